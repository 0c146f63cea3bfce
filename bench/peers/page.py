"""Draws the tables and the picture of docs/studies/performance.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.contenders import BARE, CONTENDERS, OURS, OURS_ON_REDIS, REVERB, ROLES
from bench.peers.rounds import Measured, Result
from bench.workloads import WORKLOADS, payload_bytes

COMMAND = "make bench-peers"

STEPS_PER_S = 100
"""Steps per second of the producers that docs/producers.md counts."""


@dataclass(frozen=True)
class Report:
    """A whole run."""

    machine: str
    """And the day."""
    rounds: int
    seconds: float
    others_share: float
    """Of the machine's processors, that other programs had meanwhile."""
    versions: dict[str, str]
    absent: dict[str, str]
    """Who could not take part, and why."""
    results: list[Result]

    def as_json(self) -> dict[str, Any]:
        """The run as peers.json has it."""
        return {**vars(self), "results": [each.as_json() for each in self.results]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Report":
        """Read what `as_json` made."""
        return cls(**{**data, "results": [Result.from_json(each) for each in data["results"]]})

    @property
    def conditions(self) -> str:
        """Where, when and how the figures were taken."""
        shared = (
            "The machine was quiet"
            if self.others_share < 0.05
            else f"The machine was shared: other programs had {self.others_share:.0%} of its "
            "processors meanwhile"
        )
        return (
            f"{self.machine}; medians of {self.rounds} rounds of {self.seconds:g} s each, "
            f"in turns. {shared}."
        )

    @property
    def caption(self) -> str:
        """The conditions, and the versions of all."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.conditions} {versions}."


def tables(report: Report) -> str:
    """Write the rates, and the processor time; our rate to theirs with the middle half of it."""
    names = _names(report)
    lines = [report.caption, "", *_header([*names, "leads"])]
    for result in report.results:
        cells = [_rate_cell(result, name, report.absent) for name in names]
        lines.append(f"| {result.row.name} | {' | '.join(cells)} | {_leads(result)} |")
    lines += [
        "",
        "Processor time of everything that a row needs, for each fragment or each GB:",
        "",
        *_header(names),
    ]
    for result in report.results:
        cells = [_cpu_cell(result, name, report.absent) for name in names]
        lines.append(f"| {result.row.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def short_table(report: Report) -> str:
    """Write README's table: the rates of some, and which of Breadbox and Reverb leads."""
    names = [
        each.name
        for each in CONTENDERS
        if each in (OURS, OURS_ON_REDIS, REVERB, BARE) and each.name in _names(report)
    ]
    lines = [report.conditions, "", *_header([*names, "leads"])]
    for result in report.results:
        if result.row.in_readme:
            cells = [
                "-" if _why_not(result, name, report.absent) else _rate(result, name)
                for name in names
            ]
            lines.append(f"| {result.row.name} | {' | '.join(cells)} | {_leads(result)} |")
    return "\n".join(lines) + "\n"


def producers_table(report: Report) -> str:
    """Write docs/producers.md's table: how many producers fit at half of what was measured."""
    ours = [each.name for each in (OURS, OURS_ON_REDIS) if each.name in report.versions]
    lines = [
        report.conditions,
        "",
        f"| what producers do | a fragment | {' | '.join(ours)} | producers of {STEPS_PER_S} "
        "steps/s that fit |",
        f"| --- | --- |{' --- |' * len(ours)} --- |",
    ]
    for result in report.results:
        if result.row.kind == "batch":
            continue
        fragment = WORKLOADS[result.row.workload]()
        size, steps = payload_bytes(fragment), len(fragment.reward)
        unit = 1.0 if result.row.unit == "fragments/s" else 1e9 / size
        rates = [result.measured[name].rate * unit for name in ours]
        fit = ", ".join(f"{rate * steps / STEPS_PER_S / 2:,.0f}" for rate in rates)
        lines.append(
            f"| {result.row.name} | {_size(size)}, {steps} steps | "
            f"{' | '.join(f'{rate:,.0f}/s' for rate in rates)} | {fit} |"
        )
    return "\n".join(lines) + "\n"


def _size(count: int) -> str:
    """Write bytes with two digits."""
    return f"{count / 1e6:.2g} MB" if count >= 1e5 else f"{count / 1e3:.2g} kB"


def draw(report: Report, path: Path) -> None:
    """Draw everybody's rate to ours, by row, with the middle half of the rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(9, 0.75 * len(report.results) + 1.6))
    others = [name for name in report.versions if name != OURS.name]
    for number, name in enumerate(others):
        label: str | None = name
        for position, result in enumerate(report.results):
            if not _is_compared(result, OURS.name, name):
                continue
            ratios = result.ratios(OURS.name, name)
            low, middle, high = (1.0 / each for each in reversed(_quartiles(ratios)))
            height = position + 0.18 * (number - (len(others) - 1) / 2)
            axes.errorbar(
                middle,
                height,
                xerr=[[middle - low], [high - middle]],
                fmt="o",
                color=f"C{number}",
                capsize=3,
                label=label,
            )
            axes.text(high, height, f"  {_rate(result, name)}", va="center", fontsize=7)
            label = None
    labels = [
        f"{each.row.name.replace('`', '')}\n{OURS.name} {_rate(each, OURS.name)}"
        for each in report.results
    ]
    axes.axvline(1.0, color="#b5651d", linewidth=2, label=OURS.name)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel(f"rate to {OURS.name}'s: further right is faster; bars: half of the rounds")
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_title(report.machine, loc="left", fontsize=9)
    chart.tight_layout()
    chart.savefig(path, dpi=120)
    pyplot.close(chart)


def _names(report: Report) -> list[str]:
    known = {**report.versions, **report.absent}
    return [each.name for each in CONTENDERS if each.name in known]


def _header(names: Sequence[str]) -> list[str]:
    return [f"| what a user does | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]


def _rate_cell(result: Result, name: str, absent: dict[str, str]) -> str:
    if why_not := _why_not(result, name, absent):
        return why_not
    cell = _rate(result, name)
    for ours, label in ((OURS, "ours"), (OURS_ON_REDIS, "on Redis")):
        if name not in (OURS.name, ours.name) and _is_compared(result, ours.name, name):
            low, middle, high = _quartiles(result.ratios(ours.name, name))
            cell += f"; {label} {middle:.2f} × ({low:.2f} to {high:.2f})"
    return cell


def _leads(result: Result) -> str:
    """Say which of Breadbox and Reverb leads: was faster in the whole middle half of the rounds."""
    verdicts = []
    for ours in (OURS, OURS_ON_REDIS):
        if _is_compared(result, ours.name, REVERB.name):
            low, middle, high = _quartiles(result.ratios(ours.name, REVERB.name))
            if low > 1:
                verdict = f"{OURS.name}, {middle:.1f} ×"
            elif high < 1:
                verdict = f"{REVERB.name}, {1 / middle:.1f} ×"
            else:
                verdict = "even"
            verdicts.append(verdict if ours is OURS else f"on Redis: {verdict}")
    return "; ".join(verdicts)


def _cpu_cell(result: Result, name: str, absent: dict[str, str]) -> str:
    if why_not := _why_not(result, name, absent):
        return why_not
    parts = result.measured[name].cpu

    def show(cpu: float) -> str:
        return f"{cpu * 1e6:,.0f} µs" if result.row.unit == "fragments/s" else f"{cpu:.2f} s"

    shares = ", ".join(f"{role} {show(parts[role])}" for role in ROLES if role in parts)
    return show(sum(parts.values())) + (f" ({shares})" if len(parts) > 1 else "")


def _why_not(result: Result, name: str, absent: dict[str, str]) -> str:
    measured = result.measured.get(name, Measured())
    why_not = absent.get(name) or ("" if measured.rates else measured.why_not or "not measured")
    return f"skipped: {why_not.replace('|', '/')}" if why_not else ""


def _is_compared(result: Result, *names: str) -> bool:
    return all(name in result.measured and result.measured[name].rates for name in names)


def _rate(result: Result, name: str) -> str:
    if name not in result.measured or not result.measured[name].rates:
        return "not measured"
    rate = result.measured[name].rate
    return f"{rate:,.0f}/s" if result.row.unit == "fragments/s" else f"{rate:.2f} GB/s"


def _quartiles(ordered: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median, the upper quartile."""
    last = len(ordered) - 1
    low, middle, high = (ordered[round(last * part)] for part in (0.25, 0.5, 0.75))
    return low, middle, high
