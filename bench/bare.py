"""The limit: a bare socket loop that moves the same bytes in the same pieces to the same Redis.

No framing beyond Redis' own, no checksums, no headers, no errors handled, memory ready beforehand.
And what a user would write without us: redis-py with pickle.
"""

import pickle
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import redis

from breadbox.model.fragment import Fragment

_AHEAD_BYTES = 2 * 2**20
"""Of pieces that are asked for before they are read. With more, Redis pays for fresh memory to keep
its answers in, and is no limit of anything."""


class BareSocket:
    """One blocking connection to Redis."""

    def __init__(self, address: Path | tuple[str, int]) -> None:
        """Connect to a unix socket, or to a host and port."""
        if isinstance(address, Path):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(address))
        else:
            self._socket = socket.create_connection(address)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set_pieces(self, keys: Sequence[bytes], pieces: Sequence[memoryview]) -> None:
        """SET every piece, then read all replies."""
        for key, piece in zip(keys, pieces, strict=True):
            self._socket.sendall(
                b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(piece))
            )
            self._socket.sendall(piece)
            self._socket.sendall(b"\r\n$2\r\nPX\r\n$6\r\n600000\r\n")
        replies = bytearray(len(b"+OK\r\n") * len(keys))
        self._receive(memoryview(replies))
        if replies != b"+OK\r\n" * len(keys):
            raise RuntimeError(f"Redis refused: {bytes(replies[:100])!r}")

    def get_pieces(self, keys: Sequence[bytes], destinations: Sequence[memoryview]) -> None:
        """GET every piece into its destination; some are asked for before the first is read."""
        commands = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]
        asked_count = asked_bytes = 0
        for destination in destinations:
            first = asked_count
            while asked_count < len(commands) and asked_bytes < _AHEAD_BYTES:
                asked_bytes += len(destinations[asked_count])
                asked_count += 1
            if first < asked_count:
                self._socket.sendall(b"".join(commands[first:asked_count]))
            header = bytearray(len(b"$%d\r\n" % len(destination)))
            self._receive(memoryview(header))
            self._receive(destination)
            self._receive(memoryview(bytearray(2)))
            asked_bytes -= len(destination)

    def unlink(self, keys: Sequence[bytes]) -> None:
        """Delete keys, in the background of Redis."""
        self._socket.sendall(
            b"*%d\r\n$6\r\nUNLINK\r\n" % (len(keys) + 1)
            + b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in keys)
        )
        self._socket.recv(64)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _receive(self, destination: memoryview) -> None:
        while len(destination):
            count = self._socket.recv_into(destination, 0, socket.MSG_WAITALL)
            if not count:
                raise RuntimeError("Redis closed the connection")
            destination = destination[count:]


class PickleClient:
    """What a user would write: whole fragments, pickled, one value each."""

    def __init__(self, path: Path) -> None:
        self._client = redis.Redis(unix_socket_path=str(path))

    def append(self, key: str, fragment: Fragment) -> None:
        """Store one fragment."""
        self._client.set(key, pickle.dumps(fragment), px=600_000)

    def load(self, keys: Sequence[str]) -> list[Any]:
        """Load fragments and stack their observations."""
        values: list[Any] = [self._client.get(key) for key in keys]
        fragments = [pickle.loads(value) for value in values]
        columns = zip(*[_leaves([each.obs, each.in_state]) for each in fragments], strict=True)
        return [np.stack(column) for column in columns]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete fragments."""
        self._client.unlink(*keys)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for node in tree.values() for leaf in _leaves(node)]
    if isinstance(tree, (list, tuple)):
        return [leaf for node in tree for leaf in _leaves(node)]
    return [] if tree is None else [tree]
