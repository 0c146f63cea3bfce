"""Gather what comes within a moment, so that all of it shares one trip to a store."""

import asyncio
from typing import Final

PASSES: Final = 4
"""Passes of the loop without an arrival after which no more is expected: gRPC hands out one call
at a time, and takes a few passes from one to the next."""
GATHER_S: Final = 0.005
"""Seconds after which a trip begins all the same."""


class Gathering:
    """Waits while more arrives. For one task at a time, on the loop's thread."""

    def __init__(self) -> None:
        self._passes_left = 0
        self.was_shared = True
        """Whether the latest trip served several; the owner says so."""

    def arrived(self) -> None:
        """Take note of an arrival, which others may follow."""
        self._passes_left = PASSES

    async def wait(self) -> None:
        """Return once nothing has arrived for `PASSES`, or for one pass after a trip for one."""
        now = asyncio.get_running_loop().time
        ends_at = now() + GATHER_S
        self._passes_left = PASSES if self.was_shared else 1
        while self._passes_left and now() < ends_at:
            self._passes_left -= 1
            await asyncio.sleep(0)
