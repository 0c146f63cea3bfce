"""Appends of threads by one stream; see `breadbox.streaming`.

What threads append while a message is on its way to the wire leaves in the next one, together.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from breadbox import status, streaming, wire
from breadbox.errors import ReplayBufferError
from breadbox.v1 import replay_buffer_service_pb2 as pb


@dataclass(slots=True, eq=False)
class _Sent:
    """An append on its way."""

    number: int
    """Among the appends of the stream, from 1; its call_id."""
    request: Any
    size_bytes: int
    timeout_s: float
    done: threading.Event = field(default_factory=threading.Event)
    response: Any = None
    error: ReplayBufferError | None = None
    is_unseen: bool = False
    """The stream ended before the server took it."""


class _Stream:
    """One stream, and the thread that reads its answers. The owner's lock guards it."""

    def __init__(self, owner: "AppendStreams", method: Any, metadata: Any) -> None:
        self._owner = owner
        self._outgoing: queue.SimpleQueue[_Sent | int | None] = queue.SimpleQueue()
        """Appends, call_ids that nobody waits for any more, and the end."""
        self._pending: dict[int, _Sent] = {}
        self._sent_count = 0
        self.answered_count = 0
        self._is_retired = False
        now = owner.clock()
        self.usage = streaming.Usage(now, now)
        self._call = method(self._messages(), metadata=metadata)
        try:
            threading.Thread(target=self._read, name="breadbox-appends", daemon=True).start()
        except RuntimeError:
            self.cancel()
            raise

    def put(self, request: Any, size_bytes: int, timeout_s: float) -> _Sent:
        """Send an append."""
        self._sent_count += 1
        sent = _Sent(self._sent_count, request, size_bytes, timeout_s)
        self._pending[sent.number] = sent
        self.usage.note_sent(size_bytes, self._owner.clock())
        self._outgoing.put(sent)
        return sent

    def give_up(self, sent: _Sent) -> None:
        """Wait for an answer no more."""
        if self._pending.pop(sent.number, None) is None:
            return
        self.usage.note_answered(sent.size_bytes)
        if not self._is_retired:
            self._outgoing.put(sent.number)
        elif not self._pending:
            self._call.cancel()

    def retire(self) -> None:
        """Send nothing more; what was sent is still answered."""
        self._is_retired = True
        self._outgoing.put(None)
        if self.usage.credit is None:
            self._call.cancel()

    def cancel(self) -> None:
        """End it at once."""
        self._is_retired = True
        self._outgoing.put(None)
        self._call.cancel()

    def _messages(self) -> Iterator[pb.AppendStreamRequest]:
        """What gRPC's thread sends, one after the other."""
        held: _Sent | None = None
        is_last = False
        while not is_last:
            following = held or self._outgoing.get()
            held = None
            message = pb.AppendStreamRequest()
            bundle = streaming.Bundle(self.usage.credit)
            while True:
                if following is None:
                    is_last = True
                    break
                if isinstance(following, int):
                    message.cancelled_call_ids.append(following)
                elif bundle.takes(following.size_bytes):
                    message.appends.add(
                        call_id=following.number,
                        append=following.request,
                        timeout=wire.duration("timeout_s", following.timeout_s),
                    )
                else:
                    held = following
                    break
                try:
                    following = self._outgoing.get_nowait()
                except queue.Empty:
                    break
            if message.appends or message.cancelled_call_ids:
                yield message

    def _read(self) -> None:
        try:
            for told in self._call:
                self._take(told)
        except grpc.RpcError:
            pass  # The code says what happened.
        finally:
            self._end()

    def _end(self) -> None:
        """Tell those who wait that nothing will come any more."""
        self.cancel()
        code, text = self._call.code(), self._call.details() or ""
        trailing = self._call.trailing_metadata()
        taken = streaming.taken_count(code, trailing)
        with self._owner.lock:
            pending, self._pending = self._pending, {}
            self._owner.forget(self, code)
        for sent in pending.values():
            if 0 <= taken < sent.number:
                sent.is_unseen = True
            else:
                sent.error = self._owner.error_of(code, text, trailing)
            sent.done.set()

    def _take(self, told: pb.AppendStreamResponse) -> None:
        with self._owner.lock:
            if told.HasField("credit"):
                self.usage.credit = streaming.Credit(
                    told.credit.append_count, told.credit.size_bytes
                )
            self.answered_count += len(told.answers)
            found = [(self._pending.pop(each.call_id, None), each) for each in told.answers]
            for sent, _ in found:
                if sent is not None:
                    self.usage.note_answered(sent.size_bytes)
        for sent, answer in found:
            if sent is None:
                continue
            if answer.WhichOneof("result") == "response":
                sent.response = answer.response
            else:
                sent.error = status.from_status(answer.error)
            sent.done.set()


class AppendStreams:
    """Sends appends by a stream where that is worth it. Thread-safe.

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
        self.lock = threading.Lock()
        self._streaming = streaming.Streaming()
        self._stream: _Stream | None = None
        self._closed = False

    def send(self, request: Any, timeout_s: float) -> Any:
        """Send an append and return its answer; None: it was not sent, and should go by a call.

        Raises:
            TimeoutError: No answer came in time.
            ReplayBufferError: The server refused it, or the stream broke.
        """
        if len(request.fragments) > streaming.FRAGMENTS_MAX:
            return None
        size_bytes = request.ByteSize()
        with self.lock:
            stream = self._stream_for(size_bytes)
            if stream is None:
                return None
            sent = stream.put(request, size_bytes, timeout_s)
            answered_count = stream.answered_count
        try:
            is_done = sent.done.wait(timeout_s)
        except BaseException:
            with self.lock:
                stream.give_up(sent)
            raise
        if not is_done:
            with self.lock:
                self._leave(stream)  # Whoever is silent once is not asked that way again.
                stream.give_up(sent)
                if stream.answered_count == answered_count:
                    stream.cancel()
            raise TimeoutError
        if sent.error is not None:
            raise sent.error
        return None if sent.is_unseen else sent.response

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
            try:
                self._stream = _Stream(self, self._method, self._metadata)
            except RuntimeError:  # There are no more threads to be had.
                self._streaming.note_end(0, now)
        return None

    def _leave(self, stream: _Stream) -> None:
        if self._stream is stream:
            self._stream = None
            self._streaming.note_end(stream.answered_count, self.clock())
            stream.retire()

    def forget(self, stream: _Stream, code: grpc.StatusCode) -> None:
        """A stream has ended; the lock is held."""
        if self._stream is stream:
            self._stream = None
            is_outage = code is grpc.StatusCode.UNAVAILABLE
            self._streaming.note_end(stream.answered_count, self.clock(), is_outage=is_outage)

    def close(self) -> None:
        """End the stream; what waits for an answer fails."""
        with self.lock:
            self._closed = True
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()
