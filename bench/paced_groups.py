"""What pacing and the choice of `stale` do to groups, by real processes that sleep.

A server, generators that sleep for as long as a completion takes, and a learner that sleeps for as
long as an update takes: 32 slots, 8 groups a version, a fifth of the prompts 5 times slower. Time
passes 100 times faster than in a run of updates of a minute. Each row is beside what a simulation
of its rule alone gives (`SIMULATED`). On a machine with other load the sleeps are not what they
say, and neither are the figures.

    python -m bench.paced_groups           # about six minutes for a seed; prints a table
    python -m bench.paced_groups --write   # and puts rows and table among the documents
"""

import json
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np

import breadbox
from bench.processes import breadbox_server, memory_directory
from bench.report import write_into
from breadbox.errors import ClosedError, ReplayBufferError, WaitElapsedError

DOCS = Path(__file__).parents[1] / "docs"
DATA = DOCS / "images" / "paced-groups.json"
PAGE = DOCS / "agents.md"
COMMAND = "python -m bench.paced_groups --write"
SLOTS = 32
PROCESSES = 4
PER_VERSION = 8
UPDATE_S = 0.6
GROUP_S = 1.0
SLOW_SHARE, SLOWNESS, SIGMA = 0.2, 5.0, 0.5
UPDATES = 60
WARM_UP_UPDATES = 5
AGREES_WITHIN = 0.1
LEASE_S = 30.0
BUFFER = "default"


@dataclass(frozen=True, slots=True)
class Row:
    """A way of pacing, and what a simulation of it gives beside the first."""

    name: str
    options: tuple[str, ...]
    updates: float
    """Relative to the first row."""
    thrown: float
    slow: float
    """Share of the slow among the groups trained on, beside that among those begun."""
    is_paced: bool = True


def _lead(stale: str, bound: int) -> tuple[str, ...]:
    paced = ("--groups-per-version", str(PER_VERSION), "--lead-versions", "2")
    return ("--stale", stale, "--staleness-max", str(bound), *paced)


SIMULATED = (
    Row("no tickets, bound 2", ("--staleness-max", "2"), 1.0, 0.40, 0.03, is_paced=False),
    Row("lead 2, bound 2, evict", _lead("evict", 2), 0.70, 0.18, 0.23),
    Row("lead 2, bound 8, evict", _lead("evict", 8), 0.81, 0.02, 0.89),
    Row("lead 2, bound 16, wait", _lead("wait", 16), 0.81, 0.0, 0.99),
    Row("lead 2, bound 2, wait", _lead("wait", 2), 0.30, 0.0, 1.0),
    Row("lead 2, keep", _lead("keep", 2), 0.82, 0.0, 0.99),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What one run gave."""

    updates_per_s: float
    thrown: float
    slow: float
    worst: int


class _Generators:
    """The slots of one process: each begins a group, sleeps, and appends it."""

    def __init__(self, address: str, is_paced: bool, seed: int) -> None:
        self._client = breadbox.connect(address)
        self._is_paced = is_paced
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._seed = seed
        self._begun = [0, 0]
        """Groups of fast prompts and of slow ones."""
        self._ended = threading.Event()

    def run(self, told: Connection) -> None:
        threads = [threading.Thread(target=self._fill) for _ in range(SLOTS // PROCESSES)]
        for thread in threads:
            thread.start()
        told.recv()
        self._ended.set()
        self._client.close()
        for thread in threads:
            thread.join()
        told.send(self._begun)

    def _fill(self) -> None:
        while not self._ended.is_set():
            try:
                group, version = self._begin()
                with self._lock:
                    is_slow = self._rng.random() < SLOW_SHARE
                    lasts_s = GROUP_S * self._rng.lognormvariate(0, SIGMA)
                    self._begun[is_slow] += 1
                if self._ended.wait(lasts_s * (SLOWNESS if is_slow else 1.0)):
                    return
                self._client.append(_completion(group, version, is_slow))
            except WaitElapsedError:
                continue
            except (ClosedError, ReplayBufferError):
                if not self._ended.is_set():
                    raise
                return

    def _begin(self) -> tuple[str, int]:
        if self._is_paced:
            [ticket] = self._client.tickets(1, max_wait_s=5.0, lease_s=LEASE_S)
            return ticket.group, ticket.model_version
        state = self._client.watch_model(None)
        assert state is not None
        with self._lock:
            return f"{self._seed}-{sum(self._begun)}-{self._rng.random()}", state.model_version or 0


def _completion(group: str, version: int, is_slow: bool) -> breadbox.Sequence:
    return breadbox.Sequence(
        group=group,
        member=0,
        tokens={"ids": np.zeros(4, np.int64)},
        numbers={"slow": is_slow},
        model_version_min=version,
        model_version_max=version,
    )


def _generate(address: str, is_paced: bool, seed: int, told: Connection) -> None:
    _Generators(address, is_paced, seed).run(told)


def measure(row: Row, seed: int, updates: int) -> Found:
    """Run a row for some updates, after a few that are not counted."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(PROCESSES)]
    options = ("--preset", "groups", "--fragments-per-chunk", "1", *row.options)
    with (
        memory_directory() as folder,
        breadbox_server(f"file://{folder}", *options) as server,
        breadbox.connect(server.address) as learner,
    ):
        learner.start_session("run")
        processes = [
            context.Process(
                target=_generate, args=(server.address, row.is_paced, seed * PROCESSES + n, theirs)
            )
            for n, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        staleness, trained, took_s = _learn(learner, updates)
        counters = learner.get_buffer().state.counters
        for ours, _ in pipes:
            ours.send(None)
        begun = np.sum([ours.recv() for ours, _ in pipes], axis=0)
        for process in processes:
            process.join()
    stale = counters["fragments_stale"] + counters["chunks_evicted_stale"]
    finished = counters["fragments_admitted"] + counters["fragments_stale"]
    offered = begun[1] / max(1, begun.sum())
    return Found(
        updates / took_s,
        stale / max(1, finished),
        statistics.mean(trained) / max(1e-9, offered),
        max(staleness),
    )


def _learn(client: breadbox.Client, updates: int) -> tuple[list[int], list[bool], float]:
    """Fetch, sleep and publish; return what was trained on and how long the updates took."""
    staleness, trained = list[int](), list[bool]()
    weights = {"w": np.zeros(1, np.float32)}
    began_at = time.monotonic()
    for version in range(1, WARM_UP_UPDATES + updates + 1):
        if version == WARM_UP_UPDATES + 1:
            began_at = time.monotonic()
        with client.fetch(PER_VERSION, max_wait_s=None) as lease:
            staleness += [each.staleness_when_granted for each in lease.references]
            trained += [bool(each.metadata.numbers["slow"]) for each in lease.references]
        time.sleep(UPDATE_S)
        client.publish("run", version, weights)
    return staleness, trained, time.monotonic() - began_at


def table(rows: Sequence[tuple[Row, Sequence[Found]]]) -> tuple[str, bool]:
    """Return a table of means beside the simulation's, and whether all agree with it."""
    lines = ["| | updates | thrown away | slow prompts trained, of offered | worst |"]
    lines.append("| --- | --- | --- | --- | --- |")
    first_rate = statistics.mean([each.updates_per_s for each in rows[0][1]])
    agree = True
    for row, found in rows:
        means = [
            statistics.mean([each.updates_per_s for each in found]) / first_rate,
            statistics.mean([each.thrown for each in found]),
            statistics.mean([each.slow for each in found]),
        ]
        wanted = (row.updates, row.thrown, row.slow)
        agree &= all(
            abs(mean - want) <= AGREES_WITHIN for mean, want in zip(means, wanted, strict=True)
        )
        cells = [f"{mean:.2f} ({want:.2f})" for mean, want in zip(means, wanted, strict=True)]
        lines.append(f"| {row.name} | {' | '.join(cells)} | {max(e.worst for e in found)} |")
    return "\n".join(lines) + "\n", agree


def read(path: Path) -> list[tuple[Row, list[Found]]]:
    """The runs that are written."""
    runs: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())
    return [(row, [Found(**each) for each in runs[row.name]]) for row in SIMULATED]


@click.command()
@click.option("--seeds", default=3, help="Seeds of each row.")
@click.option("--updates", default=UPDATES, help="Updates of each run.")
@click.option("--check", is_flag=True, help="End with code 1 unless each row is as simulated.")
@click.option("--write", is_flag=True, help=f"Write {DATA.name}, and the table of {PAGE.name}.")
def main(seeds: int, updates: int, check: bool, write: bool) -> None:
    """Run each row, and print it beside what is simulated."""
    rows: list[tuple[Row, list[Found]]] = []
    for row in SIMULATED:
        found = [measure(row, seed, updates) for seed in range(seeds)]
        said: list[Any] = [[round(e.updates_per_s, 3), e.thrown, e.slow, e.worst] for e in found]
        click.echo(f"{row.name}: {json.dumps(said)}")
        rows.append((row, found))
    text, agree = table(rows)
    click.echo(f"\nMeasured (simulated):\n\n{text}")
    if write:
        runs = {row.name: [asdict(each) for each in found] for row, found in rows}
        DATA.write_text(json.dumps(runs, indent=2) + "\n")
        write_into(PAGE, text, COMMAND)
    if check and not agree:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
