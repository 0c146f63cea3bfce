from breadbox.v1 import buffer_pb2 as _buffer_pb2
from breadbox.v1 import fragment_pb2 as _fragment_pb2
from breadbox.v1 import schema_pb2 as _schema_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReleaseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELEASE_MODE_UNSPECIFIED: _ClassVar[ReleaseMode]
    RELEASE_MODE_CONSUMED: _ClassVar[ReleaseMode]
    RELEASE_MODE_RETURNED: _ClassVar[ReleaseMode]

class EpisodeEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EPISODE_END_UNSPECIFIED: _ClassVar[EpisodeEnd]
    EPISODE_END_TERMINATED: _ClassVar[EpisodeEnd]
    EPISODE_END_TRUNCATED: _ClassVar[EpisodeEnd]
    EPISODE_END_ABORTED: _ClassVar[EpisodeEnd]
RELEASE_MODE_UNSPECIFIED: ReleaseMode
RELEASE_MODE_CONSUMED: ReleaseMode
RELEASE_MODE_RETURNED: ReleaseMode
EPISODE_END_UNSPECIFIED: EpisodeEnd
EPISODE_END_TERMINATED: EpisodeEnd
EPISODE_END_TRUNCATED: EpisodeEnd
EPISODE_END_ABORTED: EpisodeEnd

class StartSessionRequest(_message.Message):
    __slots__ = ("buffer", "session_id", "model_version", "take_over")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    session_id: str
    model_version: int
    take_over: bool
    def __init__(self, buffer: _Optional[str] = ..., session_id: _Optional[str] = ..., model_version: _Optional[int] = ..., take_over: bool = ...) -> None: ...

class StartSessionResponse(_message.Message):
    __slots__ = ("session_id", "model_version")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model_version: int
    def __init__(self, session_id: _Optional[str] = ..., model_version: _Optional[int] = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("buffer", "session_id")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    session_id: str
    def __init__(self, buffer: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PublishModelRequest(_message.Message):
    __slots__ = ("buffer", "session_id", "model_version", "weights")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    session_id: str
    model_version: int
    weights: _fragment_pb2.PayloadReference
    def __init__(self, buffer: _Optional[str] = ..., session_id: _Optional[str] = ..., model_version: _Optional[int] = ..., weights: _Optional[_Union[_fragment_pb2.PayloadReference, _Mapping]] = ...) -> None: ...

class PublishModelResponse(_message.Message):
    __slots__ = ("model_version", "evicted_chunk_count")
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EVICTED_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    model_version: int
    evicted_chunk_count: int
    def __init__(self, model_version: _Optional[int] = ..., evicted_chunk_count: _Optional[int] = ...) -> None: ...

class WatchModelRequest(_message.Message):
    __slots__ = ("buffer", "known_session_id", "known_model_version", "max_wait", "known_weights")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    KNOWN_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    known_session_id: str
    known_model_version: int
    max_wait: _duration_pb2.Duration
    known_weights: bool
    def __init__(self, buffer: _Optional[str] = ..., known_session_id: _Optional[str] = ..., known_model_version: _Optional[int] = ..., max_wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., known_weights: bool = ...) -> None: ...

class GroupEndsRequest(_message.Message):
    __slots__ = ("buffer", "after_number", "max_wait")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    AFTER_NUMBER_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    after_number: int
    max_wait: _duration_pb2.Duration
    def __init__(self, buffer: _Optional[str] = ..., after_number: _Optional[int] = ..., max_wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GroupEndsResponse(_message.Message):
    __slots__ = ("ends",)
    ENDS_FIELD_NUMBER: _ClassVar[int]
    ends: _containers.RepeatedCompositeFieldContainer[GroupEnd]
    def __init__(self, ends: _Optional[_Iterable[_Union[GroupEnd, _Mapping]]] = ...) -> None: ...

class GroupEnd(_message.Message):
    __slots__ = ("number", "group", "reason", "member_count")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    number: int
    group: str
    reason: _fragment_pb2.GroupEndReason
    member_count: int
    def __init__(self, number: _Optional[int] = ..., group: _Optional[str] = ..., reason: _Optional[_Union[_fragment_pb2.GroupEndReason, str]] = ..., member_count: _Optional[int] = ...) -> None: ...

class TakeTicketsRequest(_message.Message):
    __slots__ = ("buffer", "request_id", "ticket_count", "max_wait", "lease_duration")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    request_id: str
    ticket_count: int
    max_wait: _duration_pb2.Duration
    lease_duration: _duration_pb2.Duration
    def __init__(self, buffer: _Optional[str] = ..., request_id: _Optional[str] = ..., ticket_count: _Optional[int] = ..., max_wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., lease_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TakeTicketsResponse(_message.Message):
    __slots__ = ("groups", "remaining_duration", "session_id", "model_version", "staleness_max", "waiting_reason")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_DURATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MAX_FIELD_NUMBER: _ClassVar[int]
    WAITING_REASON_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[str]
    remaining_duration: _duration_pb2.Duration
    session_id: str
    model_version: int
    staleness_max: int
    waiting_reason: str
    def __init__(self, groups: _Optional[_Iterable[str]] = ..., remaining_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., session_id: _Optional[str] = ..., model_version: _Optional[int] = ..., staleness_max: _Optional[int] = ..., waiting_reason: _Optional[str] = ...) -> None: ...

class RenewTicketRequest(_message.Message):
    __slots__ = ("buffer", "group", "lease_duration")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    group: str
    lease_duration: _duration_pb2.Duration
    def __init__(self, buffer: _Optional[str] = ..., group: _Optional[str] = ..., lease_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewTicketResponse(_message.Message):
    __slots__ = ("remaining_duration", "session_id", "model_version")
    REMAINING_DURATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    remaining_duration: _duration_pb2.Duration
    session_id: str
    model_version: int
    def __init__(self, remaining_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., session_id: _Optional[str] = ..., model_version: _Optional[int] = ...) -> None: ...

class GiveBackTicketRequest(_message.Message):
    __slots__ = ("buffer", "group", "member")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    group: str
    member: int
    def __init__(self, buffer: _Optional[str] = ..., group: _Optional[str] = ..., member: _Optional[int] = ...) -> None: ...

class GiveBackTicketResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberKey(_message.Message):
    __slots__ = ("group", "member")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: int
    def __init__(self, group: _Optional[str] = ..., member: _Optional[int] = ...) -> None: ...

class MembersRequest(_message.Message):
    __slots__ = ("buffer", "prefix", "after", "keys")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    prefix: str
    after: MemberKey
    keys: _containers.RepeatedCompositeFieldContainer[MemberKey]
    def __init__(self, buffer: _Optional[str] = ..., prefix: _Optional[str] = ..., after: _Optional[_Union[MemberKey, _Mapping]] = ..., keys: _Optional[_Iterable[_Union[MemberKey, _Mapping]]] = ...) -> None: ...

class MembersResponse(_message.Message):
    __slots__ = ("members", "next_after")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_AFTER_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[MemberDescription]
    next_after: MemberKey
    def __init__(self, members: _Optional[_Iterable[_Union[MemberDescription, _Mapping]]] = ..., next_after: _Optional[_Union[MemberKey, _Mapping]] = ...) -> None: ...

class MemberDescription(_message.Message):
    __slots__ = ("group", "member", "parts", "numbers")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: int
    parts: _containers.RepeatedScalarFieldContainer[str]
    numbers: str
    def __init__(self, group: _Optional[str] = ..., member: _Optional[int] = ..., parts: _Optional[_Iterable[str]] = ..., numbers: _Optional[str] = ...) -> None: ...

class ReadMembersRequest(_message.Message):
    __slots__ = ("buffer", "keys", "parts", "lease_duration", "inline_bytes_max")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    keys: _containers.RepeatedCompositeFieldContainer[MemberKey]
    parts: _containers.RepeatedScalarFieldContainer[str]
    lease_duration: _duration_pb2.Duration
    inline_bytes_max: int
    def __init__(self, buffer: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[MemberKey, _Mapping]]] = ..., parts: _Optional[_Iterable[str]] = ..., lease_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., inline_bytes_max: _Optional[int] = ...) -> None: ...

class ReadMembersResponse(_message.Message):
    __slots__ = ("parts", "part_counts", "lease", "payloads")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PART_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[_fragment_pb2.FragmentMetadata]
    part_counts: _containers.RepeatedScalarFieldContainer[int]
    lease: Lease
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, parts: _Optional[_Iterable[_Union[_fragment_pb2.FragmentMetadata, _Mapping]]] = ..., part_counts: _Optional[_Iterable[int]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., payloads: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ClaimMembersRequest(_message.Message):
    __slots__ = ("buffer", "lacking", "member_count", "max_wait", "lease_duration", "inline_bytes_max")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    lacking: str
    member_count: int
    max_wait: _duration_pb2.Duration
    lease_duration: _duration_pb2.Duration
    inline_bytes_max: int
    def __init__(self, buffer: _Optional[str] = ..., lacking: _Optional[str] = ..., member_count: _Optional[int] = ..., max_wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., lease_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., inline_bytes_max: _Optional[int] = ...) -> None: ...

class ClaimMembersResponse(_message.Message):
    __slots__ = ("grant", "waiting_reason")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    WAITING_REASON_FIELD_NUMBER: _ClassVar[int]
    grant: FetchGrant
    waiting_reason: str
    def __init__(self, grant: _Optional[_Union[FetchGrant, _Mapping]] = ..., waiting_reason: _Optional[str] = ...) -> None: ...

class DropMembersRequest(_message.Message):
    __slots__ = ("buffer", "keys")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    keys: _containers.RepeatedCompositeFieldContainer[MemberKey]
    def __init__(self, buffer: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[MemberKey, _Mapping]]] = ...) -> None: ...

class DropMembersResponse(_message.Message):
    __slots__ = ("dropped_count",)
    DROPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    dropped_count: int
    def __init__(self, dropped_count: _Optional[int] = ...) -> None: ...

class WatchModelResponse(_message.Message):
    __slots__ = ("changed", "session_id", "model_version", "weights", "known_session_ended")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_SESSION_ENDED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    session_id: str
    model_version: int
    weights: _fragment_pb2.PayloadReference
    known_session_ended: bool
    def __init__(self, changed: bool = ..., session_id: _Optional[str] = ..., model_version: _Optional[int] = ..., weights: _Optional[_Union[_fragment_pb2.PayloadReference, _Mapping]] = ..., known_session_ended: bool = ...) -> None: ...

class AppendFragmentsRequest(_message.Message):
    __slots__ = ("buffer", "fragments", "schemas", "payloads", "max_wait")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    SCHEMAS_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    fragments: _containers.RepeatedCompositeFieldContainer[_fragment_pb2.FragmentMetadata]
    schemas: _containers.RepeatedCompositeFieldContainer[_schema_pb2.Schema]
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    max_wait: _duration_pb2.Duration
    def __init__(self, buffer: _Optional[str] = ..., fragments: _Optional[_Iterable[_Union[_fragment_pb2.FragmentMetadata, _Mapping]]] = ..., schemas: _Optional[_Iterable[_Union[_schema_pb2.Schema, _Mapping]]] = ..., payloads: _Optional[_Iterable[bytes]] = ..., max_wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AppendFragmentsResponse(_message.Message):
    __slots__ = ("results", "session_id", "model_version", "retry_delay")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[AppendResult]
    session_id: str
    model_version: int
    retry_delay: _duration_pb2.Duration
    def __init__(self, results: _Optional[_Iterable[_Union[AppendResult, _Mapping]]] = ..., session_id: _Optional[str] = ..., model_version: _Optional[int] = ..., retry_delay: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AppendResult(_message.Message):
    __slots__ = ("outcome", "first_outcome", "group_end")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FIRST_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    GROUP_END_FIELD_NUMBER: _ClassVar[int]
    outcome: _fragment_pb2.AdmissionOutcome
    first_outcome: _fragment_pb2.AdmissionOutcome
    group_end: _fragment_pb2.GroupEndReason
    def __init__(self, outcome: _Optional[_Union[_fragment_pb2.AdmissionOutcome, str]] = ..., first_outcome: _Optional[_Union[_fragment_pb2.AdmissionOutcome, str]] = ..., group_end: _Optional[_Union[_fragment_pb2.GroupEndReason, str]] = ...) -> None: ...

class FetchFragmentsRequest(_message.Message):
    __slots__ = ("buffer", "request_id", "fragment_count", "max_wait", "rank", "world_size", "lease_duration", "inline_bytes_max")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    request_id: str
    fragment_count: int
    max_wait: _duration_pb2.Duration
    rank: int
    world_size: int
    lease_duration: _duration_pb2.Duration
    inline_bytes_max: int
    def __init__(self, buffer: _Optional[str] = ..., request_id: _Optional[str] = ..., fragment_count: _Optional[int] = ..., max_wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., lease_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., inline_bytes_max: _Optional[int] = ...) -> None: ...

class FetchFragmentsResponse(_message.Message):
    __slots__ = ("grant", "wait_elapsed")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    WAIT_ELAPSED_FIELD_NUMBER: _ClassVar[int]
    grant: FetchGrant
    wait_elapsed: FetchWaitElapsed
    def __init__(self, grant: _Optional[_Union[FetchGrant, _Mapping]] = ..., wait_elapsed: _Optional[_Union[FetchWaitElapsed, _Mapping]] = ...) -> None: ...

class FetchGrant(_message.Message):
    __slots__ = ("lease", "fragments", "session_id", "model_version", "payloads", "share_fragment_counts", "step_counts")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FRAGMENT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    fragments: _containers.RepeatedCompositeFieldContainer[_fragment_pb2.FragmentReference]
    session_id: str
    model_version: int
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    share_fragment_counts: _containers.RepeatedScalarFieldContainer[int]
    step_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., fragments: _Optional[_Iterable[_Union[_fragment_pb2.FragmentReference, _Mapping]]] = ..., session_id: _Optional[str] = ..., model_version: _Optional[int] = ..., payloads: _Optional[_Iterable[bytes]] = ..., share_fragment_counts: _Optional[_Iterable[int]] = ..., step_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchWaitElapsed(_message.Message):
    __slots__ = ("waiting_reason",)
    WAITING_REASON_FIELD_NUMBER: _ClassVar[int]
    waiting_reason: str
    def __init__(self, waiting_reason: _Optional[str] = ...) -> None: ...

class GetPreparedFragmentsRequest(_message.Message):
    __slots__ = ("buffer", "request_id")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    request_id: str
    def __init__(self, buffer: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class GetPreparedFragmentsResponse(_message.Message):
    __slots__ = ("fragments",)
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    fragments: _containers.RepeatedCompositeFieldContainer[_fragment_pb2.FragmentReference]
    def __init__(self, fragments: _Optional[_Iterable[_Union[_fragment_pb2.FragmentReference, _Mapping]]] = ...) -> None: ...

class ReadFragmentsRequest(_message.Message):
    __slots__ = ("buffer", "after_chunk_id", "chunk_count_max", "max_wait", "lease_duration", "known_session_id", "subscription", "inline_bytes_max", "is_look")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    AFTER_CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    IS_LOOK_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    after_chunk_id: int
    chunk_count_max: int
    max_wait: _duration_pb2.Duration
    lease_duration: _duration_pb2.Duration
    known_session_id: str
    subscription: str
    inline_bytes_max: int
    is_look: bool
    def __init__(self, buffer: _Optional[str] = ..., after_chunk_id: _Optional[int] = ..., chunk_count_max: _Optional[int] = ..., max_wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., lease_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., known_session_id: _Optional[str] = ..., subscription: _Optional[str] = ..., inline_bytes_max: _Optional[int] = ..., is_look: bool = ...) -> None: ...

class ReadFragmentsResponse(_message.Message):
    __slots__ = ("fragments", "lease", "cursor", "skipped_chunk_count", "session_id", "model_version", "payloads")
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    fragments: _containers.RepeatedCompositeFieldContainer[_fragment_pb2.FragmentReference]
    lease: Lease
    cursor: int
    skipped_chunk_count: int
    session_id: str
    model_version: int
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, fragments: _Optional[_Iterable[_Union[_fragment_pb2.FragmentReference, _Mapping]]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., cursor: _Optional[int] = ..., skipped_chunk_count: _Optional[int] = ..., session_id: _Optional[str] = ..., model_version: _Optional[int] = ..., payloads: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CreateSubscriptionRequest(_message.Message):
    __slots__ = ("buffer", "name", "after_chunk_id", "retaining")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    RETAINING_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    name: str
    after_chunk_id: int
    retaining: bool
    def __init__(self, buffer: _Optional[str] = ..., name: _Optional[str] = ..., after_chunk_id: _Optional[int] = ..., retaining: bool = ...) -> None: ...

class CreateSubscriptionResponse(_message.Message):
    __slots__ = ("subscription",)
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    subscription: _buffer_pb2.Subscription
    def __init__(self, subscription: _Optional[_Union[_buffer_pb2.Subscription, _Mapping]] = ...) -> None: ...

class AcknowledgeChunksRequest(_message.Message):
    __slots__ = ("buffer", "subscription", "chunk_id")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    subscription: str
    chunk_id: int
    def __init__(self, buffer: _Optional[str] = ..., subscription: _Optional[str] = ..., chunk_id: _Optional[int] = ...) -> None: ...

class AcknowledgeChunksResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteSubscriptionRequest(_message.Message):
    __slots__ = ("buffer", "name")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    name: str
    def __init__(self, buffer: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class DeleteSubscriptionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("buffer", "lease_id", "lease_duration")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    lease_id: str
    lease_duration: _duration_pb2.Duration
    def __init__(self, buffer: _Optional[str] = ..., lease_id: _Optional[str] = ..., lease_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("buffer", "lease_id", "mode", "unreadable_payload_ids", "further_lease_ids")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_PAYLOAD_IDS_FIELD_NUMBER: _ClassVar[int]
    FURTHER_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    lease_id: str
    mode: ReleaseMode
    unreadable_payload_ids: _containers.RepeatedScalarFieldContainer[str]
    further_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, buffer: _Optional[str] = ..., lease_id: _Optional[str] = ..., mode: _Optional[_Union[ReleaseMode, str]] = ..., unreadable_payload_ids: _Optional[_Iterable[str]] = ..., further_lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ("ended_count",)
    ENDED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ended_count: int
    def __init__(self, ended_count: _Optional[int] = ...) -> None: ...

class UpdatePrioritiesRequest(_message.Message):
    __slots__ = ("buffer", "updates", "delete_chunk_ids")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    DELETE_CHUNK_IDS_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    updates: _containers.RepeatedCompositeFieldContainer[PriorityUpdate]
    delete_chunk_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, buffer: _Optional[str] = ..., updates: _Optional[_Iterable[_Union[PriorityUpdate, _Mapping]]] = ..., delete_chunk_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PriorityUpdate(_message.Message):
    __slots__ = ("chunk_id", "priority")
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    chunk_id: int
    priority: float
    def __init__(self, chunk_id: _Optional[int] = ..., priority: _Optional[float] = ...) -> None: ...

class UpdatePrioritiesResponse(_message.Message):
    __slots__ = ("updated_count", "deleted_count", "unknown_count")
    UPDATED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DELETED_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_COUNT_FIELD_NUMBER: _ClassVar[int]
    updated_count: int
    deleted_count: int
    unknown_count: int
    def __init__(self, updated_count: _Optional[int] = ..., deleted_count: _Optional[int] = ..., unknown_count: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "remaining_duration")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REMAINING_DURATION_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    remaining_duration: _duration_pb2.Duration
    def __init__(self, lease_id: _Optional[str] = ..., remaining_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CreateBufferRequest(_message.Message):
    __slots__ = ("name", "config")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    name: str
    config: _buffer_pb2.BufferConfig
    def __init__(self, name: _Optional[str] = ..., config: _Optional[_Union[_buffer_pb2.BufferConfig, _Mapping]] = ...) -> None: ...

class CreateBufferResponse(_message.Message):
    __slots__ = ("buffer",)
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    buffer: _buffer_pb2.Buffer
    def __init__(self, buffer: _Optional[_Union[_buffer_pb2.Buffer, _Mapping]] = ...) -> None: ...

class UpdateBufferRequest(_message.Message):
    __slots__ = ("name", "config", "update_mask")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    name: str
    config: _buffer_pb2.BufferConfig
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, name: _Optional[str] = ..., config: _Optional[_Union[_buffer_pb2.BufferConfig, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ...) -> None: ...

class UpdateBufferResponse(_message.Message):
    __slots__ = ("buffer",)
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    buffer: _buffer_pb2.Buffer
    def __init__(self, buffer: _Optional[_Union[_buffer_pb2.Buffer, _Mapping]] = ...) -> None: ...

class DeleteBufferRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteBufferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListBuffersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListBuffersResponse(_message.Message):
    __slots__ = ("buffers", "next_page_token")
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    buffers: _containers.RepeatedCompositeFieldContainer[_buffer_pb2.Buffer]
    next_page_token: str
    def __init__(self, buffers: _Optional[_Iterable[_Union[_buffer_pb2.Buffer, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetBufferRequest(_message.Message):
    __slots__ = ("name", "chunk_events_after", "with_workers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHUNK_EVENTS_AFTER_FIELD_NUMBER: _ClassVar[int]
    WITH_WORKERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    chunk_events_after: int
    with_workers: bool
    def __init__(self, name: _Optional[str] = ..., chunk_events_after: _Optional[int] = ..., with_workers: bool = ...) -> None: ...

class GetBufferResponse(_message.Message):
    __slots__ = ("buffer",)
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    buffer: _buffer_pb2.Buffer
    def __init__(self, buffer: _Optional[_Union[_buffer_pb2.Buffer, _Mapping]] = ...) -> None: ...

class GetStoreConfigRequest(_message.Message):
    __slots__ = ("write_refusal",)
    WRITE_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    write_refusal: str
    def __init__(self, write_refusal: _Optional[str] = ...) -> None: ...

class GetStoreConfigResponse(_message.Message):
    __slots__ = ("store_url", "unannounced_duration", "piece_size_bytes", "server_version", "server_time", "inline_size_bytes_max", "journal_epoch", "store_concerns", "payload_size_bytes_max")
    STORE_URL_FIELD_NUMBER: _ClassVar[int]
    UNANNOUNCED_DURATION_FIELD_NUMBER: _ClassVar[int]
    PIECE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIME_FIELD_NUMBER: _ClassVar[int]
    INLINE_SIZE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_CONCERNS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_SIZE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    store_url: str
    unannounced_duration: _duration_pb2.Duration
    piece_size_bytes: int
    server_version: str
    server_time: _timestamp_pb2.Timestamp
    inline_size_bytes_max: int
    journal_epoch: int
    store_concerns: _containers.RepeatedScalarFieldContainer[str]
    payload_size_bytes_max: int
    def __init__(self, store_url: _Optional[str] = ..., unannounced_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., piece_size_bytes: _Optional[int] = ..., server_version: _Optional[str] = ..., server_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., inline_size_bytes_max: _Optional[int] = ..., journal_epoch: _Optional[int] = ..., store_concerns: _Optional[_Iterable[str]] = ..., payload_size_bytes_max: _Optional[int] = ...) -> None: ...

class ReportEpisodesRequest(_message.Message):
    __slots__ = ("buffer", "episodes", "workers")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    buffer: str
    episodes: _containers.RepeatedCompositeFieldContainer[EpisodeReport]
    workers: _containers.RepeatedCompositeFieldContainer[_buffer_pb2.WorkerSteps]
    def __init__(self, buffer: _Optional[str] = ..., episodes: _Optional[_Iterable[_Union[EpisodeReport, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[_buffer_pb2.WorkerSteps, _Mapping]]] = ...) -> None: ...

class ReportEpisodesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EpisodeReport(_message.Message):
    __slots__ = ("worker_id", "task", "return_sum", "discounted_return_sum", "step_count", "end")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    RETURN_SUM_FIELD_NUMBER: _ClassVar[int]
    DISCOUNTED_RETURN_SUM_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    task: str
    return_sum: float
    discounted_return_sum: float
    step_count: int
    end: EpisodeEnd
    def __init__(self, worker_id: _Optional[str] = ..., task: _Optional[str] = ..., return_sum: _Optional[float] = ..., discounted_return_sum: _Optional[float] = ..., step_count: _Optional[int] = ..., end: _Optional[_Union[EpisodeEnd, str]] = ...) -> None: ...

class WritePayloadsRequest(_message.Message):
    __slots__ = ("data", "size_bytes")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    size_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, data: _Optional[bytes] = ..., size_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class WritePayloadsResponse(_message.Message):
    __slots__ = ("payloads",)
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    payloads: _containers.RepeatedCompositeFieldContainer[_fragment_pb2.PayloadReference]
    def __init__(self, payloads: _Optional[_Iterable[_Union[_fragment_pb2.PayloadReference, _Mapping]]] = ...) -> None: ...

class ReadPayloadsRequest(_message.Message):
    __slots__ = ("ranges",)
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[PayloadRange]
    def __init__(self, ranges: _Optional[_Iterable[_Union[PayloadRange, _Mapping]]] = ...) -> None: ...

class PayloadRange(_message.Message):
    __slots__ = ("payload", "offset_bytes", "length_bytes")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    payload: _fragment_pb2.PayloadReference
    offset_bytes: int
    length_bytes: int
    def __init__(self, payload: _Optional[_Union[_fragment_pb2.PayloadReference, _Mapping]] = ..., offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ...) -> None: ...

class ReadPayloadsResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class DiscardPayloadsRequest(_message.Message):
    __slots__ = ("payload_ids",)
    PAYLOAD_IDS_FIELD_NUMBER: _ClassVar[int]
    payload_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, payload_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DiscardPayloadsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
