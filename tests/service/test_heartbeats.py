"""Signs of life while a server starts: kept up as long as it lives, and never another's."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest

from breadbox_server.journal.journal_state import Heartbeats
from breadbox_server.journal.storage.claims import STARTING_S, Holder
from breadbox_server.journal.storage.interface import JournalTakenError, JournalUnavailableError
from breadbox_server.journal.storage.redis_stream import ALIVE, RedisArchive
from support.eventually import eventually_sync
from support.redis_server import RedisServer


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis(running: RedisServer) -> RedisServer:
    with running.client() as client:
        client.flushall()
    return running


def opened(stack: ExitStack, redis: RedisServer) -> RedisArchive:
    archive = RedisArchive(redis.url)
    stack.callback(archive.close)
    return archive


def test_a_server_that_starts_shows_life_for_as_long_as_it_takes(redis: RedisServer) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(redis.client())
        archive = opened(stack, redis)
        signs = Heartbeats(archive)
        stack.callback(signs.close)
        signs.start()
        # Nobody has claimed anything yet.
        archive.send_heartbeat()
        assert not client.exists(ALIVE)
        archive.claim(Holder.of_this_process())
        left_ms = round(STARTING_S * 1000)
        assert 0 < client.pttl(ALIVE) <= left_ms
        for _ in range(2):
            # As if reading had taken most of the time for which the last one counts.
            client.pexpire(ALIVE, left_ms // 3)
            eventually_sync(lambda: client.pttl(ALIVE) > left_ms // 2, "another sign of life")


def test_one_that_died_while_it_started_is_replaced_within_seconds(redis: RedisServer) -> None:
    """From another host, where nobody sees that its process is gone."""
    with ExitStack() as stack:
        client = stack.enter_context(redis.client())
        archive = opened(stack, redis)
        archive.claim(Holder("token", "elsewhere", 7))
        archive.send_heartbeat()
        assert client.pttl(ALIVE) <= 3_000


def test_signs_go_on_after_an_outage_of_the_journal() -> None:
    class Away:
        asked_count = 0

        def send_heartbeat(self) -> None:
            self.asked_count += 1
            if self.asked_count == 1:
                raise JournalUnavailableError("away")

    away = Away()
    signs = Heartbeats(cast(Any, away))
    signs.start()
    try:
        eventually_sync(lambda: away.asked_count > 1, "another sign of life")
    finally:
        signs.close()
    assert not signs.is_alive()


def test_signs_end_where_another_server_has_claimed_the_journal(redis: RedisServer) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(redis.client())
        archive, other = opened(stack, redis), opened(stack, redis)
        signs = Heartbeats(archive)
        stack.callback(signs.close)
        claim = archive.claim(Holder.of_this_process())
        heir = Holder.of_this_process()
        other.claim(heir, claim.holder.token)
        with pytest.raises(JournalTakenError):
            archive.send_heartbeat()
        signs.start()
        eventually_sync(lambda: not signs.is_alive(), "the end of the signs")
        assert (client.get(ALIVE) or b"").startswith(heir.token.encode())
