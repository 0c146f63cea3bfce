"""What is in a payload and where: everything in a header but checksums and attributes.

Fragments of one producer nearly always have the same layout, so layouts are made and checked once
and shared: `is` tells quickly that two payloads are alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from breadbox.trees import Structure
from breadbox.v1 import payload_pb2

GAP_BYTES_MAX: Final = 63
"""Zeros that a writer leaves between two arrays; readers skip longer gaps as well."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array as a header describes it; everything in here has been checked."""

    name: str
    type_name: str
    dtype: np.dtype[Any]
    """Of the stored elements: unsigned 16-bit for "bfloat16"."""
    shape: tuple[int, ...]
    codec: int
    """A value of the wire's enum Codec."""
    offset_bytes: int
    """From the start of the body."""
    size_bytes: int
    """Encoded."""
    parameters: Mapping[str, str]

    @property
    def is_raw(self) -> bool:
        """Whether the encoded bytes are the elements themselves."""
        return self.codec == payload_pb2.CODEC_RAW

    def describe(self) -> str:
        """Type and shape, for messages."""
        return f"{self.type_name}{list(self.shape)}"


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Tree and arrays of a payload. Compared by identity."""

    structure: Structure
    arrays: tuple[StoredArray, ...]
    body_bytes: int
    block_bytes: int
    """Of the checksums."""
    gaps: tuple[bytes, ...] = ()
    """Zeros before each array, from the end of the one before."""
    gaps_between: tuple[bytes, ...] = ()
    """The same, each followed by an empty place for its array."""

    def __post_init__(self) -> None:
        end = 0
        gaps = []
        for stored in self.arrays:
            gaps.append(bytes(min(stored.offset_bytes - end, GAP_BYTES_MAX)))
            end = stored.offset_bytes + stored.size_bytes
        object.__setattr__(self, "gaps", tuple(gaps))
        pairs = [part for gap in gaps for part in (gap, b"")]
        object.__setattr__(self, "gaps_between", tuple(pairs))

    def block_count(self, stored: StoredArray) -> int:
        """Checksums of an array."""
        return -(-stored.size_bytes // self.block_bytes)
