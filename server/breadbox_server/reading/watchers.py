"""Callers that wait for news of a buffer: of its model, or of its chunks."""

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final

from breadbox_server.base.clock import Clock, TimerHandle
from breadbox_server.base.errors import WatchersFullError
from breadbox_server.core.model.ids import BufferName

FEW: Final = 8
"""Callers that are woken for each piece of news."""
GATHER_S_PER_WATCHER: Final = 0.000_5
"""Seconds between two wakes, per caller: about twice what an answer costs."""
GATHER_S_MAX: Final = 0.025


class Watchers:
    """Waiting callers by buffer, at most `limit`; the largest holder's oldest makes room."""

    def __init__(self, clock: Clock, limit: int) -> None:
        self._clock = clock
        self._limit = limit
        self._of: dict[BufferName, dict[asyncio.Future[None], None]] = {}
        self._of_holder: dict[str, dict[asyncio.Future[None], None]] = {}
        """Waits by holder, the longest first."""
        self._count = 0
        self._seen: dict[BufferName, int] = {}
        """Pieces of news ever counted of a buffer, as of the last look."""
        self._woken: dict[BufferName, tuple[float, int]] = {}
        """Time and number of the last wake, by buffer."""
        self._due: dict[BufferName, TimerHandle] = {}

    def __len__(self) -> int:
        return self._count

    async def wait(
        self,
        buffer: BufferName,
        wait_s: float,
        holder: str,
        woken: asyncio.Future[None] | None = None,
    ) -> None:
        """Return once the buffer's callers are woken, or *woken* is, or after `wait_s`.

        WatchersFullError: no place, or another caller took this one's; or the error of `turn_away`.
        """
        if self._count >= self._limit:
            self._make_room(holder)
        future = woken or asyncio.get_running_loop().create_future()
        self._of.setdefault(buffer, {})[future] = None
        self._of_holder.setdefault(holder, {})[future] = None
        self._count += 1
        timer = self._clock.call_at(self._clock.now() + wait_s, partial(_wake, future))
        try:
            await future
        finally:
            timer.cancel()
            del self._of[buffer][future]
            if not self._of[buffer]:
                del self._of[buffer]
            self._leave(holder, future)

    def _make_room(self, holder: str) -> None:
        largest = max(self._of_holder, key=lambda each: len(self._of_holder[each]))
        if len(self._of_holder[largest]) <= len(self._of_holder.get(holder, ())):
            raise WatchersFullError(self._limit)
        oldest = next(iter(self._of_holder[largest]))
        self._leave(largest, oldest)
        if not oldest.done():
            oldest.set_exception(WatchersFullError(self._limit))

    def _leave(self, holder: str, future: asyncio.Future[None]) -> None:
        of_holder = self._of_holder.get(holder, {})
        if future in of_holder:
            del of_holder[future]
            self._count -= 1
            if not of_holder:
                del self._of_holder[holder]

    def wake(self, buffer: BufferName) -> None:
        """Let the callers of a buffer look again."""
        for future in self._of.get(buffer, ()):
            _wake(future)

    def look_again(
        self, count: Callable[[BufferName], int], when_settled: Callable[[Callable[[], None]], None]
    ) -> None:
        """Let the callers of each buffer of which more is counted now look, once it is durable."""
        for buffer in self._of:
            if self._seen.get(buffer) != (counted := count(buffer)):
                self._seen[buffer] = counted
                when_settled(partial(self.wake_in_time, buffer))

    def is_gathering(self, buffer: BufferName) -> bool:
        """Return True if news is gathered: right after very many wakes, but never at the limit."""
        return self._count < self._limit and self._due_at(buffer) > self._clock.now()

    def wake_in_time(self, buffer: BufferName) -> None:
        """Let a buffer's callers look again: immediately if few or after a pause, else gathered."""
        if buffer in self._due:
            return
        due_at = self._due_at(buffer)
        if due_at > self._clock.now():
            self._due[buffer] = self._clock.call_at(due_at, partial(self._wake_due, buffer))
        else:
            self._wake_due(buffer)

    def forget(self, buffer: BufferName) -> None:
        """Wake the callers of a deleted buffer, and remember nothing of it."""
        self.wake(buffer)
        self._woken.pop(buffer, None)
        self._seen.pop(buffer, None)
        if (due := self._due.pop(buffer, None)) is not None:
            due.cancel()

    def _due_at(self, buffer: BufferName) -> float:
        woken_at, woken_count = self._woken.get(buffer, (-inf, 0))
        # Of those who were woken last many are not back yet.
        count = max(woken_count, len(self._of.get(buffer, ())))
        return woken_at + (0.0 if count <= FEW else min(GATHER_S_MAX, GATHER_S_PER_WATCHER * count))

    def _wake_due(self, buffer: BufferName) -> None:
        self._due.pop(buffer, None)
        if watchers := self._of.get(buffer):
            self._woken[buffer] = self._clock.now(), len(watchers)
            self.wake(buffer)

    def turn_away(self, error: Exception) -> None:
        """Fail all waiting callers with an error."""
        for watchers in self._of.values():
            for future in watchers:
                if not future.done():
                    future.set_exception(error)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
