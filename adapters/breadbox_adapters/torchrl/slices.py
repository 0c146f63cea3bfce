"""Slices: consecutive steps of one episode, as TorchRL's `SliceSampler` lays them out."""

from typing import Any

import numpy as np

from breadbox.mirror import Prioritised, ReplayMirror, SequenceBatch, StepBatch
from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Tree
from breadbox.model.trees import concat, map_tree

ROUNDS_MAX = 100
"""Draws for a sample; then next to no sequence stays within an episode."""
_TREES = (
    "obs action reward next_obs terminated truncated handle model_version log_prob value extras"
)


def draw_slices(
    mirror: ReplayMirror, count: int, length: int, *, prioritised: bool | Prioritised
) -> StepBatch:
    """Draw slices, with replacement, each as likely as any other; one after the other, as arrays.

    The last step of each is truncated, so that no value is carried from one slice into the next.

    Args:
        mirror: Where they are drawn.
        count: Slices.
        length: Steps of each.
        prioritised: Draw in proportion to the priority of the first step.

    Raises:
        InvalidRequestError: There is no step, or next to no episode has as many.
    """
    drawn: list[dict[str, Tree]] = []
    have = 0
    for _ in range(ROUNDS_MAX):
        batch = mirror.sample_sequences(count, length=length, prioritised=prioritised)
        # A sequence goes on over ends of episodes, and stops where a worker's steps do.
        whole = np.flatnonzero(batch.mask.all(1) & ~batch.ended[:, :-1].any(1))[: count - have]
        have += len(whole)
        drawn.append(_taken(batch, whole))
        if have == count:
            return _laid_out(concat(drawn), length)
    raise InvalidRequestError(
        "slice_len", f"finds too few episodes of {length} steps: {have} slices of {count}"
    )


def _taken(batch: SequenceBatch, chosen: Any) -> dict[str, Tree]:
    trees = {name: getattr(batch, name) for name in _TREES.split()}
    return {
        **{name: map_tree(lambda leaf: leaf[chosen], tree) for name, tree in trees.items()},
        "weight": np.repeat(batch.weight[chosen, None], batch.mask.shape[1], axis=1),
    }


def _laid_out(slices: Tree, length: int) -> StepBatch:
    trees: dict[str, Any] = map_tree(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), slices)
    trees["truncated"][length - 1 :: length] |= ~trees["terminated"][length - 1 :: length]
    step_count = len(trees["reward"])
    return StepBatch(
        **trees,
        discount=np.ones(step_count, np.float32),
        episode_id=np.arange(step_count) // length,
    )
