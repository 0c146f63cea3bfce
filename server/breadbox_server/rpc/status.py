"""The one table from what went wrong inside to what the caller is told.

Identity on the wire is (domain, reason); the text is for people. Nothing here carries an address,
a credential or payload bytes: errors of the store are told in our words, never in the store's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from breadbox.model import errors as library_errors
from breadbox.v1 import errors_pb2
from breadbox_server.base import errors as shell_errors
from breadbox_server.core.model import errors as core_errors

DOMAIN: Final = "breadbox"
STORE_RETRY_DELAY_S: Final = 0.5
WAITERS_RETRY_DELAY_S: Final = 0.5
MESSAGE_LENGTH_MAX: Final = 1024
METADATA_LENGTH_MAX: Final = 256
"""Characters; all of a status must fit into the 8 KiB of trailing metadata that clients accept."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one class of error is told."""

    code: grpc.StatusCode
    reason: int
    """A value of `breadbox.v1.ErrorReason`."""
    text: str = ""
    """Empty: the error's own text. Set where that text may name an address."""
    retry_delay_s: float | None = None
    """Seconds after which the very same call may be sent again; None: the caller decides."""


_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_NOT_FOUND = grpc.StatusCode.NOT_FOUND
_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

TABLE: Final[Mapping[type[Exception], Row]] = {
    core_errors.InvalidArgumentError: Row(_INVALID, errors_pb2.ARGUMENT_INVALID),
    core_errors.FetchExceedsCapacityError: Row(_INVALID, errors_pb2.FETCH_EXCEEDS_CAPACITY),
    core_errors.BufferNotFoundError: Row(_NOT_FOUND, errors_pb2.BUFFER_NOT_FOUND),
    core_errors.BufferExistsError: Row(grpc.StatusCode.ALREADY_EXISTS, errors_pb2.BUFFER_EXISTS),
    core_errors.BuffersFullError: Row(_PRECONDITION, errors_pb2.BUFFERS_FULL),
    core_errors.SessionNotCurrentError: Row(_PRECONDITION, errors_pb2.SESSION_NOT_CURRENT),
    core_errors.VersionRegressedError: Row(_PRECONDITION, errors_pb2.VERSION_REGRESSED),
    core_errors.LeaseNotFoundError: Row(_NOT_FOUND, errors_pb2.LEASE_NOT_FOUND),
    core_errors.RequestNotFoundError: Row(_NOT_FOUND, errors_pb2.REQUEST_NOT_FOUND),
    core_errors.SubscriptionNotFoundError: Row(_NOT_FOUND, errors_pb2.SUBSCRIPTION_NOT_FOUND),
    core_errors.SubscriptionExistsError: Row(
        grpc.StatusCode.ALREADY_EXISTS, errors_pb2.SUBSCRIPTION_EXISTS
    ),
    core_errors.SubscriptionsFullError: Row(_PRECONDITION, errors_pb2.SUBSCRIPTIONS_FULL),
    core_errors.RequestMismatchError: Row(_INVALID, errors_pb2.REQUEST_MISMATCH),
    core_errors.WaitersFullError: Row(
        _EXHAUSTED, errors_pb2.WAITERS_FULL, retry_delay_s=WAITERS_RETRY_DELAY_S
    ),
    core_errors.WorkersFullError: Row(_PRECONDITION, errors_pb2.WORKERS_FULL),
    core_errors.SchemaMismatchError: Row(_PRECONDITION, errors_pb2.SCHEMA_MISMATCH),
    core_errors.DrainingError: Row(_UNAVAILABLE, errors_pb2.DRAINING),
    shell_errors.StandbyError: Row(_UNAVAILABLE, errors_pb2.STANDBY),
    shell_errors.AppendsFullError: Row(
        _EXHAUSTED, errors_pb2.APPENDS_FULL, retry_delay_s=WAITERS_RETRY_DELAY_S
    ),
    shell_errors.WatchersFullError: Row(
        _EXHAUSTED, errors_pb2.WATCHERS_FULL, retry_delay_s=WAITERS_RETRY_DELAY_S
    ),
    shell_errors.ServerBusyError: Row(
        _EXHAUSTED, errors_pb2.SERVER_BUSY, retry_delay_s=WAITERS_RETRY_DELAY_S
    ),
    shell_errors.QuotaFullError: Row(
        _EXHAUSTED, errors_pb2.QUOTA_FULL, retry_delay_s=WAITERS_RETRY_DELAY_S
    ),
    shell_errors.QuotaExceededError: Row(_PRECONDITION, errors_pb2.QUOTA_EXCEEDED),
    shell_errors.PayloadSizeError: Row(_INVALID, errors_pb2.PAYLOAD_SIZE_MISMATCH),
    shell_errors.GatewayOffError: Row(_PRECONDITION, errors_pb2.GATEWAY_OFF),
    shell_errors.GatewayFullError: Row(
        _EXHAUSTED, errors_pb2.GATEWAY_FULL, retry_delay_s=STORE_RETRY_DELAY_S
    ),
    shell_errors.GatewayStalledError: Row(
        grpc.StatusCode.DEADLINE_EXCEEDED, errors_pb2.GATEWAY_STALLED
    ),
    shell_errors.UnauthenticatedError: Row(
        grpc.StatusCode.UNAUTHENTICATED, errors_pb2.UNAUTHENTICATED
    ),
    shell_errors.PermissionDeniedError: Row(
        grpc.StatusCode.PERMISSION_DENIED, errors_pb2.PERMISSION_DENIED
    ),
    shell_errors.InternalError: Row(grpc.StatusCode.INTERNAL, errors_pb2.INTERNAL),
    library_errors.StoreUnavailableError: Row(
        _UNAVAILABLE,
        errors_pb2.STORE_UNAVAILABLE,
        text="the payload store cannot be reached by the server; try again",
    ),
    shell_errors.OutageError: Row(_UNAVAILABLE, errors_pb2.STORE_UNAVAILABLE),
    library_errors.StoreFullError: Row(
        _EXHAUSTED,
        errors_pb2.STORE_FULL,
        text="the payload store has no room; try again when batches have been released",
        retry_delay_s=STORE_RETRY_DELAY_S,
    ),
    library_errors.PayloadMissingError: Row(
        _PRECONDITION,
        errors_pb2.PAYLOAD_MISSING,
        text="the payload is not in the store; write it and call again",
    ),
    library_errors.PayloadCorruptError: Row(grpc.StatusCode.DATA_LOSS, errors_pb2.PAYLOAD_CORRUPT),
}
"""Errors with a row. `tests/service/test_status.py` holds that none is missing."""

TELLABLE: Final = tuple(TABLE)


def code_of(error: Exception) -> grpc.StatusCode:
    """The gRPC code of an error that has a row."""
    return _row(error).code


def to_status(error: Exception) -> status_pb2.Status:
    """Tell an error that has a row, with machine-readable details.

    Raises:
        KeyError: The error has no row, which is a bug.
    """
    row = _row(error)
    reason = errors_pb2.ErrorReason.Name(row.reason)
    metadata = {name: value[:METADATA_LENGTH_MAX] for name, value in _metadata(error).items()}
    details: list[Message] = [
        error_details_pb2.ErrorInfo(domain=DOMAIN, reason=reason, metadata=metadata)
    ]
    if row.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(row.retry_delay_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, core_errors.InvalidArgumentError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field[:METADATA_LENGTH_MAX],
            description=error.problem[:METADATA_LENGTH_MAX],
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    text = row.text or str(error)
    if isinstance(error, library_errors.StoreUnavailableError) and error.answer:
        text = f"the Redis of the server's payload store refuses: {error.answer}"
    status = status_pb2.Status(
        code=getattr(code_pb2, row.code.name), message=text[:MESSAGE_LENGTH_MAX]
    )
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _row(error: Exception) -> Row:
    for kind in type(error).__mro__:
        row = TABLE.get(kind)
        if row is not None:
            return row
    raise KeyError(type(error).__name__)


def _metadata(error: Exception) -> dict[str, str]:
    if isinstance(error, core_errors.DomainError):
        return error.metadata
    if isinstance(error, library_errors.PayloadMissingError):
        return {"payload": error.payload_id}
    if isinstance(error, shell_errors.OutageError):
        return {"away": ", ".join(error.places)}
    return {}
