"""End tasks reliably, even if a library swallows one cancellation.

`asyncio.TaskGroup` cancels once and then waits without a limit. Before Python 3.12
`asyncio.wait_for`, with which redis-py sends commands, may swallow that cancellation.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Final

_log = logging.getLogger(__name__)

CANCEL_AGAIN_S: Final = 0.05
"""Seconds after which a cancelled task that still runs is cancelled again."""
END_S_MAX: Final = 5.0
"""Seconds that tasks may take to end; after that they are logged and left running."""


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], *, within_s: float = END_S_MAX) -> None:
    """Cancel tasks repeatedly until all have ended, for at most `within_s` seconds.

    Their results and errors stay with them. A cancellation of the caller is raised at the end.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + within_s
    left = {task for task in tasks if not task.done()}
    was_cancelled = False
    while left and loop.time() < give_up_at:
        for task in left:
            task.cancel()
        try:
            _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
        except asyncio.CancelledError:
            # The tasks are already being ended, which the canceller wants.
            was_cancelled = True
            left = {task for task in left if not task.done()}
    for task in left:
        _log.error("%s did not end within %.1f s, and is left behind", task.get_name(), within_s)
    if was_cancelled:
        raise asyncio.CancelledError
