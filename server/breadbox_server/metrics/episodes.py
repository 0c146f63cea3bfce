"""Check reported episodes, and decide which tasks have time series of their own.

A report may have a thousand episodes, so each name is checked once. The number of tasks with
series is limited; reporters of many tasks lose theirs first, and tokens before workers.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from breadbox.v1.replay_buffer_service_pb2 import EpisodeReport
from breadbox_server.base import conversion as convert
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.validation import check_int, check_name
from breadbox_server.limits import TASK_SIZE_BYTES_MAX

RETURN_MAX: Final = 2**53
"""Largest return of an episode: a larger one would hide all others in the sum of returns."""

OTHER = "other"
"""The task under which episodes of tasks without series are counted."""


class EpisodeKey(NamedTuple):
    """Common properties of episodes that are counted together."""

    worker_id: str
    task: str
    end: str


def by_key(episodes: Iterable[EpisodeReport]) -> dict[EpisodeKey, list[EpisodeReport]]:
    """Check the episodes of a report, and group them by worker, task and end."""
    sorted_out: dict[EpisodeKey, list[EpisodeReport]] = {}
    for position, episode in enumerate(episodes):
        worker_id, task, end = episode.worker_id, episode.task or "default", episode.end
        key = EpisodeKey(worker_id, task, convert.episode_end(end, position))
        known = sorted_out.get(key)
        if known is None:
            _check_names(worker_id, task, position)
            known = sorted_out[key] = []
        if not 0 <= episode.step_count <= 2**53:
            check_int(f"episodes[{position}].step_count", episode.step_count, 0, 2**53)
        _check_return("return_sum", episode.return_sum, position)
        _check_return("discounted_return_sum", episode.discounted_return_sum, position)
        known.append(episode)
    return sorted_out


def _check_names(worker_id: str, task: str, position: int) -> None:
    at = f"episodes[{position}]"
    check_name(f"{at}.worker_id", worker_id)
    check_name(f"{at}.task", task)
    if len(task.encode()) > TASK_SIZE_BYTES_MAX:
        raise InvalidArgumentError(f"{at}.task", f"must be at most {TASK_SIZE_BYTES_MAX} bytes")


def _check_return(field: str, value: float, position: int) -> None:
    # Refuse NaN and infinity too: the sum of all returns would never be a number again.
    if not -RETURN_MAX <= value <= RETURN_MAX:
        raise InvalidArgumentError(
            f"episodes[{position}].{field}", f"must be a number from {-RETURN_MAX} to {RETURN_MAX}"
        )


class Reporter(NamedTuple):
    """The reporter of an episode."""

    token: str
    """Name of the token, or "" without tokens."""
    worker: str


class TaskSeries:
    """Tasks that have series, at most `capacity`, each owned by its first reporter."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._owners: dict[str, Reporter] = {}
        """In order of their latest report."""
        self._by_worker = Counter[Reporter]()
        self._by_token = Counter[str]()
        """Number of tasks by owner, kept up to date since a report may name thousands."""

    def place(self, task: str, reporter: Reporter) -> tuple[str, str | None]:
        """Return the task to count an episode under, and the task that loses its series for it.

        A new task replaces the longest unreported one of the reporter with the most; if its own
        reporter has the most, it counts as `OTHER`.
        """
        if task == OTHER:
            return OTHER, None
        owner = self._owners.pop(task, None)
        if owner is not None:
            self._owners[task] = owner
            return task, None
        ended = None
        if len(self._owners) >= self._capacity:
            ended = self._of_the_greediest(reporter)
            if ended is None:
                return OTHER, None
            self._count(self._owners.pop(ended), -1)
        self._owners[task] = reporter
        self._count(reporter, 1)
        return task, ended

    def _count(self, owner: Reporter, change: int) -> None:
        self._by_worker[owner] += change
        self._by_token[owner.token] += change
        if not self._by_worker[owner]:
            del self._by_worker[owner]
        if not self._by_token[owner.token]:
            del self._by_token[owner.token]

    def _of_the_greediest(self, reporter: Reporter) -> str | None:
        by_token, by_worker = self._by_token, self._by_worker
        most = max(by_token.values())
        if by_token[reporter.token] == most:
            tokens = {reporter.token}
        else:
            tokens = {token for token, count in by_token.items() if count == most}
        most = max(count for owner, count in by_worker.items() if owner.token in tokens)
        if reporter.token in tokens and by_worker[reporter] == most:
            return None
        return next(
            task
            for task, owner in self._owners.items()
            if owner.token in tokens and by_worker[owner] == most
        )
