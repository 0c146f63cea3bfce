"""Every set of chunks is as likely as any other (B9)."""

import random
from collections.abc import Callable, Iterable, Sequence

from breadbox_server.core.model.ids import ChunkId
from breadbox_server.core.samplers.interface import Candidate, Sampler, UsesLeft


class UniformSampler(Sampler):
    """Draws uniformly.

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

    def clear(self) -> None:
        """Empty the array."""
        self._chunks.clear()

    def draw(
        self, count: int, rng: random.Random, uses_left: UsesLeft | None = None
    ) -> list[ChunkId]:
        """Choose uniformly; without replacement any order is as likely as any other."""
        chunks = self._chunks
        if uses_left is None:
            return [chunks[at].chunk_id for at in rng.sample(range(len(chunks)), count)]
        drawn = draw_uniformly(
            range(len(chunks)), count, rng, lambda at: uses_left(chunks[at].chunk_id)
        )
        return [chunks[at].chunk_id for at in drawn]

    def probabilities(self, chunks: Iterable[Candidate]) -> list[float]:
        """The same for each."""
        probability = 1.0 / len(self._chunks)
        return [probability for _ in chunks]

    def order(self) -> list[ChunkId]:
        """List the array."""
        return [chunk.chunk_id for chunk in self._chunks]


def draw_uniformly(
    places: Sequence[int], count: int, rng: random.Random, uses_left: Callable[[int], int]
) -> list[int]:
    """Draw places one after the other, each as often as it may be; O(count)."""
    drawn: list[int] = []
    left: dict[int, int] = {}
    moved: dict[int, int] = {}
    """What stands where an exhausted place stood: as if the last had filled it."""
    end = len(places)
    while len(drawn) < count:
        at = rng.randrange(end)
        place = moved.get(at, places[at])
        drawn.append(place)
        left[place] = left.get(place, uses_left(place)) - 1
        if left[place] == 0:
            end -= 1
            moved[at] = moved.get(end, places[end])
    return drawn
