"""Which tasks have series of their own: as many as there is room for, fairly shared.

Clients that report episodes choose the names of tasks. A reporter is a token and a worker; one that
reports many tasks gives way to those that report few, tokens among each other first.
"""

from collections import Counter
from typing import NamedTuple

OTHER = "other"
"""The task as which episodes of tasks without series count."""


class Reporter(NamedTuple):
    """Who reports an episode."""

    token: str
    """Name of the token; empty without one."""
    worker: str


class TaskSeries:
    """The tasks that have series, each owned by the reporter that brought it.

    Args:
        capacity: Tasks there may be.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._owners: dict[str, Reporter] = {}
        """In the order of their last use."""
        self._by_worker = Counter[Reporter]()
        self._by_token = Counter[str]()
        """How many each owns: counted as they come and go, since a report may name thousands."""

    def place(self, task: str, reporter: Reporter) -> tuple[str, str | None]:
        """Where an episode counts, and the task whose series end for that.

        A newcomer takes the place of that task which nobody reported for longest, of those of the
        reporter with the most; one that has the most itself counts as `OTHER`.
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
        """Return the task that makes room for another of this reporter, or None if it has most."""
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
