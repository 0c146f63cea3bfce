"""What goes into a buffer and out of it, as limiters judge it."""

from breadbox_server.core.limiters import Flow


class FlowMeter:
    """Counts the chunks of the current session.

    A chunk that leaves without a use counts as if it had never come, so that a limiter does not
    have the others used more often for it.
    """

    __slots__ = ("delivered_count", "inserted_count")

    def __init__(self, inserted_count: int = 0, delivered_count: int = 0) -> None:
        self.inserted_count = inserted_count
        """Chunks closed, less those that left without a use."""
        self.delivered_count = delivered_count
        """Uses granted, less those given back."""

    def insert(self, chunk_count: int = 1) -> None:
        """Count chunks that were closed."""
        self.inserted_count += chunk_count

    def restart(self, inserted_count: int = 0, delivered_count: int = 0) -> None:
        """Count from here."""
        self.inserted_count = inserted_count
        self.delivered_count = delivered_count

    def drop(self, chunk_count: int = 1) -> None:
        """Take out chunks that left without a use."""
        self.inserted_count -= chunk_count

    def deliver(self, chunk_count: int) -> None:
        """Count uses that were granted."""
        self.delivered_count += chunk_count

    def take_back(self) -> None:
        """Count a use that was given back."""
        self.delivered_count -= 1

    def flow(self, held_count: int) -> Flow:
        """What a limiter judges by, with so many chunks held."""
        return Flow(held_count, self.inserted_count, self.delivered_count)
