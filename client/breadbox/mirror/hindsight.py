"""Hindsight relabelling: an achieved goal replaces the desired one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from breadbox.mirror.storage.batches import StepBatch
from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Tree
from breadbox.model.trees import rows

GoalStrategy = Literal["future", "final", "episode"]
"""Step of the episode whose achieved goal becomes a step's goal."""

Relabel = Callable[[Any, Any, Tree], Any]
"""Function from achieved goals, desired goals and extras to rewards."""

ACHIEVED = "achieved_goal"
DESIRED = "desired_goal"


def relabelled_with(batch: StepBatch, reached: Tree, relabel: Relabel) -> StepBatch:
    """Replace the goals of a batch's first steps, and the rewards that follow from them.

    Args:
        batch: Steps whose observations are dicts with an achieved and a desired goal.
        reached: Observations whose achieved goals the first steps get, one for each.
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
