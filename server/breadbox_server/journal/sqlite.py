"""A journal in SQLite, beside a `file://` store: the embedded default.

    DIR/journal.sqlite          turns
    DIR/snapshot-<sequence>     the newest snapshot; renamed into place
    DIR/reserve/                room to give up when the disk is full

Only one server holds the directory (`breadbox_server.app` locks it), so a turn's write never waits
for another writer; the compactor's process only reads turns.
"""

import asyncio
import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from breadbox_server.journal.reserve import FULL_ERRNOS, Reserve, share_bytes
from breadbox_server.journal.storage import (
    BEGINNING,
    JournalDamagedError,
    JournalFullError,
    JournalLostError,
    JournalUnavailableError,
)

FILE_NAME: Final = "journal.sqlite"
SNAPSHOT_PREFIX: Final = "snapshot-"
TRIM_TURNS: Final = 500
TRIM_SIZE_BYTES: Final = 2 * 2**20
"""Turns deleted at a time: few milliseconds, whether they are many or large."""
LOG_PAGES_MAX: Final = 1000
"""Pages in the write-ahead log after which they are moved into the database: SQLite's own bound."""
PAGE_BYTES: Final = 4096
READ_TURNS: Final = 500
WAIT_S: Final = 5.0
"""How long SQLite waits for a lock that nobody should hold."""


class SqliteArchive:
    """A `JournalArchive` in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._reserve = Reserve(directory)
        self._connection = self._reserve.with_room(partial(_connect, directory, sync=False))

    @property
    def shown(self) -> str:
        """See JournalArchive."""
        return str(self._directory / FILE_NAME)

    def is_begun(self) -> bool:
        """See JournalArchive."""
        return bool(self._snapshots())

    def begin(self, data: bytes) -> None:
        """See JournalArchive."""
        self._reserve.with_room(partial(self._execute, "DELETE FROM turns"))
        self.write_snapshot(BEGINNING, data)

    def read_snapshot(self) -> tuple[int, bytes]:
        """See JournalArchive."""
        snapshots = self._snapshots()
        if not snapshots:
            raise JournalDamagedError(
                f"{self.shown} has no snapshot beside it; restore the directory from a copy, "
                "or delete it to start empty"
            )
        sequence = max(snapshots)
        with _translated_errors():
            return sequence, snapshots[sequence].read_bytes()

    def read_turns(self, after: int) -> Iterator[tuple[int, bytes]]:
        """See JournalArchive."""
        expected = after + 1
        while True:
            with _translated_errors():
                rows = self._connection.execute(
                    "SELECT sequence, data FROM turns WHERE sequence >= ? "
                    "ORDER BY sequence LIMIT ?",
                    (expected, READ_TURNS),
                ).fetchall()
            if not rows:
                return
            for sequence, data in rows:
                if sequence != expected:
                    raise JournalDamagedError(
                        f"{self.shown} lacks turns {expected} to {sequence - 1}; "
                        "restore the directory from a copy, or delete it to start empty"
                    )
                yield sequence, data
                expected += 1

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        """See JournalArchive."""
        older = self._snapshots()
        if older and max(older) > sequence:
            return
        path = self._directory / f"{SNAPSHOT_PREFIX}{sequence}"
        half = path.with_name(f".{path.name}")
        self._reserve.with_room(partial(_write_file, half, data), is_snapshot=True)
        with _translated_errors():
            half.replace(path)
            for other, old_path in older.items():
                if other != sequence:
                    old_path.unlink(missing_ok=True)

    def read_note(self, name: str) -> str:
        """See JournalArchive."""
        with _translated_errors():
            row = self._connection.execute(
                "SELECT text FROM notes WHERE name = ?", (name,)
            ).fetchone()
        return row[0] if row else ""

    def write_note(self, name: str, text: str) -> None:
        """See JournalArchive."""
        sql = "INSERT OR REPLACE INTO notes (name, text) VALUES (?, ?)"
        self._reserve.with_room(partial(self._execute, sql, name, text))

    def close(self) -> None:
        """See JournalArchive."""
        self._connection.close()

    def _execute(self, sql: str, *values: str) -> None:
        with _translated_errors(), self._connection:
            self._connection.execute(sql, values)

    def _snapshots(self) -> dict[int, Path]:
        with _translated_errors():
            return {
                int(path.name.removeprefix(SNAPSHOT_PREFIX)): path
                for path in self._directory.glob(f"{SNAPSHOT_PREFIX}*")
                if path.name.removeprefix(SNAPSHOT_PREFIX).isdigit()
            }


class SqliteWriter:
    """A `JournalWriter` in a directory.

    Args:
        directory: Held by this server alone.
        sync: Whether a turn must survive the machine, not only the process: each commit then
            reaches the disk, in a thread. Without it a commit is some tens of microseconds.
    """

    def __init__(self, directory: Path, *, sync: bool) -> None:
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, "journal") if sync else None
        self._reserve = Reserve(directory)
        self._connection = self._reserve.with_room(partial(_connect, directory, sync=sync))
        self._reserve.refill()

    def has_room(self) -> bool:
        """See JournalWriter: while most of the reserve is there."""
        return self._reserve.has_room()

    async def append(self, sequence: int, data: bytes) -> None:
        """See JournalWriter."""
        if self._thread is None:
            self._append(sequence, data)
            return
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._append, sequence, data)

    def _append(self, sequence: int, data: bytes) -> None:
        self._reserve.with_room(partial(self._insert, sequence, data))
        if not (self._directory / FILE_NAME).exists():
            # The rows went into a file that nobody will ever find again.
            raise JournalLostError(f"{self._directory / FILE_NAME} was deleted")

    def _insert(self, sequence: int, data: bytes) -> None:
        with _translated_errors(), self._connection:
            self._connection.execute(
                "INSERT OR REPLACE INTO turns (sequence, data) VALUES (?, ?)", (sequence, data)
            )

    async def begin_again(self, sequence: int, snapshot: bytes) -> None:
        """See JournalWriter."""
        if self._thread is None:
            self._begin_again(sequence, snapshot)
            return
        # In the thread, so that the connection is not closed under a trim.
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._begin_again, sequence, snapshot)

    def _begin_again(self, sequence: int, snapshot: bytes) -> None:
        self._connection.close()
        with _translated_errors():
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in self._directory.glob(f"{FILE_NAME}*"):
                path.unlink()
        connect = partial(_connect, self._directory, sync=self._thread is not None)
        self._connection = self._reserve.with_room(connect)
        archive = SqliteArchive(self._directory)
        try:
            archive.write_snapshot(sequence, snapshot)
        finally:
            archive.close()

    async def trim(self, up_to: int) -> bool:
        """See JournalWriter."""
        if self._thread is None:
            return self._trim(up_to)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._trim, up_to)

    def _trim(self, up_to: int) -> bool:
        # It writes before it frees.
        return self._reserve.with_room(partial(self._delete_turns, up_to), is_snapshot=True)

    def _delete_turns(self, up_to: int) -> bool:
        with _translated_errors(), self._connection:
            turns = self._connection.execute(
                "SELECT sequence, length(data) FROM turns WHERE sequence <= ? "
                "ORDER BY sequence LIMIT ?",
                (up_to, TRIM_TURNS),
            ).fetchall()
            through, size_bytes = 0, 0
            for sequence, turn_bytes in turns:
                through, size_bytes = sequence, size_bytes + turn_bytes
                if size_bytes >= TRIM_SIZE_BYTES:
                    break
            self._connection.execute("DELETE FROM turns WHERE sequence <= ?", (through,))
            return len(turns) == TRIM_TURNS or size_bytes >= TRIM_SIZE_BYTES

    async def close(self) -> None:
        """See JournalWriter."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._connection.close()


def _connect(directory: Path, *, sync: bool) -> sqlite3.Connection:
    with _translated_errors():
        connection = sqlite3.connect(directory / FILE_NAME, timeout=WAIT_S, check_same_thread=False)
        # Readers never hold up the writer, nor the other way round.
        connection.execute("PRAGMA journal_mode = WAL")
        # The log is not cut off again: on a small disk it must not get long in the first place.
        log_pages = min(LOG_PAGES_MAX, share_bytes(directory) // PAGE_BYTES)
        connection.execute(f"PRAGMA wal_autocheckpoint = {max(1, log_pages)}")
        connection.execute(f"PRAGMA synchronous = {'FULL' if sync else 'OFF'}")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS turns (sequence INTEGER PRIMARY KEY, data BLOB NOT NULL)"
        )
        connection.execute(
            "CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, text TEXT NOT NULL)"
        )
        connection.commit()
        return connection


def _write_file(path: Path, data: bytes) -> None:
    """Write a file through to the disk; nothing of it is left where there is no room."""
    try:
        with _translated_errors(), path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except JournalFullError:
        path.unlink(missing_ok=True)
        raise


def _means_full(error: BaseException | None) -> bool:
    if isinstance(error, sqlite3.OperationalError):
        # The second: the index of the write-ahead log could not grow.
        return error.sqlite_errorcode in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
    return isinstance(error, OSError) and error.errno in FULL_ERRNOS


class _translated_errors:  # noqa: N801 - a context manager that reads as a function
    """Turn the errors of SQLite and of files into those of a journal."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(
            error, sqlite3.OperationalError
        ):
            raise JournalDamagedError(
                f"the journal is damaged ({error}); restore it from a copy, or delete it to start "
                "empty"
            ) from error
        if _means_full(error):
            raise JournalFullError(
                f"the journal's disk is full ({error}); free some room on it"
            ) from error
        if isinstance(error, OSError | sqlite3.OperationalError):
            raise JournalUnavailableError(f"the journal cannot be used: {error}") from error
