"""Named cursors of readers, and what retaining ones keep for them (B17).

N1  A cursor moves forward only, and never beyond the newest chunk.
N2  A chunk is RETAINED if and only if it has left the table for its uses or its version, no lease
    can bring it back, and a retaining subscription has not passed it, nor has it been let go since.
N3  `unleased_bytes` is the bytes of the retained chunks to which no lease refers.
N4  Those that retain stand in the order of their cursors.

A chunk that leaves the table costs the same however many subscriptions there are; one that is
missed, a logarithm of how many.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

from breadbox_server.core.model.counters import Counters
from breadbox_server.core.model.errors import (
    SubscriptionExistsError,
    SubscriptionNotFoundError,
    SubscriptionsFullError,
)
from breadbox_server.core.model.ids import ChunkId, SessionId, SubscriptionName
from breadbox_server.core.model.lazy_heap import LazyHeap
from breadbox_server.core.state.chunks import ArrivalOrder, Chunk, ChunkState
from breadbox_server.core.state.payloads import PayloadLedger

SUBSCRIPTIONS_MAX: Final = 256
"""Most subscriptions of one buffer."""


@dataclass(slots=True)
class Subscription:
    """A named cursor of a reader, which the buffer keeps."""

    name: SubscriptionName
    is_retaining: bool
    """Whether chunks that leave the sampler are kept until it has passed them."""
    cursor: int
    """The chunk up to which its reader has acknowledged; -1: none."""
    missed_count: int
    """Chunks that a retaining one lost: gone before it had passed them; as `all` returns it."""


class Subscriptions:
    """The subscriptions of one buffer, and the chunks out of the table that are kept for them."""

    def __init__(self, payloads: PayloadLedger, counters: Counters) -> None:
        self._payloads = payloads
        self._counters = counters
        self._by_name: dict[SubscriptionName, Subscription] = {}
        self._retaining: list[Subscription] = []
        """Those that retain, the one that is farthest behind first."""
        self._retaining_cursors: list[int] = []
        self._retaining_min: float = inf
        """The first of these; inf: there is none."""
        self._missed_by_first: Counter[int] = Counter()
        """Chunks that the first so many of them missed, for `_settle` to count for each."""
        self.left: dict[ChunkId, Chunk] = {}
        """Chunks of the session, out of the table, that are retained, or used up and leased."""
        self.arrived = ArrivalOrder(self.left)
        self._unleased: LazyHeap[ChunkId] = LazyHeap(self._is_unleased)
        self.retained_count = 0
        self.unleased_bytes = 0

    def all(self) -> tuple[Subscription, ...]:
        """List the subscriptions, by name."""
        self._settle()
        return tuple([self._by_name[name] for name in sorted(self._by_name)])

    def __getitem__(self, name: SubscriptionName) -> Subscription:
        found = self._by_name.get(name)
        if found is None:
            raise SubscriptionNotFoundError(name)
        return found

    def add(self, subscription: Subscription) -> bool:
        """Add a subscription, and return whether it was not there; the limits are checked."""
        found = self._by_name.get(subscription.name)
        if found is not None:
            if found.is_retaining != subscription.is_retaining:
                raise SubscriptionExistsError(subscription.name, found.is_retaining)
            return False
        if len(self._by_name) >= SUBSCRIPTIONS_MAX:
            raise SubscriptionsFullError(SUBSCRIPTIONS_MAX)
        self._by_name[subscription.name] = subscription
        self._line_up()
        return True

    def remove(self, name: SubscriptionName) -> None:
        """Delete a subscription, and let go of the chunks that no other has to pass."""
        del self._by_name[self[name].name]
        self._let_passed_go()

    def acknowledge(self, name: SubscriptionName, chunk_id: int) -> None:
        """Move a cursor forward, and let go of the chunks that no other has to pass."""
        moved = self[name]
        if moved.is_retaining:
            self._settle()
        moved.cursor = chunk_id
        if moved.is_retaining:
            self._let_passed_go()

    def wants(self, chunk: Chunk) -> bool:
        """Whether a retaining subscription has not passed a chunk."""
        return chunk.chunk_id > self._retaining_min

    def _line_up(self) -> None:
        self._settle()
        retaining = [each for each in self._by_name.values() if each.is_retaining]
        self._retaining = sorted(retaining, key=lambda each: each.cursor)
        self._retaining_cursors = [each.cursor for each in self._retaining]
        self._retaining_min = self._retaining_cursors[0] if self._retaining else inf

    def _settle(self) -> None:
        """Count what each subscription missed since the last call; call before a cursor moves."""
        missed = 0
        if self._missed_by_first:
            for place in reversed(range(len(self._retaining))):
                missed += self._missed_by_first[place + 1]
                self._retaining[place].missed_count += missed
            self._missed_by_first.clear()

    def _let_passed_go(self) -> None:
        before = self._retaining_min
        self._line_up()
        # What is retained was wanted until now: it all stands behind the cursor of before.
        unwanted = self._retaining_min > before
        passed = []
        for chunk_id in self.arrived.after(int(before)) if unwanted else ():
            if chunk_id > self._retaining_min:
                break
            if self.left[chunk_id].state is ChunkState.RETAINED:
                passed.append(self.left[chunk_id])
        for chunk in passed:
            self._let_go(chunk)

    def hold_used_up(self, chunk: Chunk) -> None:
        """Keep a leased chunk readable that has left the table because its uses were used up."""
        self.left[chunk.chunk_id] = chunk
        self.arrived.add(chunk)

    def take_back(self, chunk: Chunk) -> bool:
        """Stop keeping a chunk that has left the table; return whether readers could read it."""
        is_known = self.left.pop(chunk.chunk_id, None) is not None
        if is_known:
            self.arrived.remove(chunk)
        return is_known

    def by_age(self) -> list[Chunk]:
        """List the chunks out of the table that can be read."""
        return [self.left[chunk_id] for chunk_id in sorted(self.left)]

    def retain(self, chunk: Chunk) -> None:
        """Keep a chunk that has left the table for good, until it is passed or lost."""
        chunk.state = ChunkState.RETAINED
        self.hold_used_up(chunk)
        self.retained_count += 1
        if chunk.lease_count == 0:
            self.add_unleased(chunk)

    def lose(self, chunk: Chunk) -> None:
        """Give up a retained chunk that some subscription has not passed."""
        self._let_go(chunk)
        self.miss(chunk)

    def _let_go(self, chunk: Chunk) -> None:
        chunk.state = ChunkState.GONE
        self.retained_count -= 1
        self.take_back(chunk)
        if chunk.lease_count == 0:
            self.unleased_bytes -= chunk.size_bytes
            self._payloads.dispose(chunk.fragments)
        self._unleased.compact(self.retained_count)

    def add_unleased(self, chunk: Chunk) -> None:
        """Take note that no lease refers to a retained chunk any more."""
        self.unleased_bytes += chunk.size_bytes
        self._unleased.push(chunk.chunk_id)

    def miss(self, chunk: Chunk) -> None:
        """Count a chunk that is gone before every retaining subscription has passed it."""
        self._counters["chunks_missed"] += 1
        self._missed_by_first[bisect_left(self._retaining_cursors, chunk.chunk_id)] += 1

    def lose_oldest_unleased(self) -> bool:
        """Give up the oldest retained chunk without a lease; return whether there was one."""
        chunk_id = self._unleased.first()
        if chunk_id is not None:
            self.lose(self.left[chunk_id])
        return chunk_id is not None

    def retained(self) -> list[Chunk]:
        """List the retained chunks, by age."""
        return [chunk for chunk in self.by_age() if chunk.state is ChunkState.RETAINED]

    def restore(
        self, subscriptions: Iterable[Subscription], chunks: Iterable[Chunk], session_id: SessionId
    ) -> None:
        """Take subscriptions as a snapshot has them, and the chunks that they can read."""
        for each in subscriptions:
            self._by_name[each.name] = each
        self._line_up()
        for chunk in chunks:
            if chunk.state is ChunkState.RETAINED:
                self.retain(chunk)
            elif chunk.state is ChunkState.USED_UP and chunk.fragments[0].session_id == session_id:
                self.hold_used_up(chunk)

    def check_invariants(self, newest: int) -> None:
        """Assert N1 to N4; O(chunks out of the table)."""
        for each in self._by_name.values():
            assert -1 <= each.cursor <= newest, "N1: cursor"
        cursors = sorted(each.cursor for each in self._by_name.values() if each.is_retaining)
        assert self._retaining_cursors == cursors, "N4: order"
        retained = self.retained()
        for chunk in retained:
            assert self.wants(chunk), "N2: retained for nobody"
        assert self.retained_count == len(retained), "N2: count"
        unleased = [chunk for chunk in retained if chunk.lease_count == 0]
        assert self.unleased_bytes == sum(chunk.size_bytes for chunk in unleased), "N3: bytes"
        self.arrived.check_invariants()
        for chunk in self.left.values():
            is_leased = chunk.state is ChunkState.USED_UP and chunk.lease_count > 0
            assert is_leased or chunk.state is ChunkState.RETAINED, "N2: state"

    def _is_unleased(self, chunk_id: ChunkId) -> bool:
        chunk = self.left.get(chunk_id)
        return chunk is not None and chunk.lease_count == 0 and chunk.state is ChunkState.RETAINED
