"""A loop in the shape of CleanRL's dqn_atari.py, with the packages that CleanRL requires.

Usage: python dqn.py SERVER. Prints the versions of Gymnasium and numpy, and what was kept.
"""

import importlib.metadata
import json
import sys

import gymnasium as gym
import numpy as np
import torch

from breadbox_adapters.cleanrl import ReplayBuffer

STEPS = 600


def main() -> None:
    envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")])
    q_network = torch.nn.Linear(4, 2)
    rb = ReplayBuffer(
        10_000,
        envs.single_observation_space,
        envs.single_action_space,
        "cpu",
        optimize_memory_usage=True,
        handle_timeout_termination=False,
        server=sys.argv[1],
        run="cleanrl-pinned",
    )
    obs, _ = envs.reset(seed=1)
    ended_count = 0
    for global_step in range(STEPS):
        actions = torch.argmax(q_network(torch.Tensor(obs)), dim=1).numpy()
        if global_step % 3:
            actions = np.array([envs.single_action_space.sample()])
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        real_next_obs = next_obs.copy()
        for index, ended in enumerate(terminations | truncations):
            if ended:
                ended_count += 1
                real_next_obs[index] = infos["final_observation"][index]
        rb.add(obs, real_next_obs, actions, rewards, terminations, infos)
        obs = next_obs
    data = rb.sample(4000)
    sys.stdout.write(
        json.dumps(
            {
                "gymnasium": gym.__version__,
                "numpy": np.__version__,
                "rich": importlib.metadata.version("rich"),
                "kept": rb.size(),
                "ended": ended_count,
                "done_share": float(data.dones.mean()),
                "shapes": [list(each.shape) for each in data],
            }
        )
    )
    rb.close()


main()
