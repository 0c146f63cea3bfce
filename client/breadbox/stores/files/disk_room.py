"""How much of a file system payloads may take: never all of it.

Journal and payloads may lie on one file system, and payloads go only by way of the journal: were
the last block theirs, nothing could ever be released again. So writers of payloads stop while
there is still some room, and a buffer is not promised more than fits.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIB: Final = 2**20
KEPT_SHARE: Final = 16
"""Inverse of the share of a small file system that payloads leave free."""
KEPT_BYTES_MAX: Final = 64 * MIB
"""And of a large one so many bytes."""
KEPT_INODES_MAX: Final = 1024
OUTSIDE_CAPACITY_BYTES_MAX: Final = 512 * MIB
"""Most bytes of a large file system that a buffer's capacity leaves for everything else."""


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """How a file system stands."""

    size_bytes: int
    """What could be had of it at all; blocks that are kept for root do not count."""
    free_bytes: int
    inode_count: int
    """0: it makes them as it needs them."""
    free_inode_count: int

    @classmethod
    def of(cls, directory: str | Path) -> "DiskRoom":
        """Look at the file system that a directory is on. A system call; never waits for a disk.

        Raises:
            OSError: The directory is not there.
        """
        seen = os.statvfs(directory)
        used_blocks = seen.f_blocks - seen.f_bfree
        return cls(
            size_bytes=(used_blocks + seen.f_bavail) * seen.f_frsize,
            free_bytes=seen.f_bavail * seen.f_frsize,
            inode_count=seen.f_files,
            free_inode_count=seen.f_favail,
        )

    @property
    def kept_bytes(self) -> int:
        """What payloads leave free."""
        return min(self.size_bytes // KEPT_SHARE, KEPT_BYTES_MAX)

    @property
    def kept_inode_count(self) -> int:
        """Inodes that payloads leave free."""
        return min(self.inode_count // KEPT_SHARE, KEPT_INODES_MAX)

    @property
    def capacity_bytes_max(self) -> int:
        """What a buffer can be promised of it.

        The rest is for payloads that are written and not admitted yet, for blocks that are not
        filled, for the journal with its snapshots, and for what stays free.
        """
        return max(1, self.size_bytes - min(self.size_bytes // 2, OUTSIDE_CAPACITY_BYTES_MAX))

    def has_room_for(self, size_bytes: int, file_count: int) -> bool:
        """Whether so many payloads of so many bytes together may be written."""
        if self.free_bytes - size_bytes < self.kept_bytes:
            return False
        return not self.inode_count or (self.free_inode_count - file_count >= self.kept_inode_count)
