"""Appends of a stream: each is answered as a call of its own would be, and nothing waits for it."""

import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from breadbox.v1 import fragment_pb2, replay_buffer_service_pb2_grpc
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.core.buffers import DEFAULT_BUFFER
from breadbox_server.core.model.config import BufferConfig, FullPolicy
from breadbox_server.core.model.ids import SessionId
from breadbox_server.core.model.inputs import StartSession
from breadbox_server.limits import STREAM_APPENDS_MAX, STREAM_BYTES_MAX
from breadbox_server.rpc import append_stream as items
from breadbox_server.rpc import traffic
from support.eventually import eventually
from support.served import Served, info_in, reason_of, served, span
from support.token_files import bearer, line_of, write_tokens

ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED
BUFFER_FULL = fragment_pb2.ADMISSION_OUTCOME_BUFFER_FULL


def append(it: Served, call_id: int, *, wait_s: float = 0.0, **fields: Any) -> Any:
    """An append of one fragment of a worker of its own."""
    request = pb.AppendFragmentsRequest(
        fragments=[it.metadata(0, worker_id=f"w{call_id}", **fields)], max_wait=span(wait_s)
    )
    return pb.StreamedAppend(call_id=call_id, append=request, timeout=span(10.0))


def message(it: Served, *call_ids: int, wait_s: float = 0.0, **fields: Any) -> Any:
    """Some of them."""
    appends = [append(it, call_id, wait_s=wait_s, **fields) for call_id in call_ids]
    return pb.AppendStreamRequest(appends=appends)


async def opened(it: Served, **options: Any) -> Any:
    """A stream on which the server has said what it takes."""
    stream = it.stub.AppendStream(**options)
    credit = (await stream.read()).credit
    assert (STREAM_APPENDS_MAX, STREAM_BYTES_MAX) == (credit.append_count, credit.size_bytes)
    return stream


async def answers_of(stream: Any, count: int) -> list[pb.StreamedAnswer]:
    """The next answers, at least so many."""
    found: list[pb.StreamedAnswer] = []
    while len(found) < count:
        found += (await stream.read()).answers
    return found


async def answer_of(stream: Any) -> pb.StreamedAnswer:
    """The next answer."""
    (answer,) = await answers_of(stream, 1)
    return answer


def outcome(answer: pb.StreamedAnswer) -> int:
    """What an append of one fragment came to."""
    (result,) = answer.response.results
    return int(result.outcome)


def reason(answer: pb.StreamedAnswer) -> str:
    """Why an append was refused."""
    return info_in(status_pb2.Status.FromString(answer.error)).reason


async def taken(stream: Any) -> tuple[grpc.StatusCode, str | None]:
    """How a stream ended, and how many messages it says to have taken."""
    trailing = dict(await stream.trailing_metadata())
    return await stream.code(), trailing.get("breadbox-taken")


async def test_each_message_is_answered_by_its_id() -> None:
    async with served() as it:
        await it.start()
        stream = await opened(it)
        for call_id in (7, 3, 5):
            await stream.write(message(it, call_id))
        answers = await answers_of(stream, 3)
        await stream.done_writing()
        assert grpc.aio.EOF is await stream.read()
        assert (grpc.StatusCode.OK, "3") == await taken(stream)
        buffer = await it.buffer()
    assert {7: ADMITTED, 3: ADMITTED, 5: ADMITTED} == {
        each.call_id: outcome(each) for each in answers
    }
    assert 3 == buffer.state.chunk_count


async def test_a_message_that_is_refused_ends_no_stream() -> None:
    async with served() as it:
        await it.start()
        stream = await opened(it)
        await stream.write(pb.AppendStreamRequest(appends=[pb.StreamedAppend(call_id=1)]))
        refused = await answer_of(stream)
        await stream.write(message(it, 2))
        admitted = await answer_of(stream)
        stream.cancel()
    assert ("ARGUMENT_INVALID", ADMITTED) == (reason(refused), outcome(admitted))


async def test_a_message_that_waits_for_room_holds_up_nobody_behind_it() -> None:
    config = BufferConfig(capacity_chunks=1, uses_max=1, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        await it.fill(1)
        stream = await opened(it)
        await stream.write(message(it, 1, wait_s=5.0))
        await eventually(lambda: it.server.driver.appends.queue.waiting_count == 1)
        await stream.write(message(it, 2))
        second = await answer_of(stream)
        await it.make_room()
        first = await answer_of(stream)
        stream.cancel()
    assert (2, BUFFER_FULL) == (second.call_id, outcome(second))
    assert (1, ADMITTED) == (first.call_id, outcome(first))


async def test_a_stream_has_no_more_messages_on_their_way_than_it_may() -> None:
    config = BufferConfig(capacity_chunks=1, uses_max=1, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        await it.fill(1)
        stream = await opened(it)
        for call_id in range(STREAM_APPENDS_MAX + 10):
            await stream.write(message(it, call_id + 1, wait_s=5.0))
        appends = it.server.driver.appends.queue
        await eventually(lambda: appends.waiting_count == STREAM_APPENDS_MAX)
        it.clock.advance(6.0)
        answers = await answers_of(stream, STREAM_APPENDS_MAX)
        await eventually(lambda: appends.waiting_count == 10)
        stream.cancel()
        await eventually(lambda: appends.waiting_count == 0)
    assert {BUFFER_FULL} == {outcome(each) for each in answers}


async def test_appends_that_are_taken_back_make_room_on_a_stream_that_has_none() -> None:
    config = BufferConfig(capacity_chunks=1, uses_max=1, full_policy=FullPolicy.BLOCK)
    every = range(1, STREAM_APPENDS_MAX + 1)
    async with served(config) as it:
        await it.start()
        await it.fill(1)
        stream = await opened(it)
        appends = it.server.driver.appends.queue
        for _ in range(2):
            await stream.write(message(it, *every, wait_s=5.0))
            await eventually(lambda: appends.waiting_count == STREAM_APPENDS_MAX)
            await stream.write(pb.AppendStreamRequest(cancelled_call_ids=every))
            await eventually(lambda: appends.waiting_count == 0)
        last = message(it, 77, 78)
        last.cancelled_call_ids.append(77)
        await stream.write(last)
        answer = await answer_of(stream)
        await stream.done_writing()
        assert grpc.aio.EOF is await stream.read()
        assert (grpc.StatusCode.OK, str(2 * STREAM_APPENDS_MAX + 2)) == await taken(stream)
    assert (78, BUFFER_FULL) == (answer.call_id, outcome(answer))


async def test_an_idle_stream_ends_well_and_says_what_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic, "ARRIVAL_S", 0.1)
    async with served() as it:
        await it.start()
        stream = await opened(it)
        await stream.write(message(it, 1))
        await stream.read()
        assert grpc.aio.EOF is await stream.read()
        assert (grpc.StatusCode.OK, "1") == await taken(stream)


async def test_idle_streams_make_room_for_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "ARRIVALS_OF_CONNECTION_MAX", 3)
    async with served() as it:
        await it.start()
        streams = []
        for number in range(3):
            streams.append(await opened(it))
            await streams[-1].write(message(it, number + 1))
            await streams[-1].read()
        await it.buffer()
        assert grpc.aio.EOF is await streams[0].read()
        assert (grpc.StatusCode.OK, "1") == await taken(streams[0])
        for stream in streams[1:]:
            await stream.write(message(it, 9))
            assert 9 == (await answer_of(stream)).call_id
            stream.cancel()


async def test_a_server_that_ends_waits_for_no_stream_that_asks_for_nothing() -> None:
    async with AsyncExitStack() as stack:
        async with served(drain_grace_s=30.0) as it:
            await it.start()
            channel = grpc.aio.insecure_channel(it.server.address)
            await stack.enter_async_context(channel)
            stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
            stream: Any = stub.AppendStream()
            await stream.read()
            await stream.write(message(it, 1))
            await stream.read()
            ended_at = time.monotonic()
        assert time.monotonic() - ended_at < 15.0
        assert (grpc.StatusCode.OK, "1") == await taken(stream)


async def test_a_caller_that_goes_away_takes_what_waits_with_it() -> None:
    config = BufferConfig(capacity_chunks=1, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        await it.fill(1)
        stream = await opened(it)
        await stream.write(message(it, 1, wait_s=60.0))
        appends = it.server.driver.appends.queue
        await eventually(lambda: appends.waiting_count == 1)
        stream.cancel()
        await eventually(lambda: appends.waiting_count == 0)


async def test_appends_of_one_message_are_judged_together_and_answered_one_by_one() -> None:
    async with served() as it:
        await it.start()
        stream = await opened(it)
        await stream.write(message(it, *range(1, 9)))
        answers = await answers_of(stream, 8)
        await stream.done_writing()
        assert grpc.aio.EOF is await stream.read()
        assert (grpc.StatusCode.OK, "8") == await taken(stream)
    assert dict.fromkeys(range(1, 9), ADMITTED) == {each.call_id: outcome(each) for each in answers}


async def test_an_append_that_nobody_waits_for_any_more_leaves_the_line() -> None:
    config = BufferConfig(capacity_chunks=1, uses_max=1, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        await it.fill(1)
        stream = await opened(it)
        await stream.write(message(it, 1, 2, wait_s=60.0))
        appends = it.server.driver.appends.queue
        await eventually(lambda: appends.waiting_count == 2)
        await stream.write(pb.AppendStreamRequest(cancelled_call_ids=[1, 7]))
        await eventually(lambda: appends.waiting_count == 1)
        await it.make_room()
        answer = await answer_of(stream)
        stream.cancel()
    assert (2, ADMITTED) == (answer.call_id, outcome(answer))


@pytest.mark.parametrize("kind", ["nothing", "too many appends", "too many ids"])
async def test_a_message_that_keeps_to_no_bounds_ends_the_stream(kind: str) -> None:
    async with served() as it:
        await it.start()
        stream = await opened(it)
        too_many = range(STREAM_APPENDS_MAX + 1)
        wrong = {
            "nothing": pb.AppendStreamRequest(),
            "too many appends": message(it, *too_many),
            "too many ids": pb.AppendStreamRequest(cancelled_call_ids=too_many),
        }
        await stream.write(wrong[kind])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        buffer = await it.buffer()
    assert "ARGUMENT_INVALID" == reason_of(refused.value)
    assert 0 == buffer.state.chunk_count


async def test_a_stream_has_no_more_bytes_on_their_way_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(items, "STREAM_BYTES_MAX", 1)
    config = BufferConfig(capacity_chunks=1, uses_max=1, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        await it.fill(1)
        stream = it.stub.AppendStream()
        assert 1 == (await stream.read()).credit.size_bytes
        await stream.write(message(it, 1, 2, wait_s=60.0))
        await stream.write(message(it, 3, wait_s=60.0))
        appends = it.server.driver.appends.queue
        await eventually(lambda: appends.waiting_count == 2)
        await it.buffer()
        assert 2 == appends.waiting_count, "the third is not read"
        stream.cancel()


async def test_an_append_is_answered_by_its_own_deadline() -> None:
    config = BufferConfig(capacity_chunks=1, uses_max=1, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        await it.fill(1)
        stream = await opened(it)
        waiting = append(it, 1, wait_s=60.0)
        waiting.timeout.CopyFrom(span(0.5))
        await stream.write(pb.AppendStreamRequest(appends=[waiting]))
        late = await answer_of(stream)
        await stream.write(message(it, 2))
        behind = await answer_of(stream)
        stream.cancel()
    told = status_pb2.Status.FromString(late.error)
    assert (1, grpc.StatusCode.DEADLINE_EXCEEDED.value[0]) == (late.call_id, told.code)
    assert (2, BUFFER_FULL) == (behind.call_id, outcome(behind))


async def test_a_token_that_is_taken_back_ends_its_streams(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    first, second = write_tokens(path, "producer a", "producer b")
    async with served(tokens=path) as it:
        stream = await opened(it, metadata=bearer(first))
        kept = await opened(it, metadata=bearer(second))
        path.write_text(line_of("producer b", second))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        await kept.write(pb.AppendStreamRequest(appends=[pb.StreamedAppend(call_id=1)]))
        answer = await answer_of(kept)
        kept.cancel()
    assert "UNAUTHENTICATED" == reason_of(refused.value)
    assert "ARGUMENT_INVALID" == reason(answer)


async def test_an_append_that_waits_ends_when_its_worker_is_its_tokens_no_more(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens"
    (token,) = write_tokens(path, "producer a buffers=default workers=w*")
    config = BufferConfig(capacity_chunks=1, uses_max=1, full_policy=FullPolicy.BLOCK)
    async with served(config, tokens=path) as it:
        await it.server.driver.core.apply(StartSession(DEFAULT_BUFFER, SessionId("run")))
        stream = await opened(it, metadata=bearer(token))
        await stream.write(message(it, 3))
        await answer_of(stream)
        await stream.write(message(it, 1, 2, wait_s=5.0))
        await eventually(lambda: it.server.driver.appends.queue.waiting_count == 2)
        path.write_text(line_of("producer a buffers=default workers=w2", token))
        refused = await answer_of(stream)
        assert 1 == it.server.driver.appends.queue.waiting_count
        it.clock.advance(6.0)
        other = await answer_of(stream)
        stream.cancel()
    assert (1, "PERMISSION_DENIED") == (refused.call_id, reason(refused))
    assert (2, BUFFER_FULL) == (other.call_id, outcome(other))


async def test_each_append_of_a_stream_is_held_against_the_tokens_bounds(tmp_path: Path) -> None:
    (token,) = write_tokens(tmp_path / "tokens", "producer a buffers=default workers=a-*")
    async with served(tokens=tmp_path / "tokens") as it:
        stream = await opened(it, metadata=bearer(token))
        appends = [append(it, call_id) for call_id in range(1, 4)]
        appends[0].append.buffer = "another"
        appends[2].append.fragments[0].worker_id = "a-1"
        await stream.write(pb.AppendStreamRequest(appends=appends))
        told = {each.call_id: each for each in await answers_of(stream, 3)}
        stream.cancel()
    assert ["PERMISSION_DENIED"] * 2 == [reason(told[1]), reason(told[2])]
    assert fragment_pb2.ADMISSION_OUTCOME_WRONG_SESSION == outcome(told[3])


async def test_streams_are_counted_while_they_are_open() -> None:
    async with served() as it:
        await it.start()
        streams = [await opened(it) for _ in range(2)]
        gauge = it.server.metrics.append_streams
        assert 2 == gauge._value.get()  # noqa: SLF001 - as its tests do
        for stream in streams:
            stream.cancel()
        await eventually(lambda: gauge._value.get() == 0)  # noqa: SLF001
