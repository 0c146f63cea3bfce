"""What a limiter is."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple


class Flow(NamedTuple):
    """What went in and out of a buffer, all that a limiter may judge by."""

    held_count: int
    """Chunks held for sampling now."""
    inserted_count: int
    """Chunks that were closed in the current session, less those that left without a use."""
    delivered_count: int
    """Chunks granted in the current session, one per use, less those given back."""


class Limiter(ABC):
    """Decides whether an append may close a chunk, and whether a draw may happen.

    It keeps no state of its own: its decisions follow from the flow, so limits can change while
    running and nothing of it needs to be journaled. Room, order of arrival and leases are the
    buffer's business; a limiter only ever adds a reason to wait.
    """

    limits_inserts: ClassVar[bool] = True
    """False: `may_insert` is True whatever the flow, and need not be asked."""

    @abstractmethod
    def may_insert(self, flow: Flow) -> bool:
        """Whether one more chunk may be closed. Not asked while a fetch waits for chunks."""

    @abstractmethod
    def may_draw(self, flow: Flow, chunk_count: int) -> bool:
        """Whether `chunk_count` chunks may be drawn; that they are held is checked elsewhere."""

    @abstractmethod
    def reason(self, flow: Flow, chunk_count: int) -> str:
        """Say in one sentence with numbers what a draw that may not happen waits for."""
