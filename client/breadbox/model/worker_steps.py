"""Where each worker's steps went, which workers are left out of training, and why. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

REPORT_S = 5.0
"""Seconds between two reports of a worker."""
REPORTED_S_MAX = 60.0
"""Seconds without a report after which a worker is not judged any more."""
LEFT_OUT_SHARE = 0.25
"""A worker is left out if less than this part of the usual share of its steps is trained on."""
SPARE = 1.5
"""A fragment needs its own versions, and half as many to be drawn before it is stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSteps:
    """Where the steps of one worker went: each step that it acted is counted in one place.

    The worker reports the counts up to `admitted_count`, since its start; they add up to
    `acted_count`. The server divides the admitted ones, since its own start.
    """

    worker_id: str
    task: str = "default"
    """Task of its latest episode."""
    acted_count: int = 0
    """Steps that the environment has answered."""
    filling_count: int = 0
    """In the fragment being filled."""
    sending_count: int = 0
    """In fragments that the server has not answered yet."""
    dropped_count: int = 0
    """Dropped while filling: the fragment became stale, or its session ended."""
    refused_count: int = 0
    """In full fragments that worker or server refused: stale, of another session, misfits."""
    undelivered_count: int = 0
    """In fragments that the worker had left when it ended, or could not send."""
    admitted_count: int = 0
    fragment_step_count: int = 0
    """Steps of a full fragment."""
    steps_per_version: float = 0.0
    """Steps in the time of one model version, lately, or 0 if not known."""
    trained_count: int = 0
    """Admitted steps that were granted to a learner, which did not give them back."""
    evicted_count: int = 0
    """Admitted steps that left the buffer unread."""
    trained_version: int | None = None
    """Version that was current when a learner last got steps of it, or None for never."""
    report_age_s: float | None = None
    """Seconds since its latest report, or None if it has reported nothing."""

    @property
    def held_count(self) -> int:
        """Admitted steps that neither were trained on nor left unread: the buffer has them."""
        return max(0, self.admitted_count - self.trained_count - self.evicted_count)

    @property
    def lost_count(self) -> int:
        """Steps that ended without being trained on."""
        return self.dropped_count + self.refused_count + self.undelivered_count + self.evicted_count

    def ended(self) -> "WorkerSteps":
        """Return the same once its worker has ended, and fills no fragment any more."""
        undelivered = self.undelivered_count + self.filling_count
        return replace(self, filling_count=0, undelivered_count=undelivered)

    @property
    def fragment_versions(self) -> float:
        """Model versions that pass while one fragment is filled, or 0 if not known."""
        if not self.steps_per_version:
            return 0.0
        return self.fragment_step_count / self.steps_per_version


_UNSENT = ("filling", "sending", "dropped", "refused", "undelivered")
REPORTED_ENDS = (*_UNSENT, "admitted")
"""What may have become of a step, as far as its worker knows."""
ENDS = (*_UNSENT, "held", "trained", "evicted")
"""What may have become of a step, with the server's part: held, trained or evicted if admitted."""


def ends_of(workers: Iterable[WorkerSteps], ends: Sequence[str] = ENDS) -> dict[str, int]:
    """Return the steps of workers by what became of them, without those of which there is none."""
    counts = dict.fromkeys(ends, 0)
    for each in workers:
        for end in ends:
            counts[end] += getattr(each, f"{end}_count")
    return {end: count for end, count in counts.items() if count}


def reporting(workers: Sequence[WorkerSteps]) -> list[WorkerSteps]:
    """Return the workers that have reported lately."""
    return [
        each
        for each in workers
        if each.report_age_s is not None and each.report_age_s <= REPORTED_S_MAX
    ]


def left_out(workers: Sequence[WorkerSteps]) -> list[WorkerSteps]:
    """Return the workers of which far fewer steps are trained on than of all together.

    A worker is judged once a fragment's steps have ended. Where no step is trained on, as in a
    buffer that is read by a cursor, none is left out.
    """
    seen = reporting(workers)
    trained = sum(each.trained_count for each in seen)
    ended = trained + sum(each.lost_count for each in seen)
    return [
        each
        for each in seen
        if each.trained_count + each.lost_count >= max(1, each.fragment_step_count)
        and each.trained_count * ended
        < LEFT_OUT_SHARE * trained * (each.trained_count + each.lost_count)
    ]


def left_out_text(workers: Sequence[WorkerSteps]) -> str:
    """Return a sentence on the workers that are left out, or empty if none is."""
    found = left_out(workers)
    if not found:
        return ""
    how = "hardly ever" if any(each.trained_count for each in found) else "never"
    names = ", ".join([each.worker_id for each in found[:4]]) + ", ..." * (len(found) > 4)
    verb = "is" if len(found) == 1 else "are"
    return (
        f"{len(found)} of {len(reporting(workers))} environments {verb} {how} trained on ({names})"
    )


def slow_advice(workers: Sequence[WorkerSteps], staleness_max: int | None) -> str:
    """Return the remedy for the slowest worker, or empty if no fragment takes too many versions."""
    if staleness_max is None:
        return ""
    slow = [each for each in workers if each.fragment_versions * SPARE > staleness_max]
    if not slow:
        return ""
    slowest = max(slow, key=lambda each: each.fragment_versions)
    limit = math.ceil(slowest.fragment_versions * SPARE)
    steps = math.floor(slowest.steps_per_version * staleness_max / SPARE)
    shorter = (
        f"shorten to {steps} steps (and fetch as many more, so that versions take as long), or "
        if steps > 1
        else ""
    )
    return (
        f"A fragment of {slowest.fragment_step_count} steps takes worker {slowest.worker_id} "
        f"{slowest.fragment_versions:.1f} versions, and staleness_max is {staleness_max}: "
        f"{shorter}staleness_max {limit}."
    )
