"""Reads that use nothing up: of the model, of chunks after a cursor, and of named cursors (B16)."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, TypeVar

from breadbox_server.access.authorization import ANONYMOUS, Caller
from breadbox_server.core.model.description import GroupEnd, SubscriptionDescription
from breadbox_server.core.model.errors import DrainingError
from breadbox_server.core.model.ids import BufferName, ModelVersion, PayloadId, SessionId, WorkerId
from breadbox_server.core.model.inputs import Fragment, ModelState, Payload
from breadbox_server.core.rules.reading import (
    READ_BYTES_MAX,
    READ_FRAGMENTS_MAX,
    ChunksRead,
    ReadSpec,
)
from breadbox_server.journal.durable_core import DurableCore
from breadbox_server.limits import (
    GROUP_ENDS_MAX,
    INLINE_REPLY_BYTES_MAX,
    SHARED_REPLIES_MAX,
    SHARED_REPLY_BYTES_MAX,
)
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.reading.claims import Claims
from breadbox_server.reading.inline_bodies import InlineBodies
from breadbox_server.reading.read_leases import ReadLease, ReadLeases
from breadbox_server.reading.watchers import Watchers

Found = TypeVar("Found")
NOTES_MAX: Final = 4096
"""Notes of one buffer; at the limit every second one is dropped."""


@dataclass(slots=True, eq=False)
class ReadBody:
    """Payloads of a read and its encoded reply, without the lease."""

    bodies: list[bytes]
    """Payload of each fragment, b"" where it is not inline."""
    encoded: bytes = b""
    """The encoded part that is the same for all, or b"" before the first reader encodes it."""

    @property
    def is_whole(self) -> bool:
        """Return True if all payloads are inline, so that it needs no lease."""
        return all(self.bodies)

    @property
    def is_shared(self) -> bool:
        """Return True if it is small enough to be kept for others."""
        return sum(map(len, self.bodies)) <= SHARED_REPLY_BYTES_MAX


@dataclass(slots=True, eq=False)
class CachedRead:
    """The chunks after a cursor, shared by all readers there until the buffer changes."""

    found: ChunksRead
    payloads: list[Payload] = field(init=False)
    replies: dict[int, ReadBody] = field(default_factory=dict)
    """Replies that needed no trip to the store, by the inline bytes that readers take."""

    def __post_init__(self) -> None:
        self.payloads = [each.fragment.payload for each in self.found.fragments]


class ReadResult(NamedTuple):
    """Chunks, payloads and lease that one reader gets."""

    found: ChunksRead
    reply: ReadBody
    lease: ReadLease | None
    """Lease on the payloads, or None if all are inline."""


@dataclass(slots=True)
class MembersRead:
    """The parts of members, one after the other."""

    fragments: list[Fragment]
    counts: list[int]
    """Parts of each member, or -1 if it is not there."""
    lease_s: float
    """Seconds that leases of the buffer live."""


class Arrivals:
    """Arrivals of chunks, to about a second, not durable: how long a reader has been behind."""

    def __init__(self) -> None:
        self._newest: list[int] = []
        """Newest chunk at each of the times; ascending."""
        self._times: list[float] = []

    def note(self, newest: int, now: float) -> None:
        """Note that there are chunks up to this one."""
        if self._newest and newest < self._newest[-1]:
            self._newest.clear()
            self._times.clear()
        if self._newest and newest == self._newest[-1]:
            return
        self._newest.append(newest)
        self._times.append(now)
        if len(self._newest) > NOTES_MAX:
            self._newest, self._times = self._newest[::2], self._times[::2]

    def lag_s(self, cursor: int, now: float) -> float:
        """Return the seconds for which a chunk after this one has been there."""
        place = bisect_right(self._newest, cursor)
        return max(0.0, now - self._times[place]) if place < len(self._times) else 0.0


class Reads:
    """Answer watches and reads, and wake those that wait for news."""

    def __init__(
        self,
        core: DurableCore,
        bodies: InlineBodies,
        leases: ReadLeases,
        *,
        metrics: Metrics,
        watchers_max: int,
    ) -> None:
        self._core = core
        self._bodies = bodies
        self.leases = leases
        self._metrics = metrics
        self._watchers = Watchers(core.clock, watchers_max)
        self._readers = Watchers(core.clock, watchers_max)
        self._group_watchers = Watchers(core.clock, watchers_max)
        self.claims = Claims(core, bodies, leases, Watchers(core.clock, watchers_max))
        self._cached: dict[tuple[BufferName, ReadSpec], CachedRead] = {}
        self._arrivals: dict[BufferName, Arrivals] = {}

    async def watch(
        self,
        buffer: BufferName,
        *,
        session_id: SessionId,
        model_version: ModelVersion | None,
        lacks_weights: bool,
        wait_s: float,
        caller: Caller = ANONYMOUS,
    ) -> tuple[bool, ModelState]:
        """Wait at most `wait_s` until the model differs from what the caller knows.

        `lacks_weights`: the known version's weights differ too. Return whether, and the model.
        """

        def differs(state: ModelState) -> bool:
            return (state.session_id, state.model_version) != (session_id, model_version) or (
                lacks_weights and state.weights is not None
            )

        def look() -> ModelState:
            return self._core.buffers[buffer].model

        state = await self._news(self._watchers, buffer, look, differs, wait_s, caller)
        return differs(state), state

    async def group_ends(
        self, buffer: BufferName, after: int, *, wait_s: float, caller: Caller = ANONYMOUS
    ) -> list[GroupEnd]:
        """Return how groups ended after an end; wait at most `wait_s` for the first."""

        def look() -> list[GroupEnd]:
            return self._core.buffers[buffer].group_ends(after, GROUP_ENDS_MAX)

        return await self._news(self._group_watchers, buffer, look, bool, wait_s, caller)

    async def _news(
        self,
        watchers: Watchers,
        buffer: BufferName,
        look: Callable[[], Found],
        is_news: Callable[[Found], bool],
        wait_s: float,
        caller: Caller,
    ) -> Found:
        """Look until there is news, at most for `wait_s`; return what was seen last, durable."""
        until = self._core.clock.now() + wait_s
        found = await self._core.look(look)
        # Again after a change that is none to this caller.
        while not is_news(found) and (left_s := until - self._core.clock.now()) > 0:
            self._core.check_serving()
            await watchers.wait(buffer, left_s, caller.holder(buffer))
            found = await self._core.look(look)
        await self._core.turns.settled()
        return found

    async def read(
        self,
        buffer: BufferName,
        spec: ReadSpec,
        *,
        wait_s: float,
        lease_s: float | None,
        inline_bytes_max: int = 0,
        is_look: bool = False,
        caller: Caller = ANONYMOUS,
    ) -> ReadResult:
        """Return the chunks after a cursor, under a lease; wait `wait_s` at most for news (B16).

        `is_look`: its lease is no use of the buffer, see `Uses`.
        """
        self._core.check_serving()
        until = self._core.clock.now() + wait_s
        known = spec.known_session_id
        has_waited = False
        while True:
            cached = await self._core.look(partial(self._cached_read, buffer, spec))
            found = cached.found
            is_news = (
                found.chunk_count > 0
                or found.skipped_count > 0
                or (known is not None and known != found.model.session_id)
                or (spec.after is not None and found.cursor < spec.after)
            )
            if (left_s := until - self._core.clock.now()) <= 0:
                break
            if is_news:
                is_full = found.chunk_count >= spec.chunk_count_max
                if has_waited or is_full or not self._readers.is_gathering(buffer):
                    break
                self._readers.wake_in_time(buffer)
            has_waited = True
            await self._readers.wait(buffer, left_s, caller.holder(buffer))
            self._core.check_serving()
        bytes_max = min(inline_bytes_max, INLINE_REPLY_BYTES_MAX)
        absent: list[int] = []
        reply = cached.replies.get(bytes_max)
        if reply is None:
            bodies, absent = self._bodies.at_hand(cached.payloads, bytes_max)
            reply = ReadBody(bodies)
            if not absent and reply.is_shared:
                cached.replies[bytes_max] = reply
        lease = await self._leased(
            *(buffer, cached.payloads, reply, absent, lease_s or found.lease_s, caller), is_look
        )
        self._metrics.count_read(buffer, found.chunk_count, found.skipped_count)
        return ReadResult(found, reply, lease)

    async def _leased(
        self,
        buffer: BufferName,
        payloads: Sequence[Payload],
        reply: ReadBody,
        absent: Sequence[int],
        lease_s: float,
        caller: Caller,
        is_look: bool,
    ) -> ReadLease | None:
        """Read what a reply lacks; return a lease on its payloads, or None if all are inline."""
        lease = None
        if not reply.is_whole:
            lease = self.leases.take(
                buffer, payloads, lease_s, caller.holder(buffer), is_look=is_look
            )
        try:
            await self._core.turns.settled()
            await self._bodies.add(reply.bodies, payloads, absent)
        except BaseException:
            # The caller has left.
            if lease is not None:
                self.leases.release(lease.lease_id)
            raise
        if lease is not None and reply.is_whole:
            self.leases.release(lease.lease_id)
            lease = None
        return lease

    async def read_members(
        self,
        buffer: BufferName,
        keys: Sequence[tuple[WorkerId, int]],
        names: frozenset[str],
        *,
        lease_s: float | None,
        inline_bytes_max: int,
        is_look: bool = False,
        caller: Caller = ANONYMOUS,
    ) -> tuple[MembersRead, ReadBody, ReadLease | None]:
        """Return the parts of the first members, as many as a reply takes, under a lease (B34)."""
        self._core.check_serving()

        def look() -> MembersRead:
            held, found = self._core.buffers[buffer], MembersRead([], [], 0.0)
            found.lease_s = held.config.lease_s
            size_bytes = 0
            for group, member in keys:
                parts = held.parts(group, member, names)
                found.counts.append(-1 if parts is None else len(parts))
                found.fragments += parts or ()
                size_bytes += sum([each.payload.size_bytes for each in parts or ()])
                if len(found.fragments) >= READ_FRAGMENTS_MAX or size_bytes >= READ_BYTES_MAX:
                    break
            return found

        found = await self._core.look(look)
        payloads = [each.payload for each in found.fragments]
        bodies, absent = self._bodies.at_hand(payloads, inline_bytes_max)
        reply = ReadBody(bodies)
        lease = await self._leased(
            buffer, payloads, reply, absent, lease_s or found.lease_s, caller, is_look
        )
        return found, reply, lease

    def _cached_read(self, buffer: BufferName, spec: ReadSpec) -> CachedRead:
        key = (buffer, spec)
        cached = self._cached.get(key)
        if cached is None:
            cached = CachedRead(self._core.buffers[buffer].read(spec))
            if len(self._cached) >= SHARED_REPLIES_MAX:
                self._cached.clear()
            self._cached[key] = cached
        return cached

    def subscriptions(self, buffer: BufferName) -> list[tuple[SubscriptionDescription, float]]:
        """Return the named cursors of a buffer, each with the seconds it has been behind."""
        now = self._core.clock.now()
        arrivals = self._arrivals.setdefault(buffer, Arrivals())
        arrivals.note(self._core.buffers.closed_count(buffer) - 1, now)
        return [
            (each, arrivals.lag_s(each.cursor, now))
            for each in self._core.buffers[buffer].subscriptions()
        ]

    def look_again(self) -> None:
        """Wake readers of buffers that closed chunks or ended groups, once that is durable."""
        self._cached.clear()
        buffers, when_settled = self._core.buffers, self._core.turns.when_settled
        self._group_watchers.look_again(buffers.group_end_count, when_settled)
        self.claims.look_again()
        self._readers.look_again(buffers.closed_count, when_settled)

    @property
    def watcher_count(self) -> int:
        """Callers that watch a model, or wait for groups to end or for members to claim."""
        return len(self._watchers) + len(self._group_watchers) + len(self.claims.waiting)

    @property
    def reader_count(self) -> int:
        """Callers that wait for chunks to read."""
        return len(self._readers)

    def refers_to(self, buffer: BufferName, payload_id: PayloadId) -> bool:
        """Return True if a buffer, or a reader of it, refers to a payload."""
        return self._core.buffers.refers_to(buffer, payload_id) or self.leases.pins(
            buffer, payload_id
        )

    def wake(self, buffer: BufferName) -> None:
        """Let all that wait for news of a buffer look again: its model has changed."""
        self._watchers.wake(buffer)
        self._readers.wake(buffer)

    def forget(self, buffer: BufferName) -> None:
        """Let go of a deleted buffer; callers that wait for news of it are answered."""
        self._watchers.forget(buffer)
        self._readers.forget(buffer)
        self._group_watchers.forget(buffer)
        self.claims.waiting.forget(buffer)
        self._arrivals.pop(buffer, None)
        self.leases.end_of(buffer)

    def turn_away(self) -> None:
        """End every wait with DrainingError."""
        for watchers in (self._watchers, self._readers, self._group_watchers, self.claims.waiting):
            watchers.turn_away(DrainingError())
