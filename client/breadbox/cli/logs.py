"""Log lines of server, workers and learners, in one form: text for people, JSON for collectors.

One event a line, on standard error. gRPC's own lines, from its Python parts, are among them.
"""

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, TextIO, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

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


def log_options(command: Command) -> Command:
    """Add `--log-level` and `--log-format`, the arguments of `configure`."""
    for name, choices, default, help_text in (
        ("format", FORMATS, "text", "One line per event."),
        ("level", LEVELS, "info", "Least that is logged."),
    ):
        command = click.option(
            f"--log-{name}",
            envvar=f"BREADBOX_LOG_{name.upper()}",
            type=click.Choice(choices),
            default=default,
            show_envvar=True,
            show_default=True,
            help=help_text,
        )(command)
    return command


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
