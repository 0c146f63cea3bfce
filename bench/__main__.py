"""`python -m bench`: every figure beside its limit, in one run."""

import json
import subprocess
import sys
from collections.abc import Iterator, Set
from pathlib import Path

import click
from rich.console import Console

from bench import report
from bench.beside_rows import beside_rows
from bench.gateway_rows import gateway_rows
from bench.learner import learner_rows
from bench.measure import Figure
from bench.mirror_rows import mirror_rows
from bench.offline import HOW_TO_COMPARE, offline_rows
from bench.overload import overload_rows
from bench.payload_rows import payload_rows
from bench.reading_rows import reading_rows
from bench.recovery import recovery_rows, takeover_rows
from bench.rollout import rollout_rows
from bench.scale import scale_rows
from bench.service_rows import service_rows

_HERE = Path(__file__).parent
_SECTIONS = (
    *("payload", "service", "overload", "reading", "gateway"),
    *("rollout", "learner", "mirror", "core"),
)
_SECTIONS_BY_NAME = ("recovery", "takeover", "offline", "scale")
"""Measured only where they are asked for: together they take longer than all the others."""


@click.command()
@click.option("--quick", is_flag=True, help="The same rows with fewer rounds: two minutes.")
@click.option("--once", is_flag=True, help="Each row once and small, to see that it runs.")
@click.option("--only", type=click.Choice(_SECTIONS + _SECTIONS_BY_NAME), help="One section only.")
@click.option(
    "--all",
    "is_all",
    is_flag=True,
    help=f"Also {', '.join(_SECTIONS_BY_NAME)}: two to three times as long.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=_HERE / "out",
    show_default="bench/out",
    help="Where results.json and results.png go.",
)
@click.option(
    "--rllib-python",
    envvar="BREADBOX_BENCH_RLLIB_PYTHON",
    help="Interpreter of an environment with ray[rllib] and torch, to measure offline data beside.",
)
@click.option("--publish", is_flag=True, help="Write the table of docs/studies; --only scale.")
def main(
    quick: bool,
    once: bool,
    only: str | None,
    is_all: bool,
    out: Path,
    rllib_python: str | None,
    publish: bool,
) -> None:
    """Measure Breadbox on this machine, side by side with what bounds it."""
    if only and is_all:
        raise click.UsageError("--only names one section, --all means every one: give one of them")
    if publish and only != "scale":
        raise click.UsageError("--publish is for --only scale")
    sections = {only} if only else {*_SECTIONS, *(_SECTIONS_BY_NAME if is_all else ())}
    console = Console(width=None if sys.stdout.isatty() else 160)
    figures = []
    size = 0 if once else 1 if quick else 2
    for figure in _figures(size, sections, rllib_python, out, publish):
        console.print(f"{figure.workload}: {figure.name}: {figure.value:,.2f} {figure.unit}")
        figures.append(figure)
    report.show(figures, console)
    if "offline" in sections and rllib_python is None:
        console.print(HOW_TO_COMPARE, markup=False)
    report.write(figures, out)
    console.print(f"written: {out / 'results.json'}, {out / 'results.png'}")


def _figures(
    size: int, sections: Set[str], rllib_python: str | None, out: Path, publish: bool
) -> Iterator[Figure]:
    """Measure; `size` is 0 with `--once`, 1 with `--quick`, else 2, and picks one of three."""
    if "payload" in sections:
        yield from payload_rows(rounds=(1, 5, 25)[size])
        yield from beside_rows(rounds=(1, 3, 9)[size])
    if "service" in sections:
        yield from service_rows(
            rounds=(1, 3, 10)[size],
            chunk_count=(2_000, 20_000, 100_000)[size],
            wake_count=(5, 100, 500)[size],
        )
    if "overload" in sections:
        yield from overload_rows(rounds=(1, 3, 9)[size], seconds=(0.2, 1.0, 2.0)[size])
    if "reading" in sections:
        yield from reading_rows(rounds=(1, 3, 9)[size])
    if "gateway" in sections:
        yield from gateway_rows(rounds=(1, 5, 25)[size])
    if "recovery" in sections:
        yield from recovery_rows(
            fragment_count=(1_000, 20_000, 100_000)[size], rounds=(1, 3, 5)[size]
        )
    if "takeover" in sections:
        yield from takeover_rows(
            fragment_count=(1_000, 20_000, 100_000)[size], rounds=(1, 10, 10)[size]
        )
    if "rollout" in sections:
        yield from rollout_rows(rounds=(1, 12, 40)[size])
    if "learner" in sections:
        yield from learner_rows(batches=(5, 20, 40)[size])
    if "mirror" in sections:
        yield from mirror_rows(
            rounds=(1, 15, 50)[size],
            frame_steps=(200, 10_000, 10_000)[size],
            lag_count=(5, 200, 1_000)[size],
        )
    if "offline" in sections:
        yield from offline_rows(
            rounds=(1, 5, 15)[size],
            row_count=(500, 10_000, 10_000)[size],
            rllib_python=rllib_python,
        )
    if "scale" in sections:
        yield from scale_rows(
            rounds=(1, 5, 15)[size],
            seconds=(1.0, 2.0, 8.0)[size],
            directory=out,
            docs=_HERE.parent / "docs" if publish else None,
        )
    if "core" in sections:
        yield from _core_figures(("--once", "--quick", "")[size])


def _core_figures(option: str) -> Iterator[Figure]:
    """The core alone, by bench/core.py: cost at the largest size against 1,000 chunks."""
    command = [sys.executable, str(_HERE / "core.py"), *([option] if option else [])]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = json.loads((_HERE / "out" / "core.json").read_text())
    sizes = [row["size"] for row in rows if row.get("ratio") is not None]
    for row in rows:
        if row.get("ratio") is not None and row["size"] == max(sizes):
            yield Figure(
                name=f"core: {row['name']} at {row['size']:,} chunks",
                workload="core",
                value=row["value"],
                unit=row["unit"],
                limit=row["value"] / row["ratio"],
                limit_is="at 1,000 chunks",
                reach=2.0,
                is_lower_better=True,
            )


if __name__ == "__main__":
    main()
