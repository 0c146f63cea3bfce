"""Appends of threads by one stream; see `breadbox.streaming`."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import grpc

from breadbox import streaming
from breadbox.operations import Context
from breadbox.v1 import replay_buffer_service_pb2 as pb


class _Stream(streaming.Stream):
    """One stream, and the thread that reads its answers. The owner's lock guards it."""

    def __init__(self, owner: "AppendStreams", method: Any, metadata: Any) -> None:
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        super().__init__(owner.context.now(), lambda: self._calls.put(None))
        self._owner = owner
        self.call = method(self._messages(), metadata=metadata)
        try:
            threading.Thread(target=self._read, name="breadbox-appends", daemon=True).start()
        except RuntimeError:
            self.cancel()
            raise

    def _messages(self) -> Iterator[pb.AppendStreamRequest]:
        """What gRPC's thread sends, one after the other."""
        is_last = False
        while not is_last:
            self._calls.get()
            is_last = self.is_retired
            while (message := self.next_message()) is not None:
                yield message

    def _read(self) -> None:
        try:
            with suppress(grpc.RpcError):  # The code says what happened.
                for told in self.call:
                    with self._owner.lock:
                        kept = self.take(told)
                    streaming.keep(kept)
        finally:
            self.call.cancel()
            streaming.keep(self._owner.ended(self))


class AppendStreams:
    """Sends appends by a stream where that is worth it. Thread-safe.

    Args:
        context: The client's.
        place: Of the server's address.
        method: Opens a stream.
        metadata: What accompanies it.
    """

    def __init__(self, context: Context, place: int, method: Any, metadata: Any) -> None:
        self.context = context
        self._place = place
        self._method = method
        self._metadata = metadata
        self.lock = threading.Lock()
        self._streaming = streaming.Streaming[_Stream]()
        self._closed = False

    @property
    def stream(self) -> _Stream | None:
        """By which appends go now."""
        return self._streaming.stream

    def send(self, request: Any, timeout_s: float) -> Any:
        """Send an append and return its answer; None: it was not sent, and should go by a call.

        Raises:
            ReplayBufferError: No answer came in time, the server refused it, or the stream broke.
        """
        if len(request.fragments) > streaming.FRAGMENTS_MAX:
            return None
        answer: Future[Any] = Future()
        sent = streaming.Sent(request, request.ByteSize(), timeout_s, answer)
        with self.lock:
            now = self.context.now()
            stream = self._streaming.stream_for(sent.size_bytes, now, self._open)
            if stream is None:
                return None
            stream.put(sent, now)
            answered_count = stream.answered_count
        try:
            return self._result(answer, stream, sent)
        except TimeoutError:
            if answer.done():  # It came at the last moment, or is itself of a deadline.
                return answer.result()
            with self.lock:
                # Whoever is silent once is not asked that way again.
                self._streaming.leave(stream, self.context.now())
                if stream.answered_count == answered_count:
                    stream.cancel()
            raise self.context.silence(self._place) from None

    def _result(self, answer: Future[Any], stream: _Stream, sent: streaming.Sent) -> Any:
        """Wait for an answer; whoever waits no longer takes the append out of the line."""
        try:
            return answer.result(sent.timeout_s)
        finally:
            if not answer.done():
                with self.lock:
                    stream.give_up(sent)

    def _open(self) -> _Stream | None:
        if self._closed:
            return None
        try:
            return _Stream(self, self._method, self._metadata)
        except RuntimeError:  # There are no more threads to be had.
            return None

    def ended(self, stream: _Stream) -> streaming.Kept:
        """A stream has ended."""
        code, text = stream.call.code(), stream.call.details() or ""
        trailing = stream.call.trailing_metadata()
        with self.lock:
            is_outage = code is grpc.StatusCode.UNAVAILABLE
            self._streaming.ended(stream, self.context.now(), is_outage=is_outage)
            return stream.end(
                streaming.taken_count(code, trailing),
                lambda: self.context.ended_stream(self._place, code, text, trailing),
            )

    def close(self) -> None:
        """End the stream; what waits for an answer fails."""
        with self.lock:
            self._closed = True
            stream, self._streaming.stream = self._streaming.stream, None
        if stream is not None:
            stream.cancel()
