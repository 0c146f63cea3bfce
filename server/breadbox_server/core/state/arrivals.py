"""The held chunks in order of arrival, for readers that read on from a cursor.

The ids are kept from the first read on, and the sums from the first question for one, so that a
buffer that no reader follows pays nothing for them. Ids that left are dropped when they are half of
all there are, as in `lazy_heap`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, Protocol

from breadbox_server.core.model.ids import ChunkId
from breadbox_server.core.model.lazy_heap import WASTE_MIN

BLOCK_BITS: Final = 8
"""Ids that differ below this bit are summed up together."""


class Arrived(Protocol):
    """What has to be known of a chunk."""

    @property
    def chunk_id(self) -> ChunkId:
        """Unique; ascending in order of arrival."""

    @property
    def size_bytes(self) -> int:
        """Never changes."""


class Behind(NamedTuple):
    """What a reader has before it."""

    chunk_count: int
    size_bytes: int


class ArrivalOrder:
    """Held chunks by id, ascending.

    Args:
        held: The chunks that are held. Call `add` after a chunk is added and `remove` after one
            leaves; after other changes call `forget`.
    """

    def __init__(self, held: Mapping[ChunkId, Arrived]) -> None:
        self._held = held
        self._ids: list[ChunkId] | None = None
        """Ascending ids, each once, with some that left, or None if there was no read yet."""
        self._blocks: dict[int, list[int]] | None = None
        """Count and bytes of what is held, by the block of ids, or None if never asked for."""

    def add(self, chunk: Arrived) -> None:
        """Take a chunk that is held from now on: O(1) for a new one, else a search and a move."""
        if self._blocks is not None:
            _count(self._blocks, chunk)
        ids, chunk_id = self._ids, chunk.chunk_id
        if ids is None:
            return
        if not ids or ids[-1] < chunk_id:
            ids.append(chunk_id)
            return
        place = bisect_left(ids, chunk_id)
        if ids[place] != chunk_id:
            ids.insert(place, chunk_id)

    def remove(self, chunk: Arrived) -> None:
        """Let a chunk go that is held no more; O(1) amortised."""
        if self._blocks is not None:
            number = chunk.chunk_id >> BLOCK_BITS
            block = self._blocks[number]
            block[0] -= 1
            block[1] -= chunk.size_bytes
            if not block[0]:
                del self._blocks[number]
        if self._ids is not None and len(self._ids) > 2 * len(self._held) + WASTE_MIN:
            self._ids = list(filter(self._held.__contains__, self._ids))

    def forget(self) -> None:
        """Drop the ids, to be listed anew: chunks came or left without a call here."""
        self._ids = self._blocks = None

    def after(self, chunk_id: int) -> Iterator[ChunkId]:
        """Go through the held chunks after one, ascending; not to be held over a change."""
        if self._ids is None:
            self._ids = sorted(self._held)
        ids = self._ids
        for place in range(bisect_right(ids, chunk_id), len(ids)):
            if ids[place] in self._held:
                yield ids[place]

    def behind(self, chunk_ids: Iterable[int]) -> dict[int, Behind]:
        """Count the held chunks after each of several, and their bytes.

        One addition for each block of 256 ids of which any is held, and a look at the ids of one
        block for each of the several.
        """
        if self._blocks is None:
            self._blocks = {}
            for chunk in self._held.values():
                _count(self._blocks, chunk)
        numbers = sorted(self._blocks)
        found: dict[int, Behind] = {}
        whole_count, whole_bytes = 0, 0
        for chunk_id in sorted(set(chunk_ids), reverse=True):
            number = (chunk_id + 1) >> BLOCK_BITS
            while numbers and numbers[-1] > number:
                count, size_bytes = self._blocks[numbers.pop()]
                whole_count += count
                whole_bytes += size_bytes
            held = self._held
            ids = range(chunk_id + 1, (number + 1) << BLOCK_BITS) if number in self._blocks else ()
            part = [held[ChunkId(each)].size_bytes for each in ids if each in held]
            found[chunk_id] = Behind(whole_count + len(part), whole_bytes + sum(part))
        return found

    def check_invariants(self) -> None:
        """Assert that order and sums are those of what is held; O(held)."""
        held = sorted(self._held)
        assert list(self.after(-1)) == held, "order of arrival"
        for start in (0, len(held) // 2, len(held)):
            after = held[start - 1] if start else -1
            sizes = [self._held[chunk_id].size_bytes for chunk_id in held[start:]]
            assert self.behind([after]) == {after: (len(sizes), sum(sizes))}, "sums of arrivals"


def _count(blocks: dict[int, list[int]], chunk: Arrived) -> None:
    block = blocks.setdefault(chunk.chunk_id >> BLOCK_BITS, [0, 0])
    block[0] += 1
    block[1] += chunk.size_bytes
