"""The reference PPO, by the whole service, beside Stable-Baselines3's and CleanRL's.

Server, one worker and the learner run by turns (`--deterministic`), so that nothing depends on the
machine's speed. Each side gets the same environment steps, once with its own defaults and once
with the same settings for all. The environments of each side tell the returns of their episodes.

    python -m bench.beside_learners [--cleanrl FOLDER]    # goes on where it was ended
    python -m bench.beside_learners --page                # the table of docs/studies/learning.md

*FOLDER* has CleanRL's own `ppo.py` and `ppo_continuous_action.py`, and in `site` the Gymnasium
that they ask for (`pip install --target FOLDER/site gymnasium==0.29.1 tyro numpy==1.26.4`).
LunarLander needs `pip install box2d==2.3.10 pygame`, in that folder too.
Each training appends a row to docs/images/beside-learners.csv. Where two cases give a side the same
settings, a row of one is a row of the other.
"""

import csv
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

import click
import gymnasium
import numpy as np

from bench.freshness import at_end, means, returns_of
from bench.freshness_page import holm, interval
from bench.local_run import LocalRun, run_locally
from bench.report import write_into

DOCS = Path(__file__).parents[1] / "docs"
DATA = DOCS / "images" / "beside-learners.csv"
PAGE = DOCS / "studies" / "learning.md"
COMMAND = "python -m bench.beside_learners --page"
SEEDS = 10
"""Seeds from which on two sides are compared."""
BINS = 20
"""Parts of a training, by environment steps; a row has the mean return of each."""
LIMIT_S = 3600.0
SIGNIFICANT = 0.05
OURS = "Breadbox"


class Case(NamedTuple):
    """A task, and the settings of each side; all others are the side's own defaults."""

    env_id: str
    settings: str
    steps: int
    rollout: Sequence[str]
    learn: Sequence[str]
    sb3: Mapping[str, Any]
    cleanrl: Sequence[str]
    batch_steps: int
    """Steps of one of our batches."""
    env_count: int
    """Environments of Stable-Baselines3."""


_SHAPE = {
    # Four environments, as many fragments of a minibatch's length as make up a batch.
    "CartPole-v1": ("--fragment-steps", "128", "--fragments-per-batch", "4"),
    "Pendulum-v1": ("--fragment-steps", "64", "--fragments-per-batch", "64"),
    "LunarLanderContinuous-v3": ("--fragment-steps", "64", "--fragments-per-batch", "32"),
}
_CLEANRL_IDS = {"LunarLanderContinuous-v3": "LunarLanderContinuous-v2"}
"""The same physics under the name that an older Gymnasium has for it."""
CASES = (
    Case("CartPole-v1", "own", 49_152, ("--envs-per-process", "8"), (), {}, (), 2048, 1),
    Case(
        "Pendulum-v1",
        "alike",
        98_304,
        ("--envs-per-process", "4", "--num-envs", "4", *_SHAPE["Pendulum-v1"]),
        (
            *_SHAPE["Pendulum-v1"][2:],
            *("--minibatch-fragments", "1", "--epochs", "10", "--lr", "1e-3", "--discount", "0.9"),
            *("--entropy-coefficient", "0", "--advantage-normalization", "minibatch"),
            "--no-normalize-rewards",
        ),
        {"n_steps": 1024, "gamma": 0.9, "learning_rate": 1e-3},
        (
            *("--num-envs", "4", "--num-steps", "1024", "--num-minibatches", "64"),
            *("--learning-rate", "1e-3", "--no-anneal-lr", "--gamma", "0.9", "--no-clip-vloss"),
        ),
        4096,
        4,
    ),
    Case(
        "CartPole-v1",
        "alike",
        49_152,
        ("--envs-per-process", "4", "--num-envs", "4", *_SHAPE["CartPole-v1"]),
        (
            *_SHAPE["CartPole-v1"][2:],
            *("--minibatch-fragments", "1", "--epochs", "4", "--lr", "2.5e-4:0"),
            *("--value-clip", "0.2", "--advantage-normalization", "minibatch"),
        ),
        {
            **{"n_steps": 128, "batch_size": 128, "n_epochs": 4, "clip_range_vf": 0.2},
            **{"ent_coef": 0.01, "learning_rate": lambda left: 2.5e-4 * left},
        },
        (),
        512,
        4,
    ),
    Case("Pendulum-v1", "own", 98_304, ("--envs-per-process", "8"), (), {}, (), 2048, 1),
    Case(
        "CartPole-v1",
        "own, ours with --minibatch-fragments 16",
        49_152,
        ("--envs-per-process", "8"),
        ("--minibatch-fragments", "16"),
        {},
        (),
        2048,
        1,
    ),
    Case(
        "LunarLanderContinuous-v3",
        "alike",
        196_608,
        ("--envs-per-process", "4", "--num-envs", "4", *_SHAPE["LunarLanderContinuous-v3"]),
        (
            *_SHAPE["LunarLanderContinuous-v3"][2:],
            *("--minibatch-fragments", "1", "--epochs", "10", "--lr", "3e-4"),
            *("--entropy-coefficient", "0", "--advantage-normalization", "minibatch"),
            "--no-normalize-rewards",
        ),
        {"n_steps": 512},
        ("--num-envs", "4", "--num-steps", "512", "--no-anneal-lr", "--no-clip-vloss"),
        2048,
        4,
    ),
)


class Run(NamedTuple):
    """One training."""

    env_id: str
    settings: str
    side: str
    seed: int


Episodes = list[tuple[int, float]]
"""Steps of all environments until an episode's end, and its return."""
COLUMNS = (*Run._fields, "returns")


class Counted(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Writes each episode's end and return to a file of its own."""

    def __init__(self, env: "gymnasium.Env[Any, Any]", folder: str) -> None:
        super().__init__(env)
        descriptor, _ = tempfile.mkstemp(suffix=".episodes", dir=folder)
        self._file = os.fdopen(descriptor, "w", buffering=1)
        self._steps, self._return = 0, 0.0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._return = 0.0
        return super().reset(**options)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step, and count."""
        obs, reward, terminated, truncated, info = super().step(action)
        self._steps += 1
        self._return += float(reward)
        if terminated or truncated:
            self._file.write(f"{self._steps} {self._return}\n")
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        """End the file too."""
        self._file.close()
        super().close()


def make(env_id: str, folder: str) -> "gymnasium.Env[Any, Any]":
    """Make one, for `--env bench.beside_learners:make`."""
    return Counted(gymnasium.make(env_id), folder)


def episodes_in(folder: Path) -> Episodes:
    """The episodes of environments that stepped together."""
    files = [file.read_text().splitlines() for file in folder.glob("*.episodes")]
    files = [lines for lines in files if lines]
    pairs = [line.split() for lines in files for line in lines]
    return [(int(steps) * len(files), float(total)) for steps, total in pairs]


def train_ours(case: Case, seed: int, folder: Path) -> Episodes:
    """Train through the service."""
    options = json.dumps({"env_id": case.env_id, "folder": str(folder)})
    updates = str(case.steps // case.batch_steps)
    run = LocalRun(
        name="run",
        learn=(
            "--deterministic",
            "--env",
            case.env_id,
            *case.learn,
            "--updates-max",
            updates,
            "--wait-limit-s",
            "120",
        ),
        rollout=(
            *("--deterministic", "--env", "bench.beside_learners:make", "--env-options", options),
            *case.rollout,
        ),
        workers=1,
        seed=seed,
        limit_s=LIMIT_S,
    )
    finished = run_locally(run, folder)
    if finished.exit_status != 0 or len(finished.records) != int(updates):
        raise RuntimeError(f"the learner ended: {(folder / 'run' / 'learner.log').read_text()}")
    return episodes_in(folder)


def train_sb3(case: Case, seed: int, folder: Path) -> Episodes:
    """Train with Stable-Baselines3."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    torch.set_num_threads(1)
    envs = DummyVecEnv([lambda: make(case.env_id, str(folder))] * case.env_count)
    PPO("MlpPolicy", envs, seed=seed, device="cpu", **case.sb3).learn(case.steps)
    envs.close()
    return episodes_in(folder)


def train_cleanrl(case: Case, seed: int, folder: Path, scripts: Path) -> Episodes:
    """Train with CleanRL's own script, which prints its episodes."""
    script = "ppo.py" if case.env_id == "CartPole-v1" else "ppo_continuous_action.py"
    done = subprocess.run(
        [
            *(sys.executable, str((scripts / script).resolve()), "--no-cuda"),
            *("--env-id", _CLEANRL_IDS.get(case.env_id, case.env_id), "--seed", str(seed)),
            *("--total-timesteps", str(case.steps), *case.cleanrl),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str((scripts / "site").resolve()),
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    found = re.findall(r"global_step=(\d+), episodic_return=\[?([^\]\n]+)", done.stdout)
    return [(int(step), float(total)) for step, total in found]


def sides(scripts: Path | None) -> dict[str, Callable[[Case, int, Path], Episodes]]:
    """How each side is trained."""
    found: dict[str, Callable[[Case, int, Path], Episodes]] = {
        OURS: train_ours,
        "Stable-Baselines3": train_sb3,
    }
    if scripts is not None:
        found["CleanRL"] = lambda case, seed, folder: train_cleanrl(case, seed, folder, scripts)
    return found


def binned(episodes: Episodes, steps: int) -> list[float]:
    """Mean return of the episodes that ended in each part of a training."""
    bins: list[list[float]] = [[] for _ in range(BINS)]
    for end, total in episodes:
        if end <= steps:
            bins[(end - 1) * BINS // steps].append(total)
    return means(bins)


def _returns(run: Run, trainer: Callable[[Case, int, Path], Episodes], steps: int | None) -> str:
    folder = Path(tempfile.mkdtemp(prefix="beside-"))
    try:
        case = case_of(run)
        case = case._replace(steps=steps or case.steps)
        returns = binned(trainer(case, run.seed, folder), case.steps)
    finally:
        shutil.rmtree(folder)
    return " ".join(f"{each:.4g}" for each in returns)


def read(path: Path) -> dict[Run, dict[str, str]]:
    """The rows that are written so far."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {Run(row["env_id"], row["settings"], row["side"], int(row["seed"])): row for row in rows}


def missing(rows: Mapping[Run, Any], seeds: int, names: Sequence[str]) -> Iterator[Run]:
    """The trainings that are not written yet."""
    for case in CASES:
        for seed in range(seeds):
            for side in names:
                run = Run(case.env_id, case.settings, side, seed)
                if run not in rows:
                    yield run


def twins_of(run: Run) -> list[Run]:
    """The same training, told of under other settings too."""
    told = _options(case_of(run), run.side)
    return [
        run._replace(settings=each.settings)
        for each in CASES
        if each.env_id == run.env_id
        and each.settings != run.settings
        and _options(each, run.side) == told
    ]


def _options(case: Case, side: str) -> object:
    """What a side makes of a case."""
    if side == "CleanRL":
        return case.steps, case.cleanrl
    if side == OURS:
        return case.steps, case.rollout, case.learn
    return case.steps, case.sb3, case.env_count


def case_of(run: Run) -> Case:
    """What a training is made with."""
    return next(each for each in CASES if each[:2] == run[:2])


def table(rows: Mapping[Run, Mapping[str, str]]) -> str:
    """Return the page's table: every side of every case, and p where all seeds were run."""
    lines = [
        "| task | settings | PPO of | seeds | return at the end | of the whole training "
        f"| p to {OURS}: end | whole |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in CASES:
        of_case = [run for run in rows if run[:2] == case[:2]]
        found: dict[str, list[Mapping[str, str]]] = {}
        for run in sorted(of_case, key=lambda run: run.seed):
            found.setdefault(run.side, []).append(rows[run])
        ps = [_ps(found, measure) for measure in (at_end, _whole)]
        for side in sorted(found, key=(OURS, "Stable-Baselines3", "CleanRL").index):
            measures = [_told([each(row) for row in found[side]]) for each in (at_end, _whole)]
            told_ps = [f"{p[side]:.3f}{' *' * (p[side] < SIGNIFICANT)}" if side in p else ""
                       for p in ps]  # fmt: skip
            cells = [case.env_id, case.settings, side, str(len(found[side])), *measures, *told_ps]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _whole(row: Mapping[str, Any]) -> float:
    return statistics.fmean(returns_of(row))


def _told(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.0f}"
    low, high = interval(values)
    return f"{statistics.fmean(values):.0f} ({low:.0f} to {high:.0f})"


def swapped_p(ours: Sequence[float], others: Sequence[float]) -> float:
    """The two-sided p of a difference of means, by 20,000 random ways to deal out the values."""
    pooled = np.tile([*ours, *others], (20_000, 1))
    dealt = np.random.default_rng(0).permuted(pooled, axis=1)
    means = dealt[:, : len(ours)].mean(1) - dealt[:, len(ours) :].mean(1)
    observed = abs(statistics.fmean(ours) - statistics.fmean(others))
    return float(((np.abs(means) >= observed - 1e-9).sum() + 1) / (len(means) + 1))


def _ps(
    found: Mapping[str, Sequence[Mapping[str, str]]], measure: Callable[[Any], float]
) -> dict[str, float]:
    """The corrected p of each side that has all seeds, to ours."""
    values = {side: [measure(row) for row in each] for side, each in found.items()}
    complete = {side: each for side, each in values.items() if len(each) >= SEEDS}
    if OURS not in complete:
        return {}
    return holm(
        {side: swapped_p(each, complete[OURS]) for side, each in complete.items() if side != OURS}
    )


@click.command()
@click.option("--cleanrl", type=click.Path(path_type=Path, exists=True), help="CleanRL's scripts.")
@click.option("--seeds", default=SEEDS, show_default=True, type=click.IntRange(1))
@click.option("--out", default=DATA, type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1), help="Length of a training; default: the case's.")
@click.option("--page", is_flag=True, help="Write the table from the rows; train nothing.")
@click.option("--cases", default="", help="Cases that are trained, such as 0,1; default: all.")
def main(
    cleanrl: Path | None, seeds: int, out: Path, steps: int | None, page: bool, cases: str
) -> None:
    """Make the trainings that are not written yet, one at a time."""
    rows: dict[Run, Mapping[str, Any]] = dict(read(out))
    if page:
        write_into(PAGE, table(rows), COMMAND)
        return
    chosen = [CASES[int(each)][:2] for each in cases.split(",") if each] or [c[:2] for c in CASES]
    trainers = sides(cleanrl)
    is_new = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for run in missing(rows, seeds, list(trainers)):
            if run[:2] not in chosen:
                continue
            twin = next((rows[each] for each in twins_of(run) if each in rows), None)
            told = twin["returns"] if twin else _returns(run, trainers[run.side], steps)
            rows[run] = {**run._asdict(), "returns": told}
            writer.writerow(rows[run])
            file.flush()
            click.echo(f"{run} {at_end(rows[run]):.0f}")


if __name__ == "__main__":
    main()
