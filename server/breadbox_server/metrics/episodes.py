"""What a report of episodes comes to.

A report may hold thousands, and nothing else is done by the loop meanwhile; so each of its names is
checked once, and what is alike is added up before it is counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from breadbox.v1.replay_buffer_service_pb2 import EpisodeReport
from breadbox_server.base import conversion as convert
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.validation import check_int, check_name
from breadbox_server.limits import TASK_SIZE_BYTES_MAX

RETURN_MAX: Final = 2**53
"""Largest return of an episode: a larger one would drown all others in the sum of returns."""


class EpisodeKey(NamedTuple):
    """What episodes that are added up have in common."""

    worker_id: str
    task: str
    end: str


@dataclass(slots=True)
class EpisodeTotals:
    """Sums over the episodes of one key."""

    episode_count: int = 0
    return_sum: float = 0.0
    step_count: int = 0


def totals_of(episodes: Iterable[EpisodeReport]) -> dict[EpisodeKey, EpisodeTotals]:
    """Add up the episodes of a report, by worker, task and end.

    Raises:
        InvalidArgumentError: One is malformed; names it and its field.
    """
    totals: dict[EpisodeKey, EpisodeTotals] = {}
    for position, episode in enumerate(episodes):
        worker_id, task, end = episode.worker_id, episode.task or "default", episode.end
        return_sum, step_count = episode.return_sum, episode.step_count
        known = totals.get(key := EpisodeKey(worker_id, task, convert.episode_end(end, position)))
        if known is None:
            _check_names(worker_id, task, position)
            known = totals[key] = EpisodeTotals()
        if not 0 <= step_count <= 2**53:
            check_int(f"episodes[{position}].step_count", step_count, 0, 2**53)
        _check_return("return_sum", return_sum, position)
        _check_return("discounted_return_sum", episode.discounted_return_sum, position)
        known.episode_count += 1
        known.return_sum += return_sum
        known.step_count += step_count
    return totals


def _check_names(worker_id: str, task: str, position: int) -> None:
    at = f"episodes[{position}]"
    check_name(f"{at}.worker_id", worker_id)
    check_name(f"{at}.task", task)
    if len(task.encode()) > TASK_SIZE_BYTES_MAX:
        raise InvalidArgumentError(f"{at}.task", f"must be at most {TASK_SIZE_BYTES_MAX} bytes")


def _check_return(field: str, value: float, position: int) -> None:
    # Also of NaN and infinity: a sum of all returns would never be a number again.
    if not -RETURN_MAX <= value <= RETURN_MAX:
        raise InvalidArgumentError(
            f"episodes[{position}].{field}", f"must be a number from {-RETURN_MAX} to {RETURN_MAX}"
        )
