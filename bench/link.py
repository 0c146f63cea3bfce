"""A link of limited bandwidth before a server: `python -m bench.link LISTEN_PORT PORT BYTES_PER_S`.

What the server sends is slowed down, all connections together; what it is sent passes as it comes.
"""

import socket
import sys
import threading
import time

_CHUNK_BYTES = 64 * 1024
_BURST_S = 0.005
"""What a sender that was late may catch up with."""


class _Pace:
    """Says how long to wait, so that bytes flow at a rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = time.perf_counter()
        self._lock = threading.Lock()

    def wait_for(self, count: int) -> None:
        """Wait until so many bytes have passed."""
        with self._lock:
            now = time.perf_counter()
            self._free_at = max(self._free_at, now - _BURST_S) + count / self._bytes_per_s
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)


def _pass_on(source: socket.socket, target: socket.socket, pace: _Pace | None) -> None:
    memory = memoryview(bytearray(_CHUNK_BYTES))
    try:
        while count := source.recv_into(memory):
            if pace is not None:
                pace.wait_for(count)
            target.sendall(memory[:count])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # One side went away without a farewell: so does the other.
        source.close()
        target.close()


def _main() -> None:
    listen_port, port, bytes_per_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    pace = _Pace(bytes_per_s)
    with socket.create_server(("127.0.0.1", listen_port)) as listening:
        while True:
            client, _ = listening.accept()
            server = socket.create_connection(("127.0.0.1", port))
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for way in ((client, server, None), (server, client, pace)):
                threading.Thread(target=_pass_on, args=way, daemon=True).start()


if __name__ == "__main__":
    _main()
