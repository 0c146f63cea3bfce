"""Chunks are drawn as often as their priorities say, relative to each other."""

import random
from collections.abc import Callable, Iterable

from breadbox_server.core.model.ids import ChunkId
from breadbox_server.core.samplers.interface import Candidate, Sampler, UsesLeft
from breadbox_server.core.samplers.uniform import draw_uniformly

CAPACITY_MIN = 64


class PrioritisedSampler(Sampler):
    """Draws each chunk with a probability in proportion to a weight of it.

    The chunks stand in a dense array, as for `UniformSampler`, above which a tree of sums stands:
    node i is the sum of nodes 2i and 2i + 1, node 1 that of all, and weights are the leaves. A sum
    is always made anew of the two below it, never by adding what changed, so that the tree follows
    from the array alone: no error grows, what is all zeros sums up to zero, and a sampler that was
    rebuilt in the same order draws the very same chunks. O(log n) for every chunk.

    A mirror's tree of steps is another one: it draws thousands at a time with numpy, which the core
    is without, and with replacement.

    Chunks of weight 0 are drawn only once none of another weight is left to be drawn, uniformly.

    Args:
        weigh: Gives the weight of a chunk: finite, at least 0, and such that the sum of all is.
    """

    def __init__(self, weigh: Callable[[Candidate], float]) -> None:
        self._weigh = weigh
        self._chunks: list[Candidate] = []
        self._positions: dict[ChunkId, int] = {}
        self._leaves_at = CAPACITY_MIN
        """Where in the tree the leaves begin, which is how many there is room for."""
        self._sums = [0.0] * (2 * CAPACITY_MIN)

    def add(self, chunk: Candidate) -> None:
        """Put it at the end of the array."""
        position = len(self._chunks)
        if position == self._leaves_at:
            self._grow()
        self._positions[chunk.chunk_id] = position
        self._chunks.append(chunk)
        self._put(position, self._weigh(chunk))

    def remove(self, chunk: Candidate) -> None:
        """Fill its place with the last one."""
        position = self._positions.pop(chunk.chunk_id)
        last = self._chunks.pop()
        end = len(self._chunks)
        if position != end:
            self._chunks[position] = last
            self._positions[last.chunk_id] = position
            self._put(position, self._sums[self._leaves_at + end])
        self._put(end, 0.0)

    def update(self, chunk: Candidate) -> None:
        """Weigh it anew."""
        self._put(self._positions[chunk.chunk_id], self._weigh(chunk))

    def clear(self) -> None:
        """Empty array and tree."""
        self._chunks.clear()
        self._positions.clear()
        self._leaves_at = CAPACITY_MIN
        self._sums = [0.0] * (2 * CAPACITY_MIN)

    def draw(
        self, count: int, rng: random.Random, uses_left: UsesLeft | None = None
    ) -> list[ChunkId]:
        """Choose by weight, one after the other; what may be drawn no more weighs nothing."""
        chunks, sums, leaves_at = self._chunks, self._sums, self._leaves_at

        def left_at(position: int) -> int:
            return 1 if uses_left is None else uses_left(chunks[position].chunk_id)

        drawn: list[int] = []
        left: dict[int, int] = {}
        spent: dict[int, float] = {}
        while len(drawn) < count and sums[1] > 0.0:
            position = self._position_at(rng.random() * sums[1])
            drawn.append(position)
            left[position] = left.get(position, left_at(position)) - 1
            if left[position] == 0:
                spent[position] = sums[leaves_at + position]
                self._put(position, 0.0)
        if len(drawn) < count:
            rest = (
                [at for at in range(len(chunks)) if at not in spent]
                if spent
                else range(len(chunks))
            )
            drawn += draw_uniformly(rest, count - len(drawn), rng, left_at)
        for position, weight in spent.items():
            self._put(position, weight)
        return [chunks[position].chunk_id for position in drawn]

    def probabilities(self, chunks: Iterable[Candidate]) -> list[float]:
        """The weight of each as a share of all; of weight 0, as if all weighed the same."""
        total = self._sums[1]
        positions = [self._positions[chunk.chunk_id] for chunk in chunks]
        weights = [self._sums[self._leaves_at + position] for position in positions]
        even = 1.0 / len(self._chunks)
        return [weight / total if weight > 0.0 else even for weight in weights]

    def order(self) -> list[ChunkId]:
        """List the array."""
        return [chunk.chunk_id for chunk in self._chunks]

    def _put(self, position: int, weight: float) -> None:
        """Give a leaf its weight, and make the sums above it anew."""
        sums = self._sums
        node = self._leaves_at + position
        if sums[node] == weight:
            return
        sums[node] = weight
        node >>= 1
        while node:
            sums[node] = sums[2 * node] + sums[2 * node + 1]
            node >>= 1

    def _position_at(self, height: float) -> int:
        """Find the leaf at a height from 0 to the sum of all, which is positive."""
        sums, node = self._sums, 1
        while node < self._leaves_at:
            node *= 2
            below = sums[node]
            # What is rounded may reach beyond the last leaf that weighs anything.
            if height >= below and sums[node + 1] > 0.0:
                height -= below
                node += 1
        return node - self._leaves_at

    def _grow(self) -> None:
        """Make room for twice as many."""
        weights = self._sums[self._leaves_at :]
        self._leaves_at *= 2
        self._sums = [0.0] * (2 * self._leaves_at)
        self._sums[self._leaves_at : self._leaves_at + len(weights)] = weights
        for node in range(self._leaves_at - 1, 0, -1):
            self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]
