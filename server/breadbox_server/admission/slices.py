"""Appends that are pending, and the slices in which their fragments are decided.

| state    | of the queue | next                                                              |
|----------|--------------|-------------------------------------------------------------------|
| QUEUED   | yes          | DECIDING; ANSWERED: refused without a trip                        |
| DECIDING | yes          | ANSWERED: all decided; WAITING: no room; QUEUED: a part is left   |
| WAITING  | no           | QUEUED: there may be room; ANSWERED: wait over, or sent again     |
| ANSWERED | no           | the answer leaves once it is durable                              |
| OVER     | no           | none: the caller let go of it, in any state                       |
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from breadbox_server.admission.quotas import Charge
from breadbox_server.core.model.ids import (
    BufferName,
    CallerId,
    PayloadId,
    ReservationId,
    SessionId,
    WorkerId,
)
from breadbox_server.core.model.inputs import Appended, Fragment, Payload

SLICE_FRAGMENTS: Final = 256
"""Fragments judged, confirmed and admitted before others get the loop."""

SLICE_S_ASSUMED: Final = 0.05
"""Seconds of a slice on a busy machine, assumed before the first one."""
_LATEST_WEIGHT: Final = 0.2

SHORT_SLICE_FRAGMENTS: Final = 16
"""The same while learners call."""

SLICE_PIECES: Final = 8_192
"""Pieces of payloads (keys in the store) after which a slice takes no more fragments."""

SLICE_BYTES: Final = 512 * 2**10
"""Bytes of inline payloads after which it takes no more either."""


class State(Enum):
    """State of a pending append; see the table above."""

    QUEUED = auto()
    DECIDING = auto()
    WAITING = auto()
    ANSWERED = auto()
    OVER = auto()


PENDING: Final = (State.QUEUED, State.DECIDING, State.ANSWERED)
"""States of appends that neither wait for room nor are over."""


@dataclass(slots=True, eq=False)
class PendingAppend:
    """Fragments that came in one call, until it is answered."""

    buffer: BufferName
    fragments: list[Fragment]
    done: "asyncio.Future[list[Appended | None]]"
    charge: Charge
    bodies: Sequence[bytes] = ()
    """Inline payloads: none, or one per fragment, empty where it is in the store."""
    inline_bytes: int = 0
    kept: dict[PayloadId, Payload] = field(default_factory=dict)
    """Inline payloads that were stored and are not admitted yet; deleted with the append."""
    results: list[Appended | None] = field(default_factory=list)
    """Results before the first undecided fragment; None is a missing payload."""
    error: Exception | None = None
    broken_off: set[tuple[SessionId, WorkerId]] = field(default_factory=set)
    """Workers with a missing payload; their later fragments wait: admitted first, they
    would make it too late."""
    wait_until: float = 0.0
    caller_id: CallerId | None = None
    """Its id while it waits for room, or its turn has come."""
    waited_at: int = 0
    """Results that it had when it last began to wait."""
    state: State = State.QUEUED

    @property
    def is_waiting(self) -> bool:
        """Return True while it waits for room."""
        return self.state is State.WAITING

    @property
    def next_fragment(self) -> Fragment:
        """Return the first undecided fragment."""
        return self.fragments[len(self.results)]

    @property
    def is_decided(self) -> bool:
        """Return True if the append failed, or every fragment has a result."""
        return self.error is not None or len(self.results) == len(self.fragments)

    @property
    def must_come_again(self) -> bool:
        """Return True if a decided append ended for want of room."""
        last = self.results[-1] if self.results else None
        return self.error is None and last is not None and last.outcome.asks_to_wait

    def is_broken_off(self, fragment: Fragment) -> bool:
        """Return True if a payload before it of its worker is missing."""
        return (fragment.session_id, fragment.worker_id) in self.broken_off

    def fill(self, result: Appended) -> None:
        """Give every undecided fragment the same result."""
        self.results.extend([result] * (len(self.fragments) - len(self.results)))

    def reply(self) -> None:
        """Answer the caller, if it is still there."""
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.results)


@dataclass(slots=True, eq=False)
class Item:
    """A fragment of an append in a slice."""

    pending: PendingAppend
    fragment: Fragment
    body: bytes
    answer: Appended | None = None
    """How it was refused, or None if its room is reserved."""
    is_there: bool = False
    is_admitted: bool = False
    is_carried: bool = False
    """True if it is written with the entry about its fragment."""
    has_other_size: bool = False
    found_no_room: bool = False


@dataclass(slots=True, eq=False)
class OfferedAppend:
    """What a slice has of an append, and the room that is reserved for it."""

    pending: PendingAppend
    reservation_id: ReservationId
    items: list[Item]


class Slice:
    """Fragments that are judged, confirmed and admitted before others get the loop."""

    def __init__(self, fragments_max: int) -> None:
        self._fragments_max = fragments_max
        self.fragment_count = self._piece_count = self._inline_bytes = 0
        self.offers: list[OfferedAppend] = []

    @property
    def is_full(self) -> bool:
        """Return True if it takes no more fragments."""
        return (
            self.fragment_count >= self._fragments_max
            or self._piece_count >= SLICE_PIECES
            or self._inline_bytes >= SLICE_BYTES
        )

    def take(self, pending: PendingAppend) -> list[Item]:
        """Take an append's fragments from the first undecided on, as far as there is room."""
        items: list[Item] = []
        for position in range(len(pending.results), len(pending.fragments)):
            fragment = pending.fragments[position]
            if self.is_full or pending.is_broken_off(fragment):
                break
            body = pending.bodies[position] if pending.bodies else b""
            items.append(Item(pending, fragment, body))
            self.fragment_count += 1
            self._inline_bytes += len(body)
            if fragment.payload.piece_size_bytes:
                self._piece_count += fragment.payload.piece_count
        return items


class Pace:
    """Say how long appends wait for their slice, as of the latest ones."""

    def __init__(self) -> None:
        self._slice_s = SLICE_S_ASSUMED

    def expected_s(self, fragment_count: int) -> float:
        """Return the seconds until so many fragments are decided."""
        return self._slice_s * fragment_count / SLICE_FRAGMENTS

    def learn(self, fragment_count: int, took_s: float) -> None:
        """Learn from a slice how long full ones take.

        A part of a slice only ever shows that they are faster: per fragment it takes longer. Else a
        queue that was slow once would stay too short for full slices.
        """
        latest_s = took_s * SLICE_FRAGMENTS / fragment_count
        if fragment_count == SLICE_FRAGMENTS or latest_s < self._slice_s:
            self._slice_s += _LATEST_WEIGHT * (latest_s - self._slice_s)


class WaitingAppends:
    """Appends that wait for room, and those of them that have their turn, in bounds."""

    def __init__(self, count_max: int, fragments_max: int, inline_bytes_max: int) -> None:
        self._count_max = count_max
        self._fragments_max = fragments_max
        self._inline_bytes_max = inline_bytes_max
        self._by_caller: dict[CallerId, PendingAppend] = {}
        self.fragment_count = self.inline_bytes = 0

    def __len__(self) -> int:
        return len(self._by_caller)

    def find(self, caller_id: CallerId) -> PendingAppend | None:
        """Return the append of a caller, or None if it has gone."""
        return self._by_caller.get(caller_id)

    def may_take(self, pending: PendingAppend) -> bool:
        """Return whether an append may wait: it has a position, or there is room for one more."""
        return pending.caller_id is not None or (
            len(self) < self._count_max
            and self.fragment_count + len(pending.fragments) <= self._fragments_max
            and self.inline_bytes + pending.inline_bytes <= self._inline_bytes_max
        )

    def add(self, pending: PendingAppend, caller_id: CallerId) -> None:
        """Take an append, or note another id of one that is there."""
        if pending.caller_id is not None:
            self.remove(pending)
        pending.caller_id = caller_id
        self._by_caller[caller_id] = pending
        self._count(pending, 1)

    def remove(self, pending: PendingAppend) -> CallerId:
        """Let go of an append that is there; return its caller."""
        caller_id, pending.caller_id = pending.caller_id, None
        assert caller_id is not None, "it is there"
        del self._by_caller[caller_id]
        self._count(pending, -1)
        return caller_id

    def _count(self, pending: PendingAppend, change: int) -> None:
        self.fragment_count += change * len(pending.fragments)
        self.inline_bytes += change * pending.inline_bytes
