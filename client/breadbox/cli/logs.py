"""Log lines of server, workers, learners and gRPC: text for people, JSON for collectors."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

from breadbox.cli.base import printable
from breadbox.cli.settings import Settings

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]
TEXT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def below(record: logging.LogRecord) -> str:
    """Return the lines that a call gave as `extra={"below": ...}`, each indented after a newline.

    They are for the traceback of another process: no line of it can pass for an event of its own.
    """
    lines: str = getattr(record, "below", "")
    return "".join(f"\n    {line}" for line in lines.splitlines())


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
        elif lines := below(record):
            fields["exception"] = lines.strip()
        return json.dumps(fields)


class TextFormatter(logging.Formatter):
    """One line of text per event; its traceback below, or lines that are given as `below`."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Render a record without its traceback."""
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Render a record; its traceback may quote foreign text too."""
        text = super().format(record) + below(record)
        return "\n".join(map(printable, text.split("\n")))


class LogSettings(Settings):
    """What to log, and how."""

    log_level: Level = "info"
    """Lowest level that is logged."""
    log_format: Format = "text"
    """Format of a log line."""

    def configure_logs(self) -> None:
        """Send this process's logs to standard error."""
        configure(self.log_level, self.log_format)


class _Handler(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(level: Level, log_format: Format) -> None:
    """Log to standard error, replacing an earlier call's handler; other handlers stay."""
    root = logging.getLogger()
    for handler in [*root.handlers]:
        if isinstance(handler, _Handler):
            root.removeHandler(handler)
    handler = _Handler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root.addHandler(handler)
    root.setLevel(level.upper())
