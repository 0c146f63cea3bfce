"""Workers, learners and a trainer, as the library makes them behave; and the ledger they keep."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from breadbox.model.errors import PayloadMissingError, StoreUnavailableError
from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.errors import (
    DomainError,
    FetchExceedsCapacityError,
    InvalidArgumentError,
    LeaseNotFoundError,
    SessionNotCurrentError,
    SubscriptionNotFoundError,
    WaitersFullError,
)
from breadbox_server.core.model.events import FetchGranted
from breadbox_server.core.model.ids import (
    ChunkId,
    ModelVersion,
    RequestId,
    SessionId,
    SubscriptionName,
)
from breadbox_server.core.model.inputs import (
    Acknowledge,
    AdmissionOutcome,
    Appended,
    Fetch,
    Offer,
    Payload,
    PrioritiesUpdated,
    Published,
    PublishModel,
    ReleaseLease,
    ReleaseMode,
    RenewLease,
    Subscribe,
    UpdatePriorities,
)
from breadbox_server.core.rules.reading import ChunksRead, ReadSpec
from breadbox_server.driver import Driver
from breadbox_server.reading.read_leases import ReadLease
from breadbox_server.reading.reads import ReadResult
from simulation.faults import Fates
from simulation.server import Deployment, ServerDownError, SimulatedServer, live_leases
from simulation.storage import SimulatedStore
from support.appends import append
from support.inputs import named_payload, publish_model, start_session
from support.metadata import make_fragment

CALL_S = 3.0
"""Deadline of a call, beyond what it may wait on purpose."""


CANCEL_S = 1.0
"""How long a call that nobody waits for any more may go on in the server."""
STRAY_S_MAX = 60.0
"""How late a second copy of a request may arrive: no connection keeps one for longer."""
NOTICED_S = 20.0
"""Seconds after which nothing is granted any more that the store lost, if store and journal answer
all the while."""


class UnreachableError(Exception):
    """The server may or may not have carried the call out."""


@dataclass
class Lease:
    """What a client knows of a lease that it was told of."""

    payload_ids: tuple[str, ...]
    expires_at: float
    is_consumed: bool = False
    is_over: bool = False
    """Its client began to end it, or has ended it."""
    is_forgotten: bool = False
    """Journal and server came back as they were before it was granted."""


@dataclass(slots=True)
class LedgerCopy:
    """What clients had been told when a copy of the journal was made."""

    admitted: dict[tuple[str, str, int], None]
    leases: dict[str, tuple[bool, float]]
    """Whether each was consumed, and when it expired."""
    version: tuple[str, int]
    ended_sessions: set[str]


@dataclass
class Ledger:
    """What clients were told; each check is a promise of the service."""

    config: BufferConfig
    admitted: dict[tuple[str, str, int], None] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    uses: dict[str, list[Lease]] = field(default_factory=dict)
    """By payload: every lease that anybody was told of."""
    version: tuple[str, int] = ("", -1)
    """The last session and version that was acknowledged."""
    ended_sessions: set[str] = field(default_factory=set)
    grant_count: int = 0
    lineage: int = 0
    """Goes up when a server is started on a journal that is younger than what it had told."""
    priorities: dict[str, set[float]] = field(default_factory=dict)
    """By payload: those that were ever given to its fragment, or set for its chunk."""
    seen_chunks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """By id: the payloads of chunks that were granted."""
    admitted_lost_count: int = 0
    """Fragments that were acknowledged, and that journal and server lost in that way."""
    chunks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Payloads of every chunk that a reader was told of, by its id."""
    subscriptions: dict[SubscriptionName, int] = field(default_factory=dict)
    """What was acknowledged of those that were created."""
    read_count: int = 0
    """Chunks that readers were told of."""

    def copy(self) -> LedgerCopy:
        """What a copy of the journal that is made now must contain."""
        leases = {name: (each.is_consumed, each.expires_at) for name, each in self.leases.items()}
        return LedgerCopy(dict(self.admitted), leases, self.version, set(self.ended_sessions))

    def rewind(self, copy: LedgerCopy) -> None:
        """Forget, and count, what a journal that came back from a copy cannot contain."""
        self.lineage += 1
        self.admitted_lost_count += len(self.admitted) - len(copy.admitted)
        self.admitted = dict(copy.admitted)
        self.version, self.ended_sessions = copy.version, set(copy.ended_sessions)
        # Ids of chunks are given once more, and readers begin anew.
        self.chunks.clear()
        self.subscriptions.clear()
        for name, lease in self.leases.items():
            if name in copy.leases:
                lease.is_consumed, lease.expires_at = copy.leases[name]
            else:
                lease.is_forgotten = True
        for payload_id, uses in self.uses.items():
            self.uses[payload_id] = [lease for lease in uses if not lease.is_forgotten]

    def note_grant(
        self,
        grant: FetchGranted,
        store: SimulatedStore,
        known: tuple[str, int],
        now: float,
        *,
        heard_since: float,
    ) -> None:
        """Note a grant that arrived, first or repeated.

        Args:
            grant: It.
            store: Where the payloads are.
            known: Session and version that were acknowledged before it was first asked for.
            now: Seconds.
            heard_since: Since when journal and store have answered: before that nobody could
                notice what was lost, nor read anything.
        """
        if grant.expires_at <= now:
            return
        session, version = known
        assert grant.session_id >= session, "of a session that had ended"  # In order of names.
        for granted in grant.fragments:
            assert 0 <= granted.staleness <= self.config.staleness_max, "granted a stale chunk"
            assert granted.use_count <= self.config.uses_max, "used too often, and knows it"
            fragment = granted.fragment
            assert fragment.session_id == grant.session_id, "of another session"
            is_fresh = version - fragment.model_version_min <= self.config.staleness_max
            assert session != fragment.session_id or is_fresh, "granted what had become stale"
            payload_id = fragment.payload.payload_id
            assert store.is_accounted_for(payload_id), f"granted {payload_id}, which is not there"
            lost_at = store.lost.get(payload_id, now)
            noticed_at = max(lost_at, heard_since) + NOTICED_S
            assert now <= noticed_at, f"still granted, and lost for long: {payload_id}"
        self.check_priorities(grant)
        if grant.lease_id in self.leases:
            return
        self.grant_count += 1
        payload_ids = tuple(granted.fragment.payload.payload_id for granted in grant.fragments)
        lease = self.leases[grant.lease_id] = Lease(payload_ids, grant.expires_at)
        for payload_id in payload_ids:
            uses = self.uses.setdefault(payload_id, [])
            uses.append(lease)
            counted = [
                use for use in uses if use.is_consumed or (not use.is_over and use.expires_at > now)
            ]
            assert len(counted) <= self.config.uses_max, f"{payload_id} was used too often"

    def note_read(self, found: ChunksRead, after: int) -> list[int]:
        """Note what a reader was told, which has to account for every chunk up to the cursor.

        Returns:
            The chunks, in their order.
        """
        chunks: dict[int, list[str]] = {}
        for each in found.fragments:
            chunks.setdefault(each.chunk_id, []).append(each.fragment.payload.payload_id)
            assert each.fragment.session_id == found.model.session_id, "read of another session"
        ids = list(chunks)
        assert ids == sorted(ids), "read out of order"
        assert found.cursor - after == len(ids) + found.skipped_count, "chunks left uncounted"
        assert all(after < each <= found.cursor for each in ids), "read what was not asked for"
        for chunk_id, payload_ids in chunks.items():
            known = self.chunks.setdefault(chunk_id, tuple(payload_ids))
            assert known == tuple(payload_ids), f"two chunks have the id {chunk_id}"
        self.read_count += len(ids)
        return ids

    def check_priorities(self, grant: FetchGranted) -> None:
        """Check that each chunk has one of the priorities that were meant for it."""
        chunks: dict[int, dict[str, None]] = {}
        for granted in grant.fragments:
            chunk = chunks.setdefault(granted.chunk_id, {})
            chunk[granted.fragment.payload.payload_id] = None
        for granted in grant.fragments:
            assert 0.0 < granted.probability <= 1.0, "a probability that is none"
            meant = [self.priorities[payload_id] for payload_id in chunks[granted.chunk_id]]
            assert granted.priority in set().union(*meant), "a priority meant for another chunk"
        # A journal that came back gives ids again that it does not know to have given.
        for chunk_id, payload_ids in () if self.lineage else chunks.items():
            known = self.seen_chunks.setdefault(chunk_id, tuple(payload_ids))
            assert known == tuple(payload_ids), "two chunks of one id"

    def check_books(self, buffers: BufferSet, now: float) -> None:
        """Check, right after a start, that the server knows everything it ever acknowledged."""
        model = buffers[DEFAULT_BUFFER].model
        session, version = self.version
        if model.session_id == session:
            assert (model.model_version or 0) >= version, "an acknowledged version is gone"
        else:
            assert model.session_id not in self.ended_sessions, "an acknowledged session is gone"
        for admitted_session, worker_id, index in self.admitted:
            if admitted_session == model.session_id:
                fragment = make_fragment(worker_id, index, session_id=admitted_session)
                offered = buffers.apply(Offer(DEFAULT_BUFFER, [fragment], None, now + 1.0), now=now)
                expected = Appended(AdmissionOutcome.DUPLICATE, AdmissionOutcome.ADMITTED)
                assert offered.answers == [expected], (
                    f"{worker_id}/{index} was acknowledged and is gone"
                )
        cursors = {each.name: each.cursor for each in buffers[DEFAULT_BUFFER].subscriptions()}
        for name, cursor in self.subscriptions.items():
            assert name in cursors, f"subscription {name} was acknowledged and is gone"
            assert cursors[name] >= cursor, f"an acknowledgement of {name} is gone"
        alive = set(live_leases(buffers))
        for lease_id, lease in self.leases.items():
            if not (lease.is_over or lease.is_forgotten) and lease.expires_at > now:
                assert lease_id in alive, f"lease {lease_id} was acknowledged and is gone"


class Client:
    """Somebody at the other end of a bad network."""

    def __init__(self, name: str, deployment: Deployment, fates: Fates, ledger: Ledger) -> None:
        self.name = name
        self.deployment = deployment
        self.fates = fates
        self.ledger = ledger
        self.rng = fates.rng(name)
        self.network = fates.rng(f"network of {name}")
        self.selection = fates.rng(f"selection of {name}")
        self.riding = fates.rng(f"riding of {name}")
        self.is_partitioned = False
        self.is_stopping = False
        self._background: set[asyncio.Task[None]] = set()
        self._at: SimulatedServer | None = None
        """The server that it talks to."""

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def run(self) -> None:
        """What it does until it is told to stop, or has done it all."""
        raise NotImplementedError

    async def pause(self, mean_s: float) -> None:
        await asyncio.sleep(self.rng.expovariate(1 / mean_s))

    async def call(
        self,
        work: Callable[[Driver], Awaitable[Any]],
        wait_s: float = 0.0,
        *,
        patience_s: float | None = None,
        request_id: str = "",
    ) -> Any:
        """Make one attempt at a call.

        Args:
            work: What the server is to do.
            wait_s: How long the server may take on purpose.
            patience_s: After this long the caller goes away; None: at the call's deadline.
            request_id: Of the fetch, if it is one.

        Raises:
            UnreachableError: No answer came in time.
            DomainError: The server refused.
        """
        deadline_at = self.now + (wait_s + CALL_S if patience_s is None else patience_s)
        if self.fates.happens(self.network, self.fates.plan.duplicate_probability):
            self._spawn(self._deliver_stray(work, request_id))
        await self._travel(deadline_at)
        lineage = self.ledger.lineage
        try:
            server = self._route()
            task = server.call(work, request_id)
        except ServerDownError:
            raise UnreachableError from None
        await asyncio.wait({task}, timeout=max(0.0, deadline_at - self.now))
        if not task.done():
            self._at = None
            self._spawn(self._cancel_later(task, server))
            raise UnreachableError
        if task.cancelled():
            raise UnreachableError
        error = task.exception()
        expected = DomainError | StoreUnavailableError | PayloadMissingError
        if error is not None and not isinstance(error, expected):
            raise error
        await self._travel(deadline_at)
        is_outdated = lineage != self.ledger.lineage or server.is_outlived
        if isinstance(error, StoreUnavailableError) or is_outdated:
            raise UnreachableError
        return task.result()

    def _route(self) -> SimulatedServer:
        """The server that was reached before, or any other that seems to be there.

        Raises:
            ServerDownError: There is none.
        """
        serving = self.deployment.serving
        if self._at not in serving:
            if not serving:
                raise ServerDownError
            self._at = self.network.choice(serving)
        return self._at

    async def insist(self, work: Callable[[Driver], Awaitable[Any]], wait_s: float = 0.0) -> Any:
        """Repeat a call until it is answered.

        Raises:
            DomainError: The server refused.
        """
        while True:
            try:
                return await self.call(work, wait_s)
            except UnreachableError:
                await self.pause(0.3)

    async def _travel(self, deadline_at: float) -> None:
        """Take a message one way.

        Raises:
            UnreachableError: It was lost; not before the sender's patience is over.
        """
        is_lost = self.fates.happens(self.network, self.fates.plan.drop_probability)
        delay_s = self.fates.delay_s(self.network)
        if is_lost or self.is_partitioned or self.now + delay_s > deadline_at:
            await asyncio.sleep(max(0.0, deadline_at - self.now))
            raise UnreachableError
        await asyncio.sleep(delay_s)

    async def _deliver_stray(
        self, work: Callable[[Driver], Awaitable[Any]], request_id: str
    ) -> None:
        """Deliver a second copy of a request, whose answer nobody reads."""
        await asyncio.sleep(min(STRAY_S_MAX, self.fates.delay_s(self.network) * 20))
        try:
            task = self._route().call(work, request_id)
        except ServerDownError:
            return
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # Whatever it is, nobody reads it.

    async def _cancel_later(self, task: asyncio.Task[Any], server: SimulatedServer) -> None:
        await asyncio.sleep(self.fates.delay_s(self.network))
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_S)
        process = server.process
        could_end = not process.is_stopped and self.now - process.woken_at >= CANCEL_S
        if could_end and not task.done():
            violation = AssertionError("a call goes on that nobody waits for any more")
            self.fates.violations.append(violation)

    async def write(self) -> Payload:
        """Write a payload, as often as it takes."""
        while True:
            try:
                await self.fates.store_trip(self.rng)
            except StoreUnavailableError:
                await self.pause(0.1)
                continue
            disk = self.deployment.disk
            if disk is not None and not (self.fates.is_healed or disk.has_room_for_payload()):
                await self.pause(0.3)
                continue
            payload_id = f"{self.rng.getrandbits(128):032x}"
            self.deployment.store.put(payload_id)
            return named_payload(payload_id, self.rng.randrange(1, 20))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def give_up(self) -> None:
        """Forget the messages that are on their way."""
        for task in self._background:
            task.cancel()

    async def finish(self) -> None:
        """Return when no message of this client is on its way any more."""
        if self._background:
            await asyncio.wait(self._background)


class Trainer(Client):
    """Starts sessions and publishes versions; the only one to do so."""

    def __init__(self, *arguments: Any, session_count: int) -> None:
        super().__init__("trainer", *arguments)
        self._session_count = session_count
        self._lineage = 0
        """Of the ledger, when its session was last known to be there."""

    async def run(self) -> None:
        for number in range(self._session_count):
            session = f"session-{number}"
            await self._start(session)
            if number:
                self.ledger.ended_sessions.add(f"session-{number - 1}")
            self.ledger.version = (session, 0)
            for version in range(1, self.rng.randrange(3, 9)):
                await self.pause(1.5)
                await self._publish(session, version)
                self.ledger.version = (session, version)

    async def _start(self, session: str) -> None:
        await self.insist(lambda driver: driver.core.call(start_session(session)))

    async def _publish(self, session: str, version: int) -> None:
        """Publish a version, with weights or without; write them again if they are gone."""
        has_weights = self.rng.random() < 0.5
        lineage = self._lineage
        while True:
            weights = await self.write() if has_weights else None
            publish = publish_model(version, weights, session_id=session)
            try:
                await self.insist(partial(_published, publish))
            except PayloadMissingError:
                continue
            except SessionNotCurrentError:
                if lineage == self.ledger.lineage:
                    raise
                self._lineage = lineage = self.ledger.lineage
                await self._start(session)
                continue
            return


class Worker(Client):
    """Writes and appends fragments, each until it knows what became of it."""

    async def run(self) -> None:
        self._wait_s = self.fates.rng(f"patience of {self.name}").choice([0.0, 1.0])
        session, version, index = "", None, 0
        while not self.is_stopping:
            state = await self._watch(session, version)
            if state.session_id != session:
                session, index = state.session_id, 0
            version = state.model_version
            for _ in range(self.rng.randrange(1, 4) if session else 0):
                await self._append(session, version, index)
                index += 1
                await self.pause(0.1)
            await self.pause(0.2)

    async def _watch(self, session: str, version: ModelVersion | None) -> Any:
        async def watch(driver: Driver) -> Any:
            return await driver.reading.watch(
                DEFAULT_BUFFER,
                session_id=SessionId(session),
                model_version=version,
                lacks_weights=False,
                wait_s=0.3,
            )

        _, state = await self.insist(watch, 0.3)
        return state

    async def _append(self, session: str, version: int, index: int) -> None:
        rides = self.fates.happens(self.riding, 0.5)
        payload = None if rides else await self.write()
        priority = self.selection.choice([0.0, 1.0, self.selection.random()])

        async def send(driver: Driver) -> list[Appended | None]:
            body = b"" if payload else b"x" * self.riding.randrange(1, 20)
            # As the service does: what rides along gets an id of its own each time it comes.
            sent = payload or named_payload(f"{self.riding.getrandbits(128):032x}", len(body))
            self.ledger.priorities.setdefault(sent.payload_id, set()).add(priority)
            fragment = make_fragment(
                self.name,
                index,
                session_id=session,
                version=version,
                payload=sent,
                priority=priority,
            )
            return await append(
                driver, DEFAULT_BUFFER, [fragment], bodies=[body], wait_s=self._wait_s
            )

        while True:
            try:
                [answer] = await self.insist(send, self._wait_s)
            except InvalidArgumentError:
                # Of a version that a journal which came back does not know.
                assert self.ledger.lineage, "refused what nothing is wrong with"
                return
            if answer is None:
                payload = await self.write()
            elif not answer.outcome.asks_to_wait:
                break
            elif self.is_stopping:
                return
            else:
                await self.pause(0.2)
        if AdmissionOutcome.ADMITTED in (answer.outcome, answer.first_outcome):
            self.ledger.admitted[session, self.name, index] = None


class Learner(Client):
    """Fetches, alone or as two ranks, works for a while, and ends its leases."""

    async def run(self) -> None:
        number = 0
        while not self.is_stopping:
            number += 1
            world_size = self.rng.choice([1, 1, 2])
            count = self.rng.choice([1, 2]) * world_size * self.ledger.config.fragments_per_chunk
            async with asyncio.TaskGroup() as ranks:
                for rank in range(world_size):
                    rng = self.fates.rng(f"{self.name}/{number}/{rank}")
                    ranks.create_task(
                        self._learn(f"{self.name}-{number}", count, rank, world_size, rng)
                    )
            await self.pause(0.1)

    async def _learn(
        self, request_id: str, count: int, rank: int, world_size: int, rng: random.Random
    ) -> None:
        grant = await self._fetch(request_id, count, rank, world_size, rng)
        if grant is None or grant.expires_at <= self.now:
            return
        lease = self.ledger.leases[grant.lease_id]
        await asyncio.sleep(rng.choice([0.1, 0.1, 0.5, 2.0, 6.0]))
        if rng.random() < 0.3:
            renew = RenewLease(DEFAULT_BUFFER, grant.lease_id)
            if not await self._end(lease, lambda driver: self._renew(driver, renew, lease)):
                return
        if rng.random() < 0.1:
            return  # Killed: the lease expires by itself.
        mode = rng.choice([ReleaseMode.CONSUMED, ReleaseMode.CONSUMED, ReleaseMode.RETURNED])
        if any(payload_id in self.deployment.store.lost for payload_id in lease.payload_ids):
            mode = ReleaseMode.RETURNED  # It could not be read.
        if lease.expires_at <= self.now:
            return
        release = ReleaseLease(DEFAULT_BUFFER, grant.lease_id, mode)
        lease.is_over = True
        if await self._end(lease, lambda driver: driver.release([release])):
            lease.is_consumed = release.mode is ReleaseMode.CONSUMED

    @staticmethod
    async def _renew(driver: Driver, renew: RenewLease, lease: Lease) -> None:
        expires_at: float = await driver.core.call(renew)
        lease.expires_at = max(lease.expires_at, expires_at)

    async def _fetch(
        self, request_id: str, count: int, rank: int, world_size: int, rng: random.Random
    ) -> FetchGranted | None:
        wait_s = rng.choice([0.0, 0.5, 2.0])

        async def fetch(driver: Driver) -> Any:
            return await driver.fetch(
                Fetch(
                    buffer=DEFAULT_BUFFER,
                    request_id=RequestId(request_id),
                    fragment_count=count,
                    deadline_at=driver.core.clock.now() + wait_s,
                    rank=rank,
                    world_size=world_size,
                )
            )

        longest_s = rng.choice([5 * self.fates.plan.delay_s, wait_s + 0.3])
        patience_s = rng.uniform(0.0, longest_s) if rng.random() < 0.4 else None
        known, lineage = self.ledger.version, self.ledger.lineage
        for _ in range(5):
            try:
                outcome = await self.call(
                    fetch, wait_s, patience_s=patience_s, request_id=request_id
                )
            except UnreachableError:
                if patience_s is not None:
                    return None  # Killed while it waited.
                await asyncio.sleep(0.1)
                continue
            except (FetchExceedsCapacityError, LeaseNotFoundError, WaitersFullError):
                return None
            if not isinstance(outcome, FetchGranted):
                return None
            if lineage != self.ledger.lineage:
                known = ("", -1)  # Of what is acknowledged no more.
            heard_since = self.fates.heard_since(self.now)
            store = self.deployment.store
            self.ledger.note_grant(outcome, store, known, self.now, heard_since=heard_since)
            return outcome
        return None

    async def _end(self, lease: Lease, work: Callable[[Driver], Awaitable[Any]]) -> bool:
        """Release or renew; False when the lease had expired, which it must not have before."""
        try:
            await self.insist(work)
        except LeaseNotFoundError:
            is_due = lease.is_forgotten or self.now >= lease.expires_at
            assert is_due, "a lease ended before its time"
            return False
        return True


class Reader(Client):
    """Follows the buffer, by a cursor of its own or by a retaining subscription."""

    def __init__(self, name: str, *arguments: Any, subscribes: bool) -> None:
        super().__init__(name, *arguments)
        self.subscription = SubscriptionName(name) if subscribes else None
        self._forget()

    def _forget(self) -> None:
        """Begin anew, as with a journal that came back."""
        self._lineage = self.ledger.lineage
        self._after = None if self.subscription else -1
        self._base: int | None = None if self.subscription else -1
        """Where it began."""
        self._attempted = -1
        """What it tried to acknowledge."""
        self.seen: set[int] = set()
        self.skipped_count = 0

    async def run(self) -> None:
        while not self.is_stopping:
            await self._read(self.rng.choice([0.0, 0.5]))
            await self.pause(0.2)
            if self.rng.random() < 0.1:
                self._die()

    def _die(self) -> None:
        """Lose its place; only a subscription knows where it was."""
        if self.subscription is None:
            self.seen, self.skipped_count, self._after = set(), 0, -1
        else:
            self._after = None

    async def catch_up(self, newest: int) -> None:
        """Read and acknowledge all there is, while nothing goes wrong any more."""
        while (self._after is None or self._after < newest) or self._lineage != self.ledger.lineage:
            await self._read(0.0)
        if self.subscription is not None:
            await self._acknowledge()

    def check(self, buffers: BufferSet) -> None:
        """Everything that there ever was has been read, or the reader was told that it was not."""
        newest = buffers.closed_count(DEFAULT_BUFFER) - 1
        if self.subscription is None:
            assert len(self.seen) + self.skipped_count == newest + 1, "missed, and nobody said so"
            return
        shown = {each.name: each for each in buffers[DEFAULT_BUFFER].subscriptions()}
        assert self._base is not None
        missed = [each for each in range(self._base + 1, newest + 1) if each not in self.seen]
        missed_count = shown[self.subscription].missed_count
        assert len(missed) <= missed_count, f"missed, and nobody said so: {missed}"

    async def _subscribe(self) -> None:
        assert self.subscription is not None
        self._forget()
        lineage = self.ledger.lineage
        command = Subscribe(DEFAULT_BUFFER, self.subscription, is_retaining=True)
        await self.insist(lambda driver: driver.core.call(command))
        if lineage == self.ledger.lineage:
            self.ledger.subscriptions[self.subscription] = -1

    async def _read(self, wait_s: float) -> None:
        if self._lineage != self.ledger.lineage:
            self._forget()
        if self.subscription is not None and self.subscription not in self.ledger.subscriptions:
            await self._subscribe()
            return
        cursor = ReadSpec(
            after=self._after,
            subscription=self.subscription,
            chunk_count_max=self.rng.choice([1, 3, 64]),
        )

        async def read(driver: Driver) -> ReadResult:
            return await driver.reading.read(DEFAULT_BUFFER, cursor, wait_s=wait_s, lease_s=None)

        try:
            found, _, lease = await self.call(read, wait_s)
        except UnreachableError:
            return
        except SubscriptionNotFoundError:
            assert self.ledger.lineage, "a subscription is gone that was acknowledged"
            self.ledger.subscriptions.pop(SubscriptionName(self.name), None)
            return
        if self._lineage != self.ledger.lineage:
            return  # Of a journal that came back while the request was on its way.
        server = self._at
        after = self._after
        if after is None:
            after = self._where_it_stood(found)
        self.seen.update(self.ledger.note_read(found, after))
        self.skipped_count += found.skipped_count
        self._after = found.cursor
        if lease is not None and server is not None:
            await self._load(lease, server)
        if self.subscription is not None and self.rng.random() < 0.5:
            await self._acknowledge()

    def _where_it_stood(self, found: ChunksRead) -> int:
        """Where a subscription stood that was read: no less far than it was told of."""
        assert self.subscription is not None
        told = len({each.chunk_id for each in found.fragments})
        stood = found.cursor - told - found.skipped_count
        if self._base is None:
            self._base = stood
        else:
            assert stood >= self.ledger.subscriptions[self.subscription], (
                "an acknowledgement is gone"
            )
            assert stood <= max(self._attempted, self._base), "acknowledged by nobody"
        return stood

    async def _load(self, lease: ReadLease, server: SimulatedServer) -> None:
        """Read the payloads, which are there for as long as the lease and its server live."""
        for duration_s in (0.0, self.rng.choice([0.0, 0.3, 2.0])):
            await asyncio.sleep(duration_s)
            is_kept = server in self.deployment.serving and not server.is_replaced
            if self.now >= lease.expires_at or not is_kept:
                return
            for payload_id in lease.payload_ids:
                is_there = self.deployment.store.is_accounted_for(payload_id)
                assert is_there, f"deleted while it was read: {payload_id}"
        release = ReleaseLease(DEFAULT_BUFFER, lease.lease_id, ReleaseMode.CONSUMED)
        with suppress(UnreachableError, LeaseNotFoundError):
            await self.call(lambda driver: driver.release([release]))

    async def _acknowledge(self) -> None:
        name, cursor, lineage = self.subscription, self._after, self._lineage
        if name is None or cursor is None or lineage != self.ledger.lineage:
            return
        self._attempted = max(self._attempted, cursor)
        try:
            await self.insist(
                lambda driver: driver.core.call(Acknowledge(DEFAULT_BUFFER, name, cursor))
            )
        except (SubscriptionNotFoundError, InvalidArgumentError):
            assert lineage != self.ledger.lineage, "what was read cannot be acknowledged"
            return
        if lineage == self.ledger.lineage and name in self.ledger.subscriptions:
            known = self.ledger.subscriptions[name]
            self.ledger.subscriptions[name] = max(known, cursor)


class Critic(Client):
    """Sets priorities of chunks that somebody was granted, and deletes some, however late."""

    async def run(self) -> None:
        while not self.is_stopping:
            await self.pause(0.3)
            known = list(self.ledger.seen_chunks)
            if not known:
                continue
            some = self.selection.sample(known, min(len(known), 4))
            updates = [(ChunkId(chunk_id), self.selection.random()) for chunk_id in some]
            deleted = [each for each in some if self.selection.random() < 0.05]
            for chunk_id, priority in updates:
                for payload_id in self.ledger.seen_chunks[chunk_id]:
                    self.ledger.priorities[payload_id].add(priority)
            update = UpdatePriorities(DEFAULT_BUFFER, tuple(updates), tuple(map(ChunkId, deleted)))
            done = await self.insist(partial(_applied, update))
            assert len(updates) + len(deleted) == sum(done), "an id that is not counted"


async def _applied(command: UpdatePriorities, driver: Driver) -> PrioritiesUpdated:
    return await driver.core.call(command)


async def _published(command: PublishModel, driver: Driver) -> Published:
    return await driver.appends.publish(command)
