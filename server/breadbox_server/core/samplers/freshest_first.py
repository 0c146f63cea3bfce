"""Newest model version first: for learners that pay for staleness more than for waste."""

import random

from breadbox_server.core.ids import ChunkId
from breadbox_server.core.lazy_heap import LazyHeap
from breadbox_server.core.samplers.interface import Candidate, Sampler


class FreshestFirstSampler(Sampler):
    """Draws the chunks of the highest version; of one version, those that arrived last."""

    __slots__ = ("_by_freshness", "_members")

    def __init__(self) -> None:
        self._members: set[ChunkId] = set()
        self._by_freshness: LazyHeap[tuple[int, int]] = LazyHeap(self._is_member)

    def _is_member(self, entry: tuple[int, int]) -> bool:
        return -entry[1] in self._members

    def add(self, chunk: Candidate) -> None:
        """Queue it by its version."""
        self._members.add(chunk.chunk_id)
        self._by_freshness.push((-chunk.version, -chunk.chunk_id))

    def remove(self, chunk: Candidate) -> None:
        """Forget it."""
        self._members.remove(chunk.chunk_id)
        self._by_freshness.compact(len(self._members))

    def draw(self, count: int, rng: random.Random) -> list[ChunkId]:
        """Choose the freshest, freshest first; needs no randomness."""
        return [ChunkId(-entry[1]) for entry in self._by_freshness.first_many(count)]

    def order(self) -> list[ChunkId]:
        """List by arrival, which is as good as any: the order of a draw is total."""
        return sorted(self._members)
