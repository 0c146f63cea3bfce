"""When appends go by a stream, as pure decisions."""

from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2

from breadbox.model.errors import ReplayBufferError, UnavailableError
from breadbox.operations.streaming import (
    AGE_S_MAX,
    APART_S_MAX,
    DISTRUST_S,
    DISTRUST_S_MAX,
    IDLE_S_MAX,
    OPEN_S_MAX,
    OUTAGE_S,
    TOGETHER_BYTES_MAX,
    WORTH_COUNT,
    Bundle,
    Credit,
    Sent,
    Stream,
    Streaming,
    Usage,
    keep,
    taken_count,
)
from breadbox.v1 import replay_buffer_service_pb2 as pb


def test_a_stream_is_worth_it_for_whoever_has_just_appended() -> None:
    streaming = Streaming[Stream]()
    assert [False, True, False, True] == [
        streaming.is_worth_it(now) for now in (0.0, APART_S_MAX, 3.0, 3.5)
    ]


def test_one_that_was_not_worth_it_is_distrusted_for_longer_each_time() -> None:
    streaming, now, waits = Streaming[Stream](), 0.0, []
    for _ in range(8):
        streaming.note_end(WORTH_COUNT - 1, now)
        before = now
        streaming.is_worth_it(now)
        while not streaming.is_worth_it(now):
            now += 0.5
        waits.append(now - before)
    assert [min(DISTRUST_S * 2**k, DISTRUST_S_MAX) for k in range(8)] == waits
    streaming.note_end(WORTH_COUNT, now)
    assert streaming.is_worth_it(now), "one that was worth it ends the distrust"
    streaming.note_end(0, now)
    assert streaming.is_worth_it(now + DISTRUST_S - 0.5) is False
    assert streaming.is_worth_it(now + DISTRUST_S)


def test_an_outage_is_no_reason_for_distrust() -> None:
    streaming = Streaming[Stream]()
    for _ in range(8):
        streaming.note_end(0, 0.0, is_outage=True)
    assert [False, False, True] == [
        streaming.is_worth_it(now) for now in (0.0, OUTAGE_S - 0.1, OUTAGE_S)
    ]


@pytest.mark.parametrize(
    ("credit", "now", "is_over"),
    [
        (None, OPEN_S_MAX, False),
        (None, OPEN_S_MAX + 1.0, True),
        (Credit(1, 1), IDLE_S_MAX, False),
        (Credit(1, 1), IDLE_S_MAX + 1.0, True),
    ],
)
def test_a_stream_is_left_when_it_does_not_open_and_when_it_was_idle(
    credit: Credit | None, now: float, is_over: bool
) -> None:
    assert is_over is Usage(0.0, 0.0, credit).is_over(now)


def test_a_stream_is_left_when_it_is_old() -> None:
    usage = Usage(0.0, AGE_S_MAX, Credit(1, 1))
    assert [False, True] == [usage.is_over(now) for now in (AGE_S_MAX, AGE_S_MAX + 1.0)]


def test_what_is_on_its_way_keeps_to_the_credit_in_number_and_bytes() -> None:
    usage = Usage(0.0, 0.0)
    assert not usage.takes(1), "the server has said nothing yet"
    usage.credit = Credit(2, 100)
    usage.note_sent(60, 1.0)
    assert [True, False] == [usage.takes(size) for size in (40, 41)]
    usage.note_sent(10, 1.0)
    assert not usage.takes(1)
    usage.note_answered(60)
    assert [True, False] == [usage.takes(size) for size in (90, 91)]


def test_one_message_has_several_small_appends_or_one_large() -> None:
    half = TOGETHER_BYTES_MAX // 2
    bundle = Bundle(Credit(3, 10**6))
    assert [True, True, False] == [bundle.takes(half) for _ in range(3)]
    bundle = Bundle(Credit(3, 10**6))
    assert [True, True, True, False] == [bundle.takes(1) for _ in range(4)]
    bundle = Bundle(Credit(3, 10**6))
    assert [True, False] == [bundle.takes(size) for size in (10**6, 1)]


@pytest.mark.parametrize(
    ("code", "trailing", "taken"),
    [
        (grpc.StatusCode.OK, (("breadbox-taken", "7"),), 7),
        (grpc.StatusCode.OK, (("breadbox-taken", "all"),), -1),
        (grpc.StatusCode.OK, (("breadbox-taken", "9" * 5000),), -1),
        (grpc.StatusCode.OK, (), -1),
        (grpc.StatusCode.OK, None, -1),
        (grpc.StatusCode.UNAVAILABLE, (("breadbox-taken", "7"),), -1),
    ],
)
def test_what_the_server_took_is_known_of_streams_that_ended_well(
    code: grpc.StatusCode, trailing: tuple[tuple[str, str], ...] | None, taken: int
) -> None:
    assert taken == taken_count(code, trailing)


class FakeCall:
    """Of gRPC, as a stream has it."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


CREDIT = Credit(3, 10**6)


def opened(credit: Credit | None = CREDIT) -> Stream:
    """A stream on which the server has said what it takes."""
    stream = Stream(0.0, lambda: None)
    stream.call = FakeCall()
    stream.usage.credit = credit
    return stream


def sent(stream: Stream, size_bytes: int = 10) -> Sent:
    """An append that was sent."""
    each = Sent(pb.AppendFragmentsRequest(), size_bytes, 5.0, Future())
    stream.put(each, 1.0)
    return each


def messages(stream: Stream) -> list[tuple[list[int], list[int]]]:
    """What leaves now: the numbers of appends, and of those that nobody waits for, by message."""
    found = []
    while (message := stream.next_message()) is not None:
        found.append(([each.call_id for each in message.appends], [*message.cancelled_call_ids]))
    return found


def outcome(each: Sent) -> Any:
    """What an append was told."""
    assert isinstance(each.promise, Future)
    assert each.promise.done()
    return each.promise.exception() or each.promise.result()


def test_answers_go_to_whom_they_are_for_and_make_room() -> None:
    stream = opened(Credit(3, 30))
    one, other, third = (sent(stream) for _ in range(3))
    assert [([1, 2, 3], [])] == messages(stream)
    response, refusal = pb.AppendFragmentsResponse(), status_pb2.Status(code=5, message="gone")
    assert not stream.usage.takes(1)
    told = pb.AppendStreamResponse(
        credit=pb.AppendCredit(append_count=4, size_bytes=40),
        answers=[
            pb.StreamedAnswer(call_id=3, response=response),
            pb.StreamedAnswer(call_id=7, response=response),
            pb.StreamedAnswer(call_id=1, error=refusal.SerializeToString()),
        ],
    )
    keep(stream.take(told))
    assert isinstance(outcome(one), ReplayBufferError)
    assert "gone" in str(outcome(one))
    assert (response, False) == (outcome(third), other.promise.done())
    assert (3, Credit(4, 40)) == (stream.answered_count, stream.usage.credit)
    assert [True, False] == [stream.usage.takes(size) for size in (30, 31)]
    keep(stream.take(told))
    assert isinstance(outcome(one), ReplayBufferError), "what is answered again stays as it was"


def test_whoever_waits_no_longer_makes_room_and_is_taken_out_of_the_line() -> None:
    stream = opened()
    one, other = sent(stream, 900_000), sent(stream, 100_000)
    assert [([1], []), ([2], [])] == messages(stream)
    assert not stream.usage.takes(1)
    stream.give_up(one)
    stream.give_up(one)
    assert [([], [1])] == messages(stream)
    assert [True, False] == [stream.usage.takes(size) for size in (900_000, 900_001)]
    stream.retire()
    stream.give_up(other)
    assert stream.call.is_cancelled, "nobody waits for anything of it"


def test_what_a_stream_was_given_before_it_is_left_is_still_answered() -> None:
    stream = opened()
    one = sent(stream)
    stream.retire()
    assert (False, [([1], [])]) == (stream.call.is_cancelled, messages(stream))
    response = pb.AppendFragmentsResponse()
    answer = pb.StreamedAnswer(call_id=1, response=response)
    keep(stream.take(pb.AppendStreamResponse(answers=[answer])))
    assert response == outcome(one)
    silent = opened(None)
    silent.retire()
    assert silent.call.is_cancelled, "a server that said nothing is not waited for"


@pytest.mark.parametrize(("taken", "unseen"), [(-1, 0), (0, 3), (2, 1), (3, 0)])
def test_what_the_server_has_not_taken_goes_by_calls_and_the_rest_fails(
    taken: int, unseen: int
) -> None:
    stream = opened()
    every = [sent(stream) for _ in range(3)]
    keep(stream.end(taken, lambda: UnavailableError("it ended")))
    told = [outcome(each) for each in every]
    assert [None] * unseen == told[3 - unseen :]
    assert all(isinstance(each, UnavailableError) for each in told[: 3 - unseen])
    assert len({id(each) for each in told[: 3 - unseen]}) == 3 - unseen, "each has its own"


def test_a_stream_is_opened_for_the_next_append_and_left_when_it_is_old() -> None:
    streaming, made = Streaming[Stream](), []

    def open_stream() -> Stream:
        made.append(opened())
        return made[-1]

    assert [None, None] == [streaming.stream_for(1, now, open_stream) for now in (0.0, 0.1)]
    (stream,) = made
    assert stream is streaming.stream_for(1, 0.2, open_stream)
    assert streaming.stream_for(10**7, 0.3, open_stream) is None, "more than it takes"
    stream.answered_count = WORTH_COUNT
    assert streaming.stream_for(1, IDLE_S_MAX + 1.0, open_stream) is None
    assert (True, None) == (stream.is_retired, streaming.stream)
    assert streaming.stream_for(1, IDLE_S_MAX + 1.1, open_stream) is None
    assert made[1:] == [streaming.stream]
    streaming.ended(stream, IDLE_S_MAX + 1.2)
    assert made[1] is streaming.stream, "what was left before ends without harm to the next"


def test_where_none_can_be_opened_none_is_tried_for_a_while() -> None:
    streaming, tried = Streaming[Stream](), []

    def open_stream() -> None:
        tried.append(1)

    for tenth in range(int(DISTRUST_S * 10)):
        assert streaming.stream_for(1, tenth / 10, open_stream) is None
    assert [1] == tried
