"""The real driver, append queue, deletions, turns, journal codec, recovery and reconciler, on the
simulated store and journal; and how it is killed."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CollectorRegistry

from breadbox.errors import StoreError
from breadbox.stores.base import Custody
from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.config import BufferConfig
from breadbox_server.core.events import FetchGranted
from breadbox_server.core.ids import LeaseId
from breadbox_server.core.inputs import DropPayloads
from breadbox_server.driver import Driver, DriverLimits
from breadbox_server.journal.compactor import compact
from breadbox_server.journal.recovery import begin, recover
from breadbox_server.journal.turn_journal import TurnJournal
from breadbox_server.metrics import Metrics
from breadbox_server.reconciliation import Reconciler
from simulation.faults import Fates
from simulation.loop import SimulatedClock
from simulation.storage import (
    UNANNOUNCED_S,
    SimulatedArchive,
    SimulatedCustodian,
    SimulatedStore,
    SimulatedWriter,
)

METRICS = Metrics(CollectorRegistry())
"""One for all simulations: nothing here reads it, and making one costs more than a simulation."""


class ServerDownError(Exception):
    """Nobody listens."""


class Variant:
    """How the server is put together; the planted bugs override parts of this."""

    name = "real"

    def make_journal(self, writer: SimulatedWriter, sequence: int, chain: int) -> TurnJournal:
        return TurnJournal(writer, sequence, chain)

    def make_driver(self, buffers: BufferSet, **parts: Any) -> Driver:
        return Driver(buffers, **parts)


class SimulatedServer:
    """One server that is started and killed, again and again."""

    def __init__(self, config: BufferConfig, fates: Fates, variant: Variant) -> None:
        self._config = config
        self._fates = fates
        self._variant = variant
        self.store = SimulatedStore(fates)
        self.archive = SimulatedArchive()
        self.driver: Driver | None = None
        """None while it is down."""
        self.buffers: BufferSet | None = None
        self.life = 0
        self.handed_out: set[LeaseId] = set()
        """Leases that were told to somebody, and those that lived when it was started."""
        self._custodian: SimulatedCustodian | None = None
        self._writer: SimulatedWriter | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._calls: dict[asyncio.Task[Any], str] = {}
        """With the request that each is about; empty where it is about none."""

    async def start(self) -> None:
        """Recover from the journal, compare with the store, and serve."""
        self.life += 1
        rng = self._fates.rng(f"server {self.life}")
        if self.archive.is_begun() and rng.random() < 0.5:
            compact(self.archive)
        loop = asyncio.get_running_loop()
        self._writer = SimulatedWriter(self.archive, self._fates, self.life)
        buffers, sequence, chain = self._recover(rng)
        self._watch_drops(buffers)
        self._custodian = SimulatedCustodian(self.store, self._fates, self.life)
        clock = SimulatedClock(loop)
        journal = self._variant.make_journal(self._writer, sequence, chain)
        driver = self._variant.make_driver(
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
        )
        self._tasks = [loop.create_task(driver.run())]
        driver.pump()
        await self._open_books(reconciler, journal.custody)
        self._tasks.append(loop.create_task(reconciler.run()))
        self.buffers = buffers
        self.handed_out |= set(live_leases(buffers))
        self.driver = driver

    def _watch_drops(self, buffers: BufferSet) -> None:
        """See to it that only what the store really lost is given up as lost."""
        apply = buffers.apply

        def checked_apply(input: Any, *, now: float) -> Any:
            if isinstance(input, DropPayloads):
                there = set(input.payload_ids) - self.store.lost
                known = [each for each in there if buffers.refers_to(input.buffer, each)]
                assert not known, f"given up as lost, and not lost: {sorted(known)}"
            return apply(input, now=now)

        buffers.apply = checked_apply  # type: ignore[method-assign]

    async def _open_books(self, reconciler: Reconciler, custody: Custody) -> None:
        """Take the store and compare it with the books, as often as it takes."""
        assert self._custodian is not None
        while True:
            try:
                await self._custodian.take(custody)
                return await reconciler.reconcile()
            except StoreError:
                await asyncio.sleep(0.1)

    def _recover(self, rng: random.Random) -> tuple[BufferSet, int, int]:
        now = asyncio.get_running_loop().time()
        if not self.archive.is_begun():
            fresh = BufferSet(rng, self._config, is_recording=True)
            begun = begin(self.archive, fresh, now)
            return fresh, begun.sequence, begun.chain
        found = recover(
            self.archive, lambda state: BufferSet.restore(state, rng, is_recording=True)
        )
        assert found.now <= now, "the journal comes from the future"
        return found.buffers, found.sequence, found.chain

    def recovered_twin(self) -> BufferSet:
        """Build what a server started now would have."""
        return recover(
            self.archive, lambda state: BufferSet.restore(state, random.Random(0))
        ).buffers

    async def kill(self) -> None:
        """End it as SIGKILL does: nothing that it does from now on reaches anything."""
        assert self._writer is not None
        assert self._custodian is not None
        self._writer.is_dead = self._custodian.is_dead = True
        self.driver = self.buffers = None
        tasks = [*self._calls, *self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._tasks.clear()
        self._calls.clear()

    def check_alive(self) -> None:
        """Find out whether a part of the server has failed, which is a bug."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
                raise AssertionError("a part of the server has ended")

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
        task = asyncio.get_running_loop().create_task(_as_task(work(self.driver)))
        self._calls[task] = request_id
        task.add_done_callback(self._end_call)
        return task

    def _end_call(self, task: asyncio.Task[Any]) -> None:
        self._calls.pop(task, None)
        has_result = not task.cancelled() and task.exception() is None
        if has_result and isinstance(task.result(), FetchGranted):
            self.handed_out.add(task.result().lease_id)

    def check_leases(self) -> None:
        """See to it that no lease lives that nobody was told of, or is about to be.

        Of several ranks some may never come: their leases wait for them, and expire.
        """
        if self.driver is None or self.buffers is None or self.driver.turns.lag_s:
            return
        asking = set(self._calls.values())
        for grant in self.buffers._buffers[DEFAULT_BUFFER]._state.leases.live_grants():
            [lease, *others] = grant.leases
            is_known = lease.lease_id in self.handed_out or grant.request_id in asking
            assert others or is_known, f"nobody was told of lease {lease.lease_id}, and it lives on"

    async def finish_calls(self) -> None:
        """Return when no call is in the server any more."""
        if self._calls:
            await asyncio.wait(self._calls)


async def _as_task(work: Awaitable[Any]) -> Any:
    return await work


def live_leases(buffers: BufferSet) -> list[LeaseId]:
    """List the leases alive in the default buffer."""
    grants = buffers._buffers[DEFAULT_BUFFER]._state.leases.live_grants()
    return [lease.lease_id for grant in grants for lease in grant.leases if lease.end is None]
