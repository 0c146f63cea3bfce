"""What a client was told, one JSON line each, written before anything else happens.

A killed client leaves at most a torn last line, which is left out. Every line says from when to
when (`since`, `at`; seconds of the machine's monotonic clock, which all processes share) the server
may have done what it tells of.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Ledger:
    """Appends what happened to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", buffering=1)
        self._since = time.monotonic()

    def asking(self) -> None:
        """Note that a call begins: what is noted next happened after this."""
        self._since = time.monotonic()
        self.live()

    def live(self) -> None:
        """Show that its writer does not hang: the file's time is that of the last such sign."""
        os.utime(self._path)

    def note(self, kind: str, **facts: Any) -> None:
        """Write one line, whole."""
        line = {"kind": kind, "since": self._since, "at": time.monotonic(), **facts}
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def read_ledgers(folder: Path) -> Iterator[dict[str, Any]]:
    """Every line of every ledger in a folder, in order within each ledger."""
    for path in sorted(folder.glob("*.ledger")):
        for line in path.read_text().splitlines():
            try:
                yield {"ledger": path.stem, **json.loads(line)}
            except json.JSONDecodeError:
                continue  # Torn: its writer was killed while it wrote.
