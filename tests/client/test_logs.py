"""Server, workers and learners write one form of log, which a machine can read as well."""

import json
import logging
import subprocess
import sys
from datetime import datetime

import pytest
from click.testing import CliRunner

from breadbox.cli.logs import TextFormatter
from breadbox.cli.main import load_command

WRITE = (
    "import logging; from breadbox.cli import logs; logs.configure('info', {form!r});"
    "logging.getLogger('grpc._server').error('it %s', 'failed');"
    "logging.getLogger('breadbox').debug('not told')\n"
    "try: 1 / 0\nexcept ZeroDivisionError: logging.getLogger('breadbox').exception('a bug')"
)


def written(form: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", WRITE.format(form=form)], capture_output=True, text=True, check=True
    )
    assert "" == done.stdout
    return done.stderr.splitlines()


def test_a_line_has_time_level_and_place_also_of_grpcs_own() -> None:
    first, second, *trace = written("text")
    assert "ERROR   grpc._server: it failed" == first[24:]
    datetime.fromisoformat(first[:19])
    assert "ERROR   breadbox: a bug" == second[24:]
    assert "ZeroDivisionError: division by zero" == trace[-1]


def test_as_json_every_line_is_an_object_tracebacks_included() -> None:
    first, second = map(json.loads, written("json"))
    assert ("error", "grpc._server", "it failed") == (
        first["level"],
        first["logger"],
        first["message"],
    )
    assert "ZeroDivisionError" in second["exception"]


@pytest.mark.parametrize("name", ["serve", "rollout", "learn", "generate"])
def test_what_runs_for_long_takes_the_same_options(name: str) -> None:
    said = " ".join(CliRunner().invoke(load_command(name), ["--help"]).output.split())
    assert "--log-format [text|json]" in said
    assert "--log-level [debug|info|warning|error]" in said
    assert "BREADBOX_LOG_FORMAT" in said


def test_lines_below_a_message_are_lines_and_can_pass_for_no_event() -> None:
    record = logging.LogRecord("worker", logging.WARNING, "", 0, "raised:", (), None)
    record.below = "  File \x1b[1m\n12:00 forged"
    first, *further = TextFormatter().format(record).split("\n")
    assert first.endswith("WARNING worker: raised:")
    assert ["      File �[1m", "    12:00 forged"] == further
