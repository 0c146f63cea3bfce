"""A file system of a few megabytes of its own, so that a test can fill it and harm nobody."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CannotMountError(Exception):
    """This user, or this machine, may not mount file systems; says what mount said."""


@contextmanager
def small_disk(folder: Path, *, size_bytes: int, inode_count: int | None = None) -> Iterator[Path]:
    """Mount a tmpfs on a new folder inside the block; what is in it goes with it.

    Raises:
        CannotMountError: Mounting is not permitted here.
    """
    folder.mkdir()
    options = f"size={size_bytes},mode=700"
    if inode_count is not None:
        options += f",nr_inodes={inode_count}"
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        folder.rmdir()
        raise CannotMountError(str(getattr(error, "stderr", "") or error).strip()) from error
    try:
        yield folder
    finally:
        # Lazily: a mapping that a reader still holds must not keep the mount.
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)
        folder.rmdir()


def fill_up(folder: Path, *, leaving_bytes: int = 0) -> Path:
    """Do what another program does that fills the disk: one file, until nothing more fits.

    Returns:
        The file.
    """
    path = folder / "somebody-elses-file"
    seen = os.statvfs(folder)
    os_file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    left = seen.f_bavail * seen.f_frsize - leaving_bytes
    try:
        while left > 0:
            try:
                left -= os.write(os_file, bytes(min(left, 4096)))
            except OSError:
                return path
    finally:
        os.close(os_file)
    return path
