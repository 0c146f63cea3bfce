"""Where a journal is: chosen from the settings, opened, and passed on to the compactor."""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from breadbox.stores.disk import make_private_directory
from breadbox.stores.urls import parse_redis_url, parse_store_url
from breadbox_server.journal.storage.claims import Claim
from breadbox_server.journal.storage.disk_reserve import share_bytes
from breadbox_server.journal.storage.interface import (
    JournalArchive,
    JournalUnavailableError,
    JournalWriter,
)
from breadbox_server.journal.storage.sqlite import SqliteArchive, SqliteWriter

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True)
class JournalPlace:
    """A place for a journal. `repr` hides the URL, which may hold a password."""

    kind: str
    """ "sqlite" or "redis"."""
    where: str = field(repr=False)
    """A directory, or the URL of Redis."""
    has_payloads: bool = False
    """Whether it is one Redis, and payloads are kept there too."""

    @classmethod
    def choose(cls, journal: str, store: str) -> "JournalPlace | None":
        """Choose a place: journal "auto" (beside the payloads), "none", or a URL like a store's."""
        if journal == NONE:
            return None
        url = store if journal == AUTO else journal
        if directory := parse_store_url(url).directory:
            return cls("sqlite", directory)
        kind = parse_redis_url(url).kind
        return cls("redis", url, has_payloads=url == store and kind != "cluster")

    @classmethod
    def from_line(cls, line: str) -> "JournalPlace":
        """Read what `to_line` wrote."""
        return cls(**json.loads(line))

    def to_line(self) -> str:
        """One line for another process; holds the password, if there is one."""
        return json.dumps(asdict(self)) + "\n"

    @property
    def is_shared(self) -> bool:
        """Whether servers on several machines can see it."""
        return self.kind == "redis"

    def turns_bytes_max(self) -> int:
        """Return the bytes of turns it takes well between snapshots; it must be open."""
        if self.kind == "redis":
            return sys.maxsize
        return share_bytes(Path(self.where))

    def open_archive(self) -> JournalArchive:
        """Open it for reading back; a `JournalView` where `is_shared`."""
        if self.kind == "redis":
            # redis-py takes long to load, and a server over a directory does without it.
            from breadbox_server.journal.storage.redis_stream import RedisArchive

            return RedisArchive(self.where)
        directory = Path(self.where)
        try:
            make_private_directory(directory, has_parents=True)
        except OSError as error:
            raise JournalUnavailableError(
                f"{directory} cannot be used: {error.strerror}"
            ) from error
        return SqliteArchive(directory)

    def open_writer(self, claim: Claim, *, sync: bool) -> JournalWriter:
        """Open it for writing."""
        if self.kind == "redis":
            from breadbox_server.journal.storage.redis_stream import RedisWriter

            return RedisWriter(self.where, claim, carries_payloads=self.has_payloads)
        return SqliteWriter(Path(self.where), claim, sync=sync)
