"""Reading by a cursor, over a real channel: what is told, what is kept, and for how long (B16)."""

import asyncio
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.base import conversion as convert
from breadbox_server.core.buffer import ReplayBuffer
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.ids import BufferName, PayloadId
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.reading import reads as passages
from breadbox_server.reading.read_leases import ReadLeases
from breadbox_server.reading.uses import Uses
from breadbox_server.reading.watchers import FEW, GATHER_S_MAX
from breadbox_server.rpc import service
from support.eventually import eventually
from support.manual_timers import ManualTimers
from support.served import CALL_S, Served, reason_of, served, span

DEFAULT = BufferName("default")


def read(it: Served, after: int | None = None, *, wait_s: float = 0.0, **fields: Any) -> Any:
    """Start a read; await the returned call."""
    request = pb.ReadFragmentsRequest(after_chunk_id=after, max_wait=span(wait_s), **fields)
    return it.stub.ReadFragments(request, timeout=CALL_S)


def indices(reply: pb.ReadFragmentsResponse) -> list[int]:
    return [each.metadata.fragment_index for each in reply.fragments]


async def release(it: Served, lease_id: str, mode: Any = pb.RELEASE_MODE_CONSUMED) -> None:
    request = pb.ReleaseLeaseRequest(lease_id=lease_id, mode=mode)
    await it.stub.ReleaseLease(request, timeout=CALL_S)


async def test_chunks_come_in_order_of_arrival_page_by_page() -> None:
    async with served(BufferConfig(fragments_per_chunk=2)) as it:
        await it.start()
        await it.fill(10)
        first = await read(it, chunk_count_max=2)
        second = await read(it, first.cursor, chunk_count_max=2)
        last = await read(it, second.cursor, chunk_count_max=2)
        nothing = await read(it, last.cursor)
    assert [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []] == [
        indices(each) for each in (first, second, last, nothing)
    ]
    assert [0, 0, 1, 1] == [each.chunk_id for each in first.fragments]
    assert [1, 3, 4, 4] == [each.cursor for each in (first, second, last, nothing)]
    assert {0} == {each.skipped_chunk_count for each in (first, second, last, nothing)}
    assert ("run", 0) == (first.session_id, first.model_version)
    assert not nothing.HasField("lease")


async def test_a_read_consumes_nothing() -> None:
    async with served(BufferConfig(uses_max=1)) as it:
        await it.start()
        await it.fill(4)
        before = await it.buffer()
        for _ in range(3):
            reply = await read(it)
            assert [0, 1, 2, 3] == indices(reply)
            assert [0] * 4 == [each.use_count for each in reply.fragments]
        assert before == await it.buffer()
        granted = await it.fetch(4)
    assert 4 == len(granted.grant.fragments)


async def test_what_is_told_of_a_chunk_is_as_of_now() -> None:
    async with served(BufferConfig(uses_max=3, staleness_max=2)) as it:
        await it.start()
        await it.fill(1)
        await it.fetch(1)
        await it.stub.PublishModel(
            pb.PublishModelRequest(session_id="run", model_version=2), timeout=CALL_S
        )
        reply = await read(it)
    assert [(2, 1)] == [(each.staleness, each.use_count) for each in reply.fragments]
    assert 2 == reply.model_version


@pytest.mark.parametrize("after", [-1, 1])
async def test_what_left_before_it_was_read_is_counted_exactly(after: int) -> None:
    async with served(BufferConfig(capacity_chunks=4)) as it:
        await it.start()
        await it.fill(10)
        reply = await read(it, after)
        granted = await it.fetch(2)
        again = await read(it, after)
        from_the_oldest = await read(it)
    gone = {each.chunk_id for each in granted.grant.fragments}
    held = [chunk_id for chunk_id in range(6, 10) if chunk_id not in gone]
    assert ([6, 7, 8, 9], 5 - after, 9) == (
        indices(reply),
        reply.skipped_chunk_count,
        reply.cursor,
    )
    assert (held, 5 - after + 2, 9) == (indices(again), again.skipped_chunk_count, again.cursor)
    # What left before the oldest that is held was never promised to who begins.
    assert held == indices(from_the_oldest)
    assert 10 - held[0] - len(held) == from_the_oldest.skipped_chunk_count


async def test_what_left_is_news_although_nothing_came() -> None:
    async with served() as it:
        await it.start()
        await it.fill(3)
        await it.fetch(3)
        reply = await read(it, -1, wait_s=60)
    assert ([], 3, 2) == (indices(reply), reply.skipped_chunk_count, reply.cursor)


async def test_a_reader_that_waits_is_woken_by_the_next_chunk() -> None:
    async with served(BufferConfig(fragments_per_chunk=2)) as it:
        await it.start()
        waiting = read(it, wait_s=60)
        await eventually(lambda: it.server.driver.reading.reader_count == 1)
        await it.fill(1)
        await it.buffer()
        assert 1 == it.server.driver.reading.reader_count  # An open chunk is none yet.
        await it.fill(1, first=1)
        reply = await waiting
        assert 0 == it.server.driver.reading.reader_count
    assert [0, 1] == indices(reply)


async def test_a_wait_that_elapses_tells_nothing_and_takes_no_lease() -> None:
    async with served() as it:
        await it.start()
        waiting = read(it, wait_s=10)
        await eventually(lambda: it.server.driver.reading.reader_count == 1)
        it.clock.advance(10.0)
        reply = await waiting
        assert 0 == len(it.server.driver.reading.leases)
    assert ([], -1, 0) == (indices(reply), reply.cursor, reply.skipped_chunk_count)


async def test_a_reader_is_told_of_a_new_session_before_anything_of_it_came() -> None:
    async with served() as it:
        await it.start("one")
        waiting = read(it, -1, wait_s=60, known_session_id="one")
        await eventually(lambda: it.server.driver.reading.reader_count == 1)
        await it.start("two")
        reply = await waiting
    assert ("two", [], 0) == (reply.session_id, indices(reply), reply.skipped_chunk_count)


@pytest.mark.parametrize(("subscription", "expected"), [("", [0, 1, 2]), ("archive", [])])
async def test_a_cursor_of_what_there_has_not_been_yet_is_answered_at_once(
    subscription: str, expected: list[int]
) -> None:
    async with served() as it:
        await it.start()
        await it.fill(3)
        await it.stub.CreateSubscription(
            pb.CreateSubscriptionRequest(buffer="default", name="archive", after_chunk_id=2)
        )
        reply = await read(it, 7, wait_s=60, subscription=subscription)
    assert (expected, 2) == (indices(reply), reply.cursor)


async def test_an_empty_buffer_that_began_anew_is_told_of_at_once() -> None:
    async with served() as it:
        await it.start()
        reply = await read(it, 7, wait_s=60)
    assert ([], -1) == (indices(reply), reply.cursor)


async def test_chunks_of_a_session_that_ended_are_counted_as_skipped() -> None:
    async with served() as it:
        await it.start("run")
        await it.fill(5)
        first = await read(it, chunk_count_max=2)
        await it.start("next")
        await it.append(it.metadata(0, session_id="next"))
        reply = await read(it, first.cursor, known_session_id="run")
    assert ("next", [0], 3, 5) == (
        reply.session_id,
        indices(reply),
        reply.skipped_chunk_count,
        reply.cursor,
    )


async def test_a_cursor_of_a_buffer_that_began_anew_reads_all_of_it() -> None:
    async with served() as it:
        await it.start()
        await it.fill(3)
        beyond = await read(it, 7)
        known = await read(it, 1, known_session_id="another")
    assert [[0, 1, 2], [0, 1, 2]] == [indices(beyond), indices(known)]
    assert [2, 2] == [beyond.cursor, known.cursor]
    assert [0, 0] == [beyond.skipped_chunk_count, known.skipped_chunk_count]


# Leases ------------------------------------------------------------------------------------------


async def evict_everything(it: Served) -> None:
    await it.stub.EndSession(pb.EndSessionRequest(session_id="run"), timeout=CALL_S)
    assert 0 == (await it.buffer()).state.payload_bytes


def payload_ids(reply: pb.ReadFragmentsResponse) -> set[str]:
    return {each.metadata.payload.payload_id for each in reply.fragments}


async def nothing_is_deleted(it: Served, payload_id: str) -> None:
    """A payload that leaves after what is held back is deleted, and nothing before it."""
    await it.start("after")
    await it.append(it.metadata(0, session_id="after", worker_id="after"))
    await it.stub.EndSession(pb.EndSessionRequest(session_id="after"), timeout=CALL_S)
    await eventually(lambda: bool(it.custodian.deleted))
    assert payload_id not in it.custodian.deleted


async def test_payloads_stay_while_they_are_read_although_their_chunks_left() -> None:
    async with served() as it:
        await it.start()
        await it.fill(3)
        reply = await read(it)
        await evict_everything(it)
        for payload_id in payload_ids(reply):
            await nothing_is_deleted(it, payload_id)
            break
        assert 300 == it.server.driver.reading.leases.kept_bytes
        await release(it, reply.lease.lease_id)
        await eventually(lambda: payload_ids(reply) <= set(it.custodian.deleted))
        await release(it, reply.lease.lease_id)  # As often as one likes.
        assert 0 == it.server.driver.reading.leases.kept_bytes


async def test_a_payload_that_two_read_goes_with_the_second() -> None:
    async with served() as it:
        await it.start()
        await it.fill(1)
        first, second = await read(it), await read(it)
        await evict_everything(it)
        await release(it, first.lease.lease_id)
        (payload_id,) = payload_ids(first)
        await nothing_is_deleted(it, payload_id)
        await release(it, second.lease.lease_id, pb.RELEASE_MODE_RETURNED)
        await eventually(lambda: payload_id in it.custodian.deleted)


async def test_a_read_lease_expires_and_can_be_renewed() -> None:
    async with served() as it:
        await it.start()
        await it.fill(1)
        reply = await read(it, lease_duration=span(30))
        await evict_everything(it)
        it.clock.advance(20.0)
        renewed = await it.stub.RenewLease(
            pb.RenewLeaseRequest(lease_id=reply.lease.lease_id), timeout=CALL_S
        )
        assert 30 == renewed.lease.remaining_duration.seconds
        it.clock.advance(29.0)
        assert 1 == len(it.server.driver.reading.leases)
        it.clock.advance(1.0)
        await eventually(lambda: payload_ids(reply) == set(it.custodian.deleted))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.RenewLease(
                pb.RenewLeaseRequest(lease_id=reply.lease.lease_id), timeout=CALL_S
            )
    assert "LEASE_NOT_FOUND" == reason_of(caught.value)


async def test_a_shorter_lease_taken_later_ends_first() -> None:
    async with served() as it:
        await it.start()
        await it.fill(1)
        await read(it, lease_duration=span(60))
        await read(it, lease_duration=span(5))
        it.clock.advance(5.0)
        assert 1 == len(it.server.driver.reading.leases)


async def test_readers_keep_no_more_bytes_than_may_be() -> None:
    async with served(BufferConfig(capacity_bytes=8 * 250)) as it:
        await it.start()
        await it.fill(4)
        replies = []
        for after in range(-1, 3):
            replies.append(await read(it, after, chunk_count_max=1))
            it.clock.advance(1.0)
        await evict_everything(it)
        # 400 bytes are read and 250 may be kept: the two oldest have ended.
        await eventually(lambda: len(it.custodian.deleted) == 2)
        assert 200 == it.server.driver.reading.leases.kept_bytes
        assert 2 == len(it.server.driver.reading.leases)
    gone = set.union(*map(payload_ids, replies[:2]))
    assert gone == set(it.custodian.deleted[:2])


def test_a_lease_beyond_all_that_may_live_ends_the_oldest_of_who_has_most() -> None:
    clock = ManualTimers()
    leases = ReadLeases(
        clock,
        metrics=Metrics(CollectorRegistry()),
        delete=lambda _: None,
        leases_max=4,
        kept_bytes_max=0,
        uses=Uses(clock, lambda _: False),
    )
    of_b = [leases.take(DEFAULT, [], 1.0, "b")]
    of_a = [leases.take(DEFAULT, [], 60.0, "a") for _ in range(3)]
    leases.renew(of_a[0].lease_id, None)
    of_b.append(leases.take(DEFAULT, [], 1.0, "b"))
    living = [each for each in (*of_a, *of_b) if leases.knows(DEFAULT, each.lease_id)]
    assert [of_a[0], of_a[2], *of_b] == living


async def test_a_deleted_buffer_keeps_nothing_for_its_readers() -> None:
    async with served() as it:
        await it.start()
        await it.fill(2)
        reply = await read(it)
        waiting = read(it, reply.cursor, wait_s=60)
        await eventually(lambda: it.server.driver.reading.reader_count == 1)
        await it.stub.DeleteBuffer(pb.DeleteBufferRequest(name="default"), timeout=CALL_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await waiting
        await eventually(lambda: payload_ids(reply) == set(it.custodian.deleted))
    assert "BUFFER_NOT_FOUND" == reason_of(caught.value)


async def test_the_gateway_lets_readers_read_what_they_hold() -> None:
    async with served() as it:
        await it.start()
        await it.fill(1)
        reply = await read(it)
        (payload_id,) = payload_ids(reply)
        await evict_everything(it)
        driver = it.server.driver
        assert driver.reading.refers_to(DEFAULT, PayloadId(payload_id))
        assert not driver.reading.refers_to(BufferName("other"), PayloadId(payload_id))
        await release(it, reply.lease.lease_id)
        assert not driver.reading.refers_to(DEFAULT, PayloadId(payload_id))


async def test_a_caller_that_leaves_takes_its_place_in_the_wait_along() -> None:
    async with served() as it:
        await it.start()
        waiting = read(it, wait_s=60)
        await eventually(lambda: it.server.driver.reading.reader_count == 1)
        waiting.cancel()
        await eventually(lambda: it.server.driver.reading.reader_count == 0)


async def test_who_waits_is_told_that_the_server_ends() -> None:
    async with served() as it:
        await it.start()
        await it.fill(1)
        reply = await read(it)
        await evict_everything(it)
        waiting = read(it, 0, wait_s=60)
        await eventually(lambda: it.server.driver.reading.reader_count == 1)
        it.server.driver.drain()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await waiting
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read(it)
        assert 1 == len(it.server.driver.reading.leases)
    assert ["DRAINING", "DRAINING"] == [reason_of(caught.value), reason_of(refused.value)]
    # At its end the server leaves nothing behind for a reader.
    assert payload_ids(reply) <= set(it.custodian.deleted)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"after_chunk_id": -2}, "after_chunk_id"),
        ({"chunk_count_max": -1}, "chunk_count_max"),
        ({"max_wait": span(-1)}, "max_wait"),
        ({"lease_duration": span(0)}, "lease_duration"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    async with served() as it:
        await it.start()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.ReadFragments(pb.ReadFragmentsRequest(**fields), timeout=CALL_S)
    assert "ARGUMENT_INVALID" == reason_of(caught.value)
    assert field in (caught.value.details() or "")


async def test_a_read_ends_where_it_has_bytes_enough() -> None:
    async with served() as it:
        await it.start()
        large = 100 * 2**20
        await it.append(
            *(it.metadata(index, payload=it.custodian.write(large)) for index in range(4))
        )
        first = await read(it)
        second = await read(it, first.cursor)
    assert [[0, 1, 2], [3]] == [indices(first), indices(second)]


async def test_many_readers_are_woken_together() -> None:
    async with served() as it:
        await it.start()
        waiting = [read(it, wait_s=60) for _ in range(50)]
        await eventually(lambda: it.server.driver.reading.reader_count == 50)
        await it.fill(1)
        replies = await asyncio.gather(*waiting)  # noqa: TID251 - calls, not tasks
    assert [[0]] * 50 == [indices(each) for each in replies]


# Many readers ------------------------------------------------------------------------------------


async def wait_together(it: Served, count: int, after: int | None, **fields: Any) -> list[Any]:
    """Have as many readers wait for what comes."""
    waiting = [read(it, after, wait_s=60, **fields) for _ in range(count)]
    await eventually(lambda: it.server.driver.reading.reader_count == count)
    return waiting


def counting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """Note each call of a function, by its name."""
    calls: list[str] = []
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.mark.parametrize("inline_bytes_max", [0, 100], ids=["leased", "riding along"])
async def test_what_readers_at_one_place_are_told_is_looked_for_and_encoded_once(
    monkeypatch: pytest.MonkeyPatch, inline_bytes_max: int
) -> None:
    count = 20
    async with served() as it:
        await it.start()
        waiting = await wait_together(it, count, -1, inline_bytes_max=inline_bytes_max)
        encoded = counting(monkeypatch, convert, "add_references")
        looked = counting(monkeypatch, ReplayBuffer, "read")
        await it.append(it.riding(0), payloads=[b"some"])
        replies = [await each for each in waiting]
        assert ([[0]] * count, 1, 1) == (
            [indices(each) for each in replies],
            len(encoded),
            len(looked),
        )
        leases = {each.lease.lease_id for each in replies if each.HasField("lease")}
        assert (0 if inline_bytes_max else count) == len(leases)
        assert len(leases) == len(it.server.driver.reading.leases)


@pytest.mark.parametrize("module", [passages, service], ids=["payloads", "message"])
async def test_a_large_reply_is_made_for_each_reader_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    monkeypatch.setattr(module, "SHARED_REPLY_BYTES_MAX", 3)
    async with served() as it:
        await it.start()
        waiting = await wait_together(it, 3, -1, inline_bytes_max=100)
        encoded = counting(monkeypatch, convert, "add_references")
        await it.append(it.riding(0), payloads=[b"some"])
        replies = [await each for each in waiting]
    assert ([[b"some"]] * 3, 3) == ([list(each.payloads) for each in replies], len(encoded))


async def test_what_is_told_is_looked_for_anew_after_any_change() -> None:
    async with served(BufferConfig(uses_max=3)) as it:
        await it.start()
        await it.fill(1)
        uses = []
        for number in range(3):
            reply = await read(it)
            uses.append(reply.fragments[0].use_count)
            await it.fetch(1, request_id=f"r{number}")
        gone = await read(it)
    assert ([0, 1, 2], []) == (uses, indices(gone))


async def test_very_many_readers_get_together_what_comes_in_quick_succession() -> None:
    async with served() as it:
        await it.start()
        waiting = await wait_together(it, FEW + 1, -1)
        await it.fill(1)
        for each in waiting:
            assert [0] == indices(await each)  # At once, since nothing came for long.
        waiting = await wait_together(it, FEW + 1, 0)
        await it.fill(2, first=1)
        late = read(it, 0, wait_s=60)
        await eventually(lambda: it.server.driver.reading.reader_count == FEW + 2)
        await it.buffer()
        assert FEW + 2 == it.server.driver.reading.reader_count
        at_once = read(it, 0)
        assert [1, 2] == indices(await at_once)  # Who does not wait is not kept waiting.
        it.clock.advance(GATHER_S_MAX)
        replies = [await each for each in (*waiting, late)]
    assert [[1, 2]] * (FEW + 2) == [indices(each) for each in replies]


async def test_few_readers_are_told_at_once_however_quickly_it_comes() -> None:
    async with served() as it:
        await it.start()
        for index in range(3):
            waiting = await wait_together(it, FEW, index - 1)
            await it.fill(1, first=index)
            assert [[index]] * FEW == [indices(await each) for each in waiting]


async def test_a_buffer_that_ends_while_its_readers_are_to_be_woken_tells_them() -> None:
    async with served() as it:
        await it.start()
        waiting = await wait_together(it, FEW + 1, -1)
        await it.fill(1)
        for each in waiting:
            await each
        waiting = await wait_together(it, FEW + 1, 0)
        await it.fill(1, first=1)
        await it.stub.DeleteBuffer(pb.DeleteBufferRequest(name="default"), timeout=CALL_S)
        for each in waiting:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await each
            assert "BUFFER_NOT_FOUND" == reason_of(caught.value)


# Subscriptions -----------------------------------------------------------------------------------


async def subscribe(it: Served, name: str = "archive", **fields: Any) -> Any:
    request = pb.CreateSubscriptionRequest(name=name, **fields)
    return (await it.stub.CreateSubscription(request, timeout=CALL_S)).subscription


async def acknowledge(it: Served, chunk_id: int, name: str = "archive") -> None:
    request = pb.AcknowledgeChunksRequest(subscription=name, chunk_id=chunk_id)
    await it.stub.AcknowledgeChunks(request, timeout=CALL_S)


async def consume(it: Served, count: int) -> None:
    granted = (await it.fetch(count)).grant
    await release(it, granted.lease.lease_id)


async def test_a_retaining_subscription_keeps_payloads_until_they_are_acknowledged() -> None:
    async with served() as it:
        await it.start()
        created = await subscribe(it, retaining=True)
        assert ("archive", True, -1) == (
            created.name,
            created.retaining,
            created.acknowledged_chunk_id,
        )
        await it.fill(3)
        await consume(it, 3)
        reply = await read(it, subscription="archive")
        await release(it, reply.lease.lease_id)
        shown = await it.buffer()
        assert ([0, 1, 2], 3, 300) == (
            indices(reply),
            shown.state.retained_chunk_count,
            shown.state.payload_bytes,
        )
        await acknowledge(it, 1)
        await eventually(lambda: len(it.custodian.deleted) == 2)
        again = await read(it, subscription="archive")
        shown = await it.buffer()
    assert [2] == indices(again)
    (subscription,) = shown.subscriptions
    assert (1, 1, 100, 0) == (
        subscription.acknowledged_chunk_id,
        subscription.lag_chunk_count,
        subscription.lag_bytes,
        subscription.missed_chunk_count,
    )


async def test_a_subscription_that_is_deleted_lets_go_of_what_it_kept() -> None:
    async with served() as it:
        await it.start()
        await subscribe(it, retaining=True)
        await it.fill(2)
        await consume(it, 2)
        await it.stub.DeleteSubscription(
            pb.DeleteSubscriptionRequest(name="archive"), timeout=CALL_S
        )
        await eventually(lambda: len(it.custodian.deleted) == 2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(it, subscription="archive")
    assert "SUBSCRIPTION_NOT_FOUND" == reason_of(caught.value)


async def test_a_subscription_is_behind_for_as_long_as_there_is_something_for_it() -> None:
    async with served() as it:
        await it.start()
        await subscribe(it)
        it.clock.advance(50.0)
        assert 0 == (await it.buffer()).subscriptions[0].lag_duration.seconds
        await it.fill(1)
        await it.buffer()
        it.clock.advance(30.0)
        assert 30 == (await it.buffer()).subscriptions[0].lag_duration.seconds
        await it.fill(1, first=1)
        await it.buffer()
        await acknowledge(it, 0)
        it.clock.advance(5.0)
        assert 5 == (await it.buffer()).subscriptions[0].lag_duration.seconds
        await acknowledge(it, 1)
        assert 0 == (await it.buffer()).subscriptions[0].lag_duration.seconds


async def test_the_gauges_of_a_subscription_go_with_it() -> None:
    async with served(BufferConfig(capacity_chunks=2)) as it:
        await it.start()
        await subscribe(it, retaining=True)
        await it.fill(3)

        def shown() -> dict[str, float]:
            it.server.driver.show_gauges()
            return {
                sample.name.removeprefix("breadbox_subscription_"): sample.value
                for family in it.server.metrics.registry.collect()
                for sample in family.samples
                if sample.name.startswith("breadbox_subscription_")
            }

        assert {"lag_chunks": 2, "lag_bytes": 200, "lag_seconds": 0, "missed_chunks": 1} == shown()
        await it.stub.DeleteSubscription(
            pb.DeleteSubscriptionRequest(name="archive"), timeout=CALL_S
        )
        assert {} == shown()


async def test_of_one_name_there_is_one_subscription_of_one_kind() -> None:
    async with served() as it:
        await it.start()
        await subscribe(it, retaining=True)
        await subscribe(it, retaining=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await subscribe(it)
        assert 1 == len((await it.buffer()).subscriptions)
        with pytest.raises(grpc.aio.AioRpcError) as beyond:
            await acknowledge(it, 0)
    assert "SUBSCRIPTION_EXISTS" == reason_of(caught.value)
    assert "ARGUMENT_INVALID" == reason_of(beyond.value)
