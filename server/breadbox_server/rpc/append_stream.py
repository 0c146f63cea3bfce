"""A stream of appends, each of them a call of its own: taken, answered and told as one would be.

What a stream may have on its way is bounded: the appends of its next message wait for room in its
credit, and no other message is asked for meanwhile, so that nobody has to be trusted to keep to it.
Several appends may come in a message, and answers that are there at the same time leave in one.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import status_pb2

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.base import conversion as convert
from breadbox_server.base.errors import ServerBusyError
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.limits import (
    ANSWER_TAKEN_S,
    STREAM_APPENDS_MAX,
    STREAM_BYTES_MAX,
    UNTAKEN_SMALL_BYTES,
)
from breadbox_server.rpc import status
from breadbox_server.rpc.untaken_answers import Held

log = logging.getLogger(__name__)

TAKEN: Final = "breadbox-taken"
"""Trailing metadata of a stream that the server ends: appends that it took, all answered."""
END_S_MAX: Final = 1.0
"""Seconds that a stream which is over waits for whoever takes no messages."""
ANSWERS_BYTES_MAX: Final = 256 * 2**10
"""Of answers that leave in one message, unless one alone is larger."""


class ItemContext:
    """What an append of a stream has of the context that a call of its own would have."""

    def __init__(self, context: Any, timeout: Duration | None) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._ends_at = None if timeout is None else self._loop.time() + convert.seconds(timeout)

    def time_remaining(self) -> float | None:
        """Seconds until its caller waits for no answer any more; None: it does for ever."""
        left_s: float | None = self._context.time_remaining()
        if self._ends_at is None:
            return left_s
        own_s = max(0.0, self._ends_at - self._loop.time())
        return own_s if left_s is None else min(own_s, left_s)

    def invocation_metadata(self) -> Any:
        """That of the stream."""
        return self._context.invocation_metadata()


class ItemCall(Protocol):
    """An append that is being answered."""

    def cancel(self) -> None:
        """Nobody waits for its answer any more. Idempotent, also once it is answered."""


Begin = Callable[[Any, ItemContext, Callable[[Any], None]], ItemCall]
"""Begins to answer an AppendFragments, and calls back once, maybe at once: with its response, a
Status, or None where it was cancelled."""


class ItemStream:
    """One stream of them.

    Args:
        context: Of the stream.
        receive: Gives the next message, or EOF; None: the stream has to end.
        turn: Inside it a message with so many fragments may be carried out.
        begin: Answers an append.
        hold: Counts so many bytes, of answers that are not taken or of a message beyond the credit;
            raises ServerBusyError where they are too many.
        on_untaken: Called when the caller has not taken an answer for `ANSWER_TAKEN_S`.
    """

    def __init__(
        self,
        context: Any,
        receive: Callable[[], Awaitable[Any]],
        turn: Callable[[int], AbstractAsyncContextManager[None]],
        begin: Begin,
        hold: Callable[[int], Held],
        on_untaken: Callable[[], None],
    ) -> None:
        self._context = context
        self._receive = receive
        self._turn = turn
        self._begin_call = begin
        self._hold = hold
        self._on_untaken = on_untaken
        self._running: dict[_Item, None] = {}
        """Appends that are not answered."""
        self._by_id: dict[int, _Item] = {}
        self._bytes = 0
        """Of all of them."""
        self._answers: deque[_Answer] = deque()
        """Not on their way yet."""
        self._untaken_bytes = 0
        """Of these, and of those that are."""
        self._taken_count = self._done_count = 0
        """Appends that were taken; those of them that were answered, or cancelled."""
        self._has_answers = asyncio.Event()
        self._has_more_room = asyncio.Event()
        self._is_over = False

    async def run(self) -> None:
        """Take appends until the caller has sent the last, or there is no place for the next.

        What was taken is answered before the stream ends.

        Raises:
            InvalidArgumentError: A message has nothing, or more than the credit.
            ServerBusyError: It came before there was room for it, and others' bytes wait already.
        """
        # Who does not read is not awaited: it is found out as one that sends nothing.
        writer = asyncio.get_running_loop().create_task(self._write_all())
        try:
            while True:
                message = await self._receive()
                if message is None or message is grpc.aio.EOF:
                    break
                _check(message)
                self._cancel(message.cancelled_call_ids)  # Which may make room.
                if not self._has_room():
                    # Who keeps to the credit does not come here.
                    with closing(self._hold(message.ByteSize())):
                        await self._until(self._has_room)
                async with self._turn(_fragment_count(message)):
                    for append in message.appends:
                        self._begin(append)
                    self._cancel(message.cancelled_call_ids)
            await self._until(lambda: self._done_count == self._taken_count)
        finally:
            for item in tuple(self._running):
                item.cancel()
            await self._end(writer)
        self._context.set_trailing_metadata(((TAKEN, str(self._taken_count)),))

    def _has_room(self) -> bool:
        on_the_way = self._taken_count - self._done_count
        return on_the_way < STREAM_APPENDS_MAX and self._bytes < STREAM_BYTES_MAX

    def _cancel(self, call_ids: Iterable[int]) -> None:
        for call_id in call_ids:
            if (item := self._by_id.get(call_id)) is not None:
                item.cancel()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._has_more_room.clear()
            await self._has_more_room.wait()

    def _begin(self, told: pb.StreamedAppend) -> None:
        item = _Item(told.call_id, told.append.ByteSize())
        self._running[item] = None
        self._by_id[item.call_id] = item
        self._bytes += item.size_bytes
        self._taken_count += 1
        timeout = told.timeout if told.HasField("timeout") else None
        context = ItemContext(self._context, timeout)
        item.call = self._begin_call(told.append, context, partial(self._answer, item))

    def _answer(self, item: "_Item", answer: Any) -> None:
        """Let an answer leave; None: nobody waits for it."""
        del self._running[item]
        self._bytes -= item.size_bytes
        if self._by_id.get(item.call_id) is item:
            del self._by_id[item.call_id]
        self._has_more_room.set()
        if answer is None:
            self._done_count += 1
            return
        told = _Answer(item.call_id, answer)
        if self._untaken_bytes + len(told.encoded) > UNTAKEN_SMALL_BYTES:
            try:
                told.held = self._hold(len(told.encoded))
            except ServerBusyError as error:
                told = _Answer(item.call_id, status.to_status(error))
        self._untaken_bytes += len(told.encoded)
        self._answers.append(told)
        self._has_answers.set()

    async def _write_all(self) -> None:
        """Tell what the stream takes, and then send answers as they come."""
        credit = pb.AppendCredit(append_count=STREAM_APPENDS_MAX, size_bytes=STREAM_BYTES_MAX)
        await self._write(pb.AppendStreamResponse(credit=credit).SerializeToString())
        while not self._is_over:
            await self._has_answers.wait()
            self._has_answers.clear()
            while self._answers:
                leaving: list[_Answer] = []
                left = ANSWERS_BYTES_MAX
                while self._answers and left > 0:
                    leaving.append(self._answers.popleft())
                    left -= len(leaving[-1].encoded)
                try:
                    # Encoded messages that stand one after the other are one.
                    await self._write(b"".join(each.encoded for each in leaving))
                finally:
                    self._release(leaving)
                self._done_count += len(leaving)
                self._has_more_room.set()

    def _release(self, answers: "Iterable[_Answer]") -> None:
        for answer in answers:
            self._untaken_bytes -= len(answer.encoded)
            if answer.held is not None:
                answer.held.close()

    async def _write(self, response: bytes) -> None:
        try:
            async with asyncio.timeout(ANSWER_TAKEN_S):
                await self._context.write(response)
        except TimeoutError:
            self._on_untaken()
        except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
            # The caller has gone; gRPC is about to cancel the stream.
            log.debug("an answer of a stream could not be sent: %s", error)

    async def _end(self, writer: asyncio.Task[None]) -> None:
        """Let a message leave: to cut it off in the middle would keep the end from being told."""
        self._is_over = True
        self._has_answers.set()
        try:
            await asyncio.wait((writer,), timeout=END_S_MAX)
        finally:
            writer.cancel()
            self._release(self._answers)


class _Answer:
    """What an append of a stream is told.

    Args:
        call_id: Of the append.
        answer: The response, or an error.
    """

    __slots__ = ("encoded", "held")

    def __init__(
        self, call_id: int, answer: pb.AppendFragmentsResponse | status_pb2.Status
    ) -> None:
        told = pb.StreamedAnswer(call_id=call_id)
        if isinstance(answer, status_pb2.Status):
            told.error = answer.SerializeToString()
        else:
            told.response.CopyFrom(answer)
        self.encoded = pb.AppendStreamResponse(answers=[told]).SerializeToString()
        """A message with this answer alone."""
        self.held: Held | None = None


@dataclass(slots=True, eq=False)
class _Item:
    """An append that is not answered."""

    call_id: int
    size_bytes: int
    call: ItemCall | None = None

    def cancel(self) -> None:
        if self.call is not None:
            self.call.cancel()


def _check(message: pb.AppendStreamRequest) -> None:
    if not message.appends and not message.cancelled_call_ids:
        raise InvalidArgumentError("request", "has neither appends nor cancelled_call_ids")
    for field in ("appends", "cancelled_call_ids"):
        if len(getattr(message, field)) > STREAM_APPENDS_MAX:
            raise InvalidArgumentError(field, f"must be at most {STREAM_APPENDS_MAX} in a message")


def _fragment_count(message: pb.AppendStreamRequest) -> int:
    """What a message costs: a fragment that is cancelled, or that is missing, as much as others."""
    brought = sum(max(1, len(each.append.fragments)) for each in message.appends)
    return brought + len(message.cancelled_call_ids)
