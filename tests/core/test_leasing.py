"""B10, B11 and B13: uses, leases, and when a payload may be deleted."""

import gc
from collections.abc import Callable

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER
from breadbox_server.core.model.config import FullPolicy, LeaseExpiryPolicy
from breadbox_server.core.model.errors import InvalidArgumentError, LeaseNotFoundError
from breadbox_server.core.model.events import (
    ChunksEvicted,
    EvictionReason,
    FetchGranted,
    LeaseEnd,
    LeaseEnded,
    PayloadsDisposable,
)
from breadbox_server.core.model.ids import LeaseId
from breadbox_server.core.model.inputs import AdmissionOutcome, ReleaseMode
from breadbox_server.core.state.grants import Lease
from core.world import World, indices
from support.inputs import start_session
from support.metadata import make_fragment


def disposed(world: World) -> list[str]:
    events = world.events(PayloadsDisposable)
    return [payload.payload_id for event in events for payload in event.payloads]


def test_chunk_leaves_after_its_last_use_and_its_payload_when_the_lease_ends() -> None:
    world = World(uses_max=2)
    fragment = make_fragment()
    world.offer(fragment)
    first = world.granted()
    assert 1 == first.fragments[0].use_count
    second = world.granted()
    assert 2 == second.fragments[0].use_count
    assert ([], 10) == (world.held(), world.seen().payload_bytes)
    world.release(second.lease_id)
    assert [] == disposed(world)
    world.release(first.lease_id)
    assert [fragment.payload.payload_id] == disposed(world)
    assert 1 == world.count("chunks_evicted_used_up")


def test_consumed_chunk_is_told_used_up_once_with_its_uses() -> None:
    world = World()
    world.append()
    world.release(world.granted().lease_id)
    events = world.buffers.take_events()
    assert [ChunksEvicted(DEFAULT_BUFFER, EvictionReason.USED_UP, (1,), (0,))] == [
        event for event in events if isinstance(event, ChunksEvicted)
    ]
    assert LeaseEnded(DEFAULT_BUFFER, LeaseEnd.CONSUMED, (0,), (0,)) in events


def test_a_lease_ends_with_the_staleness_of_its_chunks_then_while_its_session_is_current() -> None:
    world = World(staleness_max=2)
    world.fill(2)
    first, second = world.granted(), world.granted()
    world.publish(5)
    world.release(first.lease_id)
    world.buffers.apply(start_session("next"), now=world.now)
    world.release(second.lease_id)
    ended = [event for event in world.buffers.take_events() if isinstance(event, LeaseEnded)]
    assert [(5,), ()] == [event.staleness for event in ended]


def test_returned_chunk_comes_back_at_its_old_age_with_its_use_given_back() -> None:
    world = World(sampler="oldest_first", capacity_chunks=3)
    world.fill(2)
    lease = world.granted()
    world.give_back(lease.lease_id)
    assert [("w0", 0, 0), ("w0", 1, 0)] == world.held()
    world.append("w0", 2)
    world.append("w0", 3)
    assert [("w0", 1, 0), ("w0", 2, 0), ("w0", 3, 0)] == world.held()


@pytest.mark.parametrize(
    "give_back",
    [
        lambda world, grant: world.give_back(grant.lease_id),
        lambda world, grant: world.advance(1.0),
        lambda world, grant: world.report_undelivered(grant.lease_id),
    ],
    ids=["returned", "expired", "undelivered"],
)
@pytest.mark.parametrize("uses_max", [1, 2])
def test_place_of_a_leased_chunk_is_its_own_until_its_lease_ends_where_producers_wait(
    uses_max: int, give_back: Callable[[World, FetchGranted], object]
) -> None:
    world = World(capacity_chunks=2, uses_max=uses_max, lease_s=1.0, full_policy=FullPolicy.BLOCK)
    world.fill(2)
    for _ in range(uses_max - 1):
        world.release(world.granted(2).lease_id)
    grant = world.granted(2)
    assert [] == world.held()
    assert AdmissionOutcome.BUFFER_FULL is world.append("w1")
    give_back(world, grant)
    assert [("w0", 0, uses_max - 1), ("w0", 1, uses_max - 1)] == world.held()
    assert AdmissionOutcome.BUFFER_FULL is world.append("w1")
    assert 0 == world.count("chunks_evicted_capacity")


def test_place_of_a_chunk_is_free_once_it_is_consumed_or_its_session_has_ended() -> None:
    world = World(capacity_chunks=1, full_policy=FullPolicy.BLOCK)
    world.fill(1)
    grant = world.granted()
    assert AdmissionOutcome.BUFFER_FULL is world.append("w1")
    world.release(grant.lease_id)
    assert AdmissionOutcome.ADMITTED is world.append("w1")
    world.granted()
    world.start("s1")
    assert AdmissionOutcome.ADMITTED is world.append("w1", session_id="s1")


def test_fetch_is_told_how_many_places_are_under_leases_where_producers_wait() -> None:
    world = World(capacity_chunks=2, full_policy=FullPolicy.BLOCK)
    world.fill(2)
    world.granted(1)
    world.fetch(2)
    assert (
        "1 chunk is held and 2 are needed, and 1 of capacity_chunks (2) is under leases"
        == world.seen().waiting_reason
    )


def test_use_given_back_by_one_of_two_leases_returns_the_chunk() -> None:
    world = World(uses_max=2)
    world.append()
    first, second = world.granted(), world.granted()
    world.give_back(first.lease_id)
    assert [("w0", 0, 1)] == world.held()
    third = world.granted()
    assert 2 == third.fragments[0].use_count
    for lease in (second, third):
        world.release(lease.lease_id)
    assert 0 == world.seen().payload_bytes


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (EvictionReason.STALE, lambda world: world.publish(3)),
        (EvictionReason.SESSION_ENDED, lambda world: world.start("s1")),
        (EvictionReason.CAPACITY, lambda world: world.fill(2, worker_id="w1")),
    ],
)
def test_returned_chunk_that_has_no_place_any_more_is_evicted(
    reason: EvictionReason, change: Callable[[World], object]
) -> None:
    world = World(capacity_chunks=2)
    world.append()
    lease = world.granted()
    change(world)
    world.buffers.take_events()
    held = world.held()
    world.give_back(lease.lease_id)
    assert held == world.held()
    events = world.buffers.take_events()
    assert ChunksEvicted(DEFAULT_BUFFER, reason, (0,), (0,)) in events


def test_stale_chunk_is_not_served_although_its_lease_is_returned_late() -> None:
    """B6: the race of a lease and a publish."""
    world = World(staleness_max=0)
    world.append()
    lease = world.granted()
    world.publish(1)
    world.give_back(lease.lease_id)
    world.fetch(max_wait_s=0.0)
    assert [] == world.events(FetchGranted)


def test_chunk_of_an_old_session_is_not_served_in_the_next() -> None:
    world = World()
    world.append()
    lease = world.granted()
    world.start("s1")
    world.give_back(lease.lease_id)
    assert [] == world.held()
    assert 0 == world.seen().payload_bytes


def test_lease_that_expires_gives_its_uses_back() -> None:
    world = World(lease_s=5.0)
    world.append()
    lease = world.granted()
    assert lease.expires_at == world.buffers.next_timer()
    world.advance(4.999)
    assert [] == world.held()
    world.advance(0.001)
    assert [("w0", 0, 0)] == world.held()
    assert [LeaseEnded(DEFAULT_BUFFER, LeaseEnd.EXPIRED, (0,), (0,))] == world.events(LeaseEnded)


def test_lease_that_expires_counts_as_consumed_where_configured() -> None:
    world = World(lease_s=5.0, lease_expiry_policy=LeaseExpiryPolicy.CONSUME)
    world.append()
    world.granted()
    world.advance(5.0)
    assert [] == world.held()
    assert 1 == world.count("chunks_evicted_used_up")


def test_lease_is_over_at_its_expiry_whether_or_not_the_timer_fired() -> None:
    world = World(lease_s=5.0)
    world.append()
    lease = world.granted()
    world.now += 5.0
    with pytest.raises(LeaseNotFoundError):
        world.release(lease.lease_id)
    assert [("w0", 0, 0)] == world.held()


def test_expired_chunk_satisfies_a_waiter_whose_deadline_is_the_same_instant() -> None:
    world = World(lease_s=5.0)
    world.append()
    world.granted()
    world.fetch(max_wait_s=5.0)
    world.advance(5.0)
    assert 1 == len(world.events(FetchGranted))


def test_renewal_moves_the_expiry_and_none_repeats_the_lease() -> None:
    world = World(lease_s=5.0)
    world.append()
    lease = world.granted(lease_s=8.0)
    world.advance(7.0)
    assert world.now + 8.0 == world.renew(lease.lease_id)
    assert world.now + 2.0 == world.renew(lease.lease_id, 2.0)
    world.advance(2.0)
    with pytest.raises(LeaseNotFoundError):
        world.renew(lease.lease_id)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan"), float("inf"), 86_401.0])
def test_renewal_out_of_range_is_refused(lease_s: float) -> None:
    world = World()
    world.append()
    lease = world.granted()
    with pytest.raises(InvalidArgumentError, match="lease_s"):
        world.renew(lease.lease_id, lease_s)


def test_releasing_twice_is_a_no_op_and_the_first_mode_stands() -> None:
    world = World()
    world.append()
    lease = world.granted()
    world.give_back(lease.lease_id)
    snapshot = world.buffers.snapshot()
    for mode in ReleaseMode:
        world.release(lease.lease_id, mode)
    assert snapshot == world.buffers.snapshot()


def test_unknown_and_forgotten_leases_are_refused() -> None:
    world = World(requests_remembered_max=1)
    world.fill(2)
    leases = [world.granted() for _ in range(2)]
    for lease in leases:
        world.release(lease.lease_id)
    for lease_id in (leases[0].lease_id, LeaseId("unknown")):
        with pytest.raises(LeaseNotFoundError):
            world.release(lease_id)


@pytest.mark.parametrize("undoes", [True, False])
def test_forgotten_grants_are_freed_without_a_garbage_collection(undoes: bool) -> None:
    """The server all but turns full collections off: at its size they stop everybody.

    `type(...) is`, not isinstance: some objects of the process warn when asked for their class.
    """
    world = World(requests_remembered_max=1)
    world.fill(20)
    gc.collect()
    gc.disable()
    try:
        before = sum(type(each) is Lease for each in gc.get_objects())
        for _ in range(10):
            lease_id = world.granted().lease_id
            if undoes:
                world.report_undelivered(lease_id)
            else:
                world.release(lease_id)
        after = sum(type(each) is Lease for each in gc.get_objects())
    finally:
        gc.enable()
    assert after - before <= 1


def test_request_of_more_ranks_than_are_remembered_is_remembered_until_the_next() -> None:
    world = World(requests_remembered_max=1)
    world.fill(3)
    wide = [world.granted(2, request_id="r", rank=rank, world_size=2) for rank in (0, 1)]
    for lease in wide:
        world.release(lease.lease_id)
    world.release(wide[0].lease_id)
    world.release(world.granted().lease_id)
    with pytest.raises(LeaseNotFoundError):
        world.release(wide[0].lease_id)


def test_lost_payload_takes_its_chunk_along() -> None:
    world = World(fragments_per_chunk=2)
    fragments = [make_fragment("w0", index) for index in range(2)]
    for fragment in fragments:
        world.offer(fragment)
    world.buffers.take_events()
    assert 2 == world.drop(fragments[1].payload.payload_id, "0" * 32)
    assert [] == world.held()
    assert sorted(f.payload.payload_id for f in fragments) == sorted(disposed(world))
    assert 1 == world.count("chunks_evicted_payload_lost")


def test_lost_payload_of_an_open_chunk_leaves_what_follows_it() -> None:
    world = World(fragments_per_chunk=4)
    fragments = [make_fragment("w0", index) for index in range(3)]
    for fragment in fragments:
        world.offer(fragment)
    assert 2 == world.drop(fragments[1].payload.payload_id)
    assert 1 == world.seen().open_fragment_count
    assert 2 == world.count("fragments_discarded_payload_lost")
    for index in range(3, 6):
        world.append("w0", index)
    assert [("w0", 2, 0)] == world.held()


def test_leased_chunk_whose_payload_was_lost_never_comes_back() -> None:
    world = World()
    fragment = make_fragment()
    world.offer(fragment)
    lease = world.granted()
    assert 1 == world.drop(fragment.payload.payload_id)
    assert 0 == world.drop(fragment.payload.payload_id)
    assert [] == disposed(world)
    world.give_back(lease.lease_id)
    assert [] == world.held()
    assert [fragment.payload.payload_id] == disposed(world)


def test_lower_limits_evict_at_once_what_no_longer_fits() -> None:
    world = World(staleness_max=3, uses_max=3, sampler="oldest_first")
    world.publish(3)
    for index, version in enumerate((0, 1, 2, 3, 3, 3, 3)):
        world.append("w0", index, version=version)
    for _ in range(2):
        world.release(world.granted(3).lease_id)
    world.update(staleness_max=2, uses_max=2, capacity_chunks=3, capacity_bytes=25)
    assert [("w0", 5, 0), ("w0", 6, 0)] == world.held()
    reasons = ("stale", "used_up", "capacity")
    assert [1, 2, 2] == [world.count(f"chunks_evicted_{reason}") for reason in reasons]


def test_chunk_without_a_use_left_under_a_lower_limit_lives_on_under_its_lease() -> None:
    world = World(uses_max=3)
    world.append()
    lease = world.granted()
    world.update(uses_max=1)
    assert ([], 10) == (world.held(), world.seen().payload_bytes)
    world.give_back(lease.lease_id)
    assert [("w0", 0, 0)] == world.held()


def test_higher_limit_of_uses_brings_a_leased_chunk_back() -> None:
    world = World(uses_max=1)
    world.append()
    lease = world.granted()
    world.update(uses_max=2)
    world.release(lease.lease_id)
    assert [("w0", 1)] == [(worker, uses) for worker, _, uses in world.held()]


def test_bytes_under_lease_stay_when_the_limit_is_lowered_below_them() -> None:
    world = World()
    world.fill(3)
    world.granted(2)
    world.update(capacity_bytes=15)
    assert ([], 20) == (world.held(), world.seen().payload_bytes)
    world.buffers.check_invariants()


def test_new_sampler_draws_what_is_held() -> None:
    world = World(uses_max=9)
    world.fill(4)
    for sampler, expected in (("oldest_first", [0, 1]), ("freshest_first", [3, 2])):
        world.update(uses_max=9, sampler=sampler)
        assert expected == indices(world.granted(2))


def test_fragments_per_chunk_cannot_change_while_a_fragment_is_open_held_or_leased() -> None:
    world = World(fragments_per_chunk=2)
    steps: list[Callable[[], object]] = [
        lambda: world.append("w0", 0),
        lambda: world.append("w0", 1),
        lambda: world.granted(2),
    ]
    for step in steps:
        step()
        with pytest.raises(InvalidArgumentError, match="is 2 and cannot be changed while"):
            world.update(fragments_per_chunk=3)


def test_an_empty_buffer_takes_another_fragments_per_chunk() -> None:
    world = World(fragments_per_chunk=1)
    world.fill(1)
    world.release(world.granted(1).lease_id)
    waiting = world.fetch(2)
    world.update(fragments_per_chunk=2)
    world.append("w0", 1)
    assert (1, 0) == (world.seen().open_chunk_count, world.seen().chunk_count)
    world.append("w0", 2)
    [grant] = world.events(FetchGranted)
    assert (waiting, [1, 2]) == (grant.caller_id, indices(grant))


def test_shorter_patience_with_silence_applies_at_once() -> None:
    world = World(fragments_per_chunk=2, open_chunk_s=100.0)
    world.append()
    world.advance(10.0)
    world.update(fragments_per_chunk=2, open_chunk_s=5.0)
    assert 0 == world.seen().open_chunk_count
