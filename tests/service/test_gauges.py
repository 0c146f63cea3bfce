"""Gauges that say how full the store is and what fetches wait for."""

import pytest

from breadbox.stores.base import StoreUsage
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.admission import payloads
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.metrics.metrics import WaitingFor, waiting_for
from support.driven import driven
from support.eventually import eventually
from support.served import Served, served, span


def gauge(world: Served, name: str, **labels: str) -> float | None:
    return world.server.metrics.registry.get_sample_value(f"breadbox_{name}", labels)


def cause(world: Served) -> WaitingFor:
    return waiting_for(world.server.driver.core.describe("default"))  # type: ignore[arg-type]


async def test_the_store_is_asked_how_full_it_is() -> None:
    async with served() as world:
        await eventually(lambda: gauge(world, "store_limit_bytes") == 10_000)

    assert 0 == gauge(world, "store_used_bytes")


@pytest.mark.parametrize(
    ("usage", "hold"),
    [
        (StoreUsage(9, 10, 5), ""),
        (StoreUsage(10, 10, 5), "the payload store has no room: 10 bytes are taken of 10"),
        (StoreUsage(10, 0, 5), ""),
        (
            StoreUsage(1, 10, 5, used_file_count=7, limit_file_count=7),
            "the payload store has no room: 7 inodes are taken of 7",
        ),
    ],
)
async def test_a_store_without_room_is_shown_as_what_producers_wait_for(
    usage: StoreUsage, hold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told() -> StoreUsage:
        return usage

    async with served() as world:
        monkeypatch.setattr(world.custodian, "usage", told)
        await eventually(lambda: world.server.driver.store_watch.usage == usage)
        assert hold == (await world.buffer()).state.hold
        await eventually(lambda: gauge(world, "store_used_files") == usage.used_file_count)
        config = await world.stub.GetStoreConfig(pb.GetStoreConfigRequest())

    assert usage.limit_file_count == gauge(world, "store_limit_files")
    assert usage.limit_bytes == config.payload_size_bytes_max


async def test_a_store_that_is_away_does_not_stop_the_housekeeping() -> None:
    async with served() as world:
        await eventually(lambda: gauge(world, "store_limit_bytes") == 10_000)
        world.custodian.is_down = True
        await eventually(
            lambda: bool(gauge(world, "store_errors_total", operation="usage")), within_s=10
        )
        await world.buffer()


async def test_a_store_that_answers_again_is_no_longer_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(payloads, "PERIOD_S", 0.0)
    async with driven() as it:
        watch = it.driver.store_watch
        it.custodian.is_down = True
        await eventually(lambda: watch.away_s > 0.0)
        it.custodian.is_down = False
        await eventually(lambda: watch.away_s == 0.0)
        await it.settle()
        assert 0.0 == watch.away_s


async def test_what_a_fetch_waits_for_is_told_step_by_step() -> None:
    async with served(BufferConfig(leases_max=1)) as world:
        without_session = cause(world)
        await world.start()
        without_worker = cause(world)
        await world.fill(1)
        without_chunks = cause(world)
        await world.fetch(1)
        without_leases = cause(world)

    assert [WaitingFor.SESSION, WaitingFor.WORKERS, WaitingFor.CHUNKS, WaitingFor.LEASES] == [
        without_session,
        without_worker,
        without_chunks,
        without_leases,
    ]


@pytest.mark.parametrize("reason", list(WaitingFor), ids=lambda reason: reason.value)
async def test_waiters_are_shown_under_one_reason_at_a_time(reason: WaitingFor) -> None:
    async with served() as world:
        world.server.metrics.set_waiters("default", 3, reason)
        shown = {
            each: gauge(world, "waiters", buffer="default", reason=each.value)
            for each in WaitingFor
        }

    assert {each: 3 if each is reason else 0 for each in WaitingFor} == shown


async def test_a_waiting_fetch_is_counted() -> None:
    async with served() as world:
        await world.start()
        call = world.stub.FetchFragments(
            pb.FetchFragmentsRequest(request_id="r", fragment_count=1, max_wait=span(60))
        )
        await eventually(lambda: world.server.driver.core.waiting_count == 1)
        world.server.driver.show_gauges()
        waiting = gauge(world, "waiters", buffer="default", reason="workers")
        call.cancel()

    assert 1 == waiting
