"""The driver's clock, moved by the test; due callbacks run when it moves past them."""

from collections.abc import Callable


class ManualTimer:
    """One callback that is due."""

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class ManualTimers:
    """Implements `breadbox_server.base.clock.Clock`."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._timers: list[ManualTimer] = []

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(when, callback)
        self._timers.append(timer)
        return timer

    @property
    def live_count(self) -> int:
        """Timers that would still run."""
        return sum(not timer.is_cancelled for timer in self._timers)

    def advance_late(self, duration_s: float) -> None:
        """Let time pass while the loop is busy: what becomes due waits for the next `advance`."""
        self._now += duration_s

    def advance(self, duration_s: float) -> None:
        """Let time pass, running what becomes due in order."""
        end = self._now + duration_s
        while due := [
            timer for timer in self._timers if not timer.is_cancelled and timer.when <= end
        ]:
            first = min(due, key=lambda timer: timer.when)
            self._timers.remove(first)
            self._now = max(self._now, first.when)
            first.callback()
        self._timers = [timer for timer in self._timers if not timer.is_cancelled]
        self._now = end
