"""Feed receivers from a stream of byte ranges (Redis, gateway), and from inline payloads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Protocol

from breadbox.model.errors import PayloadCorruptError
from breadbox.model.types import PayloadReference
from breadbox.stores.base import PRELUDE_BYTES, Foreseen, PayloadReceiver, PayloadStore, Segment
from breadbox.stores.deadline import Deadline

_RANGE_GUESS_BYTES: Final = 4 * 1024

_WHOLE_BYTES_MAX: Final = 64 * 1024
"""Payloads up to this size are read whole: one round trip, not two."""

Range = tuple[PayloadReference, int, int]
"""(payload, first byte, bytes)."""


class ByteStream(Protocol):
    """The bytes of ranges, one behind another."""

    def receive_into(self, destination: memoryview) -> None:
        """Fill `destination` with the next bytes of the stream."""

    def receive_all(self, expected: Foreseen) -> Sequence[int] | None:
        """Fill all memory and digest its blocks; None, with nothing done, if it cannot at once."""

    def skip(self, count: int) -> None:
        """Drop the next bytes of the stream."""


OpenStream = Callable[[Iterable[Range]], ByteStream]
"""Asks for ranges, or is ready to."""


def read(
    open_stream: OpenStream, part: Sequence[tuple[int, PayloadReference]], receiver: PayloadReceiver
) -> None:
    """Read payloads in one pass, or only the ranges wanted; one stream is open at a time."""
    whole: list[tuple[int, PayloadReference]] = []
    ranged: list[tuple[int, PayloadReference]] = []
    for item in part:
        is_whole = receiver.wants_whole or item[1].size_bytes <= _WHOLE_BYTES_MAX
        (whole if is_whole else ranged).append(item)
    if whole:
        _read_whole(open_stream, _read_foreseen(open_stream, whole, receiver), receiver)
    if ranged:
        _read_ranges(open_stream, ranged, receiver)


def _read_foreseen(
    open_stream: OpenStream, part: Sequence[tuple[int, PayloadReference]], receiver: PayloadReceiver
) -> Sequence[tuple[int, PayloadReference]]:
    """Read payloads that may be like earlier ones; return the rest."""
    rest: list[tuple[int, PayloadReference]] = []
    ranges: list[Range] = []
    foreseen: list[tuple[int, Foreseen]] = []
    for position, reference in part:
        each = receiver.foresee(position)
        if each is None:
            rest.append((position, reference))
        else:
            ranges.append((reference, 0, reference.size_bytes))
            foreseen.append((position, each))
    if not ranges:
        return rest
    stream = open_stream(ranges)
    memory: list[memoryview] = []
    blocks: list[tuple[int, int]] = []
    start = 0
    for (_, _, size_bytes), (_, each) in zip(ranges, foreseen, strict=True):
        memory += each.memory
        blocks += [(start + first, start + end) for first, end in each.blocks]
        start += size_bytes
    digests = stream.receive_all(Foreseen(memory, blocks))
    found = None if digests is None else iter(digests)
    for position, each in foreseen:
        if found is None:
            for destination in each.memory:
                stream.receive_into(destination)
            receiver.arrived(position)
        else:
            receiver.arrived(position, [*islice(found, len(each.blocks))])
    return rest


def _read_whole(
    open_stream: OpenStream, part: Sequence[tuple[int, PayloadReference]], receiver: PayloadReceiver
) -> None:
    if not part:
        return
    stream = open_stream([(reference, 0, reference.size_bytes) for _, reference in part])
    for position, reference in part:
        head = _receive_head(stream, position, reference, receiver)
        offset = len(head)
        for segment in receiver.segments(position, head):
            stream.skip(segment.offset_bytes - offset)
            stream.receive_into(segment.destination)
            offset = segment.offset_bytes + len(segment.destination)
        stream.skip(reference.size_bytes - offset)
        receiver.arrived(position)


def _receive_head(
    stream: ByteStream, position: int, reference: PayloadReference, receiver: PayloadReceiver
) -> memoryview:
    prelude = memoryview(bytearray(min(PRELUDE_BYTES, reference.size_bytes)))
    stream.receive_into(prelude)
    head_bytes = head_bytes_of(position, reference, prelude, receiver)
    head = memoryview(bytearray(head_bytes))
    head[:PRELUDE_BYTES] = prelude
    stream.receive_into(head[PRELUDE_BYTES:])
    return head


def head_bytes_of(
    position: int, reference: PayloadReference, prelude: memoryview, receiver: PayloadReceiver
) -> int:
    """Return the length of a payload's head, as its prelude has it."""
    if len(prelude) < PRELUDE_BYTES:
        raise PayloadCorruptError(f"payload {reference.payload_id} is shorter than its prelude")
    head_bytes = receiver.head_bytes(position, prelude)
    if not PRELUDE_BYTES <= head_bytes <= reference.size_bytes:
        raise PayloadCorruptError(
            f"payload {reference.payload_id} of {reference.size_bytes} bytes claims a head of "
            f"{head_bytes} bytes"
        )
    return head_bytes


def drop(buffers: list[Any], count: int) -> None:
    """Drop the first `count` bytes of a list of buffers, in place."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    del buffers[:done]
    if count:
        buffers[0] = memoryview(buffers[0])[count:]


def _read_ranges(
    open_stream: OpenStream, part: Sequence[tuple[int, PayloadReference]], receiver: PayloadReceiver
) -> None:
    """Read heads, then the ranges wanted: two round trips, and a third for long heads."""
    heads = _read_heads(open_stream, part, receiver)
    plans = [
        (reference, receiver.segments(position, head))
        for (position, reference), head in zip(part, heads, strict=True)
    ]
    stream = open_stream(
        [
            (reference, segment.offset_bytes, len(segment.destination))
            for reference, segments in plans
            for segment in segments
        ]
    )
    for (position, _), (_, segments) in zip(part, plans, strict=True):
        for segment in segments:
            stream.receive_into(segment.destination)
        receiver.arrived(position)


def _read_heads(
    open_stream: OpenStream, part: Sequence[tuple[int, PayloadReference]], receiver: PayloadReceiver
) -> list[memoryview]:
    guesses = [min(_RANGE_GUESS_BYTES, reference.size_bytes) for _, reference in part]
    first = open_stream(
        [(reference, 0, guess) for (_, reference), guess in zip(part, guesses, strict=True)]
    )
    heads = []
    missing: list[tuple[PayloadReference, Segment]] = []
    for (position, reference), guess in zip(part, guesses, strict=True):
        guessed = memoryview(bytearray(guess))
        first.receive_into(guessed)
        head_bytes = head_bytes_of(position, reference, guessed[:PRELUDE_BYTES], receiver)
        head = guessed[:head_bytes]
        if head_bytes > guess:
            head = memoryview(bytearray(head_bytes))
            head[:guess] = guessed
            missing.append((reference, Segment(guess, head[guess:])))
        heads.append(head)
    rest = open_stream(
        [
            (reference, segment.offset_bytes, len(segment.destination))
            for reference, segment in missing
        ]
    )
    for _, segment in missing:
        rest.receive_into(segment.destination)
    return heads


OpenStore = Callable[[Deadline | None], PayloadStore]
"""Opens the store by a deadline, or gives the one that is open."""


class StoreOnUse:
    """A `PayloadStore` that is opened when a payload is to be moved, and not before."""

    def __init__(self, open_store: OpenStore, deadline: Deadline | None = None) -> None:
        self._open_store = open_store
        self._deadline = deadline

    def write_many(self, payloads: Sequence[Sequence[memoryview]]) -> list[PayloadReference]:
        return self._opened().write_many(payloads) if payloads else []

    def read_many(self, references: Sequence[PayloadReference], receiver: PayloadReceiver) -> None:
        self._opened().read_many(references, receiver)

    def at_hand(self, references: Sequence[PayloadReference]) -> list[bytes] | None:
        return self._opened().at_hand(references)

    def map_many(self, references: Sequence[PayloadReference]) -> list[memoryview] | None:
        return self._opened().map_many(references)

    def delete_many(self, references: Sequence[PayloadReference]) -> None:
        self._opened().delete_many(references)

    def within(self, deadline: Deadline) -> "StoreOnUse":
        return StoreOnUse(self._open_store, deadline)

    def close(self) -> None:
        """Leave the store to its opener."""

    def _opened(self) -> PayloadStore:
        store = self._open_store(self._deadline)
        return store if self._deadline is None else store.within(self._deadline)


class InlineStore(StoreOnUse):
    """Read inline payloads by id, unverified, before a store."""

    def __init__(self, bodies: Mapping[str, bytes], store: PayloadStore) -> None:
        super().__init__(lambda _: store)
        self.bodies = bodies
        self._store = store

    def read_many(self, references: Sequence[PayloadReference], receiver: PayloadReceiver) -> None:
        others: list[tuple[int, PayloadReference]] = []
        filled: list[int] = []
        for position, reference in enumerate(references):
            body = self.bodies.get(reference.payload_id)
            if body is None:
                others.append((position, reference))
                continue
            _check_size(reference, body)
            foreseen = receiver.foresee(position)
            if foreseen is None:
                _give(position, reference, memoryview(body), receiver)
                continue
            start = 0
            for destination in foreseen.memory:
                destination[:] = body[start : (start := start + len(destination))]
            filled.append(position)
        for position in filled:
            receiver.arrived(position)
        if others:
            renumbered = _Renumbered(receiver, [position for position, _ in others])
            self._store.read_many([reference for _, reference in others], renumbered)

    def at_hand(self, references: Sequence[PayloadReference]) -> list[bytes] | None:
        """Return inline payloads, or None unless all are inline, each of its size."""
        found = [self.bodies.get(each.payload_id, b"") for each in references]
        sizes = [each.size_bytes for each in references]
        return found if all(found) and sizes == list(map(len, found)) else None

    def map_many(self, references: Sequence[PayloadReference]) -> list[memoryview] | None:
        """Copy inline payloads, if all are, into memory of the caller's own."""
        if any(each.payload_id not in self.bodies for each in references):
            return self._store.map_many(references)
        mapped = []
        for reference in references:
            body = self.bodies[reference.payload_id]
            _check_size(reference, body)
            mapped.append(memoryview(bytearray(body)))
        return mapped

    def within(self, deadline: Deadline) -> "InlineStore":
        return InlineStore(self.bodies, self._store.within(deadline))


class _Renumbered:
    def __init__(self, receiver: PayloadReceiver, positions: Sequence[int]) -> None:
        self._receiver = receiver
        self._positions = positions

    @property
    def wants_whole(self) -> bool:
        return self._receiver.wants_whole

    def foresee(self, position: int) -> Foreseen | None:
        return self._receiver.foresee(self._positions[position])

    def head_bytes(self, position: int, prelude: memoryview) -> int:
        return self._receiver.head_bytes(self._positions[position], prelude)

    def segments(self, position: int, head: memoryview) -> Sequence[Segment]:
        return self._receiver.segments(self._positions[position], head)

    def arrived(self, position: int, digests: Sequence[int] | None = None) -> None:
        self._receiver.arrived(self._positions[position], digests)


def _give(
    position: int, reference: PayloadReference, body: memoryview, receiver: PayloadReceiver
) -> None:
    head_bytes = head_bytes_of(position, reference, body[:PRELUDE_BYTES], receiver)
    for offset, destination in receiver.segments(position, body[:head_bytes]):
        part = body[offset : offset + len(destination)]
        if len(part) != len(destination):
            raise PayloadCorruptError(f"payload {reference.payload_id} ends at byte {len(body)}")
        destination[:] = part
    receiver.arrived(position)


def _check_size(reference: PayloadReference, body: bytes | memoryview) -> None:
    if len(body) != reference.size_bytes:
        raise PayloadCorruptError(
            f"payload {reference.payload_id} came along with {len(body)} bytes where its "
            f"reference says {reference.size_bytes}"
        )
