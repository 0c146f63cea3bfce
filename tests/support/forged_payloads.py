"""Payloads whose headers say what their maker wants, with checksums and sizes that are right."""

import struct
from collections.abc import Callable
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


def with_header(
    payload: bytes | bytearray, change: Callable[[payload_pb2.PayloadHeader], None]
) -> bytes:
    """A payload whose header was changed, with its checksum and sizes made right again."""
    magic, version, flags, header_bytes, _, _ = struct.unpack_from("<8sHHIQQ", payload)
    header = payload_pb2.PayloadHeader.FromString(
        bytes(payload[PRELUDE_BYTES : PRELUDE_BYTES + header_bytes])
    )
    body = payload[-(-(PRELUDE_BYTES + header_bytes) // 64) * 64 :]
    change(header)
    return assemble(header.SerializeToString(), bytes(body), magic, version, flags)


def assemble(
    raw_header: bytes, body: bytes, magic: bytes = b"BREADBOX", version: int = 1, flags: int = 0
) -> bytes:
    """A payload of a header and a body."""
    padded = raw_header.ljust(-(-(PRELUDE_BYTES + len(raw_header)) // 64) * 64 - PRELUDE_BYTES)
    size_bytes = PRELUDE_BYTES + len(padded) + len(body)
    checksum = xxhash.xxh3_64_intdigest(raw_header)
    prelude = struct.pack("<8sHHIQQ", magic, version, flags, len(raw_header), checksum, size_bytes)
    return prelude + padded + body


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
    payload = b"".join(encode_tree(tree))
    header = _parsed(payload)
    old_body, body = payload[len(payload) - header.body_size_bytes :], bytearray()
    for array in header.arrays:
        data = old_body[array.offset_bytes : array.offset_bytes + array.size_bytes]
        if array.name.startswith("extras."):
            data = packed
            array.shape[:] = (4, array_bytes // 4)
            array.codec = payload_pb2.CODEC_ZSTD
            array.block_checksums[:] = checksums(packed, header.checksum_block_bytes)
        body += bytes(-len(body) % 64)
        array.offset_bytes, array.size_bytes = len(body), len(data)
        body += data
    header.body_size_bytes = len(body)
    return assemble(header.SerializeToString(), bytes(body))


def header_of_parts(part_count: int) -> bytes:
    """A payload whose header is so many empty arrays and nothing else."""
    return assemble(b"\x12\x00" * part_count, b"")


def _parsed(payload: bytes) -> payload_pb2.PayloadHeader:
    header_bytes = struct.unpack_from("<8sHHIQQ", payload)[3]
    return payload_pb2.PayloadHeader.FromString(
        payload[PRELUDE_BYTES : PRELUDE_BYTES + header_bytes]
    )
