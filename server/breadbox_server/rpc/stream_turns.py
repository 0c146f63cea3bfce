"""Whose messages of append streams are carried out in one turn of the loop, and whose wait.

gRPC hands the loop one new call in each of its turns, and every message of a stream that is there.
Were all of these carried out at once, a few dozen streams would make each turn so long that no call
came through, whether their appends are admitted, refused or cancelled. So few are, and then none
for as long as these took.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import NamedTuple

from breadbox_server.limits import STREAM_TURN_FRAGMENTS


class _Waiting(NamedTuple):
    fragment_count: int
    turn: asyncio.Future[None]


class StreamTurns:
    """Lets messages in until they bring so many fragments, one sender after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """By sender; who was let in last stands last."""
        self._taken_count = 0
        """Fragments that were let in since there was last a pause."""
        self._took_s = 0.0
        """What these took."""

    @asynccontextmanager
    async def turn(self, sender: str, fragment_count: int) -> AsyncIterator[None]:
        """Carry a message out inside the block, which awaits nothing: at once, where few come.

        Args:
            sender: Who shares turns with others: a token, or else a connection.
            fragment_count: What it brings, one for each append or more; one message with more than
                there is room for gets a turn of its own.
        """
        if not self._waiting and self._has_room(fragment_count):
            self._take(fragment_count)
        else:
            turn: asyncio.Future[None] = self._loop.create_future()
            self._waiting.setdefault(sender, deque()).append(_Waiting(fragment_count, turn))
            await turn
        began_at = perf_counter()
        try:
            yield
        finally:
            self._took_s += perf_counter() - began_at

    def _has_room(self, fragment_count: int) -> bool:
        return not self._taken_count or (
            self._taken_count + fragment_count <= STREAM_TURN_FRAGMENTS
        )

    def _take(self, fragment_count: int) -> None:
        if not self._taken_count:
            # By then those that are let in now, and wake up in the next turn, are carried out.
            self._loop.call_soon(self._loop.call_soon, self._pause)
        self._taken_count += fragment_count

    def _pause(self) -> None:
        self._loop.call_later(self._took_s, self._let_in)

    def _let_in(self) -> None:
        self._taken_count = 0
        self._took_s = 0.0
        while self._waiting:
            sender, messages = next(iter(self._waiting.items()))
            first = messages[0]
            if not first.turn.done():  # Else its stream has ended.
                if not self._has_room(first.fragment_count):
                    return
                self._take(first.fragment_count)
                first.turn.set_result(None)
            messages.popleft()
            self._waiting.move_to_end(sender)
            if not messages:
                del self._waiting[sender]
