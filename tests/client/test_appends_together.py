"""Appends of many threads or tasks that share a client, over a real channel."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from breadbox.model import errors, types
from breadbox.stores import open_store
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.callers import KINDS, Caller, make_caller
from support.eventually import eventually
from support.fake_service import FakeService, Gate, refuse
from support.fragments import vector_fragment

ADMITTED = types.AdmissionOutcome.ADMITTED
FULL = fragment_pb2.ADMISSION_OUTCOME_BUFFER_FULL


@pytest.fixture(autouse=True)
def _inline(fake: FakeService, tmp_path: Path) -> None:
    """Payloads travel with their fragments."""
    open_store(f"file://{tmp_path}").close()
    config = pb.GetStoreConfigResponse(
        store_url=f"file://{tmp_path}",
        unannounced_duration=Duration(seconds=600),
        inline_size_bytes_max=2**16,
    )
    fake.will("GetStoreConfig", *[config] * 20)


def admit_all(request: Any, context: grpc.ServicerContext) -> pb.AppendFragmentsResponse:
    del context
    admitted = pb.AppendResult(outcome=fragment_pb2.ADMISSION_OUTCOME_ADMITTED)
    return pb.AppendFragmentsResponse(results=[admitted] * len(request.fragments))


def workers(fake: FakeService) -> list[list[str]]:
    """Whose fragments arrived, by call."""
    requests = fake.requests("AppendFragments")
    return [sorted(each.worker_id for each in request.fragments) for request in requests]


def append(caller: Caller, worker_id: str, buffer: str = "b") -> "asyncio.Task[Any]":
    """Begin to append in a thread or task of its own."""
    fragment = vector_fragment(0, worker_id=worker_id)
    call = caller.call("append", fragment, buffer=buffer)
    return asyncio.get_running_loop().create_task(call)


async def busy(caller: Caller, fake: FakeService, held: Gate) -> "list[asyncio.Task[Any]]":
    """Two calls that the server holds."""
    fake.will("AppendFragments", held, held)
    await caller.call("list_buffers")  # Connected.
    first = [append(caller, "first"), append(caller, "second")]
    await eventually(lambda: len(workers(fake)) == 2)
    return first


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine sends nothing beside before a test has all that is to go together."""
    monkeypatch.setattr("breadbox.operations.sharing.TOGETHER_S", 20.0)


def waiting(caller: Caller) -> int:
    """How many wait to go together."""
    waiting = caller.client._interpreter._shared._waiting  # noqa: SLF001 - not seen elsewhere
    return sum(map(len, waiting.values()))


async def beside(caller: Caller, names: "list[str]") -> "list[asyncio.Task[Any]]":
    """Callers that wait to go together, in this order."""
    begun = []
    for count, name in enumerate(names, start=1):
        begun.append(append(caller, name))
        await eventually(lambda: waiting(caller) == count)  # noqa: B023 - awaited here
    return begun


async def test_those_that_come_beside_calls_under_way_go_in_one(
    caller: Caller, fake: FakeService
) -> None:
    held = Gate(admit_all)
    first = await busy(caller, fake, held)
    fake.will("AppendFragments", admit_all)
    later = await beside(caller, ["a", "b", "c", "d"])
    held.open.set()
    results = [await each for each in (*first, *later)]
    assert [result.outcome for result in results] == [ADMITTED] * 6
    assert workers(fake) == [["first"], ["second"], ["a", "b", "c", "d"]] or workers(fake) == [
        *(["second"], ["first"], ["a", "b", "c", "d"])
    ]
    (_, _, together) = fake.requests("AppendFragments")
    assert all(together.payloads)
    assert not together.HasField("max_wait")


async def test_a_refusal_that_may_concern_one_is_raised_to_that_one_alone(
    caller: Caller, fake: FakeService
) -> None:
    def refuse_b(request: Any, context: grpc.ServicerContext) -> Any:
        if any(each.worker_id == "b" for each in request.fragments):
            return refuse(
                grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", text="b is not a worker"
            )(request, context)
        return admit_all(request, context)

    held = Gate(admit_all)
    first = await busy(caller, fake, held)
    fake.will("AppendFragments", *[refuse_b] * 9)
    later = await beside(caller, ["a", "b", "c"])
    held.open.set()
    await asyncio.wait([*first, *later])
    a, b, c = later
    assert [(await a).outcome, (await c).outcome] == [ADMITTED] * 2
    with pytest.raises(errors.InvalidRequestError):
        await b
    assert workers(fake)[2] == ["a", "b", "c"]
    assert sorted(workers(fake)[3:]) == [["a"], ["b"], ["c"]]


async def test_those_without_room_come_again_each_by_itself_and_wait_at_the_server(
    caller: Caller, fake: FakeService
) -> None:
    def full_for_b(request: Any, context: grpc.ServicerContext) -> pb.AppendFragmentsResponse:
        answer = admit_all(request, context)
        for position, each in enumerate(request.fragments):
            if each.worker_id == "b":
                answer.results[position].outcome = FULL
        answer.retry_delay.seconds = 60
        return answer

    held = Gate(admit_all)
    first = await busy(caller, fake, held)
    fake.will("AppendFragments", full_for_b, admit_all)
    later = await beside(caller, ["a", "b", "c"])
    held.open.set()
    results = [await each for each in (*first, *later)]
    assert [result.outcome for result in results] == [ADMITTED] * 5
    assert workers(fake)[2:] == [["a", "b", "c"], ["b"]]
    assert fake.requests("AppendFragments")[-1].max_wait.ToNanoseconds() > 0


async def test_an_outage_is_retried_by_each(caller: Caller, fake: FakeService) -> None:
    held = Gate(admit_all)
    first = await busy(caller, fake, held)
    fake.will("AppendFragments", refuse(grpc.StatusCode.UNAVAILABLE), *[admit_all] * 3)
    later = await beside(caller, ["a", "b", "c"])
    held.open.set()
    results = [await each for each in (*first, *later)]
    assert [result.outcome for result in results] == [ADMITTED] * 5
    assert sorted(workers(fake)[3:]) == [["a"], ["b"], ["c"]]


async def test_another_buffer_is_not_waited_for(caller: Caller, fake: FakeService) -> None:
    held = Gate(admit_all)
    first = await busy(caller, fake, held)
    fake.will("AppendFragments", admit_all)
    assert (await append(caller, "elsewhere", buffer="c")).outcome is ADMITTED
    held.open.set()
    for each in first:
        await each


async def test_a_silent_call_is_not_waited_for(
    caller: Caller, fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Gate(admit_all)
    first = await busy(caller, fake, held)
    monkeypatch.setattr("breadbox.operations.sharing.TOGETHER_S", 0.01)
    fake.will("AppendFragments", *[admit_all] * 3)
    for name in ("a", "b", "c"):
        assert (await append(caller, name)).outcome is ADMITTED
    held.open.set()
    for each in first:
        await each


@pytest.mark.parametrize("kind", KINDS)
async def test_the_wait_for_company_is_a_part_of_the_deadline(
    kind: str, address: str, fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Gate(admit_all)
    async with make_caller(kind, address, deadline_s=10.0) as caller:
        first = await busy(caller, fake, held)
        monkeypatch.setattr("breadbox.operations.sharing.TOGETHER_S", 2.0)
        fake.will("AppendFragments", admit_all)
        await append(caller, "a")
        held.open.set()
        for each in first:
            await each
    left_s = [call.time_remaining_s for call in fake.received if call.method == "AppendFragments"]
    assert left_s[2] < min(left_s[:2]) - 0.2


async def test_closing_ends_all_that_waits_and_all_that_goes_together(
    caller: Caller, fake: FakeService
) -> None:
    held, together = Gate(admit_all), Gate(admit_all)
    first = await busy(caller, fake, held)
    fake.will("AppendFragments", together)
    later = await beside(caller, ["a", "b", "c"])
    held.open.set()
    await asyncio.wait(first)
    await eventually(lambda: len(workers(fake)) == 3)
    more = append(caller, "d")
    await eventually(lambda: waiting(caller) == 1)
    await caller.call("close")
    for each in (*later, more):
        async with asyncio.timeout(20):
            with pytest.raises(errors.ClosedError):
                await each


@pytest.mark.parametrize("which", ["leads", "goes along", "waits"])
async def test_a_task_that_is_cancelled_takes_nothing_from_the_others(
    address: str, fake: FakeService, which: str
) -> None:
    held, together = Gate(admit_all), Gate(admit_all)
    async with make_caller("asyncio", address) as caller:
        first = await busy(caller, fake, held)
        fake.will("AppendFragments", together, admit_all)
        later = await beside(caller, ["a", "b", "c"])
        if which != "waits":
            held.open.set()
            await asyncio.wait(first)
            await eventually(lambda: len(workers(fake)) == 3)
        gone = later.pop(0 if which == "leads" else 1)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        held.open.set()
        together.open.set()
        results = [await each for each in (*first, *later)]
        assert [result.outcome for result in results] == [ADMITTED] * 4
        expected = ["a", "c"] if which == "waits" else ["a", "b", "c"]
        assert workers(fake)[2:] == [expected]
        assert (await append(caller, "after")).outcome is ADMITTED


async def test_of_a_group_nothing_goes_together(caller: Caller, fake: FakeService) -> None:
    held = Gate(admit_all)
    first = await busy(caller, fake, held)
    fake.will("AppendFragments", admit_all)
    group = [vector_fragment(index, worker_id="group") for index in range(5)]
    await caller.call("append_many", group, buffer="b")
    assert workers(fake)[2] == ["group"] * 5
    held.open.set()
    for each in first:
        await each


async def test_an_origin_that_was_not_told_yet_is_told_beside_other_calls_too(
    caller: Caller, fake: FakeService
) -> None:
    held = Gate(admit_all)
    first = await busy(caller, fake, held)
    caller.client.declare_origin({"wrappers": "none"})
    fake.will("AppendFragments", *[admit_all] * 3)
    later = [append(caller, name) for name in ("a", "b", "c")]
    await eventually(lambda: len(workers(fake)) + waiting(caller) == 5)
    held.open.set()
    for each in (*first, *later):
        await each
    told = [each.schemas[0].origin for each in fake.requests("AppendFragments")[2:] if each.schemas]
    assert told
    assert len(told) == len(workers(fake)) - 2
    assert all(each == {"wrappers": "none"} for each in told)


@pytest.mark.parametrize("kind", KINDS)
async def test_one_that_waits_for_room_for_less_than_a_moment_does_not_wait_for_company(
    kind: str, address: str, fake: FakeService
) -> None:
    held = Gate(admit_all)
    async with make_caller(kind, address, append_wait_s=0.2) as caller:
        first = await busy(caller, fake, held)
        fake.will("AppendFragments", admit_all)
        assert (await append(caller, "a")).outcome is ADMITTED
        assert fake.requests("AppendFragments")[-1].max_wait.ToNanoseconds() > 0
        held.open.set()
        for each in first:
            await each


async def test_a_task_that_is_cancelled_when_it_is_to_lead_leaves_the_others_to_themselves(
    address: str, fake: FakeService
) -> None:
    held = Gate(admit_all)
    async with make_caller("asyncio", address) as caller:
        first = await busy(caller, fake, held)
        fake.will("AppendFragments", *[admit_all] * 5)
        later = await beside(caller, ["a", "b", "c"])
        shared = caller.client._interpreter._shared  # noqa: SLF001 - not seen elsewhere
        leader, end = later[0], shared.end

        def end_and_cancel(*arguments: Any) -> None:
            end(*arguments)
            leader.cancel()  # Before it runs again.

        shared.end = end_and_cancel
        held.open.set()
        async with asyncio.timeout(20):
            with pytest.raises(asyncio.CancelledError):
                await leader
            results = [await each for each in (*first, *later[1:])]
        assert [result.outcome for result in results] == [ADMITTED] * 4
        assert (await append(caller, "after")).outcome is ADMITTED


async def test_one_whose_leader_is_interrupted_when_it_is_to_say_so_is_sent_alone(
    address: str, fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(BaseException):
        pass

    def interrupted(*arguments: Any) -> None:
        shared.end = end
        raise Interrupted

    monkeypatch.setattr("breadbox.operations.sharing.TOGETHER_S", 2.0)
    held, together = Gate(admit_all), Gate(admit_all)
    async with make_caller("blocking", address, deadline_s=0.5) as caller:
        first = await busy(caller, fake, held)
        fake.will("AppendFragments", together, admit_all)
        leader, other = await beside(caller, ["a", "b"])
        held.open.set()
        await asyncio.wait(first)
        await eventually(lambda: len(workers(fake)) == 3)
        shared = caller.client._interpreter._shared  # noqa: SLF001 - not seen elsewhere
        end, shared.end = shared.end, interrupted
        together.open.set()
        with pytest.raises(Interrupted):
            await leader
        async with asyncio.timeout(20):
            assert (await other).outcome is ADMITTED
        assert workers(fake)[2:] == [["a", "b"], ["b"]]


async def test_closing_ends_a_call_of_several_that_has_just_begun(
    address: str, fake: FakeService
) -> None:
    held = Gate(admit_all)
    async with make_caller("asyncio", address) as caller:
        first = await busy(caller, fake, held)
        later = await beside(caller, ["a", "b", "c"])
        interpreter = caller.client._interpreter  # noqa: SLF001 - not seen elsewhere
        keep, closing = interpreter._keep, []  # noqa: SLF001

        def keep_and_close(coroutine: Any) -> Any:
            kept = keep(coroutine)
            interpreter._keep = keep  # noqa: SLF001
            kept.cancel()  # As closing does, before it runs.
            closing.append(asyncio.get_running_loop().create_task(caller.call("close")))
            return kept

        interpreter._keep = keep_and_close  # noqa: SLF001
        held.open.set()
        for each in later:
            async with asyncio.timeout(20):
                with pytest.raises(errors.ClosedError):
                    await each
        for each in (*first, *closing):
            with contextlib.suppress(errors.ClosedError):
                await each
