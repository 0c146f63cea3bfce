"""HTTP/2 by hand: for clients that do what no library would."""

import socket
import struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, CONTINUATION = 0, 1, 4, 9
END_STREAM, END_HEADERS = 1, 4
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
