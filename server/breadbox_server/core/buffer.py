"""One named buffer: the rules B1 to B31 over the parts that keep its state.

What knows what:

    rules.intake     fragments coming in          state.assembly   workers and their open chunks
    rules.offers     fragments to be confirmed    state.room       places and bytes reserved
    rules.waiting    appends without room         state.room_queue their order
    state.groups     groups of members, in the place of workers
    pacing           for what a fetch waits
    rules.tickets    groups reserved ahead        state.tickets    tickets that live
    rules.granting   fetches and leases           state.holdings   closed chunks, held and leased
    rules.reading    cursors                      state.grants     waiters, grants and leases
    rules.changes    sessions, limits, losses     state.session    session, version, weights
    samplers         which chunks a draw takes    state.payloads   what the buffer refers to
    limiters         when a draw may happen       state.subscriptions   cursors with a name

Invariants between the parts, on top of each one's own:

I1  Every payload referred to belongs to exactly one of: an open chunk, a closed chunk that is held,
    leased or retained, the model's weights (B13).
I2  Every open fragment and held chunk is fresh and of the current session (B5, B6).
I3  Chunks held are at most `capacity_chunks`, and where producers wait, so are they with those that
    a lease may bring back. Bytes referred to are at most `capacity_bytes` (B7). Lowered limits may
    be exceeded for a while.
I4  No request that could be granted waits: the head of the queue lacks chunks, a lease, or the
    limiter's permission, and all others wait behind it (B8).
I5  Leases alive are at most `leases_max`, unless that limit was lowered.
I6  Right after `handle_timer(now)`, `next_timer()` is None or later than `now`.
I7  What was refused has changed nothing but counters of refusals (B14).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import inf
from typing import Any

from breadbox_server.core.lacking import MemberKey, Wanted
from breadbox_server.core.model import description, inputs
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.entries import (
    Entry,
    FragmentTaken,
    GrantMade,
    TicketsGiven,
    TimePassed,
)
from breadbox_server.core.model.errors import (
    DomainError,
    InvalidArgumentError,
    RequestNotFoundError,
)
from breadbox_server.core.model.ids import ChunkId, LeaseId, PayloadId, RequestId, WorkerId
from breadbox_server.core.model.inputs import Answer, Fragment, Payload
from breadbox_server.core.model.validation import check_name
from breadbox_server.core.rules import (
    changes,
    granting,
    intake,
    offers,
    parts,
    reading,
    tickets,
    waiting,
)
from breadbox_server.core.rules.parts import MemberSeen
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.chunks import Chunk, ChunkState
from breadbox_server.core.state.grants import granted_fragments
from breadbox_server.core.state.groups import Groups
from breadbox_server.core.state.payloads import MODEL_OWNER, Owner


class ReplayBuffer:
    """One named buffer of a `BufferSet`; what followed from an input is in the events."""

    def __init__(self, state: BufferState) -> None:
        self._state = state
        self._due_at = self._first_due()
        """Nothing is due before this instant."""

    @property
    def config(self) -> BufferConfig:
        """The limits in force."""
        return self._state.config

    @property
    def model(self) -> inputs.ModelState:
        """The current session, version and weights."""
        return self._state.model.state

    def payloads(self) -> Iterator[Payload]:
        """Go lazily through every payload referred to; not to be held over an input."""
        for fragment in self.fragments():
            if fragment.payload.size_bytes:
                yield fragment.payload
        yield from self._state.model.weights.values()

    def fragments(self) -> Iterator[Fragment]:
        """Go through every fragment whose payload is referred to; as `payloads`."""
        for payload_id, owner in self._state.payloads.owners.items():
            yield from self._fragments_from(payload_id, owner)

    def payload_batches(self, size: int) -> Iterator[list[Payload]]:
        """Go through every payload referred to now, about `size` (up to a chunk more) at a time.

        May be held over inputs: omits what comes meanwhile, and what has gone before its turn.
        Takes a pointer per payload, and milliseconds per million to begin.
        """
        owners = self._state.payloads.owners
        yield list(self._state.model.weights.values())
        payload_ids = list(owners)
        for start in range(0, len(payload_ids), size):
            yield [
                fragment.payload
                for payload_id in payload_ids[start : start + size]
                if payload_id in owners
                for fragment in self._fragments_from(payload_id, owners[payload_id])
                if fragment.payload.size_bytes
            ]

    def _fragments_from(self, payload_id: PayloadId, owner: Owner) -> Sequence[Fragment]:
        """Return all fragments of a payload's owner if the payload is the first of these."""
        if owner is MODEL_OWNER:
            return ()
        chunk = owner if isinstance(owner, Chunk) else self._state.assembly.open[owner]
        return chunk.fragments if chunk.first.payload.payload_id == payload_id else ()

    def leased_payloads(self, lease_id: LeaseId) -> tuple[Payload, ...]:
        """Return the payloads that a lease keeps readable; none if it is unknown or over."""
        lease = self._state.leases.leases.get(lease_id)
        if lease is None or lease.end is not None:
            return ()
        return tuple(
            [fragment.payload for each in lease.share for fragment in each.chunk.fragments]
        )

    def prepared(self, request_id: RequestId) -> tuple[inputs.GrantedFragment, ...]:
        """List what was granted to a request, rank 0's share first; takes no lease (B12).

        RequestNotFoundError: unknown, still waiting, or all its leases ended.
        """
        check_name("request_id", request_id)
        grant = self._state.leases.find_grant(request_id)
        if grant is None or grant.live_count == 0:
            raise RequestNotFoundError(request_id)
        return granted_fragments(grant.chunks, grant.population)

    def read(self, spec: reading.ReadSpec) -> reading.ChunksRead:
        """Return the chunks after a cursor, in order of arrival; change nothing (B16)."""
        return reading.read(self._state, spec)

    def subscriptions(self) -> tuple[description.SubscriptionDescription, ...]:
        """Show the named cursors; far cheaper than going through what they have not passed."""
        return reading.describe_subscriptions(self._state)

    def describe(self, *, now: float) -> description.BufferDescription:
        """Show limits, gauges and counters; O(model versions held), of groups O(chunks held)."""
        state, groups = self._state, self._groups
        held = state.holdings.table.held
        fragment_count = len(held) * state.config.fragments_per_chunk
        if groups is not None:
            fragment_count = sum(
                [not each.part for chunk in held.values() for each in chunk.fragments]
            )
        version = state.model.version or 0
        counts = sorted(state.holdings.table.count_by_version.items(), reverse=True)
        latest = state.leases.latest_grant()
        return description.BufferDescription(
            name=state.name,
            config=state.config,
            model=state.model.state,
            chunk_count=len(held),
            retained_count=state.holdings.subscriptions.retained_count,
            open_chunk_count=len(state.assembly.open),
            open_fragment_count=state.assembly.open_fragment_count,
            fragment_count=fragment_count,
            payload_bytes=state.payloads.referred_bytes,
            weights_bytes=state.payloads.weights_bytes,
            lease_count=state.leases.live_count,
            waiter_count=len(state.waiters.waiters),
            worker_count=len(state.assembly.workers),
            counters=dict(state.counters),
            chunk_count_by_staleness={version - held: count for held, count in counts},
            inserted_count=state.meter.inserted_count,
            delivered_count=state.meter.delivered_count,
            waiting_reason=granting.next_reason(state),
            quarantined=tuple(state.quarantined),
            latest_request_id=RequestId("") if latest is None else latest.request_id,
            schemas=tuple(state.model.schemas.values()),
            open_groups=() if groups is None else tuple(groups.longest_silent(now)),
            ticket_count=len(state.assembly.tickets.by_group),
            ticket_waiter_count=len(state.ticket_waiters.waiters),
            ticket_waiting_reason=tickets.waiting_reason(state),
        )

    @property
    def _groups(self) -> Groups | None:
        assembly = self._state.assembly
        return assembly if isinstance(assembly, Groups) else None

    def tickets_of(self, holder: str, request_id: RequestId) -> int:
        """Count a holder's tickets, and those that its other requests wait for; O(waiting)."""
        return self._state.assembly.tickets.counts[holder] + sum(
            [
                each.ticket_count
                for each in self._state.ticket_waiters.waiters.values()
                if each.holder == holder and each.request_id != request_id
            ]
        )

    def group_ends(self, after: int, count_max: int) -> list[description.GroupEnd]:
        """Return the first ends of remembered groups after the one of a number.

        InvalidArgumentError: the buffer has no groups.
        """
        if (groups := self._groups) is None:
            raise InvalidArgumentError("buffer", "has no groups: that needs `assembly` groups")
        return groups.ends_after(after, count_max)

    def members(self, prefix: str, after: tuple[str, int], count_max: int) -> list[MemberSeen]:
        """List members of open groups, in order of their keys; the first call sorts the groups."""
        return parts.listed(self._state, prefix, after, count_max)

    def members_by_key(self, keys: Sequence[tuple[WorkerId, int]]) -> list[MemberSeen]:
        """List members of open groups by their keys, without those that are not there."""
        return parts.listed_by_key(self._state, keys)

    def parts(
        self, group: WorkerId, member: int, names: Collection[str]
    ) -> Sequence[Fragment] | None:
        """Return the parts of a member, of these names or all, or None if it is not there."""
        return parts.found(self._state, group, member, names)

    def claim(
        self,
        wanted: Wanted,
        count_max: int,
        may_take: Callable[[WorkerId], bool],
        is_awaited: Callable[[Wanted], bool],
    ) -> list[list[inputs.GrantedFragment]]:
        """Claim members that lack a part; return each with all of its parts, as a grant would.

        No other claim gets them before `end_claim`. `may_take` says what the patterns of *wanted*
        say, `is_awaited` whether a claim waits for as much as another.
        """
        version = self._state.model.version or 0
        return [
            [
                inputs.GrantedFragment(
                    each,
                    chunk_id=ChunkId(-1),
                    staleness=max(0, version - self._state.version_of(each)),
                    use_count=0,
                    priority=1.0,
                    probability=1.0,
                    population=0,
                )
                for each in member
            ]
            for member in parts.claim(self._state, wanted, count_max, may_take, is_awaited)
        ]

    def end_claim(self, keys: Iterable[MemberKey]) -> None:
        """Let other claims get members that were claimed, as far as they are still there."""
        if (groups := self._groups) is not None:
            groups.end_claim(keys)

    @property
    def claimed_count(self) -> int:
        """Number of members that are claimed."""
        return 0 if (groups := self._groups) is None else len(groups.lacking.claimed)

    def has_more_to_claim(self) -> bool:
        """Return whether claims that wait may get an answer, since it was last asked."""
        if (groups := self._groups) is None:
            return True
        has_more, groups.lacking.has_more = groups.lacking.has_more, False
        return has_more

    def has_ended(self, group: WorkerId) -> bool:
        """Whether this buffer makes groups, and none of that name is open."""
        groups = self._groups
        return groups is not None and group not in groups.open

    def apply(self, input: inputs.Input[Answer], *, now: float) -> Answer:
        """Do what is due, then carry out an input; see `BufferSet.apply`."""
        self.handle_timer(now=now)
        answer: Answer = _HANDLERS[type(input)](self._state, input, now=now)
        if self._state.ticket_waiters.waiters:
            tickets.serve(self._state, now=now)
        self._due_at = self._first_due()
        return answer

    def refuse_all(self, error: DomainError) -> None:
        """Turn every waiter away."""
        granting.refuse_all(self._state, error)
        waiting.refuse_all(self._state, error)
        self._state.room.end_all()
        self._due_at = self._first_due()

    def close(self, error: DomainError) -> None:
        """Turn every waiter away and let go of every payload; the buffer is of no use then."""
        self.refuse_all(error)
        changes.drop_session(self._state)
        granting.end_all(self._state)
        self._state.tell_disposable()

    def next_timer(self) -> float | None:
        """Return the instant at which `handle_timer` has something to do, or None if never."""
        return None if self._due_at == inf else self._due_at

    def _first_due(self) -> float:
        state = self._state
        due_at = inf if (silence := intake.next_silence(state)) is None else silence
        if (lease := state.leases.first_expiry()) is not None:
            due_at = min(due_at, lease.expires_at)
        for each in (state.waiters, state.queue, state.ticket_waiters):
            if (deadline := each.first_deadline()) is not None:
                due_at = min(due_at, deadline[0])
        expiry = state.room.first_expiry()
        return due_at if expiry is None else min(due_at, expiry[0])

    def handle_timer(self, *, now: float) -> None:
        """Do everything that was due at or before `now`; see `BufferSet.handle_timer`."""
        if now < self._due_at:
            return
        state = self._state
        ended_count = state.assembly.ended_count
        offers.expire(state, now=now)
        intake.end_silent(state, now=now)
        granting.expire(state, now=now)
        if state.assembly.ended_count > ended_count:
            state.shared.record(TimePassed(state.name), now)
        granting.settle(state, now=now)
        granting.time_out_overdue(state, now=now)
        waiting.time_out_overdue(state, now=now)
        if state.ticket_waiters.waiters:
            tickets.time_out_overdue(state, now=now)
        self._due_at = self._first_due()

    def replay(self, entry: Entry, *, now: float) -> None:
        """Apply what is due, then an entry of the journal; no request may be waiting."""
        self.handle_timer(now=now)
        if isinstance(entry, FragmentTaken):
            intake.carry_out(self._state, entry.fragment, entry.outcome, now=now)
            self._state.tell_disposable()
            # A chunk that it opens or goes on with is silent for long enough only then.
            self._due_at = min(self._due_at, now + self._state.config.open_chunk_s)
            return
        if isinstance(entry, GrantMade):
            granting.replay(self._state, entry, now=now)
        elif isinstance(entry, TicketsGiven):
            tickets.replay(self._state, entry, now=now)
        elif not isinstance(entry, TimePassed):
            _HANDLERS[type(entry)](self._state, entry, now=now)
        self._due_at = self._first_due()

    def replay_run(self, run: Sequence[tuple[float, FragmentTaken]]) -> None:
        """Replay successive fragments, together where that comes to the same."""
        self._due_at = self._first_due()
        is_quiet = run[-1][0] < self._due_at
        if is_quiet and intake.carry_out_run(self._state, [taken for _, taken in run]):
            self._due_at = self._first_due()
            return
        for now, taken in run:
            self.replay(taken, now=now)

    def check_invariants(self) -> None:
        """Assert every invariant that a state alone can show; O(everything held)."""
        state = self._state
        for part in (state.holdings.table, state.assembly, state.waiters, state.model):
            part.check_invariants()
        state.ticket_waiters.check_invariants()
        state.room.check_invariants()
        state.queue.check_invariants()
        state.leases.check_invariants(state.config.requests_remembered_max)
        state.holdings.subscriptions.check_invariants(state.holdings.closed_count - 1)
        assert self._due_at <= self._first_due(), "I6: something is due before it is looked for"
        self._check_freshness()
        self._check_payloads()
        self._check_limits()

    def _check_freshness(self) -> None:
        state = self._state
        closed = [
            fragment for chunk in state.holdings.table.by_age() for fragment in chunk.fragments
        ]
        opened = [
            fragment for chunk in state.assembly.open.values() for fragment in chunk.fragments
        ]
        for fragment in [*closed, *opened]:
            assert fragment.session_id == state.model.session_id, "I2: session"
            assert state.version_of(fragment) >= state.version_min, "I2: freshness"

    def _check_payloads(self) -> None:
        state = self._state
        chunks: dict[int, Chunk] = {
            chunk.chunk_id: chunk for chunk in state.holdings.table.by_age()
        }
        lease_counts = dict.fromkeys(chunks, 0)
        for grant in state.leases.live_grants.values():
            for lease in grant.leases:
                if lease.end is not None:
                    continue
                for granted in lease.share:
                    chunk = chunks.setdefault(granted.chunk.chunk_id, granted.chunk)
                    lease_counts[chunk.chunk_id] = lease_counts.get(chunk.chunk_id, 0) + 1
        for chunk in state.holdings.subscriptions.retained():
            chunks[chunk.chunk_id] = chunk
            lease_counts.setdefault(chunk.chunk_id, 0)
        fragments = [fragment for chunk in chunks.values() for fragment in chunk.fragments]
        for open_chunk in state.assembly.open.values():
            fragments.extend(open_chunk.fragments)
        payloads = [fragment.payload for fragment in fragments]
        stored = [each for each in payloads if each.size_bytes]
        weights = list(state.model.weights.values())
        expected = sorted(payload.payload_id for payload in [*payloads, *weights])
        assert sorted(state.payloads.owners) == expected, "I1: payloads"
        senders = {fragment.worker_id for fragment in fragments}
        for worker_id in state.assembly.workers:
            holds = worker_id in state.payloads.counts
            assert holds == (worker_id in senders), "P4: payloads of workers"
        if (groups := self._groups) is not None:
            idle = next((each for each in groups.workers if each not in senders), None)
            assert groups.first_idle(state.payloads) == idle, "O7: the group to forget"
        listed = sorted(payload.payload_id for payload in self.payloads())
        expected = sorted(payload.payload_id for payload in [*stored, *weights])
        assert listed == expected, "I1: payloads as listed"
        assert state.payloads.referred_bytes == sum(p.size_bytes for p in payloads), "I1: bytes"
        assert state.payloads.weights_bytes == sum(p.size_bytes for p in weights), "I1: weights"
        for chunk in chunks.values():
            assert chunk.lease_count == lease_counts[chunk.chunk_id], "I1: leases of a chunk"
            assert chunk.state is not ChunkState.USED_UP or chunk.lease_count > 0, "H1"
            if chunk.state is ChunkState.HELD:
                assert 0 <= chunk.use_count < state.config.uses_max, "H2: uses"

    def _check_limits(self) -> None:
        state = self._state
        assert len(state.holdings.table.held) <= state.config.capacity_chunks, "I3: chunks"
        head = state.waiters.head()
        if head is not None:
            chunk_count = head.fragment_count // state.config.fragments_per_chunk
            assert not state.may_grant(chunk_count, head.world_size), "I4: a request waits in vain"
        if state.ticket_waiters.waiters:
            assert tickets.free_count(state) <= 0, "I4: a request for tickets waits in vain"


_HANDLERS: dict[type, Callable[..., Any]] = {
    inputs.StartSession: changes.start_session,
    inputs.EndSession: changes.end_session,
    inputs.PublishModel: changes.publish,
    inputs.AppendFragments: intake.append,
    inputs.Offer: offers.offer,
    inputs.Settle: offers.settle,
    inputs.WaitForRoom: waiting.wait,
    inputs.LeaveQueue: waiting.leave,
    inputs.DeclareSchema: intake.declare_schema,
    inputs.Fetch: granting.fetch,
    inputs.CancelRequest: granting.cancel,
    inputs.TakeTickets: tickets.take,
    inputs.RenewTicket: tickets.renew,
    inputs.GiveBackTicket: tickets.give_back,
    inputs.DropMembers: parts.drop,
    inputs.UndeliveredTicket: tickets.undo,
    inputs.RenewLease: granting.renew,
    inputs.ReleaseLease: granting.release,
    inputs.UndeliveredGrant: granting.undo,
    inputs.DropPayloads: changes.drop_payloads,
    inputs.ReportUnreadable: changes.report_unreadable,
    inputs.UpdateBuffer: changes.update_limits,
    inputs.UpdatePriorities: changes.update_priorities,
    inputs.Subscribe: reading.subscribe,
    inputs.Acknowledge: reading.acknowledge,
    inputs.Unsubscribe: reading.unsubscribe,
}
