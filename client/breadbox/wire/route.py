"""Choose which of several servers on one journal to call: the leader."""

import threading

from breadbox.model.errors import (
    DeadlineExceededError,
    ReplayBufferError,
    StoreUnavailableError,
    UnavailableError,
)
from breadbox.model.options import split_addresses


class Route:
    """Addresses, and the one to call; a failure selects the next one. Thread-safe."""

    def __init__(self, addresses: str) -> None:
        self.addresses = split_addresses(addresses)
        self._lock = threading.Lock()
        self.place = 0
        """Index of the address to call."""

    def failed(self, place: int, error: ReplayBufferError) -> None:
        """Select the next address after a failed call, once for several concurrent ones.

        Also after StoreUnavailableError, because a server may have been replaced without noticing.
        """
        if not isinstance(error, UnavailableError | DeadlineExceededError | StoreUnavailableError):
            return
        with self._lock:
            if place == self.place:
                self.place = (place + 1) % len(self.addresses)
