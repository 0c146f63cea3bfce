"""Calls in progress, by connection: how many there may be, and which connections are hung up on.

A call costs memory before anything is known of it. gRPC receives a message once it is asked for, so
few are on their way at a time: the slowest makes room. None waits for a place: honest clients'
messages are there already when asked for.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import grpc

from breadbox.shared.outages import OutageLog
from breadbox_server.base.errors import ServerBusyError
from breadbox_server.base.memory import trim_heap
from breadbox_server.limits import (
    ANSWER_TAKEN_S,
    ARRIVAL_S,
    ARRIVALS_MAX,
    ARRIVALS_OF_CONNECTION_MAX,
    CALLS_MAX,
    CALLS_OF_TOKEN_MAX,
    CALLS_RESERVED,
    FRUITLESS_MAX,
    FRUITLESS_S,
    INLINE_REPLY_BYTES_MAX,
    UNTAKEN_BYTES_OF,
)
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.rpc.listening import PortConnections

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Seconds between two looks at the connections."""
SLOW_WEIGHT: Final = 64
"""For how many fruitless calls one counts that has held a place in vain."""
STRANGER_WEIGHT: Final = 16
"""Weight of a call given up, or of an unknown caller; 1: a known caller that may not make it."""
TOLD_S: Final = 10.0
"""Seconds between two lines of the log about connections that were hung up on."""
RELEASED_BYTES_KEPT: Final = 16 * 2**20
"""Bytes of answers taken, after which memory is given back to the system."""
_UNTAKEN: Final = "too many bytes of answers are not taken"
UNTAKEN_PATIENCE_S: Final = 1.0
"""Seconds in which the largest holder may take its answers before it makes room for others."""
FULL_HOUSE: Final = 0.9
"""Share of the connections there may be, above which those that ask for nothing make room."""


Key = tuple[str, str]
"""What is bounded, and which of its kind: see `UNTAKEN_BYTES_OF`."""
_ALL: Final[Key] = ("all", "")


class PendingReply:
    """A reply that its client has not taken yet, counted for its connection and its token."""

    __slots__ = ("_untaken", "keys", "peer", "since", "size_bytes")

    def __init__(
        self, untaken: "UntakenReplies", peer: str, token: str, size_bytes: int, since: float
    ) -> None:
        self._untaken = untaken
        self.peer = peer
        self.size_bytes = size_bytes
        self.since = since
        self.keys = (_ALL, *_shares(peer, token))

    @property
    def holder(self) -> Key:
        """The token, or else the connection, whose share it takes."""
        return self.keys[-1]

    def close(self) -> None:
        """Stop counting the reply: it is taken, or its connection gone. Idempotent."""
        self._untaken.release(self)


class UntakenReplies:
    """Bound the bytes of replies not taken, by owner: gRPC keeps any number. One always goes."""

    def __init__(self, now: Callable[[], float], hang_up: Callable[[str], None]) -> None:
        self._now = now
        self._hang_up = hang_up
        self._held: dict[PendingReply, None] = {}
        self._bytes: Counter[Key] = Counter()
        self.released_bytes = 0
        """Bytes that were ever taken or given up."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all replies that are not taken."""
        return self._bytes[_ALL]

    def is_full(self, peer: str, token: str) -> bool:
        """Whether another large reply might not be sent, so that making it would be for nothing."""
        return any(
            self._bytes[key] > UNTAKEN_BYTES_OF[key[0]] - INLINE_REPLY_BYTES_MAX
            for key in _shares(peer, token)
        )

    def hold(self, peer: str, token: str, size_bytes: int) -> PendingReply | None:
        """Count a reply that is about to be sent, or return None if there is no room for it.

        A small holder is not refused because of others: the largest holder is hung up on.
        """
        held = PendingReply(self, peer, token, size_bytes, self._now())
        while (full := self._full_for(held)) is not None:
            if full != _ALL or not self._make_room(held):
                return None
        self._held[held] = None
        for key in held.keys:
            self._bytes[key] += size_bytes
        return held

    def release(self, held: PendingReply) -> None:
        """Stop counting a reply."""
        if held in self._held:
            del self._held[held]
            self.released_bytes += held.size_bytes
            for key in held.keys:
                self._bytes[key] -= held.size_bytes
                if not self._bytes[key]:
                    del self._bytes[key]

    def _full_for(self, held: PendingReply) -> Key | None:
        for key in reversed(held.keys):
            if 0 < self._bytes[key] > UNTAKEN_BYTES_OF[key[0]] - held.size_bytes:
                return key
        return None

    def _make_room(self, wanted: PendingReply) -> bool:
        holders: Counter[Key] = Counter()
        oldest: dict[Key, PendingReply] = {}
        for held in self._held:
            holders[held.holder] += held.size_bytes
            oldest.setdefault(held.holder, held)
        largest, size_bytes = holders.most_common(1)[0]
        first = oldest[largest]
        if (
            holders[wanted.holder] + wanted.size_bytes >= size_bytes
            or first.since > self._now() - UNTAKEN_PATIENCE_S
            or not first.peer
        ):
            return False
        self._hang_up(first.peer)
        for held in [held for held in self._held if held.peer == first.peer]:
            self.release(held)
        return True


def _shares(peer: str, token: str) -> tuple[Key, ...]:
    connection: tuple[Key, ...] = (("connection", peer),) if peer else ()
    return (*connection, ("token", token)) if token else connection


@dataclass(eq=False, slots=True)
class Call:
    """One call, from its headers to its answer."""

    method: str
    peer: str
    """What gRPC names its connection."""
    task: asyncio.Task[Any]
    since: float = 0.0
    """When it began to wait for its message, or for its answer to be taken; on the loop's clock."""
    is_slow: bool = False
    was_admitted: bool = False
    token: str = ""
    """Name under which it counts once it is admitted, or nothing without a token."""
    weight: int = STRANGER_WEIGHT
    """For how many fruitless calls it counts if its message never comes."""
    held: PendingReply | None = None
    """Its answer, until it is sent, or None if it is small."""
    request: Any = None
    metadata: Iterable[tuple[str, str | bytes]] = ()
    """Metadata, where it is asked for a token."""
    limit: asyncio.Timeout | None = None
    """Ends its handler."""
    refusal: Exception | None = None
    """Why its handler was ended early."""

    def refuse(self, error: Exception) -> None:
        """End its handler with an error. Idempotent."""
        if self.limit is not None and not self.limit.expired():
            self.refusal = error
            self.limit.reschedule(asyncio.get_running_loop().time())


class Traffic:
    """The calls in progress, and the bounds on them. For the loop's thread only."""

    def __init__(
        self, metrics: Metrics, connections: PortConnections, connections_max: int
    ) -> None:
        self._metrics = metrics
        self._connections = connections
        self._connections_max = connections_max
        self._loop = asyncio.get_running_loop()
        self._arriving: dict[Call, None] = {}
        self._admitted: dict[Call, None] = {}
        self._answered: dict[Call, None] = {}
        self._of_token: Counter[str] = Counter()
        self._fruitless: Counter[str] = Counter()
        self._hung_up: set[str] = set()
        """Connections being closed since fruitless calls were last forgotten; what they had sent
        still arrives, and is no reason to hang up again."""
        self._useful: set[str] = set()
        """Connections on which a call was admitted, ever."""
        self._idle: set[str] = set()
        """Those on which none was, at the last look."""
        self._unwanted: dict[str, str] = {}
        """To be hung up on, and why."""
        self._wake = asyncio.Event()
        self._told_until = 0.0
        self._outage = OutageLog(log, "looking at connections")
        self._untaken = UntakenReplies(self._loop.time, partial(self._hang_up, reason="untaken"))
        self._given_back_bytes = 0
        """`released_bytes` when memory was last given back to the system."""
        metrics.untaken_bytes.set_function(lambda: float(self._untaken.total_bytes))
        metrics.calls.set_function(lambda: len(self._admitted))
        metrics.messages_arriving.set_function(lambda: len(self._arriving))

    def begin(self, method: str, peer: str) -> Call:
        """Take note of the call that the current task answers."""
        task = asyncio.current_task()
        assert task is not None
        return Call(method, peer, task)

    async def receive(self, call: Call, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Return the call's next message, or `grpc.aio.EOF`, or raise ServerBusyError.

        It comes within about `ARRIVAL_S`, unless others need its place.
        """
        if len(self._arriving) >= ARRIVALS_OF_CONNECTION_MAX:
            self._make_room(call.peer)
        call.since = self._loop.time()
        self._arriving[call] = None
        try:
            return await context.read()
        except asyncio.CancelledError:
            if not call.is_slow or call.task.uncancel():
                raise
            raise self._busy("arrivals", "the request did not arrive in time") from None
        finally:
            self._arriving.pop(call, None)

    def _make_room(self, peer: str) -> None:
        of_peer = [call for call in self._arriving if call.peer == peer]
        if len(of_peer) >= ARRIVALS_OF_CONNECTION_MAX and own_name(peer):
            self._refuse_slow(of_peer[0])
        elif len(self._arriving) >= ARRIVALS_MAX:
            self._refuse_slow(next(iter(self._arriving)))

    def _refuse_slow(self, call: Call) -> None:
        del self._arriving[call]
        call.is_slow = True
        call.task.cancel()

    def admit(self, call: Call, token: str = "", *, is_reserved: bool = False) -> None:
        """Let a call be carried out, or raise ServerBusyError; operators have reserved places."""
        call.was_admitted = True
        self._useful.add(call.peer)
        if call in self._admitted:
            return
        # One useful call makes up for a fruitless one: a proxy has those of many callers.
        self._fruitless[call.peer] -= STRANGER_WEIGHT
        if token and not is_reserved and self._of_token[token] >= CALLS_OF_TOKEN_MAX:
            raise self._busy("token", f"{self._of_token[token]} calls of {token!r} are in progress")
        places = CALLS_MAX + CALLS_RESERVED * is_reserved
        if len(self._admitted) + len(self._answered) >= places:
            raise self._busy("calls", f"{places} calls are in progress already")
        self._admitted[call] = None
        if token:
            call.token = token
            self._of_token[token] += 1

    def check_untaken(self, call: Call) -> None:
        """Raise ServerBusyError if replies that are not taken leave no room for a large one."""
        if self._untaken.is_full(own_name(call.peer), call.token):
            raise self._busy("untaken", _UNTAKEN)

    def hold(self, call: Call, size_bytes: int) -> PendingReply:
        """Count a reply that is about to be sent; raise ServerBusyError if there is no room."""
        held = self._untaken.hold(own_name(call.peer), call.token, size_bytes)
        if held is None:
            raise self._busy("untaken", _UNTAKEN)
        return held

    def answered(self, call: Call) -> None:
        """Take note that all that is left of a call is to send its answer."""
        if not call.was_admitted:
            self._note_fruitless(call.peer, SLOW_WEIGHT if call.is_slow else call.weight)
        self._admitted.pop(call, None)
        if call.token:
            self._of_token[call.token] -= 1
            if not self._of_token[call.token]:
                del self._of_token[call.token]
        call.since = self._loop.time()
        self._answered[call] = None
        call.task.add_done_callback(partial(self._on_sent, call))

    def _on_sent(self, call: Call, _: asyncio.Task[Any]) -> None:
        del self._answered[call]
        if call.held is not None:
            call.held.close()

    def _note_fruitless(self, peer: str, weight: int) -> None:
        if own_name(peer):
            self._fruitless[peer] += weight
            if self._fruitless[peer] >= FRUITLESS_MAX:
                del self._fruitless[peer]
                self._hang_up(peer, "flood")

    def _busy(self, limit: str, text: str) -> ServerBusyError:
        self._metrics.calls_refused.labels(limit).inc()
        return ServerBusyError(text)

    def _hang_up(self, peer: str, reason: str) -> None:
        if peer not in self._hung_up:
            self._hung_up.add(peer)
            self._unwanted[peer] = reason
            self._wake.set()

    async def run(self) -> None:
        """Hang up on connections that deserve it, for ever."""
        counts_until = self._loop.time() + FRUITLESS_S
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            except TimeoutError:
                self._find_slow()
                self._find_untaken()
                await self._look_around()
                await self._give_back()
            if self._loop.time() >= counts_until:
                self._fruitless.clear()
                self._hung_up.clear()
                counts_until = self._loop.time() + FRUITLESS_S
            await self._close_unwanted()

    def _find_slow(self) -> None:
        since = self._loop.time() - ARRIVAL_S
        for call in tuple(self._arriving):
            if call.since > since:
                return
            self._refuse_slow(call)

    def _find_untaken(self) -> None:
        since = self._loop.time() - ANSWER_TAKEN_S
        for call in self._answered:
            if call.since > since:
                return
            self._hang_up(call.peer, "untaken")

    async def _give_back(self) -> None:
        if self._untaken.released_bytes - self._given_back_bytes >= RELEASED_BYTES_KEPT:
            self._given_back_bytes = self._untaken.released_bytes
            await asyncio.to_thread(trim_heap)

    async def _look_around(self) -> None:
        """Let those that have asked for nothing yet make room, when the house is almost full."""
        try:
            peers = await asyncio.to_thread(self._connections.peers)
        except OSError as error:
            self._outage.failed(error)
            return
        self._outage.succeeded()
        self._metrics.connections.set(len(peers))
        self._useful &= peers
        idle = peers - self._useful
        if len(peers) >= FULL_HOUSE * self._connections_max:
            # Those that came since the last look may just be about to ask.
            for peer in idle & self._idle:
                self._hang_up(peer, "idle")
        self._idle = idle

    async def _close_unwanted(self) -> None:
        self._wake.clear()
        unwanted, self._unwanted = self._unwanted, {}
        if not unwanted:
            return
        reasons = Counter(unwanted.values())
        for reason, count in reasons.items():
            self._metrics.connections_closed.labels(reason).inc(count)
        level = logging.WARNING if self._loop.time() >= self._told_until else logging.DEBUG
        if level == logging.WARNING:
            # Whoever makes us hang up again and again must not fill the log by it.
            self._told_until = self._loop.time() + TOLD_S
        log.log(
            level,
            "hung up on %d connections: %s; one of them was %s",
            len(unwanted),
            ", ".join(f"{count} for {reason}" for reason, count in reasons.items()),
            next(iter(unwanted)),
        )
        try:
            await asyncio.to_thread(self._connections.close, unwanted)
        except OSError as error:
            self._outage.failed(error)
            self._unwanted = unwanted | self._unwanted


def own_name(peer: str) -> str:
    """Return gRPC's name of a connection, or nothing for a unix socket: all have one name."""
    return "" if peer.startswith("unix") else peer
