"""The learner's records say how many steps were made, and where they went."""

from breadbox.model.types import WorkerSteps
from breadbox_learner.training.batching import EnvironmentSteps


def acted(**counts: int) -> list[WorkerSteps]:
    return [WorkerSteps(worker_id=name, acted_count=count) for name, count in counts.items()]


def test_environment_steps_are_what_workers_report_since_the_run_began() -> None:
    """They came from the indices of fragments, and steps that were never sent were not counted."""
    steps = EnvironmentSteps()
    steps.leave_out(acted(old=1000))
    steps.count([(1, 640)])
    assert 640 == steps.total
    steps.report(acted(old=1500, new=700))
    assert 1200 == steps.total
    steps.report(acted(old=1500, new=800))
    assert 1300 == steps.total


def test_a_worker_that_starts_again_under_its_name_adds_to_the_total() -> None:
    steps = EnvironmentSteps()
    steps.report(acted(w=500))
    steps.report(acted(w=20))
    assert 520 == steps.total


def test_a_resumed_run_goes_on_counting_from_its_checkpoint() -> None:
    steps, resumed, old = EnvironmentSteps(), EnvironmentSteps(), EnvironmentSteps()
    steps.report(acted(w=500))
    steps.count([(1, 64)])
    resumed.restore(steps.written())
    resumed.leave_out(acted(w=600, other=90))
    resumed.report(acted(w=600, other=100))
    assert 610 == resumed.total
    old.restore({"total": 64, "by_worker": [[1, 64]]})
    assert 64 == old.total
