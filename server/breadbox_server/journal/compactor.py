"""Make a newer snapshot of a journal, in a process of its own, and end.

    echo '{"kind": "redis", "where": "redis://..."}' |
      python -m breadbox_server.journal.compactor 10

It reads the journal as a restarted server would, at the given niceness, and takes the place from
standard input, so that no password is in the process list. Prints the snapshot's sequence, the
entries replayed, and the CPU time that took.
"""

import gc
import os
import sys
from collections.abc import Callable
from typing import Final

from breadbox_server.base.errors import BugError
from breadbox_server.journal.encoding.codec import Snapshot, encode_snapshot
from breadbox_server.journal.encoding.frames import frame_snapshot
from breadbox_server.journal.recovery import Recovered, recover
from breadbox_server.journal.storage.interface import (
    JournalArchive,
    JournalDamagedError,
    JournalError,
)
from breadbox_server.journal.storage.place import JournalPlace

DAMAGED: Final = 3
"""Exit code: the journal cannot be read back."""
UNAVAILABLE: Final = 4
"""Exit code: the journal cannot be reached, or has no room; later it may."""
BUG: Final = 5
"""Exit code: what the journal says could not be carried out, which is not the journal's fault."""


def compact(archive: JournalArchive, is_wanted: Callable[[], bool] = lambda: True) -> Recovered:
    """Write a snapshot of everything that the journal holds; return the core that it is of."""
    found = recover(archive)
    if found.turn_count and is_wanted():
        snapshot = Snapshot(found.sequence, found.now, found.buffers.snapshot())
        record = frame_snapshot(found.sequence, encode_snapshot(snapshot), found.chain)
        archive.write_snapshot(found.sequence, record)
    return found


def main() -> int:
    """Compact the journal that standard input names."""
    os.nice(int(sys.argv[1]))
    # Nothing in here has cycles, and everything ends with the process.
    gc.disable()
    parent = os.getppid()
    try:
        archive = JournalPlace.from_line(sys.stdin.readline()).open_archive()
        try:
            found = compact(archive, is_wanted=lambda: os.getppid() == parent)
        finally:
            archive.close()
    except BugError as error:
        sys.stderr.write(f"{error}\n")
        return BUG
    except JournalError as error:
        sys.stderr.write(f"{error}\n")
        return DAMAGED if isinstance(error, JournalDamagedError) else UNAVAILABLE
    sys.stdout.write(f"{found.sequence} {found.entry_count} {found.replay_s}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
