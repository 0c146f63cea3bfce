"""One round of a policy: it acts for the rows of some groups, and their environments may step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from breadbox.model.fragment import Tree
from breadbox_policies import State
from breadbox_rollout.acting.inference import Decision, Inference
from breadbox_rollout.environments.arrays import GroupArrays


@dataclass(frozen=True, slots=True)
class Round:
    """What the policy saw and did; rows in the order of the arrays."""

    obs: Tree
    """Leaves [B, ...]; the round's own memory."""
    first: NDArray[np.bool_]
    acts: NDArray[np.bool_]
    """Where the action counts."""
    decision: Decision


def play_round(
    arrays: list[GroupArrays], inference: Inference, states: list[State], model_version: int
) -> Round:
    """Run the policy once for all rows, and write its actions for the environments to read."""
    # Copied: environments overwrite theirs as soon as they are asked to step.
    obs = joined([entry.obs for entry in arrays])
    first = np.concatenate([entry.first for entry in arrays])
    acts = np.concatenate([entry.acts for entry in arrays])
    decision = inference.act(obs, states, first)
    write_actions(arrays, decision.action, decision.value, model_version)
    return Round(obs, first, acts, decision)


def write_actions(
    arrays: list[GroupArrays], action: Tree, value: NDArray[np.float32], model_version: int
) -> None:
    """Write what the rows of all *arrays* shall do, for the environments to read."""
    start = 0
    for entry in arrays:
        end = start + len(entry.first)
        _copy_rows(entry.action, action, start, end)
        entry.value[:] = value[start:end]
        entry.model_version[0] = model_version
        start = end


def joined(trees: list[Tree]) -> Tree:
    """Concatenate trees of arrays along their first axis; always a copy."""
    example = trees[0]
    if isinstance(example, dict):
        return {key: joined([tree[key] for tree in trees]) for key in example}
    if isinstance(example, tuple):
        return tuple(joined(list(parts)) for parts in zip(*trees, strict=True))
    return np.concatenate(trees)


def _copy_rows(into: Tree, rows: Tree, start: int, end: int) -> None:
    if isinstance(into, dict):
        for key, array in into.items():
            _copy_rows(array, rows[key], start, end)
    elif isinstance(into, tuple):
        for array, part in zip(into, rows, strict=True):
            _copy_rows(array, part, start, end)
    else:
        into[:] = rows[start:end]
