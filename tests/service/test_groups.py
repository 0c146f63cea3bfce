"""Groups through a server: members in any order, ends that are told, waited for and counted."""

import dataclasses
import json
from typing import Any

import grpc
import pytest

from breadbox.model.types import NUMBER_BYTES_MAX
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.core.model.config import (
    NUMBER_NAME_BYTES_MAX,
    AssemblyPolicy,
    BufferConfig,
)
from breadbox_server.core.model.ids import BufferName
from breadbox_server.core.model.inputs import CreateBuffer, DeleteBuffer
from support.eventually import eventually
from support.served import CALL_S, Served, reason_of, served, span

ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED
ENDED = fragment_pb2.ADMISSION_OUTCOME_GROUP_ENDED
MISSING = fragment_pb2.ADMISSION_OUTCOME_PAYLOAD_MISSING
GROUPS = BufferConfig(
    fragments_per_chunk=3,
    assembly=AssemblyPolicy.GROUPS,
    group_min=2,
    open_chunk_s=41.0,
    sampler="oldest_first",
)


async def outcomes(it: Served, *members: tuple[str, int]) -> list[int]:
    reply = await it.append(*(it.metadata(member, worker_id=group) for group, member in members))
    return [each.outcome for each in reply.results]


def ends(it: Served, after: int = 0, wait_s: float = 0.0, buffer: str = "") -> Any:
    request = pb.GroupEndsRequest(after_number=after, max_wait=span(wait_s), buffer=buffer)
    return it.stub.GroupEnds(request, timeout=CALL_S)


def told(reply: pb.GroupEndsResponse) -> list[tuple[str, int, int]]:
    return [(each.group, each.reason, each.member_count) for each in reply.ends]


async def test_members_of_one_call_in_any_order_are_a_chunk() -> None:
    async with served(GROUPS) as it:
        await it.start()
        came = await outcomes(it, ("a", 2), ("b", 1), ("a", 0), ("b", 0), ("a", 1))
        assert [ADMITTED] * 5 == came
        granted = (await it.fetch(3)).grant.fragments
    found = [(each.metadata.worker_id, each.metadata.fragment_index) for each in granted]
    assert [("a", 0), ("a", 1), ("a", 2)] == found


async def test_a_member_without_its_payload_holds_no_other_member_back() -> None:
    async with served(GROUPS) as it:
        await it.start()
        lacking = it.metadata(1, worker_id="a")
        it.custodian.unannounced.discard(lacking.payload.payload_id)
        reply = await it.append(
            it.metadata(0, worker_id="a"), lacking, it.metadata(2, worker_id="a")
        )
        assert [ADMITTED, MISSING, ADMITTED] == [each.outcome for each in reply.results]
        assert [ADMITTED] == await outcomes(it, ("a", 1))


async def test_a_late_member_is_told_why_its_group_ended() -> None:
    async with served(GROUPS) as it:
        await it.start()
        await outcomes(it, ("a", 0), ("a", 2))
        it.clock.advance(41.0)
        reply = await it.append(it.metadata(1, worker_id="a"))
    [result] = reply.results
    assert ENDED == result.outcome
    assert fragment_pb2.GROUP_END_REASON_PARTIAL == result.group_end


async def test_who_waits_for_ends_is_told_as_soon_as_a_group_ends() -> None:
    async with served(GROUPS) as it:
        await it.start()
        await outcomes(it, ("a", 0), ("b", 1), ("b", 2), ("c", 0), ("c", 1))
        waiting = ends(it, wait_s=60.0)
        await eventually(lambda: it.server.driver.reading.watcher_count == 1)
        assert [ADMITTED] == await outcomes(it, ("b", 0))
        reply = await waiting
        assert [("b", fragment_pb2.GROUP_END_REASON_COMPLETE, 3)] == told(reply)
        waiting = ends(it, after=reply.ends[-1].number, wait_s=60.0)
        await eventually(lambda: it.server.driver.reading.watcher_count == 1)
        it.clock.advance(41.0)
        expected = [
            ("a", fragment_pb2.GROUP_END_REASON_INCOMPLETE, 1),
            ("c", fragment_pb2.GROUP_END_REASON_PARTIAL, 2),
        ]
        assert expected == told(await waiting)
        text = it.server.metrics.registry.get_sample_value(
            "breadbox_groups_ended_total", {"buffer": "default", "reason": "partial"}
        )
    assert 1.0 == text


async def test_a_wait_for_ends_goes_on_while_what_comes_ends_no_group() -> None:
    async with served(GROUPS) as it:
        await it.start()
        waiting = ends(it, wait_s=60.0)
        await eventually(lambda: it.server.driver.reading.watcher_count == 1)
        for group in ("a", "b", "c"):
            assert [ADMITTED] == await outcomes(it, (group, 0))
        assert [ADMITTED, ADMITTED] == await outcomes(it, ("b", 1), ("b", 2))
        assert [("b", fragment_pb2.GROUP_END_REASON_COMPLETE, 3)] == told(await waiting)


async def test_a_wait_for_ends_elapses_without_any() -> None:
    async with served(GROUPS) as it:
        await it.start()
        waiting = ends(it, wait_s=5.0)
        await eventually(lambda: it.server.driver.reading.watcher_count == 1)
        it.clock.advance(5.0)
        assert [] == told(await waiting)
        assert [] == told(await ends(it))


async def test_ends_of_a_buffer_without_groups_are_refused_and_not_waited_for() -> None:
    async with served() as it:
        await it.start()
        with pytest.raises(grpc.aio.AioRpcError, match="buffer has no groups") as refused:
            await ends(it, wait_s=60.0)
        assert grpc.StatusCode.INVALID_ARGUMENT is refused.value.code()


async def test_a_wait_ends_with_its_buffer() -> None:
    async with served(GROUPS) as it:
        gone = BufferName("gone")
        await it.server.driver.core.call(CreateBuffer(gone, GROUPS))
        waiting = ends(it, wait_s=60.0, buffer=gone)
        await eventually(lambda: it.server.driver.reading.watcher_count == 1)
        await it.server.driver.delete_buffer(DeleteBuffer(gone))
        with pytest.raises(grpc.RpcError) as caught:
            await waiting
    assert "BUFFER_NOT_FOUND" == reason_of(caught.value)


async def test_a_number_that_cannot_be_is_refused() -> None:
    async with served(GROUPS) as it:
        with pytest.raises(grpc.RpcError) as caught:
            await ends(it, after=-1)
    assert "ARGUMENT_INVALID" == reason_of(caught.value)


async def test_what_a_buffer_of_groups_lacks_is_shown_and_its_groups_are_no_workers() -> None:
    async with served(GROUPS) as it:
        await it.start()
        await outcomes(it, ("a", 1), ("b", 0), ("b", 1), ("b", 2))
        await it.make_room(3)
        it.clock.advance(40.0)
        request = pb.GetBufferRequest(with_workers=True)
        buffer = (await it.stub.GetBuffer(request, timeout=CALL_S)).buffer
    [group] = buffer.state.open_groups
    assert ("a", 1, [0, 2], 40) == (
        group.group,
        group.member_count,
        list(group.lacking_members),
        group.silent_duration.seconds,
    )
    assert [] == list(buffer.workers)
    assert 1 == buffer.state.counters["groups_complete"]


async def test_numbers_come_with_the_grant_and_say_which_groups_are_dropped() -> None:
    config = dataclasses.replace(GROUPS, drop_equal="reward")
    async with served(config) as it:
        await it.start()
        for group in ("agree", "differ"):
            sent = [it.metadata(member, worker_id=group) for member in range(3)]
            for member, each in enumerate(sent):
                each.numbers = f'{{"reward":{member if group == "differ" else 1}}}'
            await it.append(*sent)
        granted = (await it.fetch(3)).grant.fragments
        assert [f'{{"reward":{n}}}' for n in range(3)] == [e.metadata.numbers for e in granted]
        equal, complete = (
            fragment_pb2.GROUP_END_REASON_EQUAL,
            fragment_pb2.GROUP_END_REASON_COMPLETE,
        )
        assert [("agree", equal, 3), ("differ", complete, 3)] == told(await ends(it))
        late = it.metadata(2, worker_id="agree")
        assert [fragment_pb2.ADMISSION_OUTCOME_DUPLICATE] == [
            each.outcome for each in (await it.append(late)).results
        ]


@pytest.mark.parametrize(
    "numbers",
    [
        "no JSON",
        "[1]",
        "7",
        "[" * 5000,
        json.dumps({str(n): n for n in range(17)}),
        json.dumps({"a" * 65: 1}),
        json.dumps({"": 1}),
        json.dumps({"a": "b" * 65}),
        json.dumps({"a": 2**63}),
        json.dumps({"a": None}),
        json.dumps({"a": [1]}),
        '{"a": "' + " " * 20_000 + '"}',
    ],
    ids=lambda text: text[:12],
)
async def test_numbers_that_are_none_or_too_many_or_too_large_are_refused(numbers: str) -> None:
    async with served(GROUPS) as it:
        await it.start()
        wrong = it.metadata(1, worker_id="a")
        wrong.numbers = numbers
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.append(it.metadata(0, worker_id="a"), wrong)
        assert "ARGUMENT_INVALID" == reason_of(caught.value)
        assert "fragments[1].numbers" in str(caught.value.details())
        assert [ADMITTED] == await outcomes(it, ("a", 0)), "nothing of it was admitted"


async def test_the_longest_numbers_are_taken() -> None:
    longest = json.dumps({f"{n:02}" + chr(1) * 62: chr(1) * 64 for n in range(16)})
    async with served(GROUPS) as it:
        await it.start()
        member = it.metadata(0, worker_id="a")
        member.numbers = longest
        assert [ADMITTED] == [each.outcome for each in (await it.append(member)).results]


def test_drop_equal_names_every_number_that_a_producer_can_send() -> None:
    """The core imports nothing of the client's, so the bound stands in both."""
    assert NUMBER_BYTES_MAX == NUMBER_NAME_BYTES_MAX
