"""Appends that wait for room, in order of arrival (B31).

Q1  A position belongs to one fragment. It is a caller's that waits or has its turn, or it is kept
    for a while for a caller that comes again.
Q2  Positions stand in order of arrival; a caller that comes again in time finds its own.
Q3  A caller has one position, and a deadline while it waits.

The queue is in no journal and no snapshot: it dies with its server.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from breadbox_server.core.model.ids import CallerId, SessionId, WorkerId
from breadbox_server.core.model.inputs import AdmissionOutcome, Fragment
from breadbox_server.core.model.lazy_heap import LazyHeap

PLACES_KEPT_MAX: Final = 65_536
"""Positions kept; the next one gives up the oldest."""

Place = tuple[SessionId, WorkerId, int]
"""Identity of the fragment that an append waits with, the same when it comes again."""


def place_of(fragment: Fragment) -> Place:
    """Return the key of the position that an append has with a fragment."""
    return fragment.session_id, fragment.worker_id, fragment.fragment_index


@dataclass(slots=True, eq=False)
class RoomWaiter:
    """A caller that waits with the first fragment of its append that is not decided."""

    caller_id: CallerId
    fragment: Fragment
    waits_for: AdmissionOutcome
    deadline_at: float
    is_called: bool = False
    """True once its turn has come."""

    @property
    def place(self) -> Place:
        """Return its position's key."""
        return place_of(self.fragment)


class RoomQueue:
    """The positions of a buffer."""

    def __init__(self) -> None:
        self._places: OrderedDict[Place, RoomWaiter | None] = OrderedDict()
        """None marks a kept position."""
        self._kept: OrderedDict[Place, float] = OrderedDict()
        self.waiters: dict[CallerId, RoomWaiter] = {}
        self.outdated: deque[RoomWaiter] = deque()
        """Those that are refused whether there is room or not, since session or version changed."""
        self._by_deadline: LazyHeap[tuple[float, CallerId]] = LazyHeap(self._is_due)

    def join(self, waiter: RoomWaiter) -> RoomWaiter | None:
        """Let a new caller wait; return the one that loses its position to it, an earlier attempt.

        A kept position is the caller's again.
        """
        place = waiter.place
        self._kept.pop(place, None)
        former = self._places.get(place)
        if former is not None:
            del self.waiters[former.caller_id]
        self._places[place] = waiter
        self.waiters[waiter.caller_id] = waiter
        self.wait_again(waiter, waiter.deadline_at)
        return former

    def wait_again(self, waiter: RoomWaiter, deadline_at: float) -> None:
        """Let a caller wait on at its position, whether its turn had come or not."""
        waiter.is_called, waiter.deadline_at = False, deadline_at
        self._by_deadline.push((deadline_at, waiter.caller_id))
        self._by_deadline.compact(len(self.waiters))

    def leave(self, waiter: RoomWaiter, kept_until: float | None = None) -> None:
        """Let a caller go; its position is kept for a while, or not at all."""
        del self.waiters[waiter.caller_id]
        self._by_deadline.compact(len(self.waiters))
        if kept_until is None:
            del self._places[waiter.place]
            return
        self._places[waiter.place] = None
        self._kept[waiter.place] = kept_until
        if len(self._kept) > PLACES_KEPT_MAX:
            self._give_up_oldest()

    def give_up_kept(self, now: float) -> None:
        """Give up positions that were kept long enough."""
        while (first := self.first_kept()) is not None and first[0] <= now:
            self._give_up_oldest()

    def _give_up_oldest(self) -> None:
        place, _ = self._kept.popitem(last=False)
        del self._places[place]

    def is_waiting(self, waiter: RoomWaiter) -> bool:
        """Return whether a caller is still there, and its turn has not come."""
        return self.waiters.get(waiter.caller_id) is waiter and not waiter.is_called

    def waiting(self) -> Iterator[RoomWaiter]:
        """Iterate over those that wait, in order; do not change the queue meanwhile."""
        return (each for each in self._places.values() if each is not None and not each.is_called)

    def waits_for(self) -> AdmissionOutcome | None:
        """Return what the first of them waits for, or None if none waits."""
        if not self.waiters:
            return None
        first = next(self.waiting(), None)
        return None if first is None else first.waits_for

    def note_outdated(self, session_id: SessionId, version_min: int) -> None:
        """Note those that wait with a fragment of another session, or a stale one; O(waiting)."""
        self.outdated = deque(
            [
                each
                for each in self.waiting()
                if each.fragment.session_id != session_id
                or each.fragment.model_version_min < version_min
            ]
        )

    def first_deadline(self) -> tuple[float, CallerId] | None:
        """Return the earliest deadline of those that wait, and its caller."""
        return self._by_deadline.first()

    def first_kept(self) -> tuple[float, Place] | None:
        """Return the position that is given up next, behind when that is; None if none is kept."""
        if not self._kept:
            return None
        place, kept_until = next(iter(self._kept.items()))
        return kept_until, place

    def _is_due(self, entry: tuple[float, CallerId]) -> bool:
        waiter = self.waiters.get(entry[1])
        return waiter is not None and not waiter.is_called and waiter.deadline_at == entry[0]

    def check_invariants(self) -> None:
        """Assert Q1 to Q3; O(positions)."""
        held = {place: each for place, each in self._places.items() if each is not None}
        assert all(place == each.place for place, each in held.items()), "Q1: fragment"
        assert self._kept.keys() == self._places.keys() - held.keys(), "Q1: kept"
        assert list(self._kept.values()) == sorted(self._kept.values()), "Q1: order of kept"
        callers = {each.caller_id: each for each in held.values()}
        assert callers == self.waiters, "Q3: callers"
        deadlines = sorted((each.deadline_at, each.caller_id) for each in self.waiting())
        assert self._by_deadline.first_many(len(deadlines) + 1) == deadlines, "Q3: deadlines"
