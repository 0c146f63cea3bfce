"""Compares the core's books with the payload store, both ways.

A payload that the books know and the store lacks was lost: what refers to it goes (PAYLOAD_LOST).
A payload that the store keeps and no book knows is what a crash left between two steps: confirmed
and not yet admitted, or forgotten and not yet deleted. Its sender may still be about to announce
it, so it is deleted only after a while, if nobody has referred to it by then.
"""

import asyncio
import logging
from collections.abc import Iterable
from itertools import islice
from typing import Final

from breadbox.errors import StoreError
from breadbox.stores.base import PayloadCustodian
from breadbox_server.clock import Clock
from breadbox_server.convert import payload_reference
from breadbox_server.core.errors import BufferNotFoundError
from breadbox_server.core.ids import BufferName, PayloadId
from breadbox_server.core.inputs import DropPayloads, Payload
from breadbox_server.driver import Driver
from breadbox_server.logs import OutageLog
from breadbox_server.metrics import Metrics

log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
"""Between two looks at a few payloads of each buffer."""
LOOK_PAYLOADS: Final = 8
"""Payloads of a buffer looked at: enough to notice a store that was emptied."""
DELETE_BATCH: Final = 256
DROP_BATCH: Final = 1024


class Reconciler:
    """Keeps books and store in agreement: at the start, and while the server runs.

    Args:
        driver: Owner of the books.
        custodian: The store.
        clock: Tells when orphans are old enough.
        metrics: Counts what was lost and what was left over.
        orphan_s: Seconds for which an unknown payload may still be announced.
        deletes_orphans: Whether nobody but this server can know what is in the store.
    """

    def __init__(
        self,
        driver: Driver,
        custodian: PayloadCustodian,
        *,
        clock: Clock,
        metrics: Metrics,
        orphan_s: float,
        deletes_orphans: bool,
    ) -> None:
        self._driver = driver
        self._custodian = custodian
        self._clock = clock
        self._metrics = metrics
        self._orphan_s = orphan_s
        self._deletes_orphans = deletes_orphans
        self._orphans: set[PayloadId] = set()
        self._orphans_due_at = 0.0
        self._is_compared = True
        self._outage = OutageLog(log, "comparing books and store")

    async def begin(self) -> None:
        """Drop, before anybody is served, what was lost while no server ran.

        So nothing of it is ever granted. What is left over takes longer to find, and is looked for
        while the server serves.

        Raises:
            StoreUnavailableError: The store cannot be reached.
        """
        for buffer in self._driver.names():
            await self._drop(buffer, await self._missing(buffer, self._driver.payloads(buffer)))
        self._is_compared = False

    async def reconcile(self) -> None:
        """Compare everything; drop what is lost, remember what is left over.

        Raises:
            StoreUnavailableError: The store cannot be reached.
        """
        # Only what was in the books before the list was begun must be on it: what is confirmed and
        # admitted meanwhile may stand where the list has been read already.
        known_before = {
            buffer: {each.payload_id for each in self._driver.payloads(buffer)}
            for buffer in self._driver.names()
        }
        with self._metrics.store_trip("list"):
            kept = {PayloadId(each) async for each in self._custodian.confirmed()}
        for buffer, of_buffer in known_before.items():
            await self._drop(buffer, of_buffer - kept)
        known = {
            each.payload_id
            for buffer in self._driver.names()
            for each in self._driver.payloads(buffer)
        }
        self._orphans = kept - known if self._deletes_orphans else set()
        self._orphans_due_at = self._clock.now() + self._orphan_s
        self._is_compared = True
        if self._orphans:
            log.info("%d payloads in the store are of no buffer", len(self._orphans))

    async def run(self) -> None:
        """Look at a few payloads now and then, and at all of them when one is missing."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                if not self._is_compared or await self._is_anything_missing():
                    await self.reconcile()
                await self._delete_orphans()
                self._outage.succeeded()
            except StoreError as error:
                self._outage.failed(error)
            except BufferNotFoundError as error:
                log.debug("%s went while it was compared; trying again", error.buffer)

    async def _is_anything_missing(self) -> bool:
        """Look at a few payloads of each buffer."""
        for buffer in self._driver.names():
            if await self._missing(buffer, islice(self._driver.payloads(buffer), LOOK_PAYLOADS)):
                return True
        return False

    async def _missing(self, buffer: BufferName, payloads: Iterable[Payload]) -> list[PayloadId]:
        """Those that the store lacks and the buffer still refers to."""
        looked_at = [payload_reference(payload) for payload in payloads]
        if not looked_at:
            return []
        with self._metrics.store_trip("present"):
            missing = await self._custodian.missing(looked_at)
        # Released and deleted while we asked is not lost.
        return [
            PayloadId(each.payload_id)
            for each in missing
            if self._driver.refers_to(buffer, PayloadId(each.payload_id))
        ]

    async def _drop(self, buffer: BufferName, missing: Iterable[PayloadId]) -> None:
        # What was released and deleted while the list was read is not lost.
        missing = tuple(each for each in missing if self._driver.refers_to(buffer, each))
        if not missing:
            return
        dropped = 0
        for start in range(0, len(missing), DROP_BATCH):
            dropped += await self._driver.apply(
                DropPayloads(buffer, missing[start : start + DROP_BATCH])
            )
        self._metrics.count_lost(buffer, len(missing))
        log.error(
            "the store lost %d payloads of buffer %s: %d fragments dropped",
            len(missing),
            buffer,
            dropped,
        )

    async def _delete_orphans(self) -> None:
        if not self._orphans or self._clock.now() < self._orphans_due_at:
            return
        names = self._driver.names()
        batch = list(islice(self._orphans, DELETE_BATCH))
        unknown = [
            payload_id
            for payload_id in batch
            if not any(self._driver.refers_to(name, payload_id) for name in names)
        ]
        await self._driver.deletions.delete_orphans(unknown)
        self._orphans.difference_update(batch)
