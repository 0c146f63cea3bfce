"""Turns of entries to records of bytes, and how much of them a restart would replay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from breadbox.stores.base import Custody
from breadbox_server.core.model.entries import Entry
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.journal.encoding.codec import Snapshot, encode_snapshot, encode_turn
from breadbox_server.journal.encoding.frames import frame_snapshot, frame_turn, open_snapshot
from breadbox_server.journal.storage.interface import NO_PAYLOADS, JournalWriter

REPLAY_S_MAX: Final = 1.0
"""CPU time that a restart may need for turns (with start and snapshot of a default buffer, under 2
s). Beyond, producers wait for the next snapshot."""
REPLAY_BYTES_MAX: Final = 128 * 2**20
"""Bytes of turns that a restart may have to read, however few the entries."""
ENTRY_S_ASSUMED: Final = 1 / 50_000
"""CPU time that an entry takes to be replayed, as long as nothing is known of this machine."""

ENTRIES_MEASURED: Final = 1_000
"""From fewer nothing is learnt about how long replaying takes."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much has been written."""

    entry_count: int = 0
    size_bytes: int = 0

    def __sub__(self, other: "Extent") -> "Extent":
        return Extent(self.entry_count - other.entry_count, self.size_bytes - other.size_bytes)


class TurnJournal:
    """Numbers turns, and writes them; see `breadbox_server.journal.turns.Journal`."""

    def __init__(
        self,
        writer: JournalWriter,
        sequence: int,
        chain: int,
        *,
        grown_entries: int = 0,
        entry_s: float = ENTRY_S_ASSUMED,
    ) -> None:
        self._writer = writer
        self.carries_payloads = writer.carries_payloads
        """Whether payloads can be written in one step with a turn."""
        self._chain = chain
        self.sequence = sequence
        self.entry_s = entry_s
        self.written = Extent()
        self._covered = Extent(-grown_entries)
        self.notes: dict[str, str] = {}
        """What is to stand beside the journal, should it be begun again."""
        self.beginnings = 0
        self.custody = Custody(writer.claim.journal, writer.claim.epoch)
        """The journal and epoch on whose behalf payloads are confirmed and deleted."""

    @property
    def backlog(self) -> Extent:
        """What a restart would have to replay after the newest snapshot."""
        return self.written - self._covered

    @property
    def replay_s(self) -> float:
        """CPU seconds that replaying the backlog would take."""
        return self.backlog.entry_count * self.entry_s

    @property
    def pressure(self) -> float:
        """How near the backlog is to what a restart can do in time; from 1 on there is no room."""
        return max(self.replay_s / REPLAY_S_MAX, self.backlog.size_bytes / REPLAY_BYTES_MAX)

    def learn(self, entry_count: int, replay_s: float) -> None:
        """Take note of how long replaying took, if it was of enough entries to learn from."""
        if entry_count >= ENTRIES_MEASURED:
            self.entry_s = replay_s / entry_count

    def cover(self, written: Extent) -> None:
        """Take note that a snapshot contains what had been written at some time."""
        if written.entry_count >= self._covered.entry_count:
            self._covered = written

    def hold(self) -> str:
        """Return why there is no room: the backlog is long, or the disk full; "" if there is."""
        if self.pressure < 1.0:
            return "" if self._writer.has_room() else "the journal's disk is full"
        return (
            f"after {self.backlog.entry_count} entries since the last snapshot of the journal a "
            "restart would take longer than 2 s; the next snapshot ends this"
        )

    async def append(
        self,
        entries: Sequence[tuple[float, Entry]],
        payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS,
    ) -> bool:
        """Return once a turn's entries and payloads are durable; False if room has run out."""
        data, chain = frame_turn(self._chain, self.sequence + 1, encode_turn(entries))
        had_room = await self._writer.append(self.sequence + 1, data, payloads)
        self.sequence += 1
        self._chain = chain
        written = self.written
        self.written = Extent(written.entry_count + len(entries), written.size_bytes + len(data))
        return had_room

    async def renew(self) -> str:
        """Send a heartbeat, check that the journal is ours and whole; return its store's start.

        Another start may have less than the one before. Empty where the journal shows a loss.
        """
        return await self._writer.renew(self.sequence)

    async def begin_again(
        self,
        buffers: tuple[BufferSnapshot, ...],
        now: float,
        payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS,
    ) -> None:
        """Begin a lost journal with the core's state after a turn, and the turn's payloads."""
        sequence = self.sequence + 1
        data = frame_snapshot(sequence, encode_snapshot(Snapshot(sequence, now, buffers)))
        await self._writer.begin_again(sequence, data, self.notes, payloads)
        self.sequence = sequence
        _, self._chain = open_snapshot(sequence, data)
        self.custody.epoch = self._writer.claim.epoch
        self.beginnings += 1
        self.cover(self.written)
