"""Nothing leaves the server before it is durable."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from breadbox.model.errors import PayloadMissingError, StoreUnavailableError
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig
from breadbox_server.core.model.errors import (
    BufferNotFoundError,
    DomainError,
    InvalidArgumentError,
    LeaseNotFoundError,
)
from breadbox_server.core.model.events import FetchGranted, WaitElapsed
from breadbox_server.core.model.ids import (
    BufferName,
    LeaseId,
    ModelVersion,
    PayloadId,
    RequestId,
    SessionId,
)
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    CreateBuffer,
    DeleteBuffer,
    EndSession,
    Fetch,
    Fragment,
    ReleaseLease,
    ReleaseMode,
    RenewLease,
    StartSession,
    UpdateBuffer,
)
from breadbox_server.core.rules.reading import ReadSpec
from breadbox_server.driver import Driver, DriverLimits
from breadbox_server.journal import turns
from breadbox_server.journal.storage.interface import JournalTakenError
from breadbox_server.maintenance.reconciliation import Reconciler
from breadbox_server.metrics.metrics import Metrics
from support.appends import append
from support.eventually import eventually
from support.fake_custodian import FakeCustodian
from support.fake_journal import FakeJournal
from support.inputs import named_payload, publish_model
from support.manual_timers import ManualTimers
from support.metadata import make_fragment, written_fragment

BUFFER = BufferName("default")
GROUPS = BufferName("groups")
RUN = SessionId("run")


publish = partial(publish_model, session_id=RUN)


@dataclass
class Journalled:
    """A driver, what it decides by, and who runs it."""

    driver: Driver
    books: BufferSet
    custodian: FakeCustodian
    journal: FakeJournal
    clock: ManualTimers
    group: asyncio.TaskGroup


@asynccontextmanager
async def journalled() -> AsyncIterator[Journalled]:
    """A driver whose decisions go through a fake journal."""
    custodian, journal, clock = FakeCustodian(), FakeJournal(), ManualTimers()
    books = BufferSet(random.Random(1), BufferConfig(), is_recording=True)
    driver = Driver(
        books,
        custodian,
        clock=clock,
        metrics=Metrics(CollectorRegistry()),
        limits=DriverLimits(),
        journal=journal,
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(driver.run())
        await driver.core.call(StartSession(BUFFER, RUN))
        yield Journalled(driver, books, custodian, journal, clock, group)
        running.cancel()


def fragment(it: Journalled, index: int) -> Fragment:
    return written_fragment(it.custodian, index, RUN)


def start_fetch(it: Journalled, wait_s: float = 60.0) -> asyncio.Task[FetchGranted | WaitElapsed]:
    return it.group.create_task(
        it.driver.fetch(
            Fetch(
                buffer=BUFFER,
                request_id=RequestId("r"),
                fragment_count=1,
                deadline_at=it.driver.core.clock.now() + wait_s,
            )
        )
    )


def hold(it: Journalled) -> None:
    it.journal.may_write.clear()
    it.journal.writing.clear()


def reconciler_of(it: Journalled) -> Reconciler:
    return Reconciler(
        it.driver,
        it.custodian,
        clock=it.clock,
        metrics=Metrics(CollectorRegistry()),
        orphan_s=10.0,
        deletes_orphans=True,
    )


async def turn_the_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_append_is_answered_only_when_it_is_durable() -> None:
    async with journalled() as it:
        hold(it)
        appending = it.group.create_task(append(it.driver, BUFFER, [fragment(it, 0)]))
        await it.journal.writing.wait()
        await turn_the_loop()
        assert not appending.done()
        it.journal.may_write.set()
        await appending
        assert 1 == len(it.journal.turns[-1])


_REFUSED_WITHOUT_THE_BUFFER: dict[str, Callable[[Journalled], Awaitable[Any]]] = {
    "append": lambda it: append(it.driver, BUFFER, [fragment(it, 0)]),
    "fetch": lambda it: it.driver.fetch(
        Fetch(
            buffer=BUFFER,
            request_id=RequestId("r"),
            fragment_count=1,
            deadline_at=it.driver.core.clock.now() + 60.0,
        )
    ),
    "delete_buffer": lambda it: it.driver.delete_buffer(DeleteBuffer(BUFFER)),
    "publish": lambda it: it.driver.appends.publish(publish(1)),
    "watch": lambda it: it.driver.reading.watch(
        BUFFER, session_id=RUN, model_version=None, lacks_weights=False, wait_s=60.0
    ),
    "durable_model": lambda it: it.driver.core.durable_model(BUFFER),
    "apply": lambda it: it.driver.core.call(EndSession(BUFFER, RUN)),
}


@pytest.mark.parametrize("method", _REFUSED_WITHOUT_THE_BUFFER)
async def test_a_deleted_buffer_is_not_found_only_when_the_deletion_is_durable(method: str) -> None:
    """Else a crash would bring back a buffer that somebody was told is gone."""
    async with journalled() as it:
        hold(it)
        deleting = it.group.create_task(it.driver.delete_buffer(DeleteBuffer(BUFFER)))
        await it.journal.writing.wait()
        told: list[BaseException] = []

        async def call() -> None:
            try:
                await _REFUSED_WITHOUT_THE_BUFFER[method](it)
            except BufferNotFoundError as error:
                told.append(error)

        calling = it.group.create_task(call())
        await turn_the_loop()
        assert [] == told
        it.journal.may_write.set()
        await deleting
        await calling
        assert 1 == len(told)


async def test_a_model_is_told_only_when_it_is_durable() -> None:
    """Else a worker would know a version that a crash makes unknown to everybody else."""
    async with journalled() as it:
        await append(it.driver, BUFFER, [fragment(it, 0)])
        hold(it)
        publishing = it.group.create_task(it.driver.appends.publish(publish(7)))
        await it.journal.writing.wait()
        asking = it.group.create_task(it.driver.core.durable_model(BUFFER))
        await turn_the_loop()
        assert not asking.done()
        it.journal.may_write.set()
        await publishing
        assert 7 == (await asking).model_version


async def test_the_end_of_a_group_is_told_only_when_it_is_durable() -> None:
    """Else a caller would go on after a number that another group has once the server crashed."""
    async with journalled() as it:
        config = BufferConfig(assembly=AssemblyPolicy.GROUPS)
        await it.driver.core.call(CreateBuffer(GROUPS, config))
        await it.driver.core.call(StartSession(GROUPS, RUN))
        hold(it)
        appending = it.group.create_task(append(it.driver, GROUPS, [fragment(it, 0)]))
        await it.journal.writing.wait()
        asking = it.group.create_task(it.driver.reading.group_ends(GROUPS, 0, wait_s=60.0))
        await turn_the_loop()
        assert not asking.done()
        it.journal.may_write.set()
        await appending
        assert [1] == [each.number for each in await asking]


async def test_a_model_that_is_durable_is_told_at_once_whatever_else_is_written() -> None:
    async with journalled() as it:
        await it.driver.appends.publish(publish(7))
        hold(it)
        appending = it.group.create_task(append(it.driver, BUFFER, [fragment(it, 0)]))
        await it.journal.writing.wait()
        asking = it.group.create_task(it.driver.core.durable_model(BUFFER))
        await turn_the_loop()
        assert asking.done()
        it.journal.may_write.set()
        await appending


async def test_a_grant_is_told_only_when_it_is_durable() -> None:
    async with journalled() as it:
        await append(it.driver, BUFFER, [fragment(it, 0)])
        hold(it)
        fetching = start_fetch(it)
        await it.journal.writing.wait()
        await turn_the_loop()
        assert not fetching.done()
        it.journal.may_write.set()
        await fetching


async def test_a_caller_cancelled_while_its_grant_is_written_leaves_nothing() -> None:
    async with journalled() as it:
        await append(it.driver, BUFFER, [fragment(it, 0)])
        hold(it)
        fetching = start_fetch(it)
        await it.journal.writing.wait()
        fetching.cancel()
        await turn_the_loop()
        it.journal.may_write.set()
        await it.driver.turns.settled()
        await turn_the_loop()
        await it.driver.turns.settled()
        seen = it.driver.core.describe(BUFFER)
        assert (0, 1) == (seen.lease_count, seen.chunk_count)


async def test_payloads_are_deleted_only_when_their_end_is_durable() -> None:
    async with journalled() as it:
        await append(it.driver, BUFFER, [fragment(it, 0)])
        hold(it)
        ending = it.group.create_task(it.driver.core.call(EndSession(BUFFER, RUN)))
        await it.journal.writing.wait()
        await turn_the_loop()
        assert [] == it.custodian.deleted
        it.journal.may_write.set()
        await ending
        await eventually(lambda: len(it.custodian.deleted) == 1)


async def held_end(it: Journalled) -> tuple[str, asyncio.Task[None]]:
    """A payload whose end is decided and not durable, and who waits for that."""
    only = fragment(it, 0)
    await append(it.driver, BUFFER, [only])
    hold(it)
    ending = it.group.create_task(it.driver.core.call(EndSession(BUFFER, RUN)))
    await it.journal.writing.wait()
    return only.payload.payload_id, ending


async def test_what_may_still_come_back_after_a_crash_is_no_orphan() -> None:
    """Of a journal that is away for longer than an orphan is kept."""
    async with journalled() as it:
        payload_id, ending = await held_end(it)
        reconciler = reconciler_of(it)
        await reconciler.reconcile()
        found = reconciler.orphan_count
        it.clock.advance(11.0)
        await reconciler.look()
        deleted_early = list(it.custodian.deleted)
        it.journal.may_write.set()
        await ending
        await eventually(lambda: it.custodian.deleted == [payload_id])
    assert (0, []) == (found, deleted_early)


async def test_an_orphan_that_was_admitted_and_let_go_waits_until_that_is_durable() -> None:
    async with journalled() as it:
        only = fragment(it, 0)
        payload_id = only.payload.payload_id
        await it.custodian.confirm([only.payload])
        reconciler = reconciler_of(it)
        await reconciler.reconcile()
        found = reconciler.orphan_count
        await append(it.driver, BUFFER, [only])
        hold(it)
        ending = it.group.create_task(it.driver.core.call(EndSession(BUFFER, RUN)))
        await it.journal.writing.wait()
        it.clock.advance(11.0)
        await reconciler.look()
        deleted_early = list(it.custodian.deleted)
        it.journal.may_write.set()
        await ending
        await eventually(lambda: it.custodian.deleted == [payload_id])
    assert (1, []) == (found, deleted_early)


async def test_what_came_due_unseen_is_no_orphan() -> None:
    """An open chunk is over, and a gauge that looks at the buffer notices it first."""
    async with journalled() as it:
        only = fragment(it, 0)
        payload_id = only.payload.payload_id
        await it.custodian.confirm([only.payload])
        reconciler = reconciler_of(it)
        await reconciler.reconcile()
        await it.driver.core.call(UpdateBuffer(BUFFER, BufferConfig(fragments_per_chunk=2)))
        await append(it.driver, BUFFER, [only])
        hold(it)
        it.clock.advance_late(BufferConfig().open_chunk_s + 1.0)
        it.driver.core.describe(BUFFER)
        is_referred_to = it.driver.reading.refers_to(BUFFER, payload_id)
        await reconciler.look()
        deleted_early = list(it.custodian.deleted)
        it.journal.may_write.set()
        await eventually(lambda: it.custodian.deleted == [payload_id])
    assert (False, []) == (is_referred_to, deleted_early)


async def test_an_unowned_payload_whose_end_is_not_durable_is_deleted_only_with_it() -> None:
    async with journalled() as it:
        weights = fragment(it, 0).payload
        command = publish(1, weights)
        await it.driver.appends.publish(command)
        with pytest.raises(InvalidArgumentError):
            await append(it.driver, BUFFER, [make_fragment("w", session_id=RUN, payload=weights)])
        hold(it)
        ending = it.group.create_task(it.driver.core.call(EndSession(BUFFER, RUN)))
        await it.journal.writing.wait()
        it.clock.advance(601.0)
        it.driver.tidy()
        await turn_the_loop()
        deleted_early = list(it.custodian.deleted)
        it.journal.may_write.set()
        await ending
        await it.driver.flush()
        assert ([], [weights.payload_id]) == (deleted_early, it.custodian.deleted)


async def test_a_payload_written_again_whose_end_is_not_durable_is_deleted_only_with_it() -> None:
    """Until then a server that takes over reads a journal that still has it."""
    async with journalled() as it:
        await append(it.driver, BUFFER, [riding(0)], bodies=[b"some"])
        it.custodian.lose_everything()
        it.custodian.may_confirm.clear()
        payloads = list(it.books[BUFFER].payloads())
        looking = it.group.create_task(it.driver.losses.drop_missing(BUFFER, payloads))
        await it.custodian.confirming.wait()
        hold(it)
        ending = it.group.create_task(it.driver.core.call(EndSession(BUFFER, RUN)))
        await it.journal.writing.wait()
        it.custodian.may_confirm.set()
        await looking
        await turn_the_loop()
        deleted_early = list(it.custodian.deleted)
        it.journal.may_write.set()
        await ending
        await eventually(lambda: payloads[0].payload_id in it.custodian.deleted)
    assert [] == deleted_early


async def test_a_payload_whose_end_is_not_durable_is_confirmed_for_nobody() -> None:
    """It would be deleted under whoever got it."""
    async with journalled() as it:
        payload_id, ending = await held_end(it)
        command = publish_model(1, named_payload(payload_id, 100), session_id="next")
        starting = it.group.create_task(
            it.driver.core.call(StartSession(BUFFER, SessionId("next")))
        )
        asyncio.get_running_loop().call_later(0.05, it.journal.may_write.set)
        with pytest.raises(PayloadMissingError):
            await it.driver.appends.publish(command)
        await ending
        await starting
        await it.driver.flush()
        assert [payload_id] == it.custodian.deleted


async def test_watchers_are_woken_and_readers_answered_only_when_it_is_durable() -> None:
    async with journalled() as it:
        watching = it.group.create_task(
            it.driver.reading.watch(
                BUFFER,
                session_id=RUN,
                model_version=ModelVersion(0),
                lacks_weights=False,
                wait_s=60,
            )
        )
        await turn_the_loop()
        hold(it)
        it.group.create_task(it.driver.core.call(publish(1)))
        await it.journal.writing.wait()
        reading = it.group.create_task(
            it.driver.reading.watch(
                BUFFER, session_id=RUN, model_version=ModelVersion(0), lacks_weights=False, wait_s=0
            )
        )
        await turn_the_loop()
        assert (False, False) == (watching.done(), reading.done())
        it.journal.may_write.set()
        assert (True, 1) == ((await watching)[0], (await reading)[1].model_version)


async def test_a_chunk_is_told_to_readers_in_the_turn_in_which_it_became_durable() -> None:
    async with journalled() as it:
        cursor = ReadSpec(after=None)
        waiting = it.group.create_task(
            it.driver.reading.read(BUFFER, cursor, wait_s=60, lease_s=None)
        )
        await turn_the_loop()
        hold(it)
        it.group.create_task(append(it.driver, BUFFER, [fragment(it, 0)]))
        await it.journal.writing.wait()
        looking = it.group.create_task(
            it.driver.reading.read(BUFFER, cursor, wait_s=0, lease_s=None)
        )
        await turn_the_loop()
        assert (False, False) == (waiting.done(), looking.done())
        it.journal.may_write.set()
        assert [1, 1] == [(await each)[0].chunk_count for each in (waiting, looking)]
        assert 2 == len(it.driver.reading.leases)


async def test_a_reader_that_leaves_before_it_is_told_leaves_no_lease() -> None:
    async with journalled() as it:
        hold(it)
        it.group.create_task(append(it.driver, BUFFER, [fragment(it, 0)]))
        await it.journal.writing.wait()
        looking = it.group.create_task(
            it.driver.reading.read(BUFFER, ReadSpec(after=None), wait_s=0, lease_s=None)
        )
        await turn_the_loop()
        assert 1 == len(it.driver.reading.leases)
        looking.cancel()
        await turn_the_loop()
        assert 0 == len(it.driver.reading.leases)
        it.journal.may_write.set()


async def test_calls_of_one_moment_share_one_write() -> None:
    async with journalled() as it:
        hold(it)
        first = it.group.create_task(it.driver.core.call(publish(1)))
        await it.journal.writing.wait()
        later = [
            it.group.create_task(it.driver.core.call(publish(version))) for version in range(2, 12)
        ]
        await turn_the_loop()
        it.journal.may_write.set()
        for task in [first, *later]:
            await task
        assert [2, 1, 10] == [len(turn) for turn in it.journal.turns]


async def test_what_is_decided_while_a_turn_is_written_waits_for_its_own_turn() -> None:
    async with journalled() as it:
        hold(it)
        first = it.group.create_task(it.driver.core.call(publish(1)))
        await it.journal.writing.wait()
        second = it.group.create_task(it.driver.core.call(publish(2)))
        await turn_the_loop()
        it.journal.may_write.set()  # Lets through whoever waits, and nobody after.
        it.journal.may_write.clear()
        await turn_the_loop()
        assert (True, False) == (first.done(), second.done())
        it.journal.may_write.set()
        await second


async def test_answers_wait_for_a_journal_that_is_away_and_come_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(turns, "RETRY_DELAY_S", 0.0)
    async with journalled() as it:
        it.journal.is_down = True
        publishing = it.group.create_task(it.driver.core.call(publish(1)))
        await turn_the_loop()
        assert not publishing.done()
        it.journal.is_down = False
        await publishing
        assert 1 == len(it.journal.turns[-1])
    told = [record.getMessage() for record in caplog.records if record.name == turns.log.name]
    away, back = told  # However many attempts were made between them.
    assert "writing the journal failed, trying again: the fake journal is down" == away
    assert back.startswith("writing the journal works again after ")


async def test_new_work_is_refused_while_the_journal_has_been_away_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "ENTRIES_MAX", 1)
    async with journalled() as it:
        hold(it)
        waiting = [it.group.create_task(it.driver.core.call(publish(1)))]
        await it.journal.writing.wait()
        waiting.append(it.group.create_task(it.driver.core.call(publish(2))))
        await turn_the_loop()
        with pytest.raises(StoreUnavailableError):
            await it.driver.core.call(publish(3))
        with pytest.raises(StoreUnavailableError):
            await append(it.driver, BUFFER, [fragment(it, 0)])
        it.journal.may_write.set()
        for task in waiting:
            await task


async def test_a_lost_journal_is_begun_again_with_everything_decided_so_far() -> None:
    async with journalled() as it:
        await append(it.driver, BUFFER, [fragment(it, 0)])
        hold(it)
        it.journal.is_lost = True
        first = it.group.create_task(it.driver.core.call(publish(1)))
        await it.journal.writing.wait()
        second = it.group.create_task(it.driver.core.call(publish(2)))
        await turn_the_loop()
        it.journal.may_write.set()
        await first
        await second
        (state,) = it.journal.snapshots
        await it.driver.core.call(publish(3))
        rebuilt = BufferSet.restore(state, random.Random(1))
        for turn in it.journal.turns:
            rebuilt.replay(turn)
        assert 3 == rebuilt[BUFFER].model.model_version
        assert it.books.snapshot() == rebuilt.snapshot()


async def test_effects_keep_their_order_when_a_lost_journal_is_begun_again() -> None:
    async with journalled() as it:
        hold(it)
        it.journal.is_lost = True
        told: list[int] = []
        publishing = []
        for version in (1, 2):
            publishing.append(it.group.create_task(it.driver.core.call(publish(version))))
            await turn_the_loop()
            it.driver.turns.when_settled(partial(told.append, version))
        it.journal.may_write.set()
        for task in publishing:
            await task
        assert [1, 2] == told


def riding(index: int, size_bytes: int = 4) -> Fragment:
    """A fragment whose payload rides along, under the id that the service gave it."""
    payload = named_payload(f"{index:032x}", size_bytes)
    return make_fragment("w0", index, session_id=RUN, payload=payload)


async def test_what_rides_along_is_written_in_the_turn_that_tells_of_it() -> None:
    async with journalled() as it:
        it.journal.carries_payloads = True
        hold(it)
        appending = it.group.create_task(append(it.driver, BUFFER, [riding(0)], bodies=[b"some"]))
        await it.journal.writing.wait()
        # The books know it already, and it is not lost.
        assert 0 == await it.driver.losses.drop_missing(
            BUFFER, it.driver.core.buffers[BUFFER].payloads()
        )
        assert 0 == await it.driver.losses.confirm_again(
            BUFFER, it.driver.core.buffers[BUFFER].payloads()
        )
        assert not appending.done()
        it.journal.may_write.set()
        await appending
        assert {riding(0).payload.payload_id: b"some"} == it.journal.payloads
        assert ([], [0]) == (it.custodian.keep_trips, [len(it.journal.turns[-1]) - 1])


async def test_what_is_refused_is_not_written_with_a_turn() -> None:
    async with journalled() as it:
        it.journal.carries_payloads = True
        await append(it.driver, BUFFER, [riding(0)], bodies=[b"some"])
        again = replace(riding(0), payload=named_payload("f" * 32, 4))
        (result,) = await append(it.driver, BUFFER, [again], bodies=[b"some"])
        assert result is not None
        assert AdmissionOutcome.DUPLICATE is result.outcome
        await it.driver.core.call(publish(1))
        assert [riding(0).payload.payload_id] == list(it.journal.payloads)
        assert [] == it.custodian.deleted


async def test_inline_payloads_come_with_the_snapshot_of_a_journal_begun_again() -> None:
    """A server that is killed after the snapshot must not leave one that refers to nothing."""
    async with journalled() as it:
        it.journal.carries_payloads = True
        hold(it)
        it.journal.is_lost = True
        appends = [it.group.create_task(append(it.driver, BUFFER, [riding(0)], bodies=[b"one"]))]
        await it.journal.writing.wait()
        appends.append(
            it.group.create_task(append(it.driver, BUFFER, [riding(1)], bodies=[b"two"]))
        )
        await turn_the_loop()
        it.journal.may_write.set()
        for each in appends:
            await each
            assert [b"one", b"two"] == list(it.journal.payloads.values())
        assert 1 == len(it.journal.snapshots)
        assert [] == it.journal.turns


async def test_a_store_without_room_gets_one_turn_more_and_then_tells_producers_to_wait() -> None:
    async with journalled() as it:
        it.journal.carries_payloads, it.journal.has_payload_room = True, False
        outcomes = []
        for index in range(4):
            it.custodian.is_full = index < 2
            sent = append(it.driver, BUFFER, [riding(index)], bodies=[b"some"])
            outcomes += [each and each.outcome for each in await sent]
            it.journal.has_payload_room = index >= 2
        full = AdmissionOutcome.BYTES_FULL
        assert [AdmissionOutcome.ADMITTED, full] == outcomes[:2]
        assert [AdmissionOutcome.ADMITTED] * 2 == outcomes[2:]
        # Asked with care, until it had room.
        assert [1, 1] == it.custodian.keep_trips
        assert 2 == len(it.journal.payloads)


@pytest.mark.parametrize(
    "bound", [("TURN_PAYLOADS_MAX", 2), ("TURN_PAYLOAD_BYTES_MAX", 8)], ids=["count", "bytes"]
)
async def test_what_a_turn_does_not_take_goes_to_the_store_by_itself(
    monkeypatch: pytest.MonkeyPatch, bound: tuple[str, int]
) -> None:
    monkeypatch.setattr(turns, *bound)
    async with journalled() as it:
        it.journal.carries_payloads = True
        fragments = [riding(index) for index in range(3)]
        await append(it.driver, BUFFER, fragments, bodies=[b"some"] * 3)
        assert ([3], {}) == (it.custodian.keep_trips, it.journal.payloads)
        await append(it.driver, BUFFER, [riding(3), riding(4)], bodies=[b"some"] * 2)
        assert ([3], 2) == (it.custodian.keep_trips, len(it.journal.payloads))


@pytest.mark.parametrize("looks", ["append", "describe"])
async def test_what_came_due_unseen_is_in_a_journal_that_is_begun_again_only_once(
    looks: str,
) -> None:
    """A timer that is late, and somebody who looks first: a grant is made that nobody told yet."""
    async with journalled() as it:
        await append(it.driver, BUFFER, [fragment(it, 0)])
        await start_fetch(it)
        waiting = it.group.create_task(_fetch(it, "next"))
        await turn_the_loop()
        hold(it)
        it.journal.is_lost = True
        it.group.create_task(it.driver.core.call(publish(1)))
        await it.journal.writing.wait()
        it.clock.advance_late(60.0)
        it.custodian.may_confirm.clear()
        it.custodian.confirming.clear()
        if looks == "append":
            it.group.create_task(append(it.driver, BUFFER, [fragment(it, 1)]))
            await it.custodian.confirming.wait()
        else:
            it.driver.core.describe(BUFFER)
        it.journal.may_write.set()
        await eventually(lambda: bool(it.journal.snapshots))
        it.custodian.may_confirm.set()
        it.clock.advance(0.0)
        await waiting
        await turn_the_loop()
        await it.driver.turns.settled()
        rebuilt = BufferSet.restore(it.journal.snapshots[0], random.Random(1))
        for turn in it.journal.turns:
            rebuilt.replay(turn)
        assert it.books.snapshot() == rebuilt.snapshot()


@pytest.mark.parametrize("seed", range(30))
async def test_the_journal_always_rebuilds_what_was_acknowledged(seed: int) -> None:
    """Random calls, cancelled at random moments; then the journal alone makes the same core."""
    rng = random.Random(seed)
    async with journalled() as it:
        tasks = []
        for step in range(60):
            kind = rng.choice(("append", "fetch", "publish", "cancel", "hold", "go", "tick"))
            if kind == "append":
                appending = partial(append, it.driver, BUFFER, [fragment(it, step)])
                tasks.append(it.group.create_task(_quietly(appending)))
            elif kind == "fetch":
                tasks.append(it.group.create_task(_quietly(partial(_fetch, it, f"r{step}"))))
            elif kind == "publish":
                version = step // 20
                publishing = partial(it.driver.core.call, publish(version))
                tasks.append(it.group.create_task(_quietly(publishing)))
            elif kind == "cancel" and tasks:
                rng.choice(tasks).cancel()
            elif kind == "hold":
                it.journal.may_write.clear()
            elif kind == "go":
                it.journal.may_write.set()
            else:
                it.clock.advance(rng.choice((0.0, 30.0)))
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
        it.journal.may_write.set()
        for task in tasks:
            task.cancel()
        await turn_the_loop()
        await it.driver.turns.settled()
        await turn_the_loop()
        await it.driver.turns.settled()
        rebuilt = BufferSet.restore((), random.Random(1))
        for turn in it.journal.turns:
            rebuilt.replay(turn)
        rebuilt.handle_timer(now=it.clock.now())
        assert it.books.snapshot() == rebuilt.snapshot(), f"seed {seed}"


async def _fetch(
    it: Journalled, request_id: str, buffer: BufferName = BUFFER
) -> FetchGranted | WaitElapsed:
    return await it.driver.fetch(
        Fetch(
            buffer=buffer,
            request_id=RequestId(request_id),
            fragment_count=1,
            deadline_at=it.driver.core.clock.now() + 20.0,
            lease_s=25.0,
        )
    )


async def _quietly(call: Callable[[], Awaitable[object]]) -> None:
    """Make a call whose refusal is as good as its answer."""
    with contextlib.suppress(DomainError):
        await call()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that is soon out of date, and renewed often."""
    monkeypatch.setattr(turns, "RENEW_S", 0.01)
    monkeypatch.setattr(turns, "ALIVE_S", 0.2)


async def first_sign_of_life(it: Journalled) -> None:
    turns = it.driver.turns
    await eventually(lambda: bool(turns._incarnation))  # noqa: SLF001 - what it compares with


async def _until_out_of_date(it: Journalled) -> None:
    """Return when others may have claimed the journal, which is away."""
    loop = asyncio.get_running_loop()
    it.journal.is_down = True
    down_at = loop.time()
    await eventually(lambda: loop.time() - down_at > 0.3, "the claim being out of date")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("asked", ["answer", "refusal", "duplicate"])
async def test_nothing_is_told_from_memory_while_the_journal_may_be_anothers(asked: str) -> None:
    """A server that was stopped may have been replaced: it asks before it says what was."""
    async with journalled() as it:
        sent = [fragment(it, 0)]
        await append(it.driver, BUFFER, sent)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "answer": lambda: it.driver.core.call(StartSession(BUFFER, RUN)),
            "refusal": lambda: it.driver.core.call(EndSession(BufferName("none"), RUN)),
            "duplicate": lambda: append(it.driver, BUFFER, sent),
        }
        await _until_out_of_date(it)
        asking = it.group.create_task(_outcome(calls[asked]()))
        await turn_the_loop()
        assert not asking.done()

        it.journal.is_down = False
        outcome = await asking
    assert (asked == "refusal") is isinstance(outcome, BufferNotFoundError)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim of which nothing is heard unless somebody asks."""
    monkeypatch.setattr(turns, "RENEW_S", 3600.0)
    monkeypatch.setattr(turns, "ALIVE_S", 7200.0)


def hold_renewals(it: Journalled) -> None:
    it.journal.may_renew.clear()
    it.journal.renewing.clear()


_REFUSED_FOR_WHAT_IS_NOT_KNOWN: dict[str, Callable[[Journalled], Awaitable[Any]]] = {
    "append": lambda it: append(it.driver, BufferName("none"), [fragment(it, 0)]),
    "append of another session": lambda it: append(
        it.driver, BUFFER, [written_fragment(it.custodian, 0, SessionId("next"))]
    ),
    "append of another version": lambda it: append(
        it.driver,
        BUFFER,
        [make_fragment("w", session_id=RUN, version=9, payload=fragment(it, 0).payload)],
    ),
    "fetch": lambda it: _fetch(it, "r", BufferName("none")),
    "delete_buffer": lambda it: it.driver.delete_buffer(DeleteBuffer(BufferName("none"))),
    "publish": lambda it: it.driver.appends.publish(publish_model(1, session_id="next")),
    "watch": lambda it: it.driver.reading.watch(
        BufferName("none"), session_id=RUN, model_version=None, lacks_weights=False, wait_s=60.0
    ),
    "durable_model": lambda it: it.driver.core.durable_model(BufferName("none")),
    "apply": lambda it: it.driver.core.call(EndSession(BufferName("none"), RUN)),
    "read": lambda it: it.driver.reading.read(
        BufferName("none"), ReadSpec(after=None), wait_s=0.0, lease_s=None
    ),
    "renew": lambda it: it.driver.renew(RenewLease(BUFFER, LeaseId("l"))),
    "release": lambda it: it.driver.release(
        [ReleaseLease(BUFFER, LeaseId("l"), ReleaseMode.CONSUMED)]
    ),
    "return to no buffer": lambda it: it.driver.release(
        [ReleaseLease(BufferName("none"), LeaseId("l"), ReleaseMode.RETURNED)]
    ),
    "report to no buffer": lambda it: it.driver.release(
        [ReleaseLease(BufferName("none"), LeaseId("l"), ReleaseMode.CONSUMED)], (PayloadId("p"),)
    ),
}


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("asked", _REFUSED_FOR_WHAT_IS_NOT_KNOWN)
async def test_nothing_is_refused_before_the_journal_was_asked_whose_it_is(asked: str) -> None:
    """Another server may have taken it over a moment ago, and know what this one does not."""
    async with journalled() as it:
        await first_sign_of_life(it)
        hold_renewals(it)
        calling = it.group.create_task(_outcome(_REFUSED_FOR_WHAT_IS_NOT_KNOWN[asked](it)))
        await eventually(it.journal.renewing.is_set, "the journal being asked")
        await turn_the_loop()
        assert not calling.done()
        it.journal.may_renew.set()
        outcome = await calling
    if isinstance(outcome, list):
        assert [AdmissionOutcome.WRONG_SESSION] == [each.outcome for each in outcome]
    else:
        assert isinstance(outcome, DomainError)


async def answered_behind(it: Journalled, command: Any) -> Any:
    """What an append is answered when something is decided meanwhile.

    That is after the append has become durable, and before it is answered.
    """
    hold(it)
    calling = it.group.create_task(_outcome(it.driver.appends.append(BUFFER, [fragment(it, 0)])))
    await it.journal.writing.wait()
    decided = asyncio.Event()

    def decide() -> None:
        hold(it)
        it.driver.core.apply_now(command)
        decided.set()

    it.driver.turns.when_settled(decide)
    it.journal.may_write.set()
    await decided.wait()
    await turn_the_loop()
    assert not calling.done()
    it.journal.may_write.set()
    return await calling


async def test_an_answer_tells_of_no_version_that_is_not_durable() -> None:
    async with journalled() as it:
        _, model = await answered_behind(it, publish(7))
    assert 7 == model.model_version


async def test_an_answer_tells_of_no_deletion_that_is_not_durable() -> None:
    async with journalled() as it:
        answer = await answered_behind(it, DeleteBuffer(BUFFER))
    assert isinstance(answer, BufferNotFoundError)


@pytest.mark.usefixtures("unhurried")
async def test_a_server_that_was_just_displaced_refuses_nobody() -> None:
    """Who waits for the refusal of a lease, say, that its successor granted is cut off instead."""
    told: list[object] = []

    async def be_displaced() -> None:
        async with journalled() as it:
            await first_sign_of_life(it)
            it.journal.is_taken = True
            told.append(
                await _outcome(it.driver.core.call(RenewLease(BUFFER, LeaseId("of another"))))
            )

    with pytest.raises(ExceptionGroup) as failed:
        await be_displaced()
    assert failed.group_contains(JournalTakenError)
    assert [] == told


@pytest.mark.usefixtures("unhurried")
async def test_refusals_of_one_moment_share_one_look_at_the_journal() -> None:
    async with journalled() as it:
        await first_sign_of_life(it)
        seen = it.journal.renewal_count
        renew = RenewLease(BUFFER, LeaseId("of nobody"))
        calls = [it.group.create_task(_outcome(it.driver.core.call(renew))) for _ in range(50)]
        refused = [await each for each in calls]
    assert all(isinstance(each, LeaseNotFoundError) for each in refused)
    assert 1 == it.journal.renewal_count - seen


@pytest.mark.usefixtures("unhurried")
async def test_a_refusal_that_follows_a_look_at_the_journal_causes_another_one() -> None:
    """What was asked before it was decided says nothing of who owns the journal since."""
    async with journalled() as it:
        await first_sign_of_life(it)
        hold_renewals(it)
        renew = RenewLease(BUFFER, LeaseId("of nobody"))
        first = it.group.create_task(_outcome(it.driver.core.call(renew)))
        await eventually(it.journal.renewing.is_set, "the journal being asked")
        second = it.group.create_task(_outcome(it.driver.core.call(renew)))
        await turn_the_loop()
        it.journal.may_renew.set()  # Lets through whoever waits, and nobody after.
        it.journal.may_renew.clear()
        await turn_the_loop()
        assert (True, False) == (first.done(), second.done())
        it.journal.may_renew.set()
        assert isinstance(await second, LeaseNotFoundError)


@pytest.mark.usefixtures("unhurried")
async def test_what_was_refused_by_a_turn_is_told_without_another_look() -> None:
    """The write of the turn has asked whose the journal is."""
    async with journalled() as it:
        await first_sign_of_life(it)
        seen = it.journal.renewal_count
        deleting = it.group.create_task(it.driver.delete_buffer(DeleteBuffer(BUFFER)))
        await asyncio.sleep(0)
        outcome = await _outcome(it.driver.core.call(EndSession(BUFFER, RUN)))
        await deleting
    assert isinstance(outcome, BufferNotFoundError)
    assert 0 == it.journal.renewal_count - seen


async def test_a_refusal_waits_for_a_journal_that_is_away_and_is_told_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "RENEW_S", 0.01)
    async with journalled() as it:
        await first_sign_of_life(it)
        it.journal.is_down = True
        renew = RenewLease(BUFFER, LeaseId("of nobody"))
        calling = it.group.create_task(_outcome(it.driver.core.call(renew)))
        seen = it.journal.renewal_count
        await eventually(lambda: it.journal.renewal_count > seen + 1, "it being asked again")
        assert not calling.done()
        assert it.driver.away_s()["journal"] > 0.0
        it.journal.is_down = False
        assert isinstance(await calling, LeaseNotFoundError)
        assert 0.0 == it.driver.away_s()["journal"]


@pytest.mark.usefixtures("hasty")
async def test_nothing_is_deleted_while_the_journal_may_be_anothers() -> None:
    """The store looks for itself, but may have come back as it was before the other's claim."""
    async with journalled() as it:
        payload = fragment(it, 0).payload
        await _until_out_of_date(it)
        it.driver.deletions.put([payload])
        await turn_the_loop()
        assert [] == it.custodian.deleted
        it.journal.is_down = False
        await it.driver.flush()
    assert [payload.payload_id] == it.custodian.deleted


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "as it was"])
async def test_who_may_have_been_replaced_lets_others_speak_when_the_store_was_started_again(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """It may have come back as it was before another server's claim, which that one renews."""
    monkeypatch.setattr(turns, "CONTEND_S", 60.0)

    async def be_replaced() -> None:
        async with journalled() as it:
            await first_sign_of_life(it)
            await _until_out_of_date(it)
            it.journal.incarnation = "second"
            it.journal.is_lost = is_lost
            appending = it.group.create_task(append(it.driver, BUFFER, [fragment(it, 0)]))
            it.journal.is_down = False
            written = it.journal.snapshots if is_lost else it.journal.turns
            await eventually(lambda: len(written) == (1 if is_lost else 2), "the turn written")
            await turn_the_loop()
            assert not appending.done()
            it.journal.is_taken = True
            with pytest.raises(asyncio.CancelledError):
                await appending

    with pytest.raises(ExceptionGroup) as failed:
        await be_replaced()
    assert failed.group_contains(JournalTakenError)


@pytest.mark.usefixtures("hasty")
async def test_who_hears_of_nobody_else_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "CONTEND_S", 0.1)
    async with journalled() as it:
        await first_sign_of_life(it)
        await _until_out_of_date(it)
        it.journal.incarnation = "second"
        it.journal.is_lost = True
        it.journal.is_down = False
        [appended] = await append(it.driver, BUFFER, [fragment(it, 0)])
        assert AdmissionOutcome.ADMITTED is appended.outcome
        assert 1 == len(it.journal.snapshots)


async def _outcome(call: Awaitable[Any]) -> object:
    try:
        return await call
    except DomainError as error:
        return error


async def test_whatever_a_journal_raises_is_an_outage_and_its_turn_is_written_after_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """uvloop raised a RuntimeError out of a connection that the other side hung up on."""
    monkeypatch.setattr(turns, "RETRY_DELAY_S", 0.001)
    async with journalled() as it:
        it.journal.error = RuntimeError("the handler is closed")
        appending = it.group.create_task(append(it.driver, BUFFER, [fragment(it, 0)]))
        await eventually(lambda: "writing the journal failed" in caplog.text, "an outage")
        assert not appending.done()
        it.journal.error = None
        await appending
        assert 1 == len(it.journal.turns[-1])
