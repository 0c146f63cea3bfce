"""CartPole in other wrappers, of the same arrays; and the same ones made in other ways."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers

Env = gymnasium.Env[Any, Any]
SPACE = spaces.Box(-np.inf, np.inf, (4,), np.float32)


class Opaque:
    """An object whose text has its address."""

    def __call__(self, obs: Any, factor: float = 2.0) -> Any:
        return np.asarray(obs * factor, np.float32)


class Broken:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __call__ = Opaque.__call__


def make(kind: str = "plain", **options: Any) -> Env:
    """CartPole of a kind; for its wrappers, *options*."""
    env = gymnasium.make("CartPole-v1", disable_env_checker=kind != "checked")
    functions: dict[str, Any] = {
        "lambda": lambda obs: np.asarray(obs / 2, np.float32),
        "opaque": Opaque(),
        "broken": Broken(),
        "partial": partial(Opaque(), factor=3.0),
    }
    if kind in functions:
        return wrappers.TransformObservation(env, functions[kind], SPACE)
    if kind == "normalized":
        return _narrow(wrappers.NormalizeObservation(env, **options))
    if kind == "both":
        return _narrow(wrappers.NormalizeReward(wrappers.NormalizeObservation(env)))
    if kind == "both, other order":
        return _narrow(wrappers.NormalizeObservation(wrappers.NormalizeReward(env)))
    if kind == "bounded":
        env.observation_space = spaces.Box(-9, 9, (4,), np.float32)
    if kind == "watched":
        return wrappers.RecordEpisodeStatistics(env)
    return env


def _narrow(env: Env) -> Env:
    return wrappers.DtypeObservation(env, np.float32)
