"""The one poller of the tests: for what happens elsewhere and tells nobody."""

import asyncio
import time
from collections.abc import Callable

_POLL_S = 0.005


async def eventually(
    condition: Callable[[], bool], what: str = "the condition", *, within_s: float = 30.0
) -> None:
    """Return as soon as `condition` holds; fail after `within_s`."""
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, f"{what} did not hold within {within_s} s"
        await asyncio.sleep(_POLL_S)


def eventually_sync(
    condition: Callable[[], bool], what: str = "the condition", *, within_s: float = 30.0
) -> None:
    """`eventually` for tests without a loop."""
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, f"{what} did not hold within {within_s} s"
        time.sleep(_POLL_S)
