"""The chunks held for sampling: by arrival, by version, and ready to be drawn.

C1  A chunk is in the table if and only if its state is HELD, and then it is in the sampler, once,
    and in the remover, if there is one.
C2  A chunk's age is its id: given in order of arrival, and kept when it comes back.
C3  `unleased_bytes` is the bytes of the table's chunks without a lease.

Every operation costs O(1) or O(log n) per chunk that it adds, removes or returns; the orders are
heaps that drop what left when it surfaces (`lazy_heap`).
"""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from typing import Final, NamedTuple

from breadbox_server.core.model.ids import ChunkId, ModelVersion
from breadbox_server.core.model.inputs import Fragment
from breadbox_server.core.model.lazy_heap import WASTE_MIN, LazyHeap
from breadbox_server.core.samplers import Place, Sampler

BLOCK_BITS: Final = 8
"""Ids that differ below this bit are summed up together."""


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

    def __init__(
        self,
        chunk_id: ChunkId,
        fragments: tuple[Fragment, ...],
        *,
        by_newest: bool = False,
    ) -> None:
        """Count from each fragment's oldest step or, *by_newest*, from its newest (`stale_by`)."""
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
        if by_newest:
            version = min([fragment.model_version_max for fragment in fragments])
        self.version = version
        """Version of its stalest fragment (B4)."""
        self.size_bytes = size_bytes
        self.priority = priority
        """The largest of its fragments', until it is set to another one (B18)."""
        self.state = ChunkState.GONE
        self.use_count = 0
        """Deliveries that were not given back (B10)."""
        self.lease_count = 0
        self.unreadable_count = 0
        """Leases under which readers reported it unreadable."""
        self.sampler_position = 0

    @property
    def first(self) -> Fragment:
        """The first of its fragments."""
        return self.fragments[0]


class ReaderBacklog(NamedTuple):
    """Held chunks that a reader has not come to yet."""

    chunk_count: int
    size_bytes: int


class ArrivalOrder:
    """Held chunks in order of arrival, for readers that read on from a cursor.

    Ids are kept from the first read on, sums from the first question for one: a buffer without
    readers pays nothing. Ids that left are dropped when they are half of all. Call `add` and
    `remove` after single changes of `held`, else `forget`.
    """

    def __init__(self, held: Mapping[ChunkId, Chunk]) -> None:
        self._held = held
        self._ids: list[ChunkId] | None = None
        """Ascending ids, each once, with some that left, or None if there was no read yet."""
        self._blocks: dict[int, list[int]] | None = None
        """Count and bytes of what is held, by the block of ids, or None if never asked for."""

    def add(self, chunk: Chunk) -> None:
        """Add a chunk that is held from now on: O(1) for a new one, else a search and a move."""
        if self._blocks is not None:
            _count(self._blocks, chunk)
        ids, chunk_id = self._ids, chunk.chunk_id
        if ids is None:
            return
        if not ids or ids[-1] < chunk_id:
            ids.append(chunk_id)
            return
        place = bisect_left(ids, chunk_id)
        if ids[place] != chunk_id:
            ids.insert(place, chunk_id)

    def remove(self, chunk: Chunk) -> None:
        """Remove a chunk that is not held any more; O(1) amortised."""
        if self._blocks is not None:
            number = chunk.chunk_id >> BLOCK_BITS
            block = self._blocks[number]
            block[0] -= 1
            block[1] -= chunk.size_bytes
            if not block[0]:
                del self._blocks[number]
        if self._ids is not None and len(self._ids) > 2 * len(self._held) + WASTE_MIN:
            self._ids = list(filter(self._held.__contains__, self._ids))

    def forget(self) -> None:
        """Drop the ids, to be listed anew: chunks came or left without a call here."""
        self._ids = self._blocks = None

    def after(self, chunk_id: int) -> Iterator[ChunkId]:
        """Go through the held chunks after one, ascending; not to be held over a change."""
        if self._ids is None:
            self._ids = sorted(self._held)
        ids = self._ids
        for place in range(bisect_right(ids, chunk_id), len(ids)):
            if ids[place] in self._held:
                yield ids[place]

    def backlogs(self, chunk_ids: Iterable[int]) -> dict[int, ReaderBacklog]:
        """Count the held chunks after each of several, and their bytes, in blocks of 256 ids."""
        if self._blocks is None:
            self._blocks = {}
            for chunk in self._held.values():
                _count(self._blocks, chunk)
        numbers = sorted(self._blocks)
        found: dict[int, ReaderBacklog] = {}
        whole_count, whole_bytes = 0, 0
        for chunk_id in sorted(set(chunk_ids), reverse=True):
            number = (chunk_id + 1) >> BLOCK_BITS
            while numbers and numbers[-1] > number:
                count, size_bytes = self._blocks[numbers.pop()]
                whole_count += count
                whole_bytes += size_bytes
            held = self._held
            ids = range(chunk_id + 1, (number + 1) << BLOCK_BITS) if number in self._blocks else ()
            part = [held[ChunkId(each)].size_bytes for each in ids if each in held]
            found[chunk_id] = ReaderBacklog(whole_count + len(part), whole_bytes + sum(part))
        return found

    def check_invariants(self) -> None:
        """Assert that order and sums are those of what is held; O(held)."""
        held = sorted(self._held)
        assert list(self.after(-1)) == held, "order of arrival"
        for start in (0, len(held) // 2, len(held)):
            after = held[start - 1] if start else -1
            sizes = [self._held[chunk_id].size_bytes for chunk_id in held[start:]]
            assert self.backlogs([after]) == {after: (len(sizes), sum(sizes))}, "sums of arrivals"


def _count(blocks: dict[int, list[int]], chunk: Chunk) -> None:
    block = blocks.setdefault(chunk.chunk_id >> BLOCK_BITS, [0, 0])
    block[0] += 1
    block[1] += chunk.size_bytes


class ChunkTable:
    """The chunks that may be drawn."""

    def __init__(self, sampler: Sampler, remover: Sampler | None = None) -> None:
        self.held: dict[ChunkId, Chunk] = {}
        """The chunks, by id; for looks only."""
        self.sampler = sampler
        self.remover = remover
        """Says which chunks leave for room, or None if the oldest do."""
        self.arrived = ArrivalOrder(self.held)
        self._by_age: LazyHeap[ChunkId] = LazyHeap(self.held.__contains__)
        self._unleased: LazyHeap[Place] = LazyHeap(self._is_unleased)
        """Places of the chunks without a lease, as they leave; by age where chance decides."""
        self._by_version: LazyHeap[tuple[ModelVersion, ChunkId]] = LazyHeap(
            lambda entry: entry[1] in self.held
        )
        self.count_by_version: dict[ModelVersion, int] = {}
        self._unleased_count = 0
        self.unleased_bytes = 0

    def add(self, chunk: Chunk) -> None:
        """Hold a chunk, at the age that its id gives it."""
        chunk.state = ChunkState.HELD
        self.held[chunk.chunk_id] = chunk
        self.sampler.add(chunk)
        if self.remover is not None:
            self.remover.add(chunk)
        self.arrived.add(chunk)
        self._by_age.push(chunk.chunk_id)
        self._by_version.push((chunk.version, chunk.chunk_id))
        self.count_by_version[chunk.version] = self.count_by_version.get(chunk.version, 0) + 1
        if chunk.lease_count == 0:
            self.add_unleased(chunk)

    def add_many(
        self, chunks: Sequence[Chunk], removed_in: Iterable[ChunkId] | None = None
    ) -> None:
        """Hold new chunks, in the sampler's order, at half the cost of `add` for each.

        `removed_in`: the same in the remover's order, None if equal.
        """
        held, counts, add = self.held, self.count_by_version, self.sampler.add
        push_age, push_version = self._by_age.push, self._by_version.push
        unleased: list[Chunk] = []
        for chunk in chunks:
            chunk_id, version = chunk.chunk_id, chunk.version
            chunk.state = ChunkState.HELD
            held[chunk_id] = chunk
            add(chunk)
            push_age(chunk_id)
            push_version((version, chunk_id))
            counts[version] = counts.get(version, 0) + 1
            if chunk.lease_count == 0:
                unleased.append(chunk)
        if self.remover is not None:
            for chunk in chunks if removed_in is None else [held[each] for each in removed_in]:
                self.remover.add(chunk)
        for chunk in unleased:
            self.add_unleased(chunk)
        self.arrived.forget()

    def remove_many(self, chunks: Iterable[Chunk], state: ChunkState) -> None:
        """Remove held chunks, as USED_UP or GONE, at less than the cost of removing each."""
        held, counts, remove = self.held, self.count_by_version, self.sampler.remove
        for chunk in chunks:
            version = chunk.version
            chunk.state = state
            del held[chunk.chunk_id]
            remove(chunk)
            if self.remover is not None:
                self.remover.remove(chunk)
            count = counts[version] - 1
            if count == 0:
                del counts[version]
            else:
                counts[version] = count
            self.arrived.remove(chunk)
            if chunk.lease_count == 0:
                self._unleased_count -= 1
                self.unleased_bytes -= chunk.size_bytes
                self._unleased.compact(self._unleased_count)
        self._by_age.compact(len(held))
        self._by_version.compact(len(held))

    def clear(self) -> list[Chunk]:
        """Remove all chunks, as GONE, at a fraction of the cost of removing each; by age."""
        gone = self.by_age()
        for chunk in gone:
            chunk.state = ChunkState.GONE
        self.held.clear()
        self.count_by_version.clear()
        self.arrived.forget()
        for order in (self._by_age, self._unleased, self._by_version):
            order.replace(())
        self._unleased_count = 0
        self.unleased_bytes = 0
        self.sampler.clear()
        if self.remover is not None:
            self.remover.clear()
        return gone

    def add_leases(self, chunks: Iterable[Chunk]) -> None:
        """Count one more lease on each of several held chunks, on one as often as it is given."""
        for chunk in chunks:
            chunk.lease_count += 1
            if chunk.lease_count == 1:
                self._unleased_count -= 1
                self.unleased_bytes -= chunk.size_bytes
        self._unleased.compact(self._unleased_count)

    def add_unleased(self, chunk: Chunk) -> None:
        """Take note that no lease refers to a held chunk."""
        self._unleased_count += 1
        self.unleased_bytes += chunk.size_bytes
        # Without a call in the usual case: every append comes here.
        place = (chunk.chunk_id,) if self.remover is None else self._place_of(chunk)
        self._unleased.push(place)

    def set_priority(self, chunk: Chunk, priority: float) -> None:
        """Give a held chunk another priority, or the same one again (B18)."""
        chunk.priority = priority
        self.sampler.update(chunk)
        if self.remover is not None:
            self.remover.update(chunk)
            if chunk.lease_count == 0:
                self._unleased.push(self._place_of(chunk))
                self._unleased.compact(self._unleased_count)

    def oldest(self) -> Chunk | None:
        """Return the held chunk that arrived first, or None if none is held."""
        chunk_id = self._by_age.first()
        return None if chunk_id is None else self.held[chunk_id]

    def first_to_leave(self, rng: random.Random) -> Chunk | None:
        """Return the held chunk that leaves first for room, or None if none is held."""
        if self.remover is None or not self.held:
            return self.oldest()
        (chunk_id,) = self.remover.draw(1, rng)
        return self.held[chunk_id]

    def first_unleased_to_leave(self, rng: random.Random) -> Chunk | None:
        """Return the unleased chunk to leave first for bytes, or None.

        Where chance decides, O(leased ones that it draws before).
        """
        first = self._unleased.first()
        if first is None:
            return None
        chunk = self.held[first[-1]]
        if self.remover is None or self.remover.place_of(chunk) is not None:
            return chunk
        count = 1
        while True:
            for chunk_id in self.remover.draw(min(count, len(self.held)), rng):
                chunk = self.held[chunk_id]
                if chunk.lease_count == 0:
                    return chunk
            count *= 2

    def oldest_version(self) -> Chunk | None:
        """Give the held chunk of the lowest version, of those the first to arrive."""
        entry = self._by_version.first()
        return None if entry is None else self.held[entry[1]]

    def newest_drawn(self, count: int) -> ModelVersion:
        """Return the highest of the *count* lowest versions held; O(versions)."""
        versions = sorted(self.count_by_version.items())
        counts = accumulate([each for _, each in versions])
        return next(
            version for (version, _), until in zip(versions, counts, strict=True) if until >= count
        )

    def smallest_bytes(self) -> int:
        """Bytes of the smallest held chunk, 0 when none is held; O(chunks held)."""
        return min((chunk.size_bytes for chunk in self.held.values()), default=0)

    def use_sampler(self, sampler: Sampler) -> None:
        """Draw with another sampler from now on; O(chunks held)."""
        for chunk in self.by_age():
            sampler.add(chunk)
        self.sampler = sampler

    def use_remover(self, remover: Sampler | None) -> None:
        """Let chunks leave by another one from now on; O(chunks held)."""
        if remover is not None:
            for chunk in self.by_age():
                remover.add(chunk)
        self.remover = remover
        unleased = [chunk for chunk in self.held.values() if chunk.lease_count == 0]
        self._unleased.replace(map(self._place_of, unleased))

    def by_age(self) -> list[Chunk]:
        """List the held chunks in order of arrival; O(chunks held)."""
        return [self.held[chunk_id] for chunk_id in sorted(self.held)]

    def check_invariants(self) -> None:
        """Assert C1 to C3; O(chunks held)."""
        assert sorted(self.sampler.order()) == sorted(self.held), "C1: sampler and table"
        if self.remover is not None:
            assert sorted(self.remover.order()) == sorted(self.held), "C1: remover and table"
        unleased = [chunk for chunk in self.held.values() if chunk.lease_count == 0]
        for chunk_id, chunk in self.held.items():
            assert chunk.chunk_id == chunk_id, "C1: key"
            assert chunk.state is ChunkState.HELD, "C1: state"
            assert chunk.lease_count >= 0, "C3: lease count"
        assert self.unleased_bytes == sum(chunk.size_bytes for chunk in unleased), "C3: bytes"
        assert self._unleased_count == len(unleased), "C3: count"
        assert sum(self.count_by_version.values()) == len(self.held), "C1: versions"
        by_age = self._by_age.first_many(len(self.held) + 1)
        assert by_age == sorted(self.held), "C2: age order"
        by_version = self._by_version.first_many(len(self.held) + 1)
        expected = sorted((chunk.version, chunk.chunk_id) for chunk in self.held.values())
        assert by_version == expected, "C1: version order"
        leaving = self._unleased.first_many(len(self.held) + 1)
        assert leaving == sorted(map(self._place_of, unleased)), "C2: order of the unleased"
        self.arrived.check_invariants()

    def _place_of(self, chunk: Chunk) -> Place:
        place = None if self.remover is None else self.remover.place_of(chunk)
        return (chunk.chunk_id,) if place is None else place

    def _is_unleased(self, place: Place) -> bool:
        chunk = self.held.get(place[-1])
        if chunk is None or chunk.lease_count:
            return False
        return self.remover is None or self._place_of(chunk) == place
