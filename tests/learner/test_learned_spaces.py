"""A worker and a learner, as processes, on one environment after another: every kind of space."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from breadbox.testing import start_server
from support.server_process import plain_environment
from support.tiers import long_but

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "env", long_but(1, ["support.learner_environments:many_spaces", "FrozenLake-v1"])
)
def test_an_environment_is_learned_whatever_its_spaces_are(env: str, tmp_path: Path) -> None:
    with start_server() as server:
        common = ("--server", server.address, "--env", env)
        worker = _start(
            *("rollout", *common, "--num-envs", "4", "--fragment-steps", "16"),
            log=tmp_path / "worker.log",
        )
        learner = _start(
            *("learn", *common, "--run-dir", str(tmp_path / "run"), "--updates-max", "3"),
            *("--fragments-per-batch", "16", "--minibatch-fragments", "8", "--no-tensorboard"),
            log=tmp_path / "learner.log",
        )
        try:
            code = learner.wait(180)
            worker.terminate()
            assert 0 == worker.wait(60), (tmp_path / "worker.log").read_text()
        finally:
            for process in (worker, learner):
                process.kill()
                process.wait()
    told = (tmp_path / "learner.log").read_text()
    assert (0, "ended: updates_done") == (code, told.splitlines()[-1]), told
    lines = (tmp_path / "run" / "progress.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(1, 0), (2, 0), (3, 0)] == [(each["update"], each["misfits"]) for each in records]


def _start(*arguments: str, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "breadbox.cli.main", *arguments],
            cwd=TESTS,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**plain_environment(), "OMP_NUM_THREADS": "1"},
        )
