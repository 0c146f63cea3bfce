"""A journal in Redis: turns in a stream, the snapshot in pieces beside it.

    breadbox:{journal}:turns            stream; the entry of turn n has the id n-0
    breadbox:{journal}:snapshot         hash: sequence, piece count
    breadbox:{journal}:piece:<n>:<k>    piece k of the snapshot of sequence n
    breadbox:{journal}:half             hash: sequence to piece count, of snapshots being written
    breadbox:{journal}:owner            the server that may write
    breadbox:{journal}:notes            hash: what is noted beside the journal

The braces are a hash tag: in a cluster all of them live on one node, so that a script may use them.
A turn is written by a script that first looks whether the journal is still ours and still whole:
that makes an append that is repeated after a lost connection harmless, and finds out about a Redis
that came back empty.
"""

import secrets
from collections.abc import Iterator
from typing import Any, Final

from breadbox.stores.cancellation import kept_cancellation
from breadbox.stores.redis_factory import open_redis, open_redis_async
from breadbox.stores.redis_wire import REDIS_ERRORS
from breadbox.stores.urls import redact
from breadbox_server.journal.storage import (
    BEGINNING,
    JournalDamagedError,
    JournalLostError,
    JournalTakenError,
    JournalUnavailableError,
)

_PREFIX: Final = "breadbox:{journal}:"
TURNS: Final = _PREFIX + "turns"
SNAPSHOT: Final = _PREFIX + "snapshot"
HALF: Final = _PREFIX + "half"
OWNER: Final = _PREFIX + "owner"
NOTES: Final = _PREFIX + "notes"
_TOUCH: Final = _PREFIX + "touch"
PIECE_SIZE_BYTES: Final = 2**20
"""Redis is not held up by one huge value."""
SNAPSHOT_READS: Final = 5
"""Attempts at a snapshot that somebody is replacing meanwhile."""
TRIM_TURNS: Final = 1000
READ_TURNS: Final = 500

# The DEL of a key that is never there counts as a write, after which Redis lets a script go on
# although it has reached maxmemory: without it a full Redis could not even be told what to free.
_APPEND: Final = """
redis.call('DEL', KEYS[3])
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  if redis.call('EXISTS', KEYS[2]) == 1 then return 'TAKEN' end
  return 'LOST'
end
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if #newest == 0 then return 'LOST' end
local last = newest[1][1]
if last == ARGV[2] .. '-0' then return 'OK' end
if last ~= ARGV[3] .. '-0' then return 'LOST' end
redis.call('XADD', KEYS[1], ARGV[2] .. '-0', 'd', ARGV[4])
return 'OK'
"""
_ANYWAY: Final = """
redis.call('DEL', KEYS[2])
return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))
"""
"""Runs one command, also at maxmemory."""
_HEAD: Final = """
redis.call('DEL', KEYS[2])
local newest = redis.call('HGET', KEYS[1], 'sequence')
if newest and tonumber(newest) > tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'sequence', ARGV[1], 'piece_count', ARGV[2])
return 1
"""
"""Makes a snapshot the one that counts, unless a newer one came while its pieces were written."""
_ONLY_TURN: Final = """
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('XADD', KEYS[1], ARGV[1] .. '-0', 'd', '')
"""
"""Leaves one turn, with nothing in it: what the next one follows."""


class RedisArchive:
    """A `JournalArchive` in Redis. Opening it changes nothing; `take` makes it this server's."""

    def __init__(self, url: str) -> None:
        self._shown = redact(url)
        with _translated_errors():
            self._client: Any = open_redis(url)

    @property
    def shown(self) -> str:
        """See JournalArchive."""
        return f"{self._shown} ({TURNS})"

    def take(self) -> str:
        """Become the one that may write; whoever wrote before is refused from now on.

        Returns:
            What `RedisWriter` shows for it.
        """
        token = secrets.token_hex(16)
        with _translated_errors():
            self._client.eval(*_anyway("SET", OWNER, token))
        return token

    def is_begun(self) -> bool:
        """See JournalArchive."""
        with _translated_errors():
            return bool(self._client.exists(SNAPSHOT) or self._client.exists(TURNS))

    def begin(self, data: bytes) -> None:
        """See JournalArchive."""
        # Snapshot first: without it, turns are a damaged journal; without turns, it is one that
        # the server begins again.
        self.write_snapshot(BEGINNING, data)
        with _translated_errors():
            self._client.eval(_ONLY_TURN, 2, TURNS, _TOUCH, BEGINNING)

    def read_snapshot(self) -> tuple[int, bytes]:
        """See JournalArchive."""
        for _ in range(SNAPSHOT_READS):
            with _translated_errors():
                head = self._client.hgetall(SNAPSHOT)
                if not head:
                    raise JournalDamagedError(self._remedy("has no snapshot"))
                sequence, piece_count = int(head[b"sequence"]), int(head[b"piece_count"])
                pieces = [self._client.get(_piece(sequence, k)) for k in range(piece_count)]
            if None not in pieces:
                return sequence, b"".join(pieces)
        raise JournalDamagedError(self._remedy("has an incomplete snapshot"))

    def read_turns(self, after: int) -> Iterator[tuple[int, bytes]]:
        """See JournalArchive."""
        expected = after + 1
        while True:
            with _translated_errors():
                entries = self._client.xrange(TURNS, min=f"{expected}-0", count=READ_TURNS)
            if not entries:
                return
            for entry_id, fields in entries:
                sequence = int(entry_id.split(b"-")[0])
                if sequence != expected:
                    raise JournalDamagedError(
                        self._remedy(f"lacks turns {expected} to {sequence - 1}")
                    )
                yield sequence, fields[b"d"]
                expected += 1

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        """See JournalArchive."""
        with _translated_errors():
            old = self._client.hgetall(SNAPSHOT)
            if old and int(old[b"sequence"]) > sequence:
                return
            halves = self._client.hgetall(HALF)
            pieces = _cut(data)
            self._client.eval(*_anyway("HSET", HALF, sequence, len(pieces)))
            for k, piece in enumerate(pieces):
                self._client.eval(*_anyway("SET", _piece(sequence, k), piece))
            if self._client.eval(*_head(sequence, len(pieces))):
                # From here on the newer one counts; what is left of others is of no use.
                useless = _useless(sequence, len(pieces), old, halves)
            else:
                useless = _pieces(sequence, len(pieces))
            if useless:
                self._client.unlink(*useless)
            self._client.hdel(HALF, *_done(sequence, halves))

    def read_note(self, name: str) -> str:
        """See JournalArchive."""
        with _translated_errors():
            text: bytes | None = self._client.hget(NOTES, name)
        return "" if text is None else text.decode()

    def write_note(self, name: str, text: str) -> None:
        """See JournalArchive."""
        with _translated_errors():
            self._client.eval(*_anyway("HSET", NOTES, name, text))

    def close(self) -> None:
        """See JournalArchive."""
        self._client.close()

    def _remedy(self, problem: str) -> str:
        return (
            f"{self.shown} {problem}; restore Redis from a copy, or delete the keys "
            f"{_PREFIX}* to start empty"
        )


class RedisWriter:
    """A `JournalWriter` in Redis.

    Args:
        url: Of Redis.
        token: What `RedisArchive.take` gave.
        answer_s: Seconds that Redis may take for one answer.
    """

    def __init__(self, url: str, token: str, *, answer_s: float = 5.0) -> None:
        self._token = token
        self._client: Any = open_redis_async(url, answer_s=answer_s)

    def has_room(self) -> bool:
        """See JournalWriter: it is written at maxmemory too."""
        return True

    async def append(self, sequence: int, data: bytes) -> None:
        """See JournalWriter."""
        with kept_cancellation(), _translated_errors():
            answer = await self._client.eval(
                _APPEND, 3, TURNS, OWNER, _TOUCH, self._token, sequence, sequence - 1, data
            )
        self._check(answer)

    async def begin_again(self, sequence: int, snapshot: bytes) -> None:
        """See JournalWriter."""
        with kept_cancellation(), _translated_errors():
            owner = await self._client.get(OWNER)
            if owner not in (None, self._token.encode()):
                raise JournalTakenError("another server writes this journal")
            await self._client.eval(*_anyway("SET", OWNER, self._token))
            old = await self._client.hgetall(SNAPSHOT)
            halves = await self._client.hgetall(HALF)
            pieces = _cut(snapshot)
            await self._client.eval(*_anyway("HSET", HALF, sequence, len(pieces)))
            for k, piece in enumerate(pieces):
                await self._client.eval(*_anyway("SET", _piece(sequence, k), piece))
            await self._client.eval(*_head(sequence, len(pieces)))
            # Only now: until the snapshot counts, the turns that are left are all there is.
            await self._client.eval(_ONLY_TURN, 2, TURNS, _TOUCH, sequence)
            if useless := _useless(sequence, len(pieces), old, halves):
                await self._client.unlink(*useless)
            await self._client.hdel(HALF, *_done(sequence, halves))

    async def trim(self, up_to: int) -> bool:
        """See JournalWriter."""
        with kept_cancellation(), _translated_errors():
            # The newest turn stays in any case: appends look at it.
            trimmed = await self._client.xtrim(
                TURNS, minid=f"{up_to}-0", approximate=True, limit=TRIM_TURNS
            )
        # Redis deletes whole nodes of a stream, some hundred turns; the last stays for later.
        return bool(trimmed)

    async def close(self) -> None:
        """See JournalWriter."""
        await self._client.aclose()

    @staticmethod
    def _check(answer: bytes) -> None:
        if answer == b"TAKEN":
            raise JournalTakenError("another server writes this journal now")
        if answer == b"LOST":
            raise JournalLostError("Redis does not have the journal any more")


def _anyway(command: str, key: str, *arguments: str | bytes | int) -> tuple[Any, ...]:
    """Arguments of EVAL for one command on one key that must work at maxmemory too."""
    return _ANYWAY, 2, key, _TOUCH, command, *arguments


def _head(sequence: int, piece_count: int) -> tuple[Any, ...]:
    """Arguments of EVAL that make a snapshot the one that counts; answered 0 if it is too old."""
    return _HEAD, 2, SNAPSHOT, _TOUCH, sequence, piece_count


def _cut(data: bytes) -> list[bytes]:
    return [
        data[start : start + PIECE_SIZE_BYTES] for start in range(0, len(data), PIECE_SIZE_BYTES)
    ]


def _pieces(sequence: int, piece_count: int) -> list[str]:
    return [_piece(sequence, k) for k in range(piece_count)]


def _useless(
    sequence: int, piece_count: int, old: dict[bytes, bytes], halves: dict[bytes, bytes]
) -> list[str]:
    """Pieces that a snapshot makes useless: of the one before, and of those never finished.

    Args:
        sequence: Of the snapshot that counts now.
        piece_count: Of it.
        old: The head of the one before; empty: there was none.
        halves: Those that were being written when this one was begun; most writers were killed.
    """
    counts = {int(each): int(count) for each, count in halves.items()}
    if old:
        before = int(old[b"sequence"])
        counts[before] = max(counts.get(before, 0), int(old[b"piece_count"]))
    return [
        _piece(each, k)
        for each, count in counts.items()
        if each <= sequence
        for k in range(piece_count if each == sequence else 0, count)
    ]


def _done(sequence: int, halves: dict[bytes, bytes]) -> list[int]:
    """Snapshots of which nothing is being written any more; a newer one may be."""
    return [sequence, *(int(each) for each in halves if int(each) < sequence)]


def _piece(sequence: int, k: int) -> str:
    return f"{_PREFIX}piece:{sequence}:{k}"


class _translated_errors:  # noqa: N801 - a context manager that reads as a function
    """Turn redis-py's errors into those of a journal, in words of ours."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, REDIS_ERRORS):
            raise JournalUnavailableError(
                f"the journal in Redis cannot be used: {type(error).__name__}: {error}"
            ) from error
