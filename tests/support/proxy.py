"""A TCP proxy that can fall silent and speak again, and send new connections elsewhere."""

import contextlib
import socket
import threading
from types import TracebackType

_CHUNK_BYTES = 1 << 16


class Proxy:
    """Passes bytes on both ways while it is not silent. A context manager.

    While it is silent everybody may still connect, and what was sent waits: as behind a cut cable,
    nobody is told of anything.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        """Where connections made from now on go."""
        self._speaks = threading.Event()
        self._speaks.set()
        self._has_ended = False
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._threads: set[threading.Thread] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]

    @property
    def address(self) -> str:
        """Where clients connect to."""
        return f"127.0.0.1:{self.port}"

    def fall_silent(self) -> None:
        """Pass nothing on until told to. What is on its way may still arrive."""
        self._speaks.clear()

    def speak(self, *, with_reset: bool = False) -> None:
        """Pass on again what waits, or break every connection, as a host that was replaced does."""
        if with_reset:
            self._break_connections()
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
        self._has_ended = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.speak(with_reset=True)
        for thread in list(self._threads):
            thread.join(timeout=10)

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
        while not self._has_ended:
            try:
                outside, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, outside)

    def _serve(self, outside: socket.socket) -> None:
        with outside:
            self._speaks.wait()
            try:
                inside = socket.create_connection(self.target, timeout=10)
            except OSError:
                return
            inside.settimeout(None)
            pair = (outside, inside)
            with inside:
                with self._lock:
                    self._pairs.add(pair)
                if self._has_ended:
                    _shut(pair)
                back = threading.Thread(target=self._pass_on, args=(inside, outside), daemon=True)
                back.start()
                self._pass_on(outside, inside)
                back.join()
                with self._lock:
                    self._pairs.discard(pair)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(_CHUNK_BYTES):
                self._speaks.wait()
                sink.sendall(received)
        _shut((source, sink))


def _shut(pair: tuple[socket.socket, socket.socket]) -> None:
    for each in pair:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
