"""Groups: members in any order, from any worker; a group ends as a whole, and that is told."""

import random
from typing import Any

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig, FullPolicy
from breadbox_server.core.model.description import OpenGroup
from breadbox_server.core.model.errors import (
    FetchExceedsCapacityError,
    InvalidArgumentError,
    WorkersFullError,
)
from breadbox_server.core.model.events import (
    EvictionReason,
    FragmentsDiscarded,
    GroupEnded,
    StepsEnd,
    StepsEnded,
)
from breadbox_server.core.model.ids import BufferName, WorkerId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Appended,
    GroupEndReason,
    Offer,
    ReleaseMode,
    Settle,
)
from core.world import World, indices
from support.metadata import make_fragment

ADMITTED, DUPLICATE = AdmissionOutcome.ADMITTED, AdmissionOutcome.DUPLICATE
ENDED, STALE = AdmissionOutcome.GROUP_ENDED, AdmissionOutcome.STALE
SIZE = 3


def world_of_groups(**limits: Any) -> World:
    defaults: dict[str, Any] = {
        "fragments_per_chunk": SIZE,
        "open_chunk_s": 10.0,
        "sampler": "oldest_first",
        "assembly": AssemblyPolicy.GROUPS,
    }
    return World(**defaults | limits)


def append_all(world: World, *members: tuple[str, int], **fields: Any) -> list[AdmissionOutcome]:
    return [world.append(group, member, **fields) for group, member in members]


def ends(world: World, after: int = 0) -> list[tuple[str, str, int]]:
    found = world.buffers[DEFAULT_BUFFER].group_ends(after, 100)
    return [(each.group, each.reason.value, each.member_count) for each in found]


def test_members_in_any_order_of_several_groups_are_delivered_by_group_in_member_order() -> None:
    world = world_of_groups()
    came = append_all(world, ("a", 2), ("b", 0), ("a", 0), ("b", 2), ("b", 1), ("a", 1))
    assert [ADMITTED] * 6 == came
    grant = world.granted(2 * SIZE)
    groups = [granted.fragment.worker_id for granted in grant.fragments]
    assert ["b", "b", "b", "a", "a", "a"] == groups, "in the order in which they were complete"
    assert [0, 1, 2, 0, 1, 2] == indices(grant)
    assert [("b", "complete", 3), ("a", "complete", 3)] == ends(world)


def test_no_member_goes_on_where_another_ends() -> None:
    """Mirrors, episodes and returns join the fragments of a worker unless one is marked."""
    world = world_of_groups()
    append_all(world, ("a", 0), ("a", 1), ("a", 2))
    assert [True] * SIZE == [each.fragment.discontinuity for each in world.granted(SIZE).fragments]


def test_a_group_has_ended_unless_it_is_open_and_a_worker_never_has() -> None:
    world = world_of_groups()
    append_all(world, ("a", 0), ("b", 0), ("b", 1), ("b", 2))
    buffer = world.buffers[DEFAULT_BUFFER]
    names = [WorkerId(name) for name in ("a", "b", "unknown")]
    assert [False, True, True] == [buffer.has_ended(name) for name in names]
    consecutive = World().buffers[DEFAULT_BUFFER]
    assert not consecutive.has_ended(names[0])


def test_a_group_of_one_is_a_chunk_at_once_and_its_end_is_told() -> None:
    world = world_of_groups(fragments_per_chunk=1)
    assert [ADMITTED, ADMITTED] == append_all(world, ("a", 0), ("b", 0))
    assert [("a", "complete", 1), ("b", "complete", 1)] == ends(world)


def test_a_late_first_member_is_judged_and_not_taken_for_a_duplicate() -> None:
    world = world_of_groups(fragments_per_chunk=100, outcomes_per_worker_max=4)
    came = append_all(world, *[("a", member) for member in range(99, -1, -1)])
    assert [ADMITTED] * 100 == came
    assert [("a", "complete", 100)] == ends(world)


def test_only_what_was_judged_is_a_duplicate() -> None:
    world = world_of_groups(group_min=2)
    append_all(world, ("a", 2), ("a", 0))
    assert Appended(DUPLICATE, ADMITTED) == world.answer(make_fragment("a", 2))
    world.advance(10.0)
    assert Appended(DUPLICATE, ADMITTED) == world.answer(make_fragment("a", 2))
    late = Appended(ENDED, group_end=GroupEndReason.PARTIAL)
    assert late == world.answer(make_fragment("a", 1))
    assert late == world.answer(make_fragment("a", 1)), "it is never judged"
    assert 2 == world.count("fragments_group_ended")


def test_a_member_that_there_cannot_be_is_refused_with_the_size() -> None:
    world = world_of_groups()
    with pytest.raises(InvalidArgumentError, match=r"fragment_index.* 0 to 2, got 3"):
        world.append("a", 3)
    assert 0 == world.seen().worker_count


def test_a_silent_group_with_enough_members_is_delivered_and_counts_what_it_has() -> None:
    world = world_of_groups(group_min=2)
    append_all(world, ("a", 2), ("a", 0))
    world.fetch(SIZE)
    world.advance(9.0)
    assert [] == ends(world)
    world.advance(1.0)
    assert [("a", "partial", 2)] == ends(world)
    assert [0, 2] == [each.fragment.fragment_index for each in world.prepared("request-1")]


def test_fragments_held_are_those_of_partial_groups_too() -> None:
    world = world_of_groups(group_min=1)
    append_all(world, ("a", 2), ("b", 0), ("b", 1), ("b", 2), ("c", 1), ("c", 0))
    assert (1, 3) == (world.seen().chunk_count, world.seen().fragment_count)
    world.advance(10.0)
    assert (3, 6) == (world.seen().chunk_count, world.seen().fragment_count)


def test_each_further_member_keeps_a_group_open() -> None:
    world = world_of_groups()
    append_all(world, ("a", 0), ("b", 0))
    world.advance(6.0)
    append_all(world, ("a", 1))
    world.advance(6.0)
    assert [("b", "incomplete", 1)] == ends(world)
    assert [ADMITTED] == append_all(world, ("a", 2))


def test_a_silent_group_with_too_few_members_is_dropped_whole_and_told() -> None:
    world = world_of_groups(group_min=2)
    append_all(world, ("a", 1))
    world.buffers.take_events()
    world.advance(10.0)
    events = world.buffers.take_events()
    assert [("a", "incomplete", 1)] == ends(world)
    assert 1 == sum(each.fragment_count for each in events if isinstance(each, FragmentsDiscarded))
    [steps] = [each for each in events if isinstance(each, StepsEnded)]
    assert StepsEnd.EVICTED is steps.end
    assert 0 == world.seen().payload_bytes
    assert [GroupEndReason.INCOMPLETE] == [
        each.reason for each in events if isinstance(each, GroupEnded)
    ]
    assert 1 == world.count("groups_incomplete")


def test_a_step_that_becomes_stale_ends_its_open_group_whole() -> None:
    world = world_of_groups(staleness_max=1)
    world.publish(1)
    append_all(world, ("a", 0), version=0)
    append_all(world, ("a", 1), ("b", 0), version=1)
    world.publish(2)
    assert [("a", "stale", 2)] == ends(world)
    late = world.answer(make_fragment("a", 2, version=2))
    assert Appended(ENDED, group_end=GroupEndReason.STALE) == late
    assert 1 == world.seen().open_fragment_count


@pytest.mark.parametrize("is_first", [True, False])
def test_a_stale_member_ends_its_group_whichever_came_first(is_first: bool) -> None:
    world = world_of_groups(staleness_max=0)
    world.publish(1)
    if not is_first:
        append_all(world, ("a", 0), version=1)
    assert [STALE] == append_all(world, ("a", 1), version=0)
    assert [("a", "stale", 0 if is_first else 1)] == ends(world)
    assert [ENDED] == append_all(world, ("a", 2), version=1)
    assert Appended(DUPLICATE, STALE) == world.answer(make_fragment("a", 1, version=0))
    assert 0 == world.seen().payload_bytes


def test_a_lost_payload_ends_its_group_whole() -> None:
    world = world_of_groups()
    lost = make_fragment("a", 0)
    world.offer(lost)
    append_all(world, ("a", 2))
    assert 2 == world.drop(lost.payload.payload_id)
    assert [("a", "lost", 2)] == ends(world)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("publish", "stale"), ("fill", "evicted"), ("drop", "lost"), ("delete", "evicted")],
)
def test_a_closed_group_that_leaves_before_a_use_is_told_once_more(
    reason: str, expected: str
) -> None:
    world = world_of_groups(staleness_max=0, capacity_chunks=1, fragments_per_chunk=1)
    first = make_fragment("a", 0)
    world.offer(first)
    match reason:
        case "publish":
            world.publish(1)
        case "fill":
            world.append("b", 0)
        case "drop":
            world.drop(first.payload.payload_id)
        case "delete":
            world.update_priorities({}, (0,))
    assert ("a", expected, 1) in ends(world, 1)
    assert "a" not in [name for name, reason, _ in ends(world) if reason == "complete"]
    assert 1 == world.count(f"groups_{expected}")


def test_a_group_that_was_used_is_not_told_of_when_it_leaves() -> None:
    world = world_of_groups(staleness_max=0, uses_max=2, fragments_per_chunk=1)
    world.append("a", 0)
    lease = world.granted(1)
    world.release(lease.lease_id)
    world.publish(1)
    assert [("a", "complete", 1)] == ends(world)


@pytest.mark.parametrize(
    ("way", "expected"), [("publish", "stale"), ("fill", "evicted"), ("start", None)]
)
def test_a_use_given_back_to_a_group_that_has_left_is_told(way: str, expected: str | None) -> None:
    world = world_of_groups(
        staleness_max=0, uses_max=2, capacity_chunks=1, fragments_per_chunk=1, lease_s=100.0
    )
    world.append("a", 0)
    lease = world.granted(1)
    match way:
        case "publish":
            world.publish(1)
        case "fill":
            world.append("b", 0)
        case "start":
            world.start("s1")
            world.append("a", 0, session_id="s1")
    world.give_back(lease.lease_id)
    reasons = dict((name, why) for name, why, _ in ends(world))
    assert (expected or "complete") == reasons["a"]


def test_a_new_session_begins_without_groups_and_numbers_go_on() -> None:
    world = world_of_groups()
    append_all(world, ("a", 0), ("b", 0), ("b", 1), ("b", 2))
    world.start("s1")
    assert [] == ends(world)
    assert [ADMITTED] == append_all(world, ("b", 0), session_id="s1")
    world.advance(10.0)
    [told] = world.buffers[DEFAULT_BUFFER].group_ends(1, 100)
    assert (2, "b", "incomplete") == (told.number, told.group, told.reason.value)
    assert 2 == world.buffers.group_end_count(DEFAULT_BUFFER)


def test_ends_are_returned_in_order_after_a_number_and_at_most_so_many() -> None:
    world = world_of_groups(fragments_per_chunk=1)
    append_all(world, *[(f"g{number}", 0) for number in range(5)])
    buffer = world.buffers[DEFAULT_BUFFER]
    assert [2, 3] == [each.number for each in buffer.group_ends(1, 2)]
    assert [4, 5] == [each.number for each in buffer.group_ends(3, 100)]
    assert [] == buffer.group_ends(5, 100)


def test_a_number_beyond_the_latest_end_is_of_an_earlier_buffer_and_misses_no_end() -> None:
    world = world_of_groups(fragments_per_chunk=1)
    append_all(world, ("a", 0), ("b", 0))
    expected = [("a", "complete", 1), ("b", "complete", 1)]
    assert [expected[1:], [], expected] == [ends(world, after) for after in (1, 2, 3)]


def test_where_producers_wait_a_partial_group_waits_for_room_and_is_not_dropped() -> None:
    world = world_of_groups(capacity_chunks=1, full_policy=FullPolicy.BLOCK, group_min=1)
    append_all(world, ("a", 0), ("a", 1), ("a", 2), ("b", 0))
    world.advance(10.0)
    assert [("a", "complete", 3)] == ends(world)
    assert 1 == world.seen().open_chunk_count
    world.release(world.granted(SIZE).lease_id)
    world.advance(10.0)
    assert [("a", "complete", 3), ("b", "partial", 1)] == ends(world)


def test_a_shorter_silence_keeps_the_order_of_those_that_wait_for_room() -> None:
    limits: dict[str, Any] = {
        "capacity_chunks": 1,
        "full_policy": FullPolicy.BLOCK,
        "group_min": 1,
    }
    world = world_of_groups(**limits)
    append_all(world, ("a", 0), ("a", 1), ("a", 2), ("b", 0))
    world.advance(4.0)
    append_all(world, ("c", 0))
    world.advance(3.0)
    world.update(
        fragments_per_chunk=SIZE, assembly=AssemblyPolicy.GROUPS, open_chunk_s=2.0, **limits
    )
    world.buffers.check_invariants()
    assert 2 == world.seen().open_chunk_count


def test_leases_and_silences_that_are_due_together_end_in_their_order_however_late() -> None:
    def play(*, is_late: bool) -> object:
        world = world_of_groups(
            capacity_chunks=1, full_policy=FullPolicy.BLOCK, group_min=1, lease_s=12.0
        )
        append_all(world, ("a", 0), ("a", 1), ("a", 2), ("b", 0))
        world.granted(SIZE)
        for span_s in [40.0] if is_late else [0.5] * 80:
            world.advance(span_s)
        opened = world.buffers.snapshot()[0].open_chunks
        return ends(world), world.held(), [each.touched_at for each in opened]

    assert play(is_late=False) == play(is_late=True)


def test_the_oldest_ended_group_makes_room_for_another_and_open_ones_do_not() -> None:
    world = world_of_groups(workers_max=2)
    append_all(world, ("a", 0), ("b", 0), ("b", 1), ("b", 2))
    with pytest.raises(WorkersFullError):
        world.append("c", 0)
    world.release(world.granted(SIZE).lease_id)
    assert [ADMITTED] == append_all(world, ("c", 0))
    assert [] == ends(world), "forgotten with its group"
    assert [ADMITTED] == append_all(world, ("a", 1))


def test_with_too_many_groups_a_further_one_is_let_in_once_one_is_free() -> None:
    world = world_of_groups(workers_max=2)
    first = make_fragment("a", 0)
    world.offer(first)
    append_all(world, ("b", 0))
    for _ in range(5):
        with pytest.raises(WorkersFullError):
            world.append("c", 0)
    world.drop(first.payload.payload_id)
    assert [ADMITTED] == append_all(world, ("c", 0))
    with pytest.raises(WorkersFullError):
        world.append("d", 0)
    world.start("s1")
    assert [ADMITTED] * 2 == append_all(world, ("e", 0), ("f", 0), session_id="s1")


def test_a_fetch_is_counted_in_whole_groups() -> None:
    world = world_of_groups(capacity_chunks=4)
    with pytest.raises(InvalidArgumentError, match="multiple"):
        world.fetch(SIZE + 1)
    with pytest.raises(FetchExceedsCapacityError):
        world.fetch(5 * SIZE)


def test_open_groups_are_described_with_the_members_that_lack() -> None:
    world = world_of_groups()
    append_all(world, ("a", 2))
    world.advance(4.0)
    append_all(world, ("b", 0), ("b", 1))
    world.advance(1.0)
    a, b = WorkerId("a"), WorkerId("b")
    expected = (OpenGroup(a, 1, (0, 1), 5.0), OpenGroup(b, 2, (2,), 1.0))
    assert expected == world.seen().open_groups
    assert () == World().seen().open_groups
    assert world.buffers.collects_groups(DEFAULT_BUFFER)
    assert not World().buffers.collects_groups(DEFAULT_BUFFER)
    assert not world.buffers.collects_groups(BufferName("none"))


def test_the_kind_of_assembly_changes_only_without_a_session_and_its_data() -> None:
    world = World(fragments_per_chunk=SIZE)
    with pytest.raises(InvalidArgumentError, match=r"assembly.*end the session"):
        world.update(fragments_per_chunk=SIZE, assembly=AssemblyPolicy.GROUPS)
    world.end()
    world.update(fragments_per_chunk=SIZE, assembly=AssemblyPolicy.GROUPS)
    world.start("s1")
    came = append_all(world, ("a", 1), ("a", 2), ("a", 0), session_id="s1")
    assert [ADMITTED] * 3 == came
    assert [("a", "complete", 3)] == ends(world)
    world.end("s1")
    world.update(fragments_per_chunk=2)
    with pytest.raises(InvalidArgumentError, match="buffer has no groups"):
        ends(world)
    assert 1 == world.buffers.group_end_count(DEFAULT_BUFFER)


def test_a_size_that_changes_between_groups_does_not_change_those_that_ended() -> None:
    world = world_of_groups(fragments_per_chunk=2)
    append_all(world, ("a", 0), ("a", 1))
    world.release(world.granted(2).lease_id)
    world.update(fragments_per_chunk=SIZE, assembly=AssemblyPolicy.GROUPS)
    assert [ENDED] == append_all(world, ("a", 2))
    assert [("a", "complete", 2)] == ends(world)


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"group_min": -1}, "group_min"),
        (
            {"assembly": AssemblyPolicy.GROUPS, "open_chunk_s": 0.999},
            "open_chunk_s must be at least 1 s in a buffer of groups, got 0.999",
        ),
        ({"group_min": 3, "fragments_per_chunk": 2}, "at most fragments_per_chunk"),
    ],
)
def test_limits_that_cannot_be_are_refused(limits: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem):
        BufferConfig(**limits)


def test_members_that_are_reserved_close_their_group_in_any_order() -> None:
    world = world_of_groups(capacity_chunks=1, full_policy=FullPolicy.BLOCK)
    members = [make_fragment("a", member) for member in (2, 0, 1)]
    offered = world.buffers.apply(Offer(DEFAULT_BUFFER, members), now=world.now)
    assert [None] * 3 == offered.answers
    again = [make_fragment("a", 0), make_fragment("b", 0)]
    waits = world.buffers.apply(Offer(DEFAULT_BUFFER, again), now=world.now)
    assert [] == waits.answers, "the same member is judged once the first is settled"
    others = [make_fragment("b", member) for member in range(SIZE)]
    full = world.buffers.apply(Offer(DEFAULT_BUFFER, others), now=world.now)
    assert [None, None] == full.answers, "the last one would close a chunk without a place"
    there = [False, True, True]
    assert offered.reservation_id is not None
    settle = Settle(DEFAULT_BUFFER, offered.reservation_id, there)
    answers = world.buffers.apply(settle, now=world.now)
    assert [None, ADMITTED, ADMITTED] == [each and each.outcome for each in answers]
    assert [ADMITTED] == append_all(world, ("a", 2))
    assert [("a", "complete", 3)] == ends(world)


def test_ends_survive_a_snapshot_and_a_replay() -> None:
    world = world_of_groups(group_min=2, staleness_max=0)
    append_all(world, ("a", 0), ("b", 2), ("b", 0), ("c", 0), ("c", 1), ("c", 2))
    base = world.buffers.snapshot()
    world.buffers.take_entries()
    world.advance(10.0)
    world.publish(1)
    expected = [("a", "incomplete", 1), ("c", "stale", 3), ("b", "stale", 2)]
    assert sorted(expected) == sorted(ends(world))
    for taken, entries in ((base, world.buffers.take_entries()), (world.buffers.snapshot(), [])):
        restored = BufferSet.restore(taken, random.Random(1))
        restored.replay(entries)
        restored.handle_timer(now=world.now)
        assert world.buffers.snapshot() == restored.snapshot()
        found = restored[DEFAULT_BUFFER].group_ends(0, 100)
        assert ends(world) == [(e.group, e.reason.value, e.member_count) for e in found]


def test_an_end_that_was_told_stays_one_for_a_server_whose_clock_is_behind() -> None:
    world = world_of_groups()
    append_all(world, ("a", 0))
    world.advance(10.0)
    restored = BufferSet.restore((), random.Random(1))
    restored.replay(world.buffers.take_entries())
    [told] = restored[DEFAULT_BUFFER].group_ends(0, 100)
    assert GroupEndReason.INCOMPLETE is told.reason


def test_a_returned_group_can_be_used_again() -> None:
    world = world_of_groups()
    append_all(world, ("a", 0), ("a", 1), ("a", 2))
    world.release(world.granted(SIZE).lease_id, ReleaseMode.RETURNED)
    assert 3 == len(world.granted(SIZE).fragments)
    assert [("a", "complete", 3)] == ends(world)


def test_a_reason_for_leaving_that_readers_brought_is_told_as_lost() -> None:
    world = world_of_groups(fragments_per_chunk=1)
    world.append("a", 0)
    state = world.buffers._shared.states[DEFAULT_BUFFER]  # noqa: SLF001 - no input brings it about
    [chunk] = state.holdings.table.held.values()
    state.note_unused(chunk.fragments, EvictionReason.QUARANTINED)
    assert [("a", "lost", 1)] == ends(world)


# drop_equal


def rewarded(world: World, group: str, *rewards: str | None) -> None:
    for member, reward in enumerate(rewards):
        numbers = "" if reward is None else f'{{"reward":{reward}}}'
        assert ADMITTED is world.append(group, member, numbers=numbers)


def test_a_complete_group_whose_members_agree_is_dropped_as_equal() -> None:
    world = world_of_groups(drop_equal="reward", capacity_chunks=1)
    rewarded(world, "differ", "1.0", "0.0", "1.0")
    rewarded(world, "agree", "1.0", "1", "1.0")
    assert [("differ", "complete", 3), ("agree", "equal", 3)] == ends(world)
    assert ["differ"] == [worker for worker, _, _ in world.held()][::SIZE], "nothing was evicted"
    assert (3, 1) == (world.count("fragments_discarded_equal"), world.count("groups_equal"))
    late = world.answer(make_fragment("agree", 0))
    assert DUPLICATE is late.outcome
    assert 1 == world.count("groups_complete")


def test_members_that_lack_the_number_or_have_none_of_it_agree_in_nothing() -> None:
    world = world_of_groups(drop_equal="reward")
    rewarded(world, "one lacks it", "1.0", None, "1.0")
    rewarded(world, "all lack it", None, None, None)
    rewarded(world, "no number", "NaN", "NaN", "NaN")
    assert ["complete"] * 3 == [reason for _, reason, _ in ends(world)]


def test_texts_and_flags_agree_as_numbers_do() -> None:
    world = world_of_groups(drop_equal="reward")
    rewarded(world, "texts", '"bad"', '"bad"', '"bad"')
    rewarded(world, "flags", "true", "true", "false")
    assert ["equal", "complete"] == [reason for _, reason, _ in ends(world)]


def test_a_partial_group_whose_members_agree_is_dropped_as_equal() -> None:
    world = world_of_groups(drop_equal="reward", group_min=2)
    rewarded(world, "agree", "0.5", "0.5")
    rewarded(world, "differ", "0.5", "0.6")
    world.advance(11.0)
    assert [("agree", "equal", 2), ("differ", "partial", 2)] == ends(world)


def test_equal_groups_are_kept_until_the_buffer_is_told_to_drop_them() -> None:
    world = world_of_groups()
    rewarded(world, "before", "1.0", "1.0", "1.0")
    world.update(fragments_per_chunk=SIZE, assembly=AssemblyPolicy.GROUPS, drop_equal="reward")
    rewarded(world, "after", "1.0", "1.0", "1.0")
    assert [("before", "complete", 3), ("after", "equal", 3)] == ends(world)


def test_ends_as_equal_survive_a_restart() -> None:
    world = world_of_groups(drop_equal="reward")
    rewarded(world, "agree", "1.0", "1.0", "1.0")
    rewarded(world, "open", "1.0", "1.0")
    taken, entries = world.buffers.snapshot(), world.buffers.take_entries()
    for base, replayed in (((), entries), (taken, [])):
        world.buffers = BufferSet.restore(base, random.Random(1), is_recording=True)
        world.buffers.replay(replayed)
        assert taken == world.buffers.snapshot()
        assert ADMITTED is world.append("open", 2, numbers='{"reward":1.0}')
        assert [("agree", "equal", 3), ("open", "equal", 3)] == ends(world)


@pytest.mark.parametrize("option", ["drop_equal", "tag"])
@pytest.mark.parametrize(
    ("name", "limits", "text"),
    [
        ("reward", {"assembly": AssemblyPolicy.CONSECUTIVE}, "groups alone"),
        ("r" * 65, {}, "at most 64 bytes"),
    ],
)
def test_a_name_of_a_number_that_cannot_be_is_refused(
    option: str, name: str, limits: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{option}.*{text}"):
        world_of_groups(**{option: name}, **limits)
