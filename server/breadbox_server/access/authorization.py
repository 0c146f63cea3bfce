"""Define which roles may make which call; check each call's token, buffer and workers."""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from breadbox.v1.replay_buffer_service_pb2 import RELEASE_MODE_RETURNED, MemberKey
from breadbox_server.base.conversion import DEFAULT_BUFFER_NAME, buffer_name
from breadbox_server.base.errors import PermissionDeniedError, UnauthenticatedError
from breadbox_server.core.model.ids import BufferName
from breadbox_server.limits import TOKEN_LENGTH_MAX

SERVICE: Final = "/breadbox.v1.ReplayBufferService/"
HEALTH: Final = "/grpc.health.v1.Health/"
REFLECTION: Final = ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",)
NAME_SHOWN_MAX: Final = 64


class Role(Enum):
    """The role of a token: which calls it may make."""

    PRODUCER = "producer"
    """For rollout workers: append, watch the model, report episodes."""
    LEARNER = "learner"
    """For learners: run sessions, publish models, fetch, read."""
    VIEWER = "viewer"
    """For observers: describe buffers and read by cursor; change nothing but their own leases."""
    ADMIN = "admin"
    """For operators, and for tools that both append and fetch: every call."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits for all clients with one token together. None is no limit."""

    workers_max: int | None = None
    """Most remembered workers that appended with the token; at least 1."""
    bytes_held_max: int | None = None
    """Most bytes of payloads that were appended with the token and that a buffer refers to."""
    appends_per_s_max: float | None = None
    """Most fragments appended per second, averaged over a few seconds; above 0. Episode reports
    have a limit of the same number."""


NO_QUOTAS: Final = Quotas()
EVERYTHING: Final = ("*",)


@dataclass(frozen=True, slots=True)
class Caller:
    """A token's name and role, and the buffers, workers and quotas that it is bound to."""

    name: str
    """The token's name, at most 64 of A-Z a-z 0-9 . _ -, or empty if the server has no tokens."""
    role: Role
    buffers: tuple[str, ...] = EVERYTHING
    """Patterns of the buffers that the token may use, as `matches` reads them."""
    workers: tuple[str, ...] | None = None
    """Patterns of the worker names that the token may append as, or None for all."""
    quotas: Quotas = NO_QUOTAS

    def may_use(self, buffer: str) -> bool:
        """Return True if the caller may use this buffer, which need not exist."""
        return matches(self.buffers, buffer)

    def may_append_as(self, worker: str) -> bool:
        """Return True if the caller may append as this worker."""
        return self.workers is None or matches(self.workers, worker)

    def holder(self, buffer: str) -> str:
        """Return the name that the caller's work is counted under: the token's or the buffer's."""
        return self.name or buffer


ANONYMOUS: Final = Caller("", Role.ADMIN)
"""The caller of every call on a server without tokens."""

_CALLER: Final[ContextVar[Caller]] = ContextVar("caller")
_PROCESS: Final[ContextVar[str]] = ContextVar("process", default="")
PROCESS_KEY: Final = "breadbox-process"
"""Metadata by which a client names its process."""


def current_caller() -> Caller:
    """Return the caller of the current call; raise LookupError outside of a call."""
    return _CALLER.get()


def caller_name() -> str | None:
    """Return the name of the call's token, or None without tokens or if the call was refused."""
    caller = _CALLER.get(None)
    return caller.name if caller is not None and caller is not ANONYMOUS else None


def calls_as(caller: Caller) -> None:
    """Set what `current_caller` returns in this task and in the tasks that it starts."""
    _CALLER.set(caller)


def called_by(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Set what `current_process` returns in this task."""
    named = next((value for key, value in metadata if key == PROCESS_KEY), "")
    _PROCESS.set(named[:NAME_SHOWN_MAX] if isinstance(named, str) else "")


def current_process(peer: str) -> str:
    """Return the name of the current call's process, or its connection's without one."""
    return _PROCESS.get() or peer


def matches(patterns: Iterable[str], name: str) -> bool:
    """Match a name against patterns; `*` matches any text. Linear in the name's length."""
    return any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: str, name: str) -> bool:
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    *between, last = rest
    if not name.startswith(first):
        return False
    at = len(first)
    for part in between:
        found = name.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return len(name) - at >= len(last) and name.endswith(last)


@dataclass(frozen=True, slots=True)
class Rule:
    """The roles that may make a call, and the request's fields that name its buffer and workers."""

    roles: frozenset[Role]
    buffer: str = ""
    """Name of the buffer field, or "" if there is none; an empty field is the default buffer."""
    workers: str = ""
    """Name of the repeated field of messages with a `worker_id`, or a `group`, or "" if there is
    none."""
    more_workers: str = ""
    """Name of another such field."""
    worker: str = ""
    """Name of a field that names one worker, or "" if there is none."""
    usual: Role | None = None
    """The role that counts as the caller's where several may call and the token is of none."""


_ALL: Final = frozenset(Role)
_PRODUCERS: Final = frozenset({Role.PRODUCER, Role.ADMIN})
_LEARNERS: Final = frozenset({Role.LEARNER, Role.ADMIN})
_READERS: Final = _LEARNERS | {Role.VIEWER}
_WRITERS: Final = _PRODUCERS | _LEARNERS
_ADMINS: Final = frozenset({Role.ADMIN})

RULES: Final[Mapping[str, Rule]] = dict.fromkeys(REFLECTION, Rule(_ALL)) | {
    SERVICE + method: rule
    for rule, methods in (
        (Rule(_PRODUCERS, "buffer", "fragments"), ("AppendFragments",)),
        (Rule(_PRODUCERS, "buffer", "episodes", "workers"), ("ReportEpisodes",)),
        (Rule(_PRODUCERS, "buffer"), ("TakeTickets",)),
        (Rule(_PRODUCERS, "buffer", worker="group"), ("RenewTicket", "GiveBackTicket")),
        (Rule(_LEARNERS, "buffer"), ("StartSession", "EndSession", "PublishModel")),
        (Rule(_LEARNERS, "buffer"), ("FetchFragments", "UpdatePriorities")),
        # A viewer, or a producer, may release the leases of its own reads; a producer, renew them.
        (Rule(_WRITERS, "buffer", usual=Role.LEARNER), ("RenewLease",)),
        (Rule(_WRITERS, "buffer"), ("ClaimMembers",)),
        (Rule(_READERS, "buffer"), ("GetPreparedFragments", "ReadFragments")),
        (Rule(_ALL, "buffer", usual=Role.LEARNER), ("ReleaseLease",)),
        (
            Rule(_LEARNERS, "buffer"),
            ("CreateSubscription", "AcknowledgeChunks", "DeleteSubscription"),
        ),
        (Rule(_ADMINS, "name"), ("CreateBuffer", "UpdateBuffer", "DeleteBuffer")),
        (Rule(_ALL, "buffer"), ("WatchModel", "GroupEnds")),
        (Rule(_ALL, "buffer", "keys"), ("Members", "ReadMembers")),
        (Rule(_WRITERS, "buffer", "keys"), ("DropMembers",)),
        (Rule(_ALL, "name"), ("GetBuffer",)),
        # The first lists the caller's buffers, the second gives the store's credentials.
        (Rule(_ALL), ("ListBuffers", "GetStoreConfig")),
        # The gateway decides for each payload if the caller may read or discard it.
        (Rule(_ALL), ("ReadPayloads",)),
        (Rule(_WRITERS), ("WritePayloads", "DiscardPayloads")),
    )
    for method in methods
}


def methods(*names: str) -> frozenset[str]:
    """Return the full paths of methods of the service."""
    return frozenset(SERVICE + name for name in names)


_NO_USES: Final = methods("GetBuffer", "DeleteBuffer", "RenewLease", "ReleaseLease")
_ABOUT_SESSIONS: Final = methods("StartSession", "EndSession", "ReportEpisodes")
_APPEND: Final = SERVICE + "AppendFragments"
_RELEASE: Final = SERVICE + "ReleaseLease"
PUBLIC_METHODS: Final = frozenset({HEALTH + "Check", HEALTH + "Watch", HEALTH + "List"})
"""Calls without a token: probes of load balancers and containers have none, and learn one bit."""


class Tokens(Protocol):
    """The known tokens and their callers."""

    def caller_of(self, token: str) -> Caller | None:
        """Return a token's caller, or None if the token is unknown, in the same time for both."""


class Gate:
    """Decide if a call may be made, before its request is read; without tokens all may."""

    def __init__(self, tokens: Tokens | None) -> None:
        self._tokens = tokens

    @property
    def asks_for_tokens(self) -> bool:
        """True if calls need a token."""
        return self._tokens is not None

    def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Return the caller of a method's full path (`ANONYMOUS` without tokens), or raise."""
        if self._tokens is None or method in PUBLIC_METHODS:
            return ANONYMOUS
        token = bearer_token(metadata)
        caller = self._tokens.caller_of(token) if token else None
        if caller is None:
            raise UnauthenticatedError
        rule = RULES.get(method)
        if rule is None or caller.role not in rule.roles:
            called = method.rpartition("/")[2]
            raise PermissionDeniedError(f"role {caller.role.value!r}", f"call {called}")
        return caller


def check_request(caller: Caller, method: str, request: Any) -> None:
    """Raise PermissionDeniedError for buffers or workers, existing or not, of other tokens."""
    rule = RULES.get(method)
    if rule is None:
        return
    if rule.buffer and caller.buffers is not EVERYTHING:
        buffer = getattr(request, rule.buffer) or DEFAULT_BUFFER_NAME
        if not caller.may_use(buffer):
            raise _not_for(caller, "buffer", caller.buffers, buffer)
    if caller.workers is not None:
        named = [getattr(request, field) for field in (rule.workers, rule.more_workers) if field]
        workers = {
            each.group if isinstance(each, MemberKey) else each.worker_id
            for messages in named
            for each in messages
        }
        for worker in workers | ({getattr(request, rule.worker)} if rule.worker else set()):
            if not caller.may_append_as(worker):
                raise _not_for(caller, "worker", caller.workers, worker)


def _not_for(
    caller: Caller, kind: str, patterns: Iterable[str], named: str
) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"token {caller.name!r}",
        f"use {kind} {named[:NAME_SHOWN_MAX]!r}; it is for {', '.join(patterns)}",
    )


def used_buffer(caller: Caller, method: str, request: Any) -> BufferName:
    """Return the buffer that a call uses, or "" for a look, and for a renewal or end of a lease.

    A lease uses its buffer while it lives, unless a look took it.
    """
    rule = RULES.get(method)
    is_look = caller.role is Role.VIEWER or getattr(request, "is_look", False)
    if rule is None or not rule.buffer or is_look or method in _NO_USES:
        return BufferName("")
    return buffer_name(getattr(request, rule.buffer))


def used_session(role: Role | None, method: str, request: Any) -> tuple[BufferName, str] | None:
    """Return the buffer of the session that a call uses, with the id that it names or "", or None.

    `role` is that of the call's callers, see `role_of_call`.
    """
    is_look = getattr(request, "is_look", False)
    if role not in (Role.PRODUCER, Role.LEARNER) or is_look or method in _ABOUT_SESSIONS:
        return None
    buffer = buffer_name(request.buffer)
    if method == _APPEND:
        return buffer, request.fragments[0].session_id if request.fragments else ""
    return buffer, getattr(request, "session_id", "")


def gives_back(method: str, request: Any) -> bool:
    """Return whether a call returns a batch unused."""
    return method == _RELEASE and request.mode == RELEASE_MODE_RETURNED


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the bearer token in a call's metadata, or "" if there is none or several."""
    values = [value for key, value in metadata if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    scheme, _, token = values[0].partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and len(token) <= TOKEN_LENGTH_MAX else ""
