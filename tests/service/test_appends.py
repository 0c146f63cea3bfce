"""Appends: confirmed before admission, in order, in batches; what nobody owns is deleted."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import grpc
import pytest
from prometheus_client import CollectorRegistry

from breadbox.model.types import PayloadReference
from breadbox.stores.base import Confirmation
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server import app
from breadbox_server.admission import payloads
from breadbox_server.admission.append_queue import SLICE_S_ASSUMED, AppendQueue
from breadbox_server.admission.payloads import DeletionQueue, RecentPayloads, UnownedPayloads
from breadbox_server.admission.precedence import WAIT_S_MAX
from breadbox_server.admission.slices import SLICE_FRAGMENTS
from breadbox_server.admission.store_trips import StoreTrips
from breadbox_server.base.clock import Clock
from breadbox_server.base.errors import AppendsFullError
from breadbox_server.core.buffers import DEFAULT_BUFFER
from breadbox_server.core.model.config import BufferConfig, FullPolicy
from breadbox_server.core.model.ids import CallerId, ReservationId, WorkerId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Answer,
    Appended,
    Fragment,
    Input,
    Offer,
    Offered,
    Payload,
    Settle,
)
from breadbox_server.driver import DriverLimits
from breadbox_server.journal.durable_core import DurableCore
from breadbox_server.journal.turns import Turns
from breadbox_server.maintenance import reconciliation
from breadbox_server.metrics.metrics import Metrics
from support.eventually import eventually
from support.fake_custodian import FakeCustodian
from support.inputs import named_payload
from support.manual_timers import ManualTimers
from support.metadata import make_fragment
from support.served import CALL_S, info_of, reason_of, served

ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED
DUPLICATE = fragment_pb2.ADMISSION_OUTCOME_DUPLICATE
STALE = fragment_pb2.ADMISSION_OUTCOME_STALE
MISSING = fragment_pb2.ADMISSION_OUTCOME_PAYLOAD_MISSING
BUFFER_FULL = fragment_pb2.ADMISSION_OUTCOME_BUFFER_FULL
BYTES_FULL = fragment_pb2.ADMISSION_OUTCOME_BYTES_FULL


def outcomes(reply: pb.AppendFragmentsResponse) -> list[int]:
    return [result.outcome for result in reply.results]


async def test_a_fragment_whose_payload_is_not_there_is_not_admitted() -> None:
    async with served() as it:
        await it.start()
        missing = it.metadata(0)
        it.custodian.lose_everything()
        reply = await it.append(missing, it.metadata(0, worker_id="other"))
        buffer = await it.buffer()
        counted = it.server.metrics.registry.get_sample_value(
            "breadbox_payloads_missing_total", {"buffer": "default"}
        )
    assert [MISSING, ADMITTED] == outcomes(reply)
    assert 1 == buffer.state.chunk_count
    assert 1 == counted


async def test_a_fragment_is_admitted_once_its_payload_has_been_written_again() -> None:
    async with served() as it:
        await it.start()
        missing = it.metadata(0)
        it.custodian.unannounced.clear()
        first = await it.append(missing)
        it.custodian.unannounced.add(missing.payload.payload_id)
        second = await it.append(missing)
    assert [[MISSING], [ADMITTED]] == [outcomes(first), outcomes(second)]


async def test_no_later_fragment_of_a_worker_overtakes_one_whose_payload_is_not_there() -> None:
    """Admitted first, it would make the missing one a duplicate that nobody has."""
    async with served(BufferConfig(fragments_per_chunk=2)) as it:
        await it.start()
        first, lost, last = (it.metadata(index) for index in range(3))
        it.custodian.unannounced.remove(lost.payload.payload_id)
        before = await it.append(first, lost, it.metadata(0, worker_id="other"), last)
        it.custodian.unannounced.add(lost.payload.payload_id)
        after = await it.append(lost, last)
        buffer = await it.buffer()
    assert [ADMITTED, MISSING, ADMITTED, MISSING] == outcomes(before)
    assert [ADMITTED, ADMITTED] == outcomes(after)
    assert 1 == buffer.state.chunk_count
    assert 0 == buffer.state.counters["fragments_discarded_gap"]


async def test_a_stale_fragment_is_not_confirmed() -> None:
    async with served(BufferConfig(staleness_max=0)) as it:
        await it.start(model_version=5)
        reply = await it.append(it.metadata(0, version=1), it.metadata(1, version=5))
    assert [STALE, ADMITTED] == outcomes(reply)
    assert [1] == it.custodian.confirm_trips
    assert 1 == len(it.custodian.unannounced)


async def test_fragments_after_one_that_asks_to_wait_carry_its_outcome_unconfirmed() -> None:
    config = BufferConfig(capacity_chunks=2, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        await it.fill(2)
        alone = await it.append(it.metadata(0))
        behind = await it.append(it.metadata(2), it.metadata(0), it.metadata(0, worker_id="other"))
    assert [DUPLICATE] == outcomes(alone)
    assert [BUFFER_FULL] * 3 == outcomes(behind)
    assert [2] == it.custodian.confirm_trips
    assert (2, 4) == (len(it.custodian.kept), len(it.custodian.unannounced))


async def test_what_stands_behind_a_fragment_that_has_to_wait_is_not_confirmed() -> None:
    """Else payloads that nobody owns would pile up with every attempt of a blocked producer."""
    config = BufferConfig(fragments_per_chunk=2, capacity_chunks=1, full_policy=FullPolicy.BLOCK)
    async with served(config) as it:
        await it.start()
        await it.append(*(it.metadata(index) for index in range(3)))
        closing, opening = it.metadata(3), it.metadata(0, worker_id="other")
        reply = await it.append(closing, opening)
        unconfirmed = set(it.custodian.unannounced)
    assert [BUFFER_FULL, BUFFER_FULL] == outcomes(reply)
    assert {closing.payload.payload_id, opening.payload.payload_id} == unconfirmed


async def test_calls_that_wait_together_share_one_trip_to_the_store() -> None:
    async with served() as it:
        await it.start()
        it.custodian.may_confirm.clear()
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(it.append(it.metadata(0, worker_id="first")))]
            await it.custodian.confirming.wait()
            calls += [
                group.create_task(it.append(it.metadata(0, worker_id=f"w{number}")))
                for number in range(20)
            ]
            gauge = "breadbox_pending_appends"
            registry = it.server.metrics.registry
            await eventually(lambda: registry.get_sample_value(gauge) == 21)
            it.custodian.may_confirm.set()
        assert [[ADMITTED]] * 21 == [outcomes(call.result()) for call in calls]
        assert 0 == registry.get_sample_value(gauge)
    assert [1, 20] == it.custodian.confirm_trips


async def test_a_large_request_is_admitted_in_slices_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Who compares books and store confirms everything again, at once.
    monkeypatch.setattr(reconciliation, "PERIOD_S", 60.0)
    async with served() as it:
        await it.start()
        reply = await it.append(*(it.metadata(index) for index in range(1000)))
        buffer = await it.buffer()
    assert [ADMITTED] * 1000 == outcomes(reply)
    assert 1000 == buffer.state.chunk_count
    assert [256, 256, 256, 232] == it.custodian.confirm_trips


async def test_a_fragment_sent_twice_in_one_request_is_admitted_once() -> None:
    async with served() as it:
        await it.start()
        first, again = it.metadata(0), it.metadata(0)
        reply = await it.append(first, again)
    assert [ADMITTED, DUPLICATE] == outcomes(reply)
    assert {first.payload.payload_id} == it.custodian.kept
    assert {again.payload.payload_id} == it.custodian.unannounced


async def test_a_payload_that_two_fragments_claim_stays_with_the_first() -> None:
    async with served(unannounced_s=100.0) as it:
        await it.start()
        payload = it.custodian.write()
        claims = [it.metadata(0, worker_id=name, payload=payload) for name in ("a", "b")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.append(*claims)
        driver = it.server.driver
        it.clock.advance(200.0)
        driver.tidy()
        await driver.flush()
        buffer = await it.buffer()
    assert "ARGUMENT_INVALID" == reason_of(caught.value)
    assert [] == it.custodian.deleted
    assert 1 == buffer.state.chunk_count
    assert {payload.payload_id} == it.custodian.kept
    assert [] == it.custodian.deleted


async def test_a_payload_confirmed_for_a_fragment_that_became_stale_is_deleted_after_a_while() -> (
    None
):
    async with served(BufferConfig(staleness_max=0), unannounced_s=100.0) as it:
        await it.start()
        it.custodian.may_confirm.clear()
        async with asyncio.TaskGroup() as group:
            appending = group.create_task(it.append(it.metadata(0)))
            await it.custodian.confirming.wait()
            await it.stub.PublishModel(
                pb.PublishModelRequest(session_id="run", model_version=1), timeout=CALL_S
            )
            it.custodian.may_confirm.set()
        (payload_id,) = it.custodian.kept
        it.clock.advance(101.0)
        await eventually(lambda: payload_id in it.custodian.deleted)
    assert [STALE] == outcomes(appending.result())


async def test_payloads_whose_confirmation_was_never_heard_of_are_deleted_after_a_while() -> None:
    async with served(unannounced_s=100.0) as it:
        await it.start()
        it.custodian.loses_answers = True
        with pytest.raises(grpc.aio.AioRpcError):
            await it.append(it.metadata(0))
        it.custodian.loses_answers = False
        (payload_id,) = it.custodian.kept
        it.clock.advance(101.0)
        await eventually(lambda: payload_id in it.custodian.deleted)


async def test_payloads_confirmed_for_a_buffer_that_went_are_deleted_after_a_while() -> None:
    async with served(unannounced_s=100.0) as it:
        await it.start()
        it.custodian.may_confirm.clear()
        async with asyncio.TaskGroup() as group:
            appending = group.create_task(_failure_of(it.append(it.metadata(0), it.metadata(1))))
            await it.custodian.confirming.wait()
            await it.stub.DeleteBuffer(pb.DeleteBufferRequest(name="default"), timeout=CALL_S)
            it.custodian.may_confirm.set()
        assert "BUFFER_NOT_FOUND" == appending.result()
        confirmed = set(it.custodian.kept)
        it.clock.advance(101.0)
        await eventually(lambda: confirmed == set(it.custodian.deleted))
    assert 2 == len(confirmed)


class SlowToDelete(FakeCustodian):
    """A store whose deletions can be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.deleting = asyncio.Event()
        self.may_delete = asyncio.Event()

    async def _delete(self, payload_ids: Iterable[str]) -> None:
        ids = list(payload_ids)
        self.deleting.set()
        await self.may_delete.wait()
        await super()._delete(ids)


async def test_a_payload_sent_again_while_it_is_being_deleted_is_missing_and_not_lost() -> None:
    """Admitted, it would be a fragment in the books whose payload goes at the next moment."""
    custodian = SlowToDelete()
    async with served(
        BufferConfig(staleness_max=0), custodian=custodian, unannounced_s=100.0
    ) as it:
        await it.start()
        custodian.loses_answers = True
        fragment = it.metadata(0)
        with pytest.raises(grpc.aio.AioRpcError):
            await it.append(fragment)
        custodian.loses_answers = False
        it.clock.advance(101.0)
        await custodian.deleting.wait()
        reply = await it.append(fragment, it.metadata(0, worker_id="other"))
        custodian.may_delete.set()
        await eventually(lambda: fragment.payload.payload_id in custodian.deleted)
        again = await it.append(it.metadata(0))
        buffer = await it.buffer()
    assert [MISSING, ADMITTED] == outcomes(reply)
    assert [ADMITTED] == outcomes(again)
    assert 2 == buffer.state.chunk_count == len(custodian.kept)


async def test_a_payload_that_is_being_confirmed_again_is_not_deleted_as_overdue() -> None:
    async with served(unannounced_s=100.0) as it:
        await it.start()
        fragment = it.metadata(0)
        it.custodian.loses_answers = True
        with pytest.raises(grpc.aio.AioRpcError):
            await it.append(fragment)
        it.custodian.loses_answers = False
        it.custodian.may_confirm.clear()
        it.custodian.confirming.clear()
        async with asyncio.TaskGroup() as group:
            appending = group.create_task(it.append(fragment))
            await it.custodian.confirming.wait()
            it.clock.advance(101.0)
            it.server.driver.tidy()
            it.custodian.may_confirm.set()
        await it.server.driver.flush()
    assert [ADMITTED] == outcomes(appending.result())
    assert {fragment.payload.payload_id} == it.custodian.kept


def unowned_payloads(custodian: FakeCustodian) -> tuple[DeletionQueue, UnownedPayloads]:
    deletions = DeletionQueue(custodian, metrics=Metrics(CollectorRegistry()), limit=10)
    return deletions, UnownedPayloads(deletions, keep_s=10.0, is_referenced=lambda *_: False)


def queue_of(custodian: FakeCustodian, clock: Clock, *, fragments_max: int) -> AppendQueue:
    """A queue for a core without a journal."""
    metrics = Metrics(CollectorRegistry())
    turns = Turns(None, metrics=metrics, on_lost=lambda: ((), 0.0), on_settled=lambda: None)
    trips = StoreTrips(
        *(custodian, *unowned_payloads(custodian), RecentPayloads(100), turns),
        clock=clock,
        metrics=metrics,
    )
    return AppendQueue(trips, clock=clock, metrics=metrics, fragments_max=fragments_max)


def payload(number: int) -> Payload:
    return named_payload(f"{number:032x}")


def leaving(deletions: DeletionQueue) -> list[int]:
    """The numbers of the payloads that are on their way out."""
    found = [number for number in range(4) if deletions.is_leaving(payload(number).payload_id)]
    assert len(found) == len(deletions)
    return found


async def test_payloads_that_leave_one_after_the_other_are_deleted_in_one_trip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(payloads, "GATHER_S", 60.0)
    custodian = FakeCustodian()
    deletions, _ = unowned_payloads(custodian)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(deletions.run())
        for number in range(3):
            deletions.put([payload(number)])
            for _ in range(10):
                await asyncio.sleep(0)
        await deletions.wait_empty()
        running.cancel()
    assert [3] == custodian.delete_trips


def test_payloads_that_nobody_owns_are_bounded_and_the_oldest_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(UnownedPayloads, "LIMIT", 2)
    deletions, unowned = unowned_payloads(FakeCustodian())
    for number in (1, 2, 1, 3):
        unowned.add(payload(number), 0.0)
    assert (2, [2]) == (len(unowned), leaving(deletions))


def test_payloads_that_nobody_owns_end_together_without_a_look_at_those_that_ended() -> None:
    def taken_s(count: int) -> float:
        deletions, unowned = unowned_payloads(FakeCustodian())
        for number in range(count):
            unowned.add(payload(number), 0.0)
        began_at = time.process_time()
        unowned.delete_overdue(10.0)
        assert count == len(deletions)
        return time.process_time() - began_at

    few_s, many_s = (min(taken_s(count) for _ in range(3)) for count in (10_000, 40_000))
    assert many_s < few_s * 8.0, (few_s, many_s)


def test_a_payload_that_is_refused_again_is_kept_for_as_long_again() -> None:
    deletions, unowned = unowned_payloads(FakeCustodian())
    for now, number in ((0.0, 1), (1.0, 2), (5.0, 1)):
        unowned.add(payload(number), now)
    unowned.delete_overdue(11.0)
    assert [2] == leaving(deletions)
    unowned.delete_overdue(15.0)
    assert [1, 2] == leaving(deletions)


def test_a_payload_that_somebody_refers_to_by_then_is_not_deleted() -> None:
    """Claimed by two fragments, it was refused for the second and belongs to the first."""
    deletions, _ = unowned_payloads(FakeCustodian())
    unowned = UnownedPayloads(deletions, keep_s=10.0, is_referenced=lambda *_: True)
    unowned.add(payload(1), 0.0)
    unowned.delete_overdue(10.0)
    assert (0, 0) == (len(unowned), len(deletions))


class Refuser:
    """A core to which everything is stale."""

    outcome = Appended(AdmissionOutcome.STALE)

    reservation_id: ReservationId | None = None

    def decide(self, command: Input[Answer], /) -> Answer:
        assert isinstance(command, Offer | Settle)
        if isinstance(command, Settle):
            return cast("Answer", [self.outcome] * len(command.there))
        answers = [self.outcome] * len(command.fragments)
        if self.reservation_id is not None:
            return cast("Answer", Offered(self.reservation_id, [None] * len(answers)))
        return cast("Answer", Offered(None, [*answers]))

    def call_up(self) -> Iterator[CallerId]:
        return iter(())

    def pump(self) -> None:
        """Nothing was decided."""

    @property
    def turns(self) -> "Refuser":
        """It has no journal."""
        return self

    def when_settled(self, effect: Callable[[], None], /) -> None:
        effect()


async def appended(queue: AppendQueue, fragments: list[Fragment]) -> list[Appended | None]:
    """Append fragments, and wait for what becomes of them."""
    job = queue.submit(DEFAULT_BUFFER, fragments)
    try:
        return await job.done
    finally:
        queue.withdraw(job)


async def test_a_long_queue_of_refusals_lets_others_have_the_loop() -> None:
    queue = queue_of(FakeCustodian(), ManualTimers(), fragments_max=10_000)
    slice_count = 20
    fragments = [
        make_fragment("w", index, session_id="run", size_bytes=1)
        for index in range(slice_count * SLICE_FRAGMENTS)
    ]
    turns_of_others = 0
    async with asyncio.TaskGroup() as group:
        running = group.create_task(queue.run(cast("DurableCore", Refuser())))
        appending = group.create_task(appended(queue, fragments))
        while not appending.done():
            turns_of_others += 1
            await asyncio.sleep(0)
        running.cancel()
    assert turns_of_others >= slice_count


class Taker(Refuser):
    """A core that takes everything."""

    outcome = Appended(AdmissionOutcome.ADMITTED)
    reservation_id = ReservationId(1)


class SlowCustodian(FakeCustodian):
    """Takes a second for a slice, or as long as it is told."""

    def __init__(self, clock: ManualTimers) -> None:
        super().__init__()
        self.clock = clock
        self.slice_s = 1.0

    async def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        await self.may_confirm.wait()
        self.clock.advance(self.slice_s)
        return [Confirmation.THERE] * len(references)


def slice_of(worker_id: str) -> list[Fragment]:
    return [
        make_fragment(worker_id, index, session_id="run", size_bytes=1)
        for index in range(SLICE_FRAGMENTS)
    ]


def roomy_queue(custodian: FakeCustodian, clock: ManualTimers) -> AppendQueue:
    """A queue that time bounds long before its count does."""
    return queue_of(custodian, clock, fragments_max=100_000)


async def test_an_append_that_would_wait_longer_than_callers_do_is_refused_at_once() -> None:
    """Many producers at once must be slowed down, not run into their deadlines one by one."""
    clock = ManualTimers()
    custodian = SlowCustodian(clock)
    queue = roomy_queue(custodian, clock)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(queue.run(cast("DurableCore", Taker())))
        for number in range(40):
            await appended(queue, slice_of(f"earlier-{number}"))
        custodian.may_confirm.clear()
        # One after another takes a second: the last of four waits for three.
        waiting = [
            group.create_task(appended(queue, slice_of(f"w-{number}"))) for number in range(4)
        ]
        await eventually(lambda: queue.pending_count == 4 * SLICE_FRAGMENTS)
        with pytest.raises(AppendsFullError):
            await appended(queue, slice_of("one too many"))
        custodian.may_confirm.set()
        results = [await task for task in waiting]
        later = await appended(queue, slice_of("later"))
        running.cancel()
    assert 4 * [SLICE_FRAGMENTS] == [len(each) for each in results]
    assert SLICE_FRAGMENTS == len(later)


async def test_a_crowd_before_the_first_slice_is_not_all_let_in() -> None:
    """Nothing is known then of how fast this machine is."""
    custodian = FakeCustodian()
    queue = roomy_queue(custodian, ManualTimers())
    room = round(WAIT_S_MAX / SLICE_S_ASSUMED)
    async with asyncio.TaskGroup() as group:
        crowd = [
            group.create_task(appended(queue, slice_of(f"w-{number}")))
            for number in range(room + 1)
        ]
        await eventually(lambda: queue.pending_count == (room + 1) * SLICE_FRAGMENTS)
        with pytest.raises(AppendsFullError):
            await appended(queue, slice_of("one too many"))
        for task in crowd:
            task.cancel()


async def test_a_queue_that_was_slow_once_is_not_held_short_for_ever() -> None:
    """After an outage the appends may be small, and then no slice is a full one."""
    clock = ManualTimers()
    custodian = SlowCustodian(clock)
    queue = roomy_queue(custodian, clock)

    async def refused_count() -> int:
        """Many workers at once, one fragment each; how many of them are told to come back."""
        first = slice_of("small")[0]
        custodian.may_confirm.clear()
        refused = 0

        async def append(number: int) -> None:
            nonlocal refused
            try:
                await appended(queue, [replace(first, worker_id=WorkerId(f"small-{number}"))])
            except AppendsFullError:
                refused += 1

        async with asyncio.TaskGroup() as group:
            for number in range(SLICE_FRAGMENTS - 1):
                group.create_task(append(number))
            await asyncio.sleep(0)
            custodian.may_confirm.set()
        return refused

    async with asyncio.TaskGroup() as group:
        running = group.create_task(queue.run(cast("DurableCore", Taker())))
        custodian.slice_s = 60.0
        for number in range(5):
            await appended(queue, slice_of(f"outage-{number}"))
        custodian.slice_s = 0.001
        counts = [await refused_count() for _ in range(40)]
        running.cancel()
    assert counts[0] > 0
    assert 0 == counts[-1]


async def test_an_append_to_an_empty_queue_is_taken_however_slow_the_server_is() -> None:
    clock = ManualTimers()
    custodian = SlowCustodian(clock)
    queue = roomy_queue(custodian, clock)
    large = [fragment for number in range(16) for fragment in slice_of(f"w-{number}")]
    async with asyncio.TaskGroup() as group:
        running = group.create_task(queue.run(cast("DurableCore", Taker())))
        first = await appended(queue, large)
        second = await appended(queue, large)
        running.cancel()
    assert [len(large)] * 2 == [len(first), len(second)]


async def test_a_store_that_is_down_fails_the_append_and_a_retry_succeeds() -> None:
    async with served() as it:
        await it.start()
        fragment = it.metadata(0)
        it.custodian.is_down = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.append(fragment)
        it.custodian.is_down = False
        reply = await it.append(fragment)
    assert "STORE_UNAVAILABLE" == reason_of(caught.value)
    assert grpc.StatusCode.UNAVAILABLE == caught.value.code()
    assert [ADMITTED] == outcomes(reply)


async def test_a_caller_that_goes_before_its_turn_takes_its_fragments_with_it() -> None:
    async with served() as it:
        await it.start()
        it.custodian.may_confirm.clear()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(it.append(it.metadata(0)))
            await it.custodian.confirming.wait()
            second = group.create_task(it.append(it.metadata(0, worker_id="gone")))
            registry = it.server.metrics.registry
            gauge = "breadbox_pending_appends"
            await eventually(lambda: registry.get_sample_value(gauge) == 2)
            second.cancel()
            await eventually(lambda: registry.get_sample_value(gauge) == 1)
            it.custodian.may_confirm.set()
            await first
        buffer = await it.buffer()
    assert 1 == buffer.state.chunk_count
    assert 1 == len(it.custodian.unannounced)


async def test_callers_that_went_away_leave_nothing_in_the_queue_while_the_store_hangs() -> None:
    """They no longer count as pending, so that their number is not bounded by anything else."""
    custodian = SlowCustodian(ManualTimers())
    custodian.may_confirm.clear()
    queue = queue_of(custodian, custodian.clock, fragments_max=3 * SLICE_FRAGMENTS)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(queue.run(cast("DurableCore", Taker())))
        first = group.create_task(appended(queue, slice_of("first")))
        await eventually(lambda: queue.pending_count == SLICE_FRAGMENTS)
        for number in range(10):
            gone = group.create_task(appended(queue, slice_of(f"gone-{number}")))
            await eventually(lambda: queue.pending_count == 2 * SLICE_FRAGMENTS)
            gone.cancel()
            await eventually(lambda: queue.pending_count == SLICE_FRAGMENTS)
        waiting = len(queue._pending)  # noqa: SLF001 - what is left of an append shows nowhere
        custodian.may_confirm.set()
        results = await first
        last = await appended(queue, slice_of("last"))
        running.cancel()
    assert 1 == waiting
    assert [SLICE_FRAGMENTS] * 2 == [len(results), len(last)]


async def test_a_draining_server_answers_appends_that_were_under_way() -> None:
    async with served() as it:
        await it.start()
        it.custodian.may_confirm.clear()
        async with asyncio.TaskGroup() as group:
            appending = group.create_task(_failure_of(it.append(it.metadata(0))))
            await it.custodian.confirming.wait()
            it.server.driver.drain()
            it.custodian.may_confirm.set()
    assert "DRAINING" == appending.result()


async def test_appends_ask_to_wait_while_deletions_have_fallen_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "DriverLimits", partial(DriverLimits, deletions_max=2))
    custodian = SlowToDelete()
    async with served(custodian=custodian) as it:
        await it.start()
        await it.fill(2)
        await it.stub.EndSession(pb.EndSessionRequest(session_id="run"), timeout=CALL_S)
        await it.start("next")
        reply = await it.append(it.metadata(0, session_id="next"))
        hold = (await it.buffer()).state.hold
        custodian.may_delete.set()
    assert [BYTES_FULL] == outcomes(reply)
    assert reply.HasField("retry_delay")
    assert "2 payloads wait for deletion, which the store is slow at" == hold


def failures(metrics: Metrics) -> float:
    labels = {"operation": "delete"}
    return metrics.registry.get_sample_value("breadbox_store_errors_total", labels) or 0.0


async def test_deletions_survive_a_store_that_is_down_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("breadbox_server.admission.payloads.RETRY_DELAY_S", 0.0)
    custodian = FakeCustodian()
    metrics = Metrics(CollectorRegistry())
    queue = DeletionQueue(custodian, metrics=metrics, limit=10)
    written = custodian.write()
    await custodian.confirm([written])
    custodian.is_down = True
    async with asyncio.TaskGroup() as group:
        running = group.create_task(queue.run())
        queue.put([named_payload(written.payload_id, written.size_bytes)])
        await eventually(lambda: failures(metrics) > 2)
        custodian.is_down = False
        await queue.wait_empty()
        running.cancel()
    assert [written.payload_id] == custodian.deleted


async def test_fragments_of_unknown_buffers_are_refused_before_they_queue() -> None:
    async with served() as it:
        request = pb.AppendFragmentsRequest(buffer="nowhere", fragments=[it.metadata(0)])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.AppendFragments(request, timeout=CALL_S)
    assert "BUFFER_NOT_FOUND" == reason_of(caught.value)
    assert "nowhere" == info_of(caught.value).metadata["buffer"]


async def _failure_of(call: Awaitable[object]) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return reason_of(error)
    return "none"
