"""Learners' calls go before appends: what appends do next waits for them, and for calls that come.

Appends are taken in by short steps: one is looked at, or some fragments are decided. A step waits
while a learner's call is in progress. Where appends wait already, it also waits until no call has
come for some passes of the loop: gRPC hands calls out in order of arrival, and the next may be a
learner's. It waits for `STEP_S` at most, as learners wait for data too; so a fetch without data
holds up nothing. Without learners no step waits.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Final

from breadbox_server.base.clock import Clock, TimerHandle
from breadbox_server.base.errors import AppendsFullError
from breadbox_server.base.gathering import Gathering

STEP_S: Final = 0.005
"""Seconds until the next step, however many calls of learners are in progress."""
PASSES: Final = 4
"""Passes of the loop without a new call before a step: gRPC takes a few to hand out the next."""
UNDER_WAY_MAX: Final = 4
"""Fragments let in and not answered with which no further append is let in while learners call."""
ABOUT_S: Final = 1.0
"""Seconds after a learner's call in which its next is expected."""
WAIT_S_MAX: Final = 3.0
"""Seconds: well under callers' deadlines (10 s), so that no call is sent again meanwhile."""


class Precedence:
    """Say when appends may take their next step. For the loop's thread only."""

    def __init__(self, clock: Clock, *, under_way: Callable[[], int]) -> None:
        self._clock = clock
        self.gathering = Gathering()
        """Waits for appends to share a slice: those that came, if only by their headers."""
        self._under_way = under_way
        """Fragments that were let in and are not answered."""
        self._ahead = 0
        """Learners' calls in progress, less those that wait for data."""
        self._last_at = -inf
        """When a learner's call last ended, or began to wait."""
        self._new: deque[tuple[asyncio.Future[None], float]] = deque()
        """Appends that nobody has looked at, and since when."""
        self._slice: asyncio.Future[None] | None = None
        """The step of appends that are under way, which comes first."""
        self._timer: TimerHandle | None = None
        self._passes_left = 0

    @property
    def has_learners(self) -> bool:
        """Return True while a learner's call is in progress, or its next is expected."""
        return self._ahead > 0 or self._clock.now() < self._last_at + ABOUT_S

    def begin(self) -> None:
        """Count a learner's call that came, or has its data."""
        self._ahead += 1

    def end(self) -> None:
        """Count one less: it is answered, or waits for data."""
        self._ahead -= 1
        self._last_at = self._clock.now()
        self.look()

    def arrived(self, *, is_append: bool = False) -> None:
        """Take note of a new call, of a learner or not."""
        if self._passes_left:
            self._passes_left = PASSES
        if is_append:
            self.gathering.arrived()

    async def new(self) -> None:
        """Return when the next append may be looked at; AppendsFullError: others wait for long."""
        if self._new:
            waited_s = self._clock.now() - self._new[0][1]
            if waited_s > WAIT_S_MAX:
                raise AppendsFullError(len(self._new), waited_s)
        elif not self.has_learners or (self._ahead <= 0 and not self._under_way()):
            return
        step: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._new.append((step, self._clock.now()))
        await self._wait(step)

    async def slice(self) -> None:
        """Return when the next slice may be decided; one at a time."""
        if self._new or self._ahead > 0:
            self._slice = asyncio.get_running_loop().create_future()
            await self._wait(self._slice)

    async def _wait(self, step: asyncio.Future[None]) -> None:
        if self._timer is None:
            self._set_timer()
        self.look()
        await step

    def look(self) -> None:
        """Look if a step is due: a learner's call has ended, or an append."""
        if self._ahead <= 0 and not self._passes_left and self._is_next():
            self._passes_left = PASSES if self.has_learners else 1
            asyncio.get_running_loop().call_soon(self._pass)

    def _is_next(self) -> bool:
        may_begin = self._under_way() < UNDER_WAY_MAX or not self.has_learners
        return self._slice is not None or (bool(self._new) and may_begin)

    def _pass(self) -> None:
        self._passes_left -= 1
        if self._ahead > 0:
            self._passes_left = 0
        elif self._passes_left:
            asyncio.get_running_loop().call_soon(self._pass)
        else:
            self._step()

    def _set_timer(self) -> None:
        self._timer = self._clock.call_at(self._clock.now() + STEP_S, self._step)

    def _step(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._slice or self._new:
            step, self._slice = self._slice or self._new.popleft()[0], None
            if not step.done():
                step.set_result(None)
                break
        if self._new:
            self._set_timer()
            self.look()
