"""Closed chunks over their whole life: held, drawn, leased, returned, evicted.

Invariants:

H1  A closed chunk is known while it is held or leased; when neither, its payloads were let go.
H2  A held chunk has fewer uses than `uses_max`, is fresh, and is of the current session.
H3  A chunk is evicted at most once, with one reason: when it leaves the table for good, or, used
    up, when its last lease ends.
"""

from collections.abc import Iterable, Iterator, Sequence

from breadbox_server.core.chunks import Chunk, ChunkState, ChunkTable
from breadbox_server.core.counters import CHUNKS_EVICTED, Counters
from breadbox_server.core.events import ChunksEvicted, Event, EvictionReason
from breadbox_server.core.ids import BufferName, ChunkId
from breadbox_server.core.inputs import Fragment
from breadbox_server.core.payloads import PayloadLedger
from breadbox_server.core.samplers import Sampler


class Holdings:
    """What a buffer does with closed chunks; whoever calls it knows why.

    Args:
        buffer: Named in the events.
        sampler: Draws from what is held.
        payloads: Told of every payload that is let go.
        counters: Counts what happens.
        events: Where evictions are told.
    """

    def __init__(
        self,
        buffer: BufferName,
        sampler: Sampler,
        *,
        payloads: PayloadLedger,
        counters: Counters,
        events: list[Event],
    ) -> None:
        self._buffer = buffer
        self._payloads = payloads
        self._counters = counters
        self._events = events
        self.table = ChunkTable(sampler)
        self.closed_count = 0
        """Chunks ever closed; the next one's id."""

    def close(self, fragments: Sequence[Fragment]) -> Chunk:
        """Make a chunk of fragments whose payloads are taken, and hold it."""
        chunk = Chunk(ChunkId(self.closed_count), tuple(fragments))
        self.closed_count += 1
        self._payloads.hand_over(chunk)
        self.table.add(chunk)
        self._counters.add("chunks_closed")
        return chunk

    def close_each(self, fragments: Iterable[Fragment]) -> None:
        """Make a chunk of each fragment, whose payload is not taken yet, and hold it."""
        chunks = [
            Chunk(ChunkId(chunk_id), (fragment,))
            for chunk_id, fragment in enumerate(fragments, self.closed_count)
        ]
        self.closed_count += len(chunks)
        for chunk in chunks:
            self._payloads.take_chunk(chunk)
        self.table.add_new(chunks)
        self._counters.add("chunks_closed", len(chunks))

    def restore(self, chunks: Iterable[Chunk], closed_count: int) -> None:
        """Take chunks as a snapshot has them, whose states, uses and leases are set.

        Args:
            chunks: In the order in which the sampler is to be told of them.
            closed_count: Chunks ever closed.
        """
        self.closed_count = closed_count
        held = []
        for chunk in chunks:
            if chunk.state is ChunkState.HELD:
                held.append(chunk)
                self._payloads.take_chunk(chunk)
            elif chunk.lease_count > 0:
                self._payloads.take_chunk(chunk)
        self.table.restore(held)

    def use(self, chunks: Sequence[Chunk], uses_max: int) -> None:
        """Count a use and a lease of held chunks, which leave the table at `uses_max` (B10).

        Args:
            chunks: Each once.
            uses_max: Limit of uses.
        """
        self.table.add_leases(chunks)
        self._counters.add("uses", len(chunks))
        for chunk in chunks:
            chunk.use_count += 1
            if chunk.use_count >= uses_max:
                self.table.remove(chunk, ChunkState.USED_UP)

    def give_back(self, chunk: Chunk) -> None:
        """Take a use back, before the lease that gave it ends (B11)."""
        chunk.use_count -= 1
        self._counters.add("chunks_returned")

    def end_lease(self, chunk: Chunk, uses_max: int, obstacle: EvictionReason | None) -> None:
        """End a lease on a chunk, and decide what becomes of the chunk.

        A chunk that was used up and has a use left again returns to the table at its old age.

        Args:
            chunk: One with a lease.
            uses_max: Limit of uses.
            obstacle: Why it could not return now; None when nothing stands in the way.
        """
        self.table.end_lease(chunk)
        if chunk.state is ChunkState.USED_UP and chunk.use_count < uses_max:
            if obstacle is None:
                self.table.add(chunk)
            else:
                self._give_up(chunk, obstacle)
        elif chunk.lease_count == 0:
            if chunk.state is ChunkState.USED_UP:
                self._give_up(chunk, EvictionReason.USED_UP)
            elif chunk.state is ChunkState.GONE:
                self._payloads.dispose(chunk.fragments)

    def evict(self, chunks: Iterable[Chunk], reason: EvictionReason) -> int:
        """Evict held chunks.

        Args:
            chunks: May be an iterator that looks for the next one when the last has gone.
            reason: Told and counted.

        Returns:
            How many there were.
        """
        use_counts = []
        for chunk in chunks:
            self.table.remove(chunk, ChunkState.GONE)
            self._let_go(chunk)
            use_counts.append(chunk.use_count)
        self._tell(reason, use_counts)
        return len(use_counts)

    def evict_all(self, reason: EvictionReason) -> int:
        """Evict everything held.

        Returns:
            How many chunks there were.
        """
        chunks = self.table.clear()
        for chunk in chunks:
            self._let_go(chunk)
        self._tell(reason, [chunk.use_count for chunk in chunks])
        return len(chunks)

    def evict_stale(self, version_min: int) -> int:
        """Evict every held chunk older than a version, wherever it stands (B5).

        Returns:
            How many there were.
        """
        return self.evict(self._older_than(version_min), EvictionReason.STALE)

    def evict_to_count(self, count_max: int) -> None:
        """Evict the oldest, leased or not, until at most so many chunks are held."""
        self.evict(self._oldest_beyond_count(count_max), EvictionReason.CAPACITY)

    def evict_to_bytes(self, referred_bytes_max: int) -> None:
        """Evict the oldest chunks without a lease until few enough bytes are referred to.

        Stops early when no chunk without a lease is left; whoever needs the room asks
        `ChunkTable.unleased_bytes` first.
        """
        self.evict(self._oldest_beyond_bytes(referred_bytes_max), EvictionReason.CAPACITY)

    def evict_used_up(self, uses_max: int) -> None:
        """Evict the chunks that have no use left under a lower limit; O(chunks held).

        Those that a lease refers to leave the table, and go when their last lease ends.
        """
        used_up = [chunk for chunk in self.table.by_age() if chunk.use_count >= uses_max]
        for chunk in used_up:
            if chunk.lease_count > 0:
                self.table.remove(chunk, ChunkState.USED_UP)
        unleased = [chunk for chunk in used_up if chunk.lease_count == 0]
        self.evict(unleased, EvictionReason.USED_UP)

    def lose(self, chunk: Chunk, reason: EvictionReason) -> bool:
        """Give up a chunk that cannot be read, unless it is given up already.

        Returns:
            Whether it was held or could have come back.
        """
        if chunk.state is ChunkState.HELD:
            self.evict([chunk], reason)
            return True
        if chunk.state is ChunkState.USED_UP:
            self._give_up(chunk, reason)
            return True
        return False

    def _older_than(self, version_min: int) -> Iterator[Chunk]:
        while (chunk := self.table.oldest_version()) is not None and chunk.version < version_min:
            yield chunk

    def _oldest_beyond_count(self, count_max: int) -> Iterator[Chunk]:
        while len(self.table) > count_max and (chunk := self.table.oldest()) is not None:
            yield chunk

    def _oldest_beyond_bytes(self, referred_bytes_max: int) -> Iterator[Chunk]:
        while self._payloads.referred_bytes > referred_bytes_max:
            chunk = self.table.oldest_unleased()
            if chunk is None:
                return
            yield chunk

    def _give_up(self, chunk: Chunk, reason: EvictionReason) -> None:
        """Evict a used-up chunk, which is out of the table already."""
        chunk.state = ChunkState.GONE
        self._let_go(chunk)
        self._tell(reason, [chunk.use_count])

    def _let_go(self, chunk: Chunk) -> None:
        """Dispose of the payloads of a chunk that is gone, unless a lease still refers to it."""
        if chunk.lease_count == 0:
            self._payloads.dispose(chunk.fragments)

    def _tell(self, reason: EvictionReason, use_counts: list[int]) -> None:
        if use_counts:
            self._counters.add(CHUNKS_EVICTED[reason], len(use_counts))
            self._events.append(ChunksEvicted(self._buffer, reason, tuple(use_counts)))
