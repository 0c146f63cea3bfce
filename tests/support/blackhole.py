"""A TCP proxy that falls silent on demand, as cut cables, firewalls and stopped hosts do."""

import contextlib
import socket
import threading
from enum import Enum
from types import TracebackType

_CHUNK_BYTES = 1 << 16


class Silence(Enum):
    """In which way nothing comes through any more."""

    STALLED = "stalled"
    """Connections stay and new ones are accepted, but no byte is passed on."""
    DROPPED = "dropped"
    """As stalled, and nobody answers who wants to connect."""


class Blackhole:
    """Passes bytes on between clients and a server, until it is told not to. A context manager.

    Args:
        target: Host and port of the server.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._passes = threading.Event()
        self._passes.set()
        self._drops = threading.Event()
        self._ended = threading.Event()
        self._left: dict[bool, int | None] = {True: None, False: None}
        """Bytes still to pass on to the server (True) and from it (False); None: no bound."""
        self._bytes_per_s = 0.0
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        # One place in the queue of those who connect: with it taken, the kernel drops the others.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.port: int = self._listener.getsockname()[1]

    @property
    def address(self) -> str:
        """Where clients connect to."""
        return f"127.0.0.1:{self.port}"

    def fall_silent(self, silence: Silence) -> None:
        """Pass nothing on from now on."""
        self._passes.clear()
        if silence is Silence.DROPPED:
            self._drops.set()
            self._fill_queue()

    def fall_silent_after(self, size_bytes: int, *, to_server: bool) -> None:
        """Pass nothing on in either direction once so many bytes more went in the one given."""
        with self._lock:
            self._left[to_server] = size_bytes

    def pass_at_most(self, bytes_per_s: float) -> None:
        """Pass bytes on no faster than this from now on, each way."""
        self._bytes_per_s = bytes_per_s

    @property
    def is_silent(self) -> bool:
        """Whether it passes nothing on."""
        return not self._passes.is_set()

    def __enter__(self) -> "Blackhole":
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._passes.set()
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=10)
        for each in [self._listener, *self._sockets]:
            each.close()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _fill_queue(self) -> None:
        """Connect until the kernel answers nobody who connects."""
        for _ in range(16):
            held = socket.socket()
            self._sockets.append(held)
            held.settimeout(0.3)
            try:
                held.connect(("127.0.0.1", self.port))
            except TimeoutError:
                return
        raise AssertionError("whoever connects is still answered")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                outside, _ = self._listener.accept()
                self._sockets.append(outside)
                if self._drops.is_set():
                    self._ended.wait()
                    return
                if self.is_silent:
                    continue
                inside = socket.create_connection(self._target)
                self._sockets.append(inside)
                self._start(self._pass_on, outside, inside, True)
                self._start(self._pass_on, inside, outside, False)

    def _pass_on(self, source: socket.socket, sink: socket.socket, to_server: bool) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(_CHUNK_BYTES):
                allowed = self._allowed(len(received), to_server)
                if self._passes.is_set():
                    sink.sendall(received[:allowed])
                if self._bytes_per_s:
                    self._ended.wait(len(received) / self._bytes_per_s)
                if allowed < len(received):
                    self._passes.clear()
                self._passes.wait()
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _allowed(self, size_bytes: int, to_server: bool) -> int:
        with self._lock:
            left = self._left[to_server]
            if left is None:
                return size_bytes
            self._left[to_server] = max(0, left - size_bytes)
            return min(left, size_bytes)
