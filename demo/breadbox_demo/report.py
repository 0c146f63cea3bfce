"""The picture that the demo leaves behind."""

from collections.abc import Sequence
from pathlib import Path

from breadbox_demo.progress import ProgressLog


def _panel(axes: object, times_s: Sequence[float], log: ProgressLog, names: dict[str, str]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    for name, label in names.items():
        axes.plot(times_s, log.column(name), label=label, linewidth=1.8)
    axes.grid(visible=True, alpha=0.3)
    if len(names) > 1:
        # Above the panel, where no line can run.
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=len(names), frameon=False, fontsize=9
        )


def write_report(log: ProgressLog, path: Path, *, title: str, target_return: float) -> None:
    """Draw return, staleness and reuse over time into a PNG.

    Args:
        log: The learner's records; each has `time_s` and what the panels show.
        path: Where the PNG goes; its folder exists.
        title: Heading of the picture.
        target_return: Drawn as a dashed line.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    times_s = log.column("time_s")
    figure, (returns, staleness, reuse) = plt.subplots(
        3, 1, figsize=(9, 9), sharex=True, height_ratios=(2, 1, 1), layout="constrained"
    )
    figure.suptitle(title)
    _panel(returns, times_s, log, {"return_mean_100": "mean return of the last 100 episodes"})
    returns.axhline(target_return, linestyle="--", color="grey", linewidth=1)
    returns.annotate(
        f"target {target_return:g}",
        (0.01, target_return),
        (0, -3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color="grey",
        va="top",
    )
    returns.set_ylabel("mean return, last 100 episodes")
    _panel(staleness, times_s, log, {"staleness_max": "oldest", "staleness_mean": "mean"})
    staleness.set_ylabel("staleness of what was\ntrained on (versions)")
    staleness.set_ylim(bottom=0)
    _panel(reuse, times_s, log, {"use_count_mean": "mean deliveries per chunk"})
    reuse.set_ylabel("reuse\n(deliveries per chunk)")
    reuse.set_ylim(bottom=0)
    reuse.set_xlabel("time (s)")
    figure.savefig(path, dpi=110)
    plt.close(figure)
