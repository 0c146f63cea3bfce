"""Many producers and learners: processes that wait for orders, so that they start once.

`python -m bench.crew ADDRESS` is one of them: it reads an `Order` per line, says that it is ready,
waits for a line more to begin with the others, and answers with what it measured.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import breadbox
from bench.workloads import WORKLOADS, numbered
from breadbox.reading.batches import Batch, load_batch

_WARM_UP_S = 0.5
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Order:
    """What one process does, for how long."""

    role: str
    """produce or learn."""
    count: int
    """Producers or learners of this process: threads, each with a client of its own."""
    seconds: float
    workload: str = "vector"
    group: int = 1
    """Fragments per call."""
    per_second: float = 0.0
    """Calls of each, due at even times, where one that is late begins at once; 0: one after
    another."""


@dataclass
class Tally:
    """What was measured."""

    latencies_ms: list[float] = field(default_factory=list)
    """Of calls, from when they were due."""
    counts: list[int] = field(default_factory=list)
    """Fragments per producer, or per learner."""
    errors: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Take over what another process measured."""
        self.latencies_ms += other.latencies_ms
        self.counts += other.counts
        self.errors += other.errors


class Crew:
    """Processes for up to so many producers and learners. A context manager."""

    def __init__(self, address: str, *, producing: int, learning: int) -> None:
        self._members = {
            "produce": [_start(address) for _ in range(producing)],
            "learn": [_start(address) for _ in range(learning)],
        }

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        members = [each for role in self._members.values() for each in role]
        for each in members:
            assert each.stdin is not None
            each.stdin.close()
        for each in members:
            try:
                each.wait(timeout=30)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
            assert each.stdout is not None
            each.stdout.close()

    def prepare(self, orders: Sequence[Order]) -> "Run":
        """Hand out orders, one per process, and return when everybody is ready."""
        free = {role: iter(members) for role, members in self._members.items()}
        busy = [(order.role, next(free[order.role])) for order in orders]
        for order, (_, member) in zip(orders, busy, strict=True):
            _tell(member, json.dumps(asdict(order)))
        for _, member in busy:
            _hear(member)
        return Run(busy)


class Run:
    """Orders that are about to be carried out."""

    def __init__(self, busy: Sequence[tuple[str, "subprocess.Popen[str]"]]) -> None:
        self._busy = busy

    def begin(self) -> None:
        """Let everybody begin; returns when what they do counts."""
        for _, member in self._busy:
            _tell(member, "go")
        time.sleep(_WARM_UP_S)

    def end(self) -> dict[str, Tally]:
        """Wait for everybody; what was measured, by role."""
        tallies = {"produce": Tally(), "learn": Tally()}
        for role, member in self._busy:
            tallies[role].add(Tally(**json.loads(_hear(member))))
        return tallies


def _start(address: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "bench.crew", address],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _tell(member: "subprocess.Popen[str]", line: str) -> None:
    assert member.stdin is not None
    member.stdin.write(line + "\n")
    member.stdin.flush()


def _hear(member: "subprocess.Popen[str]") -> str:
    assert member.stdout is not None
    line = member.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the crew ended with status {member.wait()}")
    return line


def _carry_out(address: str, order: Order, run: int) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(breadbox.connect(address)) for _ in range(order.count)]
        for client in clients:
            client.store.delete_many([])  # Opened now: loading redis-py takes long.
        tallies = [Tally() for _ in clients]
        act = {"produce": _produce, "learn": _learn}[order.role]
        print("ready", flush=True)
        sys.stdin.readline()
        start = time.perf_counter()
        threads = [
            threading.Thread(
                target=_guarded,
                args=(act, client, order, f"{os.getpid()}-{run}-{number}", start, tally),
            )
            for number, (client, tally) in enumerate(zip(clients, tallies, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    total = Tally()
    for tally in tallies:
        total.add(tally)
    print(json.dumps(asdict(total)), flush=True)


def _guarded(
    act: Callable[[breadbox.Client, Order, str, float, Tally], None],
    client: breadbox.Client,
    order: Order,
    name: str,
    start: float,
    tally: Tally,
) -> None:
    tally.counts.append(0)
    try:
        act(client, order, name, start, tally)
    except breadbox.ReplayBufferError as error:
        tally.errors.append(f"{type(error).__name__}: {error}")


class _Schedule:
    """When calls are due, and which of them count."""

    def __init__(self, start: float, seconds: float, per_second: float, phase: float) -> None:
        self._counts_from = start + _WARM_UP_S
        self._until = self._counts_from + seconds
        self._period = 1.0 / per_second if per_second else 0.0
        self._due = start + phase * self._period

    def next(self) -> float | None:
        """Wait until the next call is due; when that was, or None at the end."""
        now = time.perf_counter()
        if self._period:
            due = self._due
            self._due += self._period
            time.sleep(max(0.0, due - now))
        else:
            due = now
        return due if due < self._until else None

    def counts(self, due: float) -> bool:
        """Whether a call that was due then, and is over now, is one of those measured."""
        return self._counts_from <= due and time.perf_counter() <= self._until


def _produce(client: breadbox.Client, order: Order, name: str, start: float, tally: Tally) -> None:
    successive = numbered(WORKLOADS[order.workload](), name)
    phase = random.Random(name).random()
    schedule = _Schedule(start, order.seconds, order.per_second, phase)
    while (due := schedule.next()) is not None:
        results = client.append_many(list(islice(successive, order.group)))
        if schedule.counts(due):
            tally.latencies_ms.append((time.perf_counter() - due) * 1000)
            tally.counts[0] += len(results)
        refused = [each for each in results if each.outcome != breadbox.AdmissionOutcome.ADMITTED]
        if refused:
            tally.errors.append(f"not admitted: {refused[0]}")
            return


def _learn(client: breadbox.Client, order: Order, name: str, start: float, tally: Tally) -> None:
    del name
    into: Batch | None = None
    schedule = _Schedule(start, order.seconds, order.per_second, 0.5)
    while (due := schedule.next()) is not None:
        grant = client.service.fetch_fragments(order.group, max_wait_s=10.0)
        fetched_at = time.perf_counter()
        into = load_batch(client.store, grant.fragments, into=into)
        client.service.release_lease(grant.lease_id, breadbox.ReleaseMode.CONSUMED)
        if schedule.counts(due):
            tally.latencies_ms.append((fetched_at - due) * 1000)
            tally.counts[0] += len(grant.fragments)


def _main() -> None:
    address = sys.argv[1]
    for run, line in enumerate(sys.stdin):
        _carry_out(address, Order(**json.loads(line)), run)


if __name__ == "__main__":
    _main()
