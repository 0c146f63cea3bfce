"""A cancellation that a library swallows, raised all the same."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_cancellation() -> Iterator[None]:
    """Raise `asyncio.CancelledError` at the end of a block in which a cancellation was swallowed.

    Before Python 3.12 `asyncio.wait_for` returns its result instead, if that arrives in the same
    tick as the cancel, and redis-py sends every command through it: a job that is to end would
    then go on for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    swallowed = False
    try:
        yield
    except asyncio.CancelledError:
        raise
    except Exception:
        swallowed = task is not None and task.cancelling() > before
        if not swallowed:
            raise
    else:
        swallowed = task is not None and task.cancelling() > before
    if swallowed:
        raise asyncio.CancelledError
