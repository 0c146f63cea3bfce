"""Holds learner and workers together, so that neither runs far ahead of the other.

With d = inserted * ratio - delivered - lead_chunks, counted in chunks within the session:

    a draw of k waits       while d - k < -error_chunks   (the learner is ahead)
    closing a chunk waits   while d + ratio > error_chunks (the workers are ahead)

`lead_chunks` moves the band: where it is positive, the workers are to be ahead by so much.

A chunk that leaves without having been drawn counts as never inserted: what is stale or has no room
does not have the others drawn more often, nor does it use up the workers' part of the band.

Neither applies while fewer than `minimum_chunk_count` chunks are held: then appends pass and
fetches wait. The buffer does not ask about an append while a fetch waits for chunks, so the upper
edge gives way to a learner that needs more than the band holds. A learner that polls instead of
waiting should set `minimum_chunk_count` to the chunks it asks for.
"""

from breadbox_server.core.limiters.interface import Flow, Limiter
from breadbox_server.core.model.config import SampleToInsertRatioConfig


class SampleToInsertRatioLimiter(Limiter):
    """Keeps deliveries within `error_chunks` of `ratio` times the insertions, less the lead."""

    def __init__(self, config: SampleToInsertRatioConfig) -> None:
        self._ratio = config.ratio
        self._diff_min = config.lead_chunks - config.error_chunks
        self._diff_max = config.lead_chunks + config.error_chunks
        self._minimum_count = config.minimum_chunk_count

    def may_insert(self, flow: Flow) -> bool:
        """Whether the workers stay within the band, or too few chunks are held to matter."""
        return (
            flow.held_count < self._minimum_count
            or self._ahead_chunks(flow) + self._ratio <= self._diff_max
        )

    def may_draw(self, flow: Flow, chunk_count: int) -> bool:
        """Whether enough chunks are held and the learner stays within the band."""
        return (
            flow.held_count >= self._minimum_count
            and self._ahead_chunks(flow) - chunk_count >= self._diff_min
        )

    def reason(self, flow: Flow, chunk_count: int) -> str:
        """Name the numbers of whichever condition fails first."""
        if flow.held_count < self._minimum_count:
            return (
                f"the buffer holds {flow.held_count} chunks, "
                f"and its limiter waits for {self._minimum_count}"
            )
        return (
            f"{flow.delivered_count} chunks were delivered and {flow.inserted_count} inserted; "
            f"{chunk_count} more would bring inserted * {self._ratio:g} - delivered below "
            f"{self._diff_min:g}"
        )

    def _ahead_chunks(self, flow: Flow) -> float:
        return flow.inserted_count * self._ratio - flow.delivered_count
