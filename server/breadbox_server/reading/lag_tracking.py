"""For how long there has been something that a reader has not acknowledged, to about a second.

The core keeps no time with a chunk; here it is noted every now and then how many there had been.
Not durable: after a restart time is counted from the start.
"""

from bisect import bisect_right
from typing import Final

NOTES_MAX: Final = 4096
"""Of one buffer; at the limit every second one is dropped, so that old ones are told less well."""


class Arrivals:
    """When which chunks of a buffer had been there."""

    def __init__(self) -> None:
        self._newest: list[int] = []
        """Ascending: the newest chunk at each of the times."""
        self._times: list[float] = []
        """When it was first noted that there was a chunk after the one noted before."""

    def note(self, newest: int, now: float) -> None:
        """Take note that there are chunks up to this one."""
        if self._newest and newest < self._newest[-1]:
            self._newest.clear()
            self._times.clear()
        if self._newest and newest == self._newest[-1]:
            return
        self._newest.append(newest)
        self._times.append(now)
        if len(self._newest) > NOTES_MAX:
            self._newest, self._times = self._newest[::2], self._times[::2]

    def lag_s(self, cursor: int, now: float) -> float:
        """Seconds for which a chunk after this one has been there, as far as is known."""
        place = bisect_right(self._newest, cursor)
        return max(0.0, now - self._times[place]) if place < len(self._times) else 0.0
