"""Leases: what a grant does to a buffer, and how its leases are renewed and ended (B10 to B12)."""

from collections.abc import Iterator

from breadbox_server.core.model import inputs
from breadbox_server.core.model.config import LeaseExpiryPolicy, check_duration
from breadbox_server.core.model.entries import GrantMade, ReplayError
from breadbox_server.core.model.errors import LeaseNotFoundError
from breadbox_server.core.model.events import FetchGranted, LeaseEnd, LeaseEnded
from breadbox_server.core.model.ids import CallerId, LeaseId
from breadbox_server.core.model.inputs import ReleaseMode
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.chunks import Chunk, ChunkState
from breadbox_server.core.state.counters import LEASES_ENDED
from breadbox_server.core.state.leases import Grant, GrantedChunk, Lease, granted_fragments

_LEFT = (ChunkState.GONE, ChunkState.RETAINED)
"""What a chunk is that was evicted before its lease ended."""


class Leasing:
    """Begins and ends the leases of a buffer. Serves nobody: that is for `Fetching`, afterwards.

    Args:
        state: Of the buffer.
    """

    def __init__(self, state: BufferState) -> None:
        self._state = state

    def replay(self, made: GrantMade, *, now: float) -> Grant:
        """Make a grant once more, as it was written down.

        Raises:
            ReplayError: It does not fit the state.
        """
        table = self._state.holdings.table
        unknown = [chunk_id for chunk_id in made.chunk_ids if chunk_id not in table]
        if unknown:
            raise ReplayError(f"chunk {unknown[0]} was granted, and is not held")
        if not made.world_size == len(made.lease_ids) == len(made.leases_s):
            raise ReplayError(f"a grant for {made.world_size} ranks has not as many leases")
        return self.carry_out(made, now=now)

    def carry_out(self, made: GrantMade, *, now: float) -> Grant:
        """Apply a drawn grant to the buffer: count uses, begin leases; report to no caller.

        Its chunks are held.
        """
        state = self._state
        version = state.model.version
        assert version is not None, "I2: chunks are held without a session"
        state.draw_count += 1
        table, version_min = state.holdings.table, state.version_min
        drawn = [table[chunk_id] for chunk_id in made.chunk_ids]
        assert all([chunk.version >= version_min for chunk in drawn]), "I2: a stale chunk was drawn"
        population = len(table)
        probabilities = table.sampler.probabilities(drawn)
        use_counts = state.holdings.use(drawn, state.config.uses_max)
        chunks = [
            GrantedChunk(chunk, version - chunk.version, use_count, chunk.priority, probability)
            for chunk, use_count, probability in zip(drawn, use_counts, probabilities, strict=True)
        ]
        grant = Grant(
            made.request_id,
            made.fragment_count,
            made.world_size,
            session_id=state.model.session_id,
            model_version=version,
            population=population,
            chunks=tuple(chunks),
        )
        for rank, (lease_id, lease_s) in enumerate(zip(made.lease_ids, made.leases_s, strict=True)):
            grant.leases.append(Lease(lease_id, grant, rank, lease_s, now + lease_s))
        state.leases.add(grant)
        state.meter.deliver(len(chunks))
        state.counters.add("grants")
        return grant

    def report_granted(self, lease: Lease, caller_id: CallerId, *, wait_s: float) -> None:
        """Report its lease to a caller; other callers may have had the same lease reported."""
        grant = lease.grant
        self._state.events.append(
            FetchGranted(
                buffer=self._state.name,
                caller_id=caller_id,
                lease_id=lease.lease_id,
                expires_at=lease.expires_at,
                fragments=granted_fragments(lease.share, grant.population),
                session_id=grant.session_id,
                model_version=grant.model_version,
                wait_s=wait_s,
                first_delivery=lease.reported_count == 0,
            )
        )
        self._state.counters.add("fetches_repeated" if lease.reported_count else "fetches_granted")
        lease.reported_count += 1

    def renew(self, input: inputs.RenewLease, *, now: float) -> float:
        """Let a lease live on, and give its new expiry.

        Raises:
            InvalidArgumentError: The duration is out of range.
            LeaseNotFoundError: The lease is unknown or over.
        """
        if input.lease_s is not None:
            check_duration("lease_s", input.lease_s)
        lease = self._state.leases.find(input.lease_id)
        if lease is None or lease.end is not None:
            raise LeaseNotFoundError(input.lease_id)
        expires_at = now + (lease.lease_s if input.lease_s is None else input.lease_s)
        self._state.leases.renew(lease, expires_at)
        return expires_at

    def release(self, lease_id: LeaseId, mode: ReleaseMode) -> bool:
        """End a lease, unless it was released before.

        Returns:
            Whether it ended now.

        Raises:
            LeaseNotFoundError: The lease is unknown or has expired.
        """
        lease = self._state.leases.find(lease_id)
        if lease is None or lease.end is LeaseEnd.EXPIRED:
            raise LeaseNotFoundError(lease_id)
        if lease.end is not None:
            return False
        end = LeaseEnd.CONSUMED if mode is ReleaseMode.CONSUMED else LeaseEnd.RETURNED
        self._end(lease, end, gives_back=end is LeaseEnd.RETURNED)
        return True

    def undo(self, lease_id: LeaseId) -> bool:
        """Take note that a caller was not reached; undo the grant if nobody was (B12).

        Only the grant of a single rank is undone: other ranks may hold their shares already.

        Returns:
            Whether the grant was undone.
        """
        self._state.counters.add("grants_undelivered")
        lease = self._state.leases.find(lease_id)
        if lease is None or lease.end is not None:
            return False
        lease.reported_count -= 1
        if lease.grant.world_size > 1 or lease.reported_count > 0:
            return False
        self._let_go(lease, gives_back=True)
        self._report_ended(lease, LeaseEnd.RETURNED)
        self._state.leases.forget(lease.grant)
        return True

    def expire(self, *, now: float) -> None:
        """End the leases that are over."""
        gives_back = self._state.config.lease_expiry_policy is LeaseExpiryPolicy.GIVE_BACK
        leases = self._state.leases
        while (lease := leases.first_expiry()) is not None and lease.expires_at <= now:
            self._end(lease, LeaseEnd.EXPIRED, gives_back=gives_back)

    def end_all(self) -> None:
        """End every lease, giving nothing back."""
        while (lease := self._state.leases.first_expiry()) is not None:
            self._end(lease, LeaseEnd.EXPIRED, gives_back=False)

    def next_expiry(self) -> float | None:
        """Return the instant at which the next lease expires, or None if none lives."""
        lease = self._state.leases.first_expiry()
        return None if lease is None else lease.expires_at

    def _end(self, lease: Lease, end: LeaseEnd, *, gives_back: bool) -> None:
        self._let_go(lease, gives_back=gives_back)
        self._report_ended(lease, end)
        self._state.leases.end(lease, end, self._state.config.requests_remembered_max)

    def _let_go(self, lease: Lease, *, gives_back: bool) -> None:
        """End a lease's hold on each chunk of its share, and give the uses back if asked to."""
        state = self._state
        session_id = lease.grant.session_id
        chunks = self._giving_back(lease) if gives_back else [each.chunk for each in lease.share]
        state.holdings.end_leases(
            chunks,
            state.config.uses_max,
            lambda chunk: state.return_obstacle(chunk.version, session_id),
        )

    def _giving_back(self, lease: Lease) -> Iterator[Chunk]:
        """Give back the use of each chunk of a lease's share, lazily, as the iterator advances."""
        state = self._state
        is_current = lease.grant.session_id == state.model.session_id
        for granted in lease.share:
            chunk = granted.chunk
            state.holdings.give_back(chunk)
            if is_current:
                state.meter.take_back()
                if chunk.state in _LEFT and chunk.use_count == 0:
                    state.meter.drop()
            yield chunk

    def _report_ended(self, lease: Lease, end: LeaseEnd) -> None:
        self._state.counters.add(LEASES_ENDED[end])
        self._state.events.append(LeaseEnded(self._state.name, end, len(lease.share)))
