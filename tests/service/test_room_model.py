"""B31 beside a naive queue: room in order, and a position that is kept for 5 s.

Producers append to a full buffer, give up, are cut off and come again; learners make room; time
passes. A list says which appends are admitted and which wait. The server must do the same.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from breadbox_server.core.model.config import BufferConfig, FullPolicy
from breadbox_server.core.model.errors import DomainError
from breadbox_server.core.model.inputs import AdmissionOutcome, Appended
from breadbox_server.core.rules import waiting
from breadbox_server.core.state.room_queue import Position, RoomQueue
from support.driven import BUFFER, Driven, driven
from support.metadata import written_fragment

FULL = BufferConfig(capacity_chunks=3, uses_max=1, full_policy=FullPolicy.BLOCK, lease_s=3600.0)
PLACES = 3
KEPT_S = 5.0
"""What ARCHITECTURE.md says; the server's constant is not asked."""

Step = tuple[str, int, float]
"""What happens, to which producer or how many places, and for how long."""

PRODUCERS = st.integers(0, 4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), PRODUCERS, st.sampled_from([0.0, 4.0, 10.0, 30.0])),
        st.tuples(st.just("cut"), PRODUCERS, st.just(0.0)),
        st.tuples(st.just("room"), st.integers(1, PLACES), st.just(0.0)),
        st.tuples(st.just("time"), st.just(0), st.sampled_from([1.0, 3.0, 4.9, 5.0, 6.0])),
    ),
    min_size=8,
    max_size=40,
)


@dataclass
class NaivePosition:
    """A producer's position: it waits until a time, or its position is kept until one."""

    producer: int
    waits: bool
    until: float


@dataclass
class NaiveRoom:
    """The queue in a list, and what every producer has been told."""

    now: float = 0.0
    free: int = 0
    queue: list[NaivePosition] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    """Producers that were told to come again, in order."""

    @property
    def waiting(self) -> list[int]:
        return [each.producer for each in self.queue if each.waits]

    def come(self, producer: int, wait_s: float) -> None:
        if self.free and not self.waiting:
            self.free -= 1
            self.queue = [each for each in self.queue if each.producer != producer]
            self.admitted.append(producer)
            return
        if not wait_s:
            self.told.append(producer)
            return
        found = next((each for each in self.queue if each.producer == producer), None)
        if found is None:
            self.queue.append(NaivePosition(producer, True, self.now + wait_s))
        else:
            found.waits, found.until = True, self.now + wait_s

    def cut(self, producer: int) -> None:
        for each in self.queue:
            if each.producer == producer and each.waits:
                each.waits, each.until = False, self.now + KEPT_S

    def room(self, count: int) -> None:
        self.free += count
        while self.free and self.waiting:
            first = next(each for each in self.queue if each.waits)
            self.queue.remove(first)
            self.free -= 1
            self.admitted.append(first.producer)

    def time(self, span_s: float) -> None:
        end = self.now + span_s
        while due := [each for each in self.queue if each.until <= end]:
            first = min(due, key=lambda each: each.until)
            self.now = first.until
            if first.waits:
                first.waits, first.until = False, self.now + KEPT_S
                self.told.append(first.producer)
            else:
                self.queue.remove(first)
        self.now = end


class Producers:
    """Producers of a server; each has one worker, and appends one fragment until it is admitted."""

    def __init__(self, it: Driven) -> None:
        self.it = it
        self.calls: dict[int, asyncio.Task[None]] = {}
        self.admitted: list[int] = []
        self.told: list[int] = []

    @property
    def waiting(self) -> set[int]:
        return {producer for producer, call in self.calls.items() if not call.done()}

    def come(self, producer: int, wait_s: float) -> None:
        call = self._append(producer, wait_s)
        self.calls[producer] = asyncio.get_running_loop().create_task(call)

    async def _append(self, producer: int, wait_s: float) -> None:
        index = self.admitted.count(producer)
        fragment = written_fragment(self.it.custodian, index, "run", f"p{producer}")
        (result,), _ = await self.it.driver.appends.append(BUFFER, [fragment], wait_s=wait_s)
        if result == Appended(AdmissionOutcome.ADMITTED):
            self.admitted.append(producer)
        else:
            assert Appended(AdmissionOutcome.BUFFER_FULL) == result
            self.told.append(producer)


async def play(steps: list[Step]) -> None:
    """Take the steps, and compare after each of them."""
    room = NaiveRoom()
    async with driven(FULL) as it:
        fill = [written_fragment(it.custodian, index, "run", "fill") for index in range(PLACES)]
        await it.driver.appends.append(BUFFER, fill)
        producers = Producers(it)
        for number, (what, which, span_s) in enumerate(steps):
            if what == "come" and which not in producers.waiting:
                producers.come(which, span_s)
                room.come(which, span_s)
            elif what == "cut" and which in producers.waiting:
                producers.calls[which].cancel()
                room.cut(which)
            elif what == "room" and which <= PLACES - room.free:
                await it.consume(which)
                room.room(which)
            elif what == "time":
                it.clock.advance(span_s)
                room.time(span_s)
            await it.settle()
            expected = (room.admitted, room.told, set(room.waiting))
            got = (producers.admitted, producers.told, producers.waiting)
            assert expected == got, f"step {number} of {steps}"
            assert len(room.waiting) == it.driver.appends.queue.waiting_count
    for call in producers.calls.values():
        with suppress(DomainError, asyncio.CancelledError):
            await call


COMES_AGAIN: list[Step] = [
    ("come", 0, 10.0), ("come", 1, 30.0), ("time", 0, 5.0), ("time", 0, 5.0), ("time", 0, 4.9),
    ("come", 0, 10.0), ("room", 1, 0.0),
]  # fmt: skip
COMES_TOO_LATE: list[Step] = [*COMES_AGAIN[:4], ("time", 0, 5.0), *COMES_AGAIN[5:]]
IS_CUT_OFF: list[Step] = [
    ("come", 0, 10.0), ("come", 1, 30.0), ("cut", 0, 0.0), ("time", 0, 4.9), ("come", 0, 10.0),
    ("room", 1, 0.0), ("room", 1, 0.0),
]  # fmt: skip


@settings(max_examples=60)
@given(steps=STEPS)
@example(steps=COMES_AGAIN)
@example(steps=COMES_TOO_LATE)
@example(steps=IS_CUT_OFF)
def test_room_goes_as_in_a_naive_queue(steps: list[Step]) -> None:
    asyncio.run(play(steps))


def never_kept(queue: RoomQueue, position: Position, until: float) -> None:
    del until
    queue.remove(position)


@pytest.mark.parametrize("steps", [COMES_AGAIN, IS_CUT_OFF], ids=["told", "cut off"])
def test_the_naive_queue_catches_one_that_keeps_no_position(
    steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoomQueue, "keep", never_kept)
    with pytest.raises(AssertionError, match="step"):
        asyncio.run(play(steps))


@pytest.mark.parametrize(("kept_s", "steps"), [(4.8, IS_CUT_OFF), (5.1, COMES_TOO_LATE)])
def test_the_naive_queue_catches_a_position_kept_for_another_time(
    kept_s: float, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PLACE_KEPT_S", kept_s)
    with pytest.raises(AssertionError, match="step"):
        asyncio.run(play(steps))
