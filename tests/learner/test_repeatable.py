"""Runs with --deterministic: the same seeds give the same weights and records, to the bit."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import breadbox
from breadbox.cli.main import cli
from breadbox.testing import ServerProcess, start_server
from breadbox_learner.training.checkpoint import read_policy_weights
from rollout.test_through_the_service import worker_process
from support.eventually import eventually_sync
from support.server_process import plain_environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

UPDATES = 5
NORMALIZED = ("--policy-options", json.dumps({"normalize_observations": True}))
CLOCKED = {"time_s", "fetch_wait_s", "load_s", "update_s", "waiting_reason"}
"""Fields of a record that measure, so that they differ from run to run."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server(options=["--gateway"]) as running:
        yield running


def worker(seed: int, *options: str) -> list[str]:
    return [
        *("--deterministic", "--fragments-per-batch", "12", "--fragment-steps", "16"),
        *("--env", "CartPole-v1", "--num-envs", "3", "--seed", str(seed), *options),
    ]


def learner(address: str, folder: Path, seed: int, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "breadbox.cli.main", "learn", "--server", address),
        *("--deterministic", "--fragments-per-batch", "12", "--updates-max", str(UPDATES)),
        *("--run-dir", str(folder), "--seed", str(seed), "--minibatch-fragments", "5"),
        *("--checkpoint-every", "0", "--no-tensorboard", "--wait-limit-s", "40", *options),
    ]


def learn(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = plain_environment()
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "progress.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in CLOCKED}
        for line in lines
    ]


def trained(
    server: ServerProcess,
    folder: Path,
    *,
    seed: int = 1,
    env_seed: int = 1,
    options: Any = ((), ()),
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Run a worker and a learner to the end; what the learner wrote, and its weights."""
    of_worker, of_learner = options
    log = folder.with_suffix(".log")
    with worker_process(server.address, log, *worker(env_seed, *of_worker)):
        done = learn(learner(server.address, folder, seed, *of_learner))
    assert 0 == done.returncode, done.stderr + log.read_text()
    weights = read_policy_weights(folder / "checkpoint.safetensors")
    return records(folder), {name: each.tobytes() for name, each in weights.items()}


@pytest.mark.parametrize(
    ("of_worker", "of_learner"),
    [
        ((), ()),
        # Three processes, whose answers come in any order.
        (("--envs-per-process", "1", "--policy", "lstm"), ("--policy", "lstm")),
        (NORMALIZED, (*NORMALIZED, "--normalize-rewards")),
    ],
    ids=["mlp", "lstm", "normalized"],
)
def test_the_same_seeds_give_the_same_weights_and_curve_and_others_do_not(
    server: ServerProcess,
    tmp_path: Path,
    of_worker: tuple[str, ...],
    of_learner: tuple[str, ...],
) -> None:
    options = (of_worker, of_learner)
    first = trained(server, tmp_path / "first", options=options)
    again = trained(server, tmp_path / "again", options=options)
    assert first == again
    curve, weights = first
    assert UPDATES == len(curve)
    assert [0] * UPDATES == [each["staleness_max"] for each in curve]
    assert [12 * 16 * (n + 1) for n in range(UPDATES)] == [
        each["environment_steps"] for each in curve
    ]
    others = trained(server, tmp_path / "others", env_seed=2, options=options)
    assert curve != others[0]
    assert weights != others[1]
    assert weights != trained(server, tmp_path / "learner", seed=2, options=options)[1]
    said = (tmp_path / "first" / "settings.yaml").read_text().splitlines()
    assert {"seed: 1", "deterministic: true"} <= set(said)


def test_a_run_through_the_gateway_is_the_same_as_one_beside_the_store(
    server: ServerProcess, tmp_path: Path
) -> None:
    through = ("--store-url", "gateway:")
    beside = trained(server, tmp_path / "beside")
    assert beside == trained(server, tmp_path / "through", options=(through, through))


def test_a_killed_run_is_repeated_from_its_start_by_new_processes(
    server: ServerProcess, tmp_path: Path
) -> None:
    whole = trained(server, tmp_path / "whole")
    folder, log = tmp_path / "killed", tmp_path / "killed.log"
    with worker_process(server.address, log, *worker(1)):
        command = learner(server.address, folder, 1, "--updates-max", "1000")
        process = subprocess.Popen(command, env=plain_environment())
        progress = folder / "progress.jsonl"
        eventually_sync(lambda: progress.exists() and len(records(folder)) >= 2, within_s=60)
        process.kill()
        process.wait()
    with breadbox.connect(server.address) as client:
        killed = client.get_buffer().session_id
        # The learner first: a worker that meets the killed run's session ends with its own.
        anew = ("--overwrite", "--take-over")  # The server has seen its worker a moment ago.
        process = subprocess.Popen(
            learner(server.address, folder, 1, *anew), env=plain_environment()
        )
        eventually_sync(lambda: client.get_buffer().session_id != killed, within_s=60)
        with worker_process(server.address, log, *worker(1)):
            assert 0 == process.wait(120)
    weights = read_policy_weights(folder / "checkpoint.safetensors")
    assert whole == (records(folder), {name: each.tobytes() for name, each in weights.items()})


def test_a_learner_that_gets_another_batch_than_one_worker_makes_ends_with_the_remedy(
    server: ServerProcess, tmp_path: Path
) -> None:
    """A second worker, or one with other fragments per batch: drawn by chance, and never again."""
    many = worker(1, "--fragments-per-batch", "15")
    with worker_process(server.address, tmp_path / "worker.log", *many):
        done = learn(learner(server.address, tmp_path / "run", 1))
    assert 2 == done.returncode
    assert "is not what one worker makes with version" in done.stderr
    assert "`breadbox rollout --deterministic --fragments-per-batch 12`" in done.stderr


@pytest.mark.parametrize(
    ("options", "environment", "remedy"),
    [
        (["--prefetch-batches", "1"], {}, "prefetch_batches must be 0 with deterministic: a batch"),
        (["--publish-every", "2"], {}, "publish_every must be 1 with deterministic"),
        (["--value-warmup-updates", "1"], {}, "value_warmup_updates must be 0"),
        (["--resume"], {}, "start anew, or go on without it"),
        ([], {"RANK": "0", "WORLD_SIZE": "2"}, "deterministic needs a single process"),
    ],
)
def test_a_learner_refuses_what_it_could_not_repeat(
    options: list[str], environment: dict[str, str], remedy: str, tmp_path: Path
) -> None:
    arguments = ["learn", "--deterministic", "--run-dir", str(tmp_path), "--dry-run", *options]
    done = CliRunner(env=environment).invoke(cli, arguments)
    assert 2 == done.exit_code
    assert remedy in " ".join(done.output.split())
