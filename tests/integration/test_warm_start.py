"""A command that starts warm is, to a test, the process that it would be if it started anew."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import warm_start
from support.server_process import ServerProcess, plain_environment, serve_command

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not warm_start.is_installed(), reason="every command starts anew here"),
]


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Ids of the processes that the test has started warm."""
    ids: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        start = warm_start.Warmed.start

        def noted(self: warm_start.Warmed, *arguments: object) -> int:
            ids.append(start(self, *arguments))  # type: ignore[arg-type]
            return ids[-1]

        patch.setattr(warm_start.Warmed, "start", noted)
        yield ids


def run(*arguments: str, **options: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "breadbox.cli.main", *arguments],
        **{"capture_output": True, "text": True, "timeout": 60, **options},  # type: ignore[call-overload]
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", warm_start.MODULES)
def test_a_warm_command_says_what_a_cold_one_says(
    command: str, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = run(command, "--help"), run(command, "--nonsense")
    assert 2 == len(started)
    monkeypatch.setenv(warm_start.COLD, "1")
    cold = run(command, "--help"), run(command, "--nonsense")
    assert 2 == len(started)
    assert cold == warm


def test_a_warm_command_has_its_own_environment_folder_and_session(
    started: list[int], tmp_path: Path
) -> None:
    """The configuration is found in the folder; the variable is one that the server refuses."""
    (tmp_path / "config.yaml").write_text("speed: 11\n")
    arguments = ("serve", "--config", "config.yaml")
    code, _, said = run(*arguments, cwd=tmp_path, env=plain_environment())
    assert (2, True) == (code, "speed" in said)
    mistyped = plain_environment() | {"BREADBOX_USES_MAX": "many"}
    code, _, said = run("serve", env=mistyped, start_new_session=True)
    assert (2, True) == (code, "BREADBOX_USES_MAX" in said)
    assert 2 == len(started)


def test_a_warm_server_is_a_child_whose_end_is_seen(started: list[int], tmp_path: Path) -> None:
    server = ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "log")
    with server:
        assert [server.pid] == started
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert str(server.pid) in children
        assert 0 == server.stop()
        server.start()
        server.signal(signal.SIGKILL)
        assert -signal.SIGKILL == server.wait()


def test_a_warmed_process_that_has_died_is_replaced(started: list[int]) -> None:
    assert 2 == run("serve", "--nonsense")[0]
    for each in warm_start.warmed():
        os.kill(each.pid, signal.SIGKILL)
    # This one starts anew, and the next one warm again.
    assert 2 == run("serve", "--nonsense")[0]
    assert 1 == len(started)
    assert 2 == run("serve", "--nonsense")[0]
    assert 2 == len(started)


@pytest.mark.parametrize(
    "changed", [{"PYTHONPATH": "/nowhere"}, {"PYTHONOPTIMIZE": "1"}, {"OMP_NUM_THREADS": "2"}]
)
def test_what_changes_the_interpreter_starts_anew(
    changed: dict[str, str], started: list[int]
) -> None:
    assert 2 == run("serve", "--nonsense", env=plain_environment() | changed)[0]
    assert [] == started


def test_other_commands_start_anew(started: list[int]) -> None:
    code = "import json, sys; print(json.dumps(sys.argv))"
    said = subprocess.run(
        [sys.executable, "-c", code, "serve"], capture_output=True, text=True, check=True
    ).stdout
    assert ["-c", "serve"] == json.loads(said)
    limited = ["sh", "-c", 'exec "$@"', "sh", *serve_command("--nonsense")]
    assert 2 == subprocess.run(limited, capture_output=True, check=False).returncode
    assert [] == started
