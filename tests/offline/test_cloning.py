"""Goal: a policy cloned from an expert's episodes plays like the expert."""

from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
import torch

from breadbox.policies import PolicyModule, make_policy
from breadbox_learner.offline.cloning import CloningConfig, clone_policy
from breadbox_learner.offline.episode import Episode
from breadbox_learner.offline.errors import SamplingError

EXPERT = np.array([0.1, 0.3, 1.0, 1.0])
"""Push the cart to the side that the pole, and the cart a little, lean and move to."""


def play_expert(env: gymnasium.Env, seed: int) -> Episode:
    obs, _ = env.reset(seed=seed)
    observations, actions, rewards = [obs], [], []
    terminated = truncated = False
    while not (terminated or truncated):
        actions.append(int(EXPERT @ obs > 0))
        obs, reward, terminated, truncated, _ = env.step(actions[-1])
        observations.append(obs)
        rewards.append(reward)
    return Episode(
        id=str(seed),
        observations=np.stack(observations),
        actions=np.array(actions),
        rewards=np.array(rewards),
        terminated=terminated,
        truncated=truncated,
    )


def play(env: gymnasium.Env, policy: PolicyModule, seed: int) -> float:
    obs, _ = env.reset(seed=seed)
    state, first = policy.initial_state(1), torch.ones(1, dtype=torch.bool)
    return_sum, is_over = 0.0, False
    while not is_over:
        with torch.no_grad():
            result = policy.act(torch.as_tensor(obs)[None], state, first)
        state, first = result.state, torch.zeros(1, dtype=torch.bool)
        obs, reward, terminated, truncated, _ = env.step(int(result.action[0]))
        return_sum, is_over = return_sum + float(reward), terminated or truncated
    return return_sum


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny networks: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.timeout(240)
def test_a_cloned_policy_balances_the_pole() -> None:
    env = gymnasium.make("CartPole-v1")
    torch.manual_seed(0)
    policy = make_policy("mlp", env.observation_space, env.action_space)
    episodes = [play_expert(env, seed) for seed in range(4)]
    result = clone_policy(policy, episodes, CloningConfig(epochs=6, batch_size=64, lr=3e-3))
    returns = [play(env, policy, 1000 + seed) for seed in range(3)]
    env.close()
    assert result.losses[-1] < 0.5 * result.losses[0]
    assert np.mean(returns) >= 400, f"seed 0: {returns}"


def test_nothing_cannot_be_cloned() -> None:
    env = gymnasium.make("CartPole-v1")
    with pytest.raises(SamplingError, match="no episode"):
        clone_policy(make_policy("mlp", env.observation_space, env.action_space), [])
    env.close()
