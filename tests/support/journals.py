"""Journals of tests: claimed as a server claims them."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from breadbox_server.journal.storage.claims import Claim, Holder
from breadbox_server.journal.storage.interface import JournalArchive
from breadbox_server.journal.storage.sqlite import FILE_NAME, SqliteArchive, SqliteWriter


def claim_of(archive: JournalArchive, displaced: str = "") -> Claim:
    """A claim of a server of its own."""
    return archive.claim(Holder.of_this_process(), displaced)


def put_turn(directory: Path, sequence: int, record: bytes, epoch: int = 0) -> None:
    """Write a turn into a SQLite journal behind the back of who has it open."""
    with behind(directory) as connection:
        connection.execute("INSERT INTO turns VALUES (?, ?, ?)", (sequence, record, epoch))


@contextmanager
def behind(directory: Path) -> Iterator[sqlite3.Connection]:
    """A transaction in a SQLite journal that others have open."""
    with closing(sqlite3.connect(directory / FILE_NAME)) as connection, connection:
        yield connection


class SqliteJournal:
    """A directory with its archive open and claimed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.archive = SqliteArchive(directory)
        self.claim = claim_of(self.archive)

    def open_writer(self, *, sync: bool = False) -> SqliteWriter:
        """One more writer under the same claim."""
        return SqliteWriter(self.directory, self.claim, sync=sync)

    def close(self) -> None:
        """Give the claim up."""
        self.archive.close()
