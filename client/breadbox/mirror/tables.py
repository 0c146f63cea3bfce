"""Records in the order of their numbers: appended at one end, dropped at the other."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_SIZE_MIN = 64


class Table:
    """Records numbered from 0 upwards; numbers are never used again.

    Columns are rings whose size is a power of two, and grows as needed. Not thread-safe.
    """

    def __init__(self, **dtypes: type) -> None:
        self.first = 0
        """Number of the oldest record that is kept."""
        self.end = 0
        """Number of the next record."""
        self._mask = _SIZE_MIN - 1
        self._columns: dict[str, NDArray[Any]] = {
            name: np.zeros(_SIZE_MIN, dtype) for name, dtype in dtypes.items()
        }

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def is_at_size(self) -> bool:
        """Whether the next record makes the table grow."""
        return len(self) > self._mask

    def append(self, **values: Any) -> int:
        """Add a record; returns its number."""
        if self.is_at_size:
            self._grow()
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

    def set(self, name: str, number: int, value: Any) -> None:
        """Change one value."""
        self._columns[name][number & self._mask] = value

    def kept(self, name: str) -> NDArray[Any]:
        """A column's values of all records that are kept, in order; copied."""
        numbers = np.arange(self.first, self.end)
        values: NDArray[Any] = self._columns[name][numbers & self._mask]
        return values

    def last_at_most(self, name: str, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of a column that ascends: number of the last record whose value is no higher.

        Where there is none, the number before the first.
        """
        column, start, end = self._columns[name], self.first & self._mask, self.end & self._mask
        if not len(self):
            return np.full(len(values), self.first - 1)
        if start < end:
            found = np.searchsorted(column[start:end], values, side="right")
        else:
            older, newer = column[start:], column[:end]
            found = np.searchsorted(older, values, side="right")
            if len(newer):
                in_newer = len(older) + np.searchsorted(newer, values, side="right")
                found = np.where(found == len(older), in_newer, found)
        return found + (self.first - 1)

    def _grow(self) -> None:
        mask = 2 * self._mask + 1
        numbers = np.arange(self.first, self.end)
        for name, column in self._columns.items():
            larger = np.zeros(mask + 1, column.dtype)
            larger[numbers & mask] = column[numbers & self._mask]
            self._columns[name] = larger
        self._mask = mask
