"""Environments that a learner's evaluation meets; by `module:factory` too."""

import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Recall(gymnasium.Env[Any, Any]):
    """Shows a number at the start, then nothing; a point for each repetition, for five steps."""

    observation_space = spaces.Box(-1, 9, (1,), np.float32)
    action_space = spaces.Discrete(10)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(10))
        self.steps = 0
        return np.array([self.number], np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        reward = float(action == self.number)
        return np.array([-1], np.float32), reward, self.steps == 5, False, {}


class _Hanging(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        time.sleep(3600)


def hangs() -> gymnasium.Env[Any, Any]:
    """CartPole, whose first step lasts for an hour."""
    return _Hanging(gymnasium.make("CartPole-v1"))


def fails_while_there(path: str) -> gymnasium.Env[Any, Any]:
    """CartPole, unless there is a file."""
    env = gymnasium.make("CartPole-v1")
    return _Failing(env, Path(path))


class _Failing(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any], path: Path) -> None:
        super().__init__(env)
        self._path = path

    def step(self, action: Any) -> Any:
        if self._path.exists():
            raise RuntimeError("it is there")
        return super().step(action)


class _ManySpaces(gymnasium.Env[Any, Any]):
    observation_space = spaces.Dict(
        {
            "from_zero": spaces.Discrete(5),
            "from_three": spaces.Discrete(4, start=3),
            "flags": spaces.MultiBinary(3),
            "choices": spaces.MultiDiscrete([2, 7]),
            "number": spaces.Box(-1.0, 1.0, (), np.float32),
            "board": spaces.Box(0, 9, (2, 2), np.int64),
            "pair": spaces.Tuple([spaces.Discrete(2), spaces.Box(0.0, 1.0, (), np.float64)]),
        }
    )
    action_space = spaces.Dict(
        {
            "turn": spaces.Discrete(3, start=-1),
            "buttons": spaces.MultiBinary(2),
            "force": spaces.Box(-1.0, 1.0, (), np.float32),
            "pair": spaces.Tuple([spaces.Discrete(2), spaces.Box(0.0, 4.0, (1,), np.float32)]),
        }
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert all(self.action_space[key].contains(action[key]) for key in ("turn", "pair")), action
        self.steps += 1
        # Of different lengths, so that fragments have several final observations, one and none.
        ends, is_cut = self.steps >= 30, bool(self.np_random.random() < 0.05)
        return self.observation_space.sample(), 1.0, ends, is_cut, {}


def many_spaces() -> gymnasium.Env[Any, Any]:
    """Every kind of space that can be stored as arrays, with leaves that have no axis."""
    return _ManySpaces()


class _Wordy(gymnasium.Env[Any, Any]):
    observation_space = spaces.Dict({"s": spaces.Text(8), "n": spaces.Discrete(2)})
    action_space = spaces.Discrete(2)


def wordy() -> gymnasium.Env[Any, Any]:
    """An environment whose observations hold words."""
    return _Wordy()


class _RunsDry(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        return self._burn({})

    def _burn(self, tank: dict[str, int]) -> Any:
        return tank["fuel"]


def runs_dry() -> gymnasium.Env[Any, Any]:
    """CartPole, whose step raises somewhere below itself."""
    return _RunsDry(gymnasium.make("CartPole-v1"))


def unseen() -> gymnasium.Env[Any, Any]:
    """An environment that draws nothing."""
    return _ManySpaces()
