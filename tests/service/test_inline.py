"""Payloads that ride along: stored by the server before it answers, and carried by replies."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import grpc
import pytest

from breadbox.model.errors import StoreUnavailableError
from breadbox.model.types import PayloadReference
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server import driver
from breadbox_server.admission import appends
from breadbox_server.admission.append_queue import AppendQueue
from breadbox_server.admission.slices import SLICE_BYTES
from breadbox_server.core.model.config import BufferConfig, FullPolicy
from breadbox_server.core.model.ids import BufferName
from breadbox_server.limits import INLINE_SIZE_BYTES_MAX
from breadbox_server.reading import inline_bodies
from support.eventually import eventually
from support.served import CALL_S, Served, info_of, reason_of, served, span

ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED
DUPLICATE = fragment_pb2.ADMISSION_OUTCOME_DUPLICATE
STALE = fragment_pb2.ADMISSION_OUTCOME_STALE
MISSING = fragment_pb2.ADMISSION_OUTCOME_PAYLOAD_MISSING
BUFFER_FULL = fragment_pb2.ADMISSION_OUTCOME_BUFFER_FULL
BYTES_FULL = fragment_pb2.ADMISSION_OUTCOME_BYTES_FULL
DEFAULT = BufferName("default")


def outcomes(reply: pb.AppendFragmentsResponse) -> list[int]:
    return [result.outcome for result in reply.results]


async def test_a_payload_that_rides_along_is_stored_before_it_is_acknowledged() -> None:
    async with served() as it:
        await it.start()
        reply = await it.append(it.riding(0), payloads=[b"the payload"])
        bodies = dict(it.custodian.bodies)
        fetched = await it.fetch(1)
    (reference,) = fetched.grant.fragments
    assert [ADMITTED] == outcomes(reply)
    assert {reference.metadata.payload.payload_id: b"the payload"} == bodies
    assert len(b"the payload") == reference.metadata.payload.size_bytes
    assert ([1], []) == (it.custodian.keep_trips, it.custodian.confirm_trips)


async def test_payloads_that_ride_along_and_others_come_in_one_call() -> None:
    async with served() as it:
        await it.start()
        reply = await it.append(
            it.riding(0), it.metadata(1), it.riding(2), payloads=[b"first", b"", b"third"]
        )
        fetched = await it.fetch(3, inline_bytes_max=1000)
    assert [ADMITTED] * 3 == outcomes(reply)
    by_index = {
        each.metadata.fragment_index: body
        for each, body in zip(fetched.grant.fragments, fetched.grant.payloads, strict=True)
    }
    assert {0: b"first", 1: b"", 2: b"third"} == by_index


async def test_a_reply_carries_payloads_only_when_it_is_asked_to() -> None:
    async with served() as it:
        await it.start()
        await it.append(it.riding(0), payloads=[b"some"])
        assert [] == (await it.fetch(1)).grant.payloads
        repeated = await it.fetch(1, inline_bytes_max=4)
        assert [b"some"] == repeated.grant.payloads
        assert [] == (await it.fetch(1, inline_bytes_max=3)).grant.payloads


async def test_a_reply_carries_as_many_bytes_as_it_is_asked_for() -> None:
    async with served(BufferConfig(fragments_per_chunk=4)) as it:
        await it.start()
        bodies = [b"a" * 10, b"b" * 50, b"c" * 10, b"d" * 10]
        await it.append(*(it.riding(index) for index in range(4)), payloads=bodies)
        fetched = await it.fetch(4, inline_bytes_max=25)
        assert [b"a" * 10, b"", b"c" * 10, b""] == fetched.grant.payloads


async def test_a_read_by_a_cursor_carries_payloads() -> None:
    async with served() as it:
        await it.start()
        await it.append(it.riding(0), it.riding(1), payloads=[b"one", b"two"])
        read = await it.stub.ReadFragments(
            pb.ReadFragmentsRequest(inline_bytes_max=100), timeout=CALL_S
        )
        none = await it.stub.ReadFragments(
            pb.ReadFragmentsRequest(inline_bytes_max=100, after_chunk_id=read.cursor),
            timeout=CALL_S,
        )
    assert [b"one", b"two"] == read.payloads
    assert [] == none.payloads


@pytest.mark.parametrize("recent_bytes", [0, 1000], ids=["from the store", "from memory"])
async def test_a_read_whose_payloads_all_ride_along_takes_no_lease(
    monkeypatch: pytest.MonkeyPatch, recent_bytes: int
) -> None:
    monkeypatch.setattr(driver, "INLINE_RECENT_BYTES_MAX", recent_bytes)
    async with served() as it:
        await it.start()
        await it.append(it.riding(0), it.riding(1), payloads=[b"one", b"other"])

        async def read(bytes_max: int) -> pb.ReadFragmentsResponse:
            request = pb.ReadFragmentsRequest(inline_bytes_max=bytes_max)
            return await it.stub.ReadFragments(request, timeout=CALL_S)

        replies = [await read(bytes_max) for bytes_max in (100, 8, 7, 0)]
        leases = it.server.driver.reading.leases
        assert 2 == len(leases)
    assert [[b"one", b"other"], [b"one", b"other"], [b"one", b""], []] == [
        list(each.payloads) for each in replies
    ]
    assert [False, False, True, True] == [each.HasField("lease") for each in replies]
    assert [2] * 4 == [len(each.fragments) for each in replies]


async def test_what_came_lately_is_told_without_a_trip_to_the_store() -> None:
    async with served(BufferConfig(uses_max=1)) as it:
        await it.start()
        await it.append(it.riding(0), payloads=[b"some"])
        assert [b"some"] == (await it.fetch(1, inline_bytes_max=9)).grant.payloads
        assert [] == it.custodian.read_trips


async def test_what_came_before_that_is_read_from_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "INLINE_RECENT_BYTES_MAX", 4)
    async with served(BufferConfig(fragments_per_chunk=2)) as it:
        await it.start()
        await it.append(it.riding(0), it.riding(1), payloads=[b"first", b"next"])
        fetched = await it.fetch(2, inline_bytes_max=9)
        assert [b"first", b"next"] == fetched.grant.payloads
        assert [1] == it.custodian.read_trips


async def test_few_replies_at_a_time_are_read_from_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "INLINE_RECENT_BYTES_MAX", 0)
    monkeypatch.setattr(inline_bodies, "BODIES_S", CALL_S)
    async with served(BufferConfig(uses_max=1)) as it:
        await it.start()
        await it.append(*(it.riding(index) for index in range(9)), payloads=[b"some"] * 9)
        it.custodian.may_read.clear()
        async with asyncio.TaskGroup() as group:
            fetches = [
                group.create_task(_fetched(it, request_id=f"r{number}")) for number in range(9)
            ]
            await eventually(lambda: len(it.custodian.read_trips) == inline_bodies.BODIES_READS_MAX)
            await it.buffer()
            assert [1] * inline_bodies.BODIES_READS_MAX == it.custodian.read_trips
            it.custodian.may_read.set()
        assert [[b"some"]] * 9 == [fetch.result() for fetch in fetches]


async def _fetched(it: Served, *, request_id: str) -> list[bytes]:
    """The payloads that come along with a fetch of one."""
    return list((await it.fetch(1, request_id=request_id, inline_bytes_max=9)).grant.payloads)


async def test_what_is_deleted_takes_no_room_among_what_came_lately() -> None:
    async with served(BufferConfig(uses_max=1)) as it:
        await it.start()
        recent = it.server.driver.recent
        await it.append(it.riding(0), payloads=[b"some"])
        assert 4 == recent.size_bytes
        lease_id = (await it.fetch(1)).grant.lease.lease_id
        await it.stub.ReleaseLease(
            pb.ReleaseLeaseRequest(lease_id=lease_id, mode=pb.RELEASE_MODE_CONSUMED),
            timeout=CALL_S,
        )
        assert 0 == recent.size_bytes


async def test_what_the_store_lost_and_is_in_memory_is_written_again() -> None:
    async with served(BufferConfig(uses_max=1)) as it:
        await it.start()
        await it.append(it.riding(0), it.metadata(1), payloads=[b"some", b""])
        it.custodian.lose_everything()
        assert 2 == await it.server.driver.losses.drop_missing(
            DEFAULT, it.server.driver.core.buffers[DEFAULT].payloads()
        )
        (reference,) = (await it.fetch(1, inline_bytes_max=9)).grant.fragments
    assert {reference.metadata.payload.payload_id: b"some"} == it.custodian.bodies
    assert 0 == reference.metadata.fragment_index


async def test_what_is_in_memory_is_not_given_up_by_a_store_without_room_for_it() -> None:
    async with served(BufferConfig(uses_max=1)) as it:
        await it.start()
        await it.append(it.riding(0), it.metadata(1), payloads=[b"some", b""])
        it.custodian.lose_everything()
        it.custodian.is_full = True
        losses, payloads = it.server.driver.losses, it.server.driver.core.buffers[DEFAULT].payloads
        suspicion_count = losses.suspicion_count
        assert 1 == await losses.drop_missing(DEFAULT, payloads())
        assert 0 == await losses.drop_missing(DEFAULT, payloads())
        assert suspicion_count + 2 == losses.suspicion_count  # So that somebody looks again.
        (reference,) = (await it.fetch(1, inline_bytes_max=9)).grant.fragments
    assert 0 == reference.metadata.fragment_index


@pytest.mark.parametrize("loses_answers", [False, True], ids=["answered", "answer lost"])
async def test_what_is_let_go_while_it_is_written_again_is_deleted(loses_answers: bool) -> None:
    async with served(BufferConfig(uses_max=1)) as it:
        await it.start()
        losses, payloads = it.server.driver.losses, it.server.driver.core.buffers[DEFAULT].payloads
        await it.append(it.riding(0), payloads=[b"some"])
        it.custodian.lose_everything()
        it.custodian.may_confirm.clear()
        it.custodian.confirming.clear()

        async def mend() -> None:
            with pytest.raises(StoreUnavailableError) if loses_answers else nullcontext():
                assert 1 == await losses.drop_missing(DEFAULT, payloads())

        async with asyncio.TaskGroup() as group:
            group.create_task(mend())
            await it.custodian.confirming.wait()
            lease_id = (await it.fetch(1)).grant.lease.lease_id
            await it.stub.ReleaseLease(
                pb.ReleaseLeaseRequest(lease_id=lease_id, mode=pb.RELEASE_MODE_CONSUMED),
                timeout=CALL_S,
            )
            await eventually(lambda: len(it.custodian.deleted) == 1)
            it.custodian.loses_answers = loses_answers
            it.custodian.may_confirm.set()
        await eventually(lambda: not it.custodian.bodies)
    assert set() == it.custodian.kept


async def test_nothing_rides_along_for_who_has_the_store_at_hand() -> None:
    async with served(client_store="file:///dev/shm/somewhere") as it:
        await it.start()
        told = await it.stub.GetStoreConfig(pb.GetStoreConfigRequest(), timeout=CALL_S)
        await it.append(it.riding(0), payloads=[b"some"])
        fetched = await it.fetch(1, inline_bytes_max=9)
    assert 0 == told.inline_size_bytes_max
    assert [] == fetched.grant.payloads


@pytest.mark.parametrize("loses", [True, False], ids=["lost payload", "store away"])
async def test_what_cannot_be_read_does_not_ride_along(
    monkeypatch: pytest.MonkeyPatch, loses: bool
) -> None:
    monkeypatch.setattr(driver, "INLINE_RECENT_BYTES_MAX", 0)
    async with served() as it:
        await it.start()
        await it.append(it.riding(0), payloads=[b"some"])
        if loses:
            it.custodian.lose_everything()
        else:
            it.custodian.is_down = True
        fetched = await it.fetch(1, inline_bytes_max=100)
        it.custodian.is_down = False
    assert 1 == len(fetched.grant.fragments)
    assert b"" == b"".join(fetched.grant.payloads)


async def test_a_duplicate_writes_no_payload() -> None:
    async with served() as it:
        await it.start()
        await it.append(it.riding(0), payloads=[b"first"])
        again = await it.append(it.riding(0), it.riding(1), payloads=[b"other", b"next"])
        twice = await it.append(it.riding(2), it.riding(2), payloads=[b"one", b"same"])
        assert {b"first", b"next", b"one"} == set(it.custodian.bodies.values())
    assert [DUPLICATE, ADMITTED] == outcomes(again)
    assert [ADMITTED, DUPLICATE] == outcomes(twice)


async def test_a_stale_fragment_writes_no_payload() -> None:
    async with served(BufferConfig(staleness_max=0)) as it:
        await it.start(model_version=5)
        reply = await it.append(
            it.riding(0, version=1), it.riding(1, version=5), payloads=[b"old", b"new"]
        )
        assert [b"new"] == list(it.custodian.bodies.values())
    assert [STALE, ADMITTED] == outcomes(reply)


async def test_a_fragment_that_has_to_wait_leaves_no_payload() -> None:
    """It comes again under another id: else what nobody owns would pile up with every attempt."""
    async with served(BufferConfig(capacity_chunks=1, full_policy=FullPolicy.BLOCK)) as it:
        await it.start()
        reply = await it.append(
            *(it.riding(index) for index in range(3)), payloads=[b"one", b"two", b"three"]
        )
        await eventually(lambda: [b"one"] == list(it.custodian.bodies.values()))
        again = await it.append(it.riding(1), payloads=[b"two"])
        assert [1] == it.custodian.keep_trips
    assert [BUFFER_FULL] == outcomes(again)
    assert [ADMITTED, BUFFER_FULL, BUFFER_FULL] == outcomes(reply)


async def test_a_full_store_asks_producers_to_wait() -> None:
    async with served() as it:
        await it.start()
        it.custodian.is_full = True
        full = await it.append(it.riding(0), it.metadata(1), payloads=[b"some", b""])
        it.custodian.is_full = False
        admitted = await it.append(it.riding(0), payloads=[b"some"])
    assert [BYTES_FULL, BYTES_FULL] == outcomes(full)
    assert full.HasField("retry_delay")
    assert [ADMITTED] == outcomes(admitted)


async def test_a_payload_that_is_too_large_to_ride_along_is_for_the_store() -> None:
    """As after a restart with another --inline-size-max, of which the client does not know."""
    async with served(inline_size_bytes_max=10) as it:
        await it.start()
        reply = await it.append(
            it.riding(0),
            it.riding(1),
            it.riding(0, worker_id="w1"),
            payloads=[b"x" * 11, b"y", b"z" * 10],
        )
        later = await it.append(it.metadata(0), it.riding(1), payloads=[b"", b"y"])
        missing = it.server.metrics.registry.get_sample_value(
            "breadbox_payloads_missing_total", {"buffer": "default"}
        )
    assert [MISSING, MISSING, ADMITTED] == outcomes(reply)
    assert [ADMITTED, ADMITTED] == outcomes(later)
    assert missing in (None, 0)


async def test_without_room_for_it_nothing_rides_along() -> None:
    async with served(inline_size_bytes_max=0) as it:
        await it.start()
        reply = await it.append(it.riding(0), payloads=[b"x"])
        config = await it.stub.GetStoreConfig(pb.GetStoreConfigRequest(), timeout=CALL_S)
    assert [MISSING] == outcomes(reply)
    assert 0 == config.inline_size_bytes_max
    assert {} == it.custodian.bodies


async def test_clients_are_told_what_may_ride_along() -> None:
    async with served() as it:
        config = await it.stub.GetStoreConfig(pb.GetStoreConfigRequest(), timeout=CALL_S)
    assert INLINE_SIZE_BYTES_MAX == config.inline_size_bytes_max


def named(it: Served) -> fragment_pb2.FragmentMetadata:
    return it.metadata(0, payload=PayloadReference("a" * 32, 1))


@pytest.mark.parametrize(
    ("make", "payloads", "field"),
    [
        (named, [b"x"], "fragments[0].payload"),
        (lambda it: it.riding(0), [], "fragments[0].payload"),
        (lambda it: it.riding(0), [b""], "fragments[0].payload"),
        (lambda it: it.riding(0), [b"x", b"y"], "payloads"),
        (lambda it: it.riding(0, step_count=0), [b"x"], "fragments[0].step_count"),
    ],
    ids=["another's payload", "none", "empty", "too many", "no steps"],
)
async def test_what_is_said_wrongly_is_refused_and_stores_nothing(
    make: Callable[[Served], fragment_pb2.FragmentMetadata], payloads: list[bytes], field: str
) -> None:
    async with served() as it:
        await it.start()
        with pytest.raises(grpc.RpcError) as refused:
            await it.append(make(it), payloads=payloads)
        stored = dict(it.custodian.bodies)
    assert "ARGUMENT_INVALID" == reason_of(refused.value)
    assert info_of(refused.value).metadata["field"].startswith(field)
    assert {} == stored


async def test_a_payload_whose_answer_was_lost_is_deleted_in_time() -> None:
    async with served(unannounced_s=60.0) as it:
        await it.start()
        it.custodian.loses_answers = True
        with pytest.raises(grpc.RpcError) as refused:
            await it.append(it.riding(0), payloads=[b"first"])
        it.custodian.loses_answers = False
        (left,) = it.custodian.kept
        reply = await it.append(it.riding(0), payloads=[b"first"])
        assert 2 == len(it.custodian.kept)
        it.clock.advance(61.0)
        await eventually(lambda: it.custodian.deleted == [left])
    assert "STORE_UNAVAILABLE" == reason_of(refused.value)
    assert [ADMITTED] == outcomes(reply)


async def test_calls_that_wait_together_share_one_trip_to_the_store() -> None:
    async with served() as it:
        await it.start()
        it.custodian.may_confirm.clear()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(it.append(it.riding(0), payloads=[b"x"]))
            await it.custodian.confirming.wait()
            calls = [
                group.create_task(it.append(it.riding(0, worker_id=f"w{n}"), payloads=[b"y"]))
                for n in range(1, 21)
            ]
            registry = it.server.metrics.registry
            await eventually(lambda: registry.get_sample_value("breadbox_pending_appends") == 21)
            it.custodian.may_confirm.set()
        assert [[ADMITTED]] * 21 == [outcomes(call.result()) for call in [first, *calls]]
    assert [1, 20] == it.custodian.keep_trips


async def test_a_slice_takes_so_many_bytes_and_the_next_one_the_rest() -> None:
    body = b"x" * INLINE_SIZE_BYTES_MAX
    count = SLICE_BYTES // INLINE_SIZE_BYTES_MAX
    async with served() as it:
        await it.start()
        it.custodian.may_confirm.clear()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(it.append(it.riding(0), payloads=[b"x"]))
            await it.custodian.confirming.wait()
            at_once = count // 4
            for worker in range(5):
                group.create_task(
                    it.append(
                        *(it.riding(k, worker_id=f"w{worker + 1}") for k in range(at_once)),
                        payloads=[body] * at_once,
                    )
                )
            registry = it.server.metrics.registry
            pending = 1 + 5 * at_once
            await eventually(
                lambda: registry.get_sample_value("breadbox_pending_appends") == pending
            )
            it.custodian.may_confirm.set()
        assert [ADMITTED] == outcomes(first.result())
    assert [1, count, pending - 1 - count] == it.custodian.keep_trips


async def test_bytes_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appends, "AppendQueue", partial(AppendQueue, inline_pending_bytes_max=10))
    async with served() as it:
        await it.start()
        it.custodian.may_confirm.clear()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(it.append(it.riding(0), payloads=[b"x" * 8]))
            await it.custodian.confirming.wait()
            with pytest.raises(grpc.RpcError) as refused:
                await it.append(it.riding(0, worker_id="other"), payloads=[b"x" * 3])
            it.custodian.may_confirm.set()
        assert [ADMITTED] == outcomes(first.result())
        assert [ADMITTED] == outcomes(
            await it.append(it.riding(0, worker_id="other"), payloads=[b"x" * 10])
        )
    assert "APPENDS_FULL" == reason_of(refused.value)


async def test_who_waits_for_room_leaves_half_of_the_bytes_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(appends, "AppendQueue", partial(AppendQueue, inline_pending_bytes_max=16))
    async with served(BufferConfig(capacity_chunks=1, full_policy=FullPolicy.BLOCK)) as it:
        await it.start()
        await it.append(it.riding(0), payloads=[b"zero"])
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(
                it.append(
                    it.riding(0, worker_id="w1"), payloads=[b"x" * 8], max_wait=span(CALL_S / 2)
                )
            )
            registry = it.server.metrics.registry
            await eventually(lambda: registry.get_sample_value("breadbox_waiting_appends") == 1)
            other = await it.append(
                it.riding(0, worker_id="w2"), payloads=[b"y"], max_wait=span(CALL_S / 2)
            )
            assert [BUFFER_FULL] == outcomes(other)
            it.clock.advance(CALL_S)
        assert [BUFFER_FULL] == outcomes(waiting.result())


async def test_the_bytes_count_in_the_buffers_capacity() -> None:
    config = BufferConfig(capacity_bytes=100, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        reply = await it.append(it.riding(0), it.riding(1), payloads=[b"x" * 60, b"x" * 60])
    assert [ADMITTED, BYTES_FULL] == outcomes(reply)


async def test_who_waits_for_room_writes_a_payload_once_and_leaves_none() -> None:
    """A job that waits in line is decided several times, under the ids that it has."""
    config = BufferConfig(capacity_chunks=1, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        await it.append(it.riding(0), payloads=[b"zero"])
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(
                it.append(
                    *(it.riding(index, worker_id="w1") for index in range(3)),
                    payloads=[b"one", b"two", b"three"],
                    max_wait=span(CALL_S / 2),
                )
            )
            gauge = "breadbox_waiting_appends"
            registry = it.server.metrics.registry
            await eventually(lambda: registry.get_sample_value(gauge) == 1)
            grant = (await it.fetch(1, request_id="a")).grant
            release = pb.ReleaseLeaseRequest(
                lease_id=grant.lease.lease_id, mode=pb.RELEASE_MODE_CONSUMED
            )
            await it.stub.ReleaseLease(release, timeout=CALL_S)
            await eventually(lambda: registry.get_sample_value(gauge) == 1)
            await eventually(lambda: b"one" in it.custodian.bodies.values())
            it.clock.advance(CALL_S)
        assert [ADMITTED, BUFFER_FULL, BUFFER_FULL] == outcomes(waiting.result())
        await eventually(lambda: [b"one"] == list(it.custodian.bodies.values()))
        fetched = await it.fetch(1, request_id="b", inline_bytes_max=10)
    assert [b"one"] == fetched.grant.payloads
    assert sum(it.custodian.keep_trips) <= 4


async def test_a_caller_that_leaves_the_line_leaves_no_payload() -> None:
    config = BufferConfig(capacity_chunks=1, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        call = asyncio.create_task(  # noqa: TID251 - awaited below
            it.append(
                *(it.riding(index) for index in range(3)),
                payloads=[b"one", b"two", b"three"],
                max_wait=span(CALL_S),
            )
        )
        registry = it.server.metrics.registry
        gauge = "breadbox_waiting_appends"
        await eventually(lambda: registry.get_sample_value(gauge) == 1)
        call.cancel()
        await asyncio.wait([call])
        await eventually(lambda: [b"one"] == list(it.custodian.bodies.values()))
