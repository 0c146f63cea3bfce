"""Verify payloads that differ in the lengths of open axes together; `alike` takes equal ones.

Numpy does for all of them what `format.parse_head` does for one, which then reads what is refused
here, and says what is wrong with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import pack
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from breadbox.model.errors import PayloadCorruptError, PayloadFormatError
from breadbox.payload.alike import digest
from breadbox.payload.format import (
    CHECKSUMMED_PRELUDE_BYTES,
    PRELUDE_BYTES,
    Head,
    parse_head,
    stored_layout,
)
from breadbox.payload.layout import OPEN, Layout
from breadbox.payload.limits import ALIGNMENT_BYTES, PAYLOAD_BYTES_MAX

_SIZES: Final = ("figure_bytes", "attribute_bytes", "body_bytes")
_KIND: Final = slice(24)
"""Magic, version, number of lengths, size and hash of the layout."""
_FIGURE_BYTES: Final = 8
_ARRAYS_MAX: Final = 64
"""Arrays of a payload up to which payloads are verified together: it bounds what that allocates."""


@lru_cache(maxsize=64)
def _beginning(open_count: int) -> np.dtype[Any]:
    """Return what a payload with so many lengths begins with: prelude and lengths."""
    names, formats, offsets = (*_SIZES, "lengths"), ("<u4", "<u4", "<u8"), (24, 28, 32)
    return np.dtype(
        {
            "names": names,
            "formats": [*formats, ("<u8", (open_count,))],
            "offsets": [*offsets, PRELUDE_BYTES],
        }
    )


@dataclass(frozen=True, slots=True, eq=False)
class UnequalPayloads:
    """Payloads of one open layout, every byte of their arrays verified."""

    head: Head
    """Head of the first."""
    layout: Layout
    """Layout of all, its axes open."""
    positions: Sequence[int]
    """Which they are among all."""
    payloads: Sequence[memoryview]
    shapes: Sequence[NDArray[np.int64]]
    """int64[payload, axis] for each array."""
    starts: NDArray[np.int64]
    """int64[payload, array]; first byte of an array."""
    ends: NDArray[np.int64]
    """int64[payload, array]; the byte behind its last."""


def verify_unequal(payloads: Mapping[int, memoryview]) -> list[UnequalPayloads]:
    """Sort payloads of at most 64 KiB, by position, by open layout; leave out those refused."""
    kinds: dict[bytes, list[int]] = {}
    for position, payload in payloads.items():
        kinds.setdefault(payload[_KIND].tobytes(), []).append(position)
    groups = []
    for positions in kinds.values():
        try:
            group = _group(positions, [payloads[position] for position in positions])
        except (PayloadCorruptError, PayloadFormatError):
            continue
        if group is not None:
            groups.append(group)
    return groups


def _group(positions: Sequence[int], payloads: Sequence[memoryview]) -> UnequalPayloads | None:
    """Verify payloads that begin alike, or return None if one is refused."""
    head = parse_head(payloads[0], len(payloads[0]))
    layout = stored_layout(head.layout)
    lengths_end = PRELUDE_BYTES + _FIGURE_BYTES * layout.open_count
    if (
        not 0 < len(layout.arrays) <= _ARRAYS_MAX
        or not layout.open_count
        or layout.encoded
        or min(map(len, payloads)) < lengths_end
    ):
        return None
    beginnings = b"".join([payload[:lengths_end] for payload in payloads])
    rows = np.frombuffer(beginnings, _beginning(layout.open_count))
    figures, attributes, bodies = [rows[name].astype(np.int64) for name in _SIZES]
    owns_end = PRELUDE_BYTES + figures + attributes
    body_offsets = _aligned(owns_end + len(layout.raw))
    shapes = _shapes(layout, rows["lengths"])
    if shapes is None:
        return None
    starts = np.empty((len(payloads), len(shapes)), np.int64)
    ends = starts.copy()
    end = np.zeros(len(payloads), np.int64)
    for index in layout.order:
        starts[:, index] = _aligned(end)
        sizes = shapes[index].prod(1) * layout.arrays[index].dtype.itemsize
        ends[:, index] = end = starts[:, index] + sizes
    filled = ends > starts
    if not (
        (ends - starts <= layout.block_bytes).all()  # So each array has one checksum at most.
        and (figures == _FIGURE_BYTES * (layout.open_count + filled.sum(1))).all()
        and (bodies == end).all()
        and (body_offsets + bodies == [*map(len, payloads)]).all()
    ):
        return None
    starts += body_offsets[:, None]
    ends += body_offsets[:, None]
    group = UnequalPayloads(head, layout, positions, payloads, shapes, starts, ends)
    return group if _is_sound(group, owns_end.tolist(), lengths_end) else None


def _shapes(layout: Layout, lengths: NDArray[np.uint64]) -> list[NDArray[np.int64]] | None:
    """Return the shapes of each array, or None if one is impossible."""
    if (lengths > PAYLOAD_BYTES_MAX).any():
        return None
    columns = iter(lengths.astype(np.int64).T)
    shapes = []
    for stored in layout.arrays:
        shape = np.empty((len(lengths), len(stored.shape)), np.int64)
        for axis, length in enumerate(stored.shape):
            shape[:, axis] = next(columns) if length == OPEN else length
        with np.errstate(over="ignore"):
            extents = np.maximum(shape, 1).prod(1, dtype=np.float64) * stored.dtype.itemsize
        if (extents > PAYLOAD_BYTES_MAX).any():
            return None
        shapes.append(shape)
    return shapes


def _is_sound(group: UnequalPayloads, owns_end: Sequence[int], lengths_end: int) -> bool:
    """Return whether layouts and all checksums are right."""
    raw_layout, order = group.layout.raw, [*group.layout.order]
    starts, ends = group.starts[:, order].tolist(), group.ends[:, order].tolist()
    for payload, own_end, *spans in zip(group.payloads, owns_end, starts, ends, strict=True):
        head = payload[: own_end + len(raw_layout)].tobytes()
        digests = [digest(payload[at:end]) for at, end in zip(*spans, strict=True) if end > at]
        if not (
            head.endswith(raw_layout)
            and head.startswith(pack(f"<{len(digests)}Q", *digests), lengths_end)
            and head.startswith(
                pack("<Q", digest(head[:CHECKSUMMED_PRELUDE_BYTES] + head[PRELUDE_BYTES:own_end])),
                CHECKSUMMED_PRELUDE_BYTES,
            )
        ):
            return False
    return True


def _aligned(offsets: NDArray[np.int64]) -> Any:
    return offsets + -offsets % ALIGNMENT_BYTES
