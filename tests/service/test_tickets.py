"""Tickets over gRPC: waits, callers that go, holders' limits, tokens that are bound to workers."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server import driver
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig, StalePolicy
from breadbox_server.core.model.ids import BufferName, RequestId, WorkerId
from breadbox_server.core.model.inputs import GiveBackTicket, TakeTickets
from support.eventually import eventually
from support.served import CALL_S, Served, served, span
from support.token_files import bearer, write_tokens

BUFFER = BufferName("default")
PACED = BufferConfig(
    fragments_per_chunk=2,
    assembly=AssemblyPolicy.GROUPS,
    groups_per_version=2,
    sampler="oldest_first",
)


def take(
    it: Served, count: int = 2, wait_s: float = 0.0, request_id: str = "r", **more: Any
) -> Any:
    request = pb.TakeTicketsRequest(
        request_id=request_id,
        ticket_count=count,
        max_wait=span(wait_s),
        lease_duration=span(60.0),
    )
    return it.stub.TakeTickets(request, timeout=CALL_S, **more)


def give_back(it: Served, group: str, **more: Any) -> Any:
    return it.stub.GiveBackTicket(pb.GiveBackTicketRequest(group=group), timeout=CALL_S, **more)


def waiting_count(it: Served) -> int:
    return it.server.driver.core.describe(BUFFER).ticket_waiter_count


async def test_a_request_that_waits_gets_what_is_given_back() -> None:
    async with served(PACED) as it:
        await it.start()
        first = await take(it)
        assert (2, 60) == (len(first.groups), round(first.remaining_duration.ToSeconds()))
        assert (2, 0) == (first.staleness_max, first.model_version)
        waiting = take(it, wait_s=5.0, request_id="later")
        await eventually(lambda: waiting_count(it) == 1)
        await give_back(it, first.groups[0])
        assert 1 == len((await waiting).groups)


async def test_a_wait_that_elapses_says_why() -> None:
    async with served(PACED) as it:
        await it.start()
        await take(it)
        reply = await take(it, request_id="later")
    assert [] == list(reply.groups)
    assert reply.waiting_reason.startswith("all 2 tickets of version 0 are held")


async def test_a_buffer_that_keeps_what_is_stale_says_no_bound() -> None:
    async with served(replace(PACED, stale=StalePolicy.KEEP)) as it:
        await it.start()
        assert not (await take(it)).HasField("staleness_max")


async def test_a_lease_has_to_be_named() -> None:
    async with served(PACED) as it:
        await it.start()
        with pytest.raises(grpc.aio.AioRpcError, match="lease_duration must be given"):
            await it.stub.TakeTickets(pb.TakeTicketsRequest(request_id="r", ticket_count=1))


async def test_a_renewal_tells_the_version() -> None:
    async with served(PACED) as it:
        await it.start()
        group = (await take(it)).groups[0]
        it.clock.advance(30.0)
        request = pb.RenewTicketRequest(group=group, lease_duration=span(90.0))
        reply = await it.stub.RenewTicket(request, timeout=CALL_S)
    assert (90, 0) == (round(reply.remaining_duration.ToSeconds()), reply.model_version)
    assert reply.session_id


async def test_a_renewal_waits_once_also_while_a_new_version_becomes_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(PACED) as it:
        await it.start()
        group = (await take(it)).groups[0]
        turns, waits = it.server.driver.core.turns, list[None]()
        settled = turns.settled

        async def counted() -> None:
            waits.append(None)
            await settled()

        monkeypatch.setattr(turns, "settled", counted)
        it.server.driver.core.undurable_models += 1
        await it.stub.RenewTicket(pb.RenewTicketRequest(group=group), timeout=CALL_S)
        assert 1 == len(waits)


async def test_tickets_of_a_caller_that_goes_while_they_are_given_are_given_back() -> None:
    async with served(PACED) as it:
        await it.start()
        groups = (await take(it)).groups
        waiting = take(it, wait_s=60.0, request_id="gone")
        await eventually(lambda: waiting_count(it) == 1)
        waiting.cancel()
        await eventually(lambda: waiting_count(it) == 0)
        await give_back(it, groups[0])
        assert 1 == len((await take(it, request_id="next")).groups)


async def test_tickets_of_a_caller_that_goes_stay_those_of_its_retry() -> None:
    async with served(PACED) as it:
        await it.start()
        first, _ = (await take(it)).groups
        core = it.server.driver.core
        command = TakeTickets(
            BUFFER,
            request_id=RequestId("again"),
            ticket_count=1,
            deadline_at=it.clock.now() + 60.0,
            lease_s=60.0,
        )
        async with asyncio.TaskGroup() as calls:
            gone, again = (calls.create_task(core.wait(command)) for _ in range(2))
            await eventually(lambda: core.waiting_count == 2)
            gone.cancel()  # Its connection broke; it has not run yet when the ticket is given.
            core.apply_now(GiveBackTicket(BUFFER, WorkerId(first)))
        [group] = again.result().groups
        ends = await it.stub.GroupEnds(pb.GroupEndsRequest(), timeout=CALL_S)
        assert [first] == [each.group for each in ends.ends]
        await give_back(it, group)


async def test_a_holder_has_a_limit_that_those_that_wait_count_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "TICKETS_HELD_MAX", 3)
    async with served(PACED) as it:
        await it.start()
        await take(it)
        waiting = take(it, count=1, wait_s=60.0, request_id="waits")
        await eventually(lambda: waiting_count(it) == 1)
        with pytest.raises(
            grpc.aio.AioRpcError, match="buffer 'default' is at its tickets of 3"
        ) as refused:
            await take(it, count=1, request_id="one more")
        assert grpc.StatusCode.RESOURCE_EXHAUSTED is refused.value.code()
        waiting.cancel()


@pytest.mark.parametrize("count", [-1, 0, 1025, 16_385, 2**40])
async def test_a_count_out_of_range_is_refused_for_good(count: int) -> None:
    async with served(PACED) as it:
        await it.start()
        with pytest.raises(grpc.aio.AioRpcError, match="ticket_count must be") as refused:
            await take(it, count=count)
        assert grpc.StatusCode.INVALID_ARGUMENT is refused.value.code()


async def test_a_waiting_request_is_told_that_the_server_drains() -> None:
    async with served(PACED) as it:
        await it.start()
        await take(it)
        waiting = take(it, wait_s=60.0, request_id="waits")
        await eventually(lambda: waiting_count(it) == 1)
        it.server.driver.drain()
        with pytest.raises(grpc.aio.AioRpcError, match="draining"):
            await waiting


async def test_a_token_bound_to_other_workers_takes_and_ends_no_tickets(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    lines = ["producer any", "producer bound workers=w*", "producer paced workers=ticket-*"]
    tokens = write_tokens(path, *lines, "admin all")
    anyone, bound, paced, admin = (bearer(each) for each in tokens)
    async with served(PACED, tokens=path) as it:
        await it.stub.StartSession(pb.StartSessionRequest(session_id="run"), metadata=admin)
        with pytest.raises(grpc.aio.AioRpcError, match="append to groups ticket-"):
            await take(it, metadata=bound)
        [group] = (await take(it, count=1, metadata=paced)).groups
        with pytest.raises(grpc.aio.AioRpcError, match="use worker"):
            await give_back(it, group, metadata=bound)
        await give_back(it, group, metadata=paced)
        await take(it, count=1, request_id="other", metadata=anyone)
