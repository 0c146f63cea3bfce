"""The set of buffers: names, limits, draining, deletion, independence of each other."""

import random
from typing import Any

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.errors import (
    BufferExistsError,
    BufferNotFoundError,
    BuffersFullError,
    DrainingError,
    InvalidArgumentError,
)
from breadbox_server.core.model.events import FetchGranted, PayloadsDisposable, RequestRefused
from breadbox_server.core.model.ids import BufferName, LeaseId, PayloadId, RequestId
from breadbox_server.core.model.inputs import (
    AppendFragments,
    CreateBuffer,
    DeleteBuffer,
    Fetch,
    Offer,
    Payload,
)
from core.world import World
from support.inputs import start_session
from support.metadata import make_fragment, make_payload

OTHER = BufferName("other")


def create(world: World, name: str = OTHER, **limits: Any) -> None:
    world.buffers.apply(CreateBuffer(BufferName(name), BufferConfig(**limits)), now=world.now)


def test_default_buffer_is_there_from_the_start() -> None:
    buffers = BufferSet(random.Random(1), BufferConfig(capacity_chunks=7))
    assert ("default",) == buffers.names()
    assert 7 == buffers.describe(DEFAULT_BUFFER, now=0.0).config.capacity_chunks


def test_buffers_are_listed_by_name() -> None:
    world = World()
    create(world, "z")
    create(world, "A.1_b-c")
    assert ("A.1_b-c", "default", "z") == world.buffers.names()
    assert [True, False] == [BufferName(name) in world.buffers for name in ("z", "y")]


@pytest.mark.parametrize("name", ["", ".x", "-x", "a/b", "a b", "x" * 65, "ä", "x\n", 7])
def test_malformed_buffer_names_are_refused(name: str) -> None:
    world = World()
    with pytest.raises(InvalidArgumentError, match="buffer must be"):
        create(world, name)
    assert ("default",) == world.buffers.names()


def test_creating_again_with_equal_limits_changes_nothing_and_with_others_is_refused() -> None:
    world = World()
    create(world, capacity_chunks=5)
    create(world, capacity_chunks=5)
    with pytest.raises(BufferExistsError) as caught:
        create(world, capacity_chunks=6)
    assert {"buffer": "other"} == caught.value.metadata


def test_buffers_beyond_the_limit_are_refused() -> None:
    buffers = BufferSet(random.Random(1), BufferConfig(), buffers_max=1)
    with pytest.raises(BuffersFullError, match="limit of 1 buffers"):
        buffers.apply(CreateBuffer(OTHER, BufferConfig()), now=0.0)


def test_buffer_of_an_unknown_sampler_is_not_created() -> None:
    world = World()
    with pytest.raises(InvalidArgumentError, match="sampler"):
        create(world, sampler="best")
    assert ("default",) == world.buffers.names()


def test_everything_about_an_unknown_buffer_is_refused() -> None:
    world = World()
    for act in (
        lambda: world.buffers.apply(start_session(buffer=OTHER), now=world.now),
        lambda: world.buffers.apply(DeleteBuffer(OTHER), now=world.now),
        lambda: world.buffers.describe(OTHER, now=world.now),
        lambda: world.buffers[OTHER].model,
        lambda: world.buffers[OTHER].prepared(RequestId("r")),
        lambda: world.buffers.apply(Offer(OTHER, [make_fragment()]), now=world.now),
        lambda: world.buffers[OTHER].payloads(),
    ):
        with pytest.raises(BufferNotFoundError, match="no buffer is named 'other'"):
            act()
    assert not world.buffers.refers_to(OTHER, make_payload().payload_id)


def test_buffers_do_not_see_each_others_chunks_sessions_or_waiters() -> None:
    world = World()
    create(world)
    world.buffers.apply(start_session(buffer=OTHER), now=world.now)
    until = world.now + 9
    fetch = Fetch(buffer=OTHER, request_id=RequestId("r"), fragment_count=1, deadline_at=until)
    world.buffers.apply(fetch, now=world.now)
    world.append()
    assert [] == world.events(FetchGranted)
    assert 0 == world.buffers.describe(OTHER, now=world.now).chunk_count
    assert until == world.buffers.next_timer()


def test_payload_belongs_to_one_buffer_only() -> None:
    world = World()
    create(world)
    world.buffers.apply(start_session(buffer=OTHER), now=world.now)
    fragment = make_fragment()
    world.offer(fragment)
    with pytest.raises(InvalidArgumentError, match="in use"):
        world.buffers.apply(AppendFragments(OTHER, [fragment]), now=world.now)


def test_deleted_buffer_lets_go_of_everything_once() -> None:
    world = World(fragments_per_chunk=2)
    weights = make_payload()
    world.publish(0, weights=weights)
    fragments = [make_fragment("w0", index) for index in range(5)]
    for fragment in fragments:
        world.offer(fragment)
    world.granted(2)
    waits = world.fetch(4)
    world.buffers.take_events()
    world.buffers.apply(DeleteBuffer(DEFAULT_BUFFER), now=world.now)
    events = world.buffers.take_events()
    refused = [event for event in events if isinstance(event, RequestRefused)]
    assert [(waits, BufferNotFoundError)] == [(e.caller_id, type(e.error)) for e in refused]
    gone = [p for e in events if isinstance(e, PayloadsDisposable) for p in e.payloads]
    expected = [weights, *(fragment.payload for fragment in fragments)]
    assert sorted(p.payload_id for p in expected) == sorted(p.payload_id for p in gone)
    assert () == world.buffers.names()
    assert world.buffers.next_timer() is None


def test_deleting_an_empty_buffer_is_possible_and_its_name_is_free_again() -> None:
    world = World()
    create(world, capacity_chunks=5)
    world.buffers.apply(DeleteBuffer(OTHER), now=world.now)
    create(world, capacity_chunks=6)


def test_drain_refuses_waiters_and_new_work_but_not_the_end_of_old_work() -> None:
    world = World()
    world.fill(2)
    lease = world.granted(1)
    waits = world.fetch(2)
    world.buffers.drain(now=world.now)
    assert [(waits, DrainingError)] == [
        (event.caller_id, type(event.error)) for event in world.events(RequestRefused)
    ]
    for act in (
        lambda: world.fetch(1),
        lambda: world.append("w0", 2),
        lambda: world.reserve(make_fragment("w0", 2)),
    ):
        with pytest.raises(DrainingError):
            act()
    world.renew(lease.lease_id)
    world.release(lease.lease_id)
    assert 0 == world.seen().lease_count


def test_input_sees_everything_that_was_due_although_the_timer_is_late() -> None:
    world = World(lease_s=5.0)
    world.append()
    world.granted()
    world.now += 50.0
    assert 1 == len(world.granted().fragments)
    world.now += 50.0
    assert 1 == world.seen().chunk_count


def test_payloads_lists_all_that_is_referred_to() -> None:
    world = World(fragments_per_chunk=2)
    weights = make_payload()
    world.publish(0, weights=weights)
    fragments = [make_fragment("w0", index) for index in range(5)]
    for fragment in fragments:
        world.offer(fragment)
    world.granted(2)
    expected = sorted([weights.payload_id, *(f.payload.payload_id for f in fragments)])
    listed = list(world.buffers[DEFAULT_BUFFER].payloads())
    assert expected == sorted(payload.payload_id for payload in listed)
    assert all(world.buffers.refers_to(DEFAULT_BUFFER, p.payload_id) for p in listed)
    assert all(world.buffers.refers_elsewhere(None, p.payload_id) for p in listed)
    assert not any(world.buffers.refers_elsewhere(DEFAULT_BUFFER, p.payload_id) for p in listed)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_payloads_are_gone_through_in_batches_while_inputs_go_on(size: int) -> None:
    world = World(fragments_per_chunk=2, staleness_max=9)
    world.fill(3)
    world.append("open")
    known = sorted(each.payload_id for each in world.buffers[DEFAULT_BUFFER].payloads())
    batches = world.buffers[DEFAULT_BUFFER].payload_batches(size)
    seen = [*next(batches), *next(batches)]
    world.append("open", 1)
    world.append("late")
    for batch in batches:
        seen += batch
    assert len(seen) == len(set(seen))
    assert set(known) <= {each.payload_id for each in seen}


def test_payloads_that_go_while_batches_are_held_are_not_among_them() -> None:
    world = World(fragments_per_chunk=2)
    world.fill(3)
    batches = world.buffers[DEFAULT_BUFFER].payload_batches(2)
    assert [0, 2] == [len(next(batches)) for _ in range(2)]
    world.end()
    assert [] == [each for batch in batches for each in batch]


def test_weights_are_told_from_fragments_and_from_what_is_elsewhere() -> None:
    world = World()
    weights = make_payload()
    world.publish(0, weights=weights)
    fragment = make_fragment()
    world.offer(fragment)

    def has_weights(payload_id: PayloadId, name: BufferName = DEFAULT_BUFFER) -> bool:
        return world.buffers.has_weights(name, payload_id)

    assert has_weights(weights.payload_id)
    assert not has_weights(fragment.payload.payload_id)
    assert not has_weights(make_payload().payload_id)
    assert not has_weights(weights.payload_id, OTHER)


def test_fragments_are_those_of_all_buffers_and_no_weights() -> None:
    world = World(fragments_per_chunk=2)
    world.publish(0, weights=make_payload())
    fragments = [make_fragment("w0", index) for index in range(3)]
    for fragment in fragments:
        world.offer(fragment)
    create(world)
    assert fragments == sorted(world.buffers.fragments(), key=lambda each: each.fragment_index)


def test_a_lease_keeps_the_payloads_of_its_share_until_it_ends() -> None:
    world = World()
    fragment = make_fragment()
    world.offer(fragment)
    grant = world.granted()
    assert (fragment.payload,) == world.buffers[DEFAULT_BUFFER].leased_payloads(grant.lease_id)
    world.release(grant.lease_id)
    assert () == world.buffers[DEFAULT_BUFFER].leased_payloads(grant.lease_id)
    assert () == world.buffers[DEFAULT_BUFFER].leased_payloads(LeaseId("unknown"))


@pytest.mark.parametrize(("piece_size_bytes", "count"), [(0, 1), (10, 1), (4, 3), (5, 2)])
def test_a_payload_has_the_pieces_that_its_store_is_said_to_have_made(
    piece_size_bytes: int, count: int
) -> None:
    assert count == Payload(PayloadId("0" * 32), 10, piece_size_bytes).piece_count


def test_an_error_keeps_its_fields() -> None:
    error = InvalidArgumentError("field", "is wrong")
    assert ({"field": "field", "problem": "is wrong"}, "field is wrong") == (
        error.metadata,
        str(error),
    )
