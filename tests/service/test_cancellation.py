"""A caller that goes away: before its grant, in the tick of it, after it, and with the server."""

import asyncio

import grpc
import pytest

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.core.model.events import FetchGranted, RequestRefused, WaitElapsed
from breadbox_server.core.model.ids import BufferName, RequestId
from breadbox_server.core.model.inputs import Fetch
from breadbox_server.driver import Driver
from support.eventually import eventually
from support.served import Served, reason_of, served, span

BUFFER = BufferName("default")


def start_fetch(
    group: asyncio.TaskGroup, it: Served, request_id: str, count: int = 1
) -> asyncio.Task[FetchGranted | WaitElapsed]:
    """A fetch on the driver itself, so that the test decides in which tick it is cancelled."""
    return group.create_task(
        it.server.driver.fetch(
            Fetch(
                buffer=BUFFER,
                request_id=RequestId(request_id),
                fragment_count=count,
                deadline_at=it.server.driver.core.clock.now() + 60.0,
            )
        )
    )


def waiting_counts(driver: Driver) -> tuple[int, int]:
    """How many fetches and watches wait."""
    return driver.core.waiting_count, driver.reading.watcher_count


async def assert_nothing_is_held(it: Served, chunk_count: int) -> None:
    buffer = await it.buffer()
    state = buffer.state
    assert 0 == it.server.driver.core.waiting_count
    assert (0, 0, chunk_count) == (state.waiter_count, state.lease_count, state.chunk_count)


async def test_a_cancel_before_the_grant_leaves_no_trace() -> None:
    async with served() as it:
        await it.start()
        fetching = it.fetch(1, wait_s=60)
        await eventually(lambda: it.server.driver.core.waiting_count == 1)
        fetching.cancel()
        await eventually(lambda: it.server.driver.core.waiting_count == 0)
        await it.fill(1)
        await assert_nothing_is_held(it, chunk_count=1)


async def test_a_cancelled_head_lets_the_next_waiter_through() -> None:
    async with served() as it:
        await it.start()
        first = it.fetch(4, request_id="large", wait_s=60)
        await eventually(lambda: it.server.driver.core.waiting_count == 1)
        second = it.fetch(1, request_id="small", wait_s=60)
        await eventually(lambda: it.server.driver.core.waiting_count == 2)
        await it.fill(1)
        first.cancel()
        reply = await second
    assert "grant" == reply.WhichOneof("result")


async def test_a_cancel_in_the_tick_of_the_grant_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as it:
        await it.start()
        driver = it.server.driver
        wake = driver.core.wake
        granted = []

        def wake_and_cancel(event: FetchGranted | RequestRefused | WaitElapsed) -> None:
            wake(event)
            if isinstance(event, FetchGranted):
                # The future has its result; its task has not run yet.
                granted.append(event)
                task.cancel()

        monkeypatch.setattr(driver.core, "wake", wake_and_cancel)
        async with asyncio.TaskGroup() as group:
            task = start_fetch(group, it, "doomed")
            await eventually(lambda: driver.core.waiting_count == 1)
            await it.fill(1)
        assert task.cancelled()
        assert 1 == len(granted)
        await assert_nothing_is_held(it, chunk_count=1)


async def test_a_grant_for_a_caller_that_was_just_cancelled_is_given_back() -> None:
    async with served() as it:
        await it.start()
        driver = it.server.driver
        async with asyncio.TaskGroup() as group:
            task = start_fetch(group, it, "doomed")
            await eventually(lambda: driver.core.waiting_count == 1)
            # Cancelled, but its handler has not run yet when the grant is made.
            task.cancel()
            await it.fill(1)
        assert task.cancelled()
        await assert_nothing_is_held(it, chunk_count=1)


async def test_a_caller_gone_after_its_grant_leaves_a_lease_that_expires() -> None:
    async with served() as it:
        await it.start()
        await it.fill(1)
        await it.fetch(1)
        await it.channel.close()
        driver = it.server.driver
        assert 1 == driver.core.describe(BUFFER).lease_count
        it.clock.advance(60.0)
        seen = driver.core.describe(BUFFER)
    assert (0, 1) == (seen.lease_count, seen.chunk_count)


async def test_a_client_whose_connection_breaks_is_no_longer_waited_for() -> None:
    async with served() as it:
        await it.start()
        driver = it.server.driver
        async with grpc.aio.insecure_channel(it.server.address) as doomed:
            stub = type(it.stub)(doomed)
            fetching = stub.FetchFragments(
                pb.FetchFragmentsRequest(request_id="r", fragment_count=1, max_wait=span(60))
            )
            watching = stub.WatchModel(
                pb.WatchModelRequest(
                    known_session_id="run", known_model_version=0, max_wait=span(60)
                )
            )
            await eventually(
                lambda: (driver.core.waiting_count, driver.reading.watcher_count) == (1, 1)
            )
        await eventually(
            lambda: (driver.core.waiting_count, driver.reading.watcher_count) == (0, 0)
        )
        for call in (fetching, watching):
            with pytest.raises(asyncio.CancelledError):
                await call
        await assert_nothing_is_held(it, chunk_count=0)


async def test_callers_that_leave_take_their_timers_along() -> None:
    """A client that watches again and again would leave one for five minutes each time."""
    async with served() as it:
        await it.start()
        driver = it.server.driver
        before = it.clock.live_count
        for number in range(5):
            watching = it.stub.WatchModel(
                pb.WatchModelRequest(
                    known_session_id="run", known_model_version=0, max_wait=span(60)
                )
            )
            fetching = it.fetch(1, request_id=f"r{number}", wait_s=60)
            await eventually(
                lambda: (driver.core.waiting_count, driver.reading.watcher_count) == (1, 1)
            )
            assert before + 2 == it.clock.live_count
            watching.cancel()
            fetching.cancel()
            await eventually(
                lambda: (driver.core.waiting_count, driver.reading.watcher_count) == (0, 0)
            )
        assert before == it.clock.live_count


async def test_a_stopping_server_tells_those_who_wait_and_watch() -> None:
    async with served() as it:
        await it.start()
        fetching = it.fetch(1, wait_s=60)
        watching = it.stub.WatchModel(
            pb.WatchModelRequest(known_session_id="run", known_model_version=0, max_wait=span(60))
        )
        driver = it.server.driver
        await eventually(
            lambda: (driver.core.waiting_count, driver.reading.watcher_count) == (1, 1)
        )
        driver.drain()
        for call in (fetching, watching):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert grpc.StatusCode.UNAVAILABLE == caught.value.code()
            assert "DRAINING" == reason_of(caught.value)


async def test_a_draining_server_refuses_new_work_and_takes_releases() -> None:
    async with served() as it:
        await it.start()
        await it.fill(1)
        grant = (await it.fetch(1)).grant
        it.server.driver.drain()
        for call in (it.fetch(1, request_id="late"), it.append(it.metadata(1))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert "DRAINING" == reason_of(caught.value)
        await it.stub.ReleaseLease(
            pb.ReleaseLeaseRequest(lease_id=grant.lease.lease_id, mode=pb.RELEASE_MODE_CONSUMED)
        )


async def test_stopping_deletes_what_is_disposable_and_closes_the_store() -> None:
    async with served() as it:
        await it.start()
        await it.fill(3)
        await it.stub.EndSession(pb.EndSessionRequest(session_id="run"))
        custodian = it.custodian
    assert 3 == len(custodian.deleted)
    assert custodian.is_closed
