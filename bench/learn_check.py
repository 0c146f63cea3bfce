"""Does the reference PPO learn, through the service? Every task, every seed; `make learn-check`.

Writes the curves to docs/images/learn-check.png and the figures to docs/images/learn-check.json.
"""

import fnmatch
import json
import sys
from pathlib import Path
from typing import Any

import click

from bench.local_run import LocalRun, run_locally

TASKS = {
    "CartPole-v1": (
        475.0,
        ("--env", "CartPole-v1"),
        ("--lr", "1e-3:1e-4@150updates", "--epochs", "6"),
        (),
    ),
    "CartPole-v1, velocities hidden": (
        300.0,
        (
            *("--env", "bench.hidden_cartpole:make", "--policy", "lstm"),
            *("--policy-options", '{"feature_count": 64, "memory_count": 64}'),
        ),
        (
            *("--lr", "2e-3", "--discount", "0.98", "--gae-lambda", "0.9", "--epochs", "8"),
            *("--fragments-per-batch", "32", "--minibatch-fragments", "8"),
            *("--entropy-coefficient", "0", "--value-coefficient", "0.1"),
            *("--gradient-norm-max", "1"),
        ),
        # Learning is slower than acting here: more versions between the two would only be staler.
        ("--staleness-max", "2"),
    ),
}
"""Name: target of the mean return over 100 episodes, options of both sides, learner's, server's."""

DOCS = Path(__file__).parents[1] / "docs" / "images"


@click.command()
@click.option("--seeds", default="0,1,2", show_default=True, help="Comma between.")
@click.option("--only", default="*", show_default=True, help="Tasks of this name; * is anything.")
@click.option("--limit-s", default=900.0, show_default=True, help="Seconds per run.")
@click.option("--target-return", type=float, help="Instead of each task's own.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/learn-check"))
@click.option(
    "--docs",
    type=click.Path(path_type=Path),
    default=DOCS,
    show_default="docs/images",
    help="Gets the picture and the figures.",
)
def main(
    seeds: str, only: str, limit_s: float, target_return: float | None, out: Path, docs: Path
) -> None:
    """Run every task under every seed; exit status 1 if one misses its target.

    The picture also shows earlier runs whose records are still in *out*.
    """
    missed = False
    for task in TASKS:
        for seed in (int(text) for text in seeds.split(",")):
            if fnmatch.fnmatch(task, only):
                finished = run_locally(planned(task, seed, limit_s, target_return), out)
                missed |= finished.exit_status != 0
                print(summary(task, seed, finished.records), flush=True)
    draw({task: curves(task, out) for task in TASKS}, docs)
    sys.exit(1 if missed else 0)


def planned(task: str, seed: int, limit_s: float, target_return: float | None = None) -> LocalRun:
    """The run of a task under a seed, to the task's own target or another one."""
    own_target, both, learn, serve = TASKS[task]
    target = own_target if target_return is None else target_return
    return LocalRun(
        name=run_name(task, seed),
        learn=(*both, *learn, "--target-return", str(target)),
        rollout=both,
        serve=serve,
        seed=seed,
        limit_s=limit_s,
    )


def run_name(task: str, seed: int) -> str:
    """Folder of a run."""
    return f"{task.replace(' ', '-').replace(',', '')}-seed{seed}"


def curves(task: str, out: Path) -> dict[int, list[dict[str, Any]]]:
    """Records of every run of a task that is in *out*, by seed."""
    found = {}
    for seed in range(100):
        path = out / run_name(task, seed) / "progress.jsonl"
        if path.exists():
            found[seed] = [json.loads(line) for line in path.read_text().splitlines()]
    return {seed: records for seed, records in found.items() if records}


def has_reached(task: str, records: list[dict[str, Any]]) -> bool:
    """Whether a run ended at its target."""
    return bool(records) and (records[-1]["return_mean_100"] or 0.0) >= TASKS[task][0]


def summary(task: str, seed: int, records: list[dict[str, Any]]) -> str:
    """One line about a run."""
    if not records:
        return f"{task}, seed {seed}: made no update"
    last = records[-1]
    word = "reached" if has_reached(task, records) else "MISSED"
    return (
        f"{task}, seed {seed}: {word} {TASKS[task][0]:g} with {last['return_mean_100']} after "
        f"{last['environment_steps']} steps, {len(records)} updates, {last['time_s']:.0f} s"
    )


def draw(found: dict[str, dict[int, list[dict[str, Any]]]], docs: Path) -> None:
    """Draw mean return over steps, one panel per task, one line per seed; keep the figures."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    docs.mkdir(parents=True, exist_ok=True)
    figure, panels = plt.subplots(
        1, len(found), figsize=(6 * len(found), 4), layout="constrained", squeeze=False
    )
    rows = []
    for axes, (task, runs) in zip(panels[0], found.items(), strict=True):
        for seed, records in runs.items():
            steps = [record["environment_steps"] for record in records]
            returns = [record["return_mean_100"] or float("nan") for record in records]
            axes.plot(steps, returns, label=f"seed {seed}", linewidth=1.6)
            row = {"task": task, "seed": seed, "reached": has_reached(task, records)}
            names = ("return_mean_100", "environment_steps", "steps", "update", "time_s")
            rows.append(row | {name: records[-1][name] for name in names})
        axes.axhline(TASKS[task][0], linestyle="--", color="grey", linewidth=1)
        axes.set(title=task, xlabel="environment steps")
        axes.set_ylabel("mean return, last 100 episodes")
        axes.grid(visible=True, alpha=0.3)
        if runs:
            axes.legend(frameon=False)
    figure.savefig(docs / "learn-check.png", dpi=110)
    plt.close(figure)
    (docs / "learn-check.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
