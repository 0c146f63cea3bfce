"""How many connections the server takes, and what one too many meets."""

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.limits import RESERVED_FILES
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.rpc import traffic
from breadbox_server.rpc.listening import OPEN_FILES, PortConnections
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


async def test_a_moment_without_a_free_descriptor_ends_no_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0
    list_files = os.listdir

    def listdir(path: str) -> list[str]:
        nonlocal looks
        if path != OPEN_FILES:
            return list_files(path)
        looks += 1
        if looks <= 2:
            raise OSError(errno.EMFILE, "Too many open files", path)
        return list_files(path)

    monkeypatch.setattr(traffic, "LOOK_S", 0.02)
    monkeypatch.setattr(os, "listdir", listdir)
    async with served() as it:
        await eventually(lambda: looks > 2, "a look after those that failed")
        await it.stub.GetBuffer(pb.GetBufferRequest(), timeout=CALL_S)
    assert 1 == caplog.text.count("looking at connections failed")


class OutOfDescriptors(PortConnections):
    """Cannot hang up at first."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts: list[set[str]] = []

    def close(self, peers: Iterable[str]) -> None:
        self.attempts.append(set(peers))
        if len(self.attempts) == 1:
            raise OSError(errno.EMFILE, "Too many open files", OPEN_FILES)


async def test_a_connection_that_could_not_be_closed_is_closed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic, "LOOK_S", 0.02)
    connections = OutOfDescriptors()
    watching = traffic.Traffic(Metrics(CollectorRegistry()), connections, 10)
    running = asyncio.get_running_loop().create_task(watching.run())
    watching._hang_up("ipv4:127.0.0.1:1", "idle")  # noqa: SLF001 - what its looks call
    await eventually(lambda: len(connections.attempts) == 2, "a second attempt")
    assert [{"ipv4:127.0.0.1:1"}] * 2 == connections.attempts
    running.cancel()
