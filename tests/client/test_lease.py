"""Leases over a real channel: renewed while open, consumed or returned when left."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import grpc
import numpy as np
import pytest
import torch
from google.protobuf.duration_pb2 import Duration

import breadbox
from breadbox import aio, payload, stores
from breadbox.model import errors
from breadbox.model.options import ClientOptions
from breadbox.model.types import LeaseGrant, ReleaseMode
from breadbox.operations import operations
from breadbox.operations.leasing import Granted
from breadbox.reading import batches, parts
from breadbox.reading.loading import LoaderKeywords, LoadOrder
from breadbox.stores.base import PayloadStore
from breadbox.transport import background as keeping
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.wire import conversion as wire
from support import growth
from support.callers import make_caller
from support.eventually import eventually_sync
from support.fake_service import FakeService, Gate, refuse
from support.fragments import vector_fragment
from support.operation_world import OperationWorld

FRAGMENT_COUNT = 20
LEASE_S = 0.06
"""So short that the first renewal is due after 20 ms."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PayloadStore]:
    opened = stores.open_store(f"file://{tmp_path}")
    yield opened
    opened.close()


@pytest.fixture
def granted(store: PayloadStore, fake: FakeService) -> pb.FetchFragmentsResponse:
    fragments = [vector_fragment(index) for index in range(FRAGMENT_COUNT)]
    references = payload.write_fragments(store, fragments)
    grant = pb.FetchGrant(
        lease=pb.Lease(lease_id="l", remaining_duration=Duration(seconds=60)),
        session_id="s",
        model_version=0,
        fragments=[
            fragment_pb2.FragmentReference(
                metadata=wire.announcement(fragment, reference),
                chunk_id=fragment.fragment_index,
                use_count=1,
            )
            for fragment, reference in zip(fragments, references, strict=True)
        ],
    )
    response = pb.FetchFragmentsResponse(grant=grant)
    fake.will("FetchFragments", response)
    return response


@pytest.fixture
def client(
    address: str, store: PayloadStore, granted: pb.FetchFragmentsResponse
) -> Iterator[breadbox.Client]:
    with breadbox.Client(address, ClientOptions(deadline_s=5.0), store=store) as made:
        yield made


@pytest.fixture
async def async_client(
    address: str, store: PayloadStore, granted: pb.FetchFragmentsResponse
) -> Any:
    async with aio.Client(address, ClientOptions(deadline_s=5.0), store=store) as made:
        yield made


def released(fake: FakeService) -> list[int]:
    return [request.mode for request in fake.requests("ReleaseLease")]


class LearnerError(Exception):
    """What goes wrong in a learner."""


# Leaving ----------------------------------------------------------------------------------------


def test_a_clean_exit_consumes_the_lease_once(client: breadbox.Client, fake: FakeService) -> None:
    with client.fetch(FRAGMENT_COUNT) as lease:
        assert [] == released(fake)
    lease.release()
    assert [pb.RELEASE_MODE_CONSUMED] == released(fake)


def test_an_exception_returns_the_lease_and_goes_on_its_way(
    client: breadbox.Client, fake: FakeService
) -> None:
    with pytest.raises(LearnerError), client.fetch(FRAGMENT_COUNT):
        raise LearnerError
    assert [pb.RELEASE_MODE_RETURNED] == released(fake)


def test_a_failed_return_does_not_hide_the_exception(
    client: breadbox.Client, fake: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    fake.will("ReleaseLease", refuse(grpc.StatusCode.UNAVAILABLE))
    with pytest.raises(LearnerError), client.fetch(FRAGMENT_COUNT):
        raise LearnerError
    assert "could not be returned" in caplog.text
    assert [pb.RELEASE_MODE_RETURNED] == released(fake)


def test_a_lease_that_expired_before_a_clean_exit_is_told(
    client: breadbox.Client, fake: FakeService
) -> None:
    """The server may serve its chunks again: the learner must know."""
    fake.will("ReleaseLease", refuse(grpc.StatusCode.NOT_FOUND, "LEASE_NOT_FOUND", lease="l"))
    with pytest.raises(errors.LeaseExpiredError), client.fetch(FRAGMENT_COUNT):
        pass


def test_a_lease_released_by_hand_is_not_released_again(
    client: breadbox.Client, fake: FakeService
) -> None:
    with client.fetch(FRAGMENT_COUNT) as lease:
        lease.release(ReleaseMode.RETURNED)
        with pytest.raises(errors.ClosedError):
            next(lease.fragments())
    assert [pb.RELEASE_MODE_RETURNED] == released(fake)


async def test_an_async_lease_is_consumed_by_a_clean_exit(
    async_client: aio.Client, fake: FakeService
) -> None:
    async with await async_client.fetch(FRAGMENT_COUNT):
        assert [] == released(fake)
    assert [pb.RELEASE_MODE_CONSUMED] == released(fake)


async def test_an_async_lease_needs_no_await_in_its_with(
    async_client: aio.Client, fake: FakeService
) -> None:
    async with async_client.fetch(FRAGMENT_COUNT) as lease:
        assert FRAGMENT_COUNT == len(lease)
        assert [] == released(fake)
    assert [pb.RELEASE_MODE_CONSUMED] == released(fake)


async def test_an_exception_returns_an_async_lease_entered_at_once(
    async_client: aio.Client, fake: FakeService
) -> None:
    with pytest.raises(LearnerError):
        async with async_client.fetch(FRAGMENT_COUNT):
            raise LearnerError
    assert [pb.RELEASE_MODE_RETURNED] == released(fake)


async def test_an_async_fetch_can_be_a_task(async_client: aio.Client, fake: FakeService) -> None:
    async with asyncio.TaskGroup() as tasks:
        fetching = tasks.create_task(async_client.fetch(FRAGMENT_COUNT))
    await fetching.result().release()
    assert [pb.RELEASE_MODE_CONSUMED] == released(fake)


async def test_an_async_client_needs_no_await_in_its_with(address: str) -> None:
    async with aio.connect(address) as client:
        assert not client.closed
    assert client.closed
    with pytest.raises(errors.InvalidRequestError):
        aio.connect("nowhere")


async def test_an_exception_leaves_an_async_lease_as_it_was_raised(
    async_client: aio.Client, fake: FakeService
) -> None:
    """Not wrapped into the exception group of the renewing task."""
    with pytest.raises(LearnerError):
        async with await async_client.fetch(FRAGMENT_COUNT):
            raise LearnerError
    assert [pb.RELEASE_MODE_RETURNED] == released(fake)


async def test_a_cancelled_body_returns_an_async_lease(
    async_client: aio.Client, fake: FakeService
) -> None:
    entered = asyncio.Event()

    async def body() -> None:
        async with await async_client.fetch(FRAGMENT_COUNT):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.get_running_loop().create_task(body())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [pb.RELEASE_MODE_RETURNED] == released(fake)


async def test_a_cancel_while_the_unreadable_are_looked_for_returns_an_async_lease_all_the_same(
    async_client: aio.Client, fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, may_answer = threading.Event(), threading.Event()

    def read_fragments(*_: Any, **__: Any) -> list[breadbox.Fragment]:
        looks.set()
        assert may_answer.wait(10)
        return []

    async def body() -> None:
        async with async_client.fetch(FRAGMENT_COUNT):
            raise errors.PayloadCorruptError("a block has another checksum")

    monkeypatch.setattr(parts, "read_fragments", read_fragments)
    task = asyncio.get_running_loop().create_task(body())
    assert await asyncio.to_thread(looks.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_answer.set()
    assert [pb.RELEASE_MODE_RETURNED] == released(fake)
    assert {asyncio.current_task()} == asyncio.all_tasks()


def test_an_exception_returns_the_lease_after_a_renewal_that_is_under_way(
    client: breadbox.Client,
    fake: FakeService,
    granted: pb.FetchFragmentsResponse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `release` does: a renewal that arrived later would find the lease gone."""
    monkeypatch.setattr(keeping, "END_S", 10.0)
    granted.grant.lease.remaining_duration.FromMilliseconds(round(LEASE_S * 1e3))
    answered: list[str] = []
    renewal = Gate(renewed(60.0))

    def renew(request: Any, context: grpc.ServicerContext) -> Any:
        response = renewal(request, context)
        answered.append("RenewLease")
        return response

    def release(*_: Any) -> Any:
        answered.append("ReleaseLease")
        return pb.ReleaseLeaseResponse()

    fake.will("RenewLease", renew)
    fake.will("ReleaseLease", release)

    def body() -> None:
        with client.fetch(FRAGMENT_COUNT):
            assert renewal.entered.wait(10)
            threading.Timer(0.1, renewal.open.set).start()
            raise LearnerError

    with pytest.raises(LearnerError):
        body()
    assert ["RenewLease", "ReleaseLease"] == answered


# Loading ----------------------------------------------------------------------------------------


def test_fragments_come_in_draw_order(client: breadbox.Client) -> None:
    with client.fetch(FRAGMENT_COUNT) as lease:
        indexes = [fragment.fragment_index for fragment in lease.fragments()]
    assert list(range(FRAGMENT_COUNT)) == indexes
    assert FRAGMENT_COUNT == len(lease)


def test_batches_come_in_draw_order_with_a_short_last_one(client: breadbox.Client) -> None:
    with client.fetch(FRAGMENT_COUNT) as lease:
        loaded = list(lease.batches(8))
    assert [8, 8, 4] == [len(batch) for batch in loaded]
    rows = [int(index) for batch in loaded for index in batch.obs[:, 0, 0]]
    assert list(range(FRAGMENT_COUNT)) == rows


@pytest.mark.parametrize("count", ["4", 2.5, None, 0, -1])
def test_counts_that_are_none_are_refused_with_their_names(
    client: breadbox.Client, count: Any
) -> None:
    with client.fetch(FRAGMENT_COUNT) as lease:
        with pytest.raises(errors.InvalidRequestError, match="batch_size must be"):
            next(lease.batches(count))
        if count is not None:
            with pytest.raises(errors.InvalidRequestError, match="max_tokens must be"):
                lease.packed(max_tokens=count)


def test_columns_of_a_batch_can_be_chosen(client: breadbox.Client) -> None:
    with client.fetch(FRAGMENT_COUNT) as lease:
        batch = next(lease.batches(4, columns=["reward"]))
    assert (4, 4) == batch.reward.shape
    assert batch.obs is None


async def test_batches_are_arrays_unless_a_device_is_named(
    client: breadbox.Client, async_client: aio.Client, fake: FakeService, granted: Any
) -> None:
    fake.will("FetchFragments", granted)
    with client.fetch(FRAGMENT_COUNT) as lease:
        assert isinstance(next(lease.batches(4)).obs, np.ndarray)
        assert isinstance(next(lease.batches(4, device="cpu")).obs, torch.Tensor)
    async with await async_client.fetch(FRAGMENT_COUNT) as awaited:
        batch = await anext(aiter(awaited.batches(4, device="cpu", prefetch_batches=0)))
    assert isinstance(batch.obs, torch.Tensor)
    assert [0, 1, 2, 3] == batch.obs[:, 0, 0].tolist()


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_of_no_fragments_is_refused(client: breadbox.Client, batch_size: int) -> None:
    with client.fetch(FRAGMENT_COUNT) as lease, pytest.raises(errors.InvalidRequestError):
        list(lease.batches(batch_size))


async def test_an_async_lease_loads_the_same(async_client: aio.Client) -> None:
    async with await async_client.fetch(FRAGMENT_COUNT) as lease:
        indexes = [fragment.fragment_index async for fragment in lease.fragments()]
        sizes = [len(batch) async for batch in lease.batches(8)]
    assert list(range(FRAGMENT_COUNT)) == indexes
    assert [8, 8, 4] == sizes


@pytest.mark.parametrize("order", get_args(LoadOrder))
async def test_both_kinds_of_lease_take_the_same_options(
    client: breadbox.Client,
    async_client: aio.Client,
    fake: FakeService,
    granted: pb.FetchFragmentsResponse,
    order: LoadOrder,
) -> None:
    options: LoaderKeywords = {
        "threads": 3,
        "prefetch_batches": 3,
        "order": order,
        "seed": 5,
        "drop_last": True,
        "retries": 0,
        "on_failure": "skip",
        "max_staleness_at_use": 3,
    }
    assert LoaderKeywords.__annotations__.keys() == options.keys()
    fake.will("FetchFragments", granted)
    version = pb.WatchModelResponse(changed=True, session_id="s", model_version=3)
    fake.will("WatchModel", *[version] * 4)
    with client.fetch(FRAGMENT_COUNT) as lease:
        ours = [batch.obs[:, 0, 0].tolist() for batch in lease.batches(8, **options)]
    async with await async_client.fetch(FRAGMENT_COUNT) as awaited:
        theirs = [b.obs[:, 0, 0].tolist() async for b in awaited.batches(8, **options)]
    assert [8, 8] == [len(rows) for rows in ours]
    assert sorted(ours) == sorted(theirs)
    if order != "completed":
        assert ours == theirs


async def test_wrong_options_are_refused_before_anything_is_loaded(
    async_client: aio.Client,
) -> None:
    async with await async_client.fetch(FRAGMENT_COUNT) as lease:
        with pytest.raises(errors.InvalidRequestError, match="batch_size"):
            lease.batches(0)
        with pytest.raises(errors.InvalidRequestError, match="prefetch_batches"):
            lease.batches(1, prefetch_batches=-1)
        with pytest.raises(errors.InvalidRequestError, match="max_staleness_at_use"):
            lease.batches(1, max_staleness_at_use=-1)


class FakeSideStream:
    """Stands for a CUDA stream: notes what is made within it, and what is handed over."""

    def __init__(self) -> None:
        self.within = threading.local()
        self.made: list[bool] = []
        self.handed_over: list[int] = []

    def __enter__(self) -> None:
        self.within.it = True

    def __exit__(self, *_: object) -> None:
        self.within.it = False

    def hand_over(self, batch: Any) -> None:
        self.handed_over.append(len(batch))

    def load(self, *arguments: Any, device: Any, **named: Any) -> Any:
        assert "cuda" == device
        self.made.append(getattr(self.within, "it", False))
        return batches.load_batch(*arguments, **named)


async def test_batches_for_cuda_are_made_on_a_stream_of_their_own_and_handed_over(
    client: breadbox.Client,
    async_client: aio.Client,
    fake: FakeService,
    granted: pb.FetchFragmentsResponse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake.will("FetchFragments", granted)
    stream = FakeSideStream()
    for module in (breadbox.lease, breadbox.aio.lease):
        monkeypatch.setattr(module, "side_stream_for", lambda device: stream if device else None)
    monkeypatch.setattr(operations, "load_batch", lambda *a, **n: stream.load(*a, **n))
    with client.fetch(FRAGMENT_COUNT) as lease:
        assert 3 == len(list(lease.batches(8, device="cuda")))
    assert ([True] * 3, [8, 8, 4]) == (stream.made, stream.handed_over)
    stream = FakeSideStream()
    async with await async_client.fetch(FRAGMENT_COUNT) as awaited:
        assert 3 == len([batch async for batch in awaited.batches(8, device="cuda")])
    assert ([True] * 3, [8, 8, 4]) == (stream.made, stream.handed_over)


async def test_leaving_async_batches_early_leaves_no_task_behind(async_client: aio.Client) -> None:
    async with await async_client.fetch(FRAGMENT_COUNT) as lease:
        loading = lease.batches(1, prefetch_batches=4)
        await anext(loading)
        await loading.aclose()
    assert {asyncio.current_task()} == asyncio.all_tasks()


# Renewing ---------------------------------------------------------------------------------------


def renewed(seconds: float) -> pb.RenewLeaseResponse:
    span = Duration()
    span.FromNanoseconds(round(seconds * 1e9))
    return pb.RenewLeaseResponse(lease=pb.Lease(lease_id="l", remaining_duration=span))


def arrivals(fake: FakeService, count: int) -> bool:
    return all(fake.arrived.acquire(timeout=10) for _ in range(count))


def test_an_open_lease_is_renewed_at_a_third_of_its_life(
    client: breadbox.Client, fake: FakeService, granted: pb.FetchFragmentsResponse
) -> None:
    granted.grant.lease.remaining_duration.FromMilliseconds(round(LEASE_S * 1e3))
    fake.will("RenewLease", *[renewed(LEASE_S)] * 2, renewed(60.0))
    with client.fetch(FRAGMENT_COUNT):
        assert arrivals(fake, 4)
    methods = [call.method for call in fake.received]
    assert ["FetchFragments", *["RenewLease"] * 3, "ReleaseLease"] == methods


async def test_an_open_async_lease_is_renewed(
    async_client: aio.Client, fake: FakeService, granted: pb.FetchFragmentsResponse
) -> None:
    granted.grant.lease.remaining_duration.FromMilliseconds(round(LEASE_S * 1e3))
    fake.will("RenewLease", *[renewed(LEASE_S)] * 2, renewed(60.0))
    async with await async_client.fetch(FRAGMENT_COUNT):
        assert await asyncio.to_thread(arrivals, fake, 4)
    methods = [call.method for call in fake.received]
    assert ["FetchFragments", *["RenewLease"] * 3, "ReleaseLease"] == methods


def renewing(*answers: Any) -> tuple[Granted, list[float]]:
    """A lease of 60 s after so many renewals, and how long each was waited for."""
    world = OperationWorld()
    world.will("RenewLease", *answers)
    lease = Granted(
        SimpleNamespace(context=world.context), "default", LeaseGrant("l", 60.0, (), "s", 0, "r")
    )
    renewal = lease._renewing()  # noqa: SLF001 - without a thread or a task
    delays_s: list[float] = []

    def limited() -> operations.Operation[None]:
        effect = next(renewal)
        while len(delays_s) < len(answers) + 1:
            if isinstance(effect, operations.Sleep):
                delays_s.append(effect.duration_s)
                effect = renewal.send((yield effect))
                continue
            try:
                answer = yield effect
            except errors.ReplayBufferError as error:
                effect = renewal.throw(error)
            else:
                effect = renewal.send(answer)

    with contextlib.suppress(IndexError):  # There is no answer any more.
        world.run(limited())
    return lease, delays_s


def test_the_next_renewal_is_due_after_a_third_of_what_is_left() -> None:
    assert [20.0, 30.0, 2.0] == pytest.approx(renewing(90.0, 6.0)[1])


def test_a_renewal_that_found_nobody_is_tried_again_soon() -> None:
    lease, delays_s = renewing(errors.UnavailableError("nobody"))
    assert [20.0, 1.0] == delays_s
    assert not lease.expired


def test_renewals_that_find_nobody_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    away = errors.UnavailableError("nobody")
    _, delays_s = renewing(away, away, away, 90.0, away, away)
    assert [20.0, 1.0, 1.0, 1.0, 30.0, 1.0, 1.0] == delays_s
    assert 2 == caplog.text.count("renewing lease l failed, trying again: nobody")


def test_a_lease_found_gone_refuses_to_load(
    client: breadbox.Client, fake: FakeService, granted: pb.FetchFragmentsResponse
) -> None:
    granted.grant.lease.remaining_duration.FromMilliseconds(round(LEASE_S * 1e3))
    fake.will("RenewLease", refuse(grpc.StatusCode.NOT_FOUND, "LEASE_NOT_FOUND", lease="l"))
    with client.fetch(FRAGMENT_COUNT) as lease:
        eventually_sync(lambda: lease.expired)
        with pytest.raises(errors.LeaseExpiredError):
            next(lease.batches(4))


def test_a_forgotten_lease_is_not_renewed(client: breadbox.Client, fake: FakeService) -> None:
    """It expires, as a lease of a dead learner does."""
    before = set(threading.enumerate())
    client.fetch(FRAGMENT_COUNT)
    begun = set(threading.enumerate()) - before
    assert [] == [each for each in begun if each.name == "breadbox-background"]


def test_ranks_share_a_fetch_by_its_request_id(
    address: str, fake: FakeService, granted: pb.FetchFragmentsResponse
) -> None:
    fake.will("FetchFragments", granted)
    for rank in range(2):
        with breadbox.connect(address) as client:
            lease = client.fetch(40, 1.0, rank=rank, world_size=2, request_id="step-1")
            assert "step-1" == lease.request_id
    requests = fake.requests("FetchFragments")
    assert [(0, 2, "step-1"), (1, 2, "step-1")] == [
        (request.rank, request.world_size, request.request_id) for request in requests
    ]
    assert isinstance(lease.grant, LeaseGrant)


async def test_both_kinds_of_client_write_a_lease_the_same_way(
    kind: str, address: str, granted: pb.FetchFragmentsResponse
) -> None:
    async with make_caller(kind, address) as caller:
        lease = await caller.call("fetch", FRAGMENT_COUNT)
    assert "Lease('l', 20 fragments, open)" == repr(lease)


@growth.marked
def test_each_payload_that_is_refused_takes_as_long_as_the_first() -> None:
    def refusing(count: int) -> Callable[[], object]:
        context = SimpleNamespace(context=OperationWorld().context)
        lease = Granted(context, "default", LeaseGrant("l", 60.0, (), "s", 0, "r"))
        payload_ids = [f"{number:032x}" for number in range(count)]

        def refuse_each() -> None:
            for each in payload_ids:
                lease.refuse([each])

        return refuse_each

    growth.check(refusing, 8192)
