"""Goal: prefetching changes when items are made, never which, and always ends."""

import threading
from collections.abc import Iterator

import pytest

from breadbox_offline.training.prefetch import Prefetcher

WAIT_S = 20.0


def test_items_come_in_order() -> None:
    with Prefetcher(range(50), depth=3) as items:
        assert list(range(50)) == list(items)


def test_at_most_depth_items_are_made_ahead() -> None:
    made: list[int] = []
    reached = threading.Event()

    def source() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 2:
                reached.set()
            yield number

    with Prefetcher(source(), depth=2) as items:
        assert 0 == next(items)
        assert reached.wait(WAIT_S)
        # One was taken, and two wait.
        assert [0, 1, 2] == made


def test_an_error_comes_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise KeyError("broken")

    with Prefetcher(source()) as items:
        assert 1 == next(items)
        with pytest.raises(KeyError, match="broken"):
            next(items)
        with pytest.raises(StopIteration):
            next(items)


def test_leaving_early_ends_the_thread() -> None:
    before = threading.active_count()
    with Prefetcher(iter(int, 1), depth=1) as items:
        next(items)
    assert before == threading.active_count()
    with pytest.raises(StopIteration):
        next(items)


def test_depth_must_be_positive() -> None:
    with pytest.raises(ValueError, match="depth"):
        Prefetcher([], depth=0)
