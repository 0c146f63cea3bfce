"""The state of one buffer as plain data, and back.

Plain data is dicts with string keys, lists, strings, numbers, booleans and None: what JSON can
carry. Two buffers with equal snapshots behave alike from then on, but for what is not in one:
waiters, callers, the counters of what changed nothing, and how often a lease was told (a lease of a
snapshot counts as told once, so it is never undone as undelivered before somebody asks again).
"""

import dataclasses
from collections.abc import Iterable, Mapping
from sys import intern
from typing import Any, Final

from breadbox_server.core.assembly import OpenChunk
from breadbox_server.core.chunks import Chunk, ChunkState
from breadbox_server.core.config import (
    BufferConfig,
    FullPolicy,
    LeaseExpiryPolicy,
    MinimumChunksConfig,
    SampleToInsertRatioConfig,
)
from breadbox_server.core.description import QuarantinedFragment
from breadbox_server.core.events import Event, LeaseEnd
from breadbox_server.core.ids import (
    BufferName,
    ChunkId,
    LeaseId,
    ModelVersion,
    RequestId,
    SessionId,
    WorkerId,
)
from breadbox_server.core.inputs import Fragment, Payload
from breadbox_server.core.leases import Grant, GrantedChunk, Lease
from breadbox_server.core.outcomes import OutcomeWindow
from breadbox_server.core.state import BufferState

FORMAT: Final = 1
"""Grows with every change of what a snapshot holds or means."""

_CHUNK_STATES: Final = {state.value: state for state in ChunkState}
_LIMITERS: Final = {
    kind.__name__: kind for kind in (MinimumChunksConfig, SampleToInsertRatioConfig)
}


def take(state: BufferState) -> dict[str, Any]:
    """Write down a buffer; O(everything held)."""
    table = state.holdings.table
    held = [table[chunk_id] for chunk_id in table.sampler.order()]
    return {
        "name": state.name,
        "config": _plain_config(state.config),
        "draw_seed": state.draw_seed,
        "draw_count": state.draw_count,
        "counters": state.counters.durable(),
        "session_id": state.model.session_id,
        "model_version": state.model.version,
        "step_count": state.model.step_count,
        "ended_sessions": state.model.ended_sessions(),
        "weights": [
            [version, *_plain_payload(kept)] for version, kept in state.model.kept_weights()
        ],
        "inserted_count": state.inserted_count,
        "delivered_count": state.delivered_count,
        "closed_count": state.holdings.closed_count,
        "chunks": [_plain_chunk(chunk) for chunk in [*held, *_granted_only(state)]],
        "workers": [
            [worker.worker_id, worker.outcomes.next_index, worker.outcomes.codes().hex()]
            for worker in state.assembly.workers()
        ],
        "open_chunks": [
            [chunk.worker_id, chunk.touched_at, [_plain_fragment(f) for f in chunk.fragments]]
            for chunk in state.assembly.open_chunks()
        ],
        "unreadable": [
            [chunk.chunk_id, chunk.unreadable_count]
            for chunk in [*held, *_granted_only(state)]
            if chunk.unreadable_count
        ],
        "quarantined": [list(fragment) for fragment in state.quarantined],
        "live_grants": [_plain_grant(grant) for grant in state.leases.live_grants()],
        "ended_grants": [_plain_grant(grant) for grant in state.leases.ended_grants()],
    }


def restore(plain: Mapping[str, Any], events: list[Event]) -> BufferState:
    """Build a buffer from what `take` gave.

    Raises:
        KeyError, TypeError, ValueError, DomainError: It is no such thing.
    """
    state = BufferState(
        BufferName(plain["name"]),
        _config(plain["config"]),
        draw_seed=plain["draw_seed"],
        events=events,
    )
    state.draw_count = plain["draw_count"]
    state.counters.restore(plain["counters"])
    state.model.restore_ended([SessionId(session_id) for session_id in plain["ended_sessions"]])
    if plain["model_version"] is not None:
        session_id = SessionId(intern(plain["session_id"]))
        state.model.start(session_id, ModelVersion(plain["model_version"]))
        # Snapshots of earlier servers do not say; the next fragment will.
        state.model.step_count = plain.get("step_count")
    for version, *weights in plain["weights"]:
        state.model.restore_weights(ModelVersion(version), _payload(weights))
    state.inserted_count = plain["inserted_count"]
    state.delivered_count = plain["delivered_count"]
    _restore_workers(state, plain)
    _restore_chunks(state, plain)
    return state


def _restore_workers(state: BufferState, plain: Mapping[str, Any]) -> None:
    for worker_id, next_index, codes in plain["workers"]:
        window = OutcomeWindow(next_index, bytes.fromhex(codes))
        state.assembly.restore_worker(WorkerId(intern(worker_id)), window)
    for _, touched_at, plain_fragments in plain["open_chunks"]:
        fragments = [_fragment(fragment) for fragment in plain_fragments]
        state.assembly.restore_open_chunk(OpenChunk(fragments[0].worker_id, fragments, touched_at))
        for fragment in fragments:
            state.payloads.take(fragment)


def _restore_chunks(state: BufferState, plain: Mapping[str, Any]) -> None:
    """Bring back chunks, then the leases on them, then the table, which counts both."""
    chunks: dict[ChunkId, Chunk] = {}
    for chunk_id, chunk_state, use_count, fragments in plain["chunks"]:
        chunk = Chunk(chunk_id, tuple([_fragment(fragment) for fragment in fragments]))
        chunk.state = _CHUNK_STATES[chunk_state]
        chunk.use_count = use_count
        chunks[chunk_id] = chunk
    # Snapshots of earlier servers say nothing of it.
    for chunk_id, unreadable_count in plain.get("unreadable", ()):
        chunks[chunk_id].unreadable_count = unreadable_count
    state.quarantined.extend(QuarantinedFragment(*each) for each in plain.get("quarantined", ()))
    for plain_grant in plain["live_grants"]:
        grant = _grant(plain_grant, chunks)
        state.leases.restore_live(grant)
        for lease in grant.leases:
            for granted in () if lease.end else lease.share:
                granted.chunk.lease_count += 1
    for plain_grant in plain["ended_grants"]:
        state.leases.restore_ended(_grant(plain_grant, chunks))
    state.holdings.restore(chunks.values(), plain["closed_count"])


def _granted_only(state: BufferState) -> Iterable[Chunk]:
    """List, by age, the chunks that only a living grant knows.

    Those of a rank that has ended its lease are among them: the grant's whole list can be asked
    for as long as it lives, although their payloads may be gone.
    """
    chunks = {
        granted.chunk.chunk_id: granted.chunk
        for grant in state.leases.live_grants()
        for granted in grant.chunks
        if granted.chunk.state is not ChunkState.HELD
    }
    return [chunks[chunk_id] for chunk_id in sorted(chunks)]


def _plain_chunk(chunk: Chunk) -> list[Any]:
    fragments = [_plain_fragment(fragment) for fragment in chunk.fragments]
    return [chunk.chunk_id, chunk.state.value, chunk.use_count, fragments]


def _plain_fragment(fragment: Fragment) -> list[Any]:
    return [
        fragment.worker_id,
        fragment.fragment_index,
        fragment.session_id,
        fragment.model_version_min,
        fragment.model_version_max,
        fragment.step_count,
        fragment.discontinuity,
        *_plain_payload(fragment.payload),
    ]


def _fragment(plain: list[Any]) -> Fragment:
    """Build a fragment; equal ids are one object, so that it costs no copy of them."""
    worker_id, index, session_id, version_min, version_max, *rest = plain
    step_count, discontinuity, payload_id, size_bytes, piece_size_bytes = rest
    return Fragment.restored(
        WorkerId(intern(worker_id)),
        index,
        SessionId(intern(session_id)),
        version_min,
        version_min if version_min == version_max else version_max,
        Payload(payload_id, size_bytes, piece_size_bytes),
        step_count,
        discontinuity,
    )


def _plain_payload(payload: Payload) -> list[Any]:
    return [payload.payload_id, payload.size_bytes, payload.piece_size_bytes]


def _payload(plain: list[Any]) -> Payload:
    payload_id, size_bytes, piece_size_bytes = plain
    return Payload(payload_id, size_bytes, piece_size_bytes)


def _plain_grant(grant: Grant) -> dict[str, Any]:
    return {
        "request_id": grant.request_id,
        "fragment_count": grant.fragment_count,
        "world_size": grant.world_size,
        "session_id": grant.session_id,
        "model_version": grant.model_version,
        "chunks": [
            [granted.chunk.chunk_id, granted.staleness, granted.use_count]
            for granted in grant.chunks
        ],
        "leases": [
            [lease.lease_id, lease.lease_s, lease.expires_at, lease.end and lease.end.value]
            for lease in grant.leases
        ],
    }


def _grant(plain: Mapping[str, Any], chunks: Mapping[ChunkId, Chunk]) -> Grant:
    grant = Grant(
        RequestId(plain["request_id"]),
        plain["fragment_count"],
        plain["world_size"],
        session_id=SessionId(plain["session_id"]),
        model_version=ModelVersion(plain["model_version"]),
        chunks=tuple(
            GrantedChunk(chunks[ChunkId(chunk_id)], staleness, use_count)
            for chunk_id, staleness, use_count in plain["chunks"]
        ),
    )
    for rank, (lease_id, lease_s, expires_at, end) in enumerate(plain["leases"]):
        lease = Lease(LeaseId(lease_id), grant, rank, lease_s, expires_at)
        lease.end = None if end is None else LeaseEnd(end)
        lease.told_count = 1
        grant.leases.append(lease)
    return grant


def _plain_config(config: BufferConfig) -> dict[str, Any]:
    plain = dataclasses.asdict(config)
    plain["full_policy"] = config.full_policy.value
    plain["lease_expiry_policy"] = config.lease_expiry_policy.value
    plain["limiter"] = [type(config.limiter).__name__, plain["limiter"]]
    return plain


def _config(plain: Mapping[str, Any]) -> BufferConfig:
    limiter_name, limiter = plain["limiter"]
    limits = {
        **plain,
        "full_policy": FullPolicy(plain["full_policy"]),
        "lease_expiry_policy": LeaseExpiryPolicy(plain["lease_expiry_policy"]),
        "limiter": _LIMITERS[limiter_name](**limiter),
    }
    return BufferConfig(**limits)
