"""Draw the demo's screen while it runs, and its report at the end."""

import json
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from breadbox.diagnosis import rates_of
from breadbox.model.types import BufferDescription


@dataclass(slots=True)
class ProgressLog:
    """Follow a learner's `progress.jsonl`; an unfinished line is read by a later `poll`."""

    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    _offset_bytes: int = 0

    def poll(self) -> int:
        """Read new records, if there is a file yet; return their number."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset_bytes)
                fresh = file.read()
        except FileNotFoundError:
            return 0
        complete, newline, _ = fresh.rpartition(b"\n")
        self._offset_bytes += len(complete) + len(newline)
        lines = [line for line in complete.splitlines() if line.strip()]
        self.records.extend(json.loads(line) for line in lines)
        return len(lines)

    def column(self, name: str) -> list[float]:
        """Return one value per record, NaN if a record has none."""
        nan = float("nan")
        values = (record.get(name) for record in self.records)
        return [nan if value is None else float(value) for value in values]

    def latest(self, name: str) -> float | None:
        """Return the newest value, or None if no record has one."""
        for record in reversed(self.records):
            if record.get(name) is not None:
                return float(record[name])
        return None


SPARKS = "▁▂▃▄▅▆▇█"
RATE_WINDOW_S = 5.0
"""Seconds over which the rate of fragments is taken."""


def sparkline(values: list[float], width: int = 48) -> str:
    """Draw values, thinned to `width`, as block characters from lowest to highest."""
    known = [value for value in values if not math.isnan(value)]
    if len(known) < 2:
        return ""
    step = max(1.0, len(known) / width)
    thinned = [known[min(len(known) - 1, int(i * step))] for i in range(int(len(known) / step))]
    low, high = min(thinned), max(thinned)
    scale = (len(SPARKS) - 1) / ((high - low) or 1.0)
    return "".join(SPARKS[round((value - low) * scale)] for value in thinned)


def _number(value: float | None, form: str = ".1f") -> str:
    return "…" if value is None or math.isnan(value) else format(value, form)


class Screen:
    """The buffer's state, and the rates, from which frames are drawn."""

    def __init__(self, *, title: str, target_return: float, time_limit_s: float) -> None:
        self._title = title
        self._target_return = target_return
        self._time_limit_s = time_limit_s
        self._started_at = time.monotonic()
        self._looks: deque[tuple[float, BufferDescription]] = deque()
        """The buffer's latest states, and when they were seen, by the monotonic clock."""
        self.stage = "starting"

    def observe(self, buffer: BufferDescription, now: float) -> None:
        """Take the buffer's state as the server returned it at `now` (monotonic seconds)."""
        self._looks.append((now, buffer))
        while len(self._looks) > 2 and now - self._looks[0][0] > RATE_WINDOW_S:
            self._looks.popleft()

    @property
    def buffer(self) -> BufferDescription | None:
        """The buffer's latest state, or None before the first one."""
        return self._looks[-1][1] if self._looks else None

    @property
    def fragments_per_s(self) -> float:
        """Fragments admitted per second lately; 0 until there are two states."""
        if len(self._looks) < 2:
            return 0.0
        (before_at, before), (at, after) = self._looks[0], self._looks[-1]
        return rates_of(before, after, max(at - before_at, 1e-9))["fragments admitted"]

    @property
    def admitted(self) -> int:
        """Number of fragments admitted so far."""
        if self.buffer is None:
            return 0
        return self.buffer.state.counters.get("fragments_admitted", 0)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the screen was made."""
        return time.monotonic() - self._started_at

    def waiting_for(self, log: ProgressLog) -> str:
        """Return what the learner waits for, in words."""
        if self.buffer is None or not log.records:
            return self.stage
        if self.buffer.state.waiter_count == 0:
            return "nothing: it is training"
        return self.buffer.state.waiting_reason or "its turn"

    def frame(self, log: ProgressLog) -> RenderableType:
        """Draw one frame."""
        mean_return = log.latest("return_mean_100")
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        table.add_row(
            "mean return",
            f"[bold]{_number(mean_return)}[/] of {self._target_return:g}   "
            f"(last 100 of {_number(log.latest('episode_count'), '.0f')} episodes)",
        )
        table.add_row("", f"[green]{sparkline(log.column('return_mean_100'))}[/]")
        table.add_row("model version", _number(log.latest("model_version"), ".0f"))
        table.add_row(
            "trained on",
            f"staleness when granted {_number(log.latest('staleness_at_grant_mean'), '.2f')}, "
            f"when trained {_number(log.latest('staleness_mean'), '.2f')}, "
            f"oldest {_number(log.latest('staleness_max'), '.0f')} versions",
        )
        table.add_row(
            "fragments",
            f"{self.fragments_per_s:.0f}/s, {self.admitted} so far"
            + (f", {self.buffer.state.chunk_count} chunks held" if self.buffer else ""),
        )
        table.add_row("learner waits for", self.waiting_for(log))
        progress = min(1.0, max(0.0, (mean_return or 0.0) / self._target_return))
        bar = ProgressBar(total=1.0, completed=0.0 if math.isnan(progress) else progress, width=60)
        clock = Text(f"{self.elapsed_s:.0f} s of at most {self._time_limit_s:.0f} s", style="dim")
        foot = Table.grid(padding=(0, 2))
        foot.add_row(bar, clock)
        return Panel(Group(table, Text(), foot), title=self._title, width=100)

    def line(self, log: ProgressLog) -> str:
        """Return one line, for output that is no terminal."""
        return (
            f"{self.elapsed_s:5.0f} s  return {_number(log.latest('return_mean_100'))}"
            f"  version {_number(log.latest('model_version'), '.0f')}"
            f"  staleness {_number(log.latest('staleness_mean'), '.2f')}"
            f"  {self.fragments_per_s:.0f} fragments/s"
            f"  learner waits for: {self.waiting_for(log)}"
        )


def _panel(axes: object, times_s: Sequence[float], log: ProgressLog, names: dict[str, str]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    for name, label in names.items():
        axes.plot(times_s, log.column(name), label=label, linewidth=1.8)
    axes.grid(visible=True, alpha=0.3)
    if len(names) > 1:
        # Above the panel, where it hides no line.
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=len(names), frameon=False, fontsize=9
        )


def write_report(log: ProgressLog, path: Path, *, title: str, target_return: float) -> None:
    """Draw return, staleness and reuse over time into a PNG, with a dashed line at the target."""
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
