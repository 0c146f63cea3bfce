"""Places for a journal: one contract for both, and what only one of them can meet."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import redis

from breadbox.stores.keys import JOURNALS_KEY, piece_key
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.journal.storage import claims, sqlite
from breadbox_server.journal.storage.claims import Claim, Holder
from breadbox_server.journal.storage.interface import (
    BEGINNING,
    JournalArchive,
    JournalDamagedError,
    JournalHeldError,
    JournalLostError,
    JournalTakenError,
    JournalUnavailableError,
    JournalWriter,
)
from breadbox_server.journal.storage.redis_stream import (
    HALF,
    OWNER,
    PIECE_SIZE_BYTES,
    SNAPSHOT,
    TURNS,
    RedisArchive,
    RedisWriter,
)
from breadbox_server.journal.storage.sqlite import SqliteArchive
from simulation.faults import Fates, FaultPlan
from simulation.storage import SimulatedArchive, SimulatedJournal, SimulatedWriter
from support.eventually import eventually, eventually_sync
from support.journals import SqliteJournal, behind, claim_of, put_turn
from support.redis_server import RedisServer

FIRST = BEGINNING + 1
NOTES = {"one": "of now", "another": "of now, too"}


@dataclass
class Place:
    """One place for a journal, its archive open and claimed, and what happens behind its back."""

    archive: JournalArchive
    open_writer: Callable[[], JournalWriter]
    damage: Callable[[int], object]
    """Deletes a turn."""
    reopen: Callable[[], JournalArchive]
    """Opens another archive."""
    write_owner: Callable[[Claim], object]
    """Makes somebody else's claim the one that counts."""
    write_as_another: Callable[[int], object]
    """Writes a turn with the expected data, in another's epoch."""


def sqlite_place(stack: ExitStack, directory: Path, *, sync: bool) -> Place:
    journal = SqliteJournal(directory)
    archive = journal.archive
    stack.callback(journal.close)

    def lose_turn(sequence: int) -> None:
        with behind(directory) as connection:
            connection.execute("DELETE FROM turns WHERE sequence = ?", (sequence,))

    def write_owner(claim: Claim) -> None:
        words = (claim.to_text(), claim.holder.to_text())
        with behind(directory) as connection:
            connection.execute("UPDATE owner SET claim = ?, holder = ?", words)

    def write_as_another(sequence: int) -> None:
        put_turn(directory, sequence, b"turn %d" % sequence, epoch=1)

    return Place(
        archive,
        lambda: journal.open_writer(sync=sync),
        lose_turn,
        lambda: SqliteArchive(directory),
        write_owner,
        write_as_another,
    )


@pytest.fixture(scope="module")
def running_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_server(running_redis: RedisServer) -> RedisServer:
    """With nothing in it; shared by all who neither kill it nor have it write to the disk."""
    with running_redis.client() as client:
        client.flushall()
    return running_redis


def redis_place(stack: ExitStack, server: RedisServer) -> Place:
    client = stack.enter_context(server.client())
    archive = RedisArchive(server.url)
    stack.callback(archive.close)
    claim = claim_of(archive)

    def lose_turn(sequence: int) -> None:
        client.xdel(TURNS, f"{sequence}-0")

    def write_as_another(sequence: int) -> None:
        client.xadd(TURNS, {"d": b"turn %d" % sequence, "e": 1}, id=f"{sequence}-0")

    return Place(
        archive,
        lambda: RedisWriter(server.url, claim),
        lose_turn,
        lambda: RedisArchive(server.url),
        lambda other: client.set(OWNER, other.to_text()),
        write_as_another,
    )


def simulated_place() -> Place:
    """What simulations run on must keep the contract that they find faults against."""
    journal = SimulatedJournal(monotonic)
    archive = SimulatedArchive(journal)
    claim = claim_of(archive)
    fates = Fates(0, FaultPlan(delay_s=1e-6, slow_probability=0.0, journal_error_probability=0.0))

    def write_owner(other: Claim) -> None:
        journal.contents.owner = other

    def write_as_another(sequence: int) -> None:
        journal.contents.turns[sequence] = (b"turn %d" % sequence, 1)

    return Place(
        archive,
        lambda: SimulatedWriter(journal, claim, fates, 1),
        lambda sequence: journal.contents.turns.pop(sequence),
        lambda: SimulatedArchive(journal),
        write_owner,
        write_as_another,
    )


@pytest.fixture(params=["sqlite", "sqlite-sync", "redis", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        if request.param == "redis":
            yield redis_place(stack, request.getfixturevalue("redis_server"))
        elif request.param == "simulated":
            yield simulated_place()
        else:
            yield sqlite_place(stack, tmp_path, sync=request.param.endswith("sync"))


async def write(writer: JournalWriter, *sequences: int) -> None:
    for sequence in sequences:
        await writer.append(sequence, b"turn %d" % sequence)


def turns(place: Place, after: int = BEGINNING) -> list[tuple[int, bytes]]:
    return list(place.archive.read_turns(after))


def read_all(archive: JournalArchive) -> None:
    """Read what a server reads that starts."""
    archive.read_snapshot()
    list(archive.read_turns(BEGINNING))


def expected(*sequences: int) -> list[tuple[int, bytes]]:
    return [(sequence, b"turn %d" % sequence) for sequence in sequences]


async def test_a_new_place_is_not_begun(place: Place) -> None:
    assert not place.archive.is_begun()


async def test_turns_are_read_back_in_order(place: Place) -> None:
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, *range(FIRST, FIRST + 1200))
    assert (BEGINNING, b"nothing") == place.archive.read_snapshot()
    assert expected(*range(FIRST, FIRST + 1200)) == turns(place)
    assert expected(FIRST + 1199) == turns(place, after=FIRST + 1198)
    await writer.close()


async def test_repeating_the_last_append_changes_nothing(place: Place) -> None:
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST, FIRST + 1, FIRST + 1)
    assert expected(FIRST, FIRST + 1) == turns(place)
    await writer.close()


async def test_a_snapshot_replaces_the_one_before(place: Place) -> None:
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST, FIRST + 1, FIRST + 2)
    large = bytes(range(256)) * 12_345
    place.archive.write_snapshot(FIRST + 1, large)
    assert (FIRST + 1, large) == place.archive.read_snapshot()
    assert expected(FIRST + 2) == turns(place, after=FIRST + 1)
    await writer.close()


async def test_trimming_takes_old_turns_and_leaves_the_rest(place: Place) -> None:
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
async def test_large_turns_are_trimmed_a_few_at_a_time_so_that_the_loop_goes_on(
    tmp_path: Path, sync: bool
) -> None:
    journal = SqliteJournal(tmp_path)
    archive = journal.archive
    archive.begin(b"nothing")
    writer = journal.open_writer(sync=sync)
    last = FIRST + 9
    for sequence in range(FIRST, last + 1):
        await writer.append(sequence, b"x" * 2**20)
    archive.write_snapshot(last, b"state")
    portions = 1
    while await writer.trim(last):
        portions += 1
    assert 4 <= portions <= 6
    assert [] == list(archive.read_turns(last))
    with behind(tmp_path) as connection:
        (left,) = connection.execute("SELECT count(*) FROM turns").fetchone()
    assert 0 == left
    await writer.close()
    archive.close()


async def test_everything_may_be_trimmed_and_the_next_turn_still_follows(place: Place) -> None:
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST, FIRST + 1)
    place.archive.write_snapshot(FIRST + 1, b"state")
    await writer.trim(FIRST + 1)
    await write(writer, FIRST + 2)
    assert expected(FIRST + 2) == turns(place, after=FIRST + 1)
    await writer.close()


@pytest.mark.parametrize("lost", [FIRST, FIRST + 1])
async def test_a_missing_turn_is_found_and_the_remedy_told(place: Place, lost: int) -> None:
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST, FIRST + 1, FIRST + 2)
    place.damage(lost)
    with pytest.raises(JournalDamagedError, match=r"lacks turns .*to start empty"):
        turns(place)
    await writer.close()


async def test_a_journal_can_be_begun_again_at_any_sequence(place: Place) -> None:
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST, FIRST + 1)
    await writer.begin_again(FIRST + 1, b"state", NOTES)
    await write(writer, FIRST + 2)
    assert (FIRST + 1, b"state") == place.archive.read_snapshot()
    await writer.close()


async def test_a_journal_that_is_begun_again_has_its_notes_beside_it(place: Place) -> None:
    """Those of the next start: which store it is of, and the limits that it was started with."""
    place.archive.begin(b"nothing")
    place.archive.write_note("one", "of an older copy")
    place.archive.write_note("kept", "as it is")
    writer = place.open_writer()
    await writer.begin_again(FIRST, b"state", NOTES)
    names = [*NOTES, "kept"]
    assert NOTES | {"kept": "as it is"} == {name: place.archive.read_note(name) for name in names}
    await writer.close()


PAYLOADS = {PayloadId("a" * 32): b"one", PayloadId("b" * 32): b"two"}
KEYS = [piece_key(payload_id, 0) for payload_id in PAYLOADS]


async def test_payloads_are_written_with_a_turn_and_stay(redis_server: RedisServer) -> None:
    async with payload_writer(redis_server) as (writer, client):
        for _ in range(2):
            assert await writer.append(FIRST, b"turn", PAYLOADS)
            assert ([b"one", b"two"], [-1, -1]) == (
                client.mget(KEYS),
                [client.ttl(key) for key in KEYS],
            )
        # As protected from a server that was replaced as if they had been confirmed.
        epochs = client.hgetall(JOURNALS_KEY)
        assert {writer.claim.journal.encode(): str(writer.claim.epoch).encode()} == epochs


async def test_a_turn_that_is_repeated_writes_no_payload_that_was_deleted_since(
    redis_server: RedisServer,
) -> None:
    async with payload_writer(redis_server) as (writer, client):
        await writer.append(FIRST, b"turn", PAYLOADS)
        client.delete(*KEYS)
        await writer.append(FIRST, b"turn", PAYLOADS)
        assert [None, None] == client.mget(KEYS)


async def test_a_journal_that_is_begun_again_has_its_payloads_under_its_protection(
    redis_server: RedisServer,
) -> None:
    async with payload_writer(redis_server) as (writer, client):
        await writer.begin_again(FIRST, b"state", NOTES, PAYLOADS)
        assert list(PAYLOADS.values()) == client.mget(KEYS)
        epochs = client.hgetall(JOURNALS_KEY)
        assert {writer.claim.journal.encode(): str(writer.claim.epoch).encode()} == epochs


async def test_a_server_that_was_replaced_writes_no_payloads(redis_server: RedisServer) -> None:
    async with payload_writer(redis_server) as (writer, client):
        later = replace(writer.claim, epoch=writer.claim.epoch + 1)
        client.set(OWNER, later.to_text().replace(later.holder.token, "another"))
        with pytest.raises(JournalTakenError):
            await writer.append(FIRST, b"turn", PAYLOADS)
        assert [None, None] == client.mget(KEYS)


async def test_a_turn_that_does_not_follow_writes_no_payloads(redis_server: RedisServer) -> None:
    async with payload_writer(redis_server) as (writer, client):
        with pytest.raises(JournalLostError):
            await writer.append(FIRST + 1, b"turn", PAYLOADS)
        assert [None, None] == client.mget(KEYS)


async def test_a_full_redis_takes_a_turns_payloads_and_says_that_it_is_full(
    redis_server: RedisServer,
) -> None:
    async with payload_writer(redis_server) as (writer, client):
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) // 2)
        try:
            assert not await writer.append(FIRST, b"turn", PAYLOADS)
            assert await writer.append(FIRST + 1, b"a turn without any")
        finally:
            client.config_set("maxmemory", 0)
        assert [b"one", b"two"] == client.mget(KEYS)
        assert await writer.append(FIRST + 2, b"turn", {PayloadId("c" * 32): b"three"})


@asynccontextmanager
async def payload_writer(server: RedisServer) -> AsyncIterator[tuple[RedisWriter, redis.Redis]]:
    """Of a journal that was begun in the store."""
    archive = RedisArchive(server.url)
    claim = claim_of(archive)
    archive.begin(b"nothing")
    writer = RedisWriter(server.url, claim, carries_payloads=True)
    with server.client() as client:
        yield writer, client
    await writer.close()
    archive.close()


async def test_turns_survive_a_killed_redis_that_syncs() -> None:
    with RedisServer(is_durable=True) as server:
        archive = RedisArchive(server.url)
        claim = claim_of(archive)
        archive.begin(b"nothing")
        writer = RedisWriter(server.url, claim)
        await write(writer, FIRST)
        server.kill()
        with pytest.raises(JournalUnavailableError):
            await write(writer, FIRST + 1)
        server.start()
        await write(writer, FIRST + 1)
        assert expected(FIRST, FIRST + 1) == list(archive.read_turns(BEGINNING))
        await writer.close()
        archive.close()


async def test_an_emptied_redis_is_noticed_at_the_next_turn(redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        archive = RedisArchive(redis_server.url)
        writer = RedisWriter(redis_server.url, claim_of(archive))
        archive.begin(b"nothing")
        await write(writer, FIRST)
        client.flushall()
        with pytest.raises(JournalLostError):
            await write(writer, FIRST + 1)
        await writer.begin_again(FIRST, b"state", NOTES)
        await write(writer, FIRST + 1)
        assert expected(FIRST + 1) == list(archive.read_turns(FIRST))
        await writer.close()
        archive.close()


async def test_a_redis_that_lost_its_newest_turns_is_noticed(redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        archive = RedisArchive(redis_server.url)
        writer = RedisWriter(redis_server.url, claim_of(archive))
        archive.begin(b"nothing")
        await write(writer, FIRST, FIRST + 1)
        client.xdel(TURNS, f"{FIRST + 1}-0")
        with pytest.raises(JournalLostError):
            await write(writer, FIRST + 2)
        await writer.close()
        archive.close()


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ((TURNS,), "has no turns"),
        ((SNAPSHOT,), "has no snapshot"),
        ((TURNS, SNAPSHOT), "has no snapshot"),
        ((), f"lacks turns {FIRST + 1} to {FIRST + 1}"),
    ],
    ids=["turns", "snapshot", "both", "newest-turn"],
)
async def test_a_redis_journal_of_which_a_part_is_gone_is_damaged_and_not_empty(
    redis_server: RedisServer, lost: tuple[str, ...], told: str
) -> None:
    with redis_server.client() as client:
        archive = RedisArchive(redis_server.url)
        writer = RedisWriter(redis_server.url, claim_of(archive))
        archive.begin(b"nothing")
        archive.write_note("store", "this one")
        await write(writer, FIRST, FIRST + 1)
        if lost:
            client.delete(*lost)
        else:
            client.xdel(TURNS, f"{FIRST + 1}-0")
        assert archive.is_begun()
        with pytest.raises(JournalDamagedError, match=f"{told}; .* to start empty"):
            read_all(archive)
        await writer.close()
        archive.close()


async def test_the_server_that_wrote_before_is_refused_when_another_takes_over(
    redis_server: RedisServer,
) -> None:
    archive = RedisArchive(redis_server.url)
    old = RedisWriter(redis_server.url, claim_of(archive))
    archive.begin(b"nothing")
    await write(old, FIRST)
    new = RedisWriter(redis_server.url, claim_of(archive, displaced=old.claim.holder.token))
    with pytest.raises(JournalTakenError):
        await write(old, FIRST + 1)
    with pytest.raises(JournalTakenError):
        await old.begin_again(FIRST, b"state", NOTES)
    await write(new, FIRST + 1)
    await old.close()
    await new.close()
    archive.close()


async def test_of_two_servers_behind_a_redis_that_came_back_the_later_goes_on(
    redis_server: RedisServer,
) -> None:
    """As it was before that claim: the earlier one cannot keep it out, however late it speaks."""
    with redis_server.client() as client:
        archive = RedisArchive(redis_server.url)
        old = RedisWriter(redis_server.url, claim_of(archive))
        archive.begin(b"nothing")
        await write(old, FIRST)
        owner = client.get(OWNER)
        await write(old, FIRST + 1)
        # Epochs are milliseconds: two claims of one would be no earlier and later.
        await eventually(lambda: claims.epoch_after() > old.claim.epoch + 2)
        new = RedisWriter(redis_server.url, claim_of(archive, displaced=old.claim.holder.token))
        await write(new, FIRST + 2)
        client.xdel(TURNS, f"{FIRST + 1}-0", f"{FIRST + 2}-0")
        client.set(OWNER, owner)
        with pytest.raises(JournalLostError):
            await old.renew(FIRST + 1)
        await old.begin_again(FIRST + 1, b"older state", NOTES)
        await write(old, FIRST + 2)
        await write(old, FIRST + 3)
        with pytest.raises(JournalLostError):
            await new.renew(FIRST + 2)
        await new.begin_again(FIRST + 2, b"state", NOTES)
        with pytest.raises(JournalTakenError):
            await old.renew(FIRST + 1)
        with pytest.raises(JournalTakenError):
            await old.begin_again(FIRST + 1, b"older state", NOTES)
        assert (FIRST + 2, b"state") == archive.read_snapshot()
        assert [] == list(archive.read_turns(FIRST + 2))
        await old.close()
        await new.close()
        archive.close()


async def test_a_renewed_claim_tells_which_start_of_redis_has_it() -> None:
    with RedisServer(is_durable=True) as server:
        archive = RedisArchive(server.url)
        writer = RedisWriter(server.url, claim_of(archive))
        archive.begin(b"nothing")
        first = await writer.renew(BEGINNING)
        assert first == await writer.renew(BEGINNING)
        server.kill()
        server.start()
        # Some releases of redis-py find out by use that a connection is gone.
        with suppress(JournalUnavailableError):
            await writer.renew(BEGINNING)
        assert await writer.renew(BEGINNING) not in ("", first)
        await writer.close()
        archive.close()


class KilledError(Exception):
    """Stands for the end of a process."""


@pytest.mark.parametrize("begins_again", [False, True])
async def test_what_a_killed_writer_left_of_a_snapshot_goes_with_the_next(
    begins_again: bool, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large buffer it may be hundreds of megabytes, and nothing else ever deletes it."""
    large = b"x" * (3 * PIECE_SIZE_BYTES)
    with redis_server.client() as client:
        archive = RedisArchive(redis_server.url)
        writer = RedisWriter(redis_server.url, claim_of(archive))
        archive.begin(b"nothing")
        await write(writer, FIRST, FIRST + 1, FIRST + 2)
        killed = RedisArchive(redis_server.url)
        evaluate = redis.Redis.eval
        for sequence in (FIRST, FIRST + 2):
            left_commands = iter(range(3))

            def dying(*arguments: Any, left_commands: Iterator[int] = left_commands) -> Any:
                if next(left_commands, None) is None:
                    raise KilledError
                return evaluate(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(redis.Redis, "eval", dying)
                with pytest.raises(KilledError):
                    killed.write_snapshot(sequence, large)
        left = len(client.keys("breadbox:{journal}:piece:*"))
        if begins_again:
            await writer.begin_again(FIRST + 2, b"state", NOTES)
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


async def test_a_full_redis_still_takes_turns_and_snapshots() -> None:
    """Otherwise nothing could be released, and so nothing be freed."""
    with RedisServer(memory_bytes_max=4 * 2**20) as server, server.client() as client:
        archive = RedisArchive(server.url)
        writer = RedisWriter(server.url, claim_of(archive))
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


def empty(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


async def test_a_deleted_sqlite_journal_is_noticed(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    journal.archive.begin(b"nothing")
    writer = journal.open_writer(sync=False)
    await write(writer, FIRST)
    empty(tmp_path)
    with pytest.raises(JournalLostError):
        await write(writer, FIRST + 1)
    await writer.begin_again(FIRST, b"state", NOTES)
    await write(writer, FIRST + 1)
    await writer.close()
    journal.close()
    archive = SqliteArchive(tmp_path)
    assert NOTES == {name: archive.read_note(name) for name in NOTES}
    assert (FIRST, b"state") == archive.read_snapshot()
    assert expected(FIRST + 1) == list(archive.read_turns(FIRST))
    archive.close()


READ_AND_CLOSE = """
import sys
from pathlib import Path
from breadbox_server.journal.storage.sqlite import SqliteArchive
from breadbox_server.journal.storage.interface import BEGINNING

archive = SqliteArchive(Path(sys.argv[1]))
print([sequence for sequence, _ in archive.read_turns(BEGINNING)])
archive.close()
"""


def turns_seen_elsewhere(directory: Path) -> str:
    """The turns that another process sees, such as the compactor; it closes the database then."""
    command = [sys.executable, "-c", READ_AND_CLOSE, str(directory)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


async def test_turns_are_seen_by_other_processes_after_one_of_these_closed_the_journal(
    tmp_path: Path,
) -> None:
    """Two connections of one process, as a server has them: neither may give up the other's locks.

    Else the other process takes itself for the last one, and deletes the write-ahead log into which
    the server goes on writing.
    """
    journal = SqliteJournal(tmp_path)
    journal.archive.begin(b"nothing")
    writer = journal.open_writer(sync=False)
    seen = []
    for sequence in (FIRST, FIRST + 1, FIRST + 2):
        await write(writer, sequence)
        SqliteArchive(tmp_path).close()
        seen.append(turns_seen_elsewhere(tmp_path))
    await writer.close()
    journal.close()
    assert [str([*range(FIRST, FIRST + count)]) for count in (1, 2, 3)] == seen


async def test_a_sqlite_journal_is_not_begun_again_under_a_trim(tmp_path: Path) -> None:
    """The trim would find its connection closed, and that would end the server."""
    journal = SqliteJournal(tmp_path)
    journal.archive.begin(b"nothing")
    writer = journal.open_writer(sync=True)
    await write(writer, FIRST, FIRST + 1)
    with behind(tmp_path) as other:
        other.execute("BEGIN IMMEDIATE")  # The trim waits for the lock that this holds.
        async with asyncio.TaskGroup() as group:
            trimming = group.create_task(writer.trim(FIRST))
            group.create_task(writer.begin_again(FIRST + 1, b"state", NOTES))
            for _ in range(20):
                await asyncio.sleep(0)
            other.rollback()
    assert trimming.result() is False
    await write(writer, FIRST + 2)
    await writer.close()
    journal.close()
    archive = SqliteArchive(tmp_path)
    assert (FIRST + 1, b"state") == archive.read_snapshot()
    assert expected(FIRST + 2) == list(archive.read_turns(FIRST + 1))
    archive.close()


def test_a_file_that_is_no_journal_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"this is not SQLite" * 100)
    with pytest.raises(JournalDamagedError, match="to start empty"):
        SqliteArchive(tmp_path)


# Whose the journal is -----------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which files are open")
def test_a_file_that_is_no_journal_is_closed_again(tmp_path: Path) -> None:
    path = tmp_path / sqlite.FILE_NAME
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(JournalDamagedError):
        SqliteArchive(tmp_path)
    opened = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert path not in opened


async def test_a_journal_of_a_server_that_lives_is_held(place: Place) -> None:
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    other = place.reopen()
    with pytest.raises(JournalHeldError) as caught:
        claim_of(other)
    await write(writer, FIRST)
    assert writer.claim.holder == caught.value.holder
    assert f"process {os.getpid()}" in str(caught.value)
    await writer.close()
    other.close()


async def test_a_claim_that_was_given_up_leaves_the_next_server_nothing_to_wait_for(
    place: Place,
) -> None:
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    first = writer.claim
    await writer.close()
    place.archive.close()
    other = place.reopen()
    second = claim_of(other)
    assert (first.journal, True) == (second.journal, first.epoch < second.epoch)
    other.close()


async def test_a_turn_of_our_sequence_that_somebody_else_wrote_is_not_taken_for_ours(
    place: Place,
) -> None:
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST)
    place.write_as_another(FIRST + 1)
    with pytest.raises(JournalLostError):
        await write(writer, FIRST + 1)
    await writer.close()


async def test_another_turn_of_the_same_sequence_is_no_repeat(place: Place) -> None:
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST)
    with pytest.raises(JournalLostError):
        await writer.append(FIRST, b"something else")
    await writer.close()


@pytest.mark.parametrize("call", ["append", "renew"])
async def test_an_older_epoch_is_lost_and_a_newer_one_is_taken(place: Place, call: str) -> None:
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST)

    async def use() -> None:
        if call == "append":
            await write(writer, FIRST + 1)
        else:
            await writer.renew(FIRST)

    await writer.renew(FIRST)
    earlier = Claim(writer.claim.journal, writer.claim.epoch - 1, Holder("earlier"))
    place.write_owner(earlier)
    with pytest.raises(JournalLostError):
        await use()
    await writer.begin_again(FIRST + 1, b"state", NOTES)
    assert writer.claim.epoch > earlier.epoch + 1
    await write(writer, FIRST + 2)
    place.write_owner(Claim("journal", writer.claim.epoch + 1, Holder("later")))
    with pytest.raises(JournalTakenError):
        await use()
    with pytest.raises(JournalTakenError):
        await writer.begin_again(FIRST + 2, b"state", NOTES)
    assert (FIRST + 1, b"state") == place.archive.read_snapshot()
    await writer.close()


async def test_a_journal_that_lost_its_newest_turns_is_noticed_by_who_writes_nothing(
    place: Place,
) -> None:
    place.archive.begin(b"nothing")
    writer = place.open_writer()
    await write(writer, FIRST, FIRST + 1)
    await writer.renew(FIRST + 1)
    place.damage(FIRST + 1)
    with pytest.raises(JournalLostError):
        await writer.renew(FIRST + 1)
    await writer.close()


async def test_a_server_that_lost_its_claim_neither_writes_snapshots_nor_trims(
    redis_server: RedisServer,
) -> None:
    old = RedisArchive(redis_server.url)
    claim = claim_of(old)
    old.begin(b"nothing")
    writer = RedisWriter(redis_server.url, claim)
    await write(writer, *range(FIRST, FIRST + 400))
    old.read_snapshot()
    new = RedisArchive(redis_server.url)
    claim_of(new, displaced=claim.holder.token)
    for act in (
        lambda: old.begin(b"empty"),
        lambda: old.write_snapshot(FIRST + 300, b"state"),
        lambda: old.write_note("name", "text"),
    ):
        with pytest.raises(JournalTakenError):
            act()
    assert not await writer.trim(FIRST + 300)
    assert (BEGINNING, b"nothing") == new.read_snapshot()
    assert expected(*range(FIRST, FIRST + 400)) == list(new.read_turns(BEGINNING))
    await writer.close()
    old.close()
    new.close()


SAY_HOLDER = """
from breadbox_server.journal.storage.claims import Holder
print(Holder.of_this_process().to_text(), flush=True)
input()
"""


def test_a_holder_whose_process_ended_is_known_to_be_dead() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SAY_HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    holder, here = Holder.from_text(child.stdout.readline()), Holder.of_this_process()
    lives = holder.is_dead()
    child.kill()
    eventually_sync(holder.is_dead, "a process nobody has waited for counting as dead")
    child.communicate()
    assert not lives
    assert holder.is_dead()
    assert not here.is_dead()
    assert replace(here, started="1").is_dead()
    assert not replace(holder, boot="another machine").is_dead()
    assert holder == Holder.from_text(holder.to_text())


def test_a_holder_that_proc_does_not_show_is_taken_to_live(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Holder.of_this_process()

    def hide(_: int) -> tuple[str, str]:
        raise FileNotFoundError

    monkeypatch.setattr(Holder, "of_this_process", lambda: here)
    monkeypatch.setattr(claims, "_state_and_start", hide)
    assert not here.is_dead()
