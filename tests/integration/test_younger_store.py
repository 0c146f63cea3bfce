"""A store that comes back without its newest payloads: what is lost is noticed and dropped."""

import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import breadbox
from breadbox.model.errors import PayloadMissingError, WaitElapsedError
from breadbox.model.types import ReleaseMode
from support.eventually import eventually_sync
from support.fragments import large_fragment
from support.redis_server import RedisServer
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

KEPT = 160
LOST = 40
AT_ONCE = 4


class World:
    """A server whose journal is on its own, so that the books know what the store has lost."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.redis = stack.enter_context(RedisServer(is_durable=True))
        self.server = ServerProcess(
            *("--store", self.redis.url, "--journal", f"file://{folder}/journal"),
            *("--metrics-listen", "127.0.0.1:0", "--lease-s", "2"),
            log=folder / "log",
        )
        stack.enter_context(self.server)
        self.client = stack.enter_context(breadbox.connect(self.server.address, reconnect_s=30.0))
        self.client.start_session("s")
        # The look that every start has is over: what is noticed from now on is not its merit.
        eventually_sync(self._has_compared, "books and store being compared")
        self._copy = folder / "copy"

    def _has_compared(self) -> bool:
        with urllib.request.urlopen(self.server.metrics_url, timeout=10) as reply:
            return b'breadbox_store_seconds_count{operation="list"}' in reply.read()

    def append_and_lose_the_newest(self) -> None:
        self.client.append_many([large_fragment(index) for index in range(KEPT)])
        self.redis.copy_data(self._copy)
        self.client.append_many([large_fragment(index) for index in range(KEPT, KEPT + LOST)])
        self.redis.kill()
        self.redis.restore_data(self._copy)
        self.redis.start()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, tmp_path)


def test_a_store_without_its_newest_payloads_is_found_out_and_nothing_lost_comes_twice(
    world: World,
) -> None:
    world.append_and_lose_the_newest()
    read: Counter[int] = Counter()
    handed_out: Counter[int] = Counter()
    for _ in range(KEPT + LOST):
        try:
            lease = world.client.fetch(fragment_count=AT_ONCE, max_wait_s=0.5)
        except WaitElapsedError:
            break
        try:
            list(lease.fragments())
        except PayloadMissingError:
            handed_out.update(each.metadata.fragment_index for each in lease.references)
            lease.release(ReleaseMode.RETURNED)
            continue
        read.update(each.metadata.fragment_index for each in lease.references)
        lease.release(ReleaseMode.CONSUMED)
    # Of fewer than a batch nobody can tell: they wait for company.
    assert KEPT - AT_ONCE < len(read) <= KEPT
    assert {1} == set(read.values())
    lost = {index: count for index, count in handed_out.items() if index >= KEPT}
    assert set(lost.values()) <= {1}, lost


def test_a_store_without_its_newest_payloads_is_found_out_though_nobody_reads(world: World) -> None:
    world.append_and_lose_the_newest()
    eventually_sync(
        lambda: world.client.get_buffer().state.chunk_count == KEPT, "what is lost going"
    )


def test_payloads_that_vanish_while_the_store_runs_are_handed_out_once(world: World) -> None:
    # No restart tells of it: only who could not read.
    world.client.append_many([large_fragment(index) for index in range(KEPT)])
    references = []
    with world.client.fetch(fragment_count=KEPT, max_wait_s=5.0) as lease:
        references = [each for each in lease.references if each.metadata.fragment_index >= KEPT - 8]
        with world.redis.client() as redis:
            for each in references:
                redis.delete(f"breadbox:{{{each.metadata.payload.payload_id}}}:0")
        lease.release(ReleaseMode.RETURNED)
    assert KEPT - 8 == world.client.get_buffer().state.chunk_count


def test_what_a_learner_that_died_could_not_read_is_dropped_when_its_lease_ends(
    world: World,
) -> None:
    world.client.append_many([large_fragment(index) for index in range(KEPT)])
    grant = world.client.service.fetch_fragments(fragment_count=KEPT, max_wait_s=5.0)
    (gone,) = [each for each in grant.fragments if each.metadata.fragment_index == KEPT - 1]
    with world.redis.client() as redis:
        redis.delete(f"breadbox:{{{gone.metadata.payload.payload_id}}}:0")
    eventually_sync(
        lambda: world.client.get_buffer().state.chunk_count == KEPT - 1,
        "what is lost going",
        within_s=20.0,
    )
