"""A killed server comes back with everything that it acknowledged, and answers as before."""

import json
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest

from breadbox.v1 import buffer_pb2, fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.eventually import eventually_sync
from support.killed_server import ADMITTED, CALL_S, World, wire_payload
from support.redis_server import RedisServer
from support.served import reason_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

DUPLICATE = fragment_pb2.ADMISSION_OUTCOME_DUPLICATE
STALE = fragment_pb2.ADMISSION_OUTCOME_STALE


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
