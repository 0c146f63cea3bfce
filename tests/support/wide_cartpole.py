"""CartPole whose observations are of a wider type than those of everybody else."""

from typing import Any

import gymnasium
import numpy as np


def make() -> "gymnasium.Env[Any, Any]":
    """One environment, with observations float64[4]."""
    return gymnasium.wrappers.DtypeObservation(gymnasium.make("CartPole-v1"), np.float64)
