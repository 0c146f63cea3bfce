"""Newest model version first: for learners that pay for staleness more than for waste."""

from breadbox_server.core.samplers.interface import Candidate
from breadbox_server.core.samplers.ordered import OrderedSampler, Place


class FreshestFirstSampler(OrderedSampler):
    """Draws the chunks of the highest version; of one version, those that arrived last."""

    def place(self, chunk: Candidate) -> Place:
        """By its version, then by its arrival, the highest first."""
        return (-chunk.version, -chunk.chunk_id, chunk.chunk_id)
