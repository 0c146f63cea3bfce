"""Closed chunks over their whole life: held, drawn, leased, returned, evicted.

H1  A closed chunk is known while it is held, leased or retained; once it is none
    of these, its payloads are let go.
H2  A held chunk has fewer uses than `uses_max`, is fresh, and is of the current session.
H3  A chunk is evicted at most once, with one reason: when it leaves the table for good, or, used
    up, when its last lease ends.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from breadbox_server.core.model.counters import CHUNKS_EVICTED, Counters, FlowMeter
from breadbox_server.core.model.events import (
    ChunksEvicted,
    Event,
    EvictionReason,
    StepsEnd,
    StepsEnded,
)
from breadbox_server.core.model.ids import BufferName, ChunkId, SessionId
from breadbox_server.core.model.inputs import Fragment
from breadbox_server.core.samplers import Sampler
from breadbox_server.core.state.chunks import Chunk, ChunkState, ChunkTable
from breadbox_server.core.state.payloads import PayloadLedger
from breadbox_server.core.state.subscriptions import Subscription, Subscriptions

RETAINED_AFTER = frozenset({EvictionReason.USED_UP, EvictionReason.STALE})
"""Reasons for leaving the sampler after which a subscriber's payloads stay readable."""


class ChunkHoldings:
    """Hold, lease and evict closed chunks; `remover` (None: oldest) says which make room."""

    def __init__(
        self,
        buffer: BufferName,
        sampler: Sampler,
        remover: Sampler | None,
        *,
        removal_seed: int,
        payloads: PayloadLedger,
        meter: FlowMeter,
        counters: Counters,
        events: list[Event],
        note_unused: Callable[[Sequence[Fragment], EvictionReason], None],
        by_newest: bool,
    ) -> None:
        self._buffer = buffer
        self._removal_seed = removal_seed
        self._rng = random.Random()
        self._payloads = payloads
        self._meter = meter
        self._counters = counters
        self._events = events
        self._note_unused = note_unused
        self.by_newest = by_newest
        self.table = ChunkTable(sampler, remover)
        self.subscriptions = Subscriptions(payloads, counters)
        self.closed_count = 0
        """Chunks ever closed; the next one's id."""

    @property
    def kept_count(self) -> int:
        """Chunks held, and those retained: what `capacity_chunks` bounds by evicting."""
        return len(self.table.held) + self.subscriptions.retained_count

    @property
    def place_count(self) -> int:
        """Places taken where producers wait: `kept_count`, and what a lease may bring back (B7)."""
        return len(self.table.held) + len(self.subscriptions.left)

    @property
    def unleased_bytes(self) -> int:
        """Bytes that could be had by giving up all that has no lease."""
        return self.table.unleased_bytes + self.subscriptions.unleased_bytes

    def close(self, fragments: Sequence[Fragment]) -> Chunk:
        """Make a chunk from fragments whose payloads are taken, and hold it."""
        chunk = Chunk(ChunkId(self.closed_count), tuple(fragments), by_newest=self.by_newest)
        self.closed_count += 1
        for fragment in chunk.fragments:
            self._payloads.owners[fragment.payload.payload_id] = chunk
        self.table.add(chunk)
        self._counters["chunks_closed"] += 1
        return chunk

    @property
    def closes_in_order(self) -> bool:
        """Whether the oldest leave for room, and nothing is retained that would go first.

        And chunks are made in the quick way: their versions count from the oldest step.
        """
        return (
            self.table.remover is None
            and not self.subscriptions.retained_count
            and not self.by_newest
        )

    def close_each(
        self, fragments: Sequence[Fragment], chunk_count_max: int, referred_bytes_max: int
    ) -> None:
        """Do `close` with each fragment, with evictions before and after it, at half the cost.

        Only while `closes_in_order`.
        """
        self._counters["chunks_closed"] += len(fragments)
        gone = self._beyond_each(fragments, chunk_count_max, referred_bytes_max)
        self.evict(gone, EvictionReason.CAPACITY)

    def _beyond_each(
        self, fragments: Iterable[Fragment], chunk_count_max: int, referred_bytes_max: int
    ) -> Iterator[Chunk]:
        table, payloads = self.table, self._payloads
        for fragment in fragments:
            bytes_left = referred_bytes_max - fragment.payload.size_bytes
            if payloads.referred_bytes > bytes_left:
                yield from self._beyond_bytes(bytes_left)
            chunk = Chunk(ChunkId(self.closed_count), (fragment,))
            self.closed_count += 1
            payloads.take_chunk(chunk)
            table.add(chunk)
            if len(table.held) > chunk_count_max:
                yield from self._beyond_count(chunk_count_max)

    def restore(
        self,
        chunks: Collection[Chunk],
        removed_in: Iterable[ChunkId],
        closed_count: int,
        subscriptions: Iterable[Subscription],
        session_id: SessionId,
    ) -> None:
        """Take a snapshot's chunks, in the sampler's order; `removed_in`: in the remover's."""
        self.closed_count = closed_count
        held = []
        for chunk in chunks:
            if chunk.state is ChunkState.HELD:
                held.append(chunk)
                self._payloads.take_chunk(chunk)
            elif chunk.lease_count > 0 or chunk.state is ChunkState.RETAINED:
                self._payloads.take_chunk(chunk)
        self.table.add_many(held, removed_in)
        self.subscriptions.restore(subscriptions, chunks, session_id)

    def use(self, chunks: Sequence[Chunk], uses_max: int) -> list[int]:
        """Count a use and a lease of chunks, which leave at `uses_max` (B10); return their uses."""
        self.table.add_leases(chunks)
        self._counters["uses"] += len(chunks)
        use_counts = []
        used_up = []
        for chunk in chunks:
            chunk.use_count += 1
            use_counts.append(chunk.use_count)
            if chunk.use_count >= uses_max:
                used_up.append(chunk)
        self.table.remove_many(used_up, ChunkState.USED_UP)
        for chunk in used_up:
            self.subscriptions.hold_used_up(chunk)
        return use_counts

    def end_leases(
        self,
        chunks: Iterable[Chunk],
        uses_max: int,
        obstacle: Callable[[Chunk], EvictionReason | None],
    ) -> None:
        """End a lease on each of several chunks, and decide what becomes of them.

        A used-up chunk with a use again returns at its old age, unless `obstacle` says why not.
        """
        given_up: dict[EvictionReason, list[tuple[Chunk, int]]] = {}
        for chunk in chunks:
            chunk.lease_count -= 1
            is_leased = chunk.lease_count > 0
            if chunk.state is ChunkState.USED_UP:
                is_used_up = chunk.use_count >= uses_max
                reason = EvictionReason.USED_UP if is_used_up else obstacle(chunk)
                if reason is None:
                    self.subscriptions.take_back(chunk)
                    self.table.add(chunk)
                elif not (is_used_up and is_leased):
                    self._leave(chunk, reason)
                    given_up.setdefault(reason, []).append((chunk, chunk.use_count))
            elif is_leased:
                continue
            elif chunk.state is ChunkState.HELD:
                self.table.add_unleased(chunk)
            elif chunk.state is ChunkState.RETAINED:
                self.subscriptions.add_unleased(chunk)
            else:
                self._payloads.dispose(chunk.fragments)
        for reason, gone in given_up.items():
            self._report(reason, gone)

    def evict(self, chunks: Iterable[Chunk], reason: EvictionReason) -> int:
        """Evict held chunks, and return their number; `chunks` may iterate as they go."""
        gone = []
        for chunk in chunks:
            self.table.remove_many((chunk,), ChunkState.GONE)
            self._let_go(chunk, reason)
            gone.append((chunk, chunk.use_count))
        self._report(reason, gone)
        return len(gone)

    def evict_stale(self, version_min: int) -> int:
        """Evict every held chunk older than a version (B5), and return how many there were."""

        def older() -> Iterator[Chunk]:
            table = self.table
            while (chunk := table.oldest_version()) is not None and chunk.version < version_min:
                yield chunk

        return self.evict(older(), EvictionReason.STALE)

    def evict_to_count(self, count_max: int) -> None:
        """Evict, leased or not, until few enough are held and retained; unleased retained first."""
        while self.kept_count > count_max and self.subscriptions.lose_oldest_unleased():
            pass
        if len(self.table.held) > count_max:
            self.evict(self._beyond_count(count_max), EvictionReason.CAPACITY)

    def evict_to_bytes(self, referred_bytes_max: int) -> None:
        """Evict chunks without a lease, the retained first, until few enough bytes are referred to.

        Stops when none without a lease is left: check `unleased_bytes` first where room is needed.
        """
        while (
            self._payloads.referred_bytes > referred_bytes_max
            and self.subscriptions.lose_oldest_unleased()
        ):
            pass
        self.evict(self._beyond_bytes(referred_bytes_max), EvictionReason.CAPACITY)

    def evict_used_up(self, uses_max: int) -> None:
        """Evict chunks used up under a lower limit, leased ones at their lease's end; O(held)."""
        used_up = [chunk for chunk in self.table.by_age() if chunk.use_count >= uses_max]
        for chunk in used_up:
            if chunk.lease_count > 0:
                self.table.remove_many((chunk,), ChunkState.USED_UP)
                self.subscriptions.hold_used_up(chunk)
        unleased = [chunk for chunk in used_up if chunk.lease_count == 0]
        self.evict(unleased, EvictionReason.USED_UP)

    def lose(self, chunk: Chunk, reason: EvictionReason) -> bool:
        """Give up a chunk that cannot be read; return False if it is given up already."""
        if chunk.state is ChunkState.HELD:
            self.evict([chunk], reason)
            return True
        if chunk.state is ChunkState.USED_UP:
            self._leave(chunk, reason)
            self._report(reason, [(chunk, chunk.use_count)])
            return True
        if chunk.state is ChunkState.RETAINED:
            self.subscriptions.lose(chunk)
            return True
        return False

    def end_session(self) -> None:
        """Evict everything held, and let subscriptions miss that and all that they could read."""
        held = self.table.clear()
        for chunk in held:
            self._let_go(chunk, EvictionReason.SESSION_ENDED)
        gone = [(chunk, chunk.use_count) for chunk in held]
        self._report(EvictionReason.SESSION_ENDED, gone)
        for chunk in self.subscriptions.by_age():
            if chunk.state is ChunkState.RETAINED:
                self.subscriptions.lose(chunk)
            else:
                # Now, and not when its leases end: readers learn now that it is not theirs.
                self.subscriptions.take_back(chunk)
                if self.subscriptions.wants(chunk):
                    self.subscriptions.miss(chunk)

    def _beyond_count(self, count_max: int) -> Iterator[Chunk]:
        rng = self._removal_rng()
        while len(self.table.held) > count_max:
            chunk = self.table.first_to_leave(rng)
            assert chunk is not None
            yield chunk

    def _beyond_bytes(self, referred_bytes_max: int) -> Iterator[Chunk]:
        rng = self._removal_rng()
        while self._payloads.referred_bytes > referred_bytes_max:
            chunk = self.table.first_unleased_to_leave(rng)
            if chunk is None:
                return
            yield chunk

    def _removal_rng(self) -> random.Random:
        """Return one removal's generator, from seed and count: evictions are not journalled."""
        if self.table.remover is not None:
            evicted_count = self._counters[CHUNKS_EVICTED[EvictionReason.CAPACITY]]
            self._rng.seed((self._removal_seed << 64) + (1 << 63) + evicted_count)
        return self._rng

    def _leave(self, chunk: Chunk, reason: EvictionReason) -> None:
        """Evict a used-up chunk, which is out of the table already; `_report` is the caller's."""
        chunk.state = ChunkState.GONE
        could_be_read = self.subscriptions.take_back(chunk)
        self._let_go(chunk, reason, could_be_read=could_be_read)

    def _let_go(self, chunk: Chunk, reason: EvictionReason, *, could_be_read: bool = True) -> None:
        """Retain a chunk without leases if a subscription may want it, else let its payloads go."""
        if could_be_read and self.subscriptions.wants(chunk):
            if reason in RETAINED_AFTER:
                self.subscriptions.retain(chunk)
                return
            self.subscriptions.miss(chunk)
        if chunk.lease_count == 0:
            self._payloads.dispose(chunk.fragments)

    def _report(self, reason: EvictionReason, gone: Sequence[tuple[Chunk, int]]) -> None:
        """Report chunks that left, each with its uses then: a lease may give one back later."""
        if gone:
            chunks, use_counts = zip(*gone, strict=True)
            chunk_ids = tuple([chunk.chunk_id for chunk in chunks])
            self._counters[CHUNKS_EVICTED[reason]] += len(gone)
            # Of an ended session nothing is counted any more.
            if reason is not EvictionReason.SESSION_ENDED:
                self._meter.inserted_count -= use_counts.count(0)
            self._events.append(ChunksEvicted(self._buffer, reason, use_counts, chunk_ids))
            unread = [each for chunk, count in gone if not count for each in chunk.fragments]
            if unread:
                self._note_unused(unread, reason)
                self._events.append(StepsEnded(self._buffer, StepsEnd.EVICTED, tuple(unread)))
