"""Which chunks a grant gets, and which leave for room; `SAMPLERS` lists the samplers."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import count as count_up
from typing import Any, Protocol

from breadbox_server.core.model.config import BufferConfig, StalePolicy
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.ids import ChunkId, ModelVersion
from breadbox_server.core.model.lazy_heap import LazyHeap

OLDEST_FIRST = "oldest_first"
TREE_SIZE_MIN = 64
"""Leaves that the tree of an empty `PrioritisedSampler` has room for."""

UsesLeft = Callable[[ChunkId], int]
Place = tuple[Any, ...]
"""Where a chunk stands in an order: the smallest one is drawn first. Ends with the chunk's id."""


class Candidate(Protocol):
    """What a sampler may know of a chunk."""

    @property
    def chunk_id(self) -> ChunkId:
        """Unique; ascending in order of arrival."""

    @property
    def version(self) -> ModelVersion:
        """Version of its oldest fragment."""

    @property
    def priority(self) -> float:
        """From 0 to `config.PRIORITY_MAX`; when it changes, the sampler is notified."""

    sampler_position: int
    """The sampler's own note about the chunk; nobody else reads or writes it."""


class Sampler(ABC):
    """Draw some of the chunks that may be drawn, in O(1) or O(log n) per chunk."""

    @abstractmethod
    def add(self, chunk: Candidate) -> None:
        """Let a chunk, not yet known, be drawn from now on."""

    @abstractmethod
    def remove(self, chunk: Candidate) -> None:
        """Never draw a known chunk again, unless it is added again."""

    def update(self, chunk: Candidate) -> None:  # noqa: B027 - most samplers look at no priority
        """Take note that the priority of a known chunk was set, to what it was or to another."""

    def place_of(self, chunk: Candidate) -> Place | None:
        """Return where a known chunk stands, or None where chance says what is drawn."""
        del chunk
        return None

    @abstractmethod
    def clear(self) -> None:
        """Forget every chunk."""

    @abstractmethod
    def draw(
        self, count: int, rng: random.Random, uses_left: UsesLeft | None = None
    ) -> list[ChunkId]:
        """Choose `count` chunks in the order of being handed out; deterministic by `rng`.

        `uses_left`: draws that each allows in a draw with replacement, None: once.
        """

    @abstractmethod
    def probabilities(self, chunks: Iterable[Candidate]) -> list[float]:
        """Return how likely each known chunk is to be drawn next; positive even for last ones."""

    @abstractmethod
    def order(self) -> list[ChunkId]:
        """List the chunks so that adding them in this order to an empty sampler makes a twin."""


class UniformSampler(Sampler):
    """Draw uniformly from a dense array: every set of chunks is as likely (B9); O(k)."""

    def __init__(self) -> None:
        self._chunks: list[Candidate] = []

    def add(self, chunk: Candidate) -> None:
        """Put a chunk at the end of the array."""
        chunk.sampler_position = len(self._chunks)
        self._chunks.append(chunk)

    def remove(self, chunk: Candidate) -> None:
        """Fill a chunk's place with the last one."""
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
        drawn = _draw_uniformly(
            range(len(chunks)), count, rng, lambda at: uses_left(chunks[at].chunk_id)
        )
        return [chunks[at].chunk_id for at in drawn]

    def probabilities(self, chunks: Iterable[Candidate]) -> list[float]:
        """Return the same probability for each chunk."""
        probability = 1.0 / len(self._chunks)
        return [probability for _ in chunks]

    def order(self) -> list[ChunkId]:
        """List the array."""
        return [chunk.chunk_id for chunk in self._chunks]


def _draw_uniformly(
    places: Sequence[int], count: int, rng: random.Random, uses_left: Callable[[int], int]
) -> list[int]:
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


class PrioritisedSampler(Sampler):
    """Draw each chunk in proportion to its weight: finite, at least 0, with a finite sum.

    A tree of sums over a dense array: node i is the sum of 2i and 2i + 1, node 1 of all; leaves are
    weights. Each sum is made anew, never adjusted: no error grows, zeros sum to zero, and a rebuilt
    sampler draws the same chunks. O(log n) a chunk. Chunks of weight 0 are drawn last, uniformly. A
    mirror's tree is separate: it draws thousands at a time with numpy, which the core does without.
    """

    def __init__(self, weigh: Callable[[Candidate], float]) -> None:
        self._weigh = weigh
        self._chunks: list[Candidate] = []
        self._positions: dict[ChunkId, int] = {}
        self._leaves_at = TREE_SIZE_MIN
        """Where in the tree the leaves begin, which is how many there is room for."""
        self._sums = [0.0] * (2 * TREE_SIZE_MIN)

    def add(self, chunk: Candidate) -> None:
        """Put a chunk at the end of the array."""
        position = len(self._chunks)
        if position == self._leaves_at:
            self._grow()
        self._positions[chunk.chunk_id] = position
        self._chunks.append(chunk)
        self._put(position, self._weigh(chunk))

    def remove(self, chunk: Candidate) -> None:
        """Fill a chunk's place with the last one."""
        position = self._positions.pop(chunk.chunk_id)
        last = self._chunks.pop()
        end = len(self._chunks)
        if position != end:
            self._chunks[position] = last
            self._positions[last.chunk_id] = position
            self._put(position, self._sums[self._leaves_at + end])
        self._put(end, 0.0)

    def update(self, chunk: Candidate) -> None:
        """Set a chunk's weight anew."""
        self._put(self._positions[chunk.chunk_id], self._weigh(chunk))

    def clear(self) -> None:
        """Empty array and tree."""
        self._chunks.clear()
        self._positions.clear()
        self._leaves_at = TREE_SIZE_MIN
        self._sums = [0.0] * (2 * TREE_SIZE_MIN)

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
            drawn += _draw_uniformly(rest, count - len(drawn), rng, left_at)
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
        weights = self._sums[self._leaves_at :]
        self._leaves_at *= 2
        self._sums = [0.0] * (2 * self._leaves_at)
        self._sums[self._leaves_at : self._leaves_at + len(weights)] = weights
        for node in range(self._leaves_at - 1, 0, -1):
            self._sums[node] = self._sums[2 * node] + self._sums[2 * node + 1]


class OrderedSampler(Sampler):
    """Draw the chunks that are first in the order that `place` gives; no randomness."""

    def __init__(self, place: Callable[[Candidate], Place]) -> None:
        self._place = place
        self._places: dict[ChunkId, Place] = {}
        self._first: LazyHeap[Place] = LazyHeap(lambda place: self._places.get(place[-1]) == place)

    def add(self, chunk: Candidate) -> None:
        """Insert a chunk at its place in the order."""
        place = self._places[chunk.chunk_id] = self._place(chunk)
        self._first.push(place)

    def remove(self, chunk: Candidate) -> None:
        """Forget a chunk."""
        del self._places[chunk.chunk_id]
        self._first.compact(len(self._places))

    def place_of(self, chunk: Candidate) -> Place | None:
        """Return a chunk's place in the order."""
        return self._places[chunk.chunk_id]

    def clear(self) -> None:
        """Forget all chunks."""
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


class ByPrioritySampler(OrderedSampler):
    """Draw by priority (`sign` 1.0: lowest first); among equals the one longest unchanged."""

    def __init__(self, sign: float) -> None:
        set_numbers = count_up()
        super().__init__(lambda chunk: (sign * chunk.priority, next(set_numbers), chunk.chunk_id))

    def update(self, chunk: Candidate) -> None:
        """Move a chunk to its place in the order, behind those that are equal."""
        self.add(chunk)
        self._first.compact(len(self._places))

    def order(self) -> list[ChunkId]:
        """List the chunks, longest unchanged priority first."""
        return sorted(self._places, key=lambda chunk_id: int(self._places[chunk_id][1]))


def _prioritised(exponent: float) -> Sampler:
    # Without a look at the exponent: 0 to the power of 0 is 1.
    return PrioritisedSampler(
        lambda chunk: chunk.priority**exponent if chunk.priority > 0.0 else 0.0
    )


SAMPLERS: dict[str, Callable[[float], Sampler]] = {
    "uniform": lambda _: UniformSampler(),
    # For nearly on-policy learners that want no chunk to grow stale unused.
    OLDEST_FIRST: lambda _: OrderedSampler(lambda chunk: (chunk.chunk_id,)),
    "newest_first": lambda _: OrderedSampler(lambda chunk: (-chunk.chunk_id, chunk.chunk_id)),
    # For learners that pay for staleness more than for waste; of one version the latest come first.
    "freshest_first": lambda _: OrderedSampler(
        lambda chunk: (-chunk.version, -chunk.chunk_id, chunk.chunk_id)
    ),
    "prioritised": _prioritised,
    "highest_priority": lambda _: ByPrioritySampler(-1.0),
    "lowest_priority": lambda _: ByPrioritySampler(1.0),
}
"""Makers by name, given the power for priorities. A returned chunk keeps its arrival order."""


def make_sampler(name: str, priority_exponent: float = 1.0, *, field: str = "sampler") -> Sampler:
    """Make an empty sampler of a name, which the limit `field` says."""
    make = SAMPLERS.get(name)
    if make is None:
        raise InvalidArgumentError(field, f"must be one of {', '.join(SAMPLERS)}")
    return make(priority_exponent)


def make_draw_order(config: BufferConfig) -> Sampler:
    """Make the sampler of a buffer's draws: where `stale` is wait, the oldest version comes first.

    Fetches that wait take what has the fewest versions left (B35).
    """
    sampler = make_sampler(config.sampler, config.priority_exponent)
    if config.stale is not StalePolicy.WAIT:
        return sampler
    return OrderedSampler(lambda chunk: (chunk.version, chunk.chunk_id))


def make_remover(name: str, priority_exponent: float = 1.0) -> Sampler | None:
    """Make the sampler that says which chunks leave for room, or None if the oldest leave first."""
    if name == OLDEST_FIRST:
        return None
    if name == "uniform":
        # The one notes on each chunk where it stands, and a chunk has one such note.
        return PrioritisedSampler(lambda _: 1.0)
    return make_sampler(name, priority_exponent, field="remover")
