"""The users of SECURITY.md: each may do its work, and the clients' nothing else."""

import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from breadbox.stores import open_custodian, open_store
from breadbox.stores.base import Confirmation
from breadbox_server.access.credentials import CLIENT_RIGHTS, SERVER_RIGHTS
from support.redis_cluster import RedisCluster
from support.redis_server import RedisServer
from support.store_contract import read_back

SECURITY = Path(__file__).resolve().parents[2] / "SECURITY.md"
CONTENT = secrets.token_bytes(300_000)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(with_tcp=True) as running:
        with running.client() as client:
            for line in users():
                client.execute_command(*line.split())
        yield running


def users() -> list[str]:
    """The commands that make the users, as they stand in the document."""
    return re.findall(r"^ACL SETUSER .*$", SECURITY.read_text(), re.MULTILINE)


def test_the_command_makes_users_with_the_documented_rights() -> None:
    rights = [re.sub(r"^ACL SETUSER \S+ on >\S+ ", "", line) for line in users()]

    assert [SERVER_RIGHTS, CLIENT_RIGHTS] == rights


def url(server: RedisServer, user: str, secret: str) -> str:
    return f"redis://{user}:{secret}@127.0.0.1:{server.port}/0"


async def test_clients_write_and_read_and_the_server_confirms_and_deletes(
    server: RedisServer,
) -> None:
    store = open_store(url(server, "breadbox-client", "SECRET2"), piece_size_bytes=65_536)
    custodian = open_custodian(url(server, "breadbox-server", "SECRET1"))
    references = store.write_many([[memoryview(CONTENT)]])
    (slice_only,) = (read_back(store, references, wants_whole=False),)
    whole = read_back(store, references)
    confirmed = await custodian.confirm(references)
    listed = [payload_id async for payload_id in custodian.confirmed()]
    usage = await custodian.usage()
    await custodian.delete(references)
    left = await custodian.present(references)
    unannounced = store.write_many([[memoryview(CONTENT)]])
    store.delete_many(unannounced)
    store.close()
    await custodian.close()

    assert [CONTENT] == whole == slice_only
    assert [Confirmation.THERE] == confirmed
    assert [references[0].payload_id] == listed
    assert 0 < usage.used_bytes
    assert [False] == left


@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("RANDOMKEY",),
        ("CONFIG", "GET", "requirepass"),
        ("EVAL", "return 1", "0"),
        ("GET", "breadbox:{journal}:snapshot"),
        ("SET", "elsewhere", "1"),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("SUBSCRIBE", "all"),
        ("CLUSTER", "DELSLOTS", "1"),
        ("CLUSTER", "RESET", "HARD"),
        ("CLUSTER", "FORGET", "0" * 40),
        ("CLUSTER", "MEET", "127.0.0.1", "1"),
    ],
    ids=" ".join,
)
def test_the_clients_user_may_do_nothing_else(
    server: RedisServer, command: tuple[str, ...]
) -> None:
    with (
        redis.Redis.from_url(url(server, "breadbox-client", "SECRET2")) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.execute_command(*command)


async def test_the_users_do_their_work_on_a_cluster_and_leave_its_slots_alone() -> None:
    with RedisCluster() as cluster:
        for node in cluster.nodes:
            for line in users():
                node.client.execute_command(*line.split())
        server, client = (
            cluster.url.replace("://", f"://{user}@", 1)
            for user in ("breadbox-server:SECRET1", "breadbox-client:SECRET2")
        )
        store = open_store(client)
        custodian = open_custodian(server)
        references = store.write_many([[memoryview(CONTENT)]] * 8)
        confirmed = await custodian.confirm(references)
        whole = read_back(store, references)
        store.close()
        await custodian.close()
        for user, secret in (("breadbox-server", "SECRET1"), ("breadbox-client", "SECRET2")):
            with (
                redis.Redis(
                    port=cluster.nodes[0].port, username=user, password=secret
                ) as connection,
                pytest.raises(redis.exceptions.NoPermissionError),
            ):
                connection.execute_command("CLUSTER", "DELSLOTS", "1")

    assert [Confirmation.THERE] * 8 == confirmed
    assert [CONTENT] * 8 == whole
