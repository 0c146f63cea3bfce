"""Fetches, reads, their leases and waits at their bounds."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from breadbox.model.errors import StoreUnavailableError
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.errors import BufferNotFoundError, LeaseNotFoundError
from breadbox_server.core.model.events import FetchGranted, RequestRefused
from breadbox_server.core.model.ids import LeaseId
from breadbox_server.core.model.inputs import DeleteBuffer, Payload
from breadbox_server.core.rules.reading import ReadSpec
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.reading import read_leases, reads
from breadbox_server.reading.read_leases import ReadLeases
from breadbox_server.reading.reads import Arrivals
from breadbox_server.reading.uses import Uses
from breadbox_server.reading.watchers import FEW, GATHER_S_MAX, Watchers
from support.driven import BUFFER, Driven, driven
from support.manual_timers import ManualTimers
from support.metadata import make_payload, written_fragment

# Fetches ------------------------------------------------------------------------------------------


async def granted(it: Driven) -> FetchGranted:
    await it.driver.appends.append(BUFFER, [written_fragment(it.custodian, 0, "run")])
    found = await it.fetch(1)
    assert isinstance(found, FetchGranted)
    return found


async def test_a_grant_that_is_taken_back_is_granted_again_and_was_no_use() -> None:
    async with driven(BufferConfig(uses_max=1)) as it:
        it.driver.core.take_back(await granted(it))
        again = await it.fetch(1)
        assert isinstance(again, FetchGranted)
        assert [0] == [each.chunk_id for each in again.fragments]


async def test_a_grant_is_taken_back_though_its_buffer_has_gone() -> None:
    async with driven() as it:
        grant = await granted(it)
        await it.driver.delete_buffer(DeleteBuffer(BUFFER))
        it.driver.core.take_back(grant)
        assert () == it.driver.core.buffers.names()


async def test_a_fetch_that_is_cancelled_as_it_is_refused_is_cancelled() -> None:
    async with driven() as it:
        fetching = asyncio.get_running_loop().create_task(it.fetch(1, wait_s=60.0))
        await it.settle()
        (caller_id,) = it.driver.core._callers  # noqa: SLF001 - its future
        it.driver.core.wake(RequestRefused(BUFFER, caller_id, BufferNotFoundError(BUFFER)))
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching


async def test_an_outcome_of_a_fetch_that_has_gone_wakes_nobody() -> None:
    async with driven() as it:
        grant = await granted(it)
        error = BufferNotFoundError(BUFFER)
        it.driver.core.wake(RequestRefused(BUFFER, grant.caller_id, error))
        it.driver.core.wake(grant)
        again = await it.fetch(1)
        assert isinstance(again, FetchGranted)


# Leases of readers --------------------------------------------------------------------------------


class Shelf:
    """Leases of readers, and what is deleted once none is left."""

    def __init__(self) -> None:
        self.clock = ManualTimers()
        self.deleted: list[Payload] = []
        self.leases = ReadLeases(
            self.clock,
            metrics=Metrics(CollectorRegistry()),
            delete=self.deleted.extend,
            leases_max=10,
            kept_bytes_max=1000,
            uses=Uses(self.clock, lambda _: True),
        )

    def take(self, *payloads: Payload, holder: str = "reader") -> LeaseId:
        return self.leases.take(BUFFER, payloads, 60.0, holder).lease_id


def test_a_renewed_lease_lasts_from_now_for_what_is_asked_or_as_long_as_before() -> None:
    shelf = Shelf()
    lease_id = shelf.take(make_payload())
    shelf.clock.advance(50.0)
    assert shelf.clock.now() + 60.0 == shelf.leases.renew(lease_id, None)
    assert shelf.clock.now() + 5.0 == shelf.leases.renew(lease_id, 5.0)
    shelf.clock.advance(5.0)
    with pytest.raises(LeaseNotFoundError):
        shelf.leases.renew(lease_id, None)


def test_released_leases_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_leases, "RELEASED_REMEMBERED_MAX", 2)
    shelf = Shelf()
    taken = [shelf.take(make_payload()) for _ in range(3)]
    for each in taken:
        shelf.leases.release(each)
        shelf.leases.release(each)
    assert [False, True, True] == [shelf.leases.knows(BUFFER, each) for each in taken]


def test_what_is_let_go_twice_is_held_back_and_deleted_once() -> None:
    shelf, payload = Shelf(), make_payload(size_bytes=30)
    lease_id = shelf.take(payload)
    assert [] == shelf.leases.hold_back([payload]) == shelf.leases.hold_back([payload])
    assert 30 == shelf.leases.kept_bytes
    shelf.leases.release(lease_id)
    assert ([payload], 0) == (shelf.deleted, shelf.leases.kept_bytes)


def test_a_payload_stays_until_the_last_lease_of_it_ends_whosever_it_is() -> None:
    shelf, payload = Shelf(), make_payload(size_bytes=30)
    leases = [shelf.take(payload, holder=holder) for holder in ("one", "one", "other")]
    shelf.leases.hold_back([payload])
    counts = []
    for each in leases:
        shelf.leases.release(each)
        counts.append((len(shelf.deleted), shelf.leases.kept_bytes))
    assert [(0, 30), (0, 30), (1, 0)] == counts


# Reads --------------------------------------------------------------------------------------------


def test_a_reader_is_behind_since_the_oldest_chunk_that_it_lacks_arrived() -> None:
    arrivals = Arrivals()
    for newest, now in ((0, 10.0), (0, 11.0), (3, 20.0), (4, 30.0)):
        arrivals.note(newest, now)
    assert [30.0, 20.0, 20.0, 10.0, 0.0] == [
        arrivals.lag_s(cursor, 40.0) for cursor in (-1, 0, 2, 3, 4)
    ]
    assert 0.0 == arrivals.lag_s(-1, 5.0), "the clock was set back"


def test_arrivals_begin_anew_with_a_buffer_that_does() -> None:
    arrivals = Arrivals()
    arrivals.note(7, 10.0)
    arrivals.note(1, 50.0)
    assert 2.0 == arrivals.lag_s(-1, 52.0)


def test_arrivals_are_bounded_and_then_known_half_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "NOTES_MAX", 4)
    arrivals = Arrivals()
    for number in range(5):
        arrivals.note(number, float(number))
    assert [8.0, 6.0, 6.0, 4.0] == [arrivals.lag_s(cursor, 8.0) for cursor in (-1, 0, 1, 2)]


async def test_a_read_that_does_not_become_durable_leaves_no_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether its payloads are inline or not."""
    async with driven() as it:
        fragment = written_fragment(it.custodian, 0, "run")
        await it.driver.appends.append(BUFFER, [fragment])
        await it.driver.appends.append(
            BUFFER, [written_fragment(it.custodian, 1, "run")], bodies=[b"body" * 25]
        )

        async def away() -> None:
            raise StoreUnavailableError("away")

        monkeypatch.setattr(it.driver.turns, "settled", away)
        for after in (None, 0):
            with pytest.raises(StoreUnavailableError):
                await it.driver.reading.read(
                    BUFFER, ReadSpec(after=after), wait_s=0, lease_s=None, inline_bytes_max=1000
                )
            assert 0 == len(it.driver.reading.leases)
        monkeypatch.undo()


async def test_replies_that_are_kept_for_others_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reads, "SHARED_REPLIES_MAX", 2)
    async with driven() as it:
        fragments = [written_fragment(it.custodian, index, "run") for index in range(4)]
        await it.driver.appends.append(BUFFER, fragments)
        counts = []
        for after in (None, 0, 1, 2):
            found = await it.driver.reading.read(
                BUFFER, ReadSpec(after=after), wait_s=0, lease_s=None
            )
            cached = it.driver.reading._cached  # noqa: SLF001 - nobody sees it
            counts.append((found.found.chunk_count, len(cached)))
        assert [(4, 1), (3, 2), (2, 1), (1, 2)] == counts


async def test_a_read_after_an_append_is_no_reply_of_before() -> None:
    async with driven() as it:
        for index in range(3):
            fragment = written_fragment(it.custodian, index, "run")
            await it.driver.appends.append(BUFFER, [fragment])
            found = await it.driver.reading.read(
                BUFFER, ReadSpec(after=None), wait_s=0, lease_s=None
            )
            assert index + 1 == found.found.chunk_count


# Waits --------------------------------------------------------------------------------------------


async def waiting(watchers: Watchers, holder: str, count: int) -> list[asyncio.Task[None]]:
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(watchers.wait(BUFFER, 60.0, holder)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_a_caller_that_is_woken_already_gives_its_place_and_hears_its_news() -> None:
    watchers = Watchers(ManualTimers(), 2)
    tasks = await waiting(watchers, "large", 2)
    watchers.wake(BUFFER)
    late = watchers.wait(BUFFER, 60.0, "small")
    late.send(None)
    await asyncio.wait(tasks)
    assert [None, None] == [each.exception() for each in tasks]
    assert 1 == len(watchers)
    late.close()
    assert 0 == len(watchers)


async def test_a_wake_that_was_put_off_finds_that_all_have_gone() -> None:
    clock = ManualTimers()
    watchers = Watchers(clock, 100)
    first = await waiting(watchers, "many", FEW + 1)
    watchers.wake_in_time(BUFFER)
    await asyncio.wait(first)
    again = await waiting(watchers, "many", 1)
    watchers.wake_in_time(BUFFER)
    again[0].cancel()
    await asyncio.wait(again)
    clock.advance(GATHER_S_MAX)
    assert (0, 0) == (len(watchers), clock.live_count)


async def test_callers_that_are_woken_already_are_not_turned_away() -> None:
    watchers = Watchers(ManualTimers(), 100)
    tasks = await waiting(watchers, "reader", 2)
    watchers.wake(BUFFER)
    watchers.turn_away(StoreUnavailableError("ends"))
    await asyncio.wait(tasks)
    assert [None, None] == [each.exception() for each in tasks]
