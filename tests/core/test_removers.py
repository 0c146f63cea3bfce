"""B19: which chunks leave when there is no room, and draws with replacement."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig, FullPolicy, SampleToInsertRatio
from breadbox_server.core.model.entries import ReplayError
from breadbox_server.core.model.errors import FetchExceedsCapacityError, InvalidArgumentError
from breadbox_server.core.model.events import ChunksEvicted, FetchGranted
from breadbox_server.core.model.ids import ChunkId
from breadbox_server.core.model.inputs import AdmissionOutcome
from breadbox_server.core.samplers import SAMPLERS, UniformSampler, make_remover
from breadbox_server.core.state.chunks import Chunk, ChunkTable
from core.test_priorities import chi_square, chi_square_max
from core.world import World, indices
from support import growth
from support.metadata import make_fragment

PRIORITIES = (3.0, 1.0, 2.0, 1.0, 5.0)


def held_after(remover: str, priorities: tuple[float, ...] = PRIORITIES) -> list[int]:
    world = World(remover=remover, capacity_chunks=3)
    for index, priority in enumerate(priorities):
        assert AdmissionOutcome.ADMITTED is world.append("w0", index, priority=priority)
    return [index for _, index, _ in world.held()]


@pytest.mark.parametrize(
    ("remover", "expected"),
    [
        ("oldest_first", [2, 3, 4]),
        ("newest_first", [0, 1, 2]),
        ("lowest_priority", [0, 2, 4]),
        ("highest_priority", [1, 2, 3]),
    ],
)
def test_who_leaves_at_capacity(remover: str, expected: list[int]) -> None:
    assert expected == held_after(remover)


def test_the_freshest_leave_first_where_so_configured() -> None:
    world = World(remover="freshest_first", capacity_chunks=2, staleness_max=9)
    world.publish(3)
    for index, version in enumerate((2, 3, 1)):
        world.append("w0", index, version=version)
    assert [0, 2] == [index for _, index, _ in world.held()]


def test_a_new_chunk_may_itself_be_the_one_that_leaves() -> None:
    """It was admitted, counts as closed and evicted, and its payload goes."""
    world = World(remover="lowest_priority", capacity_chunks=2)
    world.append("w0", 0, priority=2.0)
    world.append("w0", 1, priority=3.0)
    world.buffers.take_events()
    assert AdmissionOutcome.ADMITTED is world.append("w0", 2, priority=1.0)
    [evicted] = world.events(ChunksEvicted)
    assert (0,) == evicted.use_counts
    assert [0, 1] == [index for _, index, _ in world.held()]
    assert (3, 1) == (world.count("chunks_closed"), world.count("chunks_evicted_capacity"))


def test_an_update_changes_who_leaves() -> None:
    world = World(remover="lowest_priority", capacity_chunks=3)
    for index, priority in enumerate((1.0, 2.0, 3.0)):
        world.append("w0", index, priority=priority)
    world.update_priorities({0: 9.0})
    world.append("w0", 3, priority=4.0)
    assert [0, 2, 3] == [index for _, index, _ in world.held()]


def test_chunks_of_equal_priority_leave_as_they_came() -> None:
    assert [2, 3, 4] == held_after("lowest_priority", (1.0,) * 5)


@growth.marked
@pytest.mark.parametrize("remover", ["oldest_first", "newest_first", "lowest_priority"])
def test_room_for_bytes_is_found_without_a_look_at_what_is_leased(remover: str) -> None:
    """Also where all that would leave first is leased."""

    def among(count: int) -> Callable[[], object]:
        table = ChunkTable(UniformSampler(), make_remover(remover))
        rng = random.Random(0)
        chunks = [Chunk(ChunkId(at), (make_fragment("w", at),)) for at in range(count)]
        for chunk in chunks:
            table.add(chunk)
        if remover == "newest_first":
            chunks.reverse()
        *leased, last = chunks
        for chunk in leased:
            table.add_leases([chunk])

        def look() -> None:
            for priority in range(256):
                assert last is table.first_unleased_to_leave(rng)
                table.set_priority(last, float(priority))

        return look

    growth.check(among, 8_192, growth_max=2.5)


@pytest.mark.parametrize("remover", SAMPLERS)
def test_bytes_never_evict_what_is_leased(remover: str) -> None:
    world = World(remover=remover, capacity_bytes=40, uses_max=2, sampler="oldest_first")
    for index in range(4):
        world.append("w0", index, priority=float(index))
    leased = indices(world.granted(3))
    assert AdmissionOutcome.ADMITTED is world.append("w0", 4, priority=9.0)
    assert AdmissionOutcome.ADMITTED is world.append("w0", 5, priority=0.0)
    assert [*leased, 5] == [index for _, index, _ in world.held()]
    world.buffers.check_invariants()


def test_bytes_evict_in_the_order_of_the_remover() -> None:
    world = World(remover="lowest_priority", capacity_bytes=40)
    for index, priority in enumerate((4.0, 1.0, 3.0, 2.0)):
        world.append("w0", index, priority=priority)
    world.append("w0", 4, size_bytes=20, priority=0.0)
    assert [0, 2, 4] == [index for _, index, _ in world.held()], "made room before it came"


@pytest.mark.parametrize(
    ("remover", "shares"),
    [("uniform", (0.25, 0.25, 0.25, 0.25)), ("prioritised", (0.1, 0.2, 0.3, 0.4))],
)
def test_what_leaves_by_chance_leaves_as_often_as_it_should(
    remover: str, shares: tuple[float, ...]
) -> None:
    counts: Counter[int] = Counter()
    for seed in range(1500):
        world = World(seed=seed, remover=remover, capacity_chunks=3)
        for index in range(4):
            world.append("w0", index, priority=index + 1.0)
        (gone,) = {0, 1, 2, 3} - {index for _, index, _ in world.held()}
        counts[gone] += 1
    assert chi_square(counts, dict(enumerate(shares))) < chi_square_max(3)


@pytest.mark.parametrize("remover", SAMPLERS)
def test_who_leaves_is_the_same_in_a_replay_and_after_a_restart(remover: str) -> None:
    rng = random.Random(4)
    world = World(
        remover=remover,
        sampler="prioritised",
        capacity_chunks=20,
        capacity_bytes=230,
        uses_max=3,
    )
    base = world.buffers.snapshot()
    world.buffers.take_entries()
    kept = []
    for index in range(300):
        world.append("w0", index, size_bytes=rng.randrange(5, 20), priority=rng.random())
        world.update_priorities({rng.randrange(index + 1): rng.random()})
        if index % 4 == 3:
            kept.append(world.granted(2).lease_id)
        if len(kept) > 3:
            world.release(kept.pop(0))
        if index == 150:
            base = world.buffers.snapshot()
            world.buffers.take_entries()
    twin = BufferSet.restore(base, random.Random(9))
    twin.replay(world.buffers.take_entries())
    twin.check_invariants()
    assert world.buffers.snapshot() == twin.snapshot()
    assert world.count("chunks_evicted_capacity") > 150


def test_a_remover_can_be_changed_while_chunks_are_held() -> None:
    world = World(capacity_chunks=4)
    for index, priority in enumerate((3.0, 1.0, 2.0, 4.0)):
        world.append("w0", index, priority=priority)
    world.update(capacity_chunks=2, remover="lowest_priority")
    assert [0, 3] == [index for _, index, _ in world.held()]
    world.update(capacity_chunks=1)
    assert [3] == [index for _, index, _ in world.held()]


def test_an_ended_session_leaves_nothing_in_the_remover() -> None:
    world = World(capacity_chunks=2, remover="lowest_priority")
    world.fill(2)
    world.end()
    world.start("s1")
    world.buffers.check_invariants()
    for index, priority in enumerate((1.0, 2.0, 3.0)):
        world.append("w0", index, priority=priority, session_id="s1")
    assert [1, 2] == [index for _, index, _ in world.held()]


def test_an_unknown_remover_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(InvalidArgumentError, match="remover must be one of uniform, oldest_first"):
        World(remover="worst")
    world = World()
    with pytest.raises(InvalidArgumentError, match="remover must be one of uniform, oldest_first"):
        world.update(remover="worst")


def test_a_snapshot_whose_order_of_leaving_is_of_others_is_refused() -> None:
    world = World(remover="lowest_priority")
    world.fill(2)
    [taken] = world.buffers.snapshot()
    with pytest.raises(ReplayError, match="the order in which chunks leave"):
        BufferSet.restore([replace(taken, removed_in=taken.removed_in[:1])], random.Random(0))


@pytest.mark.parametrize("full_policy", FullPolicy)
def test_a_remover_is_asked_only_where_the_policy_lets_chunks_leave(
    full_policy: FullPolicy,
) -> None:
    world = World(remover="newest_first", capacity_chunks=1, full_policy=full_policy)
    world.append("w0", 0)
    evicts = full_policy is FullPolicy.EVICT
    expected = AdmissionOutcome.ADMITTED if evicts else AdmissionOutcome.BUFFER_FULL
    assert expected is world.append("w0", 1)
    assert [0] == [index for _, index, _ in world.held()]


# Draws with replacement --------------------------------------------------------------------------


def test_a_draw_with_replacement_may_take_a_chunk_several_times() -> None:
    world = World(with_replacement=True, uses_max=100)
    world.fill(2)
    grant = world.granted(2)
    pairs: Counter[int] = Counter()
    for _ in range(2000):
        world.give_back(grant.lease_id)
        grant = world.granted(2)
        first, second = (each.chunk_id for each in grant.fragments)
        pairs[2 * first + second] += 1
    assert chi_square(pairs, dict.fromkeys(range(4), 0.25)) < chi_square_max(3)


def test_each_time_is_a_use_and_a_chunk_leaves_with_its_last() -> None:
    world = World(with_replacement=True, uses_max=3, sampler="oldest_first")
    world.fill(2)
    grant = world.granted(2)
    assert [(0, 1), (0, 2)] == [(each.chunk_id, each.use_count) for each in grant.fragments]
    later = world.granted(2)
    assert [(0, 3), (1, 1)] == [(each.chunk_id, each.use_count) for each in later.fragments]
    assert [("w0", 1, 1)] == world.held()
    world.give_back(grant.lease_id)
    assert [("w0", 0, 1), ("w0", 1, 1)] == world.held()
    world.release(later.lease_id)
    world.buffers.check_invariants()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_more_can_be_drawn_than_are_held_but_not_more_than_there_are_uses(sampler: str) -> None:
    world = World(sampler=sampler, with_replacement=True, uses_max=3, capacity_chunks=8)
    world.append("w0", 0, priority=0.0)
    world.append("w0", 1, priority=1.0)
    waiting = world.fetch(7)
    assert [] == world.events(FetchGranted)
    assert "2 chunks are held and 7 are needed" == world.seen().waiting_reason
    world.cancel(waiting)
    uses = Counter(each.chunk_id for each in world.granted(6).fragments)
    assert {0: 3, 1: 3} == uses
    assert [] == world.held()
    world.buffers.check_invariants()


def test_a_priority_of_zero_waits_for_the_uses_of_all_others() -> None:
    world = World(sampler="prioritised", with_replacement=True, uses_max=2)
    for index, priority in enumerate((0.0, 1.0, 2.0)):
        world.append("w0", index, priority=priority)
    drawn = [each.chunk_id for each in world.granted(5).fragments]
    assert [1, 1, 2, 2] == sorted(drawn[:4])
    assert 0 == drawn[4]


def test_bytes_that_one_chunk_fills_refuse_only_what_uses_cannot_meet() -> None:
    world = World(with_replacement=True, uses_max=4, capacity_bytes=10)
    world.append("w0", 0)
    assert 4 == len(world.granted(4).fragments)
    world = World(with_replacement=True, uses_max=4, capacity_bytes=10)
    world.append("w0", 0)
    with pytest.raises(FetchExceedsCapacityError):
        world.fetch(5)


def test_ranks_share_a_draw_with_replacement() -> None:
    world = World(with_replacement=True, uses_max=9, sampler="newest_first")
    world.fill(1)
    world.fetch(4, request_id="both", world_size=2)
    [first] = world.events(FetchGranted)
    world.fetch(4, request_id="both", world_size=2, rank=1)
    [second] = world.events(FetchGranted)
    assert [1, 2, 3, 4] == [e.use_count for e in (*first.fragments, *second.fragments)]
    world.give_back(first.lease_id)
    assert [("w0", 0, 2)] == world.held()


# What leaves without a use -----------------------------------------------------------------------


def ratio_world(**limits: Any) -> World:
    limiter = SampleToInsertRatio(ratio=1.0, error_chunks=4.0)
    return World(limiter=limiter, **limits)


def test_chunks_that_were_never_used_are_credited() -> None:
    """Workers may replace what went: the band is as wide as it was."""
    world = ratio_world(staleness_max=0)
    for version in range(1, 6):
        world.publish(version)
        for index in range(4):
            full = world.append("w0", 4 * version + index, version=version)
            assert AdmissionOutcome.ADMITTED is full
        assert AdmissionOutcome.BUFFER_FULL is world.append("w0", 4 * version + 4, version=version)


def test_deleted_chunks_are_credited_unless_they_were_used() -> None:
    world = ratio_world(uses_max=9, sampler="oldest_first")
    world.fill(4)
    world.release(world.granted(1).lease_id)
    assert AdmissionOutcome.ADMITTED is world.append("w0", 4)
    assert AdmissionOutcome.BUFFER_FULL is world.append("w0", 5)
    world.update_priorities({}, (0,))
    assert AdmissionOutcome.BUFFER_FULL is world.append("w0", 5)
    world.update_priorities({}, (1, 2))
    assert AdmissionOutcome.ADMITTED is world.append("w0", 5)
    assert AdmissionOutcome.ADMITTED is world.append("w0", 6)
    assert AdmissionOutcome.BUFFER_FULL is world.append("w0", 7)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_chunk_whose_only_use_was_given_back_after_it_left_is_credited(is_over: bool) -> None:
    world = ratio_world()
    world.fill(4)
    lease = world.granted(1)
    world.publish(9)
    if is_over:
        world.end()
        world.start("s1")
    world.give_back(lease.lease_id)
    session = "s1" if is_over else "s0"
    version = 0 if is_over else 9
    for index in range(4, 8):
        outcome = world.append("w0", index, version=version, session_id=session)
        assert AdmissionOutcome.ADMITTED is outcome
    outcome = world.append("w0", 8, version=version, session_id=session)
    assert AdmissionOutcome.BUFFER_FULL is outcome


def test_the_default_is_to_let_the_oldest_leave_and_to_draw_each_once() -> None:
    assert ("oldest_first", False) == (BufferConfig().remover, BufferConfig().with_replacement)
