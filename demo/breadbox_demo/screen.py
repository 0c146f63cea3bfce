"""What the demo shows while it runs."""

import math
import time
from collections import deque

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from breadbox.model.types import BufferDescription
from breadbox_demo.progress import ProgressLog

SPARKS = "▁▂▃▄▅▆▇█"
RATE_WINDOW_S = 5.0


class RateMeter:
    """Events per second over the last few seconds of a growing counter."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> None:
        """Note the counter's value at `now` (monotonic seconds)."""
        self._samples.append((now, count))
        while len(self._samples) > 2 and now - self._samples[0][0] > self._window_s:
            self._samples.popleft()

    @property
    def per_second(self) -> float:
        """0 until there are two samples."""
        if len(self._samples) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return (last - first) / max(last_at - first_at, 1e-9)


def sparkline(values: list[float], width: int = 48) -> str:
    """A line of block characters: the values, thinned to `width`, from lowest to highest."""
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
    """Keeps what is needed to draw one frame after another."""

    def __init__(self, *, title: str, target_return: float, time_limit_s: float) -> None:
        self._title = title
        self._target_return = target_return
        self._time_limit_s = time_limit_s
        self._fragments = RateMeter()
        self._started_at = time.monotonic()
        self.buffer: BufferDescription | None = None
        self.stage = "starting"

    def observe(self, buffer: BufferDescription) -> None:
        """Take in the buffer's state as the service just returned it."""
        self.buffer = buffer
        self._fragments.add(time.monotonic(), self.admitted)

    @property
    def admitted(self) -> int:
        """Fragments admitted so far."""
        if self.buffer is None:
            return 0
        return self.buffer.state.counters.get("fragments_admitted", 0)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the screen was made."""
        return time.monotonic() - self._started_at

    def waiting_for(self, log: ProgressLog) -> str:
        """What the learner waits for, in words."""
        if self.buffer is None or not log.records:
            return self.stage
        if self.buffer.state.waiter_count == 0:
            return "nothing: it is training"
        return self.buffer.state.waiting_reason or "its turn"

    def frame(self, log: ProgressLog) -> RenderableType:
        """One frame."""
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
            f"staleness mean {_number(log.latest('staleness_mean'), '.2f')}, "
            f"oldest {_number(log.latest('staleness_max'), '.0f')} versions",
        )
        table.add_row(
            "fragments",
            f"{self._fragments.per_second:.0f}/s, {self.admitted} so far"
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
        """One line, for output that is no terminal."""
        return (
            f"{self.elapsed_s:5.0f} s  return {_number(log.latest('return_mean_100'))}"
            f"  version {_number(log.latest('model_version'), '.0f')}"
            f"  staleness {_number(log.latest('staleness_mean'), '.2f')}"
            f"  {self._fragments.per_second:.0f} fragments/s"
            f"  learner waits for: {self.waiting_for(log)}"
        )
