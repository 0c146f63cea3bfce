"""When a batch goes."""

import heapq
from collections.abc import Callable
from itertools import pairwise

import pytest

from breadbox_rollout.acting.batching import BatchSize, ReadyQueue


def queue(batch: int = 4, wait_s: float = 0.5) -> ReadyQueue:
    return ReadyQueue(batch, wait_s)


def test_nobody_waiting_asks_for_no_patience() -> None:
    assert None is queue().patience_s(8, now=0.0)


def test_a_full_batch_goes_at_once_in_order_of_arrival() -> None:
    ready = queue()
    for group in (5, 3, 9, 1, 7):
        ready.add(group, 1, now=0.0)
    assert 0.0 == ready.patience_s(8, now=0.0)
    assert [5, 3, 9, 1] == ready.take()
    assert [7] == ready.take()


def test_a_part_of_a_batch_waits_for_what_is_left_of_the_maximum() -> None:
    ready = queue()
    ready.add(0, 1, now=10.0)
    ready.add(1, 1, now=10.4)
    assert 0.5 == ready.patience_s(8, now=10.0)
    assert 0.0 == ready.patience_s(8, now=10.5)


def test_fewer_live_environments_than_a_batch_holds_do_not_stall() -> None:
    """The ancestor spun forever."""
    ready = queue(batch=8, wait_s=1e9)
    ready.add(0, 1, now=0.0)
    ready.add(1, 1, now=0.0)
    assert 0.0 == ready.patience_s(2, now=0.0)


def test_a_group_is_never_split_and_may_be_larger_than_a_batch() -> None:
    ready = queue()
    ready.add(0, 3, now=0.0)
    ready.add(1, 3, now=0.0)
    ready.add(2, 9, now=0.0)
    assert [[0], [1], [2]] == [ready.take(), ready.take(), ready.take()]
    assert 0 == ready.env_count


def test_a_group_whose_process_is_gone_is_forgotten() -> None:
    ready = queue()
    ready.add(0, 1, now=0.0)
    ready.add(1, 1, now=0.0)
    ready.remove(0)
    ready.remove(42)
    assert 1 == ready.env_count
    assert [1] == ready.take()


def steps_per_s(
    env_count: int,
    inference_s: Callable[[int], float],
    step_s: float,
    size: int | None,
    *,
    after_s: float = 5.0,
    until_s: float = 15.0,
) -> float:
    """A worker in simulated time: one policy, environments with a process each."""
    ready = ReadyQueue(size or env_count, 0.02)
    chooser = None if size else BatchSize(env_count)
    under_way = [(0.0, env) for env in range(env_count)]
    now, steps = 0.0, 0
    while now < until_s:
        while under_way and under_way[0][0] <= now:
            ready.add(heapq.heappop(under_way)[1], 1, now=now)
        patience_s = ready.patience_s(env_count, now=now)
        if patience_s != 0.0:
            # 1 ns more, so that rounding does not leave a patience of almost nothing.
            wake_at = now + patience_s + 1e-9 if patience_s is not None else float("inf")
            now = min(under_way[0][0] if under_way else float("inf"), wake_at)
            continue
        groups = ready.take()
        if chooser is not None:
            chooser.batch_taken(len(groups), now=now)
            ready.batch_env_count = chooser.batch_env_count
        now += inference_s(len(groups))
        steps += len(groups) if now >= after_s else 0
        for env in groups:
            heapq.heappush(under_way, (now + step_s, env))
    return steps / (until_s - after_s)


@pytest.mark.parametrize(
    ("fixed_s", "each_s", "step_s", "best"),
    [
        (0.020, 0.0, 0.002, 16),  # a slow policy, whatever the batch: half of them costs 1.8 times
        (0.020, 0.0, 0.0001, 16),
        (0.001, 0.0, 0.012, 8),  # slow environments
        (0.004, 0.0005, 0.008, 8),  # both take as long: each half hides the other
        (0.0, 0.001, 0.008, 8),
        (0.001, 0.0005, 0.0005, 16),
    ],
)
def test_the_size_of_a_batch_is_the_faster_of_half_and_all(
    fixed_s: float, each_s: float, step_s: float, best: int
) -> None:
    def inference_s(count: int) -> float:
        return fixed_s + each_s * count

    rates = {size: steps_per_s(16, inference_s, step_s, size) for size in (8, 16)}
    assert best == max(rates, key=lambda size: rates[size])
    found = steps_per_s(16, inference_s, step_s, None)
    assert found >= 0.97 * rates[best], (found, rates)


def test_a_trial_that_was_held_up_does_not_count() -> None:
    chooser = BatchSize(4)
    now = 0.0

    def take(count: int, interval_s: float) -> None:
        nonlocal now
        for _ in range(count):
            now += interval_s
            chooser.batch_taken(chooser.batch_env_count, now=now)

    take(10, 0.05)
    now += 100.0  # the sender's queue was full
    chooser.disturb()
    take(17, 0.05)  # half: 2 every 0.05 s
    assert 4 == chooser.batch_env_count
    take(17, 0.11)  # all: 4 every 0.11 s, which is slower than half without the wait
    assert 2 == chooser.batch_env_count


def test_what_was_found_is_looked_at_again_after_a_while() -> None:
    chooser = BatchSize(4)
    now, seen = 0.0, []
    for _ in range(2000):
        now += 0.05
        chooser.batch_taken(chooser.batch_env_count, now=now)
        seen.append(chooser.batch_env_count)
    changes = sum(before != after for before, after in pairwise(seen))
    assert 3 <= changes <= 4, "half, all; a minute later half and all again"
