"""Payloads on their way out: the first goes at once, and those after it share trips."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from breadbox_server.admission import payloads as store_side
from breadbox_server.admission.payloads import BATCH_PAYLOADS, GATHER_BYTES_MAX, DeletionQueue
from breadbox_server.core.model.inputs import Payload
from breadbox_server.metrics.metrics import Metrics
from support.eventually import eventually
from support.fake_custodian import FakeCustodian
from support.inputs import named_payload


class CountingTrips(FakeCustodian):
    """A store that notes how many payloads each trip deletes."""

    def __init__(self) -> None:
        super().__init__()
        self.trips: list[int] = []

    async def _delete(self, payload_ids: Iterable[str]) -> None:
        ids = list(payload_ids)
        self.trips.append(len(ids))
        await super()._delete(ids)


def payloads(*numbers: int, size_bytes: int = 1) -> list[Payload]:
    return [named_payload(f"{number:032x}", size_bytes=size_bytes) for number in numbers]


@asynccontextmanager
async def running(store: CountingTrips) -> AsyncIterator[DeletionQueue]:
    """A queue at work, which has just made a trip."""
    queue = DeletionQueue(store, metrics=Metrics(CollectorRegistry()), limit=10_000)
    async with asyncio.TaskGroup() as group:
        job = group.create_task(queue.run())
        queue.put(payloads(0))
        await eventually(lambda: store.trips == [1])
        yield queue
        job.cancel()


async def test_what_comes_after_a_trip_shares_the_next() -> None:
    store = CountingTrips()
    async with running(store) as queue:
        for number in range(1, 21):
            queue.put(payloads(number))
            await asyncio.sleep(0)
        await eventually(lambda: len(store.deleted) == 21)
    assert [1, 20] == store.trips


@pytest.mark.parametrize(
    "batch",
    [payloads(*range(1, BATCH_PAYLOADS + 1)), payloads(1, size_bytes=GATHER_BYTES_MAX)],
    ids=["a full batch", "many bytes"],
)
async def test_what_needs_room_goes_at_once(
    monkeypatch: pytest.MonkeyPatch, batch: list[Payload]
) -> None:
    monkeypatch.setattr(store_side, "GATHER_S", 3600.0)
    store = CountingTrips()
    async with running(store) as queue:
        queue.put(batch)
        await eventually(lambda: store.trips == [1, len(batch)])


async def test_who_waits_until_nothing_is_left_waits_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_side, "GATHER_S", 3600.0)
    store = CountingTrips()
    async with running(store) as queue:
        queue.put(payloads(1))
        await queue.wait_empty()
        assert [1, 1] == store.trips
