"""What is in a payload and where: what payloads of one kind have in common.

Fragments of one producer nearly always have the same layout, so layouts are made and checked once
and shared: `is` finds out quickly that two payloads are alike.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from breadbox.model.trees import Structure
from breadbox.payload.arrays.limits import ALIGNMENT_BYTES
from breadbox.v1 import payload_pb2

GAP_BYTES_MAX: Final = ALIGNMENT_BYTES - 1
"""Zeros between two arrays, at most."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array as a layout describes it; everything in here has been checked."""

    name: str
    """Path in the tree."""
    type_name: str
    dtype: np.dtype[Any]
    """Type of the stored elements: unsigned 16-bit for "bfloat16"."""
    shape: tuple[int, ...]
    codec: int
    """A value of the wire's enum Codec."""
    raw_bytes: int
    """Bytes of its elements."""
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_raw(self) -> bool:
        """Whether the encoded bytes are the elements themselves, in every payload."""
        return self.codec == payload_pb2.CODEC_RAW

    def describe(self) -> str:
        """Type and shape, for messages."""
        return f"{self.type_name}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Places:
    """Where arrays and checksums of a payload are, by index of the array."""

    offsets: Sequence[int]
    """First encoded byte, from the start of the body."""
    sizes: Sequence[int]
    """Encoded bytes."""
    first_figures: Sequence[int]
    """First of its checksums, among the numbers of the checksums section."""
    figure_count: int
    """Numbers of the checksums section."""
    body_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Tree and arrays of a payload. Compared by identity."""

    structure: Structure
    arrays: tuple[StoredArray, ...]
    block_bytes: int
    """Bytes of a block with a checksum."""
    raw: bytes
    """As it stands in payloads."""
    hash: int
    """XXH3-64 of `raw`."""
    order: tuple[int, ...] = field(init=False)
    """Order of the arrays in the body: indexes, raw ones first."""
    encoded: tuple[int, ...] = field(init=False)
    """Arrays whose sizes each payload has for itself: the last ones of `order`."""
    raw_places: Places = field(init=False)
    """Where raw arrays and their checksums are in every payload; encoded ones come behind them."""
    gaps_between: tuple[bytes, ...] = field(init=False)
    """Zeros before each raw array, from the end of the one before; each is followed by an empty
    place for its array."""

    def __post_init__(self) -> None:
        raw = [index for index, stored in enumerate(self.arrays) if stored.is_raw]
        encoded = [index for index, stored in enumerate(self.arrays) if not stored.is_raw]
        object.__setattr__(self, "order", (*raw, *encoded))
        object.__setattr__(self, "encoded", tuple(encoded))
        places = _go_on(_nowhere(self), self, raw, [self.arrays[index].raw_bytes for index in raw])
        object.__setattr__(self, "raw_places", places)
        gaps = [bytes(-self.arrays[index].raw_bytes % ALIGNMENT_BYTES) for index in raw]
        pairs = [part for gap in (b"", *gaps[:-1]) for part in (gap, b"")]
        object.__setattr__(self, "gaps_between", tuple(pairs) if raw else ())

    def place(self, encoded_sizes: Sequence[int]) -> Places:
        """Give every array its place, from the sizes of the encoded ones."""
        if not self.encoded:
            return self.raw_places
        return _go_on(self.raw_places, self, self.encoded, encoded_sizes)


def _nowhere(layout: Layout) -> Places:
    zeros = [0] * len(layout.arrays)
    return Places(zeros, zeros, zeros, len(layout.encoded), 0)


def _go_on(places: Places, layout: Layout, indexes: Sequence[int], sizes: Sequence[int]) -> Places:
    """Place more arrays, of these encoded bytes, behind those that have their places."""
    offsets, all_sizes = [*places.offsets], [*places.sizes]
    first_figures = [*places.first_figures]
    end, figure_count = places.body_bytes, places.figure_count
    for index, size_bytes in zip(indexes, sizes, strict=True):
        offsets[index] = aligned(end)
        all_sizes[index] = size_bytes
        first_figures[index] = figure_count
        end = offsets[index] + size_bytes
        figure_count += -(-size_bytes // layout.block_bytes)
    return Places(offsets, all_sizes, first_figures, figure_count, end)


def aligned(offset_bytes: int) -> int:
    """The next multiple at which the body, or an array, may start."""
    return offset_bytes + -offset_bytes % ALIGNMENT_BYTES


def pack_figures(figures: Sequence[int]) -> bytes:
    """The checksums section of these numbers."""
    return struct.pack(f"<{len(figures)}Q", *figures)
