"""Copy steps out of columns into batches."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.mirror.storage.batches import SequenceBatch, StepBatch
from breadbox.mirror.storage.columns import Columns
from breadbox.mirror.storage.tensors import leaf_for
from breadbox.model.fragment import Tree
from breadbox.model.trees import map_tree
from breadbox.model.types import Device

Numbers = NDArray[np.int64]

NO_HANDLE = -1
"""Handle at a position of a sequence that has no step."""


def step_batch(
    columns: Columns,
    first: Numbers,
    last: Numbers,
    returns: NDArray[np.float32] | None,
    discount: NDArray[np.float32],
    weight: NDArray[np.float32],
    device: Device | None,
) -> StepBatch:
    """Copy steps: observation and action from the first rows, their result from the last rows."""
    field, leaf = columns.field, leaf_for(device)
    begun = columns.gather(first, leaf)
    done = begun if last is first else columns.gather(last, leaf)
    return StepBatch(
        obs=columns.tree("obs", begun),
        action=columns.tree("action", begun),
        reward=field(begun, "reward") if returns is None else leaf(returns),
        next_obs=columns.next_obs(done),
        terminated=field(done, "terminated"),
        truncated=field(done, "truncated"),
        discount=leaf(discount),
        weight=leaf(weight),
        handle=field(begun, "handle"),
        episode_id=field(begun, "episode_id"),
        model_version=field(begun, "model_version"),
        log_prob=columns.tree("log_prob", begun),
        value=columns.tree("value", begun),
        extras=columns.tree("extras", begun),
    )


def sequence_batch(
    columns: Columns,
    rows: Numbers,
    mask: NDArray[np.bool_],
    burn_in: int,
    state: Tree,
    weight: NDArray[np.float32],
) -> SequenceBatch:
    """Copy sequences of steps [B, L], with zeros where there is no step."""
    gathered = columns.gather(rows)
    is_short = not mask.all()
    obs, next_obs = columns.tree("obs", gathered), columns.next_obs(gathered)
    handle = columns.field(gathered, "handle")
    if is_short:
        # Empty the frames first: finding them needs the rows, which are emptied next.
        for tree in (obs, next_obs):
            map_tree(lambda leaf: _emptied(leaf, ~mask), tree)
        gathered.memory[~mask] = 0
        handle[~mask] = NO_HANDLE
    return SequenceBatch(
        obs=obs,
        action=columns.tree("action", gathered),
        reward=columns.field(gathered, "reward"),
        next_obs=next_obs,
        terminated=columns.field(gathered, "terminated"),
        truncated=columns.field(gathered, "truncated"),
        first=columns.field(gathered, "first"),
        mask=mask,
        is_burn_in=np.arange(mask.shape[1]) < burn_in,
        in_state=state,
        weight=weight,
        handle=handle,
        model_version=columns.field(gathered, "model_version"),
        log_prob=columns.tree("log_prob", gathered),
        value=columns.tree("value", gathered),
        extras=columns.tree("extras", gathered),
    )


def _emptied(leaf: Any, where: NDArray[np.bool_]) -> Any:
    leaf[where] = 0
    return leaf
