"""What the shell around the core refuses, in the same form as the core's own refusals."""

from collections.abc import Mapping, Sequence
from typing import Final

import breadbox
from breadbox.model.errors import ReplayBufferError, StoreUnavailableError
from breadbox_server.core.model.errors import DomainError
from breadbox_server.core.model.inputs import Payload


class AppendsFullError(DomainError):
    """The queue of fragments that wait for admission is full."""

    def __init__(self, waiting: int, expected_s: float = 0.0) -> None:
        super().__init__(
            f"{waiting} fragments wait for admission already, which takes about {expected_s:.1f} s"
        )
        self.waiting = waiting


class WatchersFullError(DomainError):
    """The server has its maximum of callers that watch models or wait for chunks to read."""

    def __init__(self, limit: int, what: str = "callers wait for such news") -> None:
        super().__init__(f"{limit} {what} already, which is the limit")
        self.limit = limit


class ServerBusyError(DomainError):
    """The call had no place among those in progress, or its message among those on their way."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}; try again")


class QuotaFullError(DomainError):
    """The quota of a token, or of all callers without one, is in use; it becomes free by itself."""

    def __init__(self, token: str, quota: str, limit: float, owner: str = "token") -> None:
        super().__init__(
            f"{owner} {token!r} is at its {quota} of {limit:g}; wait until less is used"
        )
        self.token = token
        self.quota = quota
        self.limit = limit


class QuotaExceededError(DomainError):
    """The request exceeds the token's quota, and waiting does not help."""

    def __init__(self, token: str, quota: str, limit: float, more: str = "") -> None:
        super().__init__(
            f"token {token!r} would exceed its {quota} of {limit:g}{more}; "
            f"its line in the server's token file sets {quota}"
        )
        self.token = token
        self.quota = quota
        self.limit = limit


class SessionInUseError(DomainError):
    """Another process uses the session that a new one would end."""

    def __init__(self, session: str, users: str) -> None:
        super().__init__(
            f"session {session!r} is in use: {users}. A new session ends it and drops its "
            "fragments: pass take_over if that is meant"
        )
        self.session = session
        self.users = users


class PayloadSizeError(DomainError):
    """The payload in the store has another number of bytes than its reference says."""

    def __init__(self, field: str, payload: Payload) -> None:
        pieces = f" in pieces of {payload.piece_size_bytes}" if payload.piece_size_bytes else ""
        problem = (
            f"says {payload.size_bytes} bytes{pieces}, and the store has another number of them; "
            "announce payloads as they were written"
        )
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


class GatewayOffError(DomainError):
    """This server has no gateway."""

    def __init__(self) -> None:
        super().__init__(
            "this server hands no payloads on; start it with --gateway, or go to the payload store"
        )


class GatewayFullError(DomainError):
    """The gateway has no place for the call, or no room for its bytes."""


class GatewayStalledError(DomainError):
    """The caller has neither sent nor taken a part of a payload for too long."""

    def __init__(self) -> None:
        super().__init__("the caller moved no part of a payload for too long")


class UnauthenticatedError(DomainError):
    """The call carries no credentials, or none that are known."""

    def __init__(self) -> None:
        super().__init__("the call carries no bearer token that this server knows")


class PermissionDeniedError(DomainError):
    """The caller's token is not for this call, buffer or worker; raised before any lookup."""

    def __init__(self, caller: str, what: str) -> None:
        super().__init__(f"{caller} may not {what}")
        self.caller = caller
        self.what = what


class InternalError(DomainError):
    """A bug of ours; the log has the details under the request id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"internal error; the server's log has it under request id {request_id}")
        self.request_id = request_id


class StandbyError(DomainError):
    """This server stands by; ask the leader.

    `leader` is for people, empty if unknown; `epoch` the latest claim's, 0 without one; `lag_turns`
    turns not replayed; `lag_s` seconds for which it may be behind; `text` empty: it follows.
    """

    def __init__(
        self,
        leader: str = "",
        epoch: int = 0,
        lag_turns: int = 0,
        lag_s: float = 0.0,
        text: str = "",
    ) -> None:
        status = f"{leader} leads" if leader else "no server leads at the moment"
        super().__init__(text or f"this server stands by, and {status}")
        self.leader = leader
        self.epoch = epoch
        self.lag_turns = lag_turns
        self.lag_s = round(lag_s, 1)


JOURNAL: Final = "journal"
PAYLOAD_STORE: Final = "payload store"


class OutageError(StoreUnavailableError):
    """Journal or store do not serve this server, so that nothing can be decided for the caller."""

    def __init__(self, silent: Sequence[str], away_s: float, refusals: Mapping[str, str]) -> None:
        troubles = []
        if silent:
            verb = "does" if len(silent) == 1 else "do"
            dependencies = " and its ".join(silent)
            troubles.append(f"its {dependencies} {verb} not answer it, for {away_s:.0f} s now")
        for answer in dict.fromkeys(refusals.values()):
            dependencies = " and its ".join(
                place for place, said in refusals.items() if said == answer
            )
            troubles.append(f"the Redis of its {dependencies} refuses: {answer}")
        super().__init__(
            f"the server is there, but {' and '.join(troubles)}; it continues by itself afterwards"
        )
        self.places = (*silent, *refusals)


class BugError(Exception):
    """Breadbox itself is wrong."""

    def __init__(self, what: str, kept: str) -> None:
        super().__init__(
            f"this is a bug of Breadbox {breadbox.__version__}: {what}; {kept}. Please report it "
            "as an issue, with these lines and a copy of the journal, which holds ids and limits, "
            "no payloads"
        )


class StartError(ReplayBufferError):
    """The server cannot start, or go on; the text says in one line what, why and what to do."""
