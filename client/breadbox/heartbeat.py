"""Show that a worker's or a learner's loop still turns, to whoever watches its container.

The loop calls `Heartbeat.beat`; the image's health check runs `python -m breadbox.heartbeat`. That
ends with 0 while the last beat is younger than BREADBOX_HEARTBEAT_S (default 120 s: above the
longest turn, such as an update of a large policy), else with 1 and a line that says how old it is.
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
"""Beats closer together than this cost nothing but a look at the clock."""


class Heartbeat:
    """Touches a file as the loop turns. One thread at a time.

    Args:
        path: The file; None: beats go nowhere.
        clock: Seconds that never go back.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._next_at = float("-inf")

    def beat(self) -> None:
        """Say that the loop turns. A file that cannot be written keeps its age; tried again."""
        if self._path is None or (now := self._clock()) < self._next_at:
            return
        self._next_at = now + PERIOD_S
        with contextlib.suppress(OSError):  # Whoever watches sees that the last beat grows old.
            self._path.touch()


def from_environment(environment: Mapping[str, str] = os.environ) -> Heartbeat:
    """The heartbeat that the container's environment asks for, or one that goes nowhere."""
    path = environment.get(FILE_VARIABLE)
    return Heartbeat(Path(path) if path else None)


def check(environment: Mapping[str, str], now: float) -> str:
    """Why the loop does not seem to turn; empty when it does.

    Args:
        environment: Names the file and the longest age.
        now: Seconds since the epoch, as files' times are.
    """
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
    """Check once; 0 while the loop turns."""
    problem = check(os.environ, time.time())
    if problem:
        sys.stderr.write(problem + "\n")
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
