"""Callers that wait for news of a buffer: of its model, or of its chunks."""

import asyncio
from collections.abc import Iterable
from functools import partial

from breadbox_server.clock import Clock
from breadbox_server.core.ids import BufferName
from breadbox_server.errors import WatchersFullError


class Watchers:
    """Those who wait, by buffer. On one event loop.

    Args:
        clock: Ends their waits.
        limit: How many may wait at a time, for all buffers together.
    """

    def __init__(self, clock: Clock, limit: int) -> None:
        self._clock = clock
        self._limit = limit
        self._of: dict[BufferName, set[asyncio.Future[None]]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Count them."""
        return self._count

    def buffers(self) -> Iterable[BufferName]:
        """Those that somebody waits for news of."""
        return self._of

    async def wait(self, buffer: BufferName, wait_s: float) -> None:
        """Return once the buffer's are woken, or after `wait_s`.

        Raises:
            WatchersFullError: As many wait as may.
            Exception: What they were turned away with.
        """
        if self._count >= self._limit:
            raise WatchersFullError(self._limit)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watchers = self._of.setdefault(buffer, set())
        watchers.add(future)
        self._count += 1
        timer = self._clock.call_at(self._clock.now() + wait_s, partial(_wake, future))
        try:
            await future
        finally:
            timer.cancel()
            watchers.discard(future)
            self._count -= 1
            if not watchers:
                self._of.pop(buffer, None)

    def wake(self, buffer: BufferName) -> None:
        """Let those of a buffer look again."""
        for future in self._of.get(buffer, ()):
            _wake(future)

    def turn_away(self, error: Exception) -> None:
        """Fail all of them."""
        for watchers in self._of.values():
            for future in watchers:
                if not future.done():
                    future.set_exception(error)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
