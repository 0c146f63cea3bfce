"""When to try again, and after how long: pure functions of what failed, the attempt and the time.

Tried again are only calls that are safe to repeat, only on UNAVAILABLE (no answer, or the server is
draining) and on RESOURCE_EXHAUSTED with a hint how long to wait; never on a passed deadline, since
the caller's time is up, and never on anything else.
"""

import random
from dataclasses import dataclass

from breadbox.errors import (
    BackpressureError,
    ReplayBufferError,
    StoreUnavailableError,
    UnavailableError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounds of trying again; both hold: attempts, and time since the first failure."""

    elapsed_s_max: float = 30.0
    """Seconds after the first failure in which a new attempt may start while nobody answers.
    0: fail at once."""
    backpressure_s_max: float = 30.0
    """The same, while the server is there and asks to wait."""
    attempts_max: int = 1000
    """Attempts of one call, the first included; reached only if failures come at once."""
    backoff_s_first: float = 0.1
    """Ceiling of the first wait; doubled with every attempt."""
    backoff_s_max: float = 2.0
    """Ceiling of every wait: a server that is back is found about this soon."""


def backoff_s(policy: RetryPolicy, attempt: int, rng: random.Random) -> float:
    """Seconds to wait before another attempt, with full jitter.

    Args:
        policy: Ceilings.
        attempt: Attempts that have failed so far, from 1.
        rng: Source of the jitter, so that many clients do not come back in step.

    Returns:
        Uniform in [0, ceiling], the ceiling doubling from `backoff_s_first` to `backoff_s_max`.
    """
    doublings = min(attempt - 1, 32)
    return rng.uniform(0.0, min(policy.backoff_s_max, policy.backoff_s_first * 2.0**doublings))


def hint_s(error: ReplayBufferError) -> float | None:
    """Seconds that the failure itself asks to wait; None when trying again cannot help."""
    match error:
        case UnavailableError() | StoreUnavailableError():
            return 0.0
        case BackpressureError():
            return error.retry_delay_s
        case _:
            return None


class RetryBudget:
    """What is left of a policy for one call. Not thread-safe: one call, one budget."""

    def __init__(self, policy: RetryPolicy, rng: random.Random) -> None:
        self._policy = policy
        self._rng = rng
        self._first_failure_at: float | None = None
        self.attempts = 0
        """Attempts that have failed."""

    def delay_s_after(self, error: ReplayBufferError, *, now: float) -> float | None:
        """Decide about a failed attempt.

        Args:
            error: What it failed with.
            now: Seconds on the clock of earlier calls.

        Returns:
            Seconds to wait before the next attempt; None to give up.
        """
        self.attempts += 1
        if self._first_failure_at is None:
            self._first_failure_at = now
        wanted_s = hint_s(error)
        if wanted_s is None or self.attempts >= self._policy.attempts_max:
            return None
        delay_s = wanted_s + backoff_s(self._policy, self.attempts, self._rng)
        allowed_s = (
            self._policy.backpressure_s_max
            if isinstance(error, BackpressureError)
            else self._policy.elapsed_s_max
        )
        left_s = self._first_failure_at + allowed_s - now
        if left_s <= 0 or wanted_s > left_s:
            return None
        return min(delay_s, left_s)

    def elapsed_s(self, *, now: float) -> float:
        """Seconds since the first failure."""
        return 0.0 if self._first_failure_at is None else now - self._first_failure_at
