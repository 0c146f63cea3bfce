"""The chunks held for sampling: by arrival, by version, and ready to be drawn.

Invariants:

C1  A chunk is in the table if and only if its state is HELD, and then it is in the sampler, once,
    and in the remover, if there is one.
C2  The age of a chunk is its id: ids are given in order of arrival, and a chunk that comes back
    keeps its own.
C3  `unleased_bytes` is the bytes of the chunks in the table to which no lease refers.

Every operation costs O(1), or a logarithm, per chunk that it adds, removes or returns; the orders
are heaps that drop what left the table when it surfaces (`lazy_heap`).
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from breadbox_server.core.model.ids import ChunkId, ModelVersion
from breadbox_server.core.model.inputs import Fragment
from breadbox_server.core.model.lazy_heap import LazyHeap
from breadbox_server.core.samplers import Sampler
from breadbox_server.core.state.arrivals import ArrivalOrder, Behind


class ChunkState(Enum):
    """Where a closed chunk is."""

    HELD = "held"
    """In the table; may be drawn."""
    USED_UP = "used_up"
    """Out of the table for its uses; leases refer to it, and one given back may return it."""
    RETAINED = "retained"
    """Out of the table for good, and kept for subscriptions that have not passed it."""
    GONE = "gone"
    """Evicted; leases may still refer to its payloads, but it never comes back."""


class Chunk:
    """`fragments_per_chunk` consecutive fragments of one worker and session; closed, immutable."""

    __slots__ = (
        "chunk_id",
        "fragments",
        "lease_count",
        "priority",
        "sampler_position",
        "size_bytes",
        "state",
        "unreadable_count",
        "use_count",
        "version",
    )

    def __init__(self, chunk_id: ChunkId, fragments: tuple[Fragment, ...]) -> None:
        self.chunk_id = chunk_id
        self.fragments = fragments
        version, size_bytes = fragments[0].model_version_min, 0
        priority = 0.0
        # Without generators, which would cost most of making a chunk of one fragment.
        for fragment in fragments:
            size_bytes += fragment.payload.size_bytes
            if fragment.model_version_min < version:
                version = fragment.model_version_min
            if fragment.priority > priority:
                priority = fragment.priority
        self.version = version
        """Version of its oldest step: the smallest of its fragments' minima (B4)."""
        self.size_bytes = size_bytes
        self.priority = priority
        """The largest of its fragments', until it is set to another one (B18)."""
        self.state = ChunkState.GONE
        self.use_count = 0
        """Deliveries that were not given back (B10)."""
        self.lease_count = 0
        """Leases alive that refer to it."""
        self.unreadable_count = 0
        """Leases whose readers reported it unreadable."""
        self.sampler_position = 0


class ChunkTable:
    """The chunks that may be drawn."""

    def __init__(self, sampler: Sampler, remover: Sampler | None = None) -> None:
        self._chunks: dict[ChunkId, Chunk] = {}
        self._sampler = sampler
        self._remover = remover
        self._arrived = ArrivalOrder(self._chunks)
        self._by_age: LazyHeap[ChunkId] = LazyHeap(self._chunks.__contains__)
        self._unleased_by_age: LazyHeap[ChunkId] = LazyHeap(self._is_unleased)
        self._by_version: LazyHeap[tuple[ModelVersion, ChunkId]] = LazyHeap(self._is_in_order)
        self._count_by_version: dict[ModelVersion, int] = {}
        self._unleased_count = 0
        self.unleased_bytes = 0
        """Bytes that could be had by evicting every chunk without a lease."""

    def __len__(self) -> int:
        """Count the chunks held."""
        return len(self._chunks)

    @property
    def sampler(self) -> Sampler:
        """The sampler that draws from the table; notified of every chunk that enters or leaves."""
        return self._sampler

    @property
    def remover(self) -> Sampler | None:
        """The sampler that says which chunks leave for room, or None if the oldest do."""
        return self._remover

    def __contains__(self, chunk_id: ChunkId) -> bool:
        """Whether a chunk is held."""
        return chunk_id in self._chunks

    def __getitem__(self, chunk_id: ChunkId) -> Chunk:
        """Give a chunk that is held."""
        return self._chunks[chunk_id]

    def add(self, chunk: Chunk) -> None:
        """Hold a chunk, at the age that its id gives it."""
        chunk.state = ChunkState.HELD
        self._chunks[chunk.chunk_id] = chunk
        self._sampler.add(chunk)
        if self._remover is not None:
            self._remover.add(chunk)
        self._arrived.add(chunk)
        self._by_age.push(chunk.chunk_id)
        self._by_version.push((chunk.version, chunk.chunk_id))
        self._count_by_version[chunk.version] = self._count_by_version.get(chunk.version, 0) + 1
        if chunk.lease_count == 0:
            self._add_unleased(chunk)

    def add_new(self, chunks: Sequence[Chunk]) -> None:
        """Hold chunks that nobody has held or leased before; as `add` of each, at half its cost."""
        held, counts, add = self._chunks, self._count_by_version, self._sampler.add
        push_age, push_unleased = self._by_age.push, self._unleased_by_age.push
        push_version = self._by_version.push
        size_bytes = 0
        for chunk in chunks:
            chunk_id, version = chunk.chunk_id, chunk.version
            chunk.state = ChunkState.HELD
            held[chunk_id] = chunk
            add(chunk)
            push_age(chunk_id)
            push_version((version, chunk_id))
            push_unleased(chunk_id)
            counts[version] = counts.get(version, 0) + 1
            size_bytes += chunk.size_bytes
            if self._remover is not None:
                self._remover.add(chunk)
        self._arrived.forget()
        self._unleased_count += len(chunks)
        self.unleased_bytes += size_bytes

    def restore(self, chunks: Iterable[Chunk], removed_in: Iterable[ChunkId]) -> None:
        """Hold chunks as a snapshot has them, in the sampler's order; for an empty table.

        As `add` of each does, at a fraction of its cost.

        Args:
            chunks: In the sampler's order.
            removed_in: The same in that of the remover, if there is one.

        Raises:
            KeyError: `removed_in` has others.
        """
        for chunk in chunks:
            self._chunks[chunk.chunk_id] = chunk
            self._sampler.add(chunk)
            self._count_by_version[chunk.version] = self._count_by_version.get(chunk.version, 0) + 1
        held = self._chunks.values()
        if self._remover is not None:
            for chunk_id in removed_in:
                self._remover.add(self._chunks[chunk_id])
        self._by_age.replace(self._chunks)
        self._by_version.replace((chunk.version, chunk.chunk_id) for chunk in held)
        unleased = [chunk for chunk in held if chunk.lease_count == 0]
        self._unleased_by_age.replace(chunk.chunk_id for chunk in unleased)
        self._unleased_count = len(unleased)
        self.unleased_bytes = sum(chunk.size_bytes for chunk in unleased)

    def remove(self, chunk: Chunk, state: ChunkState) -> None:
        """Let a held chunk go.

        Args:
            chunk: One that is held.
            state: What it is from now on: USED_UP or GONE.
        """
        self.remove_many((chunk,), state)

    def remove_many(self, chunks: Iterable[Chunk], state: ChunkState) -> None:
        """Let several held chunks go, at less than the cost of removing each."""
        held, counts, remove = self._chunks, self._count_by_version, self._sampler.remove
        for chunk in chunks:
            version = chunk.version
            chunk.state = state
            del held[chunk.chunk_id]
            remove(chunk)
            if self._remover is not None:
                self._remover.remove(chunk)
            count = counts[version] - 1
            if count == 0:
                del counts[version]
            else:
                counts[version] = count
            self._arrived.remove(chunk)
            if chunk.lease_count == 0:
                self._remove_unleased(chunk)
        self._by_age.compact(len(held))
        self._by_version.compact(len(held))

    def clear(self) -> list[Chunk]:
        """Let all chunks go, GONE, at a fraction of the cost of removing each; by age."""
        gone = [self._chunks[chunk_id] for chunk_id in sorted(self._chunks)]
        for chunk in gone:
            chunk.state = ChunkState.GONE
        self._chunks.clear()
        self._count_by_version.clear()
        self._arrived.forget()
        for order in (self._by_age, self._unleased_by_age, self._by_version):
            order.replace(())
        self._unleased_count = 0
        self.unleased_bytes = 0
        self._sampler.clear()
        if self._remover is not None:
            self._remover.clear()
        return gone

    def add_leases(self, chunks: Iterable[Chunk]) -> None:
        """Count one more lease on each of several held chunks, on one as often as it is given."""
        for chunk in chunks:
            chunk.lease_count += 1
            if chunk.lease_count == 1:
                self._unleased_count -= 1
                self.unleased_bytes -= chunk.size_bytes
        self._unleased_by_age.compact(self._unleased_count)

    def end_lease(self, chunk: Chunk) -> None:
        """Count one lease less on a chunk, wherever it is."""
        chunk.lease_count -= 1
        if chunk.lease_count == 0 and chunk.state is ChunkState.HELD:
            self._add_unleased(chunk)

    def set_priority(self, chunk: Chunk, priority: float) -> None:
        """Give a held chunk another priority, or the same one again (B18)."""
        chunk.priority = priority
        self._sampler.update(chunk)
        if self._remover is not None:
            self._remover.update(chunk)

    def oldest(self) -> Chunk | None:
        """Give the held chunk that arrived first, None when none is held."""
        chunk_id = self._by_age.first()
        return None if chunk_id is None else self._chunks[chunk_id]

    def oldest_unleased(self) -> Chunk | None:
        """Return the first to arrive of the held chunks without a lease, or None if none."""
        chunk_id = self._unleased_by_age.first()
        return None if chunk_id is None else self._chunks[chunk_id]

    def first_to_leave(self, rng: random.Random) -> Chunk | None:
        """Return the held chunk that leaves first for room, or None if none is held."""
        if self._remover is None or not self._chunks:
            return self.oldest()
        (chunk_id,) = self._remover.draw(1, rng)
        return self._chunks[chunk_id]

    def first_unleased_to_leave(self, rng: random.Random) -> Chunk | None:
        """Return the chunk without a lease that leaves first for bytes, or None if none.

        O(chunks with a lease that would leave before it), but for the oldest first, which is O(1).
        """
        if self._remover is None or self._unleased_count == 0:
            return self.oldest_unleased()
        count = 1
        while True:
            for chunk_id in self._remover.draw(min(count, len(self._chunks)), rng):
                chunk = self._chunks[chunk_id]
                if chunk.lease_count == 0:
                    return chunk
            count *= 2

    def oldest_version(self) -> Chunk | None:
        """Give the held chunk of the lowest version, of those the first to arrive."""
        entry = self._by_version.first()
        return None if entry is None else self._chunks[entry[1]]

    def arrived_after(self, chunk_id: int) -> Iterator[ChunkId]:
        """Go through the held chunks that arrived after one, in that order; see `ArrivalOrder`."""
        return self._arrived.after(chunk_id)

    def behind(self, chunk_ids: Iterable[int]) -> dict[int, Behind]:
        """Count the held chunks after each of several, and their bytes; see `ArrivalOrder`."""
        return self._arrived.behind(chunk_ids)

    def smallest_bytes(self) -> int:
        """Bytes of the smallest held chunk, 0 when none is held; O(chunks held)."""
        return min((chunk.size_bytes for chunk in self._chunks.values()), default=0)

    def use_sampler(self, sampler: Sampler) -> None:
        """Draw with another sampler from now on; O(chunks held)."""
        for chunk_id in sorted(self._chunks):
            sampler.add(self._chunks[chunk_id])
        self._sampler = sampler

    def use_remover(self, remover: Sampler | None) -> None:
        """Let chunks leave by another one from now on; O(chunks held)."""
        if remover is not None:
            for chunk_id in sorted(self._chunks):
                remover.add(self._chunks[chunk_id])
        self._remover = remover

    def by_age(self) -> Iterable[Chunk]:
        """List the held chunks in order of arrival; O(chunks held)."""
        return [self._chunks[chunk_id] for chunk_id in sorted(self._chunks)]

    def count_by_version(self) -> dict[ModelVersion, int]:
        """Count the held chunks by version; O(versions)."""
        return dict(sorted(self._count_by_version.items()))

    def check_invariants(self) -> None:
        """Assert C1 to C3; O(chunks held)."""
        assert sorted(self._sampler.order()) == sorted(self._chunks), "C1: sampler and table"
        if self._remover is not None:
            assert sorted(self._remover.order()) == sorted(self._chunks), "C1: remover and table"
        unleased = [chunk for chunk in self._chunks.values() if chunk.lease_count == 0]
        for chunk_id, chunk in self._chunks.items():
            assert chunk.chunk_id == chunk_id, "C1: key"
            assert chunk.state is ChunkState.HELD, "C1: state"
            assert chunk.lease_count >= 0, "C3: lease count"
        assert self.unleased_bytes == sum(chunk.size_bytes for chunk in unleased), "C3: bytes"
        assert self._unleased_count == len(unleased), "C3: count"
        assert sum(self._count_by_version.values()) == len(self._chunks), "C1: versions"
        by_age = self._by_age.first_many(len(self._chunks) + 1)
        assert by_age == sorted(self._chunks), "C2: age order"
        by_version = self._by_version.first_many(len(self._chunks) + 1)
        expected = sorted((chunk.version, chunk.chunk_id) for chunk in self._chunks.values())
        assert by_version == expected, "C1: version order"
        by_age_unleased = self._unleased_by_age.first_many(len(self._chunks) + 1)
        assert by_age_unleased == sorted(chunk.chunk_id for chunk in unleased), "C2: unleased order"
        self._arrived.check_invariants()

    def _is_unleased(self, chunk_id: ChunkId) -> bool:
        chunk = self._chunks.get(chunk_id)
        return chunk is not None and chunk.lease_count == 0

    def _is_in_order(self, entry: tuple[ModelVersion, ChunkId]) -> bool:
        return entry[1] in self._chunks

    def _add_unleased(self, chunk: Chunk) -> None:
        self._unleased_count += 1
        self.unleased_bytes += chunk.size_bytes
        self._unleased_by_age.push(chunk.chunk_id)

    def _remove_unleased(self, chunk: Chunk) -> None:
        self._unleased_count -= 1
        self.unleased_bytes -= chunk.size_bytes
        self._unleased_by_age.compact(self._unleased_count)
