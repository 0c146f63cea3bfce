"""Last in, first out: a stack."""

from breadbox_server.core.samplers.interface import Candidate
from breadbox_server.core.samplers.ordered import OrderedSampler, Place


class NewestFirstSampler(OrderedSampler):
    """Draws the chunks that arrived last; one that was given back keeps its first arrival."""

    def place(self, chunk: Candidate) -> Place:
        """By its arrival, the latest first."""
        return (-chunk.chunk_id, chunk.chunk_id)
