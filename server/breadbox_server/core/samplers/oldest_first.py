"""First in, first out: for nearly on-policy learners that want no chunk to grow stale unused."""

from breadbox_server.core.samplers.interface import Candidate
from breadbox_server.core.samplers.ordered import OrderedSampler, Place


class OldestFirstSampler(OrderedSampler):
    """Draws the chunks that arrived first; one that was given back keeps its first arrival."""

    def place(self, chunk: Candidate) -> Place:
        """By its arrival."""
        return (chunk.chunk_id,)
