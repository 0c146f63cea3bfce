"""Reading without consuming, as a user does: both clients, both stores, over restarts."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox.model import errors
from breadbox.model.fragment import Fragment
from breadbox.model.types import BufferConfig
from breadbox.operations.cursor_reads import LoadedRead
from breadbox.stores.base import PayloadStore
from breadbox_server.access.authorization import Role
from support.callers import KINDS, Caller, make_caller
from support.eventually import eventually_sync
from support.fragments import large_fragment, vector_fragment
from support.redis_server import RedisServer
from support.server_process import ServerProcess
from support.token_files import write_token_file

pytestmark = pytest.mark.integration

NUMBERS = itertools.count()
WAIT_S = 60.0


@pytest.fixture(scope="module", params=["redis", "file", "gateway"])
def server(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("reading")
    with RedisServer() as redis:
        store = f"file://{folder}/store" if request.param == "file" else redis.url
        options = ["--gateway"] if request.param == "gateway" else []
        with ServerProcess("--store", store, *options, log=folder / "log") as server:
            yield server


@pytest.fixture(params=KINDS)
async def caller(request: pytest.FixtureRequest, server: ServerProcess) -> Any:
    name = f"b{next(NUMBERS)}"
    async with make_caller(request.param, server.address, buffer=name) as made:
        await made.call("create_buffer", name, BufferConfig(capacity_chunks=8, uses_max=1))
        await made.call("start_session", "s")
        yield made


def fragments(*indices: int) -> list[Fragment]:
    return [vector_fragment(index) for index in indices]


def large_fragments(*indices: int) -> list[Fragment]:
    """As `fragments`, too large to ride along: reads of them have leases."""
    return [large_fragment(index) for index in indices]


async def followed(caller: Caller, **options: Any) -> list[LoadedRead]:
    """What a tail gives until nothing comes any more."""
    reads = caller.client.tail(max_wait_s=0.0, **options)
    if isinstance(caller.client, breadbox.Client):
        return await asyncio.to_thread(list, reads)
    return [read async for read in reads]


async def test_a_tail_gives_all_there_is_and_counts_what_left(caller: Caller) -> None:
    await caller.call("append_many", fragments(*range(5)))
    seen = await followed(caller, chunk_count_max=2)
    loaded = [each for read in seen for each in read.fragments]
    assert [0, 1, 2, 3, 4] == [each.fragment_index for each in loaded]
    assert [np.array([each] * 12).reshape(4, 3).tolist() for each in range(5)] == [
        each.obs.tolist() for each in loaded
    ]
    await caller.call("append_many", fragments(*range(5, 25)))
    (more,) = await followed(
        caller, after_chunk_id=seen[-1].cursor, known_session_id=seen[-1].session_id
    )
    assert (list(range(17, 25)), 12, 24) == (
        [each.fragment_index for each in more.fragments],
        more.skipped_chunk_count,
        more.cursor,
    )
    # Nobody who fetches notices.
    grant = await caller.call("fetch_fragments", 8, 5.0)
    assert list(range(17, 25)) == sorted(each.metadata.fragment_index for each in grant.fragments)


async def test_a_read_keeps_payloads_while_its_chunks_are_evicted(caller: Caller) -> None:
    await caller.call("append_many", large_fragments(*range(8)))
    read = await caller.call("read_fragments")
    await caller.call("append_many", large_fragments(*range(8, 24)))
    loaded = await caller.call("load_fragments", read.fragments)
    assert list(range(8)) == [each.fragment_index for each in loaded]
    await caller.call("release_lease", read.lease_id)
    await eventually_missing(caller, read.fragments)


async def eventually_missing(caller: Caller, references: Any) -> None:
    """Payloads go soon after the last lease on them."""
    for _ in range(400):
        try:
            await caller.call("load_fragments", references[:1])
        except errors.PayloadMissingError:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("what nobody reads any more is still there")


async def test_a_lease_that_was_let_expire_keeps_nothing(caller: Caller) -> None:
    await caller.call("append_many", large_fragments(*range(8)))
    read = await caller.call("read_fragments", lease_s=0.2)
    await caller.call("append_many", large_fragments(*range(8, 24)))
    await eventually_missing(caller, read.fragments)
    with pytest.raises(errors.LeaseExpiredError):
        await caller.call("renew_lease", read.lease_id)


def test_a_tail_goes_on_over_kill_of_the_server(tmp_path: Path) -> None:
    seen: list[LoadedRead] = []
    with (
        ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "log") as server,
        breadbox.connect(server.address) as client,
        breadbox.connect(server.address) as reader,
    ):
        client.start_session("s")
        client.append_many(fragments(0, 1))

        def follow() -> None:
            for read in reader.tail():
                seen.append(read)
                if read.fragments and read.fragments[-1].fragment_index == 5:
                    return

        thread = threading.Thread(target=follow)
        thread.start()
        eventually_sync(lambda: any(each.fragments for each in seen))
        server.kill()
        server.start()
        client.append_many(fragments(2, 3, 4, 5))
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert [0, 1, 2, 3, 4, 5] == [each.fragment_index for read in seen for each in read.fragments]
    assert 0 == sum(read.skipped_chunk_count for read in seen)


def test_a_tail_reads_all_of_a_buffer_that_began_anew(tmp_path: Path) -> None:
    """As after a restart of a server without a journal: ids of chunks begin at 0 once more."""
    with (
        ServerProcess(
            *("--store", f"file://{tmp_path}/store", "--journal", "none"), log=tmp_path / "log"
        ) as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        client.append_many(fragments(*range(9)))
        reads = client.tail()
        first = next(reads)
        server.kill()
        server.start()
        client.start_session("s")
        client.append_many(fragments(0, 1))
        second = next(reads)
        while not second.fragments:
            second = next(reads)
    assert (8, 1) == (first.cursor, second.cursor)
    assert [0, 1] == [each.fragment_index for each in second.fragments]


def test_a_tail_goes_on_in_the_next_session(tmp_path: Path) -> None:
    with (
        ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "log") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("one")
        client.append(vector_fragment(0, session_id="one"))
        reads = client.tail()
        first = next(reads)
        client.append(vector_fragment(1, session_id="one"))
        client.start_session("two")
        second = next(reads)
        client.append(vector_fragment(0, session_id="two"))
        third = next(reads)
    assert ["one", "two", "two"] == [each.session_id for each in (first, second, third)]
    assert [1, 0, 1] == [len(each.fragments) for each in (first, second, third)]
    assert [0, 1, 0] == [each.skipped_chunk_count for each in (first, second, third)]


def test_what_is_gone_or_unreadable_is_counted_as_skipped(tmp_path: Path) -> None:
    with (
        ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "log") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        client.append_many(fragments(0, 1, 2))
        store: PayloadStore = client.store
        lost = client.service.read_fragments().fragments[1].metadata.payload
        store.delete_many([lost])
        assert not list((tmp_path / "store").rglob(f"*{lost.payload_id}*"))
        (read,) = client.tail(max_wait_s=0.0)
    assert [0, 2] == [each.fragment_index for each in read.fragments]
    assert [0, 2] == [each.chunk_id for each in read.references]
    assert (1, 2) == (read.skipped_chunk_count, read.cursor)


def test_learners_read_through_the_gateway_and_producers_may_not(tmp_path: Path) -> None:
    tokens = write_token_file(tmp_path / "tokens")
    with (
        RedisServer() as redis,
        ServerProcess(
            *("--store", redis.url, "--gateway", "--tokens", str(tmp_path / "tokens")),
            log=tmp_path / "log",
        ) as server,
        breadbox.connect(server.address, token=tokens[Role.LEARNER]) as learner,
        breadbox.connect(server.address, token=tokens[Role.PRODUCER]) as producer,
    ):
        learner.start_session("s")
        producer.append(large_fragment(0))
        read = learner.service.read_fragments()
        learner.end_session("s")
        (loaded,) = learner.load_fragments(read.fragments)
        with pytest.raises(errors.PermissionDeniedError):
            producer.service.read_fragments()
        with pytest.raises(errors.PayloadMissingError):
            producer.load_fragments(read.fragments)
        assert read.lease_id is not None
        learner.service.release_lease(read.lease_id)
    assert 0 == loaded.fragment_index


# Subscriptions -----------------------------------------------------------------------------------


async def test_a_tail_by_a_subscription_acknowledges_what_its_reader_is_done_with(
    caller: Caller,
) -> None:
    await caller.call("create_subscription", "archive", retaining=True)
    await caller.call("append_many", large_fragments(*range(6)))
    grant = await caller.call("fetch_fragments", 4, 5.0)
    await caller.call("release_lease", grant.lease_id)
    seen = await followed(caller, subscription="archive", chunk_count_max=4)
    indices = [each.fragment_index for read in seen for each in read.fragments]
    assert list(range(6)) == indices
    (shown,) = (await caller.call("get_buffer")).subscriptions
    assert (5, 0, 0) == (
        shown.acknowledged_chunk_id,
        shown.lag_chunk_count,
        shown.missed_chunk_count,
    )
    await eventually_missing(caller, grant.fragments)
    await caller.call("delete_subscription", "archive")
    with pytest.raises(errors.SubscriptionNotFoundError):
        await caller.call("acknowledge_chunks", "archive", 5)


def test_what_a_reader_died_over_is_read_again_also_after_kill_of_the_server(
    tmp_path: Path,
) -> None:
    with (
        RedisServer() as redis,
        ServerProcess("--store", redis.url, log=tmp_path / "log") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        client.create_subscription("archive", retaining=True)
        client.append_many(fragments(0, 1, 2, 3))
        reads = client.tail(subscription="archive", chunk_count_max=2)
        assert [0, 1] == [each.fragment_index for each in next(reads).fragments]
        assert [2, 3] == [each.fragment_index for each in next(reads).fragments]
        grant = client.service.fetch_fragments(4, 5.0)
        client.service.release_lease(grant.lease_id)
        server.kill()
        server.start()
        assert (0, 2) == (
            client.get_buffer().state.chunk_count,
            client.get_buffer().state.retained_chunk_count,
        )
        again = next(client.tail(subscription="archive"))
        assert [2, 3] == [each.fragment_index for each in again.fragments]
        assert 0 == again.skipped_chunk_count
        client.acknowledge_chunks("archive", again.cursor)
        with redis.client() as store:
            payload_ids = [each.metadata.payload.payload_id for each in again.references]
            eventually_sync(
                lambda: not [key for each in payload_ids for key in store.keys(f"*{each}*")]
            )


def test_a_tail_by_a_subscription_goes_on_in_a_buffer_that_was_set_back(tmp_path: Path) -> None:
    """As when Redis comes back older than what was read: ids of chunks are given once more."""
    with (
        ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "log") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        client.create_subscription("archive", retaining=True)
        client.append_many(fragments(0, 1, 2))
        reads = client.tail(subscription="archive")
        assert 3 == len(next(reads).fragments)
        client.delete_buffer("default")
        client.create_buffer("default")
        client.start_session("s")
        client.create_subscription("archive", retaining=True)
        client.append(vector_fragment(0))
        while not (read := next(reads)).fragments:
            pass
    assert ([0], 0) == ([each.fragment_index for each in read.fragments], read.cursor)
