"""Does the reference PPO learn, through the service? Every task, every seed; `make learn-check`.

Writes the curves to docs/images/learn-check.png and the figures to docs/images/learn-check.json.
"""

import json
import sys
from pathlib import Path

import click

from bench.local_run import Finished, LocalRun, run_locally

TASKS = {
    "CartPole-v1": (
        475.0,
        ("--env", "CartPole-v1"),
        ("--lr", "1e-3", "--lr-decay-updates", "150", "--epochs", "6"),
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
@click.option("--only", default="", help="Tasks whose name contains this.")
@click.option("--limit-s", default=900.0, show_default=True, help="Seconds per run.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/learn-check"))
def main(seeds: str, only: str, limit_s: float, out: Path) -> None:
    """Run every task under every seed; exit status 1 if one misses its target."""
    finished: dict[str, list[Finished]] = {}
    for task, (target, both, learn, serve) in TASKS.items():
        if only not in task:
            continue
        for seed in (int(text) for text in seeds.split(",")):
            run = LocalRun(
                name=f"{task.replace(' ', '-').replace(',', '')}-seed{seed}",
                learn=(*both, *learn, "--target-return", str(target)),
                rollout=both,
                serve=serve,
                seed=seed,
                limit_s=limit_s,
            )
            result = run_locally(run, out)
            finished.setdefault(task, []).append(result)
            print(summary(task, result))
    draw(finished)
    sys.exit(0 if all(r.exit_status == 0 for results in finished.values() for r in results) else 1)


def summary(task: str, result: Finished) -> str:
    """One line about a run."""
    last = result.records[-1] if result.records else {}
    reached = "reached" if result.exit_status == 0 else "MISSED"
    return (
        f"{task}, seed {result.run.seed}: {reached} {TASKS[task][0]:g} with "
        f"{last.get('return_mean_100') or float('nan'):.1f} after {last.get('steps', 0)} steps, "
        f"{len(result.records)} updates, {last.get('time_s', 0.0):.0f} s"
    )


def draw(finished: dict[str, list[Finished]]) -> None:
    """Draw mean return over steps, one panel per task, one line per seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    DOCS.mkdir(parents=True, exist_ok=True)
    figure, panels = plt.subplots(
        1, len(finished), figsize=(6 * len(finished), 4), layout="constrained", squeeze=False
    )
    for axes, (task, results) in zip(panels[0], finished.items(), strict=True):
        for result in results:
            steps, returns = result.column("steps"), result.column("return_mean_100")
            axes.plot(steps, returns, label=f"seed {result.run.seed}", linewidth=1.6)
        axes.axhline(TASKS[task][0], linestyle="--", color="grey", linewidth=1)
        axes.set_title(task)
        axes.set_xlabel("environment steps trained on")
        axes.set_ylabel("mean return, last 100 episodes")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(DOCS / "learn-check.png", dpi=110)
    plt.close(figure)
    rows = [
        {"task": task, "seed": r.run.seed, "reached": r.exit_status == 0, **(r.records or [{}])[-1]}
        for task, results in finished.items()
        for r in results
    ]
    (DOCS / "learn-check.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
