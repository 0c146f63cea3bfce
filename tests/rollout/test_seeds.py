"""Whose data are alike: nobody's by default, and a start's with the same seed and name."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import safetensors.numpy
import torch
import yaml
from click.testing import CliRunner

import breadbox
from breadbox.cli.main import cli
from breadbox.model.fragment import Fragment
from breadbox_policies import make_policy, policy_weights
from breadbox_rollout.settings import default_worker_name, mixed_seed
from support.server_process import ServerProcess, plain_environment
from support.tiers import long_but

STEPS = 400


def digest(fragment: Fragment) -> str:
    arrays = (fragment.obs, fragment.action, fragment.reward, fragment.log_prob)
    return hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in arrays)).hexdigest()


def in_a_process(*arguments: str) -> str:
    """Run a command; what it says on standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "breadbox.cli.main", *arguments],
        env=plain_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return done.stderr


def here(*arguments: str) -> str:
    """The same in this process, which has torch already and whose random numbers go on."""
    done = CliRunner().invoke(cli, arguments)
    assert 0 == done.exit_code, done.output
    return done.stderr


Run = Callable[..., str]


def data_of(tmp_path: Path, *starts: tuple[Run, tuple[str, ...]]) -> list[set[str]]:
    """Run a worker of one environment for each of *starts*; digests of each one's fragments.

    One environment and one model: what such a worker makes does not depend on time.
    """
    server = ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "server.log")
    found = []
    with server, breadbox.connect(server.address) as client:
        for number, (run, arguments) in enumerate(starts):
            client.start_session(f"s{number}")
            run(
                *("rollout", "--env", "CartPole-v1", "--policy", "random", "--num-envs", "1"),
                *("--fragment-steps", "8", "--steps-max", str(STEPS)),
                *("--server", server.address, *arguments),
            )
            with client.fetch(fragment_count=STEPS // 8, max_wait_s=30.0) as lease:
                found.append({digest(fragment) for fragment in lease.fragments()})
            client.end_session(f"s{number}")
    return found


@pytest.mark.integration
@pytest.mark.timeout(120)
@pytest.mark.long
def test_two_workers_of_the_defaults_make_different_data(tmp_path: Path) -> None:
    """120 of 120 fragments of two workers were the same bytes."""
    one, two = data_of(tmp_path, (in_a_process, ()), (in_a_process, ()))
    assert (50, 50, set()) == (len(one), len(two), one & two)


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_a_given_seed_is_another_for_each_name_and_the_same_for_the_same(tmp_path: Path) -> None:
    named = ("--seed", "7", "--worker-name")
    one, again, other = data_of(
        tmp_path, (in_a_process, (*named, "a")), (here, (*named, "a")), (here, (*named, "b"))
    )
    assert one == again
    assert set() == one & other


def dry_run(*arguments: str) -> dict[str, Any]:
    found = CliRunner().invoke(cli, ["rollout", "--dry-run", "--env", "CartPole-v1", *arguments])
    assert 0 == found.exit_code, found.output
    return dict(yaml.safe_load(found.stdout))


def test_two_starts_have_two_seeds_and_the_environments_of_each_differ() -> None:
    assert dry_run()["seed"] != dry_run()["seed"]
    seeds = {mixed_seed(seed, name) for seed in range(100) for name in ("a", "b", "a-1", "1")}
    assert (400, True) == (len(seeds), all(0 <= seed < 2**63 for seed in seeds))
    assert mixed_seed(1, "1/a") != mixed_seed(11, "a")


def test_names_of_hosts_that_are_called_alike_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas have long names whose ends alone differ, and these are cut."""

    class Host:
        nodename = "breadbox-rollout-worker-of-some-deployment-7d9f8c6b5f-x2x4z"

    monkeypatch.setattr("os.uname", Host)
    names = [default_worker_name() for _ in range(1000)]
    assert 1000 == len(set(names))
    assert all(re.fullmatch(r"breadbox-rollout-worker-of-some--[0-9a-f]{16}", n) for n in names)


@pytest.mark.parametrize("seed", long_but(1, [("--seed", "5"), ()]))
def test_generate_plays_other_episodes_each_time_unless_it_is_told_the_seed(
    tmp_path: Path, seed: tuple[str, ...]
) -> None:
    def seeds(run: Run, out: Path) -> list[int]:
        said = run(
            *("generate", "--env", "CartPole-v1", "--policy", "random", "--episodes", "2"),
            *("--media", "none", "--no-progress", "--out", str(out), *seed),
        )
        assert re.search(r"seed \d+ \(--seed repeats", said)
        lines = (out / "manifest.jsonl").read_text().splitlines()
        return [json.loads(line)["seed"] for line in lines]

    assert bool(seed) == (seeds(in_a_process, tmp_path / "a") == seeds(here, tmp_path / "b"))


def test_greedy_episodes_repeat_the_likeliest_actions(tmp_path: Path) -> None:
    env = gymnasium.make("CartPole-v1")
    torch.manual_seed(3)
    policy = make_policy("mlp", env.observation_space, env.action_space)
    safetensors.numpy.save_file(policy_weights(policy), tmp_path / "weights.safetensors")
    here(
        *("generate", "--env", "CartPole-v1", "--policy", "mlp", "--greedy", "--episodes", "2"),
        *("--weights-file", str(tmp_path / "weights.safetensors"), "--media", "none"),
        *("--no-progress", "--out", str(tmp_path / "out")),
    )
    lines = (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()
    for entry in map(json.loads, lines):
        obs, _ = env.reset(seed=entry["seed"])
        wanted, over = [], False
        while not over:
            with torch.no_grad():
                logits = policy.actor(torch.from_numpy(obs)[None])[0]  # type: ignore[operator]
            wanted.append(int(np.argmax(logits.numpy())))
            obs, _, terminated, truncated, _ = env.step(wanted[-1])
            over = terminated or truncated
        with np.load(tmp_path / "out" / entry["action_path"], allow_pickle=False) as arrays:
            assert wanted == arrays["action"].tolist()
        assert entry["greedy"] is True
    assert 2 == len(lines)
    env.close()
