"""What the age of data does to learning: exact lag, in one process, with the project's own PPO.

Nothing is measured in time, and nothing depends on the machine's speed: version v of the policy is
trained on what version v - lag did, in environments that are stepped here (`bench.batched_envs`).
A run has reached its target once the mean return of the last 100 episodes is there, as
`breadbox learn --target-return` counts, or has not when its environment steps are used up.

    python -m bench.freshness run --seeds 10    # goes on where it was ended; hours of one core
    python -m bench.freshness page              # the tables and the picture, from what is written

`run` appends a row for each run to docs/images/freshness.csv; `page` writes the tables of
docs/studies/lag.md and docs/images/freshness.png from these rows alone.
"""

import csv
import math
import multiprocessing
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from numpy.typing import NDArray

from bench.batched_envs import ACROBOT, CARTPOLE, FORCE_CARTPOLE, BatchedEnv
from breadbox_learner.settings import PpoConfig
from breadbox_learner.training.batching import TrainingBatch
from breadbox_learner.training.ppo import PpoUpdater
from breadbox_policies import PolicyModule, make_policy

ENVS = 32
ROUNDS = 4
"""A batch is the last four fragments of each environment."""
WINDOW_EPISODES = 100
HIDDEN_SIZES = (32, 32)
EPOCHS = 2
MINIBATCH_STEPS = 512
"""What is not said here is as `breadbox learn` has it."""

LAGS = (0, 1, 2, 4, 8, 32)
USES = (1, 4)
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"staleness_weight_max": 0.0},
    "weight 2": {"staleness_weight_max": 2.0},
    "V-trace 1": {"advantages": "vtrace", "vtrace_rho_max": 1.0},
    "V-trace 2": {"advantages": "vtrace", "vtrace_rho_max": 2.0},
}


@dataclass(frozen=True, slots=True)
class Task:
    """An environment, and when it counts as learned."""

    env: BatchedEnv
    target: float
    """Mean return of the last 100 episodes."""
    fragment_steps: int
    """A batch, and so a version, is 128 times as many."""


TASKS = {
    "CartPole": Task(CARTPOLE, 195.0, 8),
    "Acrobot": Task(ACROBOT, -120.0, 4),
    "CartPole, any force": Task(FORCE_CARTPOLE, 195.0, 8),
}
STEPS_MAX = 80_000
"""Environment steps at which a run is given up, once its batch has been played."""


class Cell(NamedTuple):
    """A setting."""

    task: str
    lag: int
    """Versions between the policy that acts and the one that is trained first on what it did."""
    uses: int
    """Updates that train on each fragment, one after the other; each makes a version."""
    correction: str


COLUMNS = (*Cell._fields, "seed", "steps", "updates", "return_mean")
DOCS = Path(__file__).parents[1] / "docs"
DATA = DOCS / "images" / "freshness.csv"
PAGE = DOCS / "studies" / "lag.md"
BEGIN = "<!-- freshness: written by python -m bench.freshness page -->\n"
END = "<!-- end of freshness -->\n"


class Rollout:
    """Environments that one policy acts in, cut into fragments."""

    def __init__(self, env: BatchedEnv, fragment_steps: int, seed: int) -> None:
        self._env = env
        self._steps = fragment_steps
        self._rng = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._state = env.reset(self._rng, ENVS)
        self._first = np.ones(ENVS, dtype=np.bool_)
        self._length = np.zeros(ENVS, dtype=np.int64)
        self._return = np.zeros(ENVS)
        self._round = 0
        self.returns: deque[float] = deque(maxlen=WINDOW_EPISODES)

    @property
    def step_count(self) -> int:
        """Steps of all environments."""
        return self._round * ENVS * self._steps

    @property
    def mean_return(self) -> float:
        """Of the last 100 episodes; NaN before there are as many."""
        full = len(self.returns) == WINDOW_EPISODES
        return statistics.fmean(self.returns) if full else float("nan")

    @torch.no_grad()
    def collect(self, policy: PolicyModule) -> TrainingBatch:
        """Make one fragment of each environment."""
        rows: list[dict[str, torch.Tensor]] = []
        finals: list[tuple[int, int, NDArray[np.float32]]] = []
        for step in range(self._steps):
            obs = torch.from_numpy(self._env.observe(self._state))
            first = torch.from_numpy(self._first)
            acted = policy.act(obs, None, first, generator=self._generator)
            after, reward, terminated = self._env.step(self._state, acted.action.numpy())
            self._length += 1
            self._return += reward
            truncated = (self._length >= self._env.steps_max) & ~terminated
            rows.append(
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
            cut = np.flatnonzero(truncated)
            finals += zip(cut, [step] * len(cut), self._env.observe(after[cut]), strict=True)
            self._begin_again(after, terminated | truncated)
        self._round += 1
        finals.sort(key=lambda each: each[:2])
        columns: dict[str, Any] = {
            name: torch.stack([row[name] for row in rows], 1) for name in rows[0]
        }
        return TrainingBatch(
            **columns,
            episode_id=torch.zeros((ENVS, self._steps), dtype=torch.int64),
            next_obs=torch.from_numpy(self._env.observe(self._state)),
            final_row=np.array([row for row, _, _ in finals], dtype=np.intp),
            final_step=np.array([step for _, step, _ in finals], dtype=np.intp),
            final_obs=torch.from_numpy(np.stack([f for _, _, f in finals])) if finals else None,
            worker_ids=[str(number) for number in range(ENVS)],
            fragment_indices=[self._round] * ENVS,
            session_ids=[""] * ENVS,
            discontinuities=[False] * ENVS,
        )

    def _begin_again(self, after: NDArray[np.float64], ended: NDArray[np.bool_]) -> None:
        """Go on from the states *after* a step, anew where the episode has ended."""
        self._state, self._first = after, ended
        if ended.any():
            self.returns.extend(self._return[ended].tolist())
            self._state = np.where(ended[:, None], self._env.reset(self._rng, ENVS), after)
            self._length[ended] = 0
            self._return[ended] = 0.0


def joined(parts: Sequence[TrainingBatch]) -> TrainingBatch:
    """One batch of several rounds."""
    tensors = ("obs", "action", "log_prob", "reward", "terminated", "truncated", "first",
               "episode_id", "next_obs")  # fmt: skip
    lists = ("worker_ids", "fragment_indices", "session_ids", "discontinuities")
    columns: dict[str, Any] = {
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in tensors},
        **{name: [each for part in parts for each in getattr(part, name)] for name in lists},
    }
    finals = [part.final_obs for part in parts if part.final_obs is not None]
    return TrainingBatch(
        **columns,
        final_row=np.concatenate([part.final_row + ENVS * n for n, part in enumerate(parts)]),
        final_step=np.concatenate([part.final_step for part in parts]),
        final_obs=torch.cat(finals) if finals else None,
    )


def train(cell: Cell, seed: int, *, steps_max: int = STEPS_MAX) -> dict[str, Any]:
    """Run a setting under a seed, on one thread.

    Args:
        cell: What.
        seed: Of environments, actions, first weights and minibatches.
        steps_max: Environment steps at most.

    Returns:
        Its row: what it was, `steps` to the target ("" if it was not reached), and the `updates`
        and the mean return (`return_mean`) at its end.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = TASKS[cell.task]
    env = task.env
    rollout = Rollout(env, task.fragment_steps, seed)
    policy, acting = (
        make_policy("mlp", env.observation_space, env.action_space, hidden_sizes=HIDDEN_SIZES)
        for _ in range(2)
    )
    config = PpoConfig(
        epochs=EPOCHS,
        minibatch_fragments=MINIBATCH_STEPS // task.fragment_steps,
        **CORRECTIONS[cell.correction],
    )
    updater = PpoUpdater(policy, config, seed=seed)
    versions: deque[dict[str, torch.Tensor]] = deque(maxlen=cell.lag + 1)
    recent: deque[TrainingBatch] = deque(maxlen=ROUNDS)
    updates, reached = 0, False
    while rollout.step_count < steps_max:
        versions.append({name: each.clone() for name, each in policy.state_dict().items()})
        acting.load_state_dict(versions[0])
        recent.extend(rollout.collect(acting) for _ in range(ROUNDS // cell.uses))
        if reached := rollout.mean_return >= task.target:
            break
        if len(recent) == ROUNDS:  # As a fetch waits for a whole batch.
            updater.update(joined(recent), number=updates)
            updates += 1
    return {
        **cell._asdict(),
        "seed": seed,
        "steps": rollout.step_count if reached else "",
        "updates": updates,
        "return_mean": round(rollout.mean_return, 1),
    }


def cells() -> Iterator[Cell]:
    """Every setting. Fresh data used once are told once: there is nothing to correct in them."""
    for lag in LAGS:
        for uses in USES:
            for task in TASKS:
                for correction in CORRECTIONS:
                    if lag or uses > 1 or correction == "none":
                        yield Cell(task, lag, uses, correction)


class Spread(NamedTuple):
    """What the runs of one setting came to; steps are infinite for a run that did not arrive."""

    low: float
    median: float
    high: float
    """Quartiles of the environment steps."""
    reached: int
    runs: int


def read(path: Path) -> list[dict[str, str]]:
    """The rows that are written so far."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _key(row: Mapping[str, str]) -> tuple[Cell, int]:
    return Cell(row["task"], int(row["lag"]), int(row["uses"]), row["correction"]), int(row["seed"])


def spreads(rows: Iterable[Mapping[str, str]]) -> dict[Cell, Spread]:
    """Median and quartiles of every setting that has runs."""
    found: dict[Cell, list[float]] = {}
    for row in rows:
        found.setdefault(_key(row)[0], []).append(float(row["steps"] or "inf"))
    return {cell: _spread(sorted(steps)) for cell, steps in found.items()}


def _spread(steps: Sequence[float]) -> Spread:
    # A quartile is one of the runs: between a run that arrived and one that did not is nothing.
    low, median, high = (steps[math.ceil(share * len(steps)) - 1] for share in (0.25, 0.5, 0.75))
    return Spread(low, median, high, sum(math.isfinite(each) for each in steps), len(steps))


def tables(rows: Iterable[Mapping[str, str]]) -> str:
    """The page's tables, in Markdown: of all tasks together, then of each."""
    found = spreads(rows)
    seeds = min((each.runs for each in found.values()), default=0)
    parts = [
        f"Of {seeds} seeds of each of {len(TASKS)} tasks, these runs arrived:",
        _table(partial(_of_all, found)),
    ]
    for name, task in TASKS.items():
        parts += [
            f"**{name}** to {task.target:g}:",
            _table(partial(_of_task, found, name)),
        ]
    return "\n\n".join(parts) + "\n"


def arrived(
    found: Mapping[Cell, Spread],
    correction: str,
    *,
    lags: Sequence[int] = LAGS,
    uses: Sequence[int] = USES,
) -> tuple[int, int]:
    """How many runs with a correction reached their target, of how many, over all tasks."""
    chosen = [
        spread
        for cell, spread in found.items()
        if cell.correction == correction and cell.lag in lags and cell.uses in uses
    ]
    return sum(each.reached for each in chosen), sum(each.runs for each in chosen)


def _of_all(found: Mapping[Cell, Spread], lag: int, uses: int, correction: str) -> str:
    reached, runs = arrived(found, correction, lags=[lag], uses=[uses])
    return f"{reached} of {runs}" if runs else "-"


def _of_task(found: Mapping[Cell, Spread], task: str, lag: int, uses: int, correction: str) -> str:
    return _told(found.get(Cell(task, lag, uses, correction)))


def _table(told: Callable[[int, int, str], str]) -> str:
    lines = [
        f"| lag | uses | {' | '.join(CORRECTIONS)} |",
        f"| --- | --- |{' --- |' * len(CORRECTIONS)}",
    ]
    for uses in USES:
        for lag in LAGS:
            texts = [told(lag, uses, each) for each in CORRECTIONS]
            lines.append(f"| {lag} | {uses} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _told(spread: Spread | None) -> str:
    """A setting in a few characters: thousands of steps."""
    if spread is None:
        return "-"
    low, median, high = (
        f"{each / 1000:.0f}" if math.isfinite(each) else "never" for each in spread[:3]
    )
    few = "" if spread.reached == spread.runs else f", {spread.reached} of {spread.runs}"
    return f"never{few}" if not spread.reached else f"{median} ({low}-{high}{few})"


def draw(rows: Iterable[Mapping[str, str]], path: Path) -> None:
    """Steps to the target over the lag: a panel for each task and number of uses."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = spreads(rows)
    figure, panels = plt.subplots(
        len(USES), len(TASKS), figsize=(15, 8), layout="constrained", sharex=True, squeeze=False
    )
    for uses, line in zip(USES, panels, strict=True):
        for name, axes in zip(TASKS, line, strict=True):
            for number, correction in enumerate(CORRECTIONS):
                _draw_line(axes, found, (name, uses, correction), number)
            axes.axhline(STEPS_MAX, linestyle="--", color="grey", linewidth=1)
            axes.set(title=f"{name} to {TASKS[name].target:g}, uses {uses}", ylim=(0, None))
            axes.set_xticks(range(len(LAGS)), [str(lag) for lag in LAGS])
            axes.grid(visible=True, alpha=0.3)
    panels[0][0].legend(frameon=False)
    for axes in panels[-1]:
        axes.set_xlabel("lag in versions")
    for axes in panels[:, 0]:
        axes.set_ylabel("environment steps, median and quartiles")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _draw_line(
    axes: Any, found: Mapping[Cell, Spread], line: tuple[str, int, str], number: int
) -> None:
    """One correction over the lags; runs that did not arrive lie on the dashed line, hollow."""
    name, uses, correction = line
    color, xs, spread = f"C{number}", [], []
    for at, lag in enumerate(LAGS):
        cell = found.get(Cell(name, lag, uses, correction))
        if cell is not None:
            xs.append(at + 0.12 * (number - 1.5))
            spread.append([min(each, STEPS_MAX) for each in cell[:3]])
    if not spread:
        return
    lows, medians, highs = np.array(spread).T
    axes.errorbar(
        xs, medians, yerr=(medians - lows, highs - medians), color=color, capsize=3, linewidth=1.2,
        label=correction,
    )  # fmt: skip
    arrived = medians < STEPS_MAX
    axes.scatter(xs, medians, s=28, edgecolors=color, color=[color if a else "w" for a in arrived])


def with_tables(text: str, rows: Iterable[Mapping[str, str]]) -> str:
    """A document with the tables of these rows between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(rows)}\n{END}{after}"


def _train(steps_max: int, planned: tuple[Cell, int]) -> dict[str, Any]:
    return train(*planned, steps_max=steps_max)


@click.group()
def main() -> None:
    """Measure what the age of data does to learning."""


@main.command("run")
@click.option("--seeds", default=10, show_default=True, type=click.IntRange(1))
@click.option("--processes", default=2, show_default=True, type=click.IntRange(1))
@click.option("--steps-max", default=STEPS_MAX, show_default=True, type=click.IntRange(1))
@click.option("--out", default=DATA, type=click.Path(path_type=Path))
def run_command(seeds: int, processes: int, steps_max: int, out: Path) -> None:
    """Run what is not written yet, seed by seed, so that every setting has as many runs."""
    done = {_key(row) for row in read(out)}
    planned = [(cell, seed) for seed in range(seeds) for cell in cells()]
    planned = [each for each in planned if each not in done]
    is_new = not out.exists()
    pool = multiprocessing.get_context("spawn").Pool(processes)
    with out.open("a", newline="") as file, pool:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for row in pool.imap_unordered(partial(_train, steps_max), planned):
            writer.writerow(row)
            file.flush()


@main.command("page")
@click.option("--data", default=DATA, type=click.Path(path_type=Path, exists=True))
def page_command(data: Path) -> None:
    """Write the tables and the picture from the rows; no run is made."""
    rows = read(data)
    PAGE.write_text(with_tables(PAGE.read_text(), rows))
    draw(rows, DATA.with_suffix(".png"))


if __name__ == "__main__":
    main()
