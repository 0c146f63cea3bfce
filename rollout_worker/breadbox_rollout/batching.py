"""When to run the policy: on whoever is ready first, without waiting for anybody for long. Pure."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Waiting:
    group: int
    env_count: int
    since: float


class ReadyQueue:
    """Groups that wait for their actions, in the order in which they became ready.

    A batch goes as soon as one of these holds: it is full; everybody alive is in it; the group
    that has waited longest has done so for the maximum. Hence fewer environments than a batch
    holds stall nobody, and neither does one that takes minutes to reset.

    Args:
        batch_env_count: Environments of a full batch; a group is never split, so that a batch may
            be larger if a single group is.
        wait_s_max: Longest time a group waits for others to join it.
    """

    def __init__(self, batch_env_count: int, wait_s_max: float) -> None:
        self._batch_env_count = batch_env_count
        self._wait_s_max = wait_s_max
        self._waiting: deque[_Waiting] = deque()
        self._env_count = 0

    @property
    def env_count(self) -> int:
        """Environments that wait."""
        return self._env_count

    def add(self, group: int, env_count: int, *, now: float) -> None:
        """Put a ready group at the end."""
        self._waiting.append(_Waiting(group, env_count, now))
        self._env_count += env_count

    def remove(self, group: int) -> None:
        """Forget a group whose process is gone; fine if it does not wait."""
        kept = deque(waiting for waiting in self._waiting if waiting.group != group)
        self._waiting = kept
        self._env_count = sum(waiting.env_count for waiting in kept)

    def patience_s(self, live_env_count: int, *, now: float) -> float | None:
        """Return how long to wait for more before `take`; 0: take now; None: nobody waits."""
        if not self._waiting:
            return None
        if self._env_count >= min(self._batch_env_count, live_env_count):
            return 0.0
        return max(0.0, self._waiting[0].since + self._wait_s_max - now)

    def take(self) -> list[int]:
        """Remove and return the groups of the next batch, at least one."""
        taken = [self._waiting.popleft()]
        size = taken[0].env_count
        while self._waiting and size + self._waiting[0].env_count <= self._batch_env_count:
            taken.append(self._waiting.popleft())
            size += taken[-1].env_count
        self._env_count -= size
        return [waiting.group for waiting in taken]
