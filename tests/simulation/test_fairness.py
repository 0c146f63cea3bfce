"""Room in a full buffer goes to who has waited longest: in simulated time, with the real driver."""

import asyncio
import random
from collections import Counter

import pytest

from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig, FullPolicy
from breadbox_server.core.model.events import FetchGranted
from breadbox_server.core.model.ids import BufferName, RequestId, SessionId
from breadbox_server.core.model.inputs import Fetch, ReleaseLease, ReleaseMode, StartSession
from breadbox_server.driver import Driver, DriverLimits
from simulation.loop import SimulatedClock, run_simulated
from simulation.server import METRICS
from support.appends import append
from support.fake_custodian import FakeCustodian
from support.metadata import written_fragment

BUFFER = BufferName("default")
PRODUCERS = 16
RETRY_S = 0.25
CHUNKS_TAKEN = 960


class World:
    """Sixteen producers that always have something, and a learner that takes less than that."""

    def __init__(self, seed: int, *, wait_s: float, take: int, hold_s: float) -> None:
        self.rng = random.Random(seed)
        self.wait_s = wait_s
        self.take = take
        self.hold_s = hold_s
        self.served: Counter[int] = Counter()
        self.slowest_s = 0.0
        self.custodian = FakeCustodian()

    async def produce(self, driver: Driver, producer: int) -> None:
        rng = random.Random(f"{self.rng.random()}/{producer}")
        loop = asyncio.get_running_loop()
        for index in range(CHUNKS_TAKEN):
            fragment = written_fragment(self.custodian, index, "run", f"producer-{producer}")
            asked_at = loop.time()
            while True:
                await asyncio.sleep(rng.uniform(0.001, 0.003))
                [answer] = await append(driver, BUFFER, [fragment], wait_s=self.wait_s)
                assert answer is not None
                if not answer.outcome.asks_to_wait:
                    break
                if not self.wait_s:
                    await asyncio.sleep(RETRY_S * (1.0 + rng.random()))
            self.slowest_s = max(self.slowest_s, loop.time() - asked_at)
            self.served[producer] += 1

    async def learn(self, driver: Driver) -> None:
        for number in range(CHUNKS_TAKEN // self.take):
            grant = await driver.fetch(
                Fetch(
                    buffer=BUFFER,
                    request_id=RequestId(f"r{number}"),
                    fragment_count=self.take,
                    deadline_at=driver.core.clock.now() + 60.0,
                )
            )
            assert isinstance(grant, FetchGranted)
            await asyncio.sleep(self.hold_s * self.take)
            await driver.core.call(ReleaseLease(BUFFER, grant.lease_id, ReleaseMode.CONSUMED))

    async def run(self) -> None:
        config = BufferConfig(capacity_chunks=8, uses_max=1, full_policy=FullPolicy.BLOCK)
        driver = Driver(
            BufferSet(self.rng, config),
            self.custodian,
            clock=SimulatedClock(asyncio.get_running_loop()),
            metrics=METRICS,
            limits=DriverLimits(),
        )
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(driver.run())]
            await driver.core.call(StartSession(BUFFER, SessionId("run")))
            tasks += [group.create_task(self.produce(driver, each)) for each in range(PRODUCERS)]
            await self.learn(driver)
            for task in tasks:
                task.cancel()


def played(seed: int, **options: float) -> World:
    async def play() -> World:
        world = World(seed, **options)  # type: ignore[arg-type]
        await world.run()
        return world

    return run_simulated(play())


def share(world: World) -> float:
    """How many times what the least served got the most served one had."""
    counts = [world.served[each] for each in range(PRODUCERS)]
    return max(counts) / max(1, min(counts))


@pytest.mark.parametrize(("take", "hold_s"), [(1, 0.01), (4, 0.005), (8, 0.02)])
def test_every_producer_gets_its_share_of_a_full_buffer(take: int, hold_s: float) -> None:
    for seed in range(2):
        world = played(seed, wait_s=5.0, take=take, hold_s=hold_s)
        assert share(world) < 1.05, f"seed {seed}: {sorted(world.served.values())}"
        # Sixteen stand in line, and each leaves with what it takes the learner for one.
        assert world.slowest_s < 2 * (PRODUCERS + 8) * hold_s + 0.1, f"seed {seed}"


def test_who_comes_again_and_again_instead_of_waiting_is_served_by_chance() -> None:
    world = played(0, wait_s=0.0, take=4, hold_s=0.005)
    assert share(world) > 1.5


def test_a_wait_that_is_cut_into_short_ones_keeps_its_place() -> None:
    """So that calls may end in time, however long there is no room."""
    for seed in range(2):
        world = played(seed, wait_s=0.02, take=4, hold_s=0.01)
        assert share(world) < 1.05, f"seed {seed}: {sorted(world.served.values())}"
