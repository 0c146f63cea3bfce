"""Leases that threads or tasks of one client end at the same time, over a real channel."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from breadbox.model import errors
from breadbox.model.types import ReleaseMode
from breadbox.stores import open_store
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.callers import Caller
from support.eventually import eventually
from support.fake_service import FakeService, Gate, refuse

NAMES = ["first", "second", "a", "b", "c"]


@pytest.fixture(autouse=True)
def _leases(fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches get these leases, and a busy machine sends nothing beside before all have come."""
    monkeypatch.setattr("breadbox.operations.sharing.TOGETHER_S", 20.0)
    open_store(f"file://{tmp_path}").close()
    config = pb.GetStoreConfigResponse(
        store_url=f"file://{tmp_path}", unannounced_duration=Duration(seconds=600)
    )
    fake.will("GetStoreConfig", *[config] * 20)
    for name in NAMES:
        lease = pb.Lease(lease_id=name, remaining_duration=Duration(seconds=600))
        fake.will("FetchFragments", pb.FetchFragmentsResponse(grant=pb.FetchGrant(lease=lease)))


def end_all(request: Any, context: grpc.ServicerContext) -> pb.ReleaseLeaseResponse:
    del context
    return pb.ReleaseLeaseResponse(ended_count=1 + len(request.further_lease_ids))


def ended(fake: FakeService) -> list[list[str]]:
    """Leases that calls named, by call."""
    requests = fake.requests("ReleaseLease")
    return [[each.lease_id, *each.further_lease_ids] for each in requests]


async def release(caller: Caller, lease: Any, mode: ReleaseMode = ReleaseMode.CONSUMED) -> None:
    if asyncio.iscoroutinefunction(lease.release):
        await lease.release(mode)
    else:
        await asyncio.to_thread(lease.release, mode)


async def begun(
    caller: Caller, fake: FakeService, held: Gate, mode: ReleaseMode = ReleaseMode.CONSUMED
) -> "dict[str, asyncio.Task[None]]":
    """Releases of all leases: two under way that the server holds, and the others beside them."""
    fake.will("ReleaseLease", held, held)
    tasks, waiting = {}, caller.client._interpreter._shared._waiting  # noqa: SLF001 - unseen elsewhere

    def waiting_count() -> int:
        return sum(map(len, waiting.values()))

    for count, name in enumerate(NAMES, start=1):
        lease = await caller.call("fetch", 1)
        end = release(caller, lease, mode if count > 2 else ReleaseMode.CONSUMED)
        tasks[name] = asyncio.get_running_loop().create_task(end)
        await eventually(lambda: len(ended(fake)) + waiting_count() == count)  # noqa: B023 - awaited here
    return tasks


async def all_of(tasks: "dict[str, asyncio.Task[None]]") -> None:
    for each in tasks.values():
        await each


async def test_what_is_released_beside_calls_under_way_goes_in_one(
    caller: Caller, fake: FakeService
) -> None:
    held = Gate(end_all)
    tasks = await begun(caller, fake, held)
    fake.will("ReleaseLease", end_all)
    held.open.set()
    await all_of(tasks)
    assert ended(fake) == [["first"], ["second"], ["a", "b", "c"]]


async def test_a_lease_that_has_ended_is_said_to_its_own_caller_alone(
    caller: Caller, fake: FakeService
) -> None:
    def refuse_b(request: Any, context: grpc.ServicerContext) -> Any:
        if "b" in (request.lease_id, *request.further_lease_ids):
            return refuse(grpc.StatusCode.NOT_FOUND, "LEASE_NOT_FOUND", lease="b")(request, context)
        return end_all(request, context)

    held = Gate(end_all)
    tasks = await begun(caller, fake, held)
    fake.will("ReleaseLease", *[refuse_b] * 4)
    held.open.set()
    with pytest.raises(errors.LeaseExpiredError):
        await tasks.pop("b")
    await all_of(tasks)
    assert sorted(ended(fake)[3:]) == [["a"], ["b"], ["c"]]


async def test_a_server_that_knows_of_no_further_leases_is_sent_each(
    caller: Caller, fake: FakeService
) -> None:
    held = Gate(end_all)
    tasks = await begun(caller, fake, held)
    held.open.set()
    await all_of(tasks)  # By empty answers.
    assert sorted(ended(fake)[3:]) == [["a"], ["b"], ["c"]]


async def test_leases_that_are_returned_go_alone(caller: Caller, fake: FakeService) -> None:
    held = Gate(end_all)
    tasks = await begun(caller, fake, held, ReleaseMode.RETURNED)
    assert ended(fake) == [[name] for name in NAMES]
    held.open.set()
    await all_of(tasks)
