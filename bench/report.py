"""Shows figures: a table, results.json, and a bar chart of the ratios."""

import json
import os
import platform
import sysconfig
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.measure import Figure


def show(figures: Sequence[Figure], console: Console) -> None:
    """Print the table."""
    table = Table(title=f"Breadbox, {machine()}", title_justify="left")
    for column in ("what", "workload", "ours", "limit", "ratio", "reach", "others"):
        table.add_column(column, justify="left" if column in ("what", "others") else "right")
    for figure in figures:
        table.add_row(
            figure.name,
            figure.workload,
            f"{_short(figure.value)} {figure.unit}",
            "" if figure.limit is None else f"{_short(figure.limit)} ({figure.limit_is})",
            "" if figure.ratio is None else f"{figure.ratio:.2f}",
            _verdict(figure),
            ", ".join(
                f"{name} {_short(value)}"
                for name, value in [*figure.peers.items(), *figure.also.items()]
            ),
        )
    console.print(table)


def write(figures: Sequence[Figure], directory: Path) -> None:
    """Write results.json and results.png."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [figure.as_json() for figure in figures]
    (directory / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
    _draw(figures, directory / "results.png")


def machine() -> str:
    """Say where, when and by which Python, for the table's title."""
    cpus = len(os.sched_getaffinity(0))
    return f"{cpus} cores {platform.machine()}, {datetime.now(UTC):%Y-%m-%d}, {python()}"


def python() -> str:
    """Say which Python this is, and whether it was built as images of Python are."""
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    has = {"PGO": "--enable-optimizations" in options, "LTO": "--with-lto" in options}
    parts = " and ".join(f"{'with' if made else 'without'} {name}" for name, made in has.items())
    return f"Python {platform.python_version()} built {parts}"


def marks(command: str) -> tuple[str, str]:
    """Return what stands before and after the text that a command writes into a page."""
    return f"<!-- begin of what {command} wrote -->", f"<!-- end of what {command} wrote -->"


def write_into(page: Path, text: str, command: str) -> None:
    """Put a text where the page's marks are.

    Raises:
        ValueError: It has no marks.
    """
    begin, end = marks(command)
    before, has_begin, rest = page.read_text().partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end or begin in after:
        raise ValueError(f"{page} needs one {begin} and one {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


def _draw(figures: Sequence[Figure], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    compared = [figure for figure in figures if figure.unit == "GB/s"]
    chart, axes = pyplot.subplots(figsize=(9, 0.9 * max(1, len(compared)) + 1.5))
    for position, figure in enumerate(compared):
        bars = {"ours": figure.value}
        if figure.limit is not None:
            bars[figure.limit_is] = figure.limit
        bars |= figure.peers
        for offset, (name, value) in enumerate(bars.items()):
            height = position + 0.25 * offset
            colour = "#b5651d" if name == "ours" else f"{0.45 + 0.45 * offset / len(bars):.2f}"
            axes.barh(height, value, height=0.22, color=colour)
            axes.text(value, height, f" {name} {value:.2f}", va="center", fontsize=8)
    axes.set_yticks(
        [position + 0.25 for position in range(len(compared))],
        ["\n".join([*figure.name.split(", "), figure.workload]) for figure in compared],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("GB/s")
    axes.set_title(machine(), loc="left", fontsize=9)
    chart.tight_layout()
    chart.savefig(path, dpi=120)
    pyplot.close(chart)


def _verdict(figure: Figure) -> str:
    if figure.reach is None:
        return ""
    sign = "<=" if figure.is_lower_better else ">="
    word = "" if figure.is_reached else " missed"
    return f"{sign} {_short(figure.reach)}{word}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
