"""Receives payloads from a store straight into arrays, and checks what arrived."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.payload.codecs import decode_into
from breadbox.payload.dtypes import byte_view
from breadbox.payload.format import Head, head_bytes_of, parse_head, verify
from breadbox.payload.layout import StoredArray
from breadbox.stores.base import PayloadStore, Segment
from breadbox.types import PayloadReference


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one array of a payload goes."""

    array_index: int
    destination: NDArray[Any]
    """C-contiguous, of the stored type; as long as `rows` along the first axis."""
    rows: tuple[int, int] | None = None
    """First row, and the row behind the last; None for the whole array."""


Place = Callable[[int, Head], Sequence[Placement]]
"""Given a position and its head: where the arrays go, in order of the array index.

Called again for a payload that had to be started again; it must answer alike.
"""


def receive(
    store: PayloadStore,
    references: Sequence[PayloadReference],
    place: Place,
    *,
    wants_whole: bool = True,
) -> None:
    """Receive payloads into the arrays that `place` names, every byte verified.

    Raises:
        StoreError: As the store does, or the payload is damaged.
        Exception: Whatever `place` raises.
    """
    store.read_many(references, _Receiver(references, place, wants_whole))


@dataclass(slots=True)
class _Pending:
    """What is left to do for one array when its bytes are there."""

    head: Head
    placement: Placement
    encoded: memoryview
    first_block: int = 0
    skip_bytes: int = 0
    """Bytes of `encoded` before the first row wanted."""
    is_in_place: bool = False
    """`encoded` is the destination's own memory."""

    @property
    def stored(self) -> StoredArray:
        """The array as its header describes it."""
        return self.head.layout.arrays[self.placement.array_index]


@dataclass(slots=True)
class _Receiver:
    """A `PayloadReceiver` for trees."""

    references: Sequence[PayloadReference]
    place: Place
    wants_whole: bool
    pending: dict[int, list[_Pending]] = field(default_factory=dict)

    def head_bytes(self, position: int, prelude: memoryview) -> int:
        del position
        return head_bytes_of(prelude)

    def segments(self, position: int, head: memoryview) -> Sequence[Segment]:
        parsed = parse_head(head, self.references[position].size_bytes)
        pending = [_plan(parsed, placement) for placement in self.place(position, parsed)]
        self.pending[position] = pending
        return [
            Segment(
                parsed.body_offset
                + each.stored.offset_bytes
                + each.first_block * parsed.layout.block_bytes,
                each.encoded,
            )
            for each in pending
            if len(each.encoded)
        ]

    def arrived(self, position: int) -> None:
        for each in self.pending.pop(position):
            verify(
                each.head, each.placement.array_index, each.encoded, first_block=each.first_block
            )
            if not each.is_in_place:
                _unpack(each)


def _plan(head: Head, placement: Placement) -> _Pending:
    """Decide what to read for an array: into its place, or into memory of its own first."""
    stored = head.layout.arrays[placement.array_index]
    if stored.is_raw and placement.rows is None:
        return _Pending(head, placement, byte_view(placement.destination), is_in_place=True)
    if not stored.is_raw or placement.rows is None or not stored.size_bytes:
        return _Pending(head, placement, memoryview(bytearray(stored.size_bytes)))
    row_bytes = stored.size_bytes // stored.shape[0]
    start, stop = (row * row_bytes for row in placement.rows)
    if start == stop:
        return _Pending(head, placement, memoryview(b""))
    # Whole blocks, so that what is read can be verified.
    block_bytes = head.layout.block_bytes
    first_block = start // block_bytes
    first = first_block * block_bytes
    last = min(stored.size_bytes, -(-stop // block_bytes) * block_bytes)
    encoded = memoryview(bytearray(last - first))
    return _Pending(head, placement, encoded, first_block=first_block, skip_bytes=start - first)


def _unpack(each: _Pending) -> None:
    """Bring verified bytes to their destination."""
    destination = each.placement.destination
    if each.stored.is_raw:
        raw = byte_view(destination)
        raw[:] = each.encoded[each.skip_bytes : each.skip_bytes + len(raw)]
        return
    whole = destination
    if each.placement.rows is not None:
        whole = np.empty(each.stored.shape, dtype=each.stored.dtype)
    decode_into(whole, each.encoded, each.stored.codec, each.stored.parameters)
    if each.placement.rows is not None:
        start, stop = each.placement.rows
        destination[...] = whole[start:stop]
