"""Episode statistics: sums, tasks, and reports that hold up nobody."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from breadbox.model.errors import BackpressureError, UnavailableError
from breadbox.model.types import EpisodeEnd, EpisodeReport
from breadbox.writing.reporting import EpisodeReporter
from breadbox_rollout.sending.sender import EpisodeTracker
from support.eventually import eventually_sync as eventually
from support.rollout_service import FakeService


def report_of(task: str = "default") -> EpisodeReport:
    return EpisodeReport(
        worker_id="w",
        task=task,
        return_sum=1.0,
        discounted_return_sum=1.0,
        step_count=1,
        end=EpisodeEnd.TERMINATED,
    )


def test_an_episode_is_summed_plain_and_discounted() -> None:
    tracker = EpisodeTracker("w", "default", 0.5)
    for reward in (1.0, 2.0, 4.0):
        tracker.reward(reward)
    assert EpisodeReport(
        worker_id="w",
        task="default",
        return_sum=7.0,
        discounted_return_sum=3.0,
        step_count=3,
        end=EpisodeEnd.TRUNCATED,
    ) == tracker.end(EpisodeEnd.TRUNCATED)


def test_an_episode_without_a_step_is_no_episode_and_the_next_starts_at_zero() -> None:
    tracker = EpisodeTracker("w", "default", 0.5)
    tracker.reward(9.0)
    tracker.end(EpisodeEnd.TERMINATED)
    assert None is tracker.end(EpisodeEnd.ABORTED)
    tracker.reward(1.0)
    report = tracker.end(EpisodeEnd.TERMINATED)
    assert report is not None
    assert (1.0, 1.0) == (report.return_sum, report.discounted_return_sum)


def test_a_task_lasts_for_its_episode_only() -> None:
    """The ancestor took a task for a dictionary, and its thread died."""
    tracker = EpisodeTracker("w", "default", 0.5)
    tasks = []
    for next_task in ("dig", None, None):
        tracker.reward(1.0)
        report = tracker.end(EpisodeEnd.TERMINATED, next_task)
        assert report is not None
        tasks.append(report.task)
    assert ["default", "dig", "default"] == tasks


def test_reports_wait_for_nobody_and_those_that_are_too_many_are_counted() -> None:
    """The ancestor's rollout thread waited for every episode."""
    gate, entered = threading.Event(), threading.Event()

    class Stuck(FakeService):
        def report_episodes(self, episodes: Sequence[EpisodeReport], **workers: Any) -> None:
            entered.set()
            assert gate.wait(60.0)
            super().report_episodes(episodes, **workers)

    service = Stuck()
    reporter = EpisodeReporter(service, reports_max=2)
    reporter.start()
    reporter.put(report_of())
    assert entered.wait(60.0)
    for _ in range(5):
        reporter.put(report_of())
    gate.set()
    reporter.close(60.0)
    assert (3, 3) == (reporter.reported_count, reporter.lost_count)
    assert 3 == len(service.reports)


def test_a_report_that_cannot_be_sent_is_lost_and_counted() -> None:
    class Away(FakeService):
        def report_episodes(self, episodes: Sequence[EpisodeReport], **workers: Any) -> None:
            raise UnavailableError("away")

    reporter = EpisodeReporter(Away())
    reporter.put(report_of())
    reporter.start()
    reporter.close(60.0)
    assert (0, 1) == (reporter.reported_count, reporter.lost_count)


def test_reports_that_a_server_asks_to_wait_with_are_sent_later_and_in_their_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused, may_pass = threading.Event(), threading.Event()

    class Slow(FakeService):
        def report_episodes(self, episodes: Sequence[EpisodeReport], **workers: Any) -> None:
            if not may_pass.is_set():
                refused.set()
                raise BackpressureError("a quota is full", 0.01)
            super().report_episodes(episodes, **workers)

    service = Slow()
    reporter = EpisodeReporter(service)
    reporter.start()
    sent = [report_of(f"task {number}") for number in range(4)]
    reporter.put(sent[0])
    assert refused.wait(60.0)
    for report in sent[1:]:
        reporter.put(report)
    may_pass.set()
    reporter.close(60.0)
    assert (4, 0) == (reporter.reported_count, reporter.lost_count)
    assert sent == service.reports
    assert [] == caplog.records


def test_several_reports_that_are_refused_together_stay_in_their_order() -> None:
    class RefusesOnce(FakeService):
        was_asked = False

        def report_episodes(self, episodes: Sequence[EpisodeReport], **workers: Any) -> None:
            if not self.was_asked:
                self.was_asked = True
                raise BackpressureError("a quota is full", 0.01)
            super().report_episodes(episodes, **workers)

    service = RefusesOnce()
    reporter = EpisodeReporter(service)
    sent = [report_of(f"task {number}") for number in range(4)]
    for report in sent:
        reporter.put(report)
    reporter.start()
    reporter.close(60.0)
    assert sent == service.reports


def test_a_worker_that_ends_waits_for_its_grace_with_reports_that_nobody_takes() -> None:
    class Full(FakeService):
        def report_episodes(self, episodes: Sequence[EpisodeReport], **workers: Any) -> None:
            raise BackpressureError("a quota is full", 0.01)

    reporter = EpisodeReporter(Full())
    reporter.start()
    reporter.put(report_of())
    reporter.close(0.1)
    eventually(lambda: (0, 1) == (reporter.reported_count, reporter.lost_count))


def test_an_outage_is_logged_when_it_begins_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not with every episode: a fast worker would write dozens of lines a second."""
    answered = threading.Semaphore(0)

    class AwayForAWhile(FakeService):
        failures = 5

        def report_episodes(self, episodes: Sequence[EpisodeReport], **workers: Any) -> None:
            try:
                if self.failures:
                    self.failures -= 1
                    raise UnavailableError("away")
                super().report_episodes(episodes, **workers)
            finally:
                answered.release()

    caplog.set_level("INFO")
    reporter = EpisodeReporter(AwayForAWhile())
    reporter.start()
    for _ in range(7):
        reporter.put(report_of())
        assert answered.acquire(timeout=60.0)
    reporter.close(60.0)
    assert (2, 5) == (reporter.reported_count, reporter.lost_count)
    assert [
        "reports of episodes and steps are lost for now: away",
        "5 episode reports were lost",
    ] == [record.getMessage() for record in caplog.records]


def test_a_bug_that_ends_the_reporter_is_said_once_and_ends_the_worker_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(FakeService):
        def report_episodes(self, episodes: Sequence[EpisodeReport], **workers: Any) -> None:
            raise TypeError("a bug")

    reporter = EpisodeReporter(Broken())
    for _ in range(3):
        reporter.put(report_of())
    reporter.start()
    reporter.close(60.0)
    for _ in range(2):
        with pytest.raises(TypeError, match="a bug"):
            reporter.put(report_of())
    assert (0, 3) == (reporter.reported_count, reporter.lost_count)
    assert ["episodes are not reported any more"] == [
        record.getMessage() for record in caplog.records
    ]
