"""Wire messages to the core's inputs and back, both ways, total.

Going in, everything that is not a decision is checked here: presence, names, ranges. The first
thing wrong raises `InvalidArgumentError` naming the field as it stands on the wire.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from breadbox.model.types import PayloadReference
from breadbox.stores.keys import PIECE_SIZE_BYTES_MIN, new_payload_id
from breadbox.v1 import buffer_pb2, fragment_pb2, replay_buffer_service_pb2, schema_pb2
from breadbox.wire.schemas import (
    SCHEMA_ARRAYS_MAX,
    SCHEMA_BYTES_MAX,
    SCHEMAS_TOLD_MAX,
    hash_of,
    message_of,
)
from breadbox_server.core.model.config import (
    NAME_SIZE_BYTES_MAX,
    PRIORITY_DEFAULT,
    BufferConfig,
    FullPolicy,
    LeaseExpiryPolicy,
    LimiterConfig,
    MinimumChunksConfig,
    SampleToInsertRatioConfig,
    SchemaPolicy,
    check_duration,
)
from breadbox_server.core.model.description import SubscriptionDescription
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.ids import (
    BufferName,
    ChunkId,
    PayloadId,
    SessionId,
    SubscriptionName,
)
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Appended,
    Fragment,
    GrantedFragment,
    Payload,
    ReleaseMode,
    UpdatePriorities,
)
from breadbox_server.core.model.schemas import Schema, SchemaArray
from breadbox_server.core.model.validation import check_fragment, check_int, check_payload
from breadbox_server.core.rules.reading import Cursor
from breadbox_server.limits import (
    APPEND_FRAGMENTS_MAX,
    GATEWAY_RANGES_MAX,
    PIECES_MAX,
    PRIORITIES_MAX,
    READ_CHUNKS,
    READ_CHUNKS_MAX,
    UNREADABLE_MAX,
)

pb = replay_buffer_service_pb2

WaitingRequest = (
    pb.AppendFragmentsRequest
    | pb.FetchFragmentsRequest
    | pb.ReadFragmentsRequest
    | pb.WatchModelRequest
)
_Member = TypeVar("_Member")

DEFAULT_BUFFER_NAME: Final = "default"
IDS_SHARED_MAX: Final = 65_536
"""Ids of sessions and workers of which equal ones are one object."""
_shared: Final = lru_cache(maxsize=IDS_SHARED_MAX)(str)

_OUTCOMES: Final = {
    outcome: getattr(fragment_pb2, f"ADMISSION_OUTCOME_{outcome.name}")
    for outcome in AdmissionOutcome
}
_FULL_POLICIES: Final = {
    FullPolicy.EVICT: buffer_pb2.FULL_POLICY_EVICT,
    FullPolicy.BLOCK: buffer_pb2.FULL_POLICY_BLOCK,
}
_LEASE_EXPIRY_POLICIES: Final = {
    LeaseExpiryPolicy.GIVE_BACK: buffer_pb2.LEASE_EXPIRY_POLICY_GIVE_BACK,
    LeaseExpiryPolicy.CONSUME: buffer_pb2.LEASE_EXPIRY_POLICY_CONSUME,
}
_SCHEMA_POLICIES: Final = {
    SchemaPolicy.ONE: buffer_pb2.SCHEMA_POLICY_ONE,
    SchemaPolicy.RAGGED: buffer_pb2.SCHEMA_POLICY_RAGGED,
    SchemaPolicy.ANY: buffer_pb2.SCHEMA_POLICY_ANY,
}
_RELEASE_MODES: Final[Mapping[int, ReleaseMode]] = {
    pb.RELEASE_MODE_CONSUMED: ReleaseMode.CONSUMED,
    pb.RELEASE_MODE_RETURNED: ReleaseMode.RETURNED,
}
_EPISODE_ENDS: Final[Mapping[int, str]] = {
    pb.EPISODE_END_TERMINATED: "terminated",
    pb.EPISODE_END_TRUNCATED: "truncated",
    pb.EPISODE_END_ABORTED: "aborted",
}


# --- going in --------------------------------------------------------------------------------


def buffer_name(text: str) -> BufferName:
    """The buffer that a request names; empty is the default buffer."""
    return BufferName(text or DEFAULT_BUFFER_NAME)


def session_id(text: str) -> SessionId:
    """A session's id. Equal ids are one object, so that a held fragment costs no copy of one."""
    return SessionId(as_one_object(text))


def as_one_object(text: str) -> str:
    """The same object for equal ids, of the `IDS_SHARED_MAX` that were seen last.

    Not interned: what callers make up must not stay for ever, as it does in Python 3.12.0 to 3.12.5
    (python/cpython#113993).
    """
    return _shared(text) if len(text) <= NAME_SIZE_BYTES_MAX else text


def seconds(duration: Duration) -> float:
    """A span on the wire as seconds."""
    return float(duration.seconds + duration.nanos / 1e9)


def wait_s(request: "WaitingRequest", cap_s: float) -> float:
    """How long a caller is ready to wait, at most `cap_s`; absent is 0."""
    span_s = seconds(request.max_wait)
    if span_s < 0:
        raise InvalidArgumentError("max_wait", f"must not be negative, got {span_s:g} s")
    return min(span_s, cap_s)


def cursor(request: "pb.ReadFragmentsRequest") -> Cursor:
    """Where a reader stands."""
    check_int("chunk_count_max", request.chunk_count_max, 0, 2**62)
    if request.HasField("after_chunk_id"):
        check_int("after_chunk_id", request.after_chunk_id, -1, 2**62)
    return Cursor(
        after=request.after_chunk_id if request.HasField("after_chunk_id") else None,
        known_session_id=(
            SessionId(request.known_session_id) if request.HasField("known_session_id") else None
        ),
        chunk_count_max=min(request.chunk_count_max or READ_CHUNKS, READ_CHUNKS_MAX),
        subscription=SubscriptionName(request.subscription) if request.subscription else None,
    )


def lease_s(
    request: "pb.FetchFragmentsRequest | pb.ReadFragmentsRequest | pb.RenewLeaseRequest",
) -> float | None:
    """How long a lease is to live; None when the caller leaves it to the buffer."""
    if not request.HasField("lease_duration"):
        return None
    span_s = seconds(request.lease_duration)
    check_duration("lease_duration", span_s)
    return span_s


def release_mode(value: int) -> ReleaseMode:
    """How a lease is to end; there is no default."""
    mode = _RELEASE_MODES.get(value)
    if mode is None:
        raise InvalidArgumentError("mode", "must be RELEASE_MODE_CONSUMED or RELEASE_MODE_RETURNED")
    return mode


def unreadable(payload_ids: Sequence[str]) -> tuple[PayloadId, ...]:
    """Payloads that a reader names; those that are none are ignored with the others not leased."""
    check_int("unreadable_payload_ids", len(payload_ids), 0, UNREADABLE_MAX)
    return tuple([PayloadId(each) for each in payload_ids])


def priorities(request: "pb.UpdatePrioritiesRequest") -> UpdatePriorities:
    """Which priorities are to be set, and which chunks to be evicted."""
    check_int("updates", len(request.updates), 0, PRIORITIES_MAX)
    check_int("delete_chunk_ids", len(request.delete_chunk_ids), 0, PRIORITIES_MAX)
    return UpdatePriorities(
        buffer_name(request.buffer),
        tuple([(ChunkId(each.chunk_id), each.priority) for each in request.updates]),
        tuple(map(ChunkId, request.delete_chunk_ids)),
    )


def payload(message: fragment_pb2.PayloadReference, field: str) -> Payload:
    """Where a payload is said to live."""
    value = payload_of(message)
    _check_pieces(value, field)
    return value


def _check_pieces(value: Payload, field: str) -> None:
    """Refuse pieces that are too small or too many."""
    size_bytes, piece_size_bytes = value.size_bytes, value.piece_size_bytes
    if piece_size_bytes > 0:
        if piece_size_bytes < PIECE_SIZE_BYTES_MIN:
            raise InvalidArgumentError(
                f"{field}.piece_size_bytes",
                f"must be 0 or at least {PIECE_SIZE_BYTES_MIN}, got {piece_size_bytes}",
            )
        if size_bytes > piece_size_bytes * PIECES_MAX:
            raise InvalidArgumentError(
                f"{field}.piece_size_bytes",
                f"must cut the payload into at most {PIECES_MAX} pieces, got {piece_size_bytes}",
            )


def weights(message: fragment_pb2.PayloadReference) -> Payload:
    """Check where published weights are said to live."""
    value = payload(message, "weights")
    check_payload("weights", value)
    return value


def fragments(
    messages: Sequence[fragment_pb2.FragmentMetadata], bodies: Sequence[bytes] = ()
) -> list[Fragment]:
    """Check all fragments of one append, so that one that is malformed refuses them together.

    Args:
        messages: The fragments' metadata.
        bodies: Inline payloads: none, or one for each, empty where the payload is not inline. An
            inline one gets its id here, so that it can write over nothing, and its size from here.
    """
    check_int("fragments", len(messages), 1, APPEND_FRAGMENTS_MAX)
    if bodies and len(bodies) != len(messages):
        raise InvalidArgumentError(
            "payloads", f"must be none, or one for each of {len(messages)}, got {len(bodies)}"
        )
    checked = []
    pieces_left = PIECES_MAX
    for position, message in enumerate(messages):
        try:
            if bodies and bodies[position]:
                value = _inline(message, bodies[position])
            else:
                value = fragment(message)
            _check_pieces(value.payload, "payload")
            check_fragment(value)
            if value.payload.piece_size_bytes:
                pieces_left -= value.payload.piece_count
                _check_pieces_left(pieces_left)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"fragments[{position}].{error.field}", error.problem
            ) from None
        checked.append(value)
    return checked


def inline_bytes_max(request: pb.FetchFragmentsRequest | pb.ReadFragmentsRequest) -> int:
    """Bytes of payloads that may be inline in the reply."""
    check_int("inline_bytes_max", request.inline_bytes_max, 0, 2**63 - 1)
    return request.inline_bytes_max


def schemas(messages: Sequence[schema_pb2.Schema]) -> dict[int, Schema]:
    """Check the schemas that come with an append; by their hashes."""
    check_int("schemas", len(messages), 0, SCHEMAS_TOLD_MAX)
    checked = {}
    for position, message in enumerate(messages):
        if message.ByteSize() > SCHEMA_BYTES_MAX or len(message.arrays) > SCHEMA_ARRAYS_MAX:
            raise InvalidArgumentError(
                f"schemas[{position}]",
                f"must have at most {SCHEMA_BYTES_MAX} bytes and {SCHEMA_ARRAYS_MAX} arrays",
            )
        value = schema_of(message)
        checked[hash_of(message_of(value))] = value
    return checked


def schema_of(message: schema_pb2.Schema) -> Schema:
    """Return the core's schema for a message."""
    return tuple([SchemaArray(each.path, each.dtype, tuple(each.shape)) for each in message.arrays])


def to_schema(value: Schema) -> schema_pb2.Schema:
    """Say a schema."""
    return message_of(value)


def _check_pieces_left(pieces_left: int) -> None:
    """Refuse the fragment with which a call names more pieces than it may."""
    if pieces_left < 0:
        raise InvalidArgumentError(
            "payload.piece_size_bytes",
            f"must leave the payloads of a call together at most {PIECES_MAX} pieces; "
            "send fewer fragments at a time",
        )


def _inline(message: fragment_pb2.FragmentMetadata, body: bytes) -> Fragment:
    """Return the fragment of an inline payload."""
    if message.HasField("payload"):
        raise InvalidArgumentError("payload", "must be absent where the payload is inline")
    return fragment(message, Payload(PayloadId(new_payload_id()), len(body)))


def fragment(message: fragment_pb2.FragmentMetadata, payload: Payload | None = None) -> Fragment:
    """Return the core's fragment for a message, unchecked; `put_metadata` is the way back.

    Args:
        message: Its metadata.
        payload: Its payload, or None if the message names it.
    """
    worker_id, session_id = message.worker_id, message.session_id
    if len(worker_id) + len(session_id) <= NAME_SIZE_BYTES_MAX:
        # As `as_one_object`, which nearly all of them would have to be passed to.
        worker_id, session_id = _shared(worker_id), _shared(session_id)
    version_min, version_max = message.model_version_min, message.model_version_max
    if payload is None:
        named = message.payload
        payload = Payload(
            named.payload_id,  # type: ignore[arg-type]
            named.size_bytes,
            named.piece_size_bytes,
        )
    # Without the names' types: to call these would take a tenth of the time.
    return Fragment(
        worker_id,  # type: ignore[arg-type]
        message.fragment_index,  # type: ignore[arg-type]
        session_id,  # type: ignore[arg-type]
        version_min,  # type: ignore[arg-type]
        version_min if version_min == version_max else version_max,  # type: ignore[arg-type]
        payload,
        message.step_count,
        message.discontinuity,
        message.schema_hash,
        message.priority if message.HasField("priority") else PRIORITY_DEFAULT,
    )


def episode_end(value: int, position: int) -> str:
    """How an episode ended, as a label."""
    end = _EPISODE_ENDS.get(value)
    if end is None:
        raise InvalidArgumentError(f"episodes[{position}].end", "must say how the episode ended")
    return end


# --- going out -------------------------------------------------------------------------------


def payload_of(reference: PayloadReference | fragment_pb2.PayloadReference) -> Payload:
    """A payload as the core names it."""
    return Payload(
        PayloadId(reference.payload_id), reference.size_bytes, reference.piece_size_bytes
    )


def payload_reference(value: Payload) -> PayloadReference:
    """A payload as the stores name it."""
    return PayloadReference(value.payload_id, value.size_bytes, value.piece_size_bytes)


def ranges(
    messages: Sequence["pb.PayloadRange"],
) -> list[tuple[PayloadReference, int, int]]:
    """The ranges of payloads that a request wants: (payload, first byte, bytes)."""
    check_int("ranges", len(messages), 1, GATEWAY_RANGES_MAX)
    checked = []
    for position, message in enumerate(messages):
        at = f"ranges[{position}]"
        value = payload(message.payload, f"{at}.payload")
        check_payload(f"{at}.payload", value)
        start, length = message.offset_bytes, message.length_bytes
        if start < 0 or length < 1 or start + length > value.size_bytes:
            raise InvalidArgumentError(at, "is not of its payload")
        checked.append((payload_reference(value), start, length))
    return checked


def to_payload(value: Payload | PayloadReference) -> fragment_pb2.PayloadReference:
    """Say where a payload lives."""
    return fragment_pb2.PayloadReference(
        payload_id=value.payload_id,
        size_bytes=value.size_bytes,
        piece_size_bytes=value.piece_size_bytes,
    )


def add_references(
    granted: Iterable[GrantedFragment],
    messages: "RepeatedCompositeFieldContainer[fragment_pb2.FragmentReference]",
) -> None:
    """Add granted fragments, in order, to a reply's list."""
    for item in granted:
        reference = messages.add(
            chunk_id=item.chunk_id,
            staleness=item.staleness,
            use_count=item.use_count,
            priority=item.priority,
            probability=item.probability,
            population=item.population,
        )
        put_metadata(item.fragment, reference.metadata)


def put_metadata(value: Fragment, metadata: fragment_pb2.FragmentMetadata) -> None:
    """Fill a message with what a fragment says; `fragment` is the way back.

    In place: a message that is handed to another one's constructor is copied, at each level.
    """
    metadata.worker_id = value.worker_id
    metadata.fragment_index = value.fragment_index
    metadata.session_id = value.session_id
    metadata.model_version_min = value.model_version_min
    metadata.model_version_max = value.model_version_max
    metadata.discontinuity = value.discontinuity
    metadata.step_count = value.step_count
    metadata.schema_hash = value.schema_hash
    if value.priority != PRIORITY_DEFAULT:
        metadata.priority = value.priority
    put_payload(value.payload, metadata.payload)


def put_payload(value: Payload, location: fragment_pb2.PayloadReference) -> None:
    """Fill a message with where a payload lives; `payload_of` is the way back."""
    location.payload_id = value.payload_id
    location.size_bytes = value.size_bytes
    location.piece_size_bytes = value.piece_size_bytes


def add_append_results(
    values: Iterable[Appended | None],
    messages: "RepeatedCompositeFieldContainer[pb.AppendResult]",
) -> None:
    """Add what became of fragments to a reply; None is a payload that the store does not have."""
    for value in values:
        if value is None:
            messages.add(outcome=fragment_pb2.ADMISSION_OUTCOME_PAYLOAD_MISSING)
        elif value.first_outcome is None:
            messages.add(outcome=_OUTCOMES[value.outcome])
        else:
            messages.add(
                outcome=_OUTCOMES[value.outcome], first_outcome=_OUTCOMES[value.first_outcome]
            )


def to_subscription(value: SubscriptionDescription, lag_s: float) -> buffer_pb2.Subscription:
    """Say where a named cursor is."""
    return buffer_pb2.Subscription(
        name=value.name,
        retaining=value.is_retaining,
        acknowledged_chunk_id=value.cursor,
        lag_chunk_count=value.lag_chunks,
        lag_bytes=value.lag_bytes,
        lag_duration=to_duration(lag_s),
        missed_chunk_count=value.missed_count,
    )


def to_duration(span_s: float) -> Duration:
    """A span of seconds on the wire."""
    duration = Duration()
    duration.FromNanoseconds(round(span_s * 1e9))
    return duration


# --- limits of buffers -----------------------------------------------------------------------

_SAME_ON_THE_WIRE: Final = (
    "fragments_per_chunk",
    "capacity_chunks",
    "capacity_bytes",
    "staleness_max",
    "uses_max",
    "waiters_max",
    "leases_max",
    "workers_max",
    "priority_exponent",
    "with_replacement",
)


def config(message: buffer_pb2.BufferConfig, base: BufferConfig) -> BufferConfig:
    """Limits as asked for; what is absent is as in `base`."""
    return BufferConfig(**(_values(base) | _given(message)))


def updated_config(
    request: "pb.UpdateBufferRequest", current: BufferConfig, default: BufferConfig
) -> BufferConfig:
    """Limits as they are to be from now on.

    Args:
        request: What is to change.
        current: What the buffer has.
        default: What a field gets that is in the request's mask and not in its configuration.
    """
    given = _given(request.config)
    if not request.HasField("update_mask"):
        return BufferConfig(**(_values(current) | given))
    paths = list(request.update_mask.paths)
    known = buffer_pb2.BufferConfig.DESCRIPTOR.fields_by_name
    if paths == ["*"]:
        paths = list(known)
    for path in paths:
        if path not in known:
            raise InvalidArgumentError(
                "update_mask", f"must name fields of BufferConfig, or be * alone, got {path!r:.100}"
            )
    masked = {_NAMES_HERE.get(path, path) for path in paths}
    wanted = _values(default) | given
    return BufferConfig(**(_values(current) | {name: wanted[name] for name in masked}))


_NAMES_HERE: Final = {"lease_duration": "lease_s", "open_chunk_duration": "open_chunk_s"}
"""Fields on the wire that have other names in the core."""


def _values(limits: BufferConfig) -> dict[str, Any]:
    return {field: getattr(limits, field) for field in BufferConfig.__dataclass_fields__}


def _given(message: buffer_pb2.BufferConfig) -> dict[str, Any]:
    """The fields that are there, by their names in the core."""
    changes: dict[str, Any] = {
        field: getattr(message, field) for field in _SAME_ON_THE_WIRE if message.HasField(field)
    }
    if message.full_policy:
        changes["full_policy"] = _choice(_FULL_POLICIES, message.full_policy, "full_policy")
    if message.lease_expiry_policy:
        changes["lease_expiry_policy"] = _choice(
            _LEASE_EXPIRY_POLICIES, message.lease_expiry_policy, "lease_expiry_policy"
        )
    if message.schema:
        changes["schema"] = _choice(_SCHEMA_POLICIES, message.schema, "schema")
    if message.HasField("lease_duration"):
        changes["lease_s"] = seconds(message.lease_duration)
    if message.HasField("open_chunk_duration"):
        changes["open_chunk_s"] = seconds(message.open_chunk_duration)
    if message.HasField("sampler"):
        changes["sampler"] = _sampler(message.sampler, "sampler")
    if message.HasField("remover"):
        changes["remover"] = _sampler(message.remover, "remover")
    if message.HasField("limiter"):
        changes["limiter"] = _limiter(message.limiter)
    return changes


def _choice(members: Mapping[_Member, int], value: int, field: str) -> _Member:
    for member, number_on_the_wire in members.items():
        if number_on_the_wire == value:
            return member
    raise InvalidArgumentError(field, f"has no value {value}")


def _sampler(message: buffer_pb2.Sampler, field: str) -> str:
    name = message.WhichOneof("sampler")
    if name is None:
        raise InvalidArgumentError(f"config.{field}", "names no sampler")
    return str(name)


def _limiter(message: buffer_pb2.Limiter) -> LimiterConfig:
    match message.WhichOneof("limiter"):
        case "minimum_chunks":
            return MinimumChunksConfig(message.minimum_chunks.chunk_count)
        case "sample_to_insert_ratio":
            return SampleToInsertRatioConfig(
                ratio=message.sample_to_insert_ratio.ratio,
                error_chunks=message.sample_to_insert_ratio.error_chunks,
                minimum_chunk_count=message.sample_to_insert_ratio.minimum_chunk_count,
                lead_chunks=message.sample_to_insert_ratio.lead_chunks,
            )
        case _:
            raise InvalidArgumentError("config.limiter", "names no limiter")


def to_config(value: BufferConfig) -> buffer_pb2.BufferConfig:
    """All limits of a buffer."""
    return buffer_pb2.BufferConfig(
        **{field: getattr(value, field) for field in _SAME_ON_THE_WIRE},
        full_policy=_FULL_POLICIES[value.full_policy],
        lease_expiry_policy=_LEASE_EXPIRY_POLICIES[value.lease_expiry_policy],
        lease_duration=to_duration(value.lease_s),
        open_chunk_duration=to_duration(value.open_chunk_s),
        sampler=buffer_pb2.Sampler(**{value.sampler: {}}),
        remover=buffer_pb2.Sampler(**{value.remover: {}}),
        limiter=_to_limiter(value.limiter),
        schema=_SCHEMA_POLICIES[value.schema],
    )


def _to_limiter(value: LimiterConfig) -> buffer_pb2.Limiter:
    match value:
        case MinimumChunksConfig(chunk_count=count):
            return buffer_pb2.Limiter(minimum_chunks=buffer_pb2.MinimumChunks(chunk_count=count))
        case SampleToInsertRatioConfig():
            return buffer_pb2.Limiter(
                sample_to_insert_ratio=buffer_pb2.SampleToInsertRatio(
                    ratio=value.ratio,
                    error_chunks=value.error_chunks,
                    minimum_chunk_count=value.minimum_chunk_count,
                    lead_chunks=value.lead_chunks,
                )
            )
