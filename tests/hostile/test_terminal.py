"""Names and errors that somebody else chose reach a person's terminal as text, and as nothing else.

A name may hold markup; a server that lies, or a file that is imported, may send anything at all.
"""

import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from google.protobuf.message import Message
from rich.console import Console

import breadbox
from breadbox.cli import logs
from breadbox.cli.commands import stats, top
from breadbox.cli.main import cli
from breadbox.model.types import BufferDescription
from breadbox.v1 import buffer_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.fake_service import FakeService, refuse, serving
from support.server_process import END_S, ServerProcess, plain_environment

pytestmark = pytest.mark.integration

MARKUP = "[link=evil]see[red]"
ESCAPES = "\x1b]8;;http://evil\x07see\x1b]8;;\x07\x1b[2J\x9b31m\r\u202e"
FORGED = "FORGED: all is well"
NEW_LINE = f"see\n{FORGED}\r\n{FORGED}\u2028{FORGED}"


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


def full_of(text: str, message: Any) -> Any:
    """The message with a text wherever the wire has one, in one item of each list and map."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        entry = field.message_type
        is_map = entry is not None and entry.GetOptions().map_entry
        if is_map and entry.fields_by_name["key"].type == entry.fields_by_name["key"].TYPE_STRING:
            if entry.fields_by_name["value"].message_type is not None:
                full_of(text, value[text])
            elif entry.fields_by_name["value"].type == field.TYPE_STRING:
                value[text] = text
            else:
                value[text] = 1
        elif is_map:
            continue
        elif field.type == field.TYPE_STRING and field.label == field.LABEL_REPEATED:
            value.append(text)
        elif field.type == field.TYPE_STRING:
            setattr(message, field.name, text)
        elif entry is not None and entry.file.package.startswith("breadbox"):
            full_of(text, value.add() if field.label == field.LABEL_REPEATED else value)
    return message


def buffer_full_of(text: str) -> buffer_pb2.Buffer:
    """A buffer as a server that lies may tell of it, under which commands find what they want."""
    found: buffer_pb2.Buffer = full_of(text, buffer_pb2.Buffer())
    found.state.outage = ""  # Else little else is looked at.
    return found


COMMANDS = {
    "stats": ["stats"],
    "stats of one": ["stats", "default", "--all"],
    "buffers list": ["buffers", "list"],
    "buffers show": ["buffers", "show"],
    "buffers create": ["buffers", "create", "mine"],
    "buffers end-session": ["buffers", "end-session", "--yes", "default"],
    "buffers end-session, asked": ["buffers", "end-session", "default"],
    "subscriptions list": ["subscriptions", "list"],
    "subscriptions create": ["subscriptions", "create", "mine"],
    "top": ["top", "--count", "1"],
    "explain": ["explain", "--seconds", "0.1"],
    "doctor": ["doctor"],
}


@pytest.mark.parametrize("text", [MARKUP, ESCAPES, NEW_LINE], ids=["markup", "escapes", "lines"])
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_that_a_server_says_is_more_than_text_in_its_line(
    monkeypatch: pytest.MonkeyPatch, command: str, text: str
) -> None:
    fake = FakeService()
    found = buffer_full_of(text)
    answers: dict[str, Message] = {
        "ListBuffers": pb.ListBuffersResponse(buffers=[found]),
        "GetBuffer": pb.GetBufferResponse(buffer=found),
        "CreateBuffer": pb.CreateBufferResponse(buffer=found),
        "CreateSubscription": full_of(text, pb.CreateSubscriptionResponse()),
        "GetStoreConfig": full_of(text, pb.GetStoreConfigResponse()),
    }
    for method, answer in answers.items():
        fake.will(method, *[answer] * 100)
    denied = refuse(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED", text=text)
    fake.will("AppendFragments", *[denied] * 10)
    monkeypatch.setenv("COLUMNS", "1000")
    with serving(fake) as address:
        told = CliRunner().invoke(cli, [*COMMANDS[command], "--server", address], input="n\n")

    assert told.exception is None or isinstance(told.exception, SystemExit), told.exception
    assert "see" in told.output or "see" in told.stderr
    assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e", "\u2028"} & set(told.output)
    assert not [line for line in told.output.splitlines() if line.startswith("FORGED")]
    assert text is not MARKUP or MARKUP in told.output


def test_a_line_of_the_log_is_one_line_whoever_named_what_is_in_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("info", "text")
    error = breadbox.ReplayBufferError(f"{ESCAPES}{NEW_LINE}")
    try:
        logging.getLogger("breadbox").error("session %s", f"{ESCAPES}{NEW_LINE}", exc_info=error)
    finally:
        logging.getLogger().handlers.pop()
    told = capsys.readouterr().err

    assert FORGED in told.splitlines()[0]
    assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e", "\u2028"} & set(told)
