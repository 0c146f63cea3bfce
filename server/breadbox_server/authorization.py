"""Who may call what: one table from methods to roles, and the gate in front of every call.

The table is total: `tests/service/test_authorization.py` holds that every method of the service is
in it, and a method that is not would be refused to everybody once tokens are asked for.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, Protocol

from breadbox_server.errors import PermissionDeniedError, UnauthenticatedError
from breadbox_server.limits import TOKEN_LENGTH_MAX

SERVICE: Final = "/breadbox.v1.ReplayBufferService/"
HEALTH: Final = "/grpc.health.v1.Health/"
REFLECTION: Final = ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",)


class Role(Enum):
    """What a caller is here for."""

    PRODUCER = "producer"
    """A rollout worker: appends, watches the model, reports episodes."""
    LEARNER = "learner"
    """Runs sessions, publishes models, fetches."""
    ADMIN = "admin"
    """An operator, or a tool that does both: everything."""


_ALL: Final = frozenset(Role)
_PRODUCERS: Final = frozenset({Role.PRODUCER, Role.ADMIN})
_LEARNERS: Final = frozenset({Role.LEARNER, Role.ADMIN})
_ADMINS: Final = frozenset({Role.ADMIN})

ROLES_OF_METHOD: Final[Mapping[str, frozenset[Role]]] = {
    SERVICE + "StartSession": _LEARNERS,
    SERVICE + "EndSession": _LEARNERS,
    SERVICE + "PublishModel": _LEARNERS,
    SERVICE + "WatchModel": _ALL,
    SERVICE + "AppendFragments": _PRODUCERS,
    SERVICE + "FetchFragments": _LEARNERS,
    SERVICE + "GetPreparedFragments": _LEARNERS,
    SERVICE + "RenewLease": _LEARNERS,
    SERVICE + "ReleaseLease": _LEARNERS,
    SERVICE + "CreateBuffer": _ADMINS,
    SERVICE + "UpdateBuffer": _ADMINS,
    SERVICE + "DeleteBuffer": _ADMINS,
    SERVICE + "ListBuffers": _ALL,
    SERVICE + "GetBuffer": _ALL,
    # The answer holds the store's credentials.
    SERVICE + "GetStoreConfig": _ALL,
    SERVICE + "ReportEpisodes": _PRODUCERS,
    **dict.fromkeys(REFLECTION, _ALL),
}
PUBLIC_METHODS: Final = frozenset({HEALTH + "Check", HEALTH + "Watch", HEALTH + "List"})
"""Open without a token: a load balancer's or a container's probe has none, and learns one bit."""


class Tokens(Protocol):
    """Where tokens are known."""

    def role_of(self, token: str) -> Role | None:
        """The role of a token, or None where it is not known. Takes the same time for both."""


class Gate:
    """Decides whether a call may pass, before anything of it is looked at.

    Args:
        tokens: Who is known; None: nobody is asked for a token, and everybody may do everything.
    """

    def __init__(self, tokens: Tokens | None) -> None:
        self._tokens = tokens

    @property
    def asks_for_tokens(self) -> bool:
        """Whether anybody is asked for a token."""
        return self._tokens is not None

    def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Let a call pass, or refuse it.

        Args:
            method: Full path, such as "/breadbox.v1.ReplayBufferService/GetBuffer".
            metadata: What the caller sent along.

        Raises:
            UnauthenticatedError: There is no token, more than one, or one that is not known.
            PermissionDeniedError: The token's role may not make this call.
        """
        if self._tokens is None or method in PUBLIC_METHODS:
            return
        token = bearer_token(metadata)
        role = self._tokens.role_of(token) if token else None
        if role is None:
            raise UnauthenticatedError
        if role not in ROLES_OF_METHOD.get(method, frozenset()):
            raise PermissionDeniedError(role.value, method.rpartition("/")[2])


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The one bearer token among a call's metadata; empty where there is none, or several."""
    values = [value for key, value in metadata if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    scheme, _, token = values[0].partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and len(token) <= TOKEN_LENGTH_MAX else ""
