"""A journal in SQLite, beside a `file://` store: the embedded default.

    DIR/journal.sqlite          turns
    DIR/snapshot-<sequence>     the newest snapshot; renamed into place
    DIR/journal.end             the newest turn's sequence: to SQLite a damaged log is a short one
    DIR/journal.lock            held by the server that may write
    DIR/reserve/                room to give up when the disk is full

Only the lock's holder writes, so no write waits; the compactor only reads turns. Owner and token
stand in the database too and are checked with each turn: a lock can be deleted, and the file be
restored from a copy.
"""

import fcntl
import logging
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, Final
from uuid import UUID

import xxhash

from breadbox.shared.threads import CallThreads, HungError
from breadbox.stores.deadline import Deadline
from breadbox.stores.disk import (
    can_hang,
    check_private,
    make_private_directory,
    new_opener,
    open_private,
    opener,
)
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.journal.storage.claims import (
    Claim,
    Holder,
    epoch_after,
    new_journal_id,
    owner_from_text,
)
from breadbox_server.journal.storage.disk_reserve import FULL_ERRNOS, Reserve, share_bytes
from breadbox_server.journal.storage.interface import (
    BEGINNING,
    NO_PAYLOADS,
    JournalDamagedError,
    JournalFullError,
    JournalHeldError,
    JournalLostError,
    JournalTakenError,
    JournalUnavailableError,
)

log = logging.getLogger(__name__)

FILE_NAME: Final = "journal.sqlite"
LOCK_NAME: Final = "journal.lock"
END_NAME: Final = "journal.end"
SNAPSHOT_PREFIX: Final = "snapshot-"
TRIM_TURNS: Final = 500
TRIM_SIZE_BYTES: Final = 2 * 2**20
"""Turns deleted at a time: few milliseconds, whether they are many or large."""
LOG_PAGES_MAX: Final = 1000
"""Pages in the write-ahead log after which they are moved into the database: SQLite's own bound."""
PAGE_BYTES: Final = 4096
READ_TURNS: Final = 500
ANSWER_S: Final = 5.0
"""Seconds that a disk may take for a turn,"""
BEGIN_S: Final = 300.0
"""and for a snapshot."""
WAIT_S: Final = 5.0
"""How long SQLite waits for a lock that nobody should hold."""
_END: Final = struct.Struct("<4sIQ16s")
_END_MAGIC: Final = b"BBe1"
_CHECKSUM: Final = struct.Struct("<Q")
_REMEDY: Final = (
    f"put the directory back from a copy, or delete {FILE_NAME}*, {SNAPSHOT_PREFIX}* and "
    f"{END_NAME} in it to start empty (payloads that they knew are kept until --delete-orphans)"
)
_WRITE_NOTE: Final = "INSERT OR REPLACE INTO notes (name, text) VALUES (?, ?)"


class SqliteArchive:
    """A `JournalArchive` in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock: IO[str] | None = None
        self._reserve = Reserve(directory)
        self._connection = self._reserve.with_room(partial(_connect, directory, sync=False))

    @property
    def shown(self) -> str:
        return str(self._directory / FILE_NAME)

    def identity(self) -> str:
        return owner_from_text(_read_owner(self._connection)[0])[2]

    def claim(self, holder: Holder, displaced: str = "") -> Claim:
        """See JournalArchive. A living holder is not displaced: its lock ends with its process."""
        with _translated_errors():
            lock = open(self._directory / LOCK_NAME, "w", opener=opener)  # noqa: SIM115 - held
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            _, other = _read_owner(self._connection)
            raise JournalHeldError(Holder.from_text(other), None) from error
        self._lock = lock
        owner, _ = _read_owner(self._connection)
        epoch, _, journal = owner_from_text(owner)
        claim = Claim(journal or new_journal_id(), epoch_after(epoch), holder)
        self._reserve.with_room(partial(_write_owner, self._connection, claim))
        return claim

    def send_heartbeat(self) -> None:
        """See JournalArchive: the lock is the heartbeat."""

    def is_begun(self) -> bool:
        with _translated_errors():
            (turn,) = self._connection.execute("SELECT min(sequence) FROM turns").fetchone()
        return turn is not None or bool(self._snapshots()) or self._end_path.exists()

    def begin(self, data: bytes) -> None:
        self.write_snapshot(BEGINNING, data)
        self._reserve.with_room(partial(_make_end, self._end_path))

    def read_snapshot(self) -> tuple[int, bytes]:
        snapshots = self._snapshots()
        if not snapshots:
            raise JournalDamagedError(f"{self.shown} has no snapshot beside it; {_REMEDY}")
        sequence = max(snapshots)
        with _translated_errors():
            return sequence, snapshots[sequence].read_bytes()

    def read_turns(self, after: int) -> Iterator[tuple[int, bytes]]:
        # Before the turns: they only get more.
        end = self._read_end()
        expected = after + 1
        while True:
            with _translated_errors():
                rows = self._connection.execute(
                    "SELECT sequence, data FROM turns WHERE sequence >= ? "
                    "ORDER BY sequence LIMIT ?",
                    (expected, READ_TURNS),
                ).fetchall()
            if not rows:
                break
            for sequence, data in rows:
                if sequence != expected:
                    raise JournalDamagedError(
                        f"{self.shown} lacks turns {expected} to {sequence - 1}; {_REMEDY}"
                    )
                yield sequence, data
                expected += 1
        if end is None and expected > BEGINNING + 1:
            raise JournalDamagedError(f"{self.shown} has no {END_NAME} beside it; {_REMEDY}")
        if end is not None and expected <= end:
            raise JournalDamagedError(f"{self.shown} lacks turns {expected} to {end}; {_REMEDY}")

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        older = self._snapshots()
        if older and max(older) > sequence:
            return
        self._replace_snapshots(older, sequence, data)

    def begin_again(self, sequence: int, data: bytes) -> None:
        """Make a snapshot the one that counts, whatever there was."""
        self._replace_snapshots(self._snapshots(), sequence, data)

    def _replace_snapshots(self, older: dict[int, Path], sequence: int, data: bytes) -> None:
        path = self._directory / f"{SNAPSHOT_PREFIX}{sequence}"
        half = path.with_name(f".{path.name}")
        self._reserve.with_room(partial(_write_file, half, data), is_snapshot=True)
        with _translated_errors():
            half.replace(path)
            for other, old_path in older.items():
                if other != sequence:
                    old_path.unlink(missing_ok=True)

    def read_note(self, name: str) -> str:
        with _translated_errors():
            row = self._connection.execute(
                "SELECT text FROM notes WHERE name = ?", (name,)
            ).fetchone()
        return row[0] if row else ""

    def write_note(self, name: str, text: str) -> None:
        self._reserve.with_room(partial(self._execute, _WRITE_NOTE, name, text))

    def close(self) -> None:
        """See JournalArchive. The claim goes with the lock."""
        self._connection.close()
        if self._lock is not None:
            self._lock.close()

    @property
    def _end_path(self) -> Path:
        return self._directory / END_NAME

    def _read_end(self) -> int | None:
        try:
            record = self._end_path.read_bytes()
        except FileNotFoundError:
            return None
        body = record[: _END.size]
        if len(body) < _END.size or record != _with_checksum(body):
            raise JournalDamagedError(f"{self._end_path} is damaged; {_REMEDY}")
        _, is_synced, sequence, boot = _END.unpack(body)
        if not is_synced and boot != _boot():
            log.warning(
                "the machine was restarted since turn %d was written to %s: without --journal-sync "
                "the newest turns may be lost",
                sequence,
                self.shown,
            )
            return 0
        return int(sequence)

    def _execute(self, sql: str, *values: str) -> None:
        with _translated_errors(), self._connection:
            self._connection.execute(sql, values)

    def _snapshots(self) -> dict[int, Path]:
        with _translated_errors():
            return _snapshots_in(self._directory)


class SqliteWriter:
    """A `JournalWriter` in a directory; the claim's lock stays with its archive.

    `sync`: a turn must survive the machine, not only the process: each commit then reaches the
    disk. Without it a commit in memory takes tens of microseconds; all others have a thread, in
    which a disk may keep silent for `ANSWER_S`.
    """

    carries_payloads = False
    """See JournalWriter: they are files beside it."""

    def __init__(self, directory: Path, claim: Claim, *, sync: bool) -> None:
        self._directory = directory
        self.claim = claim
        self._sync = sync
        self._thread = CallThreads("journal", 1) if sync or can_hang(directory) else None
        self._reserve = Reserve(directory)
        self._connection = self._reserve.with_room(self._connect)
        self._file = _identity(directory / FILE_NAME)
        self._end = self._open_end()
        self._reserve.refill()
        self._has_room = self._reserve.has_room()

    def _connect(self) -> sqlite3.Connection:
        connection = _connect(self._directory, sync=self._sync)
        if self._thread is None:
            # On the loop nobody is answered while it waits: the turn is tried again instead.
            connection.execute("PRAGMA busy_timeout = 0")
        return connection

    def has_room(self) -> bool:
        """See JournalWriter: while most of the reserve is there, which a disk says with a turn."""
        return self._reserve.has_room() if self._thread is None else self._has_room

    async def append(
        self, sequence: int, data: bytes, payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS
    ) -> bool:
        assert not payloads
        await self._run(self._append, sequence, data)
        return True

    def _append(self, sequence: int, data: bytes) -> None:
        self._reserve.with_room(partial(self._insert, sequence, data))
        self._write_end(sequence)
        if _identity(self._directory / FILE_NAME) != self._file:
            # The rows went into a file that nobody will ever find again.
            raise JournalLostError(f"{self._directory / FILE_NAME} was deleted or replaced")
        self._has_room = self._reserve.has_room()

    def _insert(self, sequence: int, data: bytes) -> None:
        with _translated_errors(), self._connection:
            # First of all a write, with which this connection is alone until the commit.
            written = self._connection.execute(
                "INSERT INTO turns (sequence, data, epoch) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                (sequence, data, self.claim.epoch),
            ).rowcount
            self._check_ours()
            if not written:
                self._check_repeat(sequence, data)

    def _open_end(self) -> int:
        path = self._directory / END_NAME
        if not path.exists():
            self._reserve.with_room(partial(_make_end, path))
        with _translated_errors():
            return open_private(path, os.O_RDWR)

    def _write_end(self, sequence: int) -> None:
        """Leave word of the newest turn; in place, and after the turn itself."""
        with _translated_errors():
            os.pwrite(self._end, _end_record(sequence, is_synced=self._sync), 0)

    def _check_repeat(self, sequence: int, data: bytes) -> None:
        (row,) = self._connection.execute(
            "SELECT data, epoch FROM turns WHERE sequence = ?", (sequence,)
        )
        if row != (data, self.claim.epoch):
            raise JournalLostError(f"{self._directory / FILE_NAME} holds another turn {sequence}")

    def _check_ours(self) -> None:
        text, holder = _read_owner(self._connection)
        if text == self.claim.to_text():
            return
        epoch, token, _ = owner_from_text(text)
        if epoch >= self.claim.epoch and token != self.claim.holder.token:
            raise JournalTakenError(
                f"another server ({Holder.from_text(holder).shown}) took the journal"
            )
        raise JournalLostError(f"{self._directory / FILE_NAME} is older than it was")

    async def renew(self, sequence: int) -> str:
        """See JournalWriter. The lock is the heartbeat, and no other server gets past it."""
        await self._run(self._renew, sequence)
        return ""

    def _renew(self, sequence: int) -> None:
        if _identity(self._directory / FILE_NAME) != self._file:
            raise JournalLostError(f"{self._directory / FILE_NAME} was deleted or replaced")
        with _translated_errors():
            self._check_ours()
            # In this order: a snapshot may be made, and turns be trimmed, meanwhile.
            (oldest,) = self._connection.execute("SELECT min(sequence) FROM turns").fetchone()
            (newest,) = self._connection.execute("SELECT max(sequence) FROM turns").fetchone()
            # Twice: a listing may miss the one that is just taking the other's place.
            found = _snapshots_in(self._directory) or _snapshots_in(self._directory)
        head = max(found, default=0)
        if max(newest or 0, head) < sequence:
            raise JournalLostError(f"{self._directory / FILE_NAME} lacks its newest turns")
        if not found or (oldest is not None and oldest > head + 1):
            raise JournalLostError(
                f"{self._directory / FILE_NAME} lacks its snapshot, or turns right after it"
            )
        self._has_room = self._reserve.has_room()

    async def begin_again(
        self,
        sequence: int,
        snapshot: bytes,
        notes: Mapping[str, str],
        payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS,
    ) -> None:
        assert not payloads
        # In the thread, so that the connection is not closed under a trim.
        begin = partial(self._begin_again, sequence, snapshot, notes)
        await self._run(begin, within_s=BEGIN_S)

    def _begin_again(self, sequence: int, snapshot: bytes, notes: Mapping[str, str]) -> None:
        self._connection.close()
        with _translated_errors():
            make_private_directory(self._directory, has_parents=True)
        # Where the file was replaced, this is the one that took its place.
        self._connection = self._reserve.with_room(self._connect)
        self._file = _identity(self._directory / FILE_NAME)
        with suppress(JournalLostError), _translated_errors():
            self._check_ours()
        archive = SqliteArchive(self._directory)
        try:
            archive.begin_again(sequence, snapshot)
        finally:
            archive.close()
        os.close(self._end)
        self._end = self._open_end()
        self._write_end(sequence)
        owner, _ = _read_owner(self._connection)
        epoch, _, _ = owner_from_text(owner)
        claim = self.claim.raised(max(epoch, self.claim.epoch) + 1)
        self._reserve.with_room(partial(_write_beginning, self._connection, claim, notes))
        self.claim = claim

    async def _run(
        self, work: Callable[..., Any], *arguments: Any, within_s: float = ANSWER_S
    ) -> Any:
        """Do work on the journal; what a disk holds up goes on, and the next waits for it."""
        if self._thread is None:
            return work(*arguments)
        deadline = Deadline(within_s)
        try:
            return await self._thread.run(partial(work, *arguments), deadline.left_s)
        except HungError:
            raise JournalUnavailableError(
                f"the disk of {self._directory} did not answer in time"
            ) from None

    async def trim(self, up_to: int) -> bool:
        """See JournalWriter. What is lost or another server's is left as it is."""
        try:
            has_more: bool = await self._run(self._trim, up_to)
        except (JournalLostError, JournalTakenError):
            return False
        return has_more

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
            self._check_ours()
            return len(turns) == TRIM_TURNS or size_bytes >= TRIM_SIZE_BYTES

    async def close(self) -> None:
        with suppress(JournalUnavailableError):
            await self._run(self._close)

    def _close(self) -> None:
        self._connection.close()
        if self._end >= 0:
            os.close(self._end)
            self._end = -1


def _snapshots_in(directory: Path) -> dict[int, Path]:
    return {
        int(path.name.removeprefix(SNAPSHOT_PREFIX)): path
        for path in directory.glob(f"{SNAPSHOT_PREFIX}*")
        if path.name.removeprefix(SNAPSHOT_PREFIX).isdigit()
    }


def _connect(directory: Path, *, sync: bool) -> sqlite3.Connection:
    with _translated_errors(), ExitStack() as on_failure:
        _check_database(directory / FILE_NAME)
        connection = sqlite3.connect(directory / FILE_NAME, timeout=WAIT_S, check_same_thread=False)
        on_failure.callback(connection.close)
        # Readers never hold up the writer, nor the other way round.
        connection.execute("PRAGMA journal_mode = WAL")
        # The log is not cut off again: on a small disk it must not get long in the first place.
        log_pages = min(LOG_PAGES_MAX, share_bytes(directory) // PAGE_BYTES)
        connection.execute(f"PRAGMA wal_autocheckpoint = {max(1, log_pages)}")
        connection.execute(f"PRAGMA synchronous = {'FULL' if sync else 'OFF'}")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS turns (sequence INTEGER PRIMARY KEY, data BLOB NOT NULL, "
            "epoch INTEGER NOT NULL)"
        )
        connection.execute(
            "CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, text TEXT NOT NULL)"
        )
        connection.execute(
            "CREATE TABLE IF NOT EXISTS owner (row INTEGER PRIMARY KEY CHECK (row = 1), "
            "claim TEXT NOT NULL, holder TEXT NOT NULL)"
        )
        connection.commit()
        on_failure.pop_all()
        return connection


def _check_database(path: Path) -> None:
    """See that SQLite will follow no link, and that its files are this user's alone.

    It gives side files the database's mode. Look at them by name: closing a descriptor of a
    database gives up every lock that other connections of this process hold on it, and the next
    process to close it would take itself for the last and delete the write-ahead log under them.
    """
    with suppress(FileExistsError):
        os.close(open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    for suffix in ("", "-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            check_private(f"{path}{suffix}")


def _write_file(path: Path, data: bytes) -> None:
    """Write a file through to the disk; nothing of it is left where there is no room."""
    try:
        with _translated_errors(), open(path, "wb", opener=new_opener) as file:
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


def _read_owner(connection: sqlite3.Connection) -> tuple[str, str]:
    with _translated_errors():
        row = connection.execute("SELECT claim, holder FROM owner").fetchone()
    return row or ("", "")


def _write_owner(connection: sqlite3.Connection, claim: Claim) -> None:
    with _translated_errors(), connection:
        _replace_owner(connection, claim)


def _write_beginning(
    connection: sqlite3.Connection, claim: Claim, notes: Mapping[str, str]
) -> None:
    with _translated_errors(), connection:
        _replace_owner(connection, claim)
        connection.execute("DELETE FROM turns")
        connection.executemany(_WRITE_NOTE, notes.items())


def _replace_owner(connection: sqlite3.Connection, claim: Claim) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO owner (row, claim, holder) VALUES (1, ?, ?)",
        (claim.to_text(), claim.holder.to_text()),
    )


def _make_end(path: Path) -> None:
    half = path.with_name(f".{path.name}")
    _write_file(half, _end_record(BEGINNING, is_synced=False))
    with _translated_errors():
        half.replace(path)


def _end_record(sequence: int, *, is_synced: bool) -> bytes:
    return _with_checksum(_END.pack(_END_MAGIC, is_synced, sequence, _boot()))


def _with_checksum(body: bytes) -> bytes:
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


@cache
def _boot() -> bytes:
    with suppress(OSError, ValueError):
        return UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    return bytes(16)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        seen = path.stat()
    except FileNotFoundError:
        return None
    return seen.st_dev, seen.st_ino


class _translated_errors:  # noqa: N801 - a context manager that reads as a function
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(
            error, sqlite3.OperationalError
        ):
            raise JournalDamagedError(f"the journal is damaged ({error}); {_REMEDY}") from error
        if _means_full(error):
            raise JournalFullError(
                f"the journal's disk is full ({error}); free some room on it"
            ) from error
        if isinstance(error, OSError | sqlite3.OperationalError):
            raise JournalUnavailableError(f"the journal cannot be used: {error}") from error
