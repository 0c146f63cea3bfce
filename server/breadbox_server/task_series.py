"""Which tasks have series of their own: as many as there is room for, fairly shared.

Names of tasks are chosen by whoever reports episodes. A reporter is a token and a worker; one that
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
            del self._owners[ended]
        self._owners[task] = reporter
        return task, ended

    def _of_the_greediest(self, reporter: Reporter) -> str | None:
        """The task that makes room for another of this reporter; None: it is the greediest."""
        by_token = Counter(owner.token for owner in self._owners.values())
        most = max(by_token.values())
        is_greedy_token = by_token[reporter.token] == most
        tokens = (
            {reporter.token} if is_greedy_token else {t for t, n in by_token.items() if n == most}
        )
        by_worker = Counter(owner for owner in self._owners.values() if owner.token in tokens)
        most = max(by_worker.values())
        if by_worker[reporter] == most:
            return None
        return next(task for task, owner in self._owners.items() if by_worker[owner] == most)
