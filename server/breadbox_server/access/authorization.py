"""Rights: one total table of methods (a test holds that), and the gate in front of every call."""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from breadbox_server.base.conversion import DEFAULT_BUFFER_NAME
from breadbox_server.base.errors import PermissionDeniedError, UnauthenticatedError
from breadbox_server.limits import TOKEN_LENGTH_MAX

SERVICE: Final = "/breadbox.v1.ReplayBufferService/"
HEALTH: Final = "/grpc.health.v1.Health/"
REFLECTION: Final = ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",)
NAME_SHOWN_MAX: Final = 64


class Role(Enum):
    """What a caller may call."""

    PRODUCER = "producer"
    """A rollout worker: appends, watches the model, reports episodes."""
    LEARNER = "learner"
    """Runs sessions, publishes models, fetches, reads."""
    VIEWER = "viewer"
    """Describes buffers and reads by cursors; changes nothing, and releases its own reads only."""
    ADMIN = "admin"
    """An operator, or a tool that does both: everything."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """How much of the server the callers with one token may take together. None is no bound."""

    workers_max: int | None = None
    """Workers that may have appended under the token and be remembered; at least 1."""
    bytes_held_max: int | None = None
    """Bytes of payloads that were appended under the token and that a buffer refers to."""
    appends_per_s_max: float | None = None
    """Fragments appended per second, on average over a few seconds; above 0. Reports of episodes
    may come as often."""


NO_QUOTAS: Final = Quotas()
EVERYTHING: Final = ("*",)


@dataclass(frozen=True, slots=True)
class Caller:
    """A token's name and role, and the buffers, workers and quotas that it is bound to."""

    name: str
    """The token's name, at most 64 of A-Z a-z 0-9 . _ -, or empty if no token was asked for."""
    role: Role
    buffers: tuple[str, ...] = EVERYTHING
    """Patterns of the buffers that it may name and see; see `matches`."""
    workers: tuple[str, ...] | None = None
    """Patterns of the workers that it may append as, or None for all."""
    quotas: Quotas = NO_QUOTAS

    def may_use(self, buffer: str) -> bool:
        """Return True if it may name this buffer, whether or not there is one."""
        return matches(self.buffers, buffer)

    def may_append_as(self, worker: str) -> bool:
        """Whether it may append under this worker's name."""
        return self.workers is None or matches(self.workers, worker)

    def holder(self, buffer: str) -> str:
        """Return whose share of the server's bounds its work takes: the token's or the buffer's."""
        return self.name or buffer


ANONYMOUS: Final = Caller("", Role.ADMIN)
"""Everybody, where no tokens are asked for."""

_CALLER: Final[ContextVar[Caller]] = ContextVar("caller")


def current_caller() -> Caller:
    """Return the caller of the call that is being answered; raise LookupError outside of one."""
    return _CALLER.get()


def caller_name() -> str | None:
    """Return the name of the call's token, or None if none was asked for, or it was refused."""
    caller = _CALLER.get(None)
    return caller.name if caller is not None and caller is not ANONYMOUS else None


def calls_as(caller: Caller) -> None:
    """Have `current_caller` return this one, in this task and in those that it starts."""
    _CALLER.set(caller)


def matches(patterns: Iterable[str], name: str) -> bool:
    """Match a name against patterns; `*` stands for anything. Linear in the name's length."""
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
    """Who may make a call, and which fields of its request say what it is about."""

    roles: frozenset[Role]
    buffer: str = ""
    """The field that names the buffer, empty standing for the default one; none: it names none."""
    workers: str = ""
    """The repeated field whose messages name a `worker_id`; none: it names none."""


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
        (Rule(_PRODUCERS, "buffer", "episodes"), ("ReportEpisodes",)),
        (Rule(_LEARNERS, "buffer"), ("StartSession", "EndSession", "PublishModel")),
        (Rule(_LEARNERS, "buffer"), ("FetchFragments", "RenewLease", "UpdatePriorities")),
        # A viewer releases the leases of its own reads.
        (Rule(_READERS, "buffer"), ("GetPreparedFragments", "ReadFragments", "ReleaseLease")),
        (
            Rule(_LEARNERS, "buffer"),
            ("CreateSubscription", "AcknowledgeChunks", "DeleteSubscription"),
        ),
        (Rule(_ADMINS, "name"), ("CreateBuffer", "UpdateBuffer", "DeleteBuffer")),
        (Rule(_ALL, "buffer"), ("WatchModel",)),
        (Rule(_ALL, "name"), ("GetBuffer",)),
        # The first shows the buffers that the caller may use, the second the store's credentials.
        (Rule(_ALL), ("ListBuffers", "GetStoreConfig")),
        # What a caller may read and discard is decided payload by payload.
        (Rule(_ALL), ("ReadPayloads",)),
        (Rule(_WRITERS), ("WritePayloads", "DiscardPayloads")),
    )
    for method in methods
}
PUBLIC_METHODS: Final = frozenset({HEALTH + "Check", HEALTH + "Watch", HEALTH + "List"})
"""Open without a token: a load balancer's or a container's probe has none, and learns one bit."""


class Tokens(Protocol):
    """Lookup of the callers of tokens."""

    def caller_of(self, token: str) -> Caller | None:
        """Return a token's caller, or None if unknown; takes the same time for both."""


class Gate:
    """Decide whether a call may pass, before its request is read; no tokens: every caller may."""

    def __init__(self, tokens: Tokens | None) -> None:
        self._tokens = tokens

    @property
    def asks_for_tokens(self) -> bool:
        """Whether calls need a token."""
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
    """Raise PermissionDeniedError for another's buffer or worker, whether or not there is one."""
    rule = RULES.get(method)
    if rule is None:
        return
    if rule.buffer and caller.buffers is not EVERYTHING:
        buffer = getattr(request, rule.buffer) or DEFAULT_BUFFER_NAME
        if not caller.may_use(buffer):
            raise _not_for(caller, "buffer", caller.buffers, buffer)
    if rule.workers and caller.workers is not None:
        for worker in {each.worker_id for each in getattr(request, rule.workers)}:
            if not caller.may_append_as(worker):
                raise _not_for(caller, "worker", caller.workers, worker)


def _not_for(
    caller: Caller, kind: str, patterns: Iterable[str], named: str
) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"token {caller.name!r}",
        f"use {kind} {named[:NAME_SHOWN_MAX]!r}; it is for {', '.join(patterns)}",
    )


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the one bearer token among a call's metadata, or nothing for none or several."""
    values = [value for key, value in metadata if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    scheme, _, token = values[0].partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and len(token) <= TOKEN_LENGTH_MAX else ""
