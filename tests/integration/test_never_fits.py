"""What can never fit is refused immediately, with both sizes, in place of a wait for room."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox.aio import connect as connect_async
from breadbox.model.errors import InvalidRequestError, LimitExceededError
from breadbox.model.fragment import Fragment
from support.fragments import vector_fragment
from support.redis_server import RedisServer
from support.server_process import ServerProcess
from support.small_disk import CannotMountError, small_disk
from support.token_files import write_tokens

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MIB = 2**20
STORE_BYTES = 24 * MIB
LARGE = np.zeros(40 * MIB, np.uint8)
SOON_S = 20.0
"""Far less than `append_wait_s`, and long enough for a machine that is busy."""


@pytest.fixture(params=["files", "files-gateway", "redis", "redis-gateway"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    kind, _, gateway = request.param.partition("-")
    more = ("--gateway",) if gateway else ()
    with ExitStack() as stack:
        if kind == "redis":
            redis = RedisServer(with_tcp=True, memory_bytes_max=STORE_BYTES)
            url = stack.enter_context(redis).tcp_url
        else:
            try:
                disk = small_disk(tmp_path / "disk", size_bytes=STORE_BYTES)
                url = f"file://{stack.enter_context(disk)}/store"
            except CannotMountError as error:
                pytest.skip(f"a small file system cannot be mounted here: {error}")
        process = ServerProcess("--store", url, *more, log=tmp_path / "log")
        yield stack.enter_context(process)


def with_obs(fragment: Fragment, obs: Any) -> Fragment:
    return replace(fragment, obs=obs, next_obs=obs[0])


def refused(call: Callable[[], object]) -> str:
    began_at = time.monotonic()
    with pytest.raises(InvalidRequestError) as caught:
        call()
    assert time.monotonic() - began_at < SOON_S
    return str(caught.value)


def test_a_payload_larger_than_the_store_is_refused_and_smaller_ones_go_on(
    server: ServerProcess,
) -> None:
    large = with_obs(vector_fragment(1), LARGE.reshape(4, -1))
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        for call in (
            lambda: client.publish("s", 1, {"w": LARGE}),
            lambda: client.append(large),
            lambda: client.append_many([vector_fragment(0), large]),
        ):
            text = refused(call)
            assert "payload store takes at most" in text
            assert int(text.split()[2]) >= LARGE.nbytes
        client.publish("s", 1, {"w": LARGE[:1000]})


def test_the_asyncio_client_refuses_it_too(server: ServerProcess) -> None:
    async def publish() -> None:
        async with connect_async(server.address) as client:
            await client.start_session("s")
            await client.publish("s", 1, {"w": LARGE})

    assert "payload store takes at most" in refused(lambda: asyncio.run(publish()))


def test_a_fragment_larger_than_its_buffer_or_its_tokens_quota_is_refused(tmp_path: Path) -> None:
    admin, small = write_tokens(tmp_path / "tokens", "admin a", "producer p bytes_held_max=10000")
    arguments = ("--store", f"file://{tmp_path}/store", "--tokens", str(tmp_path / "tokens"))
    with (
        ServerProcess(*arguments, log=tmp_path / "log") as server,
        breadbox.connect(server.address, token=admin) as client,
        breadbox.connect(server.address, token=small) as producer,
    ):
        client.create_buffer("b", breadbox.BufferConfig(capacity_bytes=10_000))
        for buffer in ("b", "default"):
            client.start_session("s", buffer=buffer)
        large = with_obs(vector_fragment(), np.zeros((4, 10_000), np.uint8))
        text = refused(lambda: client.append(large, buffer="b"))
        assert "the buffer holds at most 10000 bytes" in text
        with pytest.raises(LimitExceededError, match=r"10000 with the 5\d{4} of this call alone"):
            producer.append(large)
