"""The core's entries as messages, and back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from breadbox_server.base.conversion import (
    as_one_object,
    fragment,
    payload_of,
    put_metadata,
    put_payload,
    schema_of,
    to_schema,
)
from breadbox_server.core.model import entries as core
from breadbox_server.core.model import inputs
from breadbox_server.core.model.entries import Entry, FragmentTaken
from breadbox_server.core.model.events import LeaseEnd
from breadbox_server.core.model.ids import (
    BufferName,
    ChunkId,
    LeaseId,
    ModelVersion,
    PayloadId,
    RequestId,
    SessionId,
    SubscriptionName,
)
from breadbox_server.core.model.inputs import AdmissionOutcome, ReleaseMode
from breadbox_server.journal.encoding.columns import fragments_of, put_fragments
from breadbox_server.journal.encoding.frames import NewerFormatError
from breadbox_server.journal.encoding.limits import limits_of, put_limits
from breadbox_server.journal.v1 import journal_pb2 as pb

RUN_MIN: Final = 16
"""Fragments in a row from which on columns cost less than a message for each."""
LEASE_ENDS: Final = {
    LeaseEnd.CONSUMED: pb.LEASE_END_CONSUMED,
    LeaseEnd.RETURNED: pb.LEASE_END_RETURNED,
    LeaseEnd.EXPIRED: pb.LEASE_END_EXPIRED,
}
_RELEASES: Final = {
    ReleaseMode.CONSUMED: pb.LEASE_END_CONSUMED,
    ReleaseMode.RETURNED: pb.LEASE_END_RETURNED,
}
_RELEASE_MODES: Final = {number: mode for mode, number in _RELEASES.items()}

_ADMITTED: Final = AdmissionOutcome.ADMITTED
_Messages = RepeatedCompositeFieldContainer[pb.Entry]


def put_entries(entries: Sequence[tuple[float, Entry]], messages: _Messages) -> None:
    """Add entries to a turn's, in order."""
    if len(entries) < RUN_MIN:
        _put_each(entries, messages)
        return
    for buffer, group in groupby(entries, _buffer_of_run):
        run = list(group)
        if buffer is None or len(run) < RUN_MIN:
            _put_each(run, messages)
            continue
        message = messages.add(buffer=buffer)
        message.fragments_admitted.nows.extend([now for now, _ in run])
        put_fragments(
            [taken.fragment for _, taken in run],  # type: ignore[union-attr]
            message.fragments_admitted.fragments,
        )


def entries_of(messages: Iterable[pb.Entry]) -> list[tuple[float, Entry]]:
    """The entries of a turn, in order.

    Raises:
        NewerFormatError: One is of a kind that this server does not know.
        ValueError, DomainError: One cannot be.
    """
    read: list[tuple[float, Entry]] = []
    name = ""
    for message in messages:
        kind = message.WhichOneof("decision")
        if message.buffer != name:
            name = as_one_object(message.buffer)
        buffer = BufferName(name)
        if kind == "fragment_admitted":
            taken = FragmentTaken(buffer, fragment(message.fragment_admitted), _ADMITTED)
            read.append((message.now, taken))
        elif kind == "fragments_admitted":
            read += _run_of(buffer, message.fragments_admitted)
        elif kind is None:
            raise NewerFormatError("it holds an entry of a kind that this server does not know")
        else:
            read.append((message.now, _READERS[kind](buffer, getattr(message, kind))))
    return read


def _buffer_of_run(timed: tuple[float, Entry]) -> BufferName | None:
    """The buffer of an admitted fragment; None of any other entry."""
    entry = timed[1]
    is_admitted = type(entry) is FragmentTaken and entry.outcome is AdmissionOutcome.ADMITTED
    return entry.buffer if is_admitted else None


def _run_of(buffer: BufferName, message: pb.FragmentRun) -> Iterator[tuple[float, FragmentTaken]]:
    fragments = fragments_of(message.fragments)
    taken = [FragmentTaken(buffer, each, _ADMITTED) for each in fragments]
    return zip(message.nows, taken, strict=True)


def _put_each(entries: Iterable[tuple[float, Entry]], messages: _Messages) -> None:
    for now, entry in entries:
        message = messages.add()
        message.now = now
        message.buffer = entry.buffer
        _WRITERS[type(entry)](entry, message)


# --- kind by kind ----------------------------------------------------------------------------


def _put_taken(entry: FragmentTaken, message: pb.Entry) -> None:
    is_admitted = entry.outcome is AdmissionOutcome.ADMITTED
    put_metadata(
        entry.fragment, message.fragment_admitted if is_admitted else message.fragment_stale
    )


def _put_created(entry: core.BufferCreated, message: pb.Entry) -> None:
    put_limits(entry.config, message.buffer_created.limits)
    message.buffer_created.draw_seed = entry.draw_seed


def _put_grant(entry: core.GrantMade, message: pb.Entry) -> None:
    made = message.grant_made
    made.request_id = entry.request_id
    made.fragment_count = entry.fragment_count
    made.world_size = entry.world_size
    made.chunk_ids.extend(entry.chunk_ids)
    made.lease_ids.extend(entry.lease_ids)
    made.lease_seconds.extend(entry.leases_s)


def _put_started(entry: inputs.StartSession, message: pb.Entry) -> None:
    message.session_started.session_id = entry.session_id
    if entry.model_version is not None:
        message.session_started.model_version = entry.model_version


def _put_ended(entry: inputs.EndSession, message: pb.Entry) -> None:
    message.session_ended.session_id = entry.session_id


def _put_published(entry: inputs.PublishModel, message: pb.Entry) -> None:
    published = message.model_published
    published.session_id = entry.session_id
    published.model_version = entry.model_version
    if entry.weights is not None:
        put_payload(entry.weights, published.weights)


def _put_renewed(entry: inputs.RenewLease, message: pb.Entry) -> None:
    message.lease_renewed.lease_id = entry.lease_id
    if entry.lease_s is not None:
        message.lease_renewed.lease_seconds = entry.lease_s


def _put_released(entry: inputs.ReleaseLease, message: pb.Entry) -> None:
    message.lease_released.lease_id = entry.lease_id
    message.lease_released.end = _RELEASES[entry.mode]


def _put_undone(entry: inputs.UndeliveredGrant, message: pb.Entry) -> None:
    message.grant_undone.lease_id = entry.lease_id


def _put_dropped(entry: inputs.DropPayloads, message: pb.Entry) -> None:
    message.payloads_dropped.payload_ids.extend(entry.payload_ids)


def _put_unreadable(entry: inputs.ReportUnreadable, message: pb.Entry) -> None:
    reported = message.unreadable_reported
    reported.lease_id = entry.lease_id
    reported.payload_ids.extend(entry.payload_ids)
    reported.reports_max = entry.reports_max


def _put_schema(entry: inputs.DeclareSchema, message: pb.Entry) -> None:
    declared = message.schema_told
    declared.session_id = entry.session_id
    declared.hash = entry.schema_hash
    declared.schema.CopyFrom(to_schema(entry.schema))


def _put_priorities(entry: inputs.UpdatePriorities, message: pb.Entry) -> None:
    updated = message.priorities_updated
    updated.deleted_chunk_ids.extend(entry.deleted)
    updated.chunk_ids.extend([chunk_id for chunk_id, _ in entry.priorities])
    updated.priorities.extend([priority for _, priority in entry.priorities])


def _put_subscribed(entry: inputs.Subscribe, message: pb.Entry) -> None:
    assert entry.after_chunk_id is not None, "an entry says where a subscription begins"
    message.subscription_created.name = entry.name
    message.subscription_created.retaining = entry.is_retaining
    message.subscription_created.after_chunk_id = entry.after_chunk_id


def _put_acknowledged(entry: inputs.Acknowledge, message: pb.Entry) -> None:
    message.chunks_acknowledged.name = entry.name
    message.chunks_acknowledged.chunk_id = entry.chunk_id


def _put_unsubscribed(entry: inputs.Unsubscribe, message: pb.Entry) -> None:
    message.subscription_deleted.name = entry.name


def _put_updated(entry: inputs.UpdateBuffer, message: pb.Entry) -> None:
    put_limits(entry.config, message.buffer_updated.limits)


def _put_deleted(_: inputs.DeleteBuffer, message: pb.Entry) -> None:
    message.buffer_deleted.SetInParent()


def _grant_of(buffer: BufferName, made: pb.GrantMade) -> core.GrantMade:
    return core.GrantMade(
        buffer,
        RequestId(made.request_id),
        made.fragment_count,
        made.world_size,
        tuple(map(ChunkId, made.chunk_ids)),
        tuple(map(LeaseId, made.lease_ids)),
        tuple(made.lease_seconds),
    )


def _started_of(buffer: BufferName, started: pb.SessionStarted) -> inputs.StartSession:
    has_version = started.HasField("model_version")
    version = ModelVersion(started.model_version) if has_version else None
    return inputs.StartSession(buffer, SessionId(as_one_object(started.session_id)), version)


def _published_of(buffer: BufferName, published: pb.ModelPublished) -> inputs.PublishModel:
    return inputs.PublishModel(
        buffer,
        SessionId(published.session_id),
        ModelVersion(published.model_version),
        payload_of(published.weights) if published.HasField("weights") else None,
    )


def _renewed_of(buffer: BufferName, renewed: pb.LeaseRenewed) -> inputs.RenewLease:
    lease_s = renewed.lease_seconds if renewed.HasField("lease_seconds") else None
    return inputs.RenewLease(buffer, LeaseId(renewed.lease_id), lease_s)


def _released_of(buffer: BufferName, released: pb.LeaseReleased) -> inputs.ReleaseLease:
    mode = _RELEASE_MODES.get(released.end)
    if mode is None:
        raise ValueError(f"a lease is not released by an end of {released.end}")
    return inputs.ReleaseLease(buffer, LeaseId(released.lease_id), mode)


def _priorities_of(buffer: BufferName, updated: pb.PrioritiesUpdated) -> inputs.UpdatePriorities:
    priorities = zip(map(ChunkId, updated.chunk_ids), updated.priorities, strict=True)
    deleted = tuple(map(ChunkId, updated.deleted_chunk_ids))
    return inputs.UpdatePriorities(buffer, tuple(priorities), deleted)


_WRITERS: Final[Mapping[type, Callable[[Any, pb.Entry], None]]] = {
    FragmentTaken: _put_taken,
    core.BufferCreated: _put_created,
    core.GrantMade: _put_grant,
    inputs.StartSession: _put_started,
    inputs.EndSession: _put_ended,
    inputs.PublishModel: _put_published,
    inputs.RenewLease: _put_renewed,
    inputs.ReleaseLease: _put_released,
    inputs.UndeliveredGrant: _put_undone,
    inputs.DropPayloads: _put_dropped,
    inputs.ReportUnreadable: _put_unreadable,
    inputs.UpdateBuffer: _put_updated,
    inputs.DeleteBuffer: _put_deleted,
    inputs.DeclareSchema: _put_schema,
    inputs.UpdatePriorities: _put_priorities,
    inputs.Subscribe: _put_subscribed,
    inputs.Acknowledge: _put_acknowledged,
    inputs.Unsubscribe: _put_unsubscribed,
}
_READERS: Final[Mapping[str, Callable[[Any, Any], Entry]]] = {
    "fragment_stale": lambda buffer, message: FragmentTaken(
        buffer, fragment(message), AdmissionOutcome.STALE
    ),
    "buffer_created": lambda buffer, message: core.BufferCreated(
        buffer, limits_of(message.limits), message.draw_seed
    ),
    "grant_made": _grant_of,
    "session_started": _started_of,
    "session_ended": lambda buffer, message: inputs.EndSession(
        buffer, SessionId(message.session_id)
    ),
    "model_published": _published_of,
    "lease_renewed": _renewed_of,
    "lease_released": _released_of,
    "grant_undone": lambda buffer, message: inputs.UndeliveredGrant(
        buffer, LeaseId(message.lease_id)
    ),
    "payloads_dropped": lambda buffer, message: inputs.DropPayloads(
        buffer, tuple(map(PayloadId, message.payload_ids))
    ),
    "unreadable_reported": lambda buffer, message: inputs.ReportUnreadable(
        buffer,
        LeaseId(message.lease_id),
        tuple(map(PayloadId, message.payload_ids)),
        message.reports_max,
    ),
    "buffer_updated": lambda buffer, message: inputs.UpdateBuffer(
        buffer, limits_of(message.limits)
    ),
    "buffer_deleted": lambda buffer, _: inputs.DeleteBuffer(buffer),
    "priorities_updated": _priorities_of,
    "subscription_created": lambda buffer, message: inputs.Subscribe(
        buffer, SubscriptionName(message.name), message.retaining, message.after_chunk_id
    ),
    "chunks_acknowledged": lambda buffer, message: inputs.Acknowledge(
        buffer, SubscriptionName(message.name), message.chunk_id
    ),
    "subscription_deleted": lambda buffer, message: inputs.Unsubscribe(
        buffer, SubscriptionName(message.name)
    ),
    "schema_told": lambda buffer, message: inputs.DeclareSchema(
        buffer, SessionId(message.session_id), message.hash, schema_of(message.schema)
    ),
}
