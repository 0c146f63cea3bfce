"""Small payloads ride along: against real servers and stores, and over crashes."""

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

import breadbox
from breadbox.model import errors
from breadbox.operations import calls
from breadbox.v1 import fragment_pb2, replay_buffer_service_pb2_grpc
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.callers import KINDS, make_caller
from support.eventually import eventually_sync
from support.fragments import large_fragment, vector_fragment
from support.redis_server import RedisServer, free_port
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

CALL_S = 20.0
ADMITTED = breadbox.AdmissionOutcome.ADMITTED
DUPLICATE = breadbox.AdmissionOutcome.DUPLICATE


@pytest.fixture(params=["file", "redis", "redis, journal elsewhere"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose clients are told of a store that nobody answers at."""
    with ExitStack() as stack:
        more: list[str] = []
        if request.param == "file":
            url = f"file://{tmp_path}/store"
        else:
            url = stack.enter_context(RedisServer()).url
        if request.param == "redis, journal elsewhere":
            more = ["--journal", stack.enter_context(RedisServer()).url]
        nobody = f"redis://127.0.0.1:{free_port()}"
        arguments = ("--store", url, "--client-store", nobody, *more)
        yield stack.enter_context(
            ServerProcess(*arguments, "--uses-max", "2", log=tmp_path / "log")
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_of_small_fragments_needs_no_store(server: ServerProcess, kind: str) -> None:
    sent = [vector_fragment(index) for index in range(300)]
    async with make_caller(kind, server.address, reconnect_s=0.5, deadline_s=5.0) as caller:
        await caller.call("start_session", "s")
        assert ADMITTED == (await caller.call("append", sent[0])).outcome
        results = await caller.call("append_many", sent)
        assert [DUPLICATE, *[ADMITTED] * 299] == [each.outcome for each in results]
        grant = await caller.call("fetch_fragments", 32, 5.0)
        batch = await caller.call("load_batch", grant.fragments)
        indices = [each.metadata.fragment_index for each in grant.fragments]
        assert indices == batch.obs[:, 0, 0].tolist()
        loaded = await caller.call("load_fragments", grant.fragments)
        assert indices == [each.fragment_index for each in loaded]
        read = await caller.call("read_fragments", chunk_count_max=300)
        followed = await caller.call("load_fragments", read.fragments)
        assert list(range(300)) == [each.fragment_index for each in followed]
        with pytest.raises(errors.StoreUnavailableError):
            await caller.call("append", large_fragment(300))


def test_a_mirror_of_small_fragments_needs_no_store(server: ServerProcess) -> None:
    with breadbox.connect(server.address, reconnect_s=0.5) as client:
        client.start_session("s")
        client.append_many([vector_fragment(index) for index in range(40)])
        read = next(iter(client.tail(max_wait_s=5.0)))
        assert list(range(40)) == [each.fragment_index for each in read.fragments]
        assert {b""} == {each.body for each in read.references}


def test_a_tail_of_small_fragments_has_nothing_to_release(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what came along nothing has to stay readable: so each read is one call, and not two."""
    monkeypatch.setattr(calls, "release_lease", None)
    with breadbox.connect(server.address, reconnect_s=0.5) as client:
        client.start_session("s")
        reads = client.tail(chunk_count_max=1, max_wait_s=5.0)
        for index in range(3):
            client.append(vector_fragment(index))
            assert [index] == [each.fragment_index for each in next(reads).fragments]
        assert client.service.read_fragments().lease_id is None


def test_what_rode_along_outlives_a_crash(server: ServerProcess) -> None:
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        numbers = itertools.count()
        for _ in range(3):
            sent = [vector_fragment(next(numbers)) for _ in range(50)]
            assert {ADMITTED} == {each.outcome for each in client.append_many(sent)}
            server.kill()
            server.start()
            assert {DUPLICATE} == {each.outcome for each in client.append_many(sent)}
        with client.fetch(150, 10.0) as lease:
            assert list(range(150)) == sorted(each.fragment_index for each in lease.fragments())


def test_nothing_is_left_of_a_crash_between_payload_and_entry(tmp_path: Path) -> None:
    """As the store has it then: a payload that stays, and that no book knows."""
    with RedisServer() as redis:
        arguments = ("--store", redis.url, "--unannounced-s", "1")
        with ServerProcess(*arguments, log=tmp_path / "log") as server:
            with breadbox.connect(server.address) as client:
                client.start_session("s")
                client.append_many([vector_fragment(index) for index in range(5)])
            server.kill()
            with redis.client() as keys:
                keys.set("breadbox:{" + "ab" * 16 + "}:0", os.urandom(100))
                server.start()
                eventually_sync(lambda: not keys.exists("breadbox:{" + "ab" * 16 + "}:0"))
                assert 5 == len(list(keys.scan_iter("breadbox:{*}:0")))


def test_what_rode_along_outlives_a_store_that_lost_its_latest_writes(tmp_path: Path) -> None:
    """As Redis does that is killed while its disk is slow: payloads and journal are gone."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        server = stack.enter_context(ServerProcess("--store", redis.url, log=tmp_path / "log"))
        client = stack.enter_context(breadbox.connect(server.address, reconnect_s=30))
        client.start_session("s")
        client.append_many([vector_fragment(index) for index in range(40)])
        inspector = stack.enter_context(redis.client())
        inspector.flushall()
        eventually_sync(
            lambda: len(inspector.keys("breadbox:{*}:0")) == 40,
            "the payloads to be written again",
        )
        # Another server has them from the store alone.
        server.kill()
        server.start()
        with client.fetch(fragment_count=40, max_wait_s=20.0) as lease:
            loaded = lease.fragments()
            assert list(range(40)) == sorted(each.fragment_index for each in loaded)


def test_a_full_redis_makes_producers_of_small_fragments_wait(tmp_path: Path) -> None:
    with RedisServer() as redis, redis.client() as keys:
        arguments = ("--store", redis.url, "--capacity-chunks", "100000")
        with (
            ServerProcess(*arguments, log=tmp_path / "log") as server,
            breadbox.connect(server.address, append_wait_s=1.0) as client,
        ):
            client.start_session("s")
            client.append(vector_fragment(0))
            keys.config_set("maxmemory", int(keys.info("memory")["used_memory"]) // 2)
            # One turn had been decided when Redis told that it has no room: it is written.
            assert ADMITTED == client.append(vector_fragment(1)).outcome
            for _ in range(2):
                with pytest.raises(errors.BackpressureError):
                    client.append(vector_fragment(2))
            keys.config_set("maxmemory", 0)
            for index in (2, 3):
                assert ADMITTED == client.append(vector_fragment(index)).outcome
            with client.fetch(4, 5.0) as lease:
                assert list(range(4)) == sorted(each.fragment_index for each in lease.fragments())


def test_a_payload_that_is_no_fragments_is_quarantined(server: ServerProcess) -> None:
    """Whoever sends rubbish along is found out by readers, as with the store (B29)."""
    with grpc.insecure_channel(server.address) as channel:
        stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
        stub.StartSession(pb.StartSessionRequest(session_id="s"), timeout=CALL_S)
        rubbish = fragment_pb2.FragmentMetadata(
            worker_id="w", session_id="s", step_count=4, fragment_index=0
        )
        request = pb.AppendFragmentsRequest(fragments=[rubbish], payloads=[os.urandom(300)])
        stub.AppendFragments(request, timeout=CALL_S)
    with breadbox.connect(server.address) as client:
        for _ in range(2):
            lease = client.fetch(1, 5.0)
            with pytest.raises(errors.StoreError), lease:
                list(lease.fragments())
        eventually_sync(lambda: client.get_buffer().state.chunk_count == 0)
