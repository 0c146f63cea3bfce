"""`python tests/simulation/crowd.py`: thousands of producers on one server, in simulated time.

The driver and its core are the real ones, and so are the bounds at the door and the clients' waits
between attempts. What a call costs the server's one processor is a figure that was measured
(`Costs`): who comes first is served first, and everybody else waits. Nothing here sleeps.
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import write_into

from breadbox.model.types import PayloadReference
from breadbox.operations.retry import RetryPolicy, backoff_s
from breadbox.stores.base import Confirmation
from breadbox_server.base.errors import AppendsFullError
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.events import FetchGranted
from breadbox_server.core.model.ids import BufferName, RequestId, SessionId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Fetch,
    Fragment,
    ReleaseLease,
    ReleaseMode,
    StartSession,
)
from breadbox_server.driver import Driver, DriverLimits
from breadbox_server.limits import UNASKED_MAX, UNASKED_MAX_HARD
from simulation.loop import SimulatedClock, run_simulated
from simulation.server import METRICS
from support.appends import append
from support.fake_custodian import FakeCustodian
from support.metadata import written_fragment

BUFFER = BufferName("default")
BATCH = 32
"""Fragments that a learner fetches."""
SERVER_BYTES, FRAGMENT_BYTES, CONNECTION_BYTES = 60 * 2**20, 2**10, 40 * 2**10
"""Of memory: the server alone, for a fragment held, for a client with a call in progress;
docs/deploy.md has them."""
REFUSAL_S = 30e-6
STORE_S = 0.5e-3
"""How long the store takes to confirm a slice of appends."""

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class Costs:
    """Seconds of the server's processor, as bench/scale.py measures them."""

    append_s: float = 0.88e-3
    """A call with appends, whatever is in it."""
    fragment_s: float = 0.09e-3
    """Each fragment of it."""
    batch_s: float = 3.1e-3
    """A fetch of `BATCH` fragments and its release."""

    def __str__(self) -> str:
        return (
            f"A call with appends costs {self.append_s * 1e3:.2f} ms, each fragment of it "
            f"{self.fragment_s * 1e3:.2f} ms, a fetch of {BATCH} and its release "
            f"{self.batch_s * 1e3:.1f} ms."
        )


@dataclass(frozen=True)
class Crowd:
    """Who is there, and what they do."""

    producers: int
    learners: int
    group: int
    """Fragments per append call."""
    load: float
    """What all want to send together, and to fetch once, to what the server's processor can do."""
    seconds: float = 60.0
    away_s: float = 0.0
    """For how long the server is away, after a third of the time: it was killed there."""
    costs: Costs = Costs()

    @property
    def per_second(self) -> float:
        """Fragments that all producers together want to send."""
        costs = self.costs
        each_s = costs.append_s / self.group + costs.fragment_s + costs.batch_s / BATCH
        return self.load / each_s

    @property
    def period_s(self) -> float:
        """Seconds between two groups of one producer."""
        return self.producers * self.group / self.per_second


class _TurnedAwayError(Exception):
    """The call did not get into the server; it is safe to make it again."""


class _Door:
    """The server's one processor, and the queue before it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._free_at = 0.0
        self._lives = 0
        self.is_away = False
        self.busy_s = 0.0
        self.waiting = 0
        self.waiting_peak = 0
        self.refused = 0

    def die(self) -> None:
        """Lose all that wait, and answer nobody."""
        self.is_away = True
        self._lives += 1
        self._free_at = 0.0

    async def work(self, seconds: float) -> None:
        """Wait for the processor, and use it.

        Raises:
            _TurnedAwayError: Too many wait, or the server has died.
        """
        if self.is_away:
            raise _TurnedAwayError
        if self._rng.uniform(UNASKED_MAX, UNASKED_MAX_HARD) < self.waiting:
            # gRPC draws lots as well, between the two bounds.
            self.refused += 1
            await self._use(REFUSAL_S)
            raise _TurnedAwayError
        self.waiting += 1
        self.waiting_peak = max(self.waiting_peak, self.waiting)
        try:
            await self._use(seconds)
        finally:
            self.waiting -= 1

    async def _use(self, seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + seconds
        self.busy_s += seconds
        life = self._lives
        await asyncio.sleep(self._free_at - now)
        if life != self._lives:
            raise _TurnedAwayError


class _Store(FakeCustodian):
    """A store whose answers take a while."""

    async def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        await asyncio.sleep(STORE_S)
        return await super().confirm(references)


@dataclass
class Played:
    """What became of a crowd."""

    crowd: Crowd
    sent: list[int] = field(default_factory=list)
    """Fragments of each producer that were taken."""
    append_s: list[tuple[float, float]] = field(default_factory=list)
    """When each group was due, and how long after that it was acknowledged."""
    fetch_s: list[float] = field(default_factory=list)
    delivered: int = 0
    busy: float = 0.0
    """Share of the server's processor that was used."""
    waiting_peak: int = 0
    refused: int = 0
    held_peak: int = 0
    """Fragments in the buffer at most."""
    recovered_s: float = 0.0
    """How long after its return, at most, groups waited that were due while it was away."""

    @property
    def rate(self) -> float:
        """Fragments per second that were taken."""
        return sum(self.sent) / self.crowd.seconds

    @property
    def fetch_rate(self) -> float:
        """Fragments per second that learners got."""
        return self.delivered / self.crowd.seconds

    @property
    def memory_bytes(self) -> int:
        """What the server's memory is reckoned to be, with everybody connected."""
        clients = self.crowd.producers + self.crowd.learners
        held = self.held_peak * FRAGMENT_BYTES
        return SERVER_BYTES + clients * CONNECTION_BYTES + held

    @property
    def least_to_mean(self) -> float:
        """What the producer got that got least, to the mean."""
        return min(self.sent) / statistics.mean(self.sent)

    def append_percentile(self, percent: float) -> float:
        """Seconds from when a group was due to its acknowledgement."""
        return _percentile([took_s for _, took_s in self.append_s], percent)

    def fetch_percentile(self, percent: float) -> float:
        """Seconds that a learner waited for a batch."""
        return _percentile(self.fetch_s, percent)


def _percentile(values: Sequence[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


class _World:
    def __init__(self, crowd: Crowd, seed: int) -> None:
        self.crowd = crowd
        self.rng = random.Random(seed)
        self.door = _Door(random.Random(f"{seed}/door"))
        self.store = _Store()
        self.played = Played(crowd, sent=[0] * crowd.producers)
        self._policy = RetryPolicy(attempts_max=sys.maxsize)

    async def _call(
        self, rng: random.Random, cost_s: float, work: Callable[[], Awaitable[AnswerT]]
    ) -> AnswerT:
        """Make a call as clients do: again, after a while, while it is turned away."""
        attempt = 0
        while True:
            try:
                await self.door.work(cost_s)
                return await work()
            except (_TurnedAwayError, AppendsFullError):
                attempt += 1
                await asyncio.sleep(backoff_s(self._policy, attempt, rng))

    async def produce(self, driver: Driver, producer: int) -> None:
        rng = random.Random(f"{self.rng.random()}/{producer}")
        loop, crowd = asyncio.get_running_loop(), self.crowd
        cost_s = crowd.costs.append_s + crowd.group * crowd.costs.fragment_s
        index = 0
        due = loop.time() + rng.random() * crowd.period_s
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            group = [
                written_fragment(self.store, index + each, "run", f"producer-{producer}")
                for each in range(crowd.group)
            ]
            index += crowd.group
            await self._call(rng, cost_s, partial(self._append, driver, group))
            self.played.append_s.append((due, loop.time() - due))
            self.played.sent[producer] += crowd.group
            self.played.held_peak = max(self.played.held_peak, len(self.store.kept))
            # Who is late makes the next one at once, and only so many can wait in its queue.
            due = max(due + crowd.period_s, loop.time() - crowd.period_s)

    async def _append(self, driver: Driver, group: list[Fragment]) -> None:
        answers = await append(driver, BUFFER, group)
        outcomes = {each and each.outcome for each in answers}
        assert outcomes == {AdmissionOutcome.ADMITTED}, outcomes

    async def learn(self, driver: Driver, rank: int) -> None:
        rng = random.Random(f"{self.rng.random()}/learner {rank}")
        loop, crowd = asyncio.get_running_loop(), self.crowd
        # Together they ask for as much as comes.
        period_s = crowd.learners * BATCH / crowd.per_second
        number = 0
        while True:
            await asyncio.sleep(rng.uniform(0.5, 1.5) * period_s)
            number += 1
            asked_at = loop.time()
            fetch = partial(
                driver.fetch,
                Fetch(
                    buffer=BUFFER,
                    request_id=RequestId(f"{rank}-{number}"),
                    fragment_count=BATCH,
                    deadline_at=driver.core.clock.now() + 60.0,
                ),
            )
            grant = await self._call(rng, crowd.costs.batch_s, fetch)
            if isinstance(grant, FetchGranted):
                self.played.fetch_s.append(loop.time() - asked_at)
                self.played.delivered += BATCH
                await driver.core.call(ReleaseLease(BUFFER, grant.lease_id, ReleaseMode.CONSUMED))

    async def run(self) -> Played:
        crowd, played, loop = self.crowd, self.played, asyncio.get_running_loop()
        driver = Driver(
            BufferSet(self.rng, BufferConfig()),
            self.store,
            clock=SimulatedClock(loop),
            metrics=METRICS,
            limits=DriverLimits(),
        )
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(driver.run())]
            await driver.core.call(StartSession(BUFFER, SessionId("run")))
            tasks += [
                group.create_task(self.produce(driver, each)) for each in range(crowd.producers)
            ]
            tasks += [group.create_task(self.learn(driver, each)) for each in range(crowd.learners)]
            began = loop.time()
            if crowd.away_s:
                await asyncio.sleep(crowd.seconds / 3)
                self.door.die()
                await asyncio.sleep(crowd.away_s)
                self.door.is_away = False
                returned = loop.time()
            await asyncio.sleep(began + crowd.seconds - loop.time())
            for task in tasks:
                task.cancel()
        if crowd.away_s:
            played.recovered_s = max(
                due + took_s - returned for due, took_s in played.append_s if due < returned
            )
        played.busy = min(1.0, self.door.busy_s / crowd.seconds)
        played.waiting_peak, played.refused = self.door.waiting_peak, self.door.refused
        return played


def play(crowd: Crowd, seed: int = 0) -> Played:
    """Let a crowd work for its time, from a seed that decides everything."""

    async def main() -> Played:
        return await _World(crowd, seed).run()

    return run_simulated(main())


CASES = (
    *(Crowd(1_000, 64, group, 0.5) for group in (1, 8)),
    *(Crowd(10_000, 64, 1, load, seconds=300.0) for load in (0.5, 1.2)),
    *(Crowd(10_000, 64, 8, load, seconds=150.0) for load in (0.5, 0.8, 0.95, 1.2)),
    *(Crowd(10_000, 64, 8, 0.5, seconds=150.0, away_s=away_s) for away_s in (1.5, 30.0)),
)
"""Each lasts for some periods of its producers, or who got least says nothing."""


def table(results: Sequence[Played]) -> str:
    """The table of docs/studies/scaling.md."""
    lines = [
        "| producers, fragments a call | load | appended/s, fetched/s | append p50, p99 "
        "| fetch p50, p99 | least served, to the mean | at the door at most | refused there "
        "| memory | caught up |",
        f"|{' --- |' * 10}",
    ]
    for each in results:
        crowd = each.crowd
        away = f", away for {crowd.away_s:g} s" if crowd.away_s else ""
        append, fetch = (
            f"{get(50) * 1e3:,.0f}, {get(99) * 1e3:,.0f} ms"
            for get in (each.append_percentile, each.fetch_percentile)
        )
        lines.append(
            f"| {crowd.producers:,}, {crowd.group}{away} | {crowd.load:g} "
            f"| {each.rate:,.0f}, {each.fetch_rate:,.0f} | {append} | {fetch} "
            f"| {each.least_to_mean:.2f} | {each.waiting_peak:,} | {each.refused:,} "
            f"| {each.memory_bytes / 2**20:,.0f} MiB "
            f"| {f'{each.recovered_s:.1f} s' if crowd.away_s else ''} |"
        )
    return "\n".join(lines) + "\n"


def draw(results: Sequence[Played], path: Path) -> None:
    """Draw how long appends take, over time, by crowd."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart, panels = pyplot.subplots(1, 2, figsize=(11, 3.6), sharey=True)
    for each in results:
        crowd = each.crowd
        if crowd.producers < 10_000 or crowd.group == 1:
            continue
        began = min(due for due, _ in each.append_s)
        by_second = defaultdict(list)
        for due, took_s in each.append_s:
            by_second[int(due - began)].append(took_s)
        seconds = sorted(by_second)
        p99 = [_percentile(by_second[second], 99) for second in seconds]
        label = f"load {crowd.load:g}" + (f", away for {crowd.away_s:g} s" * bool(crowd.away_s))
        panels[1 if crowd.away_s else 0].plot(seconds, p99, label=label)
    titles = ("append p99, s: by load", "append p99, s: around a restart and a takeover")
    for panel, title in zip(panels, titles, strict=True):
        panel.set_yscale("log")
        panel.set_xlabel("simulated seconds; calls by when they were due")
        panel.set_title(title, loc="left", fontsize=9)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    chart.tight_layout()
    chart.savefig(path, dpi=120)
    pyplot.close(chart)


def main() -> None:
    """Play all cases; write crowd.md and crowd.png."""
    parser = argparse.ArgumentParser(prog="python tests/simulation/crowd.py", description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("bench/out"), help="a folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--costs", type=Path, help="scale.json of bench/scale.py")
    parser.add_argument("--publish", action="store_true", help="write docs/studies/scaling.md, too")
    parser.add_argument("--small", action="store_true", help="the two smallest cases alone")
    options = parser.parse_args()
    costs = Costs(**json.loads(options.costs.read_text())) if options.costs else Costs()
    crowds = [replace(crowd, costs=costs) for crowd in CASES]
    if options.small:
        crowds = crowds[:2]
    results = []
    with ProcessPoolExecutor() as processes:
        for played in processes.map(partial(play, seed=options.seed), crowds):
            results.append(played)
            sys.stdout.write(table([played]).splitlines()[-1] + "\n")
            sys.stdout.flush()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "crowd.md").write_text(table(results))
    draw(results, options.out / "crowd.png")
    sys.stdout.write(f"written: {options.out / 'crowd.md'}, {options.out / 'crowd.png'}\n")
    if options.publish:
        docs = Path(__file__).resolve().parents[2] / "docs"
        write_into(docs / "studies" / "scaling.md", f"{costs}\n\n{table(results)}", "make crowd")
        shutil.copy(options.out / "crowd.png", docs / "images")


if __name__ == "__main__":
    main()
