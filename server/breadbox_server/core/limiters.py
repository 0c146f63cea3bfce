"""When an append may close a chunk, and a draw may happen; `make_limiter` lists the limiters."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from breadbox_server.core.model.config import (
    LimiterConfig,
    MinimumChunks,
    SampleToInsertRatio,
)


class Flow(NamedTuple):
    """What went in and out of a buffer, all that a limiter may judge by."""

    held_count: int
    inserted_count: int
    """Chunks that were closed in the current session, less those that left without a use."""
    delivered_count: int
    """Chunks granted in the current session, one per use, less those given back."""


class Limiter(ABC):
    """Decide whether an append may close a chunk, and whether a draw may happen.

    Stateless: decisions follow from the flow, so limits can change while running and nothing needs
    journaling. It only ever adds a reason to wait.
    """

    limits_inserts: ClassVar[bool] = True
    """False: `may_insert` is True whatever the flow, and need not be asked."""

    def __init__(self, minimum_count: int) -> None:
        self._minimum_count = minimum_count

    @abstractmethod
    def may_insert(self, flow: Flow) -> bool:
        """Return whether one more chunk may be closed. Not asked while a fetch waits for chunks."""

    def may_draw(self, flow: Flow, chunk_count: int) -> bool:
        """Return whether `chunk_count` chunks may be drawn, which are known to be held."""
        return flow.held_count >= self._minimum_count

    def reason(self, flow: Flow, chunk_count: int) -> str:
        """Say in one sentence with numbers what a draw that may not happen waits for."""
        return (
            f"the buffer holds {flow.held_count} chunks, "
            f"and its limiter waits for {self._minimum_count}"
        )


class MinimumChunksLimiter(Limiter):
    """Lets appends pass, and fetches once a minimum is held: no batch is drawn from a handful."""

    limits_inserts = False

    def may_insert(self, flow: Flow) -> bool:
        """Return True."""
        return True


class SampleToInsertRatioLimiter(Limiter):
    """Hold learner and workers together, so that neither runs far ahead of the other.

    With d = inserted * ratio - delivered - lead_chunks, counted in chunks within the session:

        a draw of k waits       while d - k < -error_chunks   (the learner is ahead)
        closing a chunk waits   while d + ratio > error_chunks (the workers are ahead)

    A chunk that leaves undrawn counts as never inserted. Below `minimum_chunk_count` held chunks
    appends pass and fetches wait. The buffer does not ask about an append while a fetch waits for
    chunks: a learner that polls should set `minimum_chunk_count` to the chunks it asks for.
    """

    def __init__(self, config: SampleToInsertRatio) -> None:
        super().__init__(config.minimum_chunk_count)
        self._ratio = config.ratio
        self._diff_min = config.lead_chunks - config.error_chunks
        self._diff_max = config.lead_chunks + config.error_chunks

    def may_insert(self, flow: Flow) -> bool:
        """Return whether the workers stay within the band, or too few chunks are held to matter."""
        return (
            flow.held_count < self._minimum_count
            or self._ahead_chunks(flow) + self._ratio <= self._diff_max
        )

    def may_draw(self, flow: Flow, chunk_count: int) -> bool:
        """Return whether enough chunks are held and the learner stays within the band."""
        return (
            super().may_draw(flow, chunk_count)
            and self._ahead_chunks(flow) - chunk_count >= self._diff_min
        )

    def reason(self, flow: Flow, chunk_count: int) -> str:
        """Name the numbers of whichever condition fails first."""
        if not super().may_draw(flow, chunk_count):
            return super().reason(flow, chunk_count)
        return (
            f"{flow.delivered_count} chunks were delivered and {flow.inserted_count} inserted; "
            f"{chunk_count} more would bring inserted * {self._ratio:g} - delivered below "
            f"{self._diff_min:g}"
        )

    def _ahead_chunks(self, flow: Flow) -> float:
        return flow.inserted_count * self._ratio - flow.delivered_count


def make_limiter(config: LimiterConfig) -> Limiter:
    """Make the limiter that a configuration describes."""
    if isinstance(config, MinimumChunks):
        return MinimumChunksLimiter(config.chunk_count)
    return SampleToInsertRatioLimiter(config)
