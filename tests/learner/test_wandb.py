"""Records to Weights & Biases: with the package where it is installed, else with a stand-in."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from breadbox.model.errors import InvalidRequestError
from breadbox.testing import start_server
from breadbox_learner.runs import Progress, WeightsAndBiases
from support.eventually import eventually_sync
from support.feeder import feeding
from support.wandb_file import read_run

RECORDS: list[dict[str, Any]] = [
    {"update": 1, "return_mean_100": None, "steps": 128, "waiting_reason": "0 of 8 chunks"},
    {"update": 2, "return_mean_100": 21.5, "steps": 256, "waiting_reason": ""},
]

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None,
    reason="needs the package wandb, which no extra installs: pip install wandb",
)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the run; nothing leaves this host."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield tmp_path
    import wandb

    wandb.teardown()


@needs_wandb
def test_the_package_writes_every_record_under_its_update(offline: Path) -> None:
    with Progress([WeightsAndBiases("a project", "run-7", {"lr": 0.5, "env": "x"}, offline)]) as to:
        for record in RECORDS:
            to.write(record)
    # The package's own process writes the file, a moment later.
    eventually_sync(lambda: len(read_run(offline)[1]) == 2, within_s=30)
    run, history = read_run(offline)
    assert ("run-7", "a project") == (run["id"], run["project"])
    assert (0.5, "x") == (run["config"]["lr"], run["config"]["env"])
    assert [1, 2] == [row["_step"] for row in history]
    for record, row in zip(RECORDS, history, strict=True):
        assert record == {name: row[name] for name in record}


EVALUATION: dict[str, Any] = {
    "update": 1,
    "model_version": 2,
    "environment_steps": 128,
    "evaluation_return_mean": 9.5,
    "evaluation_return_low": None,
}
ON_ITS_AXIS = {
    "evaluation/return_mean": 9.5,
    "evaluation/return_low": None,
    "evaluation/update": 1,
    "evaluation/model_version": 2,
    "evaluation/environment_steps": 128,
}


@needs_wandb
def test_the_package_takes_evaluations_and_loses_no_record_for_them(offline: Path) -> None:
    """They come late, and steps never go back there."""
    with Progress([WeightsAndBiases("p", "run-8", {}, offline)]) as to:
        to.write_evaluation({**EVALUATION, "update": 0})
        for update in range(1, 6):
            to.write({**RECORDS[1], "update": update})
            if update in (3, 5):
                to.write_evaluation({**EVALUATION, "update": update - 1})
                to.write_evaluation({**EVALUATION, "update": update})
    eventually_sync(lambda: len(read_run(offline)[1]) >= 6, within_s=30)
    history = read_run(offline)[1]
    assert [1, 2, 3, 4, 5] == [row["update"] for row in history if "update" in row]
    evaluations = [row["evaluation/update"] for row in history if "evaluation/update" in row]
    assert [0, 2, 3, 4, 5] == evaluations


@needs_wandb
@pytest.mark.integration
@pytest.mark.timeout(120)
def test_a_learner_logs_what_it_writes_to_its_folder(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BREADBOX_")}
    with start_server() as server, feeding(server.address):
        learner = subprocess.run(
            [
                *(sys.executable, "-m", "breadbox.cli.main", "learn", "--no-tensorboard"),
                *("--server", server.address, "--run-dir", str(tmp_path), "--updates-max", "3"),
                *("--fragments-per-batch", "16", "--wandb-project", "p", "--token", "secret"),
            ],
            capture_output=True,
            text=True,
            env={**clean, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"},
            timeout=120,
            check=False,
        )
    assert 0 == learner.returncode, learner.stderr
    run, history = read_run(tmp_path)
    written = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert 3 == len(history)
    assert written == [{name: row[name] for name in written[0]} for row in history]
    assert 16 == run["config"]["fragments_per_batch"]
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"secret" not in file.read_bytes()


@needs_wandb
def test_without_a_key_the_package_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(InvalidRequestError, match=r"wandb_project .*API key"):
        WeightsAndBiases("p", "r", {}, tmp_path)


# Without the package -----------------------------------------------------------------------------


class FakeRun:
    """Notes what is logged, as the package's `Run` takes it."""

    def __init__(self) -> None:
        self.logged: list[tuple[int | None, dict[str, Any]]] = []
        self.axes: dict[str, str] = {}
        self.step = 0
        self.finished = 0

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        self.logged.append((step, data))

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for the package: what matters is what it is told."""
    made = types.ModuleType("wandb")
    made.Error = type("Error", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def test_a_run_can_be_gone_on_with_and_is_finished_once(
    module: types.ModuleType, tmp_path: Path
) -> None:
    run = FakeRun()
    asked: dict[str, Any] = {}

    def init(**options: Any) -> FakeRun:
        asked.update(options)
        return run

    module.init = init  # type: ignore[attr-defined]
    with Progress([WeightsAndBiases("p", "session", {"lr": 1.0}, tmp_path)]) as progress:
        for record in RECORDS:
            progress.write(record)
        progress.write_evaluation(EVALUATION)
    progress.close()
    wanted = {"project": "p", "id": "session", "resume": "allow", "config": {"lr": 1.0}}
    assert {**wanted, "dir": str(tmp_path)} == asked
    assert [(1, RECORDS[0]), (2, RECORDS[1]), (None, ON_ITS_AXIS)] == run.logged
    steps = "evaluation/environment_steps"
    axes = dict.fromkeys(ON_ITS_AXIS.keys() - {steps}, steps)
    assert {"*": "environment_steps", **axes} == run.axes
    assert 1 == run.finished


def test_a_run_that_cannot_be_started_is_one_line(module: types.ModuleType, tmp_path: Path) -> None:
    def init(**_: Any) -> FakeRun:
        raise module.Error("no key\nlog in first")

    module.init = init  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError) as caught:
        WeightsAndBiases("p", "r", {}, tmp_path)
    assert "wandb_project cannot be logged to: no key" == str(caught.value)
