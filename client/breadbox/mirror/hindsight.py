"""Hindsight: what was achieved becomes what was wanted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from breadbox.errors import InvalidRequestError
from breadbox.fragment import Tree
from breadbox.mirror.batches import StepBatch
from breadbox.trees import rows

GoalStrategy = Literal["future", "final", "episode"]
"""Which of an episode's achievements becomes a step's goal."""

Relabel = Callable[[Any, Any, Tree], Any]
"""From what was achieved, the goals, and the extras, to rewards."""

ACHIEVED = "achieved_goal"
DESIRED = "desired_goal"


def relabelled_with(batch: StepBatch, reached: Tree, relabel: Relabel) -> StepBatch:
    """Give the first steps of a batch other goals, and the rewards that follow from them.

    Args:
        batch: Of steps whose observations are dicts with an achieved and a desired goal.
        reached: Observations of as many steps as get another goal.
        relabel: See `StepMemory.sample_goals`.

    Raises:
        InvalidRequestError: The observations have no such goals, or the rewards are too few.
    """
    if not isinstance(batch.obs, dict) or not {ACHIEVED, DESIRED} <= batch.obs.keys():
        raise InvalidRequestError("obs", f"must be a dict with {ACHIEVED!r} and {DESIRED!r}")
    count = len(reached[ACHIEVED])
    goals = reached[ACHIEVED]
    obs, next_obs = dict(batch.obs), dict(batch.next_obs)
    for tree in (obs, next_obs):
        tree[DESIRED] = np.concatenate([goals, tree[DESIRED][count:]])
    rewards = np.asarray(
        relabel(next_obs[ACHIEVED][:count], goals, rows(batch.extras, 0, count)), np.float32
    )
    if rewards.shape != (count,):
        raise InvalidRequestError(
            "relabel", f"must return float32[{count}], returned {[*rewards.shape]}"
        )
    reward = np.concatenate([rewards, batch.reward[count:]])
    return replace(batch, obs=obs, next_obs=next_obs, reward=reward)
