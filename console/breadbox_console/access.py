"""Sessions of viewers: a login by token, and one watch for each token."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from starlette.requests import Request

from breadbox import aio
from breadbox.model.errors import PermissionDeniedError, ReplayBufferError, UnauthenticatedError
from breadbox_console.watch import Watch, WatchLimits

log = logging.getLogger(__name__)

COOKIE: Final = "breadbox_console"
SESSION_S: Final = 12 * 3600.0
SESSIONS_MAX: Final = 1024
"""Logins of all tokens; the next one ends the oldest."""
SESSIONS_OF_TOKEN_MAX: Final = 16
"""Logins of one token; its next one ends its oldest."""
WATCHES_MAX: Final = 64
"""Tokens that are watched at a time; the next one ends the watch that was viewed longest ago."""
LOOK_S: Final = 10.0
"""Seconds between two looks for watches without a page, and at whether a login is needed."""
IDLE_S: Final = 1800.0
"""Seconds without an open page after which the watch of a token that logged in ends."""
TOKEN_CHARACTERS_MAX: Final = 4096


class _Session(NamedTuple):
    token: str
    expires_at: float


class Access:
    """Logins, and the watches behind them.

    `connect` makes a client with a token, or without one if that is empty; of an address if one is
    given. The watch of `own_token`, the console's own or empty, begins with the console.
    """

    def __init__(
        self, connect: Callable[..., aio.Client], own_token: str, limits: WatchLimits
    ) -> None:
        self._connect = connect
        self._own_token = own_token
        self._limits = limits
        self._sessions: dict[str, _Session] = {}
        self._watches: dict[str, tuple[Watch, asyncio.Task[None]]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._logins = asyncio.Semaphore(4)
        self.is_open = False
        """True if the server asks nobody for a token, so that pages need no login."""
        self.problem = ""
        """Why the server did not say at the last look, or empty."""

    async def run(self, started: asyncio.Event) -> None:
        """Own the watches until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            self._watch_of(self._own_token)
            while True:
                await self._ask_whether_open()
                started.set()  # A page that asks before would ask for a token.
                self._end_idle()
                await asyncio.sleep(min(1.0, LOOK_S) if self.problem else LOOK_S)

    async def login(self, token: str) -> str:
        """Return a new session's cookie.

        Raises:
            PermissionDeniedError, UnauthenticatedError: The server refuses the token, or asks for
                none: it would take any, and each would be watched.
            ReplayBufferError: The server cannot be asked.
        """
        # "@FILE" names a file of this host, which is for the command line alone.
        is_text = token.isascii() and token.isprintable() and not token.startswith("@")
        if not token or len(token) > TOKEN_CHARACTERS_MAX or not is_text:
            raise UnauthenticatedError("this is no token")
        if self.is_open:
            raise UnauthenticatedError("it asks for none")
        async with self._logins:
            await self._check_token(token)
        self._watch_of(token).is_refused = False
        own = [cookie for cookie, each in self._sessions.items() if each.token == token]
        for cookie in own[: max(0, len(own) + 1 - SESSIONS_OF_TOKEN_MAX)]:
            del self._sessions[cookie]
        while len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = _Session(token, time.monotonic() + SESSION_S)
        return cookie

    def logout(self, request: Request) -> None:
        """Forget the session of a request."""
        self._sessions.pop(request.cookies.get(COOKIE, ""), None)

    def watch_of(self, request: Request) -> Watch | None:
        """Return what the request may see, or None if it has to log in first.

        Sessions end as soon as a look, of which there is one a second, finds their token refused.
        """
        if self.is_open:
            return self._watch_of("")
        session = self._sessions.get(request.cookies.get(COOKIE, ""))
        if session is None or session.expires_at <= time.monotonic():
            return None
        watch = self._watch_of(session.token)
        if not watch.is_refused:
            return watch
        for cookie in [key for key, each in self._sessions.items() if each.token == session.token]:
            del self._sessions[cookie]
        self._end(session.token)
        return None

    def _watch_of(self, token: str) -> Watch:
        found = self._watches.get(token)
        if found is None or found[1].done():
            others = {each: one for each, (one, _) in self._watches.items() if each}
            others.pop(self._own_token, None)
            if len(others) >= WATCHES_MAX:
                self._end(min(others, key=lambda each: others[each].viewed_at))
            watch = Watch(self._connect(token), self._limits, partial(self._connect, token))
            assert self._tasks is not None, "called before run"
            found = self._watches[token] = (watch, self._tasks.create_task(_run(watch)))
        found[0].viewed_at = time.monotonic()
        return found[0]

    def _end(self, token: str) -> None:
        """End the watch of a token."""
        _, task = self._watches.pop(token)
        task.cancel()

    async def _check_token(self, token: str) -> None:
        client = self._connect(token)
        try:
            await client.list_buffers()
        finally:
            await client.close()

    async def _ask_whether_open(self) -> None:
        problem = ""
        try:
            await self._check_token("")
            self.is_open = True
        except (UnauthenticatedError, PermissionDeniedError):
            self.is_open = False
        except ReplayBufferError as error:
            problem = str(error)  # What was true of it stays so.
        except Exception as error:
            log.exception("the console failed to ask whether a login is needed")
            problem = f"the console failed: {error}"
        self.problem = problem

    def _end_idle(self) -> None:
        now = time.monotonic()
        for cookie in [key for key, each in self._sessions.items() if each.expires_at <= now]:
            del self._sessions[cookie]
        for token, (watch, _) in list(self._watches.items()):
            if token != self._own_token and now - watch.viewed_at > IDLE_S:
                self._end(token)


async def _run(watch: Watch) -> None:
    """Run a watch. One that fails is logged and ends alone: the next request begins it anew."""
    try:
        await watch.run()
    except Exception:
        log.exception("the console's watch of %s ended", watch.client.address)
