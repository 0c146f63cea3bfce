"""Sequences through a real server: both clients, both stores, every way to append and to load."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox import aio
from breadbox.errors import InvalidRequestError, SchemaMismatchError
from breadbox.types import GroupEndReason
from support.fragments import vector_fragment
from support.redis_server import RedisServer
from support.sequences import same_sequence, sequence
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SIZE = 4
ADMITTED = breadbox.AdmissionOutcome.ADMITTED


@pytest.fixture(params=["file", "redis"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    def serving(store: str) -> ServerProcess:
        size = ("--fragments-per-chunk", str(SIZE))
        return ServerProcess(*("--store", store, "--preset", "groups", *size), log=tmp_path / "log")

    if request.param == "file":
        with serving(f"file://{tmp_path}/store") as started:
            yield started
        return
    with RedisServer() as redis, serving(redis.url) as started:
        yield started


def members(group: str, *, large: bool = False) -> list[breadbox.Sequence]:
    """A group of unequal lengths: inline ones, or, if large, ones in the store."""
    factor = 5_000 if large else 20
    return [sequence(group, member, 1 + factor * member) for member in range(SIZE)]


def test_sequences_come_back_by_every_way_to_append_and_load(server: ServerProcess) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    rng = random.Random(seed)
    sent = {name: members(name, large=name in "ef") for name in "abcdef"}
    everything = [each for group in sent.values() for each in group]
    rng.shuffle(everything)
    with breadbox.connect(server.address) as client:
        session = client.start_session("s")
        assert ADMITTED is client.append(everything.pop()).outcome
        assert session.session_id == "s"
        results = client.append_many([everything.pop() for _ in range(8)])
        assert [ADMITTED] * 8 == [each.outcome for each in results]
        with breadbox.Appender(client) as appender:
            while everything:
                appender.append(everything.pop())
        found: list[Any] = []
        with client.fetch(fragment_count=3 * SIZE, max_wait_s=10) as lease:
            numbers = [each.metadata.numbers for each in lease.references]
            assert [sequence(member=n % SIZE).numbers for n in range(3 * SIZE)] == numbers
            found += list(lease.sequences())
            with pytest.raises(InvalidRequestError, match=r"lease\.sequences"):
                next(iter(lease.batches(batch_size=1)))
        with client.fetch(fragment_count=3 * SIZE, max_wait_s=10) as lease:
            found += client.load_fragments(lease.references, is_mapped=True)
            [first, *_] = lease.sequences(columns=["tokens.ids"])
            assert ["ids"] == list(first.tokens)
    assert {"s"} == {each.session_id for each in found}
    for each in found:
        assert same_sequence(sent[each.group][each.member], each)


def test_the_asyncio_client_does_as_the_blocking_one(server: ServerProcess) -> None:
    sent = members("a") + members("b", large=True)

    async def run() -> list[breadbox.Sequence]:
        async with await aio.connect(server.address) as client:
            await client.start_session("s")
            await client.append(sent[0])
            await client.append_many(sent[1:])
            async with await client.fetch(fragment_count=2 * SIZE, max_wait_s=10) as lease:
                return [each async for each in lease.sequences()]

    found = asyncio.run(run())
    assert [True] * len(sent) == [same_sequence(*pair) for pair in zip(sent, found, strict=True)]


def test_a_buffer_takes_sequences_or_fragments_and_says_which(server: ServerProcess) -> None:
    fragment = vector_fragment(0)
    fragment.session_id = "s"
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        client.append(sequence("a", 0))
        with pytest.raises(SchemaMismatchError, match="sequences of tokens wanted, fragments of"):
            client.append(fragment)
        with pytest.raises(SchemaMismatchError, match=r"tokens\.ids: int32\[\] wanted, int64"):
            client.append(sequence("a", 1, tokens={"ids": np.arange(3)}))
        with pytest.raises(
            SchemaMismatchError, match=r"context\.prompt: int64\[any\] wanted, int64"
        ):
            client.append(sequence("a", 1, context={"prompt": np.zeros((2, 2), np.int64)}))
        assert ADMITTED is client.append(sequence("a", 1, 7)).outcome
        client.start_session("t")
        fragment.session_id = "t"
        client.append(fragment)
        with pytest.raises(SchemaMismatchError, match="fragments of steps wanted, sequences of"):
            client.append(sequence("a", 0))


def test_without_a_session_a_sequence_that_names_none_is_refused(server: ServerProcess) -> None:
    with (
        breadbox.connect(server.address) as client,
        pytest.raises(InvalidRequestError, match="session_id is empty"),
    ):
        client.append(sequence("a", 0))


def test_a_group_of_equal_rewards_is_dropped_also_after_a_kill(tmp_path: Path) -> None:
    arguments = (
        *("--store", f"file://{tmp_path}/store", "--preset", "groups"),
        *("--fragments-per-chunk", "2", "--drop-equal", "reward"),
    )
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(*arguments, log=tmp_path / "log"))
        client = stack.enter_context(breadbox.connect(server.address))
        client.start_session("s")
        client.append(sequence("agree", 1, numbers={"reward": 1.0}))
        client.append(sequence("differ", 1, numbers={"reward": 0.0, "text": "ä"}))
        server.kill()
        server.start()
        client.append(sequence("agree", 0, numbers={"reward": 1.0}))
        client.append(sequence("differ", 0, numbers={"reward": 1.0}))
        with client.fetch(fragment_count=2, max_wait_s=10) as lease:
            assert {"reward": 0.0, "text": "ä"} == lease.references[1].metadata.numbers
            assert {"differ"} == {each.group for each in lease.sequences()}
        ends = [(each.group, each.reason) for each in client.group_ends(max_wait_s=5)]
    assert ("agree", GroupEndReason.EQUAL) in ends
