"""Trees whose leaves say by their values where they belong, with keys in every order."""

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import numpy as np

from breadbox.model.fragment import Fragment
from breadbox.model.trees import leaves

NAMES = ("left", "right", "goal")
ORDERS = list(permutations(NAMES))
BASES = {
    "obs": {"left": 1000, "right": 2000, "goal": {"x": 3000, "y": 4000}},
    "action": {"left": 5000, "right": 6000, "goal": 7000},
    "in_state": {"left": 8000, "right": 9000, "goal": 10_000},
    "extras": {"left": 11_000, "right": 12_000, "goal": 13_000},
}
"""Numbers added to the step's own in each leaf; they are below 1,000."""


def ordered(tree: Any, order: tuple[str, ...]) -> Any:
    """The same tree, with the keys of each dict in another order."""
    if not isinstance(tree, dict):
        return tree
    keys = [name for name in order if name in tree] or [*tree][:: 1 if order < NAMES else -1]
    return {key: ordered(tree[key], order) for key in keys}


def made(field: str, steps: Any, order: tuple[str, ...], shape: tuple[int, ...] = (2,)) -> Any:
    """A field's tree at some steps: leaves float32[..., *shape], all alike."""

    def leaf(base: Any) -> Any:
        if isinstance(base, dict):
            return {key: leaf(child) for key, child in base.items()}
        at = np.asarray(steps, np.float32) + np.float32(base)
        return np.broadcast_to(at[(..., *(None,) * len(shape))], (*at.shape, *shape)).copy()

    return ordered(leaf(BASES[field]), order)


def wrong_leaves(field: str, tree: Any) -> list[str]:
    """Leaves with a value of another leaf, each with what it has."""
    bases = dict(leaves(BASES[field]))
    found = dict(leaves(tree))
    assert bases.keys() <= found.keys(), (field, [*found])
    return [
        f"{field}.{path}: {np.unique(np.asarray(found[path]))[:4]}"
        for path, base in bases.items()
        if (np.asarray(found[path]) // 1000 != base // 1000).any()
    ]


def fragments(
    count: int, *, step_count: int = 4, shape: tuple[int, ...] = (2,), worker_id: str = "w"
) -> Iterator[Fragment]:
    """Fragments of one worker, an episode each, whose trees are all in different orders."""
    flags = np.zeros(step_count, np.bool_)
    last = np.arange(step_count) == step_count - 1
    for index in range(count):
        steps = np.arange(step_count) + index * step_count
        turns = [ORDERS[(index + turn) % len(ORDERS)] for turn in range(6)]
        yield Fragment(
            worker_id=worker_id,
            fragment_index=index,
            session_id="s",
            model_version_min=0,
            model_version_max=0,
            obs=made("obs", steps, turns[0], shape),
            next_obs=made("obs", steps[-1] + 1, turns[1], shape),
            final_obs=made("obs", steps[-1:] + 1, turns[2], shape),
            final_obs_step=np.array([step_count - 1], np.int32),
            action=made("action", steps, turns[3]),
            in_state=made("in_state", index, turns[4]),
            extras=made("extras", steps, turns[5]),
            reward=steps.astype(np.float32),
            terminated=last,
            truncated=flags,
            first=np.arange(step_count) == 0,
            episode_id=np.full(step_count, index, np.int64),
        )
