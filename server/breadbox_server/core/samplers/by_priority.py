"""Highest or lowest priority first."""

from breadbox_server.core.model.ids import ChunkId
from breadbox_server.core.samplers.interface import Candidate
from breadbox_server.core.samplers.ordered import OrderedSampler, Place


class _ByPrioritySampler(OrderedSampler):
    """Draws by priority; among equals, the chunk whose priority was given or set longest ago."""

    _sign: float

    def __init__(self) -> None:
        super().__init__()
        self._set_count = 0
        """Priorities given and set; the tie-breaker between equal ones."""

    def place(self, chunk: Candidate) -> Place:
        """By its priority, behind those that are equal."""
        self._set_count += 1
        return (self._sign * chunk.priority, self._set_count, chunk.chunk_id)

    def update(self, chunk: Candidate) -> None:
        """Put it where it belongs now, behind those that are equal."""
        self.add(chunk)
        self._first.compact(len(self._places))

    def order(self) -> list[ChunkId]:
        """List the chunks, longest unchanged priority first."""
        return sorted(self._places, key=lambda chunk_id: int(self._places[chunk_id][1]))


class HighestPrioritySampler(_ByPrioritySampler):
    """Draws the chunks of the highest priority."""

    _sign = -1.0


class LowestPrioritySampler(_ByPrioritySampler):
    """Draws the chunks of the lowest priority."""

    _sign = 1.0
