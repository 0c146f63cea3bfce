"""Run jobs in threads, ahead of the caller; `breadbox.transport.aio.prefetch` uses tasks."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from breadbox.model.errors import ClosedError

Job = TypeVar("Job")
Result = TypeVar("Result")


def prefetched(
    jobs: Iterable[Job], run: Callable[[Job], Result], *, at_once: int, depth: int, in_order: bool
) -> Generator[Result, None, None]:
    """Run jobs in threads, ahead of the caller that iterates over their results.

    At most `depth` results are ready or in progress beside the one yielded; 0, or a single job,
    runs in the iterating thread. A job's error ends the generator. `close()` cancels jobs that have
    not begun and waits for those that have. Raises ClosedError while the process exits, and in a
    process that was forked since, which has no such threads.
    """
    if depth == 0 or (isinstance(jobs, Sized) and len(jobs) == 1):
        yield from map(run, jobs)
        return
    remaining, process_id = iter(jobs), os.getpid()
    pending: deque[Future[Result]] = deque()
    executor = ThreadPoolExecutor(max_workers=min(at_once, depth), thread_name_prefix="loader")

    def top_up() -> None:
        for job in itertools.islice(remaining, depth - len(pending)):
            pending.append(_submit(executor, run, job))

    try:
        top_up()
        while pending:
            if not in_order:
                wait(pending, return_when=FIRST_COMPLETED)
                move_completed_to_front(pending)
            # No variable has the result when it is yielded, so that nothing keeps a batch alive.
            ready = [pending.popleft()]
            wait(ready)
            top_up()
            yield ready.pop().result()
            if os.getpid() != process_id:
                raise ClosedError("an iteration continues only in the process that began it")
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _submit(executor: ThreadPoolExecutor, run: Callable[[Job], Result], job: Job) -> Future[Result]:
    try:
        return executor.submit(run, job)
    except RuntimeError as error:
        # Only its owner closes the executor, and the interpreter at its exit, before it calls
        # anything that could have ended the iterating thread.
        if "shutdown" not in str(error):
            raise
        raise ClosedError("the process is ending") from error


def move_completed_to_front(pending: deque[Any]) -> None:
    """Move the first of some futures or tasks that is done to the front; one has to be."""
    position = next(i for i, future in enumerate(pending) if future.done())
    completed = pending[position]
    del pending[position]
    pending.appendleft(completed)
