"""Names in order, of which one more or one less costs little, also where there are a million."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import Final

from breadbox_server.core.model.ids import WorkerId

PIECE: Final = 1024
"""Names of a piece, when it is made; at twice as many it is cut in two."""


class SortedNames:
    """Different names in ascending pieces: O(log n + n / PIECE + PIECE) for a change."""

    __slots__ = ("_firsts", "_pieces")

    def __init__(self, names: Iterable[WorkerId]) -> None:
        ordered = sorted(names)
        self._pieces = [ordered[at : at + PIECE] for at in range(0, len(ordered), PIECE)]
        self._firsts = [piece[0] for piece in self._pieces]
        """A name for each piece, not above its first, and above all of the pieces before."""

    def add(self, name: WorkerId) -> None:
        """Add a name that is not there."""
        if not self._pieces:
            self._pieces, self._firsts = [[name]], [name]
            return
        place = max(0, bisect_right(self._firsts, name) - 1)
        piece = self._pieces[place]
        insort(piece, name)
        self._firsts[place] = piece[0]
        if len(piece) >= 2 * PIECE:
            self._pieces.insert(place + 1, piece[PIECE:])
            self._firsts.insert(place + 1, piece[PIECE])
            del piece[PIECE:]

    def remove(self, name: WorkerId) -> None:
        """Remove a name that is there."""
        place = bisect_right(self._firsts, name) - 1
        piece = self._pieces[place]
        del piece[bisect_left(piece, name)]
        if not piece:
            del self._pieces[place], self._firsts[place]

    def since(self, name: str) -> Iterator[WorkerId]:
        """Yield the names from one on, in order; they must not change meanwhile."""
        start = max(0, bisect_right(self._firsts, name) - 1)
        for place in range(start, len(self._pieces)):
            piece = self._pieces[place]
            for at in range(bisect_left(piece, name), len(piece)):
                yield piece[at]
