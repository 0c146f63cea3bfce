"""Errors that nothing foresaw: logged with their traceback, and survived where that is safe."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final

from breadbox.shared.throttle import Throttle
from breadbox_server.base.errors import BugError, StartError

log = logging.getLogger(__name__)

PAUSE_S: Final = 1.0
"""Seconds before a job that failed begins again; doubled by each failure in a row,"""
PAUSE_S_MAX: Final = 30.0
"""up to this many, after which it counts as one that runs."""

_told: Final = Throttle(monotonic, PAUSE_S_MAX)


def _tell(what: str, error: Exception) -> None:
    words = _told.words((what, type(error)))
    if words is not None:
        log.error(
            "%s failed unforeseen, which is a bug%s; trying again", what, words, exc_info=error
        )


@contextmanager
def unforeseen_as(
    outage: Callable[[str], Exception],
    known: tuple[type[Exception], ...],
    what: str,
) -> Iterator[None]:
    """Raise an outage instead of what is neither known nor a server's reason to end.

    A caller of a store, or of a journal, tries again after an outage: whatever a driver raises.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (BugError, StartError, *known)):
            raise
        _tell(what, error)
        raise outage(f"{what} failed: {error!r}") from error


async def run_on(job: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
    """Run a job that looks again and again; begin it anew if it fails, after a growing pause."""
    pause_s = PAUSE_S
    while True:
        began_at = monotonic()
        try:
            await job()
        except Exception as error:  # noqa: BLE001 - it is logged, and the job begins anew
            _tell(what, error)
        else:
            return
        if monotonic() - began_at >= PAUSE_S_MAX:
            pause_s = PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)
