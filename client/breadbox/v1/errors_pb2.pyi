from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ARGUMENT_INVALID: _ClassVar[ErrorReason]
    FETCH_EXCEEDS_CAPACITY: _ClassVar[ErrorReason]
    PAYLOAD_SIZE_MISMATCH: _ClassVar[ErrorReason]
    REQUEST_MISMATCH: _ClassVar[ErrorReason]
    BUFFER_NOT_FOUND: _ClassVar[ErrorReason]
    BUFFER_EXISTS: _ClassVar[ErrorReason]
    BUFFERS_FULL: _ClassVar[ErrorReason]
    SESSION_NOT_CURRENT: _ClassVar[ErrorReason]
    VERSION_REGRESSED: _ClassVar[ErrorReason]
    LEASE_NOT_FOUND: _ClassVar[ErrorReason]
    REQUEST_NOT_FOUND: _ClassVar[ErrorReason]
    WAITERS_FULL: _ClassVar[ErrorReason]
    WATCHERS_FULL: _ClassVar[ErrorReason]
    APPENDS_FULL: _ClassVar[ErrorReason]
    SERVER_BUSY: _ClassVar[ErrorReason]
    WORKERS_FULL: _ClassVar[ErrorReason]
    QUOTA_FULL: _ClassVar[ErrorReason]
    QUOTA_EXCEEDED: _ClassVar[ErrorReason]
    STORE_FULL: _ClassVar[ErrorReason]
    STORE_UNAVAILABLE: _ClassVar[ErrorReason]
    PAYLOAD_MISSING: _ClassVar[ErrorReason]
    PAYLOAD_CORRUPT: _ClassVar[ErrorReason]
    GATEWAY_OFF: _ClassVar[ErrorReason]
    GATEWAY_FULL: _ClassVar[ErrorReason]
    GATEWAY_STALLED: _ClassVar[ErrorReason]
    DRAINING: _ClassVar[ErrorReason]
    UNAUTHENTICATED: _ClassVar[ErrorReason]
    PERMISSION_DENIED: _ClassVar[ErrorReason]
    INTERNAL: _ClassVar[ErrorReason]
    SCHEMA_MISMATCH: _ClassVar[ErrorReason]
    SUBSCRIPTION_NOT_FOUND: _ClassVar[ErrorReason]
    SUBSCRIPTION_EXISTS: _ClassVar[ErrorReason]
    SUBSCRIPTIONS_FULL: _ClassVar[ErrorReason]
    STANDBY: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ARGUMENT_INVALID: ErrorReason
FETCH_EXCEEDS_CAPACITY: ErrorReason
PAYLOAD_SIZE_MISMATCH: ErrorReason
REQUEST_MISMATCH: ErrorReason
BUFFER_NOT_FOUND: ErrorReason
BUFFER_EXISTS: ErrorReason
BUFFERS_FULL: ErrorReason
SESSION_NOT_CURRENT: ErrorReason
VERSION_REGRESSED: ErrorReason
LEASE_NOT_FOUND: ErrorReason
REQUEST_NOT_FOUND: ErrorReason
WAITERS_FULL: ErrorReason
WATCHERS_FULL: ErrorReason
APPENDS_FULL: ErrorReason
SERVER_BUSY: ErrorReason
WORKERS_FULL: ErrorReason
QUOTA_FULL: ErrorReason
QUOTA_EXCEEDED: ErrorReason
STORE_FULL: ErrorReason
STORE_UNAVAILABLE: ErrorReason
PAYLOAD_MISSING: ErrorReason
PAYLOAD_CORRUPT: ErrorReason
GATEWAY_OFF: ErrorReason
GATEWAY_FULL: ErrorReason
GATEWAY_STALLED: ErrorReason
DRAINING: ErrorReason
UNAUTHENTICATED: ErrorReason
PERMISSION_DENIED: ErrorReason
INTERNAL: ErrorReason
SCHEMA_MISMATCH: ErrorReason
SUBSCRIPTION_NOT_FOUND: ErrorReason
SUBSCRIPTION_EXISTS: ErrorReason
SUBSCRIPTIONS_FULL: ErrorReason
STANDBY: ErrorReason
