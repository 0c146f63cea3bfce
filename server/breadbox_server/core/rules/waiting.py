"""Appends wait for room, and are called up when there is some, longest wait first (B31)."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from breadbox_server.core.model import errors, inputs
from breadbox_server.core.model.events import RoomWaitEnded
from breadbox_server.core.model.ids import CallerId
from breadbox_server.core.model.inputs import AdmissionOutcome
from breadbox_server.core.rules import granting, intake
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.room_queue import Position, place_of

PLACE_KEPT_S: Final = 5.0
"""Seconds for which a position is kept after a wait or connection ended: the caller comes again."""
LOOKED_AT_MAX: Final = 256
"""Appends that wait that are looked at in one go,"""
FEW: Final = 4
"""and of these first: mostly no further one is looked at."""


def wait(state: BufferState, input: inputs.WaitForRoom, *, now: float) -> CallerId:
    """Let an append wait: at its position if that is of the same fragment, else as the last."""
    queue, fragment = state.queue, input.fragment
    known = queue.find(input.caller_id)
    if known is not None and place_of(known.fragment) != place_of(fragment):
        # It has got something: others are first now.
        queue.remove(known)
    caller_id = state.shared.next_caller_id() if known is None else known.caller_id
    former = queue.put(Position(caller_id, fragment, input.waits_for, input.deadline_at))
    if former is not None and former is not known and not former.is_kept:
        _end(state, former)
    granting.serve(state, now=now)  # No fetch waits for a group that waits for room.
    return caller_id


def leave(state: BufferState, input: inputs.LeaveQueue, *, now: float) -> None:
    """Let an append go, and keep its position for a while if it is to come again."""
    position = state.queue.find(input.caller_id)
    if position is not None and input.keeps_place:
        state.queue.keep(position, now + PLACE_KEPT_S)
    elif position is not None:
        state.queue.remove(position)


def call_up(state: BufferState) -> Iterator[CallerId]:
    """Call up the appends that there is room for, each once the one before is offered."""
    queue = state.queue
    while queue.outdated:
        position = queue.outdated.popleft()
        if queue.is_waiting(position):
            position.is_called = True
            yield position.caller_id
    blocked_by: AdmissionOutcome | None = None
    looked_until = 0
    for count in (FEW, LOOKED_AT_MAX):
        for position in queue.first_waiting(count):
            if position.number <= looked_until:
                continue
            looked_until = position.number
            if not queue.is_waiting(position):
                continue
            worker = state.assembly.workers.get(position.fragment.worker_id)
            preview = state.room.preview(state.assembly, worker, position.fragment)
            if blocked_by and not intake.may_overtake(state, blocked_by, preview.closes_chunk):
                return
            with suppress(errors.DomainError):  # It hears of that in its turn.
                outcome = intake.judge(state, position.fragment, worker, preview).outcome
                if outcome.asks_to_wait:
                    blocked_by = position.waits_for = outcome
                    continue
            position.is_called = True
            yield position.caller_id


def time_out_overdue(state: BufferState, *, now: float) -> None:
    """End the waits that have lasted long enough, and give up positions kept for long."""
    queue = state.queue
    while (first := queue.first_deadline()) is not None and first[0] <= now:
        position = queue.by_caller[first[1]]
        if position.is_kept:
            queue.remove(position)
        else:
            queue.keep(position, now + PLACE_KEPT_S)
            _end(state, position)


def refuse_all(state: BufferState, error: errors.DomainError) -> None:
    """Turn every append away that waits for room."""
    for position in list(state.queue.waiting()):
        state.queue.remove(position)
        _end(state, position, error)


def _end(state: BufferState, position: Position, error: errors.DomainError | None = None) -> None:
    state.events.append(RoomWaitEnded(state.name, position.caller_id, position.waits_for, error))
