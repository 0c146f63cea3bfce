"""The core's snapshots as messages, and back: what there may be very many of, in columns."""

from collections.abc import Iterable, MutableSequence, Sequence
from itertools import accumulate, pairwise, repeat
from typing import Final

from breadbox.v1 import buffer_pb2
from breadbox_server.base.conversion import (
    as_one_object,
    payload_of,
    put_payload,
    schema_of,
    to_schema,
)
from breadbox_server.core.model.description import QuarantinedFragment
from breadbox_server.core.model.ids import (
    BufferName,
    ChunkId,
    FragmentIndex,
    LeaseId,
    ModelVersion,
    PayloadId,
    RequestId,
    SessionId,
    SubscriptionName,
    WorkerId,
)
from breadbox_server.core.model.inputs import Fragment
from breadbox_server.core.snapshot import (
    BufferSnapshot,
    ChunkSnapshot,
    GrantedChunkSnapshot,
    GrantSnapshot,
    LeaseSnapshot,
    OpenChunkSnapshot,
    WorkerSnapshot,
)
from breadbox_server.core.state.chunks import ChunkState
from breadbox_server.core.state.subscriptions import Subscription
from breadbox_server.journal.encoding.columns import fragments_of, put_fragments
from breadbox_server.journal.encoding.entries import LEASE_ENDS
from breadbox_server.journal.encoding.limits import limits_of, put_limits
from breadbox_server.journal.v1 import journal_pb2 as pb

_CHUNK_STATES: Final = {
    ChunkState.HELD: pb.CHUNK_STATE_HELD,
    ChunkState.USED_UP: pb.CHUNK_STATE_USED_UP,
    ChunkState.GONE: pb.CHUNK_STATE_GONE,
    ChunkState.RETAINED: pb.CHUNK_STATE_RETAINED,
}
_STATES_OF_CHUNKS: Final = {number: state for state, number in _CHUNK_STATES.items()}
_ENDS: Final = {pb.LEASE_END_UNSPECIFIED: None} | {
    number: end for end, number in LEASE_ENDS.items()
}


def put_buffer(value: BufferSnapshot, message: pb.BufferSnapshot) -> None:
    """Fill a message with a buffer."""
    message.name = value.name
    put_limits(value.config, message.limits)
    message.draw_seed = value.draw_seed
    message.draw_count = value.draw_count
    message.counters.update(value.counters)
    message.session_id = value.session_id
    if value.model_version is not None:
        message.model_version = value.model_version
    if value.step_count is not None:
        message.step_count = value.step_count
    message.ended_session_ids.extend(value.ended_sessions)
    for version, payload in value.weights:
        weights = message.weights.add(model_version=version)
        put_payload(payload, weights.payload)
    message.inserted_count = value.inserted_count
    message.delivered_count = value.delivered_count
    message.closed_count = value.closed_count
    _put_chunks(value.chunks, message.chunks)
    for worker in value.workers:
        message.workers.add(
            worker_id=worker.worker_id,
            next_index=worker.next_index,
            outcome_codes=worker.outcome_codes,
        )
    _put_open_chunks(value.open_chunks, message.open_chunks)
    for fragment in value.quarantined:
        message.quarantined.add(**fragment._asdict())
    for grant in value.live_grants:
        _put_grant(grant, message.live_grants.add())
    for grant in value.ended_grants:
        _put_grant(grant, message.ended_grants.add())
    for schema_hash, schema in value.schemas:
        message.schemas.add(hash=schema_hash, schema=to_schema(schema))
    for each in value.subscriptions:
        message.subscriptions.add(
            name=each.name,
            retaining=each.is_retaining,
            chunk_id=each.cursor,
            missed_count=each.missed_count,
        )
    message.removed_in.extend(value.removed_in)


def buffer_of(message: pb.BufferSnapshot) -> BufferSnapshot:
    """The buffer of a message.

    Raises:
        ValueError, DomainError: There cannot be such a one.
    """
    return BufferSnapshot(
        name=BufferName(message.name),
        config=limits_of(message.limits),
        draw_seed=message.draw_seed,
        draw_count=message.draw_count,
        counters=dict(message.counters),
        session_id=SessionId(as_one_object(message.session_id)),
        model_version=(
            ModelVersion(message.model_version) if message.HasField("model_version") else None
        ),
        step_count=message.step_count if message.HasField("step_count") else None,
        ended_sessions=tuple(map(SessionId, message.ended_session_ids)),
        weights=tuple(
            [
                (ModelVersion(each.model_version), payload_of(each.payload))
                for each in message.weights
            ]
        ),
        inserted_count=message.inserted_count,
        delivered_count=message.delivered_count,
        closed_count=message.closed_count,
        chunks=_chunks_of(message.chunks),
        workers=tuple(
            [
                WorkerSnapshot(
                    WorkerId(as_one_object(each.worker_id)), each.next_index, each.outcome_codes
                )
                for each in message.workers
            ]
        ),
        open_chunks=_open_chunks_of(message.open_chunks),
        quarantined=tuple(map(_quarantined_of, message.quarantined)),
        live_grants=tuple(map(_grant_of, message.live_grants)),
        ended_grants=tuple(map(_grant_of, message.ended_grants)),
        schemas=tuple([(each.hash, schema_of(each.schema)) for each in message.schemas]),
        subscriptions=tuple(
            [
                Subscription(
                    SubscriptionName(each.name), each.retaining, each.chunk_id, each.missed_count
                )
                for each in message.subscriptions
            ]
        ),
        removed_in=tuple(map(ChunkId, message.removed_in)),
    )


def _put_chunks(chunks: Sequence[ChunkSnapshot], message: pb.ChunkColumns) -> None:
    message.chunk_ids.extend([chunk.chunk_id for chunk in chunks])
    message.states.extend([_CHUNK_STATES[chunk.state] for chunk in chunks])
    message.use_counts.extend([chunk.use_count for chunk in chunks])
    message.unreadable_counts.extend([chunk.unreadable_count for chunk in chunks])
    message.fragment_counts.extend([len(chunk.fragments) for chunk in chunks])
    _put_numbers([chunk.priority for chunk in chunks], message.priorities)
    fragments = [fragment for chunk in chunks for fragment in chunk.fragments]
    put_fragments(fragments, message.fragments)


def _put_numbers(values: list[float], column: MutableSequence[float]) -> None:
    """Fill a column that stands for 1 in all of them where it has no value."""
    if values.count(1.0) < len(values):
        column.extend(values)


def _numbers_of(column: Sequence[float], count: int) -> Iterable[float]:
    return column or repeat(1.0, count)


def _chunks_of(message: pb.ChunkColumns) -> tuple[ChunkSnapshot, ...]:
    unknown = set(message.states) - _STATES_OF_CHUNKS.keys()
    if unknown:
        raise ValueError(f"a chunk has a state of {min(unknown)}")
    return tuple(
        map(
            ChunkSnapshot._make,
            zip(
                map(ChunkId, message.chunk_ids),
                map(_STATES_OF_CHUNKS.__getitem__, message.states),
                message.use_counts,
                message.unreadable_counts,
                _cut(fragments_of(message.fragments), message.fragment_counts),
                _numbers_of(message.priorities, len(message.chunk_ids)),
                strict=True,
            ),
        )
    )


def _cut(fragments: list[Fragment], counts: Sequence[int]) -> list[tuple[Fragment, ...]]:
    """So many fragments for each chunk, one after the other.

    Raises:
        ValueError: A chunk has none, or together they have more or fewer.
    """
    if any(count < 1 for count in counts):
        raise ValueError("a chunk has no fragments")
    if sum(counts) != len(fragments):
        raise ValueError(f"{len(fragments)} fragments for {sum(counts)} of chunks")
    if len(counts) == len(fragments):
        return list(zip(fragments, strict=True))
    ends = accumulate(counts, initial=0)
    return [tuple(fragments[start:end]) for start, end in pairwise(ends)]


def _put_open_chunks(chunks: Sequence[OpenChunkSnapshot], message: pb.OpenChunkColumns) -> None:
    message.touched_ats.extend([chunk.touched_at for chunk in chunks])
    message.fragment_counts.extend([len(chunk.fragments) for chunk in chunks])
    fragments = [fragment for chunk in chunks for fragment in chunk.fragments]
    put_fragments(fragments, message.fragments)


def _open_chunks_of(message: pb.OpenChunkColumns) -> tuple[OpenChunkSnapshot, ...]:
    cut = _cut(fragments_of(message.fragments), message.fragment_counts)
    return tuple(map(OpenChunkSnapshot._make, zip(message.touched_ats, cut, strict=True)))


def _quarantined_of(message: buffer_pb2.QuarantinedFragment) -> QuarantinedFragment:
    return QuarantinedFragment(
        WorkerId(message.worker_id),
        FragmentIndex(message.fragment_index),
        SessionId(message.session_id),
        PayloadId(message.payload_id),
    )


def _put_grant(grant: GrantSnapshot, message: pb.Grant) -> None:
    message.request_id = grant.request_id
    message.fragment_count = grant.fragment_count
    message.world_size = grant.world_size
    message.session_id = grant.session_id
    message.model_version = grant.model_version
    message.chunk_ids.extend([chunk.chunk_id for chunk in grant.chunks])
    message.stalenesses.extend([chunk.staleness for chunk in grant.chunks])
    message.use_counts.extend([chunk.use_count for chunk in grant.chunks])
    _put_numbers([chunk.priority for chunk in grant.chunks], message.priorities)
    _put_numbers([chunk.probability for chunk in grant.chunks], message.probabilities)
    message.population = grant.population
    for lease in grant.leases:
        message.leases.add(
            lease_id=lease.lease_id,
            lease_seconds=lease.lease_s,
            expires_at=lease.expires_at,
            end=pb.LEASE_END_UNSPECIFIED if lease.end is None else LEASE_ENDS[lease.end],
        )


def _grant_of(message: pb.Grant) -> GrantSnapshot:
    count = len(message.chunk_ids)
    chunks = zip(
        map(ChunkId, message.chunk_ids),
        message.stalenesses,
        message.use_counts,
        _numbers_of(message.priorities, count),
        _numbers_of(message.probabilities, count),
        strict=True,
    )
    return GrantSnapshot(
        RequestId(message.request_id),
        message.fragment_count,
        message.world_size,
        SessionId(as_one_object(message.session_id)),
        ModelVersion(message.model_version),
        tuple(map(GrantedChunkSnapshot._make, chunks)),
        tuple(map(_lease_of, message.leases)),
        message.population,
    )


def _lease_of(message: pb.Lease) -> LeaseSnapshot:
    if message.end not in _ENDS:
        raise ValueError(f"a lease has an end of {message.end}")
    return LeaseSnapshot(
        LeaseId(message.lease_id), message.lease_seconds, message.expires_at, _ENDS[message.end]
    )
