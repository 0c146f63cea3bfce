"""Decide on retries and their delays: pure functions of the error, the attempt and the time.

Retried, for calls that are safe to repeat: no answer (UNAVAILABLE, or silence until the attempt's
deadline), and RESOURCE_EXHAUSTED with a delay.
"""

import math
import random
from dataclasses import dataclass

from breadbox.model.errors import (
    BackpressureError,
    DeadlineExceededError,
    ReplayBufferError,
    StoreUnavailableError,
    UnavailableError,
)

BACKOFF_S_MAX = 2.0
TAKEOVER_BACKOFF_S_MAX = 0.3
"""Ceiling of a wait with several addresses, where a standby is about to take over."""
SHORTEST_S = 0.02
"""Shortest time that is worth an attempt, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounds of retries: the number of attempts, and the time since the first failure."""

    elapsed_s_max: float = 30.0
    """Seconds after the first failure in which a new attempt may start; 0: none."""
    answer_s_max: float = 10.0
    """Longest silence of one attempt, seconds; all may take this longer than `elapsed_s_max`."""
    backpressure_s_max: float = 30.0
    """Seconds in which a new attempt may start while the server answers and asks to wait."""
    attempts_max: int = 1000
    """Most attempts of one call, the first included; reached only if failures are immediate."""
    places: int = 1
    """Number of addresses that attempts go to in turn; each is tried once without a wait."""
    backoff_s_first: float = 0.1
    """Ceiling of the first wait, which doubles with every attempt."""
    backoff_s_max: float = BACKOFF_S_MAX
    """Ceiling of every wait: a server that returns is found about this soon."""


def backoff_s(policy: RetryPolicy, attempt: int, rng: random.Random) -> float:
    """Return the seconds before another attempt: uniform up to a doubling ceiling (full jitter)."""
    doublings = min(attempt - 1, 32)
    return rng.uniform(0.0, min(policy.backoff_s_max, policy.backoff_s_first * 2.0**doublings))


def hint_s(error: ReplayBufferError) -> float | None:
    """Return the seconds that the error itself asks to wait, or None if a retry cannot help."""
    if is_outage(error):
        return 0.0
    return error.retry_delay_s if isinstance(error, BackpressureError) else None


def is_outage(error: ReplayBufferError) -> bool:
    """Return True if no server answered, or if what it needs for an answer is unreachable."""
    return isinstance(error, UnavailableError | StoreUnavailableError | DeadlineExceededError)


def was_silent(error: ReplayBufferError) -> bool:
    """Return True if a wait for an answer timed out; False if the connection was refused."""
    return isinstance(error, DeadlineExceededError) or (
        isinstance(error, StoreUnavailableError) and error.was_silent
    )


class RetryBudget:
    """The rest of a policy for one call. Not thread-safe: one call, one budget."""

    def __init__(self, policy: RetryPolicy, rng: random.Random) -> None:
        self._policy = policy
        self._rng = rng
        self._outage_since: float | None = None
        self._backpressure_since: float | None = None
        self.attempts = 0
        self.ends_at = math.inf
        """Time at which silence ends the call; infinite without an outage."""

    def delay_s_after(self, error: ReplayBufferError, *, now: float) -> float | None:
        """Return the seconds to wait after a failed attempt, or None to give up."""
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
                # Silence already used the last attempt's time: reserve half of the rest for it.
                delay_s = min(delay_s, left_s / 2)
                left_s -= SHORTEST_S
            if is_next_place and rounds == 0 and not was_silent(error):
                return 0.0  # Even if the policy allows no retry: this address was not tried yet.
        if left_s <= 0 or wanted_s > left_s:
            return None
        return min(delay_s, left_s)

    def answered(self) -> None:
        """Note an answer: an outage, if there was one, is over."""
        self._outage_since = None
        self.ends_at = math.inf

    def answer_s(self, *, now: float) -> float:
        """Return the seconds of silence that the next attempt may take."""
        return min(self._policy.answer_s_max, self.ends_at - now)

    def _note_outage(self, error: ReplayBufferError, now: float) -> float:
        if self._outage_since is None:
            self._outage_since = now
            self.ends_at = now + self._policy.elapsed_s_max
            if not was_silent(error):
                # The last attempt may start at the end, and then has its own time.
                self.ends_at += self._policy.answer_s_max
        return self._outage_since

    def waited_for_room_s(self, *, now: float) -> float:
        """Return the seconds since the server first asked to wait, or 0 if it did not."""
        return 0.0 if self._backpressure_since is None else now - self._backpressure_since

    def elapsed_s(self, *, now: float) -> float:
        """Return the seconds since the outage began, or since the server first asked to wait."""
        since = self._outage_since if self._backpressure_since is None else self._backpressure_since
        return 0.0 if since is None else now - since
