"""Goal: the example of groups learns to add, and goes on wherever one of its processes is killed.

Method: it is run as a reader runs it. Its processes are killed by the ids that it prints, and the
learner's file says which groups were trained on.
"""

import importlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import breadbox

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(660)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "addition"


class Program:
    """The example in a process group of its own, until it has ended."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(EXAMPLE / "run.py"), "--folder", str(folder), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes = {"program": self._process.pid}
        """Id of the latest process of each name."""
        self.said = ""

    def lines(self) -> Iterator[str]:
        """What it prints, as it comes."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said += line
            if started := re.match(r"(.*): process (\d+)", line):
                self.processes[started[1]] = int(started[2])
            yield line

    def kill(self, *names: str) -> None:
        for name in names:
            with suppress(ProcessLookupError):  # It may have ended by itself.
                os.kill(self.processes[name], signal.SIGKILL)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._process.wait()


def accuracies(said: str) -> list[float]:
    return [float(each) / 100 for each in re.findall(r"accuracy ([\d.]+)%", said)]


def trained_in(folder: Path) -> list[str]:
    saved = torch.load(folder / "learner.pt", weights_only=True)
    return list(saved["trained"])


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example's module of parts, whose learner is not warmed up."""
    monkeypatch.syspath_prepend(EXAMPLE)
    module = importlib.import_module("roles")
    monkeypatch.setattr(module, "warm_up", lambda model, seed: None)
    yield module
    for name in ("roles", "model"):
        del sys.modules[name]


def append_groups(roles: ModuleType, client: breadbox.Client, run: Any, names: list[str]) -> None:
    """Append groups in each of which one answer of eight is right."""
    for each in roles.answers(run.model, names, run.version, run.session_id):
        client.append(each)
        part = roles.judged(each)
        part.numbers = {"reward": float(each.member == 0)}
        client.attach(part)


def test_groups_that_a_killed_learner_had_saved_are_not_trained_on_again(
    roles: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the save and the end of the lease: the server knows nothing of the step."""

    class KilledError(BaseException):
        pass

    def save_and_end(run: Any) -> None:
        saves(run)
        raise KilledError

    saves: Callable[[Any], None] = roles.Run.save
    names = [f"group-{number:02}" for number in range(2 * roles.GROUPS)]
    with breadbox.local_server() as local, roles.connect(local.address) as client:
        run = roles.Run(tmp_path, seed=0)
        roles.start_session(client, run)
        append_groups(roles, client, run, names)
        monkeypatch.setattr(roles.Run, "save", save_and_end)
        with pytest.raises(KilledError):
            roles.learn(local.address, tmp_path, 0, versions=3, target=1.0)
        assert names[: roles.GROUPS] == trained_in(tmp_path)

        monkeypatch.setattr(roles.Run, "save", saves)
        roles.learn(local.address, tmp_path, 0, versions=4, target=1.0)
    assert names == trained_in(tmp_path)
    resumed = roles.Run(tmp_path, seed=0)
    steps = {int(state["step"]) for state in resumed.optimizer.state.values()}
    assert ({2}, 4) == (steps, resumed.version)


def watched(program: Program, kills: dict[str, list[str]]) -> int:
    """Read what a program prints, kill processes at lines that begin so, and return its status."""
    for line in program.lines():
        for beginning in [each for each in kills if line.startswith(each)]:
            program.kill(*kills.pop(beginning))
    status = program.wait()
    assert not kills, program.said
    return status


def test_a_run_goes_on_after_ctrl_c_and_after_its_processes_were_killed(tmp_path: Path) -> None:
    options = "--versions", "10", "--target", "1", "--generators", "1"
    first = Program(tmp_path, *options)
    for line in first.lines():
        if line.startswith("version 1:"):
            first.kill("generator 1", "verifier")
        if line.startswith("version 5:"):
            first.interrupt()
    assert 130 == first.wait(), first.said
    assert "Traceback" not in first.said, first.said
    assert f"to go on with {tmp_path}" in first.said

    kills = {"version 5:": ["learner", "server"]}
    second = Program(tmp_path, *options)
    status = watched(second, kills)
    assert "version 10: accuracy" in second.said, second.said
    assert 1 == status  # Ten versions do not teach everything.
    trained = trained_in(tmp_path)
    assert len(trained) == len(set(trained)) > 0
    assert (tmp_path / "accuracy.png").stat().st_size > 1_000


KILLS = 8


@pytest.mark.long
def test_it_ends_at_60_percent_although_any_process_is_killed_at_any_time(tmp_path: Path) -> None:
    """Accuracy is on sums that no process trains on."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201 - to repeat it
    rng, said, status, kills = random.Random(seed), "", -signal.SIGKILL, 0
    while status == -signal.SIGKILL:
        program = Program(tmp_path)
        for _ in program.lines():
            # As often as it says something; and it says something when a process is started anew.
            if kills < KILLS and rng.random() < 0.3 and len(program.processes) == 6:
                time.sleep(rng.uniform(0, 1))  # Anywhere in what comes between two lines.
                program.kill(rng.choice(list(program.processes)))
                kills += 1
        status, said = program.wait(), said + program.said
    assert (0, KILLS) == (status, kills), said
    reached = accuracies(said)
    assert reached[0] < 0.45 < 0.6 <= reached[-1], said
    trained = trained_in(tmp_path)
    assert len(trained) == len(set(trained))
