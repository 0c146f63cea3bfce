"""Verify payloads that differ in the lengths of open axes together; `alike` takes equal ones.

Numpy does for all of them what `format.parse_head` does for one. A payload that is refused here is
read once more by that function, which raises the error for it.
"""

from collections.abc import Mapping, Sequence
from struct import pack
from typing import Any, Final, NamedTuple

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
from breadbox.payload.layout import OPEN
from breadbox.payload.limits import ALIGNMENT_BYTES, PAYLOAD_BYTES_MAX

_KIND: Final = slice(24)
"""Magic, version, number of lengths, size and hash of the layout."""
_WORD_BYTES: Final = 8
_ARRAYS_MAX: Final = 64
"""Arrays of a payload up to which payloads are verified together: it bounds what that allocates."""


class UnequalPayloads(NamedTuple):
    """Payloads of one open layout, every byte of their arrays verified."""

    head: Head
    """Head of the first."""
    positions: Sequence[int]
    shapes: Sequence[NDArray[np.int64]]
    """int64[payload, axis] for each array."""
    arrays: Sequence[Sequence[memoryview]]
    """Bytes of each array, for each payload."""

    def copied(self, row: int, index: int) -> NDArray[Any]:
        """Return an array of a payload in memory of its own, by their indexes."""
        own = bytearray(self.arrays[row][index])
        return np.ndarray(self.shapes[index][row], self.head.layout.arrays[index].dtype, own)


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
        groups += [group] if group else []
    return groups


def _group(positions: Sequence[int], payloads: Sequence[memoryview]) -> UnequalPayloads | None:
    """Verify payloads that begin alike, or return None if one is refused."""
    head = parse_head(payloads[0], len(payloads[0]))
    layout = stored_layout(head.layout)
    lengths_end = PRELUDE_BYTES + _WORD_BYTES * layout.open_count
    is_for_others = not layout.open_count or layout.encoded or len(layout.arrays) > _ARRAYS_MAX
    if is_for_others or min(map(len, payloads)) < lengths_end:
        return None
    words = np.array([np.frombuffer(payload[:lengths_end], "<u8") for payload in payloads])
    body_bytes, lengths = words[:, 4].astype(np.int64), words[:, PRELUDE_BYTES // _WORD_BYTES :].T
    figure_bytes, attribute_bytes = words.view("<u4")[:, 6:8].T.astype(np.int64)
    owns_end = PRELUDE_BYTES + figure_bytes + attribute_bytes
    heads_end = owns_end + len(layout.raw)
    body_offsets = heads_end + -heads_end % ALIGNMENT_BYTES
    if (lengths > PAYLOAD_BYTES_MAX).any():
        return None
    columns = iter(lengths.astype(np.int64))
    figure_counts = np.full(len(payloads), layout.open_count)
    end = np.zeros(len(payloads), np.int64)
    shapes, bounds = [], []
    for stored in layout.arrays:
        shape = np.empty((len(payloads), len(stored.shape)), np.int64)
        for axis, length in enumerate(stored.shape):
            shape[:, axis] = next(columns) if length == OPEN else length
        with np.errstate(over="ignore"):
            extents = np.maximum(shape, 1).prod(1, dtype=np.float64) * stored.dtype.itemsize
        if (extents > PAYLOAD_BYTES_MAX).any():
            return None
        start = end + -end % ALIGNMENT_BYTES
        end = start + shape.prod(1) * stored.dtype.itemsize
        if (end - start > layout.block_bytes).any():  # Each array has one checksum, or none.
            return None
        figure_counts += end > start
        shapes.append(shape)
        bounds += [body_offsets + start, body_offsets + end]
    if not (
        (figure_bytes == _WORD_BYTES * figure_counts).all()
        and (body_bytes == end).all()
        and (body_offsets + body_bytes == [*map(len, payloads)]).all()
    ):
        return None
    arrays = []
    spans = np.stack(bounds, 1).tolist()
    for payload, own_end, each in zip(payloads, owns_end.tolist(), spans, strict=True):
        head_bytes = payload[: own_end + len(layout.raw)].tobytes()
        found = [payload[start:stop] for start, stop in zip(each[::2], each[1::2], strict=True)]
        digests = [digest(array) for array in found if array]
        own = head_bytes[:CHECKSUMMED_PRELUDE_BYTES] + head_bytes[PRELUDE_BYTES:own_end]
        if not (
            head_bytes.endswith(layout.raw)
            and head_bytes.startswith(pack(f"<{len(digests)}Q", *digests), lengths_end)
            and head_bytes.startswith(pack("<Q", digest(own)), CHECKSUMMED_PRELUDE_BYTES)
        ):
            return None
        arrays.append(found)
    return UnequalPayloads(head, positions, shapes, arrays)
