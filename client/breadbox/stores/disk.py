"""Directories and files of this user alone, and how much of a disk payloads may take.

In /dev/shm every user can make entries under foreseeable names, so owner, writers and links are
checked (`UnsafePathError`). Payloads are deleted only by way of the journal, which may be on the
same file system, so writers stop while there is some room.
"""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_FOR_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class UnsafePathError(PermissionError):
    """What is at a path may be another user's doing; `strerror` says why, and the remedy."""


def make_private_directory(path: Path, *, has_parents: bool = False) -> None:
    """Make a directory for this user alone, or check the one there; follow this user's links."""
    path.mkdir(mode=0o700, parents=has_parents, exist_ok=True)
    check_private_directory(path)


def check_private_directory(path: Path) -> None:
    """Refuse a directory that other users made or may write."""
    user = os.geteuid()
    own = path.lstat()
    if stat.S_ISLNK(own.st_mode) and own.st_uid not in (user, 0):
        raise _refused("it is a link of another user; name a directory of your own", path)
    seen = path.stat()
    if seen.st_uid != user:
        raise _refused("it belongs to another user; name a directory of your own", path)
    if seen.st_mode & _WRITABLE_BY_OTHERS:
        raise _refused(f"other users may write it; name a new one, or chmod go-w {path}", path)


def open_private(path: str | Path, flags: int) -> int:
    """Open a file of a private directory, mode 0600; never truncate it or follow a link."""
    # Non-blocking, or a pipe in its place would hold us up.
    flags = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_link(path) from error
        raise
    try:
        if _is_for_others(os.fstat(descriptor), path):
            os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_private(path: str | Path) -> None:
    """Check a file by name, as `open_private` does, where POSIX locks forbid closing it."""
    if _is_for_others(os.lstat(path), path):
        os.chmod(path, 0o600)


def _is_for_others(seen: os.stat_result, path: str | Path) -> bool:
    if stat.S_ISLNK(seen.st_mode):
        raise _is_link(path)
    if not stat.S_ISREG(seen.st_mode):
        raise _refused("it is no file; delete it", path)
    if seen.st_uid != os.geteuid():
        raise _refused("it belongs to another user; name a directory of your own", path)
    if seen.st_nlink > 1:
        raise _is_link(path)
    return bool(seen.st_mode & _FOR_OTHERS)


def opener(path: str, flags: int) -> int:
    """For `open(..., opener=opener)`: see `open_private`."""
    return open_private(path, flags)


def open_new(path: str | Path) -> int:
    """Open a new file for writing, mode 0600, in place of what has the name."""
    try:
        return os.open(path, _NEW_FILE, 0o600)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, _NEW_FILE, 0o600)


def new_opener(path: str, flags: int) -> int:
    """For `open(..., "wb", opener=new_opener)`: see `open_new`."""
    del flags
    return open_new(path)


def _is_link(path: str | Path) -> UnsafePathError:
    return _refused("it is a link, which leads elsewhere; delete it", path)


def _refused(why: str, path: str | Path) -> UnsafePathError:
    return UnsafePathError(errno.EPERM, f"{path} is not safe to use: {why}")


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text in one step. Owner and mode stay; those of a new file are private."""
    half = path.with_name(f".{path.name}.half")
    with open(half, "w", opener=new_opener) as file:
        try:
            if path.exists():
                seen = path.stat()
                if (seen.st_uid, seen.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), seen.st_uid, seen.st_gid)
                os.fchmod(file.fileno(), seen.st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            half.replace(path)
        except BaseException:
            half.unlink(missing_ok=True)
            raise


def can_hang(directory: str | Path) -> bool:
    """Return False for a directory in memory: any other file system may never answer a call."""
    device = os.stat(directory).st_dev
    place = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return True
    for fields in map(str.split, mounts):
        if fields[2] == place:
            return fields[fields.index("-") + 1] not in ("tmpfs", "ramfs")
    return True


MIB: Final = 2**20
KEPT_SHARE: Final = 16
"""Inverse of the share of a small file system that payloads leave free."""
KEPT_BYTES_MAX: Final = 64 * MIB
"""Bytes of a large one that payloads leave free."""
KEPT_INODES_MAX: Final = 1024
OUTSIDE_CAPACITY_BYTES_MAX: Final = 512 * MIB
"""Most bytes of a large file system that a buffer's capacity leaves for everything else."""


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """How a file system stands."""

    size_bytes: int
    """Bytes of it, without blocks that are kept for root."""
    free_bytes: int
    inode_count: int
    """0 if it makes them as it needs them."""
    free_inode_count: int

    @classmethod
    def of(cls, directory: str | Path) -> "DiskRoom":
        """Look at the file system of a directory; never waits for a disk."""
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
        """Bytes that payloads leave free."""
        return min(self.size_bytes // KEPT_SHARE, KEPT_BYTES_MAX)

    @property
    def kept_inode_count(self) -> int:
        """Inodes that payloads leave free."""
        return min(self.inode_count // KEPT_SHARE, KEPT_INODES_MAX)

    @property
    def capacity_bytes_max(self) -> int:
        """Bytes that buffers can be promised; the rest is for unannounced payloads and journal."""
        return max(1, self.size_bytes - min(self.size_bytes // 2, OUTSIDE_CAPACITY_BYTES_MAX))

    def has_room_for(self, size_bytes: int, file_count: int) -> bool:
        """Return whether so many payloads of so many bytes together may be written."""
        if self.free_bytes - size_bytes < self.kept_bytes:
            return False
        return not self.inode_count or (self.free_inode_count - file_count >= self.kept_inode_count)
