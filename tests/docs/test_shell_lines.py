"""Goal: whoever types what documents show for a shell gets what they say.

Method: where lines go on from one another, bash runs them as they stand, but for the address and
what would take minutes. Of the others, as much is run as can be without what they start: commands
of ours are parsed with all their options by the very code that would run them.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pyarrow.parquet
import pytest

from breadbox.cli.main import load_command
from support.documents import BLOCKS, ROOT
from support.redis_server import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280)]

SHELL = {place: block for place, block in BLOCKS.items() if block.language == "sh"}

PROGRAMS = {
    "cd": "a folder of the repository",
    "eval": "variables that make prints",
    "kubectl": "needs a cluster; tests/deploy hold the manifests against its schemas",
    "docker": "needs an engine: tests/containers drive the composition",
    "export": "a variable",
    "do": "a word of the shell",
    "done": "a word of the shell",
    "for": "a word of the shell",
    "helm": "needs a cluster",
    "git": "needs a network",
    "printf": "writes a secret",
}
"""Other programs than ours, make and pip that a line may start with, and why it is not run."""

SCALED_DOWN = {
    "--target-return 475 --lr-decay-updates 300": "--target-return 40",
    "--episodes 40": "--episodes 6",
}


def typed(*places: str, folder: Path, changes: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run blocks in one shell, and end what they left running."""
    lines = "".join(SHELL[place].code for place in places)
    for shown, run in changes.items():
        assert shown in lines
        lines = lines.replace(shown, run)
    port = free_port()
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BREADBOX_SERVER": f"127.0.0.1:{port}",
        "MINARI_DATASETS_PATH": str(folder / "minari"),
    }
    shell = subprocess.Popen(
        ["bash", "-euc", lines.replace(":50051", f":{port}")],
        cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        shell.wait(timeout=240)
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        output, _ = shell.communicate(timeout=30)
    return subprocess.CompletedProcess(shell.args, shell.returncode, output)


@pytest.mark.long
def test_an_expert_is_recorded_imported_and_exported_by_the_lines_of_the_page(
    tmp_path: Path,
) -> None:
    store = {"file:///dev/shm/breadbox": f"file://{tmp_path}/store"}
    places = [f"docs/offline.md#{name}" for name in ("expert", "into", "minari")]
    done = typed(*places, folder=tmp_path, changes=SCALED_DOWN | store)
    assert 0 == done.returncode, done.stdout
    for name in ("expert", "copy"):
        assert 0 < pyarrow.parquet.read_metadata(tmp_path / f"{name}.parquet").num_rows, done.stdout
    assert (tmp_path / "minari" / "cartpole" / "expert-v0" / "data").is_dir()


def command_lines(code: str) -> Iterator[list[str]]:
    """Words of each command; what is behind a # is for people."""
    for line in code.replace("\\\n", " ").splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        reader.whitespace_split = True
        words = ["&&", *reader]
        starts = [place for place, word in enumerate(words) if word in ("&&", "&", ";", "|")]
        for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
            if command := words[start + 1 : end]:
                yield command


@pytest.mark.parametrize("place", SHELL)
def test_a_line_for_a_shell_is_one_that_would_run(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in command_lines(SHELL[place].code):
        program, *arguments = words
        if program == "torchrun":
            arguments = arguments[arguments.index("breadbox.cli.main") + 1 :]
            program = "breadbox"
        if program == "breadbox":
            check_command(arguments)
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        elif program == "pip":
            check_extras(arguments)
        else:
            assert program in PROGRAMS or re.match(r"\w+=|mkdir$|umask$", program), words


def check_command(arguments: list[str]) -> None:
    """Parse what stands behind `breadbox`, with every option, without running it."""
    name, *rest = arguments
    if "..." in rest:  # What the page has said before.
        rest[rest.index("...") : rest.index("...") + 1] = ["--env", "CartPole-v1"]
    command: click.Command = load_command(name)
    if isinstance(command, click.Group):
        name, *rest = rest
        command = command.commands[name]
    filled = [word.replace("HOST", "localhost").replace("PORT", "50051") for word in rest]
    for word in filled:
        if re.search(r"\.(parquet|safetensors)$", word):  # Made by a line before, or the reader.
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).touch()
    if name == "import" and filled[0] == "recordings":
        Path(filled[0]).mkdir(exist_ok=True)
    command.make_context(name, filled)


def check_extras(arguments: list[str]) -> None:
    """Every extra that pip is asked for is one of ours."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [name for word in arguments for name in re.findall(r"\[([\w,-]+)\]", word)]
    assert {name for names in asked for name in names.split(",")} <= set(
        project["optional-dependencies"]
    )
