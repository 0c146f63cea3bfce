"""How long a buffer has been idle: calls that use it count, from their beginning to their end."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.access.authorization import RULES, SERVICE
from breadbox_server.core.model.config import BufferConfig, FullPolicy
from support.eventually import eventually
from support.served import Served, served
from support.token_files import bearer, write_tokens

Metadata = Any


async def idle_s(it: Served, metadata: Metadata = ()) -> float:
    """What `breadbox buffers delete --idle-s` goes by; the clock has no part of a second."""
    reply = await it.stub.GetBuffer(pb.GetBufferRequest(), metadata=metadata)
    return float(reply.buffer.state.idle_duration.ToTimedelta().total_seconds())


async def call(it: Served, method: str, metadata: Metadata = (), **fields: Any) -> Any:
    """Make a call; a refusal is an answer too."""
    try:
        request = getattr(pb, f"{method}Request")(**fields)
        return await getattr(it.stub, method)(request, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error


FIELDS: dict[str, dict[str, Any]] = {
    "CreateBuffer": {"name": "default"},
    "FetchFragments": {"request_id": "r", "fragment_count": 1},
    "UpdateBuffer": {"name": "default"},
    "CreateSubscription": {"name": "s"},
}
LOOKS = {"GetBuffer", "DeleteBuffer"}
OF_LEASES = {"RenewLease", "ReleaseLease"}
METHODS = sorted(
    path.removeprefix(SERVICE)
    for path, rule in RULES.items()
    if rule.buffer and path.startswith(SERVICE)
)


@pytest.mark.parametrize("method", METHODS)
async def test_each_call_that_names_a_buffer_uses_it_but_for_looks_and_what_ends_leases(
    method: str,
) -> None:
    async with served() as it:
        await it.start()
        it.clock.advance(100.0)
        assert 100.0 == await idle_s(it)
        if method == "DeleteBuffer":
            await call(it, method, name="other")
        else:
            await call(it, method, **FIELDS.get(method, {}))

        is_use = method not in LOOKS | OF_LEASES
        assert (0.0 if is_use else 100.0) == await idle_s(it)


async def test_a_new_buffer_is_idle_since_it_was_made() -> None:
    async with served() as it:
        it.clock.advance(100.0)
        await it.stub.CreateBuffer(pb.CreateBufferRequest(name="new"))
        it.clock.advance(1.0)
        listed = (await it.stub.ListBuffers(pb.ListBuffersRequest())).buffers

    assert {"default": 101, "new": 1} == {
        each.name: each.state.idle_duration.seconds for each in listed
    }


WAITS: dict[str, dict[str, Any]] = {
    "FetchFragments": {"request_id": "r", "fragment_count": 1},
    "WatchModel": {"known_session_id": "run", "known_model_version": 0},
    "ReadFragments": {"known_session_id": "run"},
}


def waiting_calls(it: Served) -> int:
    return int(it.server.metrics.registry.get_sample_value("breadbox_calls") or 0)


@pytest.mark.parametrize("method", WAITS)
async def test_a_buffer_is_in_use_while_a_call_waits_and_idle_from_its_end_on(method: str) -> None:
    async with served() as it, asyncio.TaskGroup() as tasks:
        await it.start()
        fields = WAITS[method] | {"max_wait": Duration(seconds=50)}
        waiting = tasks.create_task(call(it, method, **fields))
        await eventually(lambda: waiting_calls(it) == 1)
        it.clock.advance(40.0)
        assert 0.0 == await idle_s(it)
        it.clock.advance(20.0)
        await waiting
        it.clock.advance(3.0)
        assert 3.0 == await idle_s(it)


async def test_a_buffer_is_in_use_while_an_append_waits_for_room() -> None:
    config = BufferConfig(capacity_chunks=1, full_policy=FullPolicy.BLOCK)
    async with served(config) as it, asyncio.TaskGroup() as tasks:
        await it.start()
        append = partial(call, it, "AppendFragments")
        await append(fragments=[it.metadata(0)])
        wait = Duration(seconds=50)
        waiting = tasks.create_task(append(fragments=[it.metadata(1)], max_wait=wait))
        await eventually(lambda: waiting_calls(it) == 1)
        it.clock.advance(40.0)
        assert 0.0 == await idle_s(it)
        waiting.cancel()


async def leased_by_fetch(it: Served) -> str:
    reply = await call(it, "FetchFragments", request_id="r", fragment_count=1)
    return str(reply.grant.lease.lease_id)


async def leased_by_read(it: Served, **fields: Any) -> str:
    return str((await call(it, "ReadFragments", **fields)).lease.lease_id)


@pytest.mark.parametrize(
    ("lease", "is_use"),
    [
        (leased_by_fetch, True),
        (leased_by_read, True),
        (partial(leased_by_read, is_look=True), False),
    ],
    ids=["fetch", "read", "look"],
)
async def test_a_buffer_is_in_use_while_a_lease_lives_but_for_a_looks(
    lease: Callable[[Served], Awaitable[str]], is_use: bool
) -> None:
    async with served() as it:
        await it.start()
        await call(it, "AppendFragments", fragments=[it.metadata(0)])
        lease_id = await lease(it)
        it.clock.advance(5.0)
        assert (0.0 if is_use else 5.0) == await idle_s(it)
        await call(it, "RenewLease", lease_id=lease_id)
        it.clock.advance(5.0)
        assert (0.0 if is_use else 10.0) == await idle_s(it)
        await call(it, "ReleaseLease", lease_id=lease_id, mode=pb.RELEASE_MODE_CONSUMED)
        it.clock.advance(2.0)

        assert (2.0 if is_use else 12.0) == await idle_s(it)


@pytest.mark.parametrize("method", ["WatchModel", "ReadFragments", "GetBuffer"])
async def test_no_call_of_a_viewer_uses_a_buffer(method: str, tmp_path: Path) -> None:
    boss, page = map(bearer, write_tokens(tmp_path / "tokens", "admin boss", "viewer page"))
    async with served(tokens=tmp_path / "tokens") as it:
        await call(it, "StartSession", boss, session_id="run")
        await call(it, "AppendFragments", boss, fragments=[it.metadata(0)])
        it.clock.advance(9.0)
        reply = await call(it, method, page)
        it.clock.advance(1.0)

        assert 10.0 == await idle_s(it, page)
        if method == "ReadFragments":
            ended = await call(it, "ReleaseLease", page, lease_id=reply.lease.lease_id, mode=1)
            assert isinstance(ended, pb.ReleaseLeaseResponse)
            assert 10.0 == await idle_s(it, page)


async def test_calls_that_name_buffers_that_do_not_exist_are_not_remembered() -> None:
    async with served() as it:
        for number in range(20):
            await call(it, "WatchModel", buffer=f"none-{number}")
        await it.stub.CreateBuffer(pb.CreateBufferRequest(name="b"))
        await it.stub.DeleteBuffer(pb.DeleteBufferRequest(name="b"))

        assert {"default"} >= set(it.server.driver.uses._last_at)  # noqa: SLF001 - what it keeps
