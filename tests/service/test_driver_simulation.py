"""The driver under seeded random starts, cancels, releases and ticks: nothing is ever lost.

Every step lets the loop turn a random number of times, so that cancels fall before, in and after
the tick of a grant. At the end every chunk that was put in is there again, and nobody is counted.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.errors import DomainError
from breadbox_server.core.model.events import FetchGranted, RequestRefused
from breadbox_server.core.model.ids import BufferName, RequestId, SessionId
from breadbox_server.core.model.inputs import Fetch, ReleaseLease, ReleaseMode, StartSession
from breadbox_server.driver import Driver, DriverLimits
from breadbox_server.journal.durable_core import DurableCore, Outcome
from breadbox_server.metrics.metrics import Metrics
from support.appends import append
from support.fake_custodian import FakeCustodian
from support.manual_timers import ManualTimers
from support.metadata import written_fragment

BUFFER = BufferName("default")
CHUNKS = 6
STEPS = 60


class ForgetfulCore(DurableCore):
    """The naive waiter: a grant that lands in the tick of the cancel is nobody's."""

    def _give_back(self, outcome: Outcome | RequestRefused) -> None:
        pass


@asynccontextmanager
async def running_driver(
    kind: type[DurableCore], seed: int
) -> AsyncIterator[tuple[Driver, BufferSet, ManualTimers, asyncio.TaskGroup]]:
    clock = ManualTimers()
    custodian = FakeCustodian()
    books = BufferSet(random.Random(seed), BufferConfig(uses_max=1, lease_s=3600.0))
    driver = Driver(
        books,
        custodian,
        clock=clock,
        metrics=Metrics(CollectorRegistry()),
        limits=DriverLimits(),
    )
    driver.core.__class__ = kind
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await driver.core.call(StartSession(BUFFER, SessionId("run")))
        fragments = [written_fragment(custodian, index, "run") for index in range(CHUNKS)]
        await append(driver, BUFFER, fragments)
        yield driver, books, clock, group
        running.cancel()


class Simulation:
    """Random callers on one driver."""

    def __init__(
        self, driver: Driver, clock: ManualTimers, group: asyncio.TaskGroup, seed: int
    ) -> None:
        self.driver = driver
        self.clock = clock
        self.group = group
        self.random = random.Random(seed)
        self.tasks: list[asyncio.Task[None]] = []
        self.held: list[FetchGranted] = []
        self.request_count = 0

    async def fetch(self, wait_s: float) -> None:
        self.request_count += 1
        try:
            outcome = await self.driver.fetch(
                Fetch(
                    buffer=BUFFER,
                    request_id=RequestId(f"r{self.request_count}"),
                    fragment_count=self.random.randint(1, CHUNKS),
                    deadline_at=self.driver.core.clock.now() + wait_s,
                )
            )
        except DomainError:
            return
        if isinstance(outcome, FetchGranted):
            self.held.append(outcome)

    async def release_one(self) -> None:
        grant = self.held.pop(self.random.randrange(len(self.held)))
        await self.driver.core.call(ReleaseLease(BUFFER, grant.lease_id, ReleaseMode.RETURNED))

    async def step(self) -> None:
        match self.random.choice(("fetch", "fetch", "cancel", "cancel", "release", "tick")):
            case "fetch":
                wait_s = self.random.choice((0.0, 5.0, 50.0))
                self.tasks.append(self.group.create_task(self.fetch(wait_s)))
            case "cancel" if living := [task for task in self.tasks if not task.done()]:
                self.random.choice(living).cancel()
            case "release" if self.held:
                # Not awaited to its end before the next step: its grants and a cancel may meet.
                await self.release_one()
            case "tick":
                self.clock.advance(self.random.choice((0.0, 1.0, 10.0)))
        for _ in range(self.random.randint(0, 3)):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """End every caller and give back everything that a caller was handed."""
        for task in self.tasks:
            task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        while self.held:
            await self.release_one()


async def lost_chunks(kind: type[DurableCore], seed: int) -> int:
    """Run one simulation; how many chunks are neither held nor leased to anybody we know."""
    async with running_driver(kind, seed) as (driver, books, clock, group):
        simulation = Simulation(driver, clock, group, seed)
        for _ in range(STEPS):
            await simulation.step()
        await simulation.settle()
        seen = driver.core.describe(BUFFER)
        assert (0, 0) == (driver.core.waiting_count, seen.waiter_count), f"seed {seed}"
        books.check_invariants()
        return CHUNKS - seen.chunk_count


@pytest.mark.parametrize("seed", range(60))
async def test_callers_that_come_and_go_lose_no_chunk(seed: int) -> None:
    assert 0 == await lost_chunks(DurableCore, seed), f"seed {seed}"


async def test_the_simulation_catches_a_driver_that_forgets_to_give_back() -> None:
    losses = [await lost_chunks(ForgetfulCore, seed) for seed in range(60)]
    assert any(losses), "seeds 0 to 59 found nothing"
