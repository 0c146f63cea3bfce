"""Run jobs in tasks, ahead of the caller; `breadbox.transport.prefetch` uses threads."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

from breadbox.shared.tasks import end_tasks
from breadbox.transport.prefetch import move_completed_to_front

Job = TypeVar("Job")
Result = TypeVar("Result")


async def prefetched(
    jobs: Iterable[Job],
    run: Callable[[Job], Awaitable[Result]],
    *,
    at_once: int,
    depth: int,
    in_order: bool,
) -> AsyncGenerator[Result, None]:
    """Run jobs in tasks ahead of the caller, as `transport.prefetch` does; closing cancels all."""
    if depth == 0:
        for job in jobs:
            yield await run(job)
        return
    remaining = iter(jobs)
    # Not in a group: a generator may be left from another task than it was entered from.
    pending: deque[asyncio.Task[Result]] = deque()
    turns = asyncio.Semaphore(at_once)
    loop = asyncio.get_running_loop()

    async def run_in_turn(job: Job) -> Result:
        async with turns:
            return await run(job)

    def top_up() -> None:
        for job in itertools.islice(remaining, depth - len(pending)):
            pending.append(loop.create_task(run_in_turn(job)))

    try:
        top_up()
        while pending:
            if in_order:
                await asyncio.wait([pending[0]])
            else:
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                move_completed_to_front(pending)
            # No variable has the result when it is yielded, so that nothing keeps a batch alive.
            ready = [pending.popleft()]
            top_up()
            yield ready.pop().result()
    finally:
        try:
            await end_tasks(pending)
        finally:
            for task in pending:
                if task.done() and not task.cancelled():
                    task.exception()  # Read, or asyncio would log it as never retrieved.
