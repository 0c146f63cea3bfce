"""What is done every second beside serving: gauges, and a look after the payload store."""

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from breadbox.errors import StoreError
from breadbox.stores.base import PayloadCustodian
from breadbox_server.clock import Clock
from breadbox_server.metrics import Metrics
from breadbox_server.waiting import waiting_for

if TYPE_CHECKING:
    from breadbox_server.driver import Driver

log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
SWEEP_PERIOD_S: Final = 60.0


class Housekeeping:
    """Keeps a driver's house.

    Args:
        driver: Whose.
        custodian: The payload store.
        clock: Tells when the store is to be swept.
        metrics: Shows how things stand.
    """

    def __init__(
        self, driver: "Driver", custodian: PayloadCustodian, *, clock: Clock, metrics: Metrics
    ) -> None:
        self._driver = driver
        self._custodian = custodian
        self._clock = clock
        self._metrics = metrics
        self._silent_since: float | None = None
        """Since when the store owes an answer, on the loop's clock; None: it gave the last one."""

    @property
    def store_away_s(self) -> float:
        """Seconds for which the store has owed an answer."""
        since = self._silent_since
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    async def keep_house(self) -> None:
        """Refresh gauges, and sweep what was written and never announced."""
        sweep_at = self._clock.now() + SWEEP_PERIOD_S
        while True:
            self.refresh_gauges()
            self._driver.tidy()
            await asyncio.sleep(PERIOD_S)
            if self._clock.now() >= sweep_at:
                sweep_at = self._clock.now() + SWEEP_PERIOD_S
                await self._sweep()

    async def watch_store(self) -> None:
        """Ask the store again and again how full it is, and see whether it answers."""
        while True:
            await self._refresh_usage()
            await asyncio.sleep(PERIOD_S)

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
            # Counted as a store error; whoever needs the store is told by its own call.
            log.debug("the store does not say how full it is")

    def refresh_gauges(self) -> None:
        """Show in the metrics how every buffer stands."""
        driver = self._driver
        for name in driver.names():
            seen = driver.describe(name)
            values = {
                "chunks": seen.chunk_count,
                "retained_chunks": seen.retained_count,
                "open_chunks": seen.open_chunk_count,
                "held_fragments": seen.fragment_count,
                "capacity_chunks": seen.config.capacity_chunks,
                "capacity_bytes": seen.config.capacity_bytes,
                "payload_bytes": seen.payload_bytes,
                "leases": seen.lease_count,
                "workers": seen.worker_count,
            }
            version = seen.model.model_version
            self._metrics.set_gauges(name, values, -1 if version is None else version)
            self._metrics.show_subscriptions(name, driver.subscriptions(name))
            self._metrics.set_waiters(name, seen.waiter_count, waiting_for(seen))
        self._metrics.watchers.set(driver.watcher_count)
        self._metrics.readers.set(driver.reader_count)
        self._metrics.journal_lag.set(driver.turns.lag_s)
        for place, away_s in driver.away_s().items():
            self._metrics.silence.labels(place.replace(" ", "_")).set(away_s)
