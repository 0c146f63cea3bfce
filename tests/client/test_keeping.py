"""What goes on in the background: run when it is due, next to each other, and ended for good."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from breadbox.model.errors import UnavailableError
from breadbox.operations import calls
from breadbox.operations.operations import Effect, Invoke, Operation, Sleep
from breadbox.transport import background as keeping
from breadbox.transport.background import AT_ONCE_MAX, Keeper
from support.clock import ManualClock
from support.eventually import eventually_sync

CALL = Invoke(calls.list_buffers(), 1.0)


def performed(effect: Effect) -> Any:
    """Nothing is done, and that at once."""
    return effect


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper(performed)
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


def running_threads(keeper: Keeper) -> list[threading.Thread]:
    """A keeper's own: those of a client that was left open elsewhere are none of its."""
    run = keeper._run  # noqa: SLF001 - nothing else tells them apart
    return [each for each in threading.enumerate() if getattr(each, "_target", None) == run]


def test_many_are_run_until_they_are_over() -> None:
    keeper = Keeper(performed, ManualClock(0.0))
    done = [threading.Event() for _ in range(3)]
    for event in done:
        keeper.keep(sleeping(event, 0.0, 0.0, 0.0))
    assert [True] * 3 == [event.wait(10) for event in done]
    keeper.close()
    keeper.close()
    assert not running_threads(keeper)


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

    keeper = Keeper(fail)
    keeper.keep(operation())
    assert told.wait(10)
    keeper.close()


def test_a_closed_keeper_keeps_nothing(keeper: Keeper) -> None:
    keeper.close()
    operation = sleeping(threading.Event(), 0.0)
    keeper.keep(operation)
    kept = weakref.ref(operation)
    del operation
    assert kept() is None
    assert not running_threads(keeper)


def test_what_was_ended_is_not_held_until_it_would_have_been_due(keeper: Keeper) -> None:
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
        keeper.keep(renewing(lease)).end()
        held.append(weakref.ref(lease))
    del lease
    assert 0 == sum(reference() is not None for reference in held)


def test_a_slow_one_holds_up_no_other_until_many_are_under_way() -> None:
    """One after another, twenty that take three seconds each would outlast a lease."""
    gate = Gate()
    keeper = Keeper(gate, ManualClock())
    done = [threading.Event() for _ in range(AT_ONCE_MAX + 4)]
    for event in done:
        keeper.keep(calling(event))
    eventually_sync(lambda: gate.under_way == AT_ONCE_MAX, "many calls are under way")
    gate.may_answer.set()
    assert all(event.wait(10) for event in done)
    assert AT_ONCE_MAX == gate.under_way_max
    eventually_sync(lambda: len(running_threads(keeper)) == 1, "one thread is left to wait")
    keeper.close()
    assert not running_threads(keeper)


def test_one_that_comes_while_another_is_run_is_run_meanwhile() -> None:
    gate = Gate()
    keeper = Keeper(gate)
    first, second = threading.Event(), threading.Event()
    keeper.keep(calling(first))
    eventually_sync(lambda: gate.under_way == 1, "the first calls")
    keeper.keep(sleeping(second, 0.0))
    assert second.wait(10)
    gate.may_answer.set()
    assert first.wait(10)
    keeper.close()


def test_what_is_due_again_soon_does_not_wait_behind_later_ones(keeper: Keeper) -> None:
    done = threading.Event()
    keeper.keep(sleeping(threading.Event(), 3600.0))
    keeper.keep(sleeping(done, 0.0, 0.01))
    assert done.wait(10)


def test_what_is_due_earlier_than_the_first_wakes_the_keeper(keeper: Keeper) -> None:
    done = threading.Event()
    keeper.keep(sleeping(threading.Event(), 3600.0))
    waiting = keeper._wake._waiters  # type: ignore[attr-defined]  # noqa: SLF001 - nothing else tells that it waits
    eventually_sync(lambda: len(waiting) == 1, "the keeper waits")
    keeper.keep(sleeping(done, 0.0))
    assert done.wait(10)


def test_an_end_waits_for_what_is_being_done_and_lets_nothing_more_be_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeping, "END_S", 10.0)
    gate, done = Gate(), threading.Event()
    keeper = Keeper(gate)
    kept = keeper.keep(calling(done))
    eventually_sync(lambda: gate.under_way == 1, "it calls")
    ending = threading.Thread(target=kept.end)
    ending.start()
    eventually_sync(lambda: kept.has_ended, "the end waits")
    assert ending.is_alive()
    gate.may_answer.set()
    ending.join(10)
    assert not ending.is_alive()
    assert 0 == gate.under_way
    assert None is kept.go_on(performed)
    keeper.close()


def test_an_end_does_not_wait_for_what_hangs() -> None:
    gate = Gate()
    keeper = Keeper(gate)
    kept = keeper.keep(calling(threading.Event()))
    eventually_sync(lambda: gate.under_way == 1, "it calls")
    kept.end()
    assert 1 == gate.under_way
    gate.may_answer.set()
    keeper.close()
