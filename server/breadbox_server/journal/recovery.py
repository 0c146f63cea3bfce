"""Builds the core again from a snapshot and the turns after it. Blocking."""

import gc
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import process_time
from typing import Final

from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.entries import ReplayError
from breadbox_server.core.events import PayloadsDisposable
from breadbox_server.core.ids import PayloadId
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.errors import BugError
from breadbox_server.journal.codec import (
    Snapshot,
    decode_snapshot,
    decode_turn,
    encode_snapshot,
)
from breadbox_server.journal.frames import (
    JournalFormatError,
    NewerFormatError,
    frame_snapshot,
    open_snapshot,
    open_turn,
)
from breadbox_server.journal.storage import (
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
    """A core as it was."""

    buffers: BufferSet
    sequence: int
    """Of the last turn that it contains."""
    now: float
    """The latest instant that the earlier process reached, as far as the journal knows."""
    chain: int
    """Of the last turn; see `frames`."""
    snapshot_sequence: int
    turn_count: int
    """Turns replayed after the snapshot."""
    entry_count: int
    """Entries in them."""
    let_go: frozenset[PayloadId] = frozenset()
    """Payloads that nothing refers to since these turns, and that may not have been deleted yet."""
    replay_s: float = 0.0
    """CPU time that replaying them took."""


def begin(archive: JournalArchive, buffers: BufferSet, now: float) -> Recovered:
    """Write a journal's first snapshot: a core in which nothing has happened yet."""
    buffers.take_entries()
    body = encode_snapshot(Snapshot(BEGINNING, now, buffers.snapshot()))
    record = frame_snapshot(BEGINNING, body)
    archive.begin(record)
    _, chain = open_snapshot(BEGINNING, record)
    return Recovered(buffers, BEGINNING, now, chain, BEGINNING, 0, 0)


def look(archive: JournalArchive) -> Recovered:
    """Read the books beside whoever writes them; for who only wants to know what is in them.

    Again if that fails, which a newer snapshot between two reads explains.

    Raises:
        JournalDamagedError: They cannot be read; says why and what to do.
        JournalUnavailableError: The journal cannot be reached.
    """
    for _ in range(LOOKS_MAX - 1):
        with suppress(JournalError):
            return recover(archive, _restore)
    return recover(archive, _restore)


def _restore(taken: Iterable[BufferSnapshot]) -> BufferSet:
    return BufferSet.restore(taken, random.Random(0))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the garbage collector from walking, again and again, what is made here to stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collections()
def recover(
    archive: JournalArchive, restore: Callable[[Iterable[BufferSnapshot]], BufferSet]
) -> Recovered:
    """Build the core that the journal tells of.

    Args:
        archive: One that is begun.
        restore: Builds a core from a snapshot's buffers.

    Raises:
        JournalDamagedError: It cannot be read; says why and what to do. Nothing was changed.
        JournalNewerError: A newer server wrote it.
        JournalUnavailableError: It cannot be reached.
        BugError: What it says could not be carried out for a reason that is not in it.
    """
    snapshot_sequence, snapshot_record = archive.read_snapshot()
    sequence = snapshot_sequence
    entry_count = 0
    let_go: set[PayloadId] = set()
    try:
        data, chain = open_snapshot(snapshot_sequence, snapshot_record)
        snapshot = decode_snapshot(data)
        buffers, now = restore(snapshot.buffers), snapshot.now
        began_at = process_time()
        for next_sequence, record in archive.read_turns(snapshot_sequence):
            sequence = next_sequence
            data, chain = open_turn(chain, sequence, record)
            entries = decode_turn(data).entries
            buffers.replay(entries)
            entry_count += len(entries)
            # A turn's instants never go back.
            now = max(now, entries[-1][0] if entries else now)
            # What was told when it happened is not told again; what was to be deleted then is
            # found when books and store are compared.
            for event in buffers.take_events():
                if type(event) is PayloadsDisposable:
                    let_go.update([each.payload_id for each in event.payloads])
    except NewerFormatError as error:
        raise JournalNewerError(
            f"the journal at {archive.shown} cannot be read at turn {sequence}: {error}"
        ) from error
    except (JournalFormatError, ReplayError) as error:
        raise JournalDamagedError(
            f"the journal at {archive.shown} cannot be read at turn {sequence}: {error}; {_REMEDY}"
        ) from error
    except (JournalError, MemoryError):
        raise
    except Exception as error:
        raise BugError(
            f"reading turn {sequence} of the journal at {archive.shown} back failed with {error!r}",
            "the journal is as it was; the release that wrote it may still read it",
        ) from error
    turn_count = sequence - snapshot_sequence
    replay_s = process_time() - began_at
    return Recovered(
        *(buffers, sequence, now, chain, snapshot_sequence, turn_count, entry_count),
        let_go=frozenset(let_go),
        replay_s=replay_s,
    )
