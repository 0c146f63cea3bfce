"""Log lines of server, workers and learners, in one form: text for people, JSON for collectors.

One event a line, on standard error. gRPC's own lines, from its Python parts, are among them.
"""

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TextIO

from breadbox.cli.settings import Settings, setting

FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")
TEXT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


@dataclass(frozen=True, kw_only=True)
class LogSettings(Settings):
    """What is logged, and how."""

    log_level: str = setting("info", choices=LEVELS)
    """Least that is logged."""
    log_format: str = setting("text", choices=FORMATS)
    """One line per event."""

    def configure_logs(self) -> None:
        """Send this process's logs to standard error."""
        configure(self.log_level, self.log_format)


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self.stream = sys.stderr
        super().emit(record)


def configure(level: str, log_format: str) -> None:
    """Send this process's logs to standard error; again is instead. Other handlers stay.

    Args:
        level: One of `LEVELS`.
        log_format: One of `FORMATS`.
    """
    root = logging.getLogger()
    for handler in [*root.handlers]:
        if isinstance(handler, _Handler):
            root.removeHandler(handler)
    handler = _Handler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT))
    root.addHandler(handler)
    root.setLevel(level.upper())
