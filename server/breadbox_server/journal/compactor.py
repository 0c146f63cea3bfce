"""Makes a newer snapshot of a journal, in a process of its own, and ends.

    echo '{"kind": "redis", "where": "redis://..."}' | python -m breadbox_server.journal.compactor

The server's loop never writes its state down: this process reads the last snapshot and the turns
after it, as a restarted server would, and writes what comes out. It runs at the lowest priority,
and takes where the journal is from standard input, so that no password is in the process list.
Prints the new snapshot's sequence.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Final

from breadbox_server.core.buffers import BufferSet
from breadbox_server.journal.codec import Snapshot, encode_snapshot
from breadbox_server.journal.recovery import recover
from breadbox_server.journal.redis_stream import RedisArchive
from breadbox_server.journal.sqlite import SqliteArchive
from breadbox_server.journal.storage import JournalArchive, JournalError

LOWEST_PRIORITY: Final = 19


def open_archive(kind: str, where: str) -> JournalArchive:
    """Open a journal.

    Args:
        kind: "redis" or "sqlite".
        where: Its URL, or its directory.
    """
    return RedisArchive(where) if kind == "redis" else SqliteArchive(Path(where))


def compact(archive: JournalArchive) -> int:
    """Write a snapshot of everything that the journal holds; gives its sequence."""
    # Nothing is drawn here, so any generator will do.
    found = recover(archive, lambda state: BufferSet.restore(state, random.Random(0)))
    if found.turn_count:
        snapshot = Snapshot(found.sequence, found.now, found.buffers.snapshot())
        archive.write_snapshot(found.sequence, encode_snapshot(snapshot))
    return found.sequence


def main() -> int:
    """Compact the journal that standard input names."""
    os.nice(LOWEST_PRIORITY)
    parent = os.getppid()
    journal = json.loads(sys.stdin.readline())
    archive = open_archive(journal["kind"], journal["where"])
    try:
        sequence = compact(archive)
    except JournalError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        archive.close()
    if os.getppid() != parent:
        return 1
    sys.stdout.write(f"{sequence}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
