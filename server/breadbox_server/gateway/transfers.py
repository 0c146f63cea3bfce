"""Payload bytes through the server, for callers that must not see the payload store.

Bytes pass part by part. Only threads wait for the store, and no message is asked for before there
is room, so HTTP/2 itself holds back a caller that is faster than the store.

    G1  The ids of payloads are made up here, so no caller can write over a payload.
    G2  A write is stored whole before its answer, and unannounced: it expires unless an admitted
        fragment or weights name it.
    G3  A caller reads what a buffer of its own refers to, a producer only weights, and what it
        wrote and has not announced. Anything else is answered as missing.
    G4  Bytes in memory: at most two parts for each call in progress, and these are counted, of a
        connection, of a caller and altogether.
    G5  Bytes unannounced are counted, of a caller as it says them and altogether as they come,
        until they are announced, discarded or expired.
    G6  Where all slots or bytes are taken, the largest holder gives way to a smaller one.
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
"""Threads that talk to the store; calls that wait for one hold their parts meanwhile."""
SILENCE_S: Final = 5.0
"""Silence of the store that ends a call: shorter than callers' own deadlines of 10 s."""
REPORT_S: Final = 0.5
"""Seconds between two heartbeats to a writing caller; far less than callers' deadlines of 10 s."""

Range = tuple[PayloadReference, int, int]
"""(payload, first byte, bytes)."""

Message = Written | InvalidArgumentError
"""What a write brings: what came, or why it could not be read."""

READERS: Final = {"WritePayloads": unpack_write}
"""How messages are read that carry payload bytes, by method."""


class Gateway:
    """Write and read payloads on behalf of callers. For the loop's thread only; closes `store`."""

    def __init__(
        self,
        store: PayloadParts,
        buffers: BufferSet,
        *,
        refers_to: Callable[[BufferName, PayloadId], bool],
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
        self._check_written = check_written
        self._delete = delete
        self._now = now
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="breadbox-gateway")
        self.unannounced = Unannounced(unannounced_bytes_max, keep_s=unannounced_s)
        self.calls = CallSlots()
        metrics.gateway_calls.set_function(lambda: float(self.calls.count))
        metrics.gateway_unannounced.set_function(lambda: float(self.unannounced.total_bytes))
        self._bytes_in = metrics.gateway_bytes.labels("in")
        self._bytes_out = metrics.gateway_bytes.labels("out")

    def close(self) -> None:
        """Close the store. What a thread does ends with its connection."""
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
        """Write payloads whose bytes come one behind another; `report` says when more is stored.

        What was stored of a failed write is deleted. GatewayFullError also where other callers,
        which hold less, needed the room; GatewayStalledError: the caller has fallen silent.
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
        """Send ranges of payloads, one behind another, in parts.

        PayloadMissingError also for another's; PayloadCorruptError: another size than its
        reference's; GatewayStalledError: the caller takes nothing.
        """
        self._check_readable(caller, ranges)
        async with self.calls.taken(caller.name, peer) as slot:
            reading: tuple[Future[None], memoryview] | None = None
            # Fresh memory costs as much as a copy; these are used in turns.
            memories = [bytearray(), bytearray()]
            for number, part in enumerate(_in_parts(ranges)):
                size_bytes = sum(length for _, _, length in part)
                if len(memories[number % 2]) < size_bytes:
                    # Not grown: the thread that filled it may not have let go of it yet.
                    memories[number % 2] = bytearray(size_bytes)
                following = self._read_ahead(part, memories[number % 2])
                if reading is not None:
                    await self._send(*reading, send)
                    slot.moved()
                reading = following
            if reading is not None:
                await self._send(*reading, send)

    def discard(self, caller: Caller, payload_ids: Iterable[str]) -> list[PayloadReference]:
        """Give up payloads that the caller wrote; return those that it may give up."""
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
            may_read = any(asks(name, payload_id) for name in buffers)
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
        """Delete what was stored of a write that failed, once no thread stores more of it."""

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
    """The bytes of a call's messages, the first of which has come, as one stream."""

    def __init__(self, first: Written, rest: AsyncIterator[Message]) -> None:
        self._left = first.data
        self._rest = rest

    async def take(self, count: int) -> list[memoryview]:
        """Return the next bytes, in the memory that they came in; raise if there are fewer."""
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
        """Raise if there is anything more."""
        if self._left or await anext(self._rest, None) is not None:
            raise InvalidArgumentError("data", "is more than size_bytes say")


async def first_message(messages: AsyncIterator[Message]) -> Written:
    """Wait for the first message of a write, for as long as for that of any other call."""
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
    """Cut ranges into parts of at most `limits.PART_BYTES`, counted from a payload's start."""
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
    """Wait for a thread. A cancel leaves it to its end, which its own deadline brings."""
    await asyncio.shield(asyncio.wrap_future(future))


@asynccontextmanager
async def _moving() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limits.PART_S):
            yield
    except TimeoutError:
        raise GatewayStalledError from None
