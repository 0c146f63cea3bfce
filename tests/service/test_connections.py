"""How many connections the server takes, and what one too many meets."""

import logging
import resource
import socket

import pytest

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.limits import RESERVED_FILES
from support.eventually import eventually
from support.served import CALL_S, Served, served


def connect(it: Served) -> socket.socket:
    host, _, port = it.server.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=CALL_S)
    connection.setblocking(False)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has hung up; the server sends its settings to those it takes."""
    try:
        return connection.recv(1024) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


async def test_a_connection_too_many_is_closed_and_the_others_stay() -> None:
    async with served(connections_max=3) as it:
        await it.start()  # The stub's own is the first.
        first, second = connect(it), connect(it)
        with first, second, connect(it) as third:
            await eventually(lambda: is_closed(third))
            assert [False, False] == [is_closed(each) for each in (first, second)]
            await it.stub.GetBuffer(pb.GetBufferRequest(), timeout=CALL_S)


async def test_a_connection_that_ends_makes_room() -> None:
    async with served(connections_max=2) as it:
        await it.start()
        connect(it).close()

        def gets_in() -> bool:
            with connect(it) as connection:
                connection.settimeout(0.2)
                try:
                    return connection.recv(1024) != b""
                except (TimeoutError, ConnectionResetError):
                    return False

        await eventually(gets_in)


async def test_no_more_connections_are_taken_than_open_files_allow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (RESERVED_FILES + 2, RESERVED_FILES + 2))
    with caplog.at_level(logging.WARNING):
        async with served() as it:
            await it.start()
            with connect(it), connect(it) as one_too_many:
                await eventually(lambda: is_closed(one_too_many))
    assert "leave room for 2 connections instead of 16384" in caplog.text
