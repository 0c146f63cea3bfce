"""Encode and hash schemas, for clients that declare them and for servers."""

from collections.abc import Iterable
from typing import Final

import xxhash

from breadbox.v1 import schema_pb2

SCHEMA_BYTES_MAX: Final = 64 * 1024
"""Most bytes of a declared schema. Producers declare no larger one."""

SCHEMA_ARRAYS_MAX: Final = 4096

SCHEMAS_TOLD_MAX: Final = 16
"""Most schemas declared in one call."""

NO_SCHEMA: Final = 0
"""Hash of fragments without a declared schema."""


def message_of(arrays: Iterable[tuple[str, str, Iterable[int]]]) -> schema_pb2.Schema:
    """Return the message of a schema: (path, dtype, shape) of each array, in any order."""
    message = schema_pb2.Schema()
    for path, dtype, shape in sorted(arrays, key=lambda each: each[0].encode()):
        message.arrays.add(path=path, dtype=dtype, shape=shape)
    return message


def hash_of(message: schema_pb2.Schema) -> int:
    """Return the hash of a schema that `message_of` made."""
    return xxhash.xxh3_64_intdigest(message.SerializeToString(deterministic=True)) or 1
