"""Send appends of tasks on one stream; see `breadbox.operations.streaming`."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc

from breadbox.operations import streaming
from breadbox.operations.operations import Context
from breadbox.shared.tasks import end_tasks

CLOSE_S_MAX = 1.0
"""Seconds that a cancelled stream may take to end by itself."""


class _Stream(streaming.Stream):
    """One stream, with a task that writes and one that reads."""

    def __init__(self, owner: "AppendStreams", method: Any, metadata: Any) -> None:
        self._woken = asyncio.Event()
        super().__init__(owner.context.now(), self._woken.set)
        self._owner = owner
        self.call = method(metadata=metadata)
        loop = asyncio.get_running_loop()
        self.tasks = (loop.create_task(self._write()), loop.create_task(self._read()))

    async def _write(self) -> None:
        # Appends that cannot be written fail with the stream: its end says why.
        with suppress(grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            is_last = False
            while not is_last:
                await self._woken.wait()
                self._woken.clear()
                is_last = self.is_retired
                while (message := self.next_message()) is not None:
                    await self.call.write(message)
            await self.call.done_writing()

    async def _read(self) -> None:
        code, text, trailing = grpc.StatusCode.CANCELLED, "", None
        try:
            with suppress(grpc.RpcError):  # The code says what happened.
                while (message := await self.call.read()) is not grpc.aio.EOF:
                    streaming.keep(self.take(message))
            code, text = await self.call.code(), await self.call.details() or ""
            trailing = await self.call.trailing_metadata()
        except asyncio.CancelledError:
            pass  # Cancelled by `cancel`, or with the loop.
        finally:
            self.call.cancel()
            streaming.keep(self._owner.ended(self, code, text, trailing))
            self.tasks[0].cancel()


class AppendStreams:
    """Send appends on a stream if that is worth it. For the loop's thread only.

    Args:
        context: The client's context.
        place: Position of the server's address.
        method: Opens a stream.
        metadata: gRPC metadata of the stream.
    """

    def __init__(self, context: Context, place: int, method: Any, metadata: Any) -> None:
        self.context = context
        self._place = place
        self._method = method
        self._metadata = metadata
        self._streaming = streaming.Streaming[_Stream]()
        self._not_ended: set[_Stream] = set()
        """Streams that have not ended, retired ones included."""
        self._closed = False

    @property
    def stream(self) -> _Stream | None:
        """The stream that appends use now, or None."""
        return self._streaming.stream

    async def send(self, request: Any, timeout_s: float) -> Any:
        """Send an append and return its answer, or None if it was not sent and needs a call.

        Raises:
            ReplayBufferError: No answer came in time, the server refused it, or the stream broke.
        """
        if len(request.fragments) > streaming.FRAGMENTS_MAX:
            return None
        answer = asyncio.get_running_loop().create_future()
        sent = streaming.Sent(request, request.ByteSize(), timeout_s, answer)
        now = self.context.now()
        stream = self._streaming.stream_for(sent.size_bytes, now, self._open)
        if stream is None:
            return None
        stream.put(sent, now)
        answered_count = stream.answered_count
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await answer
                finally:
                    stream.give_up(sent)
        except TimeoutError:
            if not answer.cancelled():  # It came at the last moment, or is a TimeoutError itself.
                return answer.result()
            # After one silence, do not use this stream again.
            self._streaming.leave(stream, self.context.now())
            if stream.answered_count == answered_count:
                stream.cancel()
            raise self.context.silence(self._place) from None

    def _open(self) -> _Stream | None:
        if self._closed:
            return None
        stream = _Stream(self, self._method, self._metadata)
        self._not_ended.add(stream)
        return stream

    def ended(
        self, stream: _Stream, code: grpc.StatusCode, text: str, trailing: Any
    ) -> streaming.Kept:
        """Handle the end of a stream; return promises to keep."""
        self._not_ended.discard(stream)
        is_outage = code is grpc.StatusCode.UNAVAILABLE
        self._streaming.ended(stream, self.context.now(), is_outage=is_outage)
        return stream.end(
            streaming.taken_count(code, trailing),
            lambda: self.context.ended_stream(self._place, code, text, trailing),
        )

    async def close(self) -> None:
        """End the streams; appends without an answer get an error."""
        self._closed = True
        self._streaming.stream = None
        streams = tuple(self._not_ended)
        tasks = [task for stream in streams for task in stream.tasks]
        for stream in streams:
            stream.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S_MAX)
            await end_tasks(tasks)
