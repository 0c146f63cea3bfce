"""Runs jobs in threads, ahead of whoever wants the results; in tasks `breadbox.aio.ahead` does."""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sized
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from breadbox.errors import ClosedError

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_ahead(
    jobs: Iterable[Job],
    run: Callable[[Job], Result],
    *,
    at_once: int,
    depth: int,
    in_order: bool,
) -> Generator[Result, None, None]:
    """Run jobs in threads, ahead of whoever iterates over their results.

    Args:
        jobs: Taken one by one, from the iterating thread, no earlier than needed.
        run: Called once per job.
        at_once: At most this many jobs run at a time.
        depth: At most this many results are ready or being made beside the one handed out; 0 runs
            each job when its result is asked for, in the iterating thread. There, too, runs a job
            that is known to be the only one: nothing could be ahead of it.
        in_order: Results in the order of jobs; else as they complete.

    Returns:
        A generator, which raises what a job raised in place of its result and is over then. Its
        `close()`, which leaving a `for` loop calls, cancels jobs that have not begun and waits for
        those that have.

    Raises:
        ClosedError: The process is ending, and lets no thread begin another job.
    """
    if depth == 0 or (isinstance(jobs, Sized) and len(jobs) == 1):
        yield from map(run, jobs)
        return
    remaining = iter(jobs)
    pending: deque[Future[Result]] = deque()
    executor = ThreadPoolExecutor(max_workers=min(at_once, depth), thread_name_prefix="loader")

    def top_up() -> None:
        for job in itertools.islice(remaining, depth - len(pending)):
            pending.append(_submit(executor, run, job))

    try:
        top_up()
        while pending:
            if not in_order:
                _move_completed_to_front(pending)
            # In no variable when it is handed out, so that nothing here keeps a batch alive.
            ready = [pending.popleft()]
            wait(ready)
            top_up()
            yield ready.pop().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _submit(executor: ThreadPoolExecutor, run: Callable[[Job], Result], job: Job) -> Future[Result]:
    try:
        return executor.submit(run, job)
    except RuntimeError as error:
        # The executor is closed by nobody but its owner, and by the interpreter as it ends, before
        # it calls anything that could have ended the iterating thread.
        if "shutdown" not in str(error):
            raise
        raise ClosedError("the process is ending") from error


def _move_completed_to_front(pending: deque[Future[Result]]) -> None:
    """Wait until one is done and put the first that is at the front."""
    wait(pending, return_when=FIRST_COMPLETED)
    position = next(i for i, future in enumerate(pending) if future.done())
    completed = pending[position]
    del pending[position]
    pending.appendleft(completed)
