"""`python -m bench.peers`: Breadbox beside what one would take instead, in one alternating run.

Reverb and TransferQueue bring gigabytes of one exact version, so each gets a virtual environment of
its own, below bench/out. Who cannot be installed is skipped, and the table says why.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click
import psutil

from bench.peers import page
from bench.peers.contenders import CONTENDERS, Contender, NoContestError, Running, installed
from bench.peers.rounds import Arrays, Others, play
from bench.peers.rows import ROWS
from bench.report import machine, write_into
from bench.workloads import WORKLOADS
from breadbox.model.trees import flatten
from breadbox.payload.dtypes import stored_array
from breadbox.payload.fragments import fragment_tree

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_PAGE = _DOCS / "studies" / "performance.md"


@click.command()
@click.option("--quick", is_flag=True, help="Fewer and shorter rounds: a quarter of an hour.")
@click.option(
    "--once", is_flag=True, help="One short round of what needs nothing installed: does it run?"
)
@click.option("--publish", is_flag=True, help="Write README.md, page and picture below docs/, too.")
@click.option("--last", is_flag=True, help="Measure nothing: show the last run.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=_ROOT / "bench" / "out",
    show_default="bench/out",
    help="Gets peers.json with all rounds, peers.md, peers.png, and the environments of peers.",
)
def main(quick: bool, once: bool, publish: bool, last: bool, out: Path) -> None:
    """Measure Breadbox and its peers on the same fragments, row by row, in turns."""
    out.mkdir(parents=True, exist_ok=True)
    raw = out / "peers.json"
    if last:
        report = page.Report.from_json(json.loads(raw.read_text()))
    else:
        report = _measure(
            out,
            [each for each in CONTENDERS if not (once and each.requirement)],
            rounds=1 if once else 9 if quick else 15,
            seconds=0.02 if once else 0.3 if quick else 0.6,
            limit_s=0.0 if once else 600.0 if quick else 2400.0,
        )
        raw.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    (out / "peers.md").write_text(page.tables(report))
    page.draw(report, out / "peers.png")
    print(page.tables(report))
    print(f"written: {raw}, {out / 'peers.md'}, {out / 'peers.png'}")
    if publish:
        images = _DOCS / "images"
        write_into(_PAGE, page.tables(report), page.COMMAND)
        write_into(_DOCS / "producers.md", page.producers_table(report), page.COMMAND)
        write_into(_ROOT / "README.md", page.short_table(report), page.COMMAND)
        page.draw(report, images / "peers.png")
        (images / "peers.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
        print(f"published: README.md, {_PAGE}, {images / 'peers.png'} and .json")


def _measure(
    out: Path, contenders: Sequence[Contender], *, rounds: int, seconds: float, limit_s: float
) -> page.Report:
    versions, absent, running = {}, {}, {}
    with ExitStack() as stack:
        for contender in contenders:
            try:
                version = installed(contender, out)
                running[contender.name] = Running(contender, out)
            except NoContestError as error:
                absent[contender.name] = str(error)
                _tell(f"{contender.name}: {error}")
                continue
            stack.callback(running[contender.name].close)
            versions[contender.name] = version
            _tell(f"{contender.name} {version} is there")
        before_s = _used_s(running)
        with Others() as others:
            results = play(
                ROWS,
                running,
                workload_arrays(),
                rounds=rounds,
                seconds=seconds,
                limit_s=limit_s,
                tell=_tell,
            )
        own_s = _used_s(running) - before_s
    counts = [len(each.rates) for result in results for each in result.measured.values()]
    return page.Report(
        machine=machine(),
        rounds=max(counts),
        seconds=seconds,
        others_share=others.share(own_s),
        versions=versions,
        absent=absent,
        results=results,
    )


def workload_arrays() -> dict[str, Arrays]:
    """Types and shapes of the arrays of a fragment, by workload."""
    arrays: dict[str, Arrays] = {}
    for workload, make in WORKLOADS.items():
        _, leaves = flatten(fragment_tree(make()))
        stored = [stored_array(path, leaf) for path, leaf in leaves]
        arrays[workload] = [(type_name, list(array.shape)) for array, type_name in stored]
    return arrays


def _used_s(running: dict[str, Running]) -> float:
    own = psutil.Process().cpu_times()
    return own.user + own.system + sum(sum(each.cpu_s().values()) for each in running.values())


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    main()
