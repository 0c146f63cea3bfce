"""The one table from what went wrong inside to what the caller gets.

Identity on the wire is (domain, reason); the text is for people. No address, credential or payload
bytes: a store's errors are reported in our words.
"""

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from breadbox.model import errors as library
from breadbox.v1 import errors_pb2 as reasons
from breadbox_server.base import errors as shell
from breadbox_server.core.model import errors as core

log = logging.getLogger(__name__)

DOMAIN: Final = "breadbox"
RETRY_DELAY_S: Final = 0.5
MESSAGE_LENGTH_MAX: Final = 1024
METADATA_LENGTH_MAX: Final = 256
"""Characters; all of a status must fit into the 8 KiB of trailing metadata that clients accept."""
REQUEST_ID_BYTES: Final = 8
ANSWER_MARGIN_S: Final = 0.15
"""Kept free before a call's deadline, so that the reason for no answer still reaches the caller;
less than what a wait keeps free."""
NOT_DONE: Final = "the server was not done in time"


class DeadlineNearError(Exception):
    """The call's deadline is near, and neither store nor journal is away."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one class of error is reported."""

    code: grpc.StatusCode
    reason: int
    """A value of `breadbox.v1.ErrorReason`."""
    text: str = ""
    """Text instead of the error's own, which may name an address."""
    retry_delay_s: float | None = None
    """Seconds after which the very same call may be sent again, or None if the caller decides."""


_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_NOT_FOUND = grpc.StatusCode.NOT_FOUND
_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

TABLE: Final[Mapping[type[Exception], Row]] = {
    core.InvalidArgumentError: Row(_INVALID, reasons.ARGUMENT_INVALID),
    core.FetchExceedsCapacityError: Row(_INVALID, reasons.FETCH_EXCEEDS_CAPACITY),
    core.BufferNotFoundError: Row(_NOT_FOUND, reasons.BUFFER_NOT_FOUND),
    core.BufferExistsError: Row(grpc.StatusCode.ALREADY_EXISTS, reasons.BUFFER_EXISTS),
    core.BuffersFullError: Row(_PRECONDITION, reasons.BUFFERS_FULL),
    core.SessionNotCurrentError: Row(_PRECONDITION, reasons.SESSION_NOT_CURRENT),
    shell.SessionInUseError: Row(_PRECONDITION, reasons.SESSION_IN_USE),
    core.VersionRegressedError: Row(_PRECONDITION, reasons.VERSION_REGRESSED),
    core.LeaseNotFoundError: Row(_NOT_FOUND, reasons.LEASE_NOT_FOUND),
    core.TicketNotFoundError: Row(_NOT_FOUND, reasons.TICKET_NOT_FOUND),
    core.RequestNotFoundError: Row(_NOT_FOUND, reasons.REQUEST_NOT_FOUND),
    core.SubscriptionNotFoundError: Row(_NOT_FOUND, reasons.SUBSCRIPTION_NOT_FOUND),
    core.SubscriptionExistsError: Row(grpc.StatusCode.ALREADY_EXISTS, reasons.SUBSCRIPTION_EXISTS),
    core.SubscriptionsFullError: Row(_PRECONDITION, reasons.SUBSCRIPTIONS_FULL),
    core.RequestMismatchError: Row(_INVALID, reasons.REQUEST_MISMATCH),
    core.WaitersFullError: Row(_EXHAUSTED, reasons.WAITERS_FULL, retry_delay_s=RETRY_DELAY_S),
    core.WorkersFullError: Row(_PRECONDITION, reasons.WORKERS_FULL),
    core.SchemaMismatchError: Row(_PRECONDITION, reasons.SCHEMA_MISMATCH),
    core.DrainingError: Row(_UNAVAILABLE, reasons.DRAINING),
    shell.StandbyError: Row(_UNAVAILABLE, reasons.STANDBY),
    shell.AppendsFullError: Row(_EXHAUSTED, reasons.APPENDS_FULL, retry_delay_s=RETRY_DELAY_S),
    shell.WatchersFullError: Row(_EXHAUSTED, reasons.WATCHERS_FULL, retry_delay_s=RETRY_DELAY_S),
    shell.ServerBusyError: Row(_EXHAUSTED, reasons.SERVER_BUSY, retry_delay_s=RETRY_DELAY_S),
    shell.QuotaFullError: Row(_EXHAUSTED, reasons.QUOTA_FULL, retry_delay_s=RETRY_DELAY_S),
    shell.QuotaExceededError: Row(_PRECONDITION, reasons.QUOTA_EXCEEDED),
    shell.PayloadSizeError: Row(_INVALID, reasons.PAYLOAD_SIZE_MISMATCH),
    shell.GatewayOffError: Row(_PRECONDITION, reasons.GATEWAY_OFF),
    shell.GatewayFullError: Row(_EXHAUSTED, reasons.GATEWAY_FULL, retry_delay_s=RETRY_DELAY_S),
    shell.GatewayStalledError: Row(grpc.StatusCode.DEADLINE_EXCEEDED, reasons.GATEWAY_STALLED),
    shell.UnauthenticatedError: Row(grpc.StatusCode.UNAUTHENTICATED, reasons.UNAUTHENTICATED),
    shell.PermissionDeniedError: Row(grpc.StatusCode.PERMISSION_DENIED, reasons.PERMISSION_DENIED),
    shell.InternalError: Row(grpc.StatusCode.INTERNAL, reasons.INTERNAL),
    library.StoreUnavailableError: Row(
        _UNAVAILABLE,
        reasons.STORE_UNAVAILABLE,
        text="the payload store cannot be reached by the server; try again",
    ),
    shell.OutageError: Row(_UNAVAILABLE, reasons.STORE_UNAVAILABLE),
    library.StoreFullError: Row(
        _EXHAUSTED,
        reasons.STORE_FULL,
        text="the payload store has no room; try again when batches have been released",
        retry_delay_s=RETRY_DELAY_S,
    ),
    library.PayloadMissingError: Row(
        _PRECONDITION,
        reasons.PAYLOAD_MISSING,
        text="the payload is not in the store; write it and call again",
    ),
    library.PayloadCorruptError: Row(grpc.StatusCode.DATA_LOSS, reasons.PAYLOAD_CORRUPT),
}
"""Errors with a row. `tests/service/test_status.py` holds that none is missing."""


def reply_budget_s(left_s: float | None) -> float | None:
    """Return the seconds for a reply out of those until the deadline; None without a deadline."""
    return None if left_s is None else left_s - min(ANSWER_MARGIN_S, left_s / 4)


def status_of(error: Exception, method: str) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """Return the code and status that end a call.

    An exception without a row is our bug: INTERNAL with a request id; the text is in the log only.
    """
    if not isinstance(error, tuple(TABLE)):
        request_id = secrets.token_hex(REQUEST_ID_BYTES)
        log.error("%s failed; reported as request id %s", method, request_id, exc_info=error)
        error = shell.InternalError(request_id)
    return row_of(error).code, to_status(error)


def row_of(error: Exception) -> Row:
    """Return the row of an error's class, or of one it is a kind of; KeyError is a bug."""
    for kind in type(error).__mro__:
        row = TABLE.get(kind)
        if row is not None:
            return row
    raise KeyError(type(error).__name__)


def to_status(error: Exception) -> status_pb2.Status:
    """Return the status of an error with a row, and machine-readable details; or KeyError."""
    row = row_of(error)
    reason = reasons.ErrorReason.Name(row.reason)
    metadata = {name: value[:METADATA_LENGTH_MAX] for name, value in _metadata(error).items()}
    details: list[Message] = [
        error_details_pb2.ErrorInfo(domain=DOMAIN, reason=reason, metadata=metadata)
    ]
    if row.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(row.retry_delay_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, core.InvalidArgumentError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field[:METADATA_LENGTH_MAX], description=error.problem[:METADATA_LENGTH_MAX]
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    text = row.text or str(error)
    if isinstance(error, library.StoreUnavailableError) and error.answer:
        text = f"the Redis of the server's payload store refuses: {error.answer}"
    status = status_pb2.Status(
        code=getattr(code_pb2, row.code.name), message=text[:MESSAGE_LENGTH_MAX]
    )
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _metadata(error: Exception) -> dict[str, str]:
    if isinstance(error, core.DomainError):
        return error.metadata
    if isinstance(error, library.PayloadMissingError):
        return {"payload": error.payload_id}
    if isinstance(error, shell.OutageError):
        return {"away": ", ".join(error.places)}
    return {}
