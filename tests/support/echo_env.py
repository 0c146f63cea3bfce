"""Environments that observe the action that they executed, one step late."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from breadbox.model.trees import map_tree

gym: Any = spaces  # Its annotations know int64 and one axis only.
SPACES: dict[str, Any] = {
    "multi_discrete_start": gym.MultiDiscrete([2, 3, 11], start=[0, 5, 25]),
    "multi_discrete_uint8": gym.MultiDiscrete([50, 60, 70], dtype=np.uint8),
    "multi_discrete_int32": gym.MultiDiscrete([[5, 6], [7, 80]], dtype=np.int32),
    "discrete_int32": gym.Discrete(50, dtype=np.int32),
    "discrete_start": gym.Discrete(5, start=-2, dtype=np.int8),
    "box_float16": gym.Box(-1.0, 1.0, (3,), np.float16),
    "multi_binary": gym.MultiBinary([2, 3]),
    "nested": gym.Dict(
        {
            "b": gym.Tuple([gym.Discrete(9, start=3, dtype=np.uint16), gym.Discrete(2)]),
            "a": gym.MultiDiscrete([3, 4], dtype=np.int16, start=[-9, 7]),
        }
    ),
}


class EchoEnv(gymnasium.Env[Any, Any]):
    """Episodes of seven steps; the reward is 1 for an action of the space, else 0."""

    def __init__(self, space: "gymnasium.Space[Any]") -> None:
        self.action_space = self.observation_space = space
        self.executed: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._step_count = 0
        self.action_space.seed(seed)
        return self.action_space.sample(), {}

    def step(self, action: Any) -> Any:
        self._step_count += 1
        self.executed.append(map_tree(np.array, action))
        reward = float(self.action_space.contains(action))
        return action, reward, self._step_count == 7, False, {}


def make(space: str) -> EchoEnv:
    """One environment, by a name in `SPACES`."""
    return EchoEnv(SPACES[space])


def make_vector(num_envs: int, space: str) -> SyncVectorEnv:
    """Several in one."""
    return SyncVectorEnv([partial(make, space)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
