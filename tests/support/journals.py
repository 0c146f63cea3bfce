"""Journals of tests: claimed as a server claims them."""

from pathlib import Path

from breadbox_server.journal.claims import Claim, Holder
from breadbox_server.journal.sqlite import SqliteArchive, SqliteWriter
from breadbox_server.journal.storage import JournalArchive


def claim_of(archive: JournalArchive, displaced: str = "") -> Claim:
    """A claim of a server of its own."""
    return archive.claim(Holder.of_this_process(), displaced)


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
