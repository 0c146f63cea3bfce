"""What is written down, and what entries and snapshots that do not fit are answered with.

That a replay builds an equal state is shown by the stateful test, which crashes at random.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import BufferConfig, SampleToInsertRatio
from breadbox_server.core.model.entries import (
    BufferCreated,
    Entry,
    FragmentTaken,
    GrantMade,
    ReplayError,
)
from breadbox_server.core.model.events import FetchGranted, PayloadsDisposable
from breadbox_server.core.model.ids import BufferName, LeaseId, PayloadId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    CreateBuffer,
    DeleteBuffer,
    ReleaseLease,
    ReleaseMode,
    ReportUnreadable,
)
from core.world import World
from support.inputs import grant_made, named_payload, publish_model, start_session
from support.metadata import make_fragment


def kinds(world: World) -> list[str]:
    return [type(entry).__name__ for _, entry in world.buffers.take_entries()]


def replayed(world: World, *, seed: int = 99) -> BufferSet:
    """Build the world's set again from nothing but its entries."""
    twin = BufferSet.restore((), random.Random(seed))
    twin.replay(world.buffers.take_entries())
    twin.handle_timer(now=world.now)
    return twin


def test_only_what_changed_something_is_written_down() -> None:
    world = World(staleness_max=0)
    world.publish(1)
    world.buffers.take_entries()
    fragment = make_fragment(version=1)
    world.offer(fragment)
    world.offer(fragment)
    world.append("w0", 1, version=0)
    world.append("w0", 1, session_id="other")
    assert ["FragmentTaken", "FragmentTaken"] == kinds(world)
    lease = world.granted(request_id="r")
    world.granted(request_id="r")
    assert ["GrantMade"] == kinds(world)
    world.release(lease.lease_id)
    world.release(lease.lease_id)
    assert ["ReleaseLease"] == kinds(world)
    world.start("s0")
    world.end("other")
    world.publish(1)
    world.drop("0" * 32)
    world.cancel(world.fetch())
    world.report_undelivered(lease.lease_id)
    world.seen()
    assert [] == kinds(world)


def test_entries_carry_their_time_and_the_grant_follows_its_cause() -> None:
    world = World()
    world.fetch(request_id="r")
    world.buffers.take_entries()
    world.advance(2.0)
    world.append()
    (append_now, taken), (grant_now, made) = world.buffers.take_entries()
    assert (world.now, world.now) == (append_now, grant_now)
    assert isinstance(taken, FragmentTaken)
    assert isinstance(made, GrantMade)
    assert ("r", (0,), (60.0,)) == (made.request_id, made.chunk_ids, made.leases_s)


def test_nothing_is_written_down_unless_asked_for() -> None:
    buffers = BufferSet(random.Random(1), BufferConfig())
    buffers.apply(start_session(), now=0.0)
    assert [] == buffers.take_entries()


def test_replay_from_the_beginning_creates_and_deletes_buffers() -> None:
    world = World()
    limits = BufferConfig(limiter=SampleToInsertRatio(2.0, 3.0, 4))
    for name in ("kept", "deleted"):
        world.buffers.apply(CreateBuffer(BufferName(name), limits), now=world.now)
    world.buffers.apply(DeleteBuffer(BufferName("deleted")), now=world.now)
    twin = replayed(world)
    assert ("default", "kept") == twin.names()
    assert limits == twin.describe(BufferName("kept"), now=world.now).config
    assert world.buffers.snapshot() == twin.snapshot()


def test_replayed_buffer_draws_what_the_lost_one_would_have_drawn_under_another_lease() -> None:
    world = World(uses_max=5)
    world.fill(20)
    world.granted(3)
    twin = replayed(world)
    world_draw = world.granted(5, request_id="next")
    world.buffers = twin
    twin_draw = world.granted(5, request_id="next")
    assert world_draw.fragments == twin_draw.fragments
    assert world_draw.lease_id != twin_draw.lease_id


def test_reports_of_what_cannot_be_read_are_replayed_and_outlive_snapshots() -> None:
    world = World(fragments_per_chunk=2)
    fragments = [make_fragment("w0", index) for index in range(4)]
    for fragment in fragments:
        world.offer(fragment)

    def report(times: int) -> None:
        lease = world.granted(4)
        named = (fragments[1].payload.payload_id, PayloadId("0" * 32))
        for _ in range(times):
            told = ReportUnreadable(DEFAULT_BUFFER, lease.lease_id, named, reports_max=3)
            world.buffers.apply(told, now=world.now)
        world.give_back(lease.lease_id)
        world.buffers.apply(told, now=world.now)  # A lease that is over tells nothing.

    report(1)
    world.buffers = replayed(world)
    assert [("w0", 0, 0), ("w0", 2, 0)] == world.held()
    report(1)
    state = world.buffers.snapshot()
    world.buffers = BufferSet.restore(state, random.Random(0))
    assert state == world.buffers.snapshot()
    report(1)
    assert [("w0", 2, 0)] == world.held()
    assert 1 == world.count("chunks_evicted_quarantined")
    (quarantined,) = world.seen().quarantined
    assert ("w0", 1) == (quarantined.worker_id, quarantined.fragment_index)
    world.buffers.check_invariants()
    state = world.buffers.snapshot()
    assert state == BufferSet.restore(state, random.Random(0)).snapshot()


def test_a_report_of_what_is_not_of_the_lease_is_not_written_down() -> None:
    world = World()
    world.fill(1)
    lease = world.granted()
    world.buffers.take_entries()
    told = ReportUnreadable(DEFAULT_BUFFER, lease.lease_id, (PayloadId("0" * 32),), reports_max=1)
    world.buffers.apply(told, now=world.now)
    assert [] == world.buffers.take_entries()


def test_a_chunk_in_quarantine_that_is_told_of_again_is_named_once() -> None:
    world = World(uses_max=2)
    fragment = make_fragment()
    world.offer(fragment)
    leases = [world.granted(request_id=name) for name in ("first", "second")]
    for lease in leases:
        told = ReportUnreadable(
            DEFAULT_BUFFER, lease.lease_id, (fragment.payload.payload_id,), reports_max=1
        )
        world.buffers.apply(told, now=world.now)
    assert 1 == len(world.seen().quarantined)


def test_a_worker_that_was_taken_in_is_replayed_though_nobody_could_go_for_it() -> None:
    """What a journal says was decided stands, whatever is decided otherwise now."""
    world = World(fragments_per_chunk=2, workers_max=1)
    world.append("w0")
    taken = FragmentTaken(DEFAULT_BUFFER, make_fragment("w1"), AdmissionOutcome.ADMITTED)
    world.buffers.replay([(world.now, taken)])
    assert 2 == world.seen().worker_count


def test_a_snapshot_that_contradicts_itself_is_refused() -> None:
    (taken,) = World().buffers.snapshot()
    broken = replace(taken, config=BufferConfig(sampler="best"))
    with pytest.raises(ReplayError, match="the snapshot cannot be: sampler"):
        BufferSet.restore([broken], random.Random(0))


def test_what_was_due_while_nobody_was_there_happens_at_the_first_timer() -> None:
    world = World(lease_s=5.0)
    world.append()
    world.granted(request_id="r")
    state = world.buffers.snapshot()
    twin = BufferSet.restore(state, random.Random(0))
    world.buffers = twin
    world.advance(100.0)
    assert [("w0", 0, 0)] == world.held()


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"capacity_chunks": 7},
        {"capacity_bytes": 1000},
        {"fragments_per_chunk": 3},
        {"uses_max": 2, "capacity_chunks": 14},
    ],
    ids=repr,
)
def test_run_of_fragments_is_replayed_as_it_was_decided(limits: dict[str, Any]) -> None:
    world = World(staleness_max=1, lease_s=5.0, **limits)
    for version in range(4):
        world.publish(version)
        for index in range(5):
            world.append("w0", 5 * version + index, version=version, size_bytes=100)
            world.append("w1", 7 * version + index, version=max(0, version - index))
        world.granted(3, request_id=f"r{version}")
        world.advance(3.0)
    assert world.held()
    assert world.buffers.snapshot() == replayed(world).snapshot()


def test_lease_that_expires_before_fragments_gives_back_before_them_when_replayed() -> None:
    world = World(capacity_chunks=4, lease_s=5.0, sampler="freshest_first")
    world.fill(4)
    world.granted(2)
    world.advance(6.0)
    world.fill(2, worker_id="w1")
    twin = replayed(world)
    assert world.buffers.snapshot() == twin.snapshot()


@pytest.mark.parametrize("silence_s", [9.0, 10.0, 11.0])
def test_a_worker_silent_between_two_fragments_is_so_when_they_are_replayed(
    silence_s: float,
) -> None:
    world = World(fragments_per_chunk=2, open_chunk_s=10.0)
    world.append("w0", 0)
    for second in range(4):
        world.advance(silence_s / 4)
        world.append("w1", second)
    world.append("w0", 1)
    wanted = (2, 1) if silence_s >= 10.0 else (3, 0)
    twin = replayed(world)
    for buffers in (world.buffers, twin):
        seen = buffers.describe(DEFAULT_BUFFER, now=world.now)
        assert wanted == (seen.chunk_count, seen.open_chunk_count)
    assert world.buffers.snapshot() == twin.snapshot()


def test_repeated_request_is_answered_after_a_restart_as_before() -> None:
    world = World()
    world.fill(3)
    first = world.granted(2, request_id="r")
    world.buffers = replayed(world)
    again = world.granted(2, request_id="r")
    assert (first.lease_id, first.fragments, first.expires_at) == (
        again.lease_id,
        again.fragments,
        again.expires_at,
    )
    assert not again.first_delivery
    assert "duplicate" == world.append("w0", 1).value


def test_replay_tells_payloads_whose_deletion_may_not_have_happened() -> None:
    world = World()
    fragment = make_fragment()
    world.offer(fragment)
    world.release(world.granted().lease_id)
    events = replayed(world).take_events()
    told = [p for event in events if isinstance(event, PayloadsDisposable) for p in event.payloads]
    assert [fragment.payload] == told
    assert not any(isinstance(event, FetchGranted) for event in events)


@pytest.mark.parametrize(
    "entry",
    [
        start_session("s1", buffer=BufferName("unknown")),
        BufferCreated(DEFAULT_BUFFER, BufferConfig(), 1),
        publish_model(1, session_id="another"),
        ReleaseLease(DEFAULT_BUFFER, LeaseId("unknown"), ReleaseMode.CONSUMED),
        grant_made((7,), ("l",), (1.0,)),
        grant_made((), ("l",), (1.0, 2.0)),
        publish_model(1, named_payload("no id")),
    ],
    ids=lambda entry: type(entry).__name__,
)
def test_entry_that_does_not_fit_is_refused(entry: Entry) -> None:
    world = World()
    with pytest.raises(ReplayError, match=type(entry).__name__):
        world.buffers.replay([(world.now, entry)])


def test_grant_without_a_session_does_not_fit() -> None:
    world = World(starts=False)
    with pytest.raises(ReplayError, match="chunk 0 was granted, and is not held"):
        world.buffers.replay([(world.now, grant_made((0,), ("l",), (1.0,)))])


def a_world_with_everything() -> World:
    """One chunk under a lease, one open."""
    world = World(fragments_per_chunk=2)
    world.append("w0", 0)
    world.append("w0", 1)
    world.granted(2)
    world.append("w1", 0)
    return world


@pytest.mark.parametrize(
    ("without", "problem"),
    [
        ({"chunks": ()}, "chunk 0 that is not known"),
        ({"workers": ()}, "'w1' has an open chunk, and is not remembered"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_snapshot_that_contradicts_itself_is_refused(without: dict[str, Any], problem: str) -> None:
    (taken,) = a_world_with_everything().buffers.snapshot()
    with pytest.raises(ReplayError, match=problem):
        BufferSet.restore([replace(taken, **without)], random.Random(0))


NO_PAYLOAD: Any = 7


def test_what_goes_wrong_in_a_replay_for_no_reason_of_the_entries_is_not_their_fault() -> None:
    world = World()
    with pytest.raises(AttributeError):
        world.buffers.replay([(world.now, publish_model(1, NO_PAYLOAD))])


def test_snapshot_of_a_counter_that_is_new_begins_at_zero() -> None:
    world = World()
    world.append()
    world.granted()
    (taken,) = world.buffers.snapshot()
    counters = {**taken.counters, "a name of the past": 5}
    del counters["grants"]
    restored = BufferSet.restore([replace(taken, counters=counters)], random.Random(0))
    seen = restored.describe(DEFAULT_BUFFER, now=world.now).counters
    assert 0 == seen["grants"]
    assert 1 == seen["chunks_closed"]
    assert "a name of the past" not in seen


def test_two_processes_with_the_same_books_give_no_lease_the_same_id() -> None:
    """The books of an older copy: what was granted after it must not pass for a lease of now."""
    world = World(uses_max=2)
    world.append()
    state = world.buffers.snapshot()
    lease_ids = set()
    for seed in (1, 2):
        world.buffers = BufferSet.restore(state, random.Random(seed))
        lease_ids.add(world.granted(request_id="r").lease_id)
    assert 2 == len(lease_ids)
