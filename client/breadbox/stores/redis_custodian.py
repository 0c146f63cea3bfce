"""Payloads in Redis, as the server sees them: confirm, delete and count, on the event loop."""

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final

from breadbox.stores.keys import (
    KEY_PATTERN,
    is_payload_id,
    is_sound,
    payload_id_of_key,
    piece_key,
    piece_keys,
)
from breadbox.stores.redis_wire import translated_errors
from breadbox.types import PayloadReference

_SCAN_COUNT: Final = 1000
"""Keys that Redis looks at per SCAN call: short enough not to hold up other clients."""


class RedisCustodian:
    """A `PayloadCustodian` in Redis. See `breadbox.stores.base` for the contract."""

    def __init__(self, client: Any) -> None:
        """Use `client`, an asyncio redis-py client (Redis or RedisCluster); closed with this."""
        self._client = client

    async def ping(self) -> None:
        """See PayloadCustodian."""
        with translated_errors():
            await self._client.ping()

    async def confirm(self, references: Sequence[PayloadReference]) -> list[bool]:
        """See PayloadCustodian.

        PERSIST answers 1 where it removed an expiry, and 0 both for a key that has none and for one
        that is not there. Zeros are looked up in a second round trip, which only repeated confirms
        and lost payloads pay for.
        """
        keys = [piece_keys(reference) if is_sound(reference) else [] for reference in references]
        with translated_errors():
            persisted = await self._ask("persist", [key for each in keys for key in each])
            confirmed, position = [], 0
            for each in keys:
                confirmed.append(all(persisted[position : position + len(each)]) and bool(each))
                position += len(each)
        doubtful = [position for position, is_there in enumerate(confirmed) if not is_there]
        if doubtful:
            present = await self.present([references[position] for position in doubtful])
            for position, is_there in zip(doubtful, present, strict=True):
                confirmed[position] = is_there
        return confirmed

    async def delete(self, references: Sequence[PayloadReference]) -> None:
        """See PayloadCustodian."""
        keys = [key for each in references if is_sound(each) for key in piece_keys(each)]
        with translated_errors():
            await self._ask("unlink", keys)

    async def present(self, references: Sequence[PayloadReference]) -> list[bool]:
        """See PayloadCustodian."""
        keys = [piece_keys(reference) if is_sound(reference) else [] for reference in references]
        with translated_errors():
            found = iter(await self._ask("exists", [key for each in keys for key in each]))
        # A list, not a generator: all() must not leave answers behind for the next payload.
        return [bool(each) and all([next(found) for _ in each]) for each in keys]

    async def confirmed(self) -> AsyncIterator[str]:
        """See PayloadCustodian."""
        with translated_errors():
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
        """See PayloadCustodian. Pieces are deleted from 0 on until one is not there."""
        payload_ids = [each for each in payload_ids if is_payload_id(each)]
        piece = 0
        with translated_errors():
            while payload_ids:
                # A payload of n pieces takes n round trips, shared by all: this is for sweeping.
                keys = [piece_key(payload_id, piece) for payload_id in payload_ids]
                deleted = await self._ask("unlink", keys)
                payload_ids = [
                    each for each, count in zip(payload_ids, deleted, strict=True) if count
                ]
                piece += 1

    async def sweep_unannounced(self) -> int:
        """See PayloadCustodian. Redis expires them by itself: nothing to do."""
        return 0

    async def close(self) -> None:
        """See PayloadCustodian."""
        await self._client.aclose()

    async def _ask(self, command: str, keys: Sequence[bytes]) -> list[int]:
        """Send one command per key in one round trip; the integer replies, in order."""
        if not keys:
            return []
        pipeline = self._client.pipeline(transaction=False)
        method = getattr(pipeline, command)
        for key in keys:
            method(key)
        return [int(reply) for reply in await pipeline.execute()]

    async def _without_expiry(self, keys: Sequence[bytes]) -> list[str]:
        ttls = await self._ask("pttl", keys)
        found = [
            payload_id_of_key(key) for key, ttl_ms in zip(keys, ttls, strict=True) if ttl_ms == -1
        ]
        return [payload_id for payload_id in found if payload_id is not None]
