"""Builds the core again from a snapshot and the turns after it. Blocking."""

import gc
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import process_time
from typing import Final

from breadbox_server.base.errors import BugError
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.entries import ReplayError
from breadbox_server.core.model.events import PayloadsDisposable
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.journal.encoding.codec import (
    Snapshot,
    decode_snapshot,
    decode_turn,
    encode_snapshot,
)
from breadbox_server.journal.encoding.frames import (
    JournalFormatError,
    NewerFormatError,
    frame_snapshot,
    open_snapshot,
    open_turn,
)
from breadbox_server.journal.storage.interface import (
    BEGINNING,
    JournalArchive,
    JournalDamagedError,
    JournalError,
    JournalNewerError,
)

LOOKS_MAX: Final = 3
"""Attempts at a journal that a server may be trimming meanwhile."""
_REMEDY: Final = (
    "put it back from a copy, start the Breadbox that wrote it, or delete the journal to start "
    "empty (payloads that it knew are kept until --delete-orphans)"
)


@dataclass(frozen=True, slots=True)
class Recovered:
    """A core rebuilt from a journal, and how far that was read."""

    buffers: BufferSet
    sequence: int
    now: float
    """The latest instant that the earlier process reached, as far as the journal knows."""
    chain: int
    snapshot_sequence: int
    turn_count: int
    entry_count: int
    let_go: frozenset[PayloadId] = frozenset()
    """Payloads unreferenced since these turns, which may not have been deleted yet."""
    replay_s: float = 0.0


def begin(archive: JournalArchive, buffers: BufferSet, now: float) -> Recovered:
    """Write a journal's first snapshot: a core in which nothing has happened yet."""
    buffers.take_entries()
    body = encode_snapshot(Snapshot(BEGINNING, now, buffers.snapshot()))
    record = frame_snapshot(BEGINNING, body)
    archive.begin(record)
    _, chain = open_snapshot(BEGINNING, record)
    return Recovered(buffers, BEGINNING, now, chain, BEGINNING, 0, 0)


def recover_while_written(archive: JournalArchive) -> Recovered:
    """Read a journal that another server may be writing; retry, as its snapshot may change."""
    for _ in range(LOOKS_MAX - 1):
        with suppress(JournalError):
            return recover(archive)
    return recover(archive)


def restore_to_read(taken: Iterable[BufferSnapshot]) -> BufferSet:
    """Build a core that draws nothing, for which any generator will do."""
    return BufferSet.restore(taken, random.Random(0))


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector from walking, again and again, what is made here to stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@without_collections()
def recover(
    archive: JournalArchive,
    restore: Callable[[Iterable[BufferSnapshot]], BufferSet] = restore_to_read,
) -> Recovered:
    """Build the core from its journal, or raise why not; a BugError is not the journal's fault."""
    replay = Replay(archive, restore)
    with replay.error_context():
        for sequence, record in archive.read_turns(replay.sequence):
            replay.add(sequence, record)
    return replay.recovered()


class Replay:
    """A core that is built from a journal: its newest snapshot, then one turn after the other."""

    def __init__(
        self, archive: JournalArchive, restore: Callable[[Iterable[BufferSnapshot]], BufferSet]
    ) -> None:
        self._shown = archive.shown
        self.sequence, record = archive.read_snapshot()
        """The last turn that the core contains."""
        self.snapshot_sequence = self.sequence
        self._turn_count = 0
        self._entry_count = 0
        self._let_go: deque[tuple[int, list[PayloadId]]] = deque()
        with self.error_context():
            data, self.chain = open_snapshot(self.sequence, record)
            snapshot = decode_snapshot(data)
            self._buffers, self._now = restore(snapshot.buffers), snapshot.now
        self._replay_s = 0.0

    def add(self, sequence: int, record: bytes) -> None:
        """Apply the next turn."""
        self.sequence = sequence
        began_at = process_time()
        with self.error_context():
            data, self.chain = open_turn(self.chain, sequence, record)
            entries = decode_turn(data)
            self._buffers.replay(entries)
            self._turn_count += 1
            self._entry_count += len(entries)
            # A turn's instants never go back.
            self._now = max(self._now, entries[-1][0] if entries else self._now)
            # Events of the past are not reported again. Payloads that were to be deleted then are
            # found when journal and store are compared.
            let_go = [
                each.payload_id
                for event in self._buffers.take_events()
                if type(event) is PayloadsDisposable
                for each in event.payloads
            ]
        if let_go:
            self._let_go.append((sequence, let_go))
        self._replay_s += process_time() - began_at

    def forget(self, up_to: int) -> None:
        """Forget what was let go up to a turn: it was deleted long ago."""
        while self._let_go and self._let_go[0][0] <= up_to:
            self._let_go.popleft()

    def recovered(self) -> Recovered:
        """The core as it is now; it belongs to the caller from now on."""
        return Recovered(
            *(self._buffers, self.sequence, self._now, self.chain, self.snapshot_sequence),
            *(self._turn_count, self._entry_count),
            let_go=frozenset(each for _, let_go in self._let_go for each in let_go),
            replay_s=self._replay_s,
        )

    @contextmanager
    def error_context(self) -> Iterator[None]:
        """Turn an error inside into one that says whether the journal is at fault, and where."""
        where = f"the journal at {self._shown} cannot be read at turn {self.sequence}"
        try:
            yield
        except NewerFormatError as error:
            raise JournalNewerError(f"{where}: {error}") from error
        except (JournalFormatError, ReplayError) as error:
            raise JournalDamagedError(f"{where}: {error}; {_REMEDY}") from error
        except (JournalError, BugError, MemoryError):
            raise
        except Exception as error:
            raise BugError(
                f"reading turn {self.sequence} of the journal at {self._shown} back failed with "
                f"{error!r}",
                "the journal is as it was; the release that wrote it may still read it",
            ) from error
