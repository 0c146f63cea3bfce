"""Priorities of steps, and a sum tree that draws in proportion to them, many at once."""

import numpy as np
from numpy.typing import NDArray

from breadbox.mirror.batches import Prioritised

_FAN_OUT = 16
_BITS = 4


class SumTree:
    """Weights of the numbers 0 to *size* - 1, each 0 at first. Not thread-safe.

    Sums are added anew at each change, so that no rounding adds up; each level costs b * 16 items.
    """

    def __init__(self, size: int) -> None:
        self._levels: list[NDArray[np.float64]] = []
        width = size
        while True:
            width = -(-width // _FAN_OUT)
            self._levels.append(np.zeros((width, _FAN_OUT)))
            if width == 1:
                break

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._levels[-1].sum())

    def weights(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the weights of some numbers."""
        found: NDArray[np.float64] = self._levels[0].reshape(-1)[numbers]
        return found

    def set(self, numbers: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Change weights; the last one of a number counts."""
        self._levels[0].reshape(-1)[numbers] = weights
        for lower, upper in zip(self._levels, self._levels[1:], strict=False):
            numbers = numbers >> _BITS
            upper.reshape(-1)[numbers] = lower[numbers].sum(axis=1)

    def fill(self, start: int, stop: int, weight: float) -> None:
        """Set the weight of all numbers from *start* to before *stop*."""
        if start == stop:
            return
        self._levels[0].reshape(-1)[start:stop] = weight
        for lower, upper in zip(self._levels, self._levels[1:], strict=False):
            start, stop = start >> _BITS, ((stop - 1) >> _BITS) + 1
            upper.reshape(-1)[start:stop] = lower[start:stop].sum(axis=1)

    def draw(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the number at each point, 0 to below 1; the total of weights must be above 0."""
        nodes = np.zeros(len(points), dtype=np.int64)
        rest = points * self.total
        rows = np.arange(len(points))
        for level in reversed(self._levels):
            sums = np.cumsum(level[nodes], axis=1)
            # Rounding must not lead past the last child that has any weight.
            rest = np.minimum(rest, np.nextafter(sums[:, -1], 0.0))
            children = (sums <= rest[:, None]).sum(axis=1)
            before = np.where(children > 0, sums[rows, children - 1], 0.0)
            rest = rest - before
            nodes = nodes * _FAN_OUT + children
        return nodes


class StepPriorities:
    """Priorities of rows, kept from the first request on. Not thread-safe."""

    def __init__(self, size: int, start: int) -> None:
        self._size = size
        self.alpha = Prioritised().alpha
        self._tree: SumTree | None = None
        self._values: NDArray[np.float64] | None = None
        self._max = 1.0
        self.low = start
        self.high = start

    @property
    def are_kept(self) -> bool:
        """True after the first request."""
        return self._tree is not None

    def tree(self, alpha: float) -> SumTree | None:
        """Return the tree of priorities to the power of *alpha*, or None before `weigh`."""
        return self._tree if alpha == self.alpha else None

    def weigh(self, alpha: float, rows: NDArray[np.int64], usable: NDArray[np.bool_]) -> SumTree:
        """Make the tree of an exponent from the rows of all kept steps."""
        self.alpha = alpha
        self._tree = tree = SumTree(self._size)
        if self._values is None:
            self._values = np.zeros(self._size)
            self._values[rows] = usable
        tree.set(rows, self._weights(self._values[rows]))
        return tree

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return priorities of rows; there has to be a tree."""
        assert self._values is not None
        found: NDArray[np.float64] = self._values[rows]
        return found

    def update(self, rows: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Set priorities of at least one row; there has to be a tree."""
        assert self._tree is not None
        assert self._values is not None
        self._values[rows] = values
        self._tree.set(rows, self._weights(values))
        self._max = max(self._max, float(values.max()))

    def add(self, places: list[slice], unusable: NDArray[np.int64]) -> None:
        """Set the rows of new steps to the highest priority so far, the unusable ones to 0."""
        assert self._tree is not None
        assert self._values is not None
        for each in places:
            self._values[each] = self._max
            self._tree.fill(each.start, each.stop, self._max**self.alpha)
        if len(unusable):
            self._values[unusable] = 0.0
            self._tree.set(unusable, np.zeros(len(unusable)))

    def drop(self, places: list[slice]) -> None:
        """Set the weights of removed steps to 0."""
        assert self._tree is not None
        for each in places:
            self._tree.fill(each.start, each.stop, 0.0)

    def _weights(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(values > 0, values**self.alpha, 0.0)
