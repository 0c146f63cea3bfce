"""Decide when to run the policy: on the groups ready first, with a bounded wait. Pure."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Waiting:
    group: int
    env_count: int
    since: float


class ReadyQueue:
    """Groups that wait for actions. A batch goes when full, complete, or after a bounded wait."""

    def __init__(self, batch_env_count: int, wait_s_max: float) -> None:
        self.batch_env_count = batch_env_count
        """May be changed at any time."""
        self._wait_s_max = wait_s_max
        self._waiting: deque[_Waiting] = deque()
        self._env_count = 0

    @property
    def env_count(self) -> int:
        """Number of environments that wait."""
        return self._env_count

    def add(self, group: int, env_count: int, *, now: float) -> None:
        """Add a ready group at the end."""
        self._waiting.append(_Waiting(group, env_count, now))
        self._env_count += env_count

    def remove(self, group: int) -> None:
        """Remove a waiting group after its process ended."""
        kept = deque(waiting for waiting in self._waiting if waiting.group != group)
        self._waiting = kept
        self._env_count = sum(waiting.env_count for waiting in kept)

    def patience_s(self, live_env_count: int, *, now: float) -> float | None:
        """Return the seconds to wait before `take` (0: take now), or None if no group waits."""
        if not self._waiting:
            return None
        if self._env_count >= min(self.batch_env_count, live_env_count):
            return 0.0
        return max(0.0, self._waiting[0].since + self._wait_s_max - now)

    def take(self) -> list[int]:
        """Remove and return the groups of the next batch, at least one."""
        taken = [self._waiting.popleft()]
        size = taken[0].env_count
        while self._waiting and size + self._waiting[0].env_count <= self.batch_env_count:
            taken.append(self._waiting.popleft())
            size += taken[-1].env_count
        self._env_count -= size
        return [waiting.group for waiting in taken]


class BatchSize:
    """Choose the size of a full batch by trials: half (steps overlap inference), or all."""

    TRIAL_BATCHES = 16
    TRIAL_S = 0.5
    """Least batches, and least seconds, of a trial."""
    SETTLED_S = 60.0

    def __init__(self, env_count: int) -> None:
        self._sizes = (max(1, env_count // 2), env_count)
        self._rates: list[float] = []
        """Rates of the trials so far, in the order of sizes."""
        self._best = 0
        self._settled_until: float | None = None
        self._began_at: float | None = None
        self._batch_count = 0
        self._env_count = 0

    @property
    def batch_env_count(self) -> int:
        """Batch size to use now, in environments."""
        trying = self._settled_until is None
        return self._sizes[len(self._rates) if trying else self._best]

    def disturb(self) -> None:
        """Restart the trial, because something besides environments and policy took time."""
        self._began_at = None

    def batch_taken(self, env_count: int, *, now: float) -> None:
        """Count a batch of *env_count* environments."""
        if self._settled_until is not None:
            if now < self._settled_until:
                return
            self._settled_until, self._rates = None, []
            self.disturb()
        if self._began_at is None:
            # The batch in progress began under other conditions, so it only starts the clock.
            self._began_at, self._batch_count, self._env_count = now, 0, 0
            return
        self._batch_count += 1
        self._env_count += env_count
        elapsed_s = now - self._began_at
        if self._batch_count < self.TRIAL_BATCHES or elapsed_s < self.TRIAL_S:
            return
        self._rates.append(self._env_count / elapsed_s)
        self.disturb()
        if len(self._rates) == len(self._sizes):
            self._best = self._rates.index(max(self._rates))
            self._settled_until = now + self.SETTLED_S
