"""Lives the same short life in every row of a covering array of settings.

    python tests/crossings/run.py
    python tests/crossings/run.py --row 7 --keep /tmp/row-7

README.md beside this says what happens and what must hold. Exit code 0 means that all rows were
right.
"""

import argparse
import itertools
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from crossings.life import Life  # noqa: E402 - the tests' own packages are found only now
from crossings.settings import VALUES, covering, pairs_of, possible_pairs, why_not  # noqa: E402
from crossings.world import described  # noqa: E402

AT_A_TIME = 2
ROW_S_MAX = 360.0
"""A row that takes longer hangs."""
ROW_END_S = 60.0
SHOWN_MAX = 700
HEAD = 250
HUNG = f"it did not end within {ROW_S_MAX:.0f} s"


@dataclass(frozen=True)
class Done:
    """What became of a row."""

    number: int
    problem: str
    """Empty: it was right."""
    took_s: float
    kept: Path | None
    """Where its ledgers and logs are, if it was wrong."""


def live_row(number: int, seed: int, keep: Path, *, is_told: bool) -> int:
    """Live one row in this process; gives the exit status."""
    setting = covering(seed)[number]
    sys.stdout.write(f"row {number} of seed {seed}: {described(setting)}\n")
    began_at = time.monotonic()

    def say(part: str) -> None:
        if is_told:
            sys.stdout.write(f"{time.monotonic() - began_at:7.2f} {part}\n")
            sys.stdout.flush()

    problem = Life(setting, keep, hash((seed, number)), say).live()
    sys.stdout.write(f"{shortened(problem) or 'right'}\n")
    return 1 if problem else 0


def shortened(problem: str) -> str:
    """A problem on one line: where it was, and how it ends, which of a log says most."""
    line = " | ".join(each.strip() for each in problem.splitlines())
    return line if len(line) <= SHOWN_MAX else f"{line[:HEAD]} ... {line[HEAD - SHOWN_MAX :]}"


def run_row(number: int, seed: int, keep: Path) -> Done:
    """Live one row in a process of its own."""
    began_at = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"row-{number}-", dir=keep))
    command = [sys.executable, __file__, "--seed", str(seed), "--row", str(number)]
    log = folder / "row.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, "--keep", str(folder)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        said, _ = process.communicate(timeout=ROW_S_MAX)
        problem = "" if process.returncode == 0 else "".join(said.splitlines()[1:])
        if process.returncode and not problem:
            problem = shortened(log.read_text())
    except subprocess.TimeoutExpired:
        process.terminate()  # It ends what it has started.
        process.communicate(timeout=ROW_END_S)
        problem = HUNG
    took_s = time.monotonic() - began_at
    return Done(number, problem, took_s, folder if problem else None)


def run_rows(numbers: Sequence[int], seed: int, keep: Path) -> Iterator[Done]:
    """Live rows, some at a time, and tell of each as it ends."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield from pool.map(lambda number: run_row(number, seed, keep), numbers)


def told(done: Done, seed: int) -> str:
    """A row's line, and how to live it alone where it was wrong."""
    setting = described(covering(seed)[done.number])
    came_to = "WRONG" if done.problem else "right"
    line = f"row {done.number:2}: {came_to} in {done.took_s:.0f} s: {setting}\n"
    if done.problem:
        line += f"  {done.problem}\n  ledgers and logs: {done.kept}\n"
        line += f'  alone: make crossings ARGS="--seed {seed} --row {done.number} --verbose"\n'
    return line


def table(numbers: Sequence[int], seed: int) -> str:
    """Which pairs rows hold, as markdown: of each two settings how many of how many."""
    rows = covering(seed)
    held = {pair for number in numbers for pair in pairs_of(rows[number])}
    possible = possible_pairs()
    names = list(VALUES)
    lines = [f"| | {' | '.join(names[1:])} |", f"|---|{'---|' * (len(names) - 1)}"]
    for at, one in enumerate(names[:-1]):
        cells = []
        for other in names[1:]:
            of_both = [pair for pair in possible if (pair[0][0], pair[1][0]) == (one, other)]
            count = sum(pair in held for pair in of_both)
            cells.append(f"{count}/{len(of_both)}" if names.index(other) > at else "")
        lines.append(f"| {one} | {' | '.join(cells)} |")
    share = f"{len(held & possible)} of {len(possible)} pairs in {len(numbers)} rows, seed {seed}."
    return "\n".join([*lines, "", share, "", *left_out()]) + "\n"


def left_out() -> list[str]:
    """The pairs that cannot be, and why."""
    told = []
    for one, other in itertools.combinations(VALUES, 2):
        for value, another in itertools.product(VALUES[one], VALUES[other]):
            if reason := why_not({one: value, other: another}):
                told.append(f"- Left out: {one} {value} with {other} {another}: {reason}.")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the array and of what rows decide")
    parser.add_argument("--row", type=int, help="only this one, in this process")
    parser.add_argument("--rows", type=int, nargs="+", help="only these")
    parser.add_argument("--keep", type=Path, help="folder for ledgers and logs")
    parser.add_argument("--table", type=Path, help="write what was covered into this file")
    parser.add_argument("--verbose", action="store_true", help="tell each part of a life")
    parsed = parser.parse_args()
    keep = parsed.keep or Path(tempfile.mkdtemp(prefix="crossings-"))
    keep.mkdir(parents=True, exist_ok=True)
    if parsed.row is not None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(HUNG))
        return live_row(parsed.row, parsed.seed, keep, is_told=parsed.verbose)
    numbers = parsed.rows or list(range(len(covering(parsed.seed))))
    wrong = 0
    for done in run_rows(numbers, parsed.seed, keep):
        wrong += bool(done.problem)
        sys.stdout.write(told(done, parsed.seed))
        sys.stdout.flush()
    covered = table(numbers, parsed.seed)
    if parsed.table is not None:
        parsed.table.parent.mkdir(parents=True, exist_ok=True)
        parsed.table.write_text(covered)
    sys.stdout.write(f"{covered}\n{len(numbers) - wrong} of {len(numbers)} rows right\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
