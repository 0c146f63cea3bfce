from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdmissionOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADMISSION_OUTCOME_UNSPECIFIED: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_ADMITTED: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_DUPLICATE: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_STALE: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_WRONG_SESSION: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_BUFFER_FULL: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_BYTES_FULL: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_PAYLOAD_MISSING: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_SCHEMA_UNKNOWN: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_GROUP_ENDED: _ClassVar[AdmissionOutcome]
    ADMISSION_OUTCOME_PART_CONFLICT: _ClassVar[AdmissionOutcome]

class GroupEndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_END_REASON_UNSPECIFIED: _ClassVar[GroupEndReason]
    GROUP_END_REASON_COMPLETE: _ClassVar[GroupEndReason]
    GROUP_END_REASON_PARTIAL: _ClassVar[GroupEndReason]
    GROUP_END_REASON_INCOMPLETE: _ClassVar[GroupEndReason]
    GROUP_END_REASON_STALE: _ClassVar[GroupEndReason]
    GROUP_END_REASON_LOST: _ClassVar[GroupEndReason]
    GROUP_END_REASON_EVICTED: _ClassVar[GroupEndReason]
    GROUP_END_REASON_EQUAL: _ClassVar[GroupEndReason]
    GROUP_END_REASON_GIVEN_BACK: _ClassVar[GroupEndReason]
ADMISSION_OUTCOME_UNSPECIFIED: AdmissionOutcome
ADMISSION_OUTCOME_ADMITTED: AdmissionOutcome
ADMISSION_OUTCOME_DUPLICATE: AdmissionOutcome
ADMISSION_OUTCOME_STALE: AdmissionOutcome
ADMISSION_OUTCOME_WRONG_SESSION: AdmissionOutcome
ADMISSION_OUTCOME_BUFFER_FULL: AdmissionOutcome
ADMISSION_OUTCOME_BYTES_FULL: AdmissionOutcome
ADMISSION_OUTCOME_PAYLOAD_MISSING: AdmissionOutcome
ADMISSION_OUTCOME_SCHEMA_UNKNOWN: AdmissionOutcome
ADMISSION_OUTCOME_GROUP_ENDED: AdmissionOutcome
ADMISSION_OUTCOME_PART_CONFLICT: AdmissionOutcome
GROUP_END_REASON_UNSPECIFIED: GroupEndReason
GROUP_END_REASON_COMPLETE: GroupEndReason
GROUP_END_REASON_PARTIAL: GroupEndReason
GROUP_END_REASON_INCOMPLETE: GroupEndReason
GROUP_END_REASON_STALE: GroupEndReason
GROUP_END_REASON_LOST: GroupEndReason
GROUP_END_REASON_EVICTED: GroupEndReason
GROUP_END_REASON_EQUAL: GroupEndReason
GROUP_END_REASON_GIVEN_BACK: GroupEndReason

class PayloadReference(_message.Message):
    __slots__ = ("payload_id", "size_bytes", "piece_size_bytes")
    PAYLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    payload_id: str
    size_bytes: int
    piece_size_bytes: int
    def __init__(self, payload_id: _Optional[str] = ..., size_bytes: _Optional[int] = ..., piece_size_bytes: _Optional[int] = ...) -> None: ...

class FragmentMetadata(_message.Message):
    __slots__ = ("worker_id", "fragment_index", "session_id", "model_version_min", "model_version_max", "discontinuity", "payload", "step_count", "schema_hash", "priority", "numbers", "part", "replaces")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    DISCONTINUITY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    fragment_index: int
    session_id: str
    model_version_min: int
    model_version_max: int
    discontinuity: bool
    payload: PayloadReference
    step_count: int
    schema_hash: int
    priority: float
    numbers: str
    part: str
    replaces: bool
    def __init__(self, worker_id: _Optional[str] = ..., fragment_index: _Optional[int] = ..., session_id: _Optional[str] = ..., model_version_min: _Optional[int] = ..., model_version_max: _Optional[int] = ..., discontinuity: bool = ..., payload: _Optional[_Union[PayloadReference, _Mapping]] = ..., step_count: _Optional[int] = ..., schema_hash: _Optional[int] = ..., priority: _Optional[float] = ..., numbers: _Optional[str] = ..., part: _Optional[str] = ..., replaces: bool = ...) -> None: ...

class FragmentReference(_message.Message):
    __slots__ = ("metadata", "chunk_id", "staleness", "use_count", "priority", "probability", "population")
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    USE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    POPULATION_FIELD_NUMBER: _ClassVar[int]
    metadata: FragmentMetadata
    chunk_id: int
    staleness: int
    use_count: int
    priority: float
    probability: float
    population: int
    def __init__(self, metadata: _Optional[_Union[FragmentMetadata, _Mapping]] = ..., chunk_id: _Optional[int] = ..., staleness: _Optional[int] = ..., use_count: _Optional[int] = ..., priority: _Optional[float] = ..., probability: _Optional[float] = ..., population: _Optional[int] = ...) -> None: ...
