"""Warm standbys: who leads, what they take over, and what one that was stopped may still do.

Rounds of a takeover are repeated `BREADBOX_ROUNDS` times.
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
from grpc_health.v1 import health_pb2, health_pb2_grpc

import breadbox
from breadbox.stores import open_store
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1 import replay_buffer_service_pb2_grpc
from breadbox_server.maintenance import probe
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.load import CALL_S, SESSION, Load, fragments_of
from support.redis_server import RedisServer
from support.served import info_of
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ROUNDS = range(int(os.environ.get("BREADBOX_ROUNDS", "1")))
LIMITS = ("--capacity-chunks", "1000000", "--uses-max", "1")
HELD = 1_000
TAKEOVER_S = 20.0
TURNS = "breadbox:{journal}:turns"


class Caller:
    """A raw stub of one server, which tries nothing again."""

    def __init__(self, stack: ExitStack, server: ServerProcess) -> None:
        self.channel = stack.enter_context(grpc.insecure_channel(server.address))
        self._stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(self.channel)

    def call(self, method: str, request: Any, timeout_s: float = CALL_S) -> Any:
        return getattr(self._stub, method)(request, timeout=timeout_s)

    def start_session(self) -> None:
        self.call("StartSession", pb.StartSessionRequest(session_id=SESSION))

    def is_answered(self) -> bool:
        """Whether the server is certain that it leads: what changes nothing waits for that, too."""
        try:
            self.start_session()
        except grpc.RpcError:
            return False
        return True

    def append(self, store_url: str, count: int, *, worker: str = "w") -> None:
        store = open_store(store_url)
        references = store.write_many([[memoryview(b"x" * 200)]] * count)
        batch = fragments_of(references, worker=worker)
        reply = self.call("AppendFragments", pb.AppendFragmentsRequest(fragments=batch))
        assert {1} == {result.outcome for result in reply.results}
        store.close()

    def held(self) -> int:
        return self.call("GetBuffer", pb.GetBufferRequest(name="default")).buffer.state.chunk_count

    def grant(self, count: int, request_id: str) -> Any:
        request = pb.FetchFragmentsRequest(request_id=request_id, fragment_count=count)
        return self.call("FetchFragments", request).grant

    def consume_all(self) -> Counter[tuple[str, int]]:
        """Consume everything that there is; how often each came."""
        found: Counter[tuple[str, int]] = Counter()
        while count := self.held():
            grant = self.grant(min(count, 1000), f"all-{len(found)}")
            mode = pb.RELEASE_MODE_CONSUMED
            request = pb.ReleaseLeaseRequest(lease_id=grant.lease.lease_id, mode=mode)
            self.call("ReleaseLease", request)
            found.update(
                (item.metadata.worker_id, item.metadata.fragment_index) for item in grant.fragments
            )
        return found


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


class Pair:
    """Servers on one journal, of which at most one leads."""

    def __init__(
        self, stack: ExitStack, redis: RedisServer, folder: Path, *more: str, count: int = 2
    ) -> None:
        self.redis = redis
        self.servers = [
            ServerProcess(
                *("--store", redis.url, *LIMITS, "--standby", "--metrics-listen", "127.0.0.1:0"),
                *more,
                log=folder / f"server{number}.log",
            )
            for number in range(count)
        ]
        for server in self.servers:
            stack.enter_context(ended(server))
        self.servers[0].start(TAKEOVER_S)
        for server in self.servers[1:]:
            server.start_standby()


class ended:  # noqa: N801 - a context manager that reads as a function
    """Kill a server at the end, if it still runs."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    def __enter__(self) -> None:
        return None

    def __exit__(self, *unused: object) -> None:
        self._server.__exit__(None, None, None)


def seen_elsewhere(redis: RedisServer) -> None:
    """Let the leader look like one on another host, whose end nobody sees."""
    with redis.client() as client:
        owner = client.get("breadbox:{journal}:alive")
        assert owner is not None
        token = owner.split(b" ")[0]
        left_ms = client.pttl("breadbox:{journal}:alive")
        client.set("breadbox:{journal}:alive", token + b" elsewhere", px=max(1, left_ms))


def is_current(standby: ServerProcess) -> bool:
    """Whether a standby has replayed all there is, and knows whom it follows."""
    _, reason = probe.probe(standby.address)
    return " leads, " in reason and reason.endswith("; 0 turns and 0.0 s behind")


def turn_of(entries: Any) -> int:
    """The turn of the first of some entries of the stream."""
    return int(entries[0][0].split(b"-")[0])


def health_of(stack: ExitStack, server: ServerProcess) -> int:
    channel = stack.enter_context(grpc.insecure_channel(server.address))
    request = health_pb2.HealthCheckRequest()
    return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_S).status)


def test_the_first_of_two_leads_and_the_other_refuses_saying_who(
    redis: RedisServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        leader, standby = Pair(stack, redis, tmp_path).servers
        caller = Caller(stack, leader)
        caller.start_session()
        with pytest.raises(grpc.RpcError) as caught:
            Caller(stack, standby).held()
        info = info_of(caught.value)
        config = caller.call("GetStoreConfig", pb.GetStoreConfigRequest())
        assert str(config.journal_epoch) == info.metadata["epoch"]
        assert (grpc.StatusCode.UNAVAILABLE, "STANDBY") == (caught.value.code(), info.reason)
        assert f"process {leader.pid} on" in info.metadata["leader"]
        assert 2 == health_of(stack, standby), "NOT_SERVING"
        status, reason = probe.probe(standby.address)
        assert "NOT_SERVING" == status
        assert f"stands by: process {leader.pid} on" in reason
        assert (1, 0) == (probe.main([standby.address]), probe.main(["--alive", standby.address]))
        eventually_sync(lambda: is_current(standby), "a standby that has read the journal")
        assert [0, 0] == [probe.main(["--ready", each.address]) for each in (leader, standby)]
        # Behind, it goes on living, but could not go on in the leader's place.
        redis.kill()
        eventually_sync(lambda: probe.main(["--ready", standby.address]) == 1, within_s=30)
        assert 0 == probe.main(["--alive", standby.address])


@pytest.mark.parametrize("number", ROUNDS)
@pytest.mark.parametrize("is_seen", [True, False], ids=["same-host", "claim-runs-out"])
def test_a_killed_leader_is_replaced_and_nothing_acknowledged_is_lost_or_doubled(
    number: int, is_seen: bool, redis: RedisServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        leader, standby = Pair(stack, redis, tmp_path).servers
        caller = Caller(stack, leader)
        caller.start_session()
        caller.append(redis.url, HELD)
        leased = caller.grant(100, "before")
        with Load(leader.address, redis.url) as load:
            load.wait_for(200)
            if not is_seen:
                # Stopped first: once its process is gone, the standby would see that.
                leader.signal(signal.SIGSTOP)
                seen_elsewhere(redis)
            leader.kill()
            standby.wait_serving(TAKEOVER_S)
            load.wait_end()
        heir = Caller(stack, standby)
        # The lease is there, and the grant that is asked for again is the same.
        assert leased.fragments == heir.grant(100, "before").fragments
        leased_keys = {
            (item.metadata.worker_id, item.metadata.fragment_index) for item in leased.fragments
        }
        found = heir.consume_all()
        known = load.acknowledged | {("w", index) for index in range(HELD)}
        lost = known - set(found) - leased_keys
        double = [each for each, count in found.items() if count > 1 or each in leased_keys]
        assert (set(), []) == (lost, double), f"{len(lost)} of {len(known)} lost"


@pytest.mark.parametrize("number", ROUNDS)
def test_a_stopped_leader_that_wakes_acknowledges_grants_and_deletes_nothing(
    number: int, redis: RedisServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        leader, standby = Pair(stack, redis, tmp_path).servers
        caller = Caller(stack, leader)
        caller.start_session()
        caller.append(redis.url, HELD)
        with Load(leader.address, redis.url) as load:
            load.wait_for(200)
            leader.signal(signal.SIGSTOP)
            standby.wait_serving(TAKEOVER_S)
            heir = Caller(stack, standby)
            heir.append(redis.url, 200, worker="new")
            before = heir.held()
            # What it has been told meanwhile is there when it wakes.
            late = caller.channel.unary_unary(
                "/breadbox.v1.ReplayBufferService/FetchFragments",
                request_serializer=pb.FetchFragmentsRequest.SerializeToString,
                response_deserializer=pb.FetchFragmentsResponse.FromString,
            ).future(pb.FetchFragmentsRequest(request_id="late", fragment_count=10), timeout=CALL_S)
            leader.signal(signal.SIGCONT)
            assert isinstance(late.exception(), grpc.RpcError)
            load.wait_end()
        assert 2 == leader.wait()
        assert "took the journal" in leader.log.read_text()
        assert before == heir.held()
        found = heir.consume_all()
        known = load.acknowledged | {("w", index) for index in range(HELD)}
        known |= {("new", index) for index in range(200)}
        assert (set(), 1) == (known - set(found), max(found.values()))


@pytest.mark.parametrize("form", ["{0},{1}", "{1},{0}", "ipv4:{0},{1}"])
def test_a_client_that_knows_both_servers_rides_through_a_takeover(
    form: str, redis: RedisServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        leader, standby = Pair(stack, redis, tmp_path).servers
        addresses = form.format(leader.address, standby.address)
        client = stack.enter_context(breadbox.connect(addresses))
        session = client.start_session().session_id
        for index in range(5):
            client.append(vector_fragment(index, session_id=session))
        leader.kill()
        for index in range(5, 10):
            client.append(vector_fragment(index, session_id=session))
        with client.fetch(10) as lease:
            indices = sorted(each.fragment_index for each in lease.fragments())
        assert list(range(10)) == indices
        # And back, once there is somebody to go back to.
        leader.start_standby()
        standby.kill()
        client.append(vector_fragment(10, session_id=session))
        leader.wait_serving(TAKEOVER_S)
        assert 1 == client.get_buffer().state.chunk_count


def test_payloads_that_pass_through_the_gateway_find_the_server_that_leads(
    redis: RedisServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        leader, standby = Pair(stack, redis, tmp_path, "--gateway").servers
        addresses = f"{standby.address},{leader.address}"
        client = stack.enter_context(breadbox.connect(addresses))
        session = client.start_session().session_id
        client.append(vector_fragment(0, session_id=session))
        leader.kill()
        client.append(vector_fragment(1, session_id=session))
        with client.fetch(2) as lease:
            assert [0, 1] == sorted(each.fragment_index for each in lease.fragments())


def test_a_leader_that_ends_in_order_is_replaced_at_once(
    redis: RedisServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        leader, standby = Pair(stack, redis, tmp_path).servers
        caller = Caller(stack, leader)
        caller.start_session()
        caller.append(redis.url, 10)
        with redis.client() as client:
            token = (client.get("breadbox:{journal}:alive") or b"").split(b" ")[0]
            assert 0 == leader.stop()
            # Given back, instead of running out.
            assert not (client.get("breadbox:{journal}:alive") or b"").startswith(token)
        standby.wait_serving(TAKEOVER_S)
        assert 10 == Caller(stack, standby).held()


def test_of_two_standbys_one_takes_over_and_the_other_follows_it(
    redis: RedisServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        pair = Pair(stack, redis, tmp_path, count=3)
        caller = Caller(stack, pair.servers[0])
        caller.start_session()
        caller.append(redis.url, 10)
        pair.servers[0].kill()
        others = pair.servers[1:]
        eventually_sync(lambda: 1 in [health_of(stack, each) for each in others], "a new leader")
        assert [1, 2] == sorted(health_of(stack, each) for each in others)
        (leader,) = [each for each in others if health_of(stack, each) == 1]
        (standby,) = [each for each in others if each is not leader]
        Caller(stack, leader).append(redis.url, 10, worker="next")
        # And so on: what the second one wrote is there with the third.
        leader.kill()
        standby.wait_serving(TAKEOVER_S)
        assert 20 == Caller(stack, standby).held()


def test_a_standby_takes_over_once_redis_is_back_where_the_leader_died_meanwhile(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(is_durable=True))
        leader, standby = Pair(stack, redis, tmp_path).servers
        caller = Caller(stack, leader)
        caller.start_session()
        caller.append(redis.url, 10)
        redis.kill()
        leader.kill()
        eventually_sync(lambda: "following the journal failed" in standby.log.read_text())
        assert 2 == health_of(stack, standby)
        redis.start()
        standby.wait_serving(TAKEOVER_S)
        assert 10 == Caller(stack, standby).held()


def test_a_leader_keeps_its_journal_over_a_restart_of_redis_in_which_its_claim_ran_out(
    tmp_path: Path,
) -> None:
    """Nobody could renew it meanwhile, and the leader may know what Redis has lost."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        leader, standby = Pair(stack, redis, tmp_path).servers
        caller = Caller(stack, leader)
        caller.start_session()
        caller.append(redis.url, 10)
        with redis.client() as client:
            client.save()
        caller.append(redis.url, 10, worker="late")
        redis.kill()
        eventually_sync(lambda: "following the journal failed" in standby.log.read_text())
        redis.start()
        eventually_sync(lambda: "again from memory" in leader.log.read_text())
        # It leads on once it is certain that it may.
        eventually_sync(caller.is_answered, "a leader that is certain")
        assert [1, 2] == [health_of(stack, each) for each in (leader, standby)]
        # Its payloads are lost with Redis, but not who leads: the standby follows it again.
        eventually_sync(lambda: "works again" in standby.log.read_text())
        caller.append(redis.url, 10, worker="after")
        held = caller.held()
        leader.kill()
        standby.wait_serving(TAKEOVER_S)
        assert held == Caller(stack, standby).held()


def test_a_standby_that_was_left_behind_by_a_trimmed_journal_begins_again_from_its_snapshot(
    redis: RedisServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        pair = Pair(stack, redis, tmp_path, count=1)
        (leader,) = pair.servers
        leader.stop()
        leader.arguments = (*leader.arguments, "--snapshot-entries", "100")
        leader.start()
        standby = ServerProcess(*leader.arguments, log=tmp_path / "standby.log")
        stack.enter_context(ended(standby))
        caller = Caller(stack, leader)
        caller.start_session()
        caller.append(redis.url, 10)
        standby.start_standby()
        eventually_sync(lambda: is_current(standby), "a standby that has read everything")
        standby.signal(signal.SIGSTOP)
        with redis.client() as client, Load(leader.address, redis.url):
            stopped_at = turn_of(client.xrevrange(TURNS, count=1))
            eventually_sync(
                lambda: turn_of(client.xrange(TURNS, count=1)) > stopped_at,
                "a journal that is trimmed behind the standby",
                within_s=60.0,
            )
        standby.signal(signal.SIGCONT)
        eventually_sync(lambda: "reading it again" in standby.log.read_text())
        held = caller.held()
        leader.kill()
        standby.wait_serving(TAKEOVER_S)
        assert held == Caller(stack, standby).held()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--store", "file://{folder}/store"), "--standby needs a journal that both servers"),
        (
            ("--store", "file://{folder}/store", "--journal", "{redis}"),
            "--standby needs a store that both servers",
        ),
        (("--store", "{redis}", "--journal", "none"), "needs a journal"),
        (("--store", "{redis}", "--take-over"), "leave --take-over out"),
    ],
)
def test_a_standby_of_what_is_on_one_machine_is_refused_with_the_remedy(
    arguments: tuple[str, ...], told: str, redis: RedisServer, tmp_path: Path
) -> None:
    given = [each.format(folder=tmp_path, redis=redis.url) for each in arguments]
    server = ServerProcess("--standby", *given, log=tmp_path / "log")
    with pytest.raises(AssertionError, match="did not start") as caught:
        server.start()
    assert told in str(caught.value)
    assert not (tmp_path / "store").exists()
