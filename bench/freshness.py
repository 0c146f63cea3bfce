"""What staleness_max, uses_max and capacity do to learning: runs of CartPole under several seeds.

Writes docs/images/freshness.png and docs/images/freshness.json; see docs/learner-cookbook.md. Every
figure is a mean over seeds with a 95% interval of that mean (Student's t), over environment steps.
The quantity compared is the steps that environments made until the mean return of the last 100
episodes reached the target; a run that did not reach it is told, and not averaged.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.local_run import Finished, LocalRun, run_locally
from breadbox_learner.intervals import interval

TARGET_RETURN = 195.0
SEEDS_MIN = 5
"""Fewer say nothing about settings: seeds differ by more."""
DOCS = Path(__file__).parents[1] / "docs" / "images"


@dataclass(frozen=True)
class Setting:
    """One point of the picture."""

    label: str
    serve: tuple[str, ...]
    learn: tuple[str, ...] = ()
    rollout: tuple[str, ...] = ()


def setting(
    staleness_max: int, uses_max: int = 1, *, queue: int | None = None, advantages: str = "gae"
) -> Setting:
    """Limits of the buffer.

    Args:
        staleness_max: In versions.
        uses_max: Deliveries of a chunk.
        queue: Fragments that wait in each worker: many make data old, so that the limit binds.
            None: as few as a worker has by default.
        advantages: How the learner estimates them.
    """
    label = f"staleness {staleness_max}, uses {uses_max}"
    label += f", queue {queue}" if queue else ""
    label += f", {advantages}" if advantages != "gae" else ""
    return Setting(
        label,
        # A full buffer makes workers wait, so that what is old is what was made early.
        serve=(
            *("--staleness-max", str(staleness_max), "--uses-max", str(uses_max)),
            *("--capacity-chunks", "256", "--full-policy", "block"),
        ),
        learn=("--advantages", advantages),
        rollout=("--queue-fragments", str(queue)) if queue else (),
    )


SETTINGS = [
    setting(0),
    setting(2),
    setting(8),
    setting(2, queue=512),
    setting(8, queue=512),
    setting(32, queue=512),
    setting(32, queue=512, advantages="vtrace"),
    setting(8, 4),
    setting(8, 4, advantages="vtrace"),
]


@click.command()
@click.option("--limit-s", default=90.0, show_default=True, help="Seconds per run.")
@click.option("--seeds", default=SEEDS_MIN, show_default=True, type=click.IntRange(SEEDS_MIN))
@click.option("--only", type=click.IntRange(0), help="Only the setting of this number.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/freshness"))
@click.option(
    "--docs",
    type=click.Path(path_type=Path),
    default=DOCS,
    show_default=True,
    help="Folder that gets the picture and the figures.",
)
def main(limit_s: float, seeds: int, only: int | None, out: Path, docs: Path) -> None:
    """Run every setting under every seed until the target return, or the limit."""
    chosen = SETTINGS if only is None else [SETTINGS[only]]
    runs: list[list[Finished]] = [[] for _ in chosen]
    # Seed by seed, so that a machine that slows down slows every setting.
    for seed in range(seeds):
        for number, each in enumerate(chosen):
            run = LocalRun(
                f"setting-{number}-seed{seed}",
                learn=(
                    *("--target-return", str(TARGET_RETURN), "--time-limit-s", str(limit_s)),
                    *each.learn,
                ),
                serve=each.serve,
                rollout=("--env", "CartPole-v1", *each.rollout),
                seed=seed,
                limit_s=limit_s + 60,
            )
            runs[number].append(run_locally(run, out))
            print(f"{each.label}, seed {seed}: {figures(runs[number][-1])}", flush=True)
    rows = [summary(each.label, finished) for each, finished in zip(chosen, runs, strict=True)]
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "freshness.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw([each.label for each in chosen], runs, rows, docs / "freshness.png")
    for row in rows:
        print(told(row))


def figures(finished: Finished) -> dict[str, Any]:
    """What a run came to; `reached` is false where it made no update."""
    if not finished.records:
        return {"reached": False}
    last = finished.records[-1]
    count = len(finished.records)
    return {
        "reached": (last["return_mean_100"] or 0.0) >= TARGET_RETURN,
        "environment_steps": last["environment_steps"],
        "trained_steps": last["steps"],
        "time_s": last["time_s"],
        "waiting_share": round(sum(finished.column("fetch_wait_s")) / last["time_s"], 3),
        "staleness_mean": round(sum(finished.column("staleness_mean")) / count, 2),
        "staleness_max": max(finished.column("staleness_max")),
        "use_count_mean": round(sum(finished.column("use_count_mean")) / count, 2),
    }


def summary(label: str, runs: Sequence[Finished]) -> dict[str, Any]:
    """A setting's figures: mean and half width of the 95% interval over the seeds that reached."""
    made = [figures(run) for run in runs]
    reached = [row for row in made if row["reached"]]
    names = (
        "environment_steps", "trained_steps", "time_s", "waiting_share", "staleness_mean",
        "use_count_mean",
    )  # fmt: skip
    return {
        "setting": label,
        "seeds": len(made),
        "reached": len(reached),
        **{name: interval([row[name] for row in reached]) for name in names},
        "runs": made,
    }


def told(row: dict[str, Any]) -> str:
    """One line about a setting."""
    steps, stale = row["environment_steps"], row["staleness_mean"]
    if steps["mean"] is None:
        return f"{row['setting']}: none of {row['seeds']} seeds reached {TARGET_RETURN:g}"
    half = "?" if steps["half_width"] is None else f"{steps['half_width']:,.0f}"
    return (
        f"{row['setting']}: {steps['mean']:,.0f} ± {half} environment steps to {TARGET_RETURN:g} "
        f"({row['reached']} of {row['seeds']} seeds), mean staleness {stale['mean']:.2f}"
    )


def curve(runs: Sequence[Finished]) -> tuple[Any, Any, Any]:
    """Environment steps, mean return over the seeds, and half its interval, while all runs last."""
    known = [
        (np.array(run.column("environment_steps")), np.array(run.column("return_mean_100")))
        for run in runs
        if run.records
    ]
    if not known:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    steps = np.linspace(0, min(each[-1] for each, _ in known), 100)
    values = [np.interp(steps, *each) for each in known]
    at = [interval([float(value[i]) for value in values]) for i in range(len(steps))]
    means = np.array([each["mean"] for each in at], dtype=float)
    return steps, means, np.array([each["half_width"] or 0.0 for each in at], dtype=float)


def draw(
    labels: Sequence[str],
    runs: Sequence[Sequence[Finished]],
    rows: Sequence[dict[str, Any]],
    path: Path,
) -> None:
    """Returns over environment steps on the left; on the right, what reaching the target took."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (curves, bars) = plt.subplots(1, 2, figsize=(14, 5), layout="constrained")
    for number, (label, finished, row) in enumerate(zip(labels, runs, rows, strict=True)):
        color = f"C{number}"
        steps, means, half_widths = curve(finished)
        curves.plot(steps, means, label=label, color=color)
        curves.fill_between(steps, means - half_widths, means + half_widths, color=color, alpha=0.1)
        took = row["environment_steps"]
        if took["mean"] is not None:
            bars.errorbar(
                took["mean"],
                number,
                xerr=took["half_width"] or 0.0,
                fmt="o",
                color=color,
                capsize=4,
            )
    curves.axhline(TARGET_RETURN, linestyle="--", color="grey", linewidth=1)
    curves.set_xlabel("environment steps")
    curves.set_ylabel("mean return, last 100 episodes")
    curves.legend(frameon=False, fontsize=8)
    texts = [
        f"{row['setting']}\n{row['reached']} of {row['seeds']} seeds, "
        f"staleness {row['staleness_mean']['mean'] or 0.0:.1f}"
        for row in rows
    ]
    bars.set_yticks(range(len(texts)), texts, fontsize=8)
    bars.invert_yaxis()
    bars.set_xlabel(f"environment steps to {TARGET_RETURN:g}, mean and its 95% interval")
    bars.set_xlim(left=0)
    for axes in (curves, bars):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
