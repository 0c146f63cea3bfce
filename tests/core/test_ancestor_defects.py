"""One test for each of the ancestor's buffer defects: what it got wrong, our behaviour.

A blocking call inside the buffer's event loop cannot be repeated by code that knows neither
loop nor network, which an import contract sees to; what is left of it is tested here by reading the
core's imports.
"""

import ast
import gc
import random
from pathlib import Path

import pytest

import breadbox_server.core
from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.errors import InvalidArgumentError, VersionRegressedError
from breadbox_server.core.model.events import FetchGranted, PayloadsDisposable, WaitElapsed
from breadbox_server.core.model.ids import BufferName
from breadbox_server.core.model.inputs import AdmissionOutcome, CreateBuffer
from core.world import World, indices
from support.inputs import start_session
from support.metadata import make_fragment

CORE = Path(breadbox_server.core.__file__).parent


def test_stale_chunk_behind_a_fresh_head_is_not_served() -> None:
    """Versions 5, 3, 5 by arrival; version 6 with staleness 2 makes the middle one stale."""
    world = World(staleness_max=2)
    world.publish(5)
    for index, version in enumerate((5, 3, 5)):
        world.append("w0", index, version=version)
    world.publish(6)
    assert {0, 2} == set(indices(world.granted(2)))


def test_stale_or_refused_newcomers_push_out_no_fresh_chunk() -> None:
    world = World(staleness_max=2, capacity_chunks=3)
    world.publish(5)
    for index, version in enumerate((5, 3, 5)):
        world.append("w0", index, version=version)
    world.publish(6)
    world.append("w0", 3, version=6)
    assert AdmissionOutcome.STALE is world.append("w0", 4, version=2)
    assert [0, 2, 3] == [index for _, index, _ in world.held()]


def test_one_learners_fetch_does_not_delete_what_another_one_holds() -> None:
    world = World()
    world.fill(4)
    first = world.granted(2, request_id="first")
    second = world.granted(2, request_id="second")
    assert [] == world.events(PayloadsDisposable)
    assert first.fragments == world.prepared("first")
    assert second.fragments == world.prepared("second")


def test_batch_of_a_learner_that_stopped_is_not_pinned_for_ever() -> None:
    world = World(lease_s=60.0)
    world.fill(2)
    world.granted(2)
    world.advance(60.0)
    assert 2 == len(world.held())


def test_fetch_of_a_dead_learner_takes_nothing_from_the_next_one() -> None:
    world = World()
    dead = world.fetch(2)
    world.cancel(dead)
    alive = world.fetch(2)
    world.fill(2)
    assert [alive] == [grant.caller_id for grant in world.events(FetchGranted)]


def test_fetch_that_nobody_cancels_ends_by_itself() -> None:
    world = World()
    world.fetch(2, max_wait_s=30.0)
    world.advance(30.0)
    assert 0 == world.seen().waiter_count


def test_large_request_is_not_starved_by_small_ones_behind_it() -> None:
    world = World()
    large = world.fetch(3)
    small = [world.fetch(1) for _ in range(2)]
    world.fill(5)
    assert [large, *small] == [grant.caller_id for grant in world.events(FetchGranted)]


def test_end_of_a_session_leaves_waiters_their_turn() -> None:
    world = World()
    waits = world.fetch(1)
    world.start("s1")
    world.append(session_id="s1")
    assert [waits] == [grant.caller_id for grant in world.events(FetchGranted)]


def test_core_knows_no_loop_network_clock_or_log() -> None:
    forbidden = {"asyncio", "time", "socket", "threading", "logging", "os", "grpc", "redis"}
    imported = set()
    for path in CORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    assert set() == imported & forbidden


def test_payloads_to_delete_are_told_in_one_batch_and_deleted_by_somebody_else() -> None:
    world = World(staleness_max=0)
    world.fill(400)
    world.buffers.take_events()
    world.publish(1)
    [event] = world.events(PayloadsDisposable)
    assert 400 == len(event.payloads)


def test_payloads_live_by_explicit_references_not_by_the_collector() -> None:
    world = World()
    world.append()
    grant = world.granted()
    lease_id = grant.lease_id
    del grant
    gc.collect()
    assert [] == world.events(PayloadsDisposable)
    world.release(lease_id)
    assert 1 == len(world.events(PayloadsDisposable))
    assert not any("__del__" in path.read_text() for path in CORE.rglob("*.py"))


def test_nothing_is_lost_that_was_written_down() -> None:
    world = World(fragments_per_chunk=2, uses_max=2)
    world.fill(3)
    world.append("w1", 0)
    world.granted(2)
    twin = BufferSet.restore((), random.Random(1))
    twin.replay(world.buffers.take_entries())
    assert world.buffers.snapshot() == twin.snapshot()


def test_gap_or_duplicate_costs_the_open_chunk_at_most_and_never_the_worker() -> None:
    world = World(fragments_per_chunk=2)
    assert AdmissionOutcome.ADMITTED is world.append("w0", 0)
    assert AdmissionOutcome.DUPLICATE is world.append("w0", 0)
    assert AdmissionOutcome.ADMITTED is world.append("w0", 5)
    assert AdmissionOutcome.ADMITTED is world.append("w0", 6)
    assert [("w0", 5, 0)] == world.held()


def test_duplicate_is_no_second_chunk_even_with_chunks_of_one() -> None:
    world = World()
    for index in (0, 0, 1, 0):
        world.append("w0", index)
    assert [("w0", 0, 0), ("w0", 1, 0)] == world.held()


def test_open_chunks_of_workers_that_died_do_not_stay() -> None:
    world = World(fragments_per_chunk=4, staleness_max=1, open_chunk_s=100.0)
    for number in range(5):
        world.append(f"w{number}", 0)
    world.publish(2)
    assert 0 == world.seen().open_fragment_count
    world.append("w9", 0, version=2)
    world.advance(100.0)
    assert (0, 0) == (world.seen().open_fragment_count, world.seen().payload_bytes)


def test_open_chunks_do_not_outlive_their_session() -> None:
    world = World(fragments_per_chunk=4)
    world.append("w0", 0)
    world.start("s1")
    assert (0, 0) == (world.seen().open_fragment_count, world.seen().worker_count)


def test_dropped_steps_break_a_chunk_although_the_indices_go_on() -> None:
    world = World(fragments_per_chunk=2)
    world.append("w0", 0)
    world.append("w0", 1, discontinuity=True)
    assert [] == world.held()
    world.append("w0", 2)
    assert [("w0", 1, 0)] == world.held()


def test_versions_neither_go_back_nor_come_from_the_future() -> None:
    world = World()
    world.publish(3)
    with pytest.raises(VersionRegressedError):
        world.publish(2)
    with pytest.raises(InvalidArgumentError, match="newest version published is 3"):
        world.append(version=4)


@pytest.mark.parametrize("fragment_count", [0, -1])
def test_fetch_of_nothing_is_refused_and_releases_nothing(fragment_count: int) -> None:
    world = World()
    world.append()
    lease = world.granted()
    with pytest.raises(InvalidArgumentError, match="fragment_count must be a positive multiple"):
        world.fetch(fragment_count)
    world.renew(lease.lease_id)


@pytest.mark.parametrize("uses_max", [0, -1])
def test_limits_that_make_no_sense_are_refused(uses_max: int) -> None:
    with pytest.raises(InvalidArgumentError, match="uses_max"):
        BufferConfig(uses_max=uses_max)


def test_nothing_is_taken_before_or_after_a_session() -> None:
    world = World(starts=False)
    assert AdmissionOutcome.WRONG_SESSION is world.append(session_id="early")
    world.start("s0")
    world.append()
    world.end("s0")
    assert AdmissionOutcome.WRONG_SESSION is world.append("w0", 1)
    assert 0 == world.seen().payload_bytes


def test_staleness_is_known_at_each_delivery_and_counters_only_grow() -> None:
    world = World(staleness_max=2, uses_max=2)
    world.append()
    world.publish(1)
    assert [1] == [granted.staleness for granted in world.granted().fragments]
    world.publish(2)
    assert [2] == [granted.staleness for granted in world.granted().fragments]
    before = world.seen().counters
    world.append("w0", 0)
    world.append("w0", 1, version=2)
    after = world.seen().counters
    assert all(after[name] >= count for name, count in before.items())
    assert 2 == after["uses"]


def test_one_dropped_fragment_counts_as_one() -> None:
    world = World(fragments_per_chunk=4)
    world.append("w0", 0)
    world.append("w0", 2)
    assert 1 == world.count("fragments_discarded_gap")


def test_bytes_have_a_limit_of_their_own() -> None:
    world = World(capacity_chunks=1000, capacity_bytes=50)
    for index in range(20):
        world.append("w0", index, size_bytes=20)
    assert (40, 2) == (world.seen().payload_bytes, world.seen().chunk_count)


def test_several_buffers_live_beside_each_other() -> None:
    world = World()
    other = BufferName("other")
    for _ in range(2):
        world.buffers.apply(CreateBuffer(other, BufferConfig()), now=world.now)
    world.buffers.apply(start_session("another run", buffer=other), now=world.now)
    assert "s0" == world.buffers[DEFAULT_BUFFER].model.session_id
    assert "another run" == world.buffers[other].model.session_id


def test_fetch_ends_at_its_deadline_and_says_what_it_waited_for() -> None:
    world = World()
    world.append()
    world.fetch(3, max_wait_s=20.0)
    world.advance(20.0)
    [elapsed] = world.events(WaitElapsed)
    assert (20.0, "1 chunk is held and 3 are needed") == (
        elapsed.wait_s,
        elapsed.reason,
    )


def test_fetch_may_only_look() -> None:
    world = World()
    world.fetch(1, max_wait_s=0.0)
    assert 1 == len(world.events(WaitElapsed))


def test_unsent_payload_of_a_refused_fragment_is_never_told_disposable() -> None:
    """The buffer deletes only what it took: another one of the same id may be in use."""
    world = World(staleness_max=0)
    world.publish(1)
    world.buffers.take_events()
    fragment = make_fragment("w0", 0, version=0)
    world.offer(fragment)
    assert [] == world.events(PayloadsDisposable)
