"""Put the server's parts together around one core, and hand its decisions to them."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from breadbox.shared.step_ends import REPORT_S
from breadbox.stores.base import PayloadCustodian
from breadbox_server.access.authorization import EVERYTHING, Caller
from breadbox_server.admission.appends import Appends
from breadbox_server.admission.lost_payloads import LostPayloads
from breadbox_server.admission.payloads import (
    PERIOD_S,
    DeletionQueue,
    RecentPayloads,
    StoreWatch,
    UnownedPayloads,
)
from breadbox_server.base.clock import Clock
from breadbox_server.base.errors import (
    JOURNAL,
    PAYLOAD_STORE,
    OutageError,
    PermissionDeniedError,
    QuotaFullError,
)
from breadbox_server.base.jobs import Jobs
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.description import BufferDescription
from breadbox_server.core.model.errors import BuffersFullError
from breadbox_server.core.model.events import (
    Event,
    FetchGranted,
    LeaseEnd,
    LeaseEnded,
    ModelChanged,
    PayloadsDisposable,
    RequestRefused,
    RoomWaitEnded,
    TicketsTaken,
    TicketWaitElapsed,
    WaitElapsed,
)
from breadbox_server.core.model.ids import BufferName, PayloadId
from breadbox_server.core.model.inputs import (
    CreateBuffer,
    DeleteBuffer,
    Fetch,
    ModelState,
    Payload,
    ReleaseLease,
    ReleaseMode,
    RenewLease,
    ReportUnreadable,
    StartSession,
    TakeTickets,
)
from breadbox_server.core.rules.tickets import GROUP_PREFIX, TICKETS_PER_REQUEST_MAX
from breadbox_server.journal.durable_core import DurableCore, Outcome
from breadbox_server.journal.turn_journal import TurnJournal
from breadbox_server.journal.turns import OUTAGE_S
from breadbox_server.limits import (
    APPENDS_WAITING_MAX,
    INLINE_RECENT_BYTES_MAX,
    INLINE_SIZE_BYTES_MAX,
    READ_KEPT_PART,
    READ_LEASES_MAX,
    TICKETS_HELD_MAX,
    WAITING_FRAGMENTS_MAX,
    WATCHERS_MAX,
)
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.reading.chunk_events import ChunkEvents
from breadbox_server.reading.inline_bodies import InlineBodies
from breadbox_server.reading.read_leases import ReadLeases
from breadbox_server.reading.reads import Reads
from breadbox_server.reading.session_users import SessionUsers, User
from breadbox_server.reading.step_ends import StepEnds
from breadbox_server.reading.tagged_groups import TaggedGroups
from breadbox_server.reading.uses import Uses

log = logging.getLogger(__name__)

REFUSAL_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLimits:
    """Bounds of what the parts of the driver hold."""

    watchers_max: int = WATCHERS_MAX
    """Callers that may watch a model, and as many that wait for chunks; at the limit one of the
    largest holder is refused with WATCHERS_FULL."""
    read_leases_max: int = READ_LEASES_MAX
    """Leases of readers; the next ends the oldest of the largest holder."""
    read_kept_bytes_max: int = BufferConfig().capacity_bytes // READ_KEPT_PART
    """Payload bytes that only readers keep; beyond, their leases end."""
    append_fragments_max: int = WAITING_FRAGMENTS_MAX
    """Fragments that may wait for admission; further ones are refused with APPENDS_FULL."""
    append_waiting_max: int = APPENDS_WAITING_MAX
    """Appends that may wait for room; further ones are answered immediately."""
    inline_size_bytes_max: int = INLINE_SIZE_BYTES_MAX
    """Bytes of an inline payload; 0: none."""
    deletions_max: int = 262_144
    """Payloads that may wait for deletion; beyond, fragments are answered BYTES_FULL."""
    poison_after: int = 2
    """Leases under which a chunk could not be read before it is quarantined; at least 1."""
    unowned_s: float = 600.0
    """Seconds for which a confirmed payload that was not admitted may be sent again."""


class Driver:
    """The parts around a `BufferSet`, for the loop's thread only; nothing moves until `run`."""

    def __init__(
        self,
        buffers: BufferSet,
        custodian: PayloadCustodian,
        *,
        clock: Clock,
        metrics: Metrics,
        limits: DriverLimits,
        journal: TurnJournal | None = None,
    ) -> None:
        self._metrics = metrics
        self._poison_after = limits.poison_after
        self._ending: dict[BufferName, BufferDescription] = {}
        self.core = DurableCore(
            buffers,
            clock=clock,
            metrics=metrics,
            journal=journal,
            on_events=self._hand_on,
            on_pumped=self._look_again,
        )
        self.turns = self.core.turns
        self.recent = RecentPayloads(INLINE_RECENT_BYTES_MAX)
        self.store_watch = StoreWatch(custodian, clock=clock, metrics=metrics)
        self.deletions = DeletionQueue(
            custodian,
            metrics=metrics,
            limit=limits.deletions_max,
            hold_back=lambda payloads: self.reading.leases.hold_back(payloads),
            forget=self.recent.forget,
            until_ours=self.turns.ours,
        )
        self._unowned = UnownedPayloads(
            self.deletions,
            keep_s=limits.unowned_s,
            is_referenced=partial(buffers.refers_elsewhere, None),
        )
        self.appends = Appends(
            *(self.core, custodian, self.deletions, self._unowned, self.recent),
            metrics=metrics,
            fragments_max=limits.append_fragments_max,
            waiting_max=limits.append_waiting_max,
            inline_size_bytes_max=limits.inline_size_bytes_max,
        )
        self.uses = Uses(clock, buffers.__contains__)
        self.session_users = SessionUsers(clock, buffers.__contains__)
        self.chunk_events = ChunkEvents()
        self.step_ends = StepEnds(buffers.collects_groups)
        self.tagged_groups = TaggedGroups(buffers.tag)
        self._step_ends_shown_at = -math.inf
        self.bodies = InlineBodies(
            *(custodian, self.recent, self.store_watch),
            metrics=metrics,
            size_bytes_max=limits.inline_size_bytes_max,
        )
        self.reading = Reads(
            self.core,
            self.bodies,
            ReadLeases(
                clock,
                metrics=metrics,
                delete=self.deletions.put,
                leases_max=limits.read_leases_max,
                kept_bytes_max=limits.read_kept_bytes_max,
                uses=self.uses,
            ),
            metrics=metrics,
            watchers_max=limits.watchers_max,
        )
        self.losses = LostPayloads(
            *(self.core, custodian, self.deletions, self.recent),
            metrics=metrics,
            refers_to=self.reading.refers_to,
        )

    async def create_buffer(self, command: CreateBuffer, caller: Caller) -> None:
        """Make a buffer, unless a token bound to buffers has as many as there are places left."""
        names = self.core.buffers.names()
        if caller.buffers is not EVERYTHING and command.buffer not in names:
            own_count = sum(map(caller.may_use, names))
            if own_count >= self.core.buffers.buffers_max - len(names) > 0:
                raise BuffersFullError(self.core.buffers.buffers_max, own_count)
        await self.core.call(command)

    async def delete_buffer(self, command: DeleteBuffer) -> None:
        """Delete a buffer; wake callers that watch its model, and drop its series."""
        buffer = command.buffer

        def delete() -> None:
            seen = self.core.describe(buffer)
            self.core.apply_now(command)
            self._ending[buffer] = seen
            self.turns.when_settled(partial(self._has_ended, buffer))
            self.reading.forget(buffer)
            self.uses.forget(buffer)
            self.session_users.forget(buffer)
            self.chunk_events.forget(buffer)
            self.step_ends.forget(buffer)
            self.tagged_groups.forget(buffer)
            self._metrics.forget_buffer(buffer)

        await self.core.carry_out(delete)

    def _has_ended(self, buffer: BufferName) -> None:
        self._ending.pop(buffer, None)

    def listed(self) -> Mapping[BufferName, BufferDescription | None]:
        """Return buffers, sorted by name; with a description if its end is not durable."""
        listed = self._ending | dict.fromkeys(self.core.buffers.names())
        return {name: listed[name] for name in sorted(listed)}

    async def start_session(
        self, command: StartSession, user: User, *, take_over: bool
    ) -> ModelState:
        """Make a session current; SessionInUseError if others use the current one."""
        buffer, buffers = command.buffer, self.core.buffers

        def start() -> ModelState:
            before = buffers[buffer].model.session_id
            is_new = command.session_id != before
            # The core refuses a session that ended, whichever is current.
            if is_new and not (take_over or buffers.has_ended(buffer, command.session_id)):
                self.session_users.check_free(buffer, before, user.process)
            state = self.core.apply_now(command)
            if is_new:
                self.session_users.started(buffer, user)
            return state

        return await self.core.carry_out(start)

    async def fetch(self, command: Fetch) -> FetchGranted | WaitElapsed:
        """Wait for fragments. Learners' calls go before appends, but not while they wait."""
        precedence = self.appends.queue.precedence
        precedence.end()
        try:
            return await self.core.wait(command)
        finally:
            precedence.begin()

    async def take_tickets(
        self, command: TakeTickets, caller: Caller
    ) -> TicketsTaken | TicketWaitElapsed:
        """Wait for tickets.

        Raises PermissionDeniedError if the caller may not append to their groups, and
        QuotaFullError if its holder would have more than `TICKETS_HELD_MAX`, those that its other
        requests wait for included.
        """

        def check() -> None:
            self.core.check_serving()
            buffer = self.core.buffers[command.buffer]
            held_count = buffer.tickets_of(command.holder, command.request_id)
            # The core refuses more than a request may ask for, and no wait changes that.
            count = min(command.ticket_count, TICKETS_PER_REQUEST_MAX)
            if held_count + count > TICKETS_HELD_MAX:
                owner = "token" if caller.name else "buffer"
                raise QuotaFullError(command.holder, "tickets", TICKETS_HELD_MAX, owner)

        if not caller.may_append_as(GROUP_PREFIX):
            patterns = ", ".join(caller.workers or ())
            raise PermissionDeniedError(
                f"token {caller.name!r}",
                f"append to groups {GROUP_PREFIX}*, as tickets name them; it is for {patterns}",
            )
        await self.core.look(check)
        return await self.core.wait(command)

    async def renew(self, command: RenewLease) -> float:
        """Extend a lease of a fetch or of a reader; return its new expiry."""
        if self.reading.leases.knows(command.buffer, command.lease_id):
            return self.reading.leases.renew(command.lease_id, command.lease_s)
        expires_at = await self.core.call(command)
        self.uses.note(command.buffer)
        return expires_at

    async def release(
        self, commands: Sequence[ReleaseLease], unreadable: tuple[PayloadId, ...] = ()
    ) -> None:
        """End leases of one buffer; drop first what is lost of them, in at most `RETURN_CHECK_S`.

        `unreadable` are payloads of the first that are there, and that its reader could not read.
        After a refusal all may be sent again.
        """
        knows = self.reading.leases.knows
        read = [each for each in commands if knows(each.buffer, each.lease_id)]
        if granted := [each for each in commands if each not in read]:
            await self._release_granted(granted, unreadable if granted[0] is commands[0] else ())
        for command in read:
            self.reading.leases.release(command.lease_id)

    async def _release_granted(
        self, commands: Sequence[ReleaseLease], unreadable: tuple[PayloadId, ...]
    ) -> None:
        returned = [each.lease_id for each in commands if each.mode is ReleaseMode.RETURNED]
        if returned:
            await self.losses.check_returned(commands[0].buffer, returned)

        def end() -> None:
            # In one step, so that no other report of this lease can come between.
            if unreadable:
                self._report_unreadable(commands[0], unreadable)
            try:
                for command in commands:
                    self.core.decide(command)
            finally:
                self.core.pump()

        await self.core.carry_out(end)
        self.uses.note(commands[0].buffer)

    def _report_unreadable(self, command: ReleaseLease, payload_ids: tuple[PayloadId, ...]) -> None:
        """Report the payloads that a live lease keeps: only these reach the journal and the log."""
        leased = self.core.buffers[command.buffer].leased_payloads(command.lease_id)
        named = tuple({each.payload_id for each in leased}.intersection(payload_ids))
        if not named:
            return
        self.core.apply_now(
            ReportUnreadable(command.buffer, command.lease_id, named, self._poison_after)
        )
        log.warning(
            "a reader could not read %d payloads of buffer %s, such as %s",
            len(named),
            command.buffer,
            named[0],
        )

    def outage(self) -> OutageError | None:
        """Return what does not answer this server, or None."""
        away, refusals = self.away_s(), self._refusals()
        silent = [
            place for place, away_s in away.items() if away_s >= OUTAGE_S and place not in refusals
        ]
        if not (silent or refusals):
            return None
        return OutageError(silent, max(away.values()), refusals)

    def _refusals(self) -> dict[str, str]:
        error = self._metrics.store_outage.failing(within_s=REFUSAL_S)
        refusals = {JOURNAL: self.turns.refusal, PAYLOAD_STORE: getattr(error, "answer", "")}
        return {place: answer for place, answer in refusals.items() if answer}

    def away_s(self) -> dict[str, float]:
        """Return the seconds for which journal and payload store have owed an answer."""
        return {JOURNAL: self.turns.away_s, PAYLOAD_STORE: self.store_watch.away_s}

    async def run(self, on_failure: Callable[[BaseException], None] = lambda _: None) -> None:
        """Admit, delete, make durable and maintain until cancelled; `on_failure` gets the first."""
        async with Jobs(on_failure) as jobs:
            jobs.start(self.appends.queue.run(self.core))
            jobs.start(self.deletions.run())
            jobs.start(self._tidy_each_second())
            jobs.start(self.store_watch.watch_usage())
            jobs.start(self.store_watch.sweep())
            jobs.start(self.turns.run())
            jobs.start(self.turns.keep_claim())
            await jobs.wait()

    def drain(self) -> None:
        """Refuse new fetches and fragments, and answer every client that waits. Idempotent."""
        self.core.drain()
        self.reading.turn_away()
        self.core.pump()

    async def flush(self) -> None:
        """Return once everything decided is durable and every disposable payload is deleted."""
        await self.turns.settled()
        self.reading.leases.end_all()
        await self.deletions.wait_empty()

    def tidy(self) -> None:
        """Carry out what came due in a mere look, and delete what was not sent again."""
        self.core.pump()
        self._unowned.delete_overdue(self.core.clock.now())

    async def _tidy_each_second(self) -> None:
        while True:
            self.show_gauges()
            self.tidy()
            await asyncio.sleep(PERIOD_S)

    def show_gauges(self) -> None:
        """Refresh the gauges of every buffer, and those of the server."""
        metrics = self._metrics
        for name in self.core.buffers.names():
            metrics.show_buffer(self.core.describe(name), self.reading.subscriptions(name))
        now = self.core.clock.now()
        if now - self._step_ends_shown_at >= REPORT_S:
            self._step_ends_shown_at = now
            for name in self.core.buffers.names():
                metrics.show_step_ends(name, *self.step_ends.totals(name, now))
                metrics.show_tagged_groups(name, self.tagged_groups.messages(name))
        metrics.watchers.set(self.reading.watcher_count)
        metrics.readers.set(self.reading.reader_count)
        metrics.journal_lag_seconds.set(self.turns.lag_s)
        for place, away_s in self.away_s().items():
            metrics.silence_seconds.labels(place.replace(" ", "_")).set(away_s)

    def _hand_on(self, events: Sequence[Event]) -> None:
        when_settled = self.turns.when_settled
        disposable: list[Payload] = []
        self.chunk_events.note(events, self.core.clock.now())
        self.step_ends.note(events)
        self.tagged_groups.note(events)
        for event in events:
            if type(event) is PayloadsDisposable:
                disposable += event.payloads
            elif type(event) is LeaseEnded:
                self.losses.suspicion_count += event.end is LeaseEnd.EXPIRED
            elif type(event) is ModelChanged:
                self.core.undurable_models += 1
                when_settled(partial(self._model_settled, event.buffer))
            elif type(event) is RoomWaitEnded:
                self.appends.queue.end_wait(event)
            elif isinstance(event, Outcome | RequestRefused):
                when_settled(partial(self.core.wake, event))
        if disposable:
            self.appends.quotas.let_go(disposable)
            self.deletions.announce(disposable)
            when_settled(partial(self.deletions.queue, disposable))

    def _model_settled(self, buffer: BufferName) -> None:
        self.core.undurable_models -= 1
        self.reading.wake(buffer)

    def _look_again(self) -> None:
        self.reading.look_again()
        self.appends.queue.look_again()
