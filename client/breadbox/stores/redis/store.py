"""Payloads in Redis, as clients see them: cut into pieces, each with an expiry until confirmed."""

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from threading import Lock
from typing import Any, Final, TypeVar

import redis

from breadbox.model.errors import PayloadCorruptError, PayloadMissingError, StoreUnavailableError
from breadbox.model.types import PayloadReference
from breadbox.stores import bulk
from breadbox.stores.base import (
    Foreseen,
    Part,
    PartsStore,
    PayloadReceiver,
    Segment,
    check_sound,
)
from breadbox.stores.deadline import Deadline, in_force
from breadbox.stores.keys import cut, new_payload_id, piece_key, piece_keys, piece_ranges
from breadbox.stores.reading import Range, read
from breadbox.stores.redis.errors import MovedError, raise_reply_error, translated_errors
from breadbox.stores.redis.wire import Wire, borrowed_wire, slot_taken

_log = logging.getLogger(__name__)

PIECE_SIZE_BYTES_DEFAULT: Final = 1024 * 1024
"""Measured best on unix sockets."""

_ATTEMPTS_MAX: Final = 3
"""Tries of one call on fresh connections where one breaks; a silent one has used up the time."""

_COMMANDS_IN_FLIGHT_MAX: Final = 256
"""Writes sent before replies (5 bytes each) are read: these fit socket buffers."""

_BYTES_IN_FLIGHT_MAX: Final = 4 * 1024 * 1024
"""Values asked for before they are received: bounds Redis's reply buffers. Measured best."""

_BYTES_IN_FLIGHT_MIN: Final = 1024 * 1024
"""Fewer, and more are asked for: a Redis without replies to send frees their memory."""

CONNECTIONS_MAX: Final = 16
"""Connections of one store at a time; further threads wait for one."""

_Request = tuple[bytes, int, str]
"""(packed command, bytes of the reply, payload id)."""

Router = Callable[[str], redis.ConnectionPool]
"""The pool of the node that has a payload's pieces, by payload id."""


class RedisStore(PartsStore):
    """A `PayloadStore` in Redis. See `breadbox.stores.base` for the contract."""

    def __init__(
        self,
        client: Any,
        router: Router,
        *,
        unannounced_s: float,
        piece_size_bytes: int,
        silence_s: float,
        refresh: Callable[[Deadline], None] = lambda _: None,
    ) -> None:
        super().__init__(silence_s)
        self._client = client
        self._router = router
        self._refresh = refresh
        self._expiry_ms = max(1, round(unannounced_s * 1000))
        self._piece_size_bytes = piece_size_bytes
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._doubted = threading.Event()
        """Set where a node was silent, so that a new lookup may find another."""

    def new_reference(self, size_bytes: int) -> PayloadReference:
        piece_size_bytes = self._piece_size_bytes if size_bytes > self._piece_size_bytes else 0
        return PayloadReference(new_payload_id(), size_bytes, piece_size_bytes)

    def write_parts(self, parts: Sequence[Part]) -> None:
        self._per_node(parts, attrgetter("reference"), self._write, self._begin())

    def discard_parts(self, references: Sequence[PayloadReference]) -> None:
        self.delete_many(references)

    def read_parts(self, parts: Sequence[Part]) -> None:
        deadline = self._begin()
        check_sound(part.reference for part in parts)
        self._per_node(parts, attrgetter("reference"), _read_parts, deadline)

    def read_many(self, references: Sequence[PayloadReference], receiver: PayloadReceiver) -> None:
        deadline = self._begin()
        check_sound(references)
        work = list(enumerate(references))
        turns = _InTurns(receiver)
        self._per_node(
            work,
            lambda item: item[1],
            lambda wire, part: read(partial(_Stream, wire), part, turns),
            deadline,
        )

    def delete_many(self, references: Sequence[PayloadReference]) -> None:
        deadline = self._begin()
        keys = [key for reference in references for key in piece_keys(reference)]
        with translated_errors(), slot_taken(self._slots, deadline), in_force(deadline):
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.unlink(key)
            pipeline.execute()

    def _close(self) -> None:
        self._client.close()

    def _per_node(
        self,
        work: Sequence[Any],
        reference_of: Callable[[Any], PayloadReference],
        act: Callable[[Wire, Sequence[Any]], None],
        deadline: Deadline,
    ) -> None:
        """Do each node's work at once, on fresh connections if one breaks."""

        def act_on(pool: redis.ConnectionPool, part: Sequence[Any]) -> None:
            with borrowed_wire(pool, self._slots, deadline) as wire:
                act(wire, part)

        if self._doubted.is_set():
            self._refresh(deadline)
            self._doubted.clear()
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            groups: dict[redis.ConnectionPool, list[Any]] = defaultdict(list)
            for item in work:
                groups[self._router(reference_of(item).payload_id)].append(item)
            try:
                _on_all_nodes(groups, act_on)
            except MovedError as error:
                if attempt == _ATTEMPTS_MAX:
                    # For the caller the same as a node that is away: asking later helps.
                    raise StoreUnavailableError(f"keys are on the move: {error}") from error
                self._refresh(deadline)
            except PayloadMissingError:
                # A Redis that has become a replica may lack what the new primary has.
                if attempt > 1:
                    raise
            except StoreUnavailableError as error:
                if attempt == _ATTEMPTS_MAX or error.was_silent:
                    self._doubted.set()
                    raise
                # The caller logs an outage that outlasts this.
                _log.debug("payload store call failed, trying again: %s", error)
                # The node may be gone, and another one may have taken its keys over.
                self._refresh(deadline)
            else:
                return

    def _write(self, wire: Wire, parts: Sequence[Part]) -> None:
        commands: list[memoryview | bytes] = []
        pending = 0
        failure: bytes | None = None
        for reference, offset_bytes, buffers in parts:
            piece_size_bytes = reference.piece_size_bytes
            first = offset_bytes // piece_size_bytes if offset_bytes else 0
            for piece, (length, value) in enumerate(cut(buffers, piece_size_bytes), first):
                commands += self._set_command(reference.payload_id, piece, length, value)
                pending += 1
                if pending == _COMMANDS_IN_FLIGHT_MAX:
                    failure = _exchange(wire, commands, pending) or failure
                    commands, pending = [], 0
                    if failure:
                        raise_reply_error(failure)
        failure = _exchange(wire, commands, pending)
        if failure:
            raise_reply_error(failure)

    def _set_command(
        self, payload_id: str, piece: int, length: int, cut: Sequence[memoryview]
    ) -> list[memoryview | bytes]:
        key = piece_key(payload_id, piece)
        expiry = b"%d" % self._expiry_ms
        head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, length)
        tail = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(expiry), expiry)
        return [head, *cut, tail]


def _exchange(wire: Wire, commands: Sequence[memoryview | bytes], count: int) -> bytes | None:
    wire.send(commands)
    failure = None
    for _ in range(count):
        failure = failure or wire.expect_ok()
    return failure


def _read_parts(wire: Wire, parts: Sequence[Part]) -> None:
    stream = _Stream(
        wire, [(each.reference, each.offset_bytes, sum(map(len, each.buffers))) for each in parts]
    )
    for part in parts:
        for buffer in part.buffers:
            stream.receive_into(buffer)


class _Stream:
    """The bytes of bulk replies in a known order, as one stream; commands are sent ahead."""

    def __init__(self, wire: Wire, ranges: Iterable[Range]) -> None:
        self._wire = wire
        self._requests = list(_requests(ranges))
        self._asked = 0
        self._asked_bytes = 0
        self._current = -1
        self._left = 0

    def receive_into(self, destination: memoryview) -> None:
        wanted, done = len(destination), 0
        while done < wanted:
            if not self._left:
                self._next_reply()
            count = min(self._left, wanted - done)
            self._wire.receive_into(destination[done : done + count])
            done += count
            self._took(count)

    def receive_all(self, expected: Foreseen) -> Sequence[int] | None:
        """Receive whole replies, or raise UnforeseenError if one is not as long as asked for."""
        if self._wire.is_tls or not bulk.is_compiled:
            return None
        rest = deque(expected.memory)
        values = [_take(rest, length) for _, length, _ in self._requests]
        questions: list[bulk.Question] = []
        after_bytes = 0
        for number, (_, length, _) in enumerate(self._requests):
            self._current = number
            commands = self._commands_ahead()
            if commands:
                questions.append(bulk.Question(after_bytes, commands))
            self._asked_bytes -= length
            after_bytes += length
        return self._wire.receive_values(values, expected.blocks, questions)

    def skip(self, count: int) -> None:
        while count:
            if not self._left:
                self._next_reply()
            dropped = min(self._left, count)
            self._wire.skip(dropped)
            count -= dropped
            self._took(dropped)

    def _took(self, count: int) -> None:
        self._left -= count
        if not self._left:
            self._wire.end_bulk()

    def _next_reply(self) -> None:
        self._current += 1
        commands = self._commands_ahead()
        if commands:
            self._wire.send([commands])
        _, expected, payload_id = self._requests[self._current]
        length = self._wire.bulk_length()
        if length is None or (length == 0 and expected):
            # GET says nil, GETRANGE says empty, of a key that is not there.
            raise PayloadMissingError(payload_id)
        if length != expected:
            raise PayloadCorruptError(
                f"payload {payload_id}: a piece has {length} bytes where {expected} were expected"
            )
        self._asked_bytes -= length
        self._left = length

    def _commands_ahead(self) -> bytes:
        """Return what is to be sent before the current reply is received, perhaps nothing."""
        if self._asked > self._current and self._asked_bytes > _BYTES_IN_FLIGHT_MIN:
            return b""  # Many at a time: each call makes Redis turn from sending to listening.
        commands = []
        while self._asked < len(self._requests) and (
            self._asked <= self._current or self._asked_bytes < _BYTES_IN_FLIGHT_MAX
        ):
            command, length, _ = self._requests[self._asked]
            commands.append(command)
            self._asked += 1
            self._asked_bytes += length
        return b"".join(commands)


def _take(buffers: deque[memoryview], count: int) -> list[memoryview]:
    taken = []
    while count:
        each = buffers.popleft()
        if len(each) > count:
            buffers.appendleft(each[count:])
        taken.append(each[:count])
        count -= len(taken[-1])
    return taken


def _requests(ranges: Iterable[Range]) -> Iterator[_Request]:
    for reference, offset_bytes, length_bytes in ranges:
        piece_size_bytes = reference.piece_size_bytes or reference.size_bytes
        for piece, start, length in piece_ranges(reference, offset_bytes, length_bytes):
            key = piece_key(reference.payload_id, piece)
            whole = min(piece_size_bytes, reference.size_bytes - piece * piece_size_bytes)
            if length == whole:
                command = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key)
            else:
                first, last = b"%d" % start, b"%d" % (start + length - 1)
                command = b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
                    len(key),
                    key,
                    len(first),
                    first,
                    len(last),
                    last,
                )
            yield command, length, reference.payload_id


Node = TypeVar("Node")
Work = TypeVar("Work")


def _on_all_nodes(parts: Mapping[Node, Work], act: Callable[[Node, Work], None]) -> None:
    """Do each node's part in a thread that lasts for one call (it would not survive a fork)."""
    if not parts:
        return
    (first, *others) = parts.items()
    if not others:
        act(*first)
        return
    with ThreadPoolExecutor(len(others), thread_name_prefix="breadbox-node") as threads:
        running = [threads.submit(act, *each) for each in others]
        act(*first)
    for each in running:
        each.result()


class _InTurns:
    """A `PayloadReceiver` that plans one payload at a time, for many nodes."""

    def __init__(self, receiver: PayloadReceiver) -> None:
        self._receiver = receiver
        self._turn = Lock()
        self.wants_whole: Any = receiver.wants_whole
        self.head_bytes = receiver.head_bytes
        self.arrived = receiver.arrived

    def foresee(self, position: int) -> Foreseen | None:
        with self._turn:
            return self._receiver.foresee(position)

    def segments(self, position: int, head: memoryview) -> Sequence[Segment]:
        with self._turn:
            return self._receiver.segments(position, head)
