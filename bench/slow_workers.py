"""Which environments are trained on beside faster ones: the real core and fragmenter, no clock.

Environments step in virtual time, a learner publishes a version for each batch as soon as it is
there, and every environment acts with a new version from its next step on. Nothing depends on the
machine's speed.

    python -m bench.slow_workers    # minutes of one core; writes the table of docs/slow-workers.md
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import click
import numpy as np

from bench.report import write_into
from breadbox.model.fragment import Fragment as MadeFragment
from breadbox.writing.fragmenter import Fragmenter, Step
from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import DAY_S, BufferConfig, SchemaPolicy, StalePolicy
from breadbox_server.core.model.events import FetchGranted, StepsEnd, StepsEnded, TicketsTaken
from breadbox_server.core.model.ids import (
    CallerId,
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
    GiveBackTicket,
    Payload,
    PublishModel,
    ReleaseLease,
    ReleaseMode,
    StartSession,
    TakeTickets,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "slow-workers.md"
COMMAND = "python -m bench.slow_workers"
SLOW_COUNT = 8
BATCH_STEPS = 64 * 32
SEED_COUNT = 3
OBS = np.zeros(1, np.float32)
ACTION = np.zeros((), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Fast environments beside `SLOW_COUNT` slow ones."""

    fast_count: int = 64
    slowness: float = 5.0
    """Time of a slow step, in fast ones."""
    staleness_max: int = 2
    fragment_steps: int = 32
    ragged: bool = False
    stale: StalePolicy = StalePolicy.EVICT
    """With WAIT, environments hold a ticket for the fragment that they fill, as with --pace."""

    @property
    def batch_fragments(self) -> int:
        """Fragments that the learner takes for each version."""
        return BATCH_STEPS // self.fragment_steps


CASES = (
    *[Case(fast_count=each) for each in (8, 32, 64)],
    *[Case(slowness=each) for each in (1.0, 2.0, 3.0)],
    *[Case(staleness_max=each) for each in (1, 4, 8)],
    Case(fragment_steps=8),
    Case(ragged=True),
    Case(stale=StalePolicy.KEEP),
    *[Case(stale=StalePolicy.WAIT, staleness_max=each) for each in (2, 4, 8)],
)
LEAD_VERSIONS = 2
TICKET_S = 1e9


class _World:
    def __init__(self, case: Case, seed: int) -> None:
        self._case = case
        self._rng = random.Random(seed)
        schema = SchemaPolicy.RAGGED if case.ragged else SchemaPolicy.ONE
        self._is_paced = case.stale is StalePolicy.WAIT
        config = BufferConfig(
            staleness_max=case.staleness_max,
            schema=schema,
            stale=case.stale,
            groups_per_version=case.batch_fragments if self._is_paced else 0,
            lead_versions=LEAD_VERSIONS if self._is_paced else 0,
        )
        self._core = BufferSet(random.Random(seed), config)
        self._core.apply(StartSession(DEFAULT_BUFFER, SessionId("s"), ModelVersion(0)), now=0.0)
        self._now = 0.0
        self._version = 0
        self._numbers = count()
        self.update_count = 0
        self._tickets: dict[int, WorkerId] = {}
        """By environment: of the fragment that it fills."""
        self._asking: dict[CallerId, int] = {}
        """Environments that wait for a ticket."""
        self._goes_on: list[int] = []
        """Environments that have got one."""
        self.trained = [0, 0]
        """Steps trained on, of the fast and the slow."""
        self.ended = [0, 0]
        """Steps with an end, of the fast and the slow."""
        self._fragmenters = [
            Fragmenter(
                worker_id=f"{number}",
                step_count=case.fragment_steps,
                staleness_max=None if case.stale is StalePolicy.KEEP else case.staleness_max,
            )
            for number in range(case.fast_count + SLOW_COUNT)
        ]
        for each in self._fragmenters:
            each.is_ragged = case.ragged
        self._ask()

    def run(self, duration: float) -> None:
        """Let time pass; one unit is the mean of a fast step."""
        steps = [(self._rng.random(), number) for number in range(len(self._fragmenters))]
        heapq.heapify(steps)
        while steps and steps[0][0] < duration:
            self._now, number = heapq.heappop(steps)
            if not self._is_paced or self._has_ticket(number):
                mean = self._case.slowness if self._is_slow(number) else 1.0
                heapq.heappush(steps, (self._now + mean * self._rng.uniform(0.8, 1.2), number))
                self._step(self._fragmenters[number], number)
            for each in self._goes_on:
                heapq.heappush(steps, (self._now, each))
            self._goes_on.clear()

    def _has_ticket(self, number: int) -> bool:
        """Return whether an environment may step; else it asks for a ticket, and waits."""
        fragmenter = self._fragmenters[number]
        if fragmenter.answered_count == self._case.fragment_steps:
            self._append(fragmenter.cut(OBS), number)
        if number not in self._tickets:
            assert number not in self._asking.values(), "asks once"
            request = RequestId(f"{next(self._numbers)}")
            take = TakeTickets(
                DEFAULT_BUFFER,
                request_id=request,
                ticket_count=1,
                deadline_at=self._now + TICKET_S,
                lease_s=DAY_S,
            )
            self._asking[self._core.apply(take, now=self._now)] = number
            self._follow()
            if number in self._goes_on:
                self._goes_on.remove(number)
        return number in self._tickets

    def _is_slow(self, number: int) -> bool:
        return number >= self._case.fast_count

    def _step(self, fragmenter: Fragmenter, number: int) -> None:
        dropped = fragmenter.dropped_step_count
        made = fragmenter.push(
            Step(
                session_id="s",
                model_version=self._version,
                obs=OBS,
                action=ACTION,
                first=False,
                episode_id=0,
            )
        )
        fragmenter.answer(0.0, terminated=False, truncated=False)
        self.ended[self._is_slow(number)] += fragmenter.dropped_step_count - dropped
        self._append(made, number)

    def _append(self, made: MadeFragment | None, number: int) -> None:
        if made is not None:
            described = Fragment(
                WorkerId(made.worker_id),
                FragmentIndex(made.fragment_index),
                SessionId("s"),
                ModelVersion(made.model_version_min),
                ModelVersion(made.model_version_max),
                Payload(PayloadId(f"{next(self._numbers):032x}"), 1),
                made.step_count,
                made.discontinuity,
            )
            self._core.apply(AppendFragments(DEFAULT_BUFFER, (described,)), now=self._now)
            if (ticket := self._tickets.pop(number, None)) is not None:
                self._core.apply(GiveBackTicket(DEFAULT_BUFFER, ticket), now=self._now)
            self._follow()

    def _ask(self) -> None:
        batch = self._case.batch_fragments
        request = RequestId(f"{next(self._numbers)}")
        self._core.apply(
            Fetch(
                DEFAULT_BUFFER,
                request_id=request,
                fragment_count=batch,
                deadline_at=self._now + 1e9,
            ),
            now=self._now,
        )

    def _follow(self) -> None:
        """Count what ended, and publish a version for a batch."""
        for event in self._core.take_events():
            if isinstance(event, StepsEnded):
                for each in event.fragments:
                    is_slow = self._is_slow(int(each.worker_id))
                    self.ended[is_slow] += each.step_count
                    self.trained[is_slow] += each.step_count * (event.end is StepsEnd.TRAINED)
            elif isinstance(event, TicketsTaken):
                number = self._asking.pop(event.caller_id)
                (self._tickets[number],) = event.groups
                self._goes_on.append(number)
            elif isinstance(event, FetchGranted):
                mode = ReleaseMode.CONSUMED
                self._core.apply(ReleaseLease(DEFAULT_BUFFER, event.lease_id, mode), now=self._now)
                self._version += 1
                self.update_count += 1
                version = ModelVersion(self._version)
                publish = PublishModel(DEFAULT_BUFFER, SessionId("s"), version)
                self._core.apply(publish, now=self._now)
                self._ask()
                self._follow()


def shares(case: Case, seed: int, duration: float = 1600.0) -> tuple[float, float, float]:
    """Return the shares of the fast and the slow steps that are trained on, and the updates."""
    world = _World(case, seed)
    world.run(duration)
    fast, slow = [
        trained / max(1, ended) for trained, ended in zip(world.trained, world.ended, strict=True)
    ]
    return fast, slow, world.update_count


def table(rows: Sequence[tuple[Case, Sequence[tuple[float, float, float]]]]) -> str:
    """Return the page's table: the range over the seeds."""
    lines = [
        "| fast environments | a slow step takes | `staleness_max` | `stale` | fragments "
        "| fast steps trained on | slow steps trained on | updates |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case, found in rows:
        cut = f"{case.fragment_steps} steps" + (", `ragged`" if case.ragged else "")
        stale = case.stale.value + (", `--pace`" if case.stale is StalePolicy.WAIT else "")
        ranges = [_range([each[place] for each in found]) for place in (0, 1)]
        updates = _span([round(each[2]) for each in found])
        lines.append(
            f"| {case.fast_count} | {case.slowness:g} times as long | {case.staleness_max} "
            f"| {stale} | {cut} | {ranges[0]} | {ranges[1]} | {updates} |"
        )
    return "\n".join(lines)


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _range(shares: Sequence[float]) -> str:
    low, high = (round(100 * each) for each in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


@click.command()
@click.option("--seeds", default=SEED_COUNT, help="Seeds of each row.")
@click.option("--out", type=click.Path(path_type=Path), default=PAGE, help="Page to write into.")
def main(seeds: int, out: Path) -> None:
    """Play each case, and write the table into the page."""
    rows = [(case, [shares(case, seed) for seed in range(seeds)]) for case in CASES]
    write_into(out, table(rows), COMMAND)


if __name__ == "__main__":
    main()
