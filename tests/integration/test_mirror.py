"""A mirror of a real buffer: what it holds is what producers were told was admitted."""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox.mirror import ReplayMirror
from breadbox.model.fragment import Fragment
from breadbox.model.types import AdmissionOutcome, BufferConfig
from breadbox.operations.cursor_reads import LoadedRead
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.redis_server import RedisServer
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

NUMBERS = itertools.count()
WAIT_S = 60.0
STEPS = 4


@pytest.fixture(scope="module", params=["redis", "file", "gateway"])
def server(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("mirror")
    with RedisServer() as redis:
        store = f"file://{folder}/store" if request.param == "file" else redis.url
        options = ["--gateway"] if request.param == "gateway" else []
        with ServerProcess("--store", store, *options, log=folder / "log") as server:
            yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[breadbox.Client]:
    with breadbox.connect(server.address, buffer=f"b{next(NUMBERS)}") as client:
        client.create_buffer(client.buffer, BufferConfig(capacity_chunks=64))
        client.start_session("s")
        yield client


class Ledger:
    """What producers were told was admitted, in its order."""

    def __init__(self, client: breadbox.Client) -> None:
        self.client = client
        self.admitted: list[tuple[str, int]] = []

    def append(self, *fragments: Fragment) -> None:
        for fragment, result in zip(fragments, self.client.append_many(fragments), strict=True):
            assert AdmissionOutcome.ADMITTED is result.outcome
            self.admitted.append((fragment.worker_id, fragment.fragment_index))


def fragment(index: int, worker_id: str = "w0", **changes: Any) -> Fragment:
    """A fragment whose actions say of which worker it is, and whose observations which it is."""
    made = vector_fragment(index, worker_id=worker_id, step_count=STEPS)
    return replace(made, action=np.full(STEPS, int(worker_id[1:]), np.int64), **changes)


def content(mirror: ReplayMirror) -> list[tuple[str, int]]:
    """Fragments that the mirror holds, in its order."""
    steps = mirror.at(range(mirror.step_count))
    assert (np.diff(steps.handle) > 0).all()
    return [
        (f"w{worker}", int(index))
        for worker, index in zip(steps.action[::STEPS], steps.obs[::STEPS, 0], strict=True)
    ]


def stands_at(client: breadbox.Client) -> tuple[int, int]:
    """Up to which chunk the only subscription is acknowledged, and by how many it is behind."""
    (shown,) = client.get_buffer().subscriptions
    return shown.acknowledged_chunk_id, shown.lag_chunk_count


def mirrored(client: breadbox.Client, **options: Any) -> ReplayMirror:
    return ReplayMirror(client.address, buffer=client.buffer, capacity_steps=1000, **options)


def test_it_fills_itself_and_a_second_one_with_the_same(client: breadbox.Client) -> None:
    ledger = Ledger(client)
    ledger.append(
        *(fragment(index, f"w{index % 2}", fragment_index=index // 2) for index in range(40))
    )
    expected = [(f"w{index % 2}", index) for index in range(40)]
    with mirrored(client, seed=3) as mirror:
        mirror.wait_until(40 * STEPS, timeout_s=WAIT_S)
        assert expected == content(mirror)
        ledger.append(fragment(20, "w0"))
        mirror.wait_until(41 * STEPS, timeout_s=WAIT_S)
        assert [*expected, ("w0", 20)] == content(mirror)
        # As a learner that was killed and started again.
        with mirrored(client, seed=3) as again:
            again.wait_until(41 * STEPS, timeout_s=WAIT_S)
            assert content(mirror) == content(again)
            ours, theirs = (each.sample(64, n_step=3) for each in (mirror, again))
            assert ours.handle.tolist() == theirs.handle.tolist()
            assert ours.next_obs.tolist() == theirs.next_obs.tolist()
        assert 0 == mirror.skipped_chunk_count
    # Nobody who fetches notices: no use was counted.
    grant = client.service.fetch_fragments(1)
    assert [1] == [reference.use_count for reference in grant.fragments]


def test_windows_of_two_workers_go_on_over_fragments_and_stop_at_gaps(
    client: breadbox.Client,
) -> None:
    ledger = Ledger(client)
    for index in range(6):
        for worker_id in ("w0", "w1"):
            has_gap = worker_id == "w1" and index == 3
            ledger.append(fragment(index, worker_id, discontinuity=has_gap))
    with mirrored(client, seed=3) as mirror:
        mirror.wait_until(12 * STEPS, timeout_s=WAIT_S)
        steps = mirror.at(range(mirror.step_count), n_step=8, gamma=1.0)
        # Every reward is 1, so that the return counts the steps of a window.
        found = {
            worker: steps.reward[steps.action == worker].astype(int).tolist() for worker in (0, 1)
        }
        assert [min(8, left) for left in range(24, 0, -1)] == found[0]
        halves = [min(8, left) for left in range(12, 0, -1)]
        assert halves + halves == found[1]


def test_evicted_chunks_stay_in_the_mirror_and_missed_ones_are_counted(
    client: breadbox.Client,
) -> None:
    ledger = Ledger(client)
    with mirrored(client) as mirror:
        for start in range(0, 160, 32):
            ledger.append(*(fragment(index) for index in range(start, start + 32)))
            mirror.wait_until((start + 32) * STEPS, timeout_s=WAIT_S)
        assert ledger.admitted == content(mirror)
        assert 0 == mirror.skipped_chunk_count
    with mirrored(client) as late:
        late.wait_until(64 * STEPS, timeout_s=WAIT_S)
        assert ledger.admitted[-64:] == content(late)


def test_a_retaining_subscription_keeps_what_comes_while_the_learner_is_away(
    client: breadbox.Client,
) -> None:
    client.create_subscription("learner", retaining=True)
    ledger = Ledger(client)
    ledger.append(*(fragment(index) for index in range(10)))
    with mirrored(client, subscription="learner") as mirror:
        mirror.wait_until(10 * STEPS, timeout_s=WAIT_S)
        eventually_sync(lambda: stands_at(client) == (9, 0), "all of it is acknowledged")
    ledger.append(*(fragment(index) for index in range(10, 20)))
    # Another learner uses all of it up.
    client.service.release_lease(client.service.fetch_fragments(20).lease_id)
    assert (0, 10) == (
        client.get_buffer().state.chunk_count,
        client.get_buffer().state.retained_chunk_count,
    )
    with mirrored(client, subscription="learner") as again:
        again.catch_up(timeout_s=WAIT_S)
        assert ledger.admitted[10:] == content(again)
        assert 0 == again.skipped_chunk_count
        eventually_sync(lambda: stands_at(client) == (19, 0), "all of it is acknowledged")
        ledger.append(*(fragment(index) for index in range(20, 23)))
        again.wait_until(13 * STEPS, timeout_s=WAIT_S)
        eventually_sync(lambda: stands_at(client) == (22, 0), "what came is acknowledged")
    assert 0 == client.get_buffer().state.retained_chunk_count
    # What it has passed, and is still there, is taken in as without a subscription.
    with mirrored(client, subscription="learner") as late:
        late.catch_up(timeout_s=WAIT_S)
        assert ledger.admitted[20:] == content(late)
        assert 0 == late.skipped_chunk_count


def test_what_a_subscription_lost_beyond_capacity_is_counted(client: breadbox.Client) -> None:
    client.create_subscription("learner", retaining=True)
    ledger = Ledger(client)
    ledger.append(*(fragment(index) for index in range(10)))
    with mirrored(client, subscription="learner") as mirror:
        mirror.wait_until(10 * STEPS, timeout_s=WAIT_S)
        eventually_sync(lambda: stands_at(client) == (9, 0), "all of it is acknowledged")
    ledger.append(*(fragment(index) for index in range(10, 80)))
    with mirrored(client, subscription="learner") as again:
        again.catch_up(timeout_s=WAIT_S)
        assert ledger.admitted[-64:] == content(again)
        (shown,) = client.get_buffer().subscriptions
        assert 6 == shown.missed_chunk_count == again.skipped_chunk_count


def test_nothing_is_acknowledged_before_it_is_taken_in(
    client: breadbox.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_take_in = threading.Event()
    loaded: list[int] = []
    tail = client.tail

    def watched_tail(*args: Any, **options: Any) -> Iterator[LoadedRead]:
        for read in tail(*args, **options):
            loaded.append(len(read.fragments))
            yield read
            if loaded == [1]:  # The next one is asked for.
                client.append(fragment(1))

    monkeypatch.setattr(client, "tail", watched_tail)

    class Held(ReplayMirror):
        def extend(self, fragment: Fragment, chunk_id: int | None = None) -> int:
            may_take_in.wait(WAIT_S)
            return super().extend(fragment, chunk_id)

    client.create_subscription("learner")
    client.append(fragment(0))
    with Held(client, capacity_steps=1000, subscription="learner"):
        try:
            eventually_sync(
                lambda: loaded == [1, 1], "the second is loaded while the first is taken in"
            )
            assert (-1, 2) == stands_at(client)
        finally:
            may_take_in.set()
        eventually_sync(lambda: stands_at(client) == (1, 0), "both are acknowledged")


@pytest.mark.parametrize(
    ("appended", "acknowledged"), [(4, 1), (4, 3), (4, None), (0, -1), (0, None)]
)
def test_a_buffer_that_was_set_back_is_mirrored_from_its_oldest_chunk(
    client: breadbox.Client,
    monkeypatch: pytest.MonkeyPatch,
    appended: int,
    acknowledged: int | None,
) -> None:
    """As when Redis comes back older than what was read, which a subscription is in as well."""
    may_read = threading.Event()
    waiting: list[None] = []
    tail = client.tail

    def held_tail(*args: Any, **options: Any) -> Iterator[LoadedRead]:
        reads = tail(*args, **options)
        while True:
            waiting.append(None)
            may_read.wait(WAIT_S)
            waiting.pop()
            if (read := next(reads, None)) is None:
                return
            yield read

    monkeypatch.setattr(client, "tail", held_tail)
    may_read.set()
    subscription = None if acknowledged is None else "learner"
    if subscription:
        client.create_subscription(subscription)
    Ledger(client).append(*(fragment(index) for index in range(10)))
    with ReplayMirror(client, capacity_steps=1000, subscription=subscription) as mirror:
        mirror.wait_until(10 * STEPS, timeout_s=WAIT_S)
        old = mirror.at(range(10 * STEPS)).handle
        may_read.clear()
        try:
            eventually_sync(lambda: len(waiting) == 1, "the next read is about to begin")
            client.delete_buffer(client.buffer)
            client.create_buffer(client.buffer, BufferConfig(capacity_chunks=64))
            client.start_session("s")
            ledger = Ledger(client)
            ledger.append(*(fragment(index) for index in range(appended)))
            if subscription and acknowledged is not None:
                client.create_subscription(subscription)
                client.acknowledge_chunks(subscription, acknowledged)
        finally:
            may_read.set()
        mirror.catch_up(timeout_s=WAIT_S)
        assert ledger.admitted == (content(mirror) if len(mirror) else [])
        assert not mirror.holds(old).any()
        assert 0 == mirror.skipped_chunk_count
        # As many as there had been before: what was acknowledged of these says nothing of them.
        ledger.append(*(fragment(index) for index in range(appended, 10)))
        mirror.catch_up(timeout_s=WAIT_S)
        assert ledger.admitted == content(mirror)
        if subscription:
            eventually_sync(lambda: stands_at(client) == (9, 0), "all of it is acknowledged")


def test_a_subscription_that_is_not_there_is_told(client: breadbox.Client) -> None:
    with (
        mirrored(client, subscription="none") as mirror,
        pytest.raises(breadbox.errors.SubscriptionNotFoundError, match="subscriptions create"),
    ):
        mirror.wait_until(1, timeout_s=WAIT_S)


def test_a_new_session_empties_it(client: breadbox.Client) -> None:
    ledger = Ledger(client)
    ledger.append(fragment(0))
    with mirrored(client) as mirror:
        mirror.wait_until(STEPS, timeout_s=WAIT_S)
        old = mirror.at(range(STEPS)).handle
        client.start_session("next")
        eventually_sync(lambda: mirror.step_count == 0, "the old session's steps are gone")
        client.append(replace(fragment(9), session_id="next", fragment_index=0))
        mirror.wait_until(STEPS, timeout_s=WAIT_S)
        assert [("w0", 9)] == content(mirror)
        assert not mirror.holds(old).any()
        assert 0 == mirror.update_priorities(old, np.ones(STEPS))
        assert STEPS == mirror.late_update_count


def test_it_goes_on_over_a_killed_server(tmp_path: Path) -> None:
    with (
        RedisServer() as redis,
        ServerProcess("--store", redis.url, log=tmp_path / "log") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        ledger = Ledger(client)
        with mirrored(client, seed=1) as mirror:
            for start in range(0, 30, 10):
                ledger.append(*(fragment(index) for index in range(start, start + 10)))
                mirror.wait_until((start + 10) * STEPS, timeout_s=WAIT_S)
                before = mirror.sample(16).handle
                server.kill()
                assert mirror.holds(before).all()
                assert 16 == len(mirror.sample(16))
                server.start()
            ledger.append(fragment(30))
            mirror.wait_until(31 * STEPS, timeout_s=WAIT_S)
            assert ledger.admitted == content(mirror)
            eventually_sync(lambda: mirror.lag_s < 1.0, "it has caught up")


def test_it_goes_on_over_a_killed_redis(tmp_path: Path) -> None:
    with (
        RedisServer(is_durable=True) as redis,
        ServerProcess("--store", redis.url, log=tmp_path / "log") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        ledger = Ledger(client)
        with mirrored(client) as mirror:
            ledger.append(*(fragment(index) for index in range(10)))
            mirror.wait_until(10 * STEPS, timeout_s=WAIT_S)
            redis.kill()
            assert 16 == len(mirror.sample(16))
            redis.start()
            ledger.append(*(fragment(index) for index in range(10, 20)))
            mirror.wait_until(20 * STEPS, timeout_s=WAIT_S)
            assert ledger.admitted == content(mirror)


def test_a_wrong_address_and_a_wrong_buffer_are_told(server: ServerProcess) -> None:
    with (
        ReplayMirror("127.0.0.1:1", reconnect_s=0.2) as mirror,
        pytest.raises(breadbox.errors.UnavailableError),
    ):
        mirror.wait_until(1, timeout_s=WAIT_S)
    with (
        ReplayMirror(server.address, buffer="none") as mirror,
        pytest.raises(breadbox.errors.BufferNotFoundError),
    ):
        mirror.wait_until(1, timeout_s=WAIT_S)


def test_who_waits_for_a_server_that_is_not_there_is_told(server: ServerProcess) -> None:
    with (
        ReplayMirror("127.0.0.1:1") as mirror,
        pytest.raises(
            breadbox.errors.WaitElapsedError, match=r"calling GetBuffer has failed .*127\.0\.0\.1:1"
        ),
    ):
        mirror.wait_until(1, timeout_s=2.0)


def test_steps_that_are_refused_as_stale_are_told_of_until_the_limits_are_those_of_a_mirror(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with breadbox.connect(server.address, buffer=f"b{next(NUMBERS)}") as client:
        client.create_buffer(client.buffer)
        client.start_session("s")
        for version in range(4):
            client.service.publish_model("s", version)
        with caplog.at_level("WARNING"), mirrored(client) as mirror:
            eventually_sync(lambda: "more than 2 versions old" in caplog.text)
            client.append(fragment(0))
            with pytest.raises(
                breadbox.errors.WaitElapsedError, match=r"staleness_max .*--preset off-policy"
            ):
                mirror.wait_until(1, timeout_s=5.0)
            client.update_buffer(client.buffer, BufferConfig.preset("off-policy"))
            client.append(fragment(1))
            mirror.wait_until(STEPS, timeout_s=WAIT_S)
