"""Records in the order of their numbers: appended at one end, dropped at the other."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from breadbox.mirror.storage.memory_map import NOWHERE, Memory

SIZE_MIN: Final = 64
INT64: Final = np.dtype(np.int64)


class Table:
    """Records of whole numbers, numbered from 0 upwards; numbers are never used again.

    Columns are rings whose size is a power of two, and grows as needed: into other memory, so that
    readers of the old one are not disturbed. Not thread-safe.
    """

    def __init__(self, *names: str) -> None:
        self.first = 0
        """Number of the oldest record that is kept."""
        self.end = 0
        """Number of the next record."""
        self.place = NOWHERE
        """Place of its memory."""
        self._names = names
        self._mask = -1
        self._columns: dict[str, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def size(self) -> int:
        """Records that there is room for."""
        return self._mask + 1

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of its memory."""
        return len(self._names), self.size

    @property
    def is_at_size(self) -> bool:
        """Whether the next record makes the table grow."""
        return len(self) > self._mask

    def lie_in(self, memory: NDArray[np.int64], place: int = NOWHERE) -> None:
        """Use other memory, int64[names, size], as it is."""
        self._columns = dict(zip(self._names, memory, strict=True))
        self._mask = memory.shape[1] - 1
        self.place = place

    def append(self, memory: Memory, **values: int) -> int:
        """Add a record; returns its number."""
        if self.is_at_size:
            self.grow(memory)
        for name, value in values.items():
            self._columns[name][self.end & self._mask] = value
        self.end += 1
        return self.end - 1

    def drop_before(self, number: int) -> None:
        """Forget the records of lower numbers."""
        self.first = min(max(self.first, number), self.end)

    def get(self, name: str, numbers: Any) -> Any:
        """A column's values of records that are kept."""
        return self._columns[name][numbers & self._mask]

    def set(self, name: str, number: int, value: int) -> None:
        """Change one value."""
        self._columns[name][number & self._mask] = value

    def kept(self, name: str) -> NDArray[np.int64]:
        """A column's values of all records that are kept, in order; copied."""
        if not len(self):
            return np.empty(0, np.int64)
        values: NDArray[np.int64] = self._columns[name][
            np.arange(self.first, self.end) & self._mask
        ]
        return values

    def last_at_most(self, name: str, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return numbers of the last record with a value no higher, in an ascending column.

        Where there is none, the number before the first.
        """
        if not len(self):
            return np.full(len(values), self.first - 1)
        column, start, end = self._columns[name], self.first & self._mask, self.end & self._mask
        if start < end:
            found = np.searchsorted(column[start:end], values, side="right")
        else:
            older, newer = column[start:], column[:end]
            found = np.searchsorted(older, values, side="right")
            if len(newer):
                in_newer = len(older) + np.searchsorted(newer, values, side="right")
                found = np.where(found == len(older), in_newer, found)
        return found + (self.first - 1)

    def grow(self, memory: Memory) -> None:
        """Make room for twice as many records."""
        mask = max(SIZE_MIN, 2 * self.size) - 1
        larger, place = memory.array((len(self._names), mask + 1), INT64)
        numbers = np.arange(self.first, self.end)
        for column, name in zip(larger, self._names, strict=True):
            if len(numbers):
                column[numbers & mask] = self._columns[name][numbers & self._mask]
        self.lie_in(larger, place)
