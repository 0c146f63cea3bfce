"""The real thing: a rollout worker and a server, as processes, and a fetch from here."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import breadbox
from breadbox_policies import make_policy, policy_weights
from breadbox_rollout.atari import SIZE
from support.scripted_env import ACTION_SPACE, OBSERVATION_SPACE, check_fragment
from support.scripted_parallel import BLUE_ACTIONS
from support.server_process import ServerProcess, plain_environment

pytestmark = pytest.mark.integration

WAIT_S = 120.0


@contextmanager
def worker_process(address: str, log: Path, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker that is told to end with SIGTERM, and must then end by itself."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "breadbox.cli.main", "rollout", "--server", address, *arguments],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=plain_environment(),
        )
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert 0 == process.wait(60.0)
        finally:
            process.kill()
            process.wait()
            sys.stdout.write(log.read_text())


def test_pong_from_eight_environments_reaches_a_fetch(tmp_path: Path) -> None:
    observations = gymnasium.spaces.Box(0, 255, (SIZE, SIZE), np.uint8)
    torch.manual_seed(0)
    policy = make_policy("conv_lstm", observations, gymnasium.spaces.Discrete(6))
    server = ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "server.log")
    arguments = ["--env", "breadbox_rollout.atari:make", "--num-envs", "8", "--policy", "conv_lstm",
                 "--fragment-steps", "16", "--seed", "1"]  # fmt: skip
    with (
        server,
        worker_process(server.address, tmp_path / "worker.log", *arguments),
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        client.publish("s", 0, policy_weights(policy))
        with client.fetch(fragment_count=16, max_wait_s=WAIT_S) as lease:
            fragments = list(lease.fragments())
        client.end_session("s")
    assert 16 == len(fragments)
    assert 8 >= len({fragment.worker_id for fragment in fragments}) > 1
    for fragment in fragments:
        assert ((16, 84, 84), np.uint8) == (fragment.obs.shape, fragment.obs.dtype)
        assert fragment.log_prob is not None
        # The policy sees here what it saw there, and remembers what it remembered.
        with torch.no_grad():
            judged = policy.evaluate(
                torch.from_numpy(np.array(fragment.obs)[None]),
                torch.from_numpy(np.array(fragment.action)[None]),
                tuple(torch.from_numpy(np.array(part)[None]) for part in fragment.in_state),
                torch.from_numpy(np.array(fragment.first)[None]),
            )
        np.testing.assert_allclose(judged.log_prob[0].numpy(), fragment.log_prob, atol=1e-3)
    assert "fragments {'admitted'" in (tmp_path / "worker.log").read_text()


def test_policies_of_one_environment_fill_their_buffers_against_a_pinned_opponent(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    policies = {
        name: make_policy("mlp", OBSERVATION_SPACE, actions)
        for name, actions in (("red", ACTION_SPACE), ("blue", BLUE_ACTIONS))
    }
    champion = tmp_path / "champion.safetensors"
    save_file(policy_weights(policies["red"]), champion)
    scripts = {"red_0": "....t", "red_1": "..c", "blue_0": "......t"}
    agents = {
        "red_0": {"buffer": "red"},
        "blue_*": {"buffer": "blue"},
        "red_1": {"buffer": "red", "learn": False, "weights_files": [str(champion)]},
    }
    arguments = ["--env", "support.scripted_parallel:make", "--num-envs", "2",
                 "--env-options", json.dumps({"scripts": scripts}), "--worker-name", "w",
                 "--agents", json.dumps(agents), "--fragment-steps", "4"]  # fmt: skip
    server = ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "server.log")
    with server, breadbox.connect(server.address) as client:
        client.create_buffer("red")
        client.create_buffer("blue")
        with worker_process(server.address, tmp_path / "worker.log", *arguments):
            for name, policy in policies.items():
                with breadbox.connect(server.address, buffer=name) as learner:
                    learner.start_session(name)
                    learner.publish(name, 0, policy_weights(policy))
            for name in policies:
                with (
                    breadbox.connect(server.address, buffer=name) as learner,
                    learner.fetch(fragment_count=16, max_wait_s=WAIT_S) as lease,
                ):
                    fragments = list(lease.fragments())
                for fragment in fragments:
                    check_fragment(fragment)
                assert {f"w-0-{name}_0", f"w-1-{name}_0"} >= {f.worker_id for f in fragments}
                assert {name} == {fragment.session_id for fragment in fragments}
