"""Servers on one journal, and which of them is called: the one that leads."""

import threading

from breadbox.errors import (
    DeadlineExceededError,
    ReplayBufferError,
    StoreUnavailableError,
    UnavailableError,
)
from breadbox.options import split_addresses


class Route:
    """Addresses, and which of them is called now. Thread-safe.

    Nobody is asked who leads: what is called refuses, is away or is silent, and the next one is
    called then.

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

        It does not where a server that leads has answered. Of many calls that fail at a time at one
        address, one counts.
        """
        is_elsewhere = isinstance(
            error, UnavailableError | DeadlineExceededError | StoreUnavailableError
        )
        if not is_elsewhere or (isinstance(error, UnavailableError) and error.was_answered):
            return
        with self._lock:
            if place == self._place:
                self._place = (place + 1) % len(self.addresses)
