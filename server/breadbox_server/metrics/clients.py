"""How many clients there are, by what they do: for the metrics."""

from collections.abc import Callable
from functools import cache
from typing import Final

from breadbox_server.access.authorization import RULES, Role

WINDOW_S: Final = 60.0
PEERS_MAX: Final = 65_536
"""Connections remembered; the one longest unseen is forgotten first."""


@cache
def role_of_call(method: str, caller: Role) -> Role | None:
    """Return what a caller of a method is here for, or None where several roles call it."""
    rule = RULES.get(method)
    if rule is None:
        return None
    if caller is Role.VIEWER:
        return caller
    roles = rule.roles - {Role.ADMIN, Role.VIEWER}
    if len(roles) > 1:
        return None
    return next(iter(roles), Role.ADMIN)


class ClientCensus:
    """Remember connections by role, for a minute. `seen`: the loop's thread; `count`: any."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._seen_at: dict[tuple[str, Role], float] = {}

    def seen(self, peer: str, role: Role) -> None:
        """Note that a connection made a call; `peer` is what gRPC names it."""
        key = (peer, role)
        # Out and in again, so that the dictionary is in order of last sight.
        self._seen_at.pop(key, None)
        now = self._seen_at[key] = self._now()
        # At most two go for each that comes: what is remembered shrinks, and no call pays for all.
        for _ in range(2):
            oldest = next(iter(self._seen_at))
            if self._seen_at[oldest] >= now - WINDOW_S and len(self._seen_at) <= PEERS_MAX:
                return
            del self._seen_at[oldest]

    def count(self, role: Role) -> int:
        """Connections that made a call of this role within the window."""
        since = self._now() - WINDOW_S
        # One call into C, so that the loop's thread cannot change the dictionary meanwhile.
        seen = list(self._seen_at.items())
        return sum(1 for (_, seen_role), at in seen if seen_role is role and at >= since)
