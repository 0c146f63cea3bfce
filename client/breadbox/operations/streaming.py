"""Decide which appends use a stream, and match its answers to appends. Pure.

A stream costs the server less than a call for each append. A producer that appends rarely has none,
because opening one costs as much as a call. No append waits for a stream to open, and nothing is
sent on it before the server has granted credit on it. Until then, and if a proxy allows no streams,
appends use calls.

Appends that arrive while a message is being written leave together in the next message.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc

from breadbox.model.errors import ReplayBufferError
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.wire import conversion as wire
from breadbox.wire import status

METHOD = "AppendFragments"
"""Name of the call that may use a stream."""
APART_S_MAX = 1.0
"""Longest time between two appends, in seconds, at which a stream is worth it."""
IDLE_S_MAX = 5.0
"""Seconds without an append after which a stream is not used any more: the server ends it soon."""
AGE_S_MAX = 300.0
"""Seconds for which a stream is used: less than the grace of a connection that the server ends."""
OPEN_S_MAX = 5.0
"""Seconds in which the server has to grant credit."""
WORTH_COUNT = 8
"""Answers after which a stream was worth it."""
DISTRUST_S, DISTRUST_S_MAX = 10.0, 600.0
"""Seconds without a new stream after one that was not worth it; doubled each time until one is."""
OUTAGE_S = 0.5
"""Seconds without a new stream after one that ended because the server was unreachable."""
FRAGMENTS_MAX = 4
"""Most fragments of an append that may use a stream. A stream saves the cost of a call, which
matters little if many fragments come together. And the server's loop handles all that a stream
brings before the next call, so that large groups on streams would delay all other calls."""
TOGETHER_BYTES_MAX = 32 * 1024
"""Most bytes of appends in one message; a larger append leaves alone."""
_COUNT = re.compile(r"[0-9]{1,18}")
TAKEN_KEY = "breadbox-taken"
"""Key in the trailing metadata of a stream that the server ended: number of appends it took."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Most appends and bytes that may be unanswered on a stream."""

    append_count: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class Usage:
    """The use of a stream, which decides if another append may use it."""

    opened_at: float
    last_at: float
    """Time at which an append was last sent."""
    credit: Credit | None = None
    """The credit that the server granted, or None before it did."""
    in_flight_count: int = 0
    in_flight_bytes: int = 0

    def is_over(self, now: float) -> bool:
        """Return True if the stream is too old, too idle, or was not granted credit in time."""
        if self.credit is None:
            return now - self.opened_at > OPEN_S_MAX
        return now - self.opened_at > AGE_S_MAX or now - self.last_at > IDLE_S_MAX

    def takes(self, size_bytes: int) -> bool:
        """Return True if the credit allows one more append."""
        credit = self.credit
        return (
            credit is not None
            and self.in_flight_count < credit.append_count
            and self.in_flight_bytes + size_bytes <= credit.size_bytes
        )

    def note_sent(self, size_bytes: int, now: float) -> None:
        """Count an append that was sent."""
        self.last_at = now
        self.in_flight_count += 1
        self.in_flight_bytes += size_bytes

    def note_answered(self, size_bytes: int) -> None:
        """Count an append that was answered, or whose caller waits no more."""
        self.in_flight_count -= 1
        self.in_flight_bytes -= size_bytes


class Bundle:
    """The room for appends in one message.

    Args:
        credit: Credit of the stream, or None before it is granted.
    """

    def __init__(self, credit: Credit | None) -> None:
        self._count_left = max(1, credit.append_count if credit is not None else 1)
        self._bytes_left = TOGETHER_BYTES_MAX
        self._is_empty = True

    def takes(self, size_bytes: int) -> bool:
        """Return True, and take the room, if one more append fits. The first always fits."""
        if not self._is_empty and (size_bytes > self._bytes_left or not self._count_left):
            return False
        self._is_empty = False
        self._count_left -= 1
        self._bytes_left -= size_bytes
        return True


class Promise(Protocol):
    """A future for the answer to an append, or for None if the server did not take it."""

    def done(self) -> bool:
        """Return True if it was set, or if its caller waits no more."""
        ...

    def set_result(self, response: Any, /) -> None:
        """Set a response, or None."""

    def set_exception(self, error: BaseException, /) -> None:
        """Set an error."""


@dataclass(slots=True, eq=False)
class Sent:
    """An append that is being sent."""

    request: Any
    size_bytes: int
    timeout_s: float
    promise: Promise
    number: int = 0
    """Position among the appends of the stream, from 1; its call_id."""


Kept = Sequence[tuple[Promise, Any, ReplayBufferError | None]]
"""Promises, each with its answer or its error."""


def keep(promises: Kept) -> None:
    """Set the promises that are not done."""
    for promise, response, error in promises:
        if promise.done():
            continue
        if error is None:
            promise.set_result(response)
        else:
            promise.set_exception(error)


class Stream:
    """The appends and answers of one stream. Not thread-safe but for `next_message`.

    Args:
        now: Time of opening, monotonic seconds.
        wake: Called to have `next_message` called until it returns None.
    """

    def __init__(self, now: float, wake: Callable[[], None]) -> None:
        self.call: Any = None
        """gRPC's call; set by the subclass that opens it."""
        self.usage = Usage(now, now)
        self.answered_count = 0
        self.is_retired = False
        """True if nothing more is sent but appends that wait already."""
        self._wake = wake
        self._outgoing: deque[Sent | int] = deque()
        """Appends to send, and call_ids to cancel, because their callers wait no more."""
        self._pending: dict[int, Sent] = {}
        self._sent_count = 0

    def put(self, sent: Sent, now: float) -> None:
        """Queue an append for sending."""
        self._sent_count += 1
        sent.number = self._sent_count
        self._pending[sent.number] = sent
        self.usage.note_sent(sent.size_bytes, now)
        self._outgoing.append(sent)
        self._wake()

    def give_up(self, sent: Sent) -> None:
        """Cancel an append that has no answer yet."""
        if self._pending.pop(sent.number, None) is None:
            return
        self.usage.note_answered(sent.size_bytes)
        if self.is_retired and not self._pending:
            self.call.cancel()
        else:
            self._outgoing.append(sent.number)
            self._wake()

    def retire(self) -> None:
        """Take no more appends; those sent are still answered."""
        self.is_retired = True
        self._wake()
        if self.usage.credit is None:
            self.call.cancel()

    def cancel(self) -> None:
        """End the stream immediately."""
        self.is_retired = True
        self._wake()
        self.call.cancel()

    def next_message(self) -> pb.AppendStreamRequest | None:
        """Return the next message, or None if nothing waits. For one thread at a time."""
        message = pb.AppendStreamRequest()
        bundle = Bundle(self.usage.credit)
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
        return message if message.appends or message.cancelled_call_ids else None

    def take(self, message: pb.AppendStreamResponse) -> Kept:
        """Handle a message of the server; return promises to `keep`."""
        if message.HasField("credit"):
            self.usage.credit = Credit(message.credit.append_count, message.credit.size_bytes)
        self.answered_count += len(message.answers)
        kept: list[tuple[Promise, Any, ReplayBufferError | None]] = []
        for answer in message.answers:
            sent = self._pending.pop(answer.call_id, None)
            if sent is None:
                continue
            self.usage.note_answered(sent.size_bytes)
            if answer.WhichOneof("result") == "response":
                kept.append((sent.promise, answer.response, None))
            else:
                kept.append((sent.promise, None, status.from_status(answer.error)))
        return kept

    def end(self, taken: int, make_error: Callable[[], ReplayBufferError]) -> Kept:
        """Handle the end of the stream; return promises to `keep`.

        Args:
            taken: Number of appends that the server took; see `taken_count`.
            make_error: Returns the error of an append that it may have taken.
        """
        self.is_retired = True
        self._wake()
        pending, self._pending = self._pending, {}
        return [
            (sent.promise, None, None if 0 <= taken < sent.number else make_error())
            for sent in pending.values()
        ]


StreamT = TypeVar("StreamT", bound=Stream)


class Streaming(Generic[StreamT]):
    """Choose between stream and call for each append, and keep the current stream.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self.stream: StreamT | None = None
        self._last_at = float("-inf")
        self._distrusted_until = float("-inf")
        self._distrust_s = DISTRUST_S

    def stream_for(
        self, size_bytes: int, now: float, open_stream: Callable[[], StreamT | None]
    ) -> StreamT | None:
        """Return the stream for an append of so many bytes, or None if it uses a call.

        If a stream is worth it, one is opened for the next append; this one does not wait for it.
        """
        if self.stream is not None and self.stream.usage.is_over(now):
            self.leave(self.stream, now)
        is_worth_it = self.is_worth_it(now)
        stream = self.stream
        if stream is not None:
            return stream if stream.usage.takes(size_bytes) else None
        if is_worth_it:
            self.stream = open_stream()
            if self.stream is None:
                self.note_end(0, now)
        return None

    def leave(self, stream: StreamT, now: float) -> None:
        """Stop using a stream; appends sent on it are still answered."""
        if self.stream is stream:
            self.ended(stream, now)
            stream.retire()

    def ended(self, stream: StreamT, now: float, *, is_outage: bool = False) -> None:
        """Handle the end of a stream."""
        if self.stream is stream:
            self.stream = None
            self.note_end(stream.answered_count, now, is_outage=is_outage)

    def is_worth_it(self, now: float) -> bool:
        """Return True if an append that is sent now should use a stream."""
        apart_s, self._last_at = now - self._last_at, now
        return apart_s <= APART_S_MAX and now >= self._distrusted_until

    def note_end(self, answered_count: int, now: float, *, is_outage: bool = False) -> None:
        """Decide from a stream that has ended when the next one may open.

        A stream was not worth it if a proxy refused it, or the server has no streams or no room for
        one, or if appends are too few: wait longer each time. An outage says nothing about streams,
        and calls wait for its end as well.
        """
        if answered_count >= WORTH_COUNT:
            self._distrust_s = DISTRUST_S
            return
        if is_outage:
            self._distrusted_until = now + OUTAGE_S
            return
        self._distrusted_until = now + self._distrust_s
        self._distrust_s = min(2 * self._distrust_s, DISTRUST_S_MAX)


def taken_count(code: grpc.StatusCode, trailing: Iterable[tuple[str, str | bytes]] | None) -> int:
    """Return how many appends the server took from a stream that has ended, or -1 if unknown."""
    if code is grpc.StatusCode.OK:
        for key, value in trailing or ():
            if key == TAKEN_KEY and isinstance(value, str) and _COUNT.fullmatch(value):
                return int(value)
    return -1
