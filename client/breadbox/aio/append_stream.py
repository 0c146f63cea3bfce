"""Appends of tasks by one stream; see `breadbox.streaming`.

What tasks append while a message is on its way to the wire leaves in the next one, together.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from breadbox import status, streaming, wire
from breadbox.errors import ReplayBufferError
from breadbox.tasks import end_tasks
from breadbox.v1 import replay_buffer_service_pb2 as pb

CLOSE_S_MAX = 1.0
"""Seconds that a stream that is cancelled may take to end by itself."""


@dataclass(slots=True, eq=False)
class _Sent:
    """An append on its way."""

    number: int
    """Among the appends of the stream, from 1; its call_id."""
    request: Any
    size_bytes: int
    timeout_s: float
    answer: asyncio.Future[Any]
    """Its result is None where the stream ended before the server took it."""


class _Stream:
    """One stream, with a task that writes and one that reads."""

    def __init__(self, owner: "AppendStreams", method: Any, metadata: Any) -> None:
        self._owner = owner
        self._outgoing: deque[_Sent | int] = deque()
        """Appends, and call_ids that nobody waits for any more."""
        self._pending: dict[int, _Sent] = {}
        self._sent_count = 0
        self.answered_count = 0
        self._is_retired = False
        self._wake = asyncio.Event()
        now = owner.clock()
        self.usage = streaming.Usage(now, now)
        self._call = method(metadata=metadata)
        loop = asyncio.get_running_loop()
        self.tasks = (loop.create_task(self._write()), loop.create_task(self._read()))

    async def send(self, request: Any, size_bytes: int, timeout_s: float) -> Any:
        """Send an append and return its answer; None: the server has not taken it."""
        self._sent_count += 1
        answer = asyncio.get_running_loop().create_future()
        sent = _Sent(self._sent_count, request, size_bytes, timeout_s, answer)
        self._pending[sent.number] = sent
        self.usage.note_sent(size_bytes, self._owner.clock())
        self._outgoing.append(sent)
        self._wake.set()
        try:
            return await answer
        finally:
            self._give_up(sent)

    def _give_up(self, sent: _Sent) -> None:
        """Wait for an answer no more, if there was none."""
        if self._pending.pop(sent.number, None) is None:
            return
        self.usage.note_answered(sent.size_bytes)
        if not self._is_retired:
            self._outgoing.append(sent.number)
            self._wake.set()
        elif not self._pending:
            self._call.cancel()

    def retire(self) -> None:
        """Send nothing more; what was sent is still answered."""
        self._is_retired = True
        self._wake.set()
        if self.usage.credit is None:
            self._call.cancel()

    def cancel(self) -> None:
        """End it at once."""
        self._is_retired = True
        self._wake.set()
        self._call.cancel()

    async def _write(self) -> None:
        # What cannot be written fails with the stream, whose end says why.
        with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outgoing:
                    await self._call.write(self._next_message())
                if self._is_retired:
                    await self._call.done_writing()
                    return

    def _next_message(self) -> pb.AppendStreamRequest:
        message = pb.AppendStreamRequest()
        bundle = streaming.Bundle(self.usage.credit)
        while self._outgoing:
            following = self._outgoing[0]
            if isinstance(following, int):
                message.cancelled_call_ids.append(following)
            elif bundle.takes(following.size_bytes):
                message.appends.add(
                    call_id=following.number,
                    append=following.request,
                    timeout=wire.duration("timeout_s", following.timeout_s),
                )
            else:
                break
            self._outgoing.popleft()
        return message

    async def _read(self) -> None:
        code, text, trailing = grpc.StatusCode.CANCELLED, "", None
        try:
            with contextlib.suppress(grpc.RpcError):
                while (told := await self._call.read()) is not grpc.aio.EOF:
                    self._take(told)
            code, text = await self._call.code(), await self._call.details() or ""
            trailing = await self._call.trailing_metadata()
        except asyncio.CancelledError:
            pass  # It was cancelled: by `cancel`, or with the loop.
        finally:
            self._call.cancel()
            self._fail_pending(code, text, trailing)
            self.tasks[0].cancel()

    def _fail_pending(self, code: grpc.StatusCode, text: str, trailing: Any) -> None:
        taken = streaming.taken_count(code, trailing)
        self._is_retired = True
        self._owner.forget(self, code)
        pending, self._pending = self._pending, {}
        for number, sent in pending.items():
            if sent.answer.done():
                continue
            if 0 <= taken < number:
                sent.answer.set_result(None)
            else:
                sent.answer.set_exception(self._owner.error_of(code, text, trailing))

    def _take(self, told: pb.AppendStreamResponse) -> None:
        if told.HasField("credit"):
            self.usage.credit = streaming.Credit(told.credit.append_count, told.credit.size_bytes)
        self.answered_count += len(told.answers)
        for each in told.answers:
            sent = self._pending.pop(each.call_id, None)
            if sent is None:
                continue
            self.usage.note_answered(sent.size_bytes)
            if sent.answer.done():
                continue
            if each.WhichOneof("result") == "response":
                sent.answer.set_result(each.response)
            else:
                sent.answer.set_exception(status.from_status(each.error))


class AppendStreams:
    """Sends appends by a stream where that is worth it. For the loop's thread only.

    Args:
        method: Opens a stream.
        metadata: What accompanies it.
        error_of: From code, text and trailing metadata of a stream that broke, what its appends
            meet.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        method: Any,
        metadata: Any,
        error_of: Callable[[grpc.StatusCode, str, Any], ReplayBufferError],
        clock: Callable[[], float],
    ) -> None:
        self._method = method
        self._metadata = metadata
        self.error_of = error_of
        self.clock = clock
        self._streaming = streaming.Streaming()
        self._stream: _Stream | None = None
        self._open: set[_Stream] = set()
        """Those that have not ended, retired ones included."""
        self._closed = False

    async def send(self, request: Any, timeout_s: float) -> Any:
        """Send an append and return its answer; None: it was not sent, and should go by a call.

        Raises:
            TimeoutError: No answer came in time.
            ReplayBufferError: The server refused it, or the stream broke.
        """
        if len(request.fragments) > streaming.FRAGMENTS_MAX:
            return None
        size_bytes = request.ByteSize()
        stream = self._stream_for(size_bytes)
        if stream is None:
            return None
        answered_count = stream.answered_count
        try:
            async with asyncio.timeout(timeout_s):
                return await stream.send(request, size_bytes, timeout_s)
        except TimeoutError:
            self._leave(stream)  # Whoever is silent once is not asked that way again.
            if stream.answered_count == answered_count:
                stream.cancel()
            raise

    def _stream_for(self, size_bytes: int) -> _Stream | None:
        """The stream that an append of so many bytes goes by."""
        now = self.clock()
        if self._stream is not None and self._stream.usage.is_over(now):
            self._leave(self._stream)
        is_worth_it = self._streaming.is_worth_it(now)
        stream = self._stream
        if stream is not None:
            return stream if stream.usage.takes(size_bytes) else None
        if is_worth_it and not self._closed:
            # Opened for the next: this one does not wait for it.
            self._stream = _Stream(self, self._method, self._metadata)
            self._open.add(self._stream)
        return None

    def _leave(self, stream: _Stream) -> None:
        if self._stream is stream:
            self._stream = None
            self._streaming.note_end(stream.answered_count, self.clock())
            stream.retire()

    def forget(self, stream: _Stream, code: grpc.StatusCode) -> None:
        """A stream has ended."""
        self._open.discard(stream)
        if self._stream is stream:
            self._stream = None
            is_outage = code is grpc.StatusCode.UNAVAILABLE
            self._streaming.note_end(stream.answered_count, self.clock(), is_outage=is_outage)

    async def close(self) -> None:
        """End the streams; what waits for an answer fails."""
        self._closed = True
        self._stream = None
        streams = tuple(self._open)
        tasks = [task for stream in streams for task in stream.tasks]
        for stream in streams:
            stream.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S_MAX)
            await end_tasks(tasks)
