"""The limit: a bare socket to Redis moves the same bytes, into memory that is there already."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.bare import BareSocket
from bench.payload_rows import cut
from bench.peers.side import held_max, main
from bench.processes import redis_server
from breadbox.stores.keys import piece_key


class Bare:
    """A Redis of its own."""

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Start Redis; the address is its unix socket."""
        with redis_server() as path:
            yield str(path)

    def call(self, address: str, workload: str, arrays: Sequence[np.ndarray]) -> "_Caller":
        """Connect."""
        return _Caller(address, workload, b"".join(each.tobytes() for each in arrays))


class _Caller:
    def __init__(self, address: str, workload: str, payload: bytes) -> None:
        self._socket = BareSocket(Path(address))
        self._prefix = f"{workload}-{id(self)}"
        self._pieces = cut(payload)
        self._held: deque[list[bytes]] = deque()
        self._held_max = held_max(len(payload))
        self._made = 0
        self._memory = np.empty((0, len(payload)), np.uint8)

    def append(self, count: int) -> None:
        """UNLINK the oldest, SET all pieces of all fragments, then read the replies."""
        excess_count = min(len(self._held), max(0, len(self._held) + count - self._held_max))
        oldest = [key for _ in range(excess_count) for key in self._held.popleft()]
        if oldest:
            self._socket.unlink(oldest)
        keys = []
        for _ in range(count):
            self._made += 1
            name = f"{self._prefix}-{self._made}"
            keys.append([piece_key(name, piece) for piece in range(len(self._pieces))])
        self._held.extend(keys)
        self._socket.set_pieces([key for each in keys for key in each], self._pieces * count)

    def batch(self, count: int) -> None:
        """GET all pieces of the oldest fragments to where they belong, then UNLINK them."""
        if len(self._memory) < count:
            self._memory = np.empty((count, self._memory.shape[1]), np.uint8)
        keys = [key for _ in range(count) for key in self._held.popleft()]
        places = [piece for row in self._memory[:count] for piece in cut(row.data)]
        self._socket.get_pieces(keys, places)
        self._socket.unlink(keys)

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()


if __name__ == "__main__":
    main(Bare())
