"""The held chunks in order of arrival, for those who read on from where they stand.

Kept from the first read on, so that a buffer that nobody reads so pays nothing for it. What left is
dropped when it is half of all there is, as in `lazy_heap`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator

from breadbox_server.core.ids import ChunkId
from breadbox_server.core.lazy_heap import WASTE_MIN


class ArrivalOrder:
    """Ids of held chunks, ascending.

    Args:
        held: Lists all that are held, in any order; asked once, with the first read.
        is_held: Whether a chunk is held.
    """

    def __init__(
        self, held: Callable[[], Iterable[ChunkId]], is_held: Callable[[ChunkId], bool]
    ) -> None:
        self._held = held
        self._is_held = is_held
        self._ids: list[ChunkId] | None = None
        """Ascending, each once, with some that left; None: nobody has read yet."""

    def add(self, chunk_id: ChunkId) -> None:
        """Take a chunk that is held from now on: O(1) for a new one, else a search and a move."""
        ids = self._ids
        if ids is None:
            return
        if not ids or ids[-1] < chunk_id:
            ids.append(chunk_id)
            return
        place = bisect_left(ids, chunk_id)
        if ids[place] != chunk_id:
            ids.insert(place, chunk_id)

    def forget(self) -> None:
        """Ask anew with the next read: chunks came that nobody told of."""
        self._ids = None

    def compact(self, held_count: int) -> None:
        """Drop what left if it outnumbers what is held; to be called after chunks left.

        Args:
            held_count: Chunks held.
        """
        if self._ids is not None and len(self._ids) > 2 * held_count + WASTE_MIN:
            self._ids = list(filter(self._is_held, self._ids))

    def after(self, chunk_id: int) -> Iterator[ChunkId]:
        """Go through the held chunks after one, ascending; not to be held over a change."""
        if self._ids is None:
            self._ids = sorted(self._held())
        ids = self._ids
        for place in range(bisect_right(ids, chunk_id), len(ids)):
            if self._is_held(ids[place]):
                yield ids[place]
