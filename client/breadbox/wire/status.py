"""Turn a failed call into the library's own error, by one table of reasons.

The key is (domain, reason) of `google.rpc.ErrorInfo`, never the text. A failure without one (of a
dead server, a proxy, gRPC itself) is read by its status code. Every failure has an error.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from breadbox.model import errors
from breadbox.v1 import errors_pb2

DOMAIN = "breadbox"
_DETAILS_KEY = "grpc-status-details-bin"
_RETRY_DELAY_S_DEFAULT = 0.25
_RETRY_DELAY_S_UNTOLD = 0.02
"""Seconds before a retry if a transport had no room for a call, which passes quickly."""


@dataclass(slots=True)
class Failure:
    """A failed call's code, text, reason, and fields of the error."""

    code: grpc.StatusCode
    text: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_delay_s: float | None = None

    def __post_init__(self) -> None:
        self.text = self.text or "no details"

    def text_of(self, key: str) -> str:
        """Return a field of the error, or "" if the server did not send it."""
        return self.metadata.get(key, "")

    def number_of(self, key: str) -> int:
        """Return a field of the error as an integer, or -1 if it is absent or no integer."""
        try:
            return int(self.metadata[key])
        except (KeyError, ValueError):
            return -1


_Maker = Callable[[Failure], errors.ReplayBufferError]


def _said(kind: Callable[[str], errors.ReplayBufferError]) -> _Maker:
    return lambda failure: kind(failure.text)


def _naming(kind: Callable[..., errors.ReplayBufferError], *fields: str) -> _Maker:
    return lambda failure: kind(*map(failure.text_of, fields))


def _invalid(failure: Failure) -> errors.ReplayBufferError:
    field = failure.text_of("field") or "request"
    return errors.InvalidRequestError(field, failure.text_of("problem") or failure.text)


def _exceeds_capacity(failure: Failure) -> errors.ReplayBufferError:
    field = "fragment_count"
    return errors.InvalidRequestError(field, failure.text.removeprefix(f"{field} "))


def _backpressure(failure: Failure) -> errors.ReplayBufferError:
    delay_s = failure.retry_delay_s
    return errors.BackpressureError(
        failure.text, _RETRY_DELAY_S_DEFAULT if delay_s is None else delay_s
    )


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


BY_REASON: Mapping[int, _Maker] = {
    errors_pb2.ARGUMENT_INVALID: _invalid,
    errors_pb2.PAYLOAD_SIZE_MISMATCH: _invalid,
    errors_pb2.FETCH_EXCEEDS_CAPACITY: _exceeds_capacity,
    errors_pb2.BUFFER_NOT_FOUND: _naming(errors.BufferNotFoundError, "buffer"),
    errors_pb2.BUFFER_EXISTS: _naming(errors.BufferExistsError, "buffer"),
    errors_pb2.BUFFERS_FULL: _said(errors.LimitExceededError),
    errors_pb2.SESSION_NOT_CURRENT: _naming(errors.SessionEndedError, "session", "current"),
    errors_pb2.SESSION_IN_USE: _naming(errors.SessionInUseError, "session", "users"),
    errors_pb2.VERSION_REGRESSED: lambda failure: errors.VersionRegressedError(
        failure.number_of("current"), failure.number_of("announced")
    ),
    errors_pb2.LEASE_NOT_FOUND: _naming(errors.LeaseExpiredError, "lease"),
    errors_pb2.TICKET_NOT_FOUND: _naming(errors.TicketNotFoundError, "group"),
    errors_pb2.REQUEST_NOT_FOUND: _naming(errors.RequestNotFoundError, "request"),
    errors_pb2.SUBSCRIPTION_NOT_FOUND: _naming(errors.SubscriptionNotFoundError, "subscription"),
    errors_pb2.SUBSCRIPTION_EXISTS: _naming(errors.SubscriptionExistsError, "subscription"),
    errors_pb2.SUBSCRIPTIONS_FULL: _said(errors.LimitExceededError),
    errors_pb2.REQUEST_MISMATCH: lambda failure: errors.RequestMismatchError(
        failure.text_of("request"),
        failure.text_of("field"),
        failure.number_of("first"),
        failure.number_of("now"),
    ),
    errors_pb2.WAITERS_FULL: _backpressure,
    errors_pb2.WATCHERS_FULL: _backpressure,
    errors_pb2.APPENDS_FULL: _backpressure,
    errors_pb2.SERVER_BUSY: _backpressure,
    errors_pb2.STORE_FULL: _backpressure,
    errors_pb2.GATEWAY_FULL: _backpressure,
    errors_pb2.QUOTA_FULL: _backpressure,
    errors_pb2.QUOTA_EXCEEDED: _said(errors.LimitExceededError),
    errors_pb2.GATEWAY_OFF: _said(errors.NotSupportedError),
    errors_pb2.GATEWAY_STALLED: _said(errors.DeadlineExceededError),
    errors_pb2.PAYLOAD_MISSING: _naming(errors.PayloadMissingError, "payload"),
    errors_pb2.PAYLOAD_CORRUPT: _said(errors.PayloadCorruptError),
    errors_pb2.WORKERS_FULL: _said(errors.LimitExceededError),
    errors_pb2.DRAINING: _said(errors.UnavailableError),
    errors_pb2.STANDBY: _standby,
    errors_pb2.STORE_UNAVAILABLE: _said(errors.UnavailableError),
    errors_pb2.UNAUTHENTICATED: lambda failure: errors.UnauthenticatedError(
        f"{failure.text}; give one as BREADBOX_TOKEN, --token or connect(token=...)"
    ),
    errors_pb2.PERMISSION_DENIED: _said(errors.PermissionDeniedError),
    errors_pb2.SCHEMA_MISMATCH: lambda failure: errors.SchemaMismatchError(
        failure.text, *map(failure.text_of, ("path", "wanted", "got"))
    ),
    errors_pb2.INTERNAL: _said(errors.InternalError),
}
"""Every value of `breadbox.v1.ErrorReason`; a test holds it against the server's own table."""


def _unknown(failure: Failure) -> errors.ReplayBufferError:
    name = " ".join(filter(None, (failure.code.name, failure.reason)))
    return errors.ReplayBufferError(f"the server answered {name}: {failure.text}")


def _exhausted(failure: Failure) -> errors.ReplayBufferError:
    """Return the error for a limit of gRPC: BackpressureError, unless a message is too large."""
    if re.search(r"(larger|bigger) than|size exceeds|exceeds .*limit \(", failure.text):
        return errors.LimitExceededError(f"{failure.text}; send less at a time")
    if failure.retry_delay_s is None:
        return errors.BackpressureError(failure.text, _RETRY_DELAY_S_UNTOLD)
    return _backpressure(failure)


BY_CODE: Mapping[grpc.StatusCode, _Maker] = {
    grpc.StatusCode.CANCELLED: _said(errors.UnavailableError),
    grpc.StatusCode.UNKNOWN: _said(errors.InternalError),
    grpc.StatusCode.INVALID_ARGUMENT: _invalid,
    grpc.StatusCode.DEADLINE_EXCEEDED: _said(errors.DeadlineExceededError),
    grpc.StatusCode.NOT_FOUND: _unknown,
    grpc.StatusCode.ALREADY_EXISTS: _unknown,
    grpc.StatusCode.PERMISSION_DENIED: _said(errors.PermissionDeniedError),
    grpc.StatusCode.RESOURCE_EXHAUSTED: _exhausted,
    grpc.StatusCode.FAILED_PRECONDITION: _unknown,
    grpc.StatusCode.ABORTED: _unknown,
    grpc.StatusCode.OUT_OF_RANGE: _invalid,
    grpc.StatusCode.UNIMPLEMENTED: lambda failure: errors.NotSupportedError(
        f"the server does not know this call ({failure.text}): it is older than this library, or "
        "not a Breadbox"
    ),
    grpc.StatusCode.INTERNAL: _said(errors.InternalError),
    grpc.StatusCode.UNAVAILABLE: _said(errors.UnavailableError),
    grpc.StatusCode.DATA_LOSS: _said(errors.InternalError),
    grpc.StatusCode.UNAUTHENTICATED: _said(errors.UnauthenticatedError),
}


def error_of(failure: Failure) -> errors.ReplayBufferError:
    """Return the error that a caller of the library gets for a failure."""
    known = errors_pb2.ErrorReason.DESCRIPTOR.values_by_name.get(failure.reason)
    make = (known and BY_REASON.get(known.number)) or BY_CODE.get(failure.code, _unknown)
    error = make(failure)
    error.request_id = failure.metadata.get("request_id")
    error.is_answer = bool(failure.reason)
    return error


def read_failure(
    code: grpc.StatusCode, text: str, trailing: Mapping[str, str | bytes] | None
) -> Failure:
    """Read a failed call's code, text and trailing metadata; ignore details that cannot be read."""
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


class EmptyAnswerError(grpc.RpcError):
    """A call that ended well, without a message. Never leaves a client.

    Seen of gRPC itself on a slow machine, and what a server that is none of ours may answer.
    """


def received(message: Any) -> Any:
    """Return the message of a unary call that gRPC says ended well; EmptyAnswerError if None."""
    if message is None:
        raise EmptyAnswerError
    return message


def from_rpc_error(
    error: grpc.RpcError, address: str, *, encrypted: bool, is_one_of_many: bool = False
) -> errors.ReplayBufferError:
    """Return the error for a failure of gRPC, blocking or asyncio."""
    if isinstance(error, EmptyAnswerError):
        return errors.UnavailableError(f"no answer from {address}: the call ended without one")
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return errors.InternalError(f"gRPC failed without a status: {error!r}")
    trailing = {key.lower(): value for key, value in error.trailing_metadata() or ()}
    failure = read_failure(error.code(), error.details() or "", trailing)
    if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and not failure.reason:
        return errors.DeadlineExceededError(f"{address} did not answer in time: {failure.text}")
    if failure.code is grpc.StatusCode.CANCELLED and not failure.reason:
        # A server that ends, or has too many calls, gives gRPC no words of its own.
        return errors.UnavailableError(f"no answer from {address}: it gave the call up")
    if failure.code is grpc.StatusCode.UNAVAILABLE and not failure.reason:
        return unreachable(failure.text, address, encrypted=encrypted)
    if failure.reason == "STANDBY" and is_one_of_many:
        failure.text += f"; no server at the client's addresses leads ({address} was the last one)"
    elif failure.reason == "STANDBY" and failure.text_of("leader"):
        failure.text += "; give clients the addresses of all servers, as HOST:PORT,HOST:PORT"
    return error_of(failure)


_NEVER_CONNECTED = re.compile("failed to connect|connections to all backends failing")
"""Matches gRPC's text if no connection to any server was established."""

_CERTIFICATE = (
    (
        r"certificate has expired",
        "its certificate has expired: renew it (a running server reads the new one by itself)",
    ),
    (r"not yet valid", "its certificate is not valid yet: check the clocks of both machines"),
    (
        r"Hostname Verification Check failed|not in peer certificate",
        "its certificate is for another name: call the server by a name, or an IP address, that is "
        "in the certificate",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED",
        "its certificate is of no authority that this client trusts: name the file with the right "
        "one (--tls-ca, or breadbox.Tls(ca_file=...))",
    ),
)
"""Problems with the server's certificate by pattern of the text; the first match counts."""

_HANDSHAKE = (
    (
        r"WRONG_VERSION_NUMBER",
        "the process there does not encrypt: connect without TLS, or start the server with "
        "--tls-cert and --tls-key",
    ),
    (
        r"ALERT_(UNKNOWN_CA|.*CERTIFICATE)",
        "it refuses this client's certificate: give one that its --tls-client-ca has signed "
        "and that is still valid (--tls-cert and --tls-key, or breadbox.Tls)",
    ),
    (r"SSL_ERROR_SSL", "the two sides cannot agree on how to encrypt"),
)

_OTHER = (
    (
        r"[Cc]onnection refused",
        "nothing listens there; is the server running, and is this its address as seen from here?",
    ),
    (
        r"Domain name not found|DNS resolution failed|address lookup failed|errors resolving",
        "its name is not known here; check its spelling, or use an address",
    ),
    (
        r"backend unhealthy",
        "a server is there, but none of those with this name leads: check that all servers are "
        "among its records, and read their logs",
    ),
    (r"No such file or directory", "there is no such socket; is the server running?"),
)


def unreachable(details: str, address: str, *, encrypted: bool) -> errors.UnavailableError:
    """Return the error for a call that no server answered, with known texts of gRPC explained."""
    for pattern, meaning in _OTHER:
        if re.search(pattern, details):
            return errors.UnavailableError(f"no answer from {address}: {meaning}")
    if _NEVER_CONNECTED.search(details) is None:
        return errors.UnavailableError(f"no answer from {address}: {details}")
    for pattern, meaning in (*_CERTIFICATE, *_HANDSHAKE):
        if encrypted and re.search(pattern, details):
            return errors.TlsError(
                f"no encrypted connection to {address}: {meaning} ({_cause(details)})"
            )
    return errors.UnavailableError(f"no answer from {address}: {details}{_hint(encrypted)}")


def _cause(details: str) -> str:
    found = re.search(r"OPENSSL_internal:(.*)", details) or re.search(
        r"last error: \w+: (?:\S+:\d+: )?(.*)", details
    )
    return (found.group(1) if found else details).removesuffix(": OK")


def _hint(encrypted: bool) -> str:
    if encrypted:
        return (
            "; a server that asks for certificates (--tls-client-ca) closes connections of clients "
            "without a valid one: see --tls-cert and --tls-key"
        )
    return (
        "; a server with TLS closes connections that are not encrypted: see --tls-ca, or "
        "breadbox.Tls"
    )
