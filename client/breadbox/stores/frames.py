"""Pack and take apart messages that carry payload bytes, without protobuf's two copies."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from breadbox.v1 import replay_buffer_service_pb2 as pb

_DATA_TAG: Final = 0x0A


class Written(NamedTuple):
    """A WritePayloadsRequest."""

    data: memoryview
    size_bytes: Sequence[int]


def pack(buffers: Sequence[bytes | bytearray | memoryview], others: bytes = b"") -> bytes:
    """Return a message whose `data` is these buffers of bytes, joined, before its other fields."""
    size_bytes = sum(map(len, buffers))
    if not size_bytes:
        return others
    head = bytearray([_DATA_TAG])
    while size_bytes > 0x7F:
        head.append(size_bytes & 0x7F | 0x80)
        size_bytes >>= 7
    head.append(size_bytes)
    return b"".join((head, *buffers, others))


def unpack_write(raw: bytes) -> Written:
    """Parse a WritePayloadsRequest, or raise DecodeError."""
    data, others = _split(raw)
    message = pb.WritePayloadsRequest.FromString(others)
    # Of several `data`, which no serializer writes, the last counts.
    return Written(memoryview(message.data or data), message.size_bytes)


def unpack_read(raw: bytes) -> memoryview:
    """Return the `data` of a ReadPayloadsResponse, or raise DecodeError."""
    data, others = _split(raw)
    return memoryview(pb.ReadPayloadsResponse.FromString(others).data or data)


def _split(raw: bytes) -> tuple[memoryview, bytes]:
    size_bytes, shift, at = 0, 0, 1
    if raw[:1] == b"\x0a":
        for byte in raw[1:6]:
            size_bytes |= (byte & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if byte < 0x80:
                end = at + size_bytes
                if end <= len(raw):
                    return memoryview(raw)[at:end], raw[end:]
                break
    return memoryview(b""), raw
