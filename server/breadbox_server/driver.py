"""Runs the core on the event loop: one clock, one timer, events to effects, waiters to futures.

Only the driver touches the core, only from the loop's thread, and every input runs to its end
without an `await`, so there is no lock. What the core decides takes effect in turns: the effects of
a turn (replies, grants, wake-ups, deletions) happen once the turn is durable, at once where there
is no journal.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from breadbox.errors import PayloadMissingError, StoreError, StoreFullError
from breadbox.stores.base import Confirmation, PayloadCustodian
from breadbox.types import PayloadReference
from breadbox_server.appends import AppendQueue, Job
from breadbox_server.authorization import ANONYMOUS, Caller
from breadbox_server.clock import Clock, TimerHandle
from breadbox_server.convert import payload_reference
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.config import BufferConfig
from breadbox_server.core.description import (
    AppendCredit,
    BufferDescription,
    SubscriptionDescription,
)
from breadbox_server.core.errors import (
    BufferNotFoundError,
    DomainError,
    DrainingError,
    WaitersFullError,
)
from breadbox_server.core.events import (
    Event,
    FetchGranted,
    FetchRefused,
    LeaseEnd,
    LeaseEnded,
    ModelChanged,
    PayloadsDisposable,
    WaitElapsed,
)
from breadbox_server.core.ids import (
    BufferName,
    CallerId,
    ModelVersion,
    PayloadId,
    RequestId,
    SessionId,
)
from breadbox_server.core.inputs import (
    AdmissionOutcome,
    Answer,
    Appended,
    AppendFragment,
    CancelFetch,
    DeleteBuffer,
    DropPayloads,
    Fetch,
    Fragment,
    GrantedFragment,
    Input,
    ModelState,
    Payload,
    Published,
    PublishModel,
    ReleaseLease,
    ReleaseMode,
    RenewLease,
    ReportUnreadable,
    TellSchema,
    UndeliveredGrant,
)
from breadbox_server.core.reading import Cursor
from breadbox_server.core.schemas import Schema
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.deletions import DeletionQueue, UnownedPayloads
from breadbox_server.errors import (
    AppendsFullError,
    OutageError,
    PayloadSizeError,
    QuotaExceededError,
    QuotaFullError,
)
from breadbox_server.housekeeping import Housekeeping
from breadbox_server.jobs import Jobs
from breadbox_server.lags import Arrivals
from breadbox_server.limits import (
    APPENDS_WAITING_MAX,
    INLINE_RECENT_BYTES_MAX,
    INLINE_REPLY_BYTES_MAX,
    INLINE_SIZE_BYTES_MAX,
    READ_KEPT_PART,
    READ_LEASES_MAX,
    SHARED_REPLIES_MAX,
    WAITING_FRAGMENTS_MAX,
)
from breadbox_server.metrics import Metrics
from breadbox_server.passages import Passage, Reading, Reply
from breadbox_server.quotas import UNCHARGED, Quotas
from breadbox_server.read_leases import ReadLeases
from breadbox_server.recent import RecentPayloads
from breadbox_server.turns import OUTAGE_S, Journal, Turns
from breadbox_server.watchers import Watchers

log = logging.getLogger(__name__)

RETURN_CHECK_S: Final = 2.0
"""How long a returned lease waits to hear whether its payloads are there."""
DROP_BATCH: Final = 1024
BODIES_S: Final = 1.0
"""How long a reply waits for payloads that could ride along with it."""
BODIES_READS_MAX: Final = 4
"""Replies whose payloads are read at a time: each takes one of the few connections to the store,
which confirmations and deletions need as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLimits:
    """Bounds of what the driver itself holds."""

    watchers_max: int = 16_384
    """Callers that may watch a model at a time, and as many may wait for chunks to read; the next
    is refused with WATCHERS_FULL."""
    read_leases_max: int = READ_LEASES_MAX
    """Leases of readers at a time; the next ends the one that would end first."""
    read_kept_bytes_max: int = BufferConfig().capacity_bytes // READ_KEPT_PART
    """Payload bytes that left the buffers and that readers keep; beyond, their leases end."""
    append_fragments_max: int = WAITING_FRAGMENTS_MAX
    """Fragments that may wait for admission; further ones are refused with APPENDS_FULL."""
    append_waiting_max: int = APPENDS_WAITING_MAX
    """Appends that may wait for room; further ones are told at once that there is none."""
    inline_size_bytes_max: int = INLINE_SIZE_BYTES_MAX
    """Bytes of a payload that may ride along with its fragment; 0: none may."""
    deletions_max: int = 262_144
    """Payloads that may wait for deletion; beyond, fragments are answered BYTES_FULL."""
    poison_after: int = 2
    """Leases whose readers could not read a chunk, after which it is quarantined; at least 1."""
    unowned_s: float = 600.0
    """Seconds for which a confirmed payload that was not admitted may be sent again."""


class Appending:
    """Fragments that are being appended; see `Driver.begin_append`.

    Args:
        done: Gives what became of each, once that is durable.
        on_end: Called when they are answered, or nobody waits for them any more.
    """

    def __init__(
        self,
        done: "asyncio.Future[list[Appended | None]]",
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.done = done
        """What became of each, once that is durable."""
        self._on_end: Callable[[], None] | None = on_end

    @classmethod
    def refused(cls, error: DomainError) -> "Appending":
        """Some that were refused together."""
        done: asyncio.Future[list[Appended | None]] = asyncio.get_running_loop().create_future()
        done.set_exception(error)
        return cls(done)

    def may_be_told(self) -> bool:
        """Whether what they came to is told at once; else not before `Turns.known`."""
        error = self.done.exception()
        if error is not None:
            return isinstance(error, _TOLD_AT_ONCE) or not isinstance(error, DomainError)
        return not any(
            each is not None and each.outcome in _OF_UNKNOWN for each in self.done.result()
        )

    def end(self) -> None:
        """Let go of them, whatever became of them; idempotent."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


class _DurableRefusals:
    """See `Driver.durable_refusals`. A class: every call goes through some, and few are refused."""

    __slots__ = ("_turns",)

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        is_told_at_once = isinstance(error, AppendsFullError | DrainingError | WaitersFullError)
        if isinstance(error, DomainError) and not is_told_at_once:
            await self._turns.known()


class Driver:
    """Runs a `BufferSet`. Not thread-safe: call it from the loop's thread only.

    `run` must be running in a task group for anything to be admitted, deleted or made durable.

    Args:
        buffers: The core; the driver is its only owner from now on.
        custodian: The payload store.
        clock: Where instants and wake-ups come from.
        metrics: What is fed with the core's events.
        limits: Bounds of what the driver itself holds.
        journal: Where decisions are made durable; None: they take effect at once.
    """

    def __init__(
        self,
        buffers: BufferSet,
        custodian: PayloadCustodian,
        *,
        clock: Clock,
        metrics: Metrics,
        limits: DriverLimits,
        journal: Journal | None = None,
    ) -> None:
        self._buffers = buffers
        self._custodian = custodian
        self._clock = clock
        self._metrics = metrics
        self._limits = limits
        self._callers: dict[CallerId, asyncio.Future[FetchGranted | WaitElapsed]] = {}
        self._watchers = Watchers(clock, limits.watchers_max)
        self._readers = Watchers(clock, limits.watchers_max)
        self._closed_counts: dict[BufferName, int] = {}
        """Chunks that there were when readers of a buffer were last woken."""
        self._passages: dict[tuple[BufferName, Cursor], Passage] = {}
        """What was read since anything changed last, for others who stand at the same place."""
        self._arrivals: dict[BufferName, Arrivals] = {}
        self._timer: TimerHandle | None = None
        self._timer_at: float | None = None
        self._draining = False
        self.suspicion_count = 0
        """Times that somebody may have been unable to read a payload, and was not asked."""
        self._model_changes = 0
        """Changes of models that are not durable yet."""
        self.turns = Turns(journal, metrics=metrics, on_lost=self._snapshot, on_settled=self.pump)
        self.recent = RecentPayloads(INLINE_RECENT_BYTES_MAX)
        """Small payloads that replies may carry without a trip to the store."""
        self._bodies_reads = asyncio.Semaphore(BODIES_READS_MAX)
        self.housekeeping = Housekeeping(self, custodian, clock=clock, metrics=metrics)
        self.deletions = DeletionQueue(
            custodian,
            metrics=metrics,
            limit=limits.deletions_max,
            hold_back=lambda payloads: self.read_leases.hold_back(payloads),
            forget=self.recent.forget,
            until_ours=self.turns.ours,
        )
        self.read_leases = ReadLeases(
            clock,
            metrics=metrics,
            delete=self.deletions.put,
            leases_max=limits.read_leases_max,
            kept_bytes_max=limits.read_kept_bytes_max,
        )
        self._unowned = UnownedPayloads(
            self.deletions, keep_s=limits.unowned_s, is_referenced=buffers.refers_to
        )
        self._quotas = Quotas(clock, metrics, buffers.fragments)
        self.appends = AppendQueue(
            custodian,
            self.deletions,
            self._unowned,
            clock=clock,
            metrics=metrics,
            fragments_max=limits.append_fragments_max,
            waiting_max=limits.append_waiting_max,
            has_room=self.turns.has_room,
            inline_size_bytes_max=limits.inline_size_bytes_max,
            recent=self.recent,
            carrier=self.turns,
        )

    # --- what the service calls --------------------------------------------------------------

    async def apply(self, command: Input[Answer]) -> Answer:
        """Give the core one input; return its answer once it is durable.

        A cancel leaves the input applied: a caller that tries again meets the core's own rules
        for repeated inputs.

        Raises:
            DomainError: The core refuses the input, which changed nothing.
        """
        self.turns.check_room()
        async with self.durable_refusals():
            answer = self._apply_now(command)
        await self.settled()
        return answer

    @asynccontextmanager
    async def durable_refusals(self) -> AsyncIterator[None]:
        """Around what the core may refuse: the refusal leaves once what it tells of is durable.

        Else a caller would know of a buffer's end, say, that a crash takes back. And once this
        server knows that no other one has decided otherwise: it may have been replaced just now.
        What it has no room for, and that it ends, it says at once.
        """
        try:
            yield
        except _TOLD_AT_ONCE:
            raise
        except DomainError:
            await self.turns.known()
            raise

    def _apply_now(self, command: Input[Answer]) -> Answer:
        """Give the core one input and carry out, or queue, what comes of it."""
        try:
            return self._buffers.apply(command, now=self._clock.now())
        finally:
            self.pump()

    async def publish(self, command: PublishModel) -> Published:
        """Publish a version whose weights, if any, are confirmed first.

        Raises:
            PayloadMissingError: The store does not have the weights.
            PayloadSizeError: The weights in the store have another size.
            StoreUnavailableError: The weights could not be confirmed.
            DomainError: The core refuses the version; its weights are deleted after a while.
        """
        self.turns.check_room()
        weights = command.weights
        taken = False
        try:
            if weights is not None and not await self._confirm_weights(weights):
                raise PayloadMissingError(weights.payload_id)
            async with self.durable_refusals():
                published = self._apply_now(command)
            taken = published.weights_taken
        finally:
            # Also when the store's answer was lost, or the caller left while it was awaited: the
            # weights may have been confirmed all the same.
            if weights is not None and not taken:
                self._unowned.add(weights, command.buffer, self._clock.now())
        await self.settled()
        return published

    async def _confirm_weights(self, weights: Payload) -> bool:
        """Confirm one payload; whether it is there, and not on its way out.

        Raises:
            PayloadSizeError: It has another size than its reference says.
        """
        if self.deletions.is_leaving(weights.payload_id):
            return False
        self._unowned.discard(weights.payload_id)
        with (
            self.deletions.confirming([weights.payload_id]),
            self._metrics.store_trip("confirm"),
        ):
            (found,) = await self._custodian.confirm([payload_reference(weights)])
        if found == Confirmation.OTHER_SIZE:
            raise PayloadSizeError("weights", weights)
        return found == Confirmation.THERE and not self.deletions.is_leaving(weights.payload_id)

    async def delete_buffer(self, command: DeleteBuffer) -> None:
        """Delete a buffer; those who watch its model are told, and its series are dropped.

        Raises:
            BufferNotFoundError: No buffer has this name.
        """
        async with self.durable_refusals():
            self._apply_now(command)
        self._watchers.forget(command.buffer)
        self._readers.forget(command.buffer)
        self._closed_counts.pop(command.buffer, None)
        self._arrivals.pop(command.buffer, None)
        self.read_leases.end_of(command.buffer)
        self._metrics.forget_buffer(command.buffer)
        await self.settled()

    async def append(
        self,
        buffer: BufferName,
        fragments: list[Fragment],
        caller: Caller = ANONYMOUS,
        schemas: Mapping[int, Schema] | None = None,
        bodies: Sequence[bytes] = (),
        *,
        wait_s: float = 0.0,
    ) -> list[Appended | None]:
        """Append fragments in order; see `AppendQueue.submit`. None: the payload is not there.

        Raises:
            BufferNotFoundError: No buffer has this name.
            SchemaMismatchError: One of the schemas is not the buffer's.
            QuotaFullError, QuotaExceededError: The caller's token may have no more.
            AppendsFullError: Too much waits already.
            DrainingError: The server is shutting down.
            PayloadSizeError, StoreUnavailableError: See `AppendQueue.submit`.
        """
        appending = self.begin_append(buffer, fragments, caller, schemas, bodies, wait_s=wait_s)
        try:
            with contextlib.suppress(DomainError):  # It is told once it may be.
                await appending.done
        finally:
            appending.end()
        if not appending.may_be_told():
            await self.turns.known()
        return appending.done.result()

    def begin_append(
        self,
        buffer: BufferName,
        fragments: list[Fragment],
        caller: Caller = ANONYMOUS,
        schemas: Mapping[int, Schema] | None = None,
        bodies: Sequence[bytes] = (),
        *,
        wait_s: float = 0.0,
    ) -> Appending:
        """As `append`, for who goes on meanwhile. `end` of what it gives is the caller's to call.

        Raises:
            DomainError: One of those that `durable_refusals` lets pass.
            StoreUnavailableError: The journal has not kept up for long.
        """
        self.check_serving()
        self.turns.check_room()
        charge = UNCHARGED
        try:
            session = self._buffers.model(buffer).session_id
            charge = self._quotas.charge(caller, buffer, session, fragments)
            if schemas:
                self._tell_schemas(buffer, session, fragments, schemas)
            job = self.appends.submit(buffer, fragments, charge, bodies, wait_s=wait_s)
        except DomainError as error:
            charge.end()
            if isinstance(error, _TOLD_AT_ONCE):
                raise
            return Appending.refused(error)
        return Appending(job.done, partial(self._end_append, job))

    def _end_append(self, job: Job) -> None:
        self.appends.withdraw(job)
        job.charge.end()

    def charge_report(self, caller: Caller, episode_count: int) -> None:
        """Let a report of episodes pass; see `Quotas.charge_report`."""
        self._quotas.charge_report(caller, episode_count)

    def _tell_schemas(
        self,
        buffer: BufferName,
        session: SessionId,
        fragments: list[Fragment],
        schemas: Mapping[int, Schema],
    ) -> None:
        """Let the core know what the fragments of the session are."""
        wanted = {each.schema_hash for each in fragments if each.session_id == session}
        for schema_hash, schema in schemas.items():
            if schema_hash in wanted:
                self._apply_now(TellSchema(buffer, session, schema_hash, schema))

    async def fetch(
        self,
        *,
        buffer: BufferName,
        request_id: RequestId,
        fragment_count: int,
        wait_s: float,
        rank: int,
        world_size: int,
        lease_s: float | None,
    ) -> FetchGranted | WaitElapsed:
        """Wait for fragments for at most `wait_s` seconds.

        A cancel before the grant takes the caller out of the queue. A cancel in the tick of the
        grant, when the grant exists but nobody will ever read it, gives it back.

        Raises:
            DomainError: The core refuses the fetch, now or while it waits.
        """
        self.turns.check_room()
        now = self._clock.now()
        command = Fetch(
            buffer=buffer,
            request_id=request_id,
            fragment_count=fragment_count,
            deadline_at=now + wait_s,
            rank=rank,
            world_size=world_size,
            lease_s=lease_s,
        )
        async with self.durable_refusals():
            try:
                caller_id = self._buffers.apply(command, now=now)
            except BaseException:
                self.pump()
                raise
        future: asyncio.Future[FetchGranted | WaitElapsed]
        future = self._callers[caller_id] = asyncio.get_running_loop().create_future()
        self.pump()
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                cancel = CancelFetch(buffer, caller_id)
                self._apply_if_buffer_lives(cancel)
            elif future.exception() is None:
                # The outcome landed in the tick that cancelled us: nobody else will hold it.
                self._give_back(future.result())
            self.pump()
            raise
        finally:
            del self._callers[caller_id]

    async def bodies(self, payloads: Sequence[Payload], bytes_max: int) -> list[bytes]:
        """Read small payloads that may ride along with a reply, the first of them first.

        Waits for the store at most `BODIES_S`: who is told of a payload can read it there, too.

        Args:
            payloads: Somebody holds a lease on them.
            bytes_max: Bytes that the caller would take.

        Returns:
            Of each its bytes, empty where they do not ride along; nothing where none do.
        """
        bodies, absent = self._bodies_at_hand(payloads, min(bytes_max, INLINE_REPLY_BYTES_MAX))
        await self._add_bodies(bodies, payloads, absent)
        return bodies if any(bodies) else []

    def _bodies_at_hand(
        self, payloads: Sequence[Payload], bytes_max: int
    ) -> tuple[list[bytes], list[int]]:
        """As `bodies`, of what is in memory; and the positions of what only the store has."""
        left = bytes_max
        size_max = self._limits.inline_size_bytes_max
        bodies = [b""] * len(payloads)
        absent = []
        for position, payload in enumerate(payloads):
            size_bytes = payload.size_bytes
            if size_bytes <= size_max and size_bytes <= left and payload.piece_count == 1:
                bodies[position] = self.recent.get(payload.payload_id)
                if not bodies[position]:
                    absent.append(position)
                left -= size_bytes
        return bodies, absent

    async def _add_bodies(
        self, bodies: list[bytes], payloads: Sequence[Payload], positions: Sequence[int]
    ) -> None:
        """Read what is not at hand, unless the store is away."""
        if positions and self.housekeeping.store_away_s < OUTAGE_S:
            for position, body in zip(
                positions,
                await self._read_bodies([payloads[each] for each in positions]),
                strict=True,
            ):
                bodies[position] = body

    async def _read_bodies(self, payloads: Sequence[Payload]) -> list[bytes]:
        """Read small payloads from the store; of each its bytes, empty where it gives none."""
        try:
            async with asyncio.timeout(BODIES_S), self._bodies_reads:
                with self._metrics.store_trip("read"):
                    return await self._custodian.read(
                        [payload_reference(each) for each in payloads]
                    )
        except (TimeoutError, StoreError) as error:
            log.debug("payloads do not ride along with a reply: %s", error)
            return [b""] * len(payloads)

    def take_back(self, granted: FetchGranted) -> None:
        """Undo a grant whose reply is not sent, since its caller went away."""
        self._give_back(granted)
        self.pump()

    async def watch(
        self,
        buffer: BufferName,
        *,
        session_id: SessionId,
        model_version: ModelVersion | None,
        lacks_weights: bool,
        wait_s: float,
    ) -> tuple[bool, ModelState]:
        """Wait until what is current differs from what the caller knows, at most `wait_s`.

        Args:
            buffer: Name of it.
            session_id: What the caller knows; empty: none.
            model_version: What the caller knows; None: none.
            lacks_weights: Whether weights that come for that version are a difference too.
            wait_s: Seconds; 0: not at all.

        Returns:
            Whether it differs, and what is current.

        Raises:
            BufferNotFoundError: No buffer has this name, or it was deleted meanwhile.
            WatchersFullError: Too many callers watch already.
            DrainingError: The server is shutting down.
        """

        def differs(state: ModelState) -> bool:
            return (state.session_id, state.model_version) != (session_id, model_version) or (
                lacks_weights and state.weights is not None
            )

        until = self._clock.now() + wait_s
        async with self.durable_refusals():
            state = self._buffers.model(buffer)
        # Again after a change that is none to this caller.
        while not differs(state) and (left_s := until - self._clock.now()) > 0:
            if self._draining:
                raise DrainingError
            await self._watchers.wait(buffer, left_s)
            async with self.durable_refusals():
                state = self._buffers.model(buffer)
        await self.settled()
        return differs(state), state

    async def read(
        self,
        buffer: BufferName,
        cursor: Cursor,
        *,
        wait_s: float,
        lease_s: float | None,
        inline_bytes_max: int = 0,
    ) -> Reading:
        """Give the chunks after a cursor, under a lease; wait for news for at most `wait_s` (B16).

        Of very many who wait for the next chunk, each gets those that come within a few
        milliseconds together.

        Raises:
            BufferNotFoundError: No buffer has this name, or it was deleted meanwhile.
            SubscriptionNotFoundError: The cursor is of a subscription that is not there.
            WatchersFullError: Too many callers wait already.
            DrainingError: The server is shutting down.
        """
        self.check_serving()
        until = self._clock.now() + wait_s
        known = cursor.known_session_id
        has_waited = False
        while True:
            async with self.durable_refusals():
                passage = self._passage(buffer, cursor)
            found = passage.found
            is_news = (
                found.chunk_count > 0
                or found.skipped_count > 0
                or (known is not None and known != found.model.session_id)
                or (cursor.after is not None and found.cursor < cursor.after)
            )
            if (left_s := until - self._clock.now()) <= 0:
                break
            if is_news:
                is_full = found.chunk_count >= cursor.chunk_count_max
                if has_waited or is_full or not self._readers.is_gathering(buffer):
                    break
                self._readers.wake_in_time(buffer)
            has_waited = True
            await self._readers.wait(buffer, left_s)
            self.check_serving()
        bytes_max = min(inline_bytes_max, INLINE_REPLY_BYTES_MAX)
        absent: list[int] = []
        reply = passage.replies.get(bytes_max)
        if reply is None:
            bodies, absent = self._bodies_at_hand(passage.payloads, bytes_max)
            reply = Reply(bodies)
            if not absent and reply.is_shared:
                passage.replies[bytes_max] = reply
        lease = None
        if not reply.is_whole:
            lease = self.read_leases.take(buffer, passage.payloads, lease_s or found.lease_s)
        try:
            await self.settled()
            await self._add_bodies(reply.bodies, passage.payloads, absent)
        except BaseException:
            # Nobody will hear of it.
            if lease is not None:
                self.read_leases.release(lease.lease_id)
            raise
        if lease is not None and reply.is_whole:
            self.read_leases.release(lease.lease_id)
            lease = None
        self._metrics.count_read(buffer, found.chunk_count, found.skipped_count)
        return Reading(found, reply, lease)

    def _passage(self, buffer: BufferName, cursor: Cursor) -> Passage:
        """What comes after a cursor; looked for once for all who stand there."""
        key = (buffer, cursor)
        passage = self._passages.get(key)
        if passage is None:
            passage = Passage(self._buffers.read(buffer, cursor))
            if len(self._passages) >= SHARED_REPLIES_MAX:
                self._passages.clear()
            self._passages[key] = passage
        return passage

    async def renew(self, command: RenewLease) -> float:
        """Let a lease live on, of a fetch or of a reader, and give its new expiry.

        Raises:
            InvalidArgumentError: The duration is out of range.
            LeaseNotFoundError: The lease is unknown or over.
        """
        if command.lease_id in self.read_leases:
            return self.read_leases.renew(command.lease_id, command.lease_s)
        return await self.apply(command)

    def names(self) -> tuple[BufferName, ...]:
        """The buffers, sorted by name."""
        return self._buffers.names()

    def model(self, buffer: BufferName) -> ModelState:
        """The current session, version and weights; see `BufferSet.model`."""
        return self._buffers.model(buffer)

    @property
    def is_model_settled(self) -> bool:
        """Whether what `model` gives is durable."""
        return not self._model_changes

    async def durable_model(self, buffer: BufferName) -> ModelState:
        """As `model`, once it is durable; it waits only right after a change of a model."""
        async with self.durable_refusals():
            state = self._buffers.model(buffer)
        if self._model_changes:
            await self.settled()
        return state

    def describe(self, buffer: BufferName) -> BufferDescription:
        """Limits, gauges and counters of a buffer; see `BufferSet.describe`."""
        return self._buffers.describe(buffer, now=self._clock.now())

    def prepared(self, buffer: BufferName, request_id: RequestId) -> tuple[GrantedFragment, ...]:
        """The whole list of a granted request; see `BufferSet.prepared`."""
        return self._buffers.prepared(buffer, request_id)

    def hold(self) -> str:
        """Why no fragments are taken in, whatever room the buffers have; empty: they are."""
        if self.deletions.is_full:
            return f"{len(self.deletions)} payloads wait for deletion, which the store is slow at"
        return self.turns.hold()

    def subscriptions(self, buffer: BufferName) -> list[tuple[SubscriptionDescription, float]]:
        """The named cursors of a buffer, each with the seconds for which it has been behind."""
        now = self._clock.now()
        arrivals = self._arrivals.setdefault(buffer, Arrivals())
        arrivals.note(self._buffers.closed_count(buffer) - 1, now)
        return [
            (each, arrivals.lag_s(each.cursor, now)) for each in self._buffers.subscriptions(buffer)
        ]

    def append_credit(self, buffer: BufferName, caller: Caller) -> AppendCredit:
        """What a producer may send now; nothing while deletions or the journal's disk lack room."""
        if self.hold():
            return AppendCredit(0, 0)
        return self._quotas.left(caller, self._buffers.append_credit(buffer))

    def payloads(self, buffer: BufferName) -> Iterator[Payload]:
        """Every payload that a buffer refers to; not to be held over an `await`."""
        return self._buffers.payloads(buffer)

    def payload_batches(self, buffer: BufferName, size: int) -> Iterator[list[Payload]]:
        """The same, many at a time, and to be held; see `BufferSet.payload_batches`."""
        return self._buffers.payload_batches(buffer, size)

    async def release(self, command: ReleaseLease, unreadable: tuple[PayloadId, ...] = ()) -> None:
        """End a lease. What a returned one could not read goes before anybody gets it again.

        Waits for the store at most `RETURN_CHECK_S`.

        Args:
            command: Which lease, and how it ends.
            unreadable: Payloads of it that are there and that its reader could not read.

        Raises:
            DomainError: The core refuses the input, which changed nothing.
        """
        if command.lease_id in self.read_leases:
            self.read_leases.release(command.lease_id)
            return
        if command.mode is ReleaseMode.RETURNED:
            await self._check_returned(command)
        async with self.durable_refusals():
            named = self._of_lease(command, unreadable)
        if named:
            # In one step with the release, so that no other report of this lease can come between.
            self.turns.check_room()
            reports_max = self._limits.poison_after
            self._apply_now(ReportUnreadable(command.buffer, command.lease_id, named, reports_max))
            log.warning(
                "a reader could not read %d payloads of buffer %s, such as %s",
                len(named),
                command.buffer,
                named[0],
            )
        await self.apply(command)

    def _of_lease(
        self, command: ReleaseLease, payload_ids: tuple[PayloadId, ...]
    ) -> tuple[PayloadId, ...]:
        """Those payloads that a living lease keeps: nothing else reaches the journal or the log."""
        if not payload_ids:
            return ()
        leased = self._buffers.leased_payloads(command.buffer, command.lease_id)
        return tuple({each.payload_id for each in leased}.intersection(payload_ids))

    async def _check_returned(self, command: ReleaseLease) -> None:
        async with self.durable_refusals():
            payloads = self._buffers.leased_payloads(command.buffer, command.lease_id)
        try:
            async with asyncio.timeout(RETURN_CHECK_S):
                if await self.drop_missing(command.buffer, payloads):
                    self.suspicion_count += 1
        except (TimeoutError, StoreError):
            self.suspicion_count += 1

    async def drop_missing(self, buffer: BufferName, payloads: Iterable[Payload]) -> int:
        """Ask the store for payloads, and give up what refers to those that are lost.

        Returns:
            How many the store lacked, but for those that are in memory and found no room in it.

        Raises:
            StoreUnavailableError: The store cannot be reached.
            BufferNotFoundError: The buffer was deleted meanwhile.
        """
        looked_at = self._stored(payloads)
        if not looked_at:
            return 0
        with self._metrics.store_trip("present"):
            missing = await self._custodian.missing(looked_at)
        return await self._mend(buffer, missing)

    async def confirm_again(self, buffer: BufferName, payloads: Iterable[Payload]) -> int:
        """Make payloads of a buffer stay, and give up what refers to those that are lost.

        Returns:
            How many the store lacked, but for those that are in memory and found no room in it.

        Raises:
            StoreUnavailableError: The store cannot be reached.
            BufferNotFoundError: The buffer was deleted meanwhile.
        """
        references = self._stored(payloads)
        with self._metrics.store_trip("confirm"):
            answers = await self._custodian.confirm(references)
        missing = [each for each, is_there in zip(references, answers, strict=True) if not is_there]
        return await self._mend(buffer, missing)

    def _stored(self, payloads: Iterable[Payload]) -> list[PayloadReference]:
        """Those that should be in the store by now: some are on their way there with a turn."""
        carries = self.turns.carries
        return [payload_reference(each) for each in payloads if not carries(each.payload_id)]

    async def _mend(self, buffer: BufferName, missing: list[PayloadReference]) -> int:
        """Put back what the store lacks and is in memory still; give up what refers to the rest.

        A store that died lost what it had not written out. That came last, and so is here, where it
        rode along. What finds no room is not given up: it is looked for again before long.
        """
        bodies = {}
        for each in missing:
            payload_id = PayloadId(each.payload_id)
            if self.refers_to(buffer, payload_id) and (body := self.recent.get(payload_id)):
                bodies[payload_id] = body
        put_back_count = 0
        if bodies:
            held = [each for each in missing if each.payload_id in bodies]
            try:
                await self._put_back(buffer, held, bodies)
                put_back_count = len(held)
            except StoreFullError:
                self.suspicion_count += 1
                log.warning(
                    "the store lost %d payloads of buffer %s that are in memory, and has no room "
                    "for them: they are written again once it has",
                    len(held),
                    buffer,
                )
        lost = [each for each in missing if each.payload_id not in bodies]
        return put_back_count + await self._drop_lost(buffer, lost)

    async def _put_back(
        self,
        buffer: BufferName,
        references: list[PayloadReference],
        bodies: Mapping[PayloadId, bytes],
    ) -> None:
        await self.turns.ours()
        with self.deletions.confirming(bodies), self._metrics.store_trip("keep"):
            await self._custodian.keep(
                [(each, bodies[PayloadId(each.payload_id)]) for each in references]
            )
        # What was let go meanwhile may have been deleted before it was written.
        self.deletions.put(
            Payload(PayloadId(each.payload_id), each.size_bytes, each.piece_size_bytes)
            for each in references
            if not self.refers_to(buffer, PayloadId(each.payload_id))
        )
        log.warning(
            "the store lost %d payloads of buffer %s that are in memory: they are written again",
            len(references),
            buffer,
        )

    async def _drop_lost(self, buffer: BufferName, missing: list[PayloadReference]) -> int:
        # Released and deleted while we asked is not lost.
        lost = tuple(
            [
                PayloadId(each.payload_id)
                for each in missing
                if self._buffers.refers_to(buffer, PayloadId(each.payload_id))
            ]
        )
        if not lost:
            return 0
        dropped = 0
        for start in range(0, len(lost), DROP_BATCH):
            dropped += await self.apply(DropPayloads(buffer, lost[start : start + DROP_BATCH]))
        self._metrics.count_lost(buffer, len(lost))
        log.error(
            "the store lost %d payloads of buffer %s: %d fragments dropped",
            len(lost),
            buffer,
            dropped,
        )
        return len(lost)

    def refers_to(self, buffer: BufferName, payload_id: PayloadId) -> bool:
        """Whether a buffer, or who reads it, refers to a payload."""
        return self._buffers.refers_to(buffer, payload_id) or self.read_leases.pins(
            buffer, payload_id
        )

    def is_known(self, payload_id: PayloadId) -> bool:
        """Whether any buffer refers to a payload, or it is on its way out."""
        return self.deletions.is_leaving(payload_id) or any(
            self._buffers.refers_to(name, payload_id) for name in self._buffers.names()
        )

    def has_weights(self, buffer: BufferName, payload_id: PayloadId) -> bool:
        """Whether a payload is weights of a buffer's model."""
        return self._buffers.has_weights(buffer, payload_id)

    def outage(self) -> OutageError | None:
        """What does not answer this server, for whoever has to be told; None: everything does."""
        away = self.away_s()
        places = [place for place, away_s in away.items() if away_s >= OUTAGE_S]
        return OutageError(places, max(away.values())) if places else None

    def away_s(self) -> dict[str, float]:
        """Seconds for which journal and payload store have owed an answer."""
        return {"journal": self.turns.away_s, "payload store": self.housekeeping.store_away_s}

    def remaining_s(self, expires_at: float) -> float:
        """Seconds from now to an instant of the core, at least 0."""
        return max(0.0, expires_at - self._clock.now())

    @property
    def waiting_callers(self) -> int:
        """Fetches whose outcome has not been read yet."""
        return len(self._callers)

    @property
    def watcher_count(self) -> int:
        """Callers that watch a model."""
        return len(self._watchers)

    @property
    def reader_count(self) -> int:
        """Callers that wait for chunks to read."""
        return len(self._readers)

    # --- what the append queue calls ---------------------------------------------------------

    def judge(self, buffer: BufferName, fragment: Fragment) -> Appended | None:
        """What would be refused, without changing anything; see `BufferSet.judge`."""
        return self._buffers.judge(buffer, fragment, now=self._clock.now())

    def admit(self, buffer: BufferName, fragment: Fragment) -> Appended:
        """Append a fragment whose payload is confirmed; `pump` is the caller's to call."""
        return self._buffers.apply(AppendFragment(buffer, fragment), now=self._clock.now())

    def may_overtake(
        self, buffer: BufferName, fragment: Fragment, waits_for: AdmissionOutcome
    ) -> bool:
        """Whether a fragment leaves an earlier one what it waits for; see `BufferSet`."""
        return self._buffers.may_overtake(buffer, fragment, waits_for)

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call once everything decided so far is durable; at once where it is already."""
        self.turns.when_settled(callback)

    async def settled(self) -> None:
        """Return once everything decided so far is durable; at once where it is already."""
        await self.turns.settled()

    async def settled_or_away(self) -> None:
        """As `settled`, for who only looks: not for longer than it takes to notice an outage."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.0 if self.turns.away_s >= OUTAGE_S else OUTAGE_S):
                await self.settled()

    # --- life --------------------------------------------------------------------------------

    async def run(self, on_failure: Callable[[BaseException], None] = lambda _: None) -> None:
        """Admit, delete, make durable and keep house, until cancelled.

        Args:
            on_failure: Told at once what one of these failed with; the others are ended then.
        """
        async with Jobs(on_failure) as jobs:
            jobs.start(self.appends.run(self))
            jobs.start(self.deletions.run())
            jobs.start(self.housekeeping.keep_house())
            jobs.start(self.housekeeping.watch_store())
            jobs.start(self.turns.run())
            jobs.start(self.turns.keep_claim())
            await jobs.wait()

    def check_serving(self) -> None:
        """See that what begins now may begin.

        Raises:
            DrainingError: The server is shutting down.
        """
        if self._draining:
            raise DrainingError

    def drain(self) -> None:
        """Refuse new fetches and fragments, and tell everybody who waits; idempotent."""
        self._draining = True
        self._buffers.drain(now=self._clock.now())
        self._watchers.turn_away(DrainingError())
        self._readers.turn_away(DrainingError())
        self.pump()

    def tidy(self) -> None:
        """Carry out what came due while somebody only looked, and delete what nobody sent again."""
        self.pump()
        self._unowned.delete_overdue(self._clock.now())

    async def flush(self) -> None:
        """Return once everything decided is durable and every disposable payload is deleted."""
        await self.settled()
        self.read_leases.end_all()
        await self.deletions.wait_empty()

    # --- effects -----------------------------------------------------------------------------

    def pump(self) -> None:
        """Take what the core decided, have it made durable and carried out, and arm the timer."""
        self._passages.clear()
        while True:
            # Entries before events: an effect must wait for the entries that it follows from.
            entries = self._buffers.take_entries()
            if self.turns.is_journalled:
                self.turns.add(entries)
            events = self._buffers.take_events()
            if not events:
                break
            self._metrics.observe(events)
            disposable: list[Payload] = []
            for event in events:
                if type(event) is PayloadsDisposable:
                    disposable += event.payloads
                elif type(event) is LeaseEnded:
                    self.suspicion_count += event.end is LeaseEnd.EXPIRED
                elif type(event) in _EFFECTFUL:
                    if type(event) is ModelChanged:
                        self._model_changes += 1
                        self.appends.doubt(event.buffer)
                    self.turns.when_settled(partial(self._carry_out, event))
            if disposable:
                self._quotas.let_go(disposable)
                self.deletions.announce(disposable)
                self.turns.when_settled(partial(self.deletions.put, disposable))
        if len(self._readers):
            self._wake_readers()
        self.appends.look_again()
        self._rearm_timer()

    def _wake_readers(self) -> None:
        """Wake those who wait for chunks of a buffer that has closed some, once that is durable."""
        for buffer in self._readers.buffers():
            count = self._buffers.closed_count(buffer)
            if self._closed_counts.get(buffer) != count:
                self._closed_counts[buffer] = count
                self.turns.when_settled(partial(self._readers.wake_in_time, buffer))

    def _snapshot(self) -> tuple[tuple[BufferSnapshot, ...], float]:
        """The core's state, and the instant it is of.

        Nothing that the state contains may stand in a later turn: what came due while somebody
        only looked (`judge`, `describe`) is taken into the turn that this snapshot replaces.
        """
        self.pump()
        return self._buffers.snapshot(), self._clock.now()

    def _carry_out(self, event: Event) -> None:
        match event:
            case FetchGranted() | WaitElapsed():
                future = self._callers.get(event.caller_id)
                if future is None or future.done():
                    self._give_back(event)
                else:
                    future.set_result(event)
            case FetchRefused(caller_id=caller_id, error=error):
                future = self._callers.get(caller_id)
                if future is not None and not future.done():
                    future.set_exception(error)
            case ModelChanged(buffer=buffer):
                self._model_changes -= 1
                self._watchers.wake(buffer)
                self._readers.wake(buffer)

    def _give_back(self, outcome: FetchGranted | WaitElapsed) -> None:
        """Undo a grant that its caller never received; a wait that elapsed holds nothing."""
        if isinstance(outcome, FetchGranted):
            self._apply_if_buffer_lives(UndeliveredGrant(outcome.buffer, outcome.lease_id))

    def _apply_if_buffer_lives(self, command: CancelFetch | UndeliveredGrant) -> None:
        """Tell the core, unless the buffer was deleted and everything of it is gone anyway."""
        try:
            self._buffers.apply(command, now=self._clock.now())
        except BufferNotFoundError:
            log.debug("buffer %s went before a caller's end was told", command.buffer)

    # --- the timer ---------------------------------------------------------------------------

    def _rearm_timer(self) -> None:
        timer_at = self._buffers.next_timer()
        if timer_at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = timer_at
        self._timer = None if timer_at is None else self._clock.call_at(timer_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_at = None
        self._buffers.handle_timer(now=self._clock.now())
        self.pump()


_TOLD_AT_ONCE: Final = (
    AppendsFullError,
    DrainingError,
    QuotaExceededError,
    QuotaFullError,
    WaitersFullError,
)
"""Refusals that rest on nothing but what this server has room for, and that it ends."""
_OF_UNKNOWN: Final = frozenset((AdmissionOutcome.WRONG_SESSION,))
"""Outcomes that rest on what the core does not know, as other refusals do."""
_EFFECTFUL: Final = frozenset((FetchGranted, WaitElapsed, FetchRefused, ModelChanged))
