"""Keeping house must not end the house."""

import asyncio
import random
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from breadbox.model.errors import StoreFullError, StoreUnavailableError
from breadbox.stores.base import StoreUsage
from breadbox_server.admission import payloads as store_side
from breadbox_server.admission.payloads import SWEEP_PERIOD_S
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.driver import Driver, DriverLimits
from breadbox_server.metrics.metrics import Metrics
from support.eventually import eventually
from support.fake_custodian import FakeCustodian
from support.manual_timers import ManualTimers


class Failing(FakeCustodian):
    """A store that fails whoever looks after it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error
        self.sweeps = 0
        self.looks = 0

    async def sweep_unannounced(self) -> int:
        self.sweeps += 1
        raise self._error

    def has_swept(self, times: int) -> bool:
        return self.sweeps >= times

    async def usage(self) -> StoreUsage:
        self.looks += 1
        raise self._error


@pytest.mark.parametrize(
    "error",
    [StoreUnavailableError("away"), StoreFullError("no room to delete in: ENOSPC")],
    ids=["away", "full"],
)
async def test_a_store_that_cannot_be_swept_or_measured_is_looked_after_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems need room to delete: a full disk must not end the server as well."""
    monkeypatch.setattr(store_side, "PERIOD_S", 0.0)
    custodian, clock = Failing(error), ManualTimers()
    driver = Driver(
        BufferSet(random.Random(1), BufferConfig()),
        custodian,
        clock=clock,
        metrics=Metrics(CollectorRegistry()),
        limits=DriverLimits(),
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await eventually(lambda: custodian.looks > 0)
        for sweeps in (1, 2):
            clock.advance(SWEEP_PERIOD_S)
            await eventually(partial(custodian.has_swept, sweeps))
        looks = custodian.looks
        await eventually(lambda: custodian.looks > looks)
        running.cancel()
