"""Between the wire and the library: protobuf messages and the plain types, both ways, total.

Invariants:
    W1  No protobuf type leaves this module but inside a request that is about to be sent.
    W2  An enum value that this library does not know reads as "unspecified" or None.
    W3  What cannot be said on the wire (a negative duration, a NaN, a float where a count belongs)
        is an `InvalidRequestError` that names the field, before anything is sent.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import repeat
from types import MappingProxyType
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from breadbox.model import types
from breadbox.model.errors import InternalError, InvalidRequestError
from breadbox.model.fragment import Fragment
from breadbox.v1 import buffer_pb2, fragment_pb2, replay_buffer_service_pb2
from breadbox.wire.schemas import NO_SCHEMA

MessageT = TypeVar("MessageT", bound=Message)

# A batch has many of each.

_OUTCOMES: dict[int, types.AdmissionOutcome] = {
    fragment_pb2.ADMISSION_OUTCOME_ADMITTED: types.AdmissionOutcome.ADMITTED,
    fragment_pb2.ADMISSION_OUTCOME_DUPLICATE: types.AdmissionOutcome.DUPLICATE,
    fragment_pb2.ADMISSION_OUTCOME_STALE: types.AdmissionOutcome.STALE,
    fragment_pb2.ADMISSION_OUTCOME_WRONG_SESSION: types.AdmissionOutcome.WRONG_SESSION,
    fragment_pb2.ADMISSION_OUTCOME_BUFFER_FULL: types.AdmissionOutcome.BUFFER_FULL,
    fragment_pb2.ADMISSION_OUTCOME_BYTES_FULL: types.AdmissionOutcome.BYTES_FULL,
    fragment_pb2.ADMISSION_OUTCOME_PAYLOAD_MISSING: types.AdmissionOutcome.PAYLOAD_MISSING,
    fragment_pb2.ADMISSION_OUTCOME_SCHEMA_UNKNOWN: types.AdmissionOutcome.SCHEMA_UNKNOWN,
}
_FULL_POLICIES = {
    buffer_pb2.FULL_POLICY_EVICT: types.FullPolicy.EVICT,
    buffer_pb2.FULL_POLICY_BLOCK: types.FullPolicy.BLOCK,
}
_LEASE_EXPIRY_POLICIES = {
    buffer_pb2.LEASE_EXPIRY_POLICY_GIVE_BACK: types.LeaseExpiryPolicy.GIVE_BACK,
    buffer_pb2.LEASE_EXPIRY_POLICY_CONSUME: types.LeaseExpiryPolicy.CONSUME,
}
_SCHEMA_POLICIES = {
    buffer_pb2.SCHEMA_POLICY_ONE: types.SchemaPolicy.ONE,
    buffer_pb2.SCHEMA_POLICY_RAGGED: types.SchemaPolicy.RAGGED,
    buffer_pb2.SCHEMA_POLICY_ANY: types.SchemaPolicy.ANY,
}
_RELEASE_MODES = {
    replay_buffer_service_pb2.RELEASE_MODE_CONSUMED: types.ReleaseMode.CONSUMED,
    replay_buffer_service_pb2.RELEASE_MODE_RETURNED: types.ReleaseMode.RETURNED,
}
_EPISODE_ENDS = {
    replay_buffer_service_pb2.EPISODE_END_TERMINATED: types.EpisodeEnd.TERMINATED,
    replay_buffer_service_pb2.EPISODE_END_TRUNCATED: types.EpisodeEnd.TRUNCATED,
    replay_buffer_service_pb2.EPISODE_END_ABORTED: types.EpisodeEnd.ABORTED,
}
_FULL_POLICIES_TO_WIRE = {value: key for key, value in _FULL_POLICIES.items()}
_SCHEMA_POLICIES_TO_WIRE = {value: key for key, value in _SCHEMA_POLICIES.items()}
_LEASE_EXPIRY_POLICIES_TO_WIRE = {value: key for key, value in _LEASE_EXPIRY_POLICIES.items()}
_RELEASE_MODES_TO_WIRE = {value: key for key, value in _RELEASE_MODES.items()}
_EPISODE_ENDS_TO_WIRE = {value: key for key, value in _EPISODE_ENDS.items()}

_COUNT_FIELDS = (
    "fragments_per_chunk",
    "capacity_chunks",
    "capacity_bytes",
    "staleness_max",
    "uses_max",
    "waiters_max",
    "leases_max",
    "workers_max",
)
"""Fields of a buffer's configuration that are whole numbers of the same name on both sides."""

_GAUGE_FIELDS = (
    "chunk_count",
    "retained_chunk_count",
    "open_chunk_count",
    "open_fragment_count",
    "fragment_count",
    "payload_bytes",
    "lease_count",
    "waiter_count",
    "worker_count",
    "inserted_chunk_count",
    "delivered_chunk_count",
    "waiting_reason",
    "outage",
    "hold",
    "latest_request_id",
)


def build(message_type: type[MessageT], **fields: Any) -> MessageT:
    """Make a message; None leaves a field absent.

    Raises:
        InvalidRequestError: A value does not fit its field; names the field.
    """
    try:
        return message_type(**fields)
    except (TypeError, ValueError):
        for name, value in fields.items():
            try:
                message_type(**{name: value})
            except (TypeError, ValueError) as error:
                raise InvalidRequestError(name, f"cannot be {value!r:.200}: {error}") from error
        raise


def duration(name: str, seconds: float | None) -> Duration | None:
    """Say a span on the wire, for a message to copy; None stays None.

    Raises:
        InvalidRequestError: It is negative, NaN, infinite or not a number.
    """
    if seconds is None:
        return None
    return _usual_duration(name, seconds) if type(seconds) is float else _duration(name, seconds)


def _duration(name: str, seconds: float) -> Duration:
    try:
        nanoseconds = round(seconds * 1e9) if math.isfinite(seconds) else -1
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(name, f"must be a number of seconds, got {seconds!r}") from error
    if not 0 <= nanoseconds < 10**18:
        raise InvalidRequestError(name, f"must be a finite span of at least 0 s, got {seconds!r}")
    return Duration(seconds=nanoseconds // 10**9, nanos=nanoseconds % 10**9)


_usual_duration = lru_cache(maxsize=64)(_duration)
"""Nearly all are of a few lengths, those of each append."""


def seconds(span: Duration) -> float:
    """Read a span."""
    return float(span.seconds) + float(span.nanos) * 1e-9


# Fragments ---------------------------------------------------------------------------------------


def payload_to_wire(payload: types.PayloadReference) -> fragment_pb2.PayloadReference:
    """Say where a payload is."""
    return build(
        fragment_pb2.PayloadReference,
        payload_id=payload.payload_id,
        size_bytes=payload.size_bytes,
        piece_size_bytes=payload.piece_size_bytes,
    )


def payload_from_wire(message: fragment_pb2.PayloadReference) -> types.PayloadReference:
    """Read where a payload is."""
    return types.PayloadReference(message.payload_id, message.size_bytes, message.piece_size_bytes)


def metadata_of(
    fragment: Fragment, payload: types.PayloadReference, schema_hash: int = NO_SCHEMA
) -> types.FragmentMetadata:
    """Return the metadata of a fragment with a written payload."""
    return types.FragmentMetadata(
        worker_id=fragment.worker_id,
        fragment_index=fragment.fragment_index,
        session_id=fragment.session_id,
        model_version_min=fragment.model_version_min,
        model_version_max=fragment.model_version_max,
        payload=payload,
        step_count=fragment.step_count,
        discontinuity=fragment.discontinuity,
        schema_hash=schema_hash,
        priority=fragment.priority,
    )


def metadata_to_wire(metadata: types.FragmentMetadata) -> fragment_pb2.FragmentMetadata:
    """Say what the service is to know of a fragment."""
    try:
        return _metadata(metadata, metadata.payload, metadata.schema_hash)
    except (TypeError, ValueError):
        return _checked_metadata(metadata)


def announcement(
    fragment: Fragment, payload: types.PayloadReference | None, schema_hash: int
) -> fragment_pb2.FragmentMetadata:
    """Return the announcement of a fragment; `payload` is None if it is inline."""
    try:
        return _metadata(fragment, payload, schema_hash)
    except (TypeError, ValueError):
        payload = payload or types.PayloadReference("", 0)
        return _checked_metadata(metadata_of(fragment, payload, schema_hash))


def _metadata(
    source: Fragment | types.FragmentMetadata,
    payload: types.PayloadReference | None,
    schema_hash: int,
) -> fragment_pb2.FragmentMetadata:
    """The common case, once per fragment on the way in: no check that names a field."""
    return fragment_pb2.FragmentMetadata(
        worker_id=source.worker_id,
        fragment_index=source.fragment_index,
        session_id=source.session_id,
        model_version_min=source.model_version_min,
        model_version_max=source.model_version_max,
        discontinuity=source.discontinuity,
        payload=None
        if payload is None
        else fragment_pb2.PayloadReference(
            payload_id=payload.payload_id,
            size_bytes=payload.size_bytes,
            piece_size_bytes=payload.piece_size_bytes,
        ),
        step_count=source.step_count,
        schema_hash=schema_hash,
        # Nearly all have the default, which need not be said.
        priority=None if source.priority == 1.0 else source.priority,
    )


def _checked_metadata(metadata: types.FragmentMetadata) -> fragment_pb2.FragmentMetadata:
    return build(
        fragment_pb2.FragmentMetadata,
        worker_id=metadata.worker_id,
        fragment_index=metadata.fragment_index,
        session_id=metadata.session_id,
        model_version_min=metadata.model_version_min,
        model_version_max=metadata.model_version_max,
        discontinuity=metadata.discontinuity,
        payload=payload_to_wire(metadata.payload),
        step_count=metadata.step_count,
        schema_hash=metadata.schema_hash,
        priority=metadata.priority,
    )


def metadata_from_wire(message: fragment_pb2.FragmentMetadata) -> types.FragmentMetadata:
    """Read what the service knows of a fragment."""
    return types.FragmentMetadata(
        message.worker_id,
        message.fragment_index,
        message.session_id,
        message.model_version_min,
        message.model_version_max,
        payload_from_wire(message.payload),
        message.step_count,
        message.discontinuity,
        message.schema_hash,
        message.priority if message.HasField("priority") else 1.0,
    )


def references_from_wire(
    messages: Sequence[fragment_pb2.FragmentReference], bodies: Sequence[bytes] = ()
) -> tuple[types.FragmentReference, ...]:
    """Read granted fragments, in their order, with the payloads that came along: none, or of each.

    Raises:
        InternalError: There are others than fragments.
    """
    if bodies and len(bodies) != len(messages):
        raise InternalError(f"{len(bodies)} payloads came along with {len(messages)} fragments")
    return tuple(
        [
            types.FragmentReference(
                metadata_from_wire(message.metadata),
                message.chunk_id,
                message.staleness,
                message.use_count,
                message.priority,
                message.probability,
                message.population,
                body,
            )
            for message, body in zip(messages, bodies or repeat(b""), strict=False)
        ]
    )


def outcome_from_wire(value: int) -> types.AdmissionOutcome:
    """Read an outcome; one that this library does not know is unspecified."""
    return _OUTCOMES.get(value, types.AdmissionOutcome.UNSPECIFIED)


# Buffers -----------------------------------------------------------------------------------------


def config_to_wire(config: types.BufferConfig) -> buffer_pb2.BufferConfig:
    """Say limits; None stays absent.

    Raises:
        InvalidRequestError: A limit does not fit its field.
    """
    return build(
        buffer_pb2.BufferConfig,
        **{name: getattr(config, name) for name in _COUNT_FIELDS},
        full_policy=config.full_policy and _FULL_POLICIES_TO_WIRE[config.full_policy],
        lease_expiry_policy=config.lease_expiry_policy
        and _LEASE_EXPIRY_POLICIES_TO_WIRE[config.lease_expiry_policy],
        lease_duration=duration("lease_s", config.lease_s),
        open_chunk_duration=duration("open_chunk_s", config.open_chunk_s),
        sampler=_sampler_to_wire("sampler", config.sampler),
        limiter=_limiter_to_wire(config.limiter),
        schema=config.schema and _SCHEMA_POLICIES_TO_WIRE[config.schema],
        priority_exponent=config.priority_exponent,
        remover=_sampler_to_wire("remover", config.remover),
        with_replacement=config.with_replacement,
    )


def config_from_wire(message: buffer_pb2.BufferConfig) -> types.BufferConfig:
    """Read limits; an absent one is None."""
    counts = {
        name: getattr(message, name) if message.HasField(name) else None for name in _COUNT_FIELDS
    }
    return types.BufferConfig(
        **counts,
        full_policy=_FULL_POLICIES.get(message.full_policy),
        lease_expiry_policy=_LEASE_EXPIRY_POLICIES.get(message.lease_expiry_policy),
        lease_s=seconds(message.lease_duration) if message.HasField("lease_duration") else None,
        open_chunk_s=(
            seconds(message.open_chunk_duration)
            if message.HasField("open_chunk_duration")
            else None
        ),
        sampler=message.sampler.WhichOneof("sampler"),
        limiter=_limiter_from_wire(message),
        schema=_SCHEMA_POLICIES.get(message.schema),
        priority_exponent=(
            message.priority_exponent if message.HasField("priority_exponent") else None
        ),
        remover=message.remover.WhichOneof("sampler"),
        with_replacement=(
            message.with_replacement if message.HasField("with_replacement") else None
        ),
    )


def update_mask(config: types.BufferConfig, reset: Iterable[str]) -> FieldMask | None:
    """Say which limits change: those that are given, and those that get their default again.

    Returns:
        None if none gets its default: then what is given says it.

    Raises:
        InvalidRequestError: A name is not one of a limit, or of one that is given too.
    """
    names = [field.name for field in fields(types.BufferConfig)]
    given = [name for name in names if getattr(config, name) is not None]
    back = list(reset)
    for name in back:
        if name not in names:
            raise InvalidRequestError("reset", f"must name limits, such as uses_max, got {name!r}")
        if name in given:
            raise InvalidRequestError("reset", f"names {name}, which is given a value too")
    if not back:
        return None
    return FieldMask(paths=[_NAMES_ON_THE_WIRE.get(name, name) for name in (*given, *back)])


_NAMES_ON_THE_WIRE = {"lease_s": "lease_duration", "open_chunk_s": "open_chunk_duration"}
_SAMPLERS = tuple(buffer_pb2.Sampler.DESCRIPTOR.fields_by_name)


def _sampler_to_wire(field: str, name: str | None) -> buffer_pb2.Sampler | None:
    if name is None:
        return None
    if name not in _SAMPLERS:
        raise InvalidRequestError(
            field, f"must be one of {', '.join(_SAMPLERS)}, got {name!r:.200}"
        )
    return buffer_pb2.Sampler(**{name: {}})


def _limiter_to_wire(
    limiter: types.MinimumChunks | types.SampleToInsertRatio | None,
) -> buffer_pb2.Limiter | None:
    match limiter:
        case None:
            return None
        case types.MinimumChunks():
            return buffer_pb2.Limiter(
                minimum_chunks=build(buffer_pb2.MinimumChunks, chunk_count=limiter.chunk_count)
            )
        case types.SampleToInsertRatio():
            return buffer_pb2.Limiter(
                sample_to_insert_ratio=build(
                    buffer_pb2.SampleToInsertRatio,
                    ratio=limiter.ratio,
                    error_chunks=limiter.error_chunks,
                    minimum_chunk_count=limiter.minimum_chunk_count,
                    lead_chunks=limiter.lead_chunks,
                )
            )
    raise InvalidRequestError("limiter", f"cannot be {limiter!r:.200}")


def _limiter_from_wire(
    message: buffer_pb2.BufferConfig,
) -> types.MinimumChunks | types.SampleToInsertRatio | None:
    match message.limiter.WhichOneof("limiter"):
        case "minimum_chunks":
            return types.MinimumChunks(message.limiter.minimum_chunks.chunk_count)
        case "sample_to_insert_ratio":
            ratio = message.limiter.sample_to_insert_ratio
            return types.SampleToInsertRatio(
                ratio.ratio, ratio.error_chunks, ratio.minimum_chunk_count, ratio.lead_chunks
            )
        case _:
            return None


def buffer_from_wire(message: buffer_pb2.Buffer) -> types.BufferDescription:
    """Read a buffer as the server described it."""
    state = message.state
    return types.BufferDescription(
        name=message.name,
        config=config_from_wire(message.config),
        session_id=message.session_id,
        model_version=message.model_version if message.HasField("model_version") else None,
        state=types.BufferState(
            **{name: getattr(state, name) for name in _GAUGE_FIELDS},
            idle_s=seconds(state.idle_duration),
            quarantined=tuple(
                types.QuarantinedFragment(
                    each.worker_id, each.fragment_index, each.session_id, each.payload_id
                )
                for each in state.quarantined
            ),
            counters=MappingProxyType(dict(sorted(state.counters.items()))),
            chunk_count_by_staleness=MappingProxyType(
                dict(sorted(state.chunk_count_by_staleness.items()))
            ),
        ),
        schemas=tuple(
            MappingProxyType(
                {
                    each.path: types.ArrayType(each.dtype, tuple(each.shape))
                    for each in schema.arrays
                }
            )
            for schema in message.schemas
        ),
        subscriptions=tuple(map(subscription_from_wire, message.subscriptions)),
    )


# Answers -----------------------------------------------------------------------------------------


def model_from_wire(
    message: (
        replay_buffer_service_pb2.WatchModelResponse
        | replay_buffer_service_pb2.StartSessionResponse
    ),
) -> types.ModelState:
    """Read what is current; without a session the version is None whatever the wire says."""
    has_ended = (
        isinstance(message, replay_buffer_service_pb2.WatchModelResponse)
        and message.known_session_ended
    )
    if not message.session_id:
        return types.ModelState("", None, None, has_ended)
    weights = None
    if isinstance(message, replay_buffer_service_pb2.WatchModelResponse):
        version = message.model_version if message.HasField("model_version") else None
        if message.HasField("weights"):
            weights = payload_from_wire(message.weights)
    else:
        version = message.model_version
    return types.ModelState(message.session_id, version, weights, has_ended)


def append_reply_from_wire(
    message: replay_buffer_service_pb2.AppendFragmentsResponse,
) -> types.AppendReply:
    """Read the answer to a batch of appends."""
    return types.AppendReply(
        results=tuple(
            [_append_result(result.outcome, result.first_outcome) for result in message.results]
        ),
        session_id=message.session_id,
        model_version=message.model_version if message.HasField("model_version") else None,
        append_credit_count=message.append_credit_count,
        append_credit_bytes=message.append_credit_bytes,
        retry_delay_s=(seconds(message.retry_delay) if message.HasField("retry_delay") else None),
    )


@lru_cache(maxsize=256)
def _append_result(outcome: int, first_outcome: int) -> types.AppendResult:
    return types.AppendResult(outcome_from_wire(outcome), outcome_from_wire(first_outcome))


def grant_from_wire(
    message: replay_buffer_service_pb2.FetchFragmentsResponse, request_id: str
) -> types.LeaseGrant | str:
    """Read the answer to a fetch: the grant, or the reason why there is none after the wait."""
    if message.WhichOneof("result") != "grant":
        return message.wait_elapsed.waiting_reason or "the server gave no reason"
    grant = message.grant
    return types.LeaseGrant(
        lease_id=grant.lease.lease_id,
        remaining_s=seconds(grant.lease.remaining_duration),
        fragments=references_from_wire(grant.fragments, grant.payloads),
        session_id=grant.session_id,
        model_version=grant.model_version,
        request_id=request_id,
    )


def subscription_from_wire(message: buffer_pb2.Subscription) -> types.Subscription:
    """Read where a named cursor is."""
    return types.Subscription(
        name=message.name,
        retaining=message.retaining,
        acknowledged_chunk_id=message.acknowledged_chunk_id,
        lag_chunk_count=message.lag_chunk_count,
        lag_bytes=message.lag_bytes,
        lag_s=seconds(message.lag_duration),
        missed_chunk_count=message.missed_chunk_count,
    )


def read_from_wire(message: replay_buffer_service_pb2.ReadFragmentsResponse) -> types.FragmentRead:
    """Read what came after a cursor."""
    return types.FragmentRead(
        fragments=references_from_wire(message.fragments, message.payloads),
        lease_id=message.lease.lease_id if message.HasField("lease") else None,
        remaining_s=seconds(message.lease.remaining_duration),
        cursor=message.cursor,
        skipped_chunk_count=message.skipped_chunk_count,
        session_id=message.session_id,
        model_version=message.model_version if message.HasField("model_version") else None,
    )


def store_config_from_wire(
    message: replay_buffer_service_pb2.GetStoreConfigResponse,
) -> types.StoreConfig:
    """Read where payloads live."""
    return types.StoreConfig(
        store_url=message.store_url,
        unannounced_s=seconds(message.unannounced_duration),
        piece_size_bytes=message.piece_size_bytes,
        server_version=message.server_version,
        server_unix_s=(
            message.server_time.ToNanoseconds() * 1e-9 if message.HasField("server_time") else None
        ),
        inline_size_bytes_max=message.inline_size_bytes_max,
        journal_epoch=message.journal_epoch,
        store_concerns=tuple(message.store_concerns),
    )


def release_mode_to_wire(mode: types.ReleaseMode) -> replay_buffer_service_pb2.ReleaseMode:
    """Say how a lease ends."""
    return _RELEASE_MODES_TO_WIRE[mode]


def episode_to_wire(episode: types.EpisodeReport) -> replay_buffer_service_pb2.EpisodeReport:
    """Say what came of an episode."""
    return build(
        replay_buffer_service_pb2.EpisodeReport,
        worker_id=episode.worker_id,
        task=episode.task,
        return_sum=episode.return_sum,
        discounted_return_sum=episode.discounted_return_sum,
        step_count=episode.step_count,
        end=_EPISODE_ENDS_TO_WIRE[episode.end],
    )
