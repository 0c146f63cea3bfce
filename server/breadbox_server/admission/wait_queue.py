"""Who waits for room in one buffer, in order of arrival.

Pure bookkeeping: it decides nothing, and knows no time but what it is told.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

from breadbox_server.core.model.ids import SessionId, WorkerId
from breadbox_server.core.model.inputs import AdmissionOutcome

PLACE_KEPT_S: Final = 5.0
"""How long the place of somebody is kept who went away: a caller whose wait is over, or whose
connection broke, comes again."""
PLACES_KEPT_MAX: Final = 65_536
"""Places that are kept for those who went away; the next gives up the oldest."""

Place = tuple[SessionId, WorkerId, int]
"""The fragment that somebody waits with: the one who comes again with it is the same."""


class Waiting(Protocol):
    """Somebody in a line."""

    place: Place | None
    """Where it stands; None: nowhere."""
    waits_for: AdmissionOutcome
    """What it was refused with."""

    @property
    def is_waiting(self) -> bool:
        """Whether nothing is done about it before there is room."""


W = TypeVar("W", bound=Waiting)


class Line(Generic[W]):
    """A line of those who wait, and of places that are kept for who went away a moment ago."""

    def __init__(self) -> None:
        self._places: OrderedDict[Place, W | None] = OrderedDict()
        """None: nobody stands there just now."""
        self._kept: OrderedDict[Place, float] = OrderedDict()
        """Until when places are kept where nobody stands; the first ends first."""
        self.burst = 1
        """How many may try at a time whether there is room for them: as many again as had it."""

    def __len__(self) -> int:
        """How many stand in it, those included whose turn it is."""
        return len(self._places) - len(self._kept)

    @property
    def is_empty(self) -> bool:
        """Whether nobody stands in it, and no place is kept."""
        return not self._places

    def join(self, waiter: W, place: Place) -> W | None:
        """Let somebody wait, in its old place, or else as the last.

        Returns:
            Who stood in that place: its own earlier attempt, which nobody waits for any more.
        """
        self._kept.pop(place, None)
        former = self._places.get(place)
        self._places[place] = waiter
        waiter.place = place
        if former is not None and former is not waiter:
            former.place = None
            return former
        return None

    def leave(self, waiter: W, kept_until: float | None = None) -> None:
        """Let somebody go; its place is kept for a while, or not at all. Idempotent."""
        place, waiter.place = waiter.place, None
        if place is None:
            return
        if kept_until is None:
            del self._places[place]
            return
        self._places[place] = None
        self._kept[place] = kept_until
        if len(self._kept) > PLACES_KEPT_MAX:
            self._give_up_oldest()

    def give_up_places(self, now: float) -> None:
        """Keep no place for longer than was said."""
        while self._kept and next(iter(self._kept.values())) <= now:
            self._give_up_oldest()

    def _give_up_oldest(self) -> None:
        place, _ = self._kept.popitem(last=False)
        del self._places[place]

    def waiting(self) -> Iterator[W]:
        """Those whose turn it is not, who came first first; not to be held while it changes."""
        return (each for each in self._places.values() if each is not None and each.is_waiting)

    def waits_for(self) -> AdmissionOutcome | None:
        """What the first of them waits for; None: nobody waits whose turn it is not."""
        first = next(self.waiting(), None)
        return None if first is None else first.waits_for
