"""What a server of Reverb's does that others can see, of the kind that is decided here.

The numbers are those of docs/studies/reverb.md. A table is a buffer there, an item a chunk.
"""

import random
from collections import Counter
from typing import Any

import pytest

from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import (
    BufferConfig,
    FullPolicy,
    MinimumChunks,
    SampleToInsertRatio,
)
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.events import FetchGranted, WaitElapsed
from breadbox_server.core.model.inputs import AdmissionOutcome, Appended, Offered
from core.test_priorities import chi_square, chi_square_max
from core.world import World, indices
from support.metadata import make_fragment

ADMITTED, FULL = AdmissionOutcome.ADMITTED, AdmissionOutcome.BUFFER_FULL


def banded(
    ratio: float, error_chunks: float, minimum: int = 1, lead: float = 0.0, **limits: Any
) -> World:
    limiter = SampleToInsertRatio(ratio, error_chunks, minimum, lead)
    return World(limiter=limiter, uses_max=1000, with_replacement=True, **limits)


def may_fetch(world: World, count: int = 1) -> bool:
    """Fetch without waiting; whether it was granted."""
    world.buffers.take_events()
    world.fetch(count, max_wait_s=0.0)
    return any(isinstance(event, FetchGranted) for event in world.buffers.take_events())


def test_reverb_2_a_sample_is_refused_below_the_minimum_and_granted_at_it() -> None:
    world = World(limiter=MinimumChunks(4), uses_max=9)
    world.fill(3)
    assert not may_fetch(world)
    world.append("w0", 3)
    assert may_fetch(world)


def test_reverb_3_inserts_up_to_the_minimum_are_free_whatever_the_band() -> None:
    world = banded(1.5, 1.5, minimum=3)
    assert [ADMITTED] * 3 == [world.append("w0", index) for index in range(3)]
    assert FULL is world.append("w0", 3)


def test_reverb_4_samples_within_the_band_pass_and_the_next_waits() -> None:
    world = banded(1.5, 3.0)
    world.fill(2)
    assert [True] * 6 + [False] == [may_fetch(world) for _ in range(7)]


@pytest.mark.parametrize(
    ("ratio", "minimum", "error", "inserts", "samples"),
    [(1.0, 4, 4.0, 8, 4 + 4), (4.0, 2, 8.0, 4, 2 * 4 + 8), (2.0, 40, 8.0, 44, 4 * 2 + 8)],
)
def test_reverb_4_a_band_around_the_minimum_is_as_wide_on_either_side_as_it_says(
    ratio: float, minimum: int, error: float, inserts: int, samples: int
) -> None:
    """As `SampleToInsertRatio(ratio, minimum, error)` with one number for the buffer."""
    world = banded(ratio, error, minimum, lead=ratio * minimum)
    world.fill(minimum)
    assert [True] * int(error) + [False] == [may_fetch(world) for _ in range(int(error) + 1)]
    world = banded(ratio, error, minimum, lead=ratio * minimum)
    assert [ADMITTED] * inserts == [world.append("w0", index) for index in range(inserts)]
    assert FULL is world.append("w0", inserts)
    assert [True] * samples + [False] == [may_fetch(world) for _ in range(samples + 1)]
    assert ADMITTED is world.append("w0", inserts)


def test_reverb_4_and_5_the_bounds_of_a_band_need_not_be_alike() -> None:
    """SPI 1.5, minimum 2, from -1 to 3, as Reverb's own test has it."""
    world = banded(1.5, 2.0, minimum=2, lead=1.0)
    world.fill(2)
    assert FULL is world.append("w0", 2)
    assert may_fetch(world)
    assert FULL is world.append("w0", 2)
    assert may_fetch(world)
    assert ADMITTED is world.append("w0", 2)
    assert [True] * 3 + [False] == [may_fetch(world) for _ in range(4)]


def test_reverb_5_an_insert_waits_for_as_many_samples_as_the_band_says() -> None:
    world = banded(1.5, 3.0, minimum=2)
    world.fill(2)
    assert FULL is world.append("w0", 2)
    assert may_fetch(world)
    assert FULL is world.append("w0", 2)
    assert may_fetch(world)
    assert ADMITTED is world.append("w0", 2)


def test_reverb_6_and_19_what_would_wait_can_be_asked_without_side_effects() -> None:
    world = banded(1.0, 1.0)
    world.append("w0", 0)
    before = world.held()
    assert "" == world.seen().waiting_reason
    foreseen = world.reserve(make_fragment("w0", 1))
    assert (Offered(None, [Appended(FULL)]), before) == (foreseen, world.held())
    assert not may_fetch(world, 3)
    assert may_fetch(world, 2)
    assert world.seen().waiting_reason.startswith("2 chunks were delivered and 1 inserted")


def test_reverb_7_a_queue_of_ten_takes_ten_and_gives_them_in_order() -> None:
    world = World(
        capacity_chunks=10, uses_max=1, full_policy=FullPolicy.BLOCK, sampler="oldest_first"
    )
    world.fill(10)
    assert FULL is world.append("w0", 10)
    first = world.granted(1)
    served = indices(first)
    # Reverb's sample is consumed as it is drawn; here its place is free once its lease has ended.
    assert FULL is world.append("w0", 10)
    world.release(first.lease_id)
    assert ADMITTED is world.append("w0", 10)
    for _ in range(10):
        sample = world.granted(1)
        served += indices(sample)
        world.release(sample.lease_id)
    assert list(range(11)) == served
    world.fetch(1)
    assert [] == world.events(FetchGranted)
    world.append("w0", 11)
    [granted] = world.events(FetchGranted)
    assert [11] == indices(granted)


@pytest.mark.parametrize("by", ["delete", "uses"])
def test_reverb_8_and_9_chunks_that_go_below_the_minimum_stop_samples(by: str) -> None:
    world = World(limiter=MinimumChunks(2), uses_max=2, sampler="oldest_first")
    world.fill(2)
    assert may_fetch(world)
    if by == "delete":
        world.update_priorities({}, (0,))
    else:
        assert may_fetch(world)
    assert not may_fetch(world)
    world.append("w0", 2)
    assert may_fetch(world)


def test_reverb_10_chunks_that_go_below_the_minimum_let_inserts_pass_again() -> None:
    world = banded(1.0, 2.0, minimum=2)
    world.fill(2)
    assert may_fetch(world)
    world.fill(1, worker_id="w1")
    assert FULL is world.append("w0", 2)
    world.update_priorities({}, (0, 1))
    assert ADMITTED is world.append("w0", 2)


def test_reverb_12_a_new_session_empties_the_buffer_and_its_limiter() -> None:
    world = banded(1.0, 2.0)
    world.fill(2)
    assert FULL is world.append("w0", 2)
    old = {each.chunk_id for each in world.granted(1).fragments}
    world.start("s1")
    assert 0 == world.seen().chunk_count
    assert [ADMITTED] * 2 == [world.append("w0", index, session_id="s1") for index in range(2)]
    assert old.isdisjoint(each.chunk_id for each in world.granted(2).fragments)


def test_reverb_13_and_41_and_51_the_same_item_again_is_one_item_and_keeps_its_priority() -> None:
    world = World()
    outcomes = Counter(world.append("w0", 0, priority=float(number)) for number in range(10))
    assert {ADMITTED: 1, AdmissionOutcome.DUPLICATE: 9} == outcomes
    world.append("w1", 0)
    world.update_priorities({0: 7.0})
    world.append("w0", 0, priority=1.0)
    drawn = {each.chunk_id: each.priority for each in world.granted(2).fragments}
    assert {0: 7.0, 1: 1.0} == drawn


def test_reverb_16_no_patience_gives_what_is_there_and_waits_for_nothing() -> None:
    world = World()
    world.fetch(1, max_wait_s=0.0)
    [elapsed] = world.events(WaitElapsed)
    assert 0.0 == elapsed.wait_s
    world.append("w0", 0)
    assert may_fetch(world)


@pytest.mark.parametrize(
    "limits",
    [
        {"limiter": MinimumChunks(0)},
        {"limiter": SampleToInsertRatio(0.0, 5.0)},
        {"limiter": SampleToInsertRatio(-1.0, 5.0)},
        {"limiter": SampleToInsertRatio(1.0, 0.5)},
        {"limiter": SampleToInsertRatio(3.0, 2.0)},
        {"limiter": SampleToInsertRatio(1.0, 5.0, 0)},
        {"limiter": SampleToInsertRatio(1.0, 5.0, 2, 7.1)},
        {"capacity_chunks": 0},
    ],
)
def test_reverb_20_and_72_limits_that_would_lock_everybody_out_are_refused(limits: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        BufferConfig(**limits)


@pytest.mark.parametrize(("sampler", "head"), [("oldest_first", 0), ("newest_first", 2)])
def test_reverb_21_without_removal_the_same_head_is_given_every_time(
    sampler: str, head: int
) -> None:
    world = World(sampler=sampler, uses_max=100)
    world.fill(3)
    assert [[head]] * 5 == [indices(world.granted(1)) for _ in range(5)]


def test_reverb_22_uniform_draws_have_the_frequencies_that_are_told() -> None:
    world = World(uses_max=2**30)
    world.fill(50)
    counts: Counter[int] = Counter()
    for _ in range(2500):
        granted = world.granted(1)
        world.release(granted.lease_id)
        [drawn] = granted.fragments
        counts[drawn.chunk_id] += 1
        assert 1 / 50 == drawn.probability
    assert chi_square(counts, dict.fromkeys(range(50), 1 / 50)) < chi_square_max(49)


def test_reverb_24_a_priority_of_zero_is_never_drawn_beside_others() -> None:
    world = World(sampler="prioritised", uses_max=2**30)
    for index, priority in enumerate((1.0, 0.1, 0.0)):
        world.append("w0", index, priority=priority)
    counts: Counter[int] = Counter()
    for _ in range(3000):
        granted = world.granted(1)
        world.release(granted.lease_id)
        counts[granted.fragments[0].chunk_id] += 1
    assert 0 == counts[2]
    assert chi_square(counts, {0: 1 / 1.1, 1: 0.1 / 1.1}) < chi_square_max(1)


def test_reverb_31_draws_follow_the_seed() -> None:
    def drawn(seed: int) -> list[int]:
        world = World(seed=seed, sampler="prioritised", uses_max=2**30)
        world.fill(50)
        return [indices(world.granted(1))[0] for _ in range(30)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_reverb_32_the_population_is_the_size_at_the_draw() -> None:
    world = World(uses_max=100)
    told = []
    for index in range(10):
        world.append("w0", index)
        told += [each.population for each in world.granted(1).fragments]
    assert list(range(1, 11)) == told


def test_reverb_33_the_priority_told_is_the_one_after_an_update() -> None:
    world = World(uses_max=100)
    world.append("w0", 0, priority=3.0)
    assert [3.0] == [each.priority for each in world.granted(1).fragments]
    world.update_priorities({0: 0.5})
    assert [0.5] == [each.priority for each in world.granted(1).fragments]


def test_reverb_38_and_39_uses_are_counted_up_and_the_last_one_removes() -> None:
    world = World(uses_max=2)
    world.append("w0", 0)
    assert [1] == [each.use_count for each in world.granted(1).fragments]
    assert [2] == [each.use_count for each in world.granted(1).fragments]
    assert 0 == world.seen().chunk_count
    assert not may_fetch(world)


def test_reverb_40_overflow_leaves_exactly_the_last_ones() -> None:
    world = World(capacity_chunks=10)
    world.fill(15)
    assert list(range(5, 15)) == [index for _, index, _ in world.held()]
    crowded = World(capacity_chunks=1000)
    for worker in range(64):
        crowded.fill(20, worker_id=f"w{worker}")
    assert 1000 == crowded.seen().chunk_count


def test_reverb_46_counters_after_two_inserts_and_a_sample_of_one_use() -> None:
    world = World(uses_max=1)
    world.fill(2)
    world.granted(1)
    seen = world.seen()
    assert (1, 2, 1) == (seen.chunk_count, seen.counters["chunks_closed"], seen.counters["uses"])


def test_reverb_47_what_is_leased_and_what_was_consumed_are_counted_apart() -> None:
    world = World(uses_max=9)
    world.fill(4)
    leases = [world.granted(1).lease_id for _ in range(3)]
    world.release(leases[0])
    seen = world.seen()
    expected = {"uses": 3, "leases_ended_consumed": 1}
    assert expected == {name: seen.counters[name] for name in expected}
    assert 2 == seen.lease_count


def test_reverb_48_so_many_leave_a_queue_and_the_next_is_the_one_behind_them() -> None:
    world = World(uses_max=1, sampler="oldest_first")
    world.fill(10)
    assert [0, 1, 2, 3] == indices(world.granted(4))
    assert 6 == world.seen().chunk_count
    assert [4] == indices(world.granted(1))


def test_reverb_68_a_restart_keeps_order_priorities_uses_and_the_limiter() -> None:
    """And ties of priorities, and the limits that were in force, which checkpoints do not."""
    limiter = SampleToInsertRatio(1.0, 3.0)
    world = World(limiter=limiter, uses_max=5, sampler="highest_priority")
    for index, priority in enumerate((1.0, 3.0, 2.0)):
        world.append("w0", index, priority=priority)
    world.update_priorities({0: 3.0})
    world.release(world.granted(1).lease_id)
    twin = World(starts=False)
    twin.buffers = BufferSet.restore(world.buffers.snapshot(), random.Random(5))
    assert world.held() == twin.held()
    for number in range(3):
        first = world.granted(1, request_id=f"then {number}")
        assert first.fragments == twin.granted(1, request_id=f"then {number}").fragments
    assert world.append("w0", 3) is twin.append("w0", 3)
    assert world.seen().waiting_reason == twin.seen().waiting_reason
