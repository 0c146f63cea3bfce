"""The one clock of the server: instants that go on over restarts and never go back."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


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
    """The event loop's monotonic clock, shifted once so that it starts at the wall clock.

    The shift lets deadlines that were journalled by one process be read by the next. Wall-clock
    changes while the process runs have no effect.

    Args:
        loop: The loop that runs the driver.
        not_before: An instant that an earlier process reached; the clock starts no earlier, even
            if the wall clock was set back in between.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, not_before: float = 0.0) -> None:
        self._loop = loop
        self._offset_s = max(time.time(), not_before) - loop.time()

    def now(self) -> float:
        """Seconds since the epoch, as the wall clock stood when this clock was made."""
        return self._loop.time() + self._offset_s

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Call once, at or soon after `when`."""
        return self._loop.call_at(when - self._offset_s, callback)
