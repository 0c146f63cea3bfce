"""Put episodes together from the small columns of fragments, and find them again. Pure."""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from breadbox.model.fragment import Fragment
from breadbox.model.trees import leaves
from breadbox.model.types import ArrayType, FragmentReference
from breadbox.payload.dtypes import as_numpy
from breadbox_console.arrays import NUMBERS, finite, numbers, plain, text_of

RETURNS_RECENT: Final = 20
"""Episodes of a worker whose mean return is shown."""
NAMES_MAX: Final = 500
"""Workers and tasks of which a filter names each."""
HISTOGRAM_BINS: Final = 24
CHUNKS_MAX: Final = 100_000
SPAN_STEPS_MIN: Final = 64
"""Steps that a span counts for at least: beside its rewards it takes 1 KiB."""
WORKERS_MAX: Final = 10_000
"""Workers of a buffer that are known; beyond, the one that was silent longest is forgotten."""
PATHS_MAX: Final = 256
"""Arrays of a worker of which it is counted what is no number and stands still."""
PROBLEMS_MAX: Final = 8
"""Kinds of problems of a worker's fragments that are remembered."""


_SHOWN: Final = (
    *("number", "worker_id", "episode_id", "task", "length", "end", "is_whole"),
    *("version_min", "version_max", "last_seen_at", "text"),
)


class FragmentKey(NamedTuple):
    """Identity of a fragment within its buffer (B2)."""

    session_id: str
    worker_id: str
    fragment_index: int


def key_of(reference: FragmentReference) -> FragmentKey:
    """Return a fragment's identity."""
    data = reference.metadata
    return FragmentKey(data.session_id, data.worker_id, data.fragment_index)


@dataclass(frozen=True, slots=True)
class SeenFragment:
    """What the console keeps of a fragment."""

    key: FragmentKey
    chunk_id: int
    version_min: int
    version_max: int
    step_count: int
    staleness: int
    """Versions behind the current one when it was read."""
    appended_at: float
    """Unix time at which the console read it; with a live buffer, moments after its append."""
    uses_then: int
    """Uses of its chunk when it was read."""
    discontinuity: bool
    types: Mapping[str, ArrayType]
    """Types of its arrays, by path."""


class Span(NamedTuple):
    """Steps [start, stop) of a fragment."""

    fragment: SeenFragment
    start: int
    stop: int

    @property
    def counted_steps(self) -> int:
        """Steps that it counts for in what is kept."""
        return max(self.stop - self.start, SPAN_STEPS_MIN)


@dataclass(slots=True)
class Episode:
    """An episode, or as much of it as was seen."""

    number: int
    """Names it within a watch; ascending in order of arrival."""
    session_id: str
    worker_id: str
    episode_id: int
    task: str
    is_whole: bool
    """True if its first step was seen."""
    spans: list[Span] = field(default_factory=list)
    rewards: list[NDArray[np.float32]] = field(default_factory=list)
    return_sum: float = 0.0
    """The return once the episode has ended, NaN if it is unknown; before, the rewards seen."""
    length: int = 0
    """Number of its steps that were seen, or of all its steps once its worker has reported it."""
    end: str = "running"
    """Or terminated, truncated, or cut: fragments after it are missing."""
    last_seen_at: float = 0.0
    staleness: float = 0.0
    """Mean of its fragments', once it has ended."""
    text: str = ""
    """What the text search finds, beside worker and task: its tags."""

    @property
    def has_ended(self) -> bool:
        """True if its end was seen."""
        return self.end in ("terminated", "truncated")

    @property
    def seen_count(self) -> int:
        """Number of its steps that were seen."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def version_min(self) -> int:
        """Lowest version that acted in it."""
        return min(span.fragment.version_min for span in self.spans)

    @property
    def version_max(self) -> int:
        """Highest version that acted in it."""
        return max(span.fragment.version_max for span in self.spans)

    def row(self) -> dict[str, Any]:
        """Return its line of the list, as JSON knows it."""
        shown = {name: getattr(self, name) for name in _SHOWN}
        return shown | {"return": finite(self.return_sum)}


@dataclass(slots=True)
class Worker:
    """What was seen of a worker."""

    last_seen_at: float = 0.0
    version: int = 0
    behind: deque[int] = field(default_factory=lambda: deque(maxlen=32))
    """Versions that its latest fragments were behind when they were read."""
    not_finite: Counter[str] = field(default_factory=Counter)
    """Elements that are no finite number, by the array's path."""
    still: Counter[str] = field(default_factory=Counter)
    """Latest fragments in a row in which no step differed from the one before it, by path."""
    last_steps: dict[str, int] = field(default_factory=dict)
    """Hash of the last step that was read, by path."""
    problems: Counter[str] = field(default_factory=Counter)
    """Fragments that could not be shown, by why."""
    breaks: deque[bool] = field(default_factory=lambda: deque(maxlen=32))
    """For each of its latest fragments, True if it is a discontinuity."""
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RETURNS_RECENT))
    seen_at: deque[float] = field(default_factory=lambda: deque(maxlen=32))


@dataclass(frozen=True, slots=True)
class Query:
    """Which episodes a list shows. Every field that is set must fit."""

    worker: str = ""
    task: str = ""
    end: str = ""
    text: str = ""
    """Part of a worker's name, of a task or of a tag."""
    return_min: float | None = None
    return_max: float | None = None
    length_min: float | None = None
    length_max: float | None = None
    version_min: float | None = None
    version_max: float | None = None

    def fits(self, episode: Episode) -> bool:
        """Return True if the episode is to be shown."""
        return (
            self.worker in ("", episode.worker_id)
            and self.task in ("", episode.task)
            and self.end in ("", episode.end)
            and (
                not self.text
                or self.text.lower()
                in f"{episode.worker_id}\n{episode.task}\n{episode.text}".lower()
            )
            and _within(episode.return_sum, self.return_min, self.return_max)
            and _within(episode.length, self.length_min, self.length_max)
            and (self.version_min is None or episode.version_max >= self.version_min)
            and (self.version_max is None or episode.version_min <= self.version_max)
        )


class EpisodeIndex:
    """The episodes of one buffer, the latest of them.

    Args:
        steps_max: Steps that are kept, `SPAN_STEPS_MIN` or more for each fragment. Beyond, the
            oldest episodes are forgotten.
        age_s_max: Seconds after which an episode is forgotten.
    """

    def __init__(self, *, steps_max: int, age_s_max: float) -> None:
        self._steps_max = steps_max
        self._age_s_max = age_s_max
        self._step_count = 0
        self._next_number = 1
        self._open: dict[tuple[str, str], tuple[int, Episode | None]] = {}
        """By session and worker: the latest fragment's index, and the episode that goes on."""
        self._seen: OrderedDict[FragmentKey, None] = OrderedDict()
        self.episodes: OrderedDict[int, Episode] = OrderedDict()
        self.chunks: OrderedDict[int, list[SeenFragment]] = OrderedDict()
        """The fragments of each chunk, of the latest `CHUNKS_MAX`."""
        self.workers: dict[str, Worker] = {}
        self.tasks: set[str] = set()
        """Names of tasks, at most `NAMES_MAX`."""
        self.ended: deque[Episode] = deque(maxlen=20_000)
        """Ended episodes in order of arrival; also forgotten ones, without spans and rewards."""

    def add(
        self,
        reference: FragmentReference,
        types: Mapping[str, ArrayType],
        fragment: Fragment,
        now: float,
    ) -> None:
        """Take a fragment, of which small columns were read, at a Unix time, unless it was seen."""
        data, key = reference.metadata, key_of(reference)
        if key in self._seen:
            return
        self._seen[key] = None
        seen = SeenFragment(
            key=key,
            chunk_id=reference.chunk_id,
            version_min=data.model_version_min,
            version_max=data.model_version_max,
            step_count=data.step_count,
            staleness=reference.staleness_when_granted,
            appended_at=now,
            uses_then=reference.use_count,
            discontinuity=data.discontinuity,
            types=types,
        )
        self.chunks.setdefault(seen.chunk_id, []).append(seen)
        if len(self.chunks) > CHUNKS_MAX:
            self.chunks.popitem(last=False)
        self._note_worker(seen, fragment)
        self._cut(seen, fragment)
        self._forget(now)

    def find(self, query: Query) -> list[Episode]:
        """Return the episodes that a query shows, the latest first."""
        latest_first, is_all = reversed(self.episodes.values()), query == Query()
        return [each for each in latest_first if is_all or query.fits(each)]

    def worker(self, worker_id: str) -> Worker:
        """Return what was seen of a worker, which is now the one that was heard of last."""
        worker = self.workers[worker_id] = self.workers.pop(worker_id, Worker())
        while len(self.workers) > WORKERS_MAX:
            del self.workers[next(iter(self.workers))]
        return worker

    def note_problem(self, worker_id: str, problem: str, now: float) -> None:
        """Count a fragment that could not be shown, at a Unix time."""
        worker = self.worker(worker_id)
        worker.last_seen_at = now
        if problem in worker.problems or len(worker.problems) < PROBLEMS_MAX:
            worker.problems[problem] += 1

    def _note_worker(self, seen: SeenFragment, fragment: Fragment) -> None:
        worker = self.worker(seen.key.worker_id)
        worker.breaks.append(seen.discontinuity)
        worker.last_seen_at = seen.appended_at
        worker.seen_at.append(seen.appended_at)
        worker.version = seen.version_max
        worker.behind.append(seen.staleness)
        self.note_arrays(
            seen.key.worker_id, fragment, "reward", "value", "log_prob", "action", "obs"
        )

    def note_arrays(self, worker_id: str, fragment: Fragment, *fields: str) -> None:
        """Count what is no number, and what stands still, in fields of a worker's fragment."""
        worker = self.worker(worker_id)
        for path, leaf in [
            each for name in fields for each in leaves(getattr(fragment, name), name)
        ]:
            array = as_numpy(leaf)
            is_known = path in worker.last_steps or len(worker.last_steps) < PATHS_MAX
            if not (array.size and is_known):
                continue
            if array.dtype.kind in "fc" and not np.isfinite(array).all():
                worker.not_finite[path] += int(np.count_nonzero(~np.isfinite(array)))
            value = hash(array[-1].tobytes())
            is_still = worker.last_steps.get(path, value) == value and not (array != array[0]).any()
            worker.still[path] = is_still * (worker.still[path] + 1)
            worker.last_steps[path] = value

    def _cut(self, seen: SeenFragment, fragment: Fragment) -> None:
        """Give the fragment's steps to their episodes."""
        place = seen.key[:2]
        last_index, going_on = self._open.get(place, (None, None))
        follows = last_index is not None and seen.key.fragment_index == last_index + 1
        if going_on is not None and (not follows or seen.discontinuity):
            going_on.end = "cut"
            going_on = None
        stops = np.flatnonzero(fragment.ended) + 1
        start = 0
        for stop in [*stops.tolist(), seen.step_count]:
            if stop == start:
                continue
            episode = going_on or self._begin(seen, fragment, start)
            self._extend(episode, Span(seen, start, stop), fragment)
            going_on = None if episode.end != "running" else episode
            start = stop
        self._open.pop(place, None)
        self._open[place] = (seen.key.fragment_index, going_on)
        while len(self._open) > WORKERS_MAX:
            del self._open[next(iter(self._open))]

    def _begin(self, seen: SeenFragment, fragment: Fragment, start: int) -> Episode:
        number, self._next_number = self._next_number, self._next_number + 1
        episode = Episode(
            number=number,
            session_id=seen.key.session_id,
            worker_id=seen.key.worker_id,
            episode_id=int(fragment.episode_id[start]),
            task=_label(fragment.extras, "task", start) or "default",
            is_whole=bool(fragment.first[start]),
            text=_label(fragment.extras, "tag", start),
        )
        self.episodes[number] = episode
        if len(self.tasks) < NAMES_MAX:
            self.tasks.add(episode.task)
        return episode

    def _extend(self, episode: Episode, span: Span, fragment: Fragment) -> None:
        with np.errstate(over="ignore"):
            rewards = as_numpy(fragment.reward)[span.start : span.stop].astype(np.float32)
        episode.spans.append(span)
        episode.rewards.append(rewards)
        episode.length += span.stop - span.start
        episode.return_sum += float(rewards.sum(dtype=np.float64))
        episode.last_seen_at = span.fragment.appended_at
        self._step_count += span.counted_steps
        last = span.stop - 1
        if not fragment.ended[last]:
            return
        episode.end = "terminated" if fragment.terminated[last] else "truncated"
        # A worker counts from the episode's start, even where fragments are missing here.
        reported = _reported(fragment.extras, "episode_return", last)
        if reported is not None or not episode.is_whole:
            episode.return_sum = math.nan if reported is None else reported
        length = _reported(fragment.extras, "episode_length", last)
        if length is not None and length >= 1:
            episode.length = int(length)
        episode.staleness = float(np.mean([each.fragment.staleness for each in episode.spans]))
        self.ended.append(episode)
        if math.isfinite(episode.return_sum):
            self.workers[episode.worker_id].returns.append(episode.return_sum)

    def _forget(self, now: float) -> None:
        while self.episodes:
            oldest = next(iter(self.episodes.values()))
            is_old = oldest.last_seen_at < now - self._age_s_max
            has_room = self._step_count <= self._steps_max or len(self.episodes) == 1
            if has_room and not is_old:
                break
            del self.episodes[oldest.number]
            self._step_count -= sum(span.counted_steps for span in oldest.spans)
            oldest.rewards.clear()
            oldest.spans.clear()
            place = oldest.session_id, oldest.worker_id
            index, going_on = self._open.get(place, (0, None))
            if going_on is oldest:
                self._open[place] = (index, None)
        while len(self._seen) > 200_000:
            self._seen.popitem(last=False)


def histogram(episodes: Iterable[Episode]) -> list[dict[str, float]]:
    """Return bins of the finite returns: from, to (exclusive but for the last), and count."""
    returns = np.array([each.return_sum for each in episodes])
    returns = returns[np.isfinite(returns)]
    if not returns.size:
        return []
    low, high = float(returns.min()), float(returns.max())
    with np.errstate(all="ignore"):
        edges = np.linspace(low, high, HISTOGRAM_BINS + 1)
        has_width = bool((np.diff(edges) > 0).all())
    if not has_width:  # They are equal, nearly equal, or further apart than a number can say.
        return [{"from": low, "to": high, "count": len(returns)}]
    counts, _ = np.histogram(returns, bins=edges)
    return [
        {"from": float(edges[at]), "to": float(edges[at + 1]), "count": int(count)}
        for at, count in enumerate(counts)
    ]


def learning_points(
    ended: Sequence[Episode], *, by: str, points_max: int = 200
) -> dict[str, dict[str, list[float | None]]]:
    """Return mean returns over time and steps, a series by "worker", "task" or "all".

    Each point is the mean of successive episodes; a series has at most `points_max`. An
    unknown return is left out; the episode counts for steps and staleness.
    """

    def mean(values: Iterable[float]) -> float | None:
        known = [each for each in values if not math.isnan(each)]
        return finite(np.mean(known)) if known else None

    groups: dict[str, list[tuple[float, int, Episode]]] = {}
    steps = 0
    for episode in ended:
        steps += episode.length
        name = {"worker": episode.worker_id, "task": episode.task}.get(by, "all")
        groups.setdefault(name, []).append((episode.last_seen_at, steps, episode))
    found: dict[str, dict[str, list[float | None]]] = {}
    for name, rows in sorted(groups.items(), key=lambda item: -len(item[1]))[:16]:
        size = -(-len(rows) // points_max)
        parts = [rows[at : at + size] for at in range(0, len(rows), size)]
        found[name] = {
            "time": [part[-1][0] for part in parts],
            "steps": [part[-1][1] for part in parts],
            "return": [mean(each.return_sum for *_, each in part) for part in parts],
            "staleness": [mean(each.staleness for *_, each in part) for part in parts],
        }
    return found


def _reported(extras: Mapping[str, Any], name: str, step: int) -> float | None:
    """Return the number that a worker reports of an episode at its last step.

    NaN where the worker knows none, as of an episode that its environment's failure ended; None if
    it does not report.
    """
    column = as_numpy(extras[name]) if name in extras else np.empty((0, 0))
    if math.prod(column.shape[1:]) != 1 or column.dtype.kind not in NUMBERS:
        return None
    value = float(numbers(column[step]).reshape(()))
    return value if math.isfinite(value) else math.nan


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _label(extras: Mapping[str, Any], name: str, step: int) -> str:
    """Return the text of an extra at a step, or "" if there is none."""
    column = extras.get(name)
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in "USiu":
        return ""
    return text_of(plain(column[step : step + 1])[0])
