"""A primary of the payload cluster dies in the middle of appends and fetches: nobody stops.

Replication in Redis is asynchronous: a payload that its primary had acknowledged and not yet passed
on is lost with it. The ledger therefore has three columns for what was acknowledged: received, lost
and told so, held.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.model.errors import PayloadMissingError, WaitElapsedError
from breadbox.model.types import AdmissionOutcome, BufferConfig
from support.fragments import vector_fragment
from support.redis_cluster import RedisCluster
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(120)]

BEFORE_KILL = 60
AFTER_KILL = 120
RECONNECT_S = 60.0


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster(has_replicas=True) as running:
        yield running


@pytest.fixture
def server(cluster: RedisCluster, tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("--store", cluster.url, log=tmp_path / "server.log") as running:
        yield running


class Ledger:
    """What one producer was told, and what one learner got."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.acknowledged: set[int] = set()
        self.received: list[int] = []
        self.lost: set[int] = set()
        self.errors: list[BaseException] = []
        self.half_way = threading.Event()
        self._appended = threading.Event()

    def run(self) -> None:
        """Produce and learn in two threads until both are done."""
        threads = [
            threading.Thread(target=self._guarded, args=(work,))
            for work in (self._produce, self._learn)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _guarded(self, work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - told by the test
            self.errors.append(error)
        finally:
            self.half_way.set()
            self._appended.set()

    def _produce(self) -> None:
        with breadbox.connect(self._address, reconnect_s=RECONNECT_S) as client:
            for index in range(BEFORE_KILL + AFTER_KILL):
                result = client.append(vector_fragment(index))
                outcomes = {result.outcome, result.first_outcome}
                if AdmissionOutcome.ADMITTED in outcomes:
                    self.acknowledged.add(index)
                if index == BEFORE_KILL:
                    self.half_way.set()

    def _learn(self) -> None:
        with breadbox.connect(self._address, reconnect_s=RECONNECT_S) as client:
            while True:
                is_last = self._appended.is_set()
                try:
                    with client.fetch(fragment_count=1, max_wait_s=1) as lease:
                        self._take(lease)
                except PayloadMissingError:
                    self.lost.add(lease.references[0].metadata.fragment_index)
                except WaitElapsedError:
                    if is_last:
                        return

    def _take(self, lease: breadbox.types.Lease) -> None:
        for fragment in lease.fragments():
            expected = np.full_like(fragment.obs, fragment.fragment_index)
            assert np.array_equal(expected, fragment.obs), "a mixed payload"
            self.received.append(fragment.fragment_index)


def test_clients_go_on_and_the_ledger_balances(
    cluster: RedisCluster, server: ServerProcess
) -> None:
    ledger = Ledger(server.address)
    with breadbox.connect(server.address) as client:
        client.update_buffer("default", BufferConfig(uses_max=1))
        client.start_session("s")
        runner = threading.Thread(target=ledger.run)
        runner.start()
        assert ledger.half_way.wait(60)
        cluster.kill_primary()
        runner.join()
        state = client.get_buffer().state

    assert [] == ledger.errors
    assert len(ledger.received) == len(set(ledger.received)), "used twice"
    dropped = dict(state.counters)["chunks_evicted_payload_lost"]
    gone = ledger.acknowledged - set(ledger.received) - ledger.lost
    assert dropped >= len(gone)
    assert 0 == state.chunk_count
    assert set(range(BEFORE_KILL + AFTER_KILL)) == ledger.acknowledged
