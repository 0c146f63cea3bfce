"""Grants, their leases, and what is remembered of both (B11, B12).

A grant is one draw for one request. Each rank of the request has a lease of its own on its equal
share; the grant lives while any of them does. Afterwards the request and its leases are remembered
for a while, so that a late repetition gets the true outcome instead of a second draw.

Invariants:

L1  A lease is in the expiry order if and only if it lives, and at its latest expiry only.
L2  A grant lives if and only if one of its leases does; only then it refers to chunks.
L3  A request is in exactly one of: living grants, ended grants, neither.
L4  Ended leases remembered are at most `requests_remembered_max`, or those of the last one ended.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from breadbox_server.core.model.events import LeaseEnd
from breadbox_server.core.model.ids import LeaseId, ModelVersion, RequestId, SessionId
from breadbox_server.core.model.inputs import GrantedFragment
from breadbox_server.core.model.lazy_heap import LazyHeap
from breadbox_server.core.state.chunks import Chunk


class GrantedChunk(NamedTuple):
    """A chunk as it was when it was granted."""

    chunk: Chunk
    staleness: int
    """In versions, at the grant."""
    use_count: int
    """Deliveries including this one."""
    priority: float
    """At the grant."""
    probability: float
    """How likely it was to be the first one drawn."""


class Lease:
    """A promise to one rank that its share stays readable."""

    __slots__ = ("end", "expires_at", "grant", "lease_id", "lease_s", "rank", "reported_count")

    def __init__(
        self, lease_id: LeaseId, grant: "Grant", rank: int, lease_s: float, expires_at: float
    ) -> None:
        self.lease_id = lease_id
        self.grant = grant
        self.rank = rank
        self.lease_s = lease_s
        """Its life from grant, and from a renewal that names no other."""
        self.expires_at = expires_at
        """While it lives: it is over at this instant."""
        self.end: LeaseEnd | None = None
        """How it ended; None while it lives."""
        self.reported_count = 0
        """Callers it was reported to; not part of a snapshot, where it counts as reported once."""

    @property
    def share(self) -> Sequence[GrantedChunk]:
        """Its chunks, in draw order; empty once the grant has ended."""
        chunks = self.grant.chunks
        size = len(chunks) // self.grant.world_size
        return chunks[self.rank * size : (self.rank + 1) * size]


class Grant:
    """What one request got, for all its ranks together."""

    __slots__ = (
        "chunks",
        "fragment_count",
        "leases",
        "live_count",
        "model_version",
        "population",
        "request_id",
        "session_id",
        "world_size",
    )

    def __init__(
        self,
        request_id: RequestId,
        fragment_count: int,
        world_size: int,
        *,
        session_id: SessionId,
        model_version: ModelVersion,
        population: int,
        chunks: tuple[GrantedChunk, ...],
    ) -> None:
        self.request_id = request_id
        self.fragment_count = fragment_count
        self.world_size = world_size
        self.session_id = session_id
        self.model_version = model_version
        """Current version at the grant."""
        self.population = population
        """Chunks held at the draw."""
        self.chunks = chunks
        """In draw order, rank 0's share first; empty once the grant has ended."""
        self.leases: list[Lease] = []
        """By rank."""
        self.live_count = 0
        """Leases that live."""


def granted_fragments(
    chunks: Iterable[GrantedChunk], population: int
) -> tuple[GrantedFragment, ...]:
    """List the fragments of granted chunks in the order in which they are handed out."""
    return tuple(
        [
            GrantedFragment(
                fragment,
                chunk.chunk_id,
                staleness,
                use_count,
                priority,
                probability,
                population,
            )
            for chunk, staleness, use_count, priority, probability in chunks
            for fragment in chunk.fragments
        ]
    )


class LeaseBook:
    """The leases and grants of a buffer, living and remembered."""

    def __init__(self) -> None:
        self._live_grants: dict[RequestId, Grant] = {}
        self._ended_grants: OrderedDict[RequestId, Grant] = OrderedDict()
        self._leases: dict[LeaseId, Lease] = {}
        self._by_expiry: LazyHeap[tuple[float, LeaseId]] = LazyHeap(self._is_in_order)
        self._remembered_count = 0
        self.live_count = 0
        """Leases that live."""

    def add(self, grant: Grant) -> None:
        """Enter a new grant with its leases, which all live."""
        self._live_grants[grant.request_id] = grant
        for lease in grant.leases:
            self._enter(lease)

    def find(self, lease_id: LeaseId) -> Lease | None:
        """Give a lease that lives or is remembered, else None."""
        return self._leases.get(lease_id)

    def find_grant(self, request_id: RequestId) -> Grant | None:
        """Give what a request got, if it lives or is remembered, else None."""
        return self._live_grants.get(request_id) or self._ended_grants.get(request_id)

    def latest_grant(self) -> Grant | None:
        """Return the living grant that was made last, or None if there is none to return.

        Where none lives, the grant that ended last counts, if a lease of it expired: its learner
        may not know.
        """
        ended = next(reversed(self._ended_grants.values()), None)
        if ended is not None and all(each.end is not LeaseEnd.EXPIRED for each in ended.leases):
            ended = None
        return next(reversed(self._live_grants.values()), ended)

    def renew(self, lease: Lease, expires_at: float) -> None:
        """Move the expiry of a living lease, forward or back."""
        lease.expires_at = expires_at
        self._by_expiry.push((expires_at, lease.lease_id))
        self._by_expiry.compact(self.live_count)

    def end(self, lease: Lease, end: LeaseEnd, remembered_max: int) -> None:
        """End a living lease, and its grant if it was the last; both are remembered for a while.

        The chunks of the share are the caller's to take care of, beforehand.
        """
        lease.end = end
        lease.grant.live_count -= 1
        self.live_count -= 1
        self._by_expiry.compact(self.live_count)
        if lease.grant.live_count == 0:
            self._end_grant(lease.grant, remembered_max)

    def forget(self, grant: Grant) -> None:
        """Erase a grant and its only lease as if they had never been; it must live."""
        del self._live_grants[grant.request_id]
        self.live_count -= len(grant.leases)
        self._erase_leases(grant)
        self._by_expiry.compact(self.live_count)

    def trim(self, remembered_max: int) -> None:
        """Forget the longest ended grants until no more leases are remembered than may be.

        A grant that alone has more leases than that is forgotten with the next one's end.
        """
        while self._remembered_count > remembered_max and len(self._ended_grants) > 1:
            _, oldest = self._ended_grants.popitem(last=False)
            self._remembered_count -= len(oldest.leases)
            self._erase_leases(oldest)

    def first_expiry(self) -> Lease | None:
        """Give the living lease that expires first, None when none lives."""
        entry = self._by_expiry.first()
        return None if entry is None else self._leases[entry[1]]

    def live_grants(self) -> Iterable[Grant]:
        """List the living grants, the oldest first."""
        return list(self._live_grants.values())

    def ended_grants(self) -> Iterable[Grant]:
        """List the remembered grants, the first to have ended first."""
        return list(self._ended_grants.values())

    def restore_live(self, grant: Grant) -> None:
        """Restore a living grant from a snapshot; some of its leases may have ended."""
        self._live_grants[grant.request_id] = grant
        for lease in grant.leases:
            if lease.end is None:
                self._enter(lease)
            else:
                self._leases[lease.lease_id] = lease

    def restore_ended(self, grant: Grant) -> None:
        """Remember an ended grant as a snapshot has it, behind those restored before."""
        self._remember(grant)

    def check_invariants(self, remembered_max: int) -> None:
        """Assert L1 to L4; O(leases)."""
        living = {key: lease for key, lease in self._leases.items() if lease.end is None}
        expected = sorted((lease.expires_at, key) for key, lease in living.items())
        assert self._by_expiry.first_many(len(living) + 1) == expected, "L1: expiry order"
        assert self.live_count == len(living), "L1: count"
        for grant in self._live_grants.values():
            live = [lease for lease in grant.leases if lease.end is None]
            assert live, "L2: a living grant without a lease"
            assert grant.live_count == len(live), "L2: count"
            assert len(grant.leases) == grant.world_size, "L2: a lease per rank"
            assert grant.request_id not in self._ended_grants, "L3: alive and ended"
        for grant in self._ended_grants.values():
            assert grant.live_count == 0, "L2: an ended grant with a living lease"
            assert not grant.chunks, "L2: an ended grant with chunks"
        remembered = sum(len(grant.leases) for grant in self._ended_grants.values())
        assert self._remembered_count == remembered, "L4: count"
        assert remembered <= remembered_max or len(self._ended_grants) == 1, "L4: limit"
        grants = [*self._live_grants.values(), *self._ended_grants.values()]
        assert len(self._leases) == sum(len(grant.leases) for grant in grants), "L3: leases"

    def _enter(self, lease: Lease) -> None:
        self._leases[lease.lease_id] = lease
        lease.grant.live_count += 1
        self.live_count += 1
        self._by_expiry.push((lease.expires_at, lease.lease_id))

    def _end_grant(self, grant: Grant, remembered_max: int) -> None:
        del self._live_grants[grant.request_id]
        self._remember(grant)
        self.trim(remembered_max)

    def _erase_leases(self, grant: Grant) -> None:
        """Forget a grant's leases, and break the circle of references between it and them.

        Else only a full garbage collection would free them, and the server avoids those.
        """
        for lease in grant.leases:
            del self._leases[lease.lease_id]
        grant.leases.clear()

    def _remember(self, grant: Grant) -> None:
        grant.chunks = ()
        self._ended_grants[grant.request_id] = grant
        self._remembered_count += len(grant.leases)
        for lease in grant.leases:
            self._leases[lease.lease_id] = lease

    def _is_in_order(self, entry: tuple[float, LeaseId]) -> bool:
        lease = self._leases.get(entry[1])
        return lease is not None and lease.end is None and lease.expires_at == entry[0]
