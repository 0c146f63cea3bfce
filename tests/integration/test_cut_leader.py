"""A leader that is cut off from its journal, and whose standby is not: who leads, and is asked."""

import signal
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import breadbox
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1 import replay_buffer_service_pb2_grpc
from breadbox_server.maintenance import probe
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.proxy import Proxy
from support.redis_server import RedisServer
from support.served import info_of, span
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TAKEOVER_S = 20.0
CALL_S = 20.0
SOON_S = 8.0
"""A call that was in progress at the cut is over by then, long before its own deadline."""


class CutOff:
    """A leader that reaches Redis through a cable that can be cut, and a standby with its own."""

    def __init__(self, stack: ExitStack, folder: Path, *options: str) -> None:
        self.redis = stack.enter_context(RedisServer(with_tcp=True, is_durable=True))
        self.cable = stack.enter_context(Proxy(("127.0.0.1", self.redis.port)))
        self.leader, self.standby = (
            ServerProcess(
                *("--store", f"redis://127.0.0.1:{port}", "--standby", *options),
                *("--client-store", self.redis.tcp_url, "--metrics-listen", "127.0.0.1:0"),
                log=folder / f"{name}.log",
            )
            for name, port in (("leader", self.cable.port), ("standby", self.redis.port))
        )
        stack.callback(self.standby.__exit__, None, None, None)
        stack.callback(self.leader.__exit__, None, None, None)
        self.leader.start(TAKEOVER_S)
        self.standby.start_standby()
        self.addresses = f"{self.leader.address},{self.standby.address}"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[CutOff]:
    with ExitStack() as stack:
        yield CutOff(stack, tmp_path)


def status_of(server: ServerProcess) -> str:
    return probe.probe(server.address)[0]


def leads(server: ServerProcess) -> float:
    """What the metrics of a server say."""
    with urllib.request.urlopen(server.metrics_url, timeout=CALL_S) as page:
        lines = page.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("breadbox_leads ")).split()[1])


def refusal_of(call: Callable[[], Any]) -> Any:
    """Reason and details of an error that a raw call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return info_of(caught.value)


def test_a_leader_cut_off_from_its_journal_leads_no_more_and_says_so(pair: CutOff) -> None:
    with ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(pair.leader.address))
        stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
        assert 1.0 == leads(pair.leader)
        pair.cable.fall_silent()
        pair.standby.wait_serving(TAKEOVER_S)
        eventually_sync(lambda: leads(pair.leader) == 0.0, "the leader's metrics")
        assert ("NOT_SERVING", "SERVING") == (status_of(pair.leader), status_of(pair.standby))
        assert 1.0 == leads(pair.standby)
        # Nobody restarts it for that, and nobody ends the other one for it.
        outcomes = [probe.main([each, pair.leader.address]) for each in ("--alive", "--ready")]
        assert [0, 1] == outcomes
        for method, request in (
            ("GetBuffer", pb.GetBufferRequest(name="default")),
            ("WatchModel", pb.WatchModelRequest()),
            ("StartSession", pb.StartSessionRequest(session_id="run")),
        ):
            told = refusal_of(partial(getattr(stub, method), request, timeout=CALL_S))
            assert "STANDBY" == told.reason, method
        pair.cable.speak()
        assert 2 == pair.leader.wait()


def test_clients_go_on_at_the_standby_while_the_leader_is_cut_off(pair: CutOff) -> None:
    with breadbox.connect(pair.addresses, deadline_s=30.0) as client:
        session = client.start_session().session_id
        for index in range(5):
            client.append(vector_fragment(index, session_id=session))
        pair.cable.fall_silent()
        cut_at = monotonic()
        for index in range(5, 10):
            client.append(vector_fragment(index, session_id=session))
        assert monotonic() - cut_at < SOON_S
        with client.fetch(10) as lease:
            indices = sorted(each.fragment_index for each in lease.fragments())
        assert list(range(10)) == indices


WAITING: dict[str, tuple[str, Any]] = {
    "fetch": (
        "FetchFragments",
        pb.FetchFragmentsRequest(request_id="r", fragment_count=4, max_wait=span(60.0)),
    ),
    "watch": ("WatchModel", pb.WatchModelRequest(known_session_id="run", max_wait=span(60.0))),
    "read": ("ReadFragments", pb.ReadFragmentsRequest(max_wait=span(60.0))),
    "publish": ("PublishModel", pb.PublishModelRequest(session_id="run", model_version=1)),
}


@pytest.mark.parametrize("kind", [*WAITING, "health"])
def test_what_waits_at_a_leader_that_is_cut_off_is_told_at_once(pair: CutOff, kind: str) -> None:
    with ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(pair.leader.address))
        stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
        stub.StartSession(pb.StartSessionRequest(session_id="run"), timeout=CALL_S)
        known = stub.WatchModel(pb.WatchModelRequest(), timeout=CALL_S)
        if kind == "publish":
            pair.cable.fall_silent()
        if kind == "health":
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=60.0
            )
            assert 1 == next(watch).status
            pair.cable.fall_silent()
            cut_at = monotonic()
            assert 2 == next(watch).status
            watch.cancel()
        else:
            method, request = WAITING[kind]
            if kind == "watch":
                request.known_model_version = known.model_version
            calls = stack.enter_context(ThreadPoolExecutor(1))
            waiting = calls.submit(refusal_of, lambda: getattr(stub, method)(request, timeout=60.0))
            eventually_sync(lambda: waiting.running())
            pair.cable.fall_silent()
            cut_at = monotonic()
            assert waiting.result(60.0).reason in ("STORE_UNAVAILABLE", "STANDBY")
        assert monotonic() - cut_at < SOON_S


def test_a_leader_whose_journal_answers_again_before_another_claims_it_leads_on(
    pair: CutOff,
) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(breadbox.connect(pair.addresses))
        session = client.start_session().session_id
        client.append(vector_fragment(0, session_id=session))
        pair.standby.signal(signal.SIGSTOP)
        pair.cable.fall_silent()
        eventually_sync(lambda: status_of(pair.leader) == "NOT_SERVING", within_s=SOON_S)
        pair.cable.speak()
        eventually_sync(lambda: status_of(pair.leader) == "SERVING", within_s=SOON_S)
        assert 1.0 == leads(pair.leader)
        pair.standby.signal(signal.SIGCONT)
        client.append(vector_fragment(1, session_id=session))
        assert 2 == client.get_buffer().state.chunk_count
        assert "NOT_SERVING" == status_of(pair.standby)


def test_payloads_through_the_gateway_of_a_leader_that_is_cut_off_find_the_standby(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        pair = CutOff(stack, tmp_path, "--gateway", "--inline-size-max", "0")
        client = stack.enter_context(breadbox.connect(pair.addresses, deadline_s=30.0))
        session = client.start_session().session_id
        client.append(vector_fragment(0, session_id=session))
        pair.cable.fall_silent()
        client.append(vector_fragment(1, session_id=session))
        with client.fetch(2) as lease:
            assert [0, 1] == sorted(each.fragment_index for each in lease.fragments())


def test_a_server_without_a_standby_lets_calls_wait_for_its_journal(tmp_path: Path) -> None:
    """There is nobody else to ask, and what waits keeps its place in the line."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(with_tcp=True))
        cable = stack.enter_context(Proxy(("127.0.0.1", redis.port)))
        server = stack.enter_context(
            ServerProcess(
                *("--store", f"redis://127.0.0.1:{cable.port}"),
                *("--client-store", redis.tcp_url, "--metrics-listen", "127.0.0.1:0"),
                log=tmp_path / "log",
            )
        )
        client = stack.enter_context(breadbox.connect(server.address))
        session = client.start_session().session_id
        client.append(vector_fragment(0, session_id=session))
        cable.fall_silent()
        eventually_sync(lambda: leads(server) == 0.0, "metrics that say so")
        assert "SERVING" == status_of(server)
        assert 1 == client.get_buffer().state.chunk_count
        cable.speak()
        client.append(vector_fragment(1, session_id=session))
        eventually_sync(lambda: leads(server) == 1.0, "metrics that say so")
