"""Scripted environments inside vector environments of every autoreset mode.

Each environment inside is a `ScriptedEnv` with a script of its own, so that what comes out can be
checked with `check_fragment` like that of any other.
"""

from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from support.scripted_env import OBSERVATION_SPACE, Process, ScriptedEnv


class OwnScriptEnv(ScriptedEnv):
    """Reads its own script from its beginning, whatever others in the process do."""

    def __init__(self, script: str, number: int) -> None:
        super().__init__(script)
        self._number = number
        self._position = 0

    def step(self, action: Any) -> Any:
        shared, Process.position = Process.position, self._position
        try:
            return super().step(action)
        finally:
            self._position, Process.position = Process.position, shared


def make(num_envs: int, scripts: list[str], mode: str) -> SyncVectorEnv:
    """A vector environment; environment i follows script i, or the last one."""
    return SyncVectorEnv(
        [
            partial(OwnScriptEnv, scripts[min(number, len(scripts) - 1)], number)
            for number in range(num_envs)
        ],
        autoreset_mode=AutoresetMode(mode),
    )


def make_silent(num_envs: int) -> SyncVectorEnv:
    """One that does not say how it resets."""
    env = make(num_envs, ["."], "NextStep")
    env.metadata = {}
    return env


def make_fixed() -> SyncVectorEnv:
    """A factory without num_envs: three, whoever asks."""
    return make(3, ["."], "NextStep")


def make_wide(num_envs: int) -> Any:
    """Observations that are wider than promised."""
    env = make(num_envs, ["."], "NextStep")
    env.single_observation_space = spaces.Dict(
        {**OBSERVATION_SPACE.spaces, "level": spaces.Box(-np.inf, np.inf, (7,), np.float32)}
    )
    return env
