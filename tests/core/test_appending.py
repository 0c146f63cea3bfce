"""B1 to B4: which fragments are taken, and how they become chunks."""

import random
from dataclasses import replace
from typing import Any

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import FullPolicy, SchemaPolicy
from breadbox_server.core.model.errors import (
    InvalidArgumentError,
    SchemaMismatchError,
    WorkersFullError,
)
from breadbox_server.core.model.events import (
    ChunksEvicted,
    DiscardReason,
    EvictionReason,
    FetchGranted,
    FragmentsDiscarded,
    FragmentsJudged,
    PayloadsDisposable,
)
from breadbox_server.core.model.ids import ModelVersion
from breadbox_server.core.model.inputs import AdmissionOutcome
from breadbox_server.core.rules.intake import outcome_of
from core.world import World, indices
from support.metadata import make_fragment, make_payload

ADMITTED = AdmissionOutcome.ADMITTED
FITS: dict[str, Any] = {
    "is_of_current_session": True,
    "was_judged_before": False,
    "version": ModelVersion(3),
    "version_min": 3,
    "size_bytes": 10,
    "closes_chunk": True,
    "place_count": 1,
    "capacity_chunks": 2,
    "limiter_permits": True,
    "full_policy": FullPolicy.BLOCK,
    "referred_bytes": 80,
    "evictable_bytes": 50,
    "capacity_bytes": 90,
}


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "admitted"),
        ({"is_of_current_session": False, "was_judged_before": True}, "wrong_session"),
        ({"was_judged_before": True, "version": 2}, "duplicate"),
        ({"version": 2, "limiter_permits": False}, "stale"),
        ({"limiter_permits": False}, "buffer_full"),
        ({"limiter_permits": False, "full_policy": FullPolicy.EVICT}, "buffer_full"),
        ({"limiter_permits": False, "closes_chunk": False}, "admitted"),
        ({"place_count": 2}, "buffer_full"),
        ({"place_count": 2, "closes_chunk": False}, "admitted"),
        ({"place_count": 2, "full_policy": FullPolicy.EVICT}, "admitted"),
        ({"size_bytes": 11}, "bytes_full"),
        ({"size_bytes": 60, "full_policy": FullPolicy.EVICT}, "admitted"),
        ({"size_bytes": 61, "full_policy": FullPolicy.EVICT}, "bytes_full"),
    ],
)
def test_admission_names_the_first_reason_that_applies(
    changes: dict[str, Any], outcome: str
) -> None:
    assert AdmissionOutcome(outcome) is outcome_of(**(FITS | changes))


def test_stale_fragment_evicts_nothing_although_the_buffer_is_full() -> None:
    """B1: the ancestor made room first and judged afterwards."""
    world = World(capacity_chunks=2, staleness_max=0)
    world.publish(5)
    world.fill(2, version=5)
    assert AdmissionOutcome.STALE is world.append("w1", 0, version=4)
    assert [("w0", 0, 0), ("w0", 1, 0)] == world.held()


def test_each_judgement_is_told_with_its_size() -> None:
    world = World()
    world.append(size_bytes=33)
    world.append(size_bytes=33)
    judged = world.events(FragmentsJudged)
    assert [(ADMITTED, 33), (AdmissionOutcome.DUPLICATE, 33)] == [
        (event.outcome, event.size_bytes) for event in judged
    ]


def test_appending_again_answers_the_first_outcome_and_changes_nothing() -> None:
    """B2."""
    world = World(staleness_max=0)
    world.publish(2)
    world.append(index=0, version=2)
    world.append(index=1, version=1)
    snapshot = world.buffers.snapshot()
    for index, first in ((0, ADMITTED), (1, AdmissionOutcome.STALE)):
        answer = world.answer(make_fragment("w0", index, version=2))
        assert (AdmissionOutcome.DUPLICATE, first) == (answer.outcome, answer.first_outcome)
    assert snapshot == world.buffers.snapshot()


def test_index_older_than_what_is_remembered_is_a_duplicate_without_a_first_outcome() -> None:
    world = World(outcomes_per_worker_max=2)
    world.fill(3)
    answer = world.answer(make_fragment("w0", 0))
    assert (AdmissionOutcome.DUPLICATE, None) == (answer.outcome, answer.first_outcome)


def test_index_that_was_skipped_may_still_come() -> None:
    world = World()
    world.append(index=0)
    world.append(index=2)
    assert ADMITTED is world.append(index=1)
    assert AdmissionOutcome.DUPLICATE is world.append(index=1)


def test_refusal_that_asks_to_wait_is_not_remembered() -> None:
    world = World(capacity_chunks=1, full_policy=FullPolicy.BLOCK)
    world.append(index=0)
    assert AdmissionOutcome.BUFFER_FULL is world.append(index=1)
    world.release(world.granted(1).lease_id)
    assert ADMITTED is world.append(index=1)


def test_only_some_refusals_ask_to_wait() -> None:
    waiting = [outcome.name for outcome in AdmissionOutcome if outcome.asks_to_wait]
    assert ["BUFFER_FULL", "BYTES_FULL"] == waiting


def test_new_session_forgets_workers() -> None:
    world = World()
    world.append(index=0)
    world.start("s1")
    assert ADMITTED is world.append(index=0, session_id="s1")


@pytest.mark.parametrize(
    ("index", "discontinuity", "reason"),
    [(2, False, DiscardReason.GAP), (1, True, DiscardReason.DISCONTINUITY)],
)
def test_gap_discards_the_open_chunk_and_starts_a_new_one(
    index: int, discontinuity: bool, reason: DiscardReason
) -> None:
    """B3."""
    world = World(fragments_per_chunk=2)
    first = make_fragment("w0", 0)
    world.offer(first)
    world.buffers.take_events()
    assert ADMITTED is world.append("w0", index, discontinuity=discontinuity)
    events = world.buffers.take_events()
    assert FragmentsDiscarded(DEFAULT_BUFFER, reason, 1) in events
    assert PayloadsDisposable(DEFAULT_BUFFER, (first.payload,)) in events
    assert ADMITTED is world.append("w0", index + 1)
    assert [("w0", index, 0)] == world.held()


def test_fragment_refused_as_stale_leaves_a_gap() -> None:
    world = World(fragments_per_chunk=2, staleness_max=0)
    world.publish(1)
    world.append("w0", 0, version=1)
    world.append("w0", 1, version=0)
    world.append("w0", 2, version=1)
    assert 1 == world.count("fragments_discarded_gap")
    world.append("w0", 3, version=1)
    assert [("w0", 2, 0)] == world.held()


def test_chunk_has_the_version_of_its_oldest_fragment() -> None:
    """B4: the oldest need not be the first."""
    world = World(fragments_per_chunk=3, staleness_max=5)
    world.publish(5)
    for index, version in enumerate((4, 3, 5)):
        world.append("w0", index, version=version)
    assert {2: 1} == world.seen().chunk_count_by_staleness


def test_workers_fill_chunks_of_their_own() -> None:
    world = World(fragments_per_chunk=2)
    for index in (0, 1):
        for worker_id in ("w0", "w1"):
            world.append(worker_id, index)
    assert [("w0", 0, 0), ("w1", 0, 0)] == world.held()


def test_silent_worker_loses_its_open_chunk() -> None:
    world = World(fragments_per_chunk=2, open_chunk_s=5.0)
    world.append("w0", 0)
    world.advance(3.0)
    world.append("w1", 0)
    assert world.now + 2.0 == world.buffers.next_timer()
    world.advance(2.0)
    assert 1 == world.count("fragments_discarded_worker_silent")
    assert 1 == world.seen().open_chunk_count
    world.append("w0", 1)
    assert [] == world.held()


def test_refused_attempts_do_not_break_a_workers_silence() -> None:
    """Else open chunks that fill the buffer with bytes would block each other for ever."""
    world = World(fragments_per_chunk=2, open_chunk_s=5.0, capacity_bytes=20)
    world.append("w0", 0)
    world.append("w1", 0)
    world.advance(4.0)
    assert AdmissionOutcome.BYTES_FULL is world.append("w0", 1)
    world.advance(1.0)
    assert ADMITTED is world.append("w0", 1)


def test_workers_beyond_the_limit_are_refused_and_change_nothing() -> None:
    world = World(workers_max=1)
    world.append("w0", 0)
    snapshot = world.buffers.snapshot()
    with pytest.raises(WorkersFullError) as caught:
        world.append("w1", 0)
    assert {"limit": "1"} == caught.value.metadata
    assert snapshot == world.buffers.snapshot()
    assert ADMITTED is world.append("w0", 1)


def test_a_worker_that_has_nothing_here_any_more_makes_room_for_a_new_one() -> None:
    """Whoever invents workers locks nobody out for longer than what they sent is held."""
    world = World(workers_max=3, capacity_chunks=2)
    for worker_id in ("invented-0", "invented-1", "invented-2"):
        assert ADMITTED is world.append(worker_id, 0)
    # The chunk of the first was evicted; the second is silent for longest of those that hold one.
    assert ADMITTED is world.append("honest", 5)
    assert ["invented-1", "invented-2", "honest"] == workers_of(world)
    assert ADMITTED is world.append("invented-2", 1)
    assert ADMITTED is world.append("another", 0)
    assert ["honest", "invented-2", "another"] == workers_of(world)
    # One that is forgotten begins anew.
    assert ADMITTED is world.append("invented-0", 0)


def workers_of(world: World) -> list[str]:
    (buffer,) = world.buffers.snapshot()
    return [worker.worker_id for worker in buffer.workers]


def test_version_that_was_never_published_is_refused() -> None:
    world = World()
    with pytest.raises(InvalidArgumentError, match="newest version published is 0"):
        world.append(version=1)


def test_payload_in_use_is_refused_whoever_uses_it() -> None:
    world = World()
    fragment = make_fragment("w0", 0)
    world.offer(fragment)
    with pytest.raises(InvalidArgumentError, match="in use"):
        world.append("w1", 0, payload=fragment.payload)


def test_payload_that_can_never_fit_is_refused() -> None:
    world = World(capacity_bytes=10)
    with pytest.raises(InvalidArgumentError, match="at most 10 bytes"):
        world.append(size_bytes=11)


def test_full_buffer_evicts_the_oldest_even_under_lease() -> None:
    """B7: the chunk goes, its payload stays until the lease ends."""
    world = World(capacity_chunks=2, uses_max=2, sampler="oldest_first")
    world.fill(2)
    lease = world.granted(1)
    world.append("w0", 2)
    assert [("w0", 1, 0), ("w0", 2, 0)] == world.held()
    events = world.buffers.take_events()
    assert ChunksEvicted(DEFAULT_BUFFER, EvictionReason.CAPACITY, (1,), (0,)) in events
    assert 30 == world.seen().payload_bytes
    world.release(lease.lease_id)
    assert [lease.fragments[0].fragment.payload] == [
        payload for event in world.events(PayloadsDisposable) for payload in event.payloads
    ]


def test_bytes_are_made_room_for_by_the_oldest_chunks_without_a_lease() -> None:
    world = World(capacity_bytes=40, uses_max=2, sampler="oldest_first")
    world.fill(4)
    world.granted(1)
    assert ADMITTED is world.append("w0", 4, size_bytes=15)
    assert [("w0", 0, 1), ("w0", 3, 0), ("w0", 4, 0)] == world.held()


def test_nothing_is_evicted_where_it_would_not_make_room_enough() -> None:
    world = World(capacity_bytes=40, uses_max=2, sampler="oldest_first")
    world.fill(4)
    world.granted(3)
    assert AdmissionOutcome.BYTES_FULL is world.append("w0", 4, size_bytes=11)
    assert 4 == len(world.held())


def test_bytes_of_an_open_chunk_that_a_gap_discards_count_as_room() -> None:
    world = World(fragments_per_chunk=2, capacity_bytes=20, full_policy=FullPolicy.BLOCK)
    world.append("w0", 0, size_bytes=15)
    assert AdmissionOutcome.BYTES_FULL is world.append("w0", 1, size_bytes=15)
    assert ADMITTED is world.append("w0", 2, size_bytes=15)


def test_blocking_buffer_evicts_nothing() -> None:
    world = World(capacity_chunks=2, capacity_bytes=30, full_policy=FullPolicy.BLOCK)
    world.fill(2)
    assert AdmissionOutcome.BUFFER_FULL is world.append("w0", 2)
    assert AdmissionOutcome.BUFFER_FULL is world.append("w0", 2, size_bytes=30)
    assert 0 == world.count("chunks_evicted_capacity")


# Steps ------------------------------------------------------------------------------------------


def test_the_first_fragment_decides_how_many_steps_those_of_its_session_have() -> None:
    """One worker with another setting would end the learner, which stacks fragments."""
    world = World()
    assert ADMITTED == world.append(index=0, step_count=32)
    before = world.buffers.snapshot()
    with pytest.raises(SchemaMismatchError) as refused:
        world.append("w1", step_count=64)
    assert ("step_count", "32", "64") == (
        refused.value.path,
        refused.value.wanted,
        refused.value.got,
    )
    assert "session 's0', so all its workers need one --fragment-steps" in str(refused.value)
    assert before == world.buffers.snapshot()
    world.granted(1)  # Even while nothing is held.
    with pytest.raises(SchemaMismatchError):
        world.append("w1", step_count=64)
    assert ADMITTED == world.append(index=1, step_count=32)


@pytest.mark.parametrize("policy", [SchemaPolicy.RAGGED, SchemaPolicy.ANY])
def test_a_buffer_may_take_fragments_of_any_number_of_steps(policy: SchemaPolicy) -> None:
    """Who takes single steps out of them stacks no fragments."""
    world = World(schema=policy)
    counts = (32, 5, 64)
    assert [ADMITTED] * 3 == [world.append(index=n, step_count=c) for n, c in enumerate(counts)]
    world.update(schema=SchemaPolicy.ONE)
    with pytest.raises(SchemaMismatchError, match="64 wanted, 32 got"):
        world.append(index=3, step_count=32)


def test_another_session_may_have_fragments_of_another_number_of_steps() -> None:
    world = World()
    world.append(step_count=32)
    world.start("s1")
    assert ADMITTED == world.append(session_id="s1", step_count=64)


def test_a_refused_fragment_decides_nothing() -> None:
    world = World(staleness_max=0)
    world.publish(3)
    assert AdmissionOutcome.STALE == world.append("w1", step_count=64)
    assert ADMITTED == world.append("w0", version=3, step_count=32)


def test_a_restored_buffer_still_knows_the_number_of_steps() -> None:
    world = World()
    world.append(step_count=32)
    world.granted(1)
    world.buffers = BufferSet.restore(world.buffers.snapshot(), random.Random(0))
    with pytest.raises(SchemaMismatchError, match="32 wanted, 64 got"):
        world.append("w1", step_count=64)


def test_a_group_is_judged_one_after_the_other_up_to_the_first_that_has_to_wait() -> None:
    world = World(capacity_chunks=3, full_policy=FullPolicy.BLOCK)
    world.append("w0", 0)
    group = [make_fragment("w0", index) for index in (1, 1, 2, 3, 4)]
    outcomes = [each.outcome for each in world.offer_many(group)]
    assert [
        ADMITTED,
        AdmissionOutcome.DUPLICATE,
        ADMITTED,
        AdmissionOutcome.BUFFER_FULL,
    ] == outcomes


def test_the_usual_fragments_of_a_group_are_judged_and_reported_together() -> None:
    world = World()
    for worker_id in ("w0", "w1"):
        world.append(worker_id, 0)
    world.buffers.take_events()
    world.offer_many([make_fragment(f"w{at % 2}", 1 + at // 2, size_bytes=7) for at in range(6)])
    judged = world.events(FragmentsJudged)
    assert [(ADMITTED, 6, 42)] == [
        (each.outcome, each.fragment_count, each.size_bytes) for each in judged
    ]


def test_a_group_takes_no_more_bytes_than_there_are_where_producers_wait() -> None:
    world = World(capacity_bytes=45, full_policy=FullPolicy.BLOCK)
    world.append("w0", 0, size_bytes=10)
    group = [make_fragment("w0", index, size_bytes=10) for index in range(1, 6)]
    outcomes = [each.outcome for each in world.offer_many(group)]
    assert [ADMITTED, ADMITTED, ADMITTED, AdmissionOutcome.BYTES_FULL] == outcomes


def test_a_group_stops_before_a_fragment_that_raises_and_what_came_before_has_happened() -> None:
    world = World()
    group = [make_fragment("w0", index) for index in range(3)]
    group[1].model_version_max = ModelVersion(7)
    assert [ADMITTED] == [each.outcome for each in world.offer_many(group)]
    with pytest.raises(InvalidArgumentError, match="model_version_max"):
        world.offer_many(group[1:])
    assert [("w0", 0, 0)] == world.held()


def test_one_payload_cannot_be_of_two_fragments_of_a_group() -> None:
    world = World()
    world.append("w0", 0)
    payload = make_payload()
    group = [make_fragment("w0", index, payload=payload) for index in (1, 2)]
    group.append(make_fragment("w0", 3))
    assert [ADMITTED] == [each.outcome for each in world.offer_many(group)]
    with pytest.raises(InvalidArgumentError, match="in use"):
        world.offer_many(group[1:])


def test_a_fetch_that_waits_gets_the_first_of_a_group_before_later_ones_evict_them() -> None:
    world = World(capacity_chunks=2)
    world.append("w0", 0)
    world.granted(1)
    world.fetch(2, request_id="waits")
    world.buffers.take_events()
    assert [ADMITTED] * 6 == [
        each.outcome
        for each in world.offer_many([make_fragment("w0", index) for index in range(1, 7)])
    ]
    [granted] = world.events(FetchGranted)
    assert [1, 2] == sorted(indices(granted))
    assert [("w0", 5, 0), ("w0", 6, 0)] == world.held()


@pytest.mark.parametrize("limits", [{"capacity_chunks": 3}, {"capacity_bytes": 35}], ids=str)
def test_a_group_leaves_what_the_same_fragments_one_by_one_leave(limits: dict[str, Any]) -> None:
    worlds = [World(**limits) for _ in range(2)]
    fragments = [make_fragment(f"w{index % 2}", index // 2, size_bytes=10) for index in range(16)]
    for fragment in fragments:
        worlds[0].offer(replace(fragment))
    for part in (fragments[:5], fragments[5:11], fragments[11:]):
        worlds[1].offer_many([replace(each) for each in part])
    assert worlds[0].buffers.snapshot() == worlds[1].buffers.snapshot()
