"""One named buffer: the rules B1 to B14 over the parts that keep its state.

Who knows what:

    intake      fragments coming in                 fetching   fetches, in order of arrival
    admission   whether a fragment is taken         waiters    those that cannot be met yet
    assembly    open chunks, what workers sent      leasing    how leases begin and end
    holdings    closed chunks, held and leased      leases     grants, living and remembered
    model       session, version, weights           limiters   whether a draw may happen now
    reading     what came after a cursor            subscriptions   cursors with a name
    payloads    what the buffer refers to           samplers   which chunks a draw takes
                                                    state      all of these together

Invariants between the parts, on top of each one's own:

I1  Every payload referred to belongs to exactly one of: an open chunk, a closed chunk that is held
    leased or retained, the model's weights (B13).
I2  Every open fragment and every held chunk is fresh and of the current session (B5, B6).
I3  Chunks held are at most `capacity_chunks`; where producers wait, so are they together with those
    that a lease may bring back, unless limits were changed meanwhile. Bytes referred to are at most
    `capacity_bytes`, unless that limit was lowered below what leases and open chunks refer to (B7).
I4  No request that could be granted waits: the head of the queue lacks chunks, a lease, or the
    limiter's permission, and all others wait behind it (B8).
I5  Leases alive are at most `leases_max`, unless that limit was lowered.
I6  Right after `handle_timer(now)`, `next_timer()` is None or later than `now`.
I7  What was refused has changed nothing but counters of refusals (B14).

Silence, after which an open chunk is discarded, is measured from the worker's latest *admitted*
fragment. Refused attempts do not count, so that open chunks whose workers are all blocked for lack
of bytes end by themselves instead of blocking each other for ever.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from breadbox_server.core import snapshot
from breadbox_server.core.limiters import make_limiter
from breadbox_server.core.model import inputs
from breadbox_server.core.model.config import BufferConfig, SchemaPolicy
from breadbox_server.core.model.description import (
    AppendCredit,
    BufferDescription,
    QuarantinedFragment,
    SubscriptionDescription,
)
from breadbox_server.core.model.entries import Entry, FragmentTaken, GrantMade
from breadbox_server.core.model.errors import (
    DomainError,
    InvalidArgumentError,
    RequestNotFoundError,
)
from breadbox_server.core.model.events import DiscardReason, EvictionReason, ModelChanged
from breadbox_server.core.model.ids import (
    CallerId,
    LeaseId,
    ModelVersion,
    PayloadId,
    RequestId,
    SessionId,
    WorkerId,
)
from breadbox_server.core.model.inputs import (
    Answer,
    Appended,
    Fragment,
    GrantedFragment,
    ModelState,
    Payload,
    PrioritiesUpdated,
    Published,
)
from breadbox_server.core.model.validation import (
    check_int,
    check_name,
    check_payload,
    check_priority,
    check_version,
)
from breadbox_server.core.rules import reading
from breadbox_server.core.rules.fetching import Fetching
from breadbox_server.core.rules.intake import REMEMBERED, Intake
from breadbox_server.core.rules.leasing import Leasing
from breadbox_server.core.samplers import make_remover, make_sampler
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.chunks import Chunk, ChunkState
from breadbox_server.core.state.leases import granted_fragments
from breadbox_server.core.state.payloads import MODEL_OWNER, Owner
from breadbox_server.core.state.subscriptions import Subscription

REPORTS_MAX = 1_000_000
"""Most times that a chunk may be reported unreadable before it is quarantined."""


class ReplayBuffer:
    """One named buffer as a synchronous, deterministic state machine.

    `BufferSet` is what a driver talks to; it finds the buffer, advances its time, and calls one of
    the methods that take an input. Each runs to its end: what it changed is visible in the next
    call, what followed from it (grants, evictions, payloads to delete) stands in the events.

    Args:
        state: New, or restored from a snapshot.
        next_caller_id: Gives ids that are unique among all buffers of the process.
        is_payload_taken: Whether another buffer refers to a payload.
        record: Told of every decision that a journal must hold, with its time, as it is made.
    """

    def __init__(
        self,
        state: BufferState,
        *,
        next_caller_id: Callable[[], CallerId],
        is_payload_taken: Callable[[PayloadId], bool],
        record: Callable[[Entry, float], None],
    ) -> None:
        self._state = state
        self._is_payload_taken = is_payload_taken
        self._record = record
        self._intake = Intake(state, is_payload_taken)
        self._leasing = Leasing(state)
        self._fetching = Fetching(
            state, self._leasing, next_caller_id=next_caller_id, record=record
        )
        self._quiet_until = -inf
        """While entries are replayed: nothing is due before this instant."""

    @property
    def config(self) -> BufferConfig:
        """The limits in force."""
        return self._state.config

    @property
    def model(self) -> ModelState:
        """The current session, version and weights."""
        return self._state.model.state

    def refers_to(self, payload_id: PayloadId) -> bool:
        """Whether a chunk, an open chunk, a lease or the model refers to a payload."""
        return payload_id in self._state.payloads

    def has_ended(self, session_id: SessionId) -> bool:
        """Whether a session is remembered to have ended."""
        return self._state.model.has_ended(session_id)

    def has_weights(self, payload_id: PayloadId) -> bool:
        """Whether a payload is weights of the model."""
        payloads = self._state.payloads
        return payload_id in payloads and payloads.owner(payload_id) is MODEL_OWNER

    def payloads(self) -> Iterator[Payload]:
        """Go through every payload referred to, in no order; not to be held over an input.

        Lazy: the cost is that of the payloads taken.
        """
        for fragment in self.fragments():
            yield fragment.payload
        for _, weights in self._state.model.kept_weights():
            yield weights

    def fragments(self) -> Iterator[Fragment]:
        """Go through every fragment whose payload is referred to; as `payloads`."""
        for payload_id, owner in self._state.payloads.owners():
            yield from self._fragments_from(payload_id, owner)

    def payload_batches(self, size: int) -> Iterator[list[Payload]]:
        """Go through every payload referred to now, many at a time; see `BufferSet`."""
        payloads = self._state.payloads
        yield [weights for _, weights in self._state.model.kept_weights()]
        payload_ids = list(payloads.ids())
        for start in range(0, len(payload_ids), size):
            yield [
                fragment.payload
                for payload_id in payload_ids[start : start + size]
                if payload_id in payloads
                for fragment in self._fragments_from(payload_id, payloads.owner(payload_id))
            ]

    def _fragments_from(self, payload_id: PayloadId, owner: Owner) -> Sequence[Fragment]:
        """All fragments of a payload's owner, if the payload is the first of these; else none."""
        if owner is MODEL_OWNER:
            return ()
        fragments = owner.fragments if isinstance(owner, Chunk) else self._opened_by(owner)
        return fragments if fragments[0].payload.payload_id == payload_id else ()

    def leased_payloads(self, lease_id: LeaseId) -> tuple[Payload, ...]:
        """The payloads that a lease keeps readable; none of one that is unknown or over."""
        lease = self._state.leases.find(lease_id)
        if lease is None or lease.end is not None:
            return ()
        return tuple(
            [fragment.payload for each in lease.share for fragment in each.chunk.fragments]
        )

    def _opened_by(self, worker_id: WorkerId) -> Sequence[Fragment]:
        worker = self._state.assembly.find(worker_id)
        assert worker is not None, "P1: an owner that is not known"
        assert worker.open_chunk is not None, "P1: an owner without an open chunk"
        return worker.open_chunk.fragments

    def start_session(self, input: inputs.StartSession, *, now: float) -> ModelState:
        """Make a session current, ending the previous one with everything of it (B5).

        Raises:
            InvalidArgumentError: The id or the version is malformed.
            SessionNotCurrentError: The session has ended before.
        """
        check_name("session_id", input.session_id)
        version = ModelVersion(0) if input.model_version is None else input.model_version
        check_version("model_version", version)
        state = self._state
        if input.session_id == state.model.session_id:
            return state.model.state
        state.model.check_start(input.session_id)
        if state.model.version is not None:
            self._end_session()
        state.model.start(input.session_id, version)
        state.counters.add("sessions_started")
        self._record(input, now)
        self._finish(model_changed=True)
        return state.model.state

    def end_session(self, input: inputs.EndSession, *, now: float) -> None:
        """End a session if it is current; leases live on, waiters wait for the next one.

        Raises:
            InvalidArgumentError: The id is malformed.
        """
        check_name("session_id", input.session_id)
        if input.session_id == self._state.model.session_id:
            self._end_session()
            self._record(input, now)
            self._finish(model_changed=True)

    def publish(self, input: inputs.PublishModel, *, now: float) -> Published:
        """Move the version forward; evict chunks and discard open fragments it makes stale (B5).

        The current version again is a retry and changes nothing, unless it brings the first
        weights of that version: a session begins with a version that has none.

        Raises:
            InvalidArgumentError: An argument is malformed, or the weights' payload is in use.
            SessionNotCurrentError: The session is not current.
            VersionRegressedError: The version is lower than the current one.
        """
        check_name("session_id", input.session_id)
        check_version("model_version", input.model_version)
        if input.weights is not None:
            check_payload("weights", input.weights)
        state = self._state
        state.model.check_publish(input.session_id, input.model_version)
        if input.model_version == state.model.version:
            current = state.model.state.weights
            if input.weights is None or current is not None:
                is_kept = input.weights is not None and input.weights == current
                return Published(input.model_version, 0, is_kept)
        self._check_weights(input.weights)
        state.model.publish(input.model_version, input.weights)
        state.counters.add("versions_published")
        evicted_count = self._drop_stale()
        self._record(input, now)
        self._finish(model_changed=True)
        return Published(input.model_version, evicted_count, input.weights is not None)

    def append(self, input: inputs.AppendFragment, *, now: float) -> Appended:
        """Judge a fragment and act on it (B1 to B4, B7).

        Raises:
            InvalidArgumentError: A field is malformed or out of range; the version was never
                published; the payload is in use, or larger than the buffer.
            SchemaMismatchError: The session's fragments have other arrays, or another number of
                steps.
            WorkersFullError: It is of a new worker, and no more are remembered.
        """
        answer = self._intake.append(input.fragment, now=now)
        if answer.outcome in REMEMBERED:
            self._record(FragmentTaken(input.buffer, input.fragment, answer.outcome), now)
        self._finish()
        self._fetching.serve(now=now)
        return answer

    def declare_schema(self, input: inputs.DeclareSchema, *, now: float) -> None:
        """Learn what the arrays of fragments are (B30); see `inputs.DeclareSchema`.

        Raises:
            SchemaMismatchError: The buffer takes one schema in a session, and this is another.
        """
        state = self._state
        schemas = state.model.schemas
        if input.session_id != state.model.session_id or input.schema_hash in schemas:
            return
        if state.config.schema is not SchemaPolicy.ANY and schemas.first_hash is not None:
            schemas.require_first(input.schema, input.session_id)
        if not schemas.is_full:
            schemas.add(input.schema_hash, input.schema)
            self._record(input, now)

    def judge(self, fragment: Fragment) -> Appended | None:
        """Return how `append` would answer, or None if it would admit the fragment; change nothing.

        Args:
            fragment: A well-formed one; that is not looked at again.

        Raises:
            DomainError: Whatever `append` would raise.
        """
        answer = self._intake.judge(fragment)
        return None if answer.outcome is inputs.AdmissionOutcome.ADMITTED else answer

    def may_overtake(self, fragment: Fragment, waits_for: inputs.AdmissionOutcome) -> bool:
        """Whether a fragment takes nothing that an earlier one, refused so, waits for (B31)."""
        return self._intake.may_overtake(fragment, waits_for)

    def fetch(self, input: inputs.Fetch, *, now: float) -> CallerId:
        """Grant a request, let it wait, or repeat what it was granted (B8 to B12).

        Raises:
            DomainError: As `BufferSet.apply` says of Fetch.
        """
        return self._fetching.fetch(input, now=now)

    def cancel_fetch(self, input: inputs.CancelFetch, *, now: float) -> None:
        """Remove a waiting caller, and serve the requests queued behind it."""
        self._fetching.cancel(input.caller_id, now=now)

    def renew_lease(self, input: inputs.RenewLease, *, now: float) -> float:
        """Let a lease live on, and give its new expiry.

        Raises:
            InvalidArgumentError: The duration is out of range.
            LeaseNotFoundError: The lease is unknown or over.
        """
        expires_at = self._leasing.renew(input, now=now)
        self._record(input, now)
        return expires_at

    def release_lease(self, input: inputs.ReleaseLease, *, now: float) -> None:
        """End a lease; nothing happens if it was released before.

        Raises:
            LeaseNotFoundError: The lease is unknown or has expired.
        """
        if self._leasing.release(input.lease_id, input.mode):
            self._record(input, now)
        self._finish()
        self._fetching.serve(now=now)

    def undo_grant(self, input: inputs.UndeliveredGrant, *, now: float) -> None:
        """Undo a grant that reached nobody; see `inputs.UndeliveredGrant`."""
        if self._leasing.undo(input.lease_id):
            self._record(input, now)
        self._finish()
        self._fetching.serve(now=now)

    def drop_payloads(self, input: inputs.DropPayloads, *, now: float) -> int:
        """Give up whatever refers to payloads that the store lost, and count its fragments."""
        if any(payload_id in self._state.payloads for payload_id in input.payload_ids):
            self._record(input, now)
        dropped_count = sum(self._drop_payload(payload_id) for payload_id in input.payload_ids)
        self._finish()
        return dropped_count

    def report_unreadable(self, input: inputs.ReportUnreadable, *, now: float) -> None:
        """Count payloads that a reader could not read; quarantine at `reports_max` reports (B29).

        Raises:
            InvalidArgumentError: `reports_max` is below 1.
        """
        check_int("reports_max", input.reports_max, 1, REPORTS_MAX)
        lease = self._state.leases.find(input.lease_id)
        if lease is None or lease.end is not None:
            return
        reported = frozenset(input.payload_ids)
        # Each once, however often it was drawn.
        chunks = {granted.chunk.chunk_id: granted.chunk for granted in lease.share}
        unreadable = [
            (chunk, fragments)
            for chunk in chunks.values()
            if (fragments := [f for f in chunk.fragments if f.payload.payload_id in reported])
        ]
        if not unreadable:
            return
        self._record(input, now)
        for chunk, fragments in unreadable:
            chunk.unreadable_count += 1
            if chunk.unreadable_count >= input.reports_max:
                self._quarantine(chunk, fragments)
        self._finish()

    def _quarantine(self, chunk: Chunk, fragments: Sequence[Fragment]) -> None:
        if self._state.holdings.lose(chunk, EvictionReason.QUARANTINED):
            self._state.quarantined.extend(
                [
                    QuarantinedFragment(
                        each.worker_id,
                        each.fragment_index,
                        each.session_id,
                        each.payload.payload_id,
                    )
                    for each in fragments
                ]
            )

    def update_priorities(self, input: inputs.UpdatePriorities, *, now: float) -> PrioritiesUpdated:
        """Evict chunks, then set the priorities of others (B18); see `inputs.UpdatePriorities`.

        Raises:
            InvalidArgumentError: A priority is none.
        """
        for place, (_, priority) in enumerate(input.priorities):
            check_priority(f"updates[{place}].priority", priority)
        table = self._state.holdings.table
        deleted = [chunk_id for chunk_id in dict.fromkeys(input.deleted) if chunk_id in table]
        self._state.holdings.evict([table[each] for each in deleted], EvictionReason.DELETED)
        priorities = [each for each in input.priorities if each[0] in table]
        for chunk_id, priority in priorities:
            table.set_priority(table[chunk_id], priority)
        if deleted or priorities:
            known = inputs.UpdatePriorities(input.buffer, tuple(priorities), tuple(deleted))
            self._record(known, now)
        self._finish()
        self._fetching.serve(now=now)
        unknown_count = len(input.priorities) - len(priorities) + len(input.deleted) - len(deleted)
        return PrioritiesUpdated(len(priorities), len(deleted), unknown_count)

    def update(self, input: inputs.UpdateBuffer, *, now: float) -> None:
        """Replace the limits, and evict what no longer fits; O(chunks held).

        Raises:
            InvalidArgumentError: `fragments_per_chunk` differs and the buffer is not empty, or
                there is no such sampler.
        """
        state = self._state
        old, new = state.config, input.config
        if new.fragments_per_chunk != old.fragments_per_chunk and not state.is_empty:
            raise InvalidArgumentError(
                "fragments_per_chunk",
                f"is {old.fragments_per_chunk} and cannot be changed while the buffer holds "
                "fragments or a lease refers to them; empty it (end the session), delete it, or "
                "use another buffer",
            )
        sampler = make_sampler(new.sampler, new.priority_exponent)
        remover = make_remover(new.remover, new.priority_exponent)
        if new.fragments_per_chunk != old.fragments_per_chunk:
            state.assembly.use_length(new.fragments_per_chunk)
        state.config = new
        state.limiter = make_limiter(new.limiter)
        if (new.sampler, new.priority_exponent) != (old.sampler, old.priority_exponent):
            state.holdings.table.use_sampler(sampler)
        if (new.remover, new.priority_exponent) != (old.remover, old.priority_exponent):
            state.holdings.table.use_remover(remover)
        self._drop_stale()
        state.holdings.evict_used_up(new.uses_max)
        state.holdings.evict_to_count(new.capacity_chunks)
        state.holdings.evict_to_bytes(new.capacity_bytes)
        state.leases.trim(new.requests_remembered_max)
        self._intake.discard_silent(now=now)
        self._record(input, now)
        self._fetching.refuse_impossible()
        self._finish()
        self._fetching.serve(now=now)

    def refuse_waiters(self, error: DomainError) -> None:
        """Turn every waiter away."""
        self._fetching.refuse_all(error)

    def close(self, error: DomainError) -> None:
        """Turn every waiter away and let go of every payload; the buffer is of no use then."""
        self._fetching.refuse_all(error)
        if self._state.model.version is not None:
            self._end_session()
        self._leasing.end_all()
        self._finish()

    def next_timer(self) -> float | None:
        """Return the instant at which `handle_timer` has something to do, or None if never."""
        due_at = self._intake.next_silence()
        for other in (self._leasing.next_expiry(), self._fetching.next_deadline()):
            if other is not None and (due_at is None or other < due_at):
                due_at = other
        return due_at

    def handle_timer(self, *, now: float) -> None:
        """Do everything that was due at or before `now`.

        Expired leases are ended first, so that chunks they held back can satisfy waiters whose
        deadline is this same instant. Then the open chunks of silent workers are discarded. Then
        waiters whose deadline has passed time out.
        """
        due_at = self.next_timer()
        if due_at is None or due_at > now:
            return
        self._leasing.expire(now=now)
        self._intake.discard_silent(now=now)
        self._finish()
        self._fetching.serve(now=now)
        self._fetching.elapse(now=now)

    def replay(self, entry: Entry, *, now: float) -> None:
        """Do what is due, then once more what an entry says was done; nobody may be waiting.

        Raises:
            ReplayError, DomainError: The entry does not fit the state.
        """
        if isinstance(entry, FragmentTaken):
            if now >= self._quiet_until:
                self._be_quiet(now=now)
            self._intake.carry_out(entry.fragment, entry.outcome, now=now)
            self._state.tell_disposable()
            return
        self.handle_timer(now=now)
        self._quiet_until = -inf
        if isinstance(entry, GrantMade):
            for lease in self._leasing.replay(entry, now=now).leases:
                lease.reported_count = 1
        else:
            _HANDLERS[type(entry)](self, entry, now=now)

    def replay_run(self, run: Sequence[tuple[float, FragmentTaken]]) -> None:
        """Replay successive fragments, together where that comes to the same.

        Raises:
            ReplayError, DomainError: An entry does not fit the state.
        """
        timer = self.next_timer()
        is_quiet = timer is None or timer > run[-1][0]
        if is_quiet and self._intake.carry_out_run([taken for _, taken in run]):
            return
        for now, taken in run:
            self.replay(taken, now=now)

    def _be_quiet(self, *, now: float) -> None:
        """Do what is due, and note until when fragments alone can make nothing due."""
        self.handle_timer(now=now)
        timer = self.next_timer()
        # A chunk that they open or go on with is silent for long enough only then.
        silence = now + self._state.config.open_chunk_s
        self._quiet_until = silence if timer is None else min(timer, silence)

    def apply(self, input: inputs.Input[Answer], *, now: float) -> Answer:
        """Do what is due, then carry out an input; see `BufferSet.apply`."""
        self.handle_timer(now=now)
        answer: Answer = _HANDLERS[type(input)](self, input, now=now)
        return answer

    def snapshot(self) -> BufferSnapshot:
        """Give everything that outlives the process; O(everything held)."""
        return snapshot.take(self._state)

    def describe(self) -> BufferDescription:
        """Show limits, gauges and counters; O(model versions held)."""
        state = self._state
        table = state.holdings.table
        version = state.model.version or 0
        counts = reversed(table.count_by_version().items())
        latest = state.leases.latest_grant()
        return BufferDescription(
            name=state.name,
            config=state.config,
            model=state.model.state,
            chunk_count=len(table),
            retained_count=state.holdings.subscriptions.retained_count,
            open_chunk_count=state.assembly.open_chunk_count,
            open_fragment_count=state.assembly.open_fragment_count,
            fragment_count=len(table) * state.config.fragments_per_chunk,
            payload_bytes=state.payloads.referred_bytes,
            weights_bytes=state.payloads.weights_bytes,
            lease_count=state.leases.live_count,
            waiter_count=len(state.waiters),
            worker_count=state.assembly.worker_count,
            counters=state.counters.all(),
            chunk_count_by_staleness={version - held: count for held, count in counts},
            inserted_count=state.meter.inserted_count,
            delivered_count=state.meter.delivered_count,
            waiting_reason=self._fetching.next_reason(),
            quarantined=tuple(state.quarantined),
            latest_request_id=RequestId("") if latest is None else latest.request_id,
            schemas=tuple([schema for _, schema in state.model.schemas.all()]),
        )

    def prepared(self, request_id: RequestId) -> tuple[GrantedFragment, ...]:
        """List what was granted to a request, rank 0's share first.

        Raises:
            InvalidArgumentError: The name is none.
            RequestNotFoundError: The request is unknown, still waits, or all its leases ended.
        """
        check_name("request_id", request_id)
        grant = self._state.leases.find_grant(request_id)
        if grant is None or grant.live_count == 0:
            raise RequestNotFoundError(request_id)
        return granted_fragments(grant.chunks, grant.population)

    def subscribe(self, input: inputs.Subscribe, *, now: float) -> None:
        """Create a named cursor (B17).

        Raises:
            InvalidArgumentError: The name is malformed, or there is no such chunk.
            SubscriptionExistsError: One of the name is of the other kind.
            SubscriptionsFullError: There are as many as may be.
        """
        check_name("name", input.name)
        newest = self.closed_count - 1
        after = input.after_chunk_id
        if after is None:
            oldest = self._state.holdings.table.oldest()
            after = newest if oldest is None else oldest.chunk_id - 1
        check_int("after_chunk_id", after, -1, newest)
        subscription = Subscription(input.name, input.is_retaining, after)
        if self._state.holdings.subscriptions.add(subscription):
            self._record(replace(input, after_chunk_id=after), now)

    def acknowledge(self, input: inputs.Acknowledge, *, now: float) -> None:
        """Move a named cursor forward, and let go of what was retained for it alone (B17).

        Raises:
            InvalidArgumentError: There is no such chunk yet.
            SubscriptionNotFoundError: There is no subscription of the name.
        """
        subscription = self._state.holdings.subscriptions[input.name]
        if input.chunk_id >= 0 == self.closed_count:
            raise InvalidArgumentError(
                "chunk_id", f"cannot be {input.chunk_id}: there was no chunk yet"
            )
        check_int("chunk_id", input.chunk_id, -1, self.closed_count - 1)
        if input.chunk_id > subscription.cursor:
            self._state.holdings.pass_to(input.name, input.chunk_id)
            self._record(input, now)
        self._finish()

    def unsubscribe(self, input: inputs.Unsubscribe, *, now: float) -> None:
        """Delete a named cursor, and let go of what was retained for it alone (B17).

        Raises:
            SubscriptionNotFoundError: There is no subscription of the name.
        """
        self._state.holdings.unsubscribe(input.name)
        self._record(input, now)
        self._finish()

    def subscriptions(self) -> tuple[SubscriptionDescription, ...]:
        """Show the named cursors; far cheaper than going through what they have not passed."""
        return reading.describe_subscriptions(self._state)

    @property
    def closed_count(self) -> int:
        """Chunks ever closed."""
        return self._state.holdings.closed_count

    def read(self, cursor: reading.Cursor) -> reading.ChunksRead:
        """Give the chunks that came after a cursor; changes nothing (B16)."""
        return reading.read(self._state, cursor)

    def append_credit(self) -> AppendCredit:
        """Return how much all producers together may send now without having to wait."""
        return self._intake.credit()

    def check_invariants(self) -> None:
        """Assert every invariant that a state alone can show; O(everything held)."""
        state = self._state
        for part in (state.holdings.table, state.assembly, state.waiters, state.model):
            part.check_invariants()
        state.leases.check_invariants(state.config.requests_remembered_max)
        state.holdings.subscriptions.check_invariants(self.closed_count - 1)
        self._check_freshness()
        self._check_payloads()
        self._check_limits()

    def _check_freshness(self) -> None:
        state = self._state
        closed = [
            fragment for chunk in state.holdings.table.by_age() for fragment in chunk.fragments
        ]
        opened = [
            fragment for chunk in state.assembly.open_chunks() for fragment in chunk.fragments
        ]
        for fragment in [*closed, *opened]:
            assert fragment.session_id == state.model.session_id, "I2: session"
            assert fragment.model_version_min >= state.version_min, "I2: freshness"

    def _check_payloads(self) -> None:
        state = self._state
        chunks: dict[int, Chunk] = {
            chunk.chunk_id: chunk for chunk in state.holdings.table.by_age()
        }
        lease_counts = dict.fromkeys(chunks, 0)
        for grant in state.leases.live_grants():
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
        for open_chunk in state.assembly.open_chunks():
            fragments.extend(open_chunk.fragments)
        payloads = [fragment.payload for fragment in fragments]
        weights = [kept for _, kept in state.model.kept_weights()]
        expected = sorted(payload.payload_id for payload in [*payloads, *weights])
        assert sorted(state.payloads.ids()) == expected, "I1: payloads"
        senders = {fragment.worker_id for fragment in fragments}
        for worker in state.assembly.workers():
            holds = state.payloads.holds_of(worker.worker_id)
            assert holds == (worker.worker_id in senders), "P4: payloads of workers"
        listed = sorted(payload.payload_id for payload in self.payloads())
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
        assert len(state.holdings.table) <= state.config.capacity_chunks, "I3: chunks"
        head = state.waiters.head()
        if head is not None:
            chunk_count = head.fragment_count // state.config.fragments_per_chunk
            assert not state.may_grant(chunk_count, head.world_size), "I4: a request waits in vain"

    def _check_weights(self, weights: Payload | None) -> None:
        if weights is None:
            return
        payload_id = weights.payload_id
        if payload_id in self._state.payloads or self._is_payload_taken(payload_id):
            raise InvalidArgumentError("weights.payload_id", "is in use already")

    def _drop_payload(self, payload_id: PayloadId) -> int:
        """Give up what refers to a lost payload, and count its fragments."""
        state = self._state
        if payload_id not in state.payloads:
            return 0
        owner = state.payloads.owner(payload_id)
        if owner is MODEL_OWNER:
            state.model.drop(payload_id)
            return 0
        if isinstance(owner, Chunk):
            is_lost = state.holdings.lose(owner, EvictionReason.PAYLOAD_LOST)
            return len(owner.fragments) if is_lost else 0
        lost = state.assembly.discard_lost(owner, payload_id)
        state.discard(lost, DiscardReason.PAYLOAD_LOST)
        return len(lost)

    def _end_session(self) -> None:
        state = self._state
        state.holdings.end_session()
        state.discard(state.assembly.discard_all(), DiscardReason.SESSION_ENDED)
        state.assembly.forget_workers()
        state.model.end()
        state.meter.restart()

    def _drop_stale(self) -> int:
        """Evict and discard what is stale, and count the chunks."""
        state = self._state
        evicted_count = state.holdings.evict_stale(state.version_min)
        stale = state.assembly.discard_stale(state.version_min)
        state.discard(stale, DiscardReason.STALE)
        return evicted_count

    def _finish(self, *, model_changed: bool = False) -> None:
        """Tell, at the end of an input, what it did to the model and to payloads."""
        state = self._state
        if model_changed:
            state.events.append(ModelChanged(state.name, state.model.state))
        state.tell_disposable()


_HANDLERS: dict[type, Callable[..., Any]] = {
    inputs.StartSession: ReplayBuffer.start_session,
    inputs.EndSession: ReplayBuffer.end_session,
    inputs.PublishModel: ReplayBuffer.publish,
    inputs.AppendFragment: ReplayBuffer.append,
    inputs.DeclareSchema: ReplayBuffer.declare_schema,
    inputs.Fetch: ReplayBuffer.fetch,
    inputs.CancelFetch: ReplayBuffer.cancel_fetch,
    inputs.RenewLease: ReplayBuffer.renew_lease,
    inputs.ReleaseLease: ReplayBuffer.release_lease,
    inputs.UndeliveredGrant: ReplayBuffer.undo_grant,
    inputs.DropPayloads: ReplayBuffer.drop_payloads,
    inputs.ReportUnreadable: ReplayBuffer.report_unreadable,
    inputs.UpdateBuffer: ReplayBuffer.update,
    inputs.UpdatePriorities: ReplayBuffer.update_priorities,
    inputs.Subscribe: ReplayBuffer.subscribe,
    inputs.Acknowledge: ReplayBuffer.acknowledge,
    inputs.Unsubscribe: ReplayBuffer.unsubscribe,
}
