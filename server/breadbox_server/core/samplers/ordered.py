"""Samplers that draw what comes first in an order, and need no randomness."""

import random
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from breadbox_server.core.model.ids import ChunkId
from breadbox_server.core.model.lazy_heap import LazyHeap
from breadbox_server.core.samplers.interface import Candidate, Sampler, UsesLeft

Place = tuple[Any, ...]
"""Where a chunk stands: the smallest one is drawn first. Ends with the chunk's id."""


class OrderedSampler(Sampler):
    """Draws the chunks that are first in an order."""

    def __init__(self) -> None:
        self._places: dict[ChunkId, Place] = {}
        self._first: LazyHeap[Place] = LazyHeap(self._is_current)

    @abstractmethod
    def place(self, chunk: Candidate) -> Place:
        """Give the place of a chunk that comes in."""

    def _is_current(self, place: Place) -> bool:
        return self._places.get(place[-1]) == place

    def add(self, chunk: Candidate) -> None:
        """Put it where it belongs."""
        place = self._places[chunk.chunk_id] = self.place(chunk)
        self._first.push(place)

    def remove(self, chunk: Candidate) -> None:
        """Forget it."""
        del self._places[chunk.chunk_id]
        self._first.compact(len(self._places))

    def clear(self) -> None:
        """Forget all."""
        self._places.clear()
        self._first.replace(())

    def draw(
        self, count: int, rng: random.Random, uses_left: UsesLeft | None = None
    ) -> list[ChunkId]:
        """Choose the first; with replacement each of them as often as it may be, before others."""
        first = [ChunkId(place[-1]) for place in self._first.first_many(count)]
        if uses_left is None:
            return first
        drawn: list[ChunkId] = []
        for chunk_id in first:
            drawn += [chunk_id] * min(uses_left(chunk_id), count - len(drawn))
        return drawn

    def probabilities(self, chunks: Iterable[Candidate]) -> list[float]:
        """1 each: nothing is left to chance."""
        return [1.0 for _ in chunks]

    def order(self) -> list[ChunkId]:
        """List by arrival, which is as good as any where places are a chunk's own."""
        return sorted(self._places)
