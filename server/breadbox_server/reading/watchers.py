"""Callers that wait for news of a buffer: of its model, or of its chunks."""

import asyncio
from collections.abc import Iterable
from functools import partial
from math import inf
from typing import Final

from breadbox_server.base.clock import Clock, TimerHandle
from breadbox_server.base.errors import WatchersFullError
from breadbox_server.core.model.ids import BufferName

FEW: Final = 8
"""So many are woken for each piece of news."""
GATHER_S_PER_WATCHER: Final = 0.000_5
"""Seconds between two times that more are woken, for each of them: about twice what it costs to
answer one, so that there is time left for what makes the news."""
GATHER_S_MAX: Final = 0.025
"""However many there are."""


class Watchers:
    """Those who wait, by buffer. On one event loop.

    Args:
        clock: Ends their waits.
        limit: How many may wait at a time, for all buffers together. The next takes the place of
            who has waited for longest of the holder that has the most, unless that is its own.
    """

    def __init__(self, clock: Clock, limit: int) -> None:
        self._clock = clock
        self._limit = limit
        self._of: dict[BufferName, set[asyncio.Future[None]]] = {}
        self._of_holder: dict[str, dict[asyncio.Future[None], None]] = {}
        """By whose share they count in, who has waited for longest first."""
        self._count = 0
        self._woken: dict[BufferName, tuple[float, int]] = {}
        """When those of a buffer were woken last, and how many they were."""
        self._due: dict[BufferName, TimerHandle] = {}
        """Wakes that are put off."""

    def __len__(self) -> int:
        """Count them."""
        return self._count

    def buffers(self) -> Iterable[BufferName]:
        """Those that somebody waits for news of."""
        return self._of

    async def wait(self, buffer: BufferName, wait_s: float, holder: str) -> None:
        """Return once the buffer's are woken, or after `wait_s`.

        Args:
            buffer: Of which there may be news.
            wait_s: Seconds.
            holder: In whose share of the limit it counts; see `Caller.holder`.

        Raises:
            WatchersFullError: As many wait as may, and no other holder has more of them; or as many
                did, and another's place was taken by one whose holder has fewer.
            Exception: What they were turned away with.
        """
        if self._count >= self._limit:
            self._make_room(holder)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._of.setdefault(buffer, set()).add(future)
        self._of_holder.setdefault(holder, {})[future] = None
        self._count += 1
        timer = self._clock.call_at(self._clock.now() + wait_s, partial(_wake, future))
        try:
            await future
        finally:
            timer.cancel()
            self._of[buffer].discard(future)
            if not self._of[buffer]:
                del self._of[buffer]
            self._leave(holder, future)

    def _make_room(self, holder: str) -> None:
        """Turn away who has waited for longest of the holder that has the most."""
        largest = max(self._of_holder, key=lambda each: len(self._of_holder[each]))
        if len(self._of_holder[largest]) <= len(self._of_holder.get(holder, ())):
            raise WatchersFullError(self._limit)
        oldest = next(iter(self._of_holder[largest]))
        self._leave(largest, oldest)
        if not oldest.done():
            oldest.set_exception(WatchersFullError(self._limit))

    def _leave(self, holder: str, future: asyncio.Future[None]) -> None:
        """Count one no more; idempotent."""
        of_holder = self._of_holder.get(holder, {})
        if future in of_holder:
            del of_holder[future]
            self._count -= 1
            if not of_holder:
                del self._of_holder[holder]

    def wake(self, buffer: BufferName) -> None:
        """Let those of a buffer look again."""
        for future in self._of.get(buffer, ()):
            _wake(future)

    def is_gathering(self, buffer: BufferName) -> bool:
        """Whether news that comes now is told a little later, so that more comes together.

        So it is right after very many were told; never when as many wait as may.
        """
        return self._count < self._limit and self._due_at(buffer) > self._clock.now()

    def wake_in_time(self, buffer: BufferName) -> None:
        """Let those of a buffer look again: at once, or when it has gathered news for long enough.

        Few are woken at once, and so is everybody where there were no news a moment ago.
        """
        if buffer in self._due:
            return
        due_at = self._due_at(buffer)
        if due_at > self._clock.now():
            self._due[buffer] = self._clock.call_at(due_at, partial(self._wake_due, buffer))
        else:
            self._wake_due(buffer)

    def forget(self, buffer: BufferName) -> None:
        """Let those look again of a buffer that is no more, and remember nothing of it."""
        self.wake(buffer)
        self._woken.pop(buffer, None)
        if (due := self._due.pop(buffer, None)) is not None:
            due.cancel()

    def _due_at(self, buffer: BufferName) -> float:
        """From when on those of a buffer may be woken again."""
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
        """Fail all of them."""
        for watchers in self._of.values():
            for future in watchers:
                if not future.done():
                    future.set_exception(error)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
