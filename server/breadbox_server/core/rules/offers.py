"""Fragments before and after their payloads are confirmed: offered, then settled.

An offer is judged, and takes room until it is settled: no other fragment gets that meanwhile. What
is settled is judged as any fragment that comes then, with the reserved room at hand.
"""

from collections.abc import Container, Sequence

from breadbox_server.core.model import errors, inputs
from breadbox_server.core.model.ids import WorkerId
from breadbox_server.core.model.inputs import AdmissionOutcome, Appended, Fragment, Offered
from breadbox_server.core.rules import intake
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.room import Reservation


def offer(state: BufferState, input: inputs.Offer, *, now: float) -> Offered:
    """Answer the fragments that are refused, and reserve room for the others."""
    fragments, queue = input.fragments, state.queue
    reservation = Reservation(state.shared.next_reservation_id(), input.expires_at)
    behind = None if input.caller_id in queue.waiters else queue.waits_for()
    answers: list[Appended | None] = []
    while (start := len(answers)) < len(fragments):
        if behind is None:
            count = intake.unopposed_count(state, fragments, start, is_ahead=True)
            if count:
                state.room.add_run(reservation, fragments[start : start + count])
                answers += [None] * count
                continue
        fragment = fragments[start]
        if _must_wait_for_others(state, fragment):
            break
        try:
            is_answered = _offer_one(state, reservation, fragment, behind, answers, now=now)
        except errors.DomainError:
            if answers:
                break
            raise
        if not is_answered:
            break
        last = answers[-1]
        if last is not None and last.outcome.asks_again:
            break
    if not reservation.fragments:
        return Offered(None, answers)
    return Offered(reservation.reservation_id, answers)


def _must_wait_for_others(state: BufferState, fragment: Fragment) -> bool:
    payload_id = fragment.payload.payload_id
    return state.room.is_awaited(fragment) or any(
        [payload_id in each.room.payload_ids for each in state.shared.states.values()]
    )


def _offer_one(
    state: BufferState,
    reservation: Reservation,
    fragment: Fragment,
    behind: AdmissionOutcome | None,
    answers: list[Appended | None],
    *,
    now: float,
) -> bool:
    """Answer a fragment or reserve its room; False: those reserved before it come first."""
    worker = state.assembly.workers.get(fragment.worker_id)
    preview = state.room.preview(state.assembly, worker, fragment)
    answer = intake.judge(state, fragment, worker, preview)
    outcome = answer.outcome
    if outcome is AdmissionOutcome.ADMITTED:
        if behind is not None and not intake.may_overtake(state, behind, preview.closes_chunk):
            if reservation.fragments:
                return False
            answers.append(Appended(behind))
            return True
        state.room.add(reservation, fragment, preview, worker)
        answers.append(None)
        return True
    if reservation.fragments and outcome.asks_again:
        return False
    if outcome is AdmissionOutcome.STALE and fragment.worker_id in state.room.tails:
        return False
    intake.decide(state, fragment, answer, preview, now=now)
    answers.append(answer)
    return True


def settle(state: BufferState, input: inputs.Settle, *, now: float) -> list[Appended | None]:
    """End a reservation: admit the fragments with their payloads, let go of the others."""
    state.room.end(input.reservation_id)
    answers: list[Appended | None] = []
    broken_off = set[WorkerId]()
    while len(answers) < len(input.fragments):
        run = _next_run(input, len(answers), broken_off)
        try:
            if not run:
                fragment = input.fragments[len(answers)]
                answers.append(_let_go(state, fragment, broken_off, now=now))
            else:
                answers += intake.append_run(state, run, now=now)
        except errors.DomainError:
            break
        last = answers[-1]
        if last is not None and last.outcome.asks_again:
            break
    return answers


def _next_run(
    input: inputs.Settle, start: int, broken_off: Container[WorkerId]
) -> Sequence[Fragment]:
    """Return the fragments from `start` on that have their payloads."""
    end = start
    for fragment, is_there in zip(input.fragments[start:], input.there[start:], strict=True):
        if not is_there or fragment.worker_id in broken_off:
            break
        end += 1
    return input.fragments[start:end]


def _let_go(
    state: BufferState, fragment: Fragment, broken_off: set[WorkerId], *, now: float
) -> Appended | None:
    """Answer for a payload that is missing: None, unless the fragment is refused by now.

    Later ones of its worker are let go of as well: admitted first they would make it too late.
    """
    if fragment.worker_id in broken_off:
        return None
    worker = state.assembly.workers.get(fragment.worker_id)
    preview = state.assembly.preview(worker, fragment)
    answer = intake.judge(state, fragment, worker, preview)
    if answer.outcome is not AdmissionOutcome.ADMITTED:
        intake.decide(state, fragment, answer, preview, now=now)
        return answer
    if not state.assembly.in_any_order:
        broken_off.add(fragment.worker_id)
    return None


def expire(state: BufferState, *, now: float) -> None:
    """End the reservations that are over."""
    while (first := state.room.first_expiry()) is not None and first[0] <= now:
        state.room.end(first[1])
