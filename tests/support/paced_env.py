"""Environments that take a given time for each step."""

import time
from typing import Any

import gymnasium


class _Paced(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any], step_s: float) -> None:
        super().__init__(env)
        self._step_s = step_s

    def step(self, action: Any) -> Any:
        time.sleep(self._step_s)  # What the step of a heavy scene takes.
        return super().step(action)


def make(step_s: float = 0.0) -> gymnasium.Env[Any, Any]:
    """Make a CartPole of which a step takes *step_s* seconds."""
    return _Paced(gymnasium.make("CartPole-v1"), step_s)
