from breadbox.v1 import schema_pb2 as _schema_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StalePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STALE_POLICY_UNSPECIFIED: _ClassVar[StalePolicy]
    STALE_POLICY_EVICT: _ClassVar[StalePolicy]
    STALE_POLICY_KEEP: _ClassVar[StalePolicy]

class AssemblyPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ASSEMBLY_POLICY_UNSPECIFIED: _ClassVar[AssemblyPolicy]
    ASSEMBLY_POLICY_CONSECUTIVE: _ClassVar[AssemblyPolicy]
    ASSEMBLY_POLICY_GROUPS: _ClassVar[AssemblyPolicy]

class SchemaPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEMA_POLICY_UNSPECIFIED: _ClassVar[SchemaPolicy]
    SCHEMA_POLICY_ONE: _ClassVar[SchemaPolicy]
    SCHEMA_POLICY_ANY: _ClassVar[SchemaPolicy]
    SCHEMA_POLICY_RAGGED: _ClassVar[SchemaPolicy]

class FullPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FULL_POLICY_UNSPECIFIED: _ClassVar[FullPolicy]
    FULL_POLICY_EVICT: _ClassVar[FullPolicy]
    FULL_POLICY_BLOCK: _ClassVar[FullPolicy]

class LeaseExpiryPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_EXPIRY_POLICY_UNSPECIFIED: _ClassVar[LeaseExpiryPolicy]
    LEASE_EXPIRY_POLICY_GIVE_BACK: _ClassVar[LeaseExpiryPolicy]
    LEASE_EXPIRY_POLICY_CONSUME: _ClassVar[LeaseExpiryPolicy]
STALE_POLICY_UNSPECIFIED: StalePolicy
STALE_POLICY_EVICT: StalePolicy
STALE_POLICY_KEEP: StalePolicy
ASSEMBLY_POLICY_UNSPECIFIED: AssemblyPolicy
ASSEMBLY_POLICY_CONSECUTIVE: AssemblyPolicy
ASSEMBLY_POLICY_GROUPS: AssemblyPolicy
SCHEMA_POLICY_UNSPECIFIED: SchemaPolicy
SCHEMA_POLICY_ONE: SchemaPolicy
SCHEMA_POLICY_ANY: SchemaPolicy
SCHEMA_POLICY_RAGGED: SchemaPolicy
FULL_POLICY_UNSPECIFIED: FullPolicy
FULL_POLICY_EVICT: FullPolicy
FULL_POLICY_BLOCK: FullPolicy
LEASE_EXPIRY_POLICY_UNSPECIFIED: LeaseExpiryPolicy
LEASE_EXPIRY_POLICY_GIVE_BACK: LeaseExpiryPolicy
LEASE_EXPIRY_POLICY_CONSUME: LeaseExpiryPolicy

class BufferConfig(_message.Message):
    __slots__ = ("fragments_per_chunk", "capacity_chunks", "capacity_bytes", "staleness_max", "uses_max", "full_policy", "lease_expiry_policy", "lease_duration", "waiters_max", "leases_max", "workers_max", "open_chunk_duration", "sampler", "limiter", "schema", "priority_exponent", "remover", "with_replacement", "assembly", "group_min", "drop_equal", "stale", "groups_per_version", "lead_versions", "required_parts")
    FRAGMENTS_PER_CHUNK_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MAX_FIELD_NUMBER: _ClassVar[int]
    USES_MAX_FIELD_NUMBER: _ClassVar[int]
    FULL_POLICY_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRY_POLICY_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    WAITERS_MAX_FIELD_NUMBER: _ClassVar[int]
    LEASES_MAX_FIELD_NUMBER: _ClassVar[int]
    WORKERS_MAX_FIELD_NUMBER: _ClassVar[int]
    OPEN_CHUNK_DURATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    LIMITER_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_EXPONENT_FIELD_NUMBER: _ClassVar[int]
    REMOVER_FIELD_NUMBER: _ClassVar[int]
    WITH_REPLACEMENT_FIELD_NUMBER: _ClassVar[int]
    ASSEMBLY_FIELD_NUMBER: _ClassVar[int]
    GROUP_MIN_FIELD_NUMBER: _ClassVar[int]
    DROP_EQUAL_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEAD_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_PARTS_FIELD_NUMBER: _ClassVar[int]
    fragments_per_chunk: int
    capacity_chunks: int
    capacity_bytes: int
    staleness_max: int
    uses_max: int
    full_policy: FullPolicy
    lease_expiry_policy: LeaseExpiryPolicy
    lease_duration: _duration_pb2.Duration
    waiters_max: int
    leases_max: int
    workers_max: int
    open_chunk_duration: _duration_pb2.Duration
    sampler: Sampler
    limiter: Limiter
    schema: SchemaPolicy
    priority_exponent: float
    remover: Sampler
    with_replacement: bool
    assembly: AssemblyPolicy
    group_min: int
    drop_equal: str
    stale: StalePolicy
    groups_per_version: int
    lead_versions: int
    required_parts: str
    def __init__(self, fragments_per_chunk: _Optional[int] = ..., capacity_chunks: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., staleness_max: _Optional[int] = ..., uses_max: _Optional[int] = ..., full_policy: _Optional[_Union[FullPolicy, str]] = ..., lease_expiry_policy: _Optional[_Union[LeaseExpiryPolicy, str]] = ..., lease_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., waiters_max: _Optional[int] = ..., leases_max: _Optional[int] = ..., workers_max: _Optional[int] = ..., open_chunk_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., sampler: _Optional[_Union[Sampler, _Mapping]] = ..., limiter: _Optional[_Union[Limiter, _Mapping]] = ..., schema: _Optional[_Union[SchemaPolicy, str]] = ..., priority_exponent: _Optional[float] = ..., remover: _Optional[_Union[Sampler, _Mapping]] = ..., with_replacement: bool = ..., assembly: _Optional[_Union[AssemblyPolicy, str]] = ..., group_min: _Optional[int] = ..., drop_equal: _Optional[str] = ..., stale: _Optional[_Union[StalePolicy, str]] = ..., groups_per_version: _Optional[int] = ..., lead_versions: _Optional[int] = ..., required_parts: _Optional[str] = ...) -> None: ...

class Sampler(_message.Message):
    __slots__ = ("uniform", "oldest_first", "freshest_first", "newest_first", "prioritised", "highest_priority", "lowest_priority")
    UNIFORM_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    FRESHEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    PRIORITISED_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LOWEST_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    uniform: Uniform
    oldest_first: OldestFirst
    freshest_first: FreshestFirst
    newest_first: NewestFirst
    prioritised: Prioritised
    highest_priority: HighestPriority
    lowest_priority: LowestPriority
    def __init__(self, uniform: _Optional[_Union[Uniform, _Mapping]] = ..., oldest_first: _Optional[_Union[OldestFirst, _Mapping]] = ..., freshest_first: _Optional[_Union[FreshestFirst, _Mapping]] = ..., newest_first: _Optional[_Union[NewestFirst, _Mapping]] = ..., prioritised: _Optional[_Union[Prioritised, _Mapping]] = ..., highest_priority: _Optional[_Union[HighestPriority, _Mapping]] = ..., lowest_priority: _Optional[_Union[LowestPriority, _Mapping]] = ...) -> None: ...

class Uniform(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OldestFirst(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FreshestFirst(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NewestFirst(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Prioritised(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HighestPriority(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LowestPriority(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Limiter(_message.Message):
    __slots__ = ("minimum_chunks", "sample_to_insert_ratio")
    MINIMUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_TO_INSERT_RATIO_FIELD_NUMBER: _ClassVar[int]
    minimum_chunks: MinimumChunks
    sample_to_insert_ratio: SampleToInsertRatio
    def __init__(self, minimum_chunks: _Optional[_Union[MinimumChunks, _Mapping]] = ..., sample_to_insert_ratio: _Optional[_Union[SampleToInsertRatio, _Mapping]] = ...) -> None: ...

class MinimumChunks(_message.Message):
    __slots__ = ("chunk_count",)
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    chunk_count: int
    def __init__(self, chunk_count: _Optional[int] = ...) -> None: ...

class SampleToInsertRatio(_message.Message):
    __slots__ = ("ratio", "error_chunks", "minimum_chunk_count", "lead_chunks")
    RATIO_FIELD_NUMBER: _ClassVar[int]
    ERROR_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEAD_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    ratio: float
    error_chunks: float
    minimum_chunk_count: int
    lead_chunks: float
    def __init__(self, ratio: _Optional[float] = ..., error_chunks: _Optional[float] = ..., minimum_chunk_count: _Optional[int] = ..., lead_chunks: _Optional[float] = ...) -> None: ...

class Buffer(_message.Message):
    __slots__ = ("name", "config", "session_id", "model_version", "state", "schemas", "subscriptions", "chunk_events", "workers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SCHEMAS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_EVENTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    config: BufferConfig
    session_id: str
    model_version: int
    state: BufferState
    schemas: _containers.RepeatedCompositeFieldContainer[_schema_pb2.Schema]
    subscriptions: _containers.RepeatedCompositeFieldContainer[Subscription]
    chunk_events: _containers.RepeatedCompositeFieldContainer[ChunkEvent]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerSteps]
    def __init__(self, name: _Optional[str] = ..., config: _Optional[_Union[BufferConfig, _Mapping]] = ..., session_id: _Optional[str] = ..., model_version: _Optional[int] = ..., state: _Optional[_Union[BufferState, _Mapping]] = ..., schemas: _Optional[_Iterable[_Union[_schema_pb2.Schema, _Mapping]]] = ..., subscriptions: _Optional[_Iterable[_Union[Subscription, _Mapping]]] = ..., chunk_events: _Optional[_Iterable[_Union[ChunkEvent, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerSteps, _Mapping]]] = ...) -> None: ...

class Subscription(_message.Message):
    __slots__ = ("name", "retaining", "acknowledged_chunk_id", "lag_chunk_count", "lag_bytes", "lag_duration", "missed_chunk_count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RETAINING_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    LAG_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAG_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAG_DURATION_FIELD_NUMBER: _ClassVar[int]
    MISSED_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    retaining: bool
    acknowledged_chunk_id: int
    lag_chunk_count: int
    lag_bytes: int
    lag_duration: _duration_pb2.Duration
    missed_chunk_count: int
    def __init__(self, name: _Optional[str] = ..., retaining: bool = ..., acknowledged_chunk_id: _Optional[int] = ..., lag_chunk_count: _Optional[int] = ..., lag_bytes: _Optional[int] = ..., lag_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., missed_chunk_count: _Optional[int] = ...) -> None: ...

class BufferState(_message.Message):
    __slots__ = ("chunk_count", "open_chunk_count", "open_fragment_count", "fragment_count", "payload_bytes", "lease_count", "waiter_count", "worker_count", "counters", "chunk_count_by_staleness", "waiting_reason", "outage", "hold", "quarantined", "latest_request_id", "retained_chunk_count", "inserted_chunk_count", "delivered_chunk_count", "idle_duration", "session_users", "open_groups", "ticket_count", "ticket_waiter_count", "ticket_waiting_reason")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ChunkCountByStalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    OPEN_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FRAGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITER_COUNT_FIELD_NUMBER: _ClassVar[int]
    WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_BY_STALENESS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REASON_FIELD_NUMBER: _ClassVar[int]
    OUTAGE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    LATEST_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RETAINED_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    INSERTED_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    IDLE_DURATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_USERS_FIELD_NUMBER: _ClassVar[int]
    OPEN_GROUPS_FIELD_NUMBER: _ClassVar[int]
    TICKET_COUNT_FIELD_NUMBER: _ClassVar[int]
    TICKET_WAITER_COUNT_FIELD_NUMBER: _ClassVar[int]
    TICKET_WAITING_REASON_FIELD_NUMBER: _ClassVar[int]
    chunk_count: int
    open_chunk_count: int
    open_fragment_count: int
    fragment_count: int
    payload_bytes: int
    lease_count: int
    waiter_count: int
    worker_count: int
    counters: _containers.ScalarMap[str, int]
    chunk_count_by_staleness: _containers.ScalarMap[int, int]
    waiting_reason: str
    outage: str
    hold: str
    quarantined: _containers.RepeatedCompositeFieldContainer[QuarantinedFragment]
    latest_request_id: str
    retained_chunk_count: int
    inserted_chunk_count: int
    delivered_chunk_count: int
    idle_duration: _duration_pb2.Duration
    session_users: str
    open_groups: _containers.RepeatedCompositeFieldContainer[OpenGroup]
    ticket_count: int
    ticket_waiter_count: int
    ticket_waiting_reason: str
    def __init__(self, chunk_count: _Optional[int] = ..., open_chunk_count: _Optional[int] = ..., open_fragment_count: _Optional[int] = ..., fragment_count: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., lease_count: _Optional[int] = ..., waiter_count: _Optional[int] = ..., worker_count: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., chunk_count_by_staleness: _Optional[_Mapping[int, int]] = ..., waiting_reason: _Optional[str] = ..., outage: _Optional[str] = ..., hold: _Optional[str] = ..., quarantined: _Optional[_Iterable[_Union[QuarantinedFragment, _Mapping]]] = ..., latest_request_id: _Optional[str] = ..., retained_chunk_count: _Optional[int] = ..., inserted_chunk_count: _Optional[int] = ..., delivered_chunk_count: _Optional[int] = ..., idle_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., session_users: _Optional[str] = ..., open_groups: _Optional[_Iterable[_Union[OpenGroup, _Mapping]]] = ..., ticket_count: _Optional[int] = ..., ticket_waiter_count: _Optional[int] = ..., ticket_waiting_reason: _Optional[str] = ...) -> None: ...

class OpenGroup(_message.Message):
    __slots__ = ("group", "member_count", "lacking_members", "silent_duration")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_COUNT_FIELD_NUMBER: _ClassVar[int]
    LACKING_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SILENT_DURATION_FIELD_NUMBER: _ClassVar[int]
    group: str
    member_count: int
    lacking_members: _containers.RepeatedScalarFieldContainer[int]
    silent_duration: _duration_pb2.Duration
    def __init__(self, group: _Optional[str] = ..., member_count: _Optional[int] = ..., lacking_members: _Optional[_Iterable[int]] = ..., silent_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class QuarantinedFragment(_message.Message):
    __slots__ = ("worker_id", "fragment_index", "session_id", "payload_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    fragment_index: int
    session_id: str
    payload_id: str
    def __init__(self, worker_id: _Optional[str] = ..., fragment_index: _Optional[int] = ..., session_id: _Optional[str] = ..., payload_id: _Optional[str] = ...) -> None: ...

class ChunkEvent(_message.Message):
    __slots__ = ("number", "kind", "age_duration", "chunk_ids", "values")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AGE_DURATION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: str
    age_duration: _duration_pb2.Duration
    chunk_ids: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[str] = ..., age_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., chunk_ids: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerSteps(_message.Message):
    __slots__ = ("worker_id", "task", "acted_count", "filling_count", "sending_count", "dropped_count", "refused_count", "undelivered_count", "admitted_count", "fragment_step_count", "steps_per_version", "trained_count", "evicted_count", "trained_version", "report_age_duration")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ACTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    FILLING_COUNT_FIELD_NUMBER: _ClassVar[int]
    SENDING_COUNT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNDELIVERED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAINED_COUNT_FIELD_NUMBER: _ClassVar[int]
    EVICTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRAINED_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_DURATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    task: str
    acted_count: int
    filling_count: int
    sending_count: int
    dropped_count: int
    refused_count: int
    undelivered_count: int
    admitted_count: int
    fragment_step_count: int
    steps_per_version: float
    trained_count: int
    evicted_count: int
    trained_version: int
    report_age_duration: _duration_pb2.Duration
    def __init__(self, worker_id: _Optional[str] = ..., task: _Optional[str] = ..., acted_count: _Optional[int] = ..., filling_count: _Optional[int] = ..., sending_count: _Optional[int] = ..., dropped_count: _Optional[int] = ..., refused_count: _Optional[int] = ..., undelivered_count: _Optional[int] = ..., admitted_count: _Optional[int] = ..., fragment_step_count: _Optional[int] = ..., steps_per_version: _Optional[float] = ..., trained_count: _Optional[int] = ..., evicted_count: _Optional[int] = ..., trained_version: _Optional[int] = ..., report_age_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...
