"""A mirror over a feed without a server: what it takes in, and what it does when reads fail."""

import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from breadbox.mirror import ReplayMirror
from breadbox.mirror import following as following_module
from breadbox.mirror import memory as memory_module
from breadbox.model.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    TreeMismatchError,
    UnavailableError,
    WaitElapsedError,
)
from breadbox.model.types import BufferConfig, FragmentRead
from breadbox.operations.cursor_reads import LoadedRead
from mirror.fake_feed import FakeFeed
from support.eventually import eventually_sync
from support.fragments import vector_fragment

CHUNK = 1 << 24


def mirror_of(feed: FakeFeed, **options: Any) -> ReplayMirror:
    """A mirror of what reads as a client does."""
    return ReplayMirror(cast("Any", feed), **options)


@pytest.fixture
def feed() -> FakeFeed:
    return FakeFeed()


@pytest.fixture
def mirror(feed: FakeFeed, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplayMirror]:
    monkeypatch.setattr(following_module, "POLL_S", 0.05)
    monkeypatch.setattr(following_module, "RETRY_S", 0.01)
    with mirror_of(feed, capacity_steps=100, seed=1) as made:
        yield made


def shown(mirror: ReplayMirror) -> list[int]:
    """The fragment index that the observations of each step show."""
    return [int(each) for each in mirror.at(range(mirror.step_count)).obs[:, 0]]


def test_it_takes_in_what_is_there_and_what_comes(feed: FakeFeed, mirror: ReplayMirror) -> None:
    feed.append(*(vector_fragment(index) for index in range(5)))
    mirror.wait_until(20, timeout_s=10)
    feed.append(vector_fragment(5))
    mirror.wait_until(24, timeout_s=10)
    assert [index for index in range(6) for _ in range(4)] == shown(mirror)
    assert [chunk * CHUNK + step for chunk in range(6) for step in range(4)] == mirror.at(
        range(24)
    ).handle.tolist()
    eventually_sync(lambda: mirror.lag_s == 0.0, "it is up to date")


def test_who_catches_up_finds_what_was_appended_before(
    feed: FakeFeed, mirror: ReplayMirror
) -> None:
    mirror.catch_up(timeout_s=10)  # Of nothing.
    for index in range(20):
        feed.append(vector_fragment(index))
        mirror.catch_up(timeout_s=10)
        assert 4 * (index + 1) == len(mirror)
    eventually_sync(lambda: not feed.leases, "every lease is released")
    feed.may_read.clear()
    eventually_sync(lambda: feed.reader_count == 1, "the next read is about to begin")
    feed.append(vector_fragment(20))
    with pytest.raises(WaitElapsedError, match="all steps"):
        mirror.catch_up(timeout_s=0.01)
    feed.may_read.set()
    mirror.catch_up(timeout_s=10)


def test_a_mirror_that_starts_again_holds_and_draws_the_same(
    feed: FakeFeed, mirror: ReplayMirror
) -> None:
    feed.append(*(vector_fragment(index) for index in range(20)))
    mirror.wait_until(80, timeout_s=10)
    with mirror_of(feed, capacity_steps=100, seed=1) as again:
        again.wait_until(80, timeout_s=10)
        assert shown(mirror) == shown(again)
        assert mirror.sample(64).handle.tolist() == again.sample(64).handle.tolist()


def test_chunks_that_left_unread_are_counted(feed: FakeFeed, mirror: ReplayMirror) -> None:
    feed.append(vector_fragment(0))
    mirror.wait_until(4, timeout_s=10)
    feed.may_read.clear()
    eventually_sync(lambda: feed.reader_count == 1, "the next read is about to begin")
    feed.append(*(vector_fragment(index) for index in range(1, 6)))
    del feed.chunks[2:4]
    feed.may_read.set()
    mirror.wait_until(16, timeout_s=10)
    assert 2 == mirror.skipped_chunk_count
    assert [0, 1, 4, 5] == shown(mirror)[::4]


def test_a_new_session_empties_it(feed: FakeFeed, mirror: ReplayMirror) -> None:
    feed.append(vector_fragment(0))
    mirror.wait_until(4, timeout_s=10)
    feed.start_session("next")
    eventually_sync(lambda: mirror.step_count == 0, "the old steps are gone")
    feed.append(vector_fragment(7, session_id="next"))
    mirror.wait_until(4, timeout_s=10)
    assert [7] * 4 == shown(mirror)
    assert "next" == mirror.session_id


def test_it_goes_on_after_an_outage(feed: FakeFeed, mirror: ReplayMirror) -> None:
    feed.append(vector_fragment(0))
    mirror.wait_until(4, timeout_s=10)
    feed.errors = [UnavailableError("away"), UnavailableError("away")]
    feed.append(*(vector_fragment(index) for index in range(1, 4)))
    mirror.wait_until(16, timeout_s=10)
    assert [0, 1, 2, 3] == shown(mirror)[::4]


def test_after_an_outage_it_is_not_behind_for_reads_that_it_gave_up(
    feed: FakeFeed, mirror: ReplayMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One had arrived when adding the one before failed; it is read again."""
    reader: Any = mirror._source  # noqa: SLF001 - the moment is between two of its steps
    take_in, failures = reader._take_in, [UnavailableError("away")]  # noqa: SLF001

    def fails_once(read: LoadedRead) -> None:
        if failures:
            feed.append(vector_fragment(1))
            arrived = reader._arrived  # noqa: SLF001
            eventually_sync(lambda: len(arrived) == 2, "the next read has arrived")
            raise failures.pop()
        take_in(read)

    monkeypatch.setattr(reader, "_take_in", fails_once)
    feed.append(vector_fragment(0))
    mirror.wait_until(8, timeout_s=10)
    eventually_sync(lambda: mirror.lag_s == 0.0, "it is up to date", within_s=10.0)


def test_a_server_that_counts_chunks_anew_in_its_next_session_uses_no_handle_again(
    feed: FakeFeed, mirror: ReplayMirror
) -> None:
    feed.append(*(vector_fragment(index) for index in range(5)))
    mirror.wait_until(20, timeout_s=10)
    old = mirror.at(range(20)).handle
    feed.start_session("next")
    eventually_sync(lambda: mirror.step_count == 0, "the old steps are gone")
    feed.next_chunk_id = 0
    feed.append(*(vector_fragment(index, session_id="next") for index in range(3)))
    mirror.wait_until(12, timeout_s=10)
    new = mirror.at(range(12)).handle
    assert new.min() > old.max()
    assert not mirror.holds(old).any()
    assert [0, 1, 2] == shown(mirror)[::4]


def test_a_buffer_that_is_set_back_is_read_anew(feed: FakeFeed, mirror: ReplayMirror) -> None:
    """As when Redis comes back from a copy: ids of chunks are given once more in a session."""
    feed.append(*(vector_fragment(index) for index in range(5)))
    mirror.wait_until(20, timeout_s=10)
    old = mirror.at(range(20)).handle
    del feed.chunks[2:]
    feed.next_chunk_id = 2
    feed.append(vector_fragment(7))
    eventually_sync(lambda: mirror.step_count == 12, "what the buffer holds is here")
    assert [0, 1, 7] == shown(mirror)[::4]
    assert not mirror.holds(old).any()


def test_who_catches_up_while_a_buffer_that_was_set_back_is_read_anew_waits_for_that_alone(
    feed: FakeFeed, mirror: ReplayMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed.append(*(vector_fragment(index) for index in range(5)))
    mirror.wait_until(20, timeout_s=10)
    feed.may_read.clear()
    eventually_sync(lambda: feed.reader_count == 1, "the next read is about to begin")
    del feed.chunks[2:]
    feed.next_chunk_id = 2
    read_fragments = feed.service.read_fragments

    def read_late(*args: Any, **options: Any) -> FragmentRead:
        feed.append(*(vector_fragment(7) for _ in range(not feed.may_read.is_set())))
        feed.may_read.set()
        eventually_sync(lambda: mirror.step_count == 12, "the mirror has begun anew")
        return read_fragments(*args, **options)

    monkeypatch.setattr(feed, "read_fragments", read_late)
    mirror.catch_up(timeout_s=10)
    assert [0, 1, 7] == shown(mirror)[::4]


@pytest.mark.parametrize(
    "error", [PermissionDeniedError("no"), UnavailableError("there never was an answer")]
)
def test_an_error_of_the_thread_is_raised_by_the_next_call(error: Exception) -> None:
    feed = FakeFeed(errors=[error])
    with mirror_of(feed, capacity_steps=100) as mirror:
        with pytest.raises(type(error)):
            mirror.wait_until(1, timeout_s=10)
        with pytest.raises(type(error)):
            mirror.sample(1)


def test_fragments_that_cannot_be_kept_are_an_error(feed: FakeFeed, mirror: ReplayMirror) -> None:
    feed.append(vector_fragment(0))
    mirror.wait_until(4, timeout_s=10)
    other = vector_fragment(1)
    other.obs = np.zeros((4, 7), np.float32)
    feed.append(other)
    with pytest.raises(TreeMismatchError):
        mirror.wait_until(8, timeout_s=10)


@pytest.mark.parametrize(("staleness_max", "is_told"), [(2, True), (1 << 40, False)])
def test_limits_for_on_policy_learners_are_told_of_once(
    feed: FakeFeed, caplog: pytest.LogCaptureFixture, *, staleness_max: int, is_told: bool
) -> None:
    feed.config = BufferConfig(staleness_max=staleness_max)
    with caplog.at_level("WARNING"), mirror_of(feed, capacity_steps=100) as mirror:
        feed.append(vector_fragment(0))
        mirror.wait_until(4, timeout_s=10)
    told = [each for each in caplog.messages if "--preset off-policy" in each]
    assert [True] * is_told == ["more than 2 versions old" in each for each in told]


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("no session", "No session is current in buffer 'default'.*start_session"),
        ("nothing", "No fragment arrived in the .* holds 0 chunks.*rollout workers run"),
        ("stale", r"staler than staleness_max \(2\).*--preset off-policy"),
        ("leases", "No fragment arrived in the .* holds 0 chunks"),
        ("outage", "calling ReadFragments has failed for 3 s"),
        ("silence", "the server has not answered yet"),
    ],
)
def test_who_waits_is_told_what_keeps_the_steps(
    feed: FakeFeed, monkeypatch: pytest.MonkeyPatch, cause: str, words: str
) -> None:
    monkeypatch.setattr(following_module, "POLL_S", 0.1)
    if cause == "no session":
        feed.session_id = ""
    if cause == "silence":
        feed.may_read.clear()
    feed.config = BufferConfig(staleness_max=2)
    with mirror_of(feed, capacity_steps=100) as mirror:
        eventually_sync(lambda: feed.look_count == 1)
        if cause == "stale":
            feed.counters["fragments_stale"] = 7
        if cause == "leases":
            feed.config = BufferConfig(leases_max=8)
            feed.lease_count = 8
        if cause == "outage":
            feed.outage = "calling ReadFragments has failed for 3 s: nobody answers"
        with pytest.raises(WaitElapsedError, match=f"1 steps to sample wanted, 0 there; .*{words}"):
            mirror.wait_until(1, timeout_s=1.0)
        feed.may_read.set()


def test_a_wait_that_goes_on_is_told_of_again_and_again(
    feed: FakeFeed,
    mirror: ReplayMirror,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(memory_module, "WAIT_PERIOD_S", 0.1)
    feed.append(vector_fragment(0))
    mirror.wait_until(4, timeout_s=10)
    batches = mirror.batches(8, samples_per_insert=2.0)
    thread = threading.Thread(target=lambda: next(batches))
    words = "4 new steps, by samples_per_insert, wanted, 0 there; No fragment arrived"
    with caplog.at_level("WARNING"):
        thread.start()
        eventually_sync(lambda: 2 <= sum(words in each for each in caplog.messages), within_s=30)
    feed.append(vector_fragment(1))
    thread.join(10)
    assert not thread.is_alive()
    batches.close()


def test_batches_are_those_of_samples(feed: FakeFeed, mirror: ReplayMirror) -> None:
    feed.append(*(vector_fragment(index) for index in range(10)))
    mirror.wait_until(40, timeout_s=10)
    with mirror_of(feed, capacity_steps=100, seed=1) as again:
        again.wait_until(40, timeout_s=10)
        batches = again.batches(8, prefetch=3)
        for _ in range(5):
            assert mirror.sample(8).handle.tolist() == next(batches).handle.tolist()
        batches.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_wait_for_as_many_steps_as_the_bound_says(
    feed: FakeFeed, mirror: ReplayMirror, prefetch: int
) -> None:
    feed.append(vector_fragment(0))
    mirror.wait_until(4, timeout_s=10)
    batches = mirror.batches(8, prefetch=prefetch, samples_per_insert=2.0)
    taken: list[int] = []

    def take() -> None:
        for batch in batches:
            taken.append(len(batch))
            if len(taken) == 2:
                return

    thread = threading.Thread(target=take)
    thread.start()
    feed.append(vector_fragment(1))
    eventually_sync(lambda: len(taken) == 1, "four steps let eight be drawn")
    mirror.wait_until(8)
    assert thread.is_alive()
    feed.append(vector_fragment(2))
    thread.join(10)
    assert [8, 8] == taken
    batches.close()


def test_leaving_batches_that_wait_ends_at_once(feed: FakeFeed, mirror: ReplayMirror) -> None:
    feed.append(vector_fragment(0))
    mirror.wait_until(4, timeout_s=10)
    batches = mirror.batches(8, samples_per_insert=2.0)
    feed.append(vector_fragment(1))
    assert 8 == len(next(batches))
    batches.close()


def test_the_bound_must_be_above_zero(mirror: ReplayMirror) -> None:
    with pytest.raises(InvalidRequestError, match="samples_per_insert must be above 0"):
        next(mirror.batches(1, samples_per_insert=0))


def test_closing_ends_the_thread_and_keeps_the_steps(feed: FakeFeed, mirror: ReplayMirror) -> None:
    feed.append(vector_fragment(0))
    mirror.wait_until(4, timeout_s=10)
    mirror.close()
    mirror.close()
    feed.append(vector_fragment(1))
    assert mirror.closed
    assert 4 == len(mirror.sample(4))
    assert 4 == mirror.step_count
