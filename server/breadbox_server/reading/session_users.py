"""Which processes use a buffer's session, so that no other process ends it by a slip."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from breadbox_server.access.authorization import Role
from breadbox_server.base.clock import Clock
from breadbox_server.base.errors import SessionInUseError
from breadbox_server.core.model.ids import BufferName, SessionId
from breadbox_server.limits import SESSION_USERS_MAX

USED_S: Final = 60.0
"""Seconds after its last call for which a process still counts as a user."""


class User(NamedTuple):
    """A process that calls in one role."""

    role: Role
    process: str
    """HOST/PID as the process reports it, or the name of its connection."""
    token: str = ""
    """The token's name, or "" without tokens."""
    session_id: str = ""
    """The session that its calls name, or "" if they name none."""


@dataclass(slots=True)
class _Use:
    since: float
    last_at: float
    current_count: int = 0


class SessionUsers:
    """Learners and producers of the last minute, by buffer. Not durable."""

    def __init__(self, clock: Clock, exists: Callable[[BufferName], bool]) -> None:
        self._clock = clock
        self._exists = exists
        self._uses: dict[tuple[BufferName, Role], OrderedDict[User, _Use]] = {}
        """In order of the latest call's beginning."""
        self._starters: dict[BufferName, str] = {}
        """The processes that started the current sessions."""

    def begin(self, buffer: BufferName, user: User) -> None:
        """Note a call that goes on until `end`."""
        now = self._clock.now()
        uses = self._uses.setdefault((buffer, user.role), OrderedDict())
        use = uses.get(user)
        if use is None or (now - use.last_at > USED_S and not use.current_count):
            self._forget_oldest(uses, now)
            if len(uses) >= SESSION_USERS_MAX:
                return
            use = uses[user] = _Use(now, now)
        uses.move_to_end(user)
        use.last_at = now
        use.current_count += 1

    def end(self, buffer: BufferName, user: User, *, gave_back: bool = False) -> None:
        """Note the end of a call that began; the buffer may be gone, or never have been there.

        `gave_back`: the call returned a batch unused, as an export does. It does not count.
        """
        uses = self._uses.get((buffer, user.role), OrderedDict())
        if (use := uses.get(user)) is not None:
            use.last_at = self._clock.now()
            use.current_count = max(0, use.current_count - 1)
            if gave_back and not use.current_count:
                del uses[user]
        if not self._exists(buffer):
            self.forget(buffer)

    @staticmethod
    def _forget_oldest(uses: OrderedDict[User, _Use], now: float) -> None:
        # At most two for each addition: the dictionary shrinks at low cost per call.
        for user, use in [*islice(uses.items(), 2)]:
            if use.current_count == 0 and now - use.last_at > USED_S:
                del uses[user]

    def started(self, buffer: BufferName, user: User) -> None:
        """Note that a process started a new session: users of the former one count no more."""
        self.forget(buffer)
        self._starters[buffer] = user.process
        self.begin(buffer, user)
        self.end(buffer, user)

    def forget(self, buffer: BufferName) -> None:
        """Forget the users of a buffer."""
        self._starters.pop(buffer, None)
        for role in Role:
            self._uses.pop((buffer, role), None)

    def others(self, buffer: BufferName, session_id: SessionId, process: str) -> str:
        """Return which other processes use a session, and since when, as words; "" for none."""
        if not session_id:
            return ""
        now, words = self._clock.now(), list[str]()
        for role in (Role.LEARNER, Role.PRODUCER):
            others = [
                (0.0 if use.current_count else now - use.last_at, use.since, user)
                for user, use in self._uses.get((buffer, role), {}).items()
                if user.process != process and user.session_id in ("", session_id)
            ]
            others = sorted(each for each in others if each[0] <= USED_S)
            if others:
                words.append(_words(others, now))
        return "; ".join(words)

    def check_free(self, buffer: BufferName, session_id: SessionId, process: str) -> None:
        """Raise SessionInUseError if other processes use a session that `process` did not start."""
        words = self.others(buffer, session_id, process)
        if words and process != self._starters.get(buffer):
            raise SessionInUseError(session_id, words)


def _words(others: list[tuple[float, float, User]], now: float) -> str:
    ago_s, since, user = others[0]
    host, _, pid = user.process.rpartition("/")
    kind = f"process {pid}" if pid.isdecimal() else pid
    # A connection's name has a colon, and is an address.
    named = [f"{kind} on {host}"] if host and ":" not in user.process else []
    named += [f"token {user.token!r}"] * bool(user.token)
    name = f" ({', '.join(named)})" if named else ""
    count = len({each.process for _, _, each in others})
    more = f" and {count - 1} more" if count > 1 else ""
    # The server's clock stood still while no server ran; people look at their own.
    first_at = time.gmtime(time.time() - (now - since))
    return (
        f"a {user.role.value}{name}{more} called {ago_s:.0f} s ago, and first at "
        f"{time.strftime('%H:%M:%S', first_at)} UTC"
    )
