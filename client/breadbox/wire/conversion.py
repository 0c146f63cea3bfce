"""Convert any protobuf message of the service to plain types, and back.

Invariants:
    W1  No protobuf type leaves this module except inside a request that is about to be sent.
    W2  An enum value that this library does not know reads as "unspecified" or None.
    W3  A value that no message can hold (a negative duration, a NaN, a float for a count) raises an
        `InvalidRequestError` that names the field, before anything is sent.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice, repeat
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from breadbox.model import types
from breadbox.model.errors import InternalError, InvalidRequestError
from breadbox.model.fragment import METADATA_FIELDS, Fragment, Part, Sendable
from breadbox.v1 import buffer_pb2, fragment_pb2, schema_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.wire.forms import Choice, Functions, MessageMapping, members
from breadbox.wire.forms import seconds as seconds
from breadbox.wire.numbers import NUMBERS, to_text
from breadbox.wire.schemas import NO_SCHEMA

MessageT = TypeVar("MessageT", bound=Message)
ValueT = TypeVar("ValueT")


def build(message_type: type[MessageT], **fields: Any) -> MessageT:
    """Make a message, without fields that are None; InvalidRequestError names a bad field."""
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
    """Return a span for a message; raise InvalidRequestError unless finite and at least 0."""
    if seconds is None:
        return None
    return _usual_duration(name, seconds) if type(seconds) is float else _duration(name, seconds)


def _duration(name: str, seconds: float) -> Duration:
    try:
        nanoseconds = round(seconds * 1e9) if math.isfinite(seconds) else -1
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(name, f"must be a number of seconds, got {seconds!r}") from error
    if not 0 <= nanoseconds < 10**18:
        raise InvalidRequestError(name, f"must be at least 0 s and under 1e9 s, got {seconds!r}")
    return Duration(seconds=nanoseconds // 10**9, nanos=nanoseconds % 10**9)


_usual_duration = lru_cache(maxsize=64)(_duration)
"""A cached `_duration`, because nearly all calls have one of a few durations."""


def to_wire(form: MessageMapping[MessageT, ValueT], value: ValueT) -> MessageT:
    """Return the message for a value, or raise InvalidRequestError that names the field."""
    try:
        return form.message(value)
    except (InvalidRequestError, ArithmeticError, LookupError, TypeError, ValueError):
        field, refused, error = form.misfit(value)
        if isinstance(error, InvalidRequestError):
            raise InvalidRequestError(field, error.problem) from error
        raise InvalidRequestError(field, f"cannot be {refused!r:.200}: {error}") from error


# One table per message ---------------------------------------------------------------------------


def _put_span(seconds: float, message: Duration) -> None:
    span = duration("span", seconds)
    assert span is not None
    message.CopyFrom(span)


def _read_only(read: Callable[[Any], Any]) -> Functions:
    return Functions(read, lambda value, message: message.CopyFrom(value))


@lru_cache(maxsize=256)
def _append_result(outcome: int, first_outcome: int, group_end: int) -> types.AppendResult:
    return types.AppendResult(
        outcome_from_wire(outcome), outcome_from_wire(first_outcome), _group_end(group_end)
    )


def _group_end(value: int) -> types.GroupEndReason:
    reason: types.GroupEndReason = _GROUP_ENDS.get(value, types.GroupEndReason.UNSPECIFIED)
    return reason


def outcome_from_wire(value: int) -> types.AdmissionOutcome:
    """Read an outcome; one that this library does not know is unspecified."""
    outcome: types.AdmissionOutcome = _OUTCOMES.get(value, types.AdmissionOutcome.UNSPECIFIED)
    return outcome


def _sorted(message: Mapping[Any, int]) -> Mapping[Any, int]:
    return MappingProxyType(dict(sorted(message.items())))


def _schema(message: schema_pb2.Schema) -> Mapping[str, types.ArrayType]:
    return MappingProxyType(
        {each.path: types.ArrayType(each.dtype, tuple(each.shape)) for each in message.arrays}
    )


_SPAN = Functions(seconds, _put_span)
_SAMPLER = Choice("sampler")
_OUTCOMES = members(fragment_pb2.AdmissionOutcome.DESCRIPTOR, types.AdmissionOutcome)
_GROUP_ENDS = members(fragment_pb2.GroupEndReason.DESCRIPTOR, types.GroupEndReason)
_RELEASE_MODES = members(pb.ReleaseMode.DESCRIPTOR, types.ReleaseMode).numbers
PAYLOAD = MessageMapping(fragment_pb2.PayloadReference, types.PayloadReference)
METADATA = MessageMapping(
    fragment_pb2.FragmentMetadata,
    types.FragmentMetadata,
    parts={"payload": PAYLOAD, "numbers": NUMBERS},
    # Nearly all have the default, which is left out.
    absent={"priority": 1.0},
    left_out=("replaces",),
)
_REFERENCE = MessageMapping(
    fragment_pb2.FragmentReference,
    types.FragmentReference,
    names={"staleness": "staleness_when_granted"},
    parts={"metadata": METADATA},
    beside=("body", "parts"),
)
CONFIG = MessageMapping(
    buffer_pb2.BufferConfig,
    types.BufferConfig,
    parts={
        "lease_s": _SPAN,
        "open_chunk_s": _SPAN,
        "required_parts": Functions(
            lambda text: tuple(text.split(",")) if text else (),
            lambda names: names if isinstance(names, str) else ",".join(names),
        ),
        "sampler": _SAMPLER,
        "remover": _SAMPLER,
        "limiter": Choice(
            "limiter",
            {
                "minimum_chunks": MessageMapping(buffer_pb2.MinimumChunks, types.MinimumChunks),
                "sample_to_insert_ratio": MessageMapping(
                    buffer_pb2.SampleToInsertRatio, types.SampleToInsertRatio
                ),
            },
        ),
    },
)
_SUBSCRIPTION = MessageMapping(buffer_pb2.Subscription, types.Subscription)
_MEMBER = MessageMapping(pb.MemberDescription, types.MemberDescription, parts={"numbers": NUMBERS})
WORKER = MessageMapping(buffer_pb2.WorkerSteps, types.WorkerSteps)
_BUFFER = MessageMapping(
    buffer_pb2.Buffer,
    types.BufferDescription,
    parts={
        "config": _read_only(lambda message: config_from_wire(message)),
        "state": MessageMapping(
            buffer_pb2.BufferState,
            types.BufferState,
            parts={
                "quarantined": MessageMapping(
                    buffer_pb2.QuarantinedFragment, types.QuarantinedFragment
                ),
                "open_groups": MessageMapping(buffer_pb2.OpenGroup, types.OpenGroup),
                "tagged_groups": MessageMapping(buffer_pb2.TaggedGroups, types.TaggedGroups),
            },
            reads={"counters": _sorted, "chunk_count_by_staleness": _sorted},
        ),
        "schemas": _read_only(_schema),
        "subscriptions": _SUBSCRIPTION,
        "chunk_events": MessageMapping(buffer_pb2.ChunkEvent, types.ChunkEvent),
        "workers": WORKER,
    },
)
_APPEND_REPLY = MessageMapping(
    pb.AppendFragmentsResponse,
    types.AppendReply,
    parts={
        "results": _read_only(
            lambda each: _append_result(each.outcome, each.first_outcome, each.group_end)
        )
    },
)
_STORE_CONFIG = MessageMapping(
    pb.GetStoreConfigResponse,
    types.StoreConfig,
    names={"server_time": "server_unix_s"},
    parts={"server_unix_s": _read_only(lambda message: message.ToNanoseconds() * 1e-9)},
)
EPISODE = MessageMapping(pb.EpisodeReport, types.EpisodeReport)

buffer_from_wire = _BUFFER.read
subscription_from_wire = _SUBSCRIPTION.read
append_reply_from_wire = _APPEND_REPLY.read
store_config_from_wire = _STORE_CONFIG.read


# Fragments ---------------------------------------------------------------------------------------

_metadata_fields_of = attrgetter(*METADATA_FIELDS)


def announcement(
    fragment: Sendable,
    payload: types.PayloadReference | None,
    schema_hash: int = NO_SCHEMA,
    *,
    replaces: bool = False,
) -> fragment_pb2.FragmentMetadata:
    """Return the announcement of a fragment; `payload` is None if it is inline."""
    fields = dict(zip(METADATA_FIELDS, _metadata_fields_of(fragment), strict=True))
    if fields["priority"] == 1.0:
        del fields["priority"]  # As nearly all have: left out.
    if not isinstance(fragment, Fragment):
        fields["numbers"] = to_text(fragment.numbers)
    if isinstance(fragment, Part):
        fields |= {"part": fragment.name, "replaces": replaces and bool(fragment.name)}
    return build(
        fragment_pb2.FragmentMetadata,
        payload=None if payload is None else to_wire(PAYLOAD, payload),
        step_count=fragment.step_count,
        schema_hash=schema_hash,
        **fields,
    )


def tickets_from_wire(message: pb.TakeTicketsResponse) -> types.TicketGrant | str:
    """Return the tickets that were given, or why none was."""
    if not message.groups:
        return message.waiting_reason
    return types.TicketGrant(
        tuple(message.groups),
        seconds(message.remaining_duration),
        message.session_id,
        message.model_version,
        message.staleness_max if message.HasField("staleness_max") else None,
    )


def group_ends_from_wire(message: pb.GroupEndsResponse) -> list[types.GroupEnd]:
    """Read the ends of groups, in order."""
    return [
        types.GroupEnd(each.number, each.group, _group_end(each.reason), each.member_count)
        for each in message.ends
    ]


def members_from_wire(message: pb.MembersResponse) -> list[types.MemberDescription]:
    """Read a page of members."""
    return list(map(_MEMBER.read, message.members))


def member_keys(keys: Iterable[tuple[str, int]]) -> list[pb.MemberKey]:
    """Return the keys of members for a request."""
    return [build(pb.MemberKey, group=group, member=member) for group, member in keys]


def members_read_from_wire(message: pb.ReadMembersResponse) -> types.MembersRead:
    """Read the parts of members, each as one reference."""
    bodies = message.payloads or repeat(b"")
    return types.MembersRead(
        [
            types.FragmentReference(METADATA.read(each), -1, 0, 0, body=body)
            for each, body in zip(message.parts, bodies, strict=False)
        ],
        tuple(message.part_counts),
        message.lease.lease_id if message.HasField("lease") else None,
    )


def references_from_wire(
    messages: Sequence[fragment_pb2.FragmentReference], bodies: Sequence[bytes] = ()
) -> tuple[types.FragmentReference, ...]:
    """Read granted fragments, in their order, with inline payloads: none, or one for each."""
    if bodies and len(bodies) != len(messages):
        raise InternalError(f"{len(bodies)} payloads came with {len(messages)} fragments")
    references = list(map(_REFERENCE.read, messages, bodies or repeat(b""), repeat(())))
    if not any([each.metadata.part for each in references]):
        return tuple(references)
    members: list[types.FragmentReference] = []
    for each in references:
        if each.metadata.part and members:
            members[-1].parts += (each,)
        else:
            members.append(each)
    return tuple(members)


# Buffers -----------------------------------------------------------------------------------------


def config_from_wire(message: buffer_pb2.BufferConfig) -> types.BufferConfig:
    """Read limits; one that is absent, or that this library does not know, is None."""
    return types.BufferConfig(**CONFIG.given(message))


def update_mask(config: types.BufferConfig, reset: Iterable[str]) -> FieldMask | None:
    """Return the limits that change, given or reset to defaults, or None for just those given."""
    given = [name for name in CONFIG.fields if getattr(config, name) is not None]
    back = list(reset)
    for name in back:
        if name not in CONFIG.fields:
            raise InvalidRequestError("reset", f"must name limits, such as uses_max, got {name!r}")
        if name in given:
            raise InvalidRequestError("reset", f"names {name}, which also gets a value")
    return FieldMask(paths=[CONFIG.fields[name].name for name in (*given, *back)]) if back else None


# Answers -----------------------------------------------------------------------------------------


def model_from_wire(message: (pb.WatchModelResponse | pb.StartSessionResponse)) -> types.ModelState:
    """Read session, version and weights; without a session all are empty."""
    has_ended = isinstance(message, pb.WatchModelResponse) and message.known_session_ended
    if not message.session_id:
        return types.ModelState("", None, None, has_ended)
    weights = None
    if isinstance(message, pb.WatchModelResponse):
        version = message.model_version if message.HasField("model_version") else None
        if message.HasField("weights"):
            weights = PAYLOAD.read(message.weights)
    else:
        version = message.model_version
    return types.ModelState(message.session_id, version, weights, has_ended)


def grant_from_wire(message: pb.FetchFragmentsResponse, request_id: str) -> types.LeaseGrant | str:
    """Read the reply to a fetch: the grant, or the reason why there is none after the wait."""
    if message.WhichOneof("result") != "grant":
        return message.wait_elapsed.waiting_reason or "the server gave no reason"
    return grant_of(message.grant, request_id)


def grant_of(grant: pb.FetchGrant, request_id: str) -> types.LeaseGrant:
    """Read a grant."""
    step_counts = iter(grant.step_counts)
    return types.LeaseGrant(
        lease_id=grant.lease.lease_id,
        remaining_s=seconds(grant.lease.remaining_duration),
        fragments=references_from_wire(grant.fragments, grant.payloads),
        session_id=grant.session_id,
        model_version=grant.model_version,
        request_id=request_id,
        step_counts=tuple(
            [tuple(islice(step_counts, max(0, count))) for count in grant.share_fragment_counts]
        ),
    )


def read_from_wire(message: pb.ReadFragmentsResponse) -> types.FragmentRead:
    """Read the chunks after a cursor."""
    return types.FragmentRead(
        fragments=references_from_wire(message.fragments, message.payloads),
        lease_id=message.lease.lease_id if message.HasField("lease") else None,
        remaining_s=seconds(message.lease.remaining_duration),
        cursor=message.cursor,
        skipped_chunk_count=message.skipped_chunk_count,
        session_id=message.session_id,
        model_version=message.model_version if message.HasField("model_version") else None,
    )


def release_mode_to_wire(mode: types.ReleaseMode) -> pb.ReleaseMode:
    """Return the enum value of a release mode."""
    return _RELEASE_MODES[mode]  # type: ignore[return-value]
