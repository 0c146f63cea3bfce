"""What a caller did wrong or must wait for; `rpc.status` has a row for each class."""


class DomainError(Exception):
    """Base of everything the core refuses. Never raised itself."""

    @property
    def metadata(self) -> dict[str, str]:
        """Whatever varies in the message, for machines."""
        return {name: str(value) for name, value in vars(self).items()}


class InvalidArgumentError(DomainError):
    """An argument is malformed or out of range."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


class FetchExceedsCapacityError(DomainError):
    """More was asked for, in `unit` "fragments" or "bytes", than the buffer can ever hold (B8)."""

    def __init__(self, requested: int, capacity: int, unit: str = "fragments") -> None:
        is_count = unit == "fragments"
        super().__init__(
            f"fragment_count {'is' if is_count else 'needs at least'} {requested}"
            f"{'' if is_count else ' bytes'}, but the buffer holds at most {capacity} {unit}; "
            f"ask for fewer or raise capacity_{'chunks' if is_count else 'bytes'}"
        )
        self.requested = requested
        self.capacity = capacity
        self.unit = unit


class BufferNotFoundError(DomainError):
    """No buffer has this name."""

    def __init__(self, buffer: str) -> None:
        super().__init__(f"no buffer is named {buffer!r}; create it with CreateBuffer")
        self.buffer = buffer


class BufferExistsError(DomainError):
    """A buffer of this name exists with other limits."""

    def __init__(self, buffer: str) -> None:
        super().__init__(
            f"buffer {buffer!r} exists with other limits; use UpdateBuffer or another name"
        )
        self.buffer = buffer


class BuffersFullError(DomainError):
    """The server, or the share of it left to a token, has as many buffers as it can."""

    def __init__(self, limit: int, own_count: int | None = None) -> None:
        own = "" if own_count is None else f"{own_count} of this token's and may have no more of "
        super().__init__(
            f"the server holds {own}its limit of {limit} buffers (--buffers-max of `breadbox "
            "serve`); delete one first, or those that nobody has used for long: `breadbox buffers "
            "delete --prefix PREFIX --idle-s SECONDS`"
        )
        self.limit = limit


class SessionNotCurrentError(DomainError):
    """The session is unknown or has ended."""

    def __init__(self, session: str, current: str) -> None:
        since = f"another run has started {current!r}" if current else "none is"
        super().__init__(
            f"session {session!r} is not current: {since}. An ended session never starts again"
        )
        self.session = session
        self.current = current


class VersionRegressedError(DomainError):
    """A model version lower than the current one was published (B5)."""

    def __init__(self, current: int, announced: int) -> None:
        super().__init__(f"model version {announced} is lower than the current {current}")
        self.current = current
        self.announced = announced


class LeaseNotFoundError(DomainError):
    """The lease is unknown, or has expired."""

    def __init__(self, lease: str) -> None:
        super().__init__(f"lease {lease!r} is unknown or has expired; fetch again")
        self.lease = lease


class TicketNotFoundError(DomainError):
    """The ticket is unknown, has expired, or its group is forgotten."""

    def __init__(self, group: str) -> None:
        super().__init__(f"group {group!r} has no ticket: it is unknown or has ended; take another")
        self.group = group


class RequestNotFoundError(DomainError):
    """No grant was made for this request_id, or it is no longer remembered."""

    def __init__(self, request: str) -> None:
        super().__init__(
            f"request {request!r} has no lease: it is unknown, or its leases have ended; "
            "fetch again"
        )
        self.request = request


class SubscriptionNotFoundError(DomainError):
    """The buffer has no subscription of this name."""

    def __init__(self, subscription: str) -> None:
        super().__init__(
            f"no subscription is named {subscription!r}; create it with CreateSubscription"
        )
        self.subscription = subscription


class SubscriptionExistsError(DomainError):
    """A subscription of this name is of the other kind."""

    def __init__(self, subscription: str, is_retaining: bool) -> None:
        kind = "retains" if is_retaining else "does not retain"
        super().__init__(
            f"subscription {subscription!r} exists and {kind} chunks; delete it or use another name"
        )
        self.subscription = subscription


class SubscriptionsFullError(DomainError):
    """The buffer has its maximum of subscriptions."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the buffer has its limit of {limit} subscriptions; delete one first")
        self.limit = limit


class RequestMismatchError(DomainError):
    """A request_id came again with another size, or its ranks disagree (B12)."""

    def __init__(self, request: str, field: str, first: int, now: int) -> None:
        super().__init__(f"request {request!r} had {field} {first} first and {now} now")
        self.request = request
        self.field = field
        self.first = first
        self.now = now


class WaitersFullError(DomainError):
    """The buffer already has `waiters_max` waiting fetches."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} fetches wait already, which is the limit waiters_max")
        self.limit = limit


class WorkersFullError(DomainError):
    """The session already has `workers_max` workers, and none that may be forgotten (B2)."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} workers take part already, which is the limit workers_max")
        self.limit = limit


class SchemaMismatchError(DomainError):
    """A fragment's arrays, or their steps, are others than those of its session (B4, B30)."""

    def __init__(
        self,
        session: str,
        path: str,
        wanted: str,
        got: str,
        *,
        more_count: int = 0,
        remedy: str = "the same environment, wrappers and policy; start a new session for others, "
        "or let the buffer take any (--schema any)",
    ) -> None:
        more = f" (and {more_count} more differ)" if more_count else ""
        super().__init__(
            f"{path}: {wanted} wanted, {got} got{more}; a learner stacks the fragments of session "
            f"{session!r}, so all its workers need {remedy}"
        )
        self.path = path
        self.wanted = wanted
        self.got = got


class DrainingError(DomainError):
    """The server is shutting down and takes no new work."""

    def __init__(self) -> None:
        super().__init__("the server is draining; try again, it may be back or replaced soon")
