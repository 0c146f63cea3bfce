"""TLS in front of any TCP server, with a certificate made on the spot by openssl."""

import contextlib
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from types import TracebackType


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for 127.0.0.1 and its key."""
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return certificate, key


class TlsProxy:
    """Accepts TLS connections and passes their bytes on. A context manager."""

    def __init__(self, target: tuple[str, int], certificate: Path, key: Path) -> None:
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "TlsProxy":
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                self._start(self._serve, plain)

    def _serve(self, plain: socket.socket) -> None:
        self._sockets.append(plain)
        with contextlib.suppress(OSError):
            inside = socket.create_connection(self._target)
            self._sockets.append(inside)
            outside = self._context.wrap_socket(plain, server_side=True)
            self._sockets.append(outside)
            self._start(self._pass_on, inside, outside)
            self._pass_on(outside, inside)

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(1 << 16):
                sink.sendall(received)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
