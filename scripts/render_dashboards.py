"""Draw the Grafana dashboards' panels from a Prometheus, where Grafana itself cannot run.

Usage: python scripts/render_dashboards.py [--prometheus URL] [--minutes N] [--server ADDRESS]

Every query of every panel is asked as it stands in deploy/grafana/dashboards, so a panel that is
empty here would be empty there. With --server, `breadbox top` is drawn as well.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from rich.console import Console

import breadbox
from breadbox.cli.commands import top

ROOT = Path(__file__).resolve().parent.parent
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
POINTS = 240
COLUMNS = 3
UNITS = {
    "short": ("", 1000),
    "ops": ("/s", 1000),
    "reqps": ("/s", 1000),
    "s": ("s", 1000),
    "bytes": ("B", 1000),
    "Bps": ("B/s", 1000),
}
BIG = ("", "k", "M", "G", "T")
SMALL = ("", "m", "µ", "n")

Series = list[tuple[float, float]]


def with_unit(value: float, unit: str) -> str:
    """A number for people, such as 1.5 MB/s or 20 ms."""
    suffix, base = UNITS[unit]
    if value == 0 or not math.isfinite(value):
        return f"0 {suffix}".strip()
    power = math.floor(math.log(abs(value), base) + 1e-9)
    power = max(-len(SMALL) + 1 if suffix == "s" else 0, min(power, len(BIG) - 1))
    prefix = BIG[power] if power >= 0 else SMALL[-power]
    return f"{value / base**power:.3g} {prefix}{suffix}".strip()


def legend_of(template: str, labels: dict[str, str]) -> str:
    """Grafana's legend: {{label}} stands for the label's value."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)


def with_gaps(points: Series) -> tuple[list[float], list[float]]:
    """Times and values of a line that breaks off where there are no values, as Grafana's does."""
    steps = sorted(after[0] - before[0] for before, after in pairwise(points))
    gap = 1.5 * steps[0] if steps else math.inf
    times, values = [points[0][0]], [points[0][1]]
    for (before, _), (at, value) in pairwise(points):
        if at - before > gap:
            times.append(before)
            values.append(math.nan)
        times.append(at)
        values.append(value)
    return times, values


class Prometheus:
    """Range queries over the last minutes."""

    def __init__(self, url: str, minutes: float) -> None:
        self._url = url.rstrip("/")
        self._end = time.time()
        self._start = self._end - minutes * 60
        self._step = max(1.0, minutes * 60 / POINTS)

    def series(self, expression: str) -> list[tuple[dict[str, str], Series]]:
        """The lines of a query: labels, and points of (minutes since the start, value)."""
        arguments = {
            "query": expression.replace("$buffer", ".+"),
            "start": f"{self._start:.3f}",
            "end": f"{self._end:.3f}",
            "step": f"{self._step:.3f}",
        }
        address = f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(arguments)}"
        # Prometheus is on this machine: not through a proxy for the web.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(address, timeout=30) as reply:
            answer: dict[str, Any] = json.load(reply)
        return [
            (
                line["metric"],
                [((at - self._start) / 60, float(value)) for at, value in line["values"]],
            )
            for line in answer["data"]["result"]
        ]


def draw_panel(axes: Axes, panel: dict[str, Any], prometheus: Prometheus) -> bool:
    """Draw one panel; whether there was anything to draw."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    count = 0
    for target in panel["targets"]:
        for labels, points in prometheus.series(target["expr"]):
            if not any(math.isfinite(value) for _, value in points):
                continue
            count += 1
            axes.plot(*with_gaps(points), label=legend_of(target["legendFormat"], labels))
    axes.set_title(panel["title"], fontsize=9, loc="left", fontweight="bold")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: with_unit(value, unit)))
    axes.tick_params(labelsize=7)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if count:
        axes.legend(fontsize=6, frameon=False, ncols=2, loc="best")
    else:
        axes.text(0.5, 0.5, "nothing happened", ha="center", fontsize=8, transform=axes.transAxes)
    return count > 0


def render(path: Path, prometheus: Prometheus, out: Path) -> list[str]:
    """Draw one dashboard; the titles of panels that had nothing to show."""
    dashboard = json.loads(path.read_text())
    panels = dashboard["panels"]
    rows = math.ceil(len(panels) / COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(15, 2.6 * rows), layout="constrained")
    figure.suptitle(dashboard["title"], fontsize=12, x=0.01, ha="left")
    empty = [
        panel["title"]
        for axes, panel in zip(grid.flat, panels, strict=False)
        if not draw_panel(axes, panel, prometheus)
    ]
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("minutes", fontsize=7)
    figure.savefig(out, dpi=80)
    plt.close(figure)
    return empty


def render_top(server: str, out: Path) -> None:
    """Draw what `breadbox top` shows of a server after two seconds."""
    console = Console(record=True, file=io.StringIO(), width=150)
    with breadbox.connect(server) as client:
        *_, sample = top.samples(client, 2.0, 2)
    console.print(top.render(sample, server, time.strftime("%H:%M:%S")))
    drawn = console.export_svg(title="breadbox top")
    # Rich names a font on another host; the reader's own will do.
    out.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL))


def main() -> int:
    """Draw every dashboard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--server", metavar="ADDRESS", help="draw `breadbox top` of it too")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(DASHBOARDS.glob("*.json")):
        out = options.out / f"dashboard-{path.stem}.png"
        empty = render(path, Prometheus(options.prometheus, options.minutes), out)
        print(f"{out}: {f'nothing to show for {empty}' if empty else 'every panel has data'}")
    if options.server:
        render_top(options.server, options.out / "top.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
