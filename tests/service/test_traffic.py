"""Who has a place among the calls in progress, and which connections are hung up on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server import limits
from breadbox_server.rpc import traffic
from breadbox_server.rpc.listening import PortConnections
from support.eventually import eventually
from support.http2 import (
    DATA,
    END_STREAM,
    INITIAL_WINDOW_SIZE,
    Conversation,
    frame,
    message_prefix,
    setting,
)
from support.served import CALL_S, Served, reason_of, served, span
from support.token_files import bearer, write_tokens

SERVICE = "/breadbox.v1.ReplayBufferService/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@asynccontextmanager
async def stranger(it: Served, *settings: bytes) -> AsyncIterator[Conversation]:
    conversation = await asyncio.to_thread(Conversation, it.server.address, *settings)
    try:
        yield conversation
    finally:
        await asyncio.to_thread(conversation.close)


async def give_up(it: Served, conversation: Conversation) -> None:
    """Begin a call, and give it up once the server knows of it."""
    arriving = sample(it, "messages_arriving")
    stream = conversation.begin(SERVICE + "ListBuffers")
    await eventually(lambda: sample(it, "messages_arriving") > arriving or conversation.is_closed)
    conversation.reset(stream)
    await eventually(lambda: sample(it, "messages_arriving") == arriving)


def sample(it: Served, name: str, **labels: str) -> float:
    return it.server.metrics.registry.get_sample_value(f"breadbox_{name}", labels) or 0.0


@pytest.mark.parametrize(
    "method", [SERVICE + "ListBuffers", REFLECTION, "/grpc.health.v1.Health/Watch"]
)
async def test_a_call_whose_message_does_not_come_ends(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "ARRIVAL_S", 0.1)
    monkeypatch.setattr(traffic, "LOOK_S", 0.05)
    async with served() as it, stranger(it) as slow:
        stream = slow.begin(method)
        await eventually(lambda: stream in slow.ended_streams)

        assert 1 == sample(it, "calls_refused_total", limit="arrivals")
        assert 0 == sample(it, "messages_arriving")


async def test_a_fetch_whose_message_does_not_come_holds_up_no_append() -> None:
    """Else headers alone would slow the producers of every tenant."""
    async with served() as it, stranger(it) as slow:
        slow.begin(SERVICE + "FetchFragments")
        await eventually(lambda: sample(it, "messages_arriving") == 1)

        assert not it.server.driver.appends.queue.precedence.has_learners


async def test_the_slowest_of_a_connection_makes_room_for_its_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic, "ARRIVALS_OF_CONNECTION_MAX", 3)
    async with served() as it, stranger(it) as slow:
        streams = [slow.begin(SERVICE + "ListBuffers") for _ in range(5)]
        await eventually(lambda: set(streams[:2]) <= slow.ended_streams)

        assert set(streams[:2]) == slow.ended_streams
        assert 3 == sample(it, "messages_arriving")


async def test_the_slowest_of_all_makes_room_for_another_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic, "ARRIVALS_OF_CONNECTION_MAX", 2)
    monkeypatch.setattr(traffic, "ARRIVALS_MAX", 2)
    async with served() as it, stranger(it) as first, stranger(it) as second:
        streams = [first.begin(SERVICE + "ListBuffers") for _ in range(2)]
        await eventually(lambda: sample(it, "messages_arriving") == 2)
        second.begin(SERVICE + "ListBuffers")
        await eventually(lambda: bool(first.ended_streams))
        await it.stub.GetBuffer(pb.GetBufferRequest(), timeout=CALL_S)

        assert streams[0] in first.ended_streams
        assert set() == second.ended_streams


async def test_a_connection_with_nothing_but_fruitless_calls_is_hung_up_on_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic, "FRUITLESS_MAX", 8 * traffic.STRANGER_WEIGHT)
    async with served() as it, stranger(it) as flooding, stranger(it) as other:
        for _ in range(20):
            flooding.reset(flooding.begin(SERVICE + "ListBuffers"))
            await it.stub.GetBuffer(pb.GetBufferRequest(), timeout=CALL_S)
            if flooding.is_closed:
                break
        await eventually(lambda: flooding.is_closed)

        assert not other.is_closed
        assert 1 == sample(it, "connections_closed_total", reason="flood")


async def test_a_proxy_with_more_useful_calls_than_fruitless_ones_is_not_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection is that of many callers: who is refused again and again ends no others'."""
    monkeypatch.setattr(traffic, "FRUITLESS_MAX", 8 * traffic.STRANGER_WEIGHT)
    async with served() as it, stranger(it) as proxy:
        for _ in range(40):
            useful = proxy.begin(SERVICE + "ListBuffers")
            proxy.send(frame(DATA, END_STREAM, useful, message_prefix(0)))
            ended = partial(proxy.ended_streams.__contains__, useful)
            await eventually(ended)
            await give_up(it, proxy)
        assert not proxy.is_closed

        for _ in range(400):
            await give_up(it, proxy)
            if proxy.is_closed:
                break
        await eventually(lambda: proxy.is_closed)


async def test_a_connection_that_takes_no_answers_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic, "ANSWER_TAKEN_S", 0.2)
    monkeypatch.setattr(traffic, "LOOK_S", 0.05)
    async with served() as it, stranger(it, setting(INITIAL_WINDOW_SIZE, 0)) as greedy:
        stream = greedy.begin(SERVICE + "ListBuffers")
        greedy.send(frame(DATA, END_STREAM, stream, message_prefix(0)))
        await eventually(lambda: greedy.is_closed)
        await it.stub.GetBuffer(pb.GetBufferRequest(), timeout=CALL_S)

        assert 1 == sample(it, "connections_closed_total", reason="untaken")


async def test_in_a_full_house_those_that_ask_for_nothing_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the look before: so they all have to be there before any has to make room."""
    monkeypatch.setattr(traffic, "LOOK_S", 0.05)
    full_house = traffic.FULL_HOUSE
    monkeypatch.setattr(traffic, "FULL_HOUSE", 2.0)
    async with served(connections_max=4) as it:
        await it.start()  # The stub's own is the first.
        async with contextlib.AsyncExitStack() as stack:
            idle = [await stack.enter_async_context(stranger(it)) for _ in range(3)]
            await eventually(lambda: sample(it, "connections") == 4)
            monkeypatch.setattr(traffic, "FULL_HOUSE", full_house)
            await eventually(lambda: all(each.is_closed for each in idle))
            await it.stub.GetBuffer(pb.GetBufferRequest(), timeout=CALL_S)

            assert 3 == sample(it, "connections_closed_total", reason="idle")


async def test_operators_have_places_when_all_others_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic, "CALLS_MAX", 2)
    async with served() as it:
        await it.start()
        fetches = [it.fetch(1, request_id=f"r{number}", wait_s=60) for number in range(2)]
        await eventually(lambda: sample(it, "calls") == 2)

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await it.fetch(1, request_id="r2", wait_s=60)
        await it.stub.ListBuffers(pb.ListBuffersRequest(), timeout=CALL_S)

        assert "SERVER_BUSY" == reason_of(refused.value)
        for each in fetches:
            each.cancel()
        await eventually(lambda: sample(it, "calls") == 0)


async def test_one_token_leaves_places_to_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(traffic, "CALLS_OF_TOKEN_MAX", 2)
    path = tmp_path / "tokens"
    greedy, honest = write_tokens(path, "admin greedy", "admin honest")
    async with served(tokens=path) as it:
        await it.stub.StartSession(
            pb.StartSessionRequest(session_id="s"), timeout=CALL_S, metadata=bearer(greedy)
        )
        known = pb.WatchModelRequest(known_session_id="s", known_model_version=0, max_wait=span(60))
        watches = [
            it.stub.WatchModel(known, timeout=CALL_S, metadata=bearer(greedy)) for _ in range(2)
        ]
        await eventually(lambda: sample(it, "calls") == 2)
        start = pb.StartSessionRequest(session_id="s")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await it.stub.StartSession(start, timeout=CALL_S, metadata=bearer(greedy))
        await it.stub.StartSession(start, timeout=CALL_S, metadata=bearer(honest))
        await it.stub.ListBuffers(pb.ListBuffersRequest(), metadata=bearer(greedy))
        for each in watches:
            each.cancel()
        await eventually(lambda: sample(it, "calls") == 0)
        await it.stub.StartSession(start, timeout=CALL_S, metadata=bearer(greedy))

        assert "SERVER_BUSY" == reason_of(refused.value)
        assert 1 == sample(it, "calls_refused_total", limit="token")


@pytest.mark.parametrize(("name", "value"), [("IDLE_S", 0.3), ("AGE_S", 0.3)])
async def test_clients_notice_nothing_when_their_connections_are_renewed(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, name, value)
    async with served() as it:
        await it.start()
        loop = asyncio.get_running_loop()
        peers: set[str] = set()
        connections = PortConnections()
        connections.listen_at(it.server.address)
        until = loop.time() + 2.0
        wait: Any = None
        while loop.time() < until:
            # One that waits while its connection gets too old, and short ones beside it.
            wait = wait or it.fetch(1, request_id=f"r{loop.time()}", wait_s=0.8)
            await it.stub.GetBuffer(pb.GetBufferRequest(), timeout=CALL_S)
            peers |= connections.peers()
            if name == "IDLE_S":
                wait.cancel()
                wait = None
                await asyncio.sleep(0.5)
            elif wait.done():
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await wait
                wait = None

        assert len(peers) > 1, "the connection was renewed"
