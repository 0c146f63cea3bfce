"""When to try again, and after how long: pure functions of what failed, the attempt and the time.

Tried again are only calls that are safe to repeat: where nobody answers (UNAVAILABLE, or silence
until the attempt's deadline), and on RESOURCE_EXHAUSTED with a hint how long to wait; never on
anything else.
"""

import math
import random
from dataclasses import dataclass

from breadbox.errors import (
    BackpressureError,
    DeadlineExceededError,
    ReplayBufferError,
    StoreUnavailableError,
    UnavailableError,
)

BACKOFF_S_MAX = 2.0
TAKEOVER_BACKOFF_S_MAX = 0.3
"""The same where one of several servers is about to lead."""
SHORTEST_S = 0.02
"""An attempt with less time than this is not worth making."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounds of trying again; both hold: attempts, and time since the first failure."""

    elapsed_s_max: float = 30.0
    """Seconds after the first failure in which a new attempt may start while nobody answers.
    0: fail at once."""
    answer_s_max: float = 10.0
    """Longest silence of one attempt. All of a call's attempts together are silent for at most
    this much longer than `elapsed_s_max`."""
    backpressure_s_max: float = 30.0
    """The same, while the server is there and asks to wait."""
    attempts_max: int = 1000
    """Attempts of one call, the first included; reached only if failures come at once."""
    places: int = 1
    """Addresses that attempts go to in turn: each is tried once without waiting."""
    backoff_s_first: float = 0.1
    """Ceiling of the first wait; doubled with every attempt."""
    backoff_s_max: float = BACKOFF_S_MAX
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
    if is_outage(error):
        return 0.0
    return error.retry_delay_s if isinstance(error, BackpressureError) else None


def is_outage(error: ReplayBufferError) -> bool:
    """Whether nobody answered, or whoever did lacks what it needs for an answer."""
    return isinstance(error, UnavailableError | StoreUnavailableError | DeadlineExceededError)


def was_silent(error: ReplayBufferError) -> bool:
    """Whether somebody was waited for in vain, rather than found to be away."""
    return isinstance(error, DeadlineExceededError) or (
        isinstance(error, StoreUnavailableError) and error.was_silent
    )


class RetryBudget:
    """What is left of a policy for one call. Not thread-safe: one call, one budget."""

    def __init__(self, policy: RetryPolicy, rng: random.Random) -> None:
        self._policy = policy
        self._rng = rng
        self._outage_since: float | None = None
        self._backpressure_since: float | None = None
        self.attempts = 0
        """Attempts that have failed."""
        self.ends_at = math.inf
        """When silence ends the call for good, on the clock of `now`; only in an outage."""

    def delay_s_after(self, error: ReplayBufferError, *, now: float) -> float | None:
        """Decide about a failed attempt.

        Args:
            error: What it failed with.
            now: Seconds on the clock of earlier calls.

        Returns:
            Seconds to wait before the next attempt; None to give up.
        """
        self.attempts += 1
        wanted_s = hint_s(error)
        if wanted_s is None or self.attempts >= self._policy.attempts_max:
            return None
        rounds, place = divmod(self.attempts, self._policy.places)
        is_next_place = is_outage(error) and place > 0
        delay_s = wanted_s
        if not is_next_place:
            delay_s += backoff_s(self._policy, max(1, rounds), self._rng)
        if isinstance(error, BackpressureError):
            self.answered()
            if self._backpressure_since is None:
                self._backpressure_since = now
            left_s = self._backpressure_since + self._policy.backpressure_s_max - now
        else:
            left_s = self._note_outage(error, now) + self._policy.elapsed_s_max - now
            if self.ends_at <= now + left_s:
                # Silence took the last attempt's time already: some of what is left is for it.
                delay_s = min(delay_s, left_s / 2)
                left_s -= SHORTEST_S
            if is_next_place and rounds == 0 and not was_silent(error):
                return 0.0  # Also where nothing is to be tried again: this one was not tried yet.
        if left_s <= 0 or wanted_s > left_s:
            return None
        return min(delay_s, left_s)

    def answered(self) -> None:
        """Note that somebody was there: an outage, if there was one, is over."""
        self._outage_since = None
        self.ends_at = math.inf

    def answer_s(self, *, now: float) -> float:
        """Seconds of silence that the next attempt may take."""
        return min(self._policy.answer_s_max, self.ends_at - now)

    def _note_outage(self, error: ReplayBufferError, now: float) -> float:
        """When the outage was first met."""
        if self._outage_since is None:
            self._outage_since = now
            self.ends_at = now + self._policy.elapsed_s_max
            if not was_silent(error):
                # The last attempt may start at the end, and then has its own time.
                self.ends_at += self._policy.answer_s_max
        return self._outage_since

    def elapsed_s(self, *, now: float) -> float:
        """Seconds since somebody last answered, or since the call was first asked to wait."""
        since = self._outage_since if self._backpressure_since is None else self._backpressure_since
        return 0.0 if since is None else now - since
