"""Figures and how they are taken: contenders take turns, so that noise falls on all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One row of the report."""

    name: str
    workload: str
    value: float
    unit: str
    limit: float | None = None
    """What it is compared with, in the same unit; see `limit_is`."""
    limit_is: str = ""
    reach: float | None = None
    """The ratio to reach, or the value if there is no limit; None: for information."""
    is_lower_better: bool = False
    peers: Mapping[str, float] = field(default_factory=dict)
    """The same thing by other means, same run, same unit."""
    also: Mapping[str, float] = field(default_factory=dict)
    """What else was measured with it; each name says its unit."""

    @property
    def ratio(self) -> float | None:
        """Value to limit."""
        return None if not self.limit else self.value / self.limit

    @property
    def is_reached(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.reach is None:
            return None
        got = self.value if self.ratio is None else self.ratio
        return got <= self.reach if self.is_lower_better else got >= self.reach

    def as_json(self) -> dict[str, Any]:
        """The row as results.json has it."""
        return asdict(self) | {"ratio": self.ratio, "is_reached": self.is_reached}


@dataclass
class Contender:
    """Something that moves bytes or things, measured by rounds."""

    act: Callable[[], None]
    amount: float
    """Moved by one act, in the figure's unit times seconds."""
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None


def rates(
    contenders: Mapping[str, Contender], *, rounds: int, warm_up_rounds: int = 1
) -> dict[str, float]:
    """Let contenders take turns; the median rate of each, without the first rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(warm_up_rounds + rounds):
        for name, contender in contenders.items():
            contender.before()
            start = time.perf_counter()
            contender.act()
            elapsed = time.perf_counter() - start
            contender.after()
            if round_number >= warm_up_rounds:
                seconds[name].append(elapsed)
    return {
        name: contender.amount / statistics.median(seconds[name])
        for name, contender in contenders.items()
    }


def percentile(values: list[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
