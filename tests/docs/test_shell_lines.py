"""Goal: whoever types what documents show for a shell gets what they say.

Method: bash runs the lines as they stand, but for the address and what would take minutes, in
`RUN` here or by the test that `NOT_HERE` names; `NOT_HERE` also says why the others are not run. Of
every block as much is run as can be without what it starts: commands of ours are parsed with all
their options by the very code that would run them.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import pyarrow.parquet
import pytest

import breadbox
from breadbox.cli.main import load_command
from support.documents import BLOCKS, ROOT
from support.fragments import vector_fragment
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

RUN = {
    "docs/offline.md#expert": "test_an_expert_is_recorded_imported_and_exported",
    "docs/offline.md#into": "test_an_expert_is_recorded_imported_and_exported",
    "docs/offline.md#minari": "test_an_expert_is_recorded_imported_and_exported",
    "docs/reading.md#operate": "test_lines_run_beside_a_server_with_fragments",
    "docs/troubleshooting.md#look": "test_lines_run_beside_a_server_with_fragments",
    "docs/producers.md#doctor": "test_lines_run_beside_a_server_with_fragments",
    "docs/mirror.md#serve": "test_a_server_is_started_by_the_lines",
    "docs/rollout.md#start": "test_a_learner_is_started_and_goes_on",
    "docs/learner-cookbook.md#ppo": "test_a_learner_is_started_and_goes_on",
    "docs/learner-cookbook.md#resume": "test_a_learner_is_started_and_goes_on",
}
"""Blocks that bash runs, and the test that has it do so."""

NOT_HERE = {
    "README.md#2": "pip and the whole test run; tests/dist and `make smoke` run the demo",
    "CONTRIBUTING.md#set-up": "a clone and the whole test run",
    "docs/agents.md#add": "tests/examples/test_addition.py",
    "docs/agents.md#serve": "never ends; tests/integration/test_groups.py starts one",
    "docs/learner-cookbook.md#repeat": "never ends; tests/learner/test_repeatable.py",
    "docs/my-learner.md#start": "tests/examples/test_my_learner.py",
    "docs/my-learner.md#machines": "tests/examples/test_my_learner.py",
    "docs/producers.md#top": "it never ends; tests/client/test_cli.py",
    "docs/adapters.md#sb3-start": "pip, and a server as tests/integration/test_serve.py starts it",
    "docs/minestudio.md#start": "pip, and servers as tests/integration/test_serve.py starts them",
    "docs/console.md#start": "never ends, and needs an engine; tests/console",
    "docs/console.md#views": "never ends; tests/console",
    "docs/deploy.md#standby": "needs two machines; tests/integration/test_standby.py",
    "docs/deploy.md#gateway": "needs certificates; tests/integration/test_gateway.py",
    "docs/deploy.md#helm": "needs a cluster; tests/deploy",
    "docs/learner-cookbook.md#normalise": "goes on from `...`; tests/learner/test_normalizing.py",
    "docs/learner-cookbook.md#torchrun": "goes on from a line with `...`; tests/learner/test_ranks",
    "docs/operate.md#start": "needs an engine; tests/containers",
    "docs/operate.md#again": "needs an engine; tests/containers",
    "docs/operate.md#environment": "needs an engine; tests/containers",
    "docs/operate.md#rotate": "needs an engine; tests/containers",
    "docs/operate.md#back-up": "needs an engine",
    "docs/operate.md#restore": "needs an engine",
    "docs/operate.md#kubernetes": "needs a cluster",
    "docs/operate.md#fsck": "needs an engine; tests/integration/test_fsck.py",
    "docs/slow-workers.md#pace": "never ends; tests/rollout/test_through_the_service.py",
    "docs/rollout.md#vector": "names modules of the reader's; tests/rollout/test_vector.py",
    "docs/rollout.md#agents": "needs a package that no extra has; tests/rollout/test_parallel.py",
    "docs/rollout.md#policies": "needs a package that no extra has; tests/rollout/test_parallel.py",
    "docs/rollout.md#opponents": "names a module of the reader's; tests/rollout/test_parallel.py",
    "docs/rollout.md#mask-start": (
        "names a module of the reader's; tests/rollout/test_masked_actions.py"
    ),
    "docs/rollout.md#record": "goes on from a line with `...`; tests/rollout/test_command.py",
    "docs/rollout.md#generate": "needs weights of Atari; the lines in Python below it are run",
}
"""Blocks that no test here runs: the test that runs them or their like, or why none does."""

SCALED_DOWN = {
    "--target-return 475 --lr 2.5e-3:2.5e-4@300updates": "--target-return 40",
    "--episodes 40": "--episodes 6",
}


def typed(
    *places: str, folder: Path, changes: dict[str, str], port: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run blocks in one shell, and end what they left running."""
    lines = "".join(SHELL[place].code for place in places)
    for shown, run in changes.items():
        assert shown in lines
        lines = lines.replace(shown, run)
    port = port or free_port()
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BREADBOX_SERVER": f"127.0.0.1:{port}",
        "MINARI_DATASETS_PATH": str(folder / "minari"),
    }
    shell = subprocess.Popen(
        ["bash", "-euc", re.sub(r"\bHOST:", "127.0.0.1:", lines).replace(":50051", f":{port}")],
        cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        shell.wait(timeout=240)
    finally:
        with suppress(ProcessLookupError):  # They may have left nothing running.
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


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("docs/reading.md#operate", "archive"),
        ("docs/troubleshooting.md#look", "No learner needs to wait"),
        ("docs/producers.md#doctor", "store"),
    ],
)
def test_lines_run_beside_a_server_with_fragments(place: str, shown: str, tmp_path: Path) -> None:
    with breadbox.local_server() as client:
        client.start_session("s")
        client.append_many([vector_fragment(index) for index in range(50)])
        done = typed(place, folder=tmp_path, changes={}, port=int(client.address.split(":")[-1]))
    assert 0 == done.returncode, done.stdout
    assert shown in done.stdout


@pytest.mark.long
def test_a_learner_is_started_and_goes_on(tmp_path: Path) -> None:
    learn = "breadbox learn --server HOST:PORT --env CartPole-v1"
    changes = {
        "--num-envs 16\n": "--num-envs 16 &\n",
        "--target-return 195": "--target-return 30",
        "breadbox learn ...": f"{learn} --target-return 35",
    }
    places = ("rollout.md#start", "learner-cookbook.md#ppo", "learner-cookbook.md#resume")
    with breadbox.local_server() as client:
        port = client.address.split(":")[-1]
        done = typed(
            *(f"docs/{place}" for place in places),
            folder=tmp_path,
            changes=changes | {"HOST:PORT": f"127.0.0.1:{port}"},
            port=int(port),
        )
        version = client.get_buffer().model_version
    assert 0 == done.returncode, done.stdout
    records = [
        json.loads(line)
        for line in (tmp_path / "runs/first/progress.jsonl").read_text().splitlines()
    ]
    assert sorted(set(each["update"] for each in records)) == [each["update"] for each in records]
    assert version is None or version >= records[-1]["model_version"]
    assert "checkpoint.safetensors" in {each.name for each in (tmp_path / "runs/first").iterdir()}


def test_a_server_is_started_by_the_lines(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    wait = f"--ready-file {ready} --ephemeral & while [ ! -s {ready} ]; do sleep 0.1; done"
    ask = "breadbox buffers show default --json"
    changes = {"off-policy\n": f"off-policy --listen 127.0.0.1:50051 {wait}\n{ask}\n"}
    done = typed("docs/mirror.md#serve", folder=tmp_path, changes=changes)
    assert 0 == done.returncode, done.stdout
    assert '"ragged"' in done.stdout


def test_every_block_for_a_shell_is_run_or_says_why_not() -> None:
    assert sorted(SHELL) == sorted([*RUN, *NOT_HERE])
    here = Path(__file__).read_text()
    assert [] == [name for name in RUN.values() if f"def {name}" not in here]
    named = [
        path for why in NOT_HERE.values() for path in re.findall(r"tests/[\w/]+(?:\.py)?", why)
    ]
    missing = [path for path in named if not any(ROOT.glob(f"{path}*"))]
    assert [] == missing


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
        elif program == "python":
            assert (ROOT / arguments[0]).is_file()
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
