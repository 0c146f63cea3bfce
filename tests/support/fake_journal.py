"""A journal in memory that can be held, taken away and emptied."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from breadbox_server.core.model.ids import PayloadId
from breadbox_server.journal.storage.interface import (
    NO_PAYLOADS,
    JournalLostError,
    JournalTakenError,
    JournalUnavailableError,
)
from breadbox_server.journal.turn_journal import TurnJournal


class FakeJournal(TurnJournal):
    """A journal in memory."""

    def __init__(self) -> None:
        self.turns: list[list[tuple[float, Any]]] = []
        self.snapshots: list[Any] = []
        self.is_down = False
        self.error: Exception | None = None
        """What it raises that no journal should."""
        self.is_lost = False
        self.is_taken = False
        self.is_full = False
        self.carries_payloads = False
        self.payloads: dict[PayloadId, bytes] = {}
        """That came with turns, or with a snapshot."""
        self.has_payload_room = True
        self.incarnation = "first"
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.writing = asyncio.Event()
        self.may_renew = asyncio.Event()
        self.may_renew.set()
        self.renewing = asyncio.Event()
        self.renewal_count = 0

    def hold(self) -> str:
        return "the fake journal is full" if self.is_full else ""

    async def append(
        self,
        entries: Sequence[tuple[float, Any]],
        payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS,
    ) -> bool:
        self.writing.set()
        await self.may_write.wait()
        if self.error is not None:
            raise self.error
        if self.is_down:
            raise JournalUnavailableError("the fake journal is down")
        if self.is_lost:
            raise JournalLostError("the fake journal is empty")
        self.turns.append(list(entries))
        self.payloads |= payloads
        return self.has_payload_room

    async def renew(self) -> str:
        self.renewal_count += 1
        self.renewing.set()
        await self.may_renew.wait()
        if self.error is not None:
            raise self.error
        if self.is_down:
            raise JournalUnavailableError("the fake journal is down")
        if self.is_taken:
            raise JournalTakenError("another server writes the fake journal")
        return self.incarnation

    async def begin_again(
        self, state: Any, now: float, payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS
    ) -> None:
        if self.is_down:
            raise JournalUnavailableError("the fake journal is down")
        self.is_lost = False
        self.turns.clear()
        self.snapshots.append(state)
        self.payloads |= payloads
