"""Where each worker's steps went, which workers are left out of training, and why. Pure."""

import math
from collections.abc import Iterable, Sequence

from breadbox.model.types import WorkerSteps

REPORT_S = 5.0
"""Seconds between two reports of a worker."""
REPORTED_S_MAX = 60.0
"""Seconds without a report after which a worker is not judged any more."""
LEFT_OUT_SHARE = 0.25
"""A worker is left out if less than this part of the usual share of its steps is trained on."""
SPARE = 1.5
"""A fragment needs its own versions, and half as many to be drawn before it is stale."""


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
