"""What the learner has written about its updates so far."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class ProgressLog:
    """Follows a learner's `progress.jsonl`: one JSON object per update, appended.

    A line still being written is left for the next `poll`.
    """

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    _offset_bytes: int = 0

    def poll(self) -> int:
        """Read what is new; the number of new records. A file not there yet is no news."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset_bytes)
                fresh = file.read()
        except FileNotFoundError:
            return 0
        complete, newline, _ = fresh.rpartition(b"\n")
        self._offset_bytes += len(complete) + len(newline)
        lines = [line for line in complete.splitlines() if line.strip()]
        self.records.extend(json.loads(line) for line in lines)
        return len(lines)

    def column(self, name: str) -> list[float]:
        """One value per record; NaN where a record has none."""
        nan = float("nan")
        values = (record.get(name) for record in self.records)
        return [nan if value is None else float(value) for value in values]

    def latest(self, name: str) -> float | None:
        """The newest value there is; None when no record has one."""
        for record in reversed(self.records):
            if record.get(name) is not None:
                return float(record[name])
        return None
