"""Fragments of one length as a batch, by the plainest way there is: stacking copies."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from breadbox.model.errors import TreeMismatchError
from breadbox.model.fragment import Fragment
from breadbox.model.trees import Tree, map_tree
from breadbox_learner.training.batching import TrainingBatch


def collate(fragments: Sequence[Fragment]) -> TrainingBatch:
    """Stack fragments of one length into a batch on the host.

    Loading straight into a batch (`lease.batches`) saves this copy.

    Raises:
        TreeMismatchError: Two fragments differ in structure, shape or dtype.
        ValueError: There are none.
    """

    def stacked(name: str) -> Tree:
        return stack_trees([getattr(fragment, name) for fragment in fragments])

    rows, steps, final_obs = _final_observations(fragments)
    is_told = all("episode_return" in fragment.extras for fragment in fragments)
    return TrainingBatch(
        obs=stacked("obs"),
        action=stacked("action"),
        reward=stacked("reward"),
        terminated=stacked("terminated"),
        truncated=stacked("truncated"),
        first=stacked("first"),
        episode_id=stacked("episode_id"),
        next_obs=stacked("next_obs"),
        in_state=stacked("in_state"),
        log_prob=stacked("log_prob"),
        final_row=rows,
        final_step=steps,
        final_obs=final_obs,
        episode_return=(
            np.stack([fragment.extras["episode_return"] for fragment in fragments])
            if is_told
            else None
        ),
        worker_ids=[fragment.worker_id for fragment in fragments],
        fragment_indices=[fragment.fragment_index for fragment in fragments],
        session_ids=[fragment.session_id for fragment in fragments],
        discontinuities=[fragment.discontinuity for fragment in fragments],
    )


def _final_observations(
    fragments: Sequence[Fragment],
) -> tuple[NDArray[np.intp], NDArray[np.intp], Tree]:
    """Where a truncated episode's true final observation is known, and those observations.

    Terminated episodes are left out: nothing comes after them, so nobody asks for that value.
    """
    rows: list[int] = []
    steps: list[int] = []
    observations: list[Tree] = []
    for row, fragment in enumerate(fragments):
        if fragment.final_obs_step is None:
            continue
        for position, step in enumerate(fragment.final_obs_step):
            if not fragment.truncated[step] or fragment.terminated[step]:
                continue
            rows.append(row)
            steps.append(int(step))
            observations.append(map_tree(lambda leaf, k=position: leaf[k], fragment.final_obs))
    stacked = stack_trees(observations) if observations else None
    return np.array(rows, dtype=np.intp), np.array(steps, dtype=np.intp), stacked


def stack_trees(trees: Sequence[Tree]) -> Tree:
    """Stack like trees of arrays leaf by leaf into tensors with a new first axis.

    Raises:
        TreeMismatchError: Structure, shape or dtype differs between two of them.
    """

    def stack(*arrays: Any) -> torch.Tensor:
        first = np.asarray(arrays[0])
        for array in arrays[1:]:
            if np.shape(array) != first.shape or np.asarray(array).dtype != first.dtype:
                raise TreeMismatchError(
                    "",
                    f"{first.dtype}{list(first.shape)}",
                    f"{np.asarray(array).dtype}{list(np.shape(array))}",
                    "stacking fragments",
                )
        return torch.from_numpy(np.stack(arrays))

    if not trees:
        raise ValueError("nothing to stack")
    return map_tree(stack, trees[0], *trees[1:])
