"""Count the connected clients by role, for the metrics."""

from collections.abc import Callable
from functools import cache
from typing import Final

from breadbox_server.access.authorization import RULES, Role

WINDOW_S: Final = 60.0
PEERS_MAX: Final = 65_536
"""Most remembered connections; the one with the oldest call is forgotten first."""


@cache
def role_of_call(method: str, caller: Role) -> Role | None:
    """Return the role that counts as that of a call, or None if any of several may have made it."""
    rule = RULES.get(method)
    if rule is None:
        return None
    if caller is Role.VIEWER:
        return caller
    roles = rule.roles - {Role.ADMIN, Role.VIEWER}
    if len(roles) > 1:
        return caller if rule.usual and caller in roles else rule.usual
    return next(iter(roles), Role.ADMIN)


class ClientCensus:
    """Connections of the last minute, by role. Call `seen` in the loop's thread, `count` in any."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._seen_at: dict[tuple[str, Role], float] = {}

    def seen(self, peer: str, role: Role) -> None:
        """Record that a connection made a call; `peer` is gRPC's name for it."""
        key = (peer, role)
        # Removed first, so that the dictionary is in order of the latest calls.
        self._seen_at.pop(key, None)
        now = self._seen_at[key] = self._now()
        # Removing at most two for each addition lets the dictionary shrink at low cost per call.
        for _ in range(2):
            oldest = next(iter(self._seen_at))
            if self._seen_at[oldest] >= now - WINDOW_S and len(self._seen_at) <= PEERS_MAX:
                return
            del self._seen_at[oldest]

    def count(self, role: Role) -> int:
        """Return the number of connections that made a call of this role within the window."""
        since = self._now() - WINDOW_S
        # One call into C, during which the loop's thread cannot change the dictionary.
        seen = list(self._seen_at.items())
        return sum(1 for (_, seen_role), at in seen if seen_role is role and at >= since)
