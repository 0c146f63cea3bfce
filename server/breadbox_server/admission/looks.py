"""Calls that only look take turns: each token's oldest in rotation, and slowly while others work.

A look costs the loop about as much as an append, and its caller may send any number. So while calls
come that do work, a pause of about twice its time follows each look, and a longer one if the loop
is late: all looks together take a third of the loop at most. One token's looks wait behind each
other, and others' not behind them. A look without its turn ends at its deadline.
"""

import asyncio
from collections import OrderedDict, deque
from math import inf
from typing import Final

from breadbox_server.limits import LOOK_PAUSE_S

COST_FACTOR: Final = 4
"""Seconds of the pause for each second that a handler takes, which is about half of a look."""
COST_S_MAX: Final = 0.05
"""Longest time of a look, or lateness of the loop, that a pause grows with."""
BURST_S: Final = 0.1
"""Unused pauses that looks may leave out."""
ABOUT_S: Final = 1.0
"""Seconds after a call that does work in which the next is expected."""


class Looks:
    """Say when calls that only look may be answered. For the loop's thread only."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Looks without a turn, by holder, in the order of the next turns."""
        self._next_at = -inf
        self._worked_at = -inf
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def worked(self) -> None:
        """Note a call that does work."""
        self._worked_at = self._loop.time()

    async def turn(self, holder: str) -> None:
        """Return when a look of this token, or connection, may be answered."""
        if not self._waiting and self._loop.time() >= self._next_at:
            self._pause(LOOK_PAUSE_S)
            return
        turn: asyncio.Future[None] = self._loop.create_future()
        self._waiting.setdefault(holder, deque()).append(turn)
        self._set_timer()
        await turn

    def took(self, cost_s: float) -> None:
        """Note how long the answer to a look took."""
        self._pause(COST_FACTOR * min(cost_s, COST_S_MAX))

    def _pause(self, pause_s: float) -> None:
        now = self._loop.time()
        if now < self._worked_at + ABOUT_S:
            self._next_at = max(self._next_at, now - BURST_S) + pause_s

    def _set_timer(self) -> None:
        if self._timer is None:
            due_at = max(self._next_at, self._loop.time())
            self._timer = self._loop.call_at(due_at, self._step, due_at)

    def _step(self, due_at: float) -> None:
        self._timer = None
        # A loop that comes late has more to do: on a slow machine a look takes longer, too.
        late_s = min(self._loop.time() - due_at, COST_S_MAX)
        if self._give_turn():
            self._pause(LOOK_PAUSE_S + late_s)
        if self._waiting:
            self._set_timer()

    def _give_turn(self) -> bool:
        while self._waiting:
            holder, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[holder] = turns
            if not turn.done():  # As it is once its call has ended.
                turn.set_result(None)
                return True
        return False
