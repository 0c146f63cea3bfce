"""A sum tree: draws numbers in proportion to their weights, many at once."""

import numpy as np
from numpy.typing import NDArray

_FAN_OUT = 16
_BITS = 4


class SumTree:
    """Weights of the numbers 0 to *size* - 1, each 0 at first. Not thread-safe.

    Sums are those of the children, added anew whenever one of them changes, so that no error of
    rounding adds up. Drawing and changing b numbers cost a few array operations of b * 16 items for
    each level; there are five levels for a million.
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
        """Of some numbers."""
        found: NDArray[np.float64] = self._levels[0].reshape(-1)[numbers]
        return found

    def set(self, numbers: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Change weights; of a number that is named twice, the last counts."""
        self._levels[0].reshape(-1)[numbers] = weights
        for lower, upper in zip(self._levels, self._levels[1:], strict=False):
            numbers = numbers >> _BITS
            upper.reshape(-1)[numbers] = lower[numbers].sum(axis=1)

    def fill(self, start: int, stop: int, weight: float) -> None:
        """Give one weight to all numbers from *start* to before *stop*."""
        if start == stop:
            return
        self._levels[0].reshape(-1)[start:stop] = weight
        for lower, upper in zip(self._levels, self._levels[1:], strict=False):
            start, stop = start >> _BITS, ((stop - 1) >> _BITS) + 1
            upper.reshape(-1)[start:stop] = lower[start:stop].sum(axis=1)

    def draw(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """The number at each of some points of the weights laid side by side.

        Args:
            points: From 0 to below 1, as parts of the total, which must be above 0.
        """
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
