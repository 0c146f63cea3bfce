"""An event loop whose time is a number: nothing sleeps, and nothing but the seed decides."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class SimulationStuckError(Exception):
    """Nothing is ready and no timer is set: somebody waits for what will never happen."""


class _NoSelector(selectors.SelectSelector):
    """Instead of waiting, lets the loop's time pass."""

    loop: "SimulatedLoop"

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise SimulationStuckError
        self.loop.pass_time(max(0.0, timeout))
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in simulated time, without sockets, threads or signals."""

    def __init__(self) -> None:
        self._simulated_now = 1000.0
        selector = _NoSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self._simulated_now

    def pass_time(self, seconds: float) -> None:
        self._simulated_now += seconds

    def _make_self_pipe(self) -> None:
        """Nobody wakes this loop from another thread."""

    def _close_self_pipe(self) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run_simulated(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine to its end in simulated time."""
    loop = SimulatedLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


class SimulatedClock:
    """Implements `breadbox_server.clock.Clock` on the loop's simulated time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()

    def call_at(self, when: float, callback: Any) -> asyncio.TimerHandle:
        return self._loop.call_at(when, callback)
