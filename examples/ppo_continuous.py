"""PPO with continuous actions, from four environments at once; the learner is that of ppo_dict.py.

    python examples/ppo_continuous.py                # a server, two producers and the learner

`learn HOST:50051` and `act HOST:50051` as there.
"""

import itertools

import ppo_dict
import torch
from gymnasium.vector import SyncVectorEnv
from reach import Reach
from torch import nn
from torch.distributions import Independent, Normal

import breadbox

ENVS = 4


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 2), nn.Linear(64, 1)
        self.log_std = nn.Parameter(torch.full((2,), -0.5))

    def forward(self, obs):  # a dict of tensors [..., 2]
        hidden = self.body(torch.cat([obs["place"], obs["goal"]], dim=-1))
        normal = Normal(self.actor(hidden), self.log_std.exp())
        return Independent(normal, 1), self.critic(hidden)[..., 0]  # one probability per action


def act(address: str, seed: int | None = None) -> None:
    torch.set_num_threads(1)
    envs = SyncVectorEnv([lambda: Reach(continuous=True)] * ENVS)
    policy, known, autoreset = Policy(), None, envs.metadata["autoreset_mode"]
    with (
        breadbox.connect(address) as client,
        breadbox.StepWriter(
            client, env_count=ENVS, autoreset=autoreset, session_wait_s=600
        ) as writer,
    ):
        obs, _ = envs.reset(seed=seed)
        for step in itertools.count():
            if step % 16 == 0 and (newer := client.load_model(known)) is not None:
                known, weights = newer
                policy.load_state_dict({name: torch.tensor(w) for name, w in weights.items()})
                writer.model_version = known.model_version
            with torch.no_grad():
                choice, _ = policy({key: torch.from_numpy(part) for key, part in obs.items()})
                action = choice.sample()  # stored as it was drawn; the environment clips it
            next_obs, reward, terminated, truncated, _ = envs.step(action.numpy())
            ends, log_prob = (terminated, truncated), choice.log_prob(action).numpy()
            writer.add(obs, action.numpy(), reward, next_obs, *ends, log_prob=log_prob)
            obs = next_obs


def learn(address: str) -> float:
    return ppo_dict.learn(address, Policy())


if __name__ == "__main__":
    ppo_dict.main(act, learn)
