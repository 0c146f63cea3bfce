"""Who may watch the health of a server: every connection, and none of them for many."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from breadbox_server.limits import CONNECTIONS_MAX, WATCHES_MAX, WATCHES_OF_CONNECTION_MAX
from breadbox_server.rpc import health
from support.served import Served, served

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
async def world() -> AsyncIterator[Served]:
    async with served() as running:
        yield running


def channel_to(world: Served) -> grpc.aio.Channel:
    """A connection of its own."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    return grpc.aio.insecure_channel(world.server.address, options=options)


def watch(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())


async def test_every_connection_may_watch_since_clients_by_name_call_nobody_else() -> None:
    assert WATCHES_MAX >= CONNECTIONS_MAX


async def test_a_connection_that_watches_often_is_refused_and_others_are_not(world: Served) -> None:
    async with AsyncExitStack() as stack:
        greedy = await stack.enter_async_context(channel_to(world))
        watches = [watch(greedy) for _ in range(WATCHES_OF_CONNECTION_MAX)]
        assert {SERVING} == {(await each.read()).status for each in watches}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(greedy).read()
        assert grpc.StatusCode.RESOURCE_EXHAUSTED == caught.value.code()
        other = await stack.enter_async_context(channel_to(world))
        assert SERVING == (await watch(other).read()).status
        # Whoever stops may begin again.
        watches[0].cancel()
        async with asyncio.timeout(10):
            while True:
                try:
                    status = (await watch(greedy).read()).status
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)
                else:
                    break
        assert SERVING == status


async def test_all_together_are_bounded(world: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "WATCHES_MAX", 1)
    async with channel_to(world) as first, channel_to(world) as second:
        kept = watch(first)
        assert SERVING == (await kept.read()).status
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(second).read()
        assert grpc.StatusCode.RESOURCE_EXHAUSTED == caught.value.code()
