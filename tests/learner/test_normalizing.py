"""Normalisation by the learner: its statistics, where they go, and what they are for."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import NormalizeReward

from breadbox.model.errors import InvalidRequestError
from breadbox_learner.ranks import Ranks
from breadbox_learner.settings import Membership, PpoConfig
from breadbox_learner.training import checkpoint
from breadbox_learner.training.batching import EpisodeReturns, TrainingBatch
from breadbox_learner.training.checkpoint import SessionState
from breadbox_learner.training.ppo import PpoUpdater
from breadbox_learner.training.rewards import RewardScale
from breadbox_learner.training.trainer import TrainerState
from breadbox_policies import PolicyModule, make_policy, policy_weights, set_policy_weights
from support.collating import collate
from support.local_rollout import LocalRollout

ENVIRONMENTS = 4


class Scaled(gymnasium.Env[Any, Any]):
    """A point for the choice that a number far from 0, and beside a much larger one, tells."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)
    reward_scale = 1.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(), {}

    def _seen(self) -> Any:
        self.right = int(self.np_random.integers(2))
        return np.array([1000.0 + self.right, 1e5 * self.np_random.normal()], np.float32)

    def step(self, action: Any) -> Any:
        self.steps += 1
        reward = self.reward_scale * float(action == self.right)
        return self._seen(), reward, False, self.steps == 16, {}


def policy_of(env: Any, **options: Any) -> PolicyModule:
    torch.manual_seed(0)
    return make_policy("mlp", env.observation_space, env.action_space, **options)


def rollout_of(make_env: Any, seed: int = 0) -> LocalRollout:
    return LocalRollout(make_env, env_count=ENVIRONMENTS, steps_per_fragment=32, seed=seed)


def moments_of(policy: PolicyModule) -> dict[str, Any]:
    return {name: each.numpy().copy() for name, each in policy.named_buffers()}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_badly_scaled_observations_are_learned_from_with_normalization_and_not_without(
    seed: int,
) -> None:
    """Half of the choices are right at random; all can be."""
    share_right = {}
    for normalize in (True, False):
        policy = policy_of(Scaled(), normalize_observations=normalize)
        trainer = PpoUpdater(policy, PpoConfig(discount=0.5), seed=seed)
        rollout = rollout_of(Scaled, seed=100 * seed)
        for number in range(12):
            fragments = rollout.collect(policy, 4)
            trainer.update(collate(fragments), number=number)
        share_right[normalize] = np.mean([fragment.reward for fragment in fragments])
    assert share_right[True] > 0.9, f"seed {seed}: {share_right}"
    assert share_right[False] < 0.7, f"seed {seed}: {share_right}"


def test_the_statistics_are_the_mean_and_deviation_of_all_that_was_trained_on() -> None:
    policy = policy_of(Scaled(), normalize_observations=True)
    trainer = PpoUpdater(policy, PpoConfig(epochs=1))
    rollout = rollout_of(Scaled)
    batches = [collate(rollout.collect(policy, 1 + number)) for number in range(3)]
    for batch in batches:
        before = moments_of(policy)
        trainer.update(batch)
    seen = np.concatenate([batch.obs.numpy().reshape(-1, 2) for batch in batches]).astype(float)
    after = moments_of(policy)
    assert len(seen) == after["_flattener._normalizer.count"]
    np.testing.assert_allclose(seen.mean(0), after["_flattener._normalizer.mean"], rtol=1e-9)
    np.testing.assert_allclose(seen.var(0), after["_flattener._normalizer.variance"], rtol=1e-9)
    assert len(batches[2].reward.flatten()) == len(seen) - before["_flattener._normalizer.count"]


def test_an_update_trains_with_the_statistics_that_acted() -> None:
    """So that fresh data has a ratio of 1 to the policy before the update."""
    policy = policy_of(Scaled(), normalize_observations=True)
    trainer = PpoUpdater(policy, PpoConfig())
    rollout = rollout_of(Scaled)
    for _ in range(2):
        statistics = trainer.update(collate(rollout.collect(policy, 2)))
        assert pytest.approx(1.0, abs=1e-4) == statistics.staleness_weight


def test_statistics_are_among_the_weights_that_are_published_and_in_checkpoints() -> None:
    policy = policy_of(Scaled(), normalize_observations=True)
    trainer = PpoUpdater(policy, PpoConfig(normalize_rewards=True))
    rollout = rollout_of(Scaled)
    trainer.update(collate(rollout.collect(policy, 2)))
    worker = policy_of(Scaled(), normalize_observations=True)
    set_policy_weights(worker, policy_weights(policy))
    obs = torch.tensor([[1001.0, 5e4]])
    first = torch.ones(1, dtype=torch.bool)
    with torch.no_grad():
        wanted, got = (each.act(obs, None, first, greedy=True) for each in (policy, worker))
    assert torch.equal(wanted.log_prob, got.log_prob)

    data = checkpoint.encode(
        updater=trainer,
        state=TrainerState(),
        returns=EpisodeReturns(),
        session=SessionState(),
        identity={},
    )
    resumed_policy = policy_of(Scaled(), normalize_observations=True)
    resumed = PpoUpdater(resumed_policy, PpoConfig(normalize_rewards=True))
    checkpoint.restore(
        data, updater=resumed, returns=EpisodeReturns(), identity={}, source="checkpoint"
    )
    before = moments_of(policy)
    for name, held in moments_of(resumed_policy).items():
        np.testing.assert_array_equal(before[name], held)
    assert trainer.rewards.written() == resumed.rewards.written()
    assert trainer.rewards.written()["count"] > [0.0]


class Rewarding(gymnasium.Env[Any, Any]):
    """Rewards of a given scale, in episodes of differing length."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 60))
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        reward = float(self.np_random.normal(300.0, 100.0))
        return np.zeros(1, np.float32), reward, self.left == 0, False, {}


def test_rewards_are_scaled_as_gymnasium_scales_them_and_fragments_keep_their_own() -> None:
    """One environment, so that the wrapper and the learner count the same returns."""
    policy = policy_of(Rewarding())
    rollout = LocalRollout(Rewarding, env_count=1, steps_per_fragment=16, seed=3)
    scale = RewardScale(0.97, 1e6, Ranks())
    batches = [collate(rollout.collect(policy, 4)) for _ in range(6)]
    for batch in batches:
        raw = batch.reward.clone()
        scaled = scale.scaled(batch)
        assert torch.equal(raw, batch.reward)

    oracle = NormalizeReward(Rewarding(), gamma=0.97)
    oracle.reset()
    total = 0.0
    returns = []
    for batch in batches:
        for first, reward in zip(batch.first.flatten(), batch.reward.flatten(), strict=True):
            total = float(reward) + (0.0 if first else 0.97 * total)
            returns.append(total)
    oracle.return_rms.update(np.array(returns))
    # Gymnasium begins with a made-up count of 1e-4.
    deviation = float(np.sqrt(np.asarray(oracle.return_rms.var)))
    np.testing.assert_allclose(raw.numpy() / deviation, scaled.reward.numpy(), rtol=1e-3)


def test_fragments_that_come_again_or_after_a_gap_do_not_bend_the_scale() -> None:
    policy = policy_of(Rewarding())
    rollout = LocalRollout(Rewarding, env_count=2, steps_per_fragment=16, seed=5)
    fragments = [rollout.collect(policy, 1) for _ in range(8)]
    once, again = RewardScale(0.97, 10.0, Ranks()), RewardScale(0.97, 10.0, Ranks())
    for each in fragments:
        once.scaled(collate(each))
        again.scaled(collate([*each, *each]))
        again.scaled(collate(each))
    assert once.written() == again.written()
    gaps = RewardScale(0.97, 10.0, Ranks())
    for each in fragments[::2]:
        gaps.scaled(collate(each))
    ratio = gaps.written()["variance"][0] / once.written()["variance"][0]
    assert 0.3 < ratio < 3.0


def test_a_large_reward_is_clipped() -> None:
    policy = policy_of(Rewarding())
    batch = collate(LocalRollout(Rewarding, env_count=1, steps_per_fragment=16, seed=3).collect(policy, 1))  # fmt: skip  # noqa: E501
    scaled = RewardScale(0.0, 2.0, Ranks()).scaled(batch)
    assert 2.0 == float(scaled.reward.max())


class _Halves(Ranks):
    """Two ranks in one process: each holds its half, and what is gathered is the whole."""

    def __init__(self, rank: int, gather: Any, told: list[bytes]) -> None:
        self.membership = Membership(rank, 2)
        self._gather, self._told = gather, told

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._gather(rows)
        return result

    def from_main(self, data: bytes) -> bytes:
        if self.membership.is_main:
            self._told[:] = [data]
        return self._told[0]


class Continuous(Scaled):
    """The same for a number over or under 0."""

    action_space: Any = spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action: Any) -> Any:
        return super().step(action[0] > 0)


@pytest.mark.parametrize(
    ("make_env", "options", "counted"),
    [
        (Scaled, {}, 0),
        (Scaled, {"normalize_rewards": True}, 2 * 32 * ENVIRONMENTS),
        (Continuous, {}, 2 * 32 * ENVIRONMENTS),
        (Continuous, {"normalize_rewards": False}, 0),
    ],
)
def test_rewards_are_scaled_by_default_where_actions_are_continuous(
    make_env: Any, options: dict[str, Any], counted: int
) -> None:
    policy = policy_of(make_env())
    trainer = PpoUpdater(policy, PpoConfig(epochs=1, **options))
    trainer.update(collate(rollout_of(make_env).collect(policy, 2)))
    assert trainer.rewards.written()["count"] == [counted]


def test_all_ranks_have_the_same_statistics() -> None:
    rollout = rollout_of(Scaled)
    policies = [policy_of(Scaled(), normalize_observations=True) for _ in range(2)]
    batch = collate(rollout.collect(policies[0], 2))
    rows: list[torch.Tensor] = []

    def kept(own: torch.Tensor) -> torch.Tensor:
        rows.append(own)
        return own

    RewardScale(0.9, 10.0, _Halves(0, kept, [])).scaled(batch)
    told: list[bytes] = []
    trainers = [
        PpoUpdater(
            policy,
            PpoConfig(normalize_rewards=True, epochs=1),
            ranks=_Halves(rank, lambda _: rows[0], told),
        )
        for rank, policy in enumerate(policies)
    ]
    shares = [collate(rollout.collect(policies[0], 1)) for _ in range(2)]
    for trainer, share in zip(trainers, shares, strict=True):
        trainer.update(share)
    first, second = map(moments_of, policies)
    assert first["_flattener._normalizer.count"] == len(shares[0].reward.flatten())
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert trainers[0].rewards.written() == trainers[1].rewards.written()


class _OldPolicy(PolicyModule):
    """A user's policy that counts its calls, and one that has no hook at all."""

    def __init__(self, inner: PolicyModule) -> None:
        super().__init__()
        self.inner = inner
        self.calls: list[tuple[str, bool]] = []

    def initial_state(self, batch_size: int) -> Any:
        return None

    def act(self, *arguments: Any, **options: Any) -> Any:
        return self.inner.act(*arguments, **options)

    def evaluate(self, *arguments: Any) -> Any:
        self.calls.append(("evaluate", self.training))
        return self.inner.evaluate(*arguments)


class _Counting(_OldPolicy):
    def update_statistics(self, batch: TrainingBatch) -> None:
        self.calls.append((f"update_statistics {len(batch)}", torch.is_grad_enabled()))


def test_a_policy_is_told_once_of_each_batch_after_training_on_it() -> None:
    policy = _Counting(policy_of(Scaled()))
    batch = collate(rollout_of(Scaled).collect(policy, 2))
    PpoUpdater(policy, PpoConfig(epochs=1)).update(batch)
    assert ("evaluate", False) == policy.calls[0]
    assert ("evaluate", True) == policy.calls[-2]
    assert (f"update_statistics {len(batch)}", False) == policy.calls[-1]
    assert 1 == sum(name.startswith("update") for name, _ in policy.calls)


def test_a_policy_without_the_hook_trains_as_before() -> None:
    plain, wrapped = policy_of(Scaled()), _OldPolicy(policy_of(Scaled()))
    batch = collate(rollout_of(Scaled).collect(plain, 2))
    for policy in (plain, wrapped):
        PpoUpdater(policy, PpoConfig()).update(batch)
    for wanted, got in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(wanted, got)


def test_a_clip_range_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="observation_clip"):
        policy_of(Scaled(), normalize_observations=True, observation_clip=0.0)
