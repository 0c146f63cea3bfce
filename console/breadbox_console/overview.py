"""Say of a buffer, from what was seen of it, how it is: for the overview page. Pure."""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from breadbox.diagnosis import Diagnosis, diagnose, diagnose_arrivals, rates_of
from breadbox.model.types import (
    BufferDescription,
    ChunkEvent,
    FragmentReference,
    FullPolicy,
    WorkerSteps,
)
from breadbox.shared.step_ends import ends_of, left_out, reporting
from breadbox_console.arrays import finite
from breadbox_console.episodes import EpisodeIndex, SeenFragment, Worker

WINDOW_S: Final = 10.0
"""Seconds over which rates are taken."""
HISTORY_MAX: Final = 900
"""Points of a buffer's history, one a second."""
WORKERS_SHOWN: Final = 100
IDLE_S: Final = 60.0
"""Seconds without a call after which a buffer is said to be idle."""
STILL_FRAGMENTS: Final = 4
"""Fragments in a row after which a worker's array stands still, if those of most others change."""
BREAKS_USUAL: Final = 3
"""Discontinuities among a worker's latest fragments that are no problem: it drops stale steps."""
SILENT_S: Final = 30.0
"""Seconds after which a worker that sent often is said to be silent."""
TRAINING_S: Final = 10.0
"""Seconds that a point of the training's history covers; `HISTORY_MAX` of them are kept."""
LIVES_MAX: Final = 100_000
GRANTS_MAX: Final = 64
"""Latest grants of a chunk that are kept."""
_SERIES: Final = ("time", "in", "out", "chunks", "version", "staleness")
_WHY: Final = {
    "stale": "it became stale",
    "capacity": "to make room",
    "used_up": "it was used up",
    "session_ended": "its session ended",
    "payload_lost": "the store lost its payload",
    "quarantined": "readers could not read it",
    "deleted": "a client deleted it",
}
_PRODUCERS: Final = {"PRODUCERS_WAIT": "Full", "STALE": "Stale", "WRONG_SESSION": "Refusing"}
"""Statuses of buffers that do not take what producers send, by cause."""
_ORDINARY: Final = ("stale", "capacity", "used_up", "session_ended")
"""Reasons for which chunks leave without an event on the page."""


Look = tuple[float, BufferDescription]
"""Unix time, and what the server said then."""
Point = tuple[float | None, ...]


@dataclass(slots=True)
class ChunkLife:
    """What the server reported of a chunk."""

    grants: list[dict[str, Any]] = field(default_factory=list)
    """Grants, the latest `GRANTS_MAX`: Unix time, staleness then, and how, when and at what
    staleness its lease ended, once it has."""
    earlier_use_count: int = 0
    """Grants before these that were not returned."""
    left_at: float | None = None
    why: str = ""
    """Why it left, or empty while it is held."""


@dataclass(slots=True)
class BufferHistory:
    """What was seen of a buffer: once a second."""

    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=int(WINDOW_S) + 2))
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=HISTORY_MAX))
    """The values of `_SERIES`; times are Unix times."""
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=200))
    wait_s: float = 0.0
    """Seconds in which a learner waited."""
    watched_s: float = 0.0
    latest_grant: tuple[float, int | None, ChunkEvent] | None = None
    """Unix time, the buffer's version when the console heard of it, and the chunks."""
    head: list[FragmentReference] = field(default_factory=list)
    """Fragments of the chunks that are held longest, in order."""
    event_number: int = 0
    """The latest event of chunks that was taken."""
    lives: OrderedDict[int, ChunkLife] = field(default_factory=OrderedDict)
    """By chunk, as far as the server reported anything of it."""
    uses: Counter[int] = field(default_factory=Counter)
    """Chunks that left, by their uses."""
    training: deque[Point] = field(default_factory=lambda: deque(maxlen=HISTORY_MAX))
    """Unix time, mean staleness of what was granted and of what was released as used, and the
    share of time that a learner waited, over `TRAINING_S`."""
    _granted: list[int] = field(default_factory=list)
    _used: list[int] = field(default_factory=list)
    _training_from: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def add(self, now: float, description: BufferDescription) -> None:
        """Take a look at the buffer, at a Unix time."""
        if self.looks:
            before_at, before = self.looks[-1]
            events = events_between(before, description, now)
            if any(each["kind"] == "anew" for each in events):
                self.lives.clear()
            self.events.extend(events)
            self.watched_s += now - before_at
            self.wait_s += (now - before_at) * bool(description.state.waiter_count)
        self.looks.append((now, description))
        self._take_events(description.chunk_events, now, description.model_version)
        before_at, before = self.looks[0]
        rates = rates_of(before, description, now - before_at) if now > before_at else {}
        by_staleness = description.state.chunk_count_by_staleness
        total = sum(by_staleness.values())
        mean = sum(age * count for age, count in by_staleness.items()) / total if total else None
        self.points.append(
            (
                now,
                rates.get("chunks completed"),
                rates.get("chunks delivered"),
                description.state.chunk_count,
                description.model_version,
                mean,
            )
        )

    def is_held(self, fragment: SeenFragment) -> bool:
        """Return True if the fragment's chunk is in the buffer, by what is known."""
        life = self.lives.get(fragment.chunk_id)
        _, description = self.looks[-1]
        return (
            fragment.key.session_id == description.session_id
            and description.state.chunk_count > 0
            and (not self.head or fragment.chunk_id >= self.head[0].chunk_id)
            and not (life is not None and life.why)
        )

    def _take_events(self, events: Sequence[ChunkEvent], now: float, version: int | None) -> None:
        for event in events:
            self.event_number = event.number
            at = now - event.age_s
            is_granted = event.kind == "granted"
            reason = event.kind.removeprefix("evicted_")
            if is_granted:
                self.latest_grant = (at, version, event)
                self._granted.extend(event.values)
            elif event.kind == "consumed":
                self._used.extend(event.values)
            elif reason in _WHY:
                self.uses.update(event.values)
                if reason not in _ORDINARY:
                    text = f"chunks left: {len(event.values)}, each because {_WHY[reason]}"
                    self.events.append({"time": at, "kind": "bad", "text": text})
            for place, chunk_id in enumerate(event.chunk_ids):
                life = self.lives.setdefault(chunk_id, ChunkLife())
                if is_granted:
                    life.grants.append({"at": at, "staleness": event.values[place], "end": ""})
                    if len(life.grants) > GRANTS_MAX:
                        life.earlier_use_count += life.grants.pop(0)["end"] != "returned"
                elif reason in _WHY:
                    life.left_at, life.why = at, _WHY[reason]
                else:
                    begun = next((each for each in life.grants if not each["end"]), None)
                    if begun is not None:
                        behind = event.values[place] if event.values else None
                        begun |= {"end": event.kind, "ended_at": at, "staleness_at_end": behind}
        while len(self.lives) > LIVES_MAX:
            self.lives.popitem(last=False)
        since, watched_s, wait_s = self._training_from
        if now - since >= TRAINING_S:
            share = (self.wait_s - wait_s) / max(self.watched_s - watched_s, 1e-3)
            ages = [float(np.mean(each)) if each else None for each in (self._granted, self._used)]
            if since:
                self.training.append((now, *ages, share))
            self._granted.clear()
            self._used.clear()
            self._training_from = (now, self.watched_s, self.wait_s)

    def history(self) -> dict[str, list[float | None]]:
        """Return the points by name, as lists of equal length."""
        return {name: [each[at] for each in self.points] for at, name in enumerate(_SERIES)}


def events_between(
    before: BufferDescription, after: BufferDescription, now: float
) -> list[dict[str, Any]]:
    """Return what happened between two looks, in words."""
    found: list[tuple[str, str]] = []
    if after.session_id != before.session_id:
        text = f"session {after.session_id} started" if after.session_id else "the session ended"
        found.append(("note", text))
    if after.state.outage and not before.state.outage:
        found.append(("bad", f"nothing is decided: {after.state.outage}"))
    if before.state.outage and not after.state.outage:
        found.append(("good", "the server decides again"))
    if sum(after.state.counters.values()) < sum(before.state.counters.values()):
        found.append(("anew", "the buffer was made anew, or its counters were set back"))
    return [{"time": now, "kind": kind, "text": text} for kind, text in found]


def describe_buffer(history: BufferHistory, index: EpisodeIndex) -> dict[str, Any]:
    """Return all that the overview shows of a buffer, as of the last look, as JSON knows it."""
    (before_at, before), (at, after) = history.looks[0], history.looks[-1]
    watched_s = max(at - before_at, 1e-3)
    diagnosis = diagnose(before, after, watched_s)
    if diagnosis.cause == "NONE":  # No learner waits; a producer may.
        diagnosis = diagnose_arrivals(before, after, watched_s)
    state, config = after.state, after.config
    worker_rows = describe_workers(index.workers, after, at)
    status, level, why = judge(history.looks, diagnosis, worker_rows)
    is_about_it = level != "good" and (status != "Check workers" or why == diagnosis.headline)
    has_learner = state.waiter_count or state.lease_count or state.counters.get("uses", 0)
    return {
        "name": after.name,
        "session": after.session_id,
        "version": after.model_version,
        "status": status,
        "level": level,
        "headline": why,
        "advice": [each for each in diagnosis.advice if each != why and is_about_it],
        "rates": {name: finite(rate) for name, rate in diagnosis.rates.items()},
        "point": list(history.points[-1]),
        "staleness": {str(age): count for age, count in state.chunk_count_by_staleness.items()},
        "staleness_max": config.staleness_max,
        "uses_max": config.uses_max,
        "uses": {str(count): number for count, number in sorted(history.uses.items())[:24]},
        "chunks": state.chunk_count,
        "capacity_chunks": config.capacity_chunks,
        "bytes": state.payload_bytes,
        "capacity_bytes": config.capacity_bytes,
        "leases": state.lease_count,
        "leases_max": config.leases_max,
        "waiters": state.waiter_count if has_learner else None,
        "waiting_reason": state.waiting_reason if state.waiter_count else "",
        "waiting_share": history.wait_s / max(history.watched_s, 1e-3) if has_learner else None,
        "worker_count": state.worker_count,
        "steps": ends_of(after.workers),
        "workers": worker_rows,
        "subscriptions": [asdict(each) for each in after.subscriptions],
        "batch": describe_batch(history, index),
        "next_out": next_out(after, history.head),
        "events": list(history.events)[-20:][::-1],
    }


def describe_workers(
    workers: Mapping[str, Worker], after: BufferDescription, now: float
) -> list[dict[str, Any]]:
    """Return a line for each worker; the worst first."""
    unreadable = Counter(each.worker_id for each in after.state.quarantined)
    means = {
        name: mean
        for name, worker in workers.items()
        if worker.returns and math.isfinite(mean := sum(worker.returns) / len(worker.returns))
    }
    all_means = np.array(list(means.values()))
    typical = float(np.median(all_means)) if len(means) >= 4 else None
    spread = 0.0 if typical is None else float(np.median(np.abs(all_means - typical)))
    each_still = [each.still for each in workers.values()]
    still = {path for each in each_still for path in each if each[path] >= STILL_FRAGMENTS}
    stuck = {path for path in still if np.median([each[path] for each in each_still]) < 1}
    steps = {each.worker_id: each for each in reporting(after.workers)}
    excluded = {each.worker_id for each in left_out(after.workers)}
    rows: list[dict[str, Any]] = []
    for name in excluded - workers.keys():
        rows.append(_unseen(steps[name]))
    for name, worker in sorted(workers.items()):
        problems = []
        if name in unreadable:
            problems.append(f"sent {unreadable[name]} payloads that readers cannot read")
        problems += [f"{text}, in {count} fragments" for text, count in worker.problems.items()]
        if worker.not_finite:
            count, paths = worker.not_finite.total(), ", ".join(worker.not_finite)
            problems.append(f"sent {count} values that are NaN or infinite, in {paths}")
        problems += [
            f"sent the same {path} in its latest {worker.still[path]} fragments, unlike others"
            for path in sorted(stuck)
            if worker.still[path] >= STILL_FRAGMENTS
        ]
        breaks, latest = sum(worker.breaks), len(worker.breaks)
        if breaks > max(BREAKS_USUAL, latest / 8):
            problems.append(f"dropped steps before {breaks} of its latest {latest} fragments")
        if name in excluded:
            problems.append(_steps_text(steps[name]))
        own = means.get(name)
        if own is not None and typical is not None and abs(own - typical) > 8 * spread > 0:
            problems.append(f"its mean return {own:.4g} is far from the others' {typical:.4g}")
        silent_s = now - worker.last_seen_at
        seen_at = worker.seen_at
        usual_s = (seen_at[-1] - seen_at[0]) / (len(seen_at) - 1) if len(seen_at) > 3 else np.inf
        if after.session_id and silent_s > max(SILENT_S, 10 * usual_s):
            problems.append(f"silent for {silent_s:.0f} s")
        rows.append(
            {
                "name": name,
                "rate": _rate(worker, now),
                "version": worker.version,
                "behind": max(worker.behind, default=0),
                "silent_s": silent_s,
                "mean_return": own,
                "problems": problems,
                **_trained(steps.get(name)),
            }
        )
    rows.sort(
        key=lambda row: (-len(row["problems"]), row["silent_s"] <= SILENT_S, -(row["behind"] or 0))
    )
    return rows[:WORKERS_SHOWN]


def _trained(steps: WorkerSteps | None) -> dict[str, Any]:
    """Return the share of a worker's ended steps that were trained on, and versions per fragment.

    Not of the steps acted, which the worker reports only every few seconds.
    """
    ended_count = 0 if steps is None else steps.trained_count + steps.lost_count
    if steps is None or not ended_count:
        return {"trained": None, "fragment_versions": None}
    return {
        "trained": steps.trained_count / ended_count,
        "fragment_versions": steps.fragment_versions or None,
    }


def _steps_text(steps: WorkerSteps) -> str:
    ends = ", ".join([f"{count} {end}" for end, count in ends_of([steps]).items()])
    how = "hardly ever" if steps.trained_count else "never"
    return f"is {how} trained on: of {steps.acted_count} steps {ends}"


def _unseen(steps: WorkerSteps) -> dict[str, Any]:
    """Return the line of a worker that sent no fragment that the console has read."""
    return {
        "name": steps.worker_id,
        "rate": 0.0,
        "version": None,
        "behind": None,
        "silent_s": steps.report_age_s or 0.0,
        "mean_return": None,
        "problems": [_steps_text(steps)],
        **_trained(steps),
    }


def describe_batch(history: BufferHistory, index: EpisodeIndex) -> dict[str, Any] | None:
    """Return how fresh the latest granted batch was, or None if no grant was seen.

    Workers, versions and uses are those of the batch's fragments that the console has read.
    """
    if history.latest_grant is None:
        return None
    at, version, granted = history.latest_grant
    read = [each for chunk_id in granted.chunk_ids for each in index.chunks.get(chunk_id, ())]

    def uses(each: SeenFragment) -> int:
        life, since = history.lives.get(each.chunk_id, ChunkLife()), each.appended_at
        later = [one for one in life.grants if one["at"] > since and one["end"] != "returned"]
        # Where a grant that is kept came before the fragment was read, so did all that are not.
        is_first_later = bool(life.grants) and life.grants[0]["at"] > since
        earlier_count = life.earlier_use_count if is_first_later else 0
        return max(1, each.uses_then + earlier_count + len(later))

    at_grant = [
        age + min(each.version_min for each in index.chunks[chunk_id])
        for chunk_id, age in zip(granted.chunk_ids, granted.values, strict=True)
        if index.chunks.get(chunk_id)
    ]
    return {
        "granted_at": at,
        "chunks": len(granted.chunk_ids),
        "fragments": len(read),
        "workers": Counter(each.key.worker_id for each in read).most_common(8),
        "version": at_grant[0] if at_grant else version,
        "version_min": min((each.version_min for each in read), default=None),
        "version_max": max((each.version_max for each in read), default=None),
        "staleness": [min(granted.values), float(np.median(granted.values)), max(granted.values)],
        "uses": sorted(Counter(map(uses, read)).items()),
    }


def next_out(description: BufferDescription, head: Sequence[FragmentReference]) -> dict[str, Any]:
    """Return the chunks nearest to leaving, of those held longest, and each limit as a sentence."""
    config, state = description.config, description.state
    limits = ["Staleness removes nothing."]
    if config.staleness_max is not None:
        at_limit = state.chunk_count_by_staleness.get(config.staleness_max, 0)
        limits = [f"A chunk leaves as stale beyond a staleness of {config.staleness_max}"]
        next_version = (description.model_version or 0) + 1
        leave = f"{at_limit} are at it, and leave with version {next_version}."
        limits[0] += f"; {leave if at_limit else 'none is at it.'}"
    limits.append(f"Uses after which a chunk leaves: {config.uses_max or 'any number'}.")
    is_by_age = config.remover in (None, "oldest_first")
    free = None
    if config.full_policy is FullPolicy.BLOCK:
        limits.insert(0, "None leaves for room: at capacity producers wait.")
    elif config.capacity_chunks:
        order = "the oldest first" if is_by_age else f"by the order {config.remover}"
        limits.append(f"Beyond {config.capacity_chunks} chunks some leave for room, {order}.")
        free = max(0, config.capacity_chunks - state.chunk_count) if is_by_age else None

    rows = []
    for place, each in enumerate({each.chunk_id: each for each in head}.values()):
        ends = []
        if config.staleness_max is not None:
            left = config.staleness_max + 1 - each.staleness
            version = (description.model_version or 0) + left
            ends.append((left / (config.staleness_max + 1), f"as stale with version {version}"))
        if config.uses_max:
            left = config.uses_max - each.use_count
            ends.append((left / config.uses_max, f"used up by {left} more use{'s' * (left > 1)}"))
        if free is not None and config.capacity_chunks:
            left = free + place + 1
            chunks = f"{left} more chunk{'s' * (left > 1)}"
            ends.append((left / config.capacity_chunks, f"for room by {chunks}"))
        ends.sort()
        row = {"chunk": each.chunk_id, "worker": each.metadata.worker_id, "age": each.staleness}
        why = "; or ".join([text for _, text in ends])
        rows.append((ends[:1], row | {"uses": each.use_count, "leaves": why}))
    return {
        "chunks": [row for _, row in sorted(rows, key=lambda each: each[0])[:5]],
        "limits": limits,
    }


def judge(
    looks: Sequence[Look], diagnosis: Diagnosis, workers: Sequence[Mapping[str, Any]]
) -> tuple[str, str, str]:
    """Return a buffer's status: a word, its level, and its cause in a sentence.

    `diagnosis` is of the first and the last of the looks.
    """
    state, cause, rates = looks[-1][1].state, diagnosis.cause, diagnosis.rates
    arriving, leaving = rates["fragments admitted"], rates["chunks delivered"]
    troubled = [row for row in workers if row["problems"]]
    if cause in ("OUTAGE", "HOLD"):
        return ("Down" if cause == "OUTAGE" else "Stalled"), "bad", diagnosis.headline
    if state.quarantined:
        return "Damaged", "bad", diagnosis.advice[-1]
    if cause == "LEFT_OUT":
        return "Check workers", "warn", diagnosis.headline
    # A learner that fetches again and again waits in some of the looks, and is well.
    waits = 2 * sum(bool(each.state.waiter_count) for _, each in looks) > len(looks)
    if waits and cause not in ("NONE", "NO_SESSION"):
        is_blocked = cause in ("LEASES", "PRODUCERS_WAIT")
        return ("Stalled" if is_blocked else "Starved"), "warn", diagnosis.headline
    # Workers may make more than the learner takes; the surplus becomes stale, and nothing is wrong.
    is_surplus = cause == "STALE" and leaving > 0
    if cause in _PRODUCERS and not is_surplus:
        return _PRODUCERS[cause], "warn", diagnosis.headline
    is_still = not (arriving or leaving or state.lease_count)
    if is_still and (cause == "NO_SESSION" or state.idle_s >= IDLE_S):
        if cause == "NO_SESSION":
            has_ended = state.counters.get("sessions_started")
            return ("Ended" if has_ended else "Idle"), "idle", diagnosis.headline
        return "Idle", "idle", f"No producer or learner has called for {state.idle_s:.0f} s."
    if troubled:
        why = f"{len(troubled)} of {len(workers)} workers have problems: {troubled[0]['name']} "
        return "Check workers", "warn", f"{why}{troubled[0]['problems'][0]}."
    completed = rates["chunks completed"]
    why = "No learner waits" if state.counters.get("uses") else "No learner has fetched yet"
    why += f": {completed:.3g} chunks per second arrive, {leaving:.3g} are fetched"
    why += ", and most of the others become stale." if is_surplus else "."
    return "Healthy", "good", why


def _rate(worker: Worker, now: float) -> float:
    """Return fragments per second over the latest ones."""
    if len(worker.seen_at) < 2:
        return 0.0
    return (len(worker.seen_at) - 1) / max(now - worker.seen_at[0], 1e-3)
