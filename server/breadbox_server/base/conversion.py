"""Wire messages to the core's inputs and back; checks all that is not a decision, by field."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from breadbox.model.errors import InvalidRequestError
from breadbox.model.types import PayloadReference
from breadbox.stores.keys import PIECE_SIZE_BYTES_MIN, new_payload_id
from breadbox.v1 import buffer_pb2, fragment_pb2, replay_buffer_service_pb2, schema_pb2
from breadbox.wire import numbers
from breadbox.wire.forms import DURATION, Choice, Functions, MessageMapping, members
from breadbox.wire.forms import seconds as seconds
from breadbox.wire.schemas import (
    ORIGIN_TEXT_LENGTH_MAX,
    ORIGINS_MAX,
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
    MinimumChunks,
    SampleToInsertRatio,
    check_duration,
)
from breadbox_server.core.model.description import (
    BufferDescription,
    GroupEnd,
    OpenGroup,
    QuarantinedFragment,
    SubscriptionDescription,
)
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.ids import (
    BufferName,
    ChunkId,
    LeaseId,
    PayloadId,
    SessionId,
    SubscriptionName,
    WorkerId,
)
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Appended,
    Fragment,
    GrantedFragment,
    GroupEndReason,
    Payload,
    ReleaseLease,
    ReleaseMode,
    UpdatePriorities,
)
from breadbox_server.core.model.schemas import Schema, SchemaArray, SchemaOrigin
from breadbox_server.core.model.validation import (
    PART_VERSION,
    check_fragment,
    check_int,
    check_name,
    check_payload,
)
from breadbox_server.core.rules.parts import MemberSeen
from breadbox_server.core.rules.reading import ReadSpec
from breadbox_server.limits import (
    APPEND_FRAGMENTS_MAX,
    FURTHER_LEASES_MAX,
    GATEWAY_RANGES_MAX,
    MEMBER_KEYS_MAX,
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
    | pb.GroupEndsRequest
    | pb.TakeTicketsRequest
    | pb.ClaimMembersRequest
)

LeasingRequest = (
    pb.FetchFragmentsRequest
    | pb.ReadFragmentsRequest
    | pb.RenewLeaseRequest
    | pb.TakeTicketsRequest
    | pb.RenewTicketRequest
    | pb.ReadMembersRequest
    | pb.ClaimMembersRequest
)

DEFAULT_BUFFER_NAME: Final = "default"
IDS_SHARED_MAX: Final = 65_536
_shared: Final = lru_cache(maxsize=IDS_SHARED_MAX)(str)


def as_one_object(text: str) -> str:
    """Return one object for equal ids, of the `IDS_SHARED_MAX` last seen: fragments share them.

    Not interned: Python 3.12.0 to 3.12.5 keep those for ever (python/cpython#113993).
    """
    return _shared(text) if len(text) <= NAME_SIZE_BYTES_MAX else text


def schema_of(message: schema_pb2.Schema) -> Schema:
    """Return the core's schema for a message."""
    arrays = [SchemaArray(each.path, each.dtype, tuple(each.shape)) for each in message.arrays]
    return (*arrays, *(SchemaOrigin(*each) for each in sorted(message.origin.items())))


# --- one table per message -------------------------------------------------------------------

PAYLOAD: Final = MessageMapping(fragment_pb2.PayloadReference, Payload)
to_payload: Final[Callable[[Any], fragment_pb2.PayloadReference]] = PAYLOAD.message


def to_schema(schema: Schema) -> schema_pb2.Schema:
    """Return the message for the core's schema."""
    origin = {each.path: each.text for each in schema if isinstance(each, SchemaOrigin)}
    return message_of([each for each in schema if isinstance(each, SchemaArray)], origin)


SCHEMA: Final = Functions(schema_of, lambda value, message: message.CopyFrom(to_schema(value)))
# Callers see to it that ids are short, as those of a journal are: see `as_one_object`.
METADATA: Final = MessageMapping(
    fragment_pb2.FragmentMetadata,
    Fragment,
    parts={"payload": PAYLOAD},
    reads={"worker_id": _shared, "session_id": _shared},
    absent={"priority": PRIORITY_DEFAULT},
    same={"model_version_max": "model_version_min"},
)
_GRANTED: Final = MessageMapping(
    fragment_pb2.FragmentReference,
    GrantedFragment,
    names={"metadata": "fragment"},
    parts={"fragment": METADATA},
)
MEMBER: Final = MessageMapping(pb.MemberDescription, MemberSeen)
GROUP_END: Final = MessageMapping(pb.GroupEnd, GroupEnd)
QUARANTINED: Final = MessageMapping(buffer_pb2.QuarantinedFragment, QuarantinedFragment)
STATE: Final = MessageMapping(
    buffer_pb2.BufferState,
    BufferDescription,
    names={
        "retained_chunk_count": "retained_count",
        "inserted_chunk_count": "inserted_count",
        "delivered_chunk_count": "delivered_count",
    },
    parts={
        "quarantined": QUARANTINED,
        "open_groups": MessageMapping(buffer_pb2.OpenGroup, OpenGroup),
    },
    beside=("name", "config", "model", "weights_bytes", "schemas"),
    # What only the parts around the core know.
    left_out=("outage", "hold", "idle_duration", "session_users", "tagged_groups"),
)
_SUBSCRIPTION: Final = MessageMapping(
    buffer_pb2.Subscription,
    SubscriptionDescription,
    names={
        "retaining": "is_retaining",
        "acknowledged_chunk_id": "cursor",
        "lag_chunk_count": "lag_chunks",
        "missed_chunk_count": "missed_count",
    },
    left_out=("lag_duration",),
)
_SAMPLER: Final = Choice("sampler")
CONFIG: Final = MessageMapping(
    buffer_pb2.BufferConfig,
    BufferConfig,
    parts={
        "sampler": _SAMPLER,
        "remover": _SAMPLER,
        "limiter": Choice(
            "limiter",
            {
                "minimum_chunks": MessageMapping(buffer_pb2.MinimumChunks, MinimumChunks),
                "sample_to_insert_ratio": MessageMapping(
                    buffer_pb2.SampleToInsertRatio, SampleToInsertRatio
                ),
            },
        ),
    },
    beside=("outcomes_per_worker_max", "requests_remembered_max", "retry_delay_s"),
)
to_config: Final = CONFIG.message
_OUTCOMES: Final[Mapping[AdmissionOutcome, Any]] = members(
    fragment_pb2.AdmissionOutcome.DESCRIPTOR, AdmissionOutcome
).numbers
_GROUP_ENDS: Final[Mapping[GroupEndReason, Any]] = members(
    fragment_pb2.GroupEndReason.DESCRIPTOR, GroupEndReason
).numbers
_RELEASE_MODES: Final = members(pb.ReleaseMode.DESCRIPTOR, ReleaseMode)


# --- going in --------------------------------------------------------------------------------


def buffer_name(text: str) -> BufferName:
    """Return the buffer that a request names; empty is the default buffer."""
    return BufferName(text or DEFAULT_BUFFER_NAME)


def wait_s(request: "WaitingRequest", cap_s: float) -> float:
    """Return the seconds that a caller is ready to wait, at most `cap_s`; 0 if absent."""
    span_s = seconds(request.max_wait)
    if span_s < 0:
        raise InvalidArgumentError("max_wait", f"must not be negative, got {span_s:g} s")
    return min(span_s, cap_s)


def read_spec(request: "pb.ReadFragmentsRequest") -> ReadSpec:
    """Return what a read asks for, or raise InvalidArgumentError."""
    check_int("chunk_count_max", request.chunk_count_max, 0, 2**62)
    if request.HasField("after_chunk_id"):
        check_int("after_chunk_id", request.after_chunk_id, -1, 2**62)
    return ReadSpec(
        after=request.after_chunk_id if request.HasField("after_chunk_id") else None,
        known_session_id=(
            SessionId(request.known_session_id) if request.HasField("known_session_id") else None
        ),
        chunk_count_max=min(request.chunk_count_max or READ_CHUNKS, READ_CHUNKS_MAX),
        subscription=SubscriptionName(request.subscription) if request.subscription else None,
    )


def lease_s(
    request: LeasingRequest,
) -> float | None:
    """Return the seconds that a lease is to live, or None if the buffer decides."""
    if not request.HasField("lease_duration"):
        return None
    span_s = seconds(request.lease_duration)
    check_duration("lease_duration", span_s)
    return span_s


def member_keys(messages: "Sequence[pb.MemberKey]") -> list[tuple[WorkerId, int]]:
    """Return the keys of members, or raise InvalidArgumentError if they are none or too many."""
    check_int("keys", len(messages), 1, MEMBER_KEYS_MAX)
    return [(WorkerId(each.group), each.member) for each in messages]


def release_mode(value: int) -> ReleaseMode:
    """Return how a lease is to end, or raise InvalidArgumentError: there is no default."""
    if value not in _RELEASE_MODES:
        raise InvalidArgumentError("mode", "must be RELEASE_MODE_CONSUMED or RELEASE_MODE_RETURNED")
    mode: ReleaseMode = _RELEASE_MODES[value]
    return mode


def releases(request: "pb.ReleaseLeaseRequest") -> list[ReleaseLease]:
    """Return the leases to end, one at least, or raise InvalidArgumentError."""
    further = request.further_lease_ids
    check_int("further_lease_ids", len(further), 0, FURTHER_LEASES_MAX)
    buffer, mode = buffer_name(request.buffer), release_mode(request.mode)
    return [ReleaseLease(buffer, LeaseId(each), mode) for each in (request.lease_id, *further)]


def unreadable(payload_ids: Sequence[str]) -> tuple[PayloadId, ...]:
    """Return the ids of payloads that a reader names; ids without a payload are ignored later."""
    check_int("unreadable_payload_ids", len(payload_ids), 0, UNREADABLE_MAX)
    return tuple(payload_ids)


def priorities(request: "pb.UpdatePrioritiesRequest") -> UpdatePriorities:
    """Return the priorities to set and the chunks to evict, or raise InvalidArgumentError."""
    check_int("updates", len(request.updates), 0, PRIORITIES_MAX)
    check_int("delete_chunk_ids", len(request.delete_chunk_ids), 0, PRIORITIES_MAX)
    return UpdatePriorities(
        buffer_name(request.buffer),
        tuple([(ChunkId(each.chunk_id), each.priority) for each in request.updates]),
        tuple(map(ChunkId, request.delete_chunk_ids)),
    )


def payload(message: fragment_pb2.PayloadReference, field: str) -> Payload:
    """Return a reference to a payload, or raise InvalidArgumentError if it has too many pieces."""
    value = PAYLOAD.read(message)
    _check_pieces(value, field)
    return value


def _check_pieces(value: Payload, field: str, pieces_left: int = PIECES_MAX) -> int:
    size_bytes, piece_size_bytes = value.size_bytes, value.piece_size_bytes
    if piece_size_bytes <= 0:
        return pieces_left
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
    if value.piece_count > pieces_left:
        raise InvalidArgumentError(
            f"{field}.piece_size_bytes",
            f"must leave the payloads of a call together at most {PIECES_MAX} pieces; "
            "send fewer fragments at a time",
        )
    return pieces_left - value.piece_count


def weights(message: fragment_pb2.PayloadReference) -> Payload:
    """Check where published weights are said to live."""
    value = payload(message, "weights")
    check_payload("weights", value)
    return value


def fragments(
    messages: Sequence[fragment_pb2.FragmentMetadata], bodies: Sequence[bytes] = ()
) -> list[Fragment]:
    """Check all fragments of an append: a malformed one refuses all.

    `bodies`: none, or one each, empty if not inline; an inline one gets its id and size here.
    """
    check_int("fragments", len(messages), 1, APPEND_FRAGMENTS_MAX)
    if bodies and len(bodies) != len(messages):
        raise InvalidArgumentError(
            "payloads", f"must be none, or one for each of {len(messages)}, got {len(bodies)}"
        )
    checked: list[Fragment] = []
    pieces_left = PIECES_MAX
    for position, message in enumerate(messages):
        try:
            if len(message.worker_id) + len(message.session_id) > NAME_SIZE_BYTES_MAX:
                check_name("worker_id", message.worker_id)
                check_name("session_id", message.session_id)
            value = METADATA.read(message)
            if bodies and bodies[position]:
                value.payload = _inline(message, bodies[position])
            else:
                pieces_left = _check_pieces(value.payload, "payload", pieces_left)
            check_fragment(value)
            if value.numbers:
                numbers.check(value.numbers)
            if value.part or not value.payload.size_bytes:
                _take_for_part(value)
        except (InvalidArgumentError, InvalidRequestError) as error:
            raise InvalidArgumentError(
                f"fragments[{position}].{error.field}", error.problem
            ) from None
        checked.append(value)
    return checked


def _take_for_part(value: Fragment) -> None:
    """Make a fragment what the core has for parts and numbers: without steps, never stale."""
    value.step_count, value.discontinuity = 0, True
    value.model_version_min = value.model_version_max = PART_VERSION
    if not value.payload.size_bytes:
        value.payload = Payload(PayloadId(new_payload_id()), 0)


def _inline(message: fragment_pb2.FragmentMetadata, body: bytes) -> Payload:
    """Return a payload of a fresh id for one that came inline."""
    if message.HasField("payload"):
        raise InvalidArgumentError("payload", "must be absent where the payload is inline")
    return Payload(new_payload_id(), len(body))


def schemas(messages: Sequence[schema_pb2.Schema]) -> dict[int, Schema]:
    """Check the schemas that come with an append; by their hashes."""
    check_int("schemas", len(messages), 0, SCHEMAS_TOLD_MAX)
    checked = {}
    for position, message in enumerate(messages):
        texts = [text for pair in message.origin.items() for text in pair]
        if (
            message.ByteSize() > SCHEMA_BYTES_MAX
            or len(message.arrays) > SCHEMA_ARRAYS_MAX
            or len(message.origin) > ORIGINS_MAX
            or any(len(each) > ORIGIN_TEXT_LENGTH_MAX or not each.isprintable() for each in texts)
        ):
            raise InvalidArgumentError(
                f"schemas[{position}]",
                f"must have at most {SCHEMA_BYTES_MAX} bytes, {SCHEMA_ARRAYS_MAX} arrays and "
                f"{ORIGINS_MAX} origins, of {ORIGIN_TEXT_LENGTH_MAX} printable characters",
            )
        value = schema_of(message)
        checked[hash_of(to_schema(value))] = value
    return checked


def episode_end(value: int, position: int) -> str:
    """Return how an episode ended, as a label."""
    if value not in pb.EpisodeEnd.values() or value == pb.EPISODE_END_UNSPECIFIED:
        raise InvalidArgumentError(f"episodes[{position}].end", "must say how the episode ended")
    return pb.EpisodeEnd.Name(value).removeprefix("EPISODE_END_").lower()


# --- going out -------------------------------------------------------------------------------


def ranges(messages: Sequence["pb.PayloadRange"]) -> list[tuple[PayloadReference, int, int]]:
    """Return the ranges of payloads that a request wants: (payload, first byte, bytes)."""
    check_int("ranges", len(messages), 1, GATEWAY_RANGES_MAX)
    checked = []
    for position, message in enumerate(messages):
        at = f"ranges[{position}]"
        value = payload(message.payload, f"{at}.payload")
        check_payload(f"{at}.payload", value)
        start, length = message.offset_bytes, message.length_bytes
        if start < 0 or length < 1 or start + length > value.size_bytes:
            raise InvalidArgumentError(at, "is not of its payload")
        checked.append((value, start, length))
    return checked


def add_references(
    granted: Iterable[GrantedFragment],
    messages: "RepeatedCompositeFieldContainer[fragment_pb2.FragmentReference]",
) -> None:
    """Add granted fragments, in order, to a reply's list."""
    for item in granted:
        _GRANTED.put(item, messages.add())


def add_append_results(
    values: Iterable[Appended | None], messages: "RepeatedCompositeFieldContainer[pb.AppendResult]"
) -> None:
    """Add what became of fragments to a reply; None is a payload that the store does not have."""
    messages.extend(map(_append_result, values))


@lru_cache(maxsize=64)
def _append_result(value: Appended | None) -> pb.AppendResult:
    if value is None:
        return pb.AppendResult(outcome=fragment_pb2.ADMISSION_OUTCOME_PAYLOAD_MISSING)
    first = None if value.first_outcome is None else _OUTCOMES[value.first_outcome]
    end = None if value.group_end is None else _GROUP_ENDS[value.group_end]
    return pb.AppendResult(outcome=_OUTCOMES[value.outcome], first_outcome=first, group_end=end)


def to_subscription(value: SubscriptionDescription, lag_s: float) -> buffer_pb2.Subscription:
    """Say where a named cursor is."""
    message = _SUBSCRIPTION.message(value)
    DURATION.put(lag_s, message.lag_duration)
    return message


def to_duration(span_s: float) -> Duration:
    """Return a span of seconds as a message."""
    duration = Duration()
    DURATION.put(span_s, duration)
    return duration


# --- limits of buffers -----------------------------------------------------------------------


def given_limits(message: buffer_pb2.BufferConfig) -> dict[str, Any]:
    """Return the limits that a message has, by the core's names."""
    found = CONFIG.given(message)
    for name, value in found.items():
        if value is None and CONFIG.fields[name].enum_type:
            raise InvalidArgumentError(name, f"has no value {getattr(message, name)}")
        if value is None:
            problem = f"names no {'limiter' if name == 'limiter' else 'sampler'}"
            raise InvalidArgumentError(f"config.{name}", problem)
    return found


def config(message: buffer_pb2.BufferConfig, base: BufferConfig) -> BufferConfig:
    """Limits as asked for; what is absent is as in `base`."""
    return replace(base, **given_limits(message))


def updated_config(
    request: "pb.UpdateBufferRequest", current: BufferConfig, default: BufferConfig
) -> BufferConfig:
    """Return the limits changed by a request; masked fields that it lacks get `default`'s."""
    given = given_limits(request.config)
    if not request.HasField("update_mask"):
        return replace(current, **given)
    names = {field.name: name for name, field in CONFIG.fields.items()}
    paths = list(request.update_mask.paths)
    for path in names if paths == ["*"] else paths:
        if path not in names:
            raise InvalidArgumentError(
                "update_mask", f"must name fields of BufferConfig, or be * alone, got {path!r:.100}"
            )
    masked = [names[path] for path in (names if paths == ["*"] else paths)]
    return replace(current, **{name: given.get(name, getattr(default, name)) for name in masked})
