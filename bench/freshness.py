"""What the age of data does to learning, and what it costs to do without old data.

Runs in one process each, with the project's own PPO. Nothing is measured in time, and nothing
depends on the machine's speed. Every run begins with a policy that was trained on fresh data, the
same one for all runs of a task and seed, and goes on for a fixed number of environment steps in one
of two worlds:

- `lag`: all environments are equally fast, and version v trains on what version v - lag did.
- `limit`: beside 64 fast environments, 320 slow ones, in groups whose steps take 2 to 12 times as
  long. Each acts with the newest version from its next step on. Steps that would be staler than
  `staleness_max` are lost, as in a buffer.

    python -m bench.freshness         # goes on where it was ended
    python -m bench.freshness_page    # tables and picture of docs/studies/lag.md, from the rows

Each run appends a row to docs/images/freshness.csv.
"""

import copy
import csv
import math
import multiprocessing
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from numpy.typing import NDArray

from bench.batched_envs import ACROBOT, CARTPOLE, PENDULUM, RECALL, BatchedEnv
from breadbox.model.trees import map_tree
from breadbox_learner.settings import PpoConfig
from breadbox_learner.training.batching import TrainingBatch
from breadbox_learner.training.ppo import PpoUpdater
from breadbox_policies import PolicyModule, make_policy

ENVS = 64
"""Environments that step together."""
FRAGMENT_STEPS = 8
BATCH_STEPS = 1024
MINIBATCH_STEPS = 256
"""Everything that is not said here is as `breadbox learn` has it."""
SLOWNESS = (2, 3, 5, 8, 12)
"""Fast steps that a step takes, for each group of slow environments."""
BINS = 20
"""Parts of a run that its returns are told of."""

LAGS = (0, 2, 8)
LIMITS = (0, 1, 2, 4, 8)
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"staleness_weight_max": 0.0},
    "weight 1": {"staleness_weight_max": 1.0},
    "weight 2": {"staleness_weight_max": 2.0},
    "V-trace 1": {"advantages": "vtrace", "vtrace_rho_max": 1.0},
    "V-trace 2": {"advantages": "vtrace", "vtrace_rho_max": 2.0},
}
DEFAULT = "weight 2"
SEEDS = tuple(range(10))
"""Those that judge."""
TUNING_SEEDS = (100, 101)
LRS = (1e-3, 2.5e-3, 6e-3)
TUNING_LAG = 8


@dataclass(frozen=True, slots=True)
class Task:
    """An environment, and what counts as good in it."""

    env: BatchedEnv
    target: float
    low: float
    """Return that scores 0: about that of a random policy."""
    high: float
    """Return that scores 1: the best, or near to it."""
    warm_up: int
    """Updates on fresh data before a run begins."""
    updates: int
    """Length of a run."""
    policy: str = "mlp"
    options: Mapping[str, Any] = field(default_factory=lambda: {"hidden_sizes": (32, 32)})
    ppo: Mapping[str, Any] = field(default_factory=dict)
    staggered: bool = True
    """Environments begin in the middle of an episode, each elsewhere, so that episodes end one by
    one. Not where all are equally long and a policy with memory learns faster side by side."""


# All rows were made with rewards as they are.
PENDULUM_PPO = {"discount": 0.9, "normalize_rewards": False}
TASKS = {
    "CartPole": Task(CARTPOLE, 195.0, 20.0, 500.0, 20, 40),
    "Acrobot": Task(ACROBOT, -120.0, -500.0, -80.0, 20, 40),
    "Pendulum": Task(PENDULUM, -300.0, -1200.0, -150.0, 60, 40, ppo=PENDULUM_PPO),
    "Recall": Task(
        RECALL,
        25.0,
        32 / 3,
        32.0,
        10,
        40,
        policy="lstm",
        options={"feature_count": 16, "memory_count": 16},
        ppo={"discount": 0.5},
        staggered=False,
    ),
}


class Cell(NamedTuple):
    """A setting in one of the two worlds."""

    task: str
    lag: int | None
    """Versions between the policy that acts and the one that trains on it; or None."""
    limit: int | None
    """`staleness_max` beside slow environments; or None."""
    correction: str

    @property
    def tuned_as(self) -> "Cell":
        """The setting whose step size this one has."""
        return self._replace(lag=TUNING_LAG) if self.lag else self


class Run(NamedTuple):
    """One training."""

    cell: Cell
    lr: float
    seed: int


COLUMNS = (*Cell._fields, "lr", "seed", "lost", "staleness", "returns")
DOCS = Path(__file__).parents[1] / "docs"
DATA = DOCS / "images" / "freshness.csv"


class Fragments(NamedTuple):
    """One fragment of each environment of a group, and the version of their first steps."""

    batch: TrainingBatch
    version: int


class Group:
    """Environments that step together, cut into fragments."""

    def __init__(self, task: Task, name: str, seed: tuple[int, ...]) -> None:
        self._env = env = task.env
        self._name = name
        self._rng = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(int(self._rng.integers(2**62)))
        self._state = env.reset(self._rng, ENVS)
        self._memory: Any = None
        self._first = np.ones(ENVS, dtype=np.bool_)
        self._length = self._rng.integers(0, env.steps_max if task.staggered else 1, ENVS)
        # What began in the middle is not counted.
        self._return = np.where(self._length > 0, np.nan, 0.0)
        self._index = 0
        self._is_torn = False
        self._version = 0
        self._rows: list[dict[str, Any]] = []
        self._finals: list[tuple[int, int, NDArray[np.float32]]] = []

    @torch.no_grad()
    def step(self, policy: PolicyModule, version: int) -> tuple[Fragments | None, list[float]]:
        """Step once; return fragments if they are full now, and the returns of ended episodes."""
        if not self._rows:
            self._version, self._finals = version, []
            if self._memory is None:
                self._memory = policy.initial_state(ENVS)
            self._in_state = self._memory
        obs = torch.from_numpy(self._env.observe(self._state))
        first = torch.from_numpy(self._first)
        acted = policy.act(obs, self._memory, first, generator=self._generator)
        self._memory = acted.state
        after, reward, terminated = self._env.step(self._state, acted.action.numpy())
        self._length += 1
        self._return += reward
        truncated = (self._length >= self._env.steps_max) & ~terminated
        cut = np.flatnonzero(truncated)
        step = [len(self._rows)] * len(cut)
        self._finals += zip(cut, step, self._env.observe(after[cut]), strict=True)
        self._rows.append(
            {
                "obs": obs,
                "action": acted.action,
                "log_prob": acted.log_prob,
                "reward": torch.from_numpy(reward.astype(np.float32)),
                "terminated": torch.from_numpy(terminated),
                "truncated": torch.from_numpy(truncated),
                "first": first,
            }
        )
        returns = self._begin_again(after, terminated | truncated)
        return (self._cut() if len(self._rows) == FRAGMENT_STEPS else None), returns

    def drop(self, oldest: int) -> int:
        """Give open fragments up if they began before version *oldest*; return their steps."""
        if not self._rows or self._version >= oldest:
            return 0
        count = len(self._rows) * ENVS
        self._rows, self._is_torn = [], True
        return count

    def _begin_again(self, after: NDArray[np.float64], ended: NDArray[np.bool_]) -> list[float]:
        """Go on from the states *after* a step, anew where the episode has ended."""
        self._state, self._first = after, ended
        if not ended.any():
            return []
        returns = self._return[ended]
        self._state = np.where(ended[:, None], self._env.reset(self._rng, ENVS), after)
        self._length[ended] = 0
        self._return[ended] = 0.0
        counted: list[float] = returns[~np.isnan(returns)].tolist()
        return counted

    def _cut(self) -> Fragments:
        columns: dict[str, Any] = {
            name: torch.stack([row[name] for row in self._rows], 1) for name in self._rows[0]
        }
        finals = sorted(self._finals, key=lambda each: each[:2])
        batch = TrainingBatch(
            **columns,
            episode_id=torch.zeros((ENVS, FRAGMENT_STEPS), dtype=torch.int64),
            next_obs=torch.from_numpy(self._env.observe(self._state)),
            in_state=self._in_state,
            final_row=np.array([row for row, _, _ in finals], dtype=np.intp),
            final_step=np.array([step for _, step, _ in finals], dtype=np.intp),
            final_obs=torch.from_numpy(np.stack([f for _, _, f in finals])) if finals else None,
            worker_ids=[f"{self._name}{number}" for number in range(ENVS)],
            fragment_indices=[self._index] * ENVS,
            session_ids=[""] * ENVS,
            discontinuities=[self._is_torn] * ENVS,
        )
        self._index += 1
        self._rows, self._is_torn = [], False
        return Fragments(batch, self._version)


def joined(parts: Sequence[TrainingBatch]) -> TrainingBatch:
    """One batch of the fragments of several."""
    tensors = ("obs", "action", "log_prob", "reward", "terminated", "truncated", "first",
               "episode_id", "next_obs", "in_state")  # fmt: skip
    lists = ("worker_ids", "fragment_indices", "session_ids", "discontinuities")
    columns: dict[str, Any] = {
        **{
            name: map_tree(lambda *leaves: torch.cat(leaves), *[getattr(p, name) for p in parts])
            for name in tensors
        },
        **{name: [each for part in parts for each in getattr(part, name)] for name in lists},
    }
    finals = [part.final_obs for part in parts if part.final_obs is not None]
    return TrainingBatch(
        **columns,
        final_row=np.concatenate([part.final_row + ENVS * n for n, part in enumerate(parts)]),
        final_step=np.concatenate([part.final_step for part in parts]),
        final_obs=torch.cat(finals) if finals else None,
    )


class Learner:
    """A policy in training, its versions, and what the environments did until now."""

    def __init__(self, task: Task, seed: int) -> None:
        torch.manual_seed(seed)
        env = task.env
        self.task, self.seed, self.version = task, seed, 0
        self.policy, self._acting = (
            make_policy(task.policy, env.observation_space, env.action_space, **task.options)
            for _ in range(2)
        )
        self.updater = self._updater({})
        self.fast = Group(task, "fast", (seed, 0))
        self.slow: list[Group] = []
        self.acted = self.lost = 0
        self.staleness: list[int] = []
        self._full: deque[Fragments] = deque()
        self._versions: deque[dict[str, torch.Tensor]] = deque()
        self._follow(0)

    def _updater(self, options: Mapping[str, Any]) -> PpoUpdater:
        fragments = MINIBATCH_STEPS // FRAGMENT_STEPS
        config = PpoConfig(minibatch_fragments=fragments, **self.task.ppo, **options)
        return PpoUpdater(self.policy, config, seed=self.seed)

    def begin(self, cell: Cell, lr: float) -> None:
        """Enter a setting's world."""
        state = self.updater.optimizer.state_dict()
        self.updater = self._updater({"lr": lr, **CORRECTIONS[cell.correction]})
        self.updater.optimizer.load_state_dict(state)
        if cell.limit is not None:
            self.slow = [
                Group(self.task, f"slow{number}-", (self.seed, 1 + number))
                for number in range(len(SLOWNESS))
            ]
        self.acted = self.lost = 0
        self.staleness = []

    def tick(self, tick: int) -> list[float]:
        """Have the environments step whose turn it is; return what fast ones' episodes came to."""
        groups = [self.fast]
        for number, group in enumerate(self.slow):
            if (tick + number) % SLOWNESS[number] == 0:
                groups.append(group)
        ended: list[float] = []
        for group in groups:
            full, returns = group.step(self._acting, self.version)
            self.acted += ENVS
            self._full.extend([] if full is None else [full])
            if group is self.fast:
                ended = returns
        return ended

    def train(self, lag: int, limit: float) -> bool:
        """Train on a batch if there is one, and publish a version."""
        count = BATCH_STEPS // (ENVS * FRAGMENT_STEPS)
        if len(self._full) < count:
            return False
        chosen = [self._full.popleft() for _ in range(count)]
        self.staleness += [self.version - each.version for each in chosen]
        self.updater.update(joined([each.batch for each in chosen]), number=self.version)
        self.version += 1
        self._follow(lag)
        oldest = self.version - limit
        kept = [each for each in self._full if each.version >= oldest]
        self.lost += (len(self._full) - len(kept)) * ENVS * FRAGMENT_STEPS
        self._full = deque(kept)
        if math.isfinite(limit):
            self.lost += sum(group.drop(int(oldest)) for group in [self.fast, *self.slow])
        return True

    def skip(self) -> None:
        """Throw full fragments away."""
        self._full.clear()

    def _follow(self, lag: int) -> None:
        """Have the environments act with the version of *lag* versions ago."""
        now = {name: each.clone() for name, each in self.policy.state_dict().items()}
        self._versions.append(now)
        while len(self._versions) > lag + 1:
            self._versions.popleft()
        self._acting.load_state_dict(self._versions[0])


@lru_cache(maxsize=4)
def trained(task: str, seed: int) -> Learner:
    """Return a learner after the fresh part that all runs of a task and seed begin with."""
    learner = Learner(TASKS[task], seed)
    tick = 0
    while learner.version < TASKS[task].warm_up:
        learner.tick(tick)
        learner.train(0, math.inf)
        tick += 1
    return learner


def train(run: Run, *, updates: int | None = None) -> dict[str, Any]:
    """Make a run, on one thread.

    With a lag, the policy that acts is `lag` versions behind the one that is trained; its returns
    count for itself, so environments act for as long as it takes to see the last version.

    Args:
        run: What.
        updates: Its length, if it is not the task's.

    Returns:
        Its row: the share of steps `lost` as stale, the mean `staleness` of the others when they
        were trained on, and the mean return in each of `BINS` equal parts.
    """
    torch.set_num_threads(1)
    cell = run.cell
    learner = copy.deepcopy(trained(cell.task, run.seed))
    learner.begin(cell, run.lr)
    updates = updates or TASKS[cell.task].updates
    lag = cell.lag or 0
    limit = math.inf if cell.limit is None else cell.limit
    last = learner.version + updates
    steps, delay = updates * BATCH_STEPS, lag * BATCH_STEPS
    bins: list[list[float]] = [[] for _ in range(BINS)]
    tick = 0
    while learner.acted - delay < steps:
        place = BINS * (learner.acted - delay) // steps
        ended = learner.tick(tick)
        tick += 1
        if place >= 0:
            bins[place] += ended
        if learner.version < last:
            learner.train(lag, limit)
        else:
            learner.skip()
    return {
        **cell._asdict(),
        "lr": run.lr,
        "seed": run.seed,
        "lost": f"{learner.lost / learner.acted:.3f}",
        "staleness": f"{lag + statistics.fmean(learner.staleness or [0]):.2f}",
        "returns": " ".join(f"{each:.4g}" for each in means(bins)),
    }


def means(bins: Iterable[Sequence[float]]) -> list[float]:
    """The mean of each part; where no episode ended, that of the part before, or of the next."""
    means: list[float] = []
    for each in bins:
        means.append(statistics.fmean(each) if each else [math.nan, *means][-1])
    known = next((each for each in means if not math.isnan(each)), math.nan)
    return [known if math.isnan(each) else each for each in means]


def cells(task: str, world: str) -> list[Cell]:
    """The settings of a task in one world. Without lag there is nothing to correct."""
    if world == "limit":
        return [Cell(task, None, limit, DEFAULT) for limit in LIMITS]
    lagged = [Cell(task, lag, None, each) for lag in LAGS if lag for each in CORRECTIONS]
    return [Cell(task, 0, None, "none"), *lagged]


def read(path: Path) -> dict[Run, dict[str, str]]:
    """The rows that are written so far."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {_run_of(row): row for row in csv.DictReader(file)}


def _run_of(row: Mapping[str, str]) -> Run:
    lag, limit = (int(row[name]) if row[name] else None for name in ("lag", "limit"))
    cell = Cell(row["task"], lag, limit, row["correction"])
    return Run(cell, float(row["lr"]), int(row["seed"]))


def returns_of(row: Mapping[str, Any]) -> list[float]:
    """The mean return in each part of a run."""
    return [float(each) for each in row["returns"].split()]


def at_end(row: Mapping[str, Any]) -> float:
    """The mean return of the last tenth."""
    return statistics.fmean(returns_of(row)[-BINS // 10 :])


def lr_of(rows: Mapping[Run, Mapping[str, Any]], cell: Cell) -> float:
    """The step size that ended best under the seeds that do not judge."""
    return max(
        LRS,
        key=lambda lr: statistics.fmean(
            at_end(rows[Run(cell.tuned_as, lr, seed)]) for seed in TUNING_SEEDS
        ),
    )


SLICES = tuple((task, world) for task in TASKS for world in ("lag", "limit"))


def tuning(task: str, world: str) -> list[Run]:
    """The runs that choose the step sizes of a slice."""
    tuned = dict.fromkeys(cell.tuned_as for cell in cells(task, world))
    return [Run(cell, lr, seed) for seed in TUNING_SEEDS for cell in tuned for lr in LRS]


def judging(
    rows: Mapping[Run, Mapping[str, Any]], task: str, world: str, seeds: Sequence[int] = SEEDS
) -> list[Run]:
    """The runs that a slice is judged by, once its step sizes are known."""
    lrs = {cell: lr_of(rows, cell) for cell in cells(task, world)}
    return [Run(cell, lr, seed) for seed in seeds for cell, lr in lrs.items()]


@click.command()
@click.option("--tasks", multiple=True, type=click.Choice(list(TASKS)), help="Default: all.")
@click.option("--seeds", default=len(SEEDS), show_default=True, type=click.IntRange(1))
@click.option("--processes", default=2, show_default=True, type=click.IntRange(1))
@click.option("--updates", type=click.IntRange(1), help="Length of a run; default: the task's.")
@click.option("--out", default=DATA, type=click.Path(path_type=Path))
def main(
    tasks: tuple[str, ...], seeds: int, processes: int, updates: int | None, out: Path
) -> None:
    """Make the runs that are not written yet, slice by slice."""
    rows: dict[Run, dict[str, Any]] = dict(read(out))
    is_new = not out.exists()
    pool = multiprocessing.get_context("spawn").Pool(processes)
    with out.open("a", newline="") as file, pool:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for task, world in SLICES:
            if tasks and task not in tasks:
                continue
            for plan in (tuning, partial(judging, rows, seeds=range(seeds))):
                planned = [run for run in plan(task, world) if run not in rows]
                made = pool.imap(partial(train, updates=updates), planned)
                for run, row in zip(planned, made, strict=True):
                    writer.writerow(row)
                    file.flush()
                    rows[run] = row


if __name__ == "__main__":
    main()
