"""A journal interrupted between any two commands: what was durable stays readable."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from breadbox.stores.keys import piece_key
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.journal.storage import redis_stream
from breadbox_server.journal.storage.interface import (
    BEGINNING,
    JournalDamagedError,
    JournalLostError,
    JournalUnavailableError,
)
from breadbox_server.journal.storage.redis_stream import TURNS, RedisArchive, RedisWriter
from breadbox_server.journal.storage.sqlite import SqliteArchive
from support.journals import claim_of
from support.redis_server import RedisServer

FIRST = BEGINNING + 1
STATE = b"state" * 500_000
"""Three pieces."""
PAYLOADS = {PayloadId("a" * 32): b"one", PayloadId("b" * 32): b"two"}


class Interruptible:
    """A client whose user may be interrupted before one of its commands."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._left = -1
        self._interruption = crash
        self.is_over = False
        """Whether the interruption has happened."""

    def interrupt(self, before: int, interruption: Callable[[], None]) -> None:
        """Interrupt the user before so many commands from now have been carried out."""
        self._left, self._interruption = before, interruption

    def __getattr__(self, name: str) -> Any:
        command = getattr(self._client, name)
        if name in ("close", "aclose"):
            return command

        def run(*arguments: Any, **named: Any) -> Any:
            if self._left == 0:
                self.is_over = True
                self._interruption()
            self._left -= 1
            return command(*arguments, **named)

        return run


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[Interruptible]:
    """The clients that journals open from now on."""
    made: list[Interruptible] = []

    def interruptible(opening: Callable[..., Any]) -> Callable[..., Interruptible]:
        def make(*arguments: Any, **named: Any) -> Interruptible:
            made.append(Interruptible(opening(*arguments, **named)))
            return made[-1]

        return make

    for name in ("open_redis", "open_redis_async"):
        monkeypatch.setattr(redis_stream, name, interruptible(getattr(redis_stream, name)))
    return made


def crash() -> None:
    raise redis.ConnectionError("the process was killed here")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


@pytest.fixture
def archive(server: RedisServer) -> Iterator[RedisArchive]:
    opened = RedisArchive(server.url)
    yield opened
    opened.close()


async def begun(archive: RedisArchive, url: str, last: int) -> RedisWriter:
    writer = RedisWriter(url, claim_of(archive), carries_payloads=True)
    archive.begin(b"nothing")
    for sequence in range(FIRST, last + 1):
        await writer.append(sequence, b"turn")
    return writer


def recovered(archive: RedisArchive) -> int:
    """The last turn that a server would have after it started now."""
    sequence, _ = archive.read_snapshot()
    return max([sequence, *(turn for turn, _ in archive.read_turns(sequence))])


def found(archive: RedisArchive) -> int | str:
    """The last turn that a server would have after it started now, or which turns it misses."""
    try:
        return recovered(archive)
    except JournalDamagedError as error:
        missing = re.search(r"turns \d+ to \d+", str(error))
        return missing[0] if missing else str(error)


def test_a_server_killed_while_it_began_its_journal_can_start_again(
    server: RedisServer, archive: RedisArchive, clients: list[Interruptible]
) -> None:
    command_count = 0
    is_done = False
    with server.client() as client:
        while not is_done:
            client.flushall()
            dying = RedisArchive(server.url)
            clients[-1].interrupt(command_count, crash)
            try:
                dying.begin(STATE)
                is_done = True
            except JournalUnavailableError:
                assert not archive.is_begun() or BEGINNING == recovered(archive), command_count
            dying.close()
            command_count += 1
    assert command_count > 4
    assert BEGINNING == recovered(archive)


async def test_a_server_killed_while_it_began_its_journal_again_has_all_or_says_what_is_gone(
    server: RedisServer, archive: RedisArchive, clients: list[Interruptible]
) -> None:
    command_count = 0
    is_done = False
    with server.client() as client:
        while not is_done:
            client.flushall()
            writer = await begun(archive, server.url, last=FIRST + 3)
            client.xdel(TURNS, f"{FIRST + 3}-0")
            with pytest.raises(JournalLostError):
                await writer.append(FIRST + 4, b"turn")
            clients[-1].interrupt(command_count, crash)
            try:
                await writer.begin_again(FIRST + 4, STATE, {}, PAYLOADS)
                is_done = True
            except JournalUnavailableError:
                # The turn that was deleted was acknowledged: it is not passed over in silence.
                assert found(archive) in (FIRST + 4, f"turns {FIRST + 3} to {FIRST + 3}")
            if found(archive) == FIRST + 4:
                # The snapshot refers to them.
                keys = [piece_key(payload_id, 0) for payload_id in PAYLOADS]
                assert list(PAYLOADS.values()) == client.mget(keys), command_count
            await writer.close()
            command_count += 1
    assert command_count > 5
    assert FIRST + 4 == recovered(archive)


async def test_an_older_snapshot_never_replaces_one_that_came_while_it_was_written(
    server: RedisServer, archive: RedisArchive, clients: list[Interruptible]
) -> None:
    """A compactor is at work when Redis loses its data, and the server begins again."""
    before = 0
    is_over = True
    with server.client() as client:
        while is_over:
            client.flushall()
            writer = await begun(archive, server.url, last=FIRST + 3)
            newer, compactor = RedisArchive(server.url), RedisArchive(server.url)
            interrupted = clients[-1]

            def begin_again(newer: RedisArchive = newer) -> None:
                newer.write_snapshot(FIRST + 3, b"newer")

            interrupted.interrupt(before, begin_again)
            compactor.write_snapshot(FIRST + 1, STATE)
            is_over = interrupted.is_over
            if is_over:
                assert FIRST + 3 == archive.read_snapshot()[0], before
                assert [] == client.keys(f"*piece:{FIRST + 1}:*"), before
            for each in (compactor, newer):
                each.close()
            await writer.close()
            before += 1
    assert before > 4
    assert FIRST + 1 == archive.read_snapshot()[0]


def test_an_older_snapshot_in_sqlite_leaves_a_newer_one_alone(tmp_path: Path) -> None:
    """A compactor at work when the server begins its journal again is late, not newer."""
    archive = SqliteArchive(tmp_path)
    archive.begin(b"nothing")
    archive.write_snapshot(FIRST + 5, b"newer")
    archive.write_snapshot(FIRST, b"older")
    assert (FIRST + 5, b"newer") == archive.read_snapshot()
    archive.close()
