"""Keep a connection to each address of a client, and take another one after silence."""

import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub

T = TypeVar("T")


class Line:
    """A channel to one address, blocking or asyncio, and the service's calls over it."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.stub = ReplayBufferServiceStub(channel)


class Connections(Generic[T]):
    """One connection to each address, for calls in many threads; hashable by identity.

    A balancer may have forgotten a connection, which is then silent for as long as gRPC believes
    in it. Calls after a silent one get another connection; calls in progress keep theirs.
    """

    def __init__(self, addresses: Iterable[str], open_one: Callable[[str, bool], T]) -> None:
        """Open all, with `open_one(address, is_another)`."""
        self._lock = threading.Lock()
        self._addresses = tuple(addresses)
        self._open_one = open_one
        self._current = [open_one(each, False) for each in self._addresses]
        self._calls = dict.fromkeys(self._current, 0)
        """Calls in progress, by open connection."""
        self._ended = False

    def take(self, place: int) -> T:
        """Return the connection to an address, for one call; `give_back` follows."""
        with self._lock:
            connection = self._current[place]
            self._calls[connection] += 1
        return connection

    def give_back(self, connection: T) -> bool:
        """Note the end of a call; True if the caller is to close the connection."""
        with self._lock:
            self._calls[connection] -= 1
            if self._ended or self._calls[connection] or connection in self._current:
                return False
            del self._calls[connection]
            return True

    def replace(self, place: int, silent: T) -> None:
        """Give later calls to an address another connection, unless that was done already."""
        with self._lock:
            if self._current[place] is silent and not self._ended:
                self._current[place] = another = self._open_one(self._addresses[place], True)
                self._calls[another] = 0

    def end(self) -> tuple[T, ...]:
        """Return all connections, which the caller closes; none is opened any more."""
        with self._lock:
            self._ended = True
            return tuple(self._calls)
