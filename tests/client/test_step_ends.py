"""Which workers are left out of training, and the remedy in numbers."""

from dataclasses import replace
from typing import Any

import pytest

from breadbox.diagnosis import diagnose
from breadbox.model.types import BufferConfig, BufferDescription, BufferState, WorkerSteps
from breadbox.shared.step_ends import ENDS, ends_of, left_out, left_out_text, slow_advice


def steps_of(name: str, **counts: Any) -> WorkerSteps:
    values: dict[str, Any] = {"fragment_step_count": 32, "report_age_s": 1.0, **counts}
    return WorkerSteps(worker_id=name, **values)


FAST = [
    steps_of(f"fast-{index}", acted_count=640, admitted_count=640, trained_count=640)
    for index in range(64)
]
SLOW = [
    steps_of(f"slow-{index}", acted_count=128, dropped_count=128, steps_per_version=6.4)
    for index in range(8)
]


def test_eight_of_72_that_are_never_trained_on_are_named() -> None:
    """Their share of all steps is 2 %, which nothing that looked at the share of all noticed."""
    assert SLOW == left_out(FAST + SLOW)
    told = "8 of 72 environments are never trained on (slow-0, slow-1, slow-2, slow-3, ...)"
    assert told == left_out_text(FAST + SLOW)


@pytest.mark.parametrize(
    ("changes", "is_left_out"),
    [
        ({"dropped_count": 0, "admitted_count": 128, "evicted_count": 128}, True),
        ({"dropped_count": 0, "refused_count": 128}, True),
        ({"dropped_count": 120, "admitted_count": 8, "trained_count": 8}, True),
        ({"dropped_count": 64, "admitted_count": 64, "trained_count": 64}, False),
        ({"dropped_count": 0, "admitted_count": 128}, False),
        ({"dropped_count": 31, "filling_count": 97}, False),
        ({"report_age_s": 61.0}, False),
        ({"report_age_s": None}, False),
    ],
    ids=["evicted unread", "refused", "hardly", "half", "held", "too early", "gone", "silent"],
)  # fmt: skip
def test_a_worker_is_judged_by_its_own_ends(changes: dict[str, Any], is_left_out: bool) -> None:
    worker = replace(SLOW[0], **changes)
    assert ([worker] if is_left_out else []) == left_out([*FAST, worker])


def test_where_nothing_is_trained_on_none_is_left_out() -> None:
    """A mirror reads by a cursor, which uses nothing up."""
    workers = [replace(each, trained_count=0) for each in FAST]
    assert [] == left_out(workers + SLOW)


def test_the_remedy_has_both_numbers() -> None:
    told = slow_advice(SLOW, 2)
    assert "takes worker slow-0 5.0 versions, and staleness_max is 2" in told
    assert "shorten to 8 steps" in told
    assert told.endswith("or staleness_max 8.")
    assert "" == slow_advice(SLOW, 8)
    assert "" == slow_advice(FAST, 2)
    assert "" == slow_advice(SLOW, None)
    assert "shorten" not in slow_advice(SLOW, 0)


def test_each_step_has_one_end() -> None:
    worker = steps_of(
        "w", acted_count=36, filling_count=1, sending_count=2, dropped_count=3, refused_count=4,
        undelivered_count=5, admitted_count=21, trained_count=6, evicted_count=7,
    )  # fmt: skip
    assert {"held": 8, "trained": 6, "evicted": 7}.items() <= ends_of([worker]).items()
    assert worker.acted_count == sum(ends_of([worker]).values())
    assert set(ENDS) == ends_of([worker]).keys()
    over = worker.ended()
    assert (0, 6, 36) == (over.filling_count, over.undelivered_count, sum(ends_of([over]).values()))


def test_explain_names_the_slow_and_does_not_ask_for_more_workers() -> None:
    """It said "Add workers", which makes it worse."""
    state = BufferState(waiter_count=1, counters={"fragments_admitted": 10})
    config = BufferConfig(staleness_max=2, fragments_per_chunk=1)
    before = BufferDescription("default", config, "s", 1, state)
    later = replace(state, counters={"fragments_admitted": 90, "chunks_closed": 80})
    after = replace(before, state=later, workers=(*FAST, *SLOW))
    told = diagnose(before, after, 2.0, fragment_count=64)
    assert "LEFT_OUT" == told.cause
    assert told.headline.startswith("8 of 72 environments are never trained on")
    assert "staleness_max 8." in told.advice[0]
    assert not [each for each in told.advice if "Add workers" in each]
    assert "TOO_FEW" == diagnose(before, replace(after, workers=()), 2.0, fragment_count=64).cause
