"""Encode and hash schemas, for clients that declare them and for servers."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import xxhash

from breadbox.v1 import schema_pb2

SCHEMA_BYTES_MAX: Final = 64 * 1024
"""Most bytes of a declared schema. Producers declare no larger one."""

SCHEMA_ARRAYS_MAX: Final = 4096

ORIGINS_MAX: Final = 16
ORIGIN_TEXT_LENGTH_MAX: Final = 512
"""Most origins of a schema, and characters of one's name or text."""

SCHEMAS_TOLD_MAX: Final = 16
"""Most schemas declared in one call."""

NO_ORIGIN: Final[Mapping[str, str]] = MappingProxyType({})

NO_SCHEMA: Final = 0
"""Hash of fragments without a declared schema."""


def message_of(
    arrays: Iterable[tuple[str, str, Iterable[int]]], origin: Mapping[str, str] = NO_ORIGIN
) -> schema_pb2.Schema:
    """Return the message of a schema: (path, dtype, shape) of each array, in any order."""
    message = schema_pb2.Schema(origin=origin)
    for path, dtype, shape in sorted(arrays, key=lambda each: each[0].encode()):
        message.arrays.add(path=path, dtype=dtype, shape=shape)
    return message


def hash_of(message: schema_pb2.Schema) -> int:
    """Return the hash of a schema that `message_of` made; its origin is no part of it."""
    hashed = schema_pb2.Schema(arrays=message.arrays)
    return xxhash.xxh3_64_intdigest(hashed.SerializeToString(deterministic=True)) or 1
