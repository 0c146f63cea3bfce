"""Rows about scale: payloads on several Redis nodes at once."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import psutil

import breadbox
from bench.bare import BareSocket
from bench.measure import Contender, Figure, rates
from bench.nodes import Cluster, redis_cluster
from bench.payload_rows import cut
from bench.processes import breadbox_server
from bench.workloads import SESSION_ID, WORKLOADS, numbered
from breadbox.batches import Batch, load_batch
from breadbox.stores.keys import piece_key
from breadbox.types import FragmentReference

NODE_COUNTS = (1, 2, 3)
LOADED = {"vpt": 6, "atari": 36}
"""Fragments per batch: as many from each node."""

_GB = 1e9


def scale_rows(*, rounds: int) -> Iterator[Figure]:
    """Measure what more nodes and more producers do."""
    for workload in LOADED:
        for node_count in NODE_COUNTS:
            yield _load_row(workload, node_count, rounds=rounds)


def _load_row(workload: str, node_count: int, *, rounds: int) -> Figure:
    """Load batches from all nodes at once, by a client that was told the server's address alone."""
    with (
        redis_cluster(node_count) as cluster,
        breadbox_server(cluster.url, "--uses-max", "1000000") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session(SESSION_ID)
        references = _spread(client, cluster, workload)
        into: list[Batch] = []

        def load() -> None:
            into[:] = [load_batch(client.store, references, into=into[0] if into else None)]

        with _BareLoad(cluster, references) as bare:
            moved = sum(each.metadata.payload.size_bytes for each in references) / _GB
            ours, limit = _Metered(load, cluster), _Metered(bare.load, cluster)
            got = rates(
                {"ours": Contender(ours, moved), "limit": Contender(limit, moved)}, rounds=rounds
            )
    return Figure(
        name=f"load into a stacked batch from {node_count} Redis node{'s'[: node_count - 1]}",
        workload=workload,
        value=got["ours"],
        unit="GB/s",
        limit=got["limit"],
        limit_is="bare socket loop, a thread per node",
        reach=0.8,
        also={
            "client CPU ms/GB": ours.client_ms / moved,
            "of the bare loop": limit.client_ms / moved,
            "Redis CPU ms/GB": ours.redis_ms / moved,
        },
    )


def _spread(client: breadbox.Client, cluster: Cluster, workload: str) -> list[FragmentReference]:
    """Append until a batch can be made of which each node has the same number of fragments."""
    share = LOADED[workload] // len(cluster.ports)
    successive = numbered(WORKLOADS[workload](), "bench")
    count = 0
    while True:
        group = [next(successive) for _ in range(LOADED[workload])]
        client.append_many(group)
        count += len(group)
        # Released at once: nothing leaves the buffer while this runs.
        with client.fetch(fragment_count=count, max_wait_s=10) as lease:
            by_node: list[list[FragmentReference]] = [[] for _ in cluster.ports]
            for reference in lease.references:
                by_node[cluster.node_of(_key(reference, 0))].append(reference)
        if min(map(len, by_node)) >= share:
            return [reference for part in by_node for reference in part[:share]]


class _BareLoad:
    """The limit: a connection to each node in a thread of its own. A context manager."""

    def __init__(self, cluster: Cluster, references: Sequence[FragmentReference]) -> None:
        self._keys: list[list[bytes]] = [[] for _ in cluster.ports]
        self._destinations: list[list[memoryview]] = [[] for _ in cluster.ports]
        for reference in references:
            node = cluster.node_of(_key(reference, 0))
            memory = np.empty(reference.metadata.payload.size_bytes, np.uint8).data
            for number, piece in enumerate(cut(memory)):
                self._keys[node].append(_key(reference, number))
                self._destinations[node].append(piece)
        self._sockets = [BareSocket(("127.0.0.1", port)) for port in cluster.ports]
        self._threads = ThreadPoolExecutor(len(cluster.ports))

    def __enter__(self) -> "_BareLoad":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        for each in self._sockets:
            each.close()

    def load(self) -> None:
        """Receive every piece into its place."""
        jobs = [
            self._threads.submit(each.get_pieces, keys, destinations)
            for each, keys, destinations in zip(
                self._sockets, self._keys, self._destinations, strict=True
            )
        ]
        for job in jobs:
            job.result()


@dataclass
class _Metered:
    """Runs something, and keeps what this process and the nodes worked for it."""

    act: Callable[[], None]
    cluster: Cluster
    _client_s: list[float] = field(default_factory=list)
    _redis_s: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        """Run it."""
        client, redis = time.process_time(), _cpu_s(self.cluster.pids)
        self.act()
        self._client_s.append(time.process_time() - client)
        self._redis_s.append(_cpu_s(self.cluster.pids) - redis)

    @property
    def client_ms(self) -> float:
        """Processor time of this process for one act."""
        return statistics.median(self._client_s) * 1000

    @property
    def redis_ms(self) -> float:
        """Processor time of all nodes for one act; of many, since the clock is coarse."""
        return statistics.mean(self._redis_s) * 1000


def _cpu_s(pids: Sequence[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def _key(reference: FragmentReference, number: int) -> bytes:
    return piece_key(reference.metadata.payload.payload_id, number)
