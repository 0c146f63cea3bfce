"""Redis behind Sentinel: the primary dies, its replica takes over, and the work goes on."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.model.errors import StoreUnavailableError
from breadbox.model.types import PayloadReference
from breadbox.stores import open_custodian, open_store
from breadbox.stores.base import Confirmation, PayloadCustodian
from breadbox.stores.redis.factory import open_redis_async
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.redis_sentinel import WatchedRedis
from support.server_process import ServerProcess
from support.store_contract import in_buffers, payload_of, read_back

ADMITTED = breadbox.AdmissionOutcome.ADMITTED


@pytest.fixture
def watched() -> Iterator[WatchedRedis]:
    with WatchedRedis() as started:
        yield started


async def confirmed(
    custodian: PayloadCustodian, references: list[PayloadReference]
) -> list[Confirmation]:
    """What a custodian says once it has found the new primary."""
    give_up_at = time.monotonic() + 30.0
    while True:
        try:
            return await custodian.confirm(references)
        except StoreUnavailableError:
            assert time.monotonic() < give_up_at
            await asyncio.sleep(0.05)


async def test_a_store_follows_a_failover(watched: WatchedRedis) -> None:
    store = open_store(watched.url, piece_size_bytes=64 * 1024)
    custodian = open_custodian(watched.url, unannounced_s=600.0)
    try:
        before = payload_of(300_000)
        (kept,) = store.write_many([in_buffers(before)])
        assert [Confirmation.THERE] == await custodian.confirm([kept])
        watched.wait_until_replicated()
        watched.kill_primary()
        after = payload_of(300_000)
        written: list[PayloadReference] = []

        def is_written() -> bool:
            # Until the Sentinel has settled, some of its answers name the dead one.
            with contextlib.suppress(StoreUnavailableError):
                written.extend(store.write_many([in_buffers(after)]))
            return bool(written)

        eventually_sync(is_written, "a write to the new primary", within_s=30.0)
        assert [before, after] == read_back(store, [kept, *written])
        assert [Confirmation.THERE] * 2 == await confirmed(custodian, [kept, *written])
        with watched.replica.client() as client:
            assert client.exists(f"breadbox:{{{written[0].payload_id}}}:0")
    finally:
        store.close()
        await custodian.close()


async def test_the_custodian_of_a_watched_store_answers_within_its_time() -> None:
    client = open_redis_async("redis+sentinel://127.0.0.1:1/main", answer_s=1.25)
    assert 1.25 == client.connection_pool.connection_kwargs["socket_timeout"]
    await client.aclose()


def test_a_server_and_a_client_go_on_after_a_failover(
    watched: WatchedRedis, tmp_path: Path
) -> None:
    with (
        ServerProcess("--store", watched.url, log=tmp_path / "log") as server,
        breadbox.connect(server.address, reconnect_s=60.0) as client,
    ):
        client.start_session("s")
        assert ADMITTED is client.append(vector_fragment(0)).outcome
        watched.wait_until_replicated()
        watched.kill_primary()
        for index in (1, 2):
            assert ADMITTED is client.append(vector_fragment(index)).outcome
        with client.fetch(fragment_count=3, max_wait_s=60.0) as lease:
            fragments = sorted(lease.fragments(), key=lambda each: each.fragment_index)
    assert [0, 1, 2] == [each.fragment_index for each in fragments]
    for index, fragment in enumerate(fragments):
        assert np.all(fragment.obs == index)
