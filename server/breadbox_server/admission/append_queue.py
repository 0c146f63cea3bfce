"""Appends on their way into the core: one FIFO, payloads confirmed before admission.

The core never knows a payload that is not in the store. A fragment that the core would refuse is
not confirmed, so its payload expires by itself. This module deletes payloads that were confirmed in
vain. An inline payload is written instead of confirmed, or with its journal entry.

Appends without room may wait, in order of arrival (B31).

| state    | of the queue | next                                                              |
|----------|--------------|-------------------------------------------------------------------|
| QUEUED   | yes          | DECIDING; ANSWERED: refused without a trip                        |
| DECIDING | yes          | ANSWERED: all decided; WAITING: no room; QUEUED: a part is left   |
| WAITING  | no           | QUEUED: there may be room; ANSWERED: wait over, or sent again     |
| ANSWERED | no           | the answer leaves once it is durable                              |
| OVER     | no           | none: the caller let go of it, in any state                       |
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice, takewhile
from typing import Final

from breadbox.model.errors import StoreError, StoreFullError
from breadbox.stores.base import Confirmation, PayloadCustodian
from breadbox_server.admission.payloads import DeletionQueue, RecentPayloads, UnownedPayloads
from breadbox_server.admission.precedence import WAIT_S_MAX, Precedence
from breadbox_server.admission.quotas import UNCHARGED, Charge
from breadbox_server.base.clock import Clock, TimerHandle
from breadbox_server.base.conversion import payload_reference
from breadbox_server.base.errors import AppendsFullError, PayloadSizeError
from breadbox_server.core.model.errors import BufferNotFoundError, DomainError
from breadbox_server.core.model.events import RoomWaitEnded
from breadbox_server.core.model.ids import (
    BufferName,
    CallerId,
    PayloadId,
    ReservationId,
    SessionId,
    WorkerId,
)
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Appended,
    Fragment,
    LeaveQueue,
    Offer,
    Payload,
    Settle,
    WaitForRoom,
)
from breadbox_server.journal.durable_core import DurableCore
from breadbox_server.journal.turns import Turns
from breadbox_server.limits import (
    APPENDS_WAITING_MAX,
    INLINE_PENDING_BYTES_MAX,
    INLINE_SIZE_BYTES_MAX,
)
from breadbox_server.metrics.metrics import Metrics

SLICE_FRAGMENTS: Final = 256
"""Fragments judged, confirmed and admitted before others get the loop."""

SHORT_SLICE_FRAGMENTS: Final = 16
"""The same while learners call."""

SLICE_PIECES: Final = 8_192
"""Pieces of payloads (keys in the store) after which a slice takes no more fragments."""

SLICE_BYTES: Final = 512 * 2**10
"""Bytes of inline payloads after which it takes no more either."""

SLICE_S_ASSUMED: Final = 0.05
"""Seconds of a slice on a busy machine, assumed before the first one."""
_LATEST_WEIGHT: Final = 0.2

PROGRESS_S: Final = 0.25
"""Seconds that a caller waits on after some of its fragments were admitted."""
HOLD_S: Final = 0.25
RESERVED_S: Final = 60.0
"""Seconds for which a trip to the store keeps the room of its fragments."""

BYTES_FULL: Final = Appended(AdmissionOutcome.BYTES_FULL)


class State(Enum):
    """State of a pending append; see the table above."""

    QUEUED = auto()
    DECIDING = auto()
    WAITING = auto()
    ANSWERED = auto()
    OVER = auto()


_PENDING: Final = (State.QUEUED, State.DECIDING, State.ANSWERED)


@dataclass(slots=True, eq=False)
class PendingAppend:
    """Fragments that came in one call, until it is answered."""

    buffer: BufferName
    fragments: list[Fragment]
    done: "asyncio.Future[list[Appended | None]]"
    charge: Charge
    bodies: Sequence[bytes] = ()
    """Inline payloads: none, or one per fragment, empty where it is in the store."""
    inline_bytes: int = 0
    kept: dict[PayloadId, Payload] = field(default_factory=dict)
    """Inline payloads that were stored and are not admitted yet; deleted with the append."""
    results: list[Appended | None] = field(default_factory=list)
    """Results before the first undecided fragment; None is a missing payload."""
    error: Exception | None = None
    broken_off: set[tuple[SessionId, WorkerId]] = field(default_factory=set)
    """Workers with a missing payload; their later fragments wait: admitted first, they
    would make it too late."""
    wait_until: float = 0.0
    caller_id: CallerId | None = None
    """Its id while it waits for room, or its turn has come."""
    waited_at: int = 0
    """Results that it had when it last began to wait."""
    state: State = State.QUEUED

    @property
    def is_waiting(self) -> bool:
        """Return True while it waits for room."""
        return self.state is State.WAITING

    @property
    def next_fragment(self) -> Fragment:
        """Return the first undecided fragment."""
        return self.fragments[len(self.results)]

    @property
    def is_decided(self) -> bool:
        """Return True if the append failed, or every fragment has a result."""
        return self.error is not None or len(self.results) == len(self.fragments)

    def is_broken_off(self, fragment: Fragment) -> bool:
        """Return True if a payload before it of its worker is missing."""
        return (fragment.session_id, fragment.worker_id) in self.broken_off

    def fill(self, result: Appended) -> None:
        """Give every undecided fragment the same result."""
        self.results.extend([result] * (len(self.fragments) - len(self.results)))

    def reply(self) -> None:
        """Answer the caller, if it is still there."""
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.results)


@dataclass(slots=True, eq=False)
class _Item:
    pending: PendingAppend
    fragment: Fragment
    body: bytes
    answer: Appended | None = None
    """How it was refused, or None if its room is reserved."""
    is_there: bool = False
    is_carried: bool = False
    """True if it is written with the entry about its fragment."""
    has_other_size: bool = False
    found_no_room: bool = False


@dataclass(slots=True, eq=False)
class _Offer:
    """What a slice has of an append, and the room that is reserved for it."""

    pending: PendingAppend
    reservation_id: ReservationId
    items: list[_Item]


class _Slice:
    """Fragments that are judged, confirmed and admitted before others get the loop."""

    def __init__(self, fragments_max: int) -> None:
        self._fragments_max = fragments_max
        self.fragment_count = self._piece_count = self._inline_bytes = 0
        self.offers: list[_Offer] = []

    @property
    def is_full(self) -> bool:
        """Return True if it takes no more fragments."""
        return (
            self.fragment_count >= self._fragments_max
            or self._piece_count >= SLICE_PIECES
            or self._inline_bytes >= SLICE_BYTES
        )

    def take(self, pending: PendingAppend) -> list[_Item]:
        """Take an append's fragments from the first undecided on, as far as there is room."""
        items: list[_Item] = []
        for position in range(len(pending.results), len(pending.fragments)):
            fragment = pending.fragments[position]
            if self.is_full or pending.is_broken_off(fragment):
                break
            body = pending.bodies[position] if pending.bodies else b""
            items.append(_Item(pending, fragment, body))
            self.fragment_count += 1
            self._inline_bytes += len(body)
            if fragment.payload.piece_size_bytes:
                self._piece_count += fragment.payload.piece_count
        return items


class AppendQueue:
    """Admit fragments in order of arrival. All queued fragments share one trip to the store."""

    def __init__(
        self,
        custodian: PayloadCustodian,
        deletions: DeletionQueue,
        unowned: UnownedPayloads,
        *,
        clock: Clock,
        metrics: Metrics,
        fragments_max: int,
        waiting_max: int = APPENDS_WAITING_MAX,
        has_room: Callable[[], bool] = lambda: True,
        inline_size_bytes_max: int = INLINE_SIZE_BYTES_MAX,
        inline_pending_bytes_max: int = INLINE_PENDING_BYTES_MAX,
        recent: RecentPayloads | None = None,
        carrier: Turns | None = None,
    ) -> None:
        self.precedence = Precedence(clock, under_way=lambda: self.pending_count)
        self._waiting_max = waiting_max
        self._inline_size_bytes_max = inline_size_bytes_max
        self._inline_pending_bytes_max = inline_pending_bytes_max
        self._recent = recent or RecentPayloads(0)
        self._carrier = carrier
        self._has_room = has_room
        """False if the journal can take in only what makes room."""
        self._custodian = custodian
        self._deletions = deletions
        self._clock = clock
        self._metrics = metrics
        self._fragments_max = fragments_max
        self._unowned = unowned
        self._pending: OrderedDict[PendingAppend, None] = OrderedDict()
        """Appends to decide, in order of arrival, behind those called up from the queues."""
        self._waiters: dict[CallerId, PendingAppend] = {}
        """Appends that wait for room, and those of them that have their turn."""
        self._looks_again = False
        self._hold_timer: TimerHandle | None = None
        self._core: DurableCore
        self._is_deciding = False
        self._waiting_fragments = 0
        """Bounded like pending ones, because they hold as much memory."""
        self._waiting_inline_bytes = 0
        """At most half of the bound of all appends, to leave room for other buffers."""
        self.pending_count = 0
        """Fragments that are neither answered nor wait for room."""
        self.inline_bytes = 0
        self._unread_count = self._unread_bytes = 0
        """Fragments and bytes held up by learners' calls; bounded together with pending ones."""
        self._slice_s = SLICE_S_ASSUMED
        self._wake = asyncio.Event()
        metrics.pending_appends.set_function(lambda: self.pending_count + self._unread_count)
        metrics.waiting_appends.set_function(lambda: self.waiting_count)

    @property
    def waiting_count(self) -> int:
        """Appends that wait for room, or have their turn."""
        return len(self._waiters)

    async def may_read(self, fragment_count: int, size_bytes: int) -> None:
        """Return when an append that came may be read: learners' calls go first.

        AppendsFullError: it is not to wait, as in `submit`.
        """
        self._check_room(fragment_count, size_bytes)
        self._unread_count += fragment_count
        self._unread_bytes += size_bytes
        try:
            await self.precedence.new()
        finally:
            self._unread_count -= fragment_count
            self._unread_bytes -= size_bytes

    def submit(
        self,
        buffer: BufferName,
        fragments: list[Fragment],
        charge: Charge = UNCHARGED,
        bodies: Sequence[bytes] = (),
        *,
        wait_s: float = 0.0,
    ) -> PendingAppend:
        """Queue fragments; the caller must call `withdraw` in the end.

        `done` of the append gives a result for each, or None for a payload that is missing or too
        large to be inline. It fails with PayloadSizeError or StoreUnavailableError; fragments
        before that may have been admitted. Waits for room at most `wait_s`, `PROGRESS_S` after
        progress. AppendsFullError: nothing was queued.
        """
        inline_bytes = sum(map(len, bodies))
        self._check_room(len(fragments), inline_bytes)
        done: asyncio.Future[list[Appended | None]] = asyncio.get_running_loop().create_future()
        pending = PendingAppend(buffer, fragments, done, charge, bodies, inline_bytes)
        pending.wait_until = self._clock.now() + wait_s
        self._pending[pending] = None
        self.inline_bytes += inline_bytes
        self.pending_count += len(fragments)
        self._wake.set()
        return pending

    def _check_room(self, fragment_count: int, size_bytes: int) -> None:
        waiting = self.pending_count + self._unread_count
        expected_s = self._slice_s * waiting / SLICE_FRAGMENTS
        is_full = (
            waiting + fragment_count > self._fragments_max
            or self.inline_bytes + self._unread_bytes + size_bytes > self._inline_pending_bytes_max
        )
        if is_full or expected_s > WAIT_S_MAX:
            raise AppendsFullError(waiting, expected_s)

    def withdraw(self, pending: PendingAppend) -> None:
        """Forget an append, once. A waiting one's position is kept for a while."""
        # Of a caller that went away: while the store hangs nothing else would take it out.
        self._pending.pop(pending, None)
        pending.done.cancel()
        if pending.kept and pending.state is not State.DECIDING:
            self._let_go(pending)
        self._leave_queue(pending, keeps_place=not pending.is_decided)
        self._enter(pending, State.OVER)
        self.inline_bytes -= pending.inline_bytes

    def _enter(self, pending: PendingAppend, state: State) -> None:
        change = (state in _PENDING) - (pending.state in _PENDING)
        self.pending_count += change * len(pending.fragments)
        pending.state = state
        if change < 0:
            self.precedence.look()

    def look_again(self) -> None:
        """Check soon if there is room for a waiting append."""
        if self._waiters and not self._is_deciding:
            self._looks_again = True
            self._wake.set()

    def end_wait(self, event: RoomWaitEnded) -> None:
        """Answer an append that waits for room no longer."""
        pending = self._waiters.pop(event.caller_id, None)
        if pending is None:
            return
        pending.caller_id, pending.error = None, event.error
        self._count_waiting(pending, -1)
        pending.fill(Appended(event.outcome))
        self._pending.pop(pending, None)
        self._enter(pending, State.ANSWERED)
        self._core.when_settled(pending.reply)

    async def run(self, core: DurableCore) -> None:
        """Decide what is queued, for ever."""
        self._core = core
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending or self._looks_again:
                await self.precedence.slice()
                await self._run_slice()

    async def _run_slice(self) -> None:
        started_at = self._clock.now()
        taken = self._take_slice()
        # A payload too large to be inline is answered as one that is not in the store.
        items = [
            item
            for offer in taken.offers
            for item in offer.items
            if item.answer is None and len(item.body) <= self._inline_size_bytes_max
        ]
        try:
            await self._keep(items)
            await self._confirm(items)
        except StoreError as error:
            for item in items:
                # The store may have confirmed it all the same, and only its answer was lost.
                item.is_there = True
                item.pending.error = error
        self._is_deciding = True
        try:
            for offer in taken.offers:
                self._settle(offer)
            # What was admitted may have been granted at once, and what is missing took room.
            self._looks_again |= bool(taken.offers and self._waiters)
            self._core.pump()
        finally:
            self._is_deciding = False
        for offer in taken.offers:
            pending = offer.pending
            if pending.state is State.DECIDING:
                pending.state = State.QUEUED
            if pending.kept and (pending.state is State.OVER or pending.is_decided):
                self._let_go(pending)
        while self._pending and (oldest := next(iter(self._pending))).is_decided:
            del self._pending[oldest]
            self._end_turn(oldest)
            self._enter(oldest, State.ANSWERED)
            # The reply waits until the slice is durable; the next slice does not.
            self._core.when_settled(oldest.reply)
        # A slice of refusals made no trip to the store: let the others have the loop all the same.
        await asyncio.sleep(0)
        if taken.fragment_count:
            self._learn_pace(taken.fragment_count, self._clock.now() - started_at)

    def _take_slice(self) -> _Slice:
        """Offer fragments to the core: those called up first, then the others as they came."""
        learners = self.precedence.has_learners
        taken = _Slice(SHORT_SLICE_FRAGMENTS if learners else SLICE_FRAGMENTS)
        is_held = self._deletions.is_full or not self._has_room()
        if self._looks_again:
            self._looks_again = False
            if is_held:
                self._look_later()
            else:
                self._call_up(taken)
        # An append that has to wait leaves `_pending` meanwhile.
        for pending in list(islice(self._pending, None if is_held else SLICE_FRAGMENTS)):
            if pending.is_decided or pending.state is State.DECIDING:
                continue
            if pending.done.cancelled() or is_held:
                pending.fill(BYTES_FULL)  # If cancelled, nobody reads it: it only has to be over.
            elif taken.is_full:
                break
            else:
                self._offer(taken, pending)
        return taken

    def _call_up(self, taken: _Slice) -> None:
        """Offer what waiting appends there is room for, longest wait first."""
        called: list[PendingAppend] = []
        for caller_id in self._core.call_up():
            pending = self._waiters[caller_id]
            self._enter(pending, State.QUEUED)
            self._offer(taken, pending)
            if not pending.is_waiting:
                called.append(pending)
            if taken.is_full:
                self._looks_again = True
                break
        for pending in reversed(called):
            self._pending[pending] = None
            self._pending.move_to_end(pending, last=False)

    def _look_later(self) -> None:
        """Look again later: journal and deletions do not report when they have room."""
        if self._hold_timer is None:

            def look() -> None:
                self._hold_timer = None
                self.look_again()

            self._hold_timer = self._clock.call_at(self._clock.now() + HOLD_S, look)

    def _wait(self, pending: PendingAppend, outcome: AdmissionOutcome) -> bool:
        """Let an append wait for room, unless it may not, or too much waits already."""
        now = self._clock.now()
        if pending.done.done() or now >= pending.wait_until:
            return False
        is_full = (
            self.waiting_count >= self._waiting_max
            or self._waiting_fragments + len(pending.fragments) > self._fragments_max
            or self._waiting_inline_bytes + pending.inline_bytes
            > self._inline_pending_bytes_max // 2
        )
        if pending.caller_id is None and is_full:
            return False
        if len(pending.results) > pending.waited_at:
            # It has got something: its caller should hear of it soon.
            pending.wait_until = min(pending.wait_until, now + PROGRESS_S)
        pending.waited_at = len(pending.results)
        caller_id = self._core.decide(
            WaitForRoom(
                *(pending.buffer, pending.next_fragment, outcome),
                deadline_at=pending.wait_until,
                caller_id=pending.caller_id,
            )
        )
        former_id, pending.caller_id = pending.caller_id, caller_id
        if former_id is None:
            self._count_waiting(pending, 1)
        else:
            del self._waiters[former_id]
        self._waiters[caller_id] = pending
        self._pending.pop(pending, None)
        self._enter(pending, State.WAITING)
        return True

    def _end_turn(self, pending: PendingAppend) -> None:
        last = None if pending.error else pending.results[-1]
        self._leave_queue(pending, keeps_place=last is not None and last.outcome.asks_to_wait)

    def _leave_queue(self, pending: PendingAppend, *, keeps_place: bool) -> None:
        caller_id, pending.caller_id = pending.caller_id, None
        if caller_id is None:
            return
        del self._waiters[caller_id]
        self._count_waiting(pending, -1)
        with suppress(BufferNotFoundError):
            self._core.decide(LeaveQueue(pending.buffer, caller_id, keeps_place))
        self._looks_again = True
        self._wake.set()

    def _count_waiting(self, pending: PendingAppend, change: int) -> None:
        self._waiting_fragments += change * len(pending.fragments)
        self._waiting_inline_bytes += change * pending.inline_bytes

    def _learn_pace(self, fragment_count: int, took_s: float) -> None:
        """Learn from a slice how long full ones take.

        A part of a slice only ever shows that they are faster: per fragment it takes longer. Else a
        queue that was slow once would stay too short for full slices.
        """
        latest_s = took_s * SLICE_FRAGMENTS / fragment_count
        if fragment_count == SLICE_FRAGMENTS or latest_s < self._slice_s:
            self._slice_s += _LATEST_WEIGHT * (latest_s - self._slice_s)

    def _offer(self, taken: _Slice, pending: PendingAppend) -> None:
        """Have the core answer an append's next fragments, or reserve room for them."""
        while not pending.is_decided and pending.is_broken_off(pending.next_fragment):
            pending.results.append(None)
        items = taken.take(pending)
        if not items:
            return
        fragments = [item.fragment for item in items]
        expires_at = self._clock.now() + RESERVED_S
        try:
            offered = self._core.decide(
                Offer(pending.buffer, fragments, expires_at, pending.caller_id)
            )
        except DomainError as error:
            pending.error = error
            return
        for item, answer in zip(items, offered.answers, strict=False):
            item.answer = answer
            if answer is not None and offered.reservation_id is None:
                self._take_answer(item, answer)
        if offered.reservation_id is not None:
            pending.state = State.DECIDING
            del items[len(offered.answers) :]
            taken.offers.append(_Offer(pending, offered.reservation_id, items))

    async def _keep(self, items: list[_Item]) -> None:
        """Store inline payloads under fresh ids, in one trip with a turn's entries if it can."""
        riding = []
        for item in items:
            if item.body:
                item.is_there = item.fragment.payload.payload_id in item.pending.kept
                if not item.is_there:
                    riding.append(item)
        if not riding:
            return
        carrier = self._carrier
        if carrier and carrier.can_carry(len(riding), sum(len(item.body) for item in riding)):
            for item in riding:
                item.is_there = item.is_carried = True
            return
        payloads = [(payload_reference(item.fragment.payload), item.body) for item in riding]
        payload_ids = [item.fragment.payload.payload_id for item in riding]
        found_no_room = False
        with self._deletions.confirming(payload_ids), self._metrics.store_trip("keep"):
            try:
                await self._custodian.keep(payloads)
            except StoreFullError:
                found_no_room = True
            else:
                if carrier:
                    carrier.has_payload_room = True
        for item in riding:
            # Without room for all of them, some may be there all the same.
            item.is_there, item.found_no_room = True, found_no_room
            item.pending.kept[item.fragment.payload.payload_id] = item.fragment.payload

    async def _confirm(self, items: list[_Item]) -> None:
        is_leaving = self._deletions.is_leaving
        # What is on its way out is as good as not there: its sender writes it once more.
        wanted = [
            item
            for item in items
            if not item.body and not is_leaving(item.fragment.payload.payload_id)
        ]
        if not wanted:
            return
        payload_ids = [item.fragment.payload.payload_id for item in wanted]
        for payload_id in payload_ids:
            # Sent again in time; `_admit` keeps it for a while once more if it is refused again.
            self._unowned.discard(payload_id)
        references = [payload_reference(item.fragment.payload) for item in wanted]
        with self._deletions.confirming(payload_ids), self._metrics.store_trip("confirm"):
            answers = await self._custodian.confirm(references)
        for item, payload_id, answer in zip(wanted, payload_ids, answers, strict=True):
            item.is_there = answer == Confirmation.THERE and not is_leaving(payload_id)
            item.has_other_size = answer == Confirmation.OTHER_SIZE

    def _settle(self, offer: _Offer) -> None:
        """Have the core admit what is there of an offer, and let go of the rest."""
        pending = offer.pending
        items = [item for item in offer.items if item.answer is None]
        if pending.is_decided:
            items = []
        stored = list(takewhile(lambda item: not item.found_no_room, items))
        there = [item.is_there for item in stored]
        fragments = [item.fragment for item in stored]
        try:
            settled = self._core.decide(
                Settle(pending.buffer, offer.reservation_id, fragments, there)
            )
        except DomainError as error:
            pending.error = pending.error or error
            settled = []
        left = deque(settled)
        for position, item in enumerate(offer.items):
            if pending.is_decided or pending.is_waiting:
                self._disown(item)
            elif item.answer is not None:
                self._take_answer(item, item.answer)
            elif item.found_no_room:
                self._disown(item)
                pending.fill(BYTES_FULL)
            elif left:
                self._take_settled(item, left.popleft())
            else:
                # The next is refused with an error: it is offered again, and gets it then.
                for each in offer.items[position:]:
                    self._disown(each)
                break

    def _take_settled(self, item: _Item, answer: Appended | None) -> None:
        """Take an answer to a reserved fragment, or None if its payload or an earlier one lacks."""
        pending, fragment = item.pending, item.fragment
        if answer is not None:
            self._take_answer(item, answer)
            return
        self._disown(item)
        if item.has_other_size and not pending.is_broken_off(fragment):
            field = f"fragments[{len(pending.results)}].payload"
            pending.error = PayloadSizeError(field, fragment.payload)
            return
        if not item.body and not pending.is_broken_off(fragment):
            self._metrics.count_missing(pending.buffer, 1)
        pending.broken_off.add((fragment.session_id, fragment.worker_id))
        pending.results.append(None)

    def _take_answer(self, item: _Item, answer: Appended) -> None:
        pending, payload = item.pending, item.fragment.payload
        if answer.outcome is AdmissionOutcome.ADMITTED:
            if item.is_carried and self._carrier:
                self._carrier.carry(payload.payload_id, item.body)
                self._recent.add(payload.payload_id, item.body)
            elif pending.kept.pop(payload.payload_id, None) is not None:
                self._recent.add(payload.payload_id, item.body)
            else:
                self._unowned.discard(payload.payload_id)
            pending.charge.admitted(payload)
        else:
            self._disown(item)
        if answer.outcome.asks_to_wait and self._wait(pending, answer.outcome):
            return
        if answer.outcome.asks_again:
            pending.fill(answer)
        else:
            pending.results.append(answer)

    def _disown(self, item: _Item) -> None:
        """Remember a payload confirmed for nothing: it may be sent again."""
        is_written = item.is_there and not item.is_carried
        if is_written and item.fragment.payload.payload_id not in item.pending.kept:
            self._unowned.add(item.fragment.payload, self._clock.now())

    def _let_go(self, pending: PendingAppend) -> None:
        """Delete inline payloads that were not admitted: sent again, they have other ids."""
        self._deletions.put(pending.kept.values())
        pending.kept = {}
