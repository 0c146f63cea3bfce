"""The sender: bounded, in order, and everything counted under one reason."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from breadbox.model.errors import BackpressureError, UnavailableError, UnsupportedArrayError
from breadbox.model.fragment import Fragment
from breadbox.model.types import AdmissionOutcome, AppendResult
from breadbox.writing import appender
from breadbox_rollout.sending import sender
from breadbox_rollout.sending.models import Model
from breadbox_rollout.sending.sender import Sender
from support.rollout_service import FakeService

ADMITTED = AppendResult(AdmissionOutcome.ADMITTED)
FULL = AppendResult(AdmissionOutcome.BUFFER_FULL)


def fragment_of(index: int, version: int = 1, session_id: str = "s", size: int = 1) -> Fragment:
    flags = np.zeros(1, np.bool_)
    return Fragment(
        worker_id="w",
        fragment_index=index,
        session_id=session_id,
        model_version_min=version,
        model_version_max=version,
        obs=np.zeros((1, size), np.uint8),
        action=np.zeros(1, np.int64),
        reward=np.zeros(1, np.float32),
        terminated=flags,
        truncated=flags,
        first=flags,
        episode_id=np.zeros(1, np.int64),
        next_obs=np.zeros(size, np.uint8),
    )


@pytest.fixture(autouse=True)
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test puts waits until the sender is closed, so that it is sent together."""
    monkeypatch.setattr(sender, "FLUSH_AFTER_S", 3600.0)


class Bench:
    """A sender on a fake service, with a model that the test chooses."""

    def __init__(self, **limits: Any) -> None:
        self.service = FakeService()
        self.model = Model("s", 1, None, 2)
        limits = {"fragments_max": 100, "bytes_max": 2**20, **limits}
        self.sender = Sender(self.service, lambda: self.model, **limits)

    def put(self, *fragments: Fragment) -> None:
        for fragment in fragments:
            assert self.sender.put(fragment, 0.0)

    def finish(self) -> dict[str, int]:
        """Send everything and return what became of it."""
        self.sender.close(30.0)
        return {reason: count for reason, count in self.sender.counts().items() if count}


@contextmanager
def bench_of(**limits: Any) -> Iterator[Bench]:
    bench = Bench(**limits)
    try:
        yield bench
    finally:
        bench.service.close()
        bench.sender.close(30.0)


def held(bench: Bench) -> threading.Event:
    """Let the service answer only once the event is set."""
    may_answer = threading.Event()

    def answer(fragments: Sequence[Fragment]) -> list[AppendResult]:
        assert may_answer.wait(30)
        return [ADMITTED] * len(fragments)

    bench.service.answer = answer
    return may_answer


def test_fragments_are_sent_together_and_in_order() -> None:
    with bench_of() as bench:
        bench.put(*[fragment_of(index) for index in range(5)])
        assert {"admitted": 5} == bench.finish()
        assert [5] == bench.service.append_calls
        assert [0, 1, 2, 3, 4] == [fragment.fragment_index for fragment in bench.service.fragments]


def test_every_outcome_is_counted_by_its_name() -> None:
    outcomes = [AdmissionOutcome.ADMITTED, AdmissionOutcome.STALE, AdmissionOutcome.DUPLICATE]
    with bench_of() as bench:
        bench.service.answer = lambda _: [AppendResult(outcome) for outcome in outcomes]
        bench.put(*[fragment_of(index) for index in range(3)])
        assert {"admitted": 1, "stale": 1, "duplicate": 1} == bench.finish()


@pytest.mark.parametrize(("oldest", "reason"), [(1, "admitted"), (0, "stale_before_upload")])
def test_a_fragment_is_as_stale_as_its_oldest_step(oldest: int, reason: str) -> None:
    """As for the server: its newest step may be of the current version."""
    with bench_of() as bench:
        bench.model = Model("s", 3, None, 2)
        bench.put(replace(fragment_of(0, version=oldest), model_version_max=3))
        assert {reason: 1} == bench.finish()


def test_two_workers_of_one_name_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    with bench_of() as bench:
        bench.service.answer = lambda f: [AppendResult(AdmissionOutcome.DUPLICATE)] * len(f)
        bench.put(fragment_of(0), fragment_of(1))
        assert {"duplicate": 2} == bench.finish()
    assert ["the server already has fragments of worker w"] == caplog.messages


def test_what_is_known_to_be_refused_is_dropped_before_the_upload() -> None:
    """The ancestor wrote 20 MB first."""
    with bench_of() as bench:
        bench.put(
            fragment_of(0, version=3),
            fragment_of(1, version=4),
            fragment_of(2, version=6, session_id="old"),
            fragment_of(3, version=6),
        )
        bench.model = Model("s", 6, None, 2)
        assert {
            "stale_before_upload": 1,
            "session_before_upload": 1,
            "admitted": 2,
        } == bench.finish()
        assert [1, 3] == [fragment.fragment_index for fragment in bench.service.fragments]


def test_a_full_queue_blocks_and_drops_nothing() -> None:
    with bench_of(fragments_max=2) as bench:
        may_answer = held(bench)
        bench.put(fragment_of(0), fragment_of(1))
        assert not bench.sender.put(fragment_of(2), 0.0)
        assert 2 == bench.sender.waiting_count
        may_answer.set()
        assert {"admitted": 2} == bench.finish()


def test_bytes_are_a_limit_too_but_a_single_fragment_may_exceed_it() -> None:
    with bench_of(bytes_max=1000) as bench:
        may_answer = held(bench)
        assert bench.sender.put(fragment_of(0, size=5000), 0.0)
        assert not bench.sender.put(fragment_of(1), 0.0)
        may_answer.set()
        assert {"admitted": 1} == bench.finish()


def test_a_full_buffer_is_asked_again_with_what_was_not_admitted() -> None:
    answers = [[ADMITTED, FULL, FULL], [FULL, FULL], [ADMITTED, ADMITTED]]

    def answer(fragments: Sequence[Fragment]) -> list[AppendResult]:
        results = answers.pop(0)
        if FULL in results:
            error = BackpressureError("the buffer is full", 0.0)
            error.results = tuple(results)
            bench.service.fragments += fragments[: results.index(FULL)]
            raise error
        return results

    with bench_of() as bench:
        bench.service.answer = answer
        bench.put(*[fragment_of(index) for index in range(3)])
        assert {"admitted": 3} == bench.finish()
        assert [3, 2, 2] == bench.service.append_calls
        assert [0, 1, 2] == [fragment.fragment_index for fragment in bench.service.fragments]


def test_an_array_that_cannot_be_stored_costs_its_own_fragment_only() -> None:
    """The ancestor's sender thread died, and the worker hung."""

    def answer(fragments: Sequence[Fragment]) -> list[AppendResult]:
        if any(fragment.fragment_index == 1 for fragment in fragments):
            raise UnsupportedArrayError("obs", "is an object array")
        return [ADMITTED] * len(fragments)

    with bench_of() as bench:
        bench.service.answer = answer
        bench.put(*[fragment_of(index) for index in range(4)])
        assert {"admitted": 3, "refused": 1} == bench.finish()
        assert [0, 2, 3] == [fragment.fragment_index for fragment in bench.service.fragments]


def test_a_service_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appender, "RETRY_S", 0.0)
    monkeypatch.setattr(sender, "FLUSH_AFTER_S", 0.0)
    with bench_of() as bench:
        bench.service.errors += [UnavailableError("away"), UnavailableError("away")]
        bench.put(fragment_of(0))
        bench.service.wait_until(lambda: len(bench.service.fragments) == 1)
        assert [1, 1, 1] == bench.service.append_calls


def test_what_cannot_be_delivered_before_the_end_is_counted() -> None:
    with bench_of() as bench:
        bench.service.errors += [UnavailableError("away")] * 1000
        bench.put(fragment_of(0), fragment_of(1))
        assert {"undelivered": 2} == bench.finish()


def test_a_bug_that_ends_the_thread_is_raised_where_the_environments_wait() -> None:
    """The ancestor's sender died in silence, and everybody waited for it for ever."""

    def answer(fragments: Sequence[Fragment]) -> list[AppendResult]:
        raise ZeroDivisionError("a bug")

    with bench_of(fragments_max=1) as bench:
        bench.service.answer = answer
        bench.put(fragment_of(0))
        with pytest.raises(ZeroDivisionError, match="a bug"):
            bench.sender.put(fragment_of(1), 30.0)
        assert {"undelivered": 1} == bench.finish()


def test_the_steps_of_each_fragment_have_one_end() -> None:
    """Of a worker's steps nothing but the number of fragments was known, of all workers at once."""
    outcomes = [ADMITTED, AppendResult(AdmissionOutcome.STALE)]
    with bench_of() as bench:
        bench.service.answer = lambda _: outcomes
        fragments = [replace(fragment_of(0), worker_id="v"), fragment_of(1), fragment_of(2)]
        bench.sender.steps.expect(fragments)
        bench.put(*fragments[:2])
        assert {"sending_count": 2} == bench.sender.steps.of("w")
        bench.finish()
        assert 1 == bench.sender.steps.of("v")["admitted_count"]
        counts = bench.sender.steps.of("w")
        # The last one had no room, and was not put.
        assert (1, 1, 0) == (
            counts["refused_count"], counts["undelivered_count"], counts.get("sending_count", 0)
        )  # fmt: skip
        assert {} == bench.sender.steps.of("unknown")


def test_steps_that_are_not_delivered_within_the_grace_are_reported_before_the_client_closes() -> (
    None
):
    reported: list[dict[str, int]] = []
    with bench_of() as bench:
        gate = threading.Event()

        def answer(fragments: Sequence[Fragment]) -> list[AppendResult]:
            assert gate.wait(30.0)
            return [ADMITTED] * len(fragments)

        def gave_up() -> None:
            assert not bench.service.closed
            reported.append(bench.sender.steps.of("w"))
            gate.set()

        bench.service.answer = answer
        bench.sender._gave_up = gave_up  # noqa: SLF001 - the fixture makes it without one
        bench.sender.steps.expect([fragment_of(0)])
        bench.put(fragment_of(0))
        bench.sender.close(0.0)
    assert [{"undelivered_count": 1}] == reported
    # The answer that came later changes nothing: each step is counted once.
    assert {"undelivered_count": 1} == {k: v for k, v in bench.sender.steps.of("w").items() if v}
