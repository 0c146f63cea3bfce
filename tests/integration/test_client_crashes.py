"""Clients ride through a crash of the server: nothing acknowledged is lost, nothing used twice."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import breadbox
from breadbox.model import errors
from breadbox.testing import ServerProcess, start_server
from breadbox.writing.appender import Appender
from support.eventually import eventually_sync
from support.fragments import large_fragment, vector_fragment
from support.redis_server import RedisServer

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(120)]


@pytest.fixture
def fragile() -> Iterator[ServerProcess]:
    """A server that a test may kill."""
    with start_server() as server:
        yield server


def in_background(pool: ThreadPoolExecutor, function: Callable[[], Any]) -> Any:
    started = threading.Event()

    def run() -> Any:
        started.set()
        return function()

    future = pool.submit(run)
    assert started.wait(10)
    return future


def test_a_blocked_fetch_rides_through_a_crash_of_the_server(fragile: ServerProcess) -> None:
    with breadbox.connect(fragile.address) as client, ThreadPoolExecutor() as pool:
        client.start_session("s")
        client.append_many([vector_fragment(index) for index in range(3)])
        fetch = in_background(pool, lambda: client.service.fetch_fragments(4, 60.0))
        with breadbox.connect(fragile.address) as observer:
            eventually_sync(lambda: observer.get_buffer().state.waiter_count == 1)
        fragile.restart()
        client.append(vector_fragment(3))
        grant = fetch.result(60)
    indexes = {reference.metadata.fragment_index for reference in grant.fragments}
    assert {0, 1, 2, 3} == indexes


def test_a_lease_outlives_a_crash_and_its_fetch_is_answered_as_before(
    fragile: ServerProcess,
) -> None:
    with breadbox.connect(fragile.address) as client:
        client.start_session("s")
        client.append_many([vector_fragment(index) for index in range(8)])
        with client.fetch(4, 5.0, request_id="mine") as lease:
            fragile.restart()
            again = client.service.fetch_fragments(4, 5.0, request_id="mine")
            assert (lease.lease_id, lease.references) == (again.lease_id, again.fragments)
            assert 4 == len(list(lease.fragments()))
            assert lease.renew() > 0
        counters = client.get_buffer().state.counters
        assert 4 == counters["uses"]


def test_an_appender_resends_through_a_crash_and_nothing_is_stored_twice(
    fragile: ServerProcess,
) -> None:
    with breadbox.connect(fragile.address) as client:
        client.start_session("s")
        with Appender(client) as appender:
            for index in range(300):
                if index == 150:
                    appender.flush()
                    fragile.restart()
                appender.append(vector_fragment(index))
        assert 300 == appender.counts.admitted
        assert 300 == client.get_buffer().state.fragment_count


def test_a_server_that_stays_away_is_told_within_the_time_to_reconnect(
    fragile: ServerProcess,
) -> None:
    with breadbox.connect(fragile.address, reconnect_s=0.5, deadline_s=5.0) as client:
        client.start_session("s")
        fragile.kill()
        with pytest.raises(errors.UnavailableError, match="no answer"):
            client.fetch(1, 30.0)


# Redis ------------------------------------------------------------------------------------------


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with RedisServer(is_durable=True) as started:
        yield started


@pytest.fixture
def on_redis(redis_server: RedisServer) -> Iterator[ServerProcess]:
    with start_server(store=redis_server.url) as server:
        yield server


def test_an_append_rides_through_a_restart_of_redis(
    on_redis: ServerProcess, redis_server: RedisServer
) -> None:
    with breadbox.connect(on_redis.address) as client, ThreadPoolExecutor() as pool:
        client.start_session("s")
        client.append(vector_fragment(0))
        redis_server.kill()
        appending = in_background(
            pool, lambda: client.append_many([vector_fragment(index) for index in range(1, 9)])
        )
        redis_server.start()
        assert {"admitted"} == {result.outcome.value for result in appending.result(60)}
        assert 9 == client.get_buffer().state.fragment_count


def test_a_lease_is_loaded_through_a_restart_of_redis(
    on_redis: ServerProcess, redis_server: RedisServer
) -> None:
    with breadbox.connect(on_redis.address) as client, ThreadPoolExecutor() as pool:
        client.start_session("s")
        client.append_many([vector_fragment(index) for index in range(32)])
        with client.fetch(32, 5.0) as lease:
            batches = lease.batches(4)
            first = next(batches)
            redis_server.kill()
            loading = in_background(pool, lambda: [first, *batches])
            redis_server.start()
            loaded = [int(row) for batch in loading.result(60) for row in batch.obs[:, 0, 0]]
        assert list(range(32)) == sorted(loaded)


@pytest.mark.parametrize(
    ("make", "error", "outcome"),
    [
        (large_fragment, errors.StoreUnavailableError, "admitted"),
        # Its payload rides along, so that the server is the one who misses Redis; it has decided.
        (vector_fragment, errors.UnavailableError, "duplicate"),
    ],
)
def test_a_redis_that_stays_away_is_told_within_the_time_to_reconnect(
    on_redis: ServerProcess,
    redis_server: RedisServer,
    make: Callable[[int], breadbox.Fragment],
    error: type[errors.ReplayBufferError],
    outcome: str,
) -> None:
    with breadbox.connect(on_redis.address, reconnect_s=0.5, deadline_s=2.0) as client:
        client.start_session("s")
        client.append(make(0))
        redis_server.kill()
        with pytest.raises(error):
            client.append(make(1))
        redis_server.start()
        assert outcome == client.append(make(1)).outcome.value
