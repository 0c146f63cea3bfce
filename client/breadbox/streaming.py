"""When appends go by a stream, and what its end says of those that it did not answer. Pure.

A stream costs the server less than a call for each append does. Whoever appends now and then has
none: opening it costs as much as a call. Nobody waits for one to be opened, and nothing is sent on
it before the server has said on it what it takes: until then, and wherever something on the way
takes no streams, appends go by calls.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

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


class Streaming:
    """Decides whether an append goes by a stream. Not thread-safe."""

    def __init__(self) -> None:
        self._last_at = float("-inf")
        self._distrusted_until = float("-inf")
        self._distrust_s = DISTRUST_S

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


def taken_count(code: grpc.StatusCode, trailing: Iterable[tuple[str, str | bytes]] | None) -> int:
    """How many appends a server may have taken of a stream that has ended; -1: not known."""
    if code is grpc.StatusCode.OK:
        for key, value in trailing or ():
            if key == TAKEN_KEY and isinstance(value, str) and _COUNT.fullmatch(value):
                return int(value)
    return -1
