"""Messages that carry payload bytes, packed and taken apart without copying more than gRPC does.

protobuf would copy the bytes twice each way. On the wire the messages are what
protos/breadbox/v1/replay_buffer_service.proto says: `data`, field 1 of WritePayloadsRequest and of
ReadPayloadsResponse, comes first, as a serializer writes it, and other fields behind it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from breadbox.v1 import replay_buffer_service_pb2 as pb

_DATA_TAG: Final = 0x0A
"""Field 1, of a length that follows."""


class Written(NamedTuple):
    """A WritePayloadsRequest."""

    data: memoryview
    size_bytes: Sequence[int]


def pack(buffers: Sequence[bytes | bytearray | memoryview], others: bytes = b"") -> bytes:
    """A message whose `data` is these buffers, joined.

    Args:
        buffers: Of one byte an item.
        others: Its other fields, serialized.
    """
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
    """A WritePayloadsRequest."""
    data, others = _split(raw)
    message = pb.WritePayloadsRequest.FromString(others)
    # Of several `data`, which no serializer writes, the last counts.
    return Written(memoryview(message.data or data), message.size_bytes)


def unpack_read(raw: bytes) -> memoryview:
    """The `data` of a ReadPayloadsResponse."""
    data, others = _split(raw)
    return memoryview(pb.ReadPayloadsResponse.FromString(others).data or data)


def _split(raw: bytes) -> tuple[memoryview, bytes]:
    """The `data` that a message begins with, and the rest; none, and all, where it does not."""
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
