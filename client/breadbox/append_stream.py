"""Appends of threads by one stream; see `breadbox.streaming`."""

import threading
from typing import Any

import grpc

from breadbox import streaming
from breadbox.direct_stream import DirectStream, NoDirectStreamsError
from breadbox.operations import Context
from breadbox.v1 import replay_buffer_service_pb2 as pb

TOGETHER_S = 1e-3
"""For so long after an answer an append waits for those of others who were answered too: what
leaves together costs either side less. Whoever comes later, or alone, waits for nobody."""


class _Answer:
    """What one thread waits for. Set once, by gRPC's thread."""

    def __init__(self) -> None:
        self._told = threading.Lock()
        self._told.acquire()
        self._is_done = False
        self._response: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it was set."""
        return self._is_done

    def set_result(self, response: Any) -> None:
        """Tell a response; None: the append was not sent."""
        self._response = response
        self._is_done = True
        self._told.release()

    def set_exception(self, error: BaseException) -> None:
        """Tell an error."""
        self._error = error
        self.set_result(None)

    def wait(self, timeout_s: float) -> bool:
        """Return once it is set, or so much later; whether it is. Not again once it was."""
        return self._told.acquire(timeout=timeout_s)

    def result(self) -> Any:
        """What was set."""
        if self._error is not None:
            raise self._error
        return self._response


class _Stream(streaming.Stream):
    """One stream. The owner's lock guards it."""

    def __init__(self, owner: "AppendStreams", method: Any, metadata: Any) -> None:
        super().__init__(owner.context.now(), self._send_next)
        self._owner = owner
        self._is_sending = False
        self._is_last_sent = False
        self._is_held = False
        self._awaited_count, self._awaited_until = 0, 0.0
        self.watch_s = 0.0
        """For so long whoever sent the latest append waits before it calls `release`; 0: it need
        not."""
        self._direct = DirectStream(method, metadata, sent=self._sent, received=self._received)
        self.call = self._direct.call

    def begin(self) -> None:
        """Receive; without the lock, which is needed if the stream has ended already."""
        self._direct.begin(lambda _: self._ended())

    def put(self, sent: streaming.Sent, now: float) -> None:
        """Send an append; with those of others who were told something just now, if they come."""
        was_held = self._is_held
        self._awaited_count -= 1
        self._is_held = self._awaited_count > 0 and now < self._awaited_until
        self.watch_s = self._awaited_until - now if self._is_held and not was_held else 0.0
        super().put(sent, now)

    def give_up(self, sent: streaming.Sent) -> None:
        """Wait for an answer no more, if there was none."""
        self._is_held = False
        super().give_up(sent)

    def pass_by(self) -> None:
        """Wait for one fewer: an append goes by a call, because this stream has no room for it."""
        self._awaited_count -= 1
        if self._is_held and self._awaited_count <= 0:
            self.release()

    def release(self) -> None:
        """Wait for nobody else to append."""
        self._is_held, self._awaited_count = False, 0
        self._send_next()

    def _send_next(self) -> None:
        """Have what waits leave; while a message is on its way, after that."""
        if self._is_sending or self._is_held or self._is_last_sent:
            return
        message = self.next_message()
        if message is not None:
            self._is_sending = True
            self._direct.send(message.SerializeToString())
        elif self.is_retired:
            self._is_last_sent = True
            self._direct.end()

    def _sent(self) -> None:
        with self._owner.lock:
            self._is_sending = False
            self._send_next()

    def _received(self, message: bytes) -> None:
        told = pb.AppendStreamResponse.FromString(message)
        with self._owner.lock:
            kept = self.take(told)
            self._awaited_count = max(0, self._awaited_count) + len(kept)
            self._awaited_until = self._owner.context.now() + TOGETHER_S
        streaming.keep(kept)

    def _ended(self) -> None:
        self._direct.end()
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
        self._opened: _Stream | None = None
        """One that is to begin."""
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
        answer = _Answer()
        sent = streaming.Sent(request, request.ByteSize(), timeout_s, answer)
        with self.lock:
            now = self.context.now()
            stream = self._streaming.stream_for(sent.size_bytes, now, self._open)
            if stream is not None:
                stream.put(sent, now)
                answered_count, watch_s = stream.answered_count, stream.watch_s
            elif self._streaming.stream is not None:
                self._streaming.stream.pass_by()
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.begin()
        if stream is None:
            return None
        try:
            if not (watch_s and answer.wait(min(watch_s, timeout_s))):
                if watch_s:
                    with self.lock:
                        stream.release()
                answer.wait(max(0.0, timeout_s - watch_s))
        finally:
            if not answer.done():  # Whoever waits no longer takes the append out of the line.
                with self.lock:
                    stream.give_up(sent)
        if not answer.done():  # Else it came at the last moment.
            with self.lock:
                # Whoever is silent once is not asked that way again.
                self._streaming.leave(stream, self.context.now())
                if stream.answered_count == answered_count:
                    stream.cancel()
            raise self.context.silence(self._place)
        return answer.result()

    def _open(self) -> _Stream | None:
        if self._closed:
            return None
        try:
            self._opened = _Stream(self, self._method, self._metadata)
        except (NoDirectStreamsError, RuntimeError):  # There are no more threads to be had.
            return None
        return self._opened

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
