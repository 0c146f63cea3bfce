"""What a server remembers of its chunks, for callers that look."""

import pytest

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.events import (
    ChunksEvicted,
    EvictionReason,
    LeaseEnd,
    LeaseEnded,
)
from breadbox_server.core.model.ids import BufferName, SessionId
from breadbox_server.core.model.inputs import CreateBuffer, DeleteBuffer, StartSession
from breadbox_server.reading import chunk_events
from breadbox_server.reading.chunk_events import ChunkEvents
from support.driven import BUFFER, driven
from support.metadata import written_fragment
from support.served import CALL_S, Served, served

ONE = BufferName("one")


async def events(world: Served, after: int | None) -> list[tuple[str, list[int], list[int]]]:
    """Kind, chunks and values of the events after a number."""
    reply = await world.stub.GetBuffer(pb.GetBufferRequest(chunk_events_after=after))
    found = reply.buffer.chunk_events
    assert sorted(each.number for each in found) == [each.number for each in found]
    return [(each.kind, list(each.chunk_ids), list(each.values)) for each in found]


async def test_the_life_of_a_chunk_is_told_from_its_grant_to_its_eviction() -> None:
    async with served(BufferConfig(uses_max=2, staleness_max=1)) as world:
        await world.start()
        await world.fill(2)
        await world.stub.PublishModel(pb.PublishModelRequest(session_id="run", model_version=1))
        grant = (await world.fetch(2)).grant
        release = pb.ReleaseLeaseRequest(
            lease_id=grant.lease.lease_id, mode=pb.RELEASE_MODE_RETURNED
        )
        await world.stub.ReleaseLease(release, timeout=CALL_S)
        await world.make_room(request_id="other")
        await world.stub.PublishModel(pb.PublishModelRequest(session_id="run", model_version=2))
        found = await events(world, 0)
        granted, returned, again, consumed, stale = found

    drawn = [each.chunk_id for each in grant.fragments]
    assert ("granted", drawn, [1, 1]) == granted
    assert ("returned", drawn, [1, 1]) == returned
    assert ("granted", [1]) == (again[0], again[2])
    assert ("consumed", again[1], [1]) == consumed
    used = {again[1][0]: 1}
    assert "evicted_stale" == stale[0]
    assert {each: used.get(each, 0) for each in (0, 1)} == dict(
        zip(stale[1], stale[2], strict=True)
    )


async def test_events_are_told_to_callers_that_ask_and_after_a_number() -> None:
    async with served(BufferConfig(staleness_max=0)) as world:
        await world.start()
        await world.fill(1)
        await world.stub.PublishModel(pb.PublishModelRequest(session_id="run", model_version=1))
        first = (await world.stub.GetBuffer(pb.GetBufferRequest(chunk_events_after=0))).buffer
        (event,) = first.chunk_events

        assert [] == await events(world, None)
        assert [] == await events(world, event.number)
        assert [("evicted_stale", [0], [0])] == await events(world, event.number - 1)
        world.clock.advance(3.0)
        later = (await world.stub.GetBuffer(pb.GetBufferRequest(chunk_events_after=0))).buffer
        assert 3 == later.chunk_events[0].age_duration.seconds


def evicted(*chunk_ids: int) -> ChunksEvicted:
    return ChunksEvicted(
        ONE,
        EvictionReason.CAPACITY,
        tuple(0 for _ in chunk_ids),
        tuple(chunk_ids),
    )


def test_chunks_of_a_lease_whose_session_has_ended_are_no_event_with_those_of_another() -> None:
    """Their staleness is not known; the others keep theirs."""
    kept = ChunkEvents()
    ends = [
        LeaseEnded(ONE, LeaseEnd.CONSUMED, (1, 2)),
        LeaseEnded(ONE, LeaseEnd.CONSUMED, (3,), (4,)),
    ]
    kept.note(ends, 0.0)
    assert [([1, 2], []), ([3], [4])] == [
        (list(each.chunk_ids), list(each.values)) for each in kept.after(ONE, 0)
    ]


def test_what_is_alike_in_one_step_is_one_event() -> None:
    kept = ChunkEvents()
    kept.note([evicted(0), evicted(1)], 1.0)
    kept.note([evicted(2)], 2.0)

    assert [[0, 1], [2]] == [list(each.chunk_ids) for each in kept.after(ONE, 0)]


def test_beyond_either_bound_the_oldest_events_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_events, "CHUNK_EVENTS_MAX", 3)
    monkeypatch.setattr(chunk_events, "CHUNK_EVENT_IDS_MAX", 4)
    kept = ChunkEvents()
    for chunk_id in range(5):
        kept.note([evicted(chunk_id)], 1.0)
    assert [[2], [3], [4]] == [list(each.chunk_ids) for each in kept.after(ONE, 0)]
    kept.note([evicted(5, 6, 7)], 1.0)
    assert [[4], [5, 6, 7]] == [list(each.chunk_ids) for each in kept.after(ONE, 0)]
    kept.forget(ONE)

    assert [] == list(kept.after(ONE, 0))


def test_a_later_servers_numbers_are_higher() -> None:
    first, second = ChunkEvents(), ChunkEvents()
    first.note([evicted(0)], 1.0)
    second.note([evicted(1)], 1.0)

    assert first.after(ONE, 0)[0].number <= second.after(ONE, 0)[0].number


async def test_a_buffer_of_a_deleted_ones_name_has_none_of_its_events() -> None:
    async with driven() as it:
        for _ in range(2):
            await it.driver.appends.append(BUFFER, [written_fragment(it.custodian, 0, "run")])
            await it.consume(1)
            kinds = {each.kind for each in it.driver.chunk_events.after(BUFFER, 0)}
            assert {"granted", "consumed", "evicted_used_up"} == kinds
            await it.driver.delete_buffer(DeleteBuffer(BUFFER))
            assert [] == it.driver.chunk_events.after(BUFFER, 0)
            await it.driver.core.call(CreateBuffer(BUFFER, BufferConfig()))
            await it.driver.core.call(StartSession(BUFFER, SessionId("run")))
