"""What a client was told, one JSON line each, written before anything else happens.

A killed client leaves at most a torn last line, which is left out.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Ledger:
    """Appends what happened to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def note(self, kind: str, **facts: Any) -> None:
        """Write one line, whole."""
        self._file.write(json.dumps({"kind": kind, **facts}) + "\n")


def read_ledgers(folder: Path) -> Iterator[dict[str, Any]]:
    """Every line of every ledger in a folder, in order within each ledger."""
    for path in sorted(folder.glob("*.ledger")):
        for line in path.read_text().splitlines():
            try:
                yield {"ledger": path.stem, **json.loads(line)}
            except json.JSONDecodeError:
                continue  # Torn: its writer was killed while it wrote.
