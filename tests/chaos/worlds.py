"""Where a chaos run keeps its payloads and its journal, and what can happen to that place."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from breadbox.stores.keys import payload_id_of_key
from support.proxy import Proxy
from support.redis_server import RedisServer
from support.small_disk import CannotMountError, fill_up, small_disk

DISK_BYTES = 24 * 2**20
COPIES_MAX = 3


class World(Protocol):
    """A store with the journal beside it."""

    name: str
    width: int
    """Numbers in an observation: how large fragments are."""

    @property
    def server_arguments(self) -> tuple[str, ...]:
        """Options of the server that name the store, for itself and for clients."""

    @property
    def audit_url(self) -> str:
        """The store, past everything that may be silent."""

    def payloads(self) -> list[str]:
        """What is in the store, confirmed or not, beside the journal."""

    def heal(self) -> None:
        """End whatever was done to it and lasts."""


@dataclass
class RedisWorld:
    """A Redis that syncs every write, and proxies to it for the server and for its clients."""

    redis: RedisServer
    of_server: Proxy
    of_clients: Proxy
    folder: Path
    name: str = "redis"
    width: int = 256
    copies: list[tuple[float, Path]] = field(default_factory=list)
    """When each was begun, and where it is; oldest first."""
    _copy_count: int = 0

    @property
    def server_arguments(self) -> tuple[str, ...]:
        return (
            *("--store", f"redis://{self.of_server.address}/0"),
            *("--client-store", f"redis://{self.of_clients.address}/0"),
        )

    @property
    def audit_url(self) -> str:
        return self.redis.url

    def payloads(self) -> list[str]:
        with self.redis.client() as client:
            keys = client.keys("breadbox:{*}:*")
        return [str(key) for key in keys if payload_id_of_key(key) is not None]

    def copy(self) -> None:
        """Take a copy that Redis may come back as."""
        self._copy_count += 1
        path = self.folder / f"copy-{self._copy_count}"
        begun_at = time.monotonic()
        self.redis.copy_data(path)
        self.copies.append((begun_at, path))
        if len(self.copies) > COPIES_MAX:
            shutil.rmtree(self.copies.pop(0)[1])

    def forget_copies(self) -> None:
        """Copies of a history that was given up are of no use."""
        while self.copies:
            shutil.rmtree(self.copies.pop()[1])

    def heal(self) -> None:
        self.of_server.speak()
        self.of_clients.speak()


@dataclass
class DiskWorld:
    """A directory on a file system of some megabytes, which somebody else fills now and then."""

    folder: Path
    is_small: bool
    """Whether the file system is one of its own: then it may be filled."""
    name: str = "file"
    width: int = 2048
    _theirs: Path | None = None

    @property
    def server_arguments(self) -> tuple[str, ...]:
        return ("--store", f"file://{self.folder / 'store'}")

    @property
    def audit_url(self) -> str:
        return f"file://{self.folder / 'store'}"

    def payloads(self) -> list[str]:
        store = self.folder / "store"
        places = [store / each for each in ("payloads", "groups", "unannounced")]
        return [path.name for place in places for path in place.rglob("*") if path.is_file()]

    def fill(self) -> None:
        """Leave nobody a byte."""
        self._theirs = fill_up(self.folder)

    def heal(self) -> None:
        if self._theirs is not None:
            self._theirs.unlink()
            self._theirs = None


@contextlib.contextmanager
def redis_world(folder: Path) -> Iterator[RedisWorld]:
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer(is_durable=True, with_tcp=True))
        target = ("127.0.0.1", redis.port)
        of_server = stack.enter_context(Proxy(target))
        of_clients = stack.enter_context(Proxy(target))
        yield RedisWorld(redis, of_server, of_clients, folder)


@contextlib.contextmanager
def disk_world(folder: Path) -> Iterator[DiskWorld]:
    with contextlib.ExitStack() as stack:
        try:
            mounted = stack.enter_context(small_disk(folder / "disk", size_bytes=DISK_BYTES))
        except CannotMountError:
            (folder / "disk").mkdir()
            yield DiskWorld(folder / "disk", is_small=False)
        else:
            yield DiskWorld(mounted, is_small=True)
