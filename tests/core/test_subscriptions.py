"""B17: named cursors, and what retaining ones keep within capacity."""

import random
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import FullPolicy
from breadbox_server.core.model.description import SubscriptionDescription
from breadbox_server.core.model.errors import (
    InvalidArgumentError,
    SubscriptionExistsError,
    SubscriptionNotFoundError,
    SubscriptionsFullError,
)
from breadbox_server.core.model.events import PayloadsDisposable
from breadbox_server.core.model.ids import SubscriptionName
from breadbox_server.core.model.inputs import Acknowledge, AdmissionOutcome, Subscribe, Unsubscribe
from breadbox_server.core.rules.reading import ChunksRead, ReadSpec
from breadbox_server.core.state.subscriptions import SUBSCRIPTIONS_MAX
from core.world import World
from support.lines_run import lines_run

READER = SubscriptionName("reader")
OTHER = SubscriptionName("other")


class Followed(World):
    """A world with words for subscriptions."""

    def subscribe(
        self, name: str = READER, *, retaining: bool = True, after: int | None = None
    ) -> None:
        subscribe = Subscribe(DEFAULT_BUFFER, SubscriptionName(name), retaining, after)
        self.buffers.apply(subscribe, now=self.now)

    def acknowledge(self, chunk_id: int, name: SubscriptionName = READER) -> None:
        self.buffers.apply(Acknowledge(DEFAULT_BUFFER, name, chunk_id), now=self.now)

    def unsubscribe(self, name: SubscriptionName = READER) -> None:
        self.buffers.apply(Unsubscribe(DEFAULT_BUFFER, name), now=self.now)

    def read(self, **fields: Any) -> ChunksRead:
        cursor = ReadSpec(
            **{"after": None, "subscription": READER, "chunk_count_max": 999, **fields}
        )
        return self.buffers[DEFAULT_BUFFER].read(cursor)

    def ids(self, **fields: Any) -> list[int]:
        return list(dict.fromkeys(each.chunk_id for each in self.read(**fields).fragments))

    def shown(self, name: SubscriptionName = READER) -> SubscriptionDescription:
        return {each.name: each for each in self.buffers[DEFAULT_BUFFER].subscriptions()}[name]

    def disposed(self) -> int:
        return sum(len(event.payloads) for event in self.events(PayloadsDisposable))

    def check(self) -> None:
        self.buffers.check_invariants()

    def use_up(self, count: int) -> None:
        """Draw chunks, and be done with them."""
        for _ in range(count):
            self.release(self.granted().lease_id)


def test_there_are_none_until_somebody_subscribes() -> None:
    world = Followed()
    world.fill(2)
    assert () == world.buffers[DEFAULT_BUFFER].subscriptions()
    world.subscribe(after=0)
    assert [READER] == [each.name for each in world.buffers[DEFAULT_BUFFER].subscriptions()]
    world.unsubscribe()
    assert () == world.buffers[DEFAULT_BUFFER].subscriptions()


def test_what_is_used_up_is_kept_until_it_was_passed() -> None:
    world = Followed()
    world.subscribe()
    world.fill(3)
    world.use_up(3)
    assert (0, 3, 30) == (
        world.seen().chunk_count,
        world.seen().retained_count,
        world.seen().payload_bytes,
    )
    assert [0, 1, 2] == world.ids()
    assert [] == world.ids(subscription=None, after=-1)
    world.disposed()
    world.acknowledge(1)
    assert (2, [2], 1, 10) == (
        world.disposed(),
        world.ids(),
        world.shown().lag_chunks,
        world.shown().lag_bytes,
    )
    world.acknowledge(0)  # Backwards is nowhere.
    assert (1, 0) == (world.shown().cursor, world.shown().missed_count)
    world.check()


def test_what_is_stale_is_kept_and_what_a_session_leaves_is_missed() -> None:
    world = Followed(staleness_max=0)
    world.subscribe()
    world.fill(2)
    world.publish(1)
    assert (0, [0, 1]) == (world.seen().chunk_count, world.ids())
    world.disposed()
    world.start("s1")
    assert (2, [], 2, 2) == (
        world.disposed(),
        world.ids(),
        world.shown().missed_count,
        world.read().skipped_count,
    )
    assert 2 == world.count("chunks_missed")
    world.check()


def test_a_chunk_under_a_lease_is_read_whether_it_comes_back_or_not() -> None:
    world = Followed(sampler="oldest_first")
    world.subscribe()
    world.fill(3)
    returned, consumed = world.granted().lease_id, world.granted().lease_id
    assert ([0, 1, 2], 0) == (world.ids(), world.seen().retained_count)
    world.give_back(returned)
    world.release(consumed)
    assert ([0, 1, 2], 1) == (world.ids(), world.seen().retained_count)
    world.check()


def test_what_a_lease_keeps_of_a_session_that_ended_is_read_by_nobody() -> None:
    world = Followed(uses_max=2)
    world.subscribe()
    world.fill(2)
    leases = [world.granted(2).lease_id, world.granted().lease_id]
    world.start("s1")
    assert ([], 2, 2) == (
        world.ids(),
        world.read().skipped_count,
        world.shown().missed_count,
    )
    twin = BufferSet.restore(world.buffers.snapshot(), random.Random(0))
    assert twin.snapshot() == world.buffers.snapshot()
    for lease_id in leases:
        world.release(lease_id)
    assert (2, 2) == (world.shown().missed_count, world.count("chunks_missed"))
    world.check()


def test_what_is_passed_under_a_lease_goes_with_the_lease() -> None:
    world = Followed(staleness_max=0, uses_max=2)
    world.subscribe()
    world.fill(1)
    lease_id = world.granted().lease_id
    world.publish(1)
    assert 1 == world.seen().retained_count
    world.check()
    world.acknowledge(0)
    assert (0, 0) == (world.disposed(), world.seen().retained_count)
    world.release(lease_id)
    assert 1 == world.disposed()
    world.check()


def test_a_lease_that_ends_on_what_is_retained_makes_it_evictable() -> None:
    world = Followed(staleness_max=0, uses_max=2, capacity_chunks=2, capacity_bytes=20)
    world.subscribe()
    world.fill(2)
    lease_id = world.granted(2).lease_id
    world.publish(1)
    assert AdmissionOutcome.BYTES_FULL is world.append(index=2, version=1)
    world.release(lease_id)
    world.check()
    assert AdmissionOutcome.ADMITTED is world.append(index=2, version=1)
    assert ([1, 2], 1) == (world.ids(), world.shown().missed_count)


def test_with_several_the_slowest_decides_and_who_does_not_retain_decides_nothing() -> None:
    world = Followed()
    for name, retaining in (READER, True), (OTHER, True), ("third", False):
        world.subscribe(name, retaining=retaining)
    world.fill(3)
    world.use_up(3)
    world.acknowledge(2)
    assert (3, [], [0, 1, 2], []) == (
        world.seen().retained_count,
        world.ids(),
        world.ids(subscription=OTHER),
        world.ids(subscription="third"),
    )
    assert [(0, 0), (3, 30), (0, 0)] == [
        (world.shown(name).lag_chunks, world.shown(name).lag_bytes)
        for name in (READER, OTHER, SubscriptionName("third"))
    ]
    world.disposed()
    world.unsubscribe(OTHER)
    assert (3, 0) == (world.disposed(), world.seen().retained_count)
    world.unsubscribe(READER)
    assert 0 == world.disposed()
    world.check()


@pytest.mark.parametrize("limits", [{"capacity_chunks": 3}, {"capacity_bytes": 30}])
def test_at_capacity_what_only_subscriptions_keep_goes_first(limits: dict[str, Any]) -> None:
    world = Followed(**limits)
    world.subscribe()
    world.fill(3)
    world.use_up(2)
    held = world.held()
    assert AdmissionOutcome.ADMITTED is world.append(index=3)
    assert (2, 1) == (world.seen().chunk_count, world.seen().retained_count)
    assert held == world.held()[:1]
    assert AdmissionOutcome.ADMITTED is world.append(index=4)
    assert AdmissionOutcome.ADMITTED is world.append(index=5)
    assert ([3, 4, 5], 3, 3) == (
        world.ids(),
        world.shown().missed_count,
        world.read().skipped_count,
    )
    world.check()


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [
        ({"capacity_chunks": 2}, AdmissionOutcome.BUFFER_FULL),
        ({"capacity_bytes": 20}, AdmissionOutcome.BYTES_FULL),
    ],
)
def test_where_producers_block_they_wait_for_the_slowest(
    limits: dict[str, Any], outcome: AdmissionOutcome
) -> None:
    world = Followed(full_policy=FullPolicy.BLOCK, **limits)
    world.subscribe()
    world.fill(2)
    world.use_up(2)
    assert outcome is world.append(index=2)
    world.acknowledge(0)
    assert AdmissionOutcome.ADMITTED is world.append(index=2)
    assert ([1, 2], 0) == (world.ids(), world.shown().missed_count)
    world.check()


def test_only_who_retains_and_has_not_passed_a_chunk_misses_it() -> None:
    world = Followed(capacity_chunks=2)
    third = SubscriptionName("third")
    for name in (READER, OTHER, third):
        world.subscribe(name, retaining=name != third)
    world.fill(2)
    world.acknowledge(1, OTHER)
    world.append(index=2)
    missed = [world.shown(name).missed_count for name in (READER, OTHER, third)]
    assert ([1, 0, 0], 1) == (missed, world.count("chunks_missed"))


def test_a_cursor_that_retains_nothing_moves_beside_one_that_does() -> None:
    world = Followed(capacity_chunks=2)
    world.subscribe(READER)
    world.subscribe(OTHER, retaining=False)
    world.fill(2)
    world.use_up(2)
    world.acknowledge(1, OTHER)
    assert (1, [0, 1]) == (world.shown(OTHER).cursor, world.ids())
    world.append(index=2)
    assert [1, 0] == [world.shown(name).missed_count for name in (READER, OTHER)]
    world.check()


@given(st.integers(0, 2**32))
def test_each_of_many_counts_what_went_behind_where_it_stood_then(seed: int) -> None:
    """However rarely somebody asks: here once in a while, in a twin each time."""
    rng = random.Random(seed)
    capacity = 3
    world, asked = Followed(capacity_chunks=capacity), Followed(capacity_chunks=capacity)
    expected: dict[str, int] = {}
    cursors: dict[str, int] = {}
    closed_count = 0
    for _ in range(60):
        name = SubscriptionName(str(rng.randrange(5)))
        match rng.randrange(6):
            case 0 if name not in cursors:
                cursors[name], expected[name] = rng.randrange(-1, closed_count), 0
                for each in (world, asked):
                    each.subscribe(name, after=cursors[name])
            case 1 if name in cursors:
                del cursors[name], expected[name]
                for each in (world, asked):
                    each.unsubscribe(name)
            case 2 if name in cursors and closed_count:
                cursors[name] = rng.randrange(max(0, cursors[name]), closed_count)
                for each in (world, asked):
                    each.acknowledge(cursors[name], name)
            case _:
                for each in (world, asked):
                    each.append(index=closed_count)
                gone = closed_count - capacity
                closed_count += 1
                for each_name, cursor in cursors.items():
                    expected[each_name] += cursor < gone
        asked.check()
        shown = asked.buffers[DEFAULT_BUFFER].subscriptions()
        assert expected == {each.name: each.missed_count for each in shown}
    shown = world.buffers[DEFAULT_BUFFER].subscriptions()
    assert expected == {each.name: each.missed_count for each in shown}


def test_an_append_does_as_much_however_many_subscriptions_are_left_behind() -> None:
    alone, crowd = Followed(capacity_chunks=4), Followed(capacity_chunks=4)
    for world, count in (alone, 1), (crowd, 100):
        for number in range(count):
            world.subscribe(f"retaining {number}")
            world.subscribe(f"plain {number}", retaining=False)
        world.fill(4)
    lines = [lines_run(partial(world.append, index=4)) for world in (alone, crowd)]
    assert lines[0] == lines[1]
    assert [1] * 100 == [
        crowd.shown(SubscriptionName(f"retaining {n}")).missed_count for n in range(100)
    ]


def test_a_lost_payload_is_missed_once_and_frees_its_chunk() -> None:
    world = Followed(fragments_per_chunk=2)
    world.subscribe()
    world.fill(1)
    world.release(world.granted(2).lease_id)
    (fragment, _) = world.read().fragments
    assert 2 == world.drop(fragment.fragment.payload.payload_id)
    assert ([], 1, 0) == (world.ids(), world.shown().missed_count, world.seen().payload_bytes)
    world.check()


def test_a_buffer_that_only_retains_is_not_empty() -> None:
    world = Followed()
    world.subscribe()
    world.fill(1)
    world.use_up(1)
    with pytest.raises(InvalidArgumentError):
        world.update(fragments_per_chunk=2)
    world.acknowledge(0)
    world.update(fragments_per_chunk=2)


def test_where_a_subscription_begins() -> None:
    world = Followed(capacity_chunks=2)
    world.subscribe("of nothing")
    world.fill(5)
    world.subscribe("of what is held")
    world.subscribe("from now on", after=4)
    world.subscribe("of all", after=-1)
    shown = {each.name: each.cursor for each in world.buffers[DEFAULT_BUFFER].subscriptions()}
    assert {"of nothing": -1, "of what is held": 2, "from now on": 4, "of all": -1} == shown


def test_what_cannot_be_is_refused() -> None:
    world = Followed()
    world.subscribe()
    world.subscribe()
    before = world.buffers.snapshot()
    with pytest.raises(SubscriptionExistsError):
        world.subscribe(retaining=False)
    for name, after in ("", None), ("a/b", None), ("x", 0), ("x", -2):
        with pytest.raises(InvalidArgumentError):
            world.subscribe(name, after=after)
    with pytest.raises(InvalidArgumentError):
        world.acknowledge(0)
    for refused in (
        lambda: world.acknowledge(-1, OTHER),
        lambda: world.unsubscribe(OTHER),
        lambda: world.read(subscription=OTHER),
    ):
        with pytest.raises(SubscriptionNotFoundError):
            refused()
    assert before == world.buffers.snapshot()
    for number in range(SUBSCRIPTIONS_MAX - 1):
        world.subscribe(str(number))
    with pytest.raises(SubscriptionsFullError):
        world.subscribe("one more")


def test_a_new_cursor_of_another_history_begins_where_the_subscription_stands() -> None:
    world = Followed()
    world.subscribe()
    world.fill(4)
    world.use_up(2)
    world.acknowledge(0)
    assert [1, 2, 3] == world.ids(after=99)
    assert [2, 3] == world.ids(after=1)
    assert [1, 2, 3] == world.ids(after=3, known_session_id="other")


@given(st.integers(0, 2**32), st.sampled_from(FullPolicy), st.booleans())
def test_a_retaining_reader_misses_nothing_that_capacity_does_not_cost_it(
    seed: int, full_policy: FullPolicy, is_tight: bool
) -> None:
    """Every chunk is read or counted, none is missed with room, and a crash changes nothing."""
    rng = random.Random(seed)
    limits: dict[str, Any] = {"uses_max": 2, "staleness_max": 1, "full_policy": full_policy}
    limits |= {"capacity_chunks": 4, "capacity_bytes": 70} if is_tight else {}
    world = Followed(**limits)
    world.subscribe(after=-1)
    entries = world.buffers.take_entries()
    version, index, cursor, acknowledged = 0, 0, -1, -1
    seen: list[int] = []
    skipped = 0
    leases: list[Any] = []
    for _ in range(50):
        match rng.randrange(9):
            case 0 | 1 | 2:
                world.append(index=index, version=version, size_bytes=rng.choice((10, 20)))
                index += 1
            case 3 | 4 if world.seen().chunk_count:
                leases.append(world.granted(1).lease_id)
            case 5 if leases:
                end = rng.choice((world.give_back, world.release))
                end(leases.pop(rng.randrange(len(leases))))
            case 6:
                version += rng.randrange(2)
                world.publish(version)
            case 7:
                found = world.read(after=cursor, chunk_count_max=rng.choice((1, 3)))
                seen += dict.fromkeys(each.chunk_id for each in found.fragments)
                skipped += found.skipped_count
                cursor = found.cursor
                assert cursor + 1 == len(seen) + skipped
            case 8:
                acknowledged = rng.randint(acknowledged, cursor)
                world.acknowledge(acknowledged)
        world.check()
        entries += world.buffers.take_entries()
    world.advance(0.0)
    assert sorted(set(seen)) == seen
    shown = world.shown()
    if not is_tight:
        assert (0, 0) == (skipped, shown.missed_count)
    assert skipped <= shown.missed_count
    twin = BufferSet.restore((), random.Random(0))
    twin.replay(entries)
    assert twin.snapshot() == world.buffers.snapshot()
    twin.check_invariants()
    restored = BufferSet.restore(world.buffers.snapshot(), random.Random(0))
    assert restored.snapshot() == world.buffers.snapshot()
    assert restored[DEFAULT_BUFFER].subscriptions() == world.buffers[DEFAULT_BUFFER].subscriptions()
    restored.check_invariants()


def test_who_acknowledges_before_there_is_a_chunk_is_told_so() -> None:
    world = Followed()
    world.subscribe()
    with pytest.raises(InvalidArgumentError, match="chunk_id cannot be 0: there was no chunk yet"):
        world.acknowledge(0)
    world.acknowledge(-1)
