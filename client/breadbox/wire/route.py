"""Servers on one journal, and which of them is called: the one that leads."""

import threading

from breadbox.model.errors import (
    DeadlineExceededError,
    ReplayBufferError,
    StoreUnavailableError,
    UnavailableError,
)
from breadbox.model.options import split_addresses


class Route:
    """Addresses, and which of them is called now. Thread-safe.

    No server is asked for the leader: if the called one refuses, is unreachable or silent, the next
    one is called.

    Args:
        addresses: As `connect` takes them.
    """

    def __init__(self, addresses: str) -> None:
        self.addresses = split_addresses(addresses)
        self._lock = threading.Lock()
        self._place = 0

    @property
    def place(self) -> int:
        """Index of the address to call."""
        return self._place

    def failed(self, place: int, error: ReplayBufferError) -> None:
        """Note that a call to an address failed: the next goes to the next address, if that helps.

        One that lacks its journal, and says so, may have been replaced without knowing it. Of many
        calls that fail at a time at one address, one counts.
        """
        if not isinstance(error, UnavailableError | DeadlineExceededError | StoreUnavailableError):
            return
        with self._lock:
            if place == self._place:
                self._place = (place + 1) % len(self.addresses)
