"""Verify and decode payloads of one layout together; `payload.receive` takes irregular ones."""

from collections.abc import Sequence
from operator import itemgetter
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from breadbox.model.errors import PayloadCorruptError, PayloadFormatError
from breadbox.payload.format import (
    CHECKSUMMED_PRELUDE_BYTES,
    PRELUDE_BYTES,
    Head,
    parse_head,
)
from breadbox.payload.layout import Layout

KINDS_MAX: Final = 256
"""Kinds of payloads remembered, each a few times as large as a head; beyond, all are forgotten."""
_CHECKSUM: Final = slice(CHECKSUMMED_PRELUDE_BYTES, PRELUDE_BYTES)
_packed: Final = Struct("<Q").pack
_digest: Final = xxhash.xxh3_64_intdigest


class UniformPayloads(NamedTuple):
    """Payloads of one layout, every byte of their arrays verified."""

    head: Head
    """Head of one of them: layout and places are those of all."""
    positions: Sequence[int]
    """Which they are among all, ascending."""
    bodies: NDArray[np.uint8]
    """uint8[payload, byte of the body]."""

    def column(self, index: int) -> NDArray[np.uint8]:
        """Return one array of each payload, by its index: uint8[payload, byte]."""
        start = self.head.places.offsets[index]
        return self.bodies[:, start : start + self.head.places.sizes[index]]


class _Kind:
    """What payloads that begin with the same bytes, of one layout, have in common.

    *head* is that of the first, *own* where each has checksums and attributes, *figures* where its
    checksums are, *blocks* what each covers, or None if arrays are encoded.
    """

    def __init__(self, payload: bytes) -> None:
        self.head = head = parse_head(memoryview(payload), len(payload))
        self.size_bytes = len(payload)
        self.body_offset = head.body_offset
        figures = Struct(f"<{len(head.figures)}Q")
        own_end = PRELUDE_BYTES + figures.size + len(head.raw_attributes)
        self.own = slice(PRELUDE_BYTES, own_end)
        self.layout = slice(own_end, own_end + len(head.layout.raw))
        self.raw_layout = head.layout.raw
        self.figures = slice(PRELUDE_BYTES, PRELUDE_BYTES + figures.size)
        self.pack_figures = figures.pack
        blocks = _blocks(head)
        # Two at least: of one, the getter would give no tuple.
        self.blocks = itemgetter(*blocks) if len(blocks) > 1 and not head.layout.encoded else None


_kinds: Final[dict[bytes, _Kind]] = {}
"""Kinds met lately, by the bytes that their payloads begin with, which name size and layout."""


def verify_and_group(payloads: Sequence[bytes]) -> list[UniformPayloads] | None:
    """Verify payloads and sort them by layout, or None if one is damaged or has encoded arrays."""
    groups: dict[Layout, tuple[Head, list[int], list[bytes]]] = {}
    try:
        for position, payload in enumerate(payloads):
            beginning = payload[:CHECKSUMMED_PRELUDE_BYTES]
            kind = _kinds.get(beginning)
            if kind is None:
                if len(_kinds) >= KINDS_MAX:
                    _kinds.clear()
                kind = _kinds[beginning] = _Kind(payload)
            if kind.blocks is None or not (
                len(payload) == kind.size_bytes
                and payload[_CHECKSUM] == _packed(_digest(beginning + payload[kind.own]))
                and payload[kind.layout] == kind.raw_layout
                and payload[kind.figures] == kind.pack_figures(*map(_digest, kind.blocks(payload)))
            ):
                return None
            _, positions, bodies = groups.setdefault(kind.head.layout, (kind.head, [], []))
            positions.append(position)
            bodies.append(payload[kind.body_offset :])
    except (PayloadCorruptError, PayloadFormatError):
        return None
    return [
        UniformPayloads(
            head, positions, np.frombuffer(b"".join(bodies), np.uint8).reshape(len(positions), -1)
        )
        for head, positions, bodies in groups.values()
    ]


def _blocks(head: Head) -> list[slice]:
    block_bytes = head.layout.block_bytes
    blocks = []
    for index in head.layout.order:
        start = head.body_offset + head.places.offsets[index]
        end = start + head.places.sizes[index]
        blocks += [slice(at, min(at + block_bytes, end)) for at in range(start, end, block_bytes)]
    return blocks
