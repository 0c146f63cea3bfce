"""The library against a real server: what a user does."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox.model import errors
from breadbox.model.types import AdmissionOutcome, BufferConfig, FullPolicy
from breadbox.testing import ServerProcess, start_server
from breadbox.writing.appender import Appender
from support.callers import KINDS, Caller, make_caller
from support.fragments import vector_fragment
from support.proxy import Proxy

pytestmark = pytest.mark.integration

NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=["to the store", "through the gateway"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    options = ["--capacity-chunks", "4096"]
    if request.param == "through the gateway":
        options.append("--gateway")
    with start_server(options=options) as server:
        yield server


@pytest.fixture(params=KINDS)
async def caller(request: pytest.FixtureRequest, server: ServerProcess) -> Any:
    """A client with a buffer of its own, in session "s" at version 0."""
    name = f"b{next(NUMBERS)}"
    async with make_caller(request.param, server.address, buffer=name) as made:
        await made.call("create_buffer", name, BufferConfig(staleness_max=2, uses_max=1))
        await made.call("start_session", "s")
        yield made


def outcomes(results: list[breadbox.types.AppendResult]) -> list[AdmissionOutcome]:
    return [result.outcome for result in results]


ADMITTED = AdmissionOutcome.ADMITTED
DUPLICATE = AdmissionOutcome.DUPLICATE


async def load_all(caller: Caller, lease: Any) -> list[breadbox.Fragment]:
    if isinstance(caller.client, breadbox.Client):
        with lease:
            return list(lease.fragments())
    async with lease:
        return [fragment async for fragment in lease.fragments()]


# A life ------------------------------------------------------------------------------------------


async def test_what_is_appended_is_fetched_once(caller: Caller) -> None:
    sent = [vector_fragment(index) for index in range(20)]
    assert [ADMITTED] * 20 == outcomes(await caller.call("append_many", sent))
    assert [DUPLICATE] * 20 == outcomes(await caller.call("append_many", sent))
    lease = await caller.call("fetch", 20, 5.0)
    loaded = await load_all(caller, lease)
    assert list(range(20)) == sorted(fragment.fragment_index for fragment in loaded)
    for fragment in loaded:
        assert np.array_equal(sent[fragment.fragment_index].obs, fragment.obs)
    with pytest.raises(errors.WaitElapsedError, match="0 chunks are held and 1 is needed"):
        await caller.call("fetch", 1, 0.0)


async def test_weights_reach_who_watches(caller: Caller) -> None:
    weights = {"layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    known = await caller.call("watch_model")
    await caller.call("publish", "s", 1, weights)
    state = await caller.call("watch_model", known, max_wait_s=5.0)
    assert ("s", 1) == (state.session_id, state.model_version)
    loaded = await caller.call("load_weights", state.weights)
    assert np.array_equal(weights["layer.weight"], loaded["layer.weight"])


async def test_a_version_that_moves_back_is_refused_with_both(caller: Caller) -> None:
    await caller.call("publish_model", "s", 5)
    with pytest.raises(errors.VersionRegressedError) as caught:
        await caller.call("publish_model", "s", 3)
    assert (5, 3) == (caught.value.current, caught.value.announced)


async def test_ranks_get_disjoint_shares(caller: Caller) -> None:
    await caller.call("append_many", [vector_fragment(index) for index in range(8)])
    shares = [
        await caller.call("fetch_fragments", 8, 5.0, rank=rank, world_size=2, request_id="r")
        for rank in range(2)
    ]
    prepared = await caller.call("get_prepared_fragments", "r")
    assert prepared == shares[0].fragments + shares[1].fragments
    assert "r" == (await caller.call("get_buffer")).state.latest_request_id
    with pytest.raises(errors.RequestMismatchError, match="world_size"):
        await caller.call("fetch_fragments", 8, 5.0, rank=0, world_size=4, request_id="r")


async def test_what_nobody_has_is_an_error_that_names_it(caller: Caller) -> None:
    cases: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
        ("get_buffer", ("nope",), errors.BufferNotFoundError, "nope"),
        ("renew_lease", ("nope",), errors.LeaseExpiredError, "nope"),
        ("get_prepared_fragments", ("nope",), errors.RequestNotFoundError, "nope"),
        ("publish_model", ("nope", 1), errors.SessionEndedError, "nope"),
        ("fetch", (10**9,), errors.InvalidRequestError, "fragment_count"),
        ("fetch", (0,), errors.InvalidRequestError, "fragment_count"),
        ("create_buffer", ("a/b",), errors.InvalidRequestError, "buffer"),
    ]
    for method, args, kind, named in cases:
        with pytest.raises(kind, match=named):
            await caller.call(method, *args)


async def test_a_full_buffer_that_blocks_makes_producers_wait_until_there_is_room(
    caller: Caller,
) -> None:
    config = BufferConfig(capacity_chunks=4, full_policy=FullPolicy.BLOCK)
    await caller.call("update_buffer", caller.client.buffer, config)
    async with asyncio.TaskGroup() as tasks:
        appending = tasks.create_task(
            caller.call("append_many", [vector_fragment(index) for index in range(6)])
        )
        lease = await caller.call("fetch", 4, 10.0)
        await load_all(caller, lease)
    assert [ADMITTED] * 6 == outcomes(appending.result())
    state = (await caller.call("get_buffer")).state
    assert (2, 6) == (state.chunk_count, state.counters["fragments_admitted"])


def test_the_appender_obeys_back_pressure_and_loses_nothing(server: ServerProcess) -> None:
    name = f"b{next(NUMBERS)}"
    with breadbox.connect(server.address, buffer=name) as client:
        config = BufferConfig(capacity_chunks=8, full_policy=FullPolicy.BLOCK)
        client.create_buffer(name, config)
        client.start_session("s")
        seen: list[int] = []
        with Appender(client) as appender:
            for index in range(64):
                appender.append(vector_fragment(index))
            while len(seen) < 64:
                with client.fetch(8, 20.0) as lease:
                    seen += [fragment.fragment_index for fragment in lease.fragments()]
        assert 64 == appender.counts.admitted
        assert list(range(64)) == sorted(seen)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_behind_a_slow_link_is_reached_at_the_first_attempt(
    kind: str, server: ServerProcess
) -> None:
    """A connection takes several times as long as the link: no attempt may be shorter than that."""
    host, _, port = server.address.rpartition(":")
    with Proxy((host, int(port))) as link:
        link.pass_after(0.8)
        async with make_caller(kind, link.address, reconnect_s=0.0) as caller:
            assert "default" == (await caller.call("get_buffer")).name
