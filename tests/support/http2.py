"""HTTP/2 by hand: for clients that do what no library would."""

import contextlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    *(0, 1, 3, 4),
    *(6, 7, 8, 9),
)
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE: Final = 4
"""A setting: bytes of each answer that may be sent before more are asked for."""


def connect(address: str) -> socket.socket:
    """A connection to HOST:PORT, on which nothing has been said."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def setting(identifier: int, value: int) -> bytes:
    """One entry of a SETTINGS frame."""
    return struct.pack(">HI", identifier, value)


def literal(name: bytes, value: bytes) -> bytes:
    """One header field, neither compressed nor remembered; both parts below 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_headers(path: str) -> bytes:
    """Header fields that begin a call of /SERVICE/METHOD."""
    return b"".join(
        [
            b"\x83\x86",  # :method POST, :scheme http
            literal(b":path", path.encode()),
            literal(b":authority", b"localhost"),
            literal(b"te", b"trailers"),
            literal(b"content-type", b"application/grpc"),
        ]
    )


def message_prefix(size_bytes: int) -> bytes:
    """What stands before a message, true or not."""
    return struct.pack(">BI", 0, size_bytes)


class Conversation:
    """A connection that keeps to the flow control of the other side, and to nothing else.

    A thread reads what comes: windows are kept, settings and pings answered.
    """

    def __init__(self, address: str, *settings: bytes) -> None:
        self.socket = connect(address)
        self.ended_streams: set[int] = set()
        """Streams that the other side has ended, with an answer or without."""
        self.data_bytes: Counter[int] = Counter()
        """Bytes of answers that came, by stream."""
        self.is_closed = False
        """Whether the other side has hung up, or said that it will."""
        self._lock = threading.Lock()
        self._unsent: bytearray | None = None
        self._initial_window = 65_535
        self._windows: dict[int, int] = {0: 65_535}
        self._next_stream = 1
        self.send(PREFACE + frame(SETTINGS, 0, 0, b"".join(settings)))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def begun_count(self) -> int:
        """Calls that were begun."""
        return self._next_stream // 2

    def send(self, data: bytes) -> bool:
        """Send; gives whether the other side still listens."""
        with self._lock:
            if self._unsent is not None:
                self._unsent += data
                return not self.is_closed
        try:
            self.socket.sendall(data)
        except OSError:
            self.is_closed = True
        return not self.is_closed

    @contextlib.contextmanager
    def in_one_piece(self) -> Iterator[None]:
        """Hold back what is sent inside the block, and send all of it at its end."""
        self._unsent = bytearray()
        yield
        with self._lock:
            unsent, self._unsent = self._unsent, None
        self.send(bytes(unsent))

    def begin(self, path: str, *fields: tuple[bytes, bytes], flags: int = 0) -> int:
        """Begin a call of /SERVICE/METHOD; gives its stream."""
        stream = self._next_stream
        self._next_stream += 2
        with self._lock:
            self._windows[stream] = self._initial_window
        block = call_headers(path) + b"".join(literal(*field) for field in fields)
        self.send(frame(HEADERS, END_HEADERS | flags, stream, block))
        return stream

    def send_data(self, stream: int, data: bytes) -> int:
        """Send as much on a stream as may be sent now; gives how much that was."""
        sent = 0
        while sent < len(data) and stream not in self.ended_streams and not self.is_closed:
            with self._lock:
                room = min(self._windows[0], self._windows[stream], 16_384, len(data) - sent)
                if room <= 0:
                    break
                self._windows[0] -= room
                self._windows[stream] -= room
            self.send(frame(DATA, 0, stream, data[sent : sent + room]))
            sent += room
        return sent

    def take(self, stream: int, size_bytes: int) -> None:
        """Let so many bytes more of an answer come."""
        more = size_bytes.to_bytes(4, "big")
        self.send(frame(WINDOW_UPDATE, 0, stream, more) + frame(WINDOW_UPDATE, 0, 0, more))

    def reset(self, stream: int) -> None:
        """Give a stream up."""
        self.send(frame(RST_STREAM, 0, stream, bytes(4)))

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self.socket.close()

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        self.socket.settimeout(None)
        with contextlib.suppress(OSError), self.socket.makefile("rb") as file:
            while header := file.read(9):
                if len(header) < 9:
                    break
                size = int.from_bytes(header[:3], "big")
                kind, flags, stream = struct.unpack(">BBI", header[3:])
                self._take(kind, flags, stream & 0x7FFFFFFF, file.read(size))
        self.is_closed = True

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self.data_bytes[stream] += len(payload)
        if kind == SETTINGS and not flags & ACK:
            self._take_settings(payload)
            self.send(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            with self._lock:
                more = int.from_bytes(payload, "big")
                self._windows[stream] = self._windows.get(stream, self._initial_window) + more
        elif kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & END_STREAM):
            self.ended_streams.add(stream)
        elif kind == GOAWAY:
            self.is_closed = True

    def _take_settings(self, payload: bytes) -> None:
        for position in range(0, len(payload), 6):
            identifier, value = struct.unpack(">HI", payload[position : position + 6])
            if identifier == INITIAL_WINDOW_SIZE:
                with self._lock:
                    more = value - self._initial_window
                    self._initial_window = value
                    for stream in self._windows:
                        self._windows[stream] += more if stream else 0
