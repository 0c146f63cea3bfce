"""Names and errors that somebody else chose reach a person's terminal as text, and as nothing else.

A name may hold markup; a server that lies, or a file that is imported, may send anything at all.
"""

import io
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

import breadbox
from breadbox.cli import stats, top
from breadbox.types import BufferDescription
from support.server_process import END_S, ServerProcess, plain_environment

pytestmark = pytest.mark.integration

MARKUP = "[link=evil]see[red]"
ESCAPES = "\x1b]8;;http://evil\x07see\x1b]8;;\x07\x1b[2J\x9b31m\r\u202e"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferDescription]:
    folder = tmp_path_factory.mktemp("server")
    with (
        ServerProcess("--store", f"file://{folder}/store", log=folder / "log") as server,
        breadbox.connect(server.address, reconnect_s=0) as client,
    ):
        client.start_session("run", model_version=0)
        yield client.get_buffer()


def shown(renderable: object) -> str:
    """What a terminal with colours and links would get."""
    written = io.StringIO()
    Console(file=written, force_terminal=True, color_system="truecolor", width=300).print(
        renderable
    )
    return written.getvalue()


@pytest.mark.parametrize("text", [MARKUP, ESCAPES])
def test_what_others_named_does_nothing_to_the_terminal(
    honest: BufferDescription, text: str
) -> None:
    state = replace(honest.state, waiting_reason=text, outage=text)
    hostile = replace(honest, name=text, session_id=text, state=state)
    written = shown(top.render(top.Sample(0.0, {text: hostile}, {}), text, "now"))
    written += shown(stats.describe(hostile, show_zeros=False))

    assert "\x1b]" not in written
    assert "\x1b[2J" not in written
    assert not {"\x07", "\x9b", "\r", "\u202e"} & set(written)
    assert "see" in written
    assert text is not MARKUP or MARKUP in written


def test_an_error_that_quotes_somebody_does_nothing_to_the_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "breadbox.cli.main", "stats", "--server", f"host{ESCAPES}"],
        capture_output=True,
        check=False,
        timeout=END_S,
        env=plain_environment(),
    )
    told = done.stderr.decode()

    assert 0 != done.returncode
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(told)
    assert "host" in told
