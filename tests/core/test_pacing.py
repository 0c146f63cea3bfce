"""Fetches that wait for older groups, versions to count from, and tickets of workers' chunks."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER as B
from breadbox_server.core.model.config import (
    AssemblyPolicy,
    BufferConfig,
    FullPolicy,
    StaleBy,
    StalePolicy,
)
from breadbox_server.core.model.errors import InvalidArgumentError, TicketNotFoundError
from breadbox_server.core.model.events import FetchGranted, RoomWaitEnded, WaitElapsed
from breadbox_server.core.model.ids import CallerId, ModelVersion, WorkerId
from breadbox_server.core.model.inputs import AdmissionOutcome, UpdateBuffer
from breadbox_server.core.pacing import Reserved, awaited, must_wait
from core.test_tickets import SIZE, Producers
from core.world import World
from support.metadata import make_fragment

ADMITTED, STALE = AdmissionOutcome.ADMITTED, AdmissionOutcome.STALE
BATCH = 2 * SIZE
"""Members that the learner fetches for each version: two groups."""


def waiting_producers(**limits: Any) -> Producers:
    defaults: dict[str, Any] = {"stale": StalePolicy.WAIT, "staleness_max": 1, "lead_versions": 1}
    return Producers(**defaults | limits)


def groups_of(event: FetchGranted) -> list[str]:
    return [each.fragment.worker_id for each in event.fragments[::SIZE]]


def is_granted(world: World) -> bool:
    return bool(world.events(FetchGranted))


def test_a_fetch_waits_while_newer_groups_would_leave_an_older_one_no_version() -> None:
    world = waiting_producers()
    slow, *quick = world.take(3)
    world.complete(*quick)
    assert quick == groups_of(world.granted(BATCH)), "at version 0 the slow one has another yet"
    world.publish(1)
    newer = world.take(2, request_id="t1")
    world.complete(*newer, version=1)
    world.fetch(BATCH)
    assert not is_granted(world)
    assert slow in world.seen().waiting_reason
    assert "begun at version 0, is not complete" in world.seen().waiting_reason
    world.complete(slow)
    [grant] = world.events(FetchGranted)
    assert [slow, newer[0]] == groups_of(grant), "the oldest ticket first"
    world.publish(2)
    assert 0 == world.count("groups_stale")


def test_the_smallest_number_of_groups_that_may_be_late_is_waited_for() -> None:
    """Two are taken for a version, so two of one age can wait for the next, and a third cannot."""
    for slow_count, granted in ((2, True), (3, False)):
        world = waiting_producers(staleness_max=2, lead_versions=2)
        world.take(slow_count)
        world.publish(1)
        world.complete(*world.take(2, request_id="t1"), version=1)
        world.fetch(BATCH)
        assert granted == is_granted(world), slow_count
    world = waiting_producers(staleness_max=2, lead_versions=2)
    world.take(3)
    world.publish(1)
    world.complete(*world.take(2, request_id="t1"), version=1)
    world.fetch(SIZE)
    assert is_granted(world), "half a batch leaves one of this version's two places"
    world.fetch(SIZE)
    assert not is_granted(world)


def test_what_cannot_be_saved_or_is_not_older_is_not_waited_for() -> None:
    world = waiting_producers(lead_versions=1)
    late = world.take(1)
    world.publish(2)
    world.complete(*world.take(2, request_id="t1"), version=2)
    world.fetch(BATCH)
    assert is_granted(world), f"{late} has no version left"
    world = waiting_producers(staleness_max=0, lead_versions=0, groups_per_version=1)
    world.append("a", 0)
    world.complete("b")
    world.fetch(SIZE)
    assert is_granted(world), "both are of one version: the other would take its place"


def test_the_wait_ends_with_the_lease_of_a_holder_that_is_gone() -> None:
    world = waiting_producers()
    world.take(1, lease_s=5.0)
    world.publish(1)
    world.complete(*world.take(2, request_id="t1"), version=1)
    world.fetch(BATCH)
    world.advance(4.9)
    assert not is_granted(world)
    world.advance(0.2)
    assert is_granted(world)
    assert 1 == world.count("groups_lost")


def test_a_group_with_members_and_without_a_holder_is_waited_for_until_it_is_silent() -> None:
    world = waiting_producers(open_chunk_s=8.0)
    [slow] = world.take(1, lease_s=5.0)
    assert ADMITTED is world.append(slow, 0)
    world.publish(1)
    world.complete(*world.take(2, request_id="t1"), version=1)
    world.fetch(BATCH)
    world.advance(7.9)
    assert not is_granted(world)
    world.advance(0.2)
    assert is_granted(world)
    assert 1 == world.count("groups_incomplete")


@pytest.mark.parametrize("how", ["given back", "lost", "too stale", "another policy", "next turn"])
def test_whatever_ends_a_group_or_its_hurry_ends_the_wait_at_once(how: str) -> None:
    world = waiting_producers()
    [slow] = world.take(1)
    first = make_fragment(slow, 0)
    assert ADMITTED is world.offer(first)
    world.publish(1)
    world.complete(*world.take(2, request_id="t1"), version=1)
    world.fetch(BATCH)
    assert not is_granted(world)
    if how == "given back":
        world.back(slow)
    elif how == "lost":
        world.drop(first.payload.payload_id)
    elif how == "too stale":
        world.publish(2)
    elif how == "another policy":
        world.buffers.apply(
            replace_config(world, stale=StalePolicy.EVICT),
            now=world.now,
        )
    else:
        world.buffers.apply(replace_config(world, staleness_max=8), now=world.now)
    assert is_granted(world)


def replace_config(world: World, **limits: Any) -> UpdateBuffer:
    return UpdateBuffer(B, replace(world.buffers[B].config, **limits))


def test_no_fetch_waits_for_a_group_that_waits_for_room() -> None:
    world = waiting_producers(
        capacity_bytes=99, capacity_chunks=9, full_policy=FullPolicy.BLOCK, open_chunk_s=1e3
    )
    [slow] = world.take(1)
    world.append(slow, 0)
    world.publish(1)
    for group in "abcd":
        world.complete(group, version=1)
    world.fetch(BATCH)
    assert not is_granted(world)
    last = make_fragment(slow, 1)
    assert AdmissionOutcome.BYTES_FULL is world.offer(last)
    world.wait(last, AdmissionOutcome.BYTES_FULL)
    assert is_granted(world)
    assert [] == world.events(RoomWaitEnded)


@pytest.mark.parametrize("how", ["its producer polls", "it is silent"])
def test_no_fetch_waits_for_a_group_that_only_a_fetch_gives_a_place(how: str) -> None:
    world = waiting_producers(capacity_chunks=4, full_policy=FullPolicy.BLOCK, group_min=1)
    [slow] = world.take(1, lease_s=8e4)
    world.append(slow, 0)
    world.publish(1)
    for group in "abc":
        world.complete(group, version=1)
    world.fetch(BATCH, max_wait_s=1e6)
    assert not is_granted(world)
    world.complete("d", version=1)
    [grant] = world.events(FetchGranted)  # All places are taken by what only this fetch takes.
    world.release(grant.lease_id)
    if how == "its producer polls":
        assert ADMITTED is world.append(slow, 1)
    else:
        world.advance(2 * world.config.open_chunk_s)
    assert slow in [each[0] for each in world.held()]


def test_a_wait_that_elapses_names_the_group_and_leaves_no_trace() -> None:
    world = waiting_producers()
    [slow] = world.take(1)
    world.publish(1)
    world.complete(*world.take(2, request_id="t1"), version=1)
    world.fetch(BATCH, max_wait_s=3.0)
    world.advance(3.0)
    [elapsed] = world.events(WaitElapsed)
    assert f"group {slow!r}, begun at version 0" in elapsed.reason
    world.complete(slow)
    assert not is_granted(world)


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("groups_per_version", {"groups_per_version": 0}),
        ("uses_max", {"uses_max": 2}),
        ("lead_versions", {"lead_versions": 3}),
        ("capacity_chunks", {"capacity_chunks": 5, "lead_versions": 2}),
    ],
)
def test_limits_under_which_a_wait_could_not_keep_its_promise_are_refused(
    name: str, limits: dict[str, int]
) -> None:
    fields: dict[str, Any] = {"groups_per_version": 2, "staleness_max": 2} | limits
    with pytest.raises(InvalidArgumentError, match=f"{name}.*where `stale` is wait"):
        BufferConfig(stale=StalePolicy.WAIT, **fields)


def test_the_rule_holds_a_fetch_back_exactly_if_the_oldest_first_would_come_too_late() -> None:
    """Beside every order in which what is under way can be delivered, at small sizes."""
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    rng = random.Random(seed)
    for _ in range(3000):
        version, bound, per_version = 5, rng.randint(0, 3), rng.randint(1, 2)
        spare, newest = rng.randint(0, 2), rng.randint(version - bound, version)
        versions = sorted(rng.choices(range(version - bound, version + 1), k=rng.randint(0, 6)))
        reserved = [
            Reserved(ModelVersion(each), WorkerId(f"g{place}"))
            for place, each in enumerate(versions)
        ]
        places = [version] * spare
        places += [version + 1 + later for later in range(bound) for _ in range(per_version)]
        older = [each for each in versions if each < newest]
        late = [
            each
            for place, each in enumerate(older)
            if place >= len(places) or places[place] > each + bound
        ]
        found = awaited(
            rng.sample(reserved, len(reserved)),
            ModelVersion(newest),
            version_min=version - bound,
            per_version=per_version,
            spare=spare,
        )
        assert (late[0] if late else None) == (found and found.version), (versions, newest)


def test_nothing_is_thrown_away_while_the_learner_takes_what_it_says() -> None:
    """Groups that last 1 to 30 s, for a learner that takes two for each version; any order."""
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    rng = random.Random(seed)
    bound = rng.choice([1, 2, 3])
    world = waiting_producers(staleness_max=bound, lead_versions=rng.randint(0, bound))
    version, request, running = 0, 0, dict[str, tuple[float, int]]()
    world.fetch(BATCH, max_wait_s=1e6)
    worst, trained = 0, 0
    while version < 300:
        request += 1
        for group in world.take(9, request_id=f"t{request}", lease_s=1e3):
            slow = rng.random() < 0.2
            running[group] = (world.now + rng.uniform(1, 6) * (5 if slow else 1), version)
        group = min(running, key=lambda each: running[each])
        until, began = running.pop(group)
        world.now = max(world.now, until)
        world.complete(group, version=began)
        while grants := world.events(FetchGranted):
            [grant] = grants
            worst = max(worst, *(each.staleness for each in grant.fragments))
            trained += len(grant.fragments) // SIZE
            world.release(grant.lease_id)
            version += 1
            world.publish(version)
            world.fetch(BATCH, max_wait_s=1e6)
    world.buffers.check_invariants()
    assert 2 * version == trained
    assert worst <= bound
    assert (0, 0) == (world.count("groups_stale"), world.count("chunks_evicted_stale"))


# From which version


@pytest.mark.parametrize("assembly", AssemblyPolicy)
def test_staleness_counts_from_the_newest_step_where_the_buffer_says_so(
    assembly: AssemblyPolicy,
) -> None:
    for by, outcome in ((StaleBy.OLDEST, STALE), (StaleBy.NEWEST, ADMITTED)):
        world = World(assembly=assembly, staleness_max=1, stale_by=by)
        world.publish(5)
        assert outcome is world.append("a", 0, version=2, version_max=4)
        if outcome is ADMITTED:
            assert [1] == [each.staleness for each in world.granted().fragments]
        world.buffers.check_invariants()


def test_a_chunk_is_as_stale_as_its_stalest_fragment_by_either() -> None:
    world = World(fragments_per_chunk=2, staleness_max=2, stale_by=StaleBy.NEWEST)
    world.publish(4)
    world.append("a", 0, version=0, version_max=2)
    world.append("a", 1, version=1, version_max=4)
    assert [2, 2] == [each.staleness for each in world.granted(2).fragments]
    world.append("b", 0, version=3, version_max=4)
    world.append("b", 1, version=0, version_max=2)
    world.publish(5)
    assert 1 == world.count("chunks_evicted_stale")


def test_from_which_version_changes_only_without_a_session() -> None:
    world = World()
    with pytest.raises(InvalidArgumentError, match=r"stale_by.*is oldest and cannot be changed"):
        world.update(stale_by=StaleBy.NEWEST)
    world.end()
    world.update(stale_by=StaleBy.NEWEST, staleness_max=0)
    world.start("s1")
    world.publish(3, session_id="s1")
    assert ADMITTED is world.append("a", 0, session_id="s1", version=0, version_max=3)


# Tickets of chunks that workers make


def paced_workers(**limits: Any) -> Producers:
    defaults: dict[str, Any] = {
        "fragments_per_chunk": 1,
        "assembly": AssemblyPolicy.CONSECUTIVE,
        "stale": StalePolicy.WAIT,
        "staleness_max": 1,
        "lead_versions": 1,
    }
    return Producers(**defaults | limits)


def test_a_fetch_waits_for_the_chunk_that_a_worker_fills_under_a_ticket() -> None:
    world = paced_workers()
    [slow] = world.take(1)
    world.publish(1)
    for index in range(2):
        assert ADMITTED is world.append("quick", index, version=1)
    world.fetch(2)
    assert not is_granted(world)
    assert f"the chunk of ticket {slow!r}, begun at version 0" in world.seen().waiting_reason
    assert ADMITTED is world.append("slow", 0, version=0)
    world.back(slow)
    [grant] = world.events(FetchGranted)
    assert ["slow", "quick"] == [each.fragment.worker_id for each in grant.fragments]
    assert {"given_back": 1} == world.ended()


def test_tickets_of_workers_are_counted_with_what_is_held_and_delivered() -> None:
    world = paced_workers()
    first = world.take(9)
    assert 4 == len(first)
    world.append("w", 0)
    world.back(first[0])
    assert [] == world.take(1, request_id="t1"), "its chunk is held"
    world.append("w", 1)
    world.back(first[1])
    world.release(world.granted(2).lease_id)
    assert [] == world.take(1, request_id="t2"), "they were delivered at this version"
    world.publish(1)
    assert 2 == len(world.take(9, request_id="t3"))


def test_a_ticket_of_a_worker_ends_once_by_its_holder_expiry_or_session() -> None:
    world = paced_workers()
    given, expired, kept = world.take(3, lease_s=5.0)
    world.back(given)
    with pytest.raises(TicketNotFoundError):
        world.back(given)
    with pytest.raises(InvalidArgumentError, match=r"member.*is of groups"):
        world.back(kept, 0)
    world.advance(4.0)
    world.renew_ticket(kept)
    world.advance(1.0)
    with pytest.raises(TicketNotFoundError):
        world.renew_ticket(expired)
    world.restart()
    assert 1 == world.seen().ticket_count
    world.end()
    assert {"given_back": 1, "expired": 1, "session_ended": 1} == world.ended()


def test_a_caller_that_waits_for_a_ticket_of_a_worker_gets_the_one_that_is_given_back() -> None:
    world = paced_workers(lead_versions=0)
    first, _ = world.take(2)
    caller: CallerId = world.ask(request_id="t1", wait_s=9.0)
    assert [] == world.taken()
    world.back(first)
    [taken] = world.buffers.take_events()[-1:]
    assert caller == taken.caller_id  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(20))
def test_whether_a_fetch_waits_follows_from_how_many_are_under_way_of_each_version(
    seed: int,
) -> None:
    print("seed", seed)  # noqa: T201 - told when it fails
    rng = random.Random(seed)
    for _ in range(200):
        versions = [ModelVersion(rng.randrange(6)) for _ in range(rng.randrange(12))]
        reserved = [Reserved(each, WorkerId(f"g{i}")) for i, each in enumerate(versions)]
        newest = ModelVersion(rng.randrange(7))
        version_min, per_version, spare = rng.randrange(5), rng.randrange(4), rng.randrange(4)
        waited_for = awaited(
            reserved, newest, version_min=version_min, per_version=per_version, spare=spare
        )
        assert (waited_for is not None) == must_wait(
            Counter(versions), newest, version_min=version_min, per_version=per_version, spare=spare
        )
