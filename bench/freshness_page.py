"""What the runs of `bench.freshness` say: intervals over seeds, paired tests, tables, a picture.

    python -m bench.freshness_page    # writes docs/studies/lag.md and docs/images/freshness.png

Only slices with all judging seeds are told of. Two settings are compared seed by seed, since runs
of a seed begin with the same policy: p is the share of all ways to swap the two within seeds in
which the mean difference is at least as large. In each table, p is corrected for the number of
comparisons (Holm). Intervals of 95 % are by bootstrap over the seeds.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.freshness import (
    BINS,
    CORRECTIONS,
    DATA,
    DEFAULT,
    DOCS,
    LAGS,
    LIMITS,
    SEEDS,
    SLICES,
    TASKS,
    Cell,
    Run,
    at_end,
    judging,
    read,
    returns_of,
    tuning,
)
from bench.report import write_into

PAGE = DOCS / "studies" / "lag.md"
COMMAND = "python -m bench.freshness_page"
DEFAULT_LIMIT = 2
SIGNIFICANT = 0.05

MEASURES = ("step size", "return at the end", "lowest", "area", "held")

Rows = Mapping[Run, Mapping[str, Any]]
Slice = tuple[str, str]


def complete(rows: Rows) -> list[Slice]:
    """The slices with every run."""
    return [
        each
        for each in SLICES
        if all(run in rows for run in tuning(*each))
        and all(run in rows for run in judging(rows, *each))
    ]


def judged(rows: Rows, task: str, world: str) -> dict[Cell, list[Mapping[str, Any]]]:
    """The rows of a complete slice by setting, one for each seed, in the order of the seeds."""
    found: dict[Cell, list[Mapping[str, Any]]] = {}
    for run in judging(rows, task, world):
        found.setdefault(run.cell, []).append(rows[run])
    return found


def _score(task: str, value: float) -> float:
    low, high = TASKS[task].low, TASKS[task].high
    return (value - low) / (high - low)


def end_score(row: Mapping[str, Any]) -> float:
    """Return at the end, from 0 to 1 for the task's low and high."""
    return _score(row["task"], at_end(row))


def area(row: Mapping[str, Any]) -> float:
    """Area under the curve of returns, from 0 to 1 for the task's low and high throughout."""
    return _score(row["task"], statistics.fmean(returns_of(row)))


def held(row: Mapping[str, Any]) -> float:
    """The longest time at or above the target, in updates."""
    task = TASKS[row["task"]]
    stretches = itertools.groupby(each >= task.target for each in returns_of(row))
    longest = max((len(list(parts)) for is_there, parts in stretches if is_there), default=0)
    return longest * task.updates / BINS


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the mean lies, with 95 %."""
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values)))
    low, high = np.quantile(drawn.mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def paired_p(ours: Sequence[float], others: Sequence[float]) -> float:
    """The two-sided p of a difference of means, by all swaps within pairs."""
    differences = np.subtract(ours, others)
    signs = np.array(list(itertools.product([1, -1], repeat=len(differences))))
    means = np.abs((signs * differences).mean(axis=1))
    return float((means >= abs(differences.mean()) - 1e-12).mean())


def holm(ps: Mapping[Any, float]) -> dict[Any, float]:
    """Correct several p for their number."""
    corrected, largest = {}, 0.0
    for place, key in enumerate(sorted(ps, key=lambda each: ps[each])):
        largest = max(largest, min(1.0, ps[key] * (len(ps) - place)))
        corrected[key] = largest
    return corrected


def over_tasks(rows: Rows, world: str) -> dict[str | int, list[float]]:
    """Mean score at the end over complete tasks (and lags), of each arm, one for each seed."""
    found: dict[str | int, list[list[float]]] = {}
    for task, its_world in complete(rows):
        if its_world != world:
            continue
        for cell, each in judged(rows, task, world).items():
            arm = cell.correction if cell.limit is None else cell.limit
            if cell.lag != 0:
                found.setdefault(arm, []).append([end_score(row) for row in each])
    return {
        arm: [statistics.fmean(of_seed) for of_seed in zip(*scores, strict=True)]
        for arm, scores in found.items()
    }


def against(arms: Mapping[Any, Sequence[float]], default: Any) -> dict[Any, float]:
    """Corrected p of every other arm against the default."""
    return holm(
        {arm: paired_p(each, arms[default]) for arm, each in arms.items() if arm != default}
    )


def recommended(arms: Mapping[Any, Sequence[float]], default: Any) -> Any:
    """The default, unless others end better for sure: then the best of these."""
    ps = against(arms, default)
    mean = {arm: statistics.fmean(each) for arm, each in arms.items()}
    better = [arm for arm, p in ps.items() if p < SIGNIFICANT and mean[arm] > mean[default]]
    return max(better, key=lambda arm: mean[arm], default=default)


def _with_interval(values: Sequence[float], form: str) -> str:
    low, high = interval(values)
    return f"{statistics.fmean(values):{form}} ({low:{form}} to {high:{form}})"


def _p(p: float | None) -> str:
    return "" if p is None else f"{p:.3f}" + (" *" if p < SIGNIFICANT else "")


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _measures(found: Sequence[Mapping[str, Any]]) -> list[str]:
    ends = [at_end(row) for row in found]
    form = ".1f" if abs(statistics.fmean(ends)) < 50 else ".0f"
    return [
        _with_interval(ends, form),
        f"{min(ends):{form}}",
        _with_interval([area(row) for row in found], ".2f"),
        f"{statistics.fmean(map(held, found)):.0f}",
    ]


def _compared(
    found: Mapping[Cell, Sequence[Mapping[str, Any]]], default_of: Callable[[Cell], Cell | None]
) -> dict[Cell, list[str]]:
    """Corrected p of the return at the end, and of the area, of each setting to its default."""
    columns = []
    for measure in (at_end, area):
        values = {cell: [measure(row) for row in each] for cell, each in found.items()}
        pairs = {cell: default_of(cell) for cell in found}
        ps = holm(
            {
                cell: paired_p(values[cell], values[default])
                for cell, default in pairs.items()
                if default not in (None, cell)
            }
        )
        columns.append(ps)
    return {cell: [_p(ps.get(cell)) for ps in columns] for cell in found}


def lag_table(rows: Rows, task: str) -> str:
    """What each correction ended at, by lag."""
    found = judged(rows, task, "lag")
    ps = _compared(found, lambda cell: cell._replace(correction=DEFAULT) if cell.lag else None)
    fresh = _compared(found, lambda _: Cell(task, 0, None, "none"))
    lines = [
        [
            str(cell.lag),
            cell.correction if cell.lag else "all alike",
            each[0]["lr"],
            *_measures(each),
            *ps[cell],
            *fresh[cell],
        ]
        for cell, each in found.items()
    ]
    heads = [
        "lag",
        "correction",
        *MEASURES,
        f"p to {DEFAULT}: end",
        "area",
        "p to lag 0: end",
        "area",
    ]
    return _table(heads, lines)


def limit_table(rows: Rows, task: str) -> str:
    """What each limit lost and ended at."""
    found = judged(rows, task, "limit")
    ps = _compared(found, lambda cell: cell._replace(limit=DEFAULT_LIMIT))
    lines = [
        [
            str(cell.limit),
            f"{statistics.fmean(float(row['lost']) for row in each):.0%}".replace("%", " %"),
            f"{statistics.fmean(float(row['staleness']) for row in each):.1f}",
            each[0]["lr"],
            *_measures(each),
            *ps[cell],
        ]
        for cell, each in found.items()
    ]
    heads = ["`staleness_max`", "steps lost", "staleness", *MEASURES,
             f"p to {DEFAULT_LIMIT}: end", "area"]  # fmt: skip
    return _table(heads, lines)


def _summary(arms: Mapping[Any, Sequence[float]], default: Any, head: str) -> str:
    ps = against(arms, default)
    lines = [[str(arm), _with_interval(each, ".2f"), _p(ps.get(arm))] for arm, each in arms.items()]
    return _table([head, "score at the end", f"p to {default}"], lines)


def text(rows: Rows) -> str:
    """The part of the page that follows from the rows, in Markdown."""
    done = complete(rows)
    seeds = f"{len(SEEDS)} seeds"
    parts = []
    worlds: tuple[tuple[str, str, str, Any, Callable[[Rows, str], str]], ...] = (
        ("lag", "Old data, corrected", "correction", DEFAULT, lag_table),
        ("limit", "Old data, lost instead", "`staleness_max`", DEFAULT_LIMIT, limit_table),
    )
    for world, title, head, default, table in worlds:
        tasks = [task for task, each in done if each == world]
        missing = [task for task in TASKS if task not in tasks]
        parts.append(f"## {title}")
        if missing:
            parts.append(f"Not run to the end yet, and left out here: {', '.join(missing)}.")
        if tasks:
            lags = " and the lags" if world == "lag" else ""
            parts.append(f"The mean score over {_listed(tasks)}{lags}, {seeds}:")
            parts.append(_summary(over_tasks(rows, world), default, head))
        for task in tasks:
            parts += [f"**{task}**, target {TASKS[task].target:g}:", table(rows, task)]
    return "\n\n".join(parts) + "\n"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]


def draw(rows: Rows, path: Path) -> None:
    """Returns over a run: a line of panels for each task with a complete slice."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    done = complete(rows)
    tasks = [task for task in TASKS if any(task == each for each, _ in done)]
    figure, panels = plt.subplots(
        len(tasks), 3, figsize=(14, 3.4 * len(tasks)), layout="constrained", squeeze=False
    )
    for task, line in zip(tasks, panels, strict=True):
        for axes, lag in zip(line, (*LAGS[1:], None), strict=True):
            if (task, "limit" if lag is None else "lag") in done:
                _draw_panel(axes, rows, task, lag)
            else:
                axes.set_axis_off()
    for axes in panels[-1]:
        axes.set_xlabel("updates")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _draw_panel(axes: Any, rows: Rows, task: str, lag: int | None) -> None:
    updates = TASKS[task].updates
    xs = (np.arange(BINS) + 0.5) * updates / BINS
    if lag is None:
        lines = {f"staleness_max {limit}": Cell(task, None, limit, DEFAULT) for limit in LIMITS}
    else:
        lines = {"fresh": Cell(task, 0, None, "none")}
        lines |= {each: Cell(task, lag, None, each) for each in CORRECTIONS}
    found = judged(rows, task, "limit" if lag is None else "lag")
    for label, cell in lines.items():
        curves = np.array([returns_of(row) for row in found[cell]])
        color = "grey" if label == "fresh" else None
        axes.plot(xs, curves.mean(axis=0), label=label, color=color, linewidth=1.4)
    axes.axhline(TASKS[task].target, linestyle="--", color="black", linewidth=0.6)
    axes.set_title(f"{task}, " + ("slow environments" if lag is None else f"lag {lag}"))
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


@click.command()
@click.option("--data", default=DATA, type=click.Path(path_type=Path, exists=True))
def main(data: Path) -> None:
    """Write tables and picture from the rows; no run is made."""
    rows = read(data)
    write_into(PAGE, text(rows), COMMAND)
    draw(rows, DATA.with_suffix(".png"))


if __name__ == "__main__":
    main()
