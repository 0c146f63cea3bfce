"""Limit the calls that move payloads, with fair shares of them for all callers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from math import inf
from typing import Final

from breadbox_server import limits
from breadbox_server.base.errors import GatewayFullError

PATIENCE_S: Final = 1.0
"""Seconds without a moved part after which a call of the largest caller may be ended."""

Key = tuple[str, str]
"""What a limit is for and its name there: see `limits.GATEWAY_CALLS_OF`."""
_ALL: Final[Key] = ("all", "")


class Slot:
    """The slot of one call, which counts for its token or, without tokens, its connection."""

    def __init__(self, caller: str, peer: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self.keys: tuple[Key, ...] = (_ALL, ("token", caller), ("connection", peer))
        self.holder = caller or peer
        self.moved_at = self._loop.time()
        """Time at which it last moved a part, or infinity once it gives way."""

    def moved(self) -> None:
        """Record that a part was received or sent."""
        if self.moved_at != inf:
            self.moved_at = self._loop.time()

    def has_rested(self) -> bool:
        """True if no part was moved for `PATIENCE_S`."""
        return self.moved_at <= self._loop.time() - PATIENCE_S

    def give_way(self) -> None:
        """End the call, since another caller needs its slot or memory. Idempotent."""
        if self.moved_at != inf:
            self.moved_at = inf
            self._limit.reschedule(self._loop.time())

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Raise GatewayFullError inside the block when the call has to give way."""
        try:
            async with self._limit:
                yield
        except TimeoutError:
            if not self._limit.expired():
                raise
            raise GatewayFullError(
                "other callers need the room of this call, the slowest of the caller with the most"
            ) from None


class CallSlots:
    """Limit the calls that move payloads: by connection, by caller, and in total (G4).

    A free slot goes to the waiting caller with the fewest slots, then by arrival. If all are taken
    and a caller with fewer waits, the call of the largest caller that was idle longest is ended.
    """

    def __init__(self) -> None:
        self._running: dict[Slot, None] = {}
        self._counts: Counter[Key] = Counter()
        self._waiting: dict[Slot, asyncio.Future[None]] = {}

    @property
    def count(self) -> int:
        """Number of calls in progress."""
        return len(self._running)

    @asynccontextmanager
    async def taken(self, caller: str, peer: str) -> AsyncIterator[Slot]:
        """Hold a slot inside the block, or raise GatewayFullError after `GATEWAY_WAIT_S`."""
        slot = Slot(caller, peer)
        await self._take(slot)
        try:
            async with slot.held():
                yield slot
        finally:
            self._leave(slot)

    async def _take(self, slot: Slot) -> None:
        if self._has_room(slot):
            self._let(slot)
            return
        if len(self._waiting) >= limits.GATEWAY_WAITERS_MAX:
            self._shorten_queue(slot)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[slot] = turn
        try:
            async with asyncio.timeout(limits.GATEWAY_WAIT_S):
                while not turn.done():
                    self._make_room(slot)
                    await asyncio.wait((turn,), timeout=PATIENCE_S)
        except BaseException as error:
            if slot in self._running:
                self._leave(slot)  # It got the slot in the same tick in which the wait ended.
            if isinstance(error, TimeoutError):
                raise GatewayFullError("too many calls move payloads already") from None
            raise
        finally:
            self._waiting.pop(slot, None)
        turn.result()

    def _let(self, slot: Slot) -> None:
        self._running[slot] = None
        self._counts.update(slot.keys)
        slot.moved()

    def _leave(self, slot: Slot) -> None:
        del self._running[slot]
        for key in slot.keys:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
        self._let_in()

    def _let_in(self) -> None:
        while self.count < limits.GATEWAY_CALLS_OF["all"]:
            held = _by_holder(self._running)
            able = [
                slot
                for slot, turn in self._waiting.items()
                if not turn.done() and self._has_room(slot)
            ]
            if not able:
                return
            slot = min(able, key=lambda each: held[each.holder])
            self._let(slot)
            self._waiting[slot].set_result(None)

    def _has_room(self, slot: Slot, *, is_alone: bool = False) -> bool:
        keys = slot.keys[1:] if is_alone else slot.keys
        return all(self._counts[key] < limits.GATEWAY_CALLS_OF[key[0]] for key in keys)

    def _make_room(self, wanted: Slot) -> None:
        """End a call of the largest caller if that gives the waiting caller its share."""
        if self.count < limits.GATEWAY_CALLS_OF["all"] or not self._has_room(wanted, is_alone=True):
            return
        slow = _of_largest(self._running, wanted)
        slowest = min(slow, key=lambda each: each.moved_at, default=None)
        if slowest is not None and slowest.has_rested():
            slowest.give_way()

    def _shorten_queue(self, wanted: Slot) -> None:
        """Refuse the newest waiting call of the caller with the most, or else this one."""
        others = _of_largest(self._waiting, wanted)
        refused = GatewayFullError("too many calls wait to move payloads")
        if not others:
            raise refused
        turn = self._waiting.pop(others[-1])
        if not turn.done():
            turn.set_exception(refused)


def _by_holder(slots: Iterable[Slot]) -> Counter[str]:
    return Counter(slot.holder for slot in slots)


def _of_largest(slots: Iterable[Slot], wanted: Slot) -> list[Slot]:
    """List the slots of the largest caller, or none if one more would give this caller as many."""
    slots = list(slots)
    held = _by_holder(slots)
    largest, count = held.most_common(1)[0] if held else ("", 0)
    if held[wanted.holder] + 1 >= count:
        return []
    return [slot for slot in slots if slot.holder == largest]
