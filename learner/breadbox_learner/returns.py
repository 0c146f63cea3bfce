"""Returns of the episodes that a learner sees end."""

import math
from collections import OrderedDict, deque

import numpy as np

from breadbox.fragment import Fragment

WINDOW_EPISODES = 100
REMEMBERED_MAX = 65_536
"""Episodes and unfinished runs remembered, so that a fragment delivered again is not counted again
and a learner of many workers does not grow; beyond it the oldest is forgotten."""


class EpisodeReturns:
    """Mean return of the last episodes. Not thread-safe.

    Fragments tell the return of an episode that ends in them (`extras["episode_return"]`). Where
    they do not, rewards are added up, and an episode counts only if every step of it was seen in
    order; that misses episodes whose fragments went elsewhere.
    """

    def __init__(self, window: int = WINDOW_EPISODES) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self._counted: OrderedDict[tuple[str, str, int, int], None] = OrderedDict()
        self._running: OrderedDict[tuple[str, str], tuple[int, int, float]] = OrderedDict()
        self.episode_count = 0
        """Episodes counted so far."""

    @property
    def mean(self) -> float | None:
        """Mean over the window; None before the first episode."""
        return math.fsum(self._recent) / len(self._recent) if self._recent else None

    @property
    def recent(self) -> list[float]:
        """The returns in the window, oldest first."""
        return list(self._recent)

    def restore(self, recent: list[float], episode_count: int) -> None:
        """Go on from what `recent` and `episode_count` were."""
        self._recent.extend(recent)
        self.episode_count = episode_count

    def observe(self, fragment: Fragment) -> None:
        """Count the episodes that end in *fragment*, once however often it is delivered."""
        told = fragment.extras.get("episode_return")
        returns = self._added_up(fragment) if told is None else _told(np.asarray(told))
        for step, value in returns:
            # Episode ids may start over with a worker's restart; fragment indices do not.
            key = (fragment.session_id, fragment.worker_id, fragment.fragment_index, step)
            if key in self._counted:
                continue
            self._counted[key] = None
            if len(self._counted) > REMEMBERED_MAX:
                self._counted.popitem(last=False)
            self._recent.append(value)
            self.episode_count += 1

    def _added_up(self, fragment: Fragment) -> list[tuple[int, float]]:
        """Step and return of each episode that ends here and was seen from its first step."""
        worker = (fragment.session_id, fragment.worker_id)
        index, episode, total = self._running.pop(worker, (-2, -1, math.nan))
        if index + 1 != fragment.fragment_index or fragment.discontinuity:
            total = math.nan
        ended = []
        for step in range(fragment.step_count):
            if fragment.first[step]:
                total = 0.0
            elif int(fragment.episode_id[step]) != episode:
                total = math.nan
            episode = int(fragment.episode_id[step])
            total += float(fragment.reward[step])
            if fragment.terminated[step] or fragment.truncated[step]:
                if not math.isnan(total):
                    ended.append((step, total))
                total = math.nan
        self._running[worker] = (fragment.fragment_index, episode, total)
        if len(self._running) > REMEMBERED_MAX:
            self._running.popitem(last=False)
        return ended


def _told(returns: np.ndarray) -> list[tuple[int, float]]:
    steps = np.flatnonzero(~np.isnan(returns))
    return [(int(step), float(returns[step])) for step in steps]
