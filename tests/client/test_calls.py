"""Both clients against a scripted server on a real channel."""

import asyncio
import inspect
import os
import re
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

import breadbox
from breadbox import aio
from breadbox.model import errors, types
from breadbox.model.options import ClientOptions, Tls
from breadbox.operations import calls, operations
from breadbox.service import Service
from breadbox.stores import open_store
from breadbox.v1 import buffer_pb2, errors_pb2, fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.rpc import status as server_status
from support.callers import Caller, make_caller
from support.clock import ManualClock
from support.eventually import eventually
from support.fake_service import SERVICE_DESCRIPTOR, FakeService, Gate, refuse, serving
from support.fragments import vector_fragment

PAYLOAD = types.PayloadReference("0" * 32, 100, 0)
PAYLOAD_ON_WIRE = fragment_pb2.PayloadReference(payload_id="0" * 32, size_bytes=100)
METADATA = types.FragmentMetadata(
    worker_id="w",
    fragment_index=3,
    session_id="s",
    model_version_min=1,
    model_version_max=2,
    payload=PAYLOAD,
    step_count=8,
    discontinuity=True,
)
METADATA_ON_WIRE = fragment_pb2.FragmentMetadata(
    worker_id="w",
    fragment_index=3,
    session_id="s",
    model_version_min=1,
    model_version_max=2,
    payload=PAYLOAD_ON_WIRE,
    step_count=8,
    discontinuity=True,
)
EPISODE = types.EpisodeReport(
    worker_id="w",
    return_sum=2.0,
    discounted_return_sum=1.5,
    step_count=7,
    end=types.EpisodeEnd.TRUNCATED,
)
GRANTED = pb.FetchFragmentsResponse(
    grant=pb.FetchGrant(
        lease=pb.Lease(lease_id="l", remaining_duration=Duration(seconds=60)),
        fragments=[
            fragment_pb2.FragmentReference(
                metadata=METADATA_ON_WIRE,
                chunk_id=5,
                staleness=1,
                use_count=2,
                priority=0.5,
                probability=0.25,
                population=9,
            )
        ],
        session_id="s",
        model_version=2,
    ),
)
READ = pb.ReadMembersResponse(part_counts=[0])
GIVEN = pb.TakeTicketsResponse(groups=["ticket-1"], session_id="s")


def start(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a call that the test awaits later."""
    return asyncio.get_running_loop().create_task(coroutine)


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


OF_THE_STORE = {"WritePayloads", "ReadPayloads", "DiscardPayloads"}
"""Called by `breadbox.stores.gateway` alone, behind the face of a store."""
RPCS = [method.name for method in SERVICE_DESCRIPTOR.methods if method.name not in OF_THE_STORE]
Client = breadbox.Client | aio.Client

CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {
    "StartSession": (
        ("s",),
        {"model_version": 4},
        pb.StartSessionRequest(buffer="b", session_id="s", model_version=4),
    ),
    "EndSession": (("s",), {}, pb.EndSessionRequest(buffer="b", session_id="s")),
    "PublishModel": (
        ("s", 0, PAYLOAD),
        {},
        pb.PublishModelRequest(
            buffer="b", session_id="s", model_version=0, weights=PAYLOAD_ON_WIRE
        ),
    ),
    "WatchModel": (
        (types.ModelState("s", 0, None),),
        {"max_wait_s": 0.0},
        pb.WatchModelRequest(
            buffer="b",
            known_session_id="s",
            known_model_version=0,
            known_weights=False,
            max_wait=Duration(),
        ),
    ),
    "GroupEnds": (
        (7,),
        {"max_wait_s": 0.0},
        pb.GroupEndsRequest(buffer="b", after_number=7, max_wait=Duration()),
    ),
    "TakeTickets": (
        (2, 1.5),
        {"request_id": "r", "lease_s": 30.0},
        pb.TakeTicketsRequest(
            buffer="b",
            request_id="r",
            ticket_count=2,
            max_wait=Duration(seconds=1, nanos=500_000_000),
            lease_duration=Duration(seconds=30),
        ),
    ),
    "RenewTicket": (
        ("g",),
        {"lease_s": 9.0},
        pb.RenewTicketRequest(buffer="b", group="g", lease_duration=Duration(seconds=9)),
    ),
    "GiveBackTicket": (
        ("g", 0),
        {},
        pb.GiveBackTicketRequest(buffer="b", group="g", member=0),
    ),
    "AppendFragments": (
        ([METADATA],),
        {},
        pb.AppendFragmentsRequest(buffer="b", fragments=[METADATA_ON_WIRE]),
    ),
    "Members": (("row-",), {}, pb.MembersRequest(buffer="b", prefix="row-")),
    "ReadMembers": (
        ([("g", 0)], None),
        {},
        pb.ReadMembersRequest(
            buffer="b", keys=[pb.MemberKey(group="g")], inline_bytes_max=4 * 2**20
        ),
    ),
    "ClaimMembers": (
        ("reward", 8, 1.5),
        {"lease_s": 9.0},
        pb.ClaimMembersRequest(
            buffer="b",
            lacking="reward",
            member_count=8,
            max_wait=Duration(seconds=1, nanos=500_000_000),
            lease_duration=Duration(seconds=9),
            inline_bytes_max=4 * 2**20,
        ),
    ),
    "DropMembers": (
        ([("g", 3)],),
        {},
        pb.DropMembersRequest(buffer="b", keys=[pb.MemberKey(group="g", member=3)]),
    ),
    "FetchFragments": (
        (8, 1.5),
        {"rank": 1, "world_size": 2, "request_id": "r", "lease_s": 30.0},
        pb.FetchFragmentsRequest(
            buffer="b",
            request_id="r",
            fragment_count=8,
            max_wait=Duration(seconds=1, nanos=500_000_000),
            inline_bytes_max=4 * 2**20,
            rank=1,
            world_size=2,
            lease_duration=Duration(seconds=30),
        ),
    ),
    "GetPreparedFragments": (
        ("r",),
        {},
        pb.GetPreparedFragmentsRequest(buffer="b", request_id="r"),
    ),
    "ReadFragments": (
        (7,),
        {
            "chunk_count_max": 3,
            "max_wait_s": 0.0,
            "lease_s": 30.0,
            "known_session_id": "",
            "subscription": "archive",
        },
        pb.ReadFragmentsRequest(
            inline_bytes_max=4 * 2**20,
            buffer="b",
            after_chunk_id=7,
            chunk_count_max=3,
            max_wait=Duration(),
            lease_duration=Duration(seconds=30),
            known_session_id="",
            subscription="archive",
        ),
    ),
    "CreateSubscription": (
        ("archive",),
        {"retaining": True, "after_chunk_id": -1},
        pb.CreateSubscriptionRequest(buffer="b", name="archive", retaining=True, after_chunk_id=-1),
    ),
    "AcknowledgeChunks": (
        ("archive", 7),
        {},
        pb.AcknowledgeChunksRequest(buffer="b", subscription="archive", chunk_id=7),
    ),
    "DeleteSubscription": (
        ("archive",),
        {},
        pb.DeleteSubscriptionRequest(buffer="b", name="archive"),
    ),
    "RenewLease": (
        ("l",),
        {"lease_s": 9.0},
        pb.RenewLeaseRequest(buffer="b", lease_id="l", lease_duration=Duration(seconds=9)),
    ),
    "ReleaseLease": (
        ("l", types.ReleaseMode.RETURNED),
        {},
        pb.ReleaseLeaseRequest(buffer="b", lease_id="l", mode=pb.RELEASE_MODE_RETURNED),
    ),
    "UpdatePriorities": (
        ({7: 0.5, 8: 2},),
        {"delete": (1, 2)},
        pb.UpdatePrioritiesRequest(
            buffer="b",
            updates=[
                pb.PriorityUpdate(chunk_id=7, priority=0.5),
                pb.PriorityUpdate(chunk_id=8, priority=2.0),
            ],
            delete_chunk_ids=[1, 2],
        ),
    ),
    "CreateBuffer": (
        ("n", types.BufferConfig(staleness_max=0)),
        {},
        pb.CreateBufferRequest(name="n", config=buffer_pb2.BufferConfig(staleness_max=0)),
    ),
    "UpdateBuffer": (
        ("n", types.BufferConfig(uses_max=3)),
        {},
        pb.UpdateBufferRequest(name="n", config=buffer_pb2.BufferConfig(uses_max=3)),
    ),
    "DeleteBuffer": (("n",), {}, pb.DeleteBufferRequest(name="n")),
    "ListBuffers": ((), {}, pb.ListBuffersRequest()),
    "GetBuffer": ((), {}, pb.GetBufferRequest(name="b")),
    "GetStoreConfig": ((), {}, pb.GetStoreConfigRequest()),
    "ReportEpisodes": (
        ([EPISODE],),
        {},
        pb.ReportEpisodesRequest(
            buffer="b",
            episodes=[
                pb.EpisodeReport(
                    worker_id="w",
                    task="default",
                    return_sum=2.0,
                    discounted_return_sum=1.5,
                    step_count=7,
                    end=pb.EPISODE_END_TRUNCATED,
                )
            ],
        ),
    ),
}


# Every RPC --------------------------------------------------------------------------------------


def test_every_rpc_of_the_contract_is_in_the_table_of_calls() -> None:
    assert sorted(RPCS) == sorted(calls.METHODS)
    assert sorted(RPCS) == sorted(CASES)


@pytest.mark.parametrize("rpc", RPCS)
def test_every_rpc_is_a_method_of_both_clients_with_one_signature(rpc: str) -> None:
    name = snake(rpc)
    is_raw = hasattr(Service, name)
    function = getattr(Service if is_raw else breadbox.Client, name)
    awaited = getattr(aio.Service if is_raw else aio.Client, name)
    assert inspect.signature(function).parameters == inspect.signature(awaited).parameters
    assert inspect.iscoroutinefunction(awaited)


def test_all_public_methods_of_the_blocking_client_exist_on_the_asyncio_client() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    # The store is opened by an awaited call there, since opening it may block.
    assert public(breadbox.Client) - {"store"} == (public(aio.Client) - {"open_store"}) | {"closed"}


@pytest.mark.parametrize("rpc", RPCS)
async def test_every_method_sends_its_own_request(
    rpc: str, kind: str, address: str, fake: FakeService
) -> None:
    args, kwargs, wanted = CASES[rpc]
    fake.will("FetchFragments", GRANTED)
    fake.will("TakeTickets", GIVEN)
    fake.will("ReadMembers", READ)
    fake.will("ClaimMembers", pb.ClaimMembersResponse(grant=GRANTED.grant))
    async with make_caller(kind, address, clock=ManualClock(), buffer="b") as caller:
        await caller.call(snake(rpc), *args, **kwargs)
    assert [(rpc, wanted)] == [(call.method, call.request) for call in fake.received]


@pytest.mark.parametrize("rpc", RPCS)
async def test_every_call_has_a_deadline(
    rpc: str, kind: str, address: str, fake: FakeService
) -> None:
    args, kwargs, request = CASES[rpc]
    waits = "max_wait" in request.DESCRIPTOR.fields_by_name
    wait_s = request.max_wait.ToTimedelta().total_seconds() if waits else 0.0
    fake.will("FetchFragments", GRANTED)
    fake.will("TakeTickets", GIVEN)
    fake.will("ReadMembers", READ)
    fake.will("ClaimMembers", pb.ClaimMembersResponse(grant=GRANTED.grant))
    async with make_caller(
        kind, address, clock=ManualClock(), buffer="b", deadline_s=4.0
    ) as caller:
        await caller.call(snake(rpc), *args, **kwargs)
    (call,) = fake.received
    assert pytest.approx(wait_s + 4.0, abs=1.0) == call.time_remaining_s


async def test_a_token_goes_with_every_call(kind: str, address: str, fake: FakeService) -> None:
    async with make_caller(kind, address, token="secret") as caller:
        await caller.call("list_buffers")
    (call,) = fake.received
    assert "Bearer secret" == call.metadata["authorization"]
    assert "secret" not in repr(caller.client)


async def test_a_grant_arrives_as_plain_types(caller: Caller, fake: FakeService) -> None:
    fake.will("FetchFragments", GRANTED)
    grant = await caller.call("fetch_fragments", 1, request_id="r")
    reference = types.FragmentReference(METADATA, 5, 1, 2, 0.5, 0.25, 9)
    assert types.LeaseGrant("l", 60.0, (reference,), "s", 2, "r") == grant


async def test_a_rank_knows_the_steps_of_all_shares_and_no_broken_count_harms_it(
    caller: Caller, fake: FakeService
) -> None:
    shared = pb.FetchFragmentsResponse()
    shared.CopyFrom(GRANTED)
    shared.grant.share_fragment_counts.extend([2, -1, 1, 5])
    shared.grant.step_counts.extend([7, 8, 9])
    fake.will("FetchFragments", shared)
    grant = await caller.call("fetch_fragments", 4, request_id="r")
    assert ((7, 8), (), (9,), ()) == grant.step_counts


# Failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", server_status.TABLE.items(), ids=lambda row: row[0].__name__)
async def test_every_refusal_of_the_server_arrives_as_the_librarys_own_error(
    row: tuple[type[Exception], server_status.Row], kind: str, address: str, fake: FakeService
) -> None:
    _, told = row
    reason = errors_pb2.ErrorReason.Name(told.reason)
    answer = refuse(told.code, reason, retry_delay_s=told.retry_delay_s, request_id="abc")
    # Sent once by the library, so that what may pass is raised too; to a standby until it leads.
    fake.will("ReportEpisodes", answer)
    async with make_caller(kind, address, reconnect_s=0.0) as caller:
        with pytest.raises(errors.ReplayBufferError) as caught:
            await caller.call("report_episodes", [EPISODE])
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert "abc" == caught.value.request_id
    assert type(caught.value) is not errors.ReplayBufferError


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.name != "OK"])
async def test_no_error_of_grpc_escapes_whatever_the_code(
    code: grpc.StatusCode, caller: Caller, fake: FakeService
) -> None:
    fake.will("ReportEpisodes", refuse(code))
    with pytest.raises(errors.ReplayBufferError):
        await caller.call("report_episodes", [EPISODE])


async def test_a_server_that_does_not_know_a_call_is_said_to_be_older(
    caller: Caller, fake: FakeService
) -> None:
    fake.will("TakeTickets", refuse(grpc.StatusCode.UNIMPLEMENTED))
    with pytest.raises(errors.NotSupportedError, match=r"does not know this call .* older than"):
        await caller.call("take_tickets", 1, request_id="r")


async def test_a_server_that_is_not_there_is_unavailable_and_named(kind: str) -> None:
    async with make_caller(kind, "127.0.0.1:1", reconnect_s=0.0) as caller:
        with pytest.raises(errors.UnavailableError, match=r"127\.0\.0\.1:1"):
            await caller.call("list_buffers")


async def test_a_server_that_does_not_answer_in_time_is_a_passed_deadline(
    kind: str, address: str, fake: FakeService
) -> None:
    gate = Gate(pb.ListBuffersResponse())
    fake.will("ListBuffers", gate)
    async with make_caller(kind, address, deadline_s=0.2, reconnect_s=0.0) as caller:
        with pytest.raises(errors.DeadlineExceededError, match="did not answer in time"):
            await caller.call("list_buffers")
    gate.open.set()


async def test_a_server_that_is_silent_for_a_while_is_ridden_through(
    kind: str, address: str, fake: FakeService
) -> None:
    gate = Gate(pb.ListBuffersResponse())
    fake.will("ListBuffers", gate)
    async with make_caller(kind, address, deadline_s=0.2) as caller:
        assert () == await caller.call("list_buffers")
    gate.open.set()


@pytest.mark.parametrize(
    ("method", "args", "field"),
    [
        ("start_session", (7,), "session_id"),
        ("start_session", ("\ud800",), "session_id"),
        ("fetch_fragments", (1.5,), "fragment_count"),
        ("fetch_fragments", (2**70,), "fragment_count"),
        ("publish_model", ("s", "one"), "model_version"),
        ("update_buffer", ("b", types.BufferConfig(lease_s=float("nan"))), "lease_s"),
        ("update_buffer", ("b", types.BufferConfig(sampler="clever")), "sampler"),
        ("update_buffer", ("b", types.BufferConfig(lease_s=-1.0)), "lease_s"),
        ("update_buffer", ("b", types.BufferConfig(capacity_chunks=2**64)), "capacity_chunks"),
    ],
)
async def test_what_does_not_fit_its_field_is_refused_here_and_named(
    caller: Caller, fake: FakeService, method: str, args: tuple[Any, ...], field: str
) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        await caller.call(method, *args)
    assert field == caught.value.field
    assert [] == fake.received


async def test_a_server_that_restarts_is_found_again_under_the_same_request_id(kind: str) -> None:
    first, second = FakeService(), FakeService()
    gate = Gate(GRANTED)
    first.will("FetchFragments", gate)
    second.will("FetchFragments", GRANTED)
    with serving(first) as address:
        caller = make_caller(kind, address, reconnect_s=20.0)
        fetch = start(caller.call("fetch_fragments", 1, 60.0))
        assert await asyncio.to_thread(gate.entered.wait, 10)
    with serving(second, address):
        grant = await fetch
        await caller.call("close")
    (before,), (after,) = first.requests("FetchFragments"), second.requests("FetchFragments")
    assert before.request_id == after.request_id == grant.request_id


# Appending --------------------------------------------------------------------------------------


def admit_all(request: Any, context: grpc.ServicerContext) -> pb.AppendFragmentsResponse:
    admitted = pb.AppendResult(outcome=fragment_pb2.ADMISSION_OUTCOME_ADMITTED)
    return pb.AppendFragmentsResponse(results=[admitted] * len(request.fragments))


def stored_names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def in_pairs(
    fake: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> pb.GetStoreConfigResponse:
    """Fragments go in groups of two, into a store of the test's own."""
    monkeypatch.setattr(operations, "APPEND_COUNT_MAX", 2)
    open_store(f"file://{tmp_path}").close()
    config = pb.GetStoreConfigResponse(
        store_url=f"file://{tmp_path}", unannounced_duration=Duration(seconds=600)
    )
    fake.will("GetStoreConfig", config)
    return config


@pytest.mark.usefixtures("in_pairs")
async def test_groups_are_announced_in_order_with_payloads_that_are_there(
    caller: Caller, fake: FakeService, tmp_path: Path
) -> None:
    fake.will("AppendFragments", admit_all, refuse(grpc.StatusCode.UNAVAILABLE), *[admit_all] * 2)
    fragments = [vector_fragment(index) for index in range(5)]
    results = await caller.call("append_many", fragments)
    assert [types.AdmissionOutcome.ADMITTED] * 5 == [result.outcome for result in results]
    requests = fake.requests("AppendFragments")
    sent = [[metadata.fragment_index for metadata in request.fragments] for request in requests]
    assert [[0, 1], [2, 3], [2, 3], [4]] == sent
    announced = {m.payload.payload_id for request in requests for m in request.fragments}
    assert announced == stored_names(tmp_path)


@pytest.mark.usefixtures("in_pairs")
async def test_closing_ends_an_append_whose_next_group_is_written_meanwhile(
    caller: Caller, fake: FakeService
) -> None:
    gate = Gate(pb.AppendFragmentsResponse())
    fake.will("AppendFragments", gate)
    append = start(caller.call("append_many", [vector_fragment(index) for index in range(4)]))
    assert await asyncio.to_thread(gate.entered.wait, 10)
    await caller.call("close")
    with pytest.raises(errors.ClosedError):
        await append


@pytest.mark.usefixtures("in_pairs")
async def test_cancelling_an_append_whose_next_group_is_written_meanwhile_is_not_converted(
    address: str, fake: FakeService
) -> None:
    gate = Gate(pb.AppendFragmentsResponse())
    fake.will("AppendFragments", gate)
    async with make_caller("asyncio", address) as caller:
        append = start(caller.call("append_many", [vector_fragment(index) for index in range(4)]))
        assert await asyncio.to_thread(gate.entered.wait, 10)
        append.cancel()
        with pytest.raises(asyncio.CancelledError):
            await append
        assert await asyncio.to_thread(gate.caller_left.wait, 10)


# Cancelling and closing -------------------------------------------------------------------------


async def test_cancelling_a_call_cancels_it_on_the_server_and_is_not_converted(
    address: str, fake: FakeService
) -> None:
    gate = Gate(GRANTED)
    fake.will("FetchFragments", gate)
    async with make_caller("asyncio", address) as caller:
        task = start(caller.call("fetch_fragments", 1, 60.0))
        assert await asyncio.to_thread(gate.entered.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gate.caller_left.wait, 10)
        assert 1 == len(fake.received)


async def test_the_callers_own_timeout_is_not_converted(address: str, fake: FakeService) -> None:
    gate = Gate(GRANTED)
    fake.will("FetchFragments", gate)
    async with make_caller("asyncio", address) as caller:
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.1):
                await caller.call("fetch_fragments", 1, 60.0)
    assert not isinstance(caught.value, errors.ReplayBufferError)


async def test_cancelling_while_waiting_to_try_again_ends_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = aio.Client("127.0.0.1:1", ClientOptions())
    task = start(client.list_buffers())
    await eventually(lambda: "trying again" in caplog.text, "the call waits to try again")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.close()


@pytest.mark.parametrize("rpc", ["FetchFragments", "ReportEpisodes"])
async def test_closing_ends_a_call_under_way_with_closed(
    rpc: str, caller: Caller, fake: FakeService
) -> None:
    """Also one that is never repeated, and so never looks at the client again."""
    args, kwargs, _ = CASES[rpc]
    gate = Gate(GRANTED if rpc == "FetchFragments" else pb.ReportEpisodesResponse())
    fake.will(rpc, gate)
    call = start(caller.call(snake(rpc), *args, **kwargs))
    assert await asyncio.to_thread(gate.entered.wait, 10)
    await caller.call("close")
    with pytest.raises(errors.ClosedError):
        await call


async def test_a_cancelled_call_is_cancelled_even_if_the_client_is_closing(
    address: str, fake: FakeService
) -> None:
    gate = Gate(GRANTED)
    fake.will("FetchFragments", gate)
    async with make_caller("asyncio", address) as caller:
        fetch = start(caller.call("fetch_fragments", 1, 60.0))
        assert await asyncio.to_thread(gate.entered.wait, 10)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(caller.call("close"))
            fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch


def test_closing_ends_a_wait_before_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    client = breadbox.connect("127.0.0.1:1", reconnect_s=60.0)
    failures: list[Exception] = []

    def call() -> None:
        try:
            client.list_buffers()
        except errors.ReplayBufferError as error:
            failures.append(error)

    original: Callable[[float], None] = client._interpreter._sleep  # noqa: SLF001 - to see that it sleeps

    def sleep(duration_s: float) -> None:
        waits.set()
        original(60.0)

    monkeypatch.setattr(client._interpreter, "_sleep", sleep)  # noqa: SLF001 - likewise
    thread = threading.Thread(target=call)
    thread.start()
    assert waits.wait(10)
    client.close()
    thread.join(10)
    assert [errors.ClosedError] == [type(failure) for failure in failures]


async def test_closing_twice_is_closing_once_and_a_closed_client_says_so(caller: Caller) -> None:
    await caller.call("close")
    await caller.call("close")
    assert caller.client.closed
    with pytest.raises(errors.ClosedError):
        await caller.call("list_buffers")


def test_a_client_is_refused_after_a_fork(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = breadbox.connect(address)
    parent = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: parent + 1)
        with pytest.raises(errors.ClosedError, match="fork"):
            client.list_buffers()
    client.list_buffers()
    client.close()


def test_many_threads_share_a_client(address: str, fake: FakeService) -> None:
    with breadbox.connect(address) as client:
        threads = [
            threading.Thread(target=lambda: [client.list_buffers() for _ in range(10)])
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert 80 == len(fake.received)


# Connecting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["", "  ", "http://localhost:1", None])
def test_an_address_that_cannot_be_one_is_refused(address: Any) -> None:
    with pytest.raises(errors.InvalidRequestError, match="address"):
        breadbox.connect(address)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("deadline_s", 0.0),
        ("deadline_s", float("nan")),
        ("reconnect_s", -1.0),
        ("reconnect_s", float("inf")),
        ("append_wait_s", "long"),
        ("buffer", ""),
    ],
)
def test_an_option_out_of_its_range_is_refused_and_named(name: str, value: Any) -> None:
    with pytest.raises(errors.InvalidRequestError, match=name):
        breadbox.connect("localhost:1", **{name: value})


def test_a_certificate_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"tls\.ca_file"):
        breadbox.connect("localhost:1", tls=Tls(ca_file="/nowhere/ca.pem"))
    with pytest.raises(errors.InvalidRequestError, match="both"):
        breadbox.connect("localhost:1", tls=Tls(cert_file="/nowhere/cert.pem"))


def test_connecting_does_no_io() -> None:
    breadbox.connect("host.invalid:1").close()
