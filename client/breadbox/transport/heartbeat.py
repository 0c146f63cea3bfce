"""Show a container's health check that a worker's or a learner's loop is running.

`python -m breadbox.transport.heartbeat` exits with 0 while the last `Heartbeat.beat` is younger
than BREADBOX_HEARTBEAT_S (default 120 s, above the longest iteration), else with 1.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

FILE_VARIABLE = "BREADBOX_HEARTBEAT_FILE"
AGE_VARIABLE = "BREADBOX_HEARTBEAT_S"
AGE_S_MAX = 120.0
PERIOD_S = 1.0
"""Seconds between two writes of the file; beats in between only read the clock."""


class Heartbeat:
    """Touch a file with each iteration of a loop; `path` None: do nothing. For one thread."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._next_at = float("-inf")

    def beat(self) -> None:
        """Touch the file, at most every `PERIOD_S`. If that fails, the next beat retries."""
        if self._path is None or (now := self._clock()) < self._next_at:
            return
        self._next_at = now + PERIOD_S
        with contextlib.suppress(OSError):  # The health check notices an old file.
            self._path.touch()


def from_environment(environment: Mapping[str, str] = os.environ) -> Heartbeat:
    """Return the heartbeat that the environment asks for, or one that does nothing."""
    path = environment.get(FILE_VARIABLE)
    return Heartbeat(Path(path) if path else None)


def check(environment: Mapping[str, str], now: float) -> str:
    """Return why the loop does not seem to run, or empty; `now` is in seconds since 1970."""
    path = environment.get(FILE_VARIABLE)
    if not path:
        return f"{FILE_VARIABLE} is not set"
    age_s_max = float(environment.get(AGE_VARIABLE, AGE_S_MAX))
    try:
        age_s = now - Path(path).stat().st_mtime
    except OSError as error:
        return f"no heartbeat: {error.strerror}"
    return "" if age_s <= age_s_max else f"the last heartbeat was {age_s:.0f} s ago"


def main() -> int:
    """Check once; return 0 if the loop runs."""
    problem = check(os.environ, time.time())
    if problem:
        sys.stderr.write(problem + "\n")
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
