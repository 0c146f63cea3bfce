"""A killed server comes back with everything that it acknowledged, and answers as before."""

import json
import re
import sqlite3
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from redis import Redis

from breadbox.model.types import PayloadReference
from breadbox.stores import open_store
from breadbox.stores.urls import redact
from breadbox.v1 import buffer_pb2, fragment_pb2, replay_buffer_service_pb2_grpc
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.eventually import eventually_sync
from support.redis_server import RedisServer
from support.served import reason_of
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

CALL_S = 20.0
ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED
DUPLICATE = fragment_pb2.ADMISSION_OUTCOME_DUPLICATE
STALE = fragment_pb2.ADMISSION_OUTCOME_STALE


class World:
    """A server that can be killed, its store, and a stub that finds it again."""

    def __init__(self, stack: ExitStack, store_url: str, log: Path, *arguments: str) -> None:
        self.server = ServerProcess("--store", store_url, *arguments, log=log)
        stack.enter_context(self.server)
        options = [("grpc.max_reconnect_backoff_ms", 200)]
        channel = stack.enter_context(grpc.insecure_channel(self.server.address, options))
        self.stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
        self.store = open_store(store_url)
        stack.callback(self.store.close)
        self.log = log

    def crash(self) -> None:
        """Kill the server and start it again."""
        self.server.kill()
        self.server.start()

    def lose(self, fragments: Sequence[fragment_pb2.FragmentMetadata]) -> None:
        """Take payloads out of the store behind the server's back."""
        self.store.delete_many([reference_of(fragment) for fragment in fragments])
        store_url = self.server.arguments[1]
        if store_url.startswith("file://"):
            root = Path(store_url.removeprefix("file://"))
            for fragment in fragments:
                for path in root.rglob(fragment.payload.payload_id):
                    path.unlink()

    def call(self, method: str, request: Message) -> Any:
        return getattr(self.stub, method)(request, timeout=CALL_S, wait_for_ready=True)

    def scrape(self) -> str:
        """What Prometheus would read."""
        with urllib.request.urlopen(self.server.metrics_url, timeout=CALL_S) as reply:
            return reply.read().decode()

    def start_session(self) -> None:
        self.call("StartSession", pb.StartSessionRequest(session_id="run"))

    def write(self, count: int = 1) -> list[PayloadReference]:
        return self.store.write_many([[memoryview(b"x" * 500)]] * count)

    def fragments(
        self, count: int, *, worker: str = "w", first: int = 0, version: int = 0
    ) -> list[fragment_pb2.FragmentMetadata]:
        return [
            fragment_pb2.FragmentMetadata(
                worker_id=worker,
                fragment_index=first + position,
                session_id="run",
                model_version_min=version,
                model_version_max=version,
                step_count=4,
                payload=wire_payload(reference),
            )
            for position, reference in enumerate(self.write(count))
        ]

    def append(self, fragments: Sequence[fragment_pb2.FragmentMetadata]) -> list[tuple[int, int]]:
        reply = self.call("AppendFragments", pb.AppendFragmentsRequest(fragments=fragments))
        return [(result.outcome, result.first_outcome) for result in reply.results]

    def fetch(self, request_id: str, count: int, **fields: Any) -> pb.FetchGrant:
        request = pb.FetchFragmentsRequest(request_id=request_id, fragment_count=count, **fields)
        return self.call("FetchFragments", request).grant

    def buffer(self, name: str = "default") -> buffer_pb2.Buffer:
        """A buffer without the time since it was last used, which goes on."""
        buffer: buffer_pb2.Buffer = self.call("GetBuffer", pb.GetBufferRequest(name=name)).buffer
        buffer.state.ClearField("idle_duration")
        return buffer

    def durable_buffer(self) -> buffer_pb2.Buffer:
        """A buffer without the counters of what changed nothing."""
        buffer = self.buffer()
        for name in [*buffer.state.counters]:
            if name.startswith(("fetches_", "fragments_")) and "discarded" not in name:
                del buffer.state.counters[name]
        return buffer


def wire_payload(reference: PayloadReference) -> fragment_pb2.PayloadReference:
    return fragment_pb2.PayloadReference(
        payload_id=reference.payload_id,
        size_bytes=reference.size_bytes,
        piece_size_bytes=reference.piece_size_bytes,
    )


@pytest.fixture(params=["file", "redis", "file-sync"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        if request.param == "redis":
            url = stack.enter_context(RedisServer()).url
        else:
            url = f"file://{tmp_path}/store"
        sync = ["--journal-sync"] if request.param == "file-sync" else []
        yield World(
            *(stack, url, tmp_path / "log"),
            *sync,
            *("--fragments-per-chunk", "2", "--uses-max", "2"),
        )


def test_a_killed_server_comes_back_with_the_same_books(world: World) -> None:
    world.start_session()
    world.append(world.fragments(9))
    world.append(world.fragments(4, worker="other"))
    weights = world.write()[0]
    world.call(
        "PublishModel",
        pb.PublishModelRequest(session_id="run", model_version=1, weights=wire_payload(weights)),
    )
    world.append(world.fragments(1, worker="late", version=1))
    kept = world.fetch("kept", 4)
    world.call(
        "ReleaseLease",
        pb.ReleaseLeaseRequest(lease_id=kept.lease.lease_id, mode=pb.RELEASE_MODE_CONSUMED),
    )
    world.fetch("open", 2)
    world.call(
        "CreateBuffer",
        pb.CreateBufferRequest(name="second", config=buffer_pb2.BufferConfig(staleness_max=9)),
    )
    before, second = world.durable_buffer(), world.buffer("second")
    watched = world.call("WatchModel", pb.WatchModelRequest())

    world.crash()

    assert before == world.durable_buffer()
    assert second == world.buffer("second")
    assert watched == world.call("WatchModel", pb.WatchModelRequest())
    assert (1, 2) == (before.state.lease_count, before.state.open_chunk_count)


def test_a_killed_server_answers_repeated_calls_as_before(world: World) -> None:
    world.start_session()
    fragments = world.fragments(8)
    world.append(fragments)
    granted = world.fetch("mine", 4)
    both = world.fetch("both", 4, rank=1, world_size=2)
    prepared = world.call("GetPreparedFragments", pb.GetPreparedFragmentsRequest(request_id="both"))
    consumed = world.fetch("consumed", 2)
    release = pb.ReleaseLeaseRequest(
        lease_id=consumed.lease.lease_id, mode=pb.RELEASE_MODE_CONSUMED
    )
    world.call("ReleaseLease", release)

    world.crash()

    assert [(DUPLICATE, ADMITTED)] * 8 == world.append(fragments)
    again = world.fetch("mine", 4)
    assert granted.lease.lease_id == again.lease.lease_id
    assert list(granted.fragments) == list(again.fragments)
    assert both.fragments == world.fetch("both", 4, rank=1, world_size=2).fragments
    assert prepared == world.call(
        "GetPreparedFragments", pb.GetPreparedFragmentsRequest(request_id="both")
    )
    world.call("ReleaseLease", release)
    with pytest.raises(grpc.RpcError) as caught:
        world.fetch("consumed", 2)
    assert "LEASE_NOT_FOUND" == reason_of(caught.value)
    world.call(
        "ReleaseLease",
        pb.ReleaseLeaseRequest(lease_id=granted.lease.lease_id, mode=pb.RELEASE_MODE_CONSUMED),
    )


@pytest.mark.long
def test_many_crashes_with_snapshots_between_them_lose_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        world = World(
            stack, redis.url, tmp_path / "log", "--snapshot-entries", "100", "--log-level", "debug"
        )
        world.start_session()
        appended = 0
        for _ in range(6):
            made = world.log.read_text().count("snapshot at turn")
            for _ in range(3):
                outcomes = world.append(world.fragments(60, first=appended))
                assert [(ADMITTED, 0)] * 60 == outcomes
                appended += 60
            eventually_sync(lambda: world.log.read_text().count("snapshot at turn") > made)  # noqa: B023
            before = world.durable_buffer()
            world.crash()
            assert before == world.durable_buffer()
        assert appended == world.buffer().state.chunk_count
        with redis.client() as client:
            assert client.xlen("breadbox:{journal}:turns") < 200


def test_limits_of_new_flags_are_taken_and_limits_changed_meanwhile_stand(tmp_path: Path) -> None:
    """Also where this server has a limit that the one before did not know."""

    def forget_a_limit() -> None:
        with closing(sqlite3.connect(tmp_path / "store" / "journal.sqlite")) as connection:
            select = "SELECT text FROM notes WHERE name = 'default_config'"
            noted = json.loads(connection.execute(select).fetchone()[0])
            del noted["config"]["workersMax"]
            with connection:
                update = "UPDATE notes SET text = ? WHERE name = 'default_config'"
                assert 1 == connection.execute(update, [json.dumps(noted)]).rowcount

    def limits(*arguments: str, update: int | None = None) -> tuple[int, int]:
        with ExitStack() as stack:
            world = World(stack, f"file://{tmp_path}/store", tmp_path / "log", *arguments)
            if update is not None:
                config = buffer_pb2.BufferConfig(staleness_max=update)
                world.call("UpdateBuffer", pb.UpdateBufferRequest(name="default", config=config))
            config = world.buffer().config
            world.server.stop()
            return config.uses_max, config.staleness_max

    assert (3, 7) == limits("--uses-max", "3", update=7)
    assert (3, 7) == limits("--uses-max", "3")
    forget_a_limit()
    assert (3, 7) == limits("--uses-max", "3")
    assert (4, 2) == limits("--uses-max", "4")


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


def test_a_server_that_was_replaced_stops_and_says_why(tmp_path: Path) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        old = World(stack, redis.url, tmp_path / "old.log")
        old.start_session()
        new = World(stack, redis.url, tmp_path / "new.log", "--take-over")
        with pytest.raises(grpc.RpcError):
            old.stub.EndSession(pb.EndSessionRequest(session_id="run"), timeout=CALL_S)
        assert 2 == old.server.wait()
        assert "run" == new.buffer().session_id
    assert "another server" in (tmp_path / "old.log").read_text()


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


def test_payloads_lost_while_the_server_was_down_are_dropped_and_counted(world: World) -> None:
    world.start_session()
    lost, kept = world.fragments(2), world.fragments(2, worker="other")
    world.append([*lost, *kept])
    world.server.kill()
    world.lose(lost)
    world.server.start()
    state = world.buffer().state
    assert 1 == state.chunk_count
    assert 1 == state.counters["chunks_evicted_payload_lost"]
    assert {"other"} == {item.metadata.worker_id for item in world.fetch("r", 2).fragments}


def test_one_lost_payload_among_many_is_found_before_anybody_is_served(world: World) -> None:
    world.start_session()
    many = world.fragments(2000)
    world.append(many)
    world.server.kill()
    world.lose(many[1:2])
    world.server.start()
    state = world.buffer().state
    assert (999, 1) == (state.chunk_count, state.counters["chunks_evicted_payload_lost"])


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


def test_payloads_that_no_book_knows_are_deleted_after_a_while(tmp_path: Path) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        client = stack.enter_context(redis.client())
        world = World(stack, redis.url, tmp_path / "log", "--unannounced-s", "1")
        world.start_session()
        world.append(world.fragments(3))
        (orphan,) = world.write()
        key = f"breadbox:{{{orphan.payload_id}}}:0"
        client.persist(key)
        world.crash()
        eventually_sync(lambda: not client.exists(key))
        assert 3 == len(client.keys("breadbox:{*}:0"))


def test_recovery_of_many_fragments_is_quick(tmp_path: Path) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        world = World(stack, redis.url, tmp_path / "log", "--capacity-chunks", "1000000")
        world.start_session()
        count = 20_000
        for first in range(0, count, 2000):
            world.append(world.fragments(2000, first=first))
        world.server.kill()
        started = time.perf_counter()
        world.server.start()
        elapsed_s = time.perf_counter() - started
        assert count == world.buffer().state.chunk_count
    told = re.findall(r"recovered .* in ([0-9.]+) s", (tmp_path / "log").read_text())
    # Generous for a busy machine: it is some tenths of a second on an idle one.
    assert float(told[-1]) < 20
    assert elapsed_s < 40


def reference_of(fragment: fragment_pb2.FragmentMetadata) -> PayloadReference:
    payload = fragment.payload
    return PayloadReference(payload.payload_id, payload.size_bytes, payload.piece_size_bytes)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


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
        assert 400 == len(list(directory.glob("payloads/*/*")))
        # The remedy: what the journal knew is kept until somebody asks for its end.
        for pattern in ("journal.sqlite*", "snapshot-*", "journal.end"):
            for path in directory.glob(pattern):
                path.unlink()
        world.server.start()
        assert 0 == world.buffer().state.chunk_count
        log = tmp_path / "log"
        eventually_sync(lambda: "payloads of other journals" in log.read_text())
        assert 400 == len(list(directory.glob("payloads/*/*")))
        world.server.kill()
        world.server.arguments = (*world.server.arguments, "--delete-orphans")
        world.server.start()
        eventually_sync(lambda: not list(directory.glob("payloads/*/*")))
