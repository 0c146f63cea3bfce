"""Fragments before and after their payloads are confirmed: offered, then settled.

An offer is judged, and takes room until it is settled: no other fragment gets that meanwhile. What
is settled is judged again only if something came between.
"""

from breadbox_server.core.model import errors, inputs
from breadbox_server.core.model.ids import WorkerId
from breadbox_server.core.model.inputs import AdmissionOutcome, Appended, Fragment, Offered
from breadbox_server.core.rules import intake
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.room import Reservation


def offer(state: BufferState, input: inputs.Offer, *, now: float) -> Offered:
    """Answer the fragments that are refused, and reserve room for the others."""
    fragments, room, queue = input.fragments, state.room, state.queue
    judged_by = state.config, state.model.version
    reservation = Reservation(next(state.shared.reservation_ids), input.expires_at, judged_by)
    behind = None if queue.find(input.caller_id) else queue.waits_for()
    answers: list[Appended | None] = []
    while (start := len(answers)) < len(fragments):
        count = 0 if behind else intake.unopposed_count(state, fragments, start)
        if count:
            room.add(reservation, fragments[start : start + count])
            answers += [None] * count
            continue
        try:
            if not _offer_one(state, reservation, fragments[start], behind, answers, now=now):
                break
        except errors.DomainError:
            if answers:
                break
            raise
        last = answers[-1]
        if last is not None and last.outcome.asks_again:
            break
    return Offered(reservation.reservation_id if reservation.fragments else None, answers)


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
    room = state.room
    if room.is_awaited(fragment):
        return False
    worker = state.assembly.workers.get(fragment.worker_id)
    preview = room.preview(state.assembly, worker, fragment)
    answer = intake.judge(state, fragment, worker, preview)
    outcome = answer.outcome
    if fragment.replaces and fragment.worker_id in room.tails:
        # Judged again behind what is reserved of its group: the last part of a member counts.
        outcome = AdmissionOutcome.ADMITTED if outcome is AdmissionOutcome.DUPLICATE else outcome
    if outcome is AdmissionOutcome.ADMITTED:
        if behind is None or intake.may_overtake(state, behind, preview.closes_chunk):
            reservation.is_usual = False
            opened = 0 if preview.closes_chunk else room.open_count(worker, fragment) + 1
            room.add(reservation, (fragment,), opened)
            answers.append(None)
            return True
        answer = Appended(behind)
    if reservation.fragments and answer.outcome.asks_again:
        return False
    if outcome is AdmissionOutcome.STALE and fragment.worker_id in room.tails:
        return False
    if outcome is not AdmissionOutcome.ADMITTED:
        intake.decide(state, fragment, answer, preview, now=now)
    answers.append(answer)
    return True


def settle(state: BufferState, input: inputs.Settle, *, now: float) -> list[Appended | None]:
    """End a reservation: admit the fragments with their payloads, let go of the others."""
    reservation = state.room.end(input.reservation_id)
    if reservation is None:
        return []
    are_all_there = input.there == [True] * len(reservation.fragments)
    if are_all_there and _is_as_foreseen(state, reservation):
        intake.admit_run(state, reservation.fragments, now=now)
        return [intake.ADMITTED] * len(reservation.fragments)
    answers: list[Appended | None] = []
    broken_off = set[WorkerId]()
    for fragment, is_there in zip(reservation.fragments, input.there, strict=False):
        if fragment.worker_id in broken_off:
            # Admitted now, it would make the missing one too late.
            answers.append(None)
            continue
        try:
            answer = intake.append_one(state, fragment, now=now, is_there=is_there)
        except errors.DomainError:
            break
        answers.append(answer)
        if answer is None and not state.assembly.in_any_order:
            broken_off.add(fragment.worker_id)
        elif answer is not None and answer.outcome.asks_again:
            break
    return answers


def _is_as_foreseen(state: BufferState, reservation: Reservation) -> bool:
    """Return whether nothing came between that changes how its fragments are judged."""
    place_count, bytes_left = intake.usual_room(state, reservation.place_count)
    workers = state.assembly.workers
    return (
        reservation.is_usual
        and reservation.judged_by == (state.config, state.model.version)
        and reservation.place_count <= place_count
        and reservation.size_bytes <= bytes_left
        and all(
            [
                worker_id in workers and workers[worker_id].outcomes.next_index == first
                for worker_id, first in reservation.first_indices.items()
            ]
        )
    )


def expire(state: BufferState, *, now: float) -> None:
    """End the reservations that are over."""
    while (first := state.room.first_expiry()) is not None and first[0] <= now:
        state.room.end(first[1])
