"""Jobs that run as long as the server does and end with it; see `breadbox.shared.tasks`."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Self

from breadbox.shared.tasks import end_tasks

log = logging.getLogger(__name__)

CLOSE_S_MAX: Final = 2.0
"""Seconds that closing each of the connections to store and journal may take."""


async def with_time_limit(
    step: Callable[[], Coroutine[Any, Any, Any]], within_s: float, what: str
) -> None:
    """Take one step of an end for at most `within_s` seconds, then go on without it, and say so."""
    task = asyncio.get_running_loop().create_task(step())
    try:
        done, _ = await asyncio.wait({task}, timeout=within_s)
    finally:
        # Not awaited: it had its time, and what it holds ends with the process.
        task.cancel()
    if done:
        task.result()
    else:
        log.warning("%s took longer than %.0f s; going on without", what, within_s)


class Jobs:
    """A task group that cancels its remaining tasks, repeatedly until all end, at its exit."""

    def __init__(self, on_failure: Callable[[BaseException], None] = lambda _: None) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self._errors: list[BaseException] = []
        self._block: asyncio.Task[Any] | None = None
        self._is_ending = False
        self._has_cancelled_block = False

    def start(self, job: Coroutine[Any, Any, None]) -> None:
        """Run a job from now on."""
        task = asyncio.get_running_loop().create_task(job, name=getattr(job, "__qualname__", None))
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    async def wait(self) -> None:
        """Return when every job has ended; a job that fails cancels this wait."""
        while left := {task for task in self._tasks if not task.done()}:
            await asyncio.wait(left)

    def release_block(self) -> None:
        """From now on a job that fails no longer cancels the block, which is about to end."""
        self._is_ending = True

    async def end(self) -> None:
        """Cancel all jobs until they are done; see `end_tasks`. Idempotent."""
        self._is_ending = True
        await end_tasks(self._tasks)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        self._errors.append(error)
        if len(self._errors) > 1:
            return
        self._on_failure(error)
        if not self._is_ending and self._block is not None:
            self._has_cancelled_block = True
            self._block.cancel()

    async def __aenter__(self) -> Self:
        self._block = asyncio.current_task()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is GeneratorExit:
            return  # The loop is gone, and with it everything that could be ended or awaited.
        try:
            await self.end()
        finally:
            if self._has_cancelled_block and self._block is not None:
                self._block.uncancel()
            if self._errors:
                errors = list(self._errors)
                if error is not None and not isinstance(error, asyncio.CancelledError):
                    errors.insert(0, error)
                raise BaseExceptionGroup("jobs of the server failed", errors)
