"""Two servers on one journal: one acts, and nothing that was acknowledged is lost between them.

A round of a takeover is repeated `BREADBOX_ROUNDS` times; a report wants twenty.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from breadbox.stores import open_store
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1 import replay_buffer_service_pb2_grpc
from support.eventually import eventually_sync
from support.load import CALL_S, SESSION, Load, fragments_of
from support.raw_calls import called
from support.redis_server import RedisServer
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ROUNDS = range(int(os.environ.get("BREADBOX_ROUNDS", "1")))
LIMITS = ("--capacity-chunks", "1000000", "--uses-max", "1")
HELD = 2_000
"""Fragments in the books when the second server comes: reading them back takes it a while."""


class Caller:
    """A raw stub of one server."""

    def __init__(self, stack: ExitStack, server: ServerProcess) -> None:
        channel = stack.enter_context(grpc.insecure_channel(server.address))
        self._stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)

    def call(self, method: str, request: Any) -> Any:
        return called(getattr(self._stub, method), request, timeout=CALL_S, wait_for_ready=True)

    def start_session(self) -> None:
        self.call("StartSession", pb.StartSessionRequest(session_id=SESSION))

    def append(self, store_url: str, count: int, *, worker: str = "w", first: int = 0) -> None:
        store = open_store(store_url)
        for start in range(first, first + count, 1000):
            size = min(1000, first + count - start)
            references = store.write_many([[memoryview(b"x" * 200)]] * size)
            batch = fragments_of(references, worker=worker, first=start)
            reply = self.call("AppendFragments", pb.AppendFragmentsRequest(fragments=batch))
            assert {1} == {result.outcome for result in reply.results}
        store.close()

    def fetch(self, count: int, request_id: str) -> list[tuple[str, int]]:
        """Fetch and consume; gives (worker, index)."""
        granted = self.call(
            "FetchFragments", pb.FetchFragmentsRequest(request_id=request_id, fragment_count=count)
        )
        release = pb.ReleaseLeaseRequest(
            lease_id=granted.grant.lease.lease_id, mode=pb.RELEASE_MODE_CONSUMED
        )
        self.call("ReleaseLease", release)
        return [
            (item.metadata.worker_id, item.metadata.fragment_index)
            for item in granted.grant.fragments
        ]

    def held(self) -> int:
        return self.call("GetBuffer", pb.GetBufferRequest(name="default")).buffer.state.chunk_count

    def fetch_all(self) -> Counter[tuple[str, int]]:
        """Consume everything that there is; how often each came."""
        found: Counter[tuple[str, int]] = Counter()
        while count := self.held():
            found.update(self.fetch(min(count, 1000), f"all-{len(found)}"))
        return found


def payload_count(redis: RedisServer) -> int:
    with redis.client() as client:
        return sum(1 for _ in client.scan_iter("breadbox:{*}:0", count=1000))


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.mark.parametrize("number", ROUNDS)
def test_a_takeover_under_load_loses_nothing_that_was_acknowledged(
    number: int, redis: RedisServer, tmp_path: Path
) -> None:
    old = ServerProcess("--store", redis.url, *LIMITS, log=tmp_path / "old.log")
    new = ServerProcess("--store", redis.url, *LIMITS, "--take-over", log=tmp_path / "new.log")
    with ExitStack() as stack:
        stack.enter_context(old)
        caller = Caller(stack, old)
        caller.start_session()
        caller.append(redis.url, HELD)
        with Load(old.address, redis.url) as load:
            load.wait_for(200)
            stack.enter_context(new)
            load.wait_end()
        found = Caller(stack, new).fetch_all()
        known = load.acknowledged | {("w", index) for index in range(HELD)}
        lost = known - set(found)
        double = [each for each, count in found.items() if count > 1]
        assert (set(), []) == (lost, double), f"{len(lost)} of {len(known)} lost"
        assert set(found) <= known | load.attempted


@pytest.mark.parametrize("number", ROUNDS)
def test_a_server_that_wakes_after_it_was_replaced_ends_and_costs_nothing(
    number: int, redis: RedisServer, tmp_path: Path
) -> None:
    """Nobody is asked: a stopped process shows no sign of life, and the next server starts."""
    old = ServerProcess("--store", redis.url, *LIMITS, log=tmp_path / "old.log")
    new = ServerProcess("--store", redis.url, *LIMITS, log=tmp_path / "new.log")
    with ExitStack() as stack:
        stack.enter_context(old)
        caller = Caller(stack, old)
        caller.start_session()
        caller.append(redis.url, HELD)
        with Load(old.address, redis.url) as load:
            load.wait_for(200)
            old.signal(signal.SIGSTOP)
            stack.enter_context(new)
            successor = Caller(stack, new)
            successor.append(redis.url, 200, worker="new")
            old.signal(signal.SIGCONT)
            load.wait_end()
        assert 2 == old.wait()
        assert "another server" in old.log.read_text()
        known = load.acknowledged
        known |= {("w", index) for index in range(HELD)}
        known |= {("new", index) for index in range(200)}
        # The payloads too, not only the books.
        assert payload_count(redis) >= successor.held()
        found = successor.fetch_all()
        assert (set(), 1) == (known - set(found), max(found.values()))


def test_a_second_server_refuses_to_start_while_the_first_lives(
    redis: RedisServer, tmp_path: Path
) -> None:
    first = ServerProcess("--store", redis.url, log=tmp_path / "first.log")
    second = ServerProcess("--store", redis.url, log=tmp_path / "second.log")
    with ExitStack() as stack:
        stack.enter_context(first)
        caller = Caller(stack, first)
        caller.start_session()
        with pytest.raises(AssertionError, match="did not start") as caught:
            second.start()
        caller.append(redis.url, 5)
        assert 5 == caller.held()
        told = str(caught.value).splitlines()[-1]
        assert f"another server (process {first.pid} on" in told
        assert "--take-over" in told


def test_a_killed_server_on_this_host_is_not_waited_for(redis: RedisServer, tmp_path: Path) -> None:
    with ServerProcess("--store", redis.url, log=tmp_path / "log") as server:
        for _ in range(3):
            server.kill()
            with redis.client() as client:
                # As if it had shown a sign of life just now, that counts for long.
                assert client.pexpire("breadbox:{journal}:alive", 600_000)
            server.start()


def test_a_redis_that_came_back_younger_costs_a_server_that_lives_nothing(
    redis: RedisServer, tmp_path: Path
) -> None:
    server = ServerProcess("--store", redis.url, *LIMITS, log=tmp_path / "log")
    with ExitStack() as stack:
        stack.enter_context(server)
        caller = Caller(stack, server)
        caller.start_session()
        caller.append(redis.url, 100)
        with redis.client() as client:
            client.save()
        # The copy knows an earlier owner than the one who consumes.
        server.kill()
        server.start()
        consumed = caller.fetch(40, "before")
        redis.kill()
        redis.start()
        eventually_sync(lambda: "again from memory" in server.log.read_text())
        consumed += caller.fetch(20, "after")
        server.kill()
        server.start()
        found = caller.fetch_all()
        assert 60 == len(set(consumed))
        assert 40 == len(found)
        assert not set(found) & set(consumed)


def test_two_servers_with_journals_of_their_own_keep_off_each_others_payloads(
    redis: RedisServer, tmp_path: Path
) -> None:
    """To each of them the other's payloads are of no buffer."""
    with ExitStack() as stack:
        servers = [
            ServerProcess(
                *("--store", redis.url, "--journal", f"file://{tmp_path}/journal{number}"),
                *("--unannounced-s", "1"),
                log=tmp_path / f"log{number}",
            )
            for number in range(2)
        ]
        for number, server in enumerate(servers):
            stack.enter_context(server)
            caller = Caller(stack, server)
            caller.start_session()
            caller.append(redis.url, 100, worker=f"w{number}")
        for server in servers:
            server.kill()
            server.start()
        orphans = "payloads of other journals"
        eventually_sync(lambda: all(orphans in server.log.read_text() for server in servers))
        assert 200 == payload_count(redis)
        # Where the other one is gone, what it left goes when that is asked for.
        servers[1].kill()
        servers[0].kill()
        servers[0].arguments = (*servers[0].arguments, "--delete-orphans")
        servers[0].start()
        eventually_sync(lambda: payload_count(redis) == 100)
        assert 100 == Caller(stack, servers[0]).held()


@pytest.mark.parametrize("number", ROUNDS)
def test_a_server_stopped_at_its_start_deletes_nothing_of_its_successor(
    number: int, redis: RedisServer, tmp_path: Path
) -> None:
    """It would take for orphans what was appended while it was stopped."""
    arguments = ("--store", redis.url, *LIMITS, "--unannounced-s", "1")
    old = ServerProcess(*arguments, log=tmp_path / "old.log")
    new = ServerProcess(*arguments, log=tmp_path / "new.log")
    with ExitStack() as stack:
        stack.enter_context(old)
        old.signal(signal.SIGSTOP)
        stack.enter_context(new)
        successor = Caller(stack, new)
        successor.start_session()
        successor.append(redis.url, 200)
        old.signal(signal.SIGCONT)
        assert 2 == old.wait()
        assert 200 == payload_count(redis)
        assert 200 == len(successor.fetch_all())


@pytest.mark.parametrize("kind", ["file", "redis"])
def test_a_file_journal_is_locked_whatever_the_store_is(
    kind: str, redis: RedisServer, tmp_path: Path
) -> None:
    stores = [redis.url, f"file://{tmp_path}/store"]
    journal = ("--journal", f"file://{tmp_path}/journal")
    first = ServerProcess("--store", stores[0], *journal, log=tmp_path / "first.log")
    other = stores[0] if kind == "redis" else stores[1]
    second = ServerProcess("--store", other, *journal, log=tmp_path / "second.log")
    with first:
        for arguments in ((), ("--take-over",)):
            second.arguments = (*second.arguments, *arguments)
            with pytest.raises(AssertionError, match="did not start") as caught:
                second.start()
            said = str(caught.value).splitlines()[-1]
            assert f"another server (process {first.pid} on" in said
            assert "--take-over cannot displace it" in said
        first.kill()
        second.start()
    second.kill()
