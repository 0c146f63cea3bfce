"""Connections that a balancer has forgotten: they are silent, and new ones are not."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import breadbox
from breadbox.model import errors
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1.replay_buffer_service_pb2_grpc import ReplayBufferServiceStub
from breadbox_server import limits
from support.callers import KINDS, make_caller
from support.eventually import eventually, eventually_sync
from support.fragments import large_fragment, vector_fragment
from support.proxy import Proxy
from support.served import served
from support.server_process import ServerProcess
from support.tiers import LONG

pytestmark = pytest.mark.integration

SILENCE_S = 1.0
"""Given to every attempt; all attempts on the connection of before would be silent."""
MARGIN_S = 5.0
"""For a busy machine, beside what is promised."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    options = ("--store", f"file://{tmp_path}/store", "--gateway")
    with ServerProcess(*options, log=tmp_path / "log") as process:
        yield process


@pytest.fixture
def balancer(server: ServerProcess) -> Iterator[Proxy]:
    host, _, port = server.address.rpartition(":")
    with Proxy((host, int(port))) as proxy:
        yield proxy


@pytest.mark.parametrize("kind", KINDS)
async def test_the_attempt_after_a_silent_one_goes_on_a_fresh_connection(
    kind: str, balancer: Proxy
) -> None:
    async with make_caller(kind, balancer.address, deadline_s=SILENCE_S) as caller:
        await caller.call("list_buffers")
        balancer.forget_connections()
        assert ["default"] == [each.name for each in await caller.call("list_buffers")]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_never_retries_is_silent_once(kind: str, balancer: Proxy) -> None:
    options: dict[str, Any] = {"deadline_s": SILENCE_S, "reconnect_s": 0.0}
    async with make_caller(kind, balancer.address, **options) as caller:
        await caller.call("list_buffers")
        balancer.forget_connections()
        with pytest.raises(errors.DeadlineExceededError):
            await caller.call("list_buffers")
        assert ["default"] == [each.name for each in await caller.call("list_buffers")]


def test_a_client_made_after_silence_shares_no_connection_that_is_silent(balancer: Proxy) -> None:
    with breadbox.connect(balancer.address, deadline_s=SILENCE_S) as client:
        client.list_buffers()
        balancer.forget_connections()
        client.list_buffers()
        with breadbox.connect(balancer.address, deadline_s=SILENCE_S, reconnect_s=0) as another:
            assert ["default"] == [each.name for each in another.list_buffers()]


def test_payloads_go_through_the_gateway_on_a_fresh_connection(balancer: Proxy) -> None:
    with breadbox.connect(balancer.address, deadline_s=SILENCE_S, store_url="gateway:") as client:
        client.start_session("s")
        client.append(large_fragment(0))
        balancer.forget_connections()
        client.append(large_fragment(1))
        grant = client.service.fetch_fragments(2, 10.0)
        assert [0, 1] == sorted(each.metadata.fragment_index for each in grant.fragments)


async def test_a_fetch_that_waits_keeps_its_connection_while_another_call_leaves_it() -> None:
    """A server that stands still for a moment costs no fetch its position in the queue."""
    async with served() as world:
        host, _, port = world.server.address.rpartition(":")
        with Proxy((host, int(port))) as balancer:
            async with (
                make_caller("asyncio", balancer.address, deadline_s=SILENCE_S) as caller,
                asyncio.TaskGroup() as tasks,
            ):
                await caller.call("start_session", "run")
                fetching = tasks.create_task(caller.call("fetch_fragments", 1, 60.0))
                await eventually(lambda: world.server.driver.core.waiting_count == 1)
                balancer.fall_silent()
                listing = tasks.create_task(caller.call("list_buffers"))
                await eventually(lambda: _is_replaced(caller))
                balancer.speak()
                await listing
                assert not fetching.done()
                assert 1 == world.server.driver.core.waiting_count
                await world.fill(1)
                assert 1 == len((await fetching).fragments)


def _is_replaced(caller: Any) -> bool:
    return len(caller.client._interpreter._lines._calls) > 1  # noqa: SLF001 - no other sign


async def test_the_server_hangs_up_on_a_forgotten_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC's own timeout of a ping, a minute, is not added to the server's."""
    monkeypatch.setattr(limits, "KEEPALIVE_S", 2.0)
    monkeypatch.setattr(limits, "KEEPALIVE_ANSWER_S", 1.0)
    async with served() as world:
        host, _, port = world.server.address.rpartition(":")
        with Proxy((host, int(port))) as balancer:
            never = (("grpc.keepalive_time_ms", 10**7), ("grpc.use_local_subchannel_pool", 1))
            async with grpc.aio.insecure_channel(balancer.address, options=never) as channel:
                await world.start()
                waiting = type(world)(
                    world.server, type(world.stub)(channel), channel, world.custodian, world.clock
                ).fetch(1, wait_s=100)
                waiting_count = lambda: world.server.driver.core.waiting_count  # noqa: E731
                await eventually(lambda: waiting_count() == 1)
                balancer.forget_connections()
                await eventually(lambda: waiting_count() == 0, within_s=3.0 + MARGIN_S)
                waiting.cancel()


@LONG
@pytest.mark.timeout(90)
@pytest.mark.parametrize(("places", "promised_s"), [(1, 40.0), (2, 15.0)])
def test_a_waiting_fetch_leaves_a_forgotten_connection_in_the_time_that_documents_promise(
    places: int, promised_s: float, server: ServerProcess, balancer: Proxy
) -> None:
    host, _, port = server.address.rpartition(":")
    with Proxy((host, int(port))) as second:
        address = ",".join([balancer.address, second.address][:places])
        with breadbox.connect(address) as client, breadbox.connect(server.address) as direct:
            client.start_session("s")
            started_at = time.monotonic()
            with ThreadPoolExecutor(1) as threads:
                fetching = threads.submit(client.service.fetch_fragments, 1, 80.0)
                eventually_sync(lambda: direct.get_buffer().state.waiter_count == 1)
                balancer.forget_connections()
                direct.append(vector_fragment(0))
                assert 1 == len(fetching.result().fragments)
            assert time.monotonic() - started_at < promised_s + MARGIN_S


@LONG
def test_a_call_that_waits_is_not_cut_off_for_its_pings(server: ServerProcess) -> None:
    """gRPC's default counts pings within five minutes as abuse, and the third of them ends it."""
    pings_s = 10.0  # The shortest that gRPC's clients take.
    options = [
        ("grpc.keepalive_time_ms", int(1000 * pings_s)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
    ]
    with grpc.insecure_channel(server.address, options=options) as channel:
        request = pb.FetchFragmentsRequest(buffer="default", request_id="r", fragment_count=1)
        request.max_wait.FromSeconds(int(6 * pings_s))
        reply = ReplayBufferServiceStub(channel).FetchFragments(request, timeout=9 * pings_s)
    assert "no session" in reply.wait_elapsed.waiting_reason.lower(), reply
