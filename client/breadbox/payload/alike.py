"""Verify and decode payloads of one layout together; `payload.receive` takes irregular ones."""

from collections.abc import Iterable, Sequence
from operator import itemgetter
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from breadbox.model.errors import PayloadCorruptError, PayloadFormatError
from breadbox.payload.format import CHECKSUMMED_PRELUDE_BYTES, PRELUDE_BYTES, Head, parse_head
from breadbox.payload.layout import Layout

KINDS_MAX: Final = 256
"""Kinds of payloads remembered, each a few times as large as a head; beyond, all are forgotten."""
_CHECKSUM: Final = slice(CHECKSUMMED_PRELUDE_BYTES, PRELUDE_BYTES)
_packed: Final = Struct("<Q").pack
digest: Final = xxhash.xxh3_64_intdigest


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


class Kind:
    """What payloads that begin with the same bytes, of one layout, have in common.

    *head* is that of the first, *own* where each has checksums and attributes, *figures* where its
    checksums are, *blocks* what each covers, or None if arrays are encoded or lengths are open.
    Made from at least the head of a payload.
    """

    def __init__(self, payload: bytes, size_bytes: int) -> None:
        self.head = head = parse_head(memoryview(payload), size_bytes)
        self.size_bytes = size_bytes
        self.body_offset = head.body_offset
        self._beginning = payload[:CHECKSUMMED_PRELUDE_BYTES]
        figures = Struct(f"<{len(head.figures)}Q")
        own_end = PRELUDE_BYTES + figures.size + len(head.raw_attributes)
        self._own = slice(PRELUDE_BYTES, own_end)
        self._layout = slice(own_end, own_end + len(head.layout.raw))
        self._figures = slice(PRELUDE_BYTES, PRELUDE_BYTES + figures.size)
        self._pack_figures = figures.pack
        blocks = [block for index in head.layout.order for block in blocks_of(head, index)]
        is_regular = not (head.layout.encoded or head.layout.open_count)
        # Two at least: of one, the getter would give no tuple.
        self.blocks = itemgetter(*blocks) if len(blocks) > 1 and is_regular else None

    def is_head(self, head: bytes) -> bool:
        """Return whether what begins with the same bytes is undamaged up to the body."""
        return (
            head[_CHECKSUM] == _packed(digest(self._beginning + head[self._own]))
            and head[self._layout] == self.head.layout.raw
        )

    def has_checksums(self, head: bytes, digests: Iterable[int]) -> bool:
        """Return whether all blocks of a payload, in order of the body, are as its head says."""
        return head[self._figures] == self._pack_figures(*digests)


_kinds: Final[dict[bytes, Kind]] = {}
"""Kinds met lately, by the bytes that their payloads begin with, which name size and layout."""


def verify_and_group(payloads: Sequence[bytes]) -> list[UniformPayloads] | None:
    """Verify payloads and sort them by layout, or None if one is damaged or irregular."""
    groups: dict[Layout, tuple[Head, list[int], list[bytes]]] = {}
    try:
        for position, payload in enumerate(payloads):
            beginning = payload[:CHECKSUMMED_PRELUDE_BYTES]
            kind = _kinds.get(beginning)
            if kind is None:
                if len(_kinds) >= KINDS_MAX:
                    _kinds.clear()
                kind = _kinds[beginning] = Kind(payload, len(payload))
            if kind.blocks is None or not (
                len(payload) == kind.size_bytes
                and kind.is_head(payload)
                and kind.has_checksums(payload, map(digest, kind.blocks(payload)))
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


def blocks_of(head: Head, index: int) -> list[slice]:
    """Return where the checksummed blocks of an array are in a payload, by the array's index."""
    block_bytes = head.layout.block_bytes
    start = head.body_offset + head.places.offsets[index]
    end = start + head.places.sizes[index]
    return [slice(at, min(at + block_bytes, end)) for at in range(start, end, block_bytes)]
