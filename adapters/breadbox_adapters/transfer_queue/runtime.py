"""One event loop for all calls of a process, in a thread of its own, with the client.

So a function that blocks and one that is awaited are the same coroutine, and no gRPC call ever runs
on a caller's event loop.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import breadbox
import breadbox.aio
from breadbox.environment import settings_from_environment
from breadbox.model.errors import BufferExistsError
from breadbox_adapters.transfer_queue.rows import Rows

P = ParamSpec("P")
R = TypeVar("R")

BUFFER: Final = "transfer_queue"
"""Buffer and session, unless `BREADBOX_BUFFER` names another."""
ROWS_MAX: Final = 1_000_000
"""Rows of a new buffer, at most."""
RECONNECT_S: Final = 300.0
"""A trainer had better wait for a restarted server than end."""


class Runtime:
    """Starts loop and client when they are first needed, also in a forked child."""

    def __init__(self) -> None:
        self._begin()
        # A thread that the child does not have may have held the lock.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rows: asyncio.Task[Rows] | None = None

    def start(self, coroutine: Coroutine[Any, Any, R]) -> "Future[R]":
        """Run a coroutine on the loop."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def rows(self) -> Rows:
        """Return the rows, connected; on the loop."""
        if self._rows is None or (self._rows.done() and self._rows.exception()):
            self._rows = asyncio.get_running_loop().create_task(_connected())
        return await asyncio.shield(self._rows)

    async def close(self) -> None:
        """Close the client; on the loop. The next call connects again."""
        task, self._rows = self._rows, None
        if task is not None:
            await asyncio.wait([task])
            if not task.exception():
                await task.result().client.close()


async def _connected() -> Rows:
    buffer = os.environ.get("BREADBOX_BUFFER") or BUFFER
    settings = settings_from_environment(None, buffer)
    client = await breadbox.aio.connect(reconnect_s=RECONNECT_S, **settings)
    config = breadbox.BufferConfig(
        assembly=breadbox.AssemblyPolicy.GROUPS, fragments_per_chunk=0, workers_max=ROWS_MAX
    )
    try:
        await client.create_buffer(buffer, config)
    except BufferExistsError:
        there = (await client.get_buffer(buffer)).config
        if (there.assembly, there.fragments_per_chunk) != (breadbox.AssemblyPolicy.GROUPS, 0):
            await client.close()
            raise ValueError(f"buffer {buffer!r} keeps no rows: name another one") from None
    model = await client.watch_model()
    if model is None or not model.session_id:  # Another session's rows would go with it.
        await client.start_session(BUFFER)
    return Rows(client)


runtime = Runtime()


def both(
    coroutine: Callable[P, Coroutine[Any, Any, R]],
) -> tuple[Callable[P, R], Callable[P, Coroutine[Any, Any, R]]]:
    """Make a function that blocks, and one that is awaited on any event loop."""

    @wraps(coroutine)
    def blocking(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = runtime.start(coroutine(*args, **kwargs)).result()
        return result

    @wraps(coroutine)
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.wrap_future(runtime.start(coroutine(*args, **kwargs)))

    return blocking, awaited
