"""Move large values to and from Redis without copies: the one module that speaks RESP (RESP2 only).

redis-py makes the connections. While one is borrowed, SET commands are packed around the caller's
own memory and bulk replies received straight into place. After an error in a value the connection
is closed, so one reply's value is never taken for another's.
"""

import errno
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import redis

from breadbox.model.errors import PayloadCorruptError, PayloadMissingError, StoreUnavailableError
from breadbox.stores import bulk
from breadbox.stores.base import UnforeseenError
from breadbox.stores.deadline import LOOK_S, Deadline, in_force
from breadbox.stores.reading import drop
from breadbox.stores.redis.errors import is_elsewhere, raise_reply_error, translated_errors

_BUFFERS_PER_CALL: Final = 1024

_LOOKAHEAD_BYTES: Final = 64 * 1024
"""Received ahead: reply headers, and values too small for a call."""

_LINE_AHEAD_BYTES: Final = 128
"""The same behind a large value."""

_LENGTH_DIGITS_MAX: Final = 12

_LINE_BYTES_MAX: Final = 16 * 1024

_JOIN_BYTES: Final = 16 * 1024
"""On TLS, buffers up to this size are joined before they are sent, to fill records."""

_DIRECT_BYTES: Final = 4 * 1024
"""Smaller destinations are filled by way of the lookahead: fewer system calls."""

_LOOK: Final = struct.pack("@ll", int(LOOK_S), int(LOOK_S % 1.0 * 1e6))


@contextmanager
def slot_taken(slots: threading.Semaphore, deadline: Deadline) -> Iterator[None]:
    """Take one of so many places for a connection; wait for one until the deadline."""
    if not slots.acquire(timeout=max(0.0, deadline.left_s())):
        raise TimeoutError("all connections of this client to the store are in use")
    try:
        yield
    finally:
        slots.release()


@contextmanager
def borrowed_wire(
    pool: redis.ConnectionPool, slots: threading.Semaphore, deadline: Deadline
) -> Iterator["Wire"]:
    """Take a connection from `pool`; give it back, disconnected if the body raised."""
    with translated_errors(), slot_taken(slots, deadline), in_force(deadline):
        connection: Any = pool.get_connection()
        try:
            connection.check_health()
            wire = Wire(connection, deadline)
            with wire.reporting():
                yield wire
            wire.give_back()
        except BaseException as error:
            connection.disconnect()
            if isinstance(error, PayloadMissingError) or is_elsewhere(error):
                pool.disconnect(inuse_connections=False)
            raise
        finally:
            pool.release(connection)


class Wire:
    """A borrowed connection: sends commands in vectors of buffers, receives replies into memory."""

    def __init__(self, connection: Any, deadline: Deadline) -> None:
        # Nothing is left to read on it, and only this class reads from it until the last reply.
        self._socket: socket.socket = connection._sock  # noqa: SLF001 - redis-py has no public one
        self.is_tls = isinstance(self._socket, ssl.SSLSocket)
        self._timeout_s = self._socket.gettimeout()
        self._deadline = deadline
        self._heard_at = deadline.heard_at
        self._has_moved = False
        self._kernel_waits = False
        if self.is_tls:
            self._socket.settimeout(LOOK_S)
        else:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LOOK)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _LOOK)
        self._lookahead = memoryview(bytearray(_LOOKAHEAD_BYTES))
        self._start = 0
        self._end = 0
        self._is_large = False
        self._reply_left = 0

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report to the deadline at the end if bytes moved."""
        try:
            yield
        finally:
            if self._has_moved:
                self._deadline.heard(self._deadline.now())

    def give_back(self) -> None:
        """Leave the socket as redis-py expects it. All replies must have been read."""
        if self.is_tls or self._kernel_waits:
            self._socket.settimeout(self._timeout_s)

    def send(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Send buffers one after another; returns when the kernel has them all."""
        if self.is_tls:
            for joined in _join_small(buffers):
                self._send_encrypted(joined)
            return
        for first in range(0, len(buffers), _BUFFERS_PER_CALL):
            self._send_vector(buffers[first : first + _BUFFERS_PER_CALL])

    def expect_ok(self) -> bytes | None:
        """Read a simple reply; return the error without its leading "-", or None if it is none."""
        line = self._line()
        if line[:1] == b"-":
            return line[1:]
        if line[:1] in (b"+", b":"):
            return None
        raise _unexpected(line)

    def bulk_length(self) -> int | None:
        """Read the header of a bulk reply: its length, or None for a key that is not there."""
        line = self._line()
        if line[:1] == b"-":
            raise_reply_error(line[1:])
        if line[:1] != b"$":
            raise _unexpected(line)
        number = line[1:]
        is_there = number != b"-1"
        if is_there and not (number.isdigit() and len(number) <= _LENGTH_DIGITS_MAX):
            raise _unexpected(line)
        length = int(number) if is_there else 0
        self._is_large = length >= _LOOKAHEAD_BYTES
        self._reply_left = length
        return length if is_there else None

    def receive_into(self, destination: memoryview) -> None:
        """Fill `destination` with the next bytes of a bulk reply."""
        wanted = len(destination)
        self._reply_left -= wanted
        filled = min(wanted, self._end - self._start)
        if filled:
            destination[:filled] = self._lookahead[self._start : self._start + filled]
            self._start += filled
        while filled < wanted:
            if wanted - filled < _DIRECT_BYTES:
                self._fill()
                count = min(wanted - filled, self._end - self._start)
                destination[filled : filled + count] = self._lookahead[
                    self._start : self._start + count
                ]
                self._start += count
                filled += count
            else:
                # All of it, where the kernel can wait and bytes move.
                flags = 0 if self.is_tls else socket.MSG_WAITALL
                filled += self._receive(destination[filled:], flags)

    def receive_values(
        self,
        values: Sequence[Sequence[memoryview]],
        blocks: bulk.Blocks,
        questions: Sequence[bulk.Question],
    ) -> Sequence[int]:
        """Receive the next bulk replies into memory of their exact lengths; not on TLS.

        See `breadbox.stores.bulk.receive`. UnforeseenError if a reply is not as long.
        """
        # What stands between values is received as well, and compared with what it must be.
        wanted = [b"$%d\r\n" % sum(map(len, value)) for value in values]
        wanted = [*wanted[:1], *(b"\r\n" + frame for frame in wanted[1:]), b"\r\n"]
        frames = [memoryview(bytearray(frame)) for frame in wanted]
        size_bytes = sum(map(len, chain(frames, *values)))
        digests = bulk.new_digests(blocks)
        done = 0
        while True:
            before = done
            number = self._socket.fileno()
            done = bulk.receive(number, frames, values, blocks, done, questions, digests)
            questions = [each for each in questions if each.after_bytes > done]
            # Compared also where nothing comes: an error is shorter than a value.
            if frames != wanted:
                raise UnforeseenError
            self._has_moved |= done > before
            if done == size_bytes:
                return digests
            if done == before:
                self._look()

    def skip(self, count: int) -> None:
        self._reply_left -= count
        while count:
            if self._start == self._end:
                self._fill()
            dropped = min(count, self._end - self._start)
            self._start += dropped
            count -= dropped

    def end_bulk(self) -> None:
        if self._end - self._start < 2:
            self._fill(at_least=2)
        if bytes(self._lookahead[self._start : self._start + 2]) != b"\r\n":
            raise PayloadCorruptError("a reply of Redis is not as long as it says")
        self._start += 2

    def _let_kernel_wait(self) -> None:
        """Make the socket block a moment at a time: Python's timeouts move too little a call."""
        if not self.is_tls and not self._kernel_waits:
            self._kernel_waits = True
            self._socket.settimeout(None)

    def _receive(self, destination: memoryview, flags: int = 0) -> int:
        self._let_kernel_wait()
        while True:
            try:
                count = self._socket.recv_into(destination, 0, flags)
            except (BlockingIOError, TimeoutError):
                self._look()
                continue
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, "closed by Redis")
            self._has_moved = True
            return count

    def _look(self) -> None:
        if self._has_moved:
            self._has_moved = False
            self._heard_at = self._deadline.now() - LOOK_S
            self._deadline.heard(self._heard_at)
        if self._deadline.left_s(self._heard_at) <= 0:
            raise TimeoutError("nothing moves on the connection")

    def _send_vector(self, buffers: Sequence[memoryview | bytes]) -> None:
        self._let_kernel_wait()
        rest = list(buffers)
        while rest:
            try:
                sent = self._socket.sendmsg(rest)
            except BlockingIOError:
                self._look()
                continue
            self._has_moved = True
            drop(rest, sent)

    def _send_encrypted(self, buffer: memoryview | bytes) -> None:
        rest = memoryview(buffer).cast("B")
        while rest:
            try:
                sent = self._socket.send(rest)
            except TimeoutError:
                self._look()
                continue
            self._has_moved = True
            rest = rest[sent:]

    def _line(self) -> bytes:
        line = b""
        while True:
            ready = bytes(self._lookahead[self._start : min(self._end, self._start + 64)])
            if b"\n" not in ready:
                ready = bytes(self._lookahead[self._start : self._end])
            position = ready.find(b"\n")
            if position >= 0:
                self._start += position + 1
                return (line + ready[:position]).removesuffix(b"\r")
            line += ready
            if len(line) > _LINE_BYTES_MAX:
                raise _unexpected(line)
            self._start = self._end
            self._fill()

    def _fill(self, at_least: int = 1) -> None:
        held = self._end - self._start
        if held:
            self._lookahead[:held] = bytes(self._lookahead[self._start : self._end])
        self._start, self._end = 0, held
        while self._end < at_least:
            self._end += self._receive(self._lookahead[self._end : self._end + self._ahead_bytes()])

    def _ahead_bytes(self) -> int:
        """Return how much to take ahead: little, as parts of large values are copied again."""
        if self._reply_left > _LOOKAHEAD_BYTES:
            return _DIRECT_BYTES
        if self._is_large and self._reply_left <= 0:
            return _LINE_AHEAD_BYTES
        return _LOOKAHEAD_BYTES


def _join_small(buffers: Sequence[memoryview | bytes]) -> Iterator[memoryview | bytes]:
    small: list[memoryview | bytes] = []
    small_bytes = 0
    for buffer in buffers:
        if len(buffer) <= _JOIN_BYTES:
            small.append(buffer)
            small_bytes += len(buffer)
            if small_bytes > _JOIN_BYTES:
                yield b"".join(small)
                small, small_bytes = [], 0
            continue
        if small:
            yield b"".join(small)
            small, small_bytes = [], 0
        yield buffer
    if small:
        yield b"".join(small)


def _unexpected(line: bytes) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"the payload store does not speak like Redis: {line[:40].decode('ascii', 'replace')!r}"
    )
