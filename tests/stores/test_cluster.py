"""Payloads in a real Redis Cluster: spread over its nodes, moved, and failed over."""

import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import breadbox
from breadbox.model.errors import PayloadMissingError, StoreUnavailableError
from breadbox.model.types import PayloadReference
from breadbox.stores import open_custodian, open_store
from breadbox.stores.base import Confirmation, PayloadStore, Segment
from breadbox.stores.redis import store as redis_store
from breadbox.stores.redis import wire as redis_wire
from breadbox_server.journal.storage.claims import Claim, Holder
from breadbox_server.journal.storage.interface import JournalUnavailableError
from breadbox_server.journal.storage.redis_stream import RedisArchive, RedisWriter
from support.eventually import eventually
from support.fragments import vector_fragment
from support.redis_cluster import Node, RedisCluster
from support.server_process import ServerProcess
from support.store_contract import HEAD_BYTES, RangeReceiver, read_back

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

PIECE_BYTES = 64 * 1024
PAYLOAD_BYTES = 3 * PIECE_BYTES + 100
MOVED_SLOTS = range(600)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as running:
        yield running


@pytest.fixture
def store(cluster: RedisCluster) -> Iterator[PayloadStore]:
    opened = open_store(cluster.url, piece_size_bytes=PIECE_BYTES)
    yield opened
    opened.close()


def payloads(count: int) -> list[bytes]:
    return [secrets.token_bytes(PAYLOAD_BYTES) for _ in range(count)]


def write(store: PayloadStore, contents: Sequence[bytes]) -> list[PayloadReference]:
    return store.write_many([[memoryview(content)] for content in contents])


def test_payloads_are_spread_over_the_nodes_and_read_back(
    cluster: RedisCluster, store: PayloadStore
) -> None:
    before = cluster.keys_by_primary()
    contents = payloads(60)
    references = write(store, contents)
    after = cluster.keys_by_primary()

    assert contents == read_back(store, references)
    grown = [new - old for new, old in zip(after, before, strict=True)]
    assert 60 * 4 == sum(grown)
    assert all(count > 0 for count in grown)


def test_all_pieces_of_a_payload_stay_on_one_node(
    cluster: RedisCluster, store: PayloadStore
) -> None:
    (reference,) = write(store, payloads(1))
    found = [
        len(list(node.client.scan_iter(match=f"*{reference.payload_id}*")))
        for node in cluster.primaries
    ]

    assert [0, 0, 4] == sorted(found)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch, cluster: RedisCluster) -> list[str]:
    """Nobody's connection is used before all nodes' are; names the threads that met."""
    names: list[str] = []
    barrier = threading.Barrier(len(cluster.primaries))

    @contextmanager
    def meeting(*arguments: Any) -> Iterator[Any]:
        with redis_wire.borrowed_wire(*arguments) as wire:
            barrier.wait(timeout=20)
            names.append(threading.current_thread().name)
            yield wire

    monkeypatch.setattr(redis_store, "borrowed_wire", meeting)
    return names


def test_all_nodes_are_written_to_and_read_from_at_once(
    store: PayloadStore, met: list[str]
) -> None:
    contents = payloads(60)
    references = write(store, contents)
    receiver = RangeReceiver([(HEAD_BYTES, PAYLOAD_BYTES)], wants_whole=True)
    store.read_many(references, receiver)

    assert 6 == len(met)
    assert 3 == len(set(met[:3]))
    assert contents == [receiver.heads[k] + receiver.received[k][0] for k in range(60)]
    assert not [each for each in threading.enumerate() if each.name.startswith("breadbox-node")]


class OneAtATime(RangeReceiver):
    """Holds up the first plan until another one begins, or long enough to say that none does."""

    def __init__(self) -> None:
        super().__init__([(HEAD_BYTES, PAYLOAD_BYTES)], wants_whole=True)
        self.is_planning = threading.Lock()
        self.overlapped = threading.Event()
        self.is_first = True

    def segments(self, position: int, head: memoryview) -> Sequence[Segment]:
        if not self.is_planning.acquire(blocking=False):
            self.overlapped.set()
            return super().segments(position, head)
        try:
            if self.is_first:
                self.is_first = False
                self.overlapped.wait(0.5)
            return super().segments(position, head)
        finally:
            self.is_planning.release()


def test_payloads_of_many_nodes_are_planned_one_after_another(store: PayloadStore) -> None:
    """The plan of the first decides the shape of the batch that the others join."""
    references = write(store, payloads(30))
    receiver = OneAtATime()
    store.read_many(references, receiver)

    assert not receiver.overlapped.is_set()
    assert sorted(receiver.order) == list(range(30))


def test_a_payload_missing_on_one_node_ends_the_read_of_all(store: PayloadStore) -> None:
    contents = payloads(30)
    references = write(store, contents)
    store.delete_many(references[7:8])
    with pytest.raises(PayloadMissingError):
        store.read_many(references, RangeReceiver([(HEAD_BYTES, PAYLOAD_BYTES)], wants_whole=True))
    del references[7], contents[7]

    assert contents == read_back(store, references)


async def test_the_server_confirms_and_deletes_on_every_node(
    cluster: RedisCluster, store: PayloadStore
) -> None:
    custodian = open_custodian(cluster.url)
    references = write(store, payloads(30))
    missing = PayloadReference(secrets.token_hex(16), 1000)
    confirmed = await custodian.confirm([*references, missing])
    listed = {payload_id async for payload_id in custodian.confirmed()}
    await custodian.delete(references)
    left = await custodian.present(references)
    await custodian.close()

    assert [*[Confirmation.THERE] * 30, Confirmation.MISSING] == confirmed
    assert {reference.payload_id for reference in references} <= listed
    assert [False] * 30 == left


async def test_the_usage_is_that_of_all_nodes(cluster: RedisCluster) -> None:
    custodian = open_custodian(cluster.url)
    usage = await custodian.usage()
    await custodian.close()
    of_nodes = [int(node.client.info("memory")["used_memory"]) for node in cluster.primaries]

    assert 0 == usage.limit_bytes
    assert max(of_nodes) < usage.used_bytes


async def test_payloads_are_written_confirmed_and_read_while_their_slots_move(
    cluster: RedisCluster, store: PayloadStore
) -> None:
    custodian = open_custodian(cluster.url)
    contents = payloads(60)
    references = write(store, contents)
    mover = threading.Thread(target=cluster.move_slots, args=(MOVED_SLOTS,))
    mover.start()
    rounds = 0
    while mover.is_alive():
        more = payloads(6)
        contents += more
        references += write(store, more)
        assert [Confirmation.THERE] * 6 == await custodian.confirm(references[-6:])
        assert contents[:12] == read_back(store, references[:12])
        rounds += 1
    mover.join()
    await custodian.close()

    assert contents == read_back(store, references)
    assert rounds > 0


@pytest.fixture
def url_with_dead_nodes(cluster: RedisCluster) -> str:
    """Names three nodes: a host that is not there, a port where nobody listens, a living one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = int(taken.getsockname()[1])
    living = cluster.primaries[1].port
    return f"redis+cluster://nobody.invalid:1,127.0.0.1:{dead},127.0.0.1:{living}"


async def test_any_living_node_of_the_url_is_enough_to_start(url_with_dead_nodes: str) -> None:
    store = open_store(url_with_dead_nodes, piece_size_bytes=PIECE_BYTES)
    custodian = open_custodian(url_with_dead_nodes)
    contents = payloads(10)
    references = write(store, contents)
    confirmed = await custodian.confirm(references)
    read = read_back(store, references)
    store.close()
    await custodian.close()

    assert [Confirmation.THERE] * 10 == confirmed
    assert contents == read


def test_a_server_and_a_client_start_though_the_first_nodes_are_dead(
    url_with_dead_nodes: str, tmp_path: Path
) -> None:
    with (
        ServerProcess("--store", url_with_dead_nodes, log=tmp_path / "server.log") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        client.append(vector_fragment(0))
        with client.fetch(fragment_count=1, max_wait_s=10) as lease:
            received = [fragment.fragment_index for fragment in lease.fragments()]

    assert [0] == received


@pytest.fixture
def dead_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"redis+cluster://127.0.0.1:{taken.getsockname()[1]},nobody.invalid:1"


async def test_a_cluster_without_a_living_node_is_unavailable(dead_url: str) -> None:
    with pytest.raises(StoreUnavailableError):
        open_store(dead_url)
    with pytest.raises(JournalUnavailableError):
        RedisArchive(dead_url)
    custodian = open_custodian(dead_url)
    with pytest.raises(StoreUnavailableError):
        await custodian.ping()
    await custodian.close()
    writer = RedisWriter(dead_url, Claim("journal", 1, Holder("token")))
    with pytest.raises(JournalUnavailableError):
        await writer.append(1, b"")
    await writer.close()


async def test_a_cluster_that_dies_altogether_is_unavailable() -> None:
    """Every call of those who were connected before, not only the first."""
    with RedisCluster() as cluster:
        store = open_store(cluster.url, piece_size_bytes=PIECE_BYTES)
        custodian = open_custodian(cluster.url)
        references = write(store, payloads(5))
        await custodian.ping()
        for node in cluster.nodes:
            node.kill()
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                write(store, payloads(5))
            with pytest.raises(StoreUnavailableError):
                read_back(store, references)
            with pytest.raises(StoreUnavailableError):
                store.delete_many(references)
            with pytest.raises(StoreUnavailableError):
                await custodian.confirm(references)
            with pytest.raises(StoreUnavailableError):
                await custodian.usage()
        store.close()
        await custodian.close()


def is_replicated(node: Node) -> bool:
    """Whether a primary's replica has all that it has; WAIT tells of a connection's own writes."""
    told: Any = node.client.info("replication")
    return bool(told["slave0"]["offset"] >= told["master_repl_offset"])


@pytest.mark.chaos
async def test_the_death_of_a_primary_is_ridden_through() -> None:
    """What was replicated is read from the heir; what comes after goes there."""
    with RedisCluster(has_replicas=True) as cluster:
        store = open_store(cluster.url, piece_size_bytes=PIECE_BYTES)
        custodian = open_custodian(cluster.url)
        # From here on both know all nodes, not only the one that the URL names.
        await custodian.ping()
        contents = payloads(30)
        references = write(store, contents)
        await eventually(
            lambda: all(map(is_replicated, cluster.primaries)), "all being with the replicas"
        )
        cluster.kill_primary()

        assert contents == read_back(store, references)
        assert [Confirmation.THERE] * 30 == await custodian.confirm(references)
        more = payloads(30)
        assert more == read_back(store, write(store, more))
        store.close()
        await custodian.close()
