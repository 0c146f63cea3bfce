"""Rows about scale: payloads on several Redis nodes at once, and many producers on one server."""

import json
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

import breadbox
from bench.bare import BareSocket
from bench.crew import Crew, Order, Tally
from bench.measure import Contender, Figure, percentile, rates
from bench.nodes import Cluster, redis_cluster
from bench.payload_rows import cut
from bench.processes import Server, breadbox_server, redis_server
from bench.report import machine, write_into
from bench.workloads import SESSION_ID, WORKLOADS, numbered
from breadbox.model.types import FragmentReference
from breadbox.reading.batches import Batch, load_batch
from breadbox.stores.keys import piece_key

NODE_COUNTS = (1, 2, 3)
LOADED = {"vpt": 6, "atari": 36}
"""Fragments per batch: as many from each node."""

COMMAND = "make scaling"
_GB = 1e9

LINK = 125e6
"""Bytes per second: where nodes have networks of their own, not cores, more of them are faster."""
_PROCESSES = 8
"""Of producers; 64 producers are 8 in each."""
BATCH = 32
"""Fragments that a learner fetches."""
_RATE = "fragments/s"
_BATCH_UNIT = "ms of server CPU"


@dataclass(frozen=True)
class Case:
    """Producers and learners at work together."""

    producers: int
    learners: int = 1
    workload: str = "vector"
    group: int = 1
    """Fragments per append call."""
    per_second: float = 0.0
    """Calls of each producer; 0: one after another, as fast as they are answered."""
    batches_per_second: float = 10.0
    """Of 32 fragments, fetched, loaded and released by each learner."""

    @property
    def name(self) -> str:
        """For the table."""
        each = "one at a time" if self.group == 1 else f"{self.group} at a time"
        pace = f", {self.per_second:g} a second each" if self.per_second else ""
        return (
            f"{self.producers} producer{'s'[: self.producers - 1]}, {each}{pace}; "
            f"{self.learners} learner{'s'[: self.learners - 1]}"
        )

    def orders(self, seconds: float) -> list[Order]:
        """Who does what, in as many processes as there are."""
        processes = min(self.producers, _PROCESSES)
        produce = Order(
            "produce",
            self.producers // processes,
            seconds,
            self.workload,
            self.group,
            self.per_second,
        )
        learn = Order("learn", 1, seconds, self.workload, BATCH, per_second=self.batches_per_second)
        return [produce] * processes + [learn] * self.learners


CASES = (
    *(Case(producers, learners) for learners in (1, 4) for producers in (1, 8, 64)),
    *(Case(producers, group=32) for producers in (1, 8, 64)),
    *(Case(64, learners, per_second=5.0) for learners in (1, 4)),
    *(Case(producers, workload="atari", batches_per_second=2.0) for producers in (1, 8, 64)),
)


def scale_rows(
    *, rounds: int, seconds: float, directory: Path, docs: Path | None = None
) -> Iterator[Figure]:
    """Measure what more nodes and more producers do.

    Args:
        rounds: Of loading.
        seconds: For which each case of producers and learners is measured.
        directory: Gets scale.png, scale.md with the tables, and scale.json with the `costs`.
        docs: Gets the producers' table in studies/scaling.md, and the picture, or None.
    """
    loaded = []
    for workload in LOADED:
        for node_count in NODE_COUNTS:
            loaded.append(_load_row(workload, node_count, rounds=rounds))
            yield loaded[-1]
    for node_count in NODE_COUNTS:
        loaded.append(_load_row("atari", node_count, rounds=rounds, link_bytes_per_s=LINK))
        yield loaded[-1]
    measured: dict[Case, Figure] = {}
    batches_ms: dict[str, float] = {}
    for workload in dict.fromkeys(case.workload for case in CASES):
        cases = [case for case in CASES if case.workload == workload]
        for case, figure in _crew_rows(workload, cases, seconds):
            if case is None:
                batches_ms[workload] = figure.value
            else:
                measured[case] = figure
            yield figure
    directory.mkdir(parents=True, exist_ok=True)
    draw(measured, directory / "scale.png")
    (directory / "scale.json").write_text(json.dumps(costs(measured, batches_ms)) + "\n")
    crews = crew_table(measured)
    (directory / "scale.md").write_text(f"{load_table(loaded)}\n{crews}")
    if docs is not None:
        write_into(docs / "studies" / "scaling.md", crews, COMMAND)
        shutil.copy(directory / "scale.png", docs / "images")


def _crew_rows(
    workload: str, cases: Sequence[Case], seconds: float
) -> Iterator[tuple[Case | None, Figure]]:
    """Yield what each case did, after what a batch costs the server."""
    capacity_chunks = {"vector": 4096, "atari": 256}[workload]
    with (
        redis_server() as path,
        breadbox_server(
            f"unix://{path}", "--capacity-chunks", str(capacity_chunks), "--uses-max", "1000000"
        ) as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session(SESSION_ID)
        # A learner never waits for data: what is measured of a fetch is the server.
        successive = numbered(WORKLOADS[workload](), "bench")
        client.append_many([next(successive) for _ in range(capacity_chunks // 4)])
        producing = min(_PROCESSES, max(case.producers for case in cases))
        learning = max(case.learners for case in cases)
        with Crew(server.address, producing=producing, learning=learning) as crew:
            learn = Order("learn", 1, seconds, workload, BATCH, per_second=10.0)
            server_s, tallies = _run([learn] * learning, crew, server, seconds)
            batch_s = server_s / (sum(tallies["learn"].counts) / BATCH / seconds)
            yield (
                None,
                Figure(
                    f"a fetch of {BATCH}, and its release", workload, batch_s * 1e3, _BATCH_UNIT
                ),
            )
            for case in cases:
                yield case, _crew_row(case, crew, server, seconds, batch_s)


def _run(
    orders: Sequence[Order], crew: Crew, server: Server, seconds: float
) -> tuple[float, dict[str, Tally]]:
    """Have orders carried out; the server's processor seconds per second, and what was done."""
    run = crew.prepare(orders)
    run.begin()
    before_s, start = server.cpu_s, time.perf_counter()
    time.sleep(seconds)
    server_s, elapsed = server.cpu_s - before_s, time.perf_counter() - start
    return server_s / elapsed, run.end()


def _crew_row(case: Case, crew: Crew, server: Server, seconds: float, batch_s: float) -> Figure:
    server_s, tallies = _run(case.orders(seconds), crew, server, seconds)
    errors = [error for tally in tallies.values() for error in tally.errors]
    counts = tallies["produce"].counts
    rate = sum(counts) / seconds
    batches_s = sum(tallies["learn"].counts) / BATCH / seconds * batch_s
    if not rate:
        raise RuntimeError(f"{case.name}: no append came back within {seconds} s")
    latencies = {
        f"{what} p{percent} ms": percentile(tallies[role].latencies_ms, percent)
        for what, role in (("append", "produce"), ("fetch", "learn"))
        for percent in (50, 99)
        if tallies[role].latencies_ms
    }
    return Figure(
        name=case.name,
        workload=case.workload,
        value=rate,
        unit=_RATE,
        also={
            "server CPU µs per fragment": server_s / rate * 1e6,
            "of these for appends": (server_s - batches_s) / rate * 1e6,
            "server CPU %": server_s * 100,
            **latencies,
            "slowest producer to mean": min(counts) * len(counts) / sum(counts),
            **({f"ended by {errors[0]}": len(errors)} if errors else {}),
        },
    )


def costs(measured: Mapping[Case, Figure], batches_ms: Mapping[str, float]) -> dict[str, float]:
    """Return what calls cost the server's processor, as `tests/simulation/crowd.py` reads it."""
    single_s, grouped_s = (
        measured[Case(64, group=group)].also["of these for appends"] / 1e6 for group in (1, 32)
    )
    append_s = (single_s - grouped_s) * 32 / 31
    return {
        "append_s": append_s,
        "fragment_s": single_s - append_s,
        "batch_s": batches_ms["vector"] / 1e3,
    }


def load_table(loaded: Sequence[Figure]) -> str:
    """Write what several nodes do."""
    lines = [
        machine(),
        "",
        "| load | ours | bare sockets | ratio | client CPU per GB, and of the bare loop |",
        "| --- | --- | --- | --- | --- |",
    ]
    for figure in loaded:
        own, bare = (figure.also[name] for name in ("client CPU ms/GB", "of the bare loop"))
        nodes = figure.name.partition(" from ")[2]
        lines.append(
            f"| `{figure.workload}`, {nodes} | {figure.value:.2f} GB/s | {figure.limit:.2f} GB/s "
            f"| {figure.ratio:.2f} | {own:.0f} and {bare:.0f} ms |"
        )
    return "\n".join(lines) + "\n"


def crew_table(measured: Mapping[Case, Figure]) -> str:
    """Write the first table of docs/studies/scaling.md."""
    lines = [
        machine(),
        "",
        "| producers and learners | fragments/s | server CPU per fragment | append p50, p99 "
        "| fetch p50, p99 | slowest producer |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case, figure in measured.items():
        also = figure.also
        kind = "" if case.workload == "vector" else f"`{case.workload}`: "
        append, fetch = (
            ", ".join(
                f"{also[f'{what} p{n} ms']:.1f}" for n in (50, 99) if f"{what} p{n} ms" in also
            )
            for what in ("append", "fetch")
        )
        server_us = also["server CPU µs per fragment"]
        lines.append(
            f"| {kind}{case.name} | {figure.value:,.0f} | {server_us:.0f} µs | {append} ms "
            f"| {fetch} ms | {also['slowest producer to mean']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def draw(measured: Mapping[Case, Figure], path: Path) -> None:
    """Draw the rate and the append's p99 by number of producers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    chart, panels = pyplot.subplots(1, 2, figsize=(11, 3.6))
    lines: dict[str, list[Case]] = defaultdict(list)
    for case in measured:
        if case.workload == "vector" and not case.per_second:
            lines[case.name.partition(", ")[2]].append(case)
    for name, cases in lines.items():
        producers = [case.producers for case in cases]
        panels[0].plot(producers, [measured[case].value for case in cases], "o-", label=name)
        p99 = [measured[case].also["append p99 ms"] for case in cases]
        panels[1].plot(producers, p99, "o-", label=name)
    for panel, title in zip(panels, ("fragments per second", "append p99, ms"), strict=True):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks([1, 8, 64], ["1", "8", "64"])
        panel.set_xlabel("producers")
        panel.set_title(title, loc="left", fontsize=9)
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter("{x:,.0f}")
        panel.yaxis.set_minor_formatter(ticker.NullFormatter())
        panel.grid(alpha=0.3)
    panels[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    chart.suptitle(machine(), x=0.01, ha="left", fontsize=9)
    chart.tight_layout()
    chart.savefig(path, dpi=120)
    pyplot.close(chart)


def _load_row(
    workload: str, node_count: int, *, rounds: int, link_bytes_per_s: float = 0.0
) -> Figure:
    """Load batches from all nodes at once, by a client that was told the server's address alone."""
    with (
        redis_cluster(node_count, link_bytes_per_s=link_bytes_per_s) as cluster,
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
        name=f"load into a stacked batch from {node_count} Redis node{'s'[: node_count - 1]}"
        + (", 1 Gbit/s each" if link_bytes_per_s else ""),
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
