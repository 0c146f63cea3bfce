"""What comes within a moment shares one trip: with the real driver, on a loop whose time stands."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from prometheus_client import CollectorRegistry

from breadbox_server.admission.slices import SLICE_FRAGMENTS
from breadbox_server.base.gathering import GATHER_S, PASSES, Gathering
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.events import FetchGranted
from breadbox_server.core.model.ids import BufferName, RequestId, SessionId
from breadbox_server.core.model.inputs import Fetch, ReleaseLease, ReleaseMode, StartSession
from breadbox_server.driver import Driver, DriverLimits
from breadbox_server.metrics.metrics import Metrics
from simulation.loop import SimulatedClock, SimulatedLoop, run_simulated
from support.appends import append
from support.fake_custodian import FakeCustodian
from support.fake_journal import FakeJournal
from support.metadata import written_fragment

BUFFER = BufferName("default")


async def passes(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class World:
    """A driver at work in a session, and what tests look at."""

    driver: Driver
    custodian: FakeCustodian
    journal: FakeJournal
    group: asyncio.TaskGroup

    def append(self, worker: int, count: int = 1) -> "asyncio.Task[object]":
        fragments = [
            written_fragment(self.custodian, index, "run", f"w{worker}") for index in range(count)
        ]
        return self.group.create_task(append(self.driver, BUFFER, fragments))

    def fetch(self, number: int, count: int = 1) -> "asyncio.Task[object]":
        return self.group.create_task(
            self.driver.fetch(
                Fetch(
                    buffer=BUFFER,
                    request_id=RequestId(f"r{number}"),
                    fragment_count=count,
                    deadline_at=self.driver.core.clock.now() + 10.0,
                )
            )
        )


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    custodian, journal = FakeCustodian(), FakeJournal()
    driver = Driver(
        BufferSet(random.Random(0), BufferConfig(), is_recording=True),
        custodian,
        clock=SimulatedClock(asyncio.get_running_loop()),
        metrics=Metrics(CollectorRegistry()),
        limits=DriverLimits(),
        journal=journal,
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await driver.core.call(StartSession(BUFFER, SessionId("run")))
        yield World(driver, custodian, journal, group)
        running.cancel()


def test_waiting_for_more_takes_a_few_passes_and_no_time_where_nothing_comes() -> None:
    async def play() -> tuple[float, int]:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        waiting = loop.create_task(Gathering().wait())
        count = 0
        while not waiting.done():
            await passes(1)
            count += 1
        return loop.time() - began_at, count

    assert (0.0, PASSES + 1) == run_simulated(play())


def test_waiting_for_more_ends_in_time_however_many_come() -> None:
    step_s = GATHER_S / 8

    async def play() -> float:
        loop = cast(SimulatedLoop, asyncio.get_running_loop())
        gathering = Gathering()
        began_at = loop.time()
        waiting = loop.create_task(gathering.wait())
        while not waiting.done():
            gathering.arrived()
            loop.pass_time(step_s)
            await passes(1)
        return loop.time() - began_at

    assert GATHER_S <= run_simulated(play()) <= GATHER_S + 2 * step_s


def test_appends_of_successive_passes_share_one_trip_to_the_store_and_one_turn() -> None:
    async def play() -> tuple[list[int], list[int]]:
        async with world() as it:
            before = len(it.journal.turns)
            calls = []
            for worker in range(20):
                calls.append(it.append(worker))
                await passes(PASSES - 1)
            await asyncio.wait(calls)
            return it.custodian.confirm_trips, list(map(len, it.journal.turns[before:]))

    assert ([20], [20]) == run_simulated(play())


def test_an_append_alone_is_answered_before_any_time_has_passed() -> None:
    async def play() -> float:
        async with world() as it:
            loop = asyncio.get_running_loop()
            began_at = loop.time()
            await it.append(0)
            return loop.time() - began_at

    assert 0.0 == run_simulated(play())


def test_a_fetch_is_granted_while_appends_still_gather() -> None:
    async def play() -> tuple[bool, list[int]]:
        async with world() as it:
            await asyncio.wait([it.append(0), it.append(20)])
            before = list(it.custodian.confirm_trips)
            fetching, calls = it.fetch(0), []
            for worker in range(1, 20):
                calls.append(it.append(worker))
                await passes(PASSES - 1)
            outcome = (fetching.done(), it.custodian.confirm_trips[len(before) :])
            await asyncio.wait(calls)
            return outcome

    assert (True, []) == run_simulated(play())


def test_after_one_that_came_alone_the_next_waits_for_one_pass_and_takes_what_came_meanwhile() -> (
    None
):
    async def play() -> tuple[int, list[int]]:
        async with world() as it:
            await it.append(0)
            await it.append(1)
            before = len(it.custodian.confirm_trips)
            count, alone = 0, it.append(2)
            while not it.custodian.confirm_trips[before:]:
                await passes(1)
                count += 1
            await alone
            first, second = it.append(3), it.append(4)
            await asyncio.wait([first, second])
            return count, it.custodian.confirm_trips[before:]

    count, trips = run_simulated(play())
    assert [1, 2] == trips
    assert count < PASSES


def test_after_fetches_that_shared_a_turn_those_of_successive_passes_share_the_next() -> None:
    async def play() -> list[int]:
        async with world() as it:
            await it.append(0, 8)
            before = len(it.journal.turns)
            calls = [it.fetch(0), it.fetch(1)]
            await asyncio.wait(calls)
            for number in range(2, 8):
                calls.append(it.fetch(number))
                await passes(PASSES - 1)
            await asyncio.wait(calls)
            return list(map(len, it.journal.turns[before:]))

    assert [2, 6] == run_simulated(play())


def test_a_turn_with_a_slice_of_appends_is_written_without_waiting_for_more() -> None:
    """What it has was gathered before it was decided; releases go on meanwhile."""

    async def play() -> bool:
        async with world() as it:
            await it.append(0, 8)
            grants = [cast(FetchGranted, await it.fetch(number)) for number in range(8)]
            it.custodian.may_confirm.clear()
            appending = it.append(1)
            it.custodian.confirming.clear()
            await it.custodian.confirming.wait()
            it.custodian.may_confirm.set()
            releases = []
            for grant in grants:
                release = ReleaseLease(BUFFER, grant.lease_id, ReleaseMode.CONSUMED)
                releases.append(it.group.create_task(it.driver.release([release])))
                await passes(PASSES - 2)
            is_answered = appending.done()
            await asyncio.wait([appending, *releases])
            return is_answered

    assert run_simulated(play())


def test_an_append_that_fills_a_slice_waits_for_no_others() -> None:
    async def play() -> list[int]:
        async with world() as it:
            calls = [it.append(0, SLICE_FRAGMENTS + 1)]
            for worker in range(1, PASSES):
                await passes(1)
                calls.append(it.append(worker))
            first = list(it.custodian.confirm_trips)
            await asyncio.wait(calls)
            return first

    assert [SLICE_FRAGMENTS] == run_simulated(play())
