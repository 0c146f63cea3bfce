"""The gateway beside a fake store: bounds, refusals, and what is left of calls that end early."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from breadbox.model.errors import StoreFullError, StoreUnavailableError
from breadbox.model.types import PayloadReference
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server import limits
from breadbox_server.base.errors import GatewayFullError
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.gateway import call_slots
from breadbox_server.gateway import transfers as gateway_module
from breadbox_server.gateway.call_slots import CallSlots
from breadbox_server.gateway.unannounced import Unannounced
from support.eventually import eventually
from support.fake_custodian import FakeCustodian
from support.fake_parts import FakeParts
from support.served import CALL_S, Served, reason_of, served

KIB, MIB = 2**10, 2**20


@asynccontextmanager
async def gateway(
    config: BufferConfig | None = None, **settings: Any
) -> AsyncIterator[tuple[Served, FakeParts]]:
    custodian = FakeCustodian()
    parts = FakeParts(custodian)
    async with served(
        config, custodian=custodian, parts=parts, has_gateway=True, **settings
    ) as world:
        yield world, parts


def write(world: Served, sizes: list[int], *sent: bytes) -> Any:
    """A call that says these sizes and then sends these messages."""
    first = pb.WritePayloadsRequest(size_bytes=sizes, data=sent[0] if sent else b"")
    messages = [first, *(pb.WritePayloadsRequest(data=data) for data in sent[1:])]
    return world.stub.WritePayloads(iter(messages), timeout=CALL_S)


async def written(world: Served, *payloads: bytes) -> list[fragment_pb2.PayloadReference]:
    sizes = [len(payload) for payload in payloads]
    data = b"".join(payloads)
    cut = [data[at : at + 300_000] for at in range(0, len(data), 300_000)]
    answers = [answer async for answer in write(world, sizes, *cut)]
    return list(answers[-1].payloads)


def range_of(
    payload: fragment_pb2.PayloadReference, start: int, length: int
) -> pb.ReadPayloadsRequest:
    return pb.ReadPayloadsRequest(
        ranges=[pb.PayloadRange(payload=payload, offset_bytes=start, length_bytes=length)]
    )


async def read(world: Served, request: pb.ReadPayloadsRequest) -> bytes:
    call = world.stub.ReadPayloads(request, timeout=CALL_S)
    return b"".join([answer.data async for answer in call])


async def refusal(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    return reason_of(refused.value)


async def nothing_is_left(world: Served) -> None:
    """No call holds a place or bytes any more."""

    def value(name: str) -> float | None:
        return world.server.metrics.registry.get_sample_value(name)

    await eventually(lambda: value("breadbox_gateway_calls") == 0, "places being free")
    assert 0 == value("breadbox_gateway_unannounced_bytes")


# What passes -------------------------------------------------------------------------------------


async def test_payloads_of_any_size_are_stored_and_read_as_they_were() -> None:
    payloads = [secrets.token_bytes(size) for size in (1, 700, 512 * KIB, 512 * KIB + 1, 3 * MIB)]
    async with gateway() as (world, parts):
        references = await written(world, *payloads)
        assert payloads == [bytes(parts.payloads[each.payload_id]) for each in references]
        for payload, reference in zip(payloads, references, strict=True):
            assert payload == await read(world, range_of(reference, 0, len(payload)))
        assert payloads[4][5:2_000_000] == await read(world, range_of(references[4], 5, 1_999_995))
        many = pb.ReadPayloadsRequest(
            ranges=[
                pb.PayloadRange(payload=references[3], offset_bytes=at, length_bytes=9)
                for at in (0, 524_280, 3)
            ]
        )
        assert payloads[3][:9] + payloads[3][-9:] + payloads[3][3:12] == await read(world, many)


async def test_what_is_admitted_is_no_longer_counted_and_what_is_refused_still_is() -> None:
    async with gateway() as (world, _):
        await world.start()
        one, other = await written(world, bytes(50_000), bytes(60_000))
        fragments = [
            world.metadata(0, payload=PayloadReference(one.payload_id, 50_000)),
            world.metadata(0, session_id="old", payload=PayloadReference(other.payload_id, 60_000)),
        ]
        await world.append(*fragments)
        counted = world.server.metrics.registry.get_sample_value
        assert 60_000 == counted("breadbox_gateway_unannounced_bytes")
        await world.stub.DiscardPayloads(
            pb.DiscardPayloadsRequest(payload_ids=[one.payload_id, other.payload_id, "../x"])
        )
        assert 0 == counted("breadbox_gateway_unannounced_bytes")
        await eventually(lambda: world.custodian.deleted == [other.payload_id])


async def test_weights_that_are_published_are_no_longer_counted() -> None:
    async with gateway() as (world, _):
        await world.start()
        (weights,) = await written(world, bytes(50_000))
        await world.stub.PublishModel(
            pb.PublishModelRequest(session_id="run", model_version=1, weights=weights)
        )
        await nothing_is_left(world)


async def test_what_has_expired_is_no_longer_counted() -> None:
    async with gateway(gateway_unannounced_bytes=100_000, unannounced_s=60.0) as (world, _):
        await written(world, bytes(60_000))
        assert "GATEWAY_FULL" == await refusal(write(world, [60_000], bytes(60_000)))
        world.clock.advance(61.0)
        await written(world, bytes(60_000))


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "sent"),
    [
        ([], [b"x"]),
        ([0], [b""]),
        ([-1], [b""]),
        ([10], [b"123456789"]),
        ([10], [b"12345678901"]),
        ([10], [b"1234567890", b"1"]),
        ([2**30 + 1], [b""]),
        ([1] * (limits.GATEWAY_PAYLOADS_MAX + 1), [b""]),
    ],
    ids=["no sizes", "zero", "negative", "less", "more", "another message", "huge", "many"],
)
async def test_a_write_of_other_bytes_than_it_says_is_refused_and_leaves_nothing(
    sizes: list[int], sent: list[bytes]
) -> None:
    async with gateway() as (world, parts):
        assert "ARGUMENT_INVALID" == await refusal(write(world, sizes, *sent))
        await nothing_is_left(world)
        await eventually(lambda: set(parts.payloads) <= set(parts.discarded))


async def test_a_write_without_a_message_is_refused() -> None:
    async with gateway() as (world, _):
        assert "ARGUMENT_INVALID" == await refusal(world.stub.WritePayloads(iter([])))


@pytest.mark.parametrize(
    ("start", "length"), [(-1, 5), (0, 0), (0, -1), (0, 101), (100, 1), (2**62, 2**62)]
)
async def test_a_range_that_is_not_of_its_payload_is_refused(start: int, length: int) -> None:
    async with gateway() as (world, _):
        (reference,) = await written(world, bytes(100))
        request = range_of(reference, start, length)
        assert "ARGUMENT_INVALID" == await refusal(world.stub.ReadPayloads(request))


async def test_no_more_than_so_many_ranges_are_read_in_a_call() -> None:
    async with gateway() as (world, _):
        (reference,) = await written(world, bytes(100))
        one = pb.PayloadRange(payload=reference, length_bytes=1)
        for count, is_fine in ((0, False), (512, True), (513, False)):
            request = pb.ReadPayloadsRequest(ranges=[one] * count)
            if is_fine:
                assert bytes(count) == await read(world, request)
            else:
                assert "ARGUMENT_INVALID" == await refusal(world.stub.ReadPayloads(request))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StoreUnavailableError("redis://10.0.0.1 is away"), "STORE_UNAVAILABLE"),
        (StoreFullError("OOM"), "STORE_FULL"),
    ],
)
async def test_a_store_that_fails_is_told_in_our_words_and_nothing_is_left(
    error: Exception, reason: str
) -> None:
    async with gateway() as (world, parts):
        parts.error = error
        assert reason == await refusal(write(world, [MIB], bytes(600_000), bytes(MIB - 600_000)))
        await nothing_is_left(world)
        await eventually(lambda: len(parts.discarded) == 1)


async def test_a_caller_that_gives_up_leaves_nothing_once_its_thread_has_ended() -> None:
    async with gateway() as (world, parts):
        parts.may_write.clear()
        call = write(world, [MIB], bytes(600_000), bytes(MIB - 600_000))
        reading = asyncio.ensure_future(refusal_or_cancel(call))  # noqa: TID251 - a caller
        await eventually(parts.writing.is_set, "a thread storing")
        call.cancel()
        await reading
        await nothing_is_left(world)
        assert [] == parts.discarded
        parts.may_write.set()
        await eventually(lambda: len(parts.discarded) == 1)


async def refusal_or_cancel(call: Any) -> None:
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        async for _ in call:
            pass


async def test_a_writer_that_stalls_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PART_S", 0.2)

    async def half() -> AsyncIterator[pb.WritePayloadsRequest]:
        yield pb.WritePayloadsRequest(size_bytes=[100], data=bytes(50))
        await asyncio.get_running_loop().create_future()

    async with gateway() as (world, _):
        assert "GATEWAY_STALLED" == await refusal(world.stub.WritePayloads(half()))
        await nothing_is_left(world)


async def test_a_writer_that_trickles_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is on a part: it does not begin anew with each of its messages."""
    monkeypatch.setattr(limits, "PART_S", 0.5)

    async def trickle() -> AsyncIterator[pb.WritePayloadsRequest]:
        yield pb.WritePayloadsRequest(size_bytes=[100], data=b"x")
        for _ in range(99):
            # Not at the moment of the cut: gRPC's client then has its own status, not the server's.
            await asyncio.sleep(0.2)
            yield pb.WritePayloadsRequest(data=b"x")

    async with gateway() as (world, _):
        assert "GATEWAY_STALLED" == await refusal(world.stub.WritePayloads(trickle()))
        await nothing_is_left(world)


async def test_a_reader_that_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PART_S", 0.2)
    async with gateway() as (world, _):
        (reference,) = await written(world, bytes(64 * MIB))
        call = world.stub.ReadPayloads(range_of(reference, 0, 64 * MIB))
        await call.initial_metadata()
        calls = world.server.metrics.registry.get_sample_value
        await eventually(lambda: calls("breadbox_gateway_calls") == 0, "the reader being cut off")
        assert "GATEWAY_STALLED" == await refusal(call)


async def test_a_server_that_ends_takes_no_payloads_any_more() -> None:
    async with gateway() as (world, parts):
        world.server.driver.drain()
        assert "DRAINING" == await refusal(write(world, [3], b"abc"))
        assert {} == parts.payloads
    assert parts.is_closed


async def test_without_a_gateway_every_call_of_it_says_so() -> None:
    async with served() as world:
        assert "GATEWAY_OFF" == await refusal(write(world, [3], b"abc"))
        reference = fragment_pb2.PayloadReference(payload_id="0" * 32, size_bytes=1)
        assert "GATEWAY_OFF" == await refusal(world.stub.ReadPayloads(range_of(reference, 0, 1)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await world.stub.DiscardPayloads(pb.DiscardPayloadsRequest())
        assert "GATEWAY_OFF" == reason_of(refused.value)


async def test_the_journals_path_goes_on_while_every_thread_waits_for_the_store() -> None:
    async with gateway() as (world, parts):
        await world.start()
        parts.may_write.clear()
        calls = [write(world, [100_000], bytes(100_000)) for _ in range(12)]
        await eventually(parts.writing.is_set, "threads storing")
        for index in range(5):
            await world.append(world.metadata(index))
        parts.may_write.set()
        for call in calls:
            async for answer in call:
                assert 1 == len(answer.payloads)


# Parts -------------------------------------------------------------------------------------------

PAYLOADS = st.lists(st.integers(1, 5 * limits.PART_BYTES), min_size=1, max_size=6)


@given(PAYLOADS, st.data())
def test_parts_are_the_ranges_in_order_cut_at_the_borders_of_pieces(
    sizes: list[int], data: st.DataObject
) -> None:
    ranges = []
    for number, size in enumerate(sizes):
        start = data.draw(st.integers(0, size - 1))
        length = data.draw(st.integers(1, size - start))
        ranges.append((PayloadReference(f"{number:032x}", size), start, length))
    parts = list(gateway_module._in_parts(ranges))  # noqa: SLF001 - every way to cut, without a call
    joined: list[tuple[PayloadReference, int, int]] = []
    for part in parts:
        assert 0 < sum(length for _, _, length in part) <= limits.PART_BYTES
        for reference, start, length in part:
            if joined and joined[-1][0] == reference:
                assert joined[-1][1] + joined[-1][2] == start
                assert start % limits.PART_BYTES == 0
                joined[-1] = (reference, joined[-1][1], joined[-1][2] + length)
            else:
                joined.append((reference, start, length))
    assert ranges == joined


# Bounds ------------------------------------------------------------------------------------------


def references(*sizes: int) -> list[PayloadReference]:
    return [PayloadReference(secrets.token_hex(16), size) for size in sizes]


class Books:
    """What is unannounced, and what had to make room."""

    def __init__(self) -> None:
        self.held = Unannounced(100_000, keep_s=60)
        self.ended: list[PayloadReference] = []
        self.deleted: list[PayloadReference] = []

    def say(self, caller: str, *sizes: int, now: float = 0.0) -> list[PayloadReference]:
        said = references(*sizes)
        self.held.add(caller, said, now, self.ended.append)
        return said

    def write(self, caller: str, *sizes: int) -> list[PayloadReference]:
        stored = self.say(caller, *sizes)
        for each in stored:
            self.held.arrive(PayloadId(each.payload_id), each.size_bytes)
        self.held.keep(stored, self.deleted.append)
        return stored


def test_bytes_are_bounded_of_a_caller() -> None:
    it = Books()
    it.say("a", 60_000, 40_000)
    with pytest.raises(GatewayFullError, match="100000 bytes are written with this token"):
        it.say("a", 1)
    it.say("a", 100_000, now=60.0)


def test_payloads_are_forgotten_together_without_a_look_at_those_forgotten_before() -> None:
    """A token may have written 262,144, the smallest that count."""

    def taken_s(count: int) -> float:
        held = Unannounced(2**30, keep_s=60)
        held.add("a", references(*[1] * count), 0.0, Mock())
        began_at = time.process_time()
        held.add("b", references(1), 60.0, Mock())
        assert 0 == held.bytes_of("a")
        return time.process_time() - began_at

    few_s, many_s = (min(taken_s(count) for _ in range(3)) for count in (10_000, 40_000))
    assert many_s < few_s * 8.0, (few_s, many_s)


def test_who_says_much_and_sends_little_takes_nothing_of_others() -> None:
    it = Books()
    for name in "abcd":
        (said,) = it.say(name, 100_000)
        it.held.arrive(PayloadId(said.payload_id), 1)

    it.write("e", 100_000)
    assert ([], []) == (it.ended, it.deleted)
    assert 100_000 + 4 * limits.PAYLOAD_BYTES_COUNTED_MIN == it.held.total_bytes


def test_who_holds_the_most_gives_way_to_who_holds_less() -> None:
    it = Books()
    oldest, _, *_ = (it.write(name, 50_000, 50_000)[0] for name in "abcd")

    mine = it.write("e", 40_000)
    assert ([], [oldest]) == (it.ended, it.deleted)
    assert it.held.of("a", PayloadId(oldest.payload_id)) is None
    assert 400_000 - 50_000 + 40_000 == it.held.total_bytes
    it.held.forget(PayloadId(mine[0].payload_id))
    assert 350_000 == it.held.total_bytes


def test_who_would_hold_the_most_is_refused_and_nobody_gives_way() -> None:
    it = Books()
    for name in "abcd":
        it.write(name, 100_000)

    with pytest.raises(GatewayFullError, match="400000 bytes are written"):
        it.write("e", 100_000)
    assert ([], []) == (it.ended, it.deleted)


def test_a_write_in_progress_gives_way_and_stays_refused() -> None:
    it = Books()
    for name in "abcd":
        (said,) = it.say(name, 100_000)
        it.held.arrive(PayloadId(said.payload_id), 99_999)
    it.write("e", 50_000)

    (ended,) = it.ended
    with pytest.raises(GatewayFullError, match="others needed"):
        it.held.arrive(PayloadId(ended.payload_id), 1)
    with pytest.raises(GatewayFullError, match="others needed"):
        it.held.keep([ended], it.deleted.append)


def test_small_payloads_count_as_what_they_cost_the_store() -> None:
    it = Books()
    it.write("a", *[1] * 24)
    assert 24 * limits.PAYLOAD_BYTES_COUNTED_MIN == it.held.total_bytes == it.held.bytes_of("a")
    with pytest.raises(GatewayFullError):
        it.say("a", 1)


def test_only_its_writer_has_a_payload_and_forgetting_it_twice_is_once() -> None:
    it = Books()
    (one,) = it.write("a", 50_000)
    payload_id = PayloadId(one.payload_id)
    assert (one, None) == (it.held.of("a", payload_id), it.held.of("b", payload_id))
    it.held.forget(payload_id)
    it.held.forget(payload_id)
    assert 0 == it.held.total_bytes
    assert it.held.of("a", payload_id) is None


class TestCallSlots:
    async def test_each_of_the_bounds_holds_and_places_come_free(self) -> None:
        slots = CallSlots()
        leave = asyncio.Event()

        async def call(caller: str, peer: str) -> None:
            async with slots.taken(caller, peer):
                await leave.wait()

        async with asyncio.TaskGroup() as calls:
            for _ in range(40):
                calls.create_task(call("a", "one"))
            await asyncio.sleep(0)
            assert 16 == slots.count
            for number in range(60):
                calls.create_task(call("a", f"another {number}"))
            await asyncio.sleep(0)
            assert 64 == slots.count
            for number in range(400):
                calls.create_task(call(f"b {number}", f"b {number}"))
            await asyncio.sleep(0)
            assert 256 == slots.count
            leave.set()
        assert 0 == slots.count

    async def test_who_waits_behind_a_bound_of_others_is_overtaken_and_else_is_not(self) -> None:
        slots = CallSlots()
        order: list[str] = []
        leave = {name: asyncio.Event() for name in ("first", "late")}

        async def call(name: str, caller: str, peer: str) -> None:
            async with slots.taken(caller, peer):
                order.append(name)
                await leave.get(name, leave["first"]).wait()

        async with asyncio.TaskGroup() as calls:
            for _ in range(16):
                calls.create_task(call("first", "a", "p"))
            await asyncio.sleep(0)
            calls.create_task(call("late", "a", "p"))
            calls.create_task(call("later", "a", "p"))
            await asyncio.sleep(0)
            calls.create_task(call("other", "b", "q"))
            await asyncio.sleep(0)
            assert ["first"] * 16 + ["other"] == order
            leave["first"].set()
            leave["late"].set()
        assert ["late", "later"] == order[17:]

    async def test_a_wait_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "GATEWAY_WAIT_S", 0.05)
        slots = CallSlots()
        async with contexts(slots, 16):
            with pytest.raises(GatewayFullError):
                async with slots.taken("a", "p"):
                    pass
        assert 0 == slots.count
        async with slots.taken("a", "p"):
            assert 1 == slots.count

    async def test_so_many_may_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "GATEWAY_WAITERS_MAX", 0)
        slots = CallSlots()
        async with contexts(slots, 16):
            with pytest.raises(GatewayFullError, match="wait"):
                async with slots.taken("a", "p"):
                    pass

    async def test_who_holds_the_most_gives_way_once_it_is_slow(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(call_slots, "PATIENCE_S", 0.05)
        slots = CallSlots()
        ended: list[str] = []
        leave = asyncio.Event()

        async def call(caller: str, number: int) -> None:
            try:
                async with slots.taken(caller, f"{caller} {number // 16}"):
                    await leave.wait()
            except GatewayFullError:
                ended.append(caller)

        async with asyncio.TaskGroup() as calls:
            for caller in "abcd":
                for number in range(64 + 16):
                    calls.create_task(call(caller, number))
            await asyncio.sleep(0)
            for _ in range(3):
                # Before the others, of whom more wait already.
                async with slots.taken("honest", "q"), slots.taken("honest", "q"):
                    assert 256 == slots.count
            leave.set()
        assert {"a", "b", "c", "d"} >= set(ended)
        assert len(ended) >= 2
        assert 0 == slots.count

    async def test_who_is_as_large_as_others_waits_for_a_place(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(call_slots, "PATIENCE_S", 0.01)
        monkeypatch.setitem(limits.GATEWAY_CALLS_OF, "all", 2)
        monkeypatch.setattr(limits, "GATEWAY_WAIT_S", 0.1)
        slots = CallSlots()
        async with slots.taken("a", "p"), slots.taken("b", "q"):
            with pytest.raises(GatewayFullError, match="too many calls move"):
                async with slots.taken("c", "r"):
                    pass

    async def test_those_of_whom_the_most_wait_leave_the_line_to_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "GATEWAY_WAITERS_MAX", 4)
        slots = CallSlots()
        order: list[str] = []
        leave = asyncio.Event()

        async def call(caller: str, peer: str) -> None:
            try:
                async with slots.taken(caller, peer):
                    order.append(peer)
                    await leave.wait()
            except GatewayFullError:
                order.append(f"{peer} refused")

        async with asyncio.TaskGroup() as calls:
            for _ in range(64):
                calls.create_task(call("a", f"p{len(order)}"))
                await asyncio.sleep(0)
            for number in range(4):
                calls.create_task(call("a", f"late {number}"))
            await asyncio.sleep(0)
            for _ in range(16):
                calls.create_task(call("b", "q"))
            await asyncio.sleep(0)
            del order[:]
            calls.create_task(call("b", "q"))
            await eventually(lambda: order == ["late 3 refused"])
            leave.set()

    @pytest.mark.parametrize("ticks", range(4))
    async def test_a_wait_that_is_cancelled_leaves_no_trace(self, ticks: int) -> None:
        """Before its turn, in the tick of it, and after."""
        slots = CallSlots()

        async def call() -> None:
            async with slots.taken("a", "p"):
                await asyncio.get_running_loop().create_future()

        async with asyncio.TaskGroup() as calls:
            async with contexts(slots, 16):
                waiting = calls.create_task(call())
                await asyncio.sleep(0)
            for _ in range(ticks):
                await asyncio.sleep(0)
            waiting.cancel()
        assert 0 == slots.count
        async with contexts(slots, 16):
            assert 16 == slots.count


@asynccontextmanager
async def contexts(slots: CallSlots, count: int) -> AsyncIterator[None]:
    """So many calls of one connection."""
    if not count:
        yield
        return
    async with slots.taken("a", "p"), contexts(slots, count - 1):
        yield
