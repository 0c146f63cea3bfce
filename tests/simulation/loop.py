"""An event loop whose time is a number: nothing sleeps, and nothing but the seed decides.

What runs in it belongs to *processes*, or to the world around them. A process can be stopped
between any two of its steps, as SIGSTOP does, and go on later; the world goes on meanwhile.
"""

import asyncio
import contextvars
import heapq
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

_PROCESS: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


class SimulationStuckError(Exception):
    """Nothing is ready and no timer is set: somebody waits for what will never happen."""


class Process:
    """Tasks that stop and go on together, with everything that they start."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._context.run(_PROCESS.set, self)
        self._parked: list[asyncio.Handle] = []
        self._steps_left: int | None = None
        self.is_stopped = False
        self.stopped_at = self.woken_at = 0.0

    def start(self, work: Coroutine[Any, Any, ResultT]) -> "asyncio.Task[ResultT]":
        """Run something as a part of this process."""
        loop = asyncio.get_running_loop()
        return loop.create_task(work, context=self._context.copy())

    def stop_after(self, steps: int) -> None:
        """Stop once so many more steps were taken: between any two of them, that is."""
        self._steps_left = steps

    def wake(self) -> None:
        """Go on, with everything that became ready meanwhile."""
        self._steps_left = None
        if self.is_stopped:
            self.is_stopped = False
            loop = asyncio.get_running_loop()
            self.woken_at = loop.time()
            loop._ready.extend(self._parked)  # type: ignore[attr-defined]  # noqa: SLF001 - asyncio has no public one
            self._parked.clear()

    def may_step(self, handle: asyncio.Handle) -> bool:
        """Whether a step may be taken now; else it is, later."""
        if self._steps_left is not None and not self.is_stopped:
            self._steps_left -= 1
            if self._steps_left < 0:
                self.is_stopped = True
                self.stopped_at = asyncio.get_running_loop().time()
        if self.is_stopped:
            self._parked.append(handle)
        return not self.is_stopped


class _Handle(asyncio.Handle):
    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(_PROCESS)  # type: ignore[attr-defined]
        if process is None or process.may_step(self):
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(_PROCESS)  # type: ignore[attr-defined]
        if process is None or process.may_step(self):
            super()._run()


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

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]  # noqa: SLF001 - likewise
        return timer

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
    """Implements `breadbox_server.base.clock.Clock` on the loop's simulated time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.time()

    def call_at(self, when: float, callback: Any) -> asyncio.TimerHandle:
        return self._loop.call_at(when, callback)
