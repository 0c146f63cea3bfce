"""Appends at their bounds: what is full, late, gone or another's, and what is left behind."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from breadbox.model.errors import StoreUnavailableError
from breadbox.model.types import PayloadReference
from breadbox.stores.base import Confirmation
from breadbox_server.admission import append_queue, payloads, slices
from breadbox_server.admission.append_queue import HOLD_S
from breadbox_server.admission.payloads import (
    SWEEP_PERIOD_S,
)
from breadbox_server.base.errors import PayloadSizeError
from breadbox_server.core.model.config import BufferConfig, FullPolicy
from breadbox_server.core.model.errors import BufferNotFoundError, SchemaMismatchError
from breadbox_server.core.model.events import RoomWaitEnded
from breadbox_server.core.model.ids import BufferName, CallerId, ModelVersion, SessionId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Appended,
    CreateBuffer,
    DeleteBuffer,
    Fragment,
    Payload,
    PublishModel,
    StartSession,
    UpdateBuffer,
)
from breadbox_server.core.model.schemas import SchemaArray
from breadbox_server.core.state import room_queue
from service.test_appends import queue_of
from support.driven import BUFFER, Driven, driven
from support.eventually import eventually
from support.fake_custodian import FakeCustodian
from support.manual_timers import ManualTimers
from support.metadata import make_fragment, make_payload, written_fragment

ADMITTED, DUPLICATE = (
    Appended(AdmissionOutcome.ADMITTED),
    Appended(AdmissionOutcome.DUPLICATE, AdmissionOutcome.ADMITTED),
)
BUFFER_FULL, BYTES_FULL = (
    Appended(AdmissionOutcome.BUFFER_FULL),
    Appended(AdmissionOutcome.BYTES_FULL),
)
ONE = BufferConfig(capacity_chunks=1, uses_max=1, full_policy=FullPolicy.BLOCK, lease_s=3600.0)
WAIT_S = 10.0


class Producers:
    """Appends of workers of their own, each in a task."""

    def __init__(self, it: Driven) -> None:
        self.it = it

    def send(
        self, worker: str, *indexes: int, wait_s: float = 0.0, **options: Any
    ) -> asyncio.Task[list[Appended | None]]:
        fragments = [
            written_fragment(self.it.custodian, each, "run", worker) for each in indexes or (0,)
        ]
        return self.send_these(fragments, wait_s=wait_s, **options)

    def send_these(
        self, fragments: list[Any], **options: Any
    ) -> asyncio.Task[list[Appended | None]]:
        async def call() -> list[Appended | None]:
            results, _ = await self.it.driver.appends.append(BUFFER, fragments, **options)
            return results

        return asyncio.get_running_loop().create_task(call())

    async def waiting(self, worker: str, wait_s: float = WAIT_S) -> asyncio.Task[Any]:
        call = self.send(worker, wait_s=wait_s)
        await self.it.settle()
        return call


# Positions ----------------------------------------------------------------------------------------


async def test_of_more_kept_positions_than_there_may_be_the_oldest_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_queue, "PLACES_KEPT_MAX", 2)
    async with driven(ONE) as it:
        producers = Producers(it)
        await producers.send("fill")
        for name in ("oldest", "second", "third"):
            await producers.waiting(name)
        it.clock.advance(WAIT_S)
        await it.settle()
        calls = {name: await producers.waiting(name) for name in ("third", "oldest", "second")}
        done = []
        for _ in calls:
            await it.consume(1)
            await it.settle()
            done.append([name for name, call in calls.items() if call.done()])
    assert [["second"], ["third", "second"], ["third", "oldest", "second"]] == done


async def test_a_wait_that_is_over_while_its_turn_is_decided_ends_with_the_turn() -> None:
    """What was free has gone meanwhile: the position is kept all the same."""
    two = replace(ONE, capacity_chunks=2)
    async with driven(two) as it:
        producers = Producers(it)
        await producers.send("fill", 0, 1)
        first = await producers.waiting("first")
        behind = await producers.waiting("behind", wait_s=9 * WAIT_S)
        it.custodian.confirming.clear()
        it.custodian.may_confirm.clear()
        await it.consume(1)
        await it.custodian.confirming.wait()
        it.clock.advance(WAIT_S)
        assert not first.done()
        await it.driver.core.call(UpdateBuffer(BUFFER, ONE))
        it.custodian.may_confirm.set()
        await it.settle()
        assert [BUFFER_FULL] == await first
        again = await producers.waiting("first")
        await it.consume(1)
        await it.settle()
        assert (True, False) == (again.done(), behind.done())


async def test_a_late_append_that_may_wait_joins_behind_one_whose_room_is_being_decided() -> None:
    async with driven(ONE) as it:
        producers = Producers(it)
        await producers.send("fill")
        first = await producers.waiting("first")
        it.custodian.confirming.clear()
        it.custodian.may_confirm.clear()
        await it.consume(1)
        await it.custodian.confirming.wait()
        late = producers.send("late", wait_s=WAIT_S)
        await it.settle()
        it.custodian.may_confirm.set()
        await it.settle()
        assert [ADMITTED] == await first
        assert not late.done()
        await it.consume(1)
        assert [ADMITTED] == await late


def sized(it: Driven, worker: str, index: int, size_bytes: int) -> Fragment:
    payload = make_payload(size_bytes)
    it.custodian.unannounced.add(payload.payload_id)
    return make_fragment(worker, index, session_id="run", payload=payload)


async def test_an_append_that_would_take_the_bytes_of_one_that_waits_joins_behind_it() -> None:
    bytes_alone = BufferConfig(capacity_bytes=1000, full_policy=FullPolicy.BLOCK, uses_max=1)
    async with driven(bytes_alone) as it:
        producers = Producers(it)
        await producers.send_these([sized(it, "fill", 0, 500)])
        large = producers.send_these([sized(it, "large", 0, 900)], wait_s=WAIT_S)
        await it.settle()
        small = producers.send_these([sized(it, "small", 0, 200)], wait_s=WAIT_S)
        await it.settle()
        assert not small.done()
        await it.consume(1)
        assert [ADMITTED] == await large
        assert not small.done()
        await it.consume(1)
        assert [ADMITTED] == await small


def of_version(it: Driven, worker: str, version: int) -> Fragment:
    version_of_all = ModelVersion(version)
    fragment = written_fragment(it.custodian, 0, "run", worker)
    return replace(fragment, model_version_min=version_of_all, model_version_max=version_of_all)


async def test_an_append_of_which_a_new_version_makes_one_stale_waits_on_with_the_rest() -> None:
    async with driven(replace(ONE, staleness_max=1)) as it:
        producers = Producers(it)
        await it.driver.core.call(PublishModel(BUFFER, SessionId("run"), ModelVersion(1)))
        await producers.send_these([of_version(it, "fill", 1)])
        both = [of_version(it, "old", 0), of_version(it, "new", 1)]
        call = producers.send_these(both, wait_s=WAIT_S)
        await it.settle()
        await it.driver.core.call(PublishModel(BUFFER, SessionId("run"), ModelVersion(2)))
        await it.settle()
        assert (False, 1) == (call.done(), it.driver.appends.queue.waiting_count)
        await it.consume(1)
        assert [Appended(AdmissionOutcome.STALE), ADMITTED] == await call


async def test_the_end_of_a_wait_whose_append_has_gone_is_ignored() -> None:
    async with driven(ONE) as it:
        gone = RoomWaitEnded(BUFFER, CallerId(99), AdmissionOutcome.BUFFER_FULL, None)
        it.driver.appends.queue.end_wait(gone)
        assert 0 == it.driver.appends.queue.waiting_count


async def test_an_append_without_fragments_is_answered() -> None:
    async with driven(ONE) as it:
        assert [] == await Producers(it).send_these([])


async def test_what_follows_a_missing_payload_of_its_worker_is_missing_in_later_slices_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(append_queue, "SLICE_FRAGMENTS", 2)
    async with driven() as it:
        fragments = [
            make_fragment("w0", 0, session_id="run"),
            *[
                written_fragment(it.custodian, index, "run", worker)
                for worker, index in (("w1", 0), ("w0", 1), ("w0", 2), ("w1", 1), ("w0", 3))
            ],
        ]
        results = await Producers(it).send_these(fragments)
        trips = list(it.custodian.confirm_trips)
    assert [None, ADMITTED, None, None, ADMITTED, None] == results
    assert [2, 1] == trips


async def test_a_fragment_that_another_one_of_its_append_rules_out_fails_the_append() -> None:
    """The session's first fragment says how many steps all have; both are confirmed by then."""
    async with driven(unowned_s=100.0) as it:
        first, other = (written_fragment(it.custodian, 0, "run", name) for name in ("w0", "w1"))
        other = replace(other, step_count=first.step_count + 1)
        with pytest.raises(SchemaMismatchError):
            await Producers(it).send_these([first, other])
        assert 1 == it.driver.core.describe(BUFFER).chunk_count
        it.clock.advance(101.0)
        it.driver.tidy()
        await eventually(lambda: it.custodian.deleted == [other.payload.payload_id])


class UnheardCustodian(FakeCustodian):
    """Confirms payloads, but the answers are lost."""

    async def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        await super().confirm(references)
        raise StoreUnavailableError("the fake store's answer was lost")


async def test_payloads_that_may_have_been_confirmed_are_kept_for_a_while_and_inline_ones_not() -> (
    None
):
    custodian = UnheardCustodian()
    async with driven(custodian=custodian, unowned_s=100.0) as it:
        producers = Producers(it)
        calls = producers.send("inline", bodies=[b"body"]), producers.send("stored")
        await asyncio.wait(calls)
        assert [StoreUnavailableError] * 2 == [type(each.exception()) for each in calls]
        await eventually(lambda: not custodian.bodies)
        assert 1 == len(custodian.kept)
        it.clock.advance(101.0)
        it.driver.tidy()
        await eventually(lambda: not custodian.kept)


async def test_a_caller_that_leaves_with_an_inline_payload_stored_leaves_none() -> None:
    async with driven(replace(ONE, capacity_chunks=2)) as it:
        producers = Producers(it)
        await producers.send("fill")
        it.custodian.confirming.clear()
        it.custodian.may_confirm.clear()
        call = producers.send("w", bodies=[b"body"], wait_s=WAIT_S)
        await it.custodian.confirming.wait()
        await it.driver.core.call(UpdateBuffer(BUFFER, ONE))
        it.custodian.may_confirm.set()
        await it.settle()
        assert 1 == len(it.custodian.bodies)
        call.cancel()
        await eventually(lambda: not it.custodian.bodies)


async def test_schemas_of_other_fragments_than_those_that_come_are_not_declared() -> None:
    schema = (SchemaArray("obs", "<f4", (3,)),)
    async with driven() as it:
        fragment = replace(written_fragment(it.custodian, 0, "run"), schema_hash=7)
        unknown = Appended(AdmissionOutcome.SCHEMA_UNKNOWN)
        assert [unknown] == await Producers(it).send_these([fragment], schemas={8: schema})
        assert [ADMITTED] == await Producers(it).send_these([fragment], schemas={7: schema})


async def test_payloads_that_were_never_announced_are_swept_each_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Swept(FakeCustodian):
        sweeps = 0

        async def sweep_unannounced(self) -> int:
            self.sweeps += 1
            return 3

    monkeypatch.setattr(payloads, "PERIOD_S", 0.0)
    caplog.set_level("INFO")
    custodian = Swept()
    async with driven(custodian=custodian) as it:
        await it.settle()
        assert 0 == custodian.sweeps
        it.clock.advance(SWEEP_PERIOD_S)
        await it.settle()
        it.clock.advance(SWEEP_PERIOD_S - 1)
        await it.settle()
    assert 1 == custodian.sweeps
    assert "deleted 3 payloads that were never announced" in caplog.text


# The store ----------------------------------------------------------------------------------------


async def test_a_store_that_fails_fails_what_needs_it_and_answers_the_rest() -> None:
    async with driven() as it:
        producers = Producers(it)
        known = written_fragment(it.custodian, 0, "run", "known")
        await producers.send_these([known])
        it.custodian.may_confirm.clear()
        held_up = producers.send("held up")
        await it.settle()
        refused, failed = producers.send_these([known]), producers.send("new")
        it.custodian.is_down = True
        it.custodian.may_confirm.set()
        await asyncio.wait([held_up, refused, failed])
        assert [DUPLICATE] == await refused
        for each in (held_up, failed):
            with pytest.raises(StoreUnavailableError):
                await each
        it.custodian.is_down = False


async def test_appends_that_wait_are_looked_at_again_once_deletions_have_caught_up() -> None:
    async with driven(ONE, deletions_max=1) as it:
        producers = Producers(it)
        await producers.send("fill")
        waiting = await producers.waiting("waiting")
        it.custodian.is_down = True
        await it.consume(1)
        await it.settle()
        it.clock.advance(HOLD_S)
        await it.settle()
        it.driver.appends.queue.look_again()
        await it.settle()
        assert not waiting.done()
        it.custodian.is_down = False
        await eventually(lambda: not len(it.driver.deletions))
        it.clock.advance(HOLD_S)
        await it.settle()
        assert [ADMITTED] == await waiting


async def test_a_payload_of_another_size_than_announced_fails_its_append() -> None:
    class Other(FakeCustodian):
        async def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
            return [Confirmation.OTHER_SIZE for _ in references]

    async with driven(custodian=Other()) as it:
        with pytest.raises(PayloadSizeError, match=r"fragments\[0\]\.payload"):
            await Producers(it).send("w")
        weights = make_payload()
        publish = PublishModel(BUFFER, SessionId("run"), ModelVersion(1), weights)
        with pytest.raises(PayloadSizeError, match="weights"):
            await it.driver.appends.publish(publish)


async def test_an_append_whose_buffer_goes_while_its_missing_payload_is_asked_for_hears_so() -> (
    None
):
    async with driven() as it:
        it.custodian.may_confirm.clear()
        call = Producers(it).send_these([make_fragment("w", session_id="run")])
        await it.custodian.confirming.wait()
        await it.driver.delete_buffer(DeleteBuffer(BUFFER))
        it.custodian.may_confirm.set()
        with pytest.raises(BufferNotFoundError):
            await call


async def test_a_fragment_that_becomes_stale_while_its_missing_payload_is_asked_for_is_stale() -> (
    None
):
    async with driven(BufferConfig(staleness_max=0)) as it:
        it.custodian.may_confirm.clear()
        call = Producers(it).send_these([make_fragment("w", session_id="run")])
        await it.custodian.confirming.wait()
        await it.driver.core.call(PublishModel(BUFFER, SessionId("run"), ModelVersion(1)))
        it.custodian.may_confirm.set()
        assert [Appended(AdmissionOutcome.STALE)] == await call


async def test_a_payload_that_another_buffer_holds_is_missing_here() -> None:
    other = BufferName("other")
    async with driven() as it:
        await it.driver.core.call(CreateBuffer(other, BufferConfig()))
        await it.driver.core.call(StartSession(other, SessionId("run")))
        fragment = written_fragment(it.custodian, 0, "run")
        await it.driver.appends.append(other, [fragment])
        assert [None] == await Producers(it).send_these([fragment])
        await it.driver.delete_buffer(DeleteBuffer(other))


# Inline payloads and slices -----------------------------------------------------------------------


async def test_an_inline_payload_is_stored_only_once_there_is_room_for_it() -> None:
    async with driven(ONE) as it:
        producers = Producers(it)
        calls = [producers.send(name, bodies=[b"body"], wait_s=WAIT_S) for name in ("a", "b")]
        await it.settle()
        assert [True, False] == [each.done() for each in calls]
        assert [1] == it.custodian.keep_trips
        await it.consume(1)
        assert [ADMITTED] == await calls[1]
        assert [1, 1] == it.custodian.keep_trips


async def test_an_inline_payload_whose_room_went_while_it_was_stored_is_stored_once() -> None:
    async with driven(replace(ONE, capacity_chunks=2)) as it:
        producers = Producers(it)
        await producers.send("fill")
        it.custodian.confirming.clear()
        it.custodian.may_confirm.clear()
        call = producers.send("w", bodies=[b"body"], wait_s=WAIT_S)
        await it.custodian.confirming.wait()
        await it.driver.core.call(UpdateBuffer(BUFFER, ONE))
        it.custodian.may_confirm.set()
        await it.settle()
        assert not call.done()
        await it.consume(1)
        assert [ADMITTED] == await call
        assert [1] == it.custodian.keep_trips


async def test_a_slice_takes_no_more_fragments_after_as_many_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slices, "SLICE_PIECES", 8)
    async with driven() as it:
        fragments = []
        for index in range(6):
            payload = Payload(make_payload().payload_id, 40, piece_size_bytes=10)
            it.custodian.unannounced.add(payload.payload_id)
            fragments.append(make_fragment("w", index, session_id="run", payload=payload))
        assert [ADMITTED] * 6 == await Producers(it).send_these(fragments)
        assert [2, 2, 2] == it.custodian.confirm_trips


async def test_waiting_appends_of_a_buffer_that_changes_are_looked_at_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them has gone by then."""
    monkeypatch.setattr(append_queue, "SLICE_FRAGMENTS", 2)
    async with driven(ONE) as it:
        producers = Producers(it)
        await producers.send("fill")
        calls = [await producers.waiting(f"p{number}") for number in range(5)]
        calls[1].cancel()
        await it.driver.core.call(StartSession(BUFFER, SessionId("next")))
        await it.settle()
        left = [await each for number, each in enumerate(calls) if number != 1]
    assert [[Appended(AdmissionOutcome.WRONG_SESSION)]] * 4 == left


async def test_a_queue_without_a_journal_stores_inline_payloads_itself() -> None:
    custodian = FakeCustodian()
    queue = queue_of(custodian, ManualTimers(), fragments_max=10)
    async with driven() as it:
        running = asyncio.get_running_loop().create_task(queue.run(it.driver.core))
        pending = queue.submit(BUFFER, [make_fragment("w", session_id="run")], bodies=[b"body"])
        assert [ADMITTED] == await pending.done
        queue.withdraw(pending)
        running.cancel()
    assert ([1], 1) == (custodian.keep_trips, len(custodian.bodies))
