"""A fetch waits for a minimum of chunks, so that early batches are not drawn from a handful."""

from breadbox_server.core.limiters.interface import Flow, Limiter
from breadbox_server.core.model.config import MinimumChunksConfig


class MinimumChunksLimiter(Limiter):
    """Lets appends pass, and fetches once `chunk_count` chunks are held."""

    limits_inserts = False

    def __init__(self, config: MinimumChunksConfig) -> None:
        self._minimum_count = config.chunk_count

    def may_insert(self, flow: Flow) -> bool:
        """Always."""
        return True

    def may_draw(self, flow: Flow, chunk_count: int) -> bool:
        """Once the minimum is held."""
        return flow.held_count >= self._minimum_count

    def reason(self, flow: Flow, chunk_count: int) -> str:
        """Name both numbers."""
        return (
            f"the buffer holds {flow.held_count} chunks, "
            f"and its limiter waits for {self._minimum_count}"
        )
