"""Books and store are compared while both go on: what merely moved meanwhile is not lost."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest
from prometheus_client import CollectorRegistry

from breadbox.model.types import PayloadReference
from breadbox.stores.base import Confirmation
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.events import FetchGranted
from breadbox_server.core.model.ids import BufferName, PayloadId, RequestId, SessionId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    EndSession,
    Fetch,
    Fragment,
    ReleaseLease,
    ReleaseMode,
    StartSession,
)
from breadbox_server.driver import Driver, DriverLimits
from breadbox_server.maintenance import reconciliation
from breadbox_server.maintenance.reconciliation import Reconciler
from breadbox_server.metrics.metrics import Metrics
from support.appends import append
from support.eventually import eventually
from support.fake_custodian import FakeCustodian
from support.manual_timers import ManualTimers
from support.metadata import written_fragment

BUFFER = BufferName("default")
RUN = SessionId("run")


class SlowlyListed(FakeCustodian):
    """A store whose list can be held up before anything of it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.listing = asyncio.Event()
        self.may_list = asyncio.Event()

    async def confirmed(self) -> AsyncIterator[str]:
        self.listing.set()
        await self.may_list.wait()
        for payload_id in sorted(self.kept):
            yield payload_id


def fragment(custodian: FakeCustodian, index: int) -> Fragment:
    return written_fragment(custodian, index, RUN)


def compared(
    custodian: FakeCustodian, clock: ManualTimers, metrics: Metrics
) -> tuple[Driver, Reconciler]:
    """A driver, and who compares its books with the store."""
    books = BufferSet(random.Random(1), BufferConfig())
    driver = Driver(books, custodian, clock=clock, metrics=metrics, limits=DriverLimits())
    reconciler = Reconciler(
        driver, custodian, clock=clock, metrics=metrics, orphan_s=10.0, deletes_orphans=True
    )
    return driver, reconciler


async def test_what_is_let_go_while_the_store_is_listed_is_neither_lost_nor_left_over() -> None:
    custodian, clock, metrics = SlowlyListed(), ManualTimers(), Metrics(CollectorRegistry())
    driver, reconciler = compared(custodian, clock, metrics)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await driver.core.call(StartSession(BUFFER, RUN))
        await append(driver, BUFFER, [fragment(custodian, 0), fragment(custodian, 1)])
        comparing = group.create_task(reconciler.reconcile())
        await custodian.listing.wait()
        await driver.core.call(EndSession(BUFFER, RUN))
        await eventually(lambda: len(custodian.deleted) == 2)
        custodian.may_list.set()
        await comparing
        running.cancel()
    lost = metrics.registry.get_sample_value("breadbox_payloads_lost_total", {"buffer": BUFFER})
    assert (None, 0) == (lost, reconciler.orphan_count)


async def test_a_payload_that_came_back_unannounced_is_confirmed_again_and_a_missing_one_goes() -> (
    None
):
    custodian, clock, metrics = FakeCustodian(), ManualTimers(), Metrics(CollectorRegistry())
    driver, reconciler = compared(custodian, clock, metrics)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await driver.core.call(StartSession(BUFFER, RUN))
        first, second = fragment(custodian, 0), fragment(custodian, 1)
        await append(driver, BUFFER, [first, second])
        # As a store has them that came back from a copy made before they were confirmed.
        custodian.kept.clear()
        custodian.unannounced = {first.payload.payload_id}
        await reconciler.reconcile()
        running.cancel()
    assert ({first.payload.payload_id}, set()) == (custodian.kept, custodian.unannounced)
    assert [first.payload] == list(driver.core.buffers[BUFFER].payloads())


class SlowlyConfirmed(FakeCustodian):
    """A store that has confirmed before its answer is heard of."""

    async def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        self.kept.update(each.payload_id for each in references)
        self.unannounced.difference_update(each.payload_id for each in references)
        return await super().confirm(references)


async def test_an_orphan_that_is_being_confirmed_is_not_deleted() -> None:
    custodian, clock, metrics = SlowlyConfirmed(), ManualTimers(), Metrics(CollectorRegistry())
    driver, reconciler = compared(custodian, clock, metrics)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await driver.core.call(StartSession(BUFFER, RUN))
        wanted, left_over = fragment(custodian, 0), custodian.write()
        custodian.kept = set(custodian.unannounced)
        custodian.unannounced.clear()
        await reconciler.reconcile()
        clock.advance(11.0)
        custodian.may_confirm.clear()
        appending = group.create_task(append(driver, BUFFER, [wanted]))
        await custodian.confirming.wait()
        await reconciler.look()
        custodian.may_confirm.set()
        (result,) = await appending
        running.cancel()
    assert AdmissionOutcome.ADMITTED is result.outcome
    assert [left_over.payload_id] == custodian.deleted
    assert {wanted.payload.payload_id} == custodian.kept


class Forgetful(FakeCustodian):
    """A store whose list misses what moves from node to node meanwhile."""

    async def confirmed(self) -> AsyncIterator[str]:
        for payload_id in sorted(self.kept)[1:]:
            yield payload_id


async def test_nothing_is_given_up_on_the_word_of_a_list() -> None:
    custodian, clock, metrics = Forgetful(), ManualTimers(), Metrics(CollectorRegistry())
    driver, reconciler = compared(custodian, clock, metrics)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await driver.core.call(StartSession(BUFFER, RUN))
        await append(driver, BUFFER, [fragment(custodian, index) for index in range(3)])
        await reconciler.reconcile()
        running.cancel()
    assert 3 == driver.core.describe(BUFFER).chunk_count


async def test_everything_is_compared_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciliation, "CONFIRM_BATCH", 4)
    custodian, clock, metrics = FakeCustodian(), ManualTimers(), Metrics(CollectorRegistry())
    driver, reconciler = compared(custodian, clock, metrics)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await driver.core.call(StartSession(BUFFER, RUN))
        fragments = [fragment(custodian, index) for index in range(10)]
        await append(driver, BUFFER, fragments)
        gone = {fragments[index].payload.payload_id for index in (0, 5, 9)}
        custodian.kept -= gone
        custodian.confirm_trips.clear()
        await reconciler.reconcile()
        running.cancel()
    assert [4, 4, 2] == custodian.confirm_trips
    left = {payload.payload_id for payload in driver.core.buffers[BUFFER].payloads()}
    assert {each.payload.payload_id for each in fragments} - gone == left


@pytest.mark.parametrize(
    ("watched", "left_count"),
    [("", 1), ("another", 1), ("the same", 2)],
)
async def test_books_are_compared_before_anybody_is_served_unless_the_store_was_watched(
    watched: str, left_count: int
) -> None:
    """A takeover need not ask for every payload: the server that led has, of the same start."""
    custodian, clock, metrics = FakeCustodian(), ManualTimers(), Metrics(CollectorRegistry())
    driver, reconciler = compared(custodian, clock, metrics)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await driver.core.call(StartSession(BUFFER, RUN))
        fragments = [fragment(custodian, index) for index in range(2)]
        await append(driver, BUFFER, fragments)
        custodian.kept.discard(fragments[0].payload.payload_id)
        known = await custodian.incarnation()
        await reconciler.begin(known if watched == "the same" else watched)
        assert left_count == len(list(driver.core.buffers[BUFFER].payloads()))
        # While it serves, what is lost is found as ever.
        await reconciler.look()
        assert 1 == len(list(driver.core.buffers[BUFFER].payloads()))
        running.cancel()


async def test_orphans_beyond_those_that_are_remembered_are_found_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconciliation, "ORPHANS_HELD_MAX", 100)
    custodian, clock, metrics = FakeCustodian(), ManualTimers(), Metrics(CollectorRegistry())
    driver, reconciler = compared(custodian, clock, metrics)
    custodian.kept.update(custodian.write().payload_id for _ in range(250))
    remembered = []
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await reconciler.begin()
        while custodian.kept:
            await reconciler.look()
            remembered.append(reconciler.orphan_count)
            clock.advance(11.0)
            while reconciler.orphan_count:
                await reconciler.look()
        running.cancel()
    assert [100, 100, 50] == remembered
    assert set() == custodian.kept


async def granted(driver: Driver, custodian: FakeCustodian, count: int) -> FetchGranted:
    await driver.core.call(StartSession(BUFFER, RUN))
    await append(driver, BUFFER, [fragment(custodian, index) for index in range(count)])
    outcome = await driver.fetch(
        Fetch(
            buffer=BUFFER,
            request_id=RequestId("r"),
            fragment_count=count,
            deadline_at=driver.core.clock.now(),
        )
    )
    assert isinstance(outcome, FetchGranted)
    return outcome


async def test_a_returned_lease_gives_back_only_what_the_store_has() -> None:
    custodian, clock, metrics = FakeCustodian(), ManualTimers(), Metrics(CollectorRegistry())
    driver, _ = compared(custodian, clock, metrics)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        grant = await granted(driver, custodian, 3)
        custodian.kept.discard(grant.fragments[0].fragment.payload.payload_id)
        await driver.release([ReleaseLease(BUFFER, grant.lease_id, ReleaseMode.RETURNED)])
        running.cancel()
    assert (2, 1) == (driver.core.describe(BUFFER).chunk_count, driver.losses.suspicion_count)


async def test_a_lease_is_returned_although_the_store_is_away_and_looked_at_later() -> None:
    custodian, clock, metrics = FakeCustodian(), ManualTimers(), Metrics(CollectorRegistry())
    driver, _ = compared(custodian, clock, metrics)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        grant = await granted(driver, custodian, 3)
        custodian.is_down = True
        await driver.release([ReleaseLease(BUFFER, grant.lease_id, ReleaseMode.RETURNED)])
        running.cancel()
    assert (3, 1) == (driver.core.describe(BUFFER).chunk_count, driver.losses.suspicion_count)


async def test_a_lease_that_is_consumed_asks_the_store_nothing() -> None:
    custodian, clock, metrics = FakeCustodian(), ManualTimers(), Metrics(CollectorRegistry())
    driver, _ = compared(custodian, clock, metrics)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        grant = await granted(driver, custodian, 3)
        custodian.is_down = True
        await driver.release([ReleaseLease(BUFFER, grant.lease_id, ReleaseMode.CONSUMED)])
        running.cancel()
    assert (0, 0) == (driver.core.describe(BUFFER).chunk_count, driver.losses.suspicion_count)


@pytest.mark.parametrize(
    ("known", "unknown", "let_go", "is_asked", "deleted"),
    [
        (0, 1024, 0, False, 1024),
        (0, 1025, 0, False, 0),
        (1100, 1050, 0, False, 1050),
        (1000, 1050, 0, False, 0),
        (0, 1500, 480, False, 1500),
        (0, 1505, 480, False, 480),
        (0, 1500, 0, True, 1500),
    ],
)
async def test_more_orphans_than_a_crash_leaves_are_deleted_only_when_that_is_asked_for(
    known: int, unknown: int, let_go: int, is_asked: bool, deleted: int
) -> None:
    custodian, clock, metrics = FakeCustodian(), ManualTimers(), Metrics(CollectorRegistry())
    books = BufferSet(random.Random(1), BufferConfig())
    driver = Driver(books, custodian, clock=clock, metrics=metrics, limits=DriverLimits())
    left = [custodian.write().payload_id for _ in range(unknown)]
    custodian.kept.update(left)
    reconciler = Reconciler(
        driver,
        custodian,
        clock=clock,
        metrics=metrics,
        orphan_s=10.0,
        deletes_orphans=True,
        is_asked=is_asked,
        let_go=frozenset(map(PayloadId, left[:let_go])),
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await driver.core.call(StartSession(BUFFER, RUN))
        await append(driver, BUFFER, [fragment(custodian, index) for index in range(known)])
        await reconciler.reconcile()
        clock.advance(11.0)
        while reconciler.orphan_count:
            await reconciler.look()
        running.cancel()
    assert deleted == len(custodian.deleted)
    assert set(custodian.deleted) <= set(left)
