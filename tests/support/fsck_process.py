"""`breadbox fsck` as a process, beside a server that may run."""

import json
import subprocess
import sys
from collections.abc import Mapping

from support.server_process import plain_environment

FSCK_S = 120.0
MUST_BE_0 = ("missing", "orphans", "corrupt")
"""Counts of a report by which books and store differ."""


def fsck_report(*options: str, environment: Mapping[str, str] | None = None) -> dict[str, int]:
    """Compare books and store, and say what it counted.

    Args:
        options: Of the command; without any, store and journal are those of the environment.
        environment: Variables beside those of this process that are not settings of ours.
    """
    command = [sys.executable, "-m", "breadbox.cli.main", "fsck", "--json", "--settle-s", "1"]
    done = subprocess.run(
        [*command, *options],
        env=plain_environment() | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=FSCK_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, int] = json.loads(done.stdout)
    return report
