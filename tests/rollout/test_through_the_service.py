"""The real thing: a rollout worker and a server, as processes, and a fetch from here."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import breadbox
from breadbox_policies import make_policy, policy_weights
from breadbox_rollout.atari import SIZE
from support.eventually import eventually_sync
from support.scripted_env import ACTION_SPACE, OBSERVATION_SPACE, check_fragment
from support.scripted_parallel import BLUE_ACTIONS
from support.server_process import ServerProcess, plain_environment
from support.token_files import line_of, write_tokens

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

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


def test_a_worker_beside_a_resumed_learner_acts_with_its_weights_or_not_at_all(
    tmp_path: Path,
) -> None:
    """Between the session's start at 95 and its weights it played untrained, labelled 95."""
    policy = make_policy("mlp", *_spaces("CartPole-v1"))
    server = ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "server.log")
    arguments = ["--env", "CartPole-v1", "--policy", "mlp", "--fragment-steps", "8"]
    log = tmp_path / "worker.log"
    with (
        server,
        worker_process(server.address, log, *arguments),
        breadbox.connect(server.address) as client,
    ):
        client.start_session("resumed", model_version=95)
        eventually_sync(
            lambda: (
                "waiting for a learner to publish weights; version 95 has none" in log.read_text()
            ),
            within_s=WAIT_S,
        )
        assert 0 == client.get_buffer().state.counters["fragments_admitted"]
        client.publish("resumed", 96, policy_weights(policy))
        with client.fetch(fragment_count=16, max_wait_s=WAIT_S) as lease:
            versions = {each.metadata.model_version_min for each in lease.references}
    assert {96} == versions


def test_a_paced_worker_holds_a_ticket_for_each_environment_and_loses_no_fragment(
    tmp_path: Path,
) -> None:
    policy = policy_weights(make_policy("mlp", *_spaces("CartPole-v1")))
    limits = ["--stale", "wait", "--groups-per-version", "8", "--lead-versions", "2"]
    server = ServerProcess("--store", f"file://{tmp_path}/store", *limits, log=tmp_path / "log")
    arguments = ["--env", "CartPole-v1", "--policy", "mlp", "--fragment-steps", "8", "--pace"]
    with server, breadbox.connect(server.address) as client:
        client.start_session("s")
        client.publish("s", 1, policy)
        with worker_process(server.address, tmp_path / "worker.log", *arguments, "--num-envs", "4"):
            for version in range(2, 6):
                with client.fetch(fragment_count=8, max_wait_s=WAIT_S) as lease:
                    staleness = [each.staleness_when_granted for each in lease.references]
                assert 2 >= max(staleness)
                # All tickets of the version are taken: nobody steps until it is published.
                eventually_sync(
                    lambda: client.get_buffer().state.ticket_waiting_reason != "", within_s=WAIT_S
                )
                client.publish("s", version, policy)
        counters = client.get_buffer().state.counters
        left = client.get_buffer().state.ticket_count
    assert 0 == left, "given back at the end"
    assert (0, 0) == (counters["fragments_stale"], counters["chunks_evicted_stale"])
    assert counters["tickets_given"] >= counters["fragments_admitted"] >= 4 * 8


def run_to_its_end(address: str, log: Path, *arguments: str) -> tuple[int, str]:
    """Run a worker that ends by itself; gives its exit code and what it said."""
    command = [sys.executable, "-m", "breadbox.cli.main", "rollout", "--server", address]
    with log.open("w") as output:
        done = subprocess.run(
            [*command, "--env", "CartPole-v1", "--policy", "mlp", *arguments],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=plain_environment(),
            timeout=WAIT_S,
            check=False,
        )
    return done.returncode, log.read_text()


def test_a_worker_of_other_fragment_steps_than_its_session_ends_with_code_2(tmp_path: Path) -> None:
    """It played for ever, and every fragment was refused."""
    server = ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "server.log")
    policy = make_policy("mlp", *_spaces("CartPole-v1"))
    arguments = ["--env", "CartPole-v1", "--policy", "mlp", "--fragment-steps", "8"]
    with server, breadbox.connect(server.address) as client:
        client.start_session("s")
        client.publish("s", 1, policy_weights(policy))
        with worker_process(server.address, tmp_path / "right.log", *arguments):
            eventually_sync(
                lambda: client.get_buffer().state.counters["fragments_admitted"] > 0,
                within_s=WAIT_S,
            )
            code, said = run_to_its_end(
                server.address, tmp_path / "wrong.log", "--fragment-steps", "16"
            )
    assert 2 == code
    assert "step_count: 8 wanted, 16 got" in said
    assert "all its workers need one --fragment-steps" in said
    assert "Traceback" not in said


def test_a_worker_whose_token_is_taken_away_ends_with_code_2(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    learner, producer = write_tokens(tokens, "learner l", "producer p")
    server = ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--tokens", str(tokens)),
        log=tmp_path / "server.log",
    )
    policy = make_policy("mlp", *_spaces("CartPole-v1"))
    with (
        server,
        breadbox.connect(server.address, token=learner) as client,
        ThreadPoolExecutor() as pool,
    ):
        client.start_session("s")
        client.publish("s", 1, policy_weights(policy))
        log = tmp_path / "worker.log"
        ending = pool.submit(run_to_its_end, server.address, log, "--token", producer)
        eventually_sync(
            lambda: client.get_buffer().state.counters["fragments_admitted"] > 0, within_s=WAIT_S
        )
        tokens.write_text(line_of("learner l", learner))
        code, said = ending.result(WAIT_S)
    assert 2 == code
    assert "Error: " in said
    assert "token" in said
    assert "Traceback" not in said


def _spaces(env_id: str) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    with closing(gymnasium.make(env_id)) as env:
        return env.observation_space, env.action_space


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
