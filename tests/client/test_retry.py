"""When the library tries again, and after how long."""

import random

import pytest

from breadbox.model import errors
from breadbox.operations.retry import RetryBudget, RetryPolicy, backoff_s, hint_s

POLICY = RetryPolicy(elapsed_s_max=10.0, backoff_s_first=0.1, backoff_s_max=2.0)
AWAY = errors.UnavailableError("away")


def test_backoff_is_a_pure_function_of_attempt_and_generator() -> None:
    first = [backoff_s(POLICY, attempt, random.Random(7)) for attempt in range(1, 9)]
    again = [backoff_s(POLICY, attempt, random.Random(7)) for attempt in range(1, 9)]
    assert first == again


@pytest.mark.parametrize(
    ("attempt", "ceiling_s"), [(1, 0.1), (2, 0.2), (3, 0.4), (5, 1.6), (6, 2.0), (10_000, 2.0)]
)
def test_the_ceiling_doubles_up_to_a_limit_and_the_jitter_is_full(
    attempt: int, ceiling_s: float
) -> None:
    rng = random.Random(1)
    waits = [backoff_s(POLICY, attempt, rng) for _ in range(2000)]
    assert 0 <= min(waits) < 0.02 * ceiling_s
    assert 0.98 * ceiling_s < max(waits) <= ceiling_s


@pytest.mark.parametrize(
    ("error", "wanted_s"),
    [
        (AWAY, 0.0),
        (errors.StoreUnavailableError("away"), 0.0),
        (errors.BackpressureError("full", 1.5), 1.5),
        (errors.DeadlineExceededError("late"), 0.0),
        (errors.LimitExceededError("too many"), None),
        (errors.InvalidRequestError("rank", "is odd"), None),
        (errors.InternalError("bug"), None),
        (errors.ClosedError("closed"), None),
    ],
)
def test_only_what_may_pass_is_tried_again(
    error: errors.ReplayBufferError, wanted_s: float | None
) -> None:
    assert wanted_s == hint_s(error)


def test_a_budget_ends_with_the_time_since_the_first_failure() -> None:
    budget = RetryBudget(POLICY, random.Random(0))
    assert budget.delay_s_after(AWAY, now=100.0) is not None
    assert budget.delay_s_after(AWAY, now=109.9) is not None
    assert None is budget.delay_s_after(AWAY, now=110.0)


def test_a_budget_ends_with_the_number_of_attempts() -> None:
    policy = RetryPolicy(elapsed_s_max=1e9, attempts_max=3)
    budget = RetryBudget(policy, random.Random(0))
    answers = [budget.delay_s_after(AWAY, now=0.0) is None for _ in range(3)]
    assert [False, False, True] == answers


def test_a_delay_never_leads_beyond_the_end_of_the_budget() -> None:
    budget = RetryBudget(POLICY, random.Random(0))
    now = 0.0
    while (delay_s := budget.delay_s_after(AWAY, now=now)) is not None:
        now += delay_s
        assert now <= 10.0
    assert 10.0 == now


def test_a_hint_that_leads_beyond_the_end_is_not_waited_for() -> None:
    budget = RetryBudget(RetryPolicy(backpressure_s_max=10.0), random.Random(0))
    assert None is budget.delay_s_after(errors.BackpressureError("full", 11.0), now=0.0)


def test_a_hint_is_waited_for_at_least() -> None:
    budget = RetryBudget(RetryPolicy(backpressure_s_max=10.0), random.Random(0))
    delay_s = budget.delay_s_after(errors.BackpressureError("full", 3.0), now=0.0)
    assert delay_s is not None
    assert 3.0 <= delay_s <= 3.1


def test_no_two_callers_that_are_asked_to_wait_come_again_together() -> None:
    """What is asked for is waited for, and up to the first backoff more, another time for each."""
    full = errors.BackpressureError("full", 3.0)
    delays_s = []
    for seed in range(200):
        budget = RetryBudget(RetryPolicy(backpressure_s_max=10.0), random.Random(seed))
        delay_s = budget.delay_s_after(full, now=0.0)
        assert delay_s is not None
        delays_s.append(delay_s)
    assert 200 == len(set(delays_s))
    assert 3.0 <= min(delays_s) < 3.01
    assert 3.09 < max(delays_s) <= 3.1


def test_no_two_callers_of_a_server_that_is_away_come_again_together() -> None:
    waits: list[set[float | None]] = [set(), set(), set()]
    for seed in range(100):
        budget = RetryBudget(POLICY, random.Random(seed))
        for each in waits:
            each.add(budget.delay_s_after(AWAY, now=0.0))
    assert [100, 100, 100] == [len(each) for each in waits]


def test_no_patience_means_one_attempt() -> None:
    budget = RetryBudget(RetryPolicy(elapsed_s_max=0.0), random.Random(0))
    assert None is budget.delay_s_after(AWAY, now=5.0)
