"""Makes a newer snapshot of a journal, in a process of its own, and ends.

    echo '{"kind": "redis", "where": "redis://..."}' | python -m breadbox_server.journal.compactor

The server's loop never writes its state down: this process reads the last snapshot and the turns
after it, as a restarted server would, and writes what comes out. It runs at the lowest priority,
and takes where the journal is from standard input, so that no password is in the process list.
Prints the new snapshot's sequence.
"""

import gc
import os
import random
import sys
from collections.abc import Callable
from typing import Final

from breadbox_server.core.buffers import BufferSet
from breadbox_server.journal.codec import Snapshot, encode_snapshot
from breadbox_server.journal.place import JournalPlace
from breadbox_server.journal.recovery import recover
from breadbox_server.journal.storage import JournalArchive, JournalError

LOWEST_PRIORITY: Final = 19


def compact(archive: JournalArchive, is_wanted: Callable[[], bool] = lambda: True) -> int:
    """Write a snapshot of everything that the journal holds; gives its sequence.

    Args:
        archive: The journal.
        is_wanted: Asked before the snapshot is written; a server that was killed wants none.
    """
    # Nothing is drawn here, so any generator will do.
    found = recover(archive, lambda state: BufferSet.restore(state, random.Random(0)))
    if found.turn_count and is_wanted():
        snapshot = Snapshot(found.sequence, found.now, found.buffers.snapshot())
        archive.write_snapshot(found.sequence, encode_snapshot(snapshot))
    return found.sequence


def main() -> int:
    """Compact the journal that standard input names."""
    os.nice(LOWEST_PRIORITY)
    # Nothing in here has cycles, and everything ends with the process.
    gc.disable()
    parent = os.getppid()
    try:
        archive = JournalPlace.from_line(sys.stdin.readline()).open_archive()
        try:
            sequence = compact(archive, is_wanted=lambda: os.getppid() == parent)
        finally:
            archive.close()
    except JournalError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{sequence}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
