"""The real driver, append queue, deletions, turns, journal codec, claims, recovery, reconciler and
jobs, on the simulated store and journal; how a server is stopped, killed, and replaced."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from breadbox.model.errors import StoreError
from breadbox.stores.base import StoreTakenError
from breadbox_server.base.errors import AppendsFullError, StartError
from breadbox_server.base.jobs import Jobs
from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.errors import DomainError, DrainingError, WaitersFullError
from breadbox_server.core.model.events import FetchGranted
from breadbox_server.core.model.ids import LeaseId, PayloadId
from breadbox_server.core.model.inputs import DropPayloads
from breadbox_server.driver import Driver, DriverLimits
from breadbox_server.journal.compactor import compact
from breadbox_server.journal.journal_state import _claim
from breadbox_server.journal.recovery import Recovered, begin, recover
from breadbox_server.journal.storage.claims import Claim, Holder
from breadbox_server.journal.storage.disk_reserve import SHARE
from breadbox_server.journal.storage.interface import JournalTakenError
from breadbox_server.journal.turn_journal import TurnJournal
from breadbox_server.maintenance.reconciliation import Reconciler
from breadbox_server.metrics.metrics import Metrics
from simulation.faults import Fates, World
from simulation.loop import Process, SimulatedClock
from simulation.storage import (
    DISK_BYTES,
    UNANNOUNCED_S,
    SimulatedArchive,
    SimulatedCustodian,
    SimulatedDisk,
    SimulatedJournal,
    SimulatedStore,
    SimulatedWriter,
)
from support.snapshots import snapshot_of

METRICS = Metrics(CollectorRegistry())
"""One for all simulations: nothing here reads it, and making one costs more than a simulation."""


class ServerDownError(Exception):
    """Nobody listens."""


class Variant:
    """How the server is put together; the planted bugs override parts of this."""

    name = "real"
    world = World.WEATHER
    """In which it shows what is wrong with it."""
    journal_type: type[SimulatedJournal] = SimulatedJournal
    store_type: type[SimulatedStore] = SimulatedStore
    claims_first = True
    """Whether a server claims its journal before it reads it."""

    def make_journal(self, writer: SimulatedWriter, sequence: int, chain: int) -> TurnJournal:
        return TurnJournal(writer, sequence, chain)

    def make_driver(self, buffers: BufferSet, **parts: Any) -> Driver:
        return Driver(buffers, **parts)


@dataclass(frozen=True, slots=True)
class SimulatedHolder(Holder):
    """A process that claims, as others see it."""

    server: SimulatedServer | None = field(default=None, compare=False)

    def is_dead(self) -> bool:
        return self.server is not None and self.server.is_seen_dead


class Deployment:
    """Journal and store, and the servers on them: one, but while one replaces another."""

    def __init__(self, config: BufferConfig, fates: Fates, variant: Variant) -> None:
        self.config = config
        self.fates = fates
        self.variant = variant
        self.store = variant.store_type(fates)
        self.journal = variant.journal_type()
        if fates.plan.world is World.RIVALS_YOUNGER:
            # A store that came back has payloads that all servers knew to be on their way out.
            self.store.is_needed = self._is_needed
        has_disk = fates.plan.world is World.DISK
        self.disk = SimulatedDisk(self.journal, self.store) if has_disk else None
        if self.disk is not None:
            self.store.has_room = self.disk.has_room_for_payload
        self.is_one_place = self.disk is None and fates.rng("place").random() < 0.5
        """Whether journal and payloads are in one Redis, which writes them in one step."""
        self.servers: list[SimulatedServer] = []
        """Those that were started, and have not ended."""
        self.lives = 0
        self.handed_out: set[LeaseId] = set()
        """Leases that were told to somebody, and those that lived when a server was started."""
        self.on_claim: Callable[[], None] = lambda: None
        """Called right after a server claimed the journal, before it reads it."""
        self.on_take: Callable[[], None] = lambda: None
        """Called once the store will delete nothing any more for an earlier server."""
        self.on_serve: Callable[[SimulatedServer], None] = lambda _: None
        """Called in the step in which a server begins to serve."""

    @property
    def serving(self) -> list[SimulatedServer]:
        """Servers that calls reach, as far as anybody can tell from outside."""
        return [server for server in self.servers if server.driver is not None]

    @property
    def server(self) -> SimulatedServer:
        """The only one."""
        (server,) = self.servers
        return server

    def _is_needed(self, payload_id: str) -> bool:
        """Whether the newest server refers to a payload, or the journal that it reads."""
        for server in self.servers:
            if not server.is_replaced and server.buffers is not None:
                return server.buffers.refers_to(DEFAULT_BUFFER, PayloadId(payload_id))
        return self.recovered_twin().refers_to(DEFAULT_BUFFER, PayloadId(payload_id))

    def start(self, *, takes_over: bool = False) -> SimulatedServer:
        """Start a server; it serves a while later, or ends."""
        self.lives += 1
        server = SimulatedServer(self, self.lives, takes_over=takes_over)
        self.servers.append(server)
        return server

    async def kill(self, server: SimulatedServer) -> None:
        self.servers.remove(server)
        await server.kill()

    def recovered_twin(self) -> BufferSet:
        """Build what a server started now would have."""
        archive = SimulatedArchive(self.journal)
        return recover(archive, lambda state: BufferSet.restore(state, random.Random(0))).buffers


class SimulatedServer:
    """One life of a server."""

    def __init__(self, deployment: Deployment, life: int, *, takes_over: bool) -> None:
        self._deployment = deployment
        self._fates = deployment.fates
        self._rng = self._fates.rng(f"server {life}")
        self._takes_over = takes_over
        self.name = f"server {life}"
        self.driver: Driver | None = None
        """None while it does not serve."""
        self.buffers: BufferSet | None = None
        self.claim: Claim | None = None
        """What it claimed at its start."""
        self.is_killed = False
        self.is_seen_dead = False
        """Whether another one, on the same machine, sees that it is dead."""
        self.is_outlived = False
        """Whether it was replaced on a journal that came back without what this one still knows."""
        self._archive = SimulatedArchive(deployment.journal, self._holder())
        self._custodian = SimulatedCustodian(deployment.store, self._fates, life)
        self._writer: SimulatedWriter | None = None
        self._calls: dict[asyncio.Task[Any], str] = {}
        """With the request that each is about; empty where it is about none."""
        self.process = Process()
        self._life = life
        self.main = self.process.start(self._run())

    def _holder(self) -> SimulatedHolder:
        return SimulatedHolder(self.name, server=self)

    @property
    def is_replaced(self) -> bool:
        """Whether another one has claimed the journal since, as the simulation knows."""
        newest = self._deployment.journal.newest_claim
        return self.claim is not None and newest is not None and newest.holder != self.claim.holder

    async def _run(self) -> None:
        """Recover from the journal, compare with the store, and serve."""
        deployment = self._deployment
        if self._archive.is_begun() and self._rng.random() < 0.5:
            compact(SimulatedArchive(deployment.journal))
        found = await self._open_journal()
        buffers = found.buffers
        self._watch_drops(buffers)
        clock = SimulatedClock(asyncio.get_running_loop())
        assert self._writer is not None
        journal = deployment.variant.make_journal(self._writer, found.sequence, found.chain)
        await self._take_store(journal)
        deployment.on_take()
        driver = deployment.variant.make_driver(
            buffers,
            custodian=self._custodian,
            clock=clock,
            metrics=METRICS,
            limits=DriverLimits(unowned_s=UNANNOUNCED_S),
            journal=journal,
        )
        reconciler = Reconciler(
            driver,
            self._custodian,
            clock=clock,
            metrics=METRICS,
            orphan_s=UNANNOUNCED_S,
            deletes_orphans=True,
            let_go=found.let_go,
        )
        try:
            async with Jobs(self._end) as jobs:
                jobs.start(driver.run(self._end))
                await self._open_books(driver, reconciler)
                jobs.start(reconciler.run())
                if deployment.disk is not None:
                    jobs.start(self._keep_short(deployment.disk))
                self.buffers = buffers
                deployment.handed_out |= set(live_leases(buffers))
                self.driver = driver
                deployment.on_serve(self)
                await asyncio.Event().wait()
        finally:
            self._end()
            driver.drain()
            for call in list(self._calls):
                call.cancel()

    async def _keep_short(self, disk: SimulatedDisk) -> None:
        """Compact the journal while its turns take more than their share of the disk."""
        while True:
            await asyncio.sleep(0.5)
            assert self._writer is not None
            if disk.journal.size_bytes > DISK_BYTES // SHARE:
                self._writer.compact()

    async def _open_journal(self) -> Recovered:
        """Claim the journal and read it: two trips, between which the world goes on."""
        if self._deployment.variant.claims_first:
            await self._claim_journal()
            await asyncio.sleep(self._fates.delay_s(self._rng))
            return self._recover()
        found = self._recover()
        await asyncio.sleep(self._fates.delay_s(self._rng))
        await self._claim_journal()
        return found

    async def _claim_journal(self) -> None:
        deployment = self._deployment
        self.claim = await _claim(self._archive, takes_over=self._takes_over)
        deployment.on_claim()
        self._writer = SimulatedWriter(
            *(deployment.journal, self.claim, self._fates, self._life, deployment.disk),
            store=deployment.store if deployment.is_one_place else None,
        )

    def _watch_drops(self, buffers: BufferSet) -> None:
        """See to it that only what the store really lost is given up as lost."""
        apply = buffers.apply

        def checked_apply(input: Any, *, now: float) -> Any:
            if isinstance(input, DropPayloads) and not self.is_replaced:
                there = set(input.payload_ids) - self._deployment.store.lost.keys()
                known = [each for each in there if buffers.refers_to(input.buffer, each)]
                assert not known, f"given up as lost, and not lost: {sorted(known)}"
            return apply(input, now=now)

        buffers.apply = checked_apply  # type: ignore[method-assign]

    async def _take_store(self, journal: TurnJournal) -> None:
        """Take the store, as often as it takes.

        Raises:
            StoreTakenError: Another server has taken over meanwhile.
        """
        while True:
            try:
                return await self._custodian.take(journal.custody)
            except StoreTakenError:
                raise
            except StoreError:
                await asyncio.sleep(0.1)

    async def _open_books(self, driver: Driver, reconciler: Reconciler) -> None:
        """Compare the books with the store before anybody is served, as often as it takes."""
        driver.core.pump()
        while True:
            try:
                await reconciler.begin()
                break
            except StoreError:
                await asyncio.sleep(0.1)
        await driver.turns.settled()

    def _recover(self) -> Recovered:
        rng = self._rng
        now = asyncio.get_running_loop().time()
        if not self._archive.is_begun():
            fresh = BufferSet(rng, self._deployment.config, is_recording=True)
            return begin(self._archive, fresh, now)
        found = recover(
            self._archive, lambda state: BufferSet.restore(state, rng, is_recording=True)
        )
        assert found.now <= now, "the journal comes from the future"
        return found

    def _end(self, _: BaseException | None = None) -> None:
        """Do not serve any more; a part has failed."""
        self.driver = self.buffers = None

    async def kill(self) -> None:
        """End it as SIGKILL does: what it does from now on reaches nothing."""
        self.is_killed = True
        self.is_seen_dead = self._rng.random() < 0.5
        self._custodian.link.is_cut = True
        if self._writer is not None:
            self._writer.link.is_cut = True
        self._end()
        self.process.wake()
        tasks = [*self._calls, self.main]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._calls.clear()

    def failure(self) -> BaseException | None:
        """What it ended with; None: it lives."""
        if not self.main.done():
            return None
        error: BaseException = asyncio.CancelledError()
        if not self.main.cancelled():
            error = self.main.exception() or AssertionError("a server has ended by itself")
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return error

    def call(
        self, work: Callable[[Driver], Awaitable[Any]], request_id: str = ""
    ) -> asyncio.Task[Any]:
        """Begin a call in the server, as a request that has arrived does.

        Args:
            work: What the call does.
            request_id: Of the fetch, if it is one.

        Raises:
            ServerDownError: It is down.
        """
        if self.driver is None:
            raise ServerDownError
        task = self.process.start(self._answer(work, self.driver, is_replaced=self.is_replaced))
        self._calls[task] = request_id
        task.add_done_callback(self._end_call)
        return task

    async def _answer(
        self, work: Callable[[Driver], Awaitable[Any]], driver: Driver, *, is_replaced: bool
    ) -> Any:
        """Carry a call out; who had been replaced when it came refuses nothing from memory.

        But on a journal that came back as it was before: nothing there says so.
        """
        try:
            return await work(driver)
        except DomainError as error:
            is_of_now = isinstance(error, DrainingError | WaitersFullError | AppendsFullError)
            if is_replaced and not is_of_now and self._fates.plan.world is World.RIVALS:
                violation = AssertionError(f"{self.name} was replaced, and refuses: {error}")
                self._fates.violations.append(violation)
            raise

    def _end_call(self, task: asyncio.Task[Any]) -> None:
        self._calls.pop(task, None)
        has_result = not task.cancelled() and task.exception() is None
        if has_result and isinstance(task.result(), FetchGranted):
            self._deployment.handed_out.add(task.result().lease_id)

    def check_leases(self) -> None:
        """See to it that no lease lives that nobody was told of, or is about to be.

        Of several ranks some may never come: their leases wait for them, and expire.
        """
        if self.driver is None or self.buffers is None or self.driver.turns.lag_s:
            return
        if self.process.is_stopped or self.is_replaced:
            return
        asking = set(self._calls.values())
        for grant in snapshot_of(self.buffers).live_grants:
            [lease, *others] = grant.leases
            is_known = lease.lease_id in self._deployment.handed_out or grant.request_id in asking
            assert others or is_known, f"nobody was told of lease {lease.lease_id}, and it lives on"

    async def finish_calls(self) -> None:
        """Return when no call is in the server any more."""
        if self._calls:
            await asyncio.wait(self._calls)


def is_replacement(error: BaseException) -> bool:
    """Whether a server ended with this since it found another one on its journal."""
    return isinstance(error, JournalTakenError | StoreTakenError | StartError)


def live_leases(buffers: BufferSet) -> list[LeaseId]:
    """List the leases alive in the default buffer."""
    grants = snapshot_of(buffers).live_grants
    return [lease.lease_id for grant in grants for lease in grant.leases if lease.end is None]
