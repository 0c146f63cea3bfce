"""Which appends of threads leave together; the stream itself is a fake."""

from types import SimpleNamespace
from typing import Any

import pytest

from breadbox import append_stream
from breadbox.append_stream import TOGETHER_S, AppendStreams
from breadbox.streaming import Sent
from breadbox.v1 import replay_buffer_service_pb2 as pb


class FakeDirectStream:
    """Counts what leaves, and takes no time for it."""

    def __init__(self, method: Any, metadata: Any, *, sent: Any, received: Any) -> None:
        self.call = SimpleNamespace(cancel=lambda: None)
        self.sent, self.received = sent, received
        self.messages: list[list[int]] = []

    def send(self, message: bytes) -> None:
        appends = pb.AppendStreamRequest.FromString(message).appends
        self.messages.append([each.call_id for each in appends])

    def end(self) -> None:
        pass


class World:
    """A stream, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        context: Any = SimpleNamespace(now=lambda: self.now)
        owner = AppendStreams(context, 0, None, None)
        self.stream = append_stream._Stream(owner, None, None)  # noqa: SLF001 - nobody else knows
        direct: Any = self.stream._direct  # noqa: SLF001
        self.direct: FakeDirectStream = direct
        credit = pb.AppendCredit(append_count=8, size_bytes=10**6)
        direct.received(pb.AppendStreamResponse(credit=credit).SerializeToString())

    def put(self) -> Sent:
        """One thread appends."""
        answer: Any = SimpleNamespace(done=lambda: True)
        sent = Sent(pb.AppendFragmentsRequest(), 10, 5.0, answer)
        self.stream.put(sent, self.now)
        return sent

    def arrive(self) -> list[list[int]]:
        """All that left is on the wire; the call_ids by message."""
        while self.stream._is_sending:  # noqa: SLF001
            self.direct.sent()
        found, self.direct.messages = self.direct.messages, []
        return list(found)

    def answer(self, *call_ids: int) -> None:
        """The server answers these, in one message."""
        answers = [
            pb.StreamedAnswer(call_id=each, response=pb.AppendFragmentsResponse())
            for each in call_ids
        ]
        self.direct.received(pb.AppendStreamResponse(answers=answers).SerializeToString())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(append_stream, "DirectStream", FakeDirectStream)
    return World()


def together(world: World) -> None:
    """Two are answered at a time; the next is the third."""
    world.put()
    world.put()
    assert [[1], [2]] == world.arrive()
    world.answer(1, 2)


def test_whoever_appends_alone_waits_for_nobody(world: World) -> None:
    for number in range(1, 5):
        world.put()
        assert (0.0, [[number]]) == (world.stream.watch_s, world.arrive())
        world.answer(number)


def test_those_who_are_answered_together_append_together(world: World) -> None:
    together(world)
    world.put()
    assert (TOGETHER_S, []) == (world.stream.watch_s, world.arrive())
    world.put()
    assert (0.0, [[3, 4]]) == (world.stream.watch_s, world.arrive())


def test_one_of_those_who_wait_for_others_watches_the_time(world: World) -> None:
    world.put()
    world.answer(1)
    for _ in range(3):
        world.put()
    world.arrive()
    world.answer(2, 3, 4)
    watches = []
    for _ in range(2):
        world.put()
        watches.append(world.stream.watch_s)
    assert ([TOGETHER_S, 0.0], []) == (watches, world.arrive())
    world.stream.release()
    assert [[5, 6]] == world.arrive()
    world.put()
    assert [[7]] == world.arrive(), "the one that came too late waits for nobody"


def test_whoever_comes_later_waits_for_nobody(world: World) -> None:
    together(world)
    world.now += TOGETHER_S
    world.put()
    assert (0.0, [[3]]) == (world.stream.watch_s, world.arrive())


def test_who_gives_up_holds_up_nobody_any_more(world: World) -> None:
    together(world)
    sent = world.put()
    world.stream.give_up(sent)
    assert [[3]] == world.arrive(), "with word that nobody waits for it"


def test_nobody_waits_for_an_append_that_goes_by_a_call(world: World) -> None:
    together(world)
    world.put()
    assert [] == world.arrive()
    world.stream.pass_by()
    assert [[3]] == world.arrive()
