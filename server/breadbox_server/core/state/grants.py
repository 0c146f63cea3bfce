"""Fetches that wait (B8), grants, their leases, and what is remembered of both (B11, B12).

A grant is one draw for one request; each rank has a lease on its equal share. Ended ones are
remembered, so that a late repetition gets the true outcome instead of a second draw.

L1  A lease is in the expiry order if and only if it lives, and at its latest expiry only.
L2  A grant lives if and only if one of its leases does; only then it refers to chunks.
L3  A request is in exactly one of: living grants, ended grants, neither.
L4  Ended leases remembered are at most `requests_remembered_max`, or those of the last one ended.
W1  A waiter has at least one caller, and leaves with its last one without a trace.
W2  Waiters stand in order of their first caller's arrival; only the head is ever granted.
W3  A caller belongs to one waiter and has one deadline.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from breadbox_server.core.model.events import LeaseEnd
from breadbox_server.core.model.ids import CallerId, LeaseId, ModelVersion, RequestId, SessionId
from breadbox_server.core.model.inputs import GrantedFragment
from breadbox_server.core.model.lazy_heap import LazyHeap
from breadbox_server.core.state.chunks import Chunk

RETRIES_MAX = 64
"""Callers that a waiter may have beyond one per rank; a client that sends more is broken."""


class GrantedChunk(NamedTuple):
    """A chunk as it was when it was granted."""

    chunk: Chunk
    staleness: int
    """In versions, at the grant."""
    use_count: int
    """Deliveries including this one."""
    priority: float
    probability: float
    """How likely it was to be the first one drawn."""


@dataclass(slots=True, eq=False)
class Lease:
    """A promise to one rank that its share stays readable."""

    lease_id: LeaseId
    grant: "Grant"
    rank: int
    lease_s: float
    """Its life from grant, and from a renewal that names no other."""
    expires_at: float
    """While it lives: it is over at this instant."""
    end: LeaseEnd | None = None
    reported_count: int = 0
    """Callers it was reported to; not part of a snapshot, where it counts as reported once."""

    @property
    def share(self) -> Sequence[GrantedChunk]:
        """Its chunks, in draw order; empty once the grant has ended."""
        chunks = self.grant.chunks
        size = len(chunks) // self.grant.world_size
        return chunks[self.rank * size : (self.rank + 1) * size]


@dataclass(slots=True, eq=False)
class Grant:
    """What one request got, for all its ranks together."""

    request_id: RequestId
    fragment_count: int
    world_size: int
    session_id: SessionId
    model_version: ModelVersion
    """Current version at the grant."""
    population: int
    chunks: tuple[GrantedChunk, ...]
    """In draw order, rank 0's share first; empty once the grant has ended."""
    leases: list[Lease] = field(default_factory=list)
    """By rank."""
    live_count: int = 0
    _step_counts: tuple[tuple[int, ...], ...] | None = None

    def step_counts(self) -> tuple[tuple[int, ...], ...]:
        """Return the steps of each fragment, by rank, or nothing if all shares are alike."""
        if self._step_counts is None:  # Once for all ranks.
            shares = [
                tuple(
                    [
                        each.step_count
                        for part in lease.share
                        for each in part.chunk.fragments
                        if not each.part
                    ]
                )
                for lease in self.leases
            ]
            self._step_counts = tuple(shares) if len(set(shares)) > 1 else ()
        return self._step_counts


def granted_fragments(
    chunks: Iterable[GrantedChunk], population: int
) -> tuple[GrantedFragment, ...]:
    """List the fragments of granted chunks in the order in which they are handed out."""
    return tuple(
        [
            GrantedFragment(
                fragment, chunk.chunk_id, staleness, use_count, priority, probability, population
            )
            for chunk, staleness, use_count, priority, probability in chunks
            for fragment in chunk.fragments
        ]
    )


class LeaseBook:
    """The leases and grants of a buffer, living and remembered."""

    def __init__(self) -> None:
        self.live_grants: dict[RequestId, Grant] = {}
        """The living grants, the oldest first."""
        self.ended_grants: OrderedDict[RequestId, Grant] = OrderedDict()
        """The grants remembered, the first to have ended first."""
        self.leases: dict[LeaseId, Lease] = {}
        self._by_expiry: LazyHeap[tuple[float, LeaseId]] = LazyHeap(self._is_in_order)
        self._remembered_count = 0
        self.live_count = 0

    def add(self, grant: Grant) -> None:
        """Enter a living grant with its leases; of a restored one some may have ended."""
        self.live_grants[grant.request_id] = grant
        for lease in grant.leases:
            self.leases[lease.lease_id] = lease
            if lease.end is None:
                grant.live_count += 1
                self.live_count += 1
                self._by_expiry.push((lease.expires_at, lease.lease_id))

    def find_grant(self, request_id: RequestId) -> Grant | None:
        """Return what a request got, or None if that is neither alive nor remembered."""
        return self.live_grants.get(request_id) or self.ended_grants.get(request_id)

    def latest_grant(self) -> Grant | None:
        """Return the living grant made last, or else one that ended last by expiry, or None.

        The learner may not know of that expiry.
        """
        ended = next(reversed(self.ended_grants.values()), None)
        if ended is not None and all(each.end is not LeaseEnd.EXPIRED for each in ended.leases):
            ended = None
        return next(reversed(self.live_grants.values()), ended)

    def renew(self, lease: Lease, expires_at: float) -> None:
        """Move the expiry of a living lease, forward or back."""
        lease.expires_at = expires_at
        self._by_expiry.push((expires_at, lease.lease_id))
        self._by_expiry.compact(self.live_count)

    def end(self, lease: Lease, end: LeaseEnd, remembered_max: int) -> None:
        """End a living lease, and its grant after the last; the caller sees to the chunks first."""
        lease.end = end
        lease.grant.live_count -= 1
        self.live_count -= 1
        self._by_expiry.compact(self.live_count)
        if lease.grant.live_count == 0:
            del self.live_grants[lease.grant.request_id]
            self.remember(lease.grant)
            self.trim(remembered_max)

    def forget(self, grant: Grant) -> None:
        """Erase a grant and its only lease as if they had never been; it must live."""
        del self.live_grants[grant.request_id]
        self.live_count -= len(grant.leases)
        self._erase_leases(grant)
        self._by_expiry.compact(self.live_count)

    def trim(self, remembered_max: int) -> None:
        """Forget the longest ended grants until few enough leases remain; keep the newest."""
        while self._remembered_count > remembered_max and len(self.ended_grants) > 1:
            _, oldest = self.ended_grants.popitem(last=False)
            self._remembered_count -= len(oldest.leases)
            self._erase_leases(oldest)

    def first_expiry(self) -> Lease | None:
        """Return the living lease that expires first, or None if none lives."""
        entry = self._by_expiry.first()
        return None if entry is None else self.leases[entry[1]]

    def remember(self, grant: Grant) -> None:
        """Remember a grant that has ended, behind those remembered before."""
        grant.chunks = ()
        self.ended_grants[grant.request_id] = grant
        self._remembered_count += len(grant.leases)
        for lease in grant.leases:
            self.leases[lease.lease_id] = lease

    def check_invariants(self, remembered_max: int) -> None:
        """Assert L1 to L4; O(leases)."""
        living = {key: lease for key, lease in self.leases.items() if lease.end is None}
        expected = sorted((lease.expires_at, key) for key, lease in living.items())
        assert self._by_expiry.first_many(len(living) + 1) == expected, "L1: expiry order"
        assert self.live_count == len(living), "L1: count"
        for grant in self.live_grants.values():
            live = [lease for lease in grant.leases if lease.end is None]
            assert live, "L2: a living grant without a lease"
            assert grant.live_count == len(live), "L2: count"
            assert len(grant.leases) == grant.world_size, "L2: a lease per rank"
            assert grant.request_id not in self.ended_grants, "L3: alive and ended"
        for grant in self.ended_grants.values():
            assert grant.live_count == 0, "L2: an ended grant with a living lease"
            assert not grant.chunks, "L2: an ended grant with chunks"
        remembered = sum(len(grant.leases) for grant in self.ended_grants.values())
        assert self._remembered_count == remembered, "L4: count"
        assert remembered <= remembered_max or len(self.ended_grants) == 1, "L4: limit"
        grants = [*self.live_grants.values(), *self.ended_grants.values()]
        assert len(self.leases) == sum(len(grant.leases) for grant in grants), "L3: leases"

    def _erase_leases(self, grant: Grant) -> None:
        """Forget a grant's leases, and break the reference circle: full collections are rare."""
        for lease in grant.leases:
            del self.leases[lease.lease_id]
        grant.leases.clear()

    def _is_in_order(self, entry: tuple[float, LeaseId]) -> bool:
        lease = self.leases.get(entry[1])
        return lease is not None and lease.end is None and lease.expires_at == entry[0]


@dataclass(slots=True, eq=False)
class Caller:
    """A caller that waits for the outcome: a rank, or a retry of one."""

    caller_id: CallerId
    rank: int
    lease_s: float | None
    """Life of its lease, or None for the buffer's `lease_s`."""
    asked_at: float
    deadline_at: float


@dataclass(slots=True, eq=False)
class Waiter:
    """One request, with all its callers."""

    request_id: RequestId
    fragment_count: int
    world_size: int
    callers: dict[CallerId, Caller] = field(default_factory=dict)
    """In order of arrival."""


class WaiterQueue:
    """The waiters of a buffer."""

    def __init__(self) -> None:
        self.waiters: OrderedDict[RequestId, Waiter] = OrderedDict()
        self._request_of: dict[CallerId, RequestId] = {}
        self._by_deadline: LazyHeap[tuple[float, CallerId]] = LazyHeap(
            lambda entry: entry[1] in self._request_of
        )

    def head(self) -> Waiter | None:
        """Return the first request in the queue, or None if none waits."""
        return next(iter(self.waiters.values())) if self.waiters else None

    def add(self, waiter: Waiter, caller: Caller) -> None:
        """Let a caller wait with its request, which goes to the end if it did not wait yet."""
        self.waiters.setdefault(waiter.request_id, waiter)
        waiter.callers[caller.caller_id] = caller
        self._request_of[caller.caller_id] = waiter.request_id
        self._by_deadline.push((caller.deadline_at, caller.caller_id))

    def __contains__(self, caller_id: CallerId) -> bool:
        return caller_id in self._request_of

    def waiter_of(self, caller_id: CallerId) -> Waiter:
        """Return the waiter of a caller that waits."""
        return self.waiters[self._request_of[caller_id]]

    def remove_caller(self, caller_id: CallerId) -> Caller:
        """Remove and return a waiting caller, and its waiter with the last caller (W1)."""
        waiter = self.waiter_of(caller_id)
        del self._request_of[caller_id]
        caller = waiter.callers.pop(caller_id)
        if not waiter.callers:
            del self.waiters[waiter.request_id]
        self._by_deadline.compact(len(self._request_of))
        return caller

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter with all its callers, which the waiter still lists."""
        del self.waiters[waiter.request_id]
        for caller_id in waiter.callers:
            del self._request_of[caller_id]
        self._by_deadline.compact(len(self._request_of))

    def first_deadline(self) -> tuple[float, CallerId] | None:
        """Return the earliest deadline and its caller, of several the first to have come."""
        return self._by_deadline.first()

    def check_invariants(self) -> None:
        """Assert W1 to W3; O(callers)."""
        callers: dict[CallerId, RequestId] = {}
        for request_id, waiter in self.waiters.items():
            assert waiter.request_id == request_id, "W2: key"
            assert waiter.callers, "W1: a waiter without callers"
            for caller_id in waiter.callers:
                assert caller_id not in callers, "W3: a caller with two waiters"
                callers[caller_id] = request_id
        assert callers == self._request_of, "W3: callers"
        deadlines = self._by_deadline.first_many(len(callers) + 1)
        assert sorted(caller_id for _, caller_id in deadlines) == sorted(callers), "W3: deadlines"
