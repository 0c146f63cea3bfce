"""The one clock of the server: instants that go on over restarts and never go back."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

BEAT_S: Final = 0.25


class TimerHandle(Protocol):
    """A callback that is due later."""

    def cancel(self) -> None:
        """Forget the callback; harmless when it has run."""


class Clock(Protocol):
    """Where the driver gets the time and its wake-ups from; tests have a manual one."""

    def now(self) -> float:
        """Seconds; never less than before."""

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Call once, at or soon after `when`, on the driver's loop."""


class LoopClock:
    """The loop's monotonic clock, shifted to go on at `starts_at`, where the last process ended.

    Setting the wall clock ends no lease: it only sets the first process's start.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, starts_at: float = 0.0) -> None:
        self._loop = loop
        self._offset_s = (starts_at or time.time()) - loop.time()

    def now(self) -> float:
        """Seconds since the epoch, less those for which no server ran."""
        return self._loop.time() + self._offset_s

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Call once, at or soon after `when`."""
        return self._loop.call_at(when - self._offset_s, callback)


class LoopBeat:
    """How late the event loop is, for threads: what the loop itself says comes late, too."""

    def __init__(self) -> None:
        self._due_at = time.monotonic() + BEAT_S

    @property
    def lag_s(self) -> float:
        """Seconds for which the loop has held up what was due."""
        return max(0.0, time.monotonic() - self._due_at)

    async def run(self) -> None:
        """Beat, for ever."""
        while True:
            self._due_at = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
