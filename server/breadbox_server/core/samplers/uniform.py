"""Every set of chunks is as likely as any other (B9)."""

import random

from breadbox_server.core.ids import ChunkId
from breadbox_server.core.samplers.interface import Candidate, Sampler


class UniformSampler(Sampler):
    """Draws uniformly without replacement.

    The chunks stand in a dense array, each knowing its place; the last one fills the place of one
    that leaves. So a draw of k costs O(k), whatever the number held.
    """

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: list[Candidate] = []

    def add(self, chunk: Candidate) -> None:
        """Put it at the end of the array."""
        chunk.sampler_position = len(self._chunks)
        self._chunks.append(chunk)

    def remove(self, chunk: Candidate) -> None:
        """Fill its place with the last one."""
        last = self._chunks.pop()
        if last is not chunk:
            self._chunks[chunk.sampler_position] = last
            last.sampler_position = chunk.sampler_position

    def draw(self, count: int, rng: random.Random) -> list[ChunkId]:
        """Choose uniformly without replacement; any order is as likely as any other."""
        chunks = self._chunks
        return [chunks[position].chunk_id for position in rng.sample(range(len(chunks)), count)]

    def order(self) -> list[ChunkId]:
        """List the array."""
        return [chunk.chunk_id for chunk in self._chunks]
