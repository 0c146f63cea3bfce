"""Payloads whose heads say what their maker wants, with checksums and sizes that are right."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
import zstandard

from breadbox.payload import encode_tree
from breadbox.payload.format import PRELUDE_BYTES, checksums
from breadbox.payload.fragments import fragment_tree
from breadbox.v1 import payload_pb2
from support.fragments import vector_fragment

MIB = 1 << 20

PRELUDE = struct.Struct("<8sHHIQIIQ")
"""But for its checksum, which stands behind it."""


_OPEN_AXIS = b"\xff" * 9 + b"\x01"
"""An axis of length -1, as protobuf writes it."""


@dataclass(slots=True)
class Parts:
    """A payload taken apart, to be changed and put together with right checksums and sizes."""

    layout: payload_pb2.PayloadLayout
    figures: list[int]
    attributes: bytes
    body: bytes

    def joined(self) -> bytes:
        """The payload."""
        raw_layout = self.layout.SerializeToString()
        raw_figures = struct.pack(f"<{len(self.figures)}Q", *self.figures)
        return assemble(raw_layout, self.body, raw_figures, self.attributes)


def sections_of(payload: bytes | bytearray) -> tuple[bytes, bytes, bytes, bytes]:
    """Layout, checksums, attributes and body of a payload, as they stand in it."""
    _, _, _, layout_bytes, _, figure_bytes, attribute_bytes, _ = PRELUDE.unpack_from(payload)
    raw = bytes(payload)
    attributes_at = PRELUDE_BYTES + figure_bytes
    layout_at = attributes_at + attribute_bytes
    body_at = layout_at + layout_bytes
    return (
        raw[layout_at:body_at],
        raw[PRELUDE_BYTES:attributes_at],
        raw[attributes_at:layout_at],
        raw[-(-body_at // 64) * 64 :],
    )


def parts_of(payload: bytes | bytearray) -> Parts:
    """Take a payload apart."""
    raw_layout, raw_figures, attributes, body = sections_of(payload)
    layout = payload_pb2.PayloadLayout.FromString(raw_layout)
    figures = [*struct.unpack(f"<{len(raw_figures) // 8}Q", raw_figures)]
    return Parts(layout, figures, attributes, body)


def changed(payload: bytes | bytearray, change: Callable[[Parts], object]) -> bytes:
    """A payload that was changed."""
    parts = parts_of(payload)
    change(parts)
    return parts.joined()


def assemble(
    raw_layout: bytes, body: bytes, raw_figures: bytes = b"", attributes: bytes = b""
) -> bytes:
    """A payload of its sections, with checksums, sizes and version that are right."""
    open_count = min(raw_layout.count(_OPEN_AXIS), 0xFFFF)
    sizes = len(raw_layout), xxhash.xxh3_64_intdigest(raw_layout), len(raw_figures), len(attributes)
    prelude = PRELUDE.pack(b"BREADBOX", 1 + bool(open_count), open_count, *sizes, len(body))
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(prelude + raw_figures + attributes))
    head = prelude + checksum + raw_figures + attributes + raw_layout
    return head.ljust(-(-len(head) // 64) * 64, b"\0") + body


def zeros_as_zstd(size_bytes: int) -> bytes:
    """A frame that says truly that it is so many zeros."""
    compressor = zstandard.ZstdCompressor().compressobj(size=size_bytes)
    parts = [compressor.compress(bytes(MIB)) for _ in range(size_bytes // MIB)]
    return b"".join([*parts, compressor.flush()])


def bomb_of(array_count: int, array_bytes: int) -> bytes:
    """A fragment whose extras are arrays of so many zeros each, as zstd."""
    tree: dict[str, Any] = fragment_tree(vector_fragment(0, step_count=4))
    names = [f"bomb{number:04}" for number in range(array_count)]
    tree["extras"] = dict.fromkeys(names, np.zeros((4, 0), np.uint8))
    packed = zeros_as_zstd(array_bytes)
    parts = parts_of(b"".join(encode_tree(tree)))
    extras = parts.layout.tree.dict.values[list(parts.layout.tree.dict.keys).index("extras")]
    for value in extras.dict.values:
        value.array.shape[:] = (4, array_bytes // 4)
        value.array.codec = payload_pb2.CODEC_ZSTD
        parts.body += bytes(-len(parts.body) % 64) + packed
        parts.figures += checksums(packed, parts.layout.checksum_block_bytes)
    parts.figures[:0] = [len(packed)] * array_count
    return parts.joined()


def layout_of_parts(part_count: int) -> bytes:
    """A payload whose layout is a list of so many empty nodes and nothing else."""
    items = b"\x0a\x00" * part_count
    node = b"\x1a" + varint(len(items)) + items
    return assemble(b"\x0a" + varint(len(node)) + node, b"")


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])
