"""When appends go by a stream, what goes by it, and what comes of each. Pure.

A stream costs the server less than a call for each append does. Whoever appends now and then has
none: opening it costs as much as a call. Nobody waits for one to be opened, and nothing is sent on
it before the server has said on it what it takes: until then, and wherever something on the way
takes no streams, appends go by calls.

What is appended while a message is on its way to the wire leaves in the next one, together.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc

from breadbox import status, wire
from breadbox.errors import ReplayBufferError
from breadbox.v1 import replay_buffer_service_pb2 as pb

METHOD = "AppendFragments"
"""Of the calls that may go by a stream."""
APART_S_MAX = 1.0
"""Between two appends of somebody for whom a stream is worth it."""
IDLE_S_MAX = 5.0
"""After so long without an append a stream is not used any more: the server ends it soon."""
AGE_S_MAX = 300.0
"""A stream is used for so long: less than a connection has to end once the server wants it to."""
OPEN_S_MAX = 5.0
"""In which the server has to say what it takes."""
WORTH_COUNT = 8
"""Answers after which a stream was worth it."""
DISTRUST_S, DISTRUST_S_MAX = 10.0, 600.0
"""For so long no stream is opened after one that was not; doubled each time until one was."""
OUTAGE_S = 0.5
"""The same, where the server was not there."""
FRAGMENTS_MAX = 4
"""Of an append that may go by a stream. What a stream spares is the cost of a call, which matters
little where many fragments come together; and the server's loop takes what streams bring before it
takes the next call, so that groups by streams would hold up everybody's calls."""
TOGETHER_BYTES_MAX = 32 * 1024
"""Of appends that leave in one message; one that is larger leaves alone."""
_COUNT = re.compile(r"[0-9]{1,18}")
TAKEN_KEY = "breadbox-taken"
"""In the trailing metadata of a stream that the server ended: how many appends it took."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What a stream may have on its way without an answer."""

    append_count: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class Usage:
    """How a stream is used: whether another append may go by it."""

    opened_at: float
    last_at: float
    """When an append was last sent."""
    credit: Credit | None = None
    """None: the server has not said it yet."""
    in_flight_count: int = 0
    in_flight_bytes: int = 0

    def is_over(self, now: float) -> bool:
        """Whether it should be left for another."""
        if self.credit is None:
            return now - self.opened_at > OPEN_S_MAX
        return now - self.opened_at > AGE_S_MAX or now - self.last_at > IDLE_S_MAX

    def takes(self, size_bytes: int) -> bool:
        """Whether there is room for one more append."""
        credit = self.credit
        return (
            credit is not None
            and self.in_flight_count < credit.append_count
            and self.in_flight_bytes + size_bytes <= credit.size_bytes
        )

    def note_sent(self, size_bytes: int, now: float) -> None:
        """An append was sent."""
        self.last_at = now
        self.in_flight_count += 1
        self.in_flight_bytes += size_bytes

    def note_answered(self, size_bytes: int) -> None:
        """One was answered, or nobody waits for its answer any more."""
        self.in_flight_count -= 1
        self.in_flight_bytes -= size_bytes


class Bundle:
    """How many appends leave in one message.

    Args:
        credit: Of the stream.
    """

    def __init__(self, credit: Credit | None) -> None:
        self._count_left = max(1, credit.append_count if credit is not None else 1)
        self._bytes_left = TOGETHER_BYTES_MAX
        self._is_empty = True

    def takes(self, size_bytes: int) -> bool:
        """Whether one more has room; it is taken then. One alone always has."""
        if not self._is_empty and (size_bytes > self._bytes_left or not self._count_left):
            return False
        self._is_empty = False
        self._count_left -= 1
        self._bytes_left -= size_bytes
        return True


class Promise(Protocol):
    """What waits for the answer to an append; None: the stream ended before the server took it."""

    def done(self) -> bool:
        """Whether it was told, or nobody waits any more."""
        ...

    def set_result(self, response: Any, /) -> None:
        """Tell a response."""

    def set_exception(self, error: BaseException, /) -> None:
        """Tell an error."""


@dataclass(slots=True, eq=False)
class Sent:
    """An append on its way."""

    request: Any
    size_bytes: int
    timeout_s: float
    promise: Promise
    number: int = 0
    """Among the appends of the stream, from 1; its call_id."""


Kept = Sequence[tuple[Promise, Any, ReplayBufferError | None]]
"""What promises are kept with: each with an answer or an error."""


def keep(promises: Kept) -> None:
    """Tell those who wait."""
    for promise, response, error in promises:
        if promise.done():
            continue
        if error is None:
            promise.set_result(response)
        else:
            promise.set_exception(error)


class Stream:
    """What goes by one stream, and what comes back. Not thread-safe but for `next_message`.

    Args:
        now: Monotonic seconds.
        wake: Has `next_message` called until there is none.
    """

    def __init__(self, now: float, wake: Callable[[], None]) -> None:
        self.call: Any = None
        """Of gRPC; set by whoever opens it."""
        self.usage = Usage(now, now)
        self.answered_count = 0
        self.is_retired = False
        """Nothing more is sent but what waits for that already."""
        self._wake = wake
        self._outgoing: deque[Sent | int] = deque()
        """Appends, and call_ids that nobody waits for any more."""
        self._pending: dict[int, Sent] = {}
        self._sent_count = 0

    def put(self, sent: Sent, now: float) -> None:
        """Send an append."""
        self._sent_count += 1
        sent.number = self._sent_count
        self._pending[sent.number] = sent
        self.usage.note_sent(sent.size_bytes, now)
        self._outgoing.append(sent)
        self._wake()

    def give_up(self, sent: Sent) -> None:
        """Wait for an answer no more, if there was none."""
        if self._pending.pop(sent.number, None) is None:
            return
        self.usage.note_answered(sent.size_bytes)
        if self.is_retired and not self._pending:
            self.call.cancel()
        else:
            self._outgoing.append(sent.number)
            self._wake()

    def retire(self) -> None:
        """Send nothing more; what was sent is still answered."""
        self.is_retired = True
        self._wake()
        if self.usage.credit is None:
            self.call.cancel()

    def cancel(self) -> None:
        """End it at once."""
        self.is_retired = True
        self._wake()
        self.call.cancel()

    def next_message(self) -> pb.AppendStreamRequest | None:
        """What leaves next; None: nothing waits for that. For one thread at a time."""
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

    def take(self, told: pb.AppendStreamResponse) -> Kept:
        """Take in what the server says; returns what to `keep`."""
        if told.HasField("credit"):
            self.usage.credit = Credit(told.credit.append_count, told.credit.size_bytes)
        self.answered_count += len(told.answers)
        kept: list[tuple[Promise, Any, ReplayBufferError | None]] = []
        for answer in told.answers:
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
        """Take in that nothing will come any more; returns what to `keep`.

        Args:
            taken: How many appends the server has taken; see `taken_count`.
            make_error: What those meet that it may have taken.
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
    """Decides whether an append goes by a stream, and has the one that is used.

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
        """The stream that an append of so many bytes goes by; None: it goes by a call.

        One is opened where it is worth it, for the next append: this one does not wait for it.
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
        """Use a stream no more; what was sent by it is still answered."""
        if self.stream is stream:
            self.ended(stream, now)
            stream.retire()

    def ended(self, stream: StreamT, now: float, *, is_outage: bool = False) -> None:
        """A stream has ended."""
        if self.stream is stream:
            self.stream = None
            self.note_end(stream.answered_count, now, is_outage=is_outage)

    def is_worth_it(self, now: float) -> bool:
        """Whether an append that is sent now should go by a stream."""
        apart_s, self._last_at = now - self._last_at, now
        return apart_s <= APART_S_MAX and now >= self._distrusted_until

    def note_end(self, answered_count: int, now: float, *, is_outage: bool = False) -> None:
        """Learn from a stream that has ended, for whatever reason.

        One that was not worth it was refused by something on the way, or by a server that has no
        streams or more than it has places for; or appends are too few. An outage says nothing of
        streams, and calls wait for its end as well.
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
    """How many appends a server may have taken of a stream that has ended; -1: not known."""
    if code is grpc.StatusCode.OK:
        for key, value in trailing or ():
            if key == TAKEN_KEY and isinstance(value, str) and _COUNT.fullmatch(value):
                return int(value)
    return -1
