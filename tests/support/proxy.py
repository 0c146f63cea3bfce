"""A TCP proxy that can fall silent and speak again, and send new connections elsewhere."""

import contextlib
import random
import socket
import struct
import threading
from types import TracebackType

_CHUNK_BYTES = 1 << 16


class Proxy:
    """Passes bytes on both ways while it is not silent. A context manager.

    While it is silent everybody may still connect, and what was sent waits: as behind a cut cable,
    nobody is told of anything.

    Args:
        target: Where connections go.
        backlog: How many may wait to be accepted; `drop` needs 0.
    """

    def __init__(self, target: tuple[str, int], *, backlog: int = 128) -> None:
        self.target = target
        """Where connections made from now on go."""
        self._speaks = threading.Event()
        self._speaks.set()
        self._has_ended = threading.Event()
        self._drops = False
        self._hangs_up = False
        self._era = 0
        """Grows as connections are forgotten; those of an earlier one pass nothing on."""
        self._lock = threading.Lock()
        self._left: dict[bool, int | None] = {True: None, False: None}
        """Bytes still to pass on to the target (True) and from it (False); None: no bound."""
        self._bytes_per_s = 0.0
        self._latency_s = 0.0
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._threads: set[threading.Thread] = set()
        self._queue: list[socket.socket] = []
        """What fills the queue of those who connect."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        self.port: int = self._listener.getsockname()[1]

    @property
    def address(self) -> str:
        """Where clients connect to."""
        return f"127.0.0.1:{self.port}"

    def fall_silent(self) -> None:
        """Pass nothing on until told to. What is on its way may still arrive."""
        self._speaks.clear()

    def forget_connections(self) -> None:
        """Drop all that comes on the connections of now and tell nobody; new ones are as any.

        As a balancer does that lost its table of connections, or dropped them as idle.
        """
        self._era += 1

    def fall_silent_after(self, size_bytes: int, *, to_target: bool) -> None:
        """Pass nothing on in either direction once so many bytes more went in the one given."""
        with self._lock:
            self._left[to_target] = size_bytes

    def drop(self) -> None:
        """Fall silent for good, and answer nobody who wants to connect, as a firewall does.

        Raises:
            AssertionError: Whoever connects is still answered.
        """
        self._drops = True
        self.fall_silent()
        # One place in the queue: with it taken, the kernel drops the others.
        for _ in range(16):
            held = socket.socket()
            self._queue.append(held)
            held.settimeout(0.3)
            try:
                held.connect(("127.0.0.1", self.port))
            except TimeoutError:
                return
        raise AssertionError("whoever connects is still answered")

    def hang_up(self) -> None:
        """End every connection, and new ones as soon as they were accepted, until it speaks.

        As a balancer whose backend is away does: with a reset, at once, or after a moment.
        """
        self._hangs_up = True
        self._break_connections()

    def pass_at_most(self, bytes_per_s: float) -> None:
        """Pass bytes on no faster than this from now on, each way."""
        self._bytes_per_s = bytes_per_s

    def pass_after(self, latency_s: float) -> None:
        """Pass on what comes from now on so much later, each way."""
        self._latency_s = latency_s

    @property
    def is_silent(self) -> bool:
        """Whether it passes nothing on."""
        return not self._speaks.is_set()

    def speak(self, *, with_reset: bool = False) -> None:
        """Pass on again what waits, or break every connection, as a host that was replaced does."""
        if with_reset:
            self._break_connections()
        self._hangs_up = False
        self._speaks.set()

    def __enter__(self) -> "Proxy":
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.speak(with_reset=True)
        for thread in list(self._threads):
            thread.join(timeout=10)
        for held in self._queue:
            held.close()

    def _break_connections(self) -> None:
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            _shut(pair)

    def _start(self, function: object, *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)  # type: ignore[arg-type]
        with self._lock:
            self._threads = {each for each in self._threads if each.is_alive()} | {thread}
            thread.start()

    def _accept(self) -> None:
        while not self._has_ended.is_set():
            try:
                outside, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, outside)
            if self._drops:
                self._has_ended.wait()

    def _serve(self, outside: socket.socket) -> None:
        with outside:
            self._speaks.wait()
            if self._hangs_up:
                self._has_ended.wait(random.choice((0.0, 0.0005, 0.002)))
                outside.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            try:
                inside = socket.create_connection(self.target, timeout=10)
            except OSError:
                return
            inside.settimeout(None)
            pair = (outside, inside)
            with inside:
                with self._lock:
                    self._pairs.add(pair)
                if self._has_ended.is_set():
                    _shut(pair)
                era = self._era
                back = threading.Thread(
                    target=self._pass_on, args=(inside, outside, False, era), daemon=True
                )
                back.start()
                self._pass_on(outside, inside, True, era)
                back.join()
                with self._lock:
                    self._pairs.discard(pair)

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, to_target: bool, era: int
    ) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(_CHUNK_BYTES):
                if era < self._era:
                    continue
                self._has_ended.wait(self._latency_s)
                self._speaks.wait()
                allowed = self._allowed(len(received), to_target)
                sink.sendall(received[:allowed])
                if self._bytes_per_s:
                    self._has_ended.wait(len(received) / self._bytes_per_s)
                if allowed < len(received):
                    self.fall_silent()
                    self._speaks.wait()
                    sink.sendall(received[allowed:])
        if era == self._era or self._has_ended.is_set():
            _shut((source, sink))

    def _allowed(self, size_bytes: int, to_target: bool) -> int:
        with self._lock:
            left = self._left[to_target]
            if left is None:
                return size_bytes
            self._left[to_target] = None if left < size_bytes else left - size_bytes
            return min(left, size_bytes)


def _shut(pair: tuple[socket.socket, socket.socket]) -> None:
    for each in pair:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
