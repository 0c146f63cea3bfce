"""Spare files: those of deleted payloads in memory, kept for a while to be written again.

    DIR/spare/<bytes>.<id of the payload that it held>

The cost of a payload in memory is mostly that of new pages, and a spare file has its pages. The
server makes files spare in place of deleting them, and a client writes its next payloads into them.

1. The name of a payload is that of one file, and never comes back. A reader looks for it after the
   last byte: if it is gone, the bytes may be those of another payload (`PayloadDirectory.open`).
2. A mapping holds a shared lock of its file for as long as it exists, taken before the reader looks
   for the name. A file is taken under an exclusive lock only, so that no mapping ever changes.
3. Renaming a file out of the folder decides which client takes it. Before that a client changes
   nothing of it but its times.
"""

import errno
import fcntl
import math
import os
import random
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from breadbox.model.types import PayloadReference
from breadbox.stores.disk import MIB, DiskRoom
from breadbox.stores.keys import is_sound

SPARE_SIZE_BYTES_MIN: Final = 128 * 1024
"""Smallest payload with a file that is written again; a smaller one gains too little."""
SPARE_SHARE: Final = 16
"""Inverse of the share of a file system that spare files may take."""
SPARE_BYTES_MAX: Final = 256 * MIB
"""Bytes that they may take: those of deletions that wait for others, and of writes until then."""
SPARE_S: Final = 60.0
"""Seconds for which a file is kept; the next sweep deletes it."""
_LOOK_S: Final = 0.005
"""Least seconds between two looks for spare files; the server deletes payloads in batches."""
_NAMES_MAX: Final = 64
"""Names of a class of size that a look finds: those left when the next write comes may be gone."""

_WRITE: Final = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class SpareFiles:
    """The spare files of a payload directory. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._found: dict[int, list[str]] = {}
        """Names seen at the last look, by class of size."""
        self._looked_at = -math.inf

    def keep(
        self, payloads: Sequence[PayloadReference], path_of: Callable[[str], str]
    ) -> list[PayloadReference]:
        """Make files of payloads spare, and return the payloads that are to be deleted instead.

        Where there is no room for them, spare files of other sizes go: the next payloads are most
        likely like those that leave now.
        """
        large = [each for each in payloads if each.size_bytes >= SPARE_SIZE_BYTES_MIN]
        if not large:
            return list(payloads)
        bytes_max = min(
            DiskRoom.of(self.directory.parent).size_bytes // SPARE_SHARE, SPARE_BYTES_MAX
        )
        spares = list(self._look())
        room_bytes = bytes_max - sum(size_bytes for _, size_bytes in spares)
        classes = {each.size_bytes.bit_length() for each in large}
        others = [each for each in spares if each[1].bit_length() not in classes]
        rest = [each for each in payloads if each.size_bytes < SPARE_SIZE_BYTES_MIN]
        for each in large:
            while each.size_bytes > room_bytes and others:
                name, other_bytes = others.pop()
                with suppress(FileNotFoundError):  # A client has taken it.
                    os.unlink(self.directory / name)
                room_bytes += other_bytes
            if each.size_bytes <= room_bytes and is_sound(each):
                with suppress(FileNotFoundError):
                    spare = f"{self.directory}/{each.size_bytes}.{each.payload_id}"
                    os.rename(path_of(each.payload_id), spare)
                    room_bytes -= each.size_bytes
                    continue
            rest.append(each)
        return rest

    def take(self, size_bytes: int, path: str) -> int | None:
        """Rename a spare file of about this size, cut it to the size and open it; None without."""
        if size_bytes < SPARE_SIZE_BYTES_MIN:
            return None
        for name in self._names(size_bytes.bit_length()):
            # A mapping holds a lock of it, or another client has taken it.
            with suppress(OSError):
                spare = f"{self.directory}/{name}"
                descriptor = os.open(spare, _WRITE)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _check_alone(descriptor)
                    # Before it is among unannounced payloads, which are swept by age.
                    os.utime(descriptor)
                    os.rename(spare, path)
                    os.ftruncate(descriptor, size_bytes)
                except BaseException:
                    os.close(descriptor)
                    raise
                return descriptor
        return None

    def usage(self) -> tuple[int, int]:
        """Return the bytes of all spare files, and their number."""
        sizes = [size_bytes for _, size_bytes in self._look()]
        return sum(sizes), len(sizes)

    def delete(self, before: float = math.inf) -> bool:
        """Delete files that became spare before a time; return whether there were any."""
        count = 0
        for name, _ in self._look():
            with suppress(FileNotFoundError):  # A client has taken it.
                path = self.directory / name
                if os.lstat(path).st_ctime < before:
                    os.unlink(path)
                    count += 1
        return count > 0

    def _names(self, size_class: int) -> Iterator[str]:
        """Yield names, first those of the last look, of which some may be gone or locked."""
        for is_last in (False, True):
            names = self._found.get(size_class, [])
            with suppress(IndexError):
                while True:
                    yield names.pop()
            if is_last or time.monotonic() < self._looked_at + _LOOK_S:
                return
            found: dict[int, list[str]] = {}
            for name, size_bytes in self._look():
                found.setdefault(size_bytes.bit_length(), []).append(name)
            # Each client begins elsewhere, or all would try for the same files.
            self._found = {each: _some(names) for each, names in found.items()}
            self._looked_at = time.monotonic()

    def _look(self) -> Iterator[tuple[str, int]]:
        """Yield names and sizes of spare files."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self.directory):
                size, _, payload_id = name.partition(".")
                if size.isdecimal() and is_sound(PayloadReference(payload_id, int(size))):
                    yield name, int(size)


def _some(names: list[str]) -> list[str]:
    first = random.randrange(len(names))
    return (names[first:] + names[:first])[:_NAMES_MAX]


def hold(descriptor: int) -> bool:
    """Keep a file from being written again until all copies of the descriptor are closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _check_alone(descriptor: int) -> None:
    """Raise OSError for a file with another link, which may be a backup's."""
    seen = os.fstat(descriptor)
    if seen.st_nlink != 1 or not stat.S_ISREG(seen.st_mode):
        raise OSError(errno.EMLINK, "the file has other names")
