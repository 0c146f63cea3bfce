"""Cost per operation of the core, by the number of chunks held, and its memory per fragment.

Buffers of every size stand side by side, and each round times a batch on each of them, so that the
machine's moods hit all sizes alike: a ratio is the median over rounds of this size's time to the
smallest size's time in the same round. Garbage collection is set as in the server: what is there is
frozen, and the oldest generation is hardly ever traversed, since the core makes no cycles.

Memory is what the process grew by (resident set) while the buffer was filled with fragments whose
strings are fresh, as they come off the wire.
"""

import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.events import FetchGranted
from breadbox_server.core.model.ids import (
    FragmentIndex,
    ModelVersion,
    PayloadId,
    RequestId,
    SessionId,
    WorkerId,
)
from breadbox_server.core.model.inputs import (
    AppendFragments,
    Fetch,
    Fragment,
    Payload,
    PublishModel,
    ReleaseLease,
    ReleaseMode,
    StartSession,
)

SIZES = (1_000, 10_000, 100_000, 1_000_000)
FETCH_CHUNKS = 32
"""Chunks of a fetch; also the chunks that each publish makes stale, and of one version."""
WORKER_COUNT = 256
RATIO_MAX = 2.0
MEMORY_BYTES_MAX = 1024
OUT_PATH = Path(__file__).resolve().parent / "out" / "core.json"
SESSION = SessionId("run-0123456789abcdef")


@dataclass(frozen=True)
class Row:
    """One figure of the table and of core.json."""

    name: str
    size: int
    """Chunks held; every chunk is one fragment."""
    value: float
    unit: str
    ratio: float | None
    """To the same figure at the smallest size; None where that says nothing."""


class Bench:
    """A full buffer of one size, and the operations on it that are timed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._serial = count()
        self._requests = count()
        self.version = ModelVersion(0)
        config = BufferConfig(
            capacity_chunks=size,
            capacity_bytes=2**60,
            uses_max=2**30,
            staleness_max=size // FETCH_CHUNKS - 1,
            lease_s=3600.0,
        )
        self.buffers = BufferSet(random.Random(1), config)
        self.buffers.apply(StartSession(DEFAULT_BUFFER, SESSION), now=0.0)

    def fill(self) -> None:
        """Append until full, with a new version every `FETCH_CHUNKS` chunks."""
        for _ in range(self.size // FETCH_CHUNKS):
            self.publish_next()
            for append in self.appends(FETCH_CHUNKS):
                self.buffers.apply(append, now=0.0)
            self.buffers.take_events()

    def appends(self, append_count: int) -> list[AppendFragments]:
        """Make appends as they come off the wire: no string is shared."""
        return [
            AppendFragments(DEFAULT_BUFFER, [self._fragment(serial)])
            for serial, _ in zip(self._serial, range(append_count), strict=False)
        ]

    def publish_next(self) -> None:
        """Publish the next version, which makes the oldest chunks stale once the buffer is full."""
        self.version = ModelVersion(self.version + 1)
        self.buffers.apply(PublishModel(DEFAULT_BUFFER, SESSION, self.version), now=0.0)

    def time_append(self, operations: int) -> float:
        """Append to a full buffer, so that each evicts the oldest; seconds per append."""
        appends = self.appends(operations)
        apply = self.buffers.apply
        started_at = time.perf_counter()
        for append in appends:
            apply(append, now=0.0)
            self.buffers.take_events()
        return (time.perf_counter() - started_at) / operations

    def time_fetch(self, operations: int) -> float:
        """Fetch 32 chunks and release them; seconds per pair."""
        names = [RequestId(f"request-{next(self._requests)}") for _ in range(operations)]
        started_at = time.perf_counter()
        for name in names:
            fetch = Fetch(
                buffer=DEFAULT_BUFFER,
                request_id=name,
                fragment_count=FETCH_CHUNKS,
                deadline_at=0.0,
            )
            self.buffers.apply(fetch, now=0.0)
            events = self.buffers.take_events()
            (granted,) = [event for event in events if isinstance(event, FetchGranted)]
            release = ReleaseLease(DEFAULT_BUFFER, granted.lease_id, ReleaseMode.CONSUMED)
            self.buffers.apply(release, now=0.0)
            self.buffers.take_events()
        return (time.perf_counter() - started_at) / operations

    def time_publish(self, operations: int) -> float:
        """Publish versions that each make 32 chunks stale; seconds per publish."""
        elapsed_s = 0.0
        for _ in range(operations):
            started_at = time.perf_counter()
            self.publish_next()
            self.buffers.take_events()
            elapsed_s += time.perf_counter() - started_at
            for append in self.appends(FETCH_CHUNKS):
                self.buffers.apply(append, now=0.0)
            self.buffers.take_events()
        return elapsed_s / operations

    def _fragment(self, serial: int) -> Fragment:
        """Make a fragment none of whose strings another one shares."""
        return Fragment(
            worker_id=WorkerId(f"worker-{serial % WORKER_COUNT:04d}"),
            fragment_index=FragmentIndex(serial // WORKER_COUNT),
            session_id=SessionId(str(SESSION.encode(), "utf-8")),
            model_version_min=self.version,
            model_version_max=self.version,
            payload=Payload(PayloadId(f"{serial:032x}"), 20_000_000 + serial % 1000, 2**20),
            step_count=128,
        )


def measure_costs(sizes: tuple[int, ...], rounds: int) -> list[Row]:
    """Time every operation at every size."""
    benches = [Bench(size) for size in sizes]
    for bench in benches:
        bench.fill()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 1_000_000)
    operations: list[tuple[str, Callable[[Bench], float]]] = [
        ("append", lambda bench: bench.time_append(500)),
        ("fetch of 32", lambda bench: bench.time_fetch(50)),
        ("publish", lambda bench: bench.time_publish(50)),
    ]
    rows = []
    for name, operation in operations:
        times = [[operation(bench) for bench in benches] for _ in range(rounds)]
        for place, bench in enumerate(benches):
            value = statistics.median(times_of_round[place] for times_of_round in times)
            ratio = statistics.median(
                times_of_round[place] / times_of_round[0] for times_of_round in times
            )
            rows.append(Row(name, bench.size, value * 1e6, "us", ratio))
    return rows


def measure_memory(size: int) -> Row:
    """Fill a buffer, and give the bytes that the process grew by per fragment."""
    bench = Bench(size)
    gc.collect()
    before_bytes = _resident_bytes()
    bench.fill()
    gc.collect()
    held = bench.buffers.describe(DEFAULT_BUFFER, now=0.0).fragment_count
    return Row("memory per fragment", size, (_resident_bytes() - before_bytes) / held, "B", None)


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def show(rows: list[Row], console: Console) -> None:
    """Print the rows as a table."""
    table = Table(title="The core, by chunks held")
    for heading in ("operation", "chunks held", "cost", "to the smallest", "limit"):
        table.add_column(heading, justify="left" if heading == "operation" else "right")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        limit = f"<= {MEMORY_BYTES_MAX} B" if row.unit == "B" else f"<= {RATIO_MAX:.0f}"
        table.add_row(row.name, f"{row.size:,}", f"{row.value:,.1f} {row.unit}", ratio, limit)
    console.print(table)


@click.command()
@click.option("--quick", is_flag=True, help="Up to 100,000 chunks and fewer rounds.")
@click.option("--once", is_flag=True, help="The two smallest sizes, one round of each.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=OUT_PATH,
    show_default="bench/out/core.json",
    help="Where the figures go.",
)
def main(quick: bool, once: bool, out: Path) -> None:
    """Measure the core: append, fetch and publish by chunks held, and memory per fragment."""
    sizes = SIZES[:2] if once else SIZES[:-1] if quick else SIZES
    rounds = 1 if once else 7 if quick else 15
    # A process of its own for each: memory must not be read where something was freed before.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        memory = [
            processes.submit(measure_memory, size).result()
            for size in (sizes[1:] if once else sizes[2:])
        ]
        rows = processes.submit(measure_costs, sizes, rounds).result()
    rows.extend(memory)
    show(rows, Console())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
