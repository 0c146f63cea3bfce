"""Learners' calls go before appends: which appends wait, for how long, and for which calls."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.admission.precedence import (
    ABOUT_S,
    PASSES,
    STEP_S,
    UNDER_WAY_MAX,
    WAIT_S_MAX,
    Precedence,
)
from breadbox_server.admission.slices import SHORT_SLICE_FRAGMENTS
from breadbox_server.base.errors import AppendsFullError
from breadbox_server.core.model.config import BufferConfig, FullPolicy
from support.eventually import eventually
from support.manual_timers import ManualTimers
from support.served import CALL_S, Served, served, span

ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED


def precedence(clock: ManualTimers, under_way: Callable[[], int] = int) -> Precedence:
    return Precedence(clock, under_way=under_way)


async def passes(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def new_appends(order: Precedence, count: int) -> AsyncIterator[list[int]]:
    """Appends that come in order; the numbers of those that were let in."""
    let_in: list[int] = []

    async def come(number: int) -> None:
        await order.new()
        let_in.append(number)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(come(number)) for number in range(count)]
        await passes(1)
        yield let_in
        for task in tasks:
            task.cancel()


async def test_without_learners_no_append_waits() -> None:
    async with new_appends(precedence(ManualTimers()), 100) as let_in:
        assert list(range(100)) == let_in


async def test_an_append_waits_while_a_learner_calls_and_goes_on_behind_it() -> None:
    order = precedence(ManualTimers())
    order.begin()
    async with new_appends(order, 1) as let_in:
        await passes(10 * PASSES)
        before = list(let_in)
        order.end()
        await passes(10 * PASSES)
        assert [] == before
        assert [0] == let_in


async def test_one_append_at_a_time_goes_on_while_learners_go_on_calling() -> None:
    """Learners wait for data too: appends never starve."""
    clock = ManualTimers()
    order = precedence(clock)
    order.begin()
    async with new_appends(order, 3) as let_in:
        counts = []
        for _ in range(3):
            clock.advance(STEP_S)
            await passes(2)
            counts.append(len(let_in))
        assert [1, 2, 3] == counts


async def test_a_call_that_comes_is_looked_at_before_appends_that_wait() -> None:
    """It may be a learner's, behind which the others go on waiting."""
    order = precedence(ManualTimers())
    order.begin()
    async with new_appends(order, 1) as let_in:
        order.end()
        for _ in range(10):
            order.arrived()
            await passes(PASSES - 1)
        while_they_came = list(let_in)
        await passes(PASSES + 1)
        assert [] == while_they_came
        assert [0] == let_in


async def test_what_is_under_way_goes_on_before_what_is_new() -> None:
    order = precedence(ManualTimers())
    order.begin()
    async with new_appends(order, 2) as let_in, asyncio.TaskGroup() as group:
        under_way = group.create_task(order.slice())
        await passes(1)
        order.end()
        await passes(PASSES + 1)
        assert under_way.done()
        assert [] == let_in


async def test_no_append_begins_while_many_are_under_way_and_learners_call() -> None:
    clock = ManualTimers()
    under_way = UNDER_WAY_MAX
    order = precedence(clock, lambda: under_way)
    order.begin()
    order.end()
    async with new_appends(order, 1) as let_in:
        await passes(10 * PASSES)
        before = list(let_in)
        under_way -= 1
        order.look()
        await passes(PASSES + 1)
        assert [] == before
        assert [0] == let_in


async def test_all_that_waited_go_on_when_learners_have_gone() -> None:
    clock = ManualTimers()
    order = precedence(clock)
    order.begin()
    async with new_appends(order, 100) as let_in:
        order.end()
        clock.advance(ABOUT_S + STEP_S)
        await passes(150)
        assert list(range(100)) == let_in


async def test_an_append_that_is_given_up_holds_up_none_behind_it() -> None:
    order = precedence(ManualTimers())
    order.begin()
    async with asyncio.TaskGroup() as group:
        given_up = group.create_task(order.new())
        await passes(1)
        async with new_appends(order, 1) as let_in:
            given_up.cancel()
            order.end()
            await passes(PASSES + 2)
            assert [0] == let_in


async def test_an_append_behind_those_that_wait_for_long_is_told_to_come_again() -> None:
    clock = ManualTimers()
    order = precedence(clock, lambda: UNDER_WAY_MAX)
    order.begin()
    async with new_appends(order, 1):
        clock.advance_late(WAIT_S_MAX + STEP_S)
        with pytest.raises(AppendsFullError):
            await order.new()


def precedence_of(it: Served) -> Precedence:
    return it.server.driver.appends.queue.precedence


async def test_a_fetch_that_waits_for_data_holds_up_no_append() -> None:
    async with served() as it:
        await it.start()
        fetching = it.fetch(1, wait_s=10)
        await eventually(lambda: it.server.driver.core.waiting_count == 1)
        reply = await it.append(it.metadata(0))
        granted = await fetching
    assert [ADMITTED] == [each.outcome for each in reply.results]
    assert 1 == len(granted.grant.fragments)


async def test_calls_of_learners_however_they_end_leave_none_ahead_of_appends() -> None:
    async with served() as it:
        await it.start()
        given_up = it.fetch(1, request_id="given up", wait_s=10)
        await eventually(lambda: it.server.driver.core.waiting_count == 1)
        given_up.cancel()
        await it.fetch(1, request_id="elapsed")
        await it.fill(2)
        await it.make_room(2, request_id="granted")
        refused = it.stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_id="none"), timeout=CALL_S)
        assert "OK" != (await refused.code()).name
        await eventually(lambda: it.server.driver.core.waiting_count == 0)
        it.clock.advance(ABOUT_S)
        await eventually(lambda: not precedence_of(it).has_learners)


async def test_a_large_append_is_admitted_in_order_while_a_learner_calls() -> None:
    """In short slices, whose fragments are neither lost nor answered too early."""
    count = 3 * UNDER_WAY_MAX * SHORT_SLICE_FRAGMENTS + 1
    async with served(BufferConfig(capacity_chunks=2 * count)) as it:
        await it.start()
        order = precedence_of(it)
        order.begin()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(it.append(*(it.metadata(index) for index in range(count))))
            while not task.done():
                it.clock.advance(STEP_S)
                await passes(PASSES)
        buffer = await it.buffer()
        order.end()
    assert [ADMITTED] * count == [each.outcome for each in task.result().results]
    assert count == buffer.state.chunk_count


async def test_appends_that_wait_for_room_keep_none_behind_them_from_being_looked_at() -> None:
    config = BufferConfig(capacity_chunks=1, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        await it.fill(1)
        wait = {"max_wait": span(10)}
        queue = it.server.driver.appends.queue
        precedence_of(it).begin()
        precedence_of(it).end()
        async with asyncio.TaskGroup() as group:
            waiting = [
                group.create_task(it.append(it.metadata(0, worker_id=f"w{number}"), **wait))
                for number in range(1, 2 * UNDER_WAY_MAX)
            ]
            await eventually(lambda: queue.waiting_count == len(waiting))
            for each in waiting:
                each.cancel()
