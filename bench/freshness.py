"""What staleness_max, uses_max and capacity do to learning: real runs of CartPole, and a picture.

Writes docs/images/freshness.png and docs/images/freshness.json; see docs/learner-cookbook.md.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench.local_run import Finished, LocalRun, run_locally

TARGET_RETURN = 195.0
DOCS = Path(__file__).parents[1] / "docs" / "images"


@dataclass(frozen=True)
class Setting:
    """One point of the picture."""

    label: str
    serve: tuple[str, ...]


def setting(staleness_max: int, uses_max: int, capacity: int = 4096) -> Setting:
    """Limits of the buffer."""
    label = f"staleness {staleness_max}, uses {uses_max}"
    if capacity != 4096:
        label += f", capacity {capacity}"
    return Setting(
        label,
        (
            *("--staleness-max", str(staleness_max), "--uses-max", str(uses_max)),
            *("--capacity-chunks", str(capacity)),
        ),
    )


SETTINGS = [
    setting(0, 1),
    setting(1, 1),
    setting(2, 1),
    setting(8, 1),
    setting(8, 1, capacity=64),
    setting(2, 2),
    setting(8, 4),
    setting(64, 16),
]


@click.command()
@click.option("--limit-s", default=60.0, show_default=True, help="Seconds per run.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/freshness"))
def main(limit_s: float, seed: int, out: Path) -> None:
    """Run every setting until the target return, or the limit."""
    rows = []
    runs = []
    for number, chosen in enumerate(SETTINGS):
        learn = ("--target-return", str(TARGET_RETURN), "--time-limit-s", str(limit_s))
        run = LocalRun(
            f"setting-{number}",
            learn=learn,
            serve=chosen.serve,
            rollout=("--env", "CartPole-v1"),
            seed=seed,
            limit_s=limit_s + 60,
        )
        finished = run_locally(run, out)
        runs.append(finished)
        rows.append(figures(chosen, finished))
        print(json.dumps(rows[-1]))
    DOCS.mkdir(parents=True, exist_ok=True)
    (DOCS / "freshness.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(runs)


def figures(chosen: Setting, finished: Finished) -> dict[str, Any]:
    """What a run came to."""
    last = finished.records[-1]
    waited_s = sum(finished.column("fetch_wait_s"))
    count = len(finished.records)
    return {
        "setting": chosen.label,
        "reached": (last["return_mean_100"] or 0.0) >= TARGET_RETURN,
        "return_mean_100": last["return_mean_100"],
        "time_s": last["time_s"],
        "updates": count,
        "steps_per_s": round(last["steps"] / last["time_s"]),
        "waiting_share": round(waited_s / last["time_s"], 3),
        "staleness_mean": round(sum(finished.column("staleness_mean")) / count, 2),
        "use_count_mean": round(sum(finished.column("use_count_mean")) / count, 2),
    }


def draw(runs: list[Finished]) -> None:
    """Returns over time on the left; on the right, what a step costs against how stale it is."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (curves, points) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for number, (chosen, finished) in enumerate(zip(SETTINGS, runs, strict=True)):
        color = f"C{number}"
        curves.plot(
            finished.column("time_s"),
            finished.column("return_mean_100"),
            label=chosen.label,
            color=color,
        )
        row = figures(chosen, finished)
        points.scatter(
            row["staleness_mean"],
            row["steps_per_s"],
            s=60 + 240 * row["waiting_share"],
            color=color,
            label=f"{chosen.label}: waits {row['waiting_share']:.0%}",
        )
    curves.axhline(TARGET_RETURN, linestyle="--", color="grey", linewidth=1)
    curves.set_xlabel("time (s)")
    curves.set_ylabel("mean return, last 100 episodes")
    points.set_xlabel("mean staleness of what was trained on (versions)")
    points.set_ylabel("steps trained on per second")
    points.set_xlim(left=-0.1)
    points.set_ylim(bottom=0, top=1.15 * max(_rate(run) for run in runs))
    points.legend(frameon=False, fontsize=8)
    curves.legend(frameon=False, fontsize=8)
    for axes in (curves, points):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(DOCS / "freshness.png", dpi=110)
    plt.close(figure)


def _rate(run: Finished) -> float:
    last = run.records[-1]
    rate = last["steps"] / last["time_s"]
    return rate if math.isfinite(rate) else 0.0


if __name__ == "__main__":
    main()
