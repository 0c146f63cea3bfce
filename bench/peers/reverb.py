"""Reverb: one table per workload, each item delivered once. In an environment of its own."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import reverb

from bench.peers.side import main

_ITEMS_MAX = {"vector": 4096, "atari": 590, "vpt": 25}
"""What `held_max` gives for them."""
_FLUSH_EVERY = 256


class Reverb:
    """A server in a process of its own; callers come to it by gRPC."""

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Start it."""
        with subprocess.Popen(
            [sys.executable, "-m", "bench.peers.reverb", "server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            assert server.stdout is not None
            yield f"localhost:{int(server.stdout.readline())}"
            assert server.stdin is not None
            server.stdin.close()

    def call(self, address: str, workload: str, arrays: Sequence[np.ndarray]) -> "_Caller":
        """Connect."""
        return _Caller(address, workload, arrays)


class _Caller:
    def __init__(self, address: str, workload: str, arrays: Sequence[np.ndarray]) -> None:
        self._client = reverb.Client(address)
        self._table = workload
        self._arrays = list(arrays)
        # Kept open: four times as fast as Client.insert, which makes one for each call. With the
        # default of 25 items in flight groups take 1.5 times as long.
        self._writer = self._client.writer(max_sequence_length=1, max_in_flight_items=None)
        self._put_count = 0

    def append(self, count: int) -> None:
        """Write, and wait until the server has confirmed all."""
        for _ in range(count):
            self._write()
        self._writer.flush()

    def put(self) -> None:
        """Write; at each 256th wait for the server."""
        self._write()
        self._put_count += 1
        if self._put_count % _FLUSH_EVERY == 0:
            self._writer.flush()

    def flush(self) -> None:
        """Wait until the server has confirmed all."""
        self._writer.flush()

    def _write(self) -> None:
        self._writer.append(self._arrays)
        self._writer.create_item(self._table, num_timesteps=1, priority=1.0)

    def batch(self, count: int) -> None:
        """Sample, as Python code does without TensorFlow, and stack."""
        samples = self._client.sample(self._table, count, emit_timesteps=False)
        columns = zip(*[each.data for each in samples], strict=True)
        stacked = [np.concatenate(column) for column in columns]
        assert len(stacked) == len(self._arrays)

    def close(self) -> None:
        """Disconnect."""
        self._writer.close()


def _serve() -> None:
    """Serve until standard input ends; print the port."""
    tables = [
        reverb.Table(
            name=name,
            sampler=reverb.selectors.Uniform(),
            remover=reverb.selectors.Fifo(),
            max_size=items_max,
            max_times_sampled=1,
            rate_limiter=reverb.rate_limiters.MinSize(1),
        )
        for name, items_max in _ITEMS_MAX.items()
    ]
    server = reverb.Server(tables)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    if sys.argv[1:] == ["server"]:
        _serve()
    else:
        main(Reverb())
