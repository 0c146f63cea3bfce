"""A stream of appends beside a caller that takes its time."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.base.errors import ServerBusyError
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.limits import UNTAKEN_SMALL_BYTES
from breadbox_server.rpc import append_stream as items
from support.eventually import eventually


class SlowContext:
    """Of a stream whose messages leave when the test lets them."""

    def __init__(self) -> None:
        self.is_writing = asyncio.Event()
        self.may_leave = asyncio.Event()
        self.left: list[Any] = []
        self.metadata: Any = None

    async def write(self, response: Any) -> None:
        self.is_writing.set()
        await self.may_leave.wait()
        self.left.append(response)

    def set_trailing_metadata(self, metadata: Any) -> None:
        self.metadata = metadata


def never(*_: Any) -> Any:
    raise AssertionError("there was no append")


def at_once(fragment_count: int) -> contextlib.AbstractAsyncContextManager[None]:
    """Every message has its turn."""
    return contextlib.nullcontext()


async def test_a_stream_that_is_refused_lets_the_message_leave_that_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is cut off in the middle would keep the caller from hearing why."""
    monkeypatch.setattr(items, "END_S_MAX", 30.0)
    context = SlowContext()

    async def receive() -> Any:
        await context.is_writing.wait()
        return pb.AppendStreamRequest()

    stream = items.ItemStream(context, receive, at_once, never, never, on_untaken=lambda: None)
    running = asyncio.get_running_loop().create_task(stream.run())
    await context.is_writing.wait()
    done, _ = await asyncio.wait((running,), timeout=0.05)
    context.may_leave.set()
    with pytest.raises(InvalidArgumentError, match="neither appends"):
        await running
    assert (set(), 1) == (done, len(context.left))
    assert context.metadata is None, "it has not ended well"


class Counted:
    """Bytes of a stream that the server counts, by what became of them."""

    def __init__(self, counted: list[int], closed: list[int], size_bytes: int) -> None:
        counted.append(size_bytes)
        self.close = partial(closed.append, size_bytes)


async def test_a_message_that_comes_before_there_is_room_for_it_counts_until_there_is() -> None:
    context = SlowContext()
    appends = [pb.StreamedAppend(call_id=each) for each in range(32)]
    messages = [pb.AppendStreamRequest(appends=appends)] * 2
    size_bytes = messages[0].ByteSize()
    counted: list[int] = []
    closed: list[int] = []
    deliveries: list[Callable[[Any], None]] = []

    async def receive() -> Any:
        return messages.pop() if messages else None

    def begin(request: Any, item: Any, deliver: Callable[[Any], None]) -> Any:
        deliveries.append(deliver)

    hold: Any = partial(Counted, counted, closed)
    stream = items.ItemStream(context, receive, at_once, begin, hold, on_untaken=lambda: None)
    running = asyncio.get_running_loop().create_task(stream.run())
    await eventually(lambda: counted == [size_bytes])
    assert (32, []) == (len(deliveries), closed)
    deliveries.pop()(None)
    await eventually(lambda: closed == [size_bytes])
    assert 31 + 32 == len(deliveries)
    for deliver in deliveries:
        deliver(None)
    context.may_leave.set()
    await running


async def test_answers_of_a_stream_that_nobody_takes_are_counted_and_then_refused() -> None:
    context = SlowContext()
    appends = [pb.StreamedAppend(call_id=each) for each in range(32)]
    messages = [pb.AppendStreamRequest(appends=appends), None]
    counted: list[int] = []
    released: list[int] = []

    def hold(size_bytes: int) -> Any:
        if len(counted) == 8:
            raise ServerBusyError("full")
        return Counted(counted, released, size_bytes)

    async def receive() -> Any:
        return messages.pop(0)

    def begin(request: Any, item: Any, deliver: Callable[[Any], None]) -> Any:
        deliver(pb.AppendFragmentsResponse(session_id="s" * 500))

    stream = items.ItemStream(context, receive, at_once, begin, hold, on_untaken=lambda: None)
    running = asyncio.get_running_loop().create_task(stream.run())
    await context.is_writing.wait()
    assert [] == released
    context.may_leave.set()
    await running

    answers = [
        answer
        for encoded in context.left
        for answer in pb.AppendStreamResponse.FromString(encoded).answers
    ]
    uncounted = UNTAKEN_SMALL_BYTES // counted[0]
    assert list(range(32)) == [answer.call_id for answer in answers]
    assert [True] * (uncounted + 8) + [False] * (24 - uncounted) == [
        answer.HasField("response") for answer in answers
    ]
    assert counted == released
