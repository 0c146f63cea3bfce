"""How long a store may keep silent: silence ends a call, not slowness."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

LOOK_S: Final = 0.2
"""Seconds after which a connection that waits looks whether it has waited for too long."""
GAP_S: Final = 0.4
"""Seconds of silence that are allowed even at the end of everything: bytes come in bursts."""


class Deadline:
    """The instant at which one attempt at a store call ends if nothing moves. Threads may share it.

    From `ends_at` on, in seconds of `now`, silence ends the call within `GAP_S`; `silence_s` is the
    longest silence. `now` never goes back.
    """

    def __init__(
        self,
        silence_s: float,
        *,
        ends_at: float = math.inf,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = now
        self.silence_s = silence_s
        self._ends_at = ends_at
        self._heard_at = now()

    @property
    def heard_at(self) -> float:
        """When bytes of a payload were last seen to move; at first, when the call began."""
        return self._heard_at

    def heard(self, at: float) -> None:
        """Note that bytes moved at that instant."""
        self._heard_at = max(self._heard_at, at)

    def left_s(self, heard_at: float | None = None) -> float:
        """Return the seconds left, from `heard_at` of one connection, or of any if it is None."""
        heard_at = self._heard_at if heard_at is None else heard_at
        over_at = heard_at + self.silence_s
        if over_at > self._ends_at:
            over_at = max(self._ends_at, heard_at + GAP_S)
        return over_at - self.now()


_in_force: ContextVar[Deadline | None] = ContextVar("breadbox_store_deadline", default=None)


@contextmanager
def in_force(deadline: Deadline) -> Iterator[None]:
    """Let the deadline hold for connections that this thread uses inside the block."""
    token = _in_force.set(deadline)
    try:
        yield
    finally:
        _in_force.reset(token)


def current() -> Deadline | None:
    """Return the deadline of this thread's use of connections, or None."""
    return _in_force.get()
