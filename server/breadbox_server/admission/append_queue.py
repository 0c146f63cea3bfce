"""Appends on their way into the core: one FIFO, payloads confirmed before admission.

The core never knows a payload that is not in the store. A fragment that the core would refuse is
not confirmed, so its payload expires by itself. This module deletes payloads that were confirmed in
vain. An inline payload is written instead of confirmed, or with its journal entry.

Appends without room may wait, in order of arrival (B31).
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, compress, islice, takewhile
from typing import Final

from breadbox_server.admission.precedence import WAIT_S_MAX, Precedence
from breadbox_server.admission.quotas import UNCHARGED, Charge
from breadbox_server.admission.slices import (
    SHORT_SLICE_FRAGMENTS,
    SLICE_FRAGMENTS,
    Item,
    OfferedAppend,
    PendingAppend,
    Slice,
)
from breadbox_server.admission.store_trips import StoreTrips
from breadbox_server.base.clock import Clock, TimerHandle
from breadbox_server.base.errors import AppendsFullError, PayloadSizeError
from breadbox_server.core.model.errors import BufferNotFoundError, DomainError
from breadbox_server.core.model.events import RoomWaitEnded
from breadbox_server.core.model.ids import BufferName, CallerId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Appended,
    Fragment,
    LeaveQueue,
    Offer,
    Settle,
    WaitForRoom,
)
from breadbox_server.journal.durable_core import DurableCore
from breadbox_server.limits import (
    APPENDS_WAITING_MAX,
    INLINE_PENDING_BYTES_MAX,
    INLINE_SIZE_BYTES_MAX,
)
from breadbox_server.metrics.metrics import Metrics

SLICE_S_ASSUMED: Final = 0.05
"""Seconds of a slice on a busy machine, assumed before the first one."""
_LATEST_WEIGHT: Final = 0.2
PROGRESS_S: Final = 0.25
"""Seconds that a caller waits on after some of its fragments were admitted."""
HOLD_S: Final = 0.25

BYTES_FULL: Final = Appended(AdmissionOutcome.BYTES_FULL)


class AppendQueue:
    """Admit fragments in order of arrival. All queued fragments share one trip to the store."""

    def __init__(
        self,
        trips: StoreTrips,
        *,
        clock: Clock,
        metrics: Metrics,
        fragments_max: int,
        waiting_max: int = APPENDS_WAITING_MAX,
        is_held: Callable[[], bool] = lambda: False,
        inline_size_bytes_max: int = INLINE_SIZE_BYTES_MAX,
        inline_pending_bytes_max: int = INLINE_PENDING_BYTES_MAX,
    ) -> None:
        self.precedence = Precedence(clock, under_way=lambda: self.pending_count)
        self._waiting_max = waiting_max
        self._inline_size_bytes_max = inline_size_bytes_max
        self._inline_pending_bytes_max = inline_pending_bytes_max
        self._is_held = is_held
        """True if nothing is admitted, whatever room buffers have."""
        self._trips = trips
        self._clock = clock
        self._metrics = metrics
        self._fragments_max = fragments_max
        self._pending: OrderedDict[PendingAppend, None] = OrderedDict()
        """Appends to decide, in order of arrival, behind those called up from the queues."""
        self._waiters: dict[CallerId, PendingAppend] = {}
        """Appends that wait for room, or have their turn."""
        self._waiting_fragments = 0
        """Bounded like pending ones, because they hold as much memory."""
        self._waiting_inline_bytes = 0
        """At most half of the bound of all appends, to leave room for other buffers."""
        self._looks_again = False
        self._hold_timer: TimerHandle | None = None
        self._core: DurableCore
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
        """Return when an append that came may be read: learners first. Raises as `submit` does."""
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
        wait_until = self._clock.now() + wait_s
        pending = PendingAppend(buffer, fragments, done, charge, bodies, inline_bytes, wait_until)
        self._pending[pending] = None
        self.inline_bytes += inline_bytes
        self.pending_count += len(fragments)
        self.precedence.gathering.arrived()
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
        if pending.kept and not pending.is_in_slice:
            self._trips.let_go(pending)
        self._leave_queue(pending)
        if not pending.is_waiting:
            self.pending_count -= len(pending.fragments)
            self.precedence.look()
        self.inline_bytes -= pending.inline_bytes

    def look_again(self) -> None:
        """Check soon if there is room for a waiting append."""
        if self._waiters:
            self._looks_again = True
            self._wake.set()

    def end_wait(self, event: RoomWaitEnded) -> None:
        """Answer an append that waits for room no longer."""
        pending = self._waiters.get(event.caller_id)
        if pending is None:
            return
        self._count_waiting(pending, None)
        self._set_waiting(pending, is_waiting=False)
        pending.error = event.error
        pending.fill(Appended(event.outcome))
        self._pending.pop(pending, None)
        self._core.turns.when_settled(pending.reply)

    async def run(self, core: DurableCore) -> None:
        """Decide what is queued, for ever."""
        self._core = core
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending or self._looks_again:
                if not self._fills_slice():
                    await self.precedence.gathering.wait()
                await self.precedence.slice()
                await self._run_slice()

    def _fills_slice(self) -> bool:
        undecided = (len(each.fragments) - len(each.results) for each in self._pending)
        return any(count >= SLICE_FRAGMENTS for count in accumulate(undecided))

    async def _run_slice(self) -> None:
        started_at = self._clock.now()
        taken = self._take_slice()
        # A payload too large to be inline is answered as one that is not in the store.
        inline_max = self._inline_size_bytes_max
        items = [x for offer in taken.offers for x in offer.items if len(x.body) <= inline_max]
        self.precedence.gathering.was_shared = len(taken.offers) > 1
        await self._trips.ask(items)
        for offer in taken.offers:
            pending = offer.pending
            self._settle(offer)
            pending.is_in_slice = False
            if pending.kept and (pending.done.cancelled() or pending.is_decided):
                self._trips.let_go(pending)
        if taken.fragment_count:
            # What was admitted may have been granted at once, and what is missing took room.
            self._core.pump()
            self._trips.carrier.hurry()
        while self._pending and (oldest := next(iter(self._pending))).is_decided:
            del self._pending[oldest]
            self._leave_queue(oldest)
            # The reply waits until the slice is durable; the next slice does not.
            self._core.turns.when_settled(oldest.reply)
        # A slice of refusals made no trip to the store: let the others have the loop all the same.
        await asyncio.sleep(0)
        if taken.fragment_count:
            self._learn_pace(taken.fragment_count, self._clock.now() - started_at)

    def _learn_pace(self, fragment_count: int, took_s: float) -> None:
        """Learn from a slice how long full ones take.

        A part of a slice only ever shows that they are faster: per fragment it takes longer. Else a
        queue that was slow once would stay too short for full slices.
        """
        latest_s = took_s * SLICE_FRAGMENTS / fragment_count
        if fragment_count == SLICE_FRAGMENTS or latest_s < self._slice_s:
            self._slice_s += _LATEST_WEIGHT * (latest_s - self._slice_s)

    def _take_slice(self) -> Slice:
        """Offer fragments to the core: those called up first, then the others as they came."""
        learners = self.precedence.has_learners
        taken = Slice(SHORT_SLICE_FRAGMENTS if learners else SLICE_FRAGMENTS)
        is_held = self._is_held()
        if self._looks_again:
            self._looks_again = False
            if is_held:
                self._look_later()
            else:
                self._call_up(taken)
        # An append that has to wait leaves `_pending` meanwhile.
        for pending in list(islice(self._pending, None if is_held else SLICE_FRAGMENTS)):
            if pending.is_decided or pending.is_in_slice:
                continue
            if pending.done.cancelled() or is_held:
                pending.fill(BYTES_FULL)  # If cancelled, nobody reads it: it only has to be over.
            elif taken.is_full:
                break
            else:
                self._offer(taken, pending)
        return taken

    def _call_up(self, taken: Slice) -> None:
        """Offer what waiting appends there is room for, longest wait first."""
        called: list[PendingAppend] = []
        for caller_id in self._core.call_up():
            pending = self._waiters[caller_id]
            self._set_waiting(pending, is_waiting=False)
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

    def _offer(self, taken: Slice, pending: PendingAppend) -> None:
        """Have the core answer an append's next fragments, or reserve room for them."""
        while not pending.is_decided and pending.is_broken_off(pending.next_fragment):
            pending.results.append(None)
        items = taken.take(pending)
        if not items:
            return
        offer = Offer(pending.buffer, [item.fragment for item in items], pending.caller_id)
        try:
            reservation_id, answers = self._core.decide(offer)
        except DomainError as error:
            pending.error = error
            return
        if reservation_id is not None:
            reserved = list(compress(items, [answer is None for answer in answers]))
            pending.is_in_slice = True
            taken.offers.append(OfferedAppend(pending, reservation_id, answers, reserved))
            return
        for answer in answers:
            self._take_refusal(pending, answer)

    def _take_refusal(self, pending: PendingAppend, answer: Appended | None) -> None:
        assert answer is not None, "nothing is reserved"
        if answer.outcome.asks_to_wait and self._wait(pending, answer.outcome):
            return
        if answer.outcome.asks_again:
            pending.fill(answer)
        else:
            pending.results.append(answer)

    def _settle(self, offer: OfferedAppend) -> None:
        """Have the core admit what is there of an offer, and let go of the rest."""
        pending = offer.pending
        items = () if pending.is_decided else offer.items
        there = [item.is_there for item in takewhile(lambda item: not item.found_no_room, items)]
        settle = Settle(pending.buffer, offer.reservation_id, there)
        try:
            answers = self._core.decide(settle)
        except DomainError as error:
            pending.error = pending.error or error
            return
        reserved, settled = iter(items), deque(answers)
        for answer in offer.answers:
            if pending.is_decided:
                return
            if answer is not None:
                pending.results.append(answer)
                continue
            item = next(reserved)
            if item.found_no_room:
                pending.fill(BYTES_FULL)
            elif not settled or not self._take_settled(item, settled.popleft()):
                return  # The next is offered again, and gets its answer then.

    def _take_settled(self, item: Item, answer: Appended | None) -> bool:
        """Take an answer to a reserved fragment, None if its payload or an earlier one lacks.

        False: it has to be offered again.
        """
        pending, fragment = item.pending, item.fragment
        if answer is None and not pending.is_broken_off(fragment):
            if item.has_other_size:
                field = f"fragments[{len(pending.results)}].payload"
                pending.error = PayloadSizeError(field, fragment.payload)
                return False
            if not item.body:
                self._metrics.count_missing(pending.buffer, 1)
            if not self._core.buffers.collects_groups(pending.buffer):
                pending.broken_off.add((fragment.session_id, fragment.worker_id))
        elif answer is not None and answer.outcome is AdmissionOutcome.ADMITTED:
            self._trips.admitted(item)
            pending.charge.admitted(fragment.payload)
        elif answer is not None and answer.outcome.asks_again:
            return False
        pending.results.append(answer)
        return True

    def _wait(self, pending: PendingAppend, outcome: AdmissionOutcome) -> bool:
        """Let an append wait for room, unless it may not, or too much waits already."""
        now = self._clock.now()
        has_place = pending.caller_id is not None or (
            len(self._waiters) < self._waiting_max
            and self._waiting_fragments + len(pending.fragments) <= self._fragments_max
            and self._waiting_inline_bytes + pending.inline_bytes
            <= self._inline_pending_bytes_max // 2
        )
        if pending.done.done() or now >= pending.wait_until or not has_place:
            return False
        if len(pending.results) > pending.waited_at:
            # It has got something: its caller should hear of it soon.
            pending.wait_until = min(pending.wait_until, now + PROGRESS_S)
        pending.waited_at = len(pending.results)
        fragment, until = pending.next_fragment, pending.wait_until
        wait = WaitForRoom(pending.buffer, fragment, outcome, until, pending.caller_id)
        self._count_waiting(pending, self._core.decide(wait))
        self._pending.pop(pending, None)
        self._set_waiting(pending, is_waiting=True)
        return True

    def _set_waiting(self, pending: PendingAppend, *, is_waiting: bool) -> None:
        """Count an append's fragments among those that wait for room, or among pending ones."""
        self.pending_count += (pending.is_waiting - is_waiting) * len(pending.fragments)
        pending.is_waiting = is_waiting
        self.precedence.look()

    def _count_waiting(self, pending: PendingAppend, caller_id: CallerId | None) -> None:
        """Note the id under which an append waits from now on, or None."""
        change = (caller_id is not None) - (pending.caller_id is not None)
        self._waiting_fragments += change * len(pending.fragments)
        self._waiting_inline_bytes += change * pending.inline_bytes
        if pending.caller_id is not None:
            del self._waiters[pending.caller_id]
        pending.caller_id = caller_id
        if caller_id is not None:
            self._waiters[caller_id] = pending

    def _leave_queue(self, pending: PendingAppend) -> None:
        if pending.caller_id is None:
            return
        leave = LeaveQueue(pending.buffer, pending.caller_id, pending.must_come_again)
        self._count_waiting(pending, None)
        with suppress(BufferNotFoundError):
            self._core.decide(leave)
        self._looks_again = True
        self._wake.set()
