"""The environment of the examples ppo_dict.py, ppo_continuous.py and sac_mirror.py.

A point in the plane moves to a goal. Its observations are dicts; its actions are one of four
directions, or with `Reach(continuous=True)` a vector of two numbers from -1 to 1.
"""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

DIRECTIONS = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)


class Reach(gymnasium.Env):
    def __init__(self, continuous: bool = False) -> None:
        plane = Box(-1, 1, (2,), np.float32)
        self.observation_space = Dict(place=plane, goal=plane)
        self.action_space = plane if continuous else Discrete(4)
        self.continuous = continuous

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.place, self.goal = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        self.time = 0
        return {"place": self.place, "goal": self.goal}, {}

    def step(self, action):
        move = np.clip(action, -1, 1) if self.continuous else DIRECTIONS[action]
        self.place = np.clip(self.place + 0.2 * move, -1, 1).astype(np.float32)
        self.time += 1
        distance = float(np.linalg.norm(self.place - self.goal))
        obs = {"place": self.place, "goal": self.goal}
        return obs, -distance, distance < 0.2, self.time == 32, {}
