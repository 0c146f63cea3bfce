"""Files that a user named: opened without waiting, and named in errors."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def regular(path: str, flags: int) -> int:
    """For `open(..., opener=regular)`: refuse a pipe, which would wait for a writer, or a device.

    Raises:
        OSError: It is no regular file, or cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        is_folder = stat.S_ISDIR(mode)
        why = os.strerror(errno.EISDIR) if is_folder else "It is a pipe or device, not a file"
        raise OSError(errno.EISDIR if is_folder else errno.EINVAL, why, path)
    return descriptor


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return what a file holds; see `regular`."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """Return what differs once a file was changed, its mode too, or None if there is none."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a path to an OSError that has none, such as those of writing and closing."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
