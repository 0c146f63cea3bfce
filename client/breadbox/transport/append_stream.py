"""Send appends of threads on one stream; see `breadbox.operations.streaming`."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc

from breadbox.operations import streaming
from breadbox.operations.operations import Context
from breadbox.v1 import replay_buffer_service_pb2 as pb


class _Answer:
    """The answer that one thread waits for. Set once, by the stream's reader."""

    def __init__(self) -> None:
        self._arrival = threading.Lock()
        self._arrival.acquire()
        self._is_done = False
        self._response: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether it was set."""
        return self._is_done

    def set_result(self, response: Any) -> None:
        """Set a response, or None if the append was not sent."""
        self._response = response
        self._is_done = True
        self._arrival.release()

    def set_exception(self, error: BaseException) -> None:
        """Set an error."""
        self._error = error
        self.set_result(None)

    def wait(self, timeout_s: float) -> None:
        """Wait until it is set, for at most `timeout_s`. To be called once."""
        self._arrival.acquire(timeout=timeout_s)

    def result(self) -> Any:
        """Return the response, or raise the error."""
        if self._error is not None:
            raise self._error
        return self._response


class _Stream(streaming.Stream):
    """One stream: gRPC's thread takes messages from `_messages`, another thread reads answers.

    The owner's lock guards it.
    """

    def __init__(self, owner: "AppendStreams", method: Any, metadata: Any) -> None:
        self._owner = owner
        self._woken = threading.Condition(owner.lock)
        super().__init__(owner.context.now(), self._woken.notify)
        self.call = method(self._messages(), metadata=metadata)

    def begin(self) -> None:
        """Start the thread that reads answers and ends with the stream.

        Raises:
            RuntimeError: The system allows no more threads.
        """
        threading.Thread(target=self._read, name="breadbox-appends", daemon=True).start()

    def _messages(self) -> Iterator[pb.AppendStreamRequest]:
        while True:
            with self._owner.lock:
                while (message := self.next_message()) is None:
                    if self.is_retired:
                        return
                    self._woken.wait()
            yield message

    def _read(self) -> None:
        with suppress(grpc.RpcError):  # The code says what happened.
            for answers in self.call:
                with self._owner.lock:
                    kept = self.take(answers)
                streaming.keep(kept)
        streaming.keep(self._owner.ended(self))


class AppendStreams:
    """Send appends on a stream if that is worth it. Thread-safe.

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
        self.lock = threading.Lock()
        self._streaming = streaming.Streaming[_Stream]()
        self._opened: _Stream | None = None
        """A stream to begin, or None."""
        self._closed = False

    @property
    def stream(self) -> _Stream | None:
        """The stream that appends use now, or None."""
        return self._streaming.stream

    def send(self, request: Any, timeout_s: float) -> Any:
        """Send an append and return its answer, or None if it was not sent and needs a call.

        Raises:
            ReplayBufferError: No answer came in time, the server refused it, or the stream broke.
        """
        if len(request.fragments) > streaming.FRAGMENTS_MAX:
            return None
        answer = _Answer()
        sent = streaming.Sent(request, request.ByteSize(), timeout_s, answer)
        with self.lock:
            now = self.context.now()
            stream = self._streaming.stream_for(sent.size_bytes, now, self._open)
            if stream is not None:
                stream.put(sent, now)
                answered_count = stream.answered_count
            opened, self._opened = self._opened, None
        if opened is not None:
            self._begin(opened)
        if stream is None:
            return None
        try:
            answer.wait(timeout_s)
        finally:
            if not answer.done():  # The caller waits no longer: cancel its append.
                with self.lock:
                    stream.give_up(sent)
        if not answer.done():  # Otherwise it came at the last moment.
            with self.lock:
                # After one silence, do not use this stream again.
                self._streaming.leave(stream, self.context.now())
                if stream.answered_count == answered_count:
                    stream.cancel()
            raise self.context.silence(self._place)
        return answer.result()

    def _open(self) -> _Stream | None:
        if self._closed:
            return None
        with suppress(RuntimeError):  # The system allows no more threads.
            self._opened = _Stream(self, self._method, self._metadata)
        return self._opened

    def _begin(self, stream: _Stream) -> None:
        """Start the reader, without the lock, because a stream that has ended takes it."""
        try:
            stream.begin()
        except RuntimeError:
            with self.lock:
                self._streaming.ended(stream, self.context.now())
                stream.cancel()

    def ended(self, stream: _Stream) -> streaming.Kept:
        """Handle the end of a stream; return promises to keep."""
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
        """End the stream; appends without an answer get an error."""
        with self.lock:
            self._closed = True
            stream, self._streaming.stream = self._streaming.stream, None
            if stream is not None:
                stream.cancel()
