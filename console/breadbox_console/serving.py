"""Keep connections that send no request from taking the place of those that do."""

import asyncio
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_MAX: Final = 512
"""Open connections; the next one closes the one that was silent longest, maybe itself."""
SILENT_S: Final = 10.0
"""Seconds without a whole request after which a connection is closed."""


class BoundedConnection(H11Protocol):
    """A connection of uvicorn that is closed if it sends no request."""

    silent_since = 0.0
    """When it was opened, or its last answer ended, by the loop's clock."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # noqa: D102 - asyncio's
        super().connection_made(transport)
        self.silent_since = self.loop.time()
        self._look_later()
        if len(self.connections) > CONNECTIONS_MAX:
            held = [each for each in self.connections if isinstance(each, BoundedConnection)]
            silent = [each for each in held if each.is_silent]
            min(silent, key=lambda each: each.silent_since).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102 - asyncio's
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:  # noqa: D102 - asyncio's
        try:
            super().data_received(data)
        except UnicodeDecodeError:  # In a path.
            self.send_400_response("Invalid HTTP request received.")

    def on_response_complete(self) -> None:  # noqa: D102 - uvicorn's
        self.silent_since = self.loop.time()
        super().on_response_complete()

    @property
    def is_silent(self) -> bool:
        """True while it has sent no request, or a part of one."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _look_later(self) -> None:
        self._timer = self.loop.call_later(SILENT_S, self._end_if_silent)

    def _end_if_silent(self) -> None:
        if self.is_silent and self.loop.time() - self.silent_since >= SILENT_S:
            self.transport.abort()
        else:
            self._look_later()
