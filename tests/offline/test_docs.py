"""Goal: the worked example in docs/offline.md does what the page says.

Method: run its code as it stands, on a recording by a hand-made expert.
"""

import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from breadbox_offline.episodes.episode import Episode
from breadbox_offline.errors import SamplingError
from breadbox_offline.files.writers import write_episodes
from breadbox_offline.training.cloning import clone_policy
from breadbox_policies import make_policy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "offline.md"
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


@pytest.mark.timeout(280)
def test_the_worked_example_clones_an_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = gymnasium.make("CartPole-v1")
    write_episodes((play_expert(env, seed) for seed in range(30)), tmp_path / "expert.parquet")
    env.close()
    found = re.search(r"<!-- clone -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    # Fewer games than on the page: they are what takes the time.
    code = found[1].replace("range(1000, 1020)", "range(1000, 1005)")
    assert code != found[1]
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    names: dict[str, object] = {}
    try:
        exec(compile(code, str(PAGE), "exec"), names)  # the page is ours
    finally:
        torch.set_num_threads(threads)
    returns = names["returns"]
    assert isinstance(returns, list)
    assert np.mean(returns) >= 400, f"seed 0: {returns}"


def test_nothing_cannot_be_cloned() -> None:
    env = gymnasium.make("CartPole-v1")
    with pytest.raises(SamplingError, match="no episode"):
        clone_policy(make_policy("mlp", env.observation_space, env.action_space), [])
    env.close()
