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
    """The event loop's monotonic clock, shifted once so that deadlines outlive the process.

    The shift lets deadlines that were journalled by one process be read by the next. The wall
    clock only says where the first process of all begins: set forward or back, then or later, it
    ends no lease.

    Args:
        loop: The loop that runs the driver.
        starts_at: The latest instant that an earlier process reached, where this one goes on: time
            stands still while no server runs. 0: there was none.
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
