"""`pip install breadbox` is the light client: what works with it, and what says what it lacks."""

import json
import os
import runpy
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

import breadbox
from breadbox.cli.main import COMMANDS
from breadbox.shared.extras import how_to_install
from breadbox.testing import start_server
from breadbox_offline.files.dataset import Dataset
from breadbox_offline.files.writers import write_episodes
from support.hidden_modules import hiding, modules_beyond
from support.rllib_cases import make_toy_episode

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "yaml", "gymnasium", "av", "PIL", "grpc_status", "prometheus_client"}
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("BREADBOX_")}
AS_COMMAND = "from breadbox.cli.main import main\nmain()\n"
IN_THE_BASE = {name for name, (_, extra, _) in COMMANDS.items() if not extra}
TRY_WHEEL = runpy.run_path(str(ROOT / "scripts" / "try_wheel.py"))


def run(program: str, *arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=cwd,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_base_brings_nothing_that_only_servers_workers_or_learners_need() -> None:
    assert HEAVY <= modules_beyond()


def test_the_module_itself_imports_no_other(tmp_path: Path) -> None:
    """What takes time is imported when the first name that needs it is used."""
    program = f"import sys; sys.path.insert(0, {str(Path(breadbox.__file__).parents[1])!r})\n"
    program += (
        "import os\nbefore = set(sys.modules)\nimport breadbox\nprint({*sys.modules} - before)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True
    )
    assert "{'breadbox'}" == done.stdout.strip()


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_producer_and_a_learner_of_ones_own_need_the_base_alone(
    tmp_path: Path, codec: str
) -> None:
    with start_server(store=f"file://{tmp_path / 'store'}") as server:
        show = "\nprint(*{name.partition('.')[0] for name in sys.modules})"
        program = hiding(modules_beyond()) + TRY_WHEEL["USE"] + show
        done = run(program, server.address, codec, cwd=tmp_path)
    assert 0 == done.returncode, done.stderr
    assert not {*HEAVY, "pydantic"} & {*done.stdout.split()}


@pytest.mark.parametrize("command", COMMANDS)
def test_in_a_base_install_a_command_works_or_names_its_extra_in_one_line(
    command: str, tmp_path: Path
) -> None:
    done = run(hiding(modules_beyond()) + AS_COMMAND, command, "--help", cwd=tmp_path)
    if command in IN_THE_BASE or done.returncode == 0:
        assert (0, "") == (done.returncode, done.stderr)
        return
    assert (2, "") == (done.returncode, done.stdout)
    (line,) = done.stderr.splitlines()
    assert line.endswith(how_to_install(COMMANDS[command][1]))


@pytest.mark.parametrize("command", sorted({*COMMANDS} - IN_THE_BASE))
def test_a_command_works_with_the_extra_that_it_names(command: str, tmp_path: Path) -> None:
    hidden = modules_beyond(*COMMANDS[command][1].split(","))
    done = run(hiding(hidden) + AS_COMMAND, command, "--help", cwd=tmp_path)
    assert (0, "") == (done.returncode, done.stderr)


def test_episodes_are_imported_and_exported_without_torch(tmp_path: Path) -> None:
    toys = [make_toy_episode(str(i), 9, terminated=True, truncated=False) for i in range(3)]
    write_episodes(toys, tmp_path / "in.parquet")
    program = hiding(modules_beyond("offline")) + AS_COMMAND
    with start_server(store=f"file://{tmp_path / 'store'}") as server:
        to = ("--server", server.address, "--buffer", "episodes")
        done = run(program, "import", "in.parquet", *to, "--step-count", "3", cwd=tmp_path)
        assert (0, "") == (done.returncode, done.stderr)
        done = run(program, "export", *to, "--out", "out.parquet", cwd=tmp_path)
        assert (0, "") == (done.returncode, done.stderr)
    assert 27 == sum(len(each) for each in Dataset(str(tmp_path / "out.parquet")).episodes())


@pytest.mark.parametrize(
    ("noted", "expected"),
    [
        (None, 'pip install "breadbox[server]"'),
        (
            {"url": "file:///home/me/breadbox", "dir_info": {"editable": True}},
            'pip install -e "/home/me/breadbox[server]"',
        ),
        (
            {"url": "file:///tmp/breadbox-0.1.0-py3-none-any.whl", "archive_info": {}},
            'pip install "breadbox[server] @ file:///tmp/breadbox-0.1.0-py3-none-any.whl"',
        ),
    ],
    ids=["index", "checkout", "wheel"],
)
def test_an_extra_comes_from_where_the_rest_came_from(
    noted: object, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert "direct_url.json" == name
            return None if noted is None else json.dumps(noted)

    monkeypatch.setattr(Distribution, "from_name", lambda _: Installed())
    assert expected == how_to_install("server")


@pytest.mark.parametrize(("module", "lacks"), [("sb3", "stable_baselines3"), ("cleanrl", "torch")])
def test_an_adapter_without_its_extra_says_what_to_install(
    module: str, lacks: str, tmp_path: Path
) -> None:
    done = run(hiding({lacks}) + f"import breadbox_adapters.{module}\n", cwd=tmp_path)
    assert how_to_install(module) in done.stderr
    assert 0 != done.returncode
