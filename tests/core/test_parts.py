"""The small parts on their own, where the whole does not reach every corner."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breadbox_server.core.inputs import AdmissionOutcome
from breadbox_server.core.lazy_heap import WASTE_MIN, LazyHeap
from breadbox_server.core.outcomes import OutcomeWindow
from breadbox_server.core.samplers import SAMPLERS, Sampler, make_sampler

ADMITTED, STALE = AdmissionOutcome.ADMITTED, AdmissionOutcome.STALE


class Item:
    def __init__(self, chunk_id: int, version: int) -> None:
        self.chunk_id = chunk_id
        self.version = version
        self.sampler_position = 0


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60))
def test_lazy_heap_gives_the_live_in_order(acts: list[tuple[int, bool]]) -> None:
    live: set[int] = set()
    heap: LazyHeap[int] = LazyHeap(live.__contains__)
    for entry, enters in acts:
        if enters:
            live.add(entry)
            heap.push(entry)
        else:
            live.discard(entry)
            heap.compact(len(live))
        assert sorted(live) == heap.first_many(20)
        assert sorted(live)[:2] == heap.first_many(2)
        assert (min(live) if live else None) == heap.first()


def test_lazy_heap_does_not_keep_more_dead_than_live() -> None:
    live: set[int] = set()
    heap: LazyHeap[int] = LazyHeap(live.__contains__)
    for entry in range(1000, 0, -1):
        heap.push(entry)
        live.add(entry)
        if entry <= 999:
            live.remove(entry + 1)
            heap.compact(len(live))
    assert len(heap) <= 2 * len(live) + WASTE_MIN


def test_outcome_window_remembers_the_latest_indices_only() -> None:
    window = OutcomeWindow()
    for index, outcome in ((0, ADMITTED), (1, STALE), (4, ADMITTED), (2, STALE)):
        assert not window.was_judged(index)
        window.remember(index, outcome, 4)
    expected = {0: None, 1: STALE, 2: STALE, 3: None, 4: ADMITTED, 5: None}
    assert expected == {index: window.outcome(index) for index in expected}
    judged = [index for index in range(6) if window.was_judged(index)]
    assert [0, 1, 2, 4] == judged, "0 is forgotten, so it is taken for judged; 3 was skipped"


def test_outcome_window_survives_as_bytes() -> None:
    window = OutcomeWindow()
    window.remember(2, STALE, 8)
    twin = OutcomeWindow(window.next_index, window.codes())
    assert (STALE, False, 3) == (twin.outcome(2), twin.was_judged(1), twin.next_index)


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_draws_distinct_members_and_its_order_makes_a_twin(name: str) -> None:
    rng = random.Random(5)
    sampler = make_sampler(name)
    members: dict[int, Item] = {}
    for step in range(400):
        if members and rng.random() < 0.45:
            gone = members.pop(rng.choice(sorted(members)))
            sampler.remove(gone)
        else:
            item = Item(step, rng.randrange(5))
            members[step] = item
            sampler.add(item)
        count = min(len(members), 3)
        if count:
            drawn = sampler.draw(count, random.Random(step))
            assert len(set(drawn)) == count
            assert set(drawn) <= members.keys()
            assert drawn == twin_of(name, sampler, members).draw(count, random.Random(step))
    assert sorted(members) == sorted(sampler.order())


def twin_of(name: str, sampler: Sampler, members: dict[int, Item]) -> Sampler:
    twin = make_sampler(name)
    for chunk_id in sampler.order():
        member = members[chunk_id]
        twin.add(Item(member.chunk_id, member.version))
    return twin
