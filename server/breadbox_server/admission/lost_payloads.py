"""Write again what the store lost and memory has; drop the rest (`DropPayloads`)."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from breadbox.model.errors import StoreError, StoreFullError
from breadbox.model.types import PayloadReference
from breadbox.stores.base import PayloadCustodian
from breadbox_server.admission.payloads import DeletionQueue, RecentPayloads
from breadbox_server.core.model.ids import BufferName, LeaseId, PayloadId
from breadbox_server.core.model.inputs import DropPayloads, Payload
from breadbox_server.journal.durable_core import DurableCore
from breadbox_server.metrics.metrics import Metrics

log = logging.getLogger(__name__)

RETURN_CHECK_S: Final = 2.0
DROP_BATCH: Final = 1024


class LostPayloads:
    """Look for payloads in the store, and repair what it lost."""

    def __init__(
        self,
        core: DurableCore,
        custodian: PayloadCustodian,
        deletions: DeletionQueue,
        recent: RecentPayloads,
        *,
        metrics: Metrics,
        refers_to: Callable[[BufferName, PayloadId], bool],
    ) -> None:
        self._core = core
        self._custodian = custodian
        self._deletions = deletions
        self._recent = recent
        self._metrics = metrics
        self._refers_to = refers_to
        self.suspicion_count = 0
        """Times that a client may have been unable to read a payload, and was not asked."""

    async def drop_missing(self, buffer: BufferName, payloads: Iterable[Payload]) -> int:
        """Ask the store for payloads, drop what refers to lost ones, and return how many it lacked.

        Those in memory for which the store has no room do not count.
        """
        looked_at = self._stored(payloads)
        if not looked_at:
            return 0
        with self._metrics.store_trip("present"):
            missing = await self._custodian.missing(looked_at)
        return await self._mend(buffer, missing)

    async def confirm_again(self, buffer: BufferName, payloads: Iterable[Payload]) -> int:
        """Confirm payloads of a buffer again; drop those that are missing, and return how many."""
        references = self._stored(payloads)
        with self._metrics.store_trip("confirm"):
            answers = await self._custodian.confirm(references)
        missing = [each for each, is_there in zip(references, answers, strict=True) if not is_there]
        return await self._mend(buffer, missing)

    def is_known(self, payload_id: PayloadId) -> bool:
        """Return True if any buffer refers to a payload, or it is on its way out."""
        refers = self._core.buffers.refers_elsewhere(None, payload_id)
        return refers or self._deletions.is_leaving(payload_id)

    async def check_returned(self, buffer: BufferName, lease_ids: Iterable[LeaseId]) -> None:
        """Look for the payloads of leases that are returned, for at most `RETURN_CHECK_S`."""

        def look() -> list[Payload]:
            held = self._core.buffers[buffer]
            found = [payload for each in lease_ids for payload in held.leased_payloads(each)]
            return list({each.payload_id: each for each in found}.values())

        payloads = await self._core.look(look)
        try:
            async with asyncio.timeout(RETURN_CHECK_S):
                if await self.drop_missing(buffer, payloads):
                    self.suspicion_count += 1
        except (TimeoutError, StoreError):
            self.suspicion_count += 1

    def _stored(self, payloads: Iterable[Payload]) -> list[PayloadReference]:
        """Return those that should be in the store by now: some are on their way with a turn."""
        carries = self._core.turns.carries
        return [each for each in payloads if not carries(each.payload_id)]

    async def _mend(self, buffer: BufferName, missing: list[PayloadReference]) -> int:
        """Rewrite what is lost and in memory; drop what refers to the rest; retry without room."""
        bodies = {}
        for each in missing:
            payload_id = each.payload_id
            if self._refers_to(buffer, payload_id) and (body := self._recent.get(payload_id)):
                bodies[payload_id] = body
        put_back_count = 0
        if bodies:
            held = [each for each in missing if each.payload_id in bodies]
            try:
                await self._put_back(buffer, held, bodies)
                put_back_count = len(held)
            except StoreFullError:
                self.suspicion_count += 1
                log.warning(
                    "the store lost %d payloads of buffer %s that are in memory, and has no room "
                    "for them: they are written again once it has",
                    len(held),
                    buffer,
                )
        lost = [each for each in missing if each.payload_id not in bodies]
        return put_back_count + await self._drop_lost(buffer, lost)

    async def _put_back(
        self,
        buffer: BufferName,
        references: list[PayloadReference],
        bodies: Mapping[PayloadId, bytes],
    ) -> None:
        await self._core.turns.ours()
        try:
            with self._deletions.confirming(bodies), self._metrics.store_trip("keep"):
                await self._custodian.keep([(each, bodies[each.payload_id]) for each in references])
        finally:
            # What was let go meanwhile may have been deleted before it was written, also where
            # the store's answer was lost. Not before its end is durable: until then a server that
            # takes over has it.
            let_go = [each for each in references if not self._refers_to(buffer, each.payload_id)]
            self._core.turns.when_settled(partial(self._deletions.put, let_go))
        log.warning(
            "the store lost %d payloads of buffer %s that are in memory: they are written again",
            len(references),
            buffer,
        )

    async def _drop_lost(self, buffer: BufferName, missing: list[PayloadReference]) -> int:
        # Released and deleted while we asked is not lost.
        refers_to = self._core.buffers.refers_to
        payload_ids = [each.payload_id for each in missing]
        lost = tuple([each for each in payload_ids if refers_to(buffer, each)])
        if not lost:
            return 0
        dropped = 0
        for start in range(0, len(lost), DROP_BATCH):
            dropped += await self._core.call(DropPayloads(buffer, lost[start : start + DROP_BATCH]))
        self._metrics.count_lost(buffer, len(lost))
        log.error(
            "the store lost %d payloads of buffer %s: %d fragments dropped",
            len(lost),
            buffer,
            dropped,
        )
        return len(lost)
