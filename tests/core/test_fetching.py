"""B8, B9 and B12: who is granted what, when, and what a repeated request gets."""

from typing import Any

import pytest

from breadbox_server.core.model.config import (
    FullPolicy,
    MinimumChunks,
    SampleToInsertRatio,
    SchemaPolicy,
)
from breadbox_server.core.model.errors import (
    FetchExceedsCapacityError,
    InvalidArgumentError,
    LeaseNotFoundError,
    RequestMismatchError,
    RequestNotFoundError,
    WaitersFullError,
)
from breadbox_server.core.model.events import FetchGranted, RequestRefused, StepsEnded, WaitElapsed
from breadbox_server.core.model.ids import CallerId, LeaseId
from breadbox_server.core.model.inputs import AdmissionOutcome
from breadbox_server.core.state.grants import RETRIES_MAX
from core.world import World, indices


def test_fetch_that_can_be_met_is_granted_at_once() -> None:
    world = World(fragments_per_chunk=2, staleness_max=3)
    world.fill(2)
    world.publish(2)
    grant = world.granted(4)
    assert [0, 1, 2, 3] == sorted(indices(grant))
    assert ("s0", 2, 0.0, True) == (
        grant.session_id,
        grant.model_version,
        grant.wait_s,
        grant.first_delivery,
    )
    assert {(2, 1)} == {(granted.staleness, granted.use_count) for granted in grant.fragments}
    assert world.now + 60.0 == grant.expires_at


def test_fragments_of_a_chunk_stand_together_in_order() -> None:
    world = World(fragments_per_chunk=3)
    world.fill(4)
    drawn = indices(world.granted(12))
    assert [(i, i + 1, i + 2) for i in drawn[::3]] == list(
        zip(drawn[::3], drawn[1::3], drawn[2::3], strict=True)
    )


def test_fetch_waits_for_the_append_that_satisfies_it() -> None:
    world = World()
    caller_id = world.fetch(2)
    world.advance(3.0)
    world.append("w0", 0)
    assert [] == world.events(FetchGranted)
    world.append("w0", 1)
    [grant] = world.events(FetchGranted)
    assert (caller_id, 3.0) == (grant.caller_id, grant.wait_s)


@pytest.mark.parametrize("fragment_count", [0, -4, 3, 2.0, True])
def test_fragment_count_that_makes_no_whole_chunks_is_refused_with_both_numbers(
    fragment_count: int,
) -> None:
    world = World(fragments_per_chunk=2)
    with pytest.raises(InvalidArgumentError, match=f"= 2, got {fragment_count!r}"):
        world.fetch(fragment_count)


def test_fetch_beyond_capacity_is_refused_with_both_numbers() -> None:
    world = World(fragments_per_chunk=2, capacity_chunks=3)
    with pytest.raises(FetchExceedsCapacityError) as caught:
        world.fetch(8)
    assert {"requested": "8", "capacity": "6", "unit": "fragments"} == caught.value.metadata


@pytest.mark.parametrize("full_policy", FullPolicy)
def test_fetch_that_bytes_can_never_satisfy_is_refused_with_both_numbers(
    full_policy: FullPolicy,
) -> None:
    world = World(capacity_chunks=10, capacity_bytes=45, full_policy=full_policy)
    waiting = world.fetch(5)
    behind = world.fetch(4)
    for index in range(4):
        world.append("w0", index, size_bytes=10)
    refused, trained, granted = world.buffers.take_events()[-3:]
    assert isinstance(trained, StepsEnded)
    assert isinstance(refused, RequestRefused)
    assert isinstance(granted, FetchGranted)
    assert (waiting, behind) == (refused.caller_id, granted.caller_id)
    assert isinstance(refused.error, FetchExceedsCapacityError)
    wanted = {"requested": "50", "capacity": "45", "unit": "bytes"}
    assert wanted == refused.error.metadata
    assert "raise capacity_bytes" in str(refused.error)


def test_fetch_that_bytes_can_never_satisfy_is_refused_at_once_when_they_are_full() -> None:
    world = World(capacity_chunks=10, capacity_bytes=45)
    for index in range(4):
        world.append("w0", index, size_bytes=10)
    with pytest.raises(FetchExceedsCapacityError, match="needs at least 50 bytes"):
        world.fetch(5)
    world.granted(4)


def test_fetch_waits_while_smaller_chunks_or_ended_leases_could_make_room() -> None:
    world = World(capacity_chunks=10, capacity_bytes=45, uses_max=1)
    world.append("w0", 0, size_bytes=5)
    world.append("w0", 1, size_bytes=30)
    waiting = world.fetch(3)
    world.append("w0", 2, size_bytes=5)
    assert [waiting] == [grant.caller_id for grant in world.events(FetchGranted)]
    world = World(capacity_chunks=10, capacity_bytes=45, uses_max=1)
    world.fill(2, size_bytes=20)
    lease = world.granted(2)
    waiting = world.fetch(2)
    assert AdmissionOutcome.BYTES_FULL is world.append("w0", 2, size_bytes=20)
    assert [] == world.events(RequestRefused)
    world.release(lease.lease_id)
    for index in (2, 3):
        world.append("w0", index, size_bytes=20)
    assert [waiting] == [grant.caller_id for grant in world.events(FetchGranted)]


def test_whoever_waits_beside_full_bytes_is_told_of_them() -> None:
    world = World(capacity_chunks=10, capacity_bytes=45)
    world.append("w0", 0, size_bytes=5)
    world.append("w0", 1, size_bytes=30)
    world.fetch(3)
    expected = "2 chunks are held and 3 are needed, and 35 bytes of capacity_bytes (45) are in use"
    assert expected == world.seen().waiting_reason


def test_count_must_be_whole_chunks_for_each_rank() -> None:
    world = World(fragments_per_chunk=2)
    with pytest.raises(InvalidArgumentError, match=r"2 \* 3 = 6, got 8"):
        world.fetch(8, world_size=3)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 1},
        {"rank": -1},
        {"world_size": 0},
        {"world_size": 2**17},
        {"lease_s": 0.0},
        {"lease_s": float("nan")},
        {"max_wait_s": float("nan")},
        {"max_wait_s": float("inf")},
        {"request_id": "a/b"},
    ],
)
def test_malformed_fetches_are_refused_and_leave_nothing(fields: dict[str, Any]) -> None:
    world = World()
    with pytest.raises(InvalidArgumentError):
        world.fetch(**fields)
    assert 0 == world.seen().waiter_count


def test_more_ranks_than_leases_can_never_be_granted() -> None:
    world = World(leases_max=2)
    with pytest.raises(InvalidArgumentError, match="leases_max is 2"):
        world.fetch(3, world_size=3)


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    world = World()
    first = world.fetch(3)
    second = world.fetch(1)
    world.append("w0", 0)
    world.append("w0", 1)
    assert [] == world.events(FetchGranted)
    third = world.fetch(1, max_wait_s=0.0)
    [elapsed] = world.events(WaitElapsed)
    assert third == elapsed.caller_id
    assert "2 fetches wait in order of arrival; for the first, 2 chunks are held" in elapsed.reason
    world.append("w0", 2)
    assert [first] == [grant.caller_id for grant in world.events(FetchGranted)]
    world.append("w0", 3)
    assert [second] == [grant.caller_id for grant in world.events(FetchGranted)]


def test_waiter_that_cancels_leaves_no_trace_and_lets_the_next_pass() -> None:
    world = World()
    first = world.fetch(2)
    second = world.fetch(1)
    world.append()
    world.cancel(first)
    assert [second] == [grant.caller_id for grant in world.events(FetchGranted)]
    assert 0 == world.seen().waiter_count
    world.cancel(first)


def test_waiter_that_times_out_is_told_why_and_lets_the_next_pass() -> None:
    world = World()
    first = world.fetch(2, max_wait_s=5.0)
    second = world.fetch(1, max_wait_s=9.0)
    world.append()
    world.advance(5.0)
    events = world.buffers.take_events()
    [elapsed] = [event for event in events if isinstance(event, WaitElapsed)]
    assert (first, 5.0) == (elapsed.caller_id, elapsed.wait_s)
    assert "1 chunk is held and 2 are needed" == elapsed.reason
    assert [second] == [e.caller_id for e in events if isinstance(e, FetchGranted)]


def test_fetch_without_patience_is_answered_at_once() -> None:
    world = World()
    caller_id = world.fetch(max_wait_s=0.0)
    assert [caller_id] == [event.caller_id for event in world.events(WaitElapsed)]
    assert world.buffers.next_timer() is None


def test_waiters_beyond_the_limit_are_refused_unless_they_need_not_wait() -> None:
    world = World(waiters_max=1)
    world.fetch(2)
    with pytest.raises(WaitersFullError, match="1 fetches wait"):
        world.fetch(1)
    world.fetch(1, max_wait_s=0.0)
    assert 1 == len(world.events(WaitElapsed))


def test_retry_of_a_waiting_request_waits_in_the_same_place() -> None:
    world = World(waiters_max=1)
    first = world.fetch(request_id="r", max_wait_s=5.0)
    again = world.fetch(request_id="r", max_wait_s=9.0)
    world.advance(5.0)
    assert [first] == [event.caller_id for event in world.events(WaitElapsed)]
    world.append()
    assert [again] == [event.caller_id for event in world.events(FetchGranted)]


def test_retries_of_one_request_are_bounded() -> None:
    world = World()
    for _ in range(RETRIES_MAX + 1):
        world.fetch(request_id="r")
    with pytest.raises(WaitersFullError):
        world.fetch(request_id="r")
    assert 1 == world.seen().waiter_count


def test_repeated_request_gets_the_same_grant() -> None:
    """B12: a retry after a lost reply burns no second use."""
    world = World()
    world.fill(5)
    first = world.granted(2, request_id="r")
    world.advance(1.0)
    again = world.granted(2, request_id="r")
    assert (first.lease_id, first.fragments) == (again.lease_id, again.fragments)
    assert (True, False) == (first.first_delivery, again.first_delivery)
    assert first.expires_at == again.expires_at
    assert 3 == world.seen().chunk_count


def test_repeated_request_whose_lease_ended_is_told_so() -> None:
    world = World()
    world.fill(2)
    lease = world.granted(request_id="r")
    world.release(lease.lease_id)
    with pytest.raises(LeaseNotFoundError) as caught:
        world.fetch(request_id="r")
    assert {"lease": lease.lease_id} == caught.value.metadata


def test_ended_requests_are_remembered_up_to_a_limit() -> None:
    world = World(requests_remembered_max=1)
    world.fill(3)
    for request_id in ("r0", "r1"):
        world.release(world.granted(request_id=request_id).lease_id)
    assert 1 == len(world.granted(request_id="r0").fragments)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"fragment_count": 4}, "fragment_count"), ({"world_size": 2}, "world_size")],
)
def test_request_that_comes_again_with_another_size_is_refused(
    fields: dict[str, int], field: str
) -> None:
    world = World()
    world.fetch(2, request_id="waiting")
    with pytest.raises(RequestMismatchError) as caught:
        world.fetch(**{"fragment_count": 2, **fields}, request_id="waiting")
    assert field == caught.value.field
    world.fill(2)
    with pytest.raises(RequestMismatchError):
        world.fetch(**{"fragment_count": 2, **fields}, request_id="waiting")


def test_ranks_of_one_request_get_disjoint_shares_of_one_draw() -> None:
    world = World()
    world.fill(8)
    shares = {rank: world.granted(6, request_id="r", rank=rank, world_size=3) for rank in (1, 0, 2)}
    assert 3 == len({grant.lease_id for grant in shares.values()})
    whole = world.prepared("r")
    assert whole == shares[0].fragments + shares[1].fragments + shares[2].fragments
    assert 6 == len({granted.chunk_id for granted in whole})
    assert 1 == world.count("grants")


def test_ranks_of_unequal_shares_know_the_steps_of_all_and_of_equal_ones_nothing() -> None:
    world = World(fragments_per_chunk=1, sampler="oldest_first", schema=SchemaPolicy.RAGGED)
    for index, step_count in enumerate((5, 6, 7, 8, 4, 4)):
        assert world.append("w0", index, step_count=step_count) is AdmissionOutcome.ADMITTED
    ranks = [world.granted(2, request_id="r", rank=rank, world_size=2) for rank in (1, 0)]
    assert [((5,), (6,))] * 2 == [rank.step_counts for rank in ranks]
    assert ((5,), (6,)) == world.granted(2, request_id="r", rank=1, world_size=2).step_counts
    assert () == world.granted(2).step_counts, "one rank knows its own"
    assert () == world.granted(2, request_id="equal", rank=0, world_size=2).step_counts


def test_late_rank_gets_its_share_while_its_lease_lives() -> None:
    world = World(lease_s=10.0)
    world.fill(2)
    world.granted(2, request_id="r", rank=0, world_size=2)
    world.advance(9.0)
    late = world.granted(2, request_id="r", rank=1, world_size=2)
    assert (True, world.now + 1.0) == (late.first_delivery, late.expires_at)
    world.advance(1.0)
    with pytest.raises(LeaseNotFoundError):
        world.fetch(2, request_id="r", rank=1, world_size=2)


def test_ranks_wait_together_and_are_granted_together() -> None:
    world = World()
    callers = [world.fetch(2, request_id="r", rank=rank, world_size=2) for rank in (0, 1)]
    assert 1 == world.seen().waiter_count
    world.fill(2)
    grants = world.events(FetchGranted)
    assert callers == [grant.caller_id for grant in grants]
    assert 2 == len({grant.lease_id for grant in grants})


def test_rank_that_cancels_leaves_the_others_waiting() -> None:
    world = World()
    gone = world.fetch(2, request_id="r", rank=0, world_size=2)
    stays = world.fetch(2, request_id="r", rank=1, world_size=2)
    world.cancel(gone)
    world.fill(2)
    assert [stays] == [grant.caller_id for grant in world.events(FetchGranted)]


def test_each_rank_may_ask_for_a_life_of_its_own_lease() -> None:
    world = World(lease_s=10.0)
    world.fetch(2, request_id="r", rank=0, world_size=2)
    world.fetch(2, request_id="r", rank=1, world_size=2, lease_s=3.0)
    world.fill(2)
    assert [world.now + 10.0, world.now + 3.0] == [
        grant.expires_at for grant in world.events(FetchGranted)
    ]


def test_prepared_lists_the_whole_while_any_rank_holds_its_lease() -> None:
    world = World()
    world.fill(2)
    first = world.granted(2, request_id="r", rank=0, world_size=2)
    second = world.granted(2, request_id="r", rank=1, world_size=2)
    world.release(first.lease_id)
    assert first.fragments + second.fragments == world.prepared("r")
    world.release(second.lease_id)
    with pytest.raises(RequestNotFoundError):
        world.prepared("r")


def test_the_latest_request_is_the_last_granted_that_has_a_lease() -> None:
    """For the ancestor's interface, whose ranks know no request."""
    world = World()
    world.fill(2)
    assert "" == world.seen().latest_request_id
    first, second = world.granted(request_id="first"), world.granted(request_id="second")
    assert "second" == world.seen().latest_request_id
    world.release(second.lease_id)
    assert "first" == world.seen().latest_request_id
    world.release(first.lease_id)
    assert "" == world.seen().latest_request_id


def test_a_request_whose_lease_expired_is_the_latest_until_another_is_granted() -> None:
    """Its ranks would take nothing for a batch that was not fetched yet."""
    world = World(lease_s=5.0)
    world.fill(2)
    world.granted(request_id="first")
    world.advance(5.0)
    assert "first" == world.seen().latest_request_id
    with pytest.raises(RequestNotFoundError, match="its leases have ended"):
        world.prepared("first")
    world.release(world.granted(request_id="second").lease_id)
    assert "" == world.seen().latest_request_id


def test_prepared_fragments_are_those_of_a_named_request() -> None:
    world = World()
    world.fill(1)
    world.granted(request_id="r")
    with pytest.raises(InvalidArgumentError, match="request_id"):
        world.prepared("")


def test_prepared_of_a_request_that_waits_or_is_unknown_is_refused() -> None:
    world = World()
    world.fetch(request_id="r")
    for request_id in ("r", "unknown"):
        with pytest.raises(RequestNotFoundError):
            world.prepared(request_id)


def test_draws_follow_the_seed() -> None:
    """B9: equal seeds draw alike, others do not."""

    def draw(seed: int) -> list[list[int]]:
        world = World(seed=seed, uses_max=10)
        world.fill(50)
        return [indices(world.granted(10)) for _ in range(3)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_uniform_draws_are_uniform_and_without_replacement() -> None:
    world = World(uses_max=10**6, leases_max=10**6)
    world.fill(10)
    counts = [0] * 10
    for _ in range(1000):
        drawn = indices(world.granted(3))
        assert 3 == len(set(drawn))
        for index in drawn:
            counts[index] += 1
    # 300 each; a deviation of 60 is over four standard deviations.
    assert all(240 < count < 360 for count in counts), counts


def test_oldest_first_serves_in_order_of_arrival() -> None:
    world = World(sampler="oldest_first")
    world.fill(4)
    first = world.granted(2)
    assert [0, 1] == indices(first)
    world.give_back(first.lease_id)
    assert [0, 1, 2] == indices(world.granted(3))


def test_freshest_first_serves_the_newest_version() -> None:
    world = World(sampler="freshest_first", staleness_max=9)
    world.publish(5)
    for index, version in enumerate((3, 5, 4, 5)):
        world.append("w0", index, version=version)
    first = world.granted(3)
    assert [3, 1, 2] == indices(first)
    world.give_back(first.lease_id)
    assert [3, 1, 2, 0] == indices(world.granted(4))


def test_unknown_sampler_is_refused_with_the_names_there_are() -> None:
    world = World()
    with pytest.raises(InvalidArgumentError, match="uniform, oldest_first, newest_first,"):
        world.update(sampler="best")


def test_fetch_waits_for_the_limiters_minimum() -> None:
    world = World(limiter=MinimumChunks(3))
    world.fill(2)
    world.fetch(1)
    assert [] == world.events(FetchGranted)
    assert "the buffer holds 2 chunks, and its limiter waits for 3" == world.seen().waiting_reason
    world.append("w0", 2)
    assert 1 == len(world.events(FetchGranted))


def test_ratio_holds_back_a_learner_that_is_ahead() -> None:
    world = World(limiter=SampleToInsertRatio(1.0, 2.0), uses_max=10)
    world.fill(1)  # ahead: 1 - 0
    for _ in range(3):
        world.granted(1)  # 0, -1, -2
    world.fetch(1)
    assert [] == world.events(FetchGranted)
    reason = world.seen().waiting_reason
    assert (
        "3 chunks were delivered and 1 inserted; 1 more would bring inserted * 1 - delivered "
        "below -2" == reason
    )
    world.append("w0", 1)  # -1
    assert 1 == len(world.events(FetchGranted))


def test_ratio_holds_back_workers_that_are_ahead() -> None:
    world = World(limiter=SampleToInsertRatio(1.0, 2.0))
    world.fill(2)
    assert "buffer_full" == world.append("w0", 2).value
    world.granted(1)
    assert "admitted" == world.append("w0", 2).value


def test_ratio_lets_workers_pass_while_a_fetch_waits_for_chunks() -> None:
    """Else chunks that went stale unused would lock both sides out for ever."""
    world = World(limiter=SampleToInsertRatio(1.0, 2.0), staleness_max=0)
    world.fill(2)
    world.publish(1)
    world.fetch(4)
    for index in range(2, 6):
        assert "admitted" == world.append("w0", index, version=1).value
    assert 1 == len(world.events(FetchGranted))


def test_ratio_waits_for_its_minimum_of_chunks() -> None:
    world = World(limiter=SampleToInsertRatio(1.0, 2.0, minimum_chunk_count=3))
    world.fill(3)
    world.granted(1)
    world.fetch(1)
    assert "the buffer holds 2 chunks, and its limiter waits for 3" == world.seen().waiting_reason


def test_fetch_waits_while_as_many_leases_live_as_may() -> None:
    world = World(leases_max=1)
    world.fill(2)
    lease = world.granted(1)
    world.fetch(1)
    reason = world.seen().waiting_reason
    assert "live leases: 1 of leases_max (1); needed: 1 more" == reason
    world.release(lease.lease_id)
    assert 1 == len(world.events(FetchGranted))


def test_waiters_that_new_limits_make_impossible_are_refused() -> None:
    world = World(capacity_chunks=4, leases_max=2)
    large = world.fetch(4)
    wide = world.fetch(2, world_size=2)
    small = world.fetch(2)
    world.update(capacity_chunks=2, leases_max=1)
    refused = world.events(RequestRefused)
    assert [(large, FetchExceedsCapacityError), (wide, InvalidArgumentError)] == [
        (event.caller_id, type(event.error)) for event in refused
    ]
    world.fill(2)
    assert [small] == [grant.caller_id for grant in world.events(FetchGranted)]


def test_undelivered_grant_of_one_rank_is_undone() -> None:
    world = World()
    world.append()
    lease = world.granted(request_id="r")
    world.report_undelivered(lease.lease_id)
    assert [("w0", 0, 0)] == world.held()
    with pytest.raises(LeaseNotFoundError):
        world.release(lease.lease_id)
    again = world.granted(request_id="r")
    assert again.lease_id != lease.lease_id
    assert again.first_delivery


def test_undelivered_retry_leaves_what_an_earlier_caller_got() -> None:
    world = World()
    world.append()
    first = world.granted(request_id="r")
    again = world.granted(request_id="r")
    world.report_undelivered(again.lease_id)
    world.release(first.lease_id)
    assert [] == world.held()


def test_undelivered_grant_of_one_of_several_ranks_stays_for_its_retry() -> None:
    world = World()
    world.fill(2)
    lease = world.granted(2, request_id="r", rank=0, world_size=2)
    world.report_undelivered(lease.lease_id)
    again = world.granted(2, request_id="r", rank=0, world_size=2)
    assert (lease.lease_id, True) == (again.lease_id, again.first_delivery)


def test_undelivered_grant_that_is_unknown_or_over_is_ignored() -> None:
    world = World()
    world.append()
    lease = world.granted()
    world.release(lease.lease_id)
    world.report_undelivered(lease.lease_id)
    world.report_undelivered(LeaseId("unknown"))
    world.cancel(CallerId(12345))
    assert [] == world.held()
