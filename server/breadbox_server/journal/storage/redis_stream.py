"""A journal in Redis: turns in a stream, the snapshot in pieces beside it.

    breadbox:{journal}:turns            stream; the entry of turn n has the id n-0
    breadbox:{journal}:snapshot         hash: sequence, piece count
    breadbox:{journal}:piece:<n>:<k>    piece k of the snapshot of sequence n
    breadbox:{journal}:half             hash: sequence to piece count, of unfinished snapshots
    breadbox:{journal}:owner            the writer's epoch and token, the journal's identity
    breadbox:{journal}:alive            that server's heartbeat; expires unless it is renewed
    breadbox:{journal}:notes            hash: what is noted beside the journal

The braces keep them on one node of a cluster, as scripts need. Scripts write everything, and check
that the journal is still ours, and for a turn also whole: repeating an append after a lost
connection is harmless, and a Redis that came back with less is found out.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, Final

from redis.exceptions import BusyLoadingError, ResponseError

from breadbox.stores.keys import JOURNALS_KEY, piece_key
from breadbox.stores.redis.errors import REDIS_ERRORS, kept_cancellation, shortened
from breadbox.stores.redis.factory import open_redis, open_redis_async
from breadbox.stores.urls import redact
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.journal.storage.claims import (
    ALIVE_S,
    STARTING_S,
    Claim,
    Holder,
    as_claim,
    epoch_after,
    new_journal_id,
    owner_from_text,
)
from breadbox_server.journal.storage.interface import (
    BEGINNING,
    NO_PAYLOADS,
    JournalDamagedError,
    JournalHeldError,
    JournalLostError,
    JournalStatus,
    JournalTakenError,
    JournalUnavailableError,
    Written,
)

_PREFIX: Final = "breadbox:{journal}:"
TURNS: Final = _PREFIX + "turns"
SNAPSHOT: Final = _PREFIX + "snapshot"
HALF: Final = _PREFIX + "half"
OWNER: Final = _PREFIX + "owner"
ALIVE: Final = _PREFIX + "alive"
NOTES: Final = _PREFIX + "notes"
_TOUCH: Final = _PREFIX + "touch"
PIECE_SIZE_BYTES: Final = 2**20
"""Redis is not held up by one huge value."""
SNAPSHOT_READS: Final = 5
"""Attempts at a snapshot that the compactor is replacing meanwhile."""
TRIM_TURNS: Final = 1000
READ_TURNS: Final = 500
LOOK_TURNS: Final = 100
"""Turns that one look returns: a follower must not hold up Redis."""

# The DEL of a key that is never there counts as a write, after which Redis lets a script go on
# although it has reached maxmemory: without it a full Redis would refuse even what frees memory.
_CLAIMED: Final = """
local owner = redis.call('GET', KEYS[1]) or ''
if owner ~= ARGV[1] then
  local theirs = tonumber(string.match(owner, '^(%d+) ')) or 0
  local ours = tonumber(string.match(ARGV[1], '^(%d+) ')) or 0
  if theirs >= ours then return {'TAKEN', redis.call('GET', KEYS[3]) or ''} end
  return {'LOST'}
end
"""
"""End a script unless the journal is of the claim in ARGV[1]; an older epoch is of an older Redis.
KEYS: owner, touch, alive."""
_OURS: Final = "redis.call('DEL', KEYS[2])\n" + _CLAIMED
"""Begins scripts that write."""
_CLAIM: Final = """
redis.call('DEL', KEYS[2])
local alive = redis.call('GET', KEYS[3])
local function begins(with) return string.sub(alive, 1, #with) == with end
if alive and not (begins(ARGV[5]) or begins(ARGV[2])) then
  return {'HELD', alive, redis.call('PTTL', KEYS[3])}
end
local owner = redis.call('GET', KEYS[1]) or ''
local epoch, journal = string.match(owner, '^(%d+) %S+ (%S+)$')
local new = math.max(tonumber(ARGV[1]), (tonumber(epoch) or 0) + 1)
owner = string.format('%.0f', new) .. ' ' .. ARGV[2] .. ' ' .. (journal or ARGV[3])
redis.call('SET', KEYS[1], owner)
redis.call('SET', KEYS[3], ARGV[2] .. ' ' .. ARGV[4], 'PX', ARGV[6])
return {'OK', owner}
"""
"""ARGV: least epoch, token, identity for a new journal, holder, beginning of a displaceable
heartbeat (or `_NONE`), milliseconds of the new one."""
_CLAIM_AGAIN: Final = """
redis.call('DEL', KEYS[2])
local owner = redis.call('GET', KEYS[1]) or ''
local epoch, token = string.match(owner, '^(%d+) (%S+) %S+$')
epoch = tonumber(epoch) or 0
if epoch >= tonumber(ARGV[1]) and token ~= ARGV[2] then
  return {'TAKEN', redis.call('GET', KEYS[3]) or ''}
end
local new = math.max(tonumber(ARGV[3]), epoch + 1)
owner = string.format('%.0f', new) .. ' ' .. ARGV[2] .. ' ' .. ARGV[4]
redis.call('SET', KEYS[1], owner)
redis.call('SET', KEYS[3], ARGV[5], 'PX', ARGV[6])
return {'OK', owner}
"""
"""ARGV: our epoch, token, least epoch, identity of the journal, heartbeat, its milliseconds."""
_PAYLOADS: Final = """
for i = 6, #KEYS do redis.call('SET', KEYS[i], ARGV[#ARGV - #KEYS + i]) end
if KEYS[6] and tonumber(redis.call('HGET', KEYS[5], ARGV[2]) or '0') < tonumber(ARGV[3]) then
  redis.call('HSET', KEYS[5], ARGV[2], ARGV[3])
end
"""
"""A part of scripts: keep payloads, under this epoch's protection (`redis_custodian`). KEYS: turns,
the store's hash of journals, payloads; ARGV: claim, identity, epoch, others, payloads."""
_KEEP: Final = _OURS + _PAYLOADS + "return {'OK'}"
_APPEND: Final = (
    _CLAIMED
    + """
local newest = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)
if #newest == 0 then return {'LOST'} end
local last, fields = newest[1][1], newest[1][2]
if last == ARGV[4] .. '-0' then
  if fields[2] == ARGV[6] and fields[4] == ARGV[3] then return {'OK'} end
  return {'LOST'}
end
if last ~= ARGV[5] .. '-0' then return {'LOST'} end
local refused = KEYS[6] and redis.pcall('SET', KEYS[6], ARGV[7]).err
redis.call('DEL', KEYS[2])
"""
    + _PAYLOADS
    + """
redis.call('XADD', KEYS[4], ARGV[4] .. '-0', 'd', ARGV[6], 'e', ARGV[3])
return {'OK', refused and 1 or 0}
"""
)
"""KEYS and ARGV as of `_PAYLOADS`, the others being sequence, the one before, data. Only the same
owner's same turn is a repeat, and writes nothing: its payloads may have been deleted since. The
first payload shows whether Redis has room; after the DEL it takes all anyway: the turn has been
decided."""
_RENEW: Final = (
    _OURS
    + """
local newest = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)
if #newest == 0 then return {'LOST'} end
if tonumber(string.match(newest[1][1], '^(%d+)')) < tonumber(ARGV[2]) then return {'LOST'} end
local head = tonumber(redis.call('HGET', KEYS[5], 'sequence') or '')
if not head then return {'LOST'} end
local oldest = redis.call('XRANGE', KEYS[4], '-', '+', 'COUNT', 1)[1][1]
if tonumber(string.match(oldest, '^(%d+)')) > head + 1 then return {'LOST'} end
redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4])
return {'OK', string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')}
"""
)
"""ARGV: claim, sequence, heartbeat, its milliseconds. Answers which start of Redis this is."""
_ANYWAY: Final = _OURS + "return {'OK', redis.call(ARGV[2], KEYS[4], unpack(ARGV, 3))}"
"""Runs one command, also at maxmemory."""
_HEAD: Final = (
    _OURS
    + """
local newest = redis.call('HGET', KEYS[4], 'sequence')
if newest and tonumber(newest) > tonumber(ARGV[2]) then return {'OK', 0} end
redis.call('HSET', KEYS[4], 'sequence', ARGV[2], 'piece_count', ARGV[3])
return {'OK', 1}
"""
)
"""Makes a snapshot the one that counts, unless a newer one came while its pieces were written."""
_BEGIN: Final = (
    _OURS
    + """
redis.call('HSET', KEYS[4], 'sequence', ARGV[2], 'piece_count', ARGV[3])
redis.call('DEL', KEYS[5])
redis.call('XADD', KEYS[5], ARGV[2] .. '-0', 'd', '', 'e', ARGV[4])
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[6], ARGV[i], ARGV[i + 1]) end
return {'OK'}
"""
)
"""Makes a snapshot all there is; one empty turn stays for the next to follow. ARGV: claim,
sequence, pieces, epoch, then names and texts of notes."""
_BEGUN: Final = (SNAPSHOT, TURNS, NOTES)
_TRIM: Final = (
    _OURS
    + """
local head = tonumber(redis.call('HGET', KEYS[5], 'sequence') or '0')
local up_to = string.format('%.0f', math.min(tonumber(ARGV[2]), head))
return {'OK', redis.call('XTRIM', KEYS[4], 'MINID', '~', up_to .. '-0', 'LIMIT', ARGV[3])}
"""
)
"""ARGV: claim, sequence, turns at a time. Only superfluous turns go; the newest stays, for
appends to look at."""
_LOOK: Final = """
local newest = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
return {
  redis.call('GET', KEYS[1]) or '',
  redis.call('GET', KEYS[2]) or '',
  redis.call('PTTL', KEYS[2]),
  string.match(redis.call('INFO', 'server'), 'run_id:(%w+)'),
  newest[1] and newest[1][1] or '',
  redis.call('HGET', KEYS[4], 'sequence') or '',
  redis.call('XRANGE', KEYS[3], ARGV[1] .. '-0', '+', 'COUNT', ARGV[2])
}
"""
"""What there is at one instant. KEYS: owner, alive, turns, snapshot; ARGV: first turn, count."""
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[2]) end
"""
_NONE: Final = "\n"
"""No heartbeat begins with it."""


class RedisArchive:
    """A `JournalArchive` in Redis. Opening it changes nothing; `claim` makes it this server's."""

    def __init__(self, url: str) -> None:
        self._shown = redact(url)
        self._owner: str | None = None
        """The claim in the journal when it was claimed or first read, or None before that."""
        self._holder: Holder | None = None
        with _translated_errors():
            self._client: Any = open_redis(url)

    @property
    def shown(self) -> str:
        return f"{self._shown} ({TURNS})"

    def identity(self) -> str:
        with _translated_errors():
            return owner_from_text((self._client.get(OWNER) or b"").decode())[2]

    def claim(self, holder: Holder, displaced: str = "") -> Claim:
        with _translated_errors():
            answer = self._client.eval(
                *(_CLAIM, 3, OWNER, _TOUCH, ALIVE, epoch_after(), holder.token, new_journal_id()),
                *(holder.to_text(), f"{displaced} " if displaced else _NONE),
                round(STARTING_S * 1000),
            )
        if answer[0] == b"HELD":
            raise JournalHeldError(_holder(answer[1]), max(0, answer[2]) / 1000)
        claim = as_claim(answer[1], holder)
        self._owner = claim.to_text()
        self._holder = holder
        return claim

    def send_heartbeat(self) -> None:
        if self._holder is not None:
            heartbeat = (_heartbeat_of(self._holder), "PX", round(STARTING_S * 1000))
            with _translated_errors():
                self._eval(_ANYWAY, (ALIVE,), "SET", *heartbeat)

    def is_begun(self) -> bool:
        with _translated_errors():
            # Notes come after the first of these two, and show that they are gone.
            return bool(self._client.exists(SNAPSHOT, TURNS, NOTES))

    def begin(self, data: bytes) -> None:
        pieces = _cut(data)
        with _translated_errors():
            for k, piece in enumerate(pieces):
                self._eval(_ANYWAY, (_piece(BEGINNING, k),), "SET", piece)
            self._eval(_BEGIN, _BEGUN, *_beginning(BEGINNING, len(pieces), self._seen_owner(), {}))

    def read_snapshot(self) -> tuple[int, bytes]:
        for _ in range(SNAPSHOT_READS):
            with _translated_errors():
                self._seen_owner()
                head = self._client.hgetall(SNAPSHOT)
                if not head:
                    raise JournalDamagedError(self._remedy("has no snapshot"))
                sequence, piece_count = int(head[b"sequence"]), int(head[b"piece_count"])
                pieces = [self._client.get(_piece(sequence, k)) for k in range(piece_count)]
            if None not in pieces:
                return sequence, b"".join(pieces)
        raise JournalDamagedError(self._remedy("has an incomplete snapshot"))

    def read_turns(self, after: int) -> Iterator[tuple[int, bytes]]:
        expected = after + 1
        newest = -1
        while True:
            with _translated_errors():
                entries = self._client.xrange(TURNS, min=f"{expected}-0", count=READ_TURNS)
            if not entries:
                # Turns may have been written since this read: only a second one proves a gap.
                if newest >= expected:
                    raise JournalDamagedError(self._remedy(f"lacks turns {expected} to {newest}"))
                newest = self._newest_ever()
                if newest < expected:
                    return
            for entry_id, fields in entries:
                sequence = _sequence_of(entry_id)
                if sequence != expected:
                    raise JournalDamagedError(
                        self._remedy(f"lacks turns {expected} to {sequence - 1}")
                    )
                yield sequence, fields[b"d"]
                expected += 1

    def _newest_ever(self) -> int:
        """The latest turn that was ever written, which the stream knows if it has lost it."""
        with _translated_errors():
            if not self._client.exists(TURNS):
                raise JournalDamagedError(self._remedy("has no turns"))
            return _sequence_of(self._client.xinfo_stream(TURNS)["last-generated-id"])

    def look(self, first: int) -> JournalStatus:
        with _translated_errors():
            owner, alive, left_ms, run_id, newest, snapshot, entries = self._client.eval(
                _LOOK, 4, OWNER, ALIVE, TURNS, SNAPSHOT, first, LOOK_TURNS
            )
        return JournalStatus(
            epoch=owner_from_text(owner.decode())[0],
            holder=_holder(alive) if alive else None,
            left_s=max(0, left_ms) / 1000,
            incarnation=run_id.decode(),
            newest=_sequence_of(newest),
            snapshot=int(snapshot or 0),
            # As XADD was given them: a turn's data, and its epoch.
            turns=tuple(
                Written(_sequence_of(entry_id), int(fields[3]), fields[1])
                for entry_id, fields in entries
            ),
        )

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        with _translated_errors():
            old = self._client.hgetall(SNAPSHOT)
            if old and int(old[b"sequence"]) > sequence:
                return
            halves = self._client.hgetall(HALF)
            pieces = _cut(data)
            self._eval(_ANYWAY, (HALF,), "HSET", sequence, len(pieces))
            for k, piece in enumerate(pieces):
                self._eval(_ANYWAY, (_piece(sequence, k),), "SET", piece)
            if self._eval(_HEAD, (SNAPSHOT,), sequence, len(pieces)):
                # From here on the newer one counts; what is left of others is of no use.
                useless = _useless(sequence, len(pieces), old, halves)
            else:
                useless = _pieces(sequence, len(pieces))
            if useless:
                self._client.unlink(*useless)
            self._client.hdel(HALF, *_done(sequence, halves))

    def read_note(self, name: str) -> str:
        with _translated_errors():
            text: bytes | None = self._client.hget(NOTES, name)
        return "" if text is None else text.decode()

    def write_note(self, name: str, text: str) -> None:
        with _translated_errors():
            self._eval(_ANYWAY, (NOTES,), "HSET", name, text)

    def close(self) -> None:
        self._client.close()

    def _eval(self, script: str, keys: Iterable[str], *values: str | bytes | int) -> Any:
        return _checked(self._client.eval(*_arguments(self._seen_owner(), script, keys, values)))

    def _seen_owner(self) -> str:
        if self._owner is None:
            self._owner = (self._client.get(OWNER) or b"").decode()
        return self._owner

    def _remedy(self, problem: str) -> str:
        return (
            f"{self.shown} {problem}; restore Redis from a copy, or delete the keys "
            f"{_PREFIX}* to start empty"
        )


class RedisWriter:
    """A `JournalWriter` in Redis.

    `carries_payloads`: this is also the payload store, and no cluster, as a script sees one node.
    Redis may take `answer_s` for one answer.
    """

    def __init__(
        self, url: str, claim: Claim, *, carries_payloads: bool = False, answer_s: float = 5.0
    ) -> None:
        self.claim = claim
        self.carries_payloads = carries_payloads
        self._client: Any = open_redis_async(url, answer_s=answer_s)

    def has_room(self) -> bool:
        """See JournalWriter: it is written at maxmemory too."""
        return True

    async def append(
        self, sequence: int, data: bytes, payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS
    ) -> bool:
        return not await self._eval_with(payloads, _APPEND, sequence, sequence - 1, data)

    async def renew(self, sequence: int) -> str:
        values = (sequence, *self._heartbeat())
        run_id: bytes = await self._eval(_RENEW, (TURNS, SNAPSHOT), *values)
        return run_id.decode()

    async def begin_again(
        self,
        sequence: int,
        snapshot: bytes,
        notes: Mapping[str, str],
        payloads: Mapping[PayloadId, bytes] = NO_PAYLOADS,
    ) -> None:
        await self._claim_again()
        with kept_cancellation(), _translated_errors():
            old = await self._client.hgetall(SNAPSHOT)
            halves = await self._client.hgetall(HALF)
        pieces = _cut(snapshot)
        await self._eval(_ANYWAY, (HALF,), "HSET", sequence, len(pieces))
        for k, piece in enumerate(pieces):
            await self._eval(_ANYWAY, (_piece(sequence, k),), "SET", piece)
        if payloads:
            await self._eval_with(payloads, _KEEP)
        # Until the snapshot counts, what is left of the old journal is all there is.
        await self._eval(
            _BEGIN, _BEGUN, *_beginning(sequence, len(pieces), self.claim.to_text(), notes)
        )
        with kept_cancellation(), _translated_errors():
            if useless := _useless(sequence, len(pieces), old, halves):
                await self._client.unlink(*useless)
            await self._client.hdel(HALF, *_done(sequence, halves))

    def _heartbeat(self) -> tuple[str, int]:
        return _heartbeat_of(self.claim.holder), round(ALIVE_S * 1000)

    async def _claim_again(self) -> None:
        """Raise the epoch beyond the one that was lost, so that nothing of it can come back."""
        claim = self.claim
        with kept_cancellation(), _translated_errors():
            answer = await self._client.eval(
                *(_CLAIM_AGAIN, 3, OWNER, _TOUCH, ALIVE, claim.epoch, claim.holder.token),
                *(claim.epoch + 1, claim.journal, *self._heartbeat()),
            )
        self.claim = as_claim(_checked(answer), claim.holder)

    async def _eval_with(
        self, payloads: Mapping[PayloadId, bytes], script: str, *values: str | bytes | int
    ) -> Any:
        keys: list[str | bytes] = [TURNS]
        if payloads:
            # Not otherwise: in a cluster they may be on another node.
            keys += [JOURNALS_KEY, *(piece_key(each, 0) for each in payloads)]
        claim = self.claim
        return await self._eval(
            script, keys, claim.journal, claim.epoch, *values, *payloads.values()
        )

    async def _eval(
        self, script: str, keys: Iterable[str | bytes], *values: str | bytes | int
    ) -> Any:
        with kept_cancellation(), _translated_errors():
            arguments = _arguments(self.claim.to_text(), script, keys, values)
            answer = await self._client.eval(*arguments)
        return _checked(answer)

    async def trim(self, up_to: int) -> bool:
        """See JournalWriter. What is lost or another server's is left as it is."""
        try:
            trimmed = await self._eval(_TRIM, (TURNS, SNAPSHOT), up_to, TRIM_TURNS)
        except (JournalLostError, JournalTakenError):
            return False
        # Redis deletes whole nodes of a stream, some hundred turns; the last stays for later.
        return bool(trimmed)

    async def close(self) -> None:
        """See JournalWriter. A Redis that does not answer keeps the claim until it expires."""
        try:
            with kept_cancellation(), suppress(*REDIS_ERRORS):
                await self._client.eval(_RELEASE, 2, OWNER, ALIVE, self.claim.to_text())
        finally:
            await self._client.aclose()


def _arguments(
    owner: str, script: str, keys: Iterable[str | bytes], values: Iterable[str | bytes | int]
) -> tuple[Any, ...]:
    all_keys = (OWNER, _TOUCH, ALIVE, *keys)
    return (script, len(all_keys), *all_keys, owner, *values)


def _checked(answer: list[bytes]) -> Any:
    if answer[0] == b"TAKEN":
        raise JournalTakenError(f"another server ({_holder(answer[1]).shown}) took the journal")
    if answer[0] == b"LOST":
        raise JournalLostError("Redis does not have the journal any more, or an older one")
    return answer[1] if len(answer) > 1 else None


def _sequence_of(entry_id: bytes) -> int:
    return int(entry_id.split(b"-")[0] or 0)


def _heartbeat_of(holder: Holder) -> str:
    return f"{holder.token} {holder.to_text()}"


def _holder(alive: bytes) -> Holder:
    return Holder.from_text(alive.decode(errors="replace").partition(" ")[2])


def _beginning(
    sequence: int, piece_count: int, owner: str, notes: Mapping[str, str]
) -> tuple[str | int, ...]:
    epoch = owner.partition(" ")[0]
    return (sequence, piece_count, epoch, *chain.from_iterable(notes.items()))


def _cut(data: bytes) -> list[bytes]:
    return [
        data[start : start + PIECE_SIZE_BYTES] for start in range(0, len(data), PIECE_SIZE_BYTES)
    ]


def _pieces(sequence: int, piece_count: int) -> list[str]:
    return [_piece(sequence, k) for k in range(piece_count)]


def _useless(
    sequence: int, piece_count: int, old: dict[bytes, bytes], halves: dict[bytes, bytes]
) -> list[str]:
    """Return the pieces of the previous snapshot (`old`, or empty) and of unfinished ones."""
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
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ResponseError | BusyLoadingError):
            answer = shortened(error)
            raise JournalUnavailableError(
                f"the journal in Redis cannot be used: {answer}", answer=answer
            ) from error
        if isinstance(error, REDIS_ERRORS):
            raise JournalUnavailableError(
                f"the journal in Redis cannot be used: {type(error).__name__}: {error}"
            ) from error
