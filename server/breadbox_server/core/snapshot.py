"""The state of one buffer as values, and back.

Not in it: waiters, callers, counters of what changed nothing, and how often a lease was reported
(once, after a restore: it is never undone as undelivered before a caller asks again).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from breadbox_server.core.model import ids
from breadbox_server.core.model.config import PRIORITY_DEFAULT, BufferConfig
from breadbox_server.core.model.counters import DURABLE
from breadbox_server.core.model.description import QuarantinedFragment
from breadbox_server.core.model.entries import ReplayError
from breadbox_server.core.model.events import LeaseEnd
from breadbox_server.core.model.inputs import Fragment, GroupEndReason, Payload
from breadbox_server.core.model.schemas import Schema
from breadbox_server.core.state.assembly import OutcomeWindow
from breadbox_server.core.state.buffer_state import BufferState, Shared
from breadbox_server.core.state.chunks import Chunk, ChunkState
from breadbox_server.core.state.grants import Grant, GrantedChunk, Lease
from breadbox_server.core.state.subscriptions import Subscription
from breadbox_server.core.state.tickets import Ticket


class ChunkSnapshot(NamedTuple):
    """A closed chunk; see `chunks.Chunk`."""

    chunk_id: ids.ChunkId
    state: ChunkState
    use_count: int
    unreadable_count: int
    fragments: tuple[Fragment, ...]
    priority: float = PRIORITY_DEFAULT


class OpenChunkSnapshot(NamedTuple):
    """A worker's open chunk."""

    touched_at: float
    """When its latest fragment was admitted."""
    fragments: tuple[Fragment, ...]


class WorkerSnapshot(NamedTuple):
    """What is remembered of a worker; see `assembly.OutcomeWindow`."""

    worker_id: ids.WorkerId
    next_index: int
    outcome_codes: bytes
    end: GroupEndReason | None = None
    end_number: int = 0


class TicketSnapshot(NamedTuple):
    """A ticket; see `tickets.Ticket`."""

    group: ids.WorkerId
    request_id: ids.RequestId
    holder: str
    model_version: ids.ModelVersion
    lease_s: float
    expires_at: float
    given_back: tuple[int, ...]


class GrantedChunkSnapshot(NamedTuple):
    """A chunk as it was when it was granted."""

    chunk_id: ids.ChunkId
    staleness: int
    use_count: int
    priority: float = PRIORITY_DEFAULT
    probability: float = 1.0


class LeaseSnapshot(NamedTuple):
    """A rank's lease; see `grants.Lease`."""

    lease_id: ids.LeaseId
    lease_s: float
    expires_at: float
    end: LeaseEnd | None


class GrantSnapshot(NamedTuple):
    """What one request got; see `grants.Grant`."""

    request_id: ids.RequestId
    fragment_count: int
    world_size: int
    session_id: ids.SessionId
    model_version: ids.ModelVersion
    chunks: tuple[GrantedChunkSnapshot, ...]
    leases: tuple[LeaseSnapshot, ...]
    """By rank."""
    population: int = 0
    """0: the server that granted it did not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSnapshot:
    """Everything of a buffer that outlives the process."""

    name: ids.BufferName
    config: BufferConfig
    draw_seed: int
    draw_count: int
    counters: Mapping[str, int]
    session_id: ids.SessionId
    """Empty: no session is current."""
    model_version: ids.ModelVersion | None
    step_count: int | None
    ended_sessions: tuple[ids.SessionId, ...]
    """The first to have ended first."""
    weights: tuple[tuple[ids.ModelVersion, Payload], ...]
    inserted_count: int
    delivered_count: int
    closed_count: int
    chunks: tuple[ChunkSnapshot, ...]
    """First those held, in the sampler's order, then those leased or retained, by age."""
    workers: tuple[WorkerSnapshot, ...]
    """The one heard of last at the end."""
    open_chunks: tuple[OpenChunkSnapshot, ...]
    """The longest silent first."""
    quarantined: tuple[QuarantinedFragment, ...]
    live_grants: tuple[GrantSnapshot, ...]
    ended_grants: tuple[GrantSnapshot, ...]
    """The first to have ended first."""
    schemas: tuple[tuple[int, Schema], ...] = ()
    subscriptions: tuple[Subscription, ...] = ()
    removed_in: tuple[ids.ChunkId, ...] = ()
    """The chunks held in the remover's order; empty where the oldest leave first."""
    group_end_count: int = 0
    """Ends of groups ever noted."""
    tickets: tuple[TicketSnapshot, ...] = ()
    version_delivered_count: int = 0
    """Uses granted at the current version, less those given back."""


def take(state: BufferState) -> BufferSnapshot:
    """Return the snapshot of a buffer; O(everything held)."""
    table = state.holdings.table
    held = [table.held[chunk_id] for chunk_id in table.sampler.order()]
    return BufferSnapshot(
        name=state.name,
        config=state.config,
        draw_seed=state.draw_seed,
        draw_count=state.draw_count,
        counters={name: count for name, count in state.counters.items() if name in DURABLE},
        session_id=state.model.session_id,
        model_version=state.model.version,
        step_count=state.model.step_count,
        ended_sessions=tuple(state.model.ended_sessions),
        weights=tuple(state.model.weights.items()),
        inserted_count=state.meter.inserted_count,
        delivered_count=state.meter.delivered_count,
        closed_count=state.holdings.closed_count,
        chunks=tuple(
            [
                ChunkSnapshot(
                    chunk.chunk_id,
                    chunk.state,
                    chunk.use_count,
                    chunk.unreadable_count,
                    chunk.fragments,
                    chunk.priority,
                )
                for chunk in [*held, *_not_held(state)]
            ]
        ),
        workers=tuple(
            [
                WorkerSnapshot(
                    worker_id,
                    worker.outcomes.next_index,
                    worker.outcomes.codes,
                    worker.end,
                    worker.end_number,
                )
                for worker_id, worker in state.assembly.workers.items()
            ]
        ),
        open_chunks=tuple(
            [
                OpenChunkSnapshot(chunk.touched_at, tuple(chunk.whole()))
                for chunk in state.assembly.open.values()
            ]
        ),
        quarantined=tuple(state.quarantined),
        live_grants=tuple([_taken_grant(grant) for grant in state.leases.live_grants.values()]),
        ended_grants=tuple([_taken_grant(grant) for grant in state.leases.ended_grants.values()]),
        schemas=tuple(state.model.schemas.items()),
        subscriptions=tuple([replace(each) for each in state.holdings.subscriptions.all()]),
        removed_in=() if table.remover is None else tuple(table.remover.order()),
        group_end_count=state.assembly.ended_count,
        tickets=tuple(_taken_tickets(state)),
        version_delivered_count=state.meter.version_delivered_count,
    )


def _taken_tickets(state: BufferState) -> Iterable[TicketSnapshot]:
    return [
        TicketSnapshot(
            each.group,
            each.request_id,
            each.holder,
            each.model_version,
            each.lease_s,
            each.expires_at,
            tuple(sorted(each.given_back)),
        )
        for each in state.assembly.tickets.by_group.values()
    ]


def restore(taken: BufferSnapshot, shared: Shared) -> BufferState:
    """Build a buffer from what `take` gave, or raise if it contradicts itself."""
    state = BufferState(taken.name, taken.config, draw_seed=taken.draw_seed, shared=shared)
    state.draw_count = taken.draw_count
    # A counter that the snapshot does not have begins at 0.
    state.counters.update({name: taken.counters[name] for name in DURABLE & taken.counters.keys()})
    model = state.model
    model.ended_sessions.update(dict.fromkeys(taken.ended_sessions))
    if taken.model_version is not None:
        model.session_id, model.version = taken.session_id, taken.model_version
        model.step_count = taken.step_count
        model.schemas.update(taken.schemas)
    for version, weights in taken.weights:
        model.take_weights(version, weights)
    state.meter.inserted_count = taken.inserted_count
    state.meter.delivered_count = taken.delivered_count
    for worker_id, next_index, codes, end, end_number in taken.workers:
        worker = state.assembly.find_or_add(worker_id)
        worker.outcomes = OutcomeWindow(next_index, codes)
        worker.end, worker.end_number = end, end_number
    state.assembly.restore_ends(taken.group_end_count)
    for touched_at, fragments in taken.open_chunks:
        worker_id = fragments[0].worker_id
        if worker_id not in state.assembly.workers:
            raise ReplayError(f"worker {worker_id!r} has an open chunk, and is not remembered")
        worker = state.assembly.workers[worker_id]
        state.assembly.open_again(worker, list(fragments), touched_at)
        for fragment in fragments:
            state.payloads.take(fragment)
    state.meter.version_delivered_count = taken.version_delivered_count
    _restore_tickets(state, taken.tickets)
    _restore_chunks(state, taken)
    return state


def _restore_tickets(state: BufferState, taken: Iterable[TicketSnapshot]) -> None:
    assembly = state.assembly
    for each in taken:
        ticket = Ticket(*each[:6], given_back=set(each.given_back))
        assembly.tickets.add([ticket])
        if assembly.in_any_order and ticket.group in assembly.open:
            del assembly.tickets.unbegun[ticket.group]


def _restore_chunks(state: BufferState, taken: BufferSnapshot) -> None:
    """Bring back chunks, then the leases on them, then the table, which counts both."""
    chunks: dict[ids.ChunkId, Chunk] = {}
    for chunk_id, chunk_state, use_count, unreadable_count, fragments, priority in taken.chunks:
        chunk = Chunk(chunk_id, fragments, by_newest=state.holdings.by_newest)
        chunk.priority = priority
        chunk.state = chunk_state
        chunk.use_count = use_count
        chunk.unreadable_count = unreadable_count
        chunks[chunk_id] = chunk
    state.quarantined.extend(taken.quarantined)
    for taken_grant in taken.live_grants:
        grant = _grant(taken_grant, chunks)
        state.leases.add(grant)
        for lease in grant.leases:
            for granted in () if lease.end else lease.share:
                granted.chunk.lease_count += 1
    for taken_grant in taken.ended_grants:
        state.leases.remember(_grant(taken_grant, chunks))
    subscriptions = [replace(each) for each in taken.subscriptions]
    held = [chunk.chunk_id for chunk in chunks.values() if chunk.state is ChunkState.HELD]
    if state.holdings.table.remover is not None and sorted(held) != sorted(taken.removed_in):
        raise ReplayError("the order in which chunks leave is not that of those held")
    state.holdings.restore(
        chunks.values(), taken.removed_in, taken.closed_count, subscriptions, taken.session_id
    )


def _not_held(state: BufferState) -> Iterable[Chunk]:
    """List, by age, the chunks that are retained, or that only a living grant knows.

    A grant's whole list can be asked for while it lives, so an ended rank's are among them.
    """
    chunks = {
        granted.chunk.chunk_id: granted.chunk
        for grant in state.leases.live_grants.values()
        for granted in grant.chunks
        if granted.chunk.state is not ChunkState.HELD
    } | {chunk.chunk_id: chunk for chunk in state.holdings.subscriptions.retained()}
    return [chunks[chunk_id] for chunk_id in sorted(chunks)]


def _taken_grant(grant: Grant) -> GrantSnapshot:
    return GrantSnapshot(
        grant.request_id,
        grant.fragment_count,
        grant.world_size,
        grant.session_id,
        grant.model_version,
        tuple(
            [GrantedChunkSnapshot(granted.chunk.chunk_id, *granted[1:]) for granted in grant.chunks]
        ),
        tuple(
            [
                LeaseSnapshot(lease.lease_id, lease.lease_s, lease.expires_at, lease.end)
                for lease in grant.leases
            ]
        ),
        grant.population,
    )


def _grant(taken: GrantSnapshot, chunks: Mapping[ids.ChunkId, Chunk]) -> Grant:
    unknown = [each.chunk_id for each in taken.chunks if each.chunk_id not in chunks]
    if unknown:
        raise ReplayError(f"grant {taken.request_id!r} has a chunk {unknown[0]} that is not known")
    grant = Grant(
        taken.request_id,
        taken.fragment_count,
        taken.world_size,
        taken.session_id,
        taken.model_version,
        taken.population,
        tuple([GrantedChunk(chunks[each.chunk_id], *each[1:]) for each in taken.chunks]),
    )
    for rank, (lease_id, lease_s, expires_at, end) in enumerate(taken.leases):
        lease = Lease(lease_id, grant, rank, lease_s, expires_at, end, reported_count=1)
        grant.leases.append(lease)
    return grant
