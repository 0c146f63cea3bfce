"""The background appender: bounded, in order, and nothing dropped unseen."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from breadbox.model import errors
from breadbox.model.fragment import Fragment
from breadbox.model.types import AdmissionOutcome, AppendResult
from breadbox.writing.appender import REFUSED_S_MAX, Appender, AppenderOptions, OnFailure
from support.clock import ManualClock
from support.eventually import eventually_sync
from support.fragments import vector_fragment

ADMITTED = AppendResult(AdmissionOutcome.ADMITTED)
NEVER_S = 3600.0
Answer = Callable[[Sequence[Fragment]], list[AppendResult]]


class FakeClient:
    """Remembers what it is given, and answers as told."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.arguments: list[tuple[Any, Any]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.answers: list[Answer] = []

    def append_many(
        self,
        fragments: Iterable[Fragment],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
        answered: Callable[[list[AppendResult]], None] | None = None,
    ) -> list[AppendResult]:
        fragments = list(fragments)
        self.batches.append([fragment.fragment_index for fragment in fragments])
        self.arguments.append((buffer, codecs))
        assert self.may_answer.wait(10)
        if self.answers:
            return self.answers.pop(0)(fragments)
        return [ADMITTED] * len(fragments)


@pytest.fixture
def client() -> Iterator[FakeClient]:
    made = FakeClient()
    yield made
    made.may_answer.set()


def options(**changes: Any) -> AppenderOptions:
    return AppenderOptions(**{"batch_count": 4, "flush_after_s": NEVER_S, **changes})


def give(appender: Appender, *indexes: int) -> None:
    for index in indexes:
        appender.append(vector_fragment(index))


def failing(error: Exception) -> Answer:
    def answer(fragments: Sequence[Fragment]) -> list[AppendResult]:
        raise error

    return answer


def sent(client: FakeClient) -> list[int]:
    return [index for batch in client.batches for index in batch]


# Batching ---------------------------------------------------------------------------------------


def test_a_full_batch_is_sent_without_waiting(client: FakeClient) -> None:
    with Appender(client, options()) as appender:
        give(appender, 0, 1, 2, 3)
        eventually_sync(lambda: appender.counts.admitted == 4)
    assert [[0, 1, 2, 3]] == client.batches


def test_a_lonely_fragment_is_sent_after_its_time(client: FakeClient) -> None:
    with Appender(client, options(flush_after_s=0.01)) as appender:
        give(appender, 0)
        eventually_sync(lambda: appender.counts.admitted == 1)


def test_no_fragment_is_sent_before_its_time_or_a_full_batch(client: FakeClient) -> None:
    with Appender(client, options(flush_after_s=5.0), clock=ManualClock()) as appender:
        give(appender, 0, 1, 2)
        assert 3 == appender.counts.pending
        assert [] == client.batches


def test_a_flush_sends_what_waits_and_returns_when_it_is_answered(client: FakeClient) -> None:
    with Appender(client, options()) as appender:
        give(appender, 0, 1)
        appender.flush()
        assert [[0, 1]] == client.batches
        assert 0 == appender.counts.pending


def test_a_flush_of_nothing_returns_at_once(client: FakeClient) -> None:
    with Appender(client, options()) as appender:
        appender.flush(max_wait_s=0.0)


def test_a_flush_gives_up_after_its_time_and_sending_goes_on(client: FakeClient) -> None:
    client.may_answer.clear()
    with Appender(client, options()) as appender:
        give(appender, 0)
        with pytest.raises(TimeoutError):
            appender.flush(max_wait_s=0.01)
        client.may_answer.set()
        appender.flush()
    assert [0] == sent(client)


def test_a_flush_may_leave_some_on_their_way(client: FakeClient) -> None:
    client.may_answer.clear()
    with Appender(client, options()) as appender:
        give(appender, 0, 1)
        appender.flush(max_wait_s=0.0, pending_max=2)
        with pytest.raises(TimeoutError):
            appender.flush(max_wait_s=0.01, pending_max=1)
        assert [[0, 1]] == client.batches
        client.may_answer.set()
        appender.flush(pending_max=1)


def test_closing_sends_what_waits_in_order(client: FakeClient) -> None:
    with Appender(client, options()) as appender:
        give(appender, *range(10))
    assert list(range(10)) == sent(client)
    assert 10 == appender.counts.admitted


def test_where_and_how_is_passed_on(client: FakeClient) -> None:
    with Appender(client, options(), buffer="b", codecs="lz4") as appender:
        give(appender, 0)
    assert [("b", "lz4")] == client.arguments


def test_fragments_of_many_threads_are_all_sent_once(client: FakeClient) -> None:
    with Appender(client, options(queue_count_max=8)) as appender:
        threads = [
            threading.Thread(target=give, args=(appender, *range(first, first + 50)))
            for first in range(0, 400, 50)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert list(range(400)) == sorted(sent(client))
    assert max(len(batch) for batch in client.batches) <= 8


class LazyClient(FakeClient):
    """Takes one fragment after the other, and reports it in the call, when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_report = threading.Semaphore(0)
        self.failure: Exception | None = None

    def append_many(
        self,
        fragments: Iterable[Fragment],
        *,
        answered: Callable[[list[AppendResult]], None] | None = None,
        **_: Any,
    ) -> list[AppendResult]:
        assert answered is not None
        self.batches.append([])
        for fragment in fragments:
            self.batches[-1].append(fragment.fragment_index)
            assert self.may_report.acquire(timeout=10)
            if self.failure is not None:
                raise self.failure
            answered([ADMITTED])
        return []


def test_what_comes_while_a_call_is_in_progress_is_sent_by_it() -> None:
    client = LazyClient()
    with Appender(client, options(batch_count=2)) as appender:
        give(appender, 0, 1)
        client.may_report.release()
        eventually_sync(lambda: appender.counts.admitted == 1)
        give(appender, 2, 3, 4)
        client.may_report.release(4)
        appender.flush()
    assert [[0, 1, 2, 3, 4]] == client.batches


def test_a_flush_does_not_wait_for_what_came_after_it() -> None:
    client = LazyClient()
    with Appender(client, options(batch_count=2)) as appender:
        give(appender, 0, 1)
        flushing = threading.Thread(target=appender.flush)
        flushing.start()
        eventually_sync(lambda: bool(sent(client)), "the first is on its way")
        give(appender, 2, 3)
        client.may_report.release(2)
        flushing.join(10)
        assert not flushing.is_alive()
        assert (2, 2) == (appender.counts.admitted, appender.counts.pending)
        client.may_report.release(2)


def test_what_is_unwanted_is_dropped_after_what_is_on_its_way_is_answered() -> None:
    """Counted earlier, it would end a flush that still waits for what is on its way."""
    client = LazyClient()
    unwanted = {3: "stale"}
    appender = Appender(
        client, options(batch_count=2), unwanted=lambda each: unwanted.get(each.fragment_index)
    )
    give(appender, 0, 1)
    eventually_sync(lambda: bool(sent(client)), "the first is on its way")
    give(appender, 2, 3, 4)
    client.may_report.release(1)
    eventually_sync(lambda: sent(client) == [0, 1])
    assert {} == dict(appender.counts.dropped)
    client.may_report.release(3)
    appender.close()
    assert [[0, 1], [2, 4]] == client.batches
    assert {"stale": 1} == dict(appender.counts.dropped)
    assert (5, 4) == (appender.counts.given, appender.counts.admitted)


def test_what_was_reported_before_an_error_is_not_handed_back() -> None:
    client = LazyClient()
    appender = Appender(client, options())
    give(appender, 0, 1, 2, 3)
    client.may_report.release(2)
    eventually_sync(lambda: sent(client) == [0, 1, 2])
    client.failure = errors.UnavailableError("away")
    client.may_report.release()
    with pytest.raises(errors.UnavailableError):
        appender.close()
    assert (2, 2) == (appender.counts.admitted, appender.counts.failed)
    assert [2, 3] == [fragment.fragment_index for fragment in appender.unsent()]


# Bounds -----------------------------------------------------------------------------------------


def held(client: FakeClient, **bounds: Any) -> Appender:
    """An appender whose first batch is being sent and does not come back."""
    client.may_answer.clear()
    return Appender(client, options(batch_count=1, **bounds))


def test_a_full_queue_blocks_and_takes_again_when_there_is_room(client: FakeClient) -> None:
    appender = held(client, queue_count_max=3)
    give(appender, 0, 1, 2)
    with pytest.raises(TimeoutError):
        appender.append(vector_fragment(3), max_wait_s=0.01)
    assert 3 == appender.counts.given
    client.may_answer.set()
    give(appender, 3)
    appender.close()
    assert [0, 1, 2, 3] == sent(client)


def test_bytes_bound_the_queue_too(client: FakeClient) -> None:
    size_bytes = vector_fragment().size_bytes
    appender = held(client, queue_bytes_max=2 * size_bytes)
    give(appender, 0, 1)
    assert 2 * size_bytes == appender.counts.pending_bytes
    with pytest.raises(TimeoutError):
        appender.append(vector_fragment(2), max_wait_s=0.01)
    client.may_answer.set()
    appender.close()
    assert 0 == appender.counts.pending_bytes


def test_a_fragment_larger_than_the_bound_is_held_alone(client: FakeClient) -> None:
    appender = held(client, queue_bytes_max=1)
    give(appender, 0)
    with pytest.raises(TimeoutError):
        appender.append(vector_fragment(1), max_wait_s=0.01)
    client.may_answer.set()
    give(appender, 1)
    appender.close()
    assert [0, 1] == sent(client)


def test_whoever_waits_for_room_does_not_wait_for_company_too(client: FakeClient) -> None:
    with Appender(client, options(batch_count=4, queue_count_max=2)) as appender:
        give(appender, 0, 1, 2)
        assert [[0, 1]] == client.batches


def test_many_bytes_are_sent_without_waiting(client: FakeClient) -> None:
    bounds = options(batch_bytes=2 * vector_fragment().size_bytes)
    with Appender(client, bounds) as appender:
        give(appender, 0, 1)
        eventually_sync(lambda: appender.counts.admitted == 2)


def test_what_is_sent_together_is_bounded_in_bytes(client: FakeClient) -> None:
    client.may_answer.clear()
    with Appender(client, options(batch_bytes=vector_fragment().size_bytes)) as appender:
        give(appender, 0)
        eventually_sync(lambda: bool(client.batches), "the first is on its way")
        give(appender, *range(1, 8))
        client.may_answer.set()
    assert [[0], [1, 2, 3, 4], [5, 6, 7]] == client.batches


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_count", 0),
        ("batch_bytes", 0),
        ("on_failure", "give up"),
        ("batch_count", 5000),
        ("queue_count_max", 0),
        ("queue_bytes_max", 0),
        ("flush_after_s", -1.0),
        ("flush_after_s", float("nan")),
    ],
)
def test_a_bound_out_of_its_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(errors.InvalidRequestError, match=name):
        AppenderOptions(**{name: value})


# Failures ---------------------------------------------------------------------------------------

AWAY = errors.UnavailableError("away")


def test_an_error_surfaces_on_the_next_append_on_flush_and_on_close(client: FakeClient) -> None:
    client.answers = [failing(AWAY)]
    appender = Appender(client, options(batch_count=1))
    give(appender, 0)
    eventually_sync(lambda: appender.counts.failed == 1)
    with pytest.raises(errors.UnavailableError):
        give(appender, 1)
    with pytest.raises(errors.UnavailableError):
        appender.flush()
    with pytest.raises(errors.UnavailableError):
        appender.close()
    appender.close()
    assert [0] == sent(client)


def test_an_error_ends_callers_that_wait_for_room(client: FakeClient) -> None:
    appender = held(client, queue_count_max=1)
    client.answers = [failing(AWAY)]
    give(appender, 0)
    caught: list[Exception] = []

    def blocked() -> None:
        try:
            give(appender, 1)
        except errors.UnavailableError as error:
            caught.append(error)

    thread = threading.Thread(target=blocked)
    thread.start()
    client.may_answer.set()
    thread.join(10)
    assert [AWAY] == caught
    with pytest.raises(errors.UnavailableError):
        appender.close()


def test_after_an_error_everything_unanswered_is_counted_and_handed_back(
    client: FakeClient,
) -> None:
    client.may_answer.clear()
    client.answers = [failing(AWAY)]
    appender = Appender(client, options(batch_count=2))
    give(appender, 0, 1, 2)
    client.may_answer.set()
    with pytest.raises(errors.UnavailableError):
        appender.close()
    counts = appender.counts
    assert (3, 3, 0) == (counts.given, counts.failed, counts.pending)
    assert [0, 1, 2] == [fragment.fragment_index for fragment in appender.unsent()]


def test_what_was_admitted_before_the_buffer_stayed_full_is_not_handed_back(
    client: FakeClient,
) -> None:
    error = errors.BackpressureError("full", 1.0)
    full = AppendResult(AdmissionOutcome.BUFFER_FULL)
    error.results = (ADMITTED, full, full)
    client.answers = [failing(error)]
    appender = Appender(client, options(batch_count=3))
    give(appender, 0, 1, 2)
    with pytest.raises(errors.BackpressureError):
        appender.close()
    counts = appender.counts
    assert (1, 2) == (counts.admitted, counts.failed)
    assert [1, 2] == [fragment.fragment_index for fragment in appender.unsent()]


@pytest.mark.parametrize(
    "left", [AdmissionOutcome.BUFFER_FULL, AdmissionOutcome.PAYLOAD_MISSING], ids=lambda o: o.value
)
def test_what_is_behind_a_fragment_that_is_still_to_be_sent_is_handed_back_with_it(
    client: FakeClient, left: AdmissionOutcome
) -> None:
    """Of another worker it may be judged already; again it is a duplicate."""
    error = errors.BackpressureError("full", 1.0)
    error.results = (ADMITTED, AppendResult(left), AppendResult(AdmissionOutcome.DUPLICATE))
    client.answers = [failing(error)]
    appender = Appender(client, options(batch_count=3))
    give(appender, 0, 1, 2)
    with pytest.raises(errors.BackpressureError):
        appender.close()
    assert [1, 2] == [fragment.fragment_index for fragment in appender.unsent()]
    assert {AdmissionOutcome.ADMITTED: 1} == dict(appender.counts.by_outcome)


def test_outcomes_are_counted_and_add_up(client: FakeClient) -> None:
    outcomes = [
        AdmissionOutcome.ADMITTED,
        AdmissionOutcome.DUPLICATE,
        AdmissionOutcome.STALE,
        AdmissionOutcome.WRONG_SESSION,
    ]
    client.answers = [lambda fragments: [AppendResult(outcome) for outcome in outcomes]]
    with Appender(client, options()) as appender:
        give(appender, 0, 1, 2, 3)
        appender.flush()
        counts = appender.counts
    assert {outcome: 1 for outcome in outcomes} == dict(counts.by_outcome)
    assert (1, 4, 0) == (counts.admitted, counts.given, counts.failed)


def test_a_duplicate_of_what_was_admitted_counts_as_admitted(client: FakeClient) -> None:
    """As after a lost reply; one that was refused the first time is not in the buffer."""
    firsts = [AdmissionOutcome.ADMITTED, AdmissionOutcome.STALE, AdmissionOutcome.UNSPECIFIED]
    client.answers = [
        lambda fragments: [AppendResult(AdmissionOutcome.DUPLICATE, first) for first in firsts]
    ]
    with Appender(client, options(batch_count=3)) as appender:
        give(appender, 0, 1, 2)
        appender.flush()
        assert 1 == appender.counts.admitted


def test_a_closed_appender_says_so(client: FakeClient) -> None:
    appender = Appender(client, options())
    appender.close()
    with pytest.raises(errors.ClosedError):
        give(appender, 0)
    assert [] == sent(client)


class WorkerError(Exception):
    """What goes wrong in a worker."""


def work_and_fail(client: FakeClient) -> None:
    with Appender(client, options()) as appender:
        give(appender, 0)
        raise WorkerError


def test_leaving_by_exception_sends_what_waits_and_raises_the_callers_own(
    client: FakeClient,
) -> None:
    with pytest.raises(WorkerError):
        work_and_fail(client)
    assert [0] == sent(client)


def test_leaving_by_exception_logs_an_error_of_the_background(
    client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    client.answers = [failing(AWAY)]
    with pytest.raises(WorkerError):
        work_and_fail(client)
    assert "1 fragments were not sent" in caplog.text


def test_a_bug_in_the_background_does_not_leave_callers_waiting(client: FakeClient) -> None:
    client.answers = [failing(ZeroDivisionError("bug"))]
    appender = Appender(client, options(batch_count=1))
    give(appender, 0)
    with pytest.raises(ZeroDivisionError, match="bug"):
        appender.flush()
    with pytest.raises(ZeroDivisionError, match="bug"):
        appender.close()


# Dropping, and going on -------------------------------------------------------------------------


def test_what_is_unwanted_by_now_is_dropped_under_its_reason(client: FakeClient) -> None:
    reasons = {1: "stale", 2: "stale", 4: "too long"}
    with Appender(
        client, options(), unwanted=lambda fragment: reasons.get(fragment.fragment_index)
    ) as appender:
        give(appender, *range(6))
    counts = appender.counts
    assert {"stale": 2, "too long": 1} == dict(counts.dropped)
    assert (6, 3, 0, 0) == (counts.given, counts.admitted, counts.failed, counts.pending_bytes)
    assert [0, 3, 5] == sent(client)


def test_one_that_persists_sends_again_what_failed(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("breadbox.writing.appender.RETRY_S", 0.0)
    client.answers = [failing(AWAY)] * 3
    with Appender(client, options(on_failure="persist")) as appender:
        give(appender, 0, 1, 2, 3)
        eventually_sync(lambda: appender.counts.admitted == 4)
    assert [[0, 1, 2, 3]] * 4 == client.batches
    assert 1 == caplog.text.count("sending fragments failed, trying again: away")


def test_one_that_persists_waits_for_room_for_as_long_as_it_takes(client: FakeClient) -> None:
    full = AppendResult(AdmissionOutcome.BUFFER_FULL)
    for results in ((full, full, full), (ADMITTED, full, full), (full, full)):
        error = errors.BackpressureError("full", 0.0)
        error.results = results
        client.answers.append(failing(error))
    with Appender(client, options(batch_count=3, on_failure="persist")) as appender:
        give(appender, 0, 1, 2)
    assert [[0, 1, 2], [0, 1, 2], [1, 2], [1, 2]] == client.batches
    assert 3 == appender.counts.admitted


def test_one_that_waits_does_so_for_room_and_for_nothing_else(client: FakeClient) -> None:
    full = errors.BackpressureError("full", 0.001)
    client.answers = [failing(full), failing(full)]
    appender = Appender(client, options(on_failure="wait"))
    give(appender, 0)
    appender.flush()
    assert 1 == appender.counts.admitted
    client.answers = [failing(errors.UnavailableError("away"))]
    give(appender, 1)
    with pytest.raises(errors.UnavailableError):
        appender.close()


def test_one_that_persists_drops_what_nobody_takes_and_goes_on(
    client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(fragments: Sequence[Fragment]) -> list[AppendResult]:
        if 1 in [fragment.fragment_index for fragment in fragments]:
            raise errors.UnsupportedArrayError("obs", "is an object array")
        return [ADMITTED] * len(fragments)

    client.answers = [answer] * 10
    with Appender(client, options(on_failure="persist")) as appender:
        give(appender, 0, 1, 2, 3)
    assert [[0, 1, 2, 3], [0], [1], [2], [3]] == client.batches
    assert ({"refused": 1}, 3) == (dict(appender.counts.dropped), appender.counts.admitted)
    assert "fragment 1 of worker" in caplog.text


@pytest.mark.parametrize("on_failure", ["stop", "wait", "persist"])
@pytest.mark.parametrize(
    "error",
    [
        errors.SchemaMismatchError("other steps", "step_count", "32", "16"),
        errors.UnauthenticatedError("unknown token"),
        errors.PermissionDeniedError("a learner's token"),
        errors.NotSupportedError("an older server"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else each,
)
def test_a_refusal_that_every_fragment_would_meet_ends_every_appender(
    client: FakeClient, error: errors.ReplayBufferError, on_failure: OnFailure
) -> None:
    """A worker whose token was taken away, or with other steps, played for ever for nothing."""
    assert type(error) in errors.PERMANENT
    client.answers = [failing(error)]
    appender = Appender(client, options(on_failure=on_failure))
    give(appender, 0, 1, 2, 3)
    eventually_sync(lambda: appender.counts.failed == 4)
    with pytest.raises(type(error)):
        give(appender, 4)
    with pytest.raises(type(error)):
        appender.close()
    assert [[0, 1, 2, 3]] == client.batches


def test_one_that_persists_ends_after_a_minute_in_which_every_fragment_was_refused(
    client: FakeClient,
) -> None:
    clock, too_many = ManualClock(), errors.LimitExceededError("4 workers take part already")
    appender = Appender(client, options(on_failure="persist"), clock=clock)
    for index, is_refused in enumerate([True, True, False, True, True]):
        client.answers = [failing(too_many)] if is_refused else []
        give(appender, index)
        appender.flush(max_wait_s=10.0)
        clock.advance(REFUSED_S_MAX / 2)
    client.answers = [failing(too_many)]
    give(appender, 5)
    with pytest.raises(errors.LimitExceededError):
        appender.close()
    counts = appender.counts
    assert (4, 1, 1) == (counts.dropped["refused"], counts.admitted, counts.failed)


def test_one_that_persists_tries_no_more_once_it_is_closed(client: FakeClient) -> None:
    client.answers = [failing(AWAY)] * 10
    appender = Appender(client, options(on_failure="persist"))
    give(appender, 0, 1)
    with pytest.raises(errors.UnavailableError):
        appender.close()
    assert [0, 1] == [fragment.fragment_index for fragment in appender.unsent()]
    assert [[0, 1]] == client.batches


def test_a_close_gives_up_after_its_time_and_may_be_called_again(client: FakeClient) -> None:
    client.may_answer.clear()
    client.answers = [failing(errors.ClosedError("the client was closed"))]
    appender = Appender(client, options(on_failure="persist"))
    give(appender, 0)
    with pytest.raises(TimeoutError):
        appender.close(max_wait_s=0.01)
    client.may_answer.set()
    with pytest.raises(errors.ClosedError):
        appender.close(max_wait_s=10.0)
    appender.close()
    assert 1 == appender.counts.failed


def test_fragments_of_a_worker_that_are_there_already_are_told_once(
    client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    again = AppendResult(AdmissionOutcome.DUPLICATE)
    client.answers = [lambda fragments: [again] * len(fragments)] * 2
    with Appender(client, options(batch_count=1)) as appender:
        give(appender, 0)
        appender.flush()
        give(appender, 1)
    assert 1 == caplog.text.count("has fragments of worker")
