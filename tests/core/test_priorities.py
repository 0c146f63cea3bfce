"""B18: priorities of chunks, how samplers look at them, and how they are changed."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.events import ChunksEvicted, EvictionReason, PayloadsDisposable
from breadbox_server.core.model.inputs import GrantedFragment, PrioritiesUpdated, ReleaseMode
from breadbox_server.core.model.validation import check_fragment
from breadbox_server.core.samplers import SAMPLERS, make_sampler
from core.test_parts import Item
from core.world import World
from support.metadata import make_fragment
from support.snapshots import held_chunks

DRAWS = 3_000


def chi_square_max(freedom: int) -> float:
    """What chance exceeds about once in a million times (Wilson and Hilferty)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 4.8 * math.sqrt(2 / (9 * freedom))) ** 3)


def chi_square(counts: Mapping[Any, int], probabilities: dict[int, float]) -> float:
    total = sum(counts.values())
    return sum(
        (counts[key] - total * share) ** 2 / (total * share) for key, share in probabilities.items()
    )


def prioritised(priorities: dict[int, float], exponent: float = 1.0) -> World:
    """A buffer that nothing leaves, with a chunk of each priority."""
    world = World(sampler="prioritised", priority_exponent=exponent, uses_max=2**30)
    for index, priority in priorities.items():
        world.append("w0", index, priority=priority)
    return world


def draws(world: World, count: int, chunk_count: int = 1) -> Iterator[tuple[GrantedFragment, ...]]:
    for _ in range(count):
        granted = world.granted(chunk_count)
        world.release(granted.lease_id)
        world.buffers.take_entries()
        yield granted.fragments


@pytest.mark.parametrize("exponent", [1.0, 0.5, 0.0])
def test_chunks_are_drawn_in_proportion_to_their_priorities(exponent: float) -> None:
    priorities = {number: 0.1 * number for number in range(100)}
    world = prioritised(priorities, exponent)
    weights = {number: p**exponent for number, p in priorities.items() if p > 0}
    shares = {number: weight / sum(weights.values()) for number, weight in weights.items()}
    counts: Counter[int] = Counter()
    for (drawn,) in draws(world, DRAWS):
        counts[drawn.chunk_id] += 1
        assert drawn.probability == pytest.approx(shares[drawn.chunk_id])
        assert (100, priorities[drawn.chunk_id]) == (drawn.population, drawn.priority)
    assert 0 not in counts
    assert chi_square(counts, shares) < chi_square_max(len(shares) - 1)


def test_pairs_are_drawn_one_after_the_other_without_replacement() -> None:
    weights = {0: 1.0, 1: 2.0, 2: 5.0}
    world = prioritised(weights)
    expected = {
        3 * first + second: weights[first] / 8 * weights[second] / (8 - weights[first])
        for first in weights
        for second in weights
        if first != second
    }
    counts: Counter[int] = Counter()
    for first, second in draws(world, DRAWS, 2):
        counts[3 * first.chunk_id + second.chunk_id] += 1
    assert chi_square(counts, expected) < chi_square_max(5)


def test_a_priority_of_zero_is_drawn_only_when_nothing_else_is_left() -> None:
    world = prioritised({0: 0.0, 1: 1.0, 2: 0.0, 3: 0.5})
    assert {1, 3} == {each.chunk_id for (each,) in draws(world, 200)}
    for drawn in draws(world, 50, 3):
        assert {1, 3} == {each.chunk_id for each in drawn[:2]}
        assert (0.25, 0.0) == (drawn[2].probability, drawn[2].priority)
    last = Counter(drawn[2].chunk_id for drawn in draws(world, 2000, 3))
    assert chi_square(last, {0: 0.5, 2: 0.5}) < chi_square_max(1)


def test_priorities_that_are_all_zero_are_drawn_uniformly() -> None:
    world = prioritised(dict.fromkeys(range(10), 0.0))
    counts: Counter[int] = Counter()
    for drawn in draws(world, DRAWS // 4, 2):
        counts.update(each.chunk_id for each in drawn)
        assert [0.1, 0.1] == [each.probability for each in drawn]
    assert chi_square(counts, dict.fromkeys(range(10), 0.1)) < chi_square_max(9)


def test_a_chunk_has_the_largest_priority_of_its_fragments() -> None:
    world = World(fragments_per_chunk=3, sampler="highest_priority")
    for index, priority in enumerate((0.5, 4.0, 1.0)):
        world.append("w0", index, priority=priority)
    drawn = world.granted(3).fragments
    assert [4.0] * 3 == [each.priority for each in drawn]
    assert [0.5, 4.0, 1.0] == [each.fragment.priority for each in drawn]


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        ("highest_priority", [2, 1, 3, 0]),
        ("lowest_priority", [0, 1, 3, 2]),
        ("newest_first", [3, 2, 1, 0]),
    ],
)
def test_order_of_a_draw(sampler: str, expected: list[int]) -> None:
    world = World(sampler=sampler)
    for index, priority in enumerate((0.0, 1.0, 7.0, 1.0)):
        world.append("w0", index, priority=priority)
    drawn = world.granted(4).fragments
    assert expected == [each.chunk_id for each in drawn]
    assert {(1.0, 4)} == {(each.probability, each.population) for each in drawn}


def test_equal_priorities_go_by_when_they_were_given_or_set() -> None:
    """Setting what is there already counts, too, and a restart changes nothing of it."""
    world = World(sampler="highest_priority")
    world.fill(3)
    world.update_priorities({0: 1.0})
    world.buffers = restored(world)
    assert [1, 2, 0] == [each.chunk_id for each in world.granted(3).fragments]


def test_an_update_changes_how_often_a_chunk_is_drawn() -> None:
    world = prioritised({0: 1.0, 1: 1.0, 2: 1.0})
    assert PrioritiesUpdated(1, 0, 0) == world.update_priorities({1: 0.5})
    counts = Counter(drawn.chunk_id for (drawn,) in draws(world, DRAWS))
    assert chi_square(counts, {0: 0.4, 1: 0.2, 2: 0.4}) < chi_square_max(2)


def test_ids_of_chunks_that_are_not_held_are_counted_and_change_nothing() -> None:
    world = World(capacity_chunks=2, sampler="highest_priority")
    world.fill(3)
    world.granted(1)
    world.buffers.take_entries()
    before = world.buffers.snapshot()
    late = {0: 9.0, 1: 9.0, 7: 9.0, -1: 9.0}
    assert PrioritiesUpdated(0, 0, 6) == world.update_priorities(late, delete=(0, 77))
    assert before == world.buffers.snapshot()
    assert [] == world.buffers.take_entries()


def test_only_what_was_held_is_written_down() -> None:
    world = World(sampler="highest_priority")
    world.fill(2)
    world.buffers.take_entries()
    assert PrioritiesUpdated(1, 1, 2) == world.update_priorities({1: 3.0, 0: 2.0}, (0, 9))
    [(_, entry)] = world.buffers.take_entries()
    assert (((1, 3.0),), (0,)) == (entry.priorities, entry.deleted)


@pytest.mark.parametrize("priority", [-1.0, -1e-300, math.nan, math.inf, -math.inf, 2e30, "1"])
def test_a_priority_that_is_none_changes_nothing_and_harms_nobody(priority: float) -> None:
    world = prioritised({0: 1.0, 1: 2.0})
    before = world.buffers.snapshot()
    with pytest.raises(InvalidArgumentError, match="priority must be a number from 0 to 1e"):
        check_fragment(make_fragment("w0", 2, priority=priority))
    with pytest.raises(InvalidArgumentError, match=r"updates\[1\].priority must be a number"):
        world.update_priorities({0: 5.0, 1: priority}, (0,))
    assert before == world.buffers.snapshot()
    assert world.append("w0", 2).value == "admitted"
    assert 3 == len(world.granted(3).fragments)


@pytest.mark.parametrize("exponent", [-0.1, 8.5, math.nan, math.inf, "1"])
def test_an_exponent_out_of_its_range_is_refused(exponent: float) -> None:
    with pytest.raises(InvalidArgumentError, match="priority_exponent must be from 0 to 8"):
        BufferConfig(priority_exponent=exponent)


def test_the_largest_priorities_to_the_largest_power_are_still_numbers() -> None:
    world = prioritised({0: 1e30, 1: 1e30, 2: 1.0}, 8.0)
    assert [0.5, 0.5] == [each.probability for each in world.granted(2).fragments]


def test_an_exponent_can_be_changed_while_chunks_are_held() -> None:
    world = prioritised({0: 1.0, 1: 3.0})
    world.update(sampler="prioritised", priority_exponent=2.0, uses_max=2**30)
    by_chunk = {each.chunk_id: each.probability for each in world.granted(2).fragments}
    assert {0: 0.1, 1: 0.9} == by_chunk


def test_deleted_chunks_go_and_what_is_leased_stays_readable() -> None:
    world = World(uses_max=3, sampler="oldest_first")
    world.fill(3)
    lease = world.granted(1)
    world.buffers.take_events()
    assert PrioritiesUpdated(0, 2, 1) == world.update_priorities({}, (0, 1, 1))
    events = world.buffers.take_events()
    [evicted] = [event for event in events if isinstance(event, ChunksEvicted)]
    assert (EvictionReason.DELETED, (1, 0)) == (evicted.reason, evicted.use_counts)
    [disposable] = [event for event in events if isinstance(event, PayloadsDisposable)]
    assert 1 == len(disposable.payloads)
    assert [("w0", 2, 0)] == world.held()
    world.release(lease.lease_id, ReleaseMode.RETURNED)
    assert [("w0", 2, 0)] == world.held()
    assert 2 == world.count("chunks_evicted_deleted")


def test_priority_survives_a_lease_that_gives_back_the_last_use() -> None:
    world = prioritised({0: 4.0})
    world.update(sampler="prioritised", uses_max=1)
    lease = world.granted(1)
    assert PrioritiesUpdated(0, 0, 1) == world.update_priorities({0: 9.0}), "it is used up"
    world.give_back(lease.lease_id)
    assert 4.0 == world.granted(1).fragments[0].priority


def restored(world: World) -> BufferSet:
    return BufferSet.restore(world.buffers.snapshot(), random.Random(3), is_recording=True)


def held_by(buffers: BufferSet) -> object:
    [taken] = buffers.snapshot()
    return taken.chunks


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_after_a_restart_are_those_that_there_would_have_been(name: str) -> None:
    """Whatever came before: sums are made of what is held, not of what was."""
    rng = random.Random(1)
    world = World(sampler=name, capacity_chunks=150, uses_max=4, priority_exponent=0.7)
    for index in range(400):
        world.append("w0", index, priority=rng.random() * 10 ** rng.randrange(-9, 9))
        world.update_priorities({rng.randrange(index + 1): rng.random() for _ in range(3)})
        if index % 3 == 0:
            world.release(world.granted(1).lease_id)
    twin = World(starts=False)
    twin.buffers, twin.request_count = restored(world), world.request_count
    for _ in range(60):
        first, second = world.granted(2), twin.granted(2)
        assert first.fragments == second.fragments
    assert held_by(world.buffers) == held_by(twin.buffers)


def test_a_late_update_never_meets_another_chunk() -> None:
    """Under eviction and restarts: each chunk has the priority that was last set for it."""
    rng = random.Random(2)
    world = World(sampler="prioritised", capacity_chunks=20, uses_max=2)
    wanted: dict[int, float] = {}
    for index in range(600):
        world.append("w0", index, priority=float(index))
        wanted[index] = float(index)
        held = {each[1] for each in world.held()}
        updates = {rng.randrange(index + 1): rng.random() for _ in range(4)}
        done = world.update_priorities(updates)
        known = updates.keys() & held
        assert PrioritiesUpdated(len(known), 0, len(updates) - len(known)) == done
        wanted |= {number: updates[number] for number in known}
        if index % 5 == 0:
            world.release(world.granted(1).lease_id)
        if index % 50 == 0:
            world.buffers = restored(world)
        for chunk in held_chunks(world.buffers):
            assert wanted[chunk.chunk_id] == chunk.priority


def test_sums_of_tiny_and_huge_weights_never_drift() -> None:
    sampler = make_sampler("prioritised")
    tiny = Item(0, priority=1e-15)
    sampler.add(tiny)
    for number in range(1, 10_001):
        item = Item(number, priority=0.3 if number % 2 else 1e30)
        sampler.add(item)
        sampler.remove(item)
    assert [1.0] == sampler.probabilities([tiny])
    tiny.priority = 0.0
    sampler.update(tiny)
    assert [0] == sampler.draw(1, random.Random(0))


def test_what_is_rounded_never_leads_to_a_chunk_that_weighs_nothing() -> None:
    class AlmostOne(random.Random):
        def random(self) -> float:
            return 1.0 - 2**-53

    sampler = make_sampler("prioritised")
    for number, priority in enumerate((0.1, 0.2, 0.3, 0.0)):
        sampler.add(Item(number, priority=priority))
    assert [2, 1, 0, 3] == sampler.draw(4, AlmostOne())
