"""The small parts on their own, where the whole does not reach every corner."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breadbox_server.core.limiters import Flow, make_limiter
from breadbox_server.core.model.config import MinimumChunks
from breadbox_server.core.model.ids import (
    CallerId,
    ChunkId,
    FragmentIndex,
    LeaseId,
    ModelVersion,
    PayloadId,
    RequestId,
    SessionId,
    WorkerId,
)
from breadbox_server.core.model.inputs import AdmissionOutcome, Fragment, Payload
from breadbox_server.core.model.lazy_heap import WASTE_MIN, LazyHeap
from breadbox_server.core.samplers import SAMPLERS, Sampler, make_sampler
from breadbox_server.core.state.assembly import OutcomeWindow
from breadbox_server.core.state.chunks import Chunk, ChunkState, ChunkTable
from breadbox_server.core.state.grants import Caller, Grant, Lease, LeaseBook, Waiter, WaiterQueue

ADMITTED, STALE = AdmissionOutcome.ADMITTED, AdmissionOutcome.STALE


class Item:
    def __init__(self, chunk_id: int, version: int = 0, priority: float = 1.0) -> None:
        self.chunk_id = ChunkId(chunk_id)
        self.version = ModelVersion(version)
        self.priority = priority
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
    twin = OutcomeWindow(window.next_index, window.codes)
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
            item = Item(step, rng.randrange(5), rng.choice((0.0, 0.1, 1.0, 7.0)))
            members[step] = item
            sampler.add(item)
            changed = members[rng.choice(sorted(members))]
            changed.priority = rng.choice((0.0, 0.1, 1.0, 7.0))
            sampler.update(changed)
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
        twin.add(Item(member.chunk_id, member.version, member.priority))
    return twin


CHURN = 2000
"""Many times what an order may keep of the dead beside a handful of the living."""


def order_sizes(part: object) -> list[int]:
    """Entries, dead ones included, of the orders that a part keeps."""
    values = (getattr(part, name) for name in vars(part))
    return [len(value) for value in values if isinstance(value, LazyHeap)]


def test_chunks_that_come_and_go_behind_one_that_stays_leave_nothing_in_any_order() -> None:
    """Dead entries are dropped when they surface; those behind a living one never do."""
    table = ChunkTable(make_sampler("oldest_first"))
    for number in range(CHURN):
        fragment = Fragment(
            worker_id=WorkerId("w"),
            fragment_index=FragmentIndex(number),
            session_id=SessionId("s"),
            model_version_min=ModelVersion(0),
            model_version_max=ModelVersion(0),
            payload=Payload(PayloadId(f"{number:032x}"), 1),
        )
        chunk = Chunk(ChunkId(number), (fragment,))
        table.add(chunk)
        if number > 0:
            table.add_leases([chunk])
            table.remove_many([chunk], ChunkState.GONE)
    assert max(order_sizes(table)) <= 2 + WASTE_MIN
    assert 3 == len(order_sizes(table))


def test_fetches_that_come_and_go_behind_one_that_stays_leave_nothing_in_the_order() -> None:
    for remove in ("waiter", "caller"):
        queue = WaiterQueue[Waiter]()
        for number in range(CHURN):
            waiter = Waiter(RequestId(f"r{number}"), 1, 1)
            caller = Caller(
                CallerId(number), rank=0, lease_s=None, asked_at=0.0, deadline_at=float(number)
            )
            queue.add(waiter, caller)
            if number > 0 and remove == "waiter":
                queue.remove(waiter)
            elif number > 0:
                queue.remove_caller(caller.caller_id)
        assert max(order_sizes(queue)) <= 2 + WASTE_MIN


def test_a_lease_that_is_renewed_for_ever_stands_in_the_order_once() -> None:
    book = LeaseBook()
    grant = Grant(
        RequestId("r"),
        1,
        1,
        session_id=SessionId("s"),
        model_version=ModelVersion(0),
        population=0,
        chunks=(),
    )
    for number in range(2):
        lease = Lease(LeaseId(f"l{number}"), grant, number, 1.0, 1.0)
        grant.leases.append(lease)
    book.add(grant)
    for number in range(CHURN):
        book.renew(grant.leases[1], 2.0 + number)
    assert max(order_sizes(book)) <= 4 + WASTE_MIN
    assert grant.leases[0] is book.first_expiry()


def test_a_minimum_of_chunks_holds_back_no_append() -> None:
    limiter = make_limiter(MinimumChunks(chunk_count=9))
    assert not limiter.limits_inserts
    assert limiter.may_insert(Flow(9, 0, 0))
