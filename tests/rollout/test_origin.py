"""What a worker's steps come from: the same text in every process, another one for other steps."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import vector as vector_wrappers

import breadbox
from breadbox_policies import make_policy, policy_weights
from breadbox_rollout.environments.origin import policy_text, spaces_text, wrappers_of
from rollout.test_through_the_service import WAIT_S, run_to_its_end, worker_process
from support.eventually import eventually_sync
from support.server_process import ServerProcess, plain_environment
from support.wrapped_cartpole import make

KINDS = ["plain", "lambda", "opaque", "partial", "broken", "normalized", "both", "bounded"]
WITHIN = "TimeLimit(max_episode_steps=500)"
NO_WRAPPERS = {"environment wrappers": WITHIN, "vector wrappers": "none"}


def origin_of(kind: str, **options: Any) -> dict[str, str]:
    env = make(kind, **options)
    return wrappers_of(env) | spaces_text(env.observation_space, env.action_space)


def test_the_same_stack_has_the_same_origin_in_another_process() -> None:
    source = (
        "import json, sys; from rollout.test_origin import *;"
        "json.dump({kind: origin_of(kind) for kind in KINDS}, sys.stdout)"
    )
    told = subprocess.run(
        [sys.executable, "-c", source],
        check=True,
        capture_output=True,
        cwd=Path(__file__).parent.parent,
        env={**plain_environment(), "PYTHONHASHSEED": "7"},
    ).stdout
    assert {kind: origin_of(kind) for kind in KINDS} == json.loads(told)
    assert "0x" not in told.decode()


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        ({"kind": "plain"}, {"kind": "normalized"}, {"environment wrappers", "observation space"}),
        ({"kind": "both"}, {"kind": "both, other order"}, {"environment wrappers"}),
        (
            {"kind": "normalized"},
            {"kind": "normalized", "epsilon": 0.5},
            {"environment wrappers"},
        ),
        ({"kind": "plain"}, {"kind": "bounded"}, {"observation space"}),
        ({"kind": "lambda"}, {"kind": "partial"}, {"environment wrappers"}),
        ({"kind": "plain"}, {"kind": "watched"}, set()),
        ({"kind": "plain"}, {"kind": "checked"}, set()),
    ],
    ids=lambda each: str(each.get("kind")) if isinstance(each, dict) else "",
)
def test_what_changes_steps_changes_the_origin_and_what_only_watches_does_not(
    one: dict[str, Any], other: dict[str, Any], differs: set[str]
) -> None:
    first, second = origin_of(**one), origin_of(**other)
    assert differs == {name for name in first | second if first.get(name) != second.get(name)}


def test_a_vector_environment_has_the_wrappers_within_and_its_own_apart() -> None:
    made = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    assert NO_WRAPPERS == wrappers_of(made) == wrappers_of(make())
    normalized = vector_wrappers.NormalizeObservation(made)
    outside = "NormalizeObservation(epsilon=1e-08)"
    assert {**NO_WRAPPERS, "vector wrappers": outside} == wrappers_of(normalized)


def test_of_a_vector_environment_that_shows_nothing_within_no_wrappers_are_said() -> None:
    made = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
    assert {"vector wrappers": "none"} == wrappers_of(made)


def test_a_policy_is_described_by_the_options_that_are_not_its_defaults() -> None:
    env = make()

    def text(**options: Any) -> str:
        policy = make_policy("auto", env.observation_space, env.action_space, **options)
        return policy_text(policy, options)["policy"]

    assert text() == text(hidden_sizes=[64, 64])
    assert "breadbox_policies.networks.MlpPolicy(hidden_sizes=[8])" == text(hidden_sizes=[8])


def test_the_order_of_keys_is_no_difference_and_a_long_description_is_cut_to_its_digest() -> None:
    parts = {f"k{i}": spaces.Box(0, i + 1.0, (2,), np.float32) for i in range(20)}
    backwards = list(reversed(parts.items()))
    act = spaces.Discrete(2)
    first = spaces_text(spaces.Dict(list(parts.items())), act)
    assert first == spaces_text(spaces.Dict(backwards), act)
    others = dict(parts, k19=spaces.Box(0, 21.0, (2,), np.float32))
    second = spaces_text(spaces.Dict(list(others.items())), act)
    assert first["observation space"] != second["observation space"]
    assert max(len(text) for text in first.values()) <= 512


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_a_worker_of_other_wrappers_than_its_session_ends_with_code_2(tmp_path: Path) -> None:
    """It was admitted, and the learner trained on observations of two scales."""
    env = make()
    policy = make_policy("mlp", env.observation_space, env.action_space)
    server = ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "server.log")
    arguments = ["--env", "support.wrapped_cartpole:make", "--fragment-steps", "8"]
    normalized = [*arguments, "--env-options", '{"kind": "normalized"}', "--worker-name", "norm"]
    with server, breadbox.connect(server.address) as client:
        client.start_session("s")
        client.publish("s", 1, policy_weights(policy))
        log = tmp_path / "right.log"
        with worker_process(server.address, log, *arguments, "--policy", "mlp"):
            eventually_sync(
                lambda: client.get_buffer().state.counters["fragments_admitted"] > 0,
                within_s=WAIT_S,
            )
            code, said = run_to_its_end(server.address, tmp_path / "wrong.log", *normalized)
        assert 2 == code
        assert f"environment wrappers: {WITHIN} wanted, " in said
        assert "DtypeObservation(" in said
        assert "start a new session for others" in said
        assert "fragments {'admitted'" not in said
        code, said = run_to_its_end(
            *(server.address, tmp_path / "wanted.log", *normalized),
            *("--no-declare-origin", "--steps-max", "64"),
        )
        assert (0, True) == (code, "'admitted'" in said)
