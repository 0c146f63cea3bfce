"""A journal of which a part is lost or damaged is begun again, or refused with the remedy."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis import Redis

from breadbox.stores.files import FileCustodian
from breadbox.stores.urls import redact
from breadbox.v1 import buffer_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.eventually import eventually_sync
from support.killed_server import ADMITTED, World
from support.redis_server import RedisServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


def test_a_journal_of_another_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        world = World(stack, redis.url, tmp_path / "log")
        world.start_session()
        world.server.kill()
        with redis.client() as client:
            ((entry_id, _),) = client.xrevrange("breadbox:{journal}:turns", count=1)
            sequence = int(entry_id.split(b"-")[0]) + 1
            client.xadd("breadbox:{journal}:turns", {"d": b"[99,[]]"}, id=f"{sequence}-0")
            turns = client.xlen("breadbox:{journal}:turns")
        with pytest.raises(AssertionError, match="did not start") as caught:
            world.server.start()
        with redis.client() as client:
            assert turns == client.xlen("breadbox:{journal}:turns")
    text = str(caught.value).splitlines()[-1]
    assert "another version" in text
    assert "start empty" in text


def test_an_emptied_redis_costs_its_fragments_and_nothing_else(tmp_path: Path) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        world = World(stack, redis.url, tmp_path / "log")
        world.start_session()
        world.append(world.fragments(10))
        changed = buffer_pb2.BufferConfig(staleness_max=7)
        world.call("UpdateBuffer", pb.UpdateBufferRequest(name="default", config=changed))
        with redis.client() as client:
            client.flushall()
        eventually_sync(lambda: world.buffer().state.chunk_count == 0)
        assert [(ADMITTED, 0)] * 5 == world.append(world.fragments(5, first=10))
        before = world.durable_buffer()
        assert 10 == before.state.counters["chunks_evicted_payload_lost"]
        with redis.client() as client:
            assert redact(redis.url).encode() == client.hget("breadbox:{journal}:notes", "store")
        world.crash()
        assert before == world.durable_buffer()
        assert 7 == before.config.staleness_max
        assert 5 == len(world.fetch("r", 5).fragments)


def _delete_head(client: Redis) -> None:
    client.delete("breadbox:{journal}:snapshot")


def _trim_stream(client: Redis) -> None:
    client.xtrim("breadbox:{journal}:turns", maxlen=1, approximate=False)


def _delete_piece(client: Redis) -> None:
    (piece,) = client.keys("breadbox:{journal}:piece:*")
    client.delete(piece)


@pytest.mark.parametrize("damage", [_delete_head, _trim_stream, _delete_piece])
def test_a_journal_that_could_not_be_read_back_is_begun_again_from_memory(
    damage: Callable[[Redis], None], tmp_path: Path
) -> None:
    """The server went on acknowledging into it, and could not be started again."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        world = World(
            *(stack, redis.url, tmp_path / "log", "--snapshot-entries", "100"),
            *("--metrics-listen", "127.0.0.1:0"),
        )
        world.start_session()
        world.append(world.fragments(50))
        with redis.client() as client:
            damage(client)
        # Enough for the compactor to look as well; what it meets is not read by appends.
        world.append(world.fragments(100, first=50))
        eventually_sync(
            lambda: "breadbox_journal_begun_again_total 1.0" in world.scrape(), within_s=60
        )
        world.append(world.fragments(10, first=150))
        before = world.durable_buffer()
        world.crash()
        assert before == world.durable_buffer()
        assert 160 == before.state.chunk_count
    assert "beginning it again from memory" in world.log.read_text()


def test_a_sqlite_journal_without_its_snapshot_is_begun_again_from_memory(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(stack, f"file://{tmp_path}/store", tmp_path / "log")
        world.start_session()
        world.append(world.fragments(50))
        for snapshot in (tmp_path / "store").glob("snapshot-*"):
            snapshot.unlink()
        eventually_sync(lambda: "beginning it again from memory" in world.log.read_text())
        world.append(world.fragments(10, first=50))
        before = world.durable_buffer()
        world.crash()
        assert before == world.durable_buffer()
        assert 60 == before.state.chunk_count


@pytest.mark.parametrize("name", ["turns", "snapshot", "*s*"], ids=["turns", "snapshot", "both"])
def test_a_redis_journal_of_which_a_part_is_gone_is_refused_and_costs_no_payload(
    tmp_path: Path, name: str
) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        client = stack.enter_context(redis.client())
        world = World(stack, redis.url, tmp_path / "log", "--unannounced-s", "1")
        world.start_session()
        world.append(world.fragments(8))
        world.server.kill()
        lost = [key for key in client.keys(f"breadbox:{{journal}}:{name}") if b"notes" not in key]
        client.delete(*lost)
        for _ in range(2):
            with pytest.raises(AssertionError, match="did not start") as caught:
                world.server.start()
            assert "to start empty" in str(caught.value).splitlines()[-1]
        assert 8 == len(client.keys("breadbox:{*}:0"))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def payload_count(directory: Path) -> int:
    async def count() -> int:
        custodian = FileCustodian(str(directory), unannounced_s=60.0)
        return len([each async for each in custodian.confirmed()])

    return asyncio.run(count())


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("snapshot-*", Path.unlink),
        ("snapshot-*", flip_a_bit),
        ("journal.sqlite-wal", Path.unlink),
        ("journal.sqlite-wal", flip_a_bit),
    ],
)
def test_a_damaged_journal_is_refused_with_the_remedy_and_costs_no_payload(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    directory = tmp_path / "store"
    with ExitStack() as stack:
        world = World(stack, f"file://{directory}", tmp_path / "log", "--unannounced-s", "1")
        world.start_session()
        for first in range(0, 400, 8):
            world.append(world.fragments(8, first=first))
        world.server.kill()
        damage(next(directory.glob(name)))
        for _ in range(2):
            with pytest.raises(AssertionError, match="did not start") as caught:
                world.server.start()
            assert "start empty" in str(caught.value).splitlines()[-1]
        assert 400 == payload_count(directory)
        # The remedy: what the journal knew is kept until somebody asks for its end.
        for pattern in ("journal.sqlite*", "snapshot-*", "journal.end"):
            for path in directory.glob(pattern):
                path.unlink()
        world.server.start()
        assert 0 == world.buffer().state.chunk_count
        log = tmp_path / "log"
        eventually_sync(lambda: "payloads of other journals" in log.read_text())
        assert 400 == payload_count(directory)
        world.server.kill()
        world.server.arguments = (*world.server.arguments, "--delete-orphans")
        world.server.start()
        eventually_sync(lambda: not payload_count(directory))
