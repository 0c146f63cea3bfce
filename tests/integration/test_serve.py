"""`breadbox serve` as an operator meets it: real processes, signals, ports and stores."""

import asyncio
import os
import signal
import socket
import sqlite3
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import pytest
import yaml
from google.protobuf.duration_pb2 import Duration

import breadbox
from breadbox.stores import open_store
from breadbox.v1 import fragment_pb2, replay_buffer_service_pb2_grpc
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.app import serving
from breadbox_server.journal.storage.sqlite import FILE_NAME
from breadbox_server.settings import Settings
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.redis_server import RedisServer
from support.server_process import END_S, ServerProcess, plain_environment, serve_command

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

CALL_S = 10.0
Stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub
ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED


@contextmanager
def stub_of(server: ServerProcess) -> Iterator[Stub]:
    with grpc.insecure_channel(server.address) as channel:
        yield Stub(channel)


def lone_fragment(
    payload_id: str, size_bytes: int = 1, piece_size_bytes: int = 0, *, index: int = 0
) -> pb.AppendFragmentsRequest:
    fragment = fragment_pb2.FragmentMetadata(
        worker_id="w",
        fragment_index=index,
        session_id="run",
        step_count=1,
        payload=fragment_pb2.PayloadReference(
            payload_id=payload_id, size_bytes=size_bytes, piece_size_bytes=piece_size_bytes
        ),
    )
    return pb.AppendFragmentsRequest(fragments=[fragment])


def append_one(stub: Stub, store_url: str, index: int = 0) -> int:
    """Write one payload and announce it; gives the outcome."""
    store = open_store(store_url)
    try:
        (reference,) = store.write_many([[memoryview(b"x" * 1000)]])
    finally:
        store.close()
    request = lone_fragment(
        reference.payload_id, reference.size_bytes, reference.piece_size_bytes, index=index
    )
    reply = stub.AppendFragments(request, timeout=CALL_S)
    return reply.results[0].outcome


def scrape(server: ServerProcess) -> str:
    """What Prometheus would read."""
    with urllib.request.urlopen(server.metrics_url, timeout=CALL_S) as reply:
        return reply.read().decode()


def failing(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a server that cannot start."""
    return subprocess.run(
        serve_command(*arguments),
        env=plain_environment() | environment,
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )


def assert_one_line(done: subprocess.CompletedProcess[str], *wanted: str) -> None:
    assert 2 == done.returncode, done.stderr
    assert 1 == len(done.stderr.strip().splitlines()), done.stderr
    assert "" == done.stdout
    for text in wanted:
        assert text in done.stderr


def test_a_server_says_where_it_serves_and_drains_on_sigterm(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    server = ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--ready-file", str(ready)),
        log=tmp_path / "log",
    )
    with server, stub_of(server) as stub:
        assert server.address == ready.read_text().strip()
        stub.StartSession(pb.StartSessionRequest(session_id="run"), timeout=CALL_S)
        assert ADMITTED == append_one(stub, f"file://{tmp_path}/store")
        assert 0 == server.stop()
    assert "stopped" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()


def test_a_waiting_fetch_is_told_that_the_server_drains(tmp_path: Path) -> None:
    server = ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "log")
    with server, stub_of(server) as stub:
        stub.StartSession(pb.StartSessionRequest(session_id="run"), timeout=CALL_S)
        fetching = stub.FetchFragments.future(
            pb.FetchFragmentsRequest(
                request_id="r", fragment_count=1, max_wait=Duration(seconds=60)
            ),
            timeout=60,
        )
        eventually_sync(
            lambda: (
                stub.GetBuffer(pb.GetBufferRequest(), timeout=CALL_S).buffer.state.waiter_count == 1
            )
        )
        server.signal(signal.SIGINT)
        with pytest.raises(grpc.RpcError) as caught:
            fetching.result()
        assert grpc.StatusCode.UNAVAILABLE == caught.value.code()
        assert "draining" in str(caught.value.details())
        assert 0 == server.wait()


def test_a_second_signal_ends_the_server_at_once() -> None:
    with RedisServer() as redis:
        log = Path(redis.socket_path).parent / "log"
        server = ServerProcess(
            *("--store", redis.url, "--drain-grace-s", "60"),
            *("--metrics-listen", "127.0.0.1:0"),
            log=log,
        )
        with server, stub_of(server) as stub:
            stub.StartSession(pb.StartSessionRequest(session_id="run"), timeout=CALL_S)
            # The append cannot be answered, so the drain waits for it.
            os.kill(redis.pid, signal.SIGSTOP)
            try:
                appending = stub.AppendFragments.future(lone_fragment("0" * 32), timeout=60)
                eventually_sync(lambda: "breadbox_pending_appends 1.0" in scrape(server))
                server.signal(signal.SIGTERM)
                eventually_sync(lambda: "draining" in log.read_text())
                server.signal(signal.SIGTERM)
                assert 1 == server.wait()
            finally:
                os.kill(redis.pid, signal.SIGCONT)
            assert grpc.StatusCode.UNAVAILABLE == appending.exception().code()
        assert "stopped" not in log.read_text()


def test_an_occupied_port_is_told_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = failing("--listen", address, "--store", f"file://{tmp_path}/store")
        metrics = failing(
            *("--listen", "127.0.0.1:0", "--metrics-listen", address),
            *("--store", f"file://{tmp_path}/store"),
        )
    assert_one_line(done, "--listen", address, "in use")
    assert_one_line(metrics, "--metrics-listen", address, "in use")


def test_two_servers_never_share_a_port(tmp_path: Path) -> None:
    with ServerProcess("--store", f"file://{tmp_path}/one", log=tmp_path / "log") as server:
        done = failing("--listen", server.address, "--store", f"file://{tmp_path}/two")
    assert_one_line(done, "in use")


@pytest.mark.parametrize("option", ["--listen", "--local-socket"])
def test_two_servers_never_share_a_unix_socket(option: str, tmp_path: Path) -> None:
    """gRPC would take the path away, and nobody would find the first server any more."""
    path = tmp_path / "socket"
    name = f"unix:{path}" if option == "--listen" else str(path)
    listen = name if option == "--listen" else "127.0.0.1:0"
    more = [] if option == "--listen" else ["--local-socket", name]
    first = ServerProcess(
        *("--store", f"file://{tmp_path}/one", *more), listen=listen, log=tmp_path / "log"
    )
    with first:
        done = failing("--listen", listen, "--store", f"file://{tmp_path}/two", *more)
        with grpc.insecure_channel(f"unix:{path}") as channel:
            stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
            stub.GetBuffer(pb.GetBufferRequest(), timeout=CALL_S)
        assert_one_line(done, option, "another server")
        first.kill()
        first.start()  # What a killed one leaves is nobody's.
        assert 0 == first.stop()


def test_a_server_that_cannot_start_takes_nothing_from_one_that_runs(tmp_path: Path) -> None:
    """Started twice by mistake, the second took the journal over before it looked at its port."""
    with RedisServer() as redis:
        server = ServerProcess("--store", redis.url, log=tmp_path / "log")
        with server, stub_of(server) as stub:
            stub.StartSession(pb.StartSessionRequest(session_id="run"), timeout=CALL_S)
            missing = str(tmp_path / "no.pem")
            free = ["--listen", "127.0.0.1:0", "--store", redis.url]
            assert_one_line(failing("--listen", server.address, "--store", redis.url), "in use")
            assert_one_line(failing(*free, "--tls-cert", missing, "--tls-key", missing), "no.pem")
            assert_one_line(failing(*free, "--tokens", missing), "no.pem")
            assert ADMITTED == append_one(stub, redis.url)
            assert 0 == server.stop()


def test_a_locked_journal_holds_up_its_turns_and_nobody_else(tmp_path: Path) -> None:
    """The loop waited for the lock, up to 5 s, and answered nobody."""
    store = tmp_path / "store"
    server = ServerProcess("--store", f"file://{store}", log=tmp_path / "log")
    with server, stub_of(server) as stub, closing(sqlite3.connect(store / FILE_NAME)) as other:
        config = pb.GetStoreConfigRequest()
        stub.GetStoreConfig(config, timeout=CALL_S)
        other.execute("BEGIN IMMEDIATE")
        starting = stub.StartSession.future(
            pb.StartSessionRequest(session_id="run"), timeout=6 * CALL_S
        )
        # Longer than the lock was waited for at a time.
        give_up_at = time.monotonic() + 6.0
        longest_s = 0.0
        while time.monotonic() < give_up_at:
            asked_at = time.monotonic()
            stub.GetStoreConfig(config, timeout=CALL_S)
            longest_s = max(longest_s, time.monotonic() - asked_at)
        assert not starting.done()
        other.rollback()
        starting.result()
    assert longest_s < 2.0, f"an answer took {longest_s:.1f} s"


def test_a_wall_clock_set_forward_between_two_servers_ends_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lease_count(*, fetches: bool) -> int:
        settings = Settings(listen="127.0.0.1:0", store=f"file://{tmp_path}/store")
        async with serving(settings) as server:
            with grpc.insecure_channel(server.address) as channel:
                stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
                return await asyncio.to_thread(_leases_of, stub, settings.store, fetches)

    assert 1 == asyncio.run(lease_count(fetches=True))
    wall_clock = time.time
    monkeypatch.setattr(time, "time", lambda: wall_clock() + 3600.0)
    assert 1 == asyncio.run(lease_count(fetches=False))


def _leases_of(stub: Stub, store_url: str, fetches: bool) -> int:
    if fetches:
        stub.StartSession(pb.StartSessionRequest(session_id="run"), timeout=CALL_S)
        assert ADMITTED == append_one(stub, store_url)
        request = pb.FetchFragmentsRequest(request_id="r", fragment_count=1)
        assert stub.FetchFragments(request, timeout=CALL_S).grant.lease.lease_id
    return stub.GetBuffer(pb.GetBufferRequest(), timeout=CALL_S).buffer.state.lease_count


def test_two_servers_never_share_a_store(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    with ServerProcess("--store", store, log=tmp_path / "log"):
        done = failing("--listen", "127.0.0.1:0", "--store", store)
    assert_one_line(done, "another server")


def test_a_store_that_does_not_answer_is_told_without_its_password() -> None:
    done = failing("--listen", "127.0.0.1:0", BREADBOX_STORE="redis://:hunter2@127.0.0.1:1/0")
    assert_one_line(done, "--store", "does not answer")
    assert "hunter2" not in done.stderr


def test_a_store_whose_password_is_wrong_is_told_without_it() -> None:
    with RedisServer(password="right", with_tcp=True) as store:
        url = f"redis://:hunter2@127.0.0.1:{store.port}/0"
        done = failing("--listen", "127.0.0.1:0", BREADBOX_STORE=url)
    assert_one_line(done, "--store")
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--nonsense"], "--nonsense"),
        (["--listen", "nowhere"], "HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], "65535"),
        (["--listen", "192.0.2.1:0"], "192.0.2.1"),
        (["--store", "ftp://host"], "file:///DIR"),
        (["--capacity-bytes", "8 parsecs"], "--capacity-bytes must be a size"),
        (["--staleness-max", "-1"], "--staleness-max"),
        (["--lease-s", "nan"], "--lease-s"),
        (["--sampler", "clever"], "sampler"),
        (["--full-policy", "shrug"], "block"),
        (["--minimum-chunks", "9", "--capacity-chunks", "8"], "capacity_chunks"),
        (["--config", "/nowhere/at.all"], "/nowhere/at.all"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_wrong_option_is_told_in_one_line(
    arguments: list[str], wanted: str, tmp_path: Path
) -> None:
    base = [] if "--store" in arguments else ["--store", f"file://{tmp_path}/store"]
    listen = [] if "--listen" in arguments else ["--listen", "127.0.0.1:0"]
    assert_one_line(failing(*base, *listen, *arguments), wanted)


def test_a_wrong_environment_variable_is_named(tmp_path: Path) -> None:
    done = failing("--store", f"file://{tmp_path}/store", BREADBOX_USES_MAX="many")
    assert_one_line(done, "BREADBOX_USES_MAX")


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"uses-max": 2, "staleness_max": 3, "capacity-bytes": "1GiB"}))
    server = ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--config", str(config), "--uses-max", "9"),
        log=tmp_path / "log",
        environment={"BREADBOX_STALENESS_MAX": "7", "BREADBOX_USES_MAX": "8"},
    )
    with server, stub_of(server) as stub:
        config_seen = stub.GetBuffer(pb.GetBufferRequest(), timeout=CALL_S).buffer.config
    assert (9, 7, 2**30) == (
        config_seen.uses_max,
        config_seen.staleness_max,
        config_seen.capacity_bytes,
    )
    assert 4096 == config_seen.capacity_chunks


def test_an_unknown_option_in_the_file_is_named(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("speed: 11\n")
    assert_one_line(failing("--config", str(config)), "speed")


@pytest.mark.parametrize(("capacity", "left"), [(2, 2), (5, 5), (9, 5)])
def test_limits_of_a_start_that_hold_less_are_warned_of_with_the_number(
    capacity: int, left: int, tmp_path: Path
) -> None:
    fixed = ("--journal", f"file://{tmp_path}/journal", "--store", f"file://{tmp_path}/store")
    with ServerProcess(*fixed, log=tmp_path / "log") as server:
        with breadbox.connect(server.address) as client:
            client.start_session("s")
            client.append_many([vector_fragment(index) for index in range(5)])
        server.stop()
        server.arguments = (*fixed, "--capacity-chunks", str(capacity))
        server.start()
        with breadbox.connect(server.address) as client:
            assert left == client.get_buffer().state.chunk_count
        warned = "the limits of this start hold less" in server.log.read_text()
        assert (left < 5) == warned
        assert warned == ("evicted 3 of its 5 fragments" in server.log.read_text())


def test_an_ephemeral_server_leaves_no_file_behind(tmp_path: Path) -> None:
    store = tmp_path / "store"
    server = ServerProcess("--store", f"file://{store}", "--ephemeral", log=tmp_path / "log")
    with server, stub_of(server) as stub:
        stub.StartSession(pb.StartSessionRequest(session_id="run"), timeout=CALL_S)
        append_one(stub, f"file://{store}")
        assert store.exists()
        assert 0 == server.stop()
    assert not store.exists()


def test_an_ephemeral_server_without_a_store_begins_with_nothing_beside_one_with(
    tmp_path: Path,
) -> None:
    ephemeral = ServerProcess("--ephemeral", log=tmp_path / "ephemeral.log")
    other = ServerProcess("--ephemeral", log=tmp_path / "other.log")
    with ephemeral, other, stub_of(ephemeral) as stub, stub_of(other) as other_stub:
        stores = [
            each.GetStoreConfig(pb.GetStoreConfigRequest(), timeout=CALL_S).store_url
            for each in (stub, other_stub)
        ]
        assert [ephemeral.stop(), other.stop()] == [0, 0]
    assert 2 == len(set(stores))
    assert [] == [url for url in stores if Path(url.removeprefix("file://")).exists()]


def test_ephemeral_deletes_nothing_that_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    done = failing("--listen", "127.0.0.1:0", "--store", f"file://{tmp_path}", "--ephemeral")
    assert_one_line(done, "not empty")
    assert "mine" == (tmp_path / "precious").read_text()


def test_metrics_are_served_while_the_server_runs(tmp_path: Path) -> None:
    server = ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--metrics-listen", "127.0.0.1:0"),
        log=tmp_path / "log",
    )
    with server, stub_of(server) as stub:
        stub.StartSession(pb.StartSessionRequest(session_id="run"), timeout=CALL_S)
        append_one(stub, f"file://{tmp_path}/store")
        text = scrape(server)
        assert 0 == server.stop()
    assert 'breadbox_fragments_total{buffer="default",outcome="admitted"} 1.0' in text
    assert 'breadbox_rpcs_total{code="OK",method="StartSession"} 1.0' in text


def test_logs_can_be_json(tmp_path: Path) -> None:
    server = ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--log-format", "json"), log=tmp_path / "log"
    )
    with server:
        server.stop()
    lines = [yaml.safe_load(line) for line in server.log.read_text().splitlines()]
    assert "breadbox_server.rpc.leading" in {line["logger"] for line in lines}


def test_fragments_go_through_a_real_redis_and_are_deleted_after_use() -> None:
    with RedisServer() as redis, redis.client() as client:
        server = ServerProcess("--store", redis.url, log=Path(redis.socket_path).parent / "log")
        with server, stub_of(server) as stub:
            stub.StartSession(pb.StartSessionRequest(session_id="run"), timeout=CALL_S)
            assert ADMITTED == append_one(stub, redis.url)
            (key,) = client.keys("breadbox:{*}:0")
            assert -1 == client.ttl(key)
            grant = stub.FetchFragments(
                pb.FetchFragmentsRequest(request_id="r", fragment_count=1), timeout=CALL_S
            ).grant
            stub.ReleaseLease(
                pb.ReleaseLeaseRequest(
                    lease_id=grant.lease.lease_id, mode=pb.RELEASE_MODE_CONSUMED
                ),
                timeout=CALL_S,
            )
            eventually_sync(lambda: not client.exists(key), "the payload being deleted")
            assert 0 == server.stop()


def test_an_append_fails_while_redis_is_down_and_succeeds_when_it_is_back() -> None:
    with RedisServer() as redis:
        server = ServerProcess("--store", redis.url, log=Path(redis.socket_path).parent / "log")
        with server, stub_of(server) as stub:
            stub.StartSession(pb.StartSessionRequest(session_id="run"), timeout=CALL_S)
            assert ADMITTED == append_one(stub, redis.url)
            redis.kill()
            with pytest.raises(grpc.RpcError) as caught:
                stub.AppendFragments(lone_fragment("0" * 32, index=1), timeout=30)
            assert grpc.StatusCode.UNAVAILABLE == caught.value.code()
            redis.start()
            assert ADMITTED == append_one(stub, redis.url, index=1)
