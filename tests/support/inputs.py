"""Inputs and entries of the core from plain texts and numbers, of the default buffer."""

from breadbox_server.core.buffers import DEFAULT_BUFFER
from breadbox_server.core.model.entries import GrantMade
from breadbox_server.core.model.ids import (
    BufferName,
    ChunkId,
    LeaseId,
    ModelVersion,
    PayloadId,
    RequestId,
    SessionId,
)
from breadbox_server.core.model.inputs import (
    EndSession,
    ModelState,
    Payload,
    PublishModel,
    StartSession,
)


def start_session(
    session_id: str = "s0", version: int | None = None, *, buffer: BufferName = DEFAULT_BUFFER
) -> StartSession:
    return StartSession(
        buffer, SessionId(session_id), None if version is None else ModelVersion(version)
    )


def end_session(session_id: str = "s0", *, buffer: BufferName = DEFAULT_BUFFER) -> EndSession:
    return EndSession(buffer, SessionId(session_id))


def publish_model(
    version: int,
    weights: Payload | None = None,
    *,
    session_id: str = "s0",
    buffer: BufferName = DEFAULT_BUFFER,
) -> PublishModel:
    return PublishModel(buffer, SessionId(session_id), ModelVersion(version), weights)


def model_state(session_id: str, version: int | None, weights: Payload | None = None) -> ModelState:
    return ModelState(
        SessionId(session_id), None if version is None else ModelVersion(version), weights
    )


def named_payload(payload_id: str, size_bytes: int = 1, piece_size_bytes: int = 0) -> Payload:
    return Payload(PayloadId(payload_id), size_bytes, piece_size_bytes)


def grant_made(
    chunk_ids: tuple[int, ...],
    lease_ids: tuple[str, ...],
    leases_s: tuple[float, ...],
    *,
    request_id: str = "r",
    fragment_count: int = 1,
    world_size: int = 1,
    buffer: BufferName = DEFAULT_BUFFER,
) -> GrantMade:
    return GrantMade(
        buffer,
        RequestId(request_id),
        fragment_count,
        world_size,
        tuple(map(ChunkId, chunk_ids)),
        tuple(map(LeaseId, lease_ids)),
        leases_s,
    )
