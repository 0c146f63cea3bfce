"""Leases over a real channel: renewed while open, consumed or returned when left."""

import asyncio
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import grpc
import numpy as np
import pytest
import torch
from google.protobuf.duration_pb2 import Duration

import breadbox
from breadbox import aio, batches, errors, loader, operations, payload, stores, wire
from breadbox.lease import DUE_COUNT_MIN, RENEWALS_MAX, Lease, LeaseKeeper, RenewalFailures
from breadbox.loader import LoaderKeywords, LoadOrder
from breadbox.options import ClientOptions
from breadbox.stores.base import PayloadStore
from breadbox.types import LeaseGrant, ReleaseMode
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.callers import make_caller
from support.clock import ManualClock
from support.eventually import eventually_sync
from support.fake_service import FakeService, refuse
from support.fragments import vector_fragment

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
                metadata=wire.metadata_to_wire(wire.metadata_of(fragment, reference)),
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
    }
    assert LoaderKeywords.__annotations__.keys() == options.keys()
    fake.will("FetchFragments", granted)
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
    for module in (loader, aio):
        monkeypatch.setattr(module, "side_stream_for", lambda device: stream if device else None)
    stream = FakeSideStream()
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


def test_the_next_renewal_is_due_after_a_third_of_what_is_left(
    client: breadbox.Client, fake: FakeService
) -> None:
    fake.will("RenewLease", renewed(90.0))
    lease = client.fetch(FRAGMENT_COUNT)
    assert 30.0 == lease.renew_quietly()
    keeper = LeaseKeeper(ManualClock(1000.0))
    keeper.keep(lease, 60.0)
    assert [1020.0] == [due_at for due_at, _, _ in keeper._due]
    keeper.close()


def test_a_renewal_that_found_nobody_is_tried_again_soon(
    client: breadbox.Client, fake: FakeService
) -> None:
    fake.will("RenewLease", refuse(grpc.StatusCode.UNAVAILABLE))
    lease = client.fetch(FRAGMENT_COUNT)
    assert 1.0 == lease.renew_quietly()
    assert not lease.expired


def test_renewals_that_find_nobody_are_told_once(
    client: breadbox.Client, fake: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    away = refuse(grpc.StatusCode.UNAVAILABLE)
    fake.will("RenewLease", away, away, away, renewed(90.0), away, away)
    lease = client.fetch(FRAGMENT_COUNT)
    assert [1.0, 1.0, 1.0, 30.0, 1.0, 1.0] == [lease.renew_quietly() for _ in range(6)]
    assert 2 == caplog.text.count("could not be renewed")


def test_a_renewal_that_keeps_failing_is_told_every_half_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    failures = RenewalFailures(clock)
    for _ in range(61):
        failures.tell("l", errors.UnavailableError("nobody"))
        clock.advance(1.0)
    assert 3 == caplog.text.count("could not be renewed")


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
    client.fetch(FRAGMENT_COUNT)
    assert set() == client._keeper._threads


class CountingLease:
    """Stands for a lease in the keeper's tests."""

    def __init__(self, delays_s: list[float | None], done: threading.Event) -> None:
        self.released = False
        self.renewals = 0
        self._delays_s = delays_s
        self._done = done

    def renew_quietly(self) -> float | None:
        self.renewals += 1
        delay_s = self._delays_s.pop(0)
        if not self._delays_s:
            self._done.set()
        return delay_s


def test_the_keeper_renews_many_leases_and_forgets_those_that_are_over() -> None:
    clock = ManualClock(0.0)
    keeper = LeaseKeeper(clock)
    done = [threading.Event() for _ in range(3)]
    leases = [CountingLease([0.0, 0.0, None], event) for event in done]
    for lease in leases:
        keeper.keep(lease, 0.0)  # type: ignore[arg-type]
    assert [True] * 3 == [event.wait(10) for event in done]
    keeper.close()
    keeper.close()
    assert [3, 3, 3] == [lease.renewals for lease in leases]


def test_a_closed_keeper_keeps_nothing() -> None:
    keeper = LeaseKeeper()
    keeper.close()
    lease = CountingLease([None], threading.Event())
    keeper.keep(lease, 0.0)  # type: ignore[arg-type]
    assert 0 == lease.renewals


def test_leases_that_were_released_are_not_held_until_their_renewal_would_have_been_due() -> None:
    """A learner fetches many batches, each with references to its fragments, in one lease life."""
    keeper = LeaseKeeper(ManualClock())
    held = []
    for _ in range(1000):
        lease = CountingLease([], threading.Event())
        keeper.keep(lease, 3600.0)  # type: ignore[arg-type]
        lease.released = True
        held.append(weakref.ref(lease))
    del lease
    assert sum(reference() is not None for reference in held) <= 2 * DUE_COUNT_MIN
    keeper.close()


class SlowLease:
    """Stands for a lease whose renewal takes until it is let go; counts those under way."""

    under_way = 0
    under_way_max = 0
    lock = threading.Lock()

    def __init__(self, may_answer: threading.Event, answered: threading.Semaphore) -> None:
        self.released = False
        self._may_answer = may_answer
        self._answered = answered

    def renew_quietly(self) -> float | None:
        with self.lock:
            SlowLease.under_way += 1
            SlowLease.under_way_max = max(SlowLease.under_way_max, SlowLease.under_way)
        assert self._may_answer.wait(10)
        with self.lock:
            SlowLease.under_way -= 1
        self._answered.release()
        return None


def test_a_slow_renewal_holds_up_no_other_until_many_are_under_way() -> None:
    """One after another, twenty that take three seconds each would outlast a lease."""
    keeper = LeaseKeeper(ManualClock())
    may_answer, answered = threading.Event(), threading.Semaphore(0)
    lease_count = RENEWALS_MAX + 4
    for _ in range(lease_count):
        keeper.keep(SlowLease(may_answer, answered), 0.0)  # type: ignore[arg-type]
    eventually_sync(lambda: SlowLease.under_way == RENEWALS_MAX, "many renewals are under way")
    may_answer.set()
    assert all(answered.acquire(timeout=10) for _ in range(lease_count))
    assert RENEWALS_MAX == SlowLease.under_way_max
    eventually_sync(lambda: len(keeper._threads) == 1, "one thread is left to wait")
    keeper.close()
    assert set() == keeper._threads


def test_a_lease_that_comes_while_another_is_renewed_is_renewed_meanwhile() -> None:
    keeper = LeaseKeeper()
    may_answer, answered = threading.Event(), threading.Semaphore(0)
    keeper.keep(SlowLease(may_answer, answered), 0.0)  # type: ignore[arg-type]
    eventually_sync(lambda: SlowLease.under_way == 1, "the first is being renewed")
    done = threading.Event()
    keeper.keep(CountingLease([None], done), 0.0)  # type: ignore[arg-type]
    assert done.wait(10)
    may_answer.set()
    assert answered.acquire(timeout=10)
    keeper.close()


def test_a_renewal_to_be_tried_again_soon_does_not_wait_behind_later_ones() -> None:
    keeper = LeaseKeeper()
    done = threading.Event()
    keeper.keep(CountingLease([], threading.Event()), 3600.0)  # type: ignore[arg-type]
    keeper.keep(CountingLease([0.01, None], done), 0.0)  # type: ignore[arg-type]
    assert done.wait(10)
    keeper.close()


def test_a_lease_with_less_time_does_not_wait_behind_one_with_more() -> None:
    keeper = LeaseKeeper()
    done = threading.Event()
    keeper.keep(CountingLease([], threading.Event()), 3600.0)  # type: ignore[arg-type]
    waiting = keeper._wake._waiters  # type: ignore[attr-defined]
    eventually_sync(lambda: len(waiting) == 1, "the keeper waits")
    keeper.keep(CountingLease([None], done), 0.0)  # type: ignore[arg-type]
    assert done.wait(10)
    keeper.close()


class NotingLock:
    """A lock that notes whether somebody had to wait for it, for which it leaves all the time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.was_waited_for = False

    def acquire(self, timeout: float = -1) -> bool:
        self.was_waited_for = self.was_waited_for or self._lock.locked()
        return self._lock.acquire(timeout=10)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class ReleasingClient:
    """Notes what is sent, in order."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.renewing = threading.Event()
        self.may_renew = threading.Event()

    def once(self, call: Any) -> float:
        self.renewing.set()
        assert self.may_renew.wait(10)
        self.sent.append(call.method)
        return 60.0

    def release_lease(self, *_: Any, **__: Any) -> None:
        self.sent.append("ReleaseLease")


def test_a_release_is_sent_after_a_renewal_that_is_under_way_and_before_no_other() -> None:
    """A renewal that came later would find the lease gone, and say that it had expired."""
    client = ReleasingClient()
    grant = LeaseGrant("l", 60.0, (), "s", 0, "r")
    lease = Lease(client, "default", grant, keeper=LeaseKeeper(), once=client.once)  # type: ignore[arg-type]
    lock = lease._renewing = NotingLock()  # type: ignore[assignment]
    renewing = threading.Thread(target=lease.renew_quietly)
    releasing = threading.Thread(target=lease.release)
    renewing.start()
    assert client.renewing.wait(10)
    releasing.start()
    eventually_sync(lambda: lock.was_waited_for or bool(client.sent), "the release waits")
    client.may_renew.set()
    renewing.join()
    releasing.join()
    assert None is lease.renew_quietly()
    assert ["RenewLease", "ReleaseLease"] == client.sent


def test_a_release_does_not_wait_for_a_renewal_that_hangs() -> None:
    client = ReleasingClient()
    grant = LeaseGrant("l", 60.0, (), "s", 0, "r")
    lease = Lease(client, "default", grant, keeper=LeaseKeeper(), once=client.once)  # type: ignore[arg-type]
    renewing = threading.Thread(target=lease.renew_quietly)
    renewing.start()
    assert client.renewing.wait(10)
    lease.release()
    assert ["ReleaseLease"] == client.sent
    client.may_renew.set()
    renewing.join()


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
