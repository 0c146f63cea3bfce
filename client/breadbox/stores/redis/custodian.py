"""Payloads in Redis, as the server sees them, on its event loop."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final

import redis

from breadbox.model.types import PayloadReference
from breadbox.stores.base import (
    Confirmation,
    Custody,
    StoreSharedError,
    StoreTakenError,
    StoreUsage,
)
from breadbox.stores.keys import (
    JOURNALS_KEY,
    JOURNALS_PATTERN,
    KEY_PATTERN,
    is_payload_id,
    is_sound,
    journals_key,
    payload_id_of_key,
    piece_key,
    piece_keys,
)
from breadbox.stores.redis.errors import kept_cancellation, translated_errors

_SCAN_COUNT: Final = 1000
"""Keys per SCAN call: few enough not to hold up other clients."""

_KEYS_PER_SCRIPT: Final = 1000
"""Keys per script call: well under a millisecond."""

_LOOP: Final = """
local flags = {}
for i = 2, #KEYS do local key = KEYS[i]; flags[i - 1] = %s end
return table.concat(flags)
"""
_THERE: Final = ord("1")
_OURS: Final = """
local ours = tonumber(ARGV[2] or '0')
if ours > 0 then
  local known = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
  if known > ours then return 'TAKEN' end
  if known < ours then
    redis.call('HDEL', KEYS[1], '')
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  end
end
"""
"""The epoch check, with which every script that confirms or deletes begins: KEYS[1] is the hash of
journals. The first script of an epoch raises it here, on each node and slot. The HDEL of a field
that is never there counts as a write, after which Redis lets the script go on at maxmemory."""
_ALONE: Final = (
    _OURS
    + """
if ARGV[1] then
  for _, journal in ipairs(redis.call('HKEYS', KEYS[1])) do
    if journal ~= ARGV[1] then return 'SHARED' end
  end
end
"""
)
_TAKE: Final = _OURS + "return '1'"
_PRIMARY: Final = "redis.call('HDEL', KEYS[1], '')"
"""Changes nothing, and a replica refuses it: what that lacks may be on its way to it."""
_LENGTHS: Final = (
    _OURS
    + f"""
local function differs(key, expected)
  local length = redis.pcall('STRLEN', key)
  if length == expected then return nil end
  {_PRIMARY}
  if redis.call('EXISTS', key) == 0 then return '0' end
  return '2'
end
"""
)
"""Returns why a key is not to be kept, or nil; STRLEN's error must not end the script."""
_CONFIRM: Final = (
    _LENGTHS
    + """
local flags = {}
for expected in string.gmatch(ARGV[3], '%d+') do
  local key = KEYS[#flags + 2]
  local difference = differs(key, tonumber(expected))
  if not difference then redis.call('PERSIST', key) end
  flags[#flags + 1] = difference or '1'
end
return table.concat(flags)
"""
)
"""For payloads of one piece; one argument has all sizes, for the loop's sake."""
_CONFIRM_WHOLE: Final = (
    _LENGTHS
    + """
local size, piece_size = string.match(ARGV[3], '(%d+) (%d+)')
local found = '1'
for i = 2, #KEYS do
  local expected = math.min(piece_size, size - (i - 2) * piece_size)
  local difference = differs(KEYS[i], expected)
  if difference == '0' then return '0' end
  found = difference or found
end
if found == '1' then
  for i = 2, #KEYS do redis.call('PERSIST', KEYS[i]) end
end
return found
"""
)
"""For all pieces of one payload: nobody would ever delete some of them."""
_KEEP: Final = (
    _OURS
    + """
for i = 2, #KEYS do redis.call('SET', KEYS[i], ARGV[i + 1]) end
return '1'
"""
)
"""A full Redis refuses the first SET, before anything is written."""
_EXISTS: Final = f"if ARGV[1] then {_PRIMARY} end\n" + _LOOP % "redis.call('EXISTS', key)"
_UNLINK: Final = _OURS + _LOOP % "redis.call('UNLINK', key)"
_UNLINK_ALONE: Final = _ALONE + _LOOP % "redis.call('UNLINK', key)"
"""One reply with a "1" or "0" per key: parsing one for each would cost the loop most."""
_EXISTS_BY_ID: Final = (
    f"{_PRIMARY}\n"
    + """
local flags = {}
for id in string.gmatch(ARGV[1], '%x+') do
  flags[#flags + 1] = redis.call('EXISTS', 'breadbox:{' .. id .. '}:0')
end
return table.concat(flags)
"""
)
"""For payloads of one piece, ids joined by spaces: one argument, for a quick restart."""
_CONFIRMATIONS: Final = {b"": Confirmation.MISSING} | {
    str(each.value).encode(): each for each in Confirmation
}
"""What the scripts that confirm answer; nothing is asked for a reference that is out of bounds."""


@contextmanager
def _answers() -> Iterator[None]:
    """Translate the errors of a trip to Redis, and lose no cancellation."""
    with kept_cancellation(), translated_errors():
        yield


_CAPACITY_SHARE: Final = 0.7
"""Share of maxmemory that buffers can be promised; keys, journal and writes need the rest."""


class RedisCustodian:
    """A `PayloadCustodian` in Redis. See `breadbox.stores.base` for the contract."""

    def __init__(self, client: Any, *, is_cluster: bool = False) -> None:
        self._client = client
        self._is_cluster = is_cluster
        """Keys may be on different nodes: one script call for each payload, not for all."""
        self._custody: Custody | None = None

    async def take(self, custody: Custody) -> None:
        """Slots of a cluster get word with the first payload in them."""
        self._custody = custody
        with _answers():
            _checked(await self._eval(self._client, _TAKE, []))

    async def journals(self) -> set[str]:
        with _answers():
            return {journal async for _, journals in self._journals() for journal in journals}

    async def forget_other_journals(self) -> None:
        with _answers():
            async for key, journals in self._journals():
                if self._custody is not None:
                    journals.discard(self._custody.journal)
                if journals:
                    await self._client.hdel(key, *journals)

    async def _journals(self) -> AsyncIterator[tuple[bytes, set[str]]]:
        keys = [JOURNALS_KEY]
        if self._is_cluster:
            keys = [key async for key in self._client.scan_iter(JOURNALS_PATTERN, _SCAN_COUNT)]
        for key in keys:
            yield key, {each.decode() for each in await self._client.hkeys(key)}

    async def ping(self) -> None:
        with _answers():
            await self._client.ping()

    async def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        groups = [piece_keys(each) if is_sound(each) else [] for each in references]
        flags = [b""] * len(groups)
        with _answers():
            if any(len(keys) > 1 for keys in groups):
                several = [keys if len(keys) > 1 else [] for keys in groups]
                sizes = [f"{each.size_bytes} {each.piece_size_bytes}" for each in references]
                flags = await self._ask_each(_CONFIRM_WHOLE, several, sizes)
                groups = [keys if len(keys) == 1 else [] for keys in groups]
            if any(groups):
                sizes = [str(each.size_bytes) for each in references]
                single = await self._ask(_CONFIRM, groups, sizes)
                flags = [one or other for one, other in zip(single, flags, strict=True)]
        return [_CONFIRMATIONS[each] for each in flags]

    async def keep(self, payloads: Sequence[tuple[PayloadReference, bytes]]) -> None:
        keys = [piece_key(reference.payload_id, 0) for reference, _ in payloads]
        bodies = [body for _, body in payloads]
        count = 1 if self._is_cluster else _KEYS_PER_SCRIPT
        with _answers():
            await self._run(
                _KEEP,
                [
                    (keys[at : at + count], bodies[at : at + count])
                    for at in range(0, len(keys), count)
                ],
            )

    async def read(self, references: Sequence[PayloadReference]) -> list[bytes]:
        keys = [piece_key(each.payload_id, 0) if is_sound(each) else b"" for each in references]
        with _answers():
            if self._is_cluster:
                pipeline = self._pipeline()
                for key in keys:
                    pipeline.get(key)
                found = await pipeline.execute()
            else:
                found = await self._client.mget(keys) if keys else []
        return [
            body if body is not None and len(body) == each.size_bytes else b""
            for each, body in zip(references, found, strict=True)
        ]

    async def delete(self, references: Sequence[PayloadReference]) -> None:
        with _answers():
            await self._ask(_UNLINK, [piece_keys(each) for each in references if is_sound(each)])

    async def present(self, references: Sequence[PayloadReference]) -> list[bool]:
        keys = [piece_keys(each) if is_sound(each) else [] for each in references]
        with _answers():
            flags = await self._ask(_EXISTS, keys)
        return [bool(each) and b"0" not in each for each in flags]

    async def missing(self, references: Sequence[PayloadReference]) -> list[PayloadReference]:
        missing: list[PayloadReference] = []
        single: list[PayloadReference] = []
        others: list[PayloadReference] = []
        for each in references:
            is_single = is_payload_id(each.payload_id) and not (
                self._is_cluster or 0 < each.piece_size_bytes < each.size_bytes
            )
            (single if is_single else others).append(each)
        if single:
            pipeline = self._pipeline()
            for at in range(0, len(single), _KEYS_PER_SCRIPT):
                ids = " ".join([each.payload_id for each in single[at : at + _KEYS_PER_SCRIPT]])
                pipeline.eval(_EXISTS_BY_ID, 1, JOURNALS_KEY, ids)
            with _answers():
                flags = b"".join(await pipeline.execute())
            missing = [each for each, flag in zip(single, flags, strict=True) if flag != _THERE]
        there = await self.present(others)
        missing += [each for each, is_there in zip(others, there, strict=True) if not is_there]
        return missing

    async def confirmed(self) -> AsyncIterator[str]:
        with _answers():
            batch: list[bytes] = []
            async for key in self._client.scan_iter(match=KEY_PATTERN, count=_SCAN_COUNT):
                batch.append(key)
                if len(batch) == _SCAN_COUNT:
                    for payload_id in await self._without_expiry(batch):
                        yield payload_id
                    batch = []
            for payload_id in await self._without_expiry(batch):
                yield payload_id

    async def delete_ids(self, payload_ids: Iterable[str]) -> None:
        """Pieces are deleted from 0 on until one is not there."""
        payload_ids = [each for each in payload_ids if is_payload_id(each)]
        piece = 0
        with _answers():
            while payload_ids:
                # A payload of n pieces takes n round trips, shared by all: this is for sweeping.
                keys = [[piece_key(payload_id, piece)] for payload_id in payload_ids]
                deleted = await self._ask(_UNLINK_ALONE, keys)
                payload_ids = [
                    each for each, flags in zip(payload_ids, deleted, strict=True) if flags == b"1"
                ]
                piece += 1

    async def sweep_unannounced(self) -> int:
        """Redis expires them by itself: nothing to do."""
        return 0

    async def usage(self) -> StoreUsage:
        """Return what Redis holds and its limit, of a cluster of all primaries together."""
        nodes = await self._info("memory")
        limits = [int(node["maxmemory"]) for node in nodes]
        limit_bytes = sum(limits) if all(limits) else 0
        return StoreUsage(
            used_bytes=sum(int(node["used_memory"]) for node in nodes),
            limit_bytes=limit_bytes,
            capacity_bytes_max=int(limit_bytes * _CAPACITY_SHARE),
        )

    async def incarnation(self) -> str:
        """Every start of a Redis is another; of a cluster, of a primary."""
        return " ".join(sorted(str(node["run_id"]) for node in await self._info("server")))

    async def concerns(self) -> tuple[str, ...]:
        """Return what is wrong with the settings of Redis, or of a cluster's primaries."""
        found = []
        policies = {
            str(node.get("maxmemory_policy"))
            for node in await self._info("memory")
            if int(node["maxmemory"])
        }
        if others := sorted(policies - {"noeviction"}):
            found.append(
                f"Redis evicts any key at its maxmemory, since maxmemory-policy is "
                f"{', '.join(others)}; set it to noeviction"
            )
        if any(not int(node.get("aof_enabled", 0)) for node in await self._info("persistence")):
            found.append(
                "Redis forgets its newest writes when it restarts, since appendonly is no; set it "
                "to yes where payloads, and the journal beside them, have to survive that"
            )
        else:
            found += await self._reader_concerns()
        return tuple(found)

    async def _reader_concerns(self) -> list[str]:
        """Return what the user `default` lacks, as which Redis reads its append-only file."""
        unseen = "cannot be seen, since this server's user lacks +acl|getuser"
        try:
            rights = await self._ask_primaries("ACL GETUSER", "default")
        except redis.exceptions.NoPermissionError:
            lacking = unseen
        except redis.exceptions.ResponseError:
            return []  # Older than its users, or a service that hides them.
        else:
            if all("+@all" in _rules(each) and "~*" in _rules(each) for each in rights):
                return []
            lacking = "may not do everything"
        return [
            f"Redis reads its append-only file as its user `default`, which {lacking}, and drops "
            "what that user may not write: give it the rights `~* &* +@all`, also where it is off "
            "(`breadbox secrets` and a restart of Redis do, where that made the users)"
        ]

    async def _info(self, section: str) -> list[Mapping[str, Any]]:
        with _answers():
            return await self._ask_primaries("INFO", section)

    async def _ask_primaries(self, *command: str) -> list[Mapping[str, Any]]:
        if not self._is_cluster:
            return [await self._client.execute_command(*command)]
        found = await self._client.execute_command(*command, target_nodes="primaries")
        # With a single primary the client gives its answer as it is.
        has_nodes = all(isinstance(each, Mapping) for each in found.values())
        return list(found.values()) if has_nodes else [found]

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(
        self, script: str, groups: Sequence[Sequence[bytes]], sizes: Sequence[str] = ()
    ) -> list[bytes]:
        if self._is_cluster:
            return await self._ask_each(script, groups, sizes)
        keys = [key for group in groups for key in group]
        values = [size for size, group in zip(sizes, groups, strict=True) if group] if sizes else []
        calls = [
            (
                keys[at : at + _KEYS_PER_SCRIPT],
                [" ".join(values[at : at + _KEYS_PER_SCRIPT])] if values else (),
            )
            for at in range(0, len(keys), _KEYS_PER_SCRIPT)
        ]
        flags = b"".join(await self._run(script, calls))
        ends = list(accumulate(len(group) for group in groups))
        return [flags[end - len(group) : end] for group, end in zip(groups, ends, strict=True)]

    async def _ask_each(
        self, script: str, groups: Sequence[Sequence[bytes]], sizes: Sequence[str] = ()
    ) -> list[bytes]:
        calls = [
            (keys, [size] if size else ())
            for keys, size in zip(groups, sizes or [""] * len(groups), strict=True)
            if keys
        ]
        answers = iter(await self._run(script, calls))
        return [next(answers) if keys else b"" for keys in groups]

    async def _run(
        self, script: str, calls: Sequence[tuple[Sequence[bytes], Sequence[str | bytes]]]
    ) -> list[bytes]:
        if len(calls) == 1:
            return [_checked(await self._eval(self._client, script, *calls[0]))]
        pipeline = self._pipeline()
        for each in calls:
            self._eval(pipeline, script, *each)
        return list(map(_checked, await pipeline.execute() if calls else []))

    def _pipeline(self) -> Any:
        if self._is_cluster:
            return self._client.pipeline()
        return self._client.pipeline(transaction=False)

    def _eval(
        self, client: Any, script: str, keys: Sequence[bytes], sizes: Sequence[str | bytes] = ()
    ) -> Any:
        journals = journals_key(keys[0]) if self._is_cluster and keys else JOURNALS_KEY
        custody = self._custody
        values: tuple[object, ...] = () if custody is None else (custody.journal, custody.epoch)
        if sizes:
            values = (*(values or ("", 0)), *sizes)
        return client.eval(script, 1 + len(keys), journals, *keys, *values)

    async def _without_expiry(self, keys: Sequence[bytes]) -> list[str]:
        pipeline = self._pipeline()
        for key in keys:
            pipeline.pttl(key)
        ttls = await pipeline.execute() if keys else []
        found = [
            payload_id_of_key(key) for key, ttl_ms in zip(keys, ttls, strict=True) if ttl_ms == -1
        ]
        return [payload_id for payload_id in found if payload_id is not None]


def _rules(user: Mapping[str, Any]) -> set[str]:
    keys = [key.decode() if isinstance(key, bytes) else key for key in user["keys"]]
    return {f"~{key.removeprefix('~')}" for key in keys} | {*user["categories"], *user["commands"]}


def _checked(answer: bytes) -> bytes:
    if answer == b"TAKEN":
        raise StoreTakenError
    if answer == b"SHARED":
        raise StoreSharedError
    return answer
