"""Redis fails over behind one name: the old primary lives on as a replica, and keeps connections.

The name is a proxy, which sends the connections of after the failover to the new primary.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

import breadbox
from breadbox.model.errors import PayloadMissingError, StoreUnavailableError
from breadbox.model.types import PayloadReference
from breadbox.stores import open_custodian, open_store
from breadbox.stores.base import Confirmation, Custody
from breadbox.stores.redis.errors import is_elsewhere
from breadbox.stores.redis.factory import open_redis, open_redis_async
from support.eventually import eventually_sync
from support.fragments import large_fragment, vector_fragment
from support.proxy import Proxy
from support.redis_server import RedisServer, redis_binary, valkey_binary
from support.server_process import ServerProcess
from support.store_contract import in_buffers, payload_of, read_back

pytestmark = pytest.mark.integration

PIECE_BYTES = 64 * 1024
CONNECTIONS = 8
"""Connections that each pool has made before the failover."""


@dataclass
class Named:
    """Two Redis and the name of the primary."""

    first: RedisServer
    second: RedisServer
    name: Proxy

    @property
    def url(self) -> str:
        return f"redis://{self.name.address}/0"

    def fail_over(self) -> None:
        """Make the second the primary, and the first its replica, which loses no connection."""
        with self.first.client() as first, self.second.client() as second:
            first.set("replicated-so-far", "1")
            assert 1 == first.wait(1, 10_000)
            second.replicaof("NO", "ONE")
            first.replicaof("127.0.0.1", self.second.port)
            self.name.target = ("127.0.0.1", self.second.port)
            eventually_sync(lambda: first.role()[0] == b"slave")

    def cut_off_old(self) -> None:
        """Let the old primary follow nobody that is there: it has what it had."""
        with self.first.client() as first:
            first.replicaof("127.0.0.1", 1)


@pytest.fixture(params=[redis_binary, valkey_binary], ids=["redis", "valkey"])
def named(request: pytest.FixtureRequest) -> Iterator[Named]:
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(RedisServer(with_tcp=True, binary=request.param()))
            for _ in range(2)
        )
        name = stack.enter_context(Proxy(("127.0.0.1", first.port)))
        with first.client() as one, second.client() as other:
            other.replicaof("127.0.0.1", first.port)
            one.ping()
            eventually_sync(lambda: other.info("replication")["master_link_status"] == "up")
        yield Named(first, second, name)


async def _on_all_connections(call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONNECTIONS):
            tasks.create_task(call())


async def test_one_answer_of_a_replica_is_enough_for_all_connections_of_a_custodian(
    named: Named,
) -> None:
    store = open_store(named.url, piece_size_bytes=PIECE_BYTES)
    custodian = open_custodian(named.url, unannounced_s=600.0)
    await custodian.take(Custody("journal", 1))
    references = store.write_many([in_buffers(payload_of(100))])
    await _on_all_connections(lambda: custodian.confirm(references))
    named.fail_over()
    with pytest.raises(StoreUnavailableError, match="read only"):
        await custodian.confirm(references)
    await _on_all_connections(lambda: custodian.confirm(references))
    await custodian.delete(references)
    assert [False] == await custodian.present(references)
    await custodian.close()
    store.close()


def test_a_reader_looks_elsewhere_for_a_payload_that_the_old_primary_lacks(named: Named) -> None:
    late = open_store(named.url, piece_size_bytes=PIECE_BYTES)
    before = payload_of(100)
    assert [before] == read_back(late, late.write_many([in_buffers(before)]))
    named.fail_over()
    named.cut_off_old()
    fresh = open_store(named.url, piece_size_bytes=PIECE_BYTES)
    body = payload_of(200_000)
    assert [body] == read_back(late, fresh.write_many([in_buffers(body)]))
    late.close()
    fresh.close()


@pytest.mark.parametrize(
    ("ask", "expected"),
    [("confirm", [Confirmation.THERE]), ("missing", []), ("present", [True])],
)
async def test_a_replica_that_is_behind_never_calls_a_payload_missing(
    ask: str, expected: list[object], named: Named
) -> None:
    custodian = open_custodian(named.url, unannounced_s=600.0)
    await custodian.take(Custody("journal", 1))
    named.fail_over()
    named.cut_off_old()
    store = open_store(named.url, piece_size_bytes=PIECE_BYTES)
    after = store.write_many([in_buffers(payload_of(100))])
    with pytest.raises(StoreUnavailableError, match="read only"):
        await getattr(custodian, ask)(after)
    assert expected == await getattr(custodian, ask)(after)
    await custodian.close()
    store.close()


def test_a_clients_store_writes_to_the_new_primary_within_the_same_call(named: Named) -> None:
    store = open_store(named.url, piece_size_bytes=PIECE_BYTES)
    store.write_many([in_buffers(payload_of(100))])
    named.fail_over()
    body = payload_of(300_000)
    assert [body] == read_back(store, store.write_many([in_buffers(body)]))
    store.close()


def test_a_payload_that_is_nowhere_is_missing(named: Named) -> None:
    store = open_store(named.url, piece_size_bytes=PIECE_BYTES)
    with pytest.raises(PayloadMissingError):
        read_back(store, [PayloadReference("0" * 32, 1000)])
    store.close()


def test_deleting_goes_to_the_new_primary_at_the_second_attempt(named: Named) -> None:
    store = open_store(named.url, piece_size_bytes=PIECE_BYTES)
    references = store.write_many([in_buffers(payload_of(100))])
    store.delete_many([])
    named.fail_over()
    with pytest.raises(StoreUnavailableError, match="read only"):
        store.delete_many(references)
    store.delete_many(references)
    with named.second.client() as client:
        assert 0 == len(client.keys("breadbox:*"))
    store.close()


async def test_both_plain_clients_leave_a_replica(named: Named) -> None:
    blocking, asynchronous = open_redis(named.url), open_redis_async(named.url)
    blocking.set("a", 1)
    await _on_all_connections(lambda: asynchronous.set("a", 1))
    named.fail_over()
    script = "return redis.call('SET', KEYS[1], 1)"
    with pytest.raises(redis_py.ResponseError):
        blocking.eval(script, 1, "b")
    assert b"OK" == blocking.eval(script, 1, "b")
    with pytest.raises(redis_py.ResponseError):
        await asynchronous.eval(script, 1, "c")
    await _on_all_connections(lambda: asynchronous.eval(script, 1, "c"))
    blocking.close()
    await asynchronous.aclose()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (redis_py.exceptions.ReadOnlyError("You can't write against a read only replica."), True),
        (redis_py.exceptions.BusyLoadingError("Redis is loading the dataset in memory"), True),
        (redis_py.ResponseError("MASTERDOWN Link with MASTER is down"), True),
        (redis_py.ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (redis_py.ResponseError("UNBLOCKED force unblock from blocking operation"), True),
        (redis_py.ResponseError("CLUSTERDOWN The cluster is down"), True),
        (
            redis_py.ResponseError(
                "Error running script (call to f_12): @user_script:3: @user_script: 3: -READONLY "
                "You can't write against a read only replica."
            ),
            True,
        ),
        (redis_py.ResponseError("MISCONF Redis is configured to save RDB snapshots"), False),
        (redis_py.exceptions.OutOfMemoryError("command not allowed"), False),
        (redis_py.exceptions.NoPermissionError("no permissions to run LOADING"), False),
        (redis_py.exceptions.ConnectionError("Connection refused"), False),
    ],
)
def test_answers_that_another_redis_may_not_give_are_known(
    error: redis_py.RedisError, expected: bool
) -> None:
    assert is_elsewhere(error) is expected


@pytest.mark.timeout(120)
def test_a_server_and_its_clients_go_on_by_themselves(named: Named, tmp_path: Path) -> None:
    options = ("--store", named.url, "--schema", "any")
    with (
        ServerProcess(*options, log=tmp_path / "log") as server,
        breadbox.connect(server.address, reconnect_s=45.0) as client,
    ):
        client.start_session("s")
        outcomes = [client.append(large_fragment(0)).outcome]
        named.fail_over()
        outcomes.append(client.append(vector_fragment(1)).outcome)
        outcomes.append(client.append(large_fragment(2)).outcome)
        assert [breadbox.AdmissionOutcome.ADMITTED] * 3 == outcomes
        assert 3 == len(client.service.fetch_fragments(3, 10.0).fragments)
