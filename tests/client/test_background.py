"""What goes on in the background: run when it is due, next to each other, and ended for good."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from breadbox.model.errors import UnavailableError
from breadbox.operations import calls
from breadbox.operations.operations import Effect, Invoke, Operation, Sleep
from breadbox.transport import background
from breadbox.transport.background import AT_ONCE_MAX, BackgroundRunner
from support.clock import ManualClock
from support.eventually import eventually_sync

CALL = Invoke(calls.list_buffers(), 1.0)


def performed(effect: Effect) -> Any:
    """Nothing is done, and that at once."""
    return effect


@pytest.fixture
def runner() -> Iterator[BackgroundRunner]:
    made = BackgroundRunner(performed)
    yield made
    made.close()


def sleeping(done: threading.Event, *delays_s: float) -> Operation[None]:
    for delay_s in delays_s:
        yield Sleep(delay_s)
    done.set()


def calling(done: threading.Event) -> Operation[None]:
    """Due at once; then calls somebody."""
    yield Sleep(0.0)
    yield CALL
    done.set()


class Gate:
    """Performs a call when it is let, and counts those under way."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.under_way = 0
        self.under_way_max = 0
        self._lock = threading.Lock()

    def __call__(self, effect: Effect) -> Any:
        with self._lock:
            self.under_way += 1
            self.under_way_max = max(self.under_way_max, self.under_way)
        assert self.may_answer.wait(10)
        with self._lock:
            self.under_way -= 1
        return effect


def running_threads(runner: BackgroundRunner) -> list[threading.Thread]:
    """A runner's own: those of a client that was left open elsewhere are none of its."""
    run = runner._run  # noqa: SLF001 - nothing else tells them apart
    return [each for each in threading.enumerate() if getattr(each, "_target", None) == run]


def test_many_are_run_until_they_are_over() -> None:
    runner = BackgroundRunner(performed, ManualClock(0.0))
    done = [threading.Event() for _ in range(3)]
    for event in done:
        runner.start(sleeping(event, 0.0, 0.0, 0.0))
    assert [True] * 3 == [event.wait(10) for event in done]
    runner.close()
    runner.close()
    assert not running_threads(runner)


def test_what_fails_is_told_to_the_operation() -> None:
    told = threading.Event()

    def fail(_: Effect) -> Any:
        raise UnavailableError("nobody")

    def operation() -> Operation[None]:
        yield Sleep(0.0)
        try:
            yield CALL
        except UnavailableError:
            told.set()

    runner = BackgroundRunner(fail)
    runner.start(operation())
    assert told.wait(10)
    runner.close()


def test_a_closed_runner_starts_nothing(runner: BackgroundRunner) -> None:
    runner.close()
    operation = sleeping(threading.Event(), 0.0)
    runner.start(operation)
    task = weakref.ref(operation)
    del operation
    assert task() is None
    assert not running_threads(runner)


def test_what_was_ended_is_not_held_until_it_would_have_been_due(runner: BackgroundRunner) -> None:
    """A learner fetches many batches, each with references to its fragments, in one lease life."""

    class Lease:
        pass

    def renewing(lease: Lease) -> Operation[None]:
        while True:
            yield Sleep(3600.0)
            assert lease

    held = []
    for _ in range(100):
        lease = Lease()
        runner.start(renewing(lease)).end()
        held.append(weakref.ref(lease))
    del lease
    assert 0 == sum(reference() is not None for reference in held)


def test_a_slow_one_holds_up_no_other_until_many_are_under_way() -> None:
    """One after another, twenty that take three seconds each would outlast a lease."""
    gate = Gate()
    runner = BackgroundRunner(gate, ManualClock())
    done = [threading.Event() for _ in range(AT_ONCE_MAX + 4)]
    for event in done:
        runner.start(calling(event))
    eventually_sync(lambda: gate.under_way == AT_ONCE_MAX, "many calls are under way")
    gate.may_answer.set()
    assert all(event.wait(10) for event in done)
    assert AT_ONCE_MAX == gate.under_way_max
    eventually_sync(lambda: len(running_threads(runner)) == 1, "one thread is left to wait")
    runner.close()
    assert not running_threads(runner)


def test_one_that_comes_while_another_is_run_is_run_meanwhile() -> None:
    gate = Gate()
    runner = BackgroundRunner(gate)
    first, second = threading.Event(), threading.Event()
    runner.start(calling(first))
    eventually_sync(lambda: gate.under_way == 1, "the first calls")
    runner.start(sleeping(second, 0.0))
    assert second.wait(10)
    gate.may_answer.set()
    assert first.wait(10)
    runner.close()


def test_what_is_due_again_soon_does_not_wait_behind_later_ones(runner: BackgroundRunner) -> None:
    done = threading.Event()
    runner.start(sleeping(threading.Event(), 3600.0))
    runner.start(sleeping(done, 0.0, 0.01))
    assert done.wait(10)


def test_what_is_due_earlier_than_the_first_wakes_the_runner(runner: BackgroundRunner) -> None:
    done = threading.Event()
    runner.start(sleeping(threading.Event(), 3600.0))
    waiting = runner._wake._waiters  # type: ignore[attr-defined]  # noqa: SLF001 - nothing else tells that it waits
    eventually_sync(lambda: len(waiting) == 1, "the runner waits")
    runner.start(sleeping(done, 0.0))
    assert done.wait(10)


def test_an_end_waits_for_what_is_being_done_and_lets_nothing_more_be_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "END_S", 10.0)
    gate, done = Gate(), threading.Event()
    runner = BackgroundRunner(gate)
    task = runner.start(calling(done))
    eventually_sync(lambda: gate.under_way == 1, "it calls")
    ending = threading.Thread(target=task.end)
    ending.start()
    eventually_sync(lambda: task.has_ended, "the end waits")
    assert ending.is_alive()
    gate.may_answer.set()
    ending.join(10)
    assert not ending.is_alive()
    assert 0 == gate.under_way
    assert None is task.go_on(performed)
    runner.close()


def test_an_end_does_not_wait_for_what_hangs() -> None:
    gate = Gate()
    runner = BackgroundRunner(gate)
    task = runner.start(calling(threading.Event()))
    eventually_sync(lambda: gate.under_way == 1, "it calls")
    task.end()
    assert 1 == gate.under_way
    gate.may_answer.set()
    runner.close()
