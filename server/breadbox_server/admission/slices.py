"""Appends that are pending, and the slices in which their fragments are decided."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
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

SHORT_SLICE_FRAGMENTS: Final = 16
"""The same while learners call."""

SLICE_PIECES: Final = 8_192
"""Pieces of payloads (keys in the store) after which a slice takes no more fragments."""

SLICE_BYTES: Final = 512 * 2**10
"""Bytes of inline payloads after which it takes no more either."""


@dataclass(slots=True, eq=False)
class PendingAppend:
    """Fragments that came in one call, until it is answered."""

    buffer: BufferName
    fragments: list[Fragment]
    done: "asyncio.Future[list[Appended | None]]"
    charge: Charge
    bodies: Sequence[bytes]
    """Inline payloads: none, or one per fragment, empty where it is in the store."""
    inline_bytes: int
    wait_until: float
    kept: dict[PayloadId, Payload] = field(default_factory=dict)
    """Inline payloads that were stored and are not admitted yet; deleted with the append."""
    results: list[Appended | None] = field(default_factory=list)
    """Results before the first undecided fragment; None is a missing payload."""
    error: Exception | None = None
    broken_off: set[tuple[SessionId, WorkerId]] = field(default_factory=set)
    """Workers with a missing payload; their later fragments wait: admitted first, they
    would make it too late."""
    caller_id: CallerId | None = None
    """Its id while it waits for room, or has its turn."""
    waited_at: int = 0
    """Results that it had when it last began to wait."""
    is_waiting: bool = False
    is_in_slice: bool = False

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
        """Return True if it is not decided, or ended for want of room."""
        if not self.is_decided:
            return True
        last = None if self.error else self.results[-1]
        return last is not None and last.outcome.asks_to_wait

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
    is_there: bool = False
    is_carried: bool = False
    """True if it is written with the entry about its fragment."""
    has_other_size: bool = False
    found_no_room: bool = False


@dataclass(slots=True, eq=False)
class OfferedAppend:
    """What a slice has of an append, and the room that is reserved for it."""

    pending: PendingAppend
    reservation_id: ReservationId
    answers: list[Appended | None]
    """How fragments were refused; None for each of `items`."""
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
