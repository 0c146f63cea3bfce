"""Convert fragments to tensors for a recurrent policy, and count their episodes and steps."""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from breadbox.model.summaries import summary
from breadbox.model.trees import Tree, map_tree
from breadbox.model.types import WorkerSteps
from breadbox.reading.batches import Batch

_TENSOR_FIELDS = (
    "obs", "action", "reward", "terminated", "truncated", "first", "next_obs", "in_state",
    "log_prob",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class TrainingBatch:
    """B fragments of T steps; leaves [B, T, ...] unless noted, ids int64, flags bool."""

    obs: Tree
    action: Tree
    reward: Tensor
    """float32[B, T]."""
    terminated: Tensor
    truncated: Tensor
    first: Tensor
    """bool[B, T]; the step starts an episode: the recurrent state is reset before it."""
    episode_id: Tensor
    next_obs: Tree
    """Leaves [B, ...]."""
    in_state: Tree = None
    """Recurrent states before step 0, leaves [B, ...], or None without memory."""
    log_prob: Tensor | None = None
    """float32[B, T]; log-probability under the policy that acted."""
    final_row: NDArray[np.intp]
    """intp[K]; ascending rows of truncated episodes with a known final observation."""
    final_step: NDArray[np.intp]
    """intp[K]; the truncated steps, ascending within a row."""
    final_obs: Tree = None
    """Final observations, leaves [K, ...], or None if K is 0."""
    episode_return: NDArray[np.float32] | None = None
    """float32[B, T]; an ended episode's return if workers report it, else NaN."""
    worker_ids: list[str]
    fragment_indices: list[int]
    session_ids: list[str]
    discontinuities: list[bool]

    def __len__(self) -> int:
        return len(self.reward)

    def __repr__(self) -> str:
        return summary("TrainingBatch", [f"{len(self)} fragments"], self.tensors)

    @property
    def step_count(self) -> int:
        """B times T."""
        return self.reward.numel()

    @property
    def tensors(self) -> dict[str, Tree]:
        """The fields that training reads, which are tensors or trees of them."""
        return {name: getattr(self, name) for name in (*_TENSOR_FIELDS, "final_obs")}

    def to(self, device: torch.device | str) -> "TrainingBatch":
        """Copy the batch with its tensors to *device*."""
        moved = {
            name: map_tree(lambda leaf: leaf.to(device, non_blocking=True), tree)
            for name, tree in self.tensors.items()
        }
        return replace(self, **moved)


def training_batch(batch: Batch) -> TrainingBatch:
    """Return a loaded batch as tensors, which share its memory if possible."""
    tensors = batch.to_torch() if isinstance(batch.reward, np.ndarray) else batch
    reported = (tensors.extras or {}).get("episode_return")
    rows, steps, final_obs = _truncated_only(tensors)
    metadata = [reference.metadata for reference in batch.references]
    return TrainingBatch(
        **{name: getattr(tensors, name) for name in (*_TENSOR_FIELDS, "episode_id")},
        final_row=rows,
        final_step=steps,
        final_obs=final_obs,
        episode_return=None if reported is None else reported.cpu().numpy(),
        worker_ids=[each.worker_id for each in metadata],
        fragment_indices=[each.fragment_index for each in metadata],
        session_ids=[each.session_id for each in metadata],
        discontinuities=[each.discontinuity for each in metadata],
    )


def _truncated_only(batch: Batch) -> tuple[NDArray[np.intp], NDArray[np.intp], Tree]:
    """Return truncated episodes' known final observations; terminated ones need none."""
    none = np.zeros(0, dtype=np.intp)
    row, step = batch.final_obs_row, batch.final_obs_step
    if row is None or step is None:
        return none, none, None
    wanted = batch.truncated[row, step] & ~batch.terminated[row, step]
    if not bool(wanted.any()):
        return none, none, None
    return (
        row[wanted].cpu().numpy().astype(np.intp),
        step[wanted].cpu().numpy().astype(np.intp),
        map_tree(lambda leaf: leaf[wanted], batch.final_obs),
    )


@dataclass(frozen=True, slots=True)
class ExtendedSequence:
    """A batch with `next_obs` and final observations inserted: one pass gives every value.

    A final observation comes after its step, with its state; the step after it resets the state.
    """

    obs: Tree
    """Leaves [B, S, ...], S >= T + 1."""
    action: Tree
    """Leaves [B, S, ...]; any valid action where there was none."""
    first: Tensor
    """bool[B, S]."""
    step_position: NDArray[np.intp]
    """intp[B, T]; position of each step."""
    next_position: NDArray[np.intp]
    """intp[B]; position of `next_obs`."""
    final_position: NDArray[np.intp]
    """intp[K]; position of each final observation, in its row."""


def extend(batch: TrainingBatch, rows: slice) -> ExtendedSequence:
    """Insert `next_obs` and the final observations of *rows* at their places in time."""
    reward = batch.reward[rows]
    row_count, length = reward.shape
    start = rows.start or 0
    chosen = np.flatnonzero((batch.final_row >= start) & (batch.final_row < start + row_count))
    final_row, final_step = batch.final_row[chosen] - start, batch.final_step[chosen]
    # Position of each final observation among those of its row.
    slot = np.arange(len(chosen)) - np.searchsorted(final_row, final_row)
    slots = int(slot.max(initial=-1)) + 1

    # Sort keys: 2t for step t, 2t + 1 for its final observation, 2T for next_obs, more for fillers.
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


Ended = tuple[int, float]
"""An ended episode: its identity, a signed 64-bit number equal on every rank, and its return."""
WINDOW_EPISODES = 100
REMEMBERED_MAX = 65_536
"""Most episodes remembered, so that a repeated delivery counts once; the oldest is forgotten."""


class EpisodeReturns:
    """Mean return of the latest episodes of all ranks; sums rewards if there is no return."""

    def __init__(self, window: int = WINDOW_EPISODES) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self._counted: OrderedDict[int, None] = OrderedDict()
        self._running: OrderedDict[tuple[str, str], tuple[int, int, float]] = OrderedDict()
        self.episode_count = 0

    @property
    def mean(self) -> float | None:
        """The mean over the window, or None before the first episode."""
        return math.fsum(self._recent) / len(self._recent) if self._recent else None

    @property
    def recent(self) -> list[float]:
        """The returns in the window, oldest first."""
        return list(self._recent)

    def restore(self, recent: list[float], episode_count: int) -> None:
        """Continue from earlier values of `recent` and `episode_count`."""
        self._recent.extend(recent)
        self.episode_count = episode_count

    def observe(self, batch: TrainingBatch) -> None:
        """Count the episodes that end in *batch*; for a learner of one process."""
        self.count(self.ended_in(batch))

    def ended_in(self, batch: TrainingBatch) -> list[Ended]:
        """Return the episodes that end in *batch*; call it once per batch, in order."""
        found = []
        for row in range(len(batch)):
            ended = (
                self._summed(batch, row) if batch.episode_return is None else _reported(batch, row)
            )
            found += [(_identity(batch, row, step), value) for step, value in ended]
        return found

    def count(self, ended: Iterable[Ended]) -> None:
        """Count episodes, each once, however often and on whichever rank it was delivered."""
        for identity, value in ended:
            if identity in self._counted:
                continue
            self._counted[identity] = None
            if len(self._counted) > REMEMBERED_MAX:
                self._counted.popitem(last=False)
            self._recent.append(value)
            self.episode_count += 1

    def _summed(self, batch: TrainingBatch, row: int) -> list[tuple[int, float]]:
        worker = (batch.session_ids[row], batch.worker_ids[row])
        index, episode, total = self._running.pop(worker, (-2, -1, math.nan))
        if index + 1 != batch.fragment_indices[row] or batch.discontinuities[row]:
            total = math.nan
        ended = []
        steps = zip(
            batch.first[row].tolist(),
            batch.episode_id[row].tolist(),
            batch.reward[row].tolist(),
            (batch.terminated[row] | batch.truncated[row]).tolist(),
            strict=True,
        )
        for step, (is_first, episode_id, reward, has_ended) in enumerate(steps):
            if is_first:
                total = 0.0
            elif episode_id != episode:
                total = math.nan
            episode = episode_id
            total += reward
            if has_ended:
                if not math.isnan(total):
                    ended.append((step, total))
                total = math.nan
        self._running[worker] = (batch.fragment_indices[row], episode, total)
        if len(self._running) > REMEMBERED_MAX:
            self._running.popitem(last=False)
        return ended


def _identity(batch: TrainingBatch, row: int, step: int) -> int:
    # Episode ids may restart with a worker; fragment indices do not.
    names = (batch.session_ids[row], batch.worker_ids[row], batch.fragment_indices[row], step)
    return hashed(names)


def hashed(names: tuple[str | int, ...]) -> int:
    """Return a signed 64-bit number that is the same on every rank."""
    return int.from_bytes(xxhash.xxh3_64_digest(repr(names).encode()), "big", signed=True)


def _reported(batch: TrainingBatch, row: int) -> list[tuple[int, float]]:
    assert batch.episode_return is not None
    returns = batch.episode_return[row]
    return [(int(step), float(returns[step])) for step in np.flatnonzero(~np.isnan(returns))]


class EnvironmentSteps:
    """Count the steps that environments made: those that workers report. Not thread-safe.

    Producers that report nothing are counted by the highest fragment index of each, which misses
    the steps that were never sent.
    """

    def __init__(self) -> None:
        self._by_worker: OrderedDict[int, int] = OrderedDict()
        self._estimated = 0
        self._by_reporter: dict[str, int] = {}
        """Steps at each worker's latest report, since its start."""
        self._reported = 0

    @property
    def total(self) -> int:
        """Number of steps of all workers and sessions of the run."""
        return max(self._estimated, self._reported)

    def leave_out(self, workers: Iterable[WorkerSteps]) -> None:
        """Do not count what workers that are new to the run have made until now."""
        for each in workers:
            self._by_reporter.setdefault(each.worker_id, each.acted_count)

    def report(self, workers: Iterable[WorkerSteps]) -> None:
        """Count what workers have reported since the last call."""
        for each in workers:
            before = self._by_reporter.get(each.worker_id, 0)
            # A worker that was started again under its name counts from 0.
            self._reported += each.acted_count - (before if before <= each.acted_count else 0)
            self._by_reporter[each.worker_id] = each.acted_count

    def seen_in(self, batch: TrainingBatch) -> list[tuple[int, int]]:
        """Return workers in *batch*, by an identity equal on every rank, and their steps."""
        length = batch.reward.shape[1]
        names = zip(batch.session_ids, batch.worker_ids, strict=True)
        identities = [hashed(name) for name in names]
        steps = [(index + 1) * length for index in batch.fragment_indices]
        return list(zip(identities, steps, strict=True))

    def count(self, seen: Iterable[tuple[int, int]]) -> None:
        """Count what `seen_in` returned, on any rank."""
        for identity, steps in seen:
            held = self._by_worker.pop(identity, 0)
            self._by_worker[identity] = max(held, steps)
            self._estimated += max(0, steps - held)
            if len(self._by_worker) > REMEMBERED_MAX:
                self._by_worker.popitem(last=False)

    def written(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain data."""
        return {
            "total": self._estimated,
            "by_worker": [list(item) for item in self._by_worker.items()],
            "reported": self._reported,
            "by_reporter": self._by_reporter,
        }

    def restore(self, written: Mapping[str, Any]) -> None:
        """Continue from the state that `written` returned."""
        self._estimated = written["total"]
        # Checkpoints before 0.2 have no reports.
        self._reported = written.get("reported", 0)
        self._by_reporter = dict(written.get("by_reporter", {}))
        self._by_worker = OrderedDict((identity, steps) for identity, steps in written["by_worker"])
