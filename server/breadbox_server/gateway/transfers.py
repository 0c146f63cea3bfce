"""Write and read payloads for clients without access to the payload store.

Bytes are moved in parts. Only threads wait for the store, and no message is read before there
is room, so HTTP/2 slows down a client that is faster than the store.

    G1  The server makes the ids of payloads, so no client can overwrite a payload.
    G2  A write is stored completely before it is answered. It expires unless an admitted
        fragment or weights name it.
    G3  A caller may read what its buffers refer to (a producer only weights), and what it
        wrote and has not announced. Any other payload is reported as missing.
    G4  Memory: at most two parts for each call in progress. Calls are limited by connection,
        by caller and in total.
    G5  Unannounced bytes are limited: by caller as declared, in total as received,
        until they are announced, discarded or expired.
    G6  If all slots or bytes are taken, the caller with the most gives way to one with fewer.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from breadbox.model.errors import PayloadMissingError, StoreError
from breadbox.model.types import PayloadReference
from breadbox.stores.base import Part, PayloadParts
from breadbox.stores.deadline import Deadline
from breadbox.stores.frames import Written, unpack_write
from breadbox_server import limits
from breadbox_server.access.authorization import Caller, Role
from breadbox_server.base.errors import GatewayStalledError
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.errors import DrainingError, InvalidArgumentError
from breadbox_server.core.model.ids import BufferName, PayloadId
from breadbox_server.gateway.call_slots import CallSlots
from breadbox_server.gateway.unannounced import Unannounced
from breadbox_server.metrics.metrics import Metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS: Final = 8
"""Threads that call the store; calls that wait for a thread keep their parts in memory."""
SILENCE_S: Final = 5.0
"""Seconds without an answer of the store that end a call; below clients' deadlines of 10 s."""
REPORT_S: Final = 0.5
"""Seconds between heartbeats to a writing client; far below clients' deadlines of 10 s."""

Range = tuple[PayloadReference, int, int]
"""(payload, offset, number of bytes)."""

Message = Written | InvalidArgumentError
"""A received message of a write, or the error of its decoding."""

READERS: Final = {"WritePayloads": unpack_write}
"""Decoders of the messages that contain payload bytes, by method."""


class Gateway:
    """Write and read payloads for clients. For the loop's thread only; owns `store`."""

    def __init__(
        self,
        store: PayloadParts,
        buffers: BufferSet,
        *,
        refers_to: Callable[[BufferName, PayloadId], bool],
        is_leased: Callable[[str, PayloadId], bool],
        check_written: Callable[[Caller, int, int], None],
        unannounced_s: float,
        unannounced_bytes_max: int,
        delete: Callable[[PayloadReference], None],
        now: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._buffers = buffers
        self._refers_to = refers_to
        self._is_leased = is_leased
        self._check_written = check_written
        self._delete = delete
        self._now = now
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="breadbox-gateway")
        self.unannounced = Unannounced(unannounced_bytes_max, keep_s=unannounced_s)
        self.calls = CallSlots()
        metrics.gateway_calls.set_function(lambda: float(self.calls.count))
        metrics.gateway_unannounced_bytes.set_function(lambda: float(self.unannounced.total_bytes))
        self._bytes_in = metrics.gateway_bytes.labels("in")
        self._bytes_out = metrics.gateway_bytes.labels("out")

    def close(self) -> None:
        """Close the store, which ends the calls of its threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    async def write(
        self,
        caller: Caller,
        peer: str,
        sizes: Sequence[int],
        incoming: "Incoming",
        report: Callable[[], Awaitable[None]],
    ) -> list[PayloadReference]:
        """Write payloads from one stream of bytes; `report` is called whenever more is stored.

        A failed write is deleted. Raises GatewayFullError also if other callers,
        which hold less, needed the room; GatewayStalledError if the client sends no more.
        """
        _check_sizes(sizes, self.unannounced.bytes_max)
        async with self.calls.taken(caller.name, peer) as slot:
            references = [self._store.new_reference(size_bytes) for size_bytes in sizes]
            self._check_written(caller, self.unannounced.bytes_of(caller.name), sum(sizes))
            self.unannounced.add(caller.name, references, self._now(), lambda _: slot.give_way())
            storing: Future[None] | None = None
            reported_at = self._now()
            try:
                for ranges in _in_parts((each, 0, each.size_bytes) for each in references):
                    for reference, _, length in ranges:
                        self.unannounced.arrive(PayloadId(reference.payload_id), length)
                    async with _moving():
                        parts = [
                            Part(reference, start, await incoming.take(length))
                            for reference, start, length in ranges
                        ]
                    slot.moved()
                    self._bytes_in.inc(sum(length for _, _, length in ranges))
                    if storing is not None:
                        await _done(storing)
                    if self._now() - reported_at >= REPORT_S:
                        reported_at = self._now()
                        async with _moving():
                            await report()
                    storing = self._submit(self._store_now().write_parts, parts)
                async with _moving():
                    await incoming.end()
                assert storing is not None, "there is a payload, and none is empty"
                await _done(storing)
                self.unannounced.keep(references, self._delete)
            except BaseException:
                for each in references:
                    self.unannounced.forget(PayloadId(each.payload_id))
                self._discard_after(storing, references)
                raise
        return references

    async def read(
        self,
        caller: Caller,
        peer: str,
        ranges: Sequence[Range],
        send: Callable[[memoryview], Awaitable[None]],
    ) -> None:
        """Send ranges of payloads as one stream, in parts.

        Raises PayloadMissingError also for payloads of others, PayloadCorruptError if the size is
        not the reference's, GatewayStalledError if the client reads no more.
        """
        self._check_readable(caller, ranges)
        async with self.calls.taken(caller.name, peer) as slot:
            reading: tuple[Future[None], memoryview] | None = None
            # New memory costs as much as a copy, so two buffers alternate.
            memories = [bytearray(), bytearray()]
            for number, part in enumerate(_in_parts(ranges)):
                size_bytes = sum(length for _, _, length in part)
                if len(memories[number % 2]) < size_bytes:
                    # Not resized: the thread that filled it may still hold a view of it.
                    memories[number % 2] = bytearray(size_bytes)
                following = self._read_ahead(part, memories[number % 2])
                if reading is not None:
                    await self._send(*reading, send)
                    slot.moved()
                reading = following
            if reading is not None:
                await self._send(*reading, send)

    def discard(self, caller: Caller, payload_ids: Iterable[str]) -> list[PayloadReference]:
        """Discard payloads that the caller wrote; return those that it may discard."""
        held = [self.unannounced.of(caller.name, PayloadId(each)) for each in payload_ids]
        wanted = [each for each in held if each is not None and not self._is_referred_to(each)]
        for each in wanted:
            self.unannounced.forget(PayloadId(each.payload_id))
        return wanted

    def _check_readable(self, caller: Caller, ranges: Sequence[Range]) -> None:
        """Raise PayloadMissingError unless a caller may read these payloads (G3)."""
        buffers = [name for name in self._buffers.names() if caller.may_use(name)]
        asks = self._buffers.has_weights if caller.role is Role.PRODUCER else self._refers_to
        for reference, _, _ in ranges:
            payload_id = PayloadId(reference.payload_id)
            may_read = any(
                asks(name, payload_id) or self._is_leased(caller.holder(name), payload_id)
                for name in buffers
            )
            if not may_read and self.unannounced.of(caller.name, payload_id) is None:
                raise PayloadMissingError(reference.payload_id)

    def _is_referred_to(self, reference: PayloadReference) -> bool:
        payload_id = PayloadId(reference.payload_id)
        return any(self._refers_to(each, payload_id) for each in self._buffers.names())

    def _store_now(self) -> PayloadParts:
        return self._store.within(Deadline(SILENCE_S))

    def _submit(self, function: Callable[[T], None], argument: T) -> "Future[None]":
        try:
            return self._threads.submit(function, argument)
        except RuntimeError:
            raise DrainingError from None

    def _read_ahead(
        self, part: Sequence[Range], memory: bytearray
    ) -> "tuple[Future[None], memoryview]":
        filled = memoryview(memory)[: sum(length for _, _, length in part)]
        wanted, at = [], 0
        for reference, start, length in part:
            wanted.append(Part(reference, start, [filled[at : at + length]]))
            at += length
        return self._submit(self._store_now().read_parts, wanted), filled

    async def _send(
        self,
        reading: "Future[None]",
        memory: memoryview,
        send: Callable[[memoryview], Awaitable[None]],
    ) -> None:
        await _done(reading)
        async with _moving():
            await send(memory)
        self._bytes_out.inc(len(memory))

    def _discard_after(
        self, storing: "Future[None] | None", references: Sequence[PayloadReference]
    ) -> None:
        """Delete the stored part of a failed write once no thread writes to it."""

        def discard(_: object) -> None:
            try:
                self._threads.submit(self._discard, references)
            except RuntimeError:
                log.debug("the server ends: a failed write is left to its expiry")

        if storing is None:
            discard(None)
        else:
            storing.add_done_callback(discard)

    def _discard(self, references: Sequence[PayloadReference]) -> None:
        try:
            self._store_now().discard_parts(references)
        except StoreError as error:
            log.debug("a failed write is left to its expiry: %s", error)


class Incoming:
    """The bytes of a call's messages as one stream; the first message was received."""

    def __init__(self, first: Written, rest: AsyncIterator[Message]) -> None:
        self._left = first.data
        self._rest = rest

    async def take(self, count: int) -> list[memoryview]:
        """Return the next `count` bytes without a copy; raise if there are fewer."""
        taken = []
        while count:
            if not self._left:
                message = await anext(self._rest, None)
                if message is None:
                    raise InvalidArgumentError("data", "is less than size_bytes say")
                self._left = _checked(message).data
            part = self._left[:count]
            taken.append(part)
            count -= len(part)
            self._left = self._left[len(part) :]
        return taken

    async def end(self) -> None:
        """Raise if there are more bytes."""
        if self._left or await anext(self._rest, None) is not None:
            raise InvalidArgumentError("data", "is more than size_bytes say")


async def first_message(messages: AsyncIterator[Message]) -> Written:
    """Wait for the first message of a write, with the time limit of all requests."""
    first = await anext(messages, None)
    if first is None:
        raise InvalidArgumentError("size_bytes", "must be given")
    return _checked(first)


def _checked(message: Message) -> Written:
    if isinstance(message, InvalidArgumentError):
        raise message
    return message


def _check_sizes(sizes: Sequence[int], bytes_max: int) -> None:
    if not 1 <= len(sizes) <= limits.GATEWAY_PAYLOADS_MAX:
        raise InvalidArgumentError(
            "size_bytes", f"must be 1 to {limits.GATEWAY_PAYLOADS_MAX} sizes, got {len(sizes)}"
        )
    for position, size_bytes in enumerate(sizes):
        if not 0 < size_bytes <= bytes_max:
            raise InvalidArgumentError(
                f"size_bytes[{position}]",
                f"must be 1 to {bytes_max} (--gateway-unannounced), got {size_bytes}",
            )


def _in_parts(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """Split ranges into parts of at most `limits.PART_BYTES`, aligned to each payload's start."""
    part: list[Range] = []
    room = limits.PART_BYTES
    for reference, start, length in ranges:
        if part and length > room:
            yield part
            part, room = [], limits.PART_BYTES
        end = start + length
        while end - start > room:
            border = start - start % limits.PART_BYTES + limits.PART_BYTES
            yield [(reference, start, border - start)]
            start = border
        if end > start:
            part.append((reference, start, end - start))
            room -= end - start
    if part:
        yield part


async def _done(future: "Future[None]") -> None:
    """Wait for a thread's future. If cancelled, the thread runs on until its own deadline."""
    await asyncio.shield(asyncio.wrap_future(future))


@asynccontextmanager
async def _moving() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limits.PART_S):
            yield
    except TimeoutError:
        raise GatewayStalledError from None
