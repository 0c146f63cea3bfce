"""`StepIndex`: finds the segment that a position among all held steps falls into."""

import numpy as np
from numpy.typing import NDArray


class StepIndex:
    """Lengths of segments in order, with cumulative sums.

    Append and removal from the front cost O(1) amortised, finding costs O(log segments), removal
    from elsewhere O(segments). Segments are known by the number that `append` returned.
    """

    def __init__(self) -> None:
        self._numbers = np.zeros(16, dtype=np.int64)
        self._ends = np.zeros(16, dtype=np.int64)
        self._low = 0
        self._high = 0
        self._removed_step_count = 0
        self._next_number = 0

    def __len__(self) -> int:
        """Segments held."""
        return self._high - self._low

    @property
    def step_count(self) -> int:
        """Steps of all segments held."""
        return self._last_end() - self._removed_step_count

    def append(self, length: int) -> int:
        """Add a segment behind all others; returns its number."""
        if self._high == len(self._ends):
            self._make_room()
        self._ends[self._high] = self._last_end() + length
        self._numbers[self._high] = number = self._next_number
        self._high += 1
        self._next_number += 1
        return number

    def remove(self, numbers: set[int]) -> None:
        """Remove segments; cheap while they are the first ones."""
        while numbers and len(self) and int(self._numbers[self._low]) in numbers:
            numbers = numbers - {int(self._numbers[self._low])}
            self._removed_step_count = int(self._ends[self._low])
            self._low += 1
        if numbers:
            self._rebuild(numbers)

    def find(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Segment numbers of positions, and how far into the segment each is."""
        ends = self._ends[self._low : self._high]
        places = positions + self._removed_step_count
        slots = np.searchsorted(ends, places, side="right")
        starts = np.where(slots > 0, ends[slots - 1], self._removed_step_count)
        return self._numbers[self._low : self._high][slots], places - starts

    def lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Numbers and lengths of all segments, in order."""
        ends = self._ends[self._low : self._high]
        return (
            self._numbers[self._low : self._high].copy(),
            np.diff(ends, prepend=self._removed_step_count),
        )

    def _last_end(self) -> int:
        return int(self._ends[self._high - 1]) if len(self) else self._removed_step_count

    def _make_room(self) -> None:
        size = max(16, 2 * len(self))
        held = slice(self._low, self._high)
        for name in ("_numbers", "_ends"):
            grown = np.zeros(size, dtype=np.int64)
            grown[: len(self)] = getattr(self, name)[held]
            setattr(self, name, grown)
        self._low, self._high = 0, held.stop - held.start

    def _rebuild(self, removed: set[int]) -> None:
        numbers, lengths = self.lengths()
        keep = ~np.isin(numbers, np.fromiter(removed, dtype=np.int64))
        self._numbers, self._ends = numbers[keep], np.cumsum(lengths[keep])
        self._low, self._high = 0, len(self._ends)
        self._removed_step_count = 0
