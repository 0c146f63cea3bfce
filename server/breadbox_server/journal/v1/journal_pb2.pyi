from breadbox.v1 import buffer_pb2 as _buffer_pb2
from breadbox.v1 import fragment_pb2 as _fragment_pb2
from breadbox.v1 import schema_pb2 as _schema_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_END_UNSPECIFIED: _ClassVar[LeaseEnd]
    LEASE_END_CONSUMED: _ClassVar[LeaseEnd]
    LEASE_END_RETURNED: _ClassVar[LeaseEnd]
    LEASE_END_EXPIRED: _ClassVar[LeaseEnd]

class ChunkState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHUNK_STATE_UNSPECIFIED: _ClassVar[ChunkState]
    CHUNK_STATE_HELD: _ClassVar[ChunkState]
    CHUNK_STATE_USED_UP: _ClassVar[ChunkState]
    CHUNK_STATE_GONE: _ClassVar[ChunkState]
    CHUNK_STATE_RETAINED: _ClassVar[ChunkState]
LEASE_END_UNSPECIFIED: LeaseEnd
LEASE_END_CONSUMED: LeaseEnd
LEASE_END_RETURNED: LeaseEnd
LEASE_END_EXPIRED: LeaseEnd
CHUNK_STATE_UNSPECIFIED: ChunkState
CHUNK_STATE_HELD: ChunkState
CHUNK_STATE_USED_UP: ChunkState
CHUNK_STATE_GONE: ChunkState
CHUNK_STATE_RETAINED: ChunkState

class Turn(_message.Message):
    __slots__ = ("version", "entries")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    version: int
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, version: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("now", "buffer", "buffer_created", "fragment_admitted", "fragment_stale", "fragments_admitted", "grant_made", "session_started", "session_ended", "model_published", "lease_renewed", "lease_released", "grant_undone", "payloads_dropped", "unreadable_reported", "buffer_updated", "buffer_deleted", "schema_told", "priorities_updated", "subscription_created", "chunks_acknowledged", "subscription_deleted", "time_passed", "tickets_given", "ticket_renewed", "ticket_given_back", "members_dropped")
    NOW_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    BUFFER_CREATED_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_STALE_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    GRANT_MADE_FIELD_NUMBER: _ClassVar[int]
    SESSION_STARTED_FIELD_NUMBER: _ClassVar[int]
    SESSION_ENDED_FIELD_NUMBER: _ClassVar[int]
    MODEL_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    LEASE_RENEWED_FIELD_NUMBER: _ClassVar[int]
    LEASE_RELEASED_FIELD_NUMBER: _ClassVar[int]
    GRANT_UNDONE_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_REPORTED_FIELD_NUMBER: _ClassVar[int]
    BUFFER_UPDATED_FIELD_NUMBER: _ClassVar[int]
    BUFFER_DELETED_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_TOLD_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_UPDATED_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_CREATED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_DELETED_FIELD_NUMBER: _ClassVar[int]
    TIME_PASSED_FIELD_NUMBER: _ClassVar[int]
    TICKETS_GIVEN_FIELD_NUMBER: _ClassVar[int]
    TICKET_RENEWED_FIELD_NUMBER: _ClassVar[int]
    TICKET_GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    now: float
    buffer: str
    buffer_created: BufferCreated
    fragment_admitted: _fragment_pb2.FragmentMetadata
    fragment_stale: _fragment_pb2.FragmentMetadata
    fragments_admitted: FragmentRun
    grant_made: GrantMade
    session_started: SessionStarted
    session_ended: SessionEnded
    model_published: ModelPublished
    lease_renewed: LeaseRenewed
    lease_released: LeaseReleased
    grant_undone: GrantUndone
    payloads_dropped: PayloadsDropped
    unreadable_reported: UnreadableReported
    buffer_updated: BufferUpdated
    buffer_deleted: BufferDeleted
    schema_told: SchemaTold
    priorities_updated: PrioritiesUpdated
    subscription_created: SubscriptionCreated
    chunks_acknowledged: ChunksAcknowledged
    subscription_deleted: SubscriptionDeleted
    time_passed: TimePassed
    tickets_given: TicketsGiven
    ticket_renewed: TicketRenewed
    ticket_given_back: TicketGivenBack
    members_dropped: MembersDropped
    def __init__(self, now: _Optional[float] = ..., buffer: _Optional[str] = ..., buffer_created: _Optional[_Union[BufferCreated, _Mapping]] = ..., fragment_admitted: _Optional[_Union[_fragment_pb2.FragmentMetadata, _Mapping]] = ..., fragment_stale: _Optional[_Union[_fragment_pb2.FragmentMetadata, _Mapping]] = ..., fragments_admitted: _Optional[_Union[FragmentRun, _Mapping]] = ..., grant_made: _Optional[_Union[GrantMade, _Mapping]] = ..., session_started: _Optional[_Union[SessionStarted, _Mapping]] = ..., session_ended: _Optional[_Union[SessionEnded, _Mapping]] = ..., model_published: _Optional[_Union[ModelPublished, _Mapping]] = ..., lease_renewed: _Optional[_Union[LeaseRenewed, _Mapping]] = ..., lease_released: _Optional[_Union[LeaseReleased, _Mapping]] = ..., grant_undone: _Optional[_Union[GrantUndone, _Mapping]] = ..., payloads_dropped: _Optional[_Union[PayloadsDropped, _Mapping]] = ..., unreadable_reported: _Optional[_Union[UnreadableReported, _Mapping]] = ..., buffer_updated: _Optional[_Union[BufferUpdated, _Mapping]] = ..., buffer_deleted: _Optional[_Union[BufferDeleted, _Mapping]] = ..., schema_told: _Optional[_Union[SchemaTold, _Mapping]] = ..., priorities_updated: _Optional[_Union[PrioritiesUpdated, _Mapping]] = ..., subscription_created: _Optional[_Union[SubscriptionCreated, _Mapping]] = ..., chunks_acknowledged: _Optional[_Union[ChunksAcknowledged, _Mapping]] = ..., subscription_deleted: _Optional[_Union[SubscriptionDeleted, _Mapping]] = ..., time_passed: _Optional[_Union[TimePassed, _Mapping]] = ..., tickets_given: _Optional[_Union[TicketsGiven, _Mapping]] = ..., ticket_renewed: _Optional[_Union[TicketRenewed, _Mapping]] = ..., ticket_given_back: _Optional[_Union[TicketGivenBack, _Mapping]] = ..., members_dropped: _Optional[_Union[MembersDropped, _Mapping]] = ...) -> None: ...

class BufferCreated(_message.Message):
    __slots__ = ("limits", "draw_seed")
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DRAW_SEED_FIELD_NUMBER: _ClassVar[int]
    limits: BufferLimits
    draw_seed: int
    def __init__(self, limits: _Optional[_Union[BufferLimits, _Mapping]] = ..., draw_seed: _Optional[int] = ...) -> None: ...

class FragmentRun(_message.Message):
    __slots__ = ("nows", "fragments")
    NOWS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    nows: _containers.RepeatedScalarFieldContainer[float]
    fragments: FragmentColumns
    def __init__(self, nows: _Optional[_Iterable[float]] = ..., fragments: _Optional[_Union[FragmentColumns, _Mapping]] = ...) -> None: ...

class GrantMade(_message.Message):
    __slots__ = ("request_id", "fragment_count", "world_size", "chunk_ids", "lease_ids", "lease_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    fragment_count: int
    world_size: int
    chunk_ids: _containers.RepeatedScalarFieldContainer[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    lease_seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[str] = ..., fragment_count: _Optional[int] = ..., world_size: _Optional[int] = ..., chunk_ids: _Optional[_Iterable[int]] = ..., lease_ids: _Optional[_Iterable[str]] = ..., lease_seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class SessionStarted(_message.Message):
    __slots__ = ("session_id", "model_version")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model_version: int
    def __init__(self, session_id: _Optional[str] = ..., model_version: _Optional[int] = ...) -> None: ...

class SessionEnded(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ModelPublished(_message.Message):
    __slots__ = ("session_id", "model_version", "weights")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model_version: int
    weights: _fragment_pb2.PayloadReference
    def __init__(self, session_id: _Optional[str] = ..., model_version: _Optional[int] = ..., weights: _Optional[_Union[_fragment_pb2.PayloadReference, _Mapping]] = ...) -> None: ...

class LeaseRenewed(_message.Message):
    __slots__ = ("lease_id", "lease_seconds")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_seconds: float
    def __init__(self, lease_id: _Optional[str] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class LeaseReleased(_message.Message):
    __slots__ = ("lease_id", "end")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    end: LeaseEnd
    def __init__(self, lease_id: _Optional[str] = ..., end: _Optional[_Union[LeaseEnd, str]] = ...) -> None: ...

class GrantUndone(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class PayloadsDropped(_message.Message):
    __slots__ = ("payload_ids",)
    PAYLOAD_IDS_FIELD_NUMBER: _ClassVar[int]
    payload_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, payload_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class UnreadableReported(_message.Message):
    __slots__ = ("lease_id", "payload_ids", "reports_max")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_IDS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_MAX_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    payload_ids: _containers.RepeatedScalarFieldContainer[str]
    reports_max: int
    def __init__(self, lease_id: _Optional[str] = ..., payload_ids: _Optional[_Iterable[str]] = ..., reports_max: _Optional[int] = ...) -> None: ...

class BufferUpdated(_message.Message):
    __slots__ = ("limits",)
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: BufferLimits
    def __init__(self, limits: _Optional[_Union[BufferLimits, _Mapping]] = ...) -> None: ...

class BufferDeleted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubscriptionCreated(_message.Message):
    __slots__ = ("name", "retaining", "after_chunk_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RETAINING_FIELD_NUMBER: _ClassVar[int]
    AFTER_CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    retaining: bool
    after_chunk_id: int
    def __init__(self, name: _Optional[str] = ..., retaining: bool = ..., after_chunk_id: _Optional[int] = ...) -> None: ...

class ChunksAcknowledged(_message.Message):
    __slots__ = ("name", "chunk_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    chunk_id: int
    def __init__(self, name: _Optional[str] = ..., chunk_id: _Optional[int] = ...) -> None: ...

class SubscriptionDeleted(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class TimePassed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TicketsGiven(_message.Message):
    __slots__ = ("request_id", "groups", "lease_seconds", "holder")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    groups: _containers.RepeatedScalarFieldContainer[str]
    lease_seconds: float
    holder: str
    def __init__(self, request_id: _Optional[str] = ..., groups: _Optional[_Iterable[str]] = ..., lease_seconds: _Optional[float] = ..., holder: _Optional[str] = ...) -> None: ...

class TicketRenewed(_message.Message):
    __slots__ = ("group", "lease_seconds")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    group: str
    lease_seconds: float
    def __init__(self, group: _Optional[str] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class TicketGivenBack(_message.Message):
    __slots__ = ("group", "member")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: int
    def __init__(self, group: _Optional[str] = ..., member: _Optional[int] = ...) -> None: ...

class MembersDropped(_message.Message):
    __slots__ = ("groups", "members")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[str]
    members: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, groups: _Optional[_Iterable[str]] = ..., members: _Optional[_Iterable[int]] = ...) -> None: ...

class SchemaTold(_message.Message):
    __slots__ = ("session_id", "hash", "schema")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    hash: int
    schema: _schema_pb2.Schema
    def __init__(self, session_id: _Optional[str] = ..., hash: _Optional[int] = ..., schema: _Optional[_Union[_schema_pb2.Schema, _Mapping]] = ...) -> None: ...

class PrioritiesUpdated(_message.Message):
    __slots__ = ("deleted_chunk_ids", "chunk_ids", "priorities")
    DELETED_CHUNK_IDS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    deleted_chunk_ids: _containers.RepeatedScalarFieldContainer[int]
    chunk_ids: _containers.RepeatedScalarFieldContainer[int]
    priorities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, deleted_chunk_ids: _Optional[_Iterable[int]] = ..., chunk_ids: _Optional[_Iterable[int]] = ..., priorities: _Optional[_Iterable[float]] = ...) -> None: ...

class BufferLimits(_message.Message):
    __slots__ = ("config", "outcomes_per_worker_max", "requests_remembered_max", "retry_delay_seconds")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_PER_WORKER_MAX_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_REMEMBERED_MAX_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    config: _buffer_pb2.BufferConfig
    outcomes_per_worker_max: int
    requests_remembered_max: int
    retry_delay_seconds: float
    def __init__(self, config: _Optional[_Union[_buffer_pb2.BufferConfig, _Mapping]] = ..., outcomes_per_worker_max: _Optional[int] = ..., requests_remembered_max: _Optional[int] = ..., retry_delay_seconds: _Optional[float] = ...) -> None: ...

class FragmentColumns(_message.Message):
    __slots__ = ("worker_id", "fragment_index", "session_id", "model_version_min", "model_version_max", "discontinuity", "step_count", "payload_id", "size_bytes", "piece_size_bytes", "schema_hash", "priority", "numbers", "part", "replaces")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    DISCONTINUITY_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    worker_id: StringColumn
    fragment_index: _containers.RepeatedScalarFieldContainer[int]
    session_id: StringColumn
    model_version_min: _containers.RepeatedScalarFieldContainer[int]
    model_version_max: _containers.RepeatedScalarFieldContainer[int]
    discontinuity: _containers.RepeatedScalarFieldContainer[bool]
    step_count: _containers.RepeatedScalarFieldContainer[int]
    payload_id: _containers.RepeatedScalarFieldContainer[str]
    size_bytes: _containers.RepeatedScalarFieldContainer[int]
    piece_size_bytes: _containers.RepeatedScalarFieldContainer[int]
    schema_hash: _containers.RepeatedScalarFieldContainer[int]
    priority: _containers.RepeatedScalarFieldContainer[float]
    numbers: _containers.RepeatedScalarFieldContainer[str]
    part: _containers.RepeatedScalarFieldContainer[str]
    replaces: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, worker_id: _Optional[_Union[StringColumn, _Mapping]] = ..., fragment_index: _Optional[_Iterable[int]] = ..., session_id: _Optional[_Union[StringColumn, _Mapping]] = ..., model_version_min: _Optional[_Iterable[int]] = ..., model_version_max: _Optional[_Iterable[int]] = ..., discontinuity: _Optional[_Iterable[bool]] = ..., step_count: _Optional[_Iterable[int]] = ..., payload_id: _Optional[_Iterable[str]] = ..., size_bytes: _Optional[_Iterable[int]] = ..., piece_size_bytes: _Optional[_Iterable[int]] = ..., schema_hash: _Optional[_Iterable[int]] = ..., priority: _Optional[_Iterable[float]] = ..., numbers: _Optional[_Iterable[str]] = ..., part: _Optional[_Iterable[str]] = ..., replaces: _Optional[_Iterable[bool]] = ...) -> None: ...

class StringColumn(_message.Message):
    __slots__ = ("strings", "places")
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    strings: _containers.RepeatedScalarFieldContainer[str]
    places: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, strings: _Optional[_Iterable[str]] = ..., places: _Optional[_Iterable[int]] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("version", "sequence", "now", "buffers")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    sequence: int
    now: float
    buffers: _containers.RepeatedCompositeFieldContainer[BufferSnapshot]
    def __init__(self, version: _Optional[int] = ..., sequence: _Optional[int] = ..., now: _Optional[float] = ..., buffers: _Optional[_Iterable[_Union[BufferSnapshot, _Mapping]]] = ...) -> None: ...

class BufferSnapshot(_message.Message):
    __slots__ = ("name", "limits", "draw_seed", "draw_count", "counters", "session_id", "model_version", "step_count", "ended_session_ids", "weights", "inserted_count", "delivered_count", "closed_count", "chunks", "workers", "open_chunks", "quarantined", "live_grants", "ended_grants", "schemas", "subscriptions", "removed_in", "group_end_count", "tickets", "version_delivered_count")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DRAW_SEED_FIELD_NUMBER: _ClassVar[int]
    DRAW_COUNT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    ENDED_SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    INSERTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    OPEN_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    LIVE_GRANTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_GRANTS_FIELD_NUMBER: _ClassVar[int]
    SCHEMAS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_IN_FIELD_NUMBER: _ClassVar[int]
    GROUP_END_COUNT_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    VERSION_DELIVERED_COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    limits: BufferLimits
    draw_seed: int
    draw_count: int
    counters: _containers.ScalarMap[str, int]
    session_id: str
    model_version: int
    step_count: int
    ended_session_ids: _containers.RepeatedScalarFieldContainer[str]
    weights: _containers.RepeatedCompositeFieldContainer[Weights]
    inserted_count: int
    delivered_count: int
    closed_count: int
    chunks: ChunkColumns
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    open_chunks: OpenChunkColumns
    quarantined: _containers.RepeatedCompositeFieldContainer[_buffer_pb2.QuarantinedFragment]
    live_grants: _containers.RepeatedCompositeFieldContainer[Grant]
    ended_grants: _containers.RepeatedCompositeFieldContainer[Grant]
    schemas: _containers.RepeatedCompositeFieldContainer[KnownSchema]
    subscriptions: _containers.RepeatedCompositeFieldContainer[NamedCursor]
    removed_in: _containers.RepeatedScalarFieldContainer[int]
    group_end_count: int
    tickets: _containers.RepeatedCompositeFieldContainer[Ticket]
    version_delivered_count: int
    def __init__(self, name: _Optional[str] = ..., limits: _Optional[_Union[BufferLimits, _Mapping]] = ..., draw_seed: _Optional[int] = ..., draw_count: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., session_id: _Optional[str] = ..., model_version: _Optional[int] = ..., step_count: _Optional[int] = ..., ended_session_ids: _Optional[_Iterable[str]] = ..., weights: _Optional[_Iterable[_Union[Weights, _Mapping]]] = ..., inserted_count: _Optional[int] = ..., delivered_count: _Optional[int] = ..., closed_count: _Optional[int] = ..., chunks: _Optional[_Union[ChunkColumns, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., open_chunks: _Optional[_Union[OpenChunkColumns, _Mapping]] = ..., quarantined: _Optional[_Iterable[_Union[_buffer_pb2.QuarantinedFragment, _Mapping]]] = ..., live_grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., ended_grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., schemas: _Optional[_Iterable[_Union[KnownSchema, _Mapping]]] = ..., subscriptions: _Optional[_Iterable[_Union[NamedCursor, _Mapping]]] = ..., removed_in: _Optional[_Iterable[int]] = ..., group_end_count: _Optional[int] = ..., tickets: _Optional[_Iterable[_Union[Ticket, _Mapping]]] = ..., version_delivered_count: _Optional[int] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("group", "request_id", "holder", "model_version", "lease_seconds", "expires_at", "given_back")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    group: str
    request_id: str
    holder: str
    model_version: int
    lease_seconds: float
    expires_at: float
    given_back: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[str] = ..., request_id: _Optional[str] = ..., holder: _Optional[str] = ..., model_version: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., expires_at: _Optional[float] = ..., given_back: _Optional[_Iterable[int]] = ...) -> None: ...

class NamedCursor(_message.Message):
    __slots__ = ("name", "retaining", "chunk_id", "missed_count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RETAINING_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    MISSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    retaining: bool
    chunk_id: int
    missed_count: int
    def __init__(self, name: _Optional[str] = ..., retaining: bool = ..., chunk_id: _Optional[int] = ..., missed_count: _Optional[int] = ...) -> None: ...

class KnownSchema(_message.Message):
    __slots__ = ("hash", "schema")
    HASH_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    hash: int
    schema: _schema_pb2.Schema
    def __init__(self, hash: _Optional[int] = ..., schema: _Optional[_Union[_schema_pb2.Schema, _Mapping]] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("model_version", "payload")
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    model_version: int
    payload: _fragment_pb2.PayloadReference
    def __init__(self, model_version: _Optional[int] = ..., payload: _Optional[_Union[_fragment_pb2.PayloadReference, _Mapping]] = ...) -> None: ...

class ChunkColumns(_message.Message):
    __slots__ = ("chunk_ids", "states", "use_counts", "unreadable_counts", "fragment_counts", "fragments", "priorities")
    CHUNK_IDS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    USE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    chunk_ids: _containers.RepeatedScalarFieldContainer[int]
    states: _containers.RepeatedScalarFieldContainer[ChunkState]
    use_counts: _containers.RepeatedScalarFieldContainer[int]
    unreadable_counts: _containers.RepeatedScalarFieldContainer[int]
    fragment_counts: _containers.RepeatedScalarFieldContainer[int]
    fragments: FragmentColumns
    priorities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chunk_ids: _Optional[_Iterable[int]] = ..., states: _Optional[_Iterable[_Union[ChunkState, str]]] = ..., use_counts: _Optional[_Iterable[int]] = ..., unreadable_counts: _Optional[_Iterable[int]] = ..., fragment_counts: _Optional[_Iterable[int]] = ..., fragments: _Optional[_Union[FragmentColumns, _Mapping]] = ..., priorities: _Optional[_Iterable[float]] = ...) -> None: ...

class OpenChunkColumns(_message.Message):
    __slots__ = ("touched_ats", "fragment_counts", "fragments")
    TOUCHED_ATS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    touched_ats: _containers.RepeatedScalarFieldContainer[float]
    fragment_counts: _containers.RepeatedScalarFieldContainer[int]
    fragments: FragmentColumns
    def __init__(self, touched_ats: _Optional[_Iterable[float]] = ..., fragment_counts: _Optional[_Iterable[int]] = ..., fragments: _Optional[_Union[FragmentColumns, _Mapping]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "next_index", "outcome_codes", "end", "end_number")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_CODES_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    END_NUMBER_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    next_index: int
    outcome_codes: bytes
    end: _fragment_pb2.GroupEndReason
    end_number: int
    def __init__(self, worker_id: _Optional[str] = ..., next_index: _Optional[int] = ..., outcome_codes: _Optional[bytes] = ..., end: _Optional[_Union[_fragment_pb2.GroupEndReason, str]] = ..., end_number: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("request_id", "fragment_count", "world_size", "session_id", "model_version", "chunk_ids", "stalenesses", "use_counts", "leases", "priorities", "probabilities", "population")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_IDS_FIELD_NUMBER: _ClassVar[int]
    STALENESSES_FIELD_NUMBER: _ClassVar[int]
    USE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    POPULATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    fragment_count: int
    world_size: int
    session_id: str
    model_version: int
    chunk_ids: _containers.RepeatedScalarFieldContainer[int]
    stalenesses: _containers.RepeatedScalarFieldContainer[int]
    use_counts: _containers.RepeatedScalarFieldContainer[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    priorities: _containers.RepeatedScalarFieldContainer[float]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    population: int
    def __init__(self, request_id: _Optional[str] = ..., fragment_count: _Optional[int] = ..., world_size: _Optional[int] = ..., session_id: _Optional[str] = ..., model_version: _Optional[int] = ..., chunk_ids: _Optional[_Iterable[int]] = ..., stalenesses: _Optional[_Iterable[int]] = ..., use_counts: _Optional[_Iterable[int]] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., priorities: _Optional[_Iterable[float]] = ..., probabilities: _Optional[_Iterable[float]] = ..., population: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "lease_seconds", "expires_at", "end")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_seconds: float
    expires_at: float
    end: LeaseEnd
    def __init__(self, lease_id: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., expires_at: _Optional[float] = ..., end: _Optional[_Union[LeaseEnd, str]] = ...) -> None: ...
