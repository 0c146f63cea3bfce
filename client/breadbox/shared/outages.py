"""Log outages in few lines."""

import logging
import time
from collections.abc import Callable
from math import inf
from threading import Lock
from typing import Final

_log = logging.getLogger(__name__)

OUTAGE_PERIOD_S: Final = 30.0
"""Seconds between two lines about an outage."""


class OutageLog:
    """Log an outage at its start, every `OUTAGE_PERIOD_S`, and at its end. Thread-safe."""

    def __init__(
        self, log: logging.Logger, what: str, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._what = what
        self._now = now
        self._lock = Lock()
        self._began_at: float | None = None
        self._logged_at = self._failed_at = 0.0
        self._error: Exception | None = None

    @property
    def words(self) -> str:
        """What fails now, for how long, and why; or empty."""
        with self._lock:
            began_at, error = self._began_at, self._error
        if began_at is None:
            return ""
        return f"{self._what} has failed for {self._now() - began_at:.0f} s: {error}"

    def failing(self, within_s: float = inf) -> Exception | None:
        """Return the latest attempt's error, or None after a success or `within_s` seconds."""
        with self._lock:
            is_old = self._now() - self._failed_at > within_s
            return None if self._began_at is None or is_old else self._error

    def failed(self, error: Exception) -> None:
        """Record a failed attempt that will be repeated."""
        now = self._now()
        with self._lock:
            self._error, self._failed_at = error, now
            began_at = self._began_at
            if began_at is None:
                self._began_at = now
            elif now - self._logged_at < OUTAGE_PERIOD_S:
                return
            self._logged_at = now
        if began_at is None:
            self._log.warning("%s failed, trying again: %s", self._what, error)
        else:
            self._log.warning("%s has failed for %.0f s: %s", self._what, now - began_at, error)

    def succeeded(self) -> None:
        """Record a successful attempt."""
        if self._began_at is None:
            return
        with self._lock:
            began_at, self._began_at = self._began_at, None
        if began_at is not None:
            away_s = self._now() - began_at
            # A warning like the failure, so that a log which shows one shows the other.
            self._log.warning("%s works again after %.1f s", self._what, away_s)


class Outages:
    """The outages of one client, by the activity that they stop. Thread-safe."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._logs: dict[str, OutageLog] = {}

    def failed(self, what: str, error: Exception) -> None:
        """Record a failed attempt that will be repeated; *what* is one of a small set."""
        self._logs.setdefault(what, OutageLog(_log, what, now=self._now)).failed(error)

    def succeeded(self, what: str) -> None:
        """Record an attempt that succeeded or was answered."""
        if what in self._logs:
            self._logs[what].succeeded()

    @property
    def words(self) -> str:
        """What fails now and is retried, or empty."""
        return "; ".join(filter(None, [each.words for each in list(self._logs.values())]))
