"""Masks of actions from the worker's environments to the learner's update, and in evaluation."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from breadbox.model.errors import InvalidRequestError
from breadbox_learner.playing import play
from breadbox_learner.settings import PpoConfig
from breadbox_learner.training.batching import TrainingBatch
from breadbox_learner.training.ppo import PpoUpdater
from breadbox_policies import PolicyModule, make_policy, policy_weights
from breadbox_rollout.environments.environments import EnvSpec
from support import masked_env
from support.collating import collate
from support.masked_env import Masked, is_allowed
from support.rollout_service import FakeService
from support.rollout_worker import running_worker

SEED = 3


def policy_of(kind: str, name: str = "policy") -> PolicyModule:
    torch.manual_seed(SEED)
    env = Masked(kind)
    made: PolicyModule = getattr(masked_env, name)(env.observation_space, env.action_space)
    return made


def collected(
    kind: str, factory: str, name: str, count: int = 24
) -> tuple[TrainingBatch, list[Any]]:
    """Fragments of eight steps that a whole worker made, as a batch and one by one."""
    service = FakeService()
    service.publish("s", 0, policy_weights(policy_of(kind, name)))
    spec = EnvSpec(name=f"support.masked_env:{factory}", options={"kind": kind})
    inside = 3 if factory == "make_vector" else 1
    pool: dict[str, Any] = {"env_count": 2 * inside, "envs_per_process": inside}
    policy = f"support.masked_env:{name}"
    with running_worker(
        service, ".", spec=spec, policy=policy, fragment_steps=8, **pool
    ) as rollout:
        rollout.wait_for_fragments(count)
    fragments = service.fragments[:count]
    return collate(fragments), fragments


@pytest.mark.parametrize("factory", ["Masked", "make_vector", "LateAgent"])
@pytest.mark.parametrize(("kind", "name"), [("discrete", "policy"), ("mixed", "recurrent")])
def test_no_forbidden_action_is_executed_and_training_on_them_is_finite(
    kind: str, factory: str, name: str
) -> None:
    """The environment takes a point for each; last observations allow nothing.

    Nor do the rows of agents that have not joined yet, which the policy gets all the same.
    """
    batch, fragments = collected(kind, factory, name)
    assert {0.0} == set(batch.reward.flatten().tolist()), f"seed {SEED}"
    for fragment in fragments:
        action = fragment.action
        for step in range(8):
            row = (
                {key: part[step] for key, part in action.items()}
                if isinstance(action, dict)
                else action[step]
            )
            assert is_allowed(kind, fragment.obs["legal"][step], row)
    alone = batch.obs["legal"].sum(-1) == len(masked_env.COUNTS[kind])
    assert bool(alone.any())
    ended = [fragment.final_obs["legal"] for fragment in fragments if fragment.final_obs]
    assert not np.concatenate(ended).any()

    policy = policy_of(kind, name)
    with torch.no_grad():
        judged = policy.evaluate(batch.obs, batch.action, batch.in_state, batch.first)
    torch.testing.assert_close(judged.log_prob, batch.log_prob, atol=1e-4, rtol=1e-4)
    batch.reward.copy_(torch.randn(batch.reward.shape, generator=torch.Generator().manual_seed(1)))
    updater = PpoUpdater(policy, PpoConfig(minibatch_fragments=4), seed=SEED)
    for number in range(3):
        statistics = updater.update(batch, number=number)
        assert 0 == statistics.skipped_steps
        told = (statistics.kl, statistics.policy_loss, statistics.entropy)
        assert np.isfinite(told).all()
        assert number or statistics.staleness_weight == pytest.approx(1.0, abs=1e-4)
    assert all(bool(each.isfinite().all()) for each in policy.parameters())


def has_fragments(service: FakeService, count: int) -> bool:
    return len(service.fragments) >= count


@pytest.mark.parametrize("late", ["mixed", "opponent"])
def test_agents_with_masks_of_their_own_take_no_forbidden_action(late: str) -> None:
    """With a policy and a buffer for each, or where one plays with earlier versions."""
    early, other = FakeService(), FakeService()
    is_opponent = late == "opponent"
    kinds = {"early": "discrete", "late": "discrete" if is_opponent else late}
    services = {"early": early} if is_opponent else {"early": early, "late": other}
    for agent, service in services.items():
        service.publish("s", 0, policy_weights(policy_of(kinds[agent])))
    with running_worker(
        early,
        ".",
        spec=EnvSpec(name="support.masked_env:Team", options=kinds),
        policy="support.masked_env:policy",
        fragment_steps=8,
        agents=services,
        opponents="late" if is_opponent else None,
        env_count=2,
        envs_per_process=1,
    ) as rollout:
        rollout.wait_for_fragments(12)
        for service in services.values():
            service.wait_until(partial(has_fragments, service, 12))
    for agent, service in services.items():
        for fragment in service.fragments:
            assert not fragment.reward.any(), f"seed {SEED}"
            assert sum(masked_env.COUNTS[kinds[agent]]) == fragment.obs["legal"].shape[1]


def test_a_worker_whose_environment_allows_nothing_ends_with_the_key_that_is_at_fault() -> None:
    service = FakeService()
    service.publish("s", 0, policy_weights(policy_of("discrete")))
    spec = EnvSpec(name="support.masked_env:Masked", options={"kind": "discrete", "blocks_at": 3})
    with (
        running_worker(service, ".", spec=spec, policy="support.masked_env:policy") as rollout,
        pytest.raises(InvalidRequestError, match="action_mask 'legal' allows nothing in row"),
    ):
        rollout.wait_for_error()


@pytest.mark.parametrize("kind", list(masked_env.ACTIONS))
def test_evaluation_minds_the_mask(kind: str) -> None:
    played = [play(Masked(kind), policy_of(kind), seed=seed, steps_max=100) for seed in range(20)]
    assert [(0.0, 6)] * 20 == [(each.episode_return, each.steps) for each in played]


@pytest.mark.parametrize("name", ["mlp", "random"])
def test_the_pages_environment_is_played_without_a_forbidden_step(name: str) -> None:
    """Beyond its ends there is no cell."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "rollout.md").read_text()
    (code,) = re.findall(r"<!-- mask -->\n```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/rollout.md#mask", "exec"), names)  # The page is ours.
    env = names["Corridor"]()
    torch.manual_seed(SEED)
    policy = make_policy(name, env.observation_space, env.action_space, action_mask="legal")
    obs, _ = env.reset(seed=SEED)
    cells = set()
    for _ in range(300):
        assert env.observation_space.contains(obs)
        batch = {key: torch.from_numpy(each[None]) for key, each in obs.items()}
        with torch.no_grad():
            acted = policy.act(batch, None, torch.ones(1, dtype=torch.bool))
        obs, _, over, _, _ = env.step(int(acted.action[0]))
        cells.add(env.cell)
        if over:
            assert [1, 0] == obs["legal"].tolist()
            obs, _ = env.reset()
    assert {0, 1, 2, 3, 4} == cells, f"seed {SEED}"
