"""Returns of the episodes that a learner sees end, and steps that environments made for it."""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash

from breadbox_learner.training.batching import TrainingBatch

Ended = tuple[int, float]
"""An episode that ended: its identity, 64 bits with a sign, the same on every rank; its return."""

WINDOW_EPISODES = 100
REMEMBERED_MAX = 65_536
"""Episodes and unfinished runs remembered, so that a fragment delivered again is not counted again
and a learner of many workers does not grow; beyond it the oldest is forgotten."""


class EpisodeReturns:
    """Mean return of the last episodes. Not thread-safe.

    Where several ranks train together, each finds what ended in its share of a batch, and counts
    what ended in the shares of all: so every rank has the same mean, of the last episodes of all.

    Fragments carry the return of an episode that ends in them (`extras["episode_return"]`). Where
    they do not, rewards are added up, and an episode counts only if every step of it was seen in
    order; that misses episodes whose fragments went elsewhere.
    """

    def __init__(self, window: int = WINDOW_EPISODES) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self._counted: OrderedDict[int, None] = OrderedDict()
        self._running: OrderedDict[tuple[str, str], tuple[int, int, float]] = OrderedDict()
        self.episode_count = 0
        """Episodes counted so far."""

    @property
    def mean(self) -> float | None:
        """The mean over the window, or None before the first episode."""
        return math.fsum(self._recent) / len(self._recent) if self._recent else None

    @property
    def recent(self) -> list[float]:
        """The returns in the window, oldest first."""
        return list(self._recent)

    def restore(self, recent: list[float], episode_count: int) -> None:
        """Go on from what `recent` and `episode_count` were."""
        self._recent.extend(recent)
        self.episode_count = episode_count

    def observe(self, batch: TrainingBatch) -> None:
        """Count the episodes that end in *batch*, as a learner of one process does."""
        self.count(self.ended_in(batch))

    def ended_in(self, batch: TrainingBatch) -> list[Ended]:
        """Find the episodes that end in *batch*; call it once per batch, in order."""
        found = []
        for row in range(len(batch)):
            ended = (
                self._added_up(batch, row) if batch.episode_return is None else _told(batch, row)
            )
            found += [(_identity(batch, row, step), value) for step, value in ended]
        return found

    def count(self, ended: Iterable[Ended]) -> None:
        """Count episodes, each once however often its fragment was delivered, and to whom."""
        for identity, value in ended:
            if identity in self._counted:
                continue
            self._counted[identity] = None
            if len(self._counted) > REMEMBERED_MAX:
                self._counted.popitem(last=False)
            self._recent.append(value)
            self.episode_count += 1

    def _added_up(self, batch: TrainingBatch, row: int) -> list[tuple[int, float]]:
        """Return step and return of each episode that ends here and was seen from its start."""
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
    # Episode ids may start over with a worker's restart; fragment indices do not.
    names = (batch.session_ids[row], batch.worker_ids[row], batch.fragment_indices[row], step)
    return _hashed(names)


def _hashed(names: tuple[str | int, ...]) -> int:
    """64 bits with a sign."""
    return int.from_bytes(xxhash.xxh3_64_digest(repr(names).encode()), "big", signed=True)


def _told(batch: TrainingBatch, row: int) -> list[tuple[int, float]]:
    assert batch.episode_return is not None
    returns = batch.episode_return[row]
    return [(int(step), float(returns[step])) for step in np.flatnonzero(~np.isnan(returns))]


class EnvironmentSteps:
    """Steps that environments have made, as far as a learner can tell. Not thread-safe.

    A worker's fragments are numbered without gaps, those included that were stale, evicted or never
    sent; so the highest number seen is how many fragments came before it. Steps since then, and
    those dropped before they filled a fragment, are not known.
    """

    def __init__(self) -> None:
        self._by_worker: OrderedDict[int, int] = OrderedDict()
        self.total = 0
        """Steps of all workers and sessions of the run."""

    def seen_in(self, batch: TrainingBatch) -> list[tuple[int, int]]:
        """List workers in *batch*, by an identity that is the same on every rank, and steps."""
        length = batch.reward.shape[1]
        names = zip(batch.session_ids, batch.worker_ids, strict=True)
        identities = [_hashed(name) for name in names]
        steps = [(index + 1) * length for index in batch.fragment_indices]
        return list(zip(identities, steps, strict=True))

    def count(self, seen: Iterable[tuple[int, int]]) -> None:
        """Take note of what `seen_in` found, on whatever rank."""
        for identity, steps in seen:
            held = self._by_worker.pop(identity, 0)
            self._by_worker[identity] = max(held, steps)
            self.total += max(0, steps - held)
            if len(self._by_worker) > REMEMBERED_MAX:
                self._by_worker.popitem(last=False)

    def written(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain data."""
        return {"total": self.total, "by_worker": [list(item) for item in self._by_worker.items()]}

    def restore(self, written: Mapping[str, Any]) -> None:
        """Go on from what `written` gave."""
        self.total = written["total"]
        self._by_worker = OrderedDict((identity, steps) for identity, steps in written["by_worker"])
