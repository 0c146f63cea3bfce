"""The loader of `breadbox.loader` on the loop: the same plan and options, tasks, not threads.

Its invariants L1 to L3 hold here too, but for one thing: a load that has begun when its iteration
is left goes on in its thread, unseen, and nobody waits for it.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from breadbox.loader import LOAD_ERRORS, LoaderOptions, LoadPlan
from breadbox.side_stream import SideStream
from breadbox.types import FragmentReference

Job = TypeVar("Job")
Loaded = TypeVar("Loaded")


class AsyncFragmentLoader(Generic[Loaded]):
    """Loads lists of references as batches, ahead of their use; see `FragmentLoader`.

    Args:
        load: Loads some references as one batch, in their order; awaited from several tasks.
        options: How; `threads` is how many loads are under way at a time.
        side_stream: The CUDA stream on which `load` makes batches; None: it does so on none.
    """

    def __init__(
        self,
        load: Callable[[Sequence[FragmentReference]], Awaitable[Loaded]],
        options: LoaderOptions | None = None,
        *,
        side_stream: SideStream | None = None,
    ) -> None:
        self._load = load
        self._side_stream = side_stream
        self._plan: LoadPlan[Loaded] = LoadPlan(options or LoaderOptions())

    @property
    def skipped(self) -> list[FragmentReference]:
        """References that could not be loaded, over the loader's life; only with "skip"."""
        return self._plan.skipped

    def batches(
        self, references: Sequence[FragmentReference], batch_size: int
    ) -> AsyncGenerator[Loaded, None]:
        """Load *references* in batches; arguments and errors as `FragmentLoader.batches`."""
        options = self._plan.options
        loaded = run_ahead(
            self._plan.jobs(references, batch_size),
            self._load_job,
            tasks=options.threads,
            depth=options.prefetch_batches,
            in_order=options.order != "completed",
        )
        return self._handed_out(loaded)

    async def _handed_out(
        self, groups: AsyncGenerator[list[Loaded], None]
    ) -> AsyncGenerator[Loaded, None]:
        """Hand out what is in the lists, and keep nothing of it."""
        async with aclosing(groups):
            async for group in groups:
                while group:
                    if self._side_stream is not None:
                        self._side_stream.hand_over(group[-1])
                    yield group.pop()

    async def _load_job(self, job: Sequence[FragmentReference]) -> list[Loaded]:
        """Carry out the plan for one batch."""
        asking = self._plan.loaded(job)
        try:
            wanted = next(asking)
            while True:
                try:
                    loaded = await self._load(wanted)
                except LOAD_ERRORS as error:
                    wanted = asking.throw(error)
                else:
                    wanted = asking.send(loaded)
        except StopIteration as stop:
            batches: list[Loaded] = stop.value
            return batches
        finally:
            asking.close()


async def run_ahead(
    jobs: Iterable[Job],
    run: Callable[[Job], Awaitable[Loaded]],
    *,
    tasks: int,
    depth: int,
    in_order: bool,
) -> AsyncGenerator[Loaded, None]:
    """Run jobs in tasks, ahead of whoever iterates over their results.

    Args:
        jobs: Taken one by one, no earlier than needed.
        run: Called once per job.
        tasks: At most this many jobs run at a time.
        depth: At most this many results are ready or being made beside the one handed out; 0 runs
            each job when its result is asked for.
        in_order: Results in the order of jobs; else as they complete.

    Returns:
        A generator, which raises what a job raised in place of its result and is over then.
        Closing it, or cancelling whoever waits for it, cancels all jobs that have not ended.
    """
    if depth == 0:
        for job in jobs:
            yield await run(job)
        return
    remaining = iter(jobs)
    # Not in a group: a generator may be left from another task than it was entered from.
    pending: deque[asyncio.Task[Loaded]] = deque()
    turns = asyncio.Semaphore(tasks)
    loop = asyncio.get_running_loop()

    async def run_in_turn(job: Job) -> Loaded:
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
                _move_completed_to_front(pending)
            # In no variable when it is handed out, so that nothing here keeps a batch alive.
            ready = [pending.popleft()]
            top_up()
            yield ready.pop().result()
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        for task in pending:
            if not task.cancelled():
                task.exception()  # Nobody's business any more; unasked for, it would be logged.


def _move_completed_to_front(pending: deque[asyncio.Task[Loaded]]) -> None:
    position = next(i for i, task in enumerate(pending) if task.done())
    completed = pending[position]
    del pending[position]
    pending.appendleft(completed)
