"""The connections of one port, as the system knows them: gRPC does not let go of one by itself."""

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator

_FILES = "/dev/fd"


class PortConnections:
    """Connections to a TCP port that this process has taken, named as gRPC names peers."""

    def __init__(self) -> None:
        self.port = 0
        """What they are connected to; 0: there are none."""

    def peers(self) -> set[str]:
        """All there are; takes some microseconds for every open file. From any thread."""
        return {peer for _, peer in self._files()}

    def close(self, peers: Iterable[str]) -> None:
        """Hang up on some; gRPC sees their ends. From any thread."""
        wanted = set(peers)
        for file, peer in self._files():
            if peer in wanted:
                # What was seen may have been closed since, and its number be another's: a copy
                # stays what it is.
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as copy:
                    if self._peer_of(copy) == peer:
                        copy.shutdown(socket.SHUT_RDWR)

    def _files(self) -> Iterator[tuple[int, str]]:
        if not self.port:
            return
        for name in os.listdir(_FILES):
            file = int(name)
            try:
                seen = socket.socket(fileno=file)
            except OSError:
                continue  # No socket, or closed meanwhile.
            try:
                peer = self._peer_of(seen)
            finally:
                seen.detach()
            if peer is not None:
                yield file, peer

    def _peer_of(self, seen: socket.socket) -> str | None:
        """What gRPC names a connection; None: it is none of ours."""
        try:
            if (
                seen.family not in (socket.AF_INET, socket.AF_INET6)
                or seen.getsockname()[1] != self.port
            ):
                return None
            host, port = seen.getpeername()[:2]
        except OSError:
            return None
        # gRPC listens on one socket for both families.
        host = host.removeprefix("::ffff:")
        return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
