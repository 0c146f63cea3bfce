"""From fragments to tensors that a recurrent policy can be run over."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from breadbox.fragment import Fragment
from breadbox_learner.trees import Tree, map_tree, stack_trees


@dataclass(slots=True, kw_only=True)
class TrainingBatch:
    """B fragments of T steps. Leaves of trees are `[B, T, ...]` unless said otherwise."""

    obs: Tree
    action: Tree
    reward: Tensor
    """float32[B, T]."""
    terminated: Tensor
    """bool[B, T]."""
    truncated: Tensor
    """bool[B, T]."""
    first: Tensor
    """bool[B, T]; the step starts an episode: recurrent state is reset before it."""
    next_obs: Tree
    """Leaves [B, ...]."""
    in_states: list[Tree]
    """B recurrent states before step 0, without a batch axis; each None for a policy without."""
    log_prob: Tensor | None = None
    """float32[B, T]; under the policy that acted."""
    final_row: NDArray[np.intp]
    """intp[K]; ascending rows in which an episode was truncated with a known final observation."""
    final_step: NDArray[np.intp]
    """intp[K]; the truncated steps, ascending within a row."""
    final_obs: Tree = None
    """Leaves [K, ...]; None when K is 0."""
    worker_ids: list[str] = field(default_factory=list)
    fragment_indices: list[int] = field(default_factory=list)
    session_ids: list[str] = field(default_factory=list)
    discontinuities: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        """B."""
        return len(self.reward)

    @property
    def step_count(self) -> int:
        """B times T."""
        return self.reward.numel()

    def to(self, device: torch.device | str) -> "TrainingBatch":
        """The same batch with its tensors on *device*."""

        def move(tree: Tree) -> Tree:
            return map_tree(lambda leaf: leaf.to(device, non_blocking=True), tree)

        return TrainingBatch(
            obs=move(self.obs),
            action=move(self.action),
            reward=move(self.reward),
            terminated=move(self.terminated),
            truncated=move(self.truncated),
            first=move(self.first),
            next_obs=move(self.next_obs),
            in_states=move(self.in_states),
            log_prob=move(self.log_prob),
            final_row=self.final_row,
            final_step=self.final_step,
            final_obs=move(self.final_obs),
            worker_ids=self.worker_ids,
            fragment_indices=self.fragment_indices,
            session_ids=self.session_ids,
            discontinuities=self.discontinuities,
        )


def collate(fragments: Sequence[Fragment]) -> TrainingBatch:
    """Stack fragments of one length into a batch on the host.

    Raises:
        TreeMismatchError: Two fragments differ in structure, shape or dtype.
        ValueError: There are none.
    """
    rows, steps, final_obs = _final_observations(fragments)
    with_log_prob = all(fragment.log_prob is not None for fragment in fragments)
    return TrainingBatch(
        obs=stack_trees([fragment.obs for fragment in fragments]),
        action=stack_trees([fragment.action for fragment in fragments]),
        reward=stack_trees([fragment.reward for fragment in fragments]),
        terminated=stack_trees([fragment.terminated for fragment in fragments]),
        truncated=stack_trees([fragment.truncated for fragment in fragments]),
        first=stack_trees([fragment.first for fragment in fragments]),
        next_obs=stack_trees([fragment.next_obs for fragment in fragments]),
        in_states=[map_tree(_tensor, fragment.in_state) for fragment in fragments],
        log_prob=(
            stack_trees([fragment.log_prob for fragment in fragments]) if with_log_prob else None
        ),
        final_row=rows,
        final_step=steps,
        final_obs=final_obs,
        worker_ids=[fragment.worker_id for fragment in fragments],
        fragment_indices=[fragment.fragment_index for fragment in fragments],
        session_ids=[fragment.session_id for fragment in fragments],
        discontinuities=[fragment.discontinuity for fragment in fragments],
    )


def _tensor(array: Any) -> Tensor:
    """A tensor that owns its memory: fragments may lie in memory that is unmapped later."""
    return torch.from_numpy(np.array(array))


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


@dataclass(frozen=True, slots=True)
class ExtendedSequence:
    """A batch with `next_obs` and final observations put in their places in time.

    One pass of a recurrent policy over it gives every value that advantage estimation asks for:
    a final observation stands right after the step it answers, with the state of its episode, and
    the step behind it resets the state because it is the first of an episode.
    """

    obs: Tree
    """Leaves [B, S, ...], S >= T + 1."""
    action: Tree
    """Leaves [B, S, ...]; any valid action where there was none."""
    first: Tensor
    """bool[B, S]."""
    step_position: NDArray[np.intp]
    """intp[B, T]; where each step went."""
    next_position: NDArray[np.intp]
    """intp[B]; where `next_obs` went."""
    final_position: NDArray[np.intp]
    """intp[K]; where the final observations went, in the row of each."""


def extend(batch: TrainingBatch, rows: slice) -> ExtendedSequence:
    """Put `next_obs` and the final observations of *rows* in their places in time."""
    reward = batch.reward[rows]
    row_count, length = reward.shape
    start = rows.start or 0
    chosen = np.flatnonzero((batch.final_row >= start) & (batch.final_row < start + row_count))
    final_row, final_step = batch.final_row[chosen] - start, batch.final_step[chosen]
    # Position of each final observation among those of its row.
    slot = np.arange(len(chosen)) - np.searchsorted(final_row, final_row)
    slots = int(slot.max(initial=-1)) + 1

    # Sort keys: step t is 2t, what answers it 2t + 1, next_obs 2T, empty slots after all.
    keys = np.full((row_count, length + 1 + slots), 2 * length + 1)
    keys[:, : length + 1] = 2 * np.arange(length + 1)
    keys[final_row, length + 1 + slot] = 2 * final_step + 1
    order = np.argsort(keys, axis=1, kind="stable")
    position = np.argsort(order, axis=1, kind="stable")

    first = torch.zeros((row_count, order.shape[1]), dtype=torch.bool, device=reward.device)
    first[:, :length] = batch.first[rows]
    first[:, length] = (batch.terminated | batch.truncated)[rows, -1]
    gather = torch.from_numpy(order).to(reward.device)
    row_index = torch.arange(row_count, device=reward.device)[:, None]

    def with_next_and_final(steps: Tensor, after: Tensor, final: Tensor | None) -> Tensor:
        parts = [steps[rows], after[rows].unsqueeze(1)]
        if slots:
            filler = after[rows].unsqueeze(1).repeat_interleave(slots, 1)
            if final is not None:
                filler[final_row, slot] = final[chosen]
            parts.append(filler)
        joined = torch.cat(parts, dim=1)
        return joined[row_index, gather] if slots else joined

    final_obs = batch.final_obs
    obs = (
        map_tree(
            lambda steps, after: with_next_and_final(steps, after, None), batch.obs, batch.next_obs
        )
        if final_obs is None
        else map_tree(with_next_and_final, batch.obs, batch.next_obs, final_obs)
    )
    action = map_tree(lambda leaf: with_next_and_final(leaf, leaf[:, -1], None), batch.action)
    return ExtendedSequence(
        obs=obs,
        action=action,
        first=first[row_index, gather],
        step_position=position[:, :length],
        next_position=position[:, length],
        final_position=position[final_row, length + 1 + slot],
    )
