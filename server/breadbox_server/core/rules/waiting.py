"""Appends wait for room, and are called up when there is some, longest wait first (B31)."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Final

from breadbox_server.core.model import errors, inputs
from breadbox_server.core.model.events import RoomWaitEnded
from breadbox_server.core.model.ids import CallerId
from breadbox_server.core.model.inputs import AdmissionOutcome
from breadbox_server.core.rules import intake
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.room_queue import RoomWaiter, place_of

PLACE_KEPT_S: Final = 5.0
"""Seconds for which a position is kept after a wait or connection ended: the caller comes again."""
LOOKED_AT_MAX: Final = 256
"""Appends that wait that are looked at in one go."""


def wait(state: BufferState, input: inputs.WaitForRoom, *, now: float) -> CallerId:
    """Let an append wait: at its position if that is of the same fragment, else as the last."""
    queue, known = state.queue, None
    if input.caller_id is not None:
        known = queue.waiters.get(input.caller_id)
    if known is not None and known.place == place_of(input.fragment):
        known.fragment, known.waits_for = input.fragment, input.waits_for
        queue.wait_again(known, input.deadline_at)
        return known.caller_id
    if known is not None:
        # It has got something: others are first now.
        queue.leave(known)
    caller_id = state.shared.next_caller_id() if known is None else known.caller_id
    waiter = RoomWaiter(caller_id, input.fragment, input.waits_for, input.deadline_at)
    former = queue.join(waiter)
    if former is not None:
        _end(state, former)
    return caller_id


def leave(state: BufferState, input: inputs.LeaveQueue, *, now: float) -> None:
    """Let an append go, and keep its position for a while if it is to come again."""
    waiter = state.queue.waiters.get(input.caller_id)
    if waiter is not None:
        state.queue.leave(waiter, now + PLACE_KEPT_S if input.keeps_place else None)


def call_up(state: BufferState) -> Iterator[CallerId]:
    """Call up the appends that there is room for, each once the one before is offered."""
    queue = state.queue
    while queue.outdated:
        waiter = queue.outdated.popleft()
        if queue.is_waiting(waiter):
            waiter.is_called = True
            yield waiter.caller_id
    blocked_by: AdmissionOutcome | None = None
    for waiter in list(islice(queue.waiting(), LOOKED_AT_MAX)):
        if not queue.is_waiting(waiter):
            continue
        worker = state.assembly.workers.get(waiter.fragment.worker_id)
        preview = state.room.preview(state.assembly, worker, waiter.fragment)
        if blocked_by and not intake.may_overtake(state, blocked_by, preview.closes_chunk):
            return
        with suppress(errors.DomainError):  # It hears of that in its turn.
            outcome = intake.judge(state, waiter.fragment, worker, preview).outcome
            if outcome.asks_to_wait:
                blocked_by = waiter.waits_for = outcome
                continue
        waiter.is_called = True
        yield waiter.caller_id


def time_out_overdue(state: BufferState, *, now: float) -> None:
    """End the waits that have lasted long enough, and give up positions kept for long."""
    queue = state.queue
    while (first := queue.first_deadline()) is not None and first[0] <= now:
        waiter = queue.waiters[first[1]]
        queue.leave(waiter, now + PLACE_KEPT_S)
        _end(state, waiter)
    queue.give_up_kept(now)


def refuse_all(state: BufferState, error: errors.DomainError) -> None:
    """Turn every append away that waits for room."""
    for waiter in list(state.queue.waiting()):
        state.queue.leave(waiter)
        _end(state, waiter, error)


def _end(state: BufferState, waiter: RoomWaiter, error: errors.DomainError | None = None) -> None:
    state.events.append(RoomWaitEnded(state.name, waiter.caller_id, waiter.waits_for, error))
