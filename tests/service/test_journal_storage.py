"""Places for a journal: one contract for both, and what only one of them can meet."""

import asyncio
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from breadbox_server.journal.redis_stream import (
    HALF,
    OWNER,
    PIECE_SIZE_BYTES,
    TURNS,
    RedisArchive,
    RedisWriter,
)
from breadbox_server.journal.sqlite import SqliteArchive, SqliteWriter
from breadbox_server.journal.storage import (
    BEGINNING,
    JournalDamagedError,
    JournalLostError,
    JournalTakenError,
    JournalUnavailableError,
)
from support.eventually import eventually
from support.redis_server import RedisServer

FIRST = BEGINNING + 1


class Place:
    """One place for a journal, its archive open."""

    def __init__(self, archive, open_writer: Callable, damage: Callable) -> None:
        self.archive = archive
        self.open_writer = open_writer
        self.damage = damage


def sqlite_place(stack: ExitStack, directory: Path, *, sync: bool) -> Place:
    archive = SqliteArchive(directory)
    stack.callback(archive.close)

    def lose_turn(sequence: int) -> None:
        with archive._connection as connection:
            connection.execute("DELETE FROM turns WHERE sequence = ?", (sequence,))

    return Place(archive, lambda: SqliteWriter(directory, sync=sync), lose_turn)


def redis_place(stack: ExitStack) -> Place:
    server = stack.enter_context(RedisServer())
    client = stack.enter_context(server.client())
    archive = RedisArchive(server.url)
    stack.callback(archive.close)
    token = archive.take()

    def lose_turn(sequence: int) -> None:
        client.xdel(TURNS, f"{sequence}-0")

    return Place(archive, lambda: RedisWriter(server.url, token), lose_turn)


@pytest.fixture(params=["sqlite", "sqlite-sync", "redis"])
def place(request, tmp_path):
    with ExitStack() as stack:
        if request.param == "redis":
            yield redis_place(stack)
        else:
            yield sqlite_place(stack, tmp_path, sync=request.param.endswith("sync"))


async def write(writer, *sequences: int) -> None:
    for sequence in sequences:
        await writer.append(sequence, b"turn %d" % sequence)


def turns(place: Place, after: int = BEGINNING) -> list[tuple[int, bytes]]:
    return list(place.archive.read_turns(after))


def expected(*sequences: int) -> list[tuple[int, bytes]]:
    return [(sequence, b"turn %d" % sequence) for sequence in sequences]


async def test_a_new_place_is_not_begun(place):
    assert not place.archive.is_begun()


async def test_turns_are_read_back_in_order(place):
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, *range(FIRST, FIRST + 1200))
    assert (BEGINNING, b"nothing") == place.archive.read_snapshot()
    assert expected(*range(FIRST, FIRST + 1200)) == turns(place)
    assert expected(FIRST + 1199) == turns(place, after=FIRST + 1198)
    await writer.close()


async def test_repeating_the_last_append_changes_nothing(place):
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST, FIRST + 1, FIRST + 1)
    assert expected(FIRST, FIRST + 1) == turns(place)
    await writer.close()


async def test_a_snapshot_replaces_the_one_before(place):
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST, FIRST + 1, FIRST + 2)
    large = bytes(range(256)) * 12_345
    place.archive.write_snapshot(FIRST + 1, large)
    assert (FIRST + 1, large) == place.archive.read_snapshot()
    assert expected(FIRST + 2) == turns(place, after=FIRST + 1)
    await writer.close()


async def test_trimming_takes_old_turns_and_leaves_the_rest(place):
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    last = FIRST + 2999
    await write(writer, *range(FIRST, last + 1))
    place.archive.write_snapshot(last - 10, b"state")
    for _ in range(20):
        await writer.trim(last - 10)
    assert expected(*range(last - 9, last + 1)) == turns(place, after=last - 10)
    await write(writer, last + 1)
    assert expected(last + 1) == turns(place, after=last)
    await writer.close()


@pytest.mark.parametrize("sync", [False, True])
async def test_large_turns_are_trimmed_a_few_at_a_time_so_that_the_loop_goes_on(tmp_path, sync):
    archive = SqliteArchive(tmp_path)
    archive.begin(b"nothing")
    writer = SqliteWriter(tmp_path, sync=sync)
    last = FIRST + 9
    for sequence in range(FIRST, last + 1):
        await writer.append(sequence, b"x" * 2**20)
    archive.write_snapshot(last, b"state")
    portions = 1
    while await writer.trim(last):
        portions += 1
    assert 4 <= portions <= 6
    assert [] == list(archive.read_turns(last))
    (left,) = archive._connection.execute("SELECT count(*) FROM turns").fetchone()
    assert 0 == left
    await writer.close()
    archive.close()


async def test_everything_may_be_trimmed_and_the_next_turn_still_follows(place):
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST, FIRST + 1)
    place.archive.write_snapshot(FIRST + 1, b"state")
    await writer.trim(FIRST + 1)
    await write(writer, FIRST + 2)
    assert expected(FIRST + 2) == turns(place, after=FIRST + 1)
    await writer.close()


@pytest.mark.parametrize("lost", [FIRST, FIRST + 1])
async def test_a_missing_turn_is_found_and_the_remedy_told(place, lost):
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST, FIRST + 1, FIRST + 2)
    place.damage(lost)
    with pytest.raises(JournalDamagedError, match=r"lacks turns .*to start empty"):
        turns(place)
    await writer.close()


async def test_a_journal_can_be_begun_again_at_any_sequence(place):
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST, FIRST + 1)
    await writer.begin_again(FIRST + 1, b"state")
    await write(writer, FIRST + 2)
    assert (FIRST + 1, b"state") == place.archive.read_snapshot()
    await writer.close()


async def test_turns_survive_a_killed_redis_that_syncs():
    with RedisServer(is_durable=True) as server:
        archive = RedisArchive(server.url)
        token = archive.take()
        archive.begin(b"nothing")
        writer = RedisWriter(server.url, token)
        await write(writer, FIRST)
        server.kill()
        with pytest.raises(JournalUnavailableError):
            await write(writer, FIRST + 1)
        server.start()
        await write(writer, FIRST + 1)
        assert expected(FIRST, FIRST + 1) == list(archive.read_turns(BEGINNING))
        await writer.close()
        archive.close()


async def test_an_emptied_redis_is_noticed_at_the_next_turn():
    with RedisServer() as server, server.client() as client:
        archive = RedisArchive(server.url)
        writer = RedisWriter(server.url, archive.take())
        archive.begin(b"nothing")
        await write(writer, FIRST)
        client.flushall()
        with pytest.raises(JournalLostError):
            await write(writer, FIRST + 1)
        await writer.begin_again(FIRST, b"state")
        await write(writer, FIRST + 1)
        assert expected(FIRST + 1) == list(archive.read_turns(FIRST))
        await writer.close()
        archive.close()


async def test_a_redis_that_lost_its_newest_turns_is_noticed():
    with RedisServer() as server, server.client() as client:
        archive = RedisArchive(server.url)
        writer = RedisWriter(server.url, archive.take())
        archive.begin(b"nothing")
        await write(writer, FIRST, FIRST + 1)
        client.xdel(TURNS, f"{FIRST + 1}-0")
        with pytest.raises(JournalLostError):
            await write(writer, FIRST + 2)
        await writer.close()
        archive.close()


async def test_the_server_that_wrote_before_is_refused_when_another_takes_over():
    with RedisServer() as server:
        archive = RedisArchive(server.url)
        old = RedisWriter(server.url, archive.take())
        archive.begin(b"nothing")
        await write(old, FIRST)
        new = RedisWriter(server.url, archive.take())
        with pytest.raises(JournalTakenError):
            await write(old, FIRST + 1)
        with pytest.raises(JournalTakenError):
            await old.begin_again(FIRST, b"state")
        await write(new, FIRST + 1)
        await old.close()
        await new.close()
        archive.close()


class KilledError(Exception):
    """Stands for the end of a process."""


class KilledAfter:
    """A client whose process ends after some commands."""

    def __init__(self, client, commands: int) -> None:
        self._client = client
        self._left = commands

    def __getattr__(self, name):
        return getattr(self._client, name)

    def eval(self, *arguments):
        self._left -= 1
        if self._left < 0:
            raise KilledError
        return self._client.eval(*arguments)


@pytest.mark.parametrize("begins_again", [False, True])
async def test_what_a_killed_writer_left_of_a_snapshot_goes_with_the_next(begins_again):
    """Of a large buffer it may be hundreds of megabytes, and nothing else ever deletes it."""
    large = b"x" * (3 * PIECE_SIZE_BYTES)
    with RedisServer() as server, server.client() as client:
        archive = RedisArchive(server.url)
        writer = RedisWriter(server.url, archive.take())
        archive.begin(b"nothing")
        await write(writer, FIRST, FIRST + 1, FIRST + 2)
        killed = RedisArchive(server.url)
        for sequence in (FIRST, FIRST + 2):
            alive, killed._client = killed._client, KilledAfter(killed._client, 3)
            with pytest.raises(KilledError):
                killed.write_snapshot(sequence, large)
            killed._client = alive
        left = len(client.keys("breadbox:{journal}:piece:*"))
        if begins_again:
            await writer.begin_again(FIRST + 2, b"state")
        else:
            archive.write_snapshot(FIRST + 2, b"state")
        assert (FIRST + 2, b"state") == archive.read_snapshot()
        assert 5 == left
        assert [b"breadbox:{journal}:piece:%d:0" % (FIRST + 2)] == client.keys(
            "breadbox:{journal}:piece:*"
        )
        assert not client.exists(HALF)
        await writer.close()
        killed.close()
        archive.close()


async def test_a_full_redis_still_takes_turns_and_snapshots():
    """Otherwise nothing could be released, and so nothing be freed."""
    with RedisServer(memory_bytes_max=4 * 2**20) as server, server.client() as client:
        archive = RedisArchive(server.url)
        writer = RedisWriter(server.url, archive.take())
        archive.begin(b"nothing")
        while client.info("memory")["used_memory"] < 4 * 2**20:
            client.eval(
                "redis.call('DEL', 'x') redis.call('APPEND', 'fill', ARGV[1])", 0, b"x" * 100_000
            )
        await write(writer, FIRST, FIRST + 1)
        archive.write_snapshot(FIRST, b"state" * 1000)
        await writer.trim(FIRST)
        assert (FIRST, b"state" * 1000) == archive.read_snapshot()
        assert expected(FIRST + 1) == list(archive.read_turns(FIRST))
        assert client.exists(OWNER)
        await writer.close()
        archive.close()


async def test_a_deleted_sqlite_journal_is_noticed(tmp_path):
    archive = SqliteArchive(tmp_path)
    archive.begin(b"nothing")
    archive.close()
    writer = SqliteWriter(tmp_path, sync=False)
    await write(writer, FIRST)
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(JournalLostError):
        await write(writer, FIRST + 1)
    await writer.begin_again(FIRST, b"state")
    await write(writer, FIRST + 1)
    await writer.close()
    archive = SqliteArchive(tmp_path)
    assert (FIRST, b"state") == archive.read_snapshot()
    assert expected(FIRST + 1) == list(archive.read_turns(FIRST))
    archive.close()


class HeldConnection:
    """A connection that is held up in the middle of a trim."""

    def __init__(self, connection) -> None:
        self._connection = connection
        self.trims = threading.Event()
        self.may_trim = threading.Event()

    def __enter__(self):
        return self._connection.__enter__()

    def __exit__(self, *error):
        return self._connection.__exit__(*error)

    def execute(self, statement, *arguments):
        if statement.startswith("DELETE"):
            self.trims.set()
            assert self.may_trim.wait(60.0)
        return self._connection.execute(statement, *arguments)

    def close(self) -> None:
        self._connection.close()


async def test_a_sqlite_journal_is_not_begun_again_under_a_trim(tmp_path):
    """The trim would find its connection closed, and that would end the server."""
    archive = SqliteArchive(tmp_path)
    archive.begin(b"nothing")
    archive.close()
    writer = SqliteWriter(tmp_path, sync=True)
    await write(writer, FIRST, FIRST + 1)
    held = writer._connection = HeldConnection(writer._connection)
    async with asyncio.TaskGroup() as group:
        trimming = group.create_task(writer.trim(FIRST))
        await eventually(held.trims.is_set)
        beginning = group.create_task(writer.begin_again(FIRST + 1, b"state"))
        await eventually(lambda: beginning.done() or writer._thread._work_queue.qsize() == 1)
        held.may_trim.set()
    assert trimming.result() is False
    await write(writer, FIRST + 2)
    await writer.close()
    archive = SqliteArchive(tmp_path)
    assert (FIRST + 1, b"state") == archive.read_snapshot()
    assert expected(FIRST + 2) == list(archive.read_turns(FIRST + 1))
    archive.close()


def test_a_file_that_is_no_journal_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "journal.sqlite").write_bytes(b"this is not SQLite" * 100)
    with pytest.raises(JournalDamagedError, match="to start empty"):
        SqliteArchive(tmp_path)
