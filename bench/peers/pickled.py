"""What people write at home: fragments pickled into a list in Redis, and popped off it."""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import redis

from bench.peers.side import held_max, main
from bench.processes import redis_server


class Pickled:
    """A Redis of its own."""

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Start Redis; the address is its unix socket."""
        with redis_server() as path:
            yield str(path)

    def call(self, address: str, workload: str, arrays: Sequence[np.ndarray]) -> "_Caller":
        """Connect."""
        return _Caller(address, workload, arrays)


class _Caller:
    def __init__(self, address: str, workload: str, arrays: Sequence[np.ndarray]) -> None:
        self._client = redis.Redis(unix_socket_path=address)
        self._list = workload
        self._fragment = {f"field {number}": array for number, array in enumerate(arrays)}
        self._held_max = held_max(sum(array.nbytes for array in arrays))

    def append(self, count: int) -> None:
        """RPUSH, and LTRIM to what may be held."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.rpush(self._list, *[pickle.dumps(self._fragment) for _ in range(count)])
            pipe.ltrim(self._list, -self._held_max, -1)
            pipe.execute()

    def batch(self, count: int) -> None:
        """BLPOP one by one."""
        fragments = []
        for _ in range(count):
            popped: Any = self._client.blpop([self._list])
            fragments.append(pickle.loads(popped[1]))
        stacked = {name: np.stack([each[name] for each in fragments]) for name in fragments[0]}
        assert len(stacked) == len(self._fragment)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


if __name__ == "__main__":
    main(Pickled())
