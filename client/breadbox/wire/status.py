"""From a failed call to the library's own error: one table, keyed by the reason on the wire.

The server's errors carry `google.rpc.ErrorInfo`; identity is (domain, reason), never the text. A
failure without one (a dead server, a proxy, gRPC itself) is read by its status code. Both ways are
total: every failure becomes a `ReplayBufferError`.
"""

import re
from collections.abc import Callable, Mapping

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from breadbox.model import errors
from breadbox.v1 import errors_pb2
from breadbox.wire.unreachable import unreachable

DOMAIN = "breadbox"
_DETAILS_KEY = "grpc-status-details-bin"
_RETRY_DELAY_S_DEFAULT = 0.25
_RETRY_DELAY_S_UNTOLD = 0.02
"""Where a transport has no place for a call just now: places are free again in no time."""


class Failure:
    """What is known of a failed call: code, text, reason, and the fields that vary."""

    def __init__(
        self,
        code: grpc.StatusCode,
        text: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_delay_s: float | None = None,
    ) -> None:
        self.code = code
        self.text = text or "no details"
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_delay_s = retry_delay_s

    def text_of(self, key: str) -> str:
        """A field that varies; empty when the server did not send it."""
        return self.metadata.get(key, "")

    def number_of(self, key: str) -> int:
        """A field that varies, as a whole number; -1 when it is absent or none."""
        try:
            return int(self.metadata[key])
        except (KeyError, ValueError):
            return -1


def _mismatch(failure: Failure) -> errors.ReplayBufferError:
    return errors.RequestMismatchError(
        failure.text_of("request"),
        failure.text_of("field"),
        failure.number_of("first"),
        failure.number_of("now"),
    )


def _invalid(failure: Failure) -> errors.ReplayBufferError:
    field = failure.text_of("field") or "request"
    return errors.InvalidRequestError(field, failure.text_of("problem") or failure.text)


def _exceeds_capacity(failure: Failure) -> errors.ReplayBufferError:
    requested, capacity = failure.text_of("requested"), failure.text_of("capacity")
    if failure.text_of("unit") == "bytes":
        problem = (
            f"needs at least {requested} bytes, but the buffer holds at most {capacity} bytes; "
            "ask for fewer or raise capacity_bytes"
        )
    else:
        problem = (
            f"is {requested}, but the buffer holds at most {capacity} fragments; "
            "ask for fewer or raise capacity_chunks"
        )
    return errors.InvalidRequestError("fragment_count", problem)


def _backpressure(failure: Failure) -> errors.ReplayBufferError:
    delay_s = failure.retry_delay_s
    return errors.BackpressureError(
        failure.text, _RETRY_DELAY_S_DEFAULT if delay_s is None else delay_s
    )


def _schema_mismatch(failure: Failure) -> errors.ReplayBufferError:
    fields = (failure.text_of(name) for name in ("path", "wanted", "got"))
    return errors.SchemaMismatchError(failure.text, *fields)


def _standby(failure: Failure) -> errors.ReplayBufferError:
    try:
        lag_s = float(failure.text_of("lag_s"))
    except ValueError:
        lag_s = 0.0
    return errors.StandbyError(
        failure.text,
        leader=failure.text_of("leader"),
        epoch=max(0, failure.number_of("epoch")),
        lag_turns=max(0, failure.number_of("lag_turns")),
        lag_s=lag_s,
    )


BY_REASON: Mapping[int, Callable[[Failure], errors.ReplayBufferError]] = {
    errors_pb2.ARGUMENT_INVALID: _invalid,
    errors_pb2.PAYLOAD_SIZE_MISMATCH: _invalid,
    errors_pb2.FETCH_EXCEEDS_CAPACITY: _exceeds_capacity,
    errors_pb2.BUFFER_NOT_FOUND: lambda failure: errors.BufferNotFoundError(
        failure.text_of("buffer")
    ),
    errors_pb2.BUFFER_EXISTS: lambda failure: errors.BufferExistsError(failure.text_of("buffer")),
    errors_pb2.BUFFERS_FULL: lambda failure: errors.LimitExceededError(failure.text),
    errors_pb2.SESSION_NOT_CURRENT: lambda failure: errors.SessionEndedError(
        failure.text_of("session"), failure.text_of("current")
    ),
    errors_pb2.VERSION_REGRESSED: lambda failure: errors.VersionRegressedError(
        failure.number_of("current"), failure.number_of("announced")
    ),
    errors_pb2.LEASE_NOT_FOUND: lambda failure: errors.LeaseExpiredError(failure.text_of("lease")),
    errors_pb2.REQUEST_NOT_FOUND: lambda failure: errors.RequestNotFoundError(
        failure.text_of("request")
    ),
    errors_pb2.SUBSCRIPTION_NOT_FOUND: lambda failure: errors.SubscriptionNotFoundError(
        failure.text_of("subscription")
    ),
    errors_pb2.SUBSCRIPTION_EXISTS: lambda failure: errors.SubscriptionExistsError(
        failure.text_of("subscription")
    ),
    errors_pb2.SUBSCRIPTIONS_FULL: lambda failure: errors.LimitExceededError(failure.text),
    errors_pb2.REQUEST_MISMATCH: _mismatch,
    errors_pb2.WAITERS_FULL: _backpressure,
    errors_pb2.WATCHERS_FULL: _backpressure,
    errors_pb2.APPENDS_FULL: _backpressure,
    errors_pb2.SERVER_BUSY: _backpressure,
    errors_pb2.STORE_FULL: _backpressure,
    errors_pb2.GATEWAY_FULL: _backpressure,
    errors_pb2.QUOTA_FULL: _backpressure,
    errors_pb2.QUOTA_EXCEEDED: lambda failure: errors.LimitExceededError(failure.text),
    errors_pb2.GATEWAY_OFF: lambda failure: errors.NotSupportedError(failure.text),
    errors_pb2.GATEWAY_STALLED: lambda failure: errors.DeadlineExceededError(failure.text),
    errors_pb2.PAYLOAD_MISSING: lambda failure: errors.PayloadMissingError(
        failure.text_of("payload")
    ),
    errors_pb2.PAYLOAD_CORRUPT: lambda failure: errors.PayloadCorruptError(failure.text),
    errors_pb2.WORKERS_FULL: lambda failure: errors.LimitExceededError(failure.text),
    errors_pb2.DRAINING: lambda failure: errors.UnavailableError(failure.text),
    errors_pb2.STANDBY: _standby,
    errors_pb2.STORE_UNAVAILABLE: lambda failure: errors.UnavailableError(failure.text),
    errors_pb2.UNAUTHENTICATED: lambda failure: errors.UnauthenticatedError(
        f"{failure.text}; give one as BREADBOX_TOKEN, --token or connect(token=...)"
    ),
    errors_pb2.PERMISSION_DENIED: lambda failure: errors.PermissionDeniedError(failure.text),
    errors_pb2.SCHEMA_MISMATCH: _schema_mismatch,
    errors_pb2.INTERNAL: lambda failure: errors.InternalError(failure.text),
}
"""Every value of `breadbox.v1.ErrorReason`; a test holds it against the server's own table."""


def _unknown(failure: Failure) -> errors.ReplayBufferError:
    name = " ".join(filter(None, (failure.code.name, failure.reason)))
    return errors.ReplayBufferError(f"the server answered {name}: {failure.text}")


def _exhausted(failure: Failure) -> errors.ReplayBufferError:
    """From gRPC itself, ours or a proxy's: it gets better, unless it is about a size."""
    if re.search(r"(larger|bigger) than|size exceeds|exceeds .*limit \(", failure.text):
        return errors.LimitExceededError(f"{failure.text}; send less at a time")
    if failure.retry_delay_s is None:
        return errors.BackpressureError(failure.text, _RETRY_DELAY_S_UNTOLD)
    return _backpressure(failure)


BY_CODE: Mapping[grpc.StatusCode, Callable[[Failure], errors.ReplayBufferError]] = {
    grpc.StatusCode.CANCELLED: lambda failure: errors.UnavailableError(failure.text),
    grpc.StatusCode.UNKNOWN: lambda failure: errors.InternalError(failure.text),
    grpc.StatusCode.INVALID_ARGUMENT: _invalid,
    grpc.StatusCode.DEADLINE_EXCEEDED: lambda failure: errors.DeadlineExceededError(failure.text),
    grpc.StatusCode.NOT_FOUND: _unknown,
    grpc.StatusCode.ALREADY_EXISTS: _unknown,
    grpc.StatusCode.PERMISSION_DENIED: lambda failure: errors.PermissionDeniedError(failure.text),
    grpc.StatusCode.RESOURCE_EXHAUSTED: _exhausted,
    grpc.StatusCode.FAILED_PRECONDITION: _unknown,
    grpc.StatusCode.ABORTED: _unknown,
    grpc.StatusCode.OUT_OF_RANGE: _invalid,
    grpc.StatusCode.UNIMPLEMENTED: lambda failure: errors.NotSupportedError(failure.text),
    grpc.StatusCode.INTERNAL: lambda failure: errors.InternalError(failure.text),
    grpc.StatusCode.UNAVAILABLE: lambda failure: errors.UnavailableError(failure.text),
    grpc.StatusCode.DATA_LOSS: lambda failure: errors.InternalError(failure.text),
    grpc.StatusCode.UNAUTHENTICATED: lambda failure: errors.UnauthenticatedError(failure.text),
}


def error_of(failure: Failure) -> errors.ReplayBufferError:
    """The error that a caller of the library meets."""
    known = errors_pb2.ErrorReason.DESCRIPTOR.values_by_name.get(failure.reason)
    make = (known and BY_REASON.get(known.number)) or BY_CODE.get(failure.code, _unknown)
    error = make(failure)
    error.request_id = failure.metadata.get("request_id")
    return error


def read_failure(
    code: grpc.StatusCode, text: str, trailing: Mapping[str, str | bytes] | None
) -> Failure:
    """Read what a failed call left: status code, text and trailing metadata.

    Details that cannot be read are ignored: then the code decides.
    """
    details = (trailing or {}).get(_DETAILS_KEY)
    if not isinstance(details, bytes):
        return Failure(code, text)
    try:
        status = status_pb2.Status.FromString(details)
    except DecodeError:
        return Failure(code, text)
    reason, metadata, retry_delay_s = "", {}, None
    for packed in status.details:
        info = error_details_pb2.ErrorInfo()
        hint = error_details_pb2.RetryInfo()
        if packed.Unpack(info) and info.domain == DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
        elif packed.Unpack(hint):
            retry_delay_s = hint.retry_delay.ToTimedelta().total_seconds()
    return Failure(
        code, status.message or text, reason=reason, metadata=metadata, retry_delay_s=retry_delay_s
    )


def from_rpc_error(
    error: grpc.RpcError, address: str, *, encrypted: bool, is_one_of_many: bool = False
) -> errors.ReplayBufferError:
    """Read a failure of gRPC, blocking or asyncio.

    Args:
        error: What a call raised; one that is not of a call (gRPC promises none) is an
            `InternalError`.
        address: Named when nobody answers there.
        encrypted: Whether the connection was to be encrypted.
        is_one_of_many: Whether the client has other addresses, too.
    """
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return errors.InternalError(f"gRPC failed without a status: {error!r}")
    trailing = {key.lower(): value for key, value in error.trailing_metadata() or ()}
    failure = read_failure(error.code(), error.details() or "", trailing)
    if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and not failure.reason:
        return errors.DeadlineExceededError(f"{address} did not answer in time: {failure.text}")
    if failure.code is grpc.StatusCode.UNAVAILABLE and not failure.reason:
        return unreachable(failure.text, address, encrypted=encrypted)
    if failure.reason == "STANDBY" and is_one_of_many:
        failure.text += f"; none of the client's addresses leads, of which {address} was asked last"
    elif failure.reason == "STANDBY" and failure.text_of("leader"):
        failure.text += "; give clients the addresses of all servers, as HOST:PORT,HOST:PORT"
    return error_of(failure)
