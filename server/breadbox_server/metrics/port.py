"""Serve metrics over HTTP; open to every client, so with few files and threads."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from breadbox_server.limits import METRICS_REQUEST_S, METRICS_REQUESTS_MAX


class _Handler(WSGIRequestHandler):
    """Handle one request, after which its connection is closed."""

    timeout = METRICS_REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, since scrapes are frequent."""


class _Server(ThreadingMixIn, WSGIServer):
    """Serve each connection in a thread; at `METRICS_REQUESTS_MAX` close the oldest one."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._since: dict[Any, float] = {}
        """Time at which each open connection was accepted, the oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind the address without looking up its host name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = address = self.socket.getsockname()
        self.server_name, self.server_port = str(address[0]), int(address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._since[request] = time.monotonic()
            if len(self._since) > METRICS_REQUESTS_MAX:
                self._hang_up(next(iter(self._since)))
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that exceed their time; called twice a second."""
        with self._lock:
            late = time.monotonic() - METRICS_REQUEST_S
            for request in [each for each, since in self._since.items() if since < late]:
                self._hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the errors of clients that disconnected."""

    def _hang_up(self, request: Any) -> None:
        del self._since[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)  # Its thread then ends and closes it.


@contextmanager
def metrics_served(host: str, port: int, registry: CollectorRegistry) -> Iterator[int]:
    """Serve a registry's metrics inside the block; yield the port."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    server = _Server((host, port), family)
    server.set_app(make_wsgi_app(registry))
    thread = threading.Thread(target=server.serve_forever, name="breadbox-metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
