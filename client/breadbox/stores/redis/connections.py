"""Connections of redis-py that keep to the deadline in force, whatever they are used for.

redis-py has a time limit for each answer and tries again at several levels, so that one command
can take many times the limit. Here every wait of a connection (its making, its greeting, each
answer) takes its limit from what is left of the caller's deadline at that moment; what is over
fails at once, also inside redis-py's own repetitions.
"""

from functools import cache
from typing import Any, Final

import redis
import redis.asyncio

from breadbox.stores.common.deadline import current

CONNECT_S_MAX: Final = 5.0
"""Longest making of a connection: an address that swallows packets is not there."""
_SHARE: Final = 0.5
"""Part of the time left that one answer may take: another node, or Sentinel, may answer instead."""


class NoTlsError(redis.exceptions.TimeoutError):
    """Nobody answered the greeting of an encrypted connection."""

    def __init__(self) -> None:
        super().__init__(
            "no answer to an encrypted greeting in time: if Redis does not speak TLS on this port, "
            "its URL begins with redis://, not rediss://"
        )


class BoundedPool(redis.ConnectionPool):
    """A pool of bounded connections."""

    def __init__(self, connection_class: Any = redis.connection.Connection, **options: Any) -> None:
        super().__init__(connection_class=bounded(connection_class), **options)


def bound_pool(client: Any) -> None:
    """Let a client that made its own pool make bounded connections in it."""
    pool = client.connection_pool
    pool.connection_class = bounded(pool.connection_class)


@cache
def bounded(connection_class: Any) -> Any:
    """A kind of connection that keeps to the deadline in force."""
    if getattr(connection_class, "keeps_deadlines", False):
        return connection_class

    class Bounded(connection_class):  # type: ignore[misc]
        keeps_deadlines = True

        def connect(self, *arguments: Any, **options: Any) -> Any:
            self._limit_making()
            return super().connect(*arguments, **options)

        def _connect(self, *arguments: Any, **options: Any) -> Any:
            # Again: before this the Sentinels may have been asked where to go.
            self._limit_making()
            try:
                return super()._connect(*arguments, **options)
            except (TimeoutError, redis.exceptions.TimeoutError) as error:
                if isinstance(self, redis.SSLConnection):
                    raise NoTlsError from error
                raise

        def send_packed_command(self, *arguments: Any, **options: Any) -> Any:
            self._limit_answer()
            return super().send_packed_command(*arguments, **options)

        def read_response(self, *arguments: Any, **options: Any) -> Any:
            self._limit_answer()
            return super().read_response(*arguments, **options)

        def _limit_making(self) -> None:
            if (answer_s := _answer_s()) is not None:
                self.socket_connect_timeout = min(CONNECT_S_MAX, answer_s)
                self.socket_timeout = answer_s

        def _limit_answer(self) -> None:
            held = self._sock
            if held is not None and (answer_s := _answer_s()) is not None:
                held.settimeout(answer_s)

    Bounded.__name__ = Bounded.__qualname__ = f"Bounded{connection_class.__name__}"
    return Bounded


def tell_of_tls(client: Any) -> None:
    """Let an asyncio client say what its silent encrypted connections may mean."""
    pool = client.connection_pool
    if issubclass(pool.connection_class, redis.asyncio.SSLConnection):
        pool.connection_class = _telling(pool.connection_class)


@cache
def _telling(connection_class: Any) -> Any:
    class Telling(connection_class):  # type: ignore[misc]
        async def connect(self) -> None:
            try:
                await super().connect()
            except (TimeoutError, redis.exceptions.TimeoutError) as error:
                raise NoTlsError from error

    return Telling


def _answer_s() -> float | None:
    """Return the seconds that the next answer may take, or None for the connection's default.

    Raises:
        redis.exceptions.TimeoutError: The deadline is over.
    """
    deadline = current()
    if deadline is None:
        return None
    left_s = deadline.left_s()
    if left_s <= 0:
        raise redis.exceptions.TimeoutError("the call's time is up")
    return left_s * _SHARE
