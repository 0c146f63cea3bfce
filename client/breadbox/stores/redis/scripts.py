"""Scripts on a connection of their own, with little around each."""

import asyncio
from collections.abc import Iterator
from functools import cache
from hashlib import sha1
from typing import Any

import redis

Word = str | bytes | int


class ScriptLine:
    """Run scripts of a caller that mostly runs one at a time.

    redis-py borrows a connection for each command, looks whether it is fresh, and puts two time
    limits around it; all of that takes longer than to send a script's arguments and to read the
    answer. So one connection is kept here. A script that comes while another is on it goes
    redis-py's way at once, and one that fails on it once more: scripts have to bear being repeated.

    Args:
        client: An asyncio client of redis-py, of a single Redis or of Sentinels; one of a cluster
            runs all scripts its own way.
        answer_s: Seconds that Redis may take for one answer.
    """

    def __init__(self, client: Any, answer_s: float) -> None:
        self._client = client
        self._answer_s = answer_s
        self._pool: Any = getattr(client, "connection_pool", None)
        self._connection: Any = None
        self._is_busy = False

    async def eval(self, script: str, *arguments: Word) -> Any:
        """Run a script; the arguments are those of EVAL behind it."""
        if self._pool is not None and not self._is_busy:
            self._is_busy = True
            try:
                return await self._ask(["EVALSHA", _digest(script), *arguments])
            except (redis.ConnectionError, redis.exceptions.NoScriptError):
                # Redis was started again, say. Silence is not waited for twice.
                pass
            finally:
                self._is_busy = False
        return await self._client.eval(script, *arguments)

    async def _ask(self, words: list[Word]) -> Any:
        try:
            async with asyncio.timeout(self._answer_s):
                connection = self._connection
                if connection is None:
                    connection = self._connection = await self._pool.get_connection()
                    # The block's limit is the only one.
                    connection.socket_timeout = None
                await connection.send_packed_command([*_packed(words)], check_health=False)
                return await connection.read_response()
        except TimeoutError as error:
            raise redis.exceptions.TimeoutError("Redis did not answer in time") from error


@cache
def _digest(script: str) -> str:
    """What Redis names a script."""
    return sha1(script.encode(), usedforsecurity=False).hexdigest()


def _packed(words: list[Word]) -> Iterator[bytes]:
    """A command as it goes over the wire."""
    yield b"*%d\r\n" % len(words)
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        yield b"$%d\r\n" % len(data)
        yield data
        yield b"\r\n"
