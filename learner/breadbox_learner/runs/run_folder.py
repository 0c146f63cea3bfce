"""Where a run keeps its records and its checkpoint: one folder, of one run."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from breadbox.model.errors import InvalidRequestError, ReplayBufferError
from breadbox_learner.settings import LearnSettings

EVENT_FILES = "events.out.tfevents.*"


class RunFolderError(ReplayBufferError):
    """The folder of a run, or a file in it, cannot be used; says which and why."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path}: {error.strerror or error}")
        self.path = path


class RunFolder:
    """The files of one run. Made by `open`; nothing here is safe against a second learner."""

    def __init__(self, path: Path) -> None:
        """Use `open` instead."""
        self.path = path
        self.progress = path / "progress.jsonl"
        """One JSON object per update."""
        self.checkpoint = path / "checkpoint.safetensors"
        """The last checkpoint, whole or not there."""

    @classmethod
    def open(cls, settings: LearnSettings) -> "RunFolder":
        """Make the folder, or find it; with `overwrite` the run in it is deleted.

        Raises:
            InvalidRequestError: It holds a run, and nobody said what to do with that.
            RunFolderError: It cannot be made or written to.
        """
        cls.check(settings)
        if settings.run_dir is None:
            return cls(_new_folder(Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")))
        folder = cls(settings.run_dir)
        with _named(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            if not os.access(folder.path, os.W_OK):
                raise PermissionError(0, "cannot be written to")
            if settings.overwrite:
                folder._delete_run()
        return folder

    @classmethod
    def check(cls, settings: LearnSettings) -> None:
        """Refuse a folder that holds another run, without touching anything.

        Raises:
            InvalidRequestError: It holds a run and neither `resume` nor `overwrite` is set, or both
                are.
            RunFolderError: It cannot be looked into.
        """
        if settings.resume and settings.overwrite:
            raise InvalidRequestError("resume", "and overwrite contradict each other: set one")
        if settings.run_dir is None or settings.resume or settings.overwrite:
            return
        folder = cls(settings.run_dir)
        with _named(folder.path):
            holds_run = folder.checkpoint.exists() or (
                folder.progress.exists() and folder.progress.stat().st_size > 0
            )
        if holds_run:
            raise InvalidRequestError(
                "run_dir",
                f"{folder.path} holds a run: --resume goes on with it, --overwrite deletes it "
                "and starts anew",
            )

    def read_checkpoint(self) -> bytes:
        """Read the checkpoint; empty when there is none.

        Raises:
            RunFolderError: It cannot be read.
        """
        with _named(self.checkpoint):
            return self.checkpoint.read_bytes() if self.checkpoint.exists() else b""

    def write_checkpoint(self, data: bytes) -> None:
        """Replace the checkpoint in one step; a crash leaves the old one or the new one, whole.

        Raises:
            RunFolderError: It cannot be written, such as for want of room. The old one stays.
        """
        partial = self.checkpoint.with_suffix(".partial")
        with _named(self.checkpoint):
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.checkpoint)
            # The new name is only as safe as its folder's entry.
            folder = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def drop_records_after(self, update: int) -> None:
        """Delete the records of updates that are about to be made again.

        A run that was killed has written records of updates which its checkpoint does not hold.

        Raises:
            RunFolderError: The file cannot be read or replaced.
        """
        with _named(self.progress):
            if not self.progress.is_file():
                return
            kept = [
                line
                for line in self.progress.read_bytes().splitlines(keepends=True)
                if _update_of(line) <= update
            ]
            partial = self.progress.with_suffix(".partial")
            partial.write_bytes(b"".join(kept))
            partial.replace(self.progress)

    def _delete_run(self) -> None:
        for path in (self.checkpoint, self.progress, *self.path.glob(EVENT_FILES)):
            path.unlink(missing_ok=True)


def _new_folder(wanted: Path) -> Path:
    """A folder that nobody else has, named after *wanted*."""
    with _named(wanted):
        for number in count(2):
            path = wanted if number == 2 else wanted.with_name(f"{wanted.name}-{number - 1}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            return path
    raise AssertionError("unreachable")


def _update_of(line: bytes) -> float:
    """The number of a record's update; endless where a line was cut short by a kill."""
    try:
        return int(json.loads(line)["update"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into an error that names the path."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(path, error) from error
