"""A stream of appends beside a caller that takes its time."""

import asyncio
from typing import Any

import pytest

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server import items
from breadbox_server.core.errors import InvalidArgumentError


class SlowContext:
    """Of a stream whose messages leave when the test lets them."""

    def __init__(self) -> None:
        self.is_writing = asyncio.Event()
        self.may_leave = asyncio.Event()
        self.left: list[Any] = []

    async def write(self, response: Any) -> None:
        self.is_writing.set()
        await self.may_leave.wait()
        self.left.append(response)

    def set_trailing_metadata(self, metadata: Any) -> None:
        raise AssertionError("it has not ended well")


def never(*_: Any) -> Any:
    raise AssertionError("there was no append")


async def test_a_stream_that_is_refused_lets_the_message_leave_that_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is cut off in the middle would keep the caller from hearing why."""
    monkeypatch.setattr(items, "END_S_MAX", 30.0)
    context = SlowContext()

    async def receive() -> Any:
        await context.is_writing.wait()
        return pb.AppendStreamRequest()

    stream = items.ItemStream(context, receive, never, on_untaken=lambda: None)
    running = asyncio.get_running_loop().create_task(stream.run())
    await context.is_writing.wait()
    done, _ = await asyncio.wait((running,), timeout=0.05)
    context.may_leave.set()
    with pytest.raises(InvalidArgumentError, match="neither appends"):
        await running
    assert (set(), 1) == (done, len(context.left))
