"""All errors of the library.

Everything derives from `ReplayBufferError`. Classes hold fields and build their message from them.
No `grpc.RpcError` and no `redis.RedisError` leaves the library; the cause is chained.
"""

from typing import Any

from breadbox.model.outcomes import AppendResult


class ReplayBufferError(Exception):
    """Base of every error of this library."""

    request_id: str | None = None
    """The server's id of the failed call, if it returned one; quote it in a bug report."""
    is_answer: bool = False
    """True if a server answered so; False if none did, or the error is of this process."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let it go to another process: made of its text and fields, not of its arguments again."""
        return _made_again, (type(self), self.args, self.__dict__)


def _made_again(
    kind: type[ReplayBufferError], args: tuple[Any, ...], fields: dict[str, Any]
) -> ReplayBufferError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class InvalidRequestError(ReplayBufferError):
    """An argument is malformed, out of range, or can never be satisfied."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


class BufferNotFoundError(ReplayBufferError):
    """No buffer has this name."""

    def __init__(self, buffer: str, text: str = "") -> None:
        super().__init__(
            text
            or f"no buffer is named {buffer!r}; `breadbox buffers create` or create_buffer() makes "
            "one"
        )
        self.buffer = buffer


class BufferExistsError(ReplayBufferError):
    """A buffer of this name exists with other limits."""

    def __init__(self, buffer: str) -> None:
        super().__init__(f"buffer {buffer!r} exists with other limits")
        self.buffer = buffer


class SessionEndedError(ReplayBufferError):
    """The session is unknown or has ended; another learner may have started its own."""

    def __init__(self, session_id: str, current_session_id: str) -> None:
        since = (
            f"another run has started {current_session_id!r}" if current_session_id else "none is"
        )
        super().__init__(
            f"session {session_id!r} is not current: {since}. An ended session cannot be started "
            "again: start_session() makes a new one"
        )
        self.session_id = session_id
        self.current_session_id = current_session_id


class SessionInUseError(ReplayBufferError):
    """Another process uses the buffer's session, which is not the caller's. Nothing was changed."""

    def __init__(self, session_id: str, users: str) -> None:
        super().__init__(
            f"session {session_id!r} is in use: {users}. If it is the session of your run, start "
            "it by its name (--resume with its --run-dir); else use another buffer. take_over=True "
            "(--take-over) ends it and drops its fragments. It is free 60 s after these processes "
            "were stopped"
        )
        self.session_id = session_id
        self.users = users
        """Which processes called, when last and when first, as words."""


class VersionRegressedError(ReplayBufferError):
    """A model version lower than the current one was published."""

    def __init__(self, current: int, announced: int) -> None:
        super().__init__(f"model version {announced} is lower than the current {current}")
        self.current = current
        self.announced = announced


class LeaseExpiredError(ReplayBufferError):
    """The lease is unknown or has expired: its payloads may be gone; fetch again."""

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"lease {lease_id!r} is unknown or has expired; fetch again")
        self.lease_id = lease_id


class TicketNotFoundError(ReplayBufferError):
    """The ticket is unknown or has ended, with its group or by expiry; take another."""

    def __init__(self, group: str) -> None:
        super().__init__(f"group {group!r} has no ticket: it is unknown or has ended; take another")
        self.group = group


class GroupEndedError(ReplayBufferError):
    """The group of a part has ended, so that nothing can be attached any more."""

    def __init__(self, group: str, reason: str) -> None:
        super().__init__(f"group {group!r} has ended ({reason}); nothing can be attached any more")
        self.group = group
        self.reason = reason


class PartConflictError(ReplayBufferError):
    """The member has a part of this name with other bytes. Nothing was changed."""

    def __init__(self, group: str, member: int, part: str) -> None:
        super().__init__(
            f"member {member} of group {group!r} has a part {part!r} with other bytes; in a buffer "
            "of rows, attach(..., replace=True) replaces it"
        )
        self.group = group
        self.member = member
        self.part = part


class MemberNotFoundError(ReplayBufferError):
    """The buffer has no such member, or it has no part of this name."""

    def __init__(self, group: str, member: int, part: str = "") -> None:
        lacking = f"it has no part {part!r}" if part else "it is unknown, or was dropped"
        super().__init__(f"member {member} of group {group!r} cannot be read: {lacking}")
        self.group = group
        self.member = member
        self.part = part
        """Name of the part that it lacks, or empty if there is no such member."""


class SubscriptionNotFoundError(ReplayBufferError):
    """The buffer has no subscription of this name."""

    def __init__(self, subscription: str) -> None:
        super().__init__(
            f"no subscription is named {subscription!r}; create it first, with "
            "client.create_subscription() or `breadbox subscriptions create`"
        )
        self.subscription = subscription


class SubscriptionExistsError(ReplayBufferError):
    """A subscription of this name is retaining and the requested one is not, or the reverse."""

    def __init__(self, subscription: str) -> None:
        super().__init__(
            f"subscription {subscription!r} exists and is of the other kind, retaining or not; "
            "delete it or use another name"
        )
        self.subscription = subscription


class RequestNotFoundError(ReplayBufferError):
    """The request_id has no lease: it is unknown, or its leases have ended."""

    def __init__(self, fetch_request_id: str) -> None:
        super().__init__(
            f"request {fetch_request_id!r} has no lease: it is unknown, or its leases have ended, "
            "for example because they were not renewed; fetch again"
        )
        self.fetch_request_id = fetch_request_id


class RequestMismatchError(ReplayBufferError):
    """A request_id was used again for another size, or the ranks of a fetch disagree."""

    def __init__(self, fetch_request_id: str, field: str, first: int, now: int) -> None:
        super().__init__(
            f"request {fetch_request_id!r} had {field} {first} first and {now} now; all ranks must "
            "ask for the same, and a new fetch needs a new request_id"
        )
        self.fetch_request_id = fetch_request_id
        self.field = field
        self.first = first
        self.now = now


class WaitElapsedError(ReplayBufferError, TimeoutError):
    """A fetch or a request for tickets waited for `max_wait_s`, or a writer for a session.

    Nothing was taken.
    """

    def __init__(self, waited_s: float, reason: str, what: str = "a batch") -> None:
        super().__init__(f"waited {waited_s:.1f} s for {what}: {reason} (see `breadbox explain`)")
        self.waited_s = waited_s
        self.reason = reason


class BackpressureError(ReplayBufferError):
    """Server or store ask to wait and retry, and the library has waited for as long as it may."""

    results: tuple[AppendResult, ...] = ()
    """Results of an append's fragments so far, in order; appending all of them again is safe."""

    def __init__(self, what: str, retry_delay_s: float) -> None:
        super().__init__(f"{what}; try again in {retry_delay_s:.2f} s")
        self.what = what
        self.retry_delay_s = retry_delay_s


class LimitExceededError(ReplayBufferError):
    """A limit of the server is reached, and waiting does not help: raise it, or use less."""


class UnavailableError(ReplayBufferError):
    """The server or the store is unreachable or draining, also after retries."""


class StandbyError(UnavailableError):
    """The server is a standby, and the client has no address of the leader.

    Args:
        text: The server's message.
        leader: The leader's process, or empty if the standby knows none.
        epoch: Epoch of the leader's claim, or 0 if there was none.
        lag_turns: Turns of the journal that the standby has not replayed yet.
        lag_s: Seconds by which the standby may be behind the journal.
    """

    def __init__(
        self, text: str, *, leader: str = "", epoch: int = 0, lag_turns: int = 0, lag_s: float = 0.0
    ) -> None:
        super().__init__(text)
        self.leader = leader
        self.epoch = epoch
        self.lag_turns = lag_turns
        self.lag_s = lag_s


class TlsError(UnavailableError):
    """A server answers, but certificates or encryption do not match; names problem and remedy.

    A client that never had an answer raises it immediately. A client that had one retries for
    `reconnect_s`, as in any outage: a certificate may be renewed meanwhile.
    """


class DeadlineExceededError(ReplayBufferError, TimeoutError):
    """The server did not answer in time, nor after retries: it is slow, stuck or cut off."""


class UnauthenticatedError(ReplayBufferError):
    """The server requires credentials that this client did not send, or does not know them."""


class PermissionDeniedError(ReplayBufferError):
    """The credentials do not allow this call."""


class NotSupportedError(ReplayBufferError):
    """The server does not know this call: it is older than this library, or not a Breadbox."""


class InternalError(ReplayBufferError):
    """A bug in the server; its log has the details under the request id."""


class ClosedError(ReplayBufferError):
    """The client, appender or lease was closed before this call."""


class StoreError(ReplayBufferError):
    """Base of errors between this process and the payload store."""


class StoreUrlError(StoreError):
    """The store URL is malformed, or of an unknown kind. The message has no password."""


class StoreUnavailableError(StoreError):
    """The payload store cannot be reached, does not answer, or refuses a command."""

    def __init__(self, what: str, *, was_silent: bool = False, answer: str = "") -> None:
        super().__init__(what)
        self.was_silent = was_silent
        self.answer = answer
        """The store's own message if it refused, such as that its disk is full, or empty."""


class StoreFullError(StoreError):
    """The payload store has no room (Redis at maxmemory, disk full); wait and try again."""

    def __init__(self, what: str, retry_delay_s: float = 0.5) -> None:
        super().__init__(f"{what}; try again in {retry_delay_s:.2f} s")
        self.what = what
        self.retry_delay_s = retry_delay_s
        self.payload_bytes = 0
        """Size of the largest payload that found no room, or 0 if unknown."""


class PayloadMissingError(StoreError):
    """The store does not have the payload: it expired unannounced, or was deleted or lost."""

    def __init__(self, payload_id: str) -> None:
        super().__init__(f"payload {payload_id} is not in the store")
        self.payload_id = payload_id


class PayloadCorruptError(StoreError):
    """A payload is truncated, fails its checksum, or contradicts its own header."""


class PayloadFormatError(StoreError):
    """A payload has a format version that this library does not read."""

    def __init__(self, version: int, supported: int) -> None:
        super().__init__(f"payload format version {version}; this library reads {supported}")
        self.version = version
        self.supported = supported


class SchemaMismatchError(ReplayBufferError):
    """A fragment has other arrays, or steps, than its session; names the path, wanted and got.

    A learner could not stack them, so the server refuses the fragment, and adapters refuse to join
    a run with other spaces. All workers of a session need the same environment, wrappers and
    policy, and fragments of as many steps (path `step_count`). A new session may have others, and a
    buffer with `schema` `any` takes all.
    """

    def __init__(self, text: str, path: str, wanted: str, got: str) -> None:
        super().__init__(text)
        self.path = path
        self.wanted = wanted
        self.got = got


PERMANENT = (SchemaMismatchError, UnauthenticatedError, PermissionDeniedError, NotSupportedError)
"""Errors that every later fragment of the producer would get too. They stop an appender, whatever
its `on_failure`, and a rollout worker, with exit code 2.

Not among them: `TlsError`, because certificates are renewed (unless the server never answered);
`BufferNotFoundError`, because the buffer may be created later; InvalidRequestError,
UnsupportedArrayError and LimitExceededError, because they concern one fragment or one worker's
name: an appender with "persist" drops the fragment, and stops after a minute of only such errors.
"""


class TreeMismatchError(ReplayBufferError, ValueError):
    """Two trees that must be alike differ; names the path, what was wanted and what was got."""

    def __init__(
        self, path: str, wanted: str, got: str, where: str = "", *, remedy: str = ""
    ) -> None:
        super().__init__(
            f"{where + ': ' if where else ''}{path or '(root)'}: wanted {wanted}, got {got}"
            f"{'; ' if remedy else ''}{remedy}"
        )
        self.path = path
        self.wanted = wanted
        self.got = got
        self.where = where


class UnsupportedArrayError(ReplayBufferError, ValueError):
    """A leaf cannot be stored, such as an object array; names the path."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or '(root)'}: {problem}")
        self.path = path
        self.problem = problem
