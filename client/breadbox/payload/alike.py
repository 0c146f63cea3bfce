"""Payloads in memory, verified and taken apart together, where they are alike.

Fragments of one producer have one layout, and nearly all of what takes time in reading a small
payload, finding out what is in it, is then the same for all of them. What is not so regular, or
fails a check, is for `breadbox.payload.receive`, which says what is wrong with it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from breadbox.errors import PayloadCorruptError, PayloadFormatError
from breadbox.payload.format import (
    CHECKSUMMED_PRELUDE_BYTES,
    PRELUDE_BYTES,
    Head,
    parse_head,
)
from breadbox.payload.layout import Layout, pack_figures


class Alike(NamedTuple):
    """Payloads of one layout, every byte of their arrays verified."""

    head: Head
    """Of one of them: layout and places are those of all."""
    positions: Sequence[int]
    """Which they are among all, ascending."""
    bodies: NDArray[np.uint8]
    """uint8[payload, byte of the body]."""

    def column(self, index: int) -> NDArray[np.uint8]:
        """uint8[payload, byte]: one array of each, by its index."""
        start = self.head.places.offsets[index]
        return self.bodies[:, start : start + self.head.places.sizes[index]]


class _Kind:
    """What payloads have in common that begin with the same bytes and have the same layout."""

    def __init__(self, payload: bytes) -> None:
        head = parse_head(memoryview(payload), len(payload))
        layout = head.layout
        self.head = head
        self.size_bytes = len(payload)
        self.is_raw = not layout.encoded and head.places.body_bytes > 0
        self.figures_end = PRELUDE_BYTES + len(pack_figures(head.figures))
        self.layout_at = self.figures_end + len(head.raw_attributes)
        self.layout_end = self.layout_at + len(layout.raw)
        self.blocks = _blocks(head)


def gather(payloads: Sequence[bytes]) -> list[Alike] | None:
    """Verify payloads, and sort them by layout, in order of the first of each.

    Returns:
        None where one is damaged, or has encoded arrays: they are to be received one by one.
    """
    kinds: dict[bytes, _Kind] = {}
    groups: dict[Layout, tuple[Head, list[int], list[bytes]]] = {}
    try:
        for position, payload in enumerate(payloads):
            beginning = payload[:CHECKSUMMED_PRELUDE_BYTES]
            kind = kinds.get(beginning)
            if kind is None:
                kind = kinds[beginning] = _Kind(payload)
            if not kind.is_raw or not _is_whole(payload, beginning, kind):
                return None
            _, positions, bodies = groups.setdefault(kind.head.layout, (kind.head, [], []))
            positions.append(position)
            bodies.append(payload[kind.head.body_offset :])
    except (PayloadCorruptError, PayloadFormatError):
        return None
    return [
        Alike(
            head, positions, np.frombuffer(b"".join(bodies), np.uint8).reshape(len(positions), -1)
        )
        for head, positions, bodies in groups.values()
    ]


_digest: Final = xxhash.xxh3_64_intdigest


def _is_whole(payload: bytes, beginning: bytes, kind: _Kind) -> bool:
    """Whether a payload is of a kind, and none of its checksums fails."""
    layout_at = kind.layout_at
    checksum = payload[CHECKSUMMED_PRELUDE_BYTES:PRELUDE_BYTES]
    return (
        len(payload) == kind.size_bytes
        and _digest(beginning + payload[PRELUDE_BYTES:layout_at]).to_bytes(8, "little") == checksum
        and payload[layout_at : kind.layout_end] == kind.head.layout.raw
        and pack_figures([_digest(payload[each]) for each in kind.blocks])
        == payload[PRELUDE_BYTES : kind.figures_end]
    )


def _blocks(head: Head) -> list[slice]:
    """Where the checksummed blocks of a payload without encoded arrays are, in their order."""
    block_bytes = head.layout.block_bytes
    blocks = []
    for index in head.layout.order:
        start = head.body_offset + head.places.offsets[index]
        end = start + head.places.sizes[index]
        blocks += [slice(at, min(at + block_bytes, end)) for at in range(start, end, block_bytes)]
    return blocks
