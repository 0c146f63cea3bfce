"""The server's parts without its port: a driver at work, beside a fake store and a manual clock."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.events import FetchGranted, WaitElapsed
from breadbox_server.core.model.ids import BufferName, RequestId, SessionId
from breadbox_server.core.model.inputs import Fetch, ReleaseLease, ReleaseMode, StartSession
from breadbox_server.driver import Driver, DriverLimits
from breadbox_server.metrics.metrics import Metrics
from support.fake_custodian import FakeCustodian
from support.manual_timers import ManualTimers

BUFFER = BufferName("default")
PASSES = 40
"""Of the loop, after which everything that needs no time has happened."""


@dataclass
class Driven:
    """A driver, and the levers a test pulls."""

    driver: Driver
    custodian: FakeCustodian
    clock: ManualTimers
    registry: CollectorRegistry
    request_count: int = 0

    async def settle(self) -> None:
        """Return once all that is not waiting for time, room or data is done."""
        for _ in range(PASSES):
            await asyncio.sleep(0)

    async def fetch(self, count: int, *, wait_s: float = 0.0) -> FetchGranted | WaitElapsed:
        """Fetch as one rank of one, under a request of its own."""
        self.request_count += 1
        return await self.driver.fetch(
            Fetch(
                buffer=BUFFER,
                request_id=RequestId(f"r{self.request_count}"),
                fragment_count=count,
                deadline_at=self.driver.core.clock.now() + wait_s,
            )
        )

    async def consume(self, count: int) -> None:
        """Use up so many chunks of one fragment, and give their places free."""
        granted = await self.fetch(count)
        assert isinstance(granted, FetchGranted)
        await self.driver.release([ReleaseLease(BUFFER, granted.lease_id, ReleaseMode.CONSUMED)])

    def sample(self, name: str, **labels: str) -> float:
        """The value of a series, 0 where there is none."""
        return self.registry.get_sample_value(f"breadbox_{name}", labels) or 0.0


@asynccontextmanager
async def driven(
    config: BufferConfig | None = None,
    *,
    custodian: FakeCustodian | None = None,
    seed: int = 0,
    **limits: Any,
) -> AsyncIterator[Driven]:
    """Run a driver inside the block, in session "run"; time stands still unless the test moves it.

    What the block leaves waiting is answered, as at the end of a server.
    """
    custodian = custodian or FakeCustodian()
    clock = ManualTimers()
    registry = CollectorRegistry()
    driver = Driver(
        BufferSet(random.Random(seed), config or BufferConfig()),
        custodian,
        clock=clock,
        metrics=Metrics(registry),
        limits=DriverLimits(**limits),
    )
    running = asyncio.get_running_loop().create_task(driver.run())
    try:
        await driver.core.call(StartSession(BUFFER, SessionId("run")))
        it = Driven(driver, custodian, clock, registry)
        yield it
        driver.drain()
        await it.settle()
    finally:
        running.cancel()
        await asyncio.wait([running])
