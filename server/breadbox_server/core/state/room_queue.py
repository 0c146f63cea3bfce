"""Appends that wait for room, in order of arrival (B31).

Q1  A position belongs to one fragment. Its caller waits or has its turn, or it is kept for a while
    for a caller that comes again.
Q2  Positions stand in order of arrival; a caller that comes again in time finds its own.
Q3  A caller has one position. That has a deadline unless it is the caller's turn.

The queue is in no journal and no snapshot: it dies with its server.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from breadbox_server.core.model.ids import CallerId, SessionId, WorkerId
from breadbox_server.core.model.inputs import AdmissionOutcome, Fragment, VersionOf
from breadbox_server.core.model.lazy_heap import LazyHeap

PLACES_KEPT_MAX: Final = 65_536
"""Positions kept; the next one gives up the oldest."""

Place = tuple[SessionId, WorkerId, int]
"""Identity of the fragment that an append waits with, the same when it comes again."""


def place_of(fragment: Fragment) -> Place:
    """Return the key of the position that an append has with a fragment."""
    return fragment.session_id, fragment.worker_id, fragment.fragment_index


@dataclass(slots=True, eq=False)
class Position:
    """A caller that waits with the first fragment of its append that is not decided."""

    caller_id: CallerId
    """Its latest caller."""
    fragment: Fragment
    waits_for: AdmissionOutcome
    until: float
    """The caller's deadline, or when a kept position is given up."""
    is_called: bool = False
    """True once its turn has come."""
    is_kept: bool = False
    number: int = 0
    """Ascending in the order of the queue."""


class RoomQueue:
    """The positions of a buffer."""

    def __init__(self) -> None:
        self._positions: OrderedDict[Place, Position] = OrderedDict()
        self.by_caller: dict[CallerId, Position] = {}
        """Each position under its latest caller."""
        self._waiting: LazyHeap[tuple[int, CallerId]] = LazyHeap(self._waits)
        """The callers that wait: as many positions as there are may be kept before them."""
        self._last_number = 0
        self._by_deadline: LazyHeap[tuple[float, CallerId]] = LazyHeap(self._has_deadline)
        self.kept: dict[CallerId, Position] = {}
        """Those of them that are kept, the oldest first."""
        self.outdated: deque[Position] = deque()
        """Those that are refused whether there is room or not, since session or version changed."""

    def find(self, caller_id: CallerId | None) -> Position | None:
        """Return the position of a caller that waits or has its turn, or None."""
        position = self.by_caller.get(caller_id) if caller_id is not None else None
        return None if position is None or position.is_kept else position

    def put(self, position: Position) -> Position | None:
        """Let a caller wait as the last, or in the place of its fragment's former position.

        That one is returned; it may be another attempt's, or kept.
        """
        place = place_of(position.fragment)
        former = self._positions.get(place)
        if former is not None:
            self._forget(former)
            position.number = former.number
        else:
            self._last_number += 1
            position.number = self._last_number
        self._positions[place] = position
        self._waiting.push((position.number, position.caller_id))
        self.by_caller[position.caller_id] = position
        self._wait(position)
        return former

    def _wait(self, position: Position) -> None:
        self._by_deadline.push((position.until, position.caller_id))
        self._by_deadline.compact(len(self.by_caller))
        self._waiting.compact(len(self.by_caller))

    def keep(self, position: Position, until: float) -> None:
        """Keep the position of a caller that goes."""
        position.is_called, position.is_kept, position.until = False, True, until
        self.kept[position.caller_id] = position
        self._wait(position)
        if len(self.kept) > PLACES_KEPT_MAX:
            self.remove(next(iter(self.kept.values())))

    def remove(self, position: Position) -> None:
        """Give a position up."""
        del self._positions[place_of(position.fragment)]
        self._forget(position)

    def _forget(self, position: Position) -> None:
        del self.by_caller[position.caller_id]
        self.kept.pop(position.caller_id, None)

    def is_waiting(self, position: Position) -> bool:
        """Return whether a caller is still there, and its turn has not come."""
        is_there = self.by_caller.get(position.caller_id) is position
        return is_there and not (position.is_called or position.is_kept)

    def waiting(self) -> Iterator[Position]:
        """Iterate over those that wait, in order; do not change the queue meanwhile."""
        return (each for each in self._positions.values() if not (each.is_called or each.is_kept))

    def first_waiting(self, count: int) -> list[Position]:
        """Return the first so many of them, without a look at those that are kept."""
        return [self.by_caller[caller_id] for _, caller_id in self._waiting.first_many(count)]

    def waits_for(self) -> AdmissionOutcome | None:
        """Return what the first of them waits for, or None if none waits."""
        first = self._waiting.first()
        return None if first is None else self.by_caller[first[1]].waits_for

    def _waits(self, entry: tuple[int, CallerId]) -> bool:
        position = self.by_caller.get(entry[1])
        return (
            position is not None
            and position.number == entry[0]
            and not (position.is_called or position.is_kept)
        )

    def note_outdated(self, session_id: SessionId, version_min: int, version_of: VersionOf) -> None:
        """Note those that wait with a fragment of another session, or a stale one; O(waiting)."""
        self.outdated = deque(
            [
                each
                for each in self.waiting()
                if each.fragment.session_id != session_id or version_of(each.fragment) < version_min
            ]
        )

    def first_deadline(self) -> tuple[float, CallerId] | None:
        """Return the earliest deadline, and the caller that is its position's latest."""
        return self._by_deadline.first()

    def _has_deadline(self, entry: tuple[float, CallerId]) -> bool:
        position = self.by_caller.get(entry[1])
        return position is not None and not position.is_called and position.until == entry[0]

    def check_invariants(self) -> None:
        """Assert Q1 to Q3; O(positions)."""
        positions = self._positions.values()
        assert all(place == place_of(each.fragment) for place, each in self._positions.items()), (
            "Q1: fragment"
        )
        assert not any(each.is_called and each.is_kept for each in positions), "Q1: kept"
        callers = {each.caller_id: each for each in positions}
        assert self.by_caller == callers, "Q3: callers"
        kept = {caller_id: each for caller_id, each in callers.items() if each.is_kept}
        assert self.kept == kept, "Q1: kept ones"
        waiting = [(each.number, each.caller_id) for each in self.waiting()]
        assert self._waiting.first_many(len(waiting) + 1) == waiting, "Q2: order"
        deadlines = sorted((each.until, each.caller_id) for each in positions if not each.is_called)
        assert self._by_deadline.first_many(len(deadlines) + 1) == deadlines, "Q3: deadlines"
