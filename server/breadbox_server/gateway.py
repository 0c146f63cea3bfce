"""Payload bytes through the server, for callers who must not see the payload store.

Bytes pass part by part: a call holds one part that comes in, or goes out, and one that a thread
stores, or has read. Nothing here awaits the store on the loop, and nobody is asked for a next
message before there is room for it, so HTTP/2 itself holds back whoever is faster than the store.

Invariants:
    G1  The ids of payloads are made up here, so nobody can write over a payload.
    G2  What a call writes is stored whole before the call is answered, and unannounced: it expires,
        unless a fragment or weights that name it are admitted.
    G3  A caller reads what a buffer of its own refers to, a producer only weights, and besides what
        it wrote itself and has not announced yet. Anything else is answered as if it were missing.
    G4  Bytes in memory: at most two parts for each call in progress, and these are counted, of a
        connection, of a caller and altogether.
    G5  Bytes unannounced are counted by caller and altogether, until they are announced,
        discarded or expired.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, Protocol, TypeVar

from breadbox.errors import PayloadMissingError, StoreError
from breadbox.stores.base import Part, PayloadParts
from breadbox.stores.deadline import Deadline
from breadbox.stores.frames import Written, unpack_write
from breadbox.types import PayloadReference
from breadbox_server import limits
from breadbox_server.authorization import Caller, Role
from breadbox_server.core.errors import DrainingError, InvalidArgumentError
from breadbox_server.core.ids import BufferName, PayloadId
from breadbox_server.errors import GatewayFullError, GatewayStalledError
from breadbox_server.metrics import Metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

THREADS: Final = 8
"""Threads that talk to the store; calls that wait for one hold their parts meanwhile."""
SILENCE_S: Final = 5.0
"""Silence of the store that ends a call: shorter than callers' own deadlines of 10 s."""
TELL_S: Final = 0.5
"""Seconds between two signs of life for who writes; far less than callers' deadlines of 10 s."""

Range = tuple[PayloadReference, int, int]
"""(payload, first byte, bytes)."""

Message = Written | InvalidArgumentError
"""Of a write: what came, or why it could not be read."""

READERS: Final = {"WritePayloads": unpack_write}
"""How messages are read that carry payload bytes, by method."""


class Referrer(Protocol):
    """Who knows what refers to a payload."""

    def names(self) -> tuple[BufferName, ...]:
        """All buffers."""

    def refers_to(self, buffer: BufferName, payload_id: PayloadId) -> bool:
        """Whether a buffer, a lease of it or its model refers to a payload."""

    def has_weights(self, buffer: BufferName, payload_id: PayloadId) -> bool:
        """Whether a payload is weights of the buffer's model."""


class Gateway:
    """Writes and reads payloads on behalf of callers. Call it from the loop's thread only.

    Args:
        store: Where payloads live; moved to in threads, closed with this.
        referrer: Says what a caller may read.
        unannounced_s: Seconds that a payload lives before it is announced.
        unannounced_bytes_max: What a caller may have written and not announced.
        now: Seconds that never go back.
        metrics: Told of bytes and calls.
    """

    def __init__(
        self,
        store: PayloadParts,
        referrer: Referrer,
        *,
        unannounced_s: float,
        unannounced_bytes_max: int,
        now: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._referrer = referrer
        self._now = now
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="breadbox-gateway")
        self.unannounced = Unannounced(unannounced_bytes_max, keep_s=unannounced_s)
        self.calls = CallSlots()
        metrics.gateway_calls.set_function(lambda: float(self.calls.count))
        metrics.gateway_unannounced.set_function(lambda: float(self.unannounced.total_bytes))
        self._bytes_in = metrics.gateway_bytes.labels("in")
        self._bytes_out = metrics.gateway_bytes.labels("out")

    def close(self) -> None:
        """Begin nothing more, and close the store. What a thread does ends with its connection."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    async def write(
        self,
        caller: Caller,
        peer: str,
        sizes: Sequence[int],
        incoming: "Incoming",
        tell: Callable[[], Awaitable[None]],
    ) -> list[PayloadReference]:
        """Write payloads of these sizes, whose bytes come one behind another.

        Args:
            caller: On whose behalf.
            peer: The caller's connection.
            sizes: Bytes of each payload.
            incoming: Their bytes.
            tell: Says, now and then, that more is stored.

        Raises:
            InvalidArgumentError: There are other bytes than that, or more than a caller may write.
            GatewayFullError: The caller has written too much that is not announced.
            GatewayStalledError: The caller has fallen silent.
            StoreError: The store is away, or full. Here as above, what was stored is deleted.
        """
        _check_sizes(sizes, self.unannounced.bytes_max)
        async with self.calls.taken(caller.name, peer):
            references = [self._store.new_reference(size_bytes) for size_bytes in sizes]
            self.unannounced.add(caller.name, references, self._now())
            storing: Future[None] | None = None
            told_at = self._now()
            try:
                for ranges in _in_parts((each, 0, each.size_bytes) for each in references):
                    async with _moving():
                        parts = [
                            Part(reference, start, await incoming.take(length))
                            for reference, start, length in ranges
                        ]
                    self._bytes_in.inc(sum(length for _, _, length in ranges))
                    if storing is not None:
                        await _done(storing)
                    if self._now() - told_at >= TELL_S:
                        told_at = self._now()
                        async with _moving():
                            await tell()
                    storing = self._submit(self._store_now().write_parts, parts)
                async with _moving():
                    await incoming.end()
                assert storing is not None, "there is a payload, and none is empty"
                await _done(storing)
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

        Raises:
            PayloadMissingError: A payload is not there, or not for this caller.
            PayloadCorruptError: It has another size than its reference says.
            GatewayStalledError: The caller takes nothing.
            StoreUnavailableError: The store is away.
        """
        self.check_readable(caller, ranges)
        async with self.calls.taken(caller.name, peer):
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
                reading = following
            if reading is not None:
                await self._send(*reading, send)

    def discard(self, caller: Caller, payload_ids: Iterable[str]) -> list[PayloadReference]:
        """Give up payloads that the caller wrote; those among the ids that it may give up."""
        held = [self.unannounced.of(caller.name, PayloadId(each)) for each in payload_ids]
        wanted = [each for each in held if each is not None and not self._is_referred_to(each)]
        for each in wanted:
            self.unannounced.forget(PayloadId(each.payload_id))
        return wanted

    def check_readable(self, caller: Caller, ranges: Sequence[Range]) -> None:
        """See that a caller may read these payloads.

        Raises:
            PayloadMissingError: The payload is not for this caller.
        """
        buffers = [name for name in self._referrer.names() if caller.may_use(name)]
        asks = (
            self._referrer.has_weights if caller.role is Role.PRODUCER else self._referrer.refers_to
        )
        for reference, _, _ in ranges:
            payload_id = PayloadId(reference.payload_id)
            may_read = any(asks(name, payload_id) for name in buffers)
            if not may_read and self.unannounced.of(caller.name, payload_id) is None:
                raise PayloadMissingError(reference.payload_id)

    def _is_referred_to(self, reference: PayloadReference) -> bool:
        payload_id = PayloadId(reference.payload_id)
        return any(self._referrer.refers_to(each, payload_id) for each in self._referrer.names())

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


class Unannounced:
    """What was written through the gateway and is not announced yet: whose, and how much (G5).

    Args:
        bytes_max: Of one caller; `limits.UNANNOUNCED_CALLERS` times that altogether.
        keep_s: Seconds after which it has expired.
    """

    def __init__(self, bytes_max: int, *, keep_s: float) -> None:
        self.bytes_max = bytes_max
        self._keep_s = keep_s
        self._held: dict[PayloadId, tuple[float, str, PayloadReference]] = {}
        """In order of the time at which they expire."""
        self._bytes: Counter[str] = Counter()
        self.total_bytes = 0

    def add(self, caller: str, references: Sequence[PayloadReference], now: float) -> None:
        """Count what a caller is about to write.

        Raises:
            GatewayFullError: It would be too much, of this caller or altogether.
        """
        self._forget_overdue(now)
        wanted = sum(map(_counted, references))
        in_all_max = self.bytes_max * limits.UNANNOUNCED_CALLERS
        if self._bytes[caller] + wanted > self.bytes_max or self.total_bytes + wanted > in_all_max:
            raise GatewayFullError(
                f"{self._bytes[caller]} bytes are written with this token and not announced, "
                f"{self.total_bytes} altogether; {self.bytes_max} and {in_all_max} may be"
            )
        self._bytes[caller] += wanted
        self.total_bytes += wanted
        for each in references:
            self._held[PayloadId(each.payload_id)] = (now + self._keep_s, caller, each)

    def of(self, caller: str, payload_id: PayloadId) -> PayloadReference | None:
        """A payload, if this caller wrote it and it is not announced yet."""
        _, writer, reference = self._held.get(payload_id, (0.0, None, None))
        return reference if writer == caller else None

    def forget(self, payload_id: PayloadId) -> None:
        """Count a payload no more: it is announced, or deleted, or another's."""
        held = self._held.pop(payload_id, None)
        if held is None:
            return
        _, caller, reference = held
        self._bytes[caller] -= _counted(reference)
        self.total_bytes -= _counted(reference)
        if not self._bytes[caller]:
            del self._bytes[caller]

    def _forget_overdue(self, now: float) -> None:
        while self._held and next(iter(self._held.values()))[0] <= now:
            self.forget(next(iter(self._held)))


def _counted(reference: PayloadReference) -> int:
    """Bytes that a payload counts as: a small one costs the store more than itself."""
    return max(reference.size_bytes, limits.PAYLOAD_BYTES_COUNTED_MIN)


class CallSlots:
    """How many calls move payloads at a time: of a connection, of a caller, and altogether (G4).

    Whoever finds no room waits, in order of arrival, but not behind those of others that would
    find none either.
    """

    def __init__(self) -> None:
        self._running: Counter[tuple[str, str]] = Counter()
        self._waiting: deque[tuple[Sequence[tuple[str, str]], asyncio.Future[None]]] = deque()

    @property
    def count(self) -> int:
        """Calls in progress."""
        return self._running["all", ""]

    @asynccontextmanager
    async def taken(self, caller: str, peer: str) -> AsyncIterator[None]:
        """Hold a place inside the block.

        Raises:
            GatewayFullError: None was free for `limits.GATEWAY_WAIT_S`, or too many wait.
        """
        keys = (("all", ""), ("token", caller), ("connection", peer))
        await self._take(keys)
        try:
            yield
        finally:
            for key in keys:
                self._running[key] -= 1
                if not self._running[key]:
                    del self._running[key]
            self._let_in()

    async def _take(self, keys: Sequence[tuple[str, str]]) -> None:
        if self._has_room(keys):
            self._running.update(keys)
            return
        if len(self._waiting) >= limits.GATEWAY_WAITERS_MAX:
            raise GatewayFullError("too many calls wait to move payloads")
        turn = asyncio.get_running_loop().create_future()
        entry = (keys, turn)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(limits.GATEWAY_WAIT_S):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                # Let in within the tick that ended the wait.
                self._running.subtract(keys)
                self._let_in()
            else:
                self._waiting.remove(entry)
            if isinstance(error, TimeoutError):
                raise GatewayFullError("too many calls move payloads already") from None
            raise

    def _let_in(self) -> None:
        for entry in tuple(self._waiting):
            keys, turn = entry
            if self._running["all", ""] >= limits.GATEWAY_CALLS_MAX:
                return
            if not turn.done() and self._has_room(keys):
                self._waiting.remove(entry)
                self._running.update(keys)
                turn.set_result(None)

    def _has_room(self, keys: Sequence[tuple[str, str]]) -> bool:
        return all(self._running[key] < limits.GATEWAY_CALLS_OF[key[0]] for key in keys)


class Incoming:
    """The bytes of a call's messages, as one stream.

    Args:
        first: The message that has come.
        rest: Those to come.
    """

    def __init__(self, first: Written, rest: AsyncIterator[Message]) -> None:
        self._left = first.data
        self._rest = rest

    async def take(self, count: int) -> list[memoryview]:
        """The next bytes, as the memory that they came in.

        Raises:
            InvalidArgumentError: There are fewer.
        """
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
        """See that there is nothing more.

        Raises:
            InvalidArgumentError: There is.
        """
        if self._left or await anext(self._rest, None) is not None:
            raise InvalidArgumentError("data", "is more than size_bytes say")


async def first_message(messages: AsyncIterator[Message]) -> Written:
    """Wait for the first message of a write, for as long as for that of any other call.

    Raises:
        InvalidArgumentError: There is none.
    """
    first = await anext(messages, None)
    if first is None:
        raise InvalidArgumentError("size_bytes", "must be given")
    return _checked(first)


def _checked(message: Message) -> Written:
    """What has come, if it could be read."""
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
    """Around the coming or going of one part.

    Raises:
        GatewayStalledError: It took longer than `limits.PART_S`.
    """
    try:
        async with asyncio.timeout(limits.PART_S):
            yield
    except TimeoutError:
        raise GatewayStalledError from None
