"""Payloads on their way out: what is queued together shares trips."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from breadbox_server.admission.payloads import BATCH_PAYLOADS, DeletionQueue
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


async def test_what_comes_together_shares_a_trip_up_to_a_batch() -> None:
    store = CountingTrips()
    async with running(store) as queue:
        for number in range(1, BATCH_PAYLOADS + 2):
            queue.put(payloads(number))
        await eventually(lambda: len(store.deleted) == BATCH_PAYLOADS + 2)
    assert [1, BATCH_PAYLOADS, 1] == store.trips


async def test_a_caller_waits_until_nothing_is_left() -> None:
    store = CountingTrips()
    async with running(store) as queue:
        queue.put(payloads(1))
        await queue.wait_empty()
        assert [1, 1] == store.trips
