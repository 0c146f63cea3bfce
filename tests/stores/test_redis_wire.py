"""The one place that speaks RESP: partial sends, split replies, silence, and failing users."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from breadbox.model.errors import PayloadCorruptError, StoreUnavailableError
from breadbox.stores.base import UnforeseenError
from breadbox.stores.deadline import Deadline
from breadbox.stores.redis.wire import Wire, borrowed_wire
from support.redis_server import RedisServer


class ScriptedSocket:
    """Takes a few bytes at a time, and gives what it is told in the portions that it is told."""

    def __init__(self, *portions: bytes, takes_bytes: int = 2**30) -> None:
        self.sent = b""
        self._portions = list(portions)
        self._takes_bytes = takes_bytes

    def gettimeout(self) -> None:
        return None

    def settimeout(self, _: float | None) -> None:
        """It never blocks."""

    def setsockopt(self, *_: Any) -> None:
        """It never blocks."""

    def sendmsg(self, buffers: list[Any]) -> int:
        taken = b"".join(bytes(buffer) for buffer in buffers)[: self._takes_bytes]
        self.sent += taken
        return len(taken)

    def recv_into(self, buffer: memoryview, size_bytes: int = 0, flags: int = 0) -> int:
        portion = self._portions.pop(0)
        taken = portion[: size_bytes or len(buffer)]
        if portion[len(taken) :]:
            self._portions.insert(0, portion[len(taken) :])
        buffer[: len(taken)] = taken
        return len(taken)


class Connection:
    """As much of a redis-py connection as is used."""

    def __init__(self, held: Any) -> None:
        self._sock = held


@contextmanager
def silent_server(limit_s: float) -> Iterator[socket.socket]:
    """Our end of a connection to somebody who neither reads nor writes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(limit_s)
        yield ours


@pytest.mark.parametrize("takes_bytes", [1, 3, 7, 1000])
def test_a_vector_that_the_socket_takes_in_parts_arrives_whole(takes_bytes: int) -> None:
    taking = ScriptedSocket(takes_bytes=takes_bytes)
    Wire(Connection(taking), Deadline(10.0)).send([b"one", memoryview(b"and two"), b"", b"three"])
    assert b"oneand twothree" == taking.sent


def test_a_line_end_may_come_in_two_parts() -> None:
    wire = Wire(Connection(ScriptedSocket(b"$3\r\nabc\r", b"\n$1\r\nx", b"\r\n")), Deadline(10.0))
    values = []
    for _ in range(2):
        value = memoryview(bytearray(wire.bulk_length() or 0))
        wire.receive_into(value)
        wire.end_bulk()
        values.append(bytes(value))
    assert [b"abc", b"x"] == values


def test_a_value_longer_than_it_says_is_noticed_at_its_end() -> None:
    wire = Wire(Connection(ScriptedSocket(b"$3\r\nabcdef\r\n")), Deadline(10.0))
    wire.receive_into(memoryview(bytearray(wire.bulk_length() or 0)))
    with pytest.raises(PayloadCorruptError, match="not as long as it says"):
        wire.end_bulk()


@pytest.mark.parametrize(
    "length", ["abc", "", " 3", "1_0", "+3", "-2", "3.0", "9" * 13, "9" * 5000, "\u0663"]
)
def test_a_length_that_is_no_number_is_the_stores_error(length: str) -> None:
    said = b"$" + length.encode() + b"\r\nabc\r\n"
    wire = Wire(Connection(ScriptedSocket(said)), Deadline(10.0))
    with pytest.raises(StoreUnavailableError, match="does not speak like Redis"):
        wire.bulk_length()


def test_a_length_that_is_no_number_is_unforeseen_to_the_compiled_receiver() -> None:
    """So that all is read again, and the store's error raised."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire = Wire(Connection(ours), Deadline(5.0))
        theirs.sendall(b"$abc\r\n" + bytes(100) + b"\r\n")
        with pytest.raises(UnforeseenError):
            wire.receive_values([[memoryview(bytearray(100))]], [], [])


def test_a_server_that_says_nothing_is_given_up_at_the_deadline() -> None:
    with silent_server(0.05) as ours, pytest.raises(TimeoutError):
        Wire(Connection(ours), Deadline(0.1)).bulk_length()


def test_a_server_that_takes_nothing_is_given_up_at_the_deadline() -> None:
    with silent_server(0.05) as ours, pytest.raises(TimeoutError):
        Wire(Connection(ours), Deadline(0.1)).send([memoryview(bytearray(2**24))])


def test_slowness_is_no_silence() -> None:
    """A value may take many times the deadline while its bytes move."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pause_s = 0.1
        value = bytes(20)

        def dribble() -> None:
            theirs.sendall(b"$20\r\n")
            for position in range(len(value)):
                time.sleep(pause_s)
                theirs.sendall(value[position : position + 1])
            theirs.sendall(b"\r\n")

        thread = threading.Thread(target=dribble)
        thread.start()
        wire = Wire(Connection(ours), Deadline(1.0))
        received = memoryview(bytearray(wire.bulk_length() or 0))
        wire.receive_into(received)
        wire.end_bulk()
        thread.join()
    assert value == bytes(received)


def test_a_connection_goes_back_with_the_limit_that_it_came_with() -> None:
    with silent_server(12.5) as ours:
        wire = Wire(Connection(ours), Deadline(10.0))
        wire.send([b"PING"])
        assert None is ours.gettimeout()
        wire.give_back()
        assert 12.5 == ours.gettimeout()


@pytest.mark.integration
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, StoreUnavailableError])
def test_a_connection_whose_user_failed_is_closed_before_anybody_else_has_it(
    redis_url: str, redis_server: RedisServer, error: type[BaseException]
) -> None:
    """A reply may still be on its way: the next user would take it for its own."""
    pool = redis.BlockingConnectionPool.from_url(redis_url, max_connections=1, protocol=2)
    held: list[socket.socket] = []
    slots = threading.BoundedSemaphore(1)

    def fail(wire: Wire) -> None:
        wire.send([b"*1\r\n$4\r\nPING\r\n"])
        held.append(wire._socket)  # noqa: SLF001 - is it closed?
        raise error("a failure")

    with pytest.raises(error), borrowed_wire(pool, slots, Deadline(10.0)) as wire:
        fail(wire)
    assert [-1] == [each.fileno() for each in held]
    with borrowed_wire(pool, slots, Deadline(10.0)) as wire:
        wire.send([b"*2\r\n$4\r\nECHO\r\n$2\r\nhi\r\n"])
        assert 2 == wire.bulk_length()
        wire.skip(2)
        wire.end_bulk()
    pool.disconnect()
