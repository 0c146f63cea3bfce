"""Scale rewards by the deviation of the discounted return, so that values are of about one size."""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch

from breadbox_learner.ranks import Ranks
from breadbox_learner.training.batching import REMEMBERED_MAX, TrainingBatch, hashed
from breadbox_policies import RunningMoments


class RewardScale:
    """Running deviation of the return that each worker has collected, discounted backwards in time.

    As Gymnasium's NormalizeReward: after a step the return is the reward plus the discounted return
    before it, 0 at the start of an episode. Where a worker's earlier steps did not come it goes on
    from the mean. All ranks count the steps of all, so that the scale is the same on each.
    """

    def __init__(self, discount: float, clip: float, ranks: Ranks) -> None:
        self._discount = discount
        self._clip = clip
        self._ranks = ranks
        self._moments = RunningMoments(1)
        self._running: OrderedDict[int, tuple[int, float]] = OrderedDict()
        """The next fragment index, and the return until then, by worker."""

    def scaled(self, batch: TrainingBatch) -> TrainingBatch:
        """Count a batch, and return it with rewards that are scaled and clipped."""
        self._count(batch)
        reward = batch.reward / float(self._moments.deviation)
        return replace(batch, reward=reward.clamp(-self._clip, self._clip))

    def written(self) -> dict[str, list[float]]:
        """Return the statistics for `restore`, as plain data."""
        return {name: each.reshape(-1).tolist() for name, each in self._buffers()}

    def restore(self, written: dict[str, list[float]]) -> None:
        """Continue from what `written` returned."""
        for name, buffer in self._buffers():
            buffer.copy_(torch.tensor(written[name], dtype=buffer.dtype).reshape(buffer.shape))

    def _buffers(self) -> Any:
        return self._moments.named_buffers()

    def _count(self, batch: TrainingBatch) -> None:
        count, length = batch.reward.shape
        workers = [hashed(each) for each in zip(batch.session_ids, batch.worker_ids, strict=True)]
        # With its row a fragment that was drawn twice is no longer one.
        keys = torch.tensor([workers, batch.fragment_indices, list(range(count))]).T
        # Rewards go as the bits of a float64, beside whole numbers.
        reward = batch.reward.detach().cpu().double().reshape(-1, 1).view(torch.int64)
        first = batch.first.cpu().long().reshape(-1, 1)
        rows = self._ranks.gathered(
            torch.cat([keys.repeat_interleave(length, 0), first, reward], 1)
        )
        rewards = rows[:, 4].contiguous().view(torch.float64).tolist()
        steps: dict[tuple[int, ...], list[tuple[int, float]]] = {}
        for (*key, is_first), value in zip(rows[:, :4].tolist(), rewards, strict=True):
            steps.setdefault((*key,), []).append((is_first, value))
        returns: list[float] = []
        for (worker, index, _), fragment in sorted(steps.items()):
            returns += self._returns(worker, index, fragment)
        self._moments.add(torch.tensor(returns, dtype=torch.float64).reshape(-1, 1))

    def _returns(self, worker: int, index: int, steps: list[tuple[int, float]]) -> list[float]:
        expected, total = self._running.pop(worker, (index, float(self._moments.mean)))
        if index < expected:  # Delivered again.
            self._running[worker] = expected, total
            return []
        if index > expected:
            total = float(self._moments.mean)
        returns = []
        for first, reward in steps:
            total = reward + (0.0 if first else self._discount * total)
            returns.append(total)
        self._running[worker] = index + 1, total
        if len(self._running) > REMEMBERED_MAX:
            self._running.popitem(last=False)
        return returns
