"""Feed receivers with payloads from a stream of bytes, which a store answers in order.

A store that can be asked for byte ranges, and answers them one behind another, needs no more than
that: a connection to Redis, and a gateway.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from breadbox.model.errors import PayloadCorruptError
from breadbox.model.types import PayloadReference
from breadbox.stores.common.base import PRELUDE_BYTES, PayloadReceiver, Segment

_RANGE_GUESS_BYTES: Final = 4 * 1024
"""First read of a payload of which only parts are wanted; holds most heads."""

_WHOLE_BYTES_MAX: Final = 64 * 1024
"""Payloads up to this size are read whole, whatever is wanted of them: one round trip, not two."""

Range = tuple[PayloadReference, int, int]
"""(payload, first byte, bytes)."""


class ByteStream(Protocol):
    """The bytes of ranges, one behind another."""

    def receive_into(
        self, destination: memoryview, filled: Callable[[int], None] | None = None
    ) -> None:
        """Fill `destination` with the next bytes of the stream; call `filled` for each part."""

    def skip(self, count: int) -> None:
        """Drop the next bytes of the stream."""


OpenStream = Callable[[Iterable[Range]], ByteStream]
"""Asks for ranges, or is ready to."""


def read(
    open_stream: OpenStream,
    part: Sequence[tuple[int, PayloadReference]],
    receiver: PayloadReceiver,
) -> None:
    """Read payloads: in one pass, or by ranges where only parts are wanted.

    Args:
        open_stream: Opens a stream; the one before has been read to its end.
        part: Positions that the receiver knows them by, and the payloads.
        receiver: Says where bytes go.
    """
    whole: list[tuple[int, PayloadReference]] = []
    ranged: list[tuple[int, PayloadReference]] = []
    for item in part:
        is_whole = receiver.wants_whole or item[1].size_bytes <= _WHOLE_BYTES_MAX
        (whole if is_whole else ranged).append(item)
    if whole:
        _read_whole(open_stream, whole, receiver)
    if ranged:
        _read_ranges(open_stream, ranged, receiver)


def _read_whole(
    open_stream: OpenStream,
    part: Sequence[tuple[int, PayloadReference]],
    receiver: PayloadReceiver,
) -> None:
    stream = open_stream([(reference, 0, reference.size_bytes) for _, reference in part])
    for position, reference in part:
        head = _receive_head(stream, position, reference, receiver)
        offset = len(head)
        for segment in receiver.segments(position, head):
            stream.skip(segment.offset_bytes - offset)
            stream.receive_into(segment.destination, segment.filled)
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
    """Length of a payload's head, as its prelude has it.

    Raises:
        PayloadCorruptError: No payload can be so.
    """
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
    open_stream: OpenStream,
    part: Sequence[tuple[int, PayloadReference]],
    receiver: PayloadReceiver,
) -> None:
    """Read heads first, then only the ranges wanted: two round trips for all payloads together.

    A third is needed where heads are longer than the first guess.
    """
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
            stream.receive_into(segment.destination, segment.filled)
        receiver.arrived(position)


def _read_heads(
    open_stream: OpenStream,
    part: Sequence[tuple[int, PayloadReference]],
    receiver: PayloadReceiver,
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
