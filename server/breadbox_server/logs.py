"""What the server says of an outage, in few lines."""

import logging
import time
from collections.abc import Callable
from typing import Final

OUTAGE_PERIOD_S: Final = 30.0
"""Seconds between two lines about an outage that goes on."""


class OutageLog:
    """Tells of an outage once when it begins, then every `OUTAGE_PERIOD_S`, and when it is over.

    For work that is tried again several times a second: a line for every attempt would bury the
    rest of the log.

    Args:
        log: Where the lines go: warnings, and at the end an info.
        what: The work that does not succeed, such as "deleting payloads".
        now: Seconds on a clock that never goes back.
    """

    def __init__(
        self, log: logging.Logger, what: str, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._what = what
        self._now = now
        self._began_at: float | None = None
        self._told_at = 0.0

    def failed(self, error: Exception) -> None:
        """Note an attempt that failed and will be made again."""
        now = self._now()
        if self._began_at is None:
            self._began_at = self._told_at = now
            self._log.warning("%s failed, trying again: %s", self._what, error)
        elif now - self._told_at >= OUTAGE_PERIOD_S:
            self._told_at = now
            away_s = now - self._began_at
            self._log.warning("%s has failed for %.0f s: %s", self._what, away_s, error)

    def succeeded(self) -> None:
        """Note an attempt that succeeded."""
        if self._began_at is not None:
            away_s = self._now() - self._began_at
            self._began_at = None
            self._log.info("%s works again after %.1f s", self._what, away_s)
