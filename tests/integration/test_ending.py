"""Every server ends when it is asked to, or has to: in time, and saying why.

How many servers are ended under load is BREADBOX_ENDINGS (default 4 of each kind); for hundreds,
run tests/chaos/endings.py.
"""

import os
import random
import signal
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1 import replay_buffer_service_pb2_grpc
from chaos.endings import KINDS, run_endings
from support import http2
from support.eventually import eventually_sync
from support.redis_server import RedisServer
from support.server_process import ServerProcess, plain_environment, serve_command
from support.tiers import long_but

ROUNDS = int(os.environ.get("BREADBOX_ENDINGS", "4"))
CALL_S = 10.0
WATCH = "/grpc.health.v1.Health/Watch"

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120 + 40 * ROUNDS)]


@pytest.mark.parametrize("kind", long_but(1, KINDS))
def test_every_server_ends_under_load(kind: str, tmp_path: Path) -> None:
    """redis-py swallowed a cancellation now and then, and what it was meant for never ended."""
    seed = random.SystemRandom().randrange(2**32)
    tally = run_endings(kind, ROUNDS, tmp_path, seed)
    assert [] == tally.problems, f"seed {seed}: {tally.summary()}"
    assert tally.appended > 0


def test_a_watch_of_the_health_that_reads_nothing_holds_up_no_end(tmp_path: Path) -> None:
    server = ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--drain-grace-s", "1"), log=tmp_path / "log"
    )
    with server, http2.connect(server.address) as stranger:
        no_window = http2.setting(http2.INITIAL_WINDOW_SIZE, 0)
        stranger.sendall(http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0, no_window))
        for stream in (1, 3):
            headers = http2.call_headers(WATCH)
            stranger.sendall(
                http2.frame(http2.HEADERS, http2.END_HEADERS, stream, headers)
                + http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message_prefix(0))
            )
        with grpc.insecure_channel(server.address) as channel:
            # Answered after the Watch was read, and by another: health serves others meanwhile.
            check = health_pb2_grpc.HealthStub(channel).Check
            for _ in range(20):
                reply = check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
                assert health_pb2.HealthCheckResponse.SERVING == reply.status
        assert 0 == server.stop()
    assert "Traceback" not in server.log.read_text()


def test_a_watch_of_the_health_is_told_the_end_and_holds_it_up_no_further(tmp_path: Path) -> None:
    server = ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--drain-grace-s", "600"), log=tmp_path / "log"
    )
    with server, grpc.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        response = health_pb2.HealthCheckResponse
        assert response.SERVING == next(watch).status
        server.signal(signal.SIGTERM)
        assert [response.NOT_SERVING] == [each.status for each in watch]
        assert 0 == server.wait()


def test_the_ready_file_goes_when_the_server_ends(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    server = ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--ready-file", str(ready)), log=tmp_path / "log"
    )
    with server:
        assert server.address == ready.read_text().strip()
        assert 0 == server.stop()
    assert not ready.exists()


def test_a_second_signal_leaves_neither_ready_file_nor_ephemeral_directory(tmp_path: Path) -> None:
    ready, store = tmp_path / "ready", tmp_path / "store"
    server = ServerProcess(
        *("--store", f"file://{store}", "--ephemeral", "--ready-file", str(ready)),
        *("--drain-grace-s", "600"),
        log=tmp_path / "log",
    )
    with server, grpc.insecure_channel(server.address) as channel:
        stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
        stub.StartSession(pb.StartSessionRequest(session_id="run"), timeout=CALL_S)
        assert store.exists()
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGTERM)
        assert server.wait() in (0, 1)  # The first may have been enough.
    assert (False, False) == (ready.exists(), store.exists())


def test_a_server_that_still_waits_for_its_store_ends_at_once_when_asked(tmp_path: Path) -> None:
    with RedisServer() as redis:
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            with (tmp_path / "log").open("w") as log:
                process = subprocess.Popen(
                    serve_command("--listen", "127.0.0.1:0", "--store", redis.url),
                    env=plain_environment(),
                    stderr=log,
                )
            try:
                eventually_sync(
                    lambda: _takes(process.pid, signal.SIGTERM), "its thread", within_s=60
                )
                process.send_signal(signal.SIGTERM)
                # Far below the 30 s for which it would wait for an answer.
                assert 0 == process.wait(timeout=20)
            finally:
                process.kill()
                process.wait()
        finally:
            os.kill(redis.pid, signal.SIGCONT)


def _takes(pid: int, number: int) -> bool:
    """Whether a process leaves a signal to the thread that waits for it."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")]
    return bool(int(mask, 16) >> (number - 1) & 1)
