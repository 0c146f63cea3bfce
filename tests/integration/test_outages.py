"""Redis is away for longer than any call may take: who waits is told why, and goes on by itself."""

import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
import grpc
import pytest
from click.testing import CliRunner

import breadbox
from breadbox.cli.commands.doctor import doctor
from breadbox.cli.commands.stats import explain, stats
from breadbox.cli.commands.top import top
from breadbox.cli.main import cli
from breadbox.model.errors import StoreUnavailableError, UnavailableError
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1 import replay_buffer_service_pb2_grpc
from support.eventually import eventually_sync
from support.fragments import large_fragment, vector_fragment
from support.redis_server import RedisServer
from support.served import info_of
from support.server_process import ServerProcess, plain_environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

CALL_S = 3.0


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer(with_tcp=True, is_durable=True) as running:
        yield running


@pytest.fixture
def server(redis: RedisServer, tmp_path: Path) -> Iterator[ServerProcess]:
    arguments = ("--store", redis.tcp_url, "--metrics-listen", "127.0.0.1:0")
    with ServerProcess(*arguments, log=tmp_path / "server.log") as running:
        yield running


@contextmanager
def silenced(redis: RedisServer) -> Iterator[None]:
    """Redis keeps its connections and answers nothing inside the block."""
    redis.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        redis.signal(signal.SIGCONT)


def known_outage(client: breadbox.Client) -> str:
    """What the server says does not answer it, once it says so of both."""

    def names_both() -> bool:
        told.append(client.get_buffer().state.outage)
        return "journal" in told[-1] and "payload store" in told[-1]

    told: list[str] = []
    # Something has to wait for the journal before it can be missed.
    with pytest.raises(UnavailableError):
        client.start_session("other")
    eventually_sync(names_both, "the server telling of the outage")
    return told[-1]


def test_a_call_that_waits_for_a_silent_redis_is_told_the_reason_before_its_deadline(
    redis: RedisServer, server: ServerProcess
) -> None:
    with grpc.insecure_channel(server.address) as channel, silenced(redis):
        stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
        started = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            stub.StartSession(pb.StartSessionRequest(session_id="run"), timeout=CALL_S)
        took_s = time.monotonic() - started
    assert grpc.StatusCode.UNAVAILABLE == caught.value.code()
    info = info_of(caught.value)
    assert "STORE_UNAVAILABLE" == info.reason
    assert "journal" in info.metadata["away"]
    assert "journal" in str(caught.value.details())
    assert took_s < CALL_S


def test_what_only_looks_is_answered_in_an_outage_and_names_it(
    redis: RedisServer, server: ServerProcess
) -> None:
    with breadbox.connect(server.address, deadline_s=CALL_S, reconnect_s=0.0) as client:
        client.start_session("run")
        assert "" == client.get_buffer().state.outage
        with silenced(redis):
            outage = known_outage(client)
            assert "its journal and its payload store do not answer it" in outage
            (listed,) = client.list_buffers()
            assert "journal" in listed.state.outage
            looking: dict[click.Command, list[str]] = {
                stats: [],
                explain: ["--seconds", "0.1"],
                top: ["--count", "1"],
                doctor: [],
            }
            for command, options in looking.items():
                said = CliRunner().invoke(
                    command, ["--server", server.address, *options], terminal_width=200
                )
                assert "its journal and its payload store" in said.output, said.output
                assert "breadbox serve`, or name" not in said.output
        eventually_sync(
            lambda: client.get_buffer().state.outage == "", "the outage being over for the server"
        )


def test_an_outage_is_known_though_nobody_waits_for_the_journal(
    redis: RedisServer, server: ServerProcess
) -> None:
    """Signs of life are owed an answer: so the first call that needs one is told why, too."""
    with breadbox.connect(server.address, deadline_s=CALL_S, reconnect_s=0.0) as client:
        with silenced(redis):
            eventually_sync(lambda: "journal" in client.get_buffer().state.outage)
        eventually_sync(lambda: client.get_buffer().state.outage == "")


def test_a_buffer_is_listed_until_its_end_is_durable(
    redis: RedisServer, server: ServerProcess
) -> None:
    with breadbox.connect(server.address, deadline_s=CALL_S, reconnect_s=0.0) as client:
        client.create_buffer("other")

        def names() -> list[str]:
            return [each.name for each in client.list_buffers()]

        with silenced(redis):
            with pytest.raises(UnavailableError):
                client.delete_buffer("other")
            assert ["default", "other"] == names()
            with pytest.raises(UnavailableError):
                client.get_buffer("other")
        eventually_sync(lambda: names() == ["default"])


def test_tools_name_a_redis_that_is_gone_and_not_the_server(
    redis: RedisServer, server: ServerProcess
) -> None:
    """Killed instead of silenced: connections are refused at once."""
    with breadbox.connect(server.address, deadline_s=CALL_S, reconnect_s=0.0) as client:
        client.start_session("run")
        redis.kill()
        known_outage(client)
    for arguments in (
        ["stats"],
        ["explain", "--seconds", "0.1"],
        ["top", "--count", "1"],
        ["doctor"],
        ["buffers", "list"],
    ):
        said = CliRunner().invoke(cli, [*arguments, "--server", server.address])
        shown = " ".join(said.output.split())
        assert "its journal and its payload store do not answer it" in shown, said.output
        assert "Start `breadbox serve`" not in shown
        assert "Traceback" not in shown
    log = server.log.read_text()
    assert 1 == log.count("writing the journal failed, trying again: "), log
    assert 1 >= log.count("comparing the buffers and the store failed, trying again: "), log


@pytest.mark.parametrize("journal", ["beside the payloads", "in a directory"])
def test_what_a_redis_says_that_cannot_write_is_told_everywhere(
    redis: RedisServer, tmp_path: Path, journal: str
) -> None:
    """As with a full disk: it answers, reads, and refuses every write."""
    arguments = ["--store", redis.tcp_url, "--metrics-listen", "127.0.0.1:0"]
    place = "the Redis of its journal"
    if journal == "in a directory":
        arguments += ["--journal", f"file://{tmp_path}/journal"]
        place = "the Redis of its payload store refuses: MISCONF"
    with (
        ServerProcess(*arguments, log=tmp_path / "server.log") as server,
        breadbox.connect(server.address, deadline_s=CALL_S, reconnect_s=1.0) as client,
    ):
        client.start_session("s")
        client.append(vector_fragment(0))
        with redis.refusing_writes():
            for fragment in (vector_fragment(1), large_fragment(2)):
                with pytest.raises((UnavailableError, StoreUnavailableError), match="MISCONF Red"):
                    client.append(fragment)
            told = client.get_buffer().state.outage
            assert place in told, told
            for arguments in (
                ["stats"],
                ["explain", "--seconds", "0.1"],
                ["top", "--count", "1"],
                ["doctor"],
            ):
                said = CliRunner().invoke(cli, [*arguments, "--server", server.address])
                shown = " ".join(said.output.split())
                assert "refuses: MISCONF Redis is configured" in shown, said.output
                assert "end-session" not in shown, said.output
            with urllib.request.urlopen(server.metrics_url) as page:
                counted = page.read().decode()
        assert re.search(r"^breadbox_store_refusals_total{.*} [1-9]", counted, re.MULTILINE)
        assert "admitted" == client.append(vector_fragment(3)).outcome.value
        eventually_sync(lambda: client.get_buffer().state.outage == "", "the outage being over")
    lines = [line for line in server.log.read_text().splitlines() if "MISCONF Redis" in line]
    tasks = [line.partition(" failed, trying again: ")[0].rpartition(": ")[2] for line in lines]
    assert lines
    assert len(set(tasks)) == len(lines), "\n".join(lines)


def test_a_server_with_nothing_to_write_says_that_its_redis_refuses(
    redis: RedisServer, server: ServerProcess
) -> None:
    with redis.refusing_writes():
        eventually_sync(lambda: "MISCONF Redis" in server.log.read_text(), "the server's log")
    eventually_sync(lambda: "journal works again" in server.log.read_text(), "the server's log")

    assert 1 == server.log.read_text().count("MISCONF Redis")


def test_a_server_that_is_stuck_is_told_from_one_that_is_not_there(server: ServerProcess) -> None:
    server.signal(signal.SIGSTOP)
    try:
        arguments = ["--server", server.address, "--deadline-s", "1"]
        for command in ("stats", "top", "explain"):
            said = CliRunner().invoke(cli, [command, *arguments])
            assert 2 == said.exit_code, said.output
            assert 1 == len(said.stderr.splitlines()), said.stderr
        said = CliRunner().invoke(cli, ["doctor", *arguments])
        assert (1, True) == (said.exit_code, "address" in said.output), said.output
    finally:
        server.signal(signal.SIGCONT)


# A worker and a learner ------------------------------------------------------------------------

DEADLINE_S = 1.0
RECONNECT_S = 30.0
AWAY_S = 4.0
"""Several deadlines: what the outage of half a minute is to the defaults."""


@contextmanager
def process(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command of ours inside the block."""
    with log.open("wb") as told:
        running = subprocess.Popen(
            [sys.executable, "-m", "breadbox.cli.main", *arguments],
            stdout=told,
            stderr=told,
            env=plain_environment() | {"OMP_NUM_THREADS": "1"},
        )
        try:
            yield running
        finally:
            running.terminate()
            running.wait(timeout=30)


def stop_and_go_on(redis: RedisServer) -> None:
    with silenced(redis):
        time.sleep(AWAY_S)  # The outage itself; nothing is waited for.


def kill_and_restart(redis: RedisServer) -> None:
    redis.kill()
    time.sleep(AWAY_S)
    redis.start()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_worker_and_a_learner_go_on_by_themselves_when_redis_is_back(
    redis: RedisServer, server: ServerProcess, tmp_path: Path
) -> None:
    progress, log = tmp_path / "run" / "progress.jsonl", tmp_path / "learn.log"

    def updates() -> int:
        return len(progress.read_text().splitlines()) if progress.exists() else 0

    def reached(wanted: int) -> bool:
        return updates() >= wanted

    learn = (
        *("learn", "--server", server.address, "--run-dir", str(progress.parent)),
        *("--deadline-s", str(DEADLINE_S), "--reconnect-s", str(RECONNECT_S)),
        *("--fragments-per-batch", "8", "--minibatch-fragments", "8", "--no-tensorboard"),
    )
    rollout = ("rollout", "--server", server.address, "--env", "CartPole-v1", "--num-envs", "2")
    with (
        process(*rollout, log=tmp_path / "rollout.log") as worker,
        process(*learn, log=log) as learner,
    ):
        eventually_sync(partial(reached, 3), "the learner learning", within_s=60.0)
        for outage in (stop_and_go_on, kill_and_restart):
            outage(redis)
            wanted = updates() + 3
            eventually_sync(partial(reached, wanted), f"learning after {outage}", within_s=60.0)
            assert None is worker.poll(), (tmp_path / "rollout.log").read_text()
            assert None is learner.poll(), log.read_text()


def test_who_waits_for_a_redis_that_is_gone_says_so_at_once_and_when_it_is_back(
    redis: RedisServer, server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        return [line for line in caplog.messages if "moving payloads" in line]

    caplog.set_level("INFO")
    with (
        breadbox.connect(server.address, reconnect_s=RECONNECT_S) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        client.start_session("s")
        client.append(large_fragment(0))
        redis.kill()
        waiting = pool.submit(client.append, large_fragment(1))
        eventually_sync(lambda: bool(told()), "the client saying that it waits", within_s=5.0)
        redis.start()
        assert "admitted" == waiting.result(timeout=60).outcome.value
    began, ended = told()
    assert began.startswith("moving payloads failed, trying again: the Redis payload store ")
    assert ended.startswith("moving payloads works again after ")
    assert "payload store call failed" not in caplog.text
