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
    """Addresses, and the one called now: the next one after a failure. Thread-safe."""

    def __init__(self, addresses: str) -> None:
        self.addresses = split_addresses(addresses)
        self._lock = threading.Lock()
        self.place = 0
        """Index of the address to call."""

    def failed(self, place: int, error: ReplayBufferError) -> None:
        """Note a failed call, so that the next uses the next address; of concurrent ones once.

        A server that reports its journal missing may have been replaced without knowing it.
        """
        if not isinstance(error, UnavailableError | DeadlineExceededError | StoreUnavailableError):
            return
        with self._lock:
            if place == self.place:
                self.place = (place + 1) % len(self.addresses)
