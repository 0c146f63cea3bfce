"""Room on the journal's disk, taken early so that it can be given up when there is none.

    DIR/reserve/<n>   parts, each a file of allocated blocks with nothing in them

Releases and deletions make room, but go through the journal and need some first. The disk is all
the state: the server and its compactor share a reserve.
"""

import contextlib
import errno
import os
from collections.abc import Callable
from math import inf
from pathlib import Path
from time import monotonic
from typing import Final, TypeVar

from breadbox.stores.disk import MIB, DiskRoom, make_private_directory, open_new
from breadbox_server.journal.storage.interface import JournalFullError

T = TypeVar("T")

FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})
FOLDER_NAME: Final = "reserve"
PART_COUNT: Final = 8
ROOM_PARTS: Final = 5
"""With fewer, nothing more is taken in: what is left is for releases, and for a snapshot."""
SNAPSHOT_PARTS: Final = 2
"""Parts that only a snapshot may have: without one no old turn can ever be deleted."""
SHARE: Final = 8
"""The reserve takes one part in so many of a small file system."""
SIZE_BYTES_MAX: Final = 16 * MIB
"""The most that it takes of a large one."""
REFILL_PERIOD_S: Final = 0.5
LOOK_PERIOD_S: Final = 0.1
"""Seconds for which what was seen of the folder holds: every append asks if there is room."""


def share_bytes(directory: Path) -> int:
    """What the turns of a journal may take of the file system that it is on, and its log, each."""
    return DiskRoom.of(directory).size_bytes // SHARE


class Reserve:
    """Allocated room beside a journal."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = monotonic) -> None:
        self._directory = directory
        self._folder = directory / FOLDER_NAME
        self._clock = clock
        self._refill_at = 0.0
        self._look_at = -inf
        self._has_room = True

    def has_room(self) -> bool:
        """Return whether so much is left that more may be taken in; fill up what can be again."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_PERIOD_S
            count = self._count()
            if count < PART_COUNT and now >= self._refill_at:
                self._refill_at = now + REFILL_PERIOD_S
                count = self.refill()
            self._has_room = count >= ROOM_PARTS
        return self._has_room

    def refill(self) -> int:
        """Allocate parts that are not there, as far as there is room."""
        with contextlib.suppress(OSError):
            make_private_directory(self._folder)
            part_bytes = min(share_bytes(self._directory), SIZE_BYTES_MAX) // PART_COUNT
            for number in range(PART_COUNT):
                if not self._is_whole(number, part_bytes) and not self._allocate(
                    number, part_bytes
                ):
                    break
        return self._count()

    def with_room(self, write: Callable[[], T], *, is_snapshot: bool = False) -> T:
        """Write, giving up parts until there is room; JournalFullError if none are left."""
        while True:
            try:
                return write()
            except JournalFullError:
                if not self._give_up(0 if is_snapshot else SNAPSHOT_PARTS):
                    raise

    def _give_up(self, keep: int) -> bool:
        parts = self._parts()
        for part in parts[keep:]:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()
                self._look_at = -inf
                self._refill_at = self._clock() + REFILL_PERIOD_S
                return True
        return False

    def _parts(self) -> list[Path]:
        return [path for n in range(PART_COUNT) if (path := self._folder / str(n)).exists()]

    def _count(self) -> int:
        return len(self._parts())

    def _is_whole(self, number: int, part_bytes: int) -> bool:
        try:
            return (self._folder / str(number)).stat().st_size >= part_bytes
        except FileNotFoundError:
            return False

    def _allocate(self, number: int, part_bytes: int) -> bool:
        room = DiskRoom.of(self._directory)
        if room.free_bytes - part_bytes < room.kept_bytes // 2:
            return False
        # A part has its name only once it is whole: what a crash leaves behind is none.
        half = self._folder / ".half"
        descriptor = open_new(half)
        try:
            os.posix_fallocate(descriptor, 0, max(1, part_bytes))
        except OSError:
            half.unlink(missing_ok=True)
            return False
        finally:
            os.close(descriptor)
        half.replace(self._folder / str(number))
        return True
