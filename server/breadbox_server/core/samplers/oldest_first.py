"""First in, first out: for nearly on-policy learners that want no chunk to grow stale unused."""

import random

from breadbox_server.core.ids import ChunkId
from breadbox_server.core.lazy_heap import LazyHeap
from breadbox_server.core.samplers.interface import Candidate, Sampler


class OldestFirstSampler(Sampler):
    """Draws the chunks that arrived first; one that was given back keeps its first arrival."""

    __slots__ = ("_by_age", "_members")

    def __init__(self) -> None:
        self._members: set[ChunkId] = set()
        self._by_age: LazyHeap[ChunkId] = LazyHeap(self._members.__contains__)

    def add(self, chunk: Candidate) -> None:
        """Queue it by its arrival."""
        self._members.add(chunk.chunk_id)
        self._by_age.push(chunk.chunk_id)

    def remove(self, chunk: Candidate) -> None:
        """Forget it."""
        self._members.remove(chunk.chunk_id)
        self._by_age.compact(len(self._members))

    def draw(self, count: int, rng: random.Random) -> list[ChunkId]:
        """Choose the oldest, oldest first; needs no randomness."""
        return self._by_age.first_many(count)

    def order(self) -> list[ChunkId]:
        """List by arrival."""
        return sorted(self._members)
