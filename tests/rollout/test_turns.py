"""A worker in turns with its learner: a batch with each version, then none until the next."""

import re
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from breadbox.cli.main import cli
from breadbox_policies import NotRepeatableError, make_policy, policy_weights
from breadbox_rollout.environments.environments import EnvSpec
from support.rollout_service import FakeService
from support.rollout_worker import Rollout, running_worker
from support.scripted_env import ACTION_SPACE, OBSERVATION_SPACE, check_fragment, check_sequence

COUNT, STEPS, ENVS = 6, 4, 3
WEIGHTS = policy_weights(make_policy("mlp", OBSERVATION_SPACE, ACTION_SPACE))
SCRIPT = "....t..c."


def running(service: FakeService, script: str = SCRIPT, **options: Any) -> Any:
    chosen = {"env_count": ENVS, "fragments_per_batch": COUNT, **options}
    return running_worker(service, script, fragment_steps=STEPS, **chosen)


def versions(rollout: Rollout) -> dict[str, list[tuple[int, int]]]:
    """The oldest and newest version of each worker's fragments, in order."""
    return {
        name: [(each.model_version_min, each.model_version_max) for each in fragments]
        for name, fragments in sorted(rollout.by_worker().items())
    }


@pytest.mark.parametrize("envs_per_process", [1, 2, 3])
def test_each_version_makes_one_batch_whole_and_nothing_else(envs_per_process: int) -> None:
    service = FakeService()
    service.publish("s", 0)
    with running(service, envs_per_process=envs_per_process) as rollout:
        for turn, version in enumerate((1, 2, 4), start=1):
            service.publish("s", version, WEIGHTS)
            rollout.wait_for_fragments(turn * COUNT)
        assert 3 * COUNT == len(service.fragments)
        assert rollout.worker.step_count == 3 * COUNT * STEPS
    for fragments in rollout.by_worker().values():
        check_sequence(fragments)
        for fragment in fragments:
            check_fragment(fragment)
    each = [(version, version) for version in (1, 1, 2, 2, 4, 4)]
    assert {f"w-{env}": each for env in range(ENVS)} == versions(rollout)


@pytest.mark.parametrize("script", [SCRIPT[:5] + "!", SCRIPT[:5] + "x"])
def test_a_failing_environment_ends_a_worker_in_turns(script: str) -> None:
    service = FakeService()
    service.publish("s", 1, WEIGHTS)
    with (
        running(service, script, envs_per_process=1) as rollout,
        pytest.raises(NotRepeatableError, match="fail"),
    ):
        rollout.wait_for_error()


def test_an_environment_that_spends_a_step_on_its_reset_ends_a_worker_in_turns() -> None:
    options = {"mode": "NextStep", "scripts": [SCRIPT, "..t", "......."]}
    spec = EnvSpec(name="support.scripted_vector:make", options=options)
    service = FakeService()
    service.publish("s", 1, WEIGHTS)
    with (
        running(service, spec=spec, envs_per_process=ENVS) as rollout,
        pytest.raises(NotRepeatableError, match="spend a step on its reset"),
    ):
        rollout.wait_for_error()


def test_a_second_session_ends_a_worker_in_turns() -> None:
    """Its environments are in the middle of their episodes."""
    service = FakeService()
    service.publish("s", 1, WEIGHTS)
    with running(service) as rollout:
        rollout.wait_for_fragments(COUNT)
        service.publish("t", 1, WEIGHTS)
        with pytest.raises(NotRepeatableError, match="session 't' came"):
            rollout.wait_for_error()


def test_a_batch_that_does_not_divide_by_the_agents_ends_a_worker_in_turns() -> None:
    service = FakeService()
    service.publish("s", 1, WEIGHTS)
    options = {"scripts": {f"red_{agent}": SCRIPT for agent in range(3)}}
    spec = EnvSpec(name="support.scripted_parallel:make", options=options)
    with (
        running(service, spec=spec) as rollout,
        pytest.raises(
            NotRepeatableError, match=r"answered 2 steps of 4.*must divide by the agents"
        ),
    ):
        rollout.wait_for_error()


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (["--batch-envs", "2"], "batch_envs must be None with deterministic"),
        (["--rebuild-interval-s", "5"], "it goes by the clock"),
        (["--memory-limit", "1GiB"], "memory_limit must be 0"),
        (["--agents", '{"*": {}}'], "agents must be {}"),
        (["--num-envs", "7"], "must be a multiple of num_envs (7) with deterministic, got 64"),
    ],
)
def test_a_worker_refuses_what_it_could_not_repeat(options: list[str], remedy: str) -> None:
    arguments = ["rollout", "--env", "CartPole-v1", "--deterministic", "--dry-run", *options]
    done = CliRunner().invoke(cli, arguments)
    assert 2 == done.exit_code
    assert remedy in " ".join(done.output.split())


def test_the_seed_alone_repeats_a_worker() -> None:
    arguments = ["rollout", "--env", "CartPole-v1", "--deterministic", "--dry-run", "--seed", "3"]
    done = CliRunner().invoke(cli, arguments)
    assert 0 == done.exit_code, done.output
    assert {"seed": 3, "fragments_per_batch": 64, "num_envs": 8} == {
        name: value
        for name, value in yaml.safe_load(re.sub("^#.*", "", done.output)).items()
        if name in ("seed", "fragments_per_batch", "num_envs")
    }
