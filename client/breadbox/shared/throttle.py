"""Limit and count log lines of events that may happen thousands of times. Pure."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

INTERVAL_S = 10.0
"""Seconds between two lines about the same key."""


@dataclass(slots=True)
class _Said:
    at: float
    unsaid_count: int = 0


class Throttle:
    """Decide which lines to log: the first, and later one in *interval_s*."""

    def __init__(self, clock: Callable[[], float], interval_s: float = INTERVAL_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._said: dict[Hashable, _Said] = {}

    def words(self, key: Hashable) -> str | None:
        """Return text to append to a line about *key*, or None to log none. Keys must be few."""
        now = self._clock()
        said = self._said.get(key)
        if said is None:
            self._said[key] = _Said(now)
            return ""
        if now - said.at < self._interval_s:
            said.unsaid_count += 1
            return None
        unsaid_count, self._said[key] = said.unsaid_count, _Said(now)
        return f" (and {unsaid_count} more since the last line)" if unsaid_count else ""
