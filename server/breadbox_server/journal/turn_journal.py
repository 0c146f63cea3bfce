"""Turns of entries to records of bytes: the `Journal` that the server's turns go through."""

from collections.abc import Sequence
from typing import Any

from breadbox.stores.base import Custody
from breadbox_server.journal.codec import Snapshot, encode_snapshot, encode_turn
from breadbox_server.journal.storage import JournalWriter


class TurnJournal:
    """Numbers turns, and writes them; see `breadbox_server.turns.Journal`.

    Args:
        writer: Where records go.
        sequence: Of the last turn that was written before.
    """

    def __init__(self, writer: JournalWriter, sequence: int) -> None:
        self._writer = writer
        self.sequence = sequence
        """Of the last turn that is durable."""
        self.size_bytes = 0
        """Bytes of all turns written by this process."""
        self.entry_count = 0
        """Entries in them."""
        self.custody = Custody(writer.claim.journal, writer.claim.epoch)
        """On whose behalf payloads are confirmed and deleted: of the epoch that is written."""

    def has_room(self) -> bool:
        """Whether more may be taken in; see `JournalWriter.has_room`."""
        return self._writer.has_room()

    async def append(self, entries: Sequence[tuple[float, Any]]) -> None:
        """Return once the entries of one turn are durable; see `Journal.append`."""
        data = encode_turn(entries)
        await self._writer.append(self.sequence + 1, data)
        self.sequence += 1
        self.size_bytes += len(data)
        self.entry_count += len(entries)

    async def renew(self) -> None:
        """Show a sign of life, and see whether the journal is still ours and whole."""
        await self._writer.renew(self.sequence)

    async def begin_again(self, state: Any, now: float) -> None:
        """Begin a journal that was lost; see `Journal.begin_again`."""
        sequence = self.sequence + 1
        data = encode_snapshot(Snapshot(sequence, now, state))
        await self._writer.begin_again(sequence, data)
        self.sequence = sequence
        self.custody.epoch = self._writer.claim.epoch
