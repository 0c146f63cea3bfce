"""A Redis that lacks a command, or a right, or is not ready: taken where it can be, else named."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from breadbox.model.errors import StoreUnavailableError
from breadbox.stores import open_custodian, open_store
from breadbox.stores.base import Confirmation
from breadbox.stores.redis.errors import raise_reply_error, shortened, translated_errors
from breadbox_server.base.errors import StartError
from breadbox_server.maintenance.store_opening import open_store as open_server_store
from breadbox_server.settings import Settings
from support.redis_server import RedisServer
from support.store_contract import in_buffers, payload_of, read_back

pytestmark = pytest.mark.integration


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(with_tcp=True) as running:
        yield running


def _url(server: RedisServer, rights: str) -> str:
    """URL of a user with everything but."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "someone", "on", ">secret", *rights.split())
    return f"redis://someone:secret@127.0.0.1:{server.port}/0"


async def test_a_redis_without_the_client_command_is_taken(server: RedisServer) -> None:
    url = _url(server, "~* +@all -client")
    store, custodian = open_store(url), open_custodian(url, unannounced_s=600.0)
    body = payload_of(100_000)
    references = store.write_many([in_buffers(body)])
    assert [body] == read_back(store, references)
    assert [Confirmation.THERE] == await custodian.confirm(references)
    await custodian.close()
    store.close()


async def test_connections_have_a_name_where_they_may(server: RedisServer) -> None:
    store, custodian = open_store(server.tcp_url), open_custodian(server.tcp_url, unannounced_s=9)
    store.write_many([in_buffers(payload_of(10))])
    await custodian.ping()
    with server.client() as client:
        names = [each["name"] for each in client.client_list()]
    assert 2 == names.count("breadbox")
    await custodian.close()
    store.close()


async def test_a_name_that_the_url_gives_is_kept(server: RedisServer) -> None:
    url = f"{server.tcp_url}?client_name=mine"
    store, custodian = open_store(url), open_custodian(url, unannounced_s=9)
    store.write_many([in_buffers(payload_of(10))])
    await custodian.ping()
    with server.client() as client:
        names = [each["name"] for each in client.client_list()]
    assert (2, 0) == (names.count("mine"), names.count("breadbox"))
    await custodian.close()
    store.close()


@pytest.mark.parametrize("command", ["eval", "info"])
async def test_a_server_names_the_right_that_its_user_lacks(
    command: str, server: RedisServer
) -> None:
    custodian = open_custodian(_url(server, f"~* +@all -{command}"), unannounced_s=600.0)
    with pytest.raises(StoreUnavailableError, match=rf"NOPERM.*\(\+{command}\)") as caught:
        await (custodian.delete_ids(["0" * 32]) if command == "eval" else custodian.usage())
    assert "someone" not in str(caught.value)
    await custodian.close()


def test_a_client_names_the_right_that_its_user_lacks(server: RedisServer) -> None:
    store = open_store(_url(server, "~* +@all -set"))
    with pytest.raises(StoreUnavailableError, match=r"NOPERM.*\(\+set\)") as caught:
        store.write_many([in_buffers(payload_of(10))])
    assert "someone" not in str(caught.value)
    store.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            redis_py.ResponseError(
                "unknown command `EVAL`, with args beginning with: `local secret`, `1`, "
            ),
            "it has no command EVAL",
        ),
        (
            redis_py.ResponseError("unknown command 'CLIENT', with args beginning with: 'LIST'"),
            "it has no command CLIENT",
        ),
        (
            redis_py.exceptions.NoPermissionError(
                "User someone has no permissions to run the 'client|setname' command"
            ),
            "NOPERM, the user lacks a right (+client|setname)",
        ),
        (
            redis_py.exceptions.NoPermissionError(
                "this user has no permissions to run the 'xadd' command or its subcommand"
            ),
            "NOPERM, the user lacks a right (+xadd)",
        ),
        (
            redis_py.exceptions.NoPermissionError("No permissions to access a key"),
            "NOPERM, the user lacks a right",
        ),
    ],
)
def test_a_refusal_names_the_command_and_nothing_secret(
    error: redis_py.ResponseError, expected: str
) -> None:
    assert shortened(error) == expected
    with pytest.raises(StoreUnavailableError) as caught, translated_errors():
        raise error
    assert caught.value.answer == expected


def test_a_cluster_whose_nodes_were_silent_was_silent() -> None:
    with pytest.raises(StoreUnavailableError) as caught, translated_errors():
        raise redis_py.exceptions.RedisClusterException("no reachable node") from TimeoutError()
    assert caught.value.was_silent


def test_a_refusal_of_a_large_value_names_no_user() -> None:
    line = b"NOPERM User someone has no permissions to run the 'getrange' command"
    with pytest.raises(StoreUnavailableError) as caught:
        raise_reply_error(line)
    assert caught.value.answer == "NOPERM, the user lacks a right (+getrange)"


@contextmanager
def _answering(answer: bytes) -> Iterator[str]:
    """A store's URL, where every command gets one answer."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while received := connection.recv(65_536):
                connection.sendall(answer * max(1, received.count(b"*")))

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("answer", "remedy"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", "once Redis has read its data"),
        (b"-NOPERM this user has no permissions to run the 'ping' command\r\n", "+ping"),
        (b"-MASTERDOWN Link with MASTER is down\r\n", "give a primary's URL"),
    ],
)
def test_a_redis_that_answers_is_not_to_be_started(
    answer: bytes, remedy: str, tmp_path: Path
) -> None:
    async def start(url: str) -> Any:
        return await open_server_store(Settings(store=url, journal=f"file://{tmp_path}"), None)

    with _answering(answer) as url, pytest.raises(StartError) as caught:
        asyncio.run(start(url))
    assert remedy in str(caught.value)
    assert "start it" not in str(caught.value)
