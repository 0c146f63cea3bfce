"""Fetches wait, are granted or time out (B8, B9); leases begin, go on and end (B10 to B12)."""

import math
from collections.abc import Iterator

from breadbox_server.core.model import errors, events, inputs
from breadbox_server.core.model.config import LeaseExpiryPolicy, StalePolicy, check_duration
from breadbox_server.core.model.counters import LEASES_ENDED
from breadbox_server.core.model.entries import GrantMade, ReplayError
from breadbox_server.core.model.events import EvictionReason, LeaseEnd, StepsEnd
from breadbox_server.core.model.ids import CallerId, ChunkId, LeaseId
from breadbox_server.core.model.validation import WORLD_SIZE_MAX, check_int, check_name
from breadbox_server.core.state import grants
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.chunks import Chunk, ChunkState
from breadbox_server.core.state.grants import (
    Caller,
    Grant,
    GrantedChunk,
    Lease,
    RequestT,
    Waiter,
    WaiterQueue,
)

LEASE_ID_BITS = 96
"""Wide enough that a lease of a server that lost its books is never taken for another one."""


def fetch(state: BufferState, input: inputs.Fetch, *, now: float) -> CallerId:
    """Grant a request, let it wait, or repeat what it was granted."""
    check_name("request_id", input.request_id)
    check_int("world_size", input.world_size, 1, WORLD_SIZE_MAX)
    check_int("rank", input.rank, 0, input.world_size - 1)
    if input.lease_s is not None:
        check_duration("lease_s", input.lease_s)
    if not math.isfinite(input.deadline_at):
        raise errors.InvalidArgumentError("deadline_at", "must be a finite instant")
    _check_size(state, input.fragment_count, input.world_size)
    grant = state.leases.find_grant(input.request_id)
    if grant is not None:
        return _repeat(state, grant, input)
    waiters = state.waiters
    waiter = waiters.waiters.get(input.request_id)
    if waiter is None:
        waiter = Waiter(input.request_id, input.fragment_count, input.world_size)
    else:
        _check_same(waiter, input)
    is_granted = not waiters.waiters and state.may_grant(
        _chunk_count(state, waiter), waiter.world_size
    )
    if not is_granted:
        _check_bytes(state, waiter)
    if not is_granted and input.deadline_at > now:
        callers_max, waiters_max = waiter.world_size + grants.RETRIES_MAX, state.config.waiters_max
        if len(waiter.callers) >= callers_max:
            raise errors.WaitersFullError(callers_max)
        if not waiter.callers and len(waiters.waiters) >= waiters_max:
            raise errors.WaitersFullError(waiters_max)
    caller_id = state.shared.next_caller_id()
    caller = Caller(caller_id, input.rank, input.lease_s, now, input.deadline_at)
    if is_granted:
        waiter.callers[caller_id] = caller
        _draw(state, waiter, now=now)
    elif input.deadline_at > now:
        waiters.add(waiter, caller)
    else:
        _report_elapsed(state, caller, reason_for(state, waiter), now=now)
    return caller_id


def _check_size(state: BufferState, fragment_count: int, world_size: int) -> None:
    """Refuse what could never be granted, however long it waited (B8)."""
    config = state.config
    if config.keeps_rows:
        raise errors.InvalidArgumentError(
            "buffer", "keeps rows (`fragments_per_chunk` is 0), which are read by their keys"
        )
    unit = config.fragments_per_chunk * world_size
    if type(fragment_count) is not int or fragment_count <= 0 or fragment_count % unit:
        raise errors.InvalidArgumentError(
            "fragment_count",
            f"must be a positive multiple of fragments_per_chunk * world_size = "
            f"{config.fragments_per_chunk} * {world_size} = {unit}, got {fragment_count!r}",
        )
    if fragment_count > config.capacity_fragments:
        raise errors.FetchExceedsCapacityError(fragment_count, config.capacity_fragments)
    if world_size > config.leases_max:
        raise errors.InvalidArgumentError(
            "world_size", f"is {world_size}, but leases_max is {config.leases_max}"
        )


def _check_bytes(state: BufferState, waiter: Waiter) -> None:
    """Refuse what bytes will never let be granted, chunks being as large as they are (B8)."""
    needed_bytes = state.bytes_beyond(_chunk_count(state, waiter))
    if needed_bytes:
        raise errors.FetchExceedsCapacityError(needed_bytes, state.config.capacity_bytes, "bytes")


def _check_same(first: Waiter | Grant, input: inputs.Fetch) -> None:
    """Refuse a known request that comes with another size (B12)."""
    for field in ("fragment_count", "world_size"):
        before, now = getattr(first, field), getattr(input, field)
        if before != now:
            raise errors.RequestMismatchError(input.request_id, field, before, now)


def _repeat(state: BufferState, grant: Grant, input: inputs.Fetch) -> CallerId:
    _check_same(grant, input)
    lease = grant.leases[input.rank]
    if lease.end is not None:
        raise errors.LeaseNotFoundError(lease.lease_id)
    caller_id = state.shared.next_caller_id()
    _report_granted(state, lease, caller_id, wait_s=0.0)
    return caller_id


def cancel(state: BufferState, input: inputs.CancelRequest, *, now: float) -> None:
    """Remove a waiting caller; its request goes with its last caller (B8)."""
    if input.caller_id in state.ticket_waiters:
        state.ticket_waiters.remove_caller(input.caller_id)
    if input.caller_id in state.waiters:
        state.waiters.remove_caller(input.caller_id)
        state.counters["fetches_cancelled"] += 1
        serve(state, now=now)


def settle(state: BufferState, *, now: float) -> None:
    """Report, at the end of an input, what was let go of, and serve the queue."""
    state.tell_disposable()
    serve(state, now=now)


def serve(state: BufferState, *, now: float) -> None:
    """Grant from the head of the queue while possible; turn away a head that never will be."""
    waiters = state.waiters
    while (head := waiters.head()) is not None:
        if state.may_grant(_chunk_count(state, head), head.world_size):
            waiters.remove(head)
            _draw(state, head, now=now)
            continue
        try:
            _check_bytes(state, head)
        except errors.FetchExceedsCapacityError as error:
            _refuse(state, waiters, head, error)
        else:
            return


def _refuse(
    state: BufferState, waiters: WaiterQueue[RequestT], waiter: RequestT, error: errors.DomainError
) -> None:
    waiters.remove(waiter)
    for caller_id in waiter.callers:
        state.counters["fetches_refused"] += isinstance(waiter, Waiter)
        state.events.append(events.RequestRefused(state.name, caller_id, error))


def refuse_all(state: BufferState, error: errors.DomainError) -> None:
    """Turn every waiter away, those for tickets too."""
    for fetch in list(state.waiters.waiters.values()):
        _refuse(state, state.waiters, fetch, error)
    for request in list(state.ticket_waiters.waiters.values()):
        _refuse(state, state.ticket_waiters, request, error)


def refuse_impossible(state: BufferState) -> None:
    """Refuse the waiters that the limits, just changed, never allow to be met."""
    for waiter in list(state.waiters.waiters.values()):
        try:
            _check_size(state, waiter.fragment_count, waiter.world_size)
        except errors.DomainError as error:
            _refuse(state, state.waiters, waiter, error)


def time_out_overdue(state: BufferState, *, now: float) -> None:
    """Time out overdue callers, and serve those behind; a grant at the deadline still counts."""
    waiters = state.waiters
    while (first := waiters.first_deadline()) is not None and first[0] <= now:
        reason = reason_for(state, waiters.waiter_of(first[1]))
        _report_elapsed(state, waiters.remove_caller(first[1]), reason, now=now)
        serve(state, now=now)


def reason_for(state: BufferState, waiter: Waiter) -> str:
    """Say in one sentence with numbers what a request waits for, in the queue or before it."""
    head = state.waiters.head()
    if head is None or head is waiter:
        return state.waiting_reason(_chunk_count(state, waiter), waiter.world_size)
    reason = state.waiting_reason(_chunk_count(state, head), head.world_size)
    count = len(state.waiters.waiters)
    waiting = "1 fetch waits" if count == 1 else f"{count} fetches wait"
    return f"{waiting} in order of arrival; for the first, {reason}"


def next_reason(state: BufferState) -> str:
    """Say what the next fetch would wait for; empty when the smallest one would not."""
    head = state.waiters.head()
    return state.waiting_reason(1, 1) if head is None else reason_for(state, head)


def _chunk_count(state: BufferState, waiter: Waiter) -> int:
    return waiter.fragment_count // state.config.fragments_per_chunk


def _draw(state: BufferState, waiter: Waiter, *, now: float) -> None:
    rng = state.next_draw_rng()
    table, config = state.holdings.table, state.config

    def uses_left(chunk_id: ChunkId) -> int:
        return config.uses_max - table.held[chunk_id].use_count

    chunk_ids = table.sampler.draw(
        _chunk_count(state, waiter), rng, uses_left if config.with_replacement else None
    )
    salt = state.shared.lease_salt
    lease_ids = [
        LeaseId(f"{rng.getrandbits(LEASE_ID_BITS) ^ salt:0{LEASE_ID_BITS // 4}x}")
        for _ in range(waiter.world_size)
    ]
    leases_s = [config.lease_s] * waiter.world_size
    for caller in waiter.callers.values():
        if caller.lease_s is not None:
            leases_s[caller.rank] = caller.lease_s
    made = GrantMade(
        state.name,
        waiter.request_id,
        waiter.fragment_count,
        waiter.world_size,
        tuple(chunk_ids),
        tuple(lease_ids),
        tuple(leases_s),
    )
    grant = _carry_out(state, made, now=now)
    state.shared.record(made, now)
    first = [each for part in grant.chunks if part.use_count == 1 for each in part.chunk.fragments]
    if first:
        state.events.append(
            events.StepsEnded(state.name, StepsEnd.TRAINED, tuple(first), grant.model_version)
        )
    for caller in waiter.callers.values():
        lease = grant.leases[caller.rank]
        _report_granted(state, lease, caller.caller_id, wait_s=now - caller.asked_at)


def replay(state: BufferState, made: GrantMade, *, now: float) -> None:
    """Apply a journalled grant again, as reported once; ReplayError if it does not fit."""
    held = state.holdings.table.held
    unknown = [chunk_id for chunk_id in made.chunk_ids if chunk_id not in held]
    if unknown:
        raise ReplayError(f"chunk {unknown[0]} was granted, and is not held")
    if not made.world_size == len(made.lease_ids) == len(made.leases_s):
        raise ReplayError(f"a grant for {made.world_size} ranks has not as many leases")
    for lease in _carry_out(state, made, now=now).leases:
        lease.reported_count = 1


def _carry_out(state: BufferState, made: GrantMade, *, now: float) -> Grant:
    """Apply a drawn grant, whose chunks are held: count uses, begin leases; report to no caller."""
    version = state.model.version
    assert version is not None, "I2: chunks are held without a session"
    state.draw_count += 1
    table, version_min = state.holdings.table, state.version_min
    drawn = [table.held[chunk_id] for chunk_id in made.chunk_ids]
    assert all([chunk.version >= version_min for chunk in drawn]), "I2: a stale chunk was drawn"
    population = len(table.held)
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
        state.model.session_id,
        version,
        population,
        tuple(chunks),
    )
    for rank, (lease_id, lease_s) in enumerate(zip(made.lease_ids, made.leases_s, strict=True)):
        grant.leases.append(Lease(lease_id, grant, rank, lease_s, now + lease_s))
    state.leases.add(grant)
    state.meter.delivered_count += len(chunks)
    state.meter.version_delivered_count += len(chunks)
    if state.config.stale is StalePolicy.KEEP:
        late_count = sum([each.staleness > state.config.staleness_max for each in chunks])
        state.counters["chunks_delivered_late"] += late_count
    state.counters["grants"] += 1
    return grant


def _report_granted(
    state: BufferState, lease: Lease, caller_id: CallerId, *, wait_s: float
) -> None:
    """Report its lease to a caller; other callers may have had the same lease reported."""
    grant = lease.grant
    state.events.append(
        events.FetchGranted(
            buffer=state.name,
            caller_id=caller_id,
            lease_id=lease.lease_id,
            expires_at=lease.expires_at,
            fragments=grants.granted_fragments(lease.share, grant.population),
            session_id=grant.session_id,
            model_version=grant.model_version,
            wait_s=wait_s,
            first_delivery=lease.reported_count == 0,
            step_counts=grant.step_counts() if grant.world_size > 1 else (),
        )
    )
    state.counters["fetches_repeated" if lease.reported_count else "fetches_granted"] += 1
    lease.reported_count += 1


def _report_elapsed(state: BufferState, caller: Caller, reason: str, *, now: float) -> None:
    state.counters["fetches_elapsed"] += 1
    wait_s = now - caller.asked_at
    state.events.append(events.WaitElapsed(state.name, caller.caller_id, reason, wait_s))


def renew(state: BufferState, input: inputs.RenewLease, *, now: float) -> float:
    """Let a lease live on, and return its new expiry."""
    if input.lease_s is not None:
        check_duration("lease_s", input.lease_s)
    lease = state.leases.leases.get(input.lease_id)
    if lease is None or lease.end is not None:
        raise errors.LeaseNotFoundError(input.lease_id)
    expires_at = now + (lease.lease_s if input.lease_s is None else input.lease_s)
    state.leases.renew(lease, expires_at)
    state.shared.record(input, now)
    return expires_at


def release(state: BufferState, input: inputs.ReleaseLease, *, now: float) -> None:
    """End a lease; do nothing if it was released before."""
    lease = state.leases.leases.get(input.lease_id)
    if lease is None or lease.end is LeaseEnd.EXPIRED:
        raise errors.LeaseNotFoundError(input.lease_id)
    if lease.end is None:
        is_returned = input.mode is inputs.ReleaseMode.RETURNED
        end = LeaseEnd.RETURNED if is_returned else LeaseEnd.CONSUMED
        _end(state, lease, end, gives_back=is_returned)
        state.shared.record(input, now)
    settle(state, now=now)


def undo(state: BufferState, input: inputs.UndeliveredGrant, *, now: float) -> None:
    """Note that a caller was not reached; undo a single rank's grant if none was (B12)."""
    state.counters["grants_undelivered"] += 1
    lease = state.leases.leases.get(input.lease_id)
    if lease is not None and lease.end is None:
        lease.reported_count -= 1
        if lease.grant.world_size == 1 and lease.reported_count <= 0:
            _let_go(state, lease, LeaseEnd.RETURNED, gives_back=True)
            state.leases.forget(lease.grant)
            state.shared.record(input, now)
    settle(state, now=now)


def expire(state: BufferState, *, now: float) -> None:
    """End the leases that are over."""
    gives_back = state.config.lease_expiry_policy is LeaseExpiryPolicy.GIVE_BACK
    while (lease := state.leases.first_expiry()) is not None and lease.expires_at <= now:
        _end(state, lease, LeaseEnd.EXPIRED, gives_back=gives_back)


def end_all(state: BufferState) -> None:
    """End every lease, giving nothing back."""
    while (lease := state.leases.first_expiry()) is not None:
        _end(state, lease, LeaseEnd.EXPIRED, gives_back=False)


def _end(state: BufferState, lease: Lease, end: LeaseEnd, *, gives_back: bool) -> None:
    _let_go(state, lease, end, gives_back=gives_back)
    state.leases.end(lease, end, state.config.requests_remembered_max)


def _let_go(state: BufferState, lease: Lease, end: LeaseEnd, *, gives_back: bool) -> None:
    def obstacle(chunk: Chunk) -> EvictionReason | None:
        if lease.grant.session_id != state.model.session_id:
            return EvictionReason.SESSION_ENDED
        if chunk.version < state.version_min:
            return EvictionReason.STALE
        if len(state.holdings.table.held) >= state.config.capacity_chunks:
            return EvictionReason.CAPACITY
        return None

    chunks = _giving_back(state, lease) if gives_back else [each.chunk for each in lease.share]
    state.holdings.end_leases(chunks, state.config.uses_max, obstacle)
    state.counters[LEASES_ENDED[end]] += 1
    chunk_ids = tuple([each.chunk.chunk_id for each in lease.share])
    version = state.model.version
    staleness: tuple[int, ...] = ()
    if version is not None and lease.grant.session_id == state.model.session_id:
        staleness = tuple([version - each.chunk.version for each in lease.share])
    state.events.append(events.LeaseEnded(state.name, end, chunk_ids, staleness))


def _giving_back(state: BufferState, lease: Lease) -> Iterator[Chunk]:
    """Give back the use of each chunk of a lease's share, lazily, as the iterator advances."""
    is_current = lease.grant.session_id == state.model.session_id
    for granted in lease.share:
        chunk = granted.chunk
        chunk.use_count -= 1
        state.counters["chunks_returned"] += 1
        # A chunk that was evicted before its lease ended, and has no use now, never came.
        has_left = chunk.state in (ChunkState.GONE, ChunkState.RETAINED)
        if chunk.use_count == 0:
            if has_left and is_current:
                is_stale = chunk.version < state.version_min
                why = EvictionReason.STALE if is_stale else EvictionReason.CAPACITY
                state.note_unused(chunk.fragments, why)
            for end in (StepsEnd.RETURNED, *([StepsEnd.EVICTED] if has_left else [])):
                state.events.append(events.StepsEnded(state.name, end, chunk.fragments))
        if is_current:
            state.meter.delivered_count -= 1
            is_of_version = lease.grant.model_version == state.model.version
            state.meter.version_delivered_count -= is_of_version
            if has_left and chunk.use_count == 0:
                state.meter.inserted_count -= 1
        yield chunk
