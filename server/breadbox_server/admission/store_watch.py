"""Watches the payload store: how full it is, whether it answers, what nobody announced."""

import asyncio
import logging
from typing import Final

from breadbox.model.errors import StoreError
from breadbox.stores.base import PayloadCustodian
from breadbox_server.base.clock import Clock
from breadbox_server.metrics.metrics import Metrics

log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
SWEEP_PERIOD_S: Final = 60.0


class StoreWatch:
    """Asks a payload store every second how full it is, and sweeps it every minute.

    Args:
        custodian: The payload store.
        clock: Says when the next sweep is due.
        metrics: Shows usage, round trips and errors.
    """

    def __init__(self, custodian: PayloadCustodian, *, clock: Clock, metrics: Metrics) -> None:
        self._custodian = custodian
        self._clock = clock
        self._metrics = metrics
        self._silent_since: float | None = None
        """Instant since when the store owes an answer, on the loop's clock, or None."""

    @property
    def away_s(self) -> float:
        """Seconds for which the store has owed an answer."""
        since = self._silent_since
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    async def watch_usage(self) -> None:
        """Ask the store again and again how full it is, and notice when it does not answer."""
        while True:
            await self._refresh_usage()
            await asyncio.sleep(PERIOD_S)

    async def sweep(self) -> None:
        """Delete, once a minute, payloads that were written and never announced."""
        due_at = self._clock.now() + SWEEP_PERIOD_S
        while True:
            await asyncio.sleep(PERIOD_S)
            if self._clock.now() >= due_at:
                due_at = self._clock.now() + SWEEP_PERIOD_S
                await self._sweep()

    async def _sweep(self) -> None:
        try:
            with self._metrics.store_trip("sweep"):
                count = await self._custodian.sweep_unannounced()
        except StoreError as error:
            log.warning("unannounced payloads could not be swept: %s", type(error).__name__)
            return
        if count:
            log.info("deleted %d payloads that were never announced", count)

    async def _refresh_usage(self) -> None:
        if self._silent_since is None:
            self._silent_since = asyncio.get_running_loop().time()
        try:
            with self._metrics.store_trip("usage"):
                self._metrics.set_store_usage(await self._custodian.usage())
            self._silent_since = None
        except StoreError:
            # Counted as a store error; a call that needs the store gets the error itself.
            log.debug("the store does not say how full it is")
