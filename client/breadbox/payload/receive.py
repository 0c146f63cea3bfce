"""Receives payloads from a store straight into arrays, and checks what arrived."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from breadbox.model.errors import PayloadCorruptError, ReplayBufferError
from breadbox.model.types import PayloadReference
from breadbox.payload.alike import Kind, blocks_of, digest
from breadbox.payload.codecs import decode_into
from breadbox.payload.dtypes import byte_view
from breadbox.payload.format import (
    CHECKSUMMED_PRELUDE_BYTES,
    Head,
    head_bytes_of,
    parse_head,
    verify,
)
from breadbox.payload.layout import StoredArray
from breadbox.payload.unequal import UnequalPayloads, verify_unequal
from breadbox.stores.base import Foreseen, PayloadStore, Segment, UnforeseenError

_SMALL_BYTES: Final = 16 * 1024
"""Largest array that is received with what is around it, and copied: 0.7 to 0.8 of the cost."""
WHOLE_BYTES_MAX: Final = 64 * 1024
"""Largest payload of a size not met that is received with others by one call, and copied."""
WHOLE_BYTES_TOGETHER_MAX: Final = 8 * 1024 * 1024
"""Bytes of such payloads that are received together."""
HEADS_MET_MAX: Final = 256
"""Sizes of payloads that are known."""


class Placement(NamedTuple):
    """Where one array of a payload goes."""

    array_index: int
    destination: NDArray[Any] | memoryview
    """C-contiguous, of the stored type, `rows` long; or a raw array's memory, whole, as bytes."""
    rows: tuple[int, int] | None = None
    """First row, and the row behind the last; None for the whole array."""


Place = Callable[[int, Head], Sequence[Placement]]
"""Returns where arrays of the payload at a position go; must answer alike if asked again."""
Take = Callable[[UnequalPayloads], bool]
"""Copies arrays of payloads into place together, or returns False with nothing done."""


def receive(
    store: PayloadStore,
    references: Sequence[PayloadReference],
    place: Place,
    *,
    wants_whole: bool = True,
    start_over: Callable[[], None] = lambda: None,
    take: Take = lambda _: False,
) -> None:
    """Receive payloads into the arrays that `place` names, every byte verified.

    Payloads of sizes met before are placed by the heads of those, and received by one call. Where
    one then differs, `start_over` is called, and everything is placed and received again. Small
    payloads of other sizes are received by that call, too, and then placed, or taken together.
    """
    try:
        store.read_many(references, _Receiver(references, place, take, wants_whole, wants_whole))
    except UnforeseenError:
        start_over()
        store.read_many(references, _Receiver(references, place, take, wants_whole, False))


@dataclass(slots=True)
class _Arriving:
    """One array on its way; its blocks are verified as they come."""

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
        return self.head.layout.arrays[self.placement.array_index]

    @property
    def segment(self) -> Segment:
        offset = self.head.places.offsets[self.placement.array_index]
        offset += self.first_block * self.head.layout.block_bytes
        return Segment(self.head.body_offset + offset, self.encoded)

    def arrived(self) -> None:
        index = self.placement.array_index
        verify(self.head, index, self.encoded, first_block=self.first_block)
        if not self.is_in_place:
            _unpack(self)


class _Coming(NamedTuple):
    """A payload on its way, placed by the head of an earlier one."""

    placements: Sequence[Placement]
    plan: "_Plan"
    memory: memoryview
    """Everything but the large arrays, which are received into place."""


class _Plan(NamedTuple):
    """Where the bytes of payloads like an earlier one go, large arrays and the rest apart."""

    like: Head
    kinds: dict[bytes, Kind]
    """Kinds that came, by the bytes that they begin with."""
    large: Sequence[tuple[int, int]]
    """(number of the placement, bytes of the rest in front of it), by offset."""
    small: Sequence[tuple[int, int, int]]
    """(number of the placement, first byte within the rest, byte behind the last)."""
    rest_bytes: int
    blocks: Sequence[tuple[int, slice]]
    """Checksummed blocks by offset, each of a large array, by its order, or of the rest, -1."""
    bounds: Sequence[tuple[int, int]]
    """The same, as bytes of the payload."""


heads_met: dict[int, Head | None] = {}
"""Heads of payloads without encoded arrays, by size; None where layouts share a size."""


@dataclass(slots=True)
class _Receiver:
    references: Sequence[PayloadReference]
    place: Place
    take: Take
    wants_whole: bool
    foresees: bool
    arriving: dict[int, list[_Arriving]] = field(default_factory=dict)
    foreseen: dict[int, _Coming] = field(default_factory=dict)
    whole: dict[int, memoryview] = field(default_factory=dict)
    """Memory of payloads of which nothing is known."""
    whole_bytes: int = 0
    came: dict[int, memoryview] = field(default_factory=dict)
    """Those of them that are filled, while others are not."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    plans: dict[Head, _Plan] = field(default_factory=dict)

    def foresee(self, position: int) -> Foreseen | None:
        size_bytes = self.references[position].size_bytes
        head = heads_met.get(size_bytes)
        if not self.foresees:
            return None
        if head is None:
            return self._foresee_whole(position, size_bytes)
        try:
            placements = self.place(position, head)
        except ReplayBufferError as error:  # Perhaps of the earlier payload alone.
            raise UnforeseenError from error
        plan = self.plans.get(head)
        if plan is None:
            indexes = tuple(placement.array_index for placement in placements)
            plan = self.plans[head] = _plan_of(head, indexes)
        memory = memoryview(bytearray(plan.rest_bytes))
        self.foreseen[position] = _Coming(placements, plan, memory)
        buffers: list[memoryview] = []
        done = 0
        for number, start in plan.large:
            buffers += (memory[done:start], _memory(placements[number].destination))
            done = start
        return Foreseen([*buffers, memory[done:]], plan.bounds)

    def _foresee_whole(self, position: int, size_bytes: int) -> Foreseen | None:
        if size_bytes > WHOLE_BYTES_MAX or self.whole_bytes > WHOLE_BYTES_TOGETHER_MAX:
            return None
        if position not in self.whole:
            self.whole_bytes += size_bytes
        memory = self.whole[position] = memoryview(bytearray(size_bytes))
        return Foreseen([memory], ())

    def head_bytes(self, position: int, prelude: memoryview) -> int:
        del position
        return head_bytes_of(prelude)

    def segments(self, position: int, head: memoryview) -> Sequence[Segment]:
        parsed = self._met(position, head)
        offsets = parsed.places.offsets
        placements = sorted(
            self.place(position, parsed), key=lambda each: offsets[each.array_index]
        )
        arriving = self.arriving[position] = [_plan(parsed, each) for each in placements]
        segments = [each.segment for each in arriving]
        return [each for each in segments if len(each.destination)]

    def arrived(self, position: int, digests: Sequence[int] | None = None) -> None:
        coming = self.foreseen.pop(position, None)
        if coming is not None:
            _verify(coming, digests)
            return
        if position not in self.whole:
            for each in self.arriving.pop(position):
                each.arrived()
            return
        with self.lock:
            self.came[position] = self.whole.pop(position)
            if self.whole:
                return
            came, self.came, self.whole_bytes = self.came, {}, 0
        for group in verify_unequal(came):
            if self.take(group):
                for taken in group.positions:
                    del came[taken]
        for number, whole in came.items():
            self._unpack_whole(number, whole)

    def _unpack_whole(self, position: int, whole: memoryview) -> None:
        head = self._met(position, whole)
        for placement in self.place(position, head):
            start = head.body_offset + head.places.offsets[placement.array_index]
            end = start + head.places.sizes[placement.array_index]
            _Arriving(head, placement, whole[start:end]).arrived()

    def _met(self, position: int, head: memoryview) -> Head:
        size_bytes = self.references[position].size_bytes
        parsed = parse_head(head, size_bytes)
        layout = parsed.layout
        # With open axes few payloads of a size are alike.
        if not (layout.encoded or layout.open_count) and size_bytes not in heads_met:
            while len(heads_met) >= HEADS_MET_MAX:
                heads_met.pop(next(iter(heads_met)), None)
            heads_met[size_bytes] = parsed
        return parsed


def _verify(coming: _Coming, digests: Sequence[int] | None) -> None:
    """Check a payload and unpack its small arrays; UnforeseenError if it differs, or is damaged."""
    placements, plan, memory = coming
    head = bytes(memory[: plan.like.body_offset])
    kind = _kind_of(head, plan)
    if kind is None or not kind.is_head(head):
        heads_met[plan.like.size_bytes] = None
        raise UnforeseenError
    if digests is None:
        parts = [*[_memory(placements[number].destination) for number, _ in plan.large], memory]
        digests = [digest(parts[part][block]) for part, block in plan.blocks]
    if not kind.has_checksums(head, digests):
        raise UnforeseenError
    for number, start, end in plan.small:
        _memory(placements[number].destination)[:] = memory[start:end]


def _kind_of(head: bytes, plan: _Plan) -> Kind | None:
    beginning = head[:CHECKSUMMED_PRELUDE_BYTES]
    kind = plan.kinds.get(beginning)
    if kind is None:
        try:
            kind = Kind(head, plan.like.size_bytes)
        except PayloadCorruptError:  # Or it has a longer one.
            return None
        if kind.head.layout.raw != plan.like.layout.raw:
            return None
        plan.kinds[beginning] = kind
    return kind


@lru_cache(HEADS_MET_MAX)
def _plan_of(head: Head, indexes: Sequence[int]) -> _Plan:
    """Plan for payloads like one, of which these arrays are placed; kept for batches to come."""
    places = head.places
    numbers = {index: number for number, index in enumerate(indexes)}
    large: list[tuple[int, int]] = []
    small: list[tuple[int, int, int]] = []
    blocks: list[tuple[int, slice]] = []
    bounds: list[tuple[int, int]] = []
    large_bytes = 0
    for index in head.layout.order:
        number, size_bytes = numbers.get(index), places.sizes[index]
        start = head.body_offset + places.offsets[index]
        part, origin = -1, large_bytes
        if number is not None and size_bytes > _SMALL_BYTES:
            part, origin = len(large), start
            large.append((number, start - large_bytes))
            large_bytes += size_bytes
        elif number is not None and size_bytes:
            small.append((number, start - origin, start - origin + size_bytes))
        for block in blocks_of(head, index):
            blocks.append((part, slice(block.start - origin, block.stop - origin)))
            bounds.append((block.start, block.stop))
    return _Plan(head, {}, large, small, head.size_bytes - large_bytes, blocks, bounds)


def _memory(destination: NDArray[Any] | memoryview) -> memoryview:
    return destination if isinstance(destination, memoryview) else byte_view(destination)


def _plan(head: Head, placement: Placement) -> _Arriving:
    size_bytes = head.places.sizes[placement.array_index]
    is_raw = head.is_raw(placement.array_index)
    if is_raw and placement.rows is None:
        return _Arriving(head, placement, _memory(placement.destination), is_in_place=True)
    if not is_raw or placement.rows is None or not size_bytes:
        return _Arriving(head, placement, memoryview(bytearray(size_bytes)))
    row_bytes = size_bytes // head.layout.arrays[placement.array_index].shape[0]
    start, stop = (row * row_bytes for row in placement.rows)
    if start == stop:
        return _Arriving(head, placement, memoryview(b""))
    # Whole blocks, so that what is read can be verified.
    block_bytes = head.layout.block_bytes
    first_block = start // block_bytes
    first = first_block * block_bytes
    last = min(size_bytes, -(-stop // block_bytes) * block_bytes)
    encoded = memoryview(bytearray(last - first))
    return _Arriving(head, placement, encoded, first_block=first_block, skip_bytes=start - first)


def _unpack(each: _Arriving) -> None:
    destination = each.placement.destination
    if each.head.is_raw(each.placement.array_index):
        raw = _memory(destination)
        raw[:] = each.encoded[each.skip_bytes : each.skip_bytes + len(raw)]
        return
    assert not isinstance(destination, memoryview)
    whole, stored = destination, each.stored
    if each.placement.rows is not None:
        whole = np.empty(stored.shape, dtype=stored.dtype)
    decode_into(whole, each.encoded, stored.codec, stored.parameters)
    if each.placement.rows is not None:
        start, stop = each.placement.rows
        destination[...] = whole[start:stop]
