"""When appends go by a stream, as pure decisions."""

import grpc
import pytest

from breadbox.streaming import (
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
    Streaming,
    Usage,
    taken_count,
)


def test_a_stream_is_worth_it_for_whoever_has_just_appended() -> None:
    streaming = Streaming()
    assert [False, True, False, True] == [
        streaming.is_worth_it(now) for now in (0.0, APART_S_MAX, 3.0, 3.5)
    ]


def test_one_that_was_not_worth_it_is_distrusted_for_longer_each_time() -> None:
    streaming, now, waits = Streaming(), 0.0, []
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
    streaming = Streaming()
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
