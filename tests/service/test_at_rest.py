"""The check that a server is at rest in the end finds each count that a change forgets."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from breadbox_server.access.authorization import Caller, Quotas, Role
from breadbox_server.admission.append_queue import AppendQueue
from breadbox_server.admission.payloads import DeletionQueue
from breadbox_server.admission.precedence import STEP_S, Precedence
from breadbox_server.admission.quotas import Charge
from breadbox_server.core.model.config import BufferConfig, FullPolicy
from breadbox_server.core.state.room import Room
from breadbox_server.core.state.room_queue import RoomQueue
from breadbox_server.driver import Driver
from breadbox_server.reading.watchers import Watchers
from support.at_rest import left_over
from support.driven import BUFFER, Driven, driven
from support.metadata import written_fragment

ONE = BufferConfig(capacity_chunks=1, uses_max=1, full_policy=FullPolicy.BLOCK, lease_s=3600.0)
PRODUCER = Caller("team", Role.PRODUCER, quotas=Quotas(bytes_held_max=10_000))


async def ended(it: Driven, call: asyncio.Task[Any]) -> None:
    """Let time pass until a call is over; cut it off if it hangs."""
    for _ in range(20):
        await it.settle()
        it.clock.advance(STEP_S)
    call.cancel()
    await asyncio.wait([call])


async def live(it: Driven) -> None:
    """A life with all that a server counts: appends that wait, quotas, fetches, reads, watches."""
    driver, precedence = it.driver, it.driver.appends.queue.precedence
    loop = asyncio.get_running_loop()

    def append(index: int, wait_s: float = 0.0) -> asyncio.Task[Any]:
        fragment = written_fragment(it.custodian, index, "run")
        call = driver.appends.append(BUFFER, [fragment], PRODUCER, bodies=[b"x"], wait_s=wait_s)
        return loop.create_task(call)

    await ended(it, append(0))
    waiting = append(1, wait_s=60.0)
    await it.settle()
    precedence.begin()  # As a call of a learner does.
    await ended(it, loop.create_task(it.consume(1)))
    precedence.end()
    await ended(it, waiting)
    cut_off = append(2, wait_s=60.0)
    await it.settle()
    cut_off.cancel()
    precedence.begin()
    held_up = loop.create_task(driver.appends.queue.may_read(1, 100))
    await it.settle()
    held_up.cancel()
    precedence.end()
    state = driver.core.buffers[BUFFER].model
    watching = loop.create_task(
        driver.reading.watch(
            BUFFER,
            session_id=state.session_id,
            model_version=state.model_version,
            lacks_weights=False,
            wait_s=60.0,
        )
    )
    lease = driver.reading.leases.take(
        BUFFER, [each.payload for each in driver.core.buffers.fragments()], 60.0, "reader"
    )
    await ended(it, loop.create_task(it.consume(1)))
    driver.reading.leases.release(lease.lease_id)
    await it.settle()
    for each in (cut_off, held_up, watching):
        await ended(it, each)


async def test_a_server_whose_callers_have_gone_is_at_rest() -> None:
    async with driven(ONE) as it:
        await live(it)
    assert {} == left_over(it.driver)


def without(owner: type, name: str, times: int = 1) -> Callable[[pytest.MonkeyPatch], None]:
    """Plant a bug: the first calls of a method do nothing."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        kept, left = getattr(owner, name), Counter(calls=times)

        def forgetful(*args: Any, **options: Any) -> Any:
            left["calls"] -= 1
            return None if left["calls"] >= 0 else kept(*args, **options)

        monkeypatch.setattr(owner, name, forgetful)

    return plant


def miscounting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a bug: what ends its wait is not counted off."""
    count = AppendQueue._count_waiting  # noqa: SLF001 - a bug is planted in it

    def only_up(self: Any, pending: Any, caller_id: Any) -> None:
        before = self._waiting_fragments, self._waiting_inline_bytes
        count(self, pending, caller_id)
        after = self._waiting_fragments, self._waiting_inline_bytes
        self._waiting_fragments, self._waiting_inline_bytes = map(max, before, after)

    monkeypatch.setattr(AppendQueue, "_count_waiting", only_up)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (without(Precedence, "end"), {"learners' calls ahead"}),
        (without(Charge, "end", 9), {"bytes of appends in progress"}),
        (miscounting, {"waiting fragments", "waiting inline bytes"}),
        (without(RoomQueue, "remove", 9), {"positions"}),
        (without(Room, "end", 9), {"reservations"}),
        (without(AppendQueue, "withdraw"), {"inline bytes"}),
        (without(Watchers, "_leave"), {"callers watching", "holders of callers watching"}),
        (without(DeletionQueue, "queue", 1), {"payloads leaving that nobody deletes"}),
    ],
    ids=lambda each: "" if callable(each) else ", ".join(sorted(each)),
)
async def test_what_a_planted_bug_leaves_behind_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    found: set[str],
    monkeypatch: pytest.MonkeyPatch,
    servers_end_at_rest: list[Driver],
) -> None:
    plant(monkeypatch)
    async with driven(ONE) as it:
        await live(it)
    assert found <= left_over(it.driver).keys()
    servers_end_at_rest.clear()  # The fixture would fail this test as well.
