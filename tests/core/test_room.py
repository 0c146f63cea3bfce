"""B31 and reservations: room is taken from the offer on, and goes to the append that came first."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER
from breadbox_server.core.model.config import FullPolicy, SampleToInsertRatio
from breadbox_server.core.model.errors import (
    BufferNotFoundError,
    DomainError,
    DrainingError,
    InvalidArgumentError,
    SchemaMismatchError,
)
from breadbox_server.core.model.events import RoomWaitEnded
from breadbox_server.core.model.ids import ReservationId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Appended,
    DeleteBuffer,
    LeaveQueue,
    Offered,
    Settle,
)
from breadbox_server.core.rules.waiting import PLACE_KEPT_S
from breadbox_server.core.state import room_queue
from core.world import World
from support.metadata import make_fragment, make_payload

ADMITTED, STALE = Appended(AdmissionOutcome.ADMITTED), Appended(AdmissionOutcome.STALE)
BUFFER_FULL = Appended(AdmissionOutcome.BUFFER_FULL)
BYTES_FULL = Appended(AdmissionOutcome.BYTES_FULL)
BLOCKS: dict[str, Any] = {"full_policy": FullPolicy.BLOCK, "uses_max": 1}


def outcomes(offered: Offered) -> list[AdmissionOutcome | None]:
    return [None if each is None else each.outcome for each in offered.answers]


# Reservations -------------------------------------------------------------------------------------


def test_a_place_is_taken_from_the_offer_until_it_is_settled() -> None:
    world = World(capacity_chunks=1, **BLOCKS)
    first, late = make_fragment("first"), make_fragment("late")
    offered = world.reserve(first)
    assert [None] == offered.answers
    assert [BUFFER_FULL] == world.reserve(late).answers
    assert AdmissionOutcome.BUFFER_FULL is world.offer(late)
    assert [ADMITTED] == world.settle(offered, [first])
    assert [("first", 0, 0)] == world.held()


def test_bytes_are_taken_from_the_offer_until_it_is_settled() -> None:
    world = World(capacity_bytes=100, **BLOCKS)
    first, late = make_fragment("first", size_bytes=60), make_fragment("late", size_bytes=60)
    offered = world.reserve(first)
    assert [BYTES_FULL] == world.reserve(late).answers
    assert [ADMITTED] == world.settle(offered, [first])
    assert 60 == world.seen().payload_bytes


def test_what_the_store_has_not_answered_for_is_not_admitted() -> None:
    world = World()
    world.fill(1, worker_id="w0")
    fragments = [make_fragment("w0", 1), make_fragment("w0", 2)]
    for there in ([True], []):
        offered = world.reserve(*fragments)
        assert [None] * len(fragments) == offered.answers
        settle = Settle(DEFAULT_BUFFER, offered.reservation_id or ReservationId(0), there)
        assert [ADMITTED] * len(there) == world.buffers.apply(settle, now=world.now)
        fragments = fragments[len(there) :]
    assert [("w0", 0, 0), ("w0", 1, 0)] == world.held()


def test_a_missing_payload_gives_its_room_back() -> None:
    world = World(capacity_chunks=1, **BLOCKS)
    missing, other = make_fragment("missing"), make_fragment("other")
    offered = world.reserve(missing)
    assert [None] == world.settle(offered, [missing], [False])
    assert AdmissionOutcome.ADMITTED is world.offer(other)


def test_later_fragments_of_a_worker_with_a_missing_payload_are_let_go_of() -> None:
    world = World()
    fragments = [make_fragment("w0", 0), make_fragment("w0", 1), make_fragment("w1", 0)]
    offered = world.reserve(*fragments)
    assert [None] * 3 == offered.answers
    assert [None, None, ADMITTED] == world.settle(offered, fragments, [False, True, True])
    assert AdmissionOutcome.ADMITTED is world.offer(make_fragment("w0", 0))


def test_what_is_missing_of_a_known_worker_is_let_go_of_alone() -> None:
    world = World()
    world.fill(1, worker_id="w0")
    world.fill(1, worker_id="w1")
    fragments = [make_fragment("w0", 1), make_fragment("w1", 1)]
    offered = world.reserve(*fragments)
    world.buffers.check_invariants()
    assert [None, ADMITTED] == world.settle(offered, fragments, [False, True])
    world.buffers.check_invariants()


def test_a_reservation_that_expired_gives_its_room_back_and_answers_nothing() -> None:
    world = World(capacity_chunks=1, **BLOCKS)
    slow, other = make_fragment("slow"), make_fragment("other")
    offered = world.reserve(slow, reserve_s=5.0)
    assert world.now + 5.0 == world.buffers.next_timer()
    world.advance(5.0)
    assert AdmissionOutcome.ADMITTED is world.offer(other)
    assert [] == world.settle(offered, [slow])
    assert [BUFFER_FULL] == world.reserve(slow).answers


@pytest.mark.parametrize("missing", [False, True], ids=["there", "missing"])
def test_a_fragment_that_becomes_stale_while_it_is_confirmed_is_stale(missing: bool) -> None:
    world = World(staleness_max=0)
    fragment = make_fragment()
    offered = world.reserve(fragment)
    world.publish(1)
    assert [STALE] == world.settle(offered, [fragment], [not missing])


def test_a_reservation_without_an_expiry_lasts_until_it_is_settled() -> None:
    world = World(capacity_chunks=1, **BLOCKS)
    fragment = make_fragment()
    offered = world.reserve(fragment, reserve_s=inf)
    assert world.buffers.next_timer() is None
    world.buffers.check_invariants()
    world.advance(1e6)
    assert [BUFFER_FULL] == world.reserve(make_fragment("late")).answers
    assert [ADMITTED] == world.settle(offered, [fragment])


def test_a_session_that_ends_takes_its_reservations_with_it() -> None:
    world = World(capacity_chunks=1, **BLOCKS)
    old = make_fragment("w0")
    offered = world.reserve(old)
    world.start("s1")
    new = make_fragment("w0", session_id="s1")
    next_offered = world.reserve(new)
    assert [None] == next_offered.answers
    assert [] == world.settle(offered, [old])
    assert [ADMITTED] == world.settle(next_offered, [new])
    assert [AdmissionOutcome.WRONG_SESSION] == outcomes(world.reserve(old))


def test_room_that_limits_take_away_is_waited_for() -> None:
    world = World(capacity_chunks=2, **BLOCKS)
    world.append("w0")
    fragment = make_fragment("w1")
    offered = world.reserve(fragment)
    world.update(capacity_chunks=1, **BLOCKS)
    assert [BUFFER_FULL] == world.settle(offered, [fragment])


def test_what_is_refused_is_answered_and_what_follows_of_other_workers_is_reserved() -> None:
    world = World(staleness_max=0)
    world.publish(1)
    world.append("w0", 0, version=1)
    fragments = [
        make_fragment("w1", 0, version=1),
        make_fragment("w0", 0, version=1),
        make_fragment("w2", 0, version=0),
        make_fragment("w0", 1, version=1),
    ]
    offered = world.reserve(*fragments)
    duplicate = AdmissionOutcome.DUPLICATE
    assert [None, duplicate, AdmissionOutcome.STALE, None] == outcomes(offered)
    reserved = [fragments[0], fragments[3]]
    assert [ADMITTED] * 2 == world.settle(offered, reserved)


TOO_NEW = "model_version_max"


@pytest.mark.parametrize(
    ("index", "version", "size_bytes", "alone"),
    [
        (0, 1, 10, None),
        (1, 0, 10, AdmissionOutcome.STALE),
        (1, 2, 10, TOO_NEW),
        (1, 1, 95, None),
    ],
    ids=["the same", "stale", "too new", "no room"],
)
def test_a_fragment_that_depends_on_a_reserved_one_is_judged_after_it(
    index: int, version: int, size_bytes: int, alone: AdmissionOutcome | str | None
) -> None:
    world = World(staleness_max=0, capacity_bytes=100, **BLOCKS)
    world.publish(1)
    first = make_fragment("w0", 0, version=1)
    second = make_fragment("w0", index, version=version, size_bytes=size_bytes)
    offered = world.reserve(first, second)
    assert [None] == offered.answers
    world.settle(offered, [first], [False])
    if alone == TOO_NEW:
        with pytest.raises(InvalidArgumentError, match=TOO_NEW):
            world.reserve(second)
    else:
        assert [alone] == outcomes(world.reserve(second))


def test_a_payload_is_reserved_for_one_fragment() -> None:
    world = World()
    payload = make_payload()
    claims = [make_fragment(name, payload=payload) for name in ("w0", "w1")]
    offered = world.reserve(*claims)
    assert [None] == offered.answers
    with pytest.raises(InvalidArgumentError, match="in use"):
        world.reserve(claims[1])
    assert [ADMITTED] == world.settle(offered, claims[:1])


def test_an_error_that_shows_only_when_it_is_settled_changes_nothing_and_comes_with_the_offer() -> (
    None
):
    world = World()
    fragments = [make_fragment("w0", step_count=4), make_fragment("w1", step_count=8)]
    offered = world.reserve(*fragments)
    assert [None, None] == offered.answers
    assert [ADMITTED] == world.settle(offered, fragments)
    with pytest.raises(SchemaMismatchError):
        world.reserve(fragments[1])
    assert [("w0", 0, 0)] == world.held()


def test_reserved_fragments_of_one_worker_close_chunks_together() -> None:
    """Five fragments close two chunks of two; the fifth takes no place."""
    world = World(fragments_per_chunk=2, capacity_chunks=2, **BLOCKS)
    world.append("w0", 0)
    fragments = [make_fragment("w0", index) for index in range(1, 5)]
    offered = world.reserve(*fragments)
    assert [None] * 4 == offered.answers
    assert [] != world.reserve(make_fragment("w1", 0)).answers
    assert [BUFFER_FULL] == world.reserve(make_fragment("w0", 5)).answers
    assert [ADMITTED] * 4 == world.settle(offered, fragments)
    assert (2, 1) == (world.seen().chunk_count, world.seen().open_fragment_count)


def test_chunks_that_are_evicted_need_no_bytes_beside_each_other() -> None:
    """Each of many producers gets its turn, however little the buffer holds."""
    world = World(capacity_bytes=25)
    fragments = [make_fragment(f"w{number}") for number in range(5)]
    offers = [world.reserve(each) for each in fragments]
    assert [[None]] * 5 == [each.answers for each in offers]
    for offered, fragment in zip(offers, fragments, strict=True):
        assert [ADMITTED] == world.settle(offered, [fragment])
    assert [("w3", 0, 0), ("w4", 0, 0)] == world.held()


def test_a_limiter_counts_reserved_chunks() -> None:
    limiter = SampleToInsertRatio(ratio=1.0, error_chunks=2.0, minimum_chunk_count=1)
    world = World(limiter=limiter)
    fragments = [make_fragment("w0", index) for index in range(4)]
    offered = world.reserve(*fragments)
    one_by_one = World(limiter=limiter)
    admitted = [one_by_one.offer(replace(each)) for each in fragments]
    assert admitted.count(AdmissionOutcome.ADMITTED) == len(offered.answers)
    assert AdmissionOutcome.BUFFER_FULL in admitted


def test_what_is_settled_behind_a_later_fragment_of_its_worker_is_judged_again() -> None:
    world = World(outcomes_per_worker_max=1)
    world.fill(1)
    fragments = [make_fragment("w0", 1), make_fragment("w0", 2)]
    offers = [world.reserve(each) for each in fragments]
    assert [ADMITTED] == world.settle(offers[1], fragments[1:])
    assert [Appended(AdmissionOutcome.DUPLICATE)] == world.settle(offers[0], fragments[:1])


# The queue ----------------------------------------------------------------------------------------


def full_world(**limits: Any) -> World:
    world = World(capacity_chunks=1, **(BLOCKS | limits))
    world.append("fill")
    return world


def make_room(world: World) -> None:
    world.release(world.granted(1).lease_id)


def ended(world: World) -> list[tuple[int, AdmissionOutcome, type[DomainError] | None]]:
    return [
        (each.caller_id, each.outcome, type(each.error) if each.error else None)
        for each in world.events(RoomWaitEnded)
    ]


FULL = AdmissionOutcome.BUFFER_FULL


def test_appends_are_called_up_in_order_of_arrival_as_far_as_there_is_room() -> None:
    world = full_world()
    callers = [world.wait(make_fragment(name)) for name in ("a", "b")]
    assert [] == world.called_up()
    make_room(world)
    called = world.buffers.call_up(now=world.now)
    assert callers[0] == next(called)
    assert [None] == world.reserve(make_fragment("a"), caller_id=callers[0]).answers
    assert [] == list(called)


def test_a_late_append_takes_no_room_that_an_earlier_one_waits_for() -> None:
    world = full_world()
    caller = world.wait(make_fragment("a"))
    make_room(world)
    assert [BUFFER_FULL] == world.reserve(make_fragment("late")).answers
    assert [None] == world.reserve(make_fragment("a"), caller_id=caller).answers


def test_what_waits_for_a_place_is_passed_only_by_what_takes_none() -> None:
    world = World(fragments_per_chunk=2, **BLOCKS)
    world.append("w0", 0)
    world.wait(make_fragment("first"))
    assert [None] == world.reserve(make_fragment("w1")).answers
    assert [BUFFER_FULL] == world.reserve(make_fragment("w0", 1)).answers
    assert [None] == world.reserve(make_fragment("w2"), make_fragment("w0", 1)).answers


def test_what_waits_for_bytes_is_passed_only_while_nothing_is_there_that_makes_room() -> None:
    world = World(**BLOCKS)
    world.wait(make_fragment("first"), AdmissionOutcome.BYTES_FULL)

    def passes() -> bool:
        fragment = make_fragment("w1")
        offered = world.reserve(fragment)
        if offered.reservation_id is not None:
            world.settle(offered, [fragment], [False])
        return offered.answers == [None]

    assert passes()
    world.append("w0", 0)
    assert not passes()
    grant = world.granted(1)
    assert not passes()
    world.release(grant.lease_id)
    assert passes()


def test_a_wait_ends_at_its_deadline_and_its_position_is_kept_for_a_while() -> None:
    world = full_world()
    first = world.wait(make_fragment("a"), wait_s=1.0)
    second = world.wait(make_fragment("b"), wait_s=100.0)
    assert world.now + 1.0 == world.buffers.next_timer()
    world.advance(1.0)
    assert [(first, FULL, None)] == ended(world)
    assert world.now + PLACE_KEPT_S == world.buffers.next_timer()
    world.advance(PLACE_KEPT_S - 0.5)
    again = world.wait(make_fragment("a"))
    make_room(world)
    assert [again, second] == world.called_up()


def test_a_position_that_was_kept_for_long_enough_is_given_up() -> None:
    world = full_world()
    world.wait(make_fragment("a"), wait_s=1.0)
    second = world.wait(make_fragment("b"), wait_s=100.0)
    world.advance(1.0)
    world.advance(PLACE_KEPT_S)
    again = world.wait(make_fragment("a"))
    make_room(world)
    assert [second, again] == world.called_up()


def test_of_more_kept_positions_than_there_may_be_the_oldest_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_queue, "PLACES_KEPT_MAX", 1)
    world = full_world()
    for name in ("a", "b"):
        world.wait(make_fragment(name), wait_s=1.0)
    world.advance(1.0)
    later = {name: world.wait(make_fragment(name)) for name in ("a", "b")}
    make_room(world)
    assert [later["b"], later["a"]] == world.called_up()


def test_a_second_attempt_takes_the_position_of_the_first() -> None:
    world = full_world()
    first = world.wait(make_fragment("a"))
    behind = world.wait(make_fragment("b"))
    again = world.wait(make_fragment("a"))
    assert [(first, FULL, None)] == ended(world)
    make_room(world)
    assert [again, behind] == world.called_up()


def test_an_append_that_got_something_goes_to_the_end_under_its_id() -> None:
    world = full_world()
    many = world.wait(make_fragment("a", 0))
    one = world.wait(make_fragment("b"))
    assert many == world.wait(make_fragment("a", 1), caller_id=many)
    make_room(world)
    assert [one, many] == world.called_up()


def test_an_append_that_found_no_room_in_its_turn_keeps_its_position() -> None:
    world = full_world()
    callers = [world.wait(make_fragment(name)) for name in ("a", "b")]
    make_room(world)
    assert callers == world.called_up()
    for caller_id, name in zip(reversed(callers), "ba", strict=True):
        assert caller_id == world.wait(make_fragment(name), caller_id=caller_id)
    assert callers == world.called_up()


def test_one_that_leaves_is_not_called_up_and_nothing_is_left_of_it() -> None:
    world = full_world()
    gone, there = (world.wait(make_fragment(name)) for name in ("a", "b"))
    for _ in range(2):
        world.buffers.apply(LeaveQueue(DEFAULT_BUFFER, gone, keeps_place=False), now=world.now)
    make_room(world)
    assert [there] == world.called_up()


def test_what_a_new_session_refuses_is_called_up_although_there_is_no_room() -> None:
    world = full_world()
    callers = [world.wait(make_fragment(name)) for name in ("a", "b", "c")]
    world.start("s1")
    world.buffers.apply(LeaveQueue(DEFAULT_BUFFER, callers[1], keeps_place=True), now=world.now)
    assert [callers[0], callers[2]] == world.called_up()
    wrong = AdmissionOutcome.WRONG_SESSION
    assert [wrong] == outcomes(world.reserve(make_fragment("a"), caller_id=callers[0]))


def test_what_a_new_version_makes_stale_is_called_up_behind_one_that_waits() -> None:
    world = World(capacity_chunks=1, staleness_max=1, **BLOCKS)
    world.publish(5)
    world.append("fill", version=5)
    world.wait(make_fragment("fresh", version=5))
    stale = world.wait(make_fragment("stale", version=4))
    world.publish(6)
    assert [stale] == world.called_up()


def test_one_that_is_refused_with_an_error_is_called_up_to_hear_it() -> None:
    world = full_world()
    caller = world.wait(make_fragment("a", version=0, step_count=99))
    assert [caller] == world.called_up()
    with pytest.raises(SchemaMismatchError):
        world.reserve(make_fragment("a", step_count=99), caller_id=caller)


def test_one_that_leaves_while_others_are_called_up_is_passed_over() -> None:
    world = World(**BLOCKS)
    callers = [world.wait(make_fragment(name)) for name in ("a", "b", "c")]
    called = world.buffers.call_up(now=world.now)
    assert callers[0] == next(called)
    world.buffers.apply(LeaveQueue(DEFAULT_BUFFER, callers[1], keeps_place=False), now=world.now)
    assert [callers[2]] == list(called)


def test_the_end_of_server_or_buffer_ends_every_wait() -> None:
    for act, error in (
        (lambda it: it.buffers.drain(now=it.now), DrainingError),
        (
            lambda it: it.buffers.apply(DeleteBuffer(DEFAULT_BUFFER), now=it.now),
            BufferNotFoundError,
        ),
    ):
        world = full_world()
        caller = world.wait(make_fragment("a"))
        world.buffers.take_events()
        act(world)
        assert [(caller, FULL, error)] == ended(world)
        with pytest.raises(error):
            world.reserve(make_fragment("a"))
