"""`make bench-peers`: who does what in which turn, and what the page says of it; not how fast."""

import re
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.peers import page
from bench.peers.contenders import (
    CONTENDERS,
    OURS,
    OURS_ON_REDIS,
    REVERB,
    Contender,
    NoContestError,
    Role,
    Running,
    installed,
)
from bench.peers.rounds import Arrays, Measured, Result, play
from bench.peers.rows import ROWS, Row
from bench.peers.side import Order
from bench.report import machine, marks, write_into

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

ONE = Row("append one at a time", "append", "small")
BATCH = Row("a batch of 2", "batch", "small", 2)
LARGE = Row("append groups of 3", "append", "large", 3, "GB/s")
ARRAYS: Mapping[str, Arrays] = {
    "small": [("<f4", [4]), ("|b1", [2])],
    "large": [("|u1", [1_000_000])],
}

BEGIN, END = marks(page.COMMAND)


class _Acting:
    """Takes a known time and processor time for each step, and notes whose turn it was."""

    def __init__(self, name: str, step_s: float, turns: list[tuple[str, str]]) -> None:
        self._name, self._step_s, self._turns = name, step_s, turns
        self._used_s = 0.0
        self.orders: list[Order] = []

    def ask(self, order: Order, limit_s: float) -> Any:
        assert limit_s > 0
        self.orders.append(order)
        if not order.is_ready:
            return None
        self._turns.append((order.kind, self._name))
        self._used_s += order.steps * self._step_s / 2
        return {"amount": order.steps * order.group, "seconds": order.steps * self._step_s}

    def cpu_s(self) -> dict[tuple[Role, int], float]:
        third_s = self._used_s / 3
        return {("caller", 1): third_s, ("server", 2): third_s, ("server", 3): third_s}


class _Ending(_Acting):
    """Ends when it is asked for a batch."""

    def ask(self, order: Order, limit_s: float) -> Any:
        if order.kind == "batch":
            raise NoContestError("it ended with status 3")
        return super().ask(order, limit_s)


def test_everybody_takes_a_turn_in_each_row_and_another_one_begins_each_round() -> None:
    turns: list[tuple[str, str]] = []
    names = ("a", "b", "c")
    actors = {name: _Acting(name, 0.01, turns) for name in names}

    play([ONE, BATCH], actors, ARRAYS, rounds=2, seconds=0.1, limit_s=60.0)

    orders = ["abc", "abc", "abc", "abc", "bca", "bca"]  # The first two warm up.
    kinds = ["append", "batch"] * 3
    assert turns == [
        (kind, name) for kind, order in zip(kinds, orders, strict=True) for name in order
    ]


def test_a_turn_lasts_as_long_as_it_is_to_and_rates_and_processor_time_are_of_its_amount() -> None:
    actor = _Acting("a", 0.02, [])

    (one, batch, large) = play(
        [ONE, BATCH, LARGE], {"a": actor}, ARRAYS, rounds=3, seconds=0.1, limit_s=60.0
    )

    assert [5, 5, 5] == [each.steps for each in actor.orders[-6:] if each.is_ready]
    assert [50.0] * 3 == pytest.approx(one.measured["a"].rates)
    assert 100.0 == pytest.approx(batch.measured["a"].rate)
    assert 0.15 == pytest.approx(large.measured["a"].rate), "3 MB in 20 ms"
    parts = {"caller": 0.01 / 3, "server": 0.02 / 3}
    assert parts == pytest.approx(one.measured["a"].cpu)
    assert {role: each / 0.003 for role, each in parts.items()} == pytest.approx(
        large.measured["a"].cpu
    )


def test_what_is_held_for_a_turn_is_bounded_however_fast_somebody_is() -> None:
    actor = _Acting("a", 1e-6, [])

    play([BATCH, LARGE], {"a": actor}, {**ARRAYS, "small": [("|u1", [10**6])]}, rounds=1,
         seconds=1.0, limit_s=60.0)  # fmt: skip

    last = [each for each in actor.orders if each.is_ready][-2:]
    assert [134, 89] == [each.steps for each in last], "256 MiB of 2 MB and of 3 MB"


def test_who_ends_is_left_out_of_that_row_alone_and_the_table_says_why() -> None:
    actors = {
        OURS.name: _Acting(OURS.name, 0.01, []),
        "Reverb": _Ending("Reverb", 0.02, []),
    }

    results = play([ONE, BATCH], actors, ARRAYS, rounds=2, seconds=0.1, limit_s=60.0)

    assert [2, 2] == [len(each.measured[OURS.name].rates) for each in results]
    lines = page.tables(_report(results)).splitlines()
    (batch,) = [line for line in lines if line.startswith("| a batch of 2") and "200/s" in line]
    assert "| skipped: it ended with status 3 |" in batch
    (one,) = [line for line in lines if line.startswith("| append one") and "100/s" in line]
    assert "| 50/s; ours 2.00 × (2.00 to 2.00) |" in one


def test_no_round_begins_after_the_time_but_one_counts() -> None:
    (one,) = play([ONE], {"a": _Acting("a", 0.01, [])}, ARRAYS, rounds=9, seconds=0.1, limit_s=0.0)

    assert 1 == len(one.measured["a"].rates)


def test_ratios_are_of_the_same_round() -> None:
    result = Result(ONE, {"ours": Measured([1.0, 8.0, 3.0]), "theirs": Measured([2.0, 4.0, 3.0])})

    assert [0.5, 1.0, 2.0] == result.ratios("ours", "theirs")


def test_the_page_gets_tables_with_who_is_absent_and_a_picture(tmp_path: Path) -> None:
    actors = {
        OURS.name: _Acting(OURS.name, 0.01, []),
        "Reverb": _Acting("Reverb", 0.02, []),
    }
    results = play([ONE, LARGE], actors, ARRAYS, rounds=4, seconds=0.1, limit_s=60.0)
    report = _report(results, absent={"TransferQueue": "pip: no matching distribution"})
    text = tmp_path / "page.md"
    text.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")

    for _ in range(2):  # Twice is once.
        write_into(text, page.tables(page.Report.from_json(report.as_json())), page.COMMAND)
    page.draw(report, tmp_path / "peers.png")

    assert f"before\n{BEGIN}\n\n{page.tables(report)}\n{END}\nafter\n" == text.read_text()
    assert 4 == text.read_text().count("| skipped: pip: no matching distribution |")
    assert "other programs had 25% of its processors" in text.read_text()
    assert (tmp_path / "peers.png").stat().st_size > 1000


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "page.md"
    text.write_text("nothing\n")

    with pytest.raises(ValueError, match="needs one"):
        write_into(text, "text", page.COMMAND)

    assert "nothing\n" == text.read_text()


@pytest.mark.parametrize(
    ("theirs", "verdicts"),
    [
        ([1.0, 1.0, 1.0, 9.0, 1.0], "Breadbox, 4.0 ×; on Redis: even"),
        ([8.0, 8.0, 8.0, 8.0, 0.1], "Reverb, 2.0 ×; on Redis: Reverb, 4.0 ×"),
    ],
)
def test_who_leads_was_faster_in_the_whole_middle_half_of_the_rounds(
    theirs: list[float], verdicts: str
) -> None:
    rates = {OURS.name: [4.0] * 5, OURS_ON_REDIS.name: [2.0, 1.0, 2.0, 1.0, 0.5]}
    measured = {name: Measured(each, [{"caller": 1.0}] * 5) for name, each in rates.items()}
    measured[REVERB.name] = Measured(theirs, [{"caller": 1e-6, "server": 3e-6}] * 5)

    report = _report([Result(ONE, measured)])

    assert f"| {verdicts} |" in page.tables(report)
    assert "| 4 µs (caller 1 µs, server 3 µs) |" in page.tables(report)


def test_readme_shows_some_rows_of_four_and_nothing_where_somebody_lacks_one() -> None:
    lacking = replace(LARGE, in_readme=False)
    results = [
        Result(ONE, {OURS.name: Measured([4.0], [{}]), REVERB.name: Measured(why_not="it ended")}),
        Result(lacking, {OURS.name: Measured([4.0], [{}])}),
    ]

    text = page.short_table(_report(results, absent={"TransferQueue": "pip: nothing"}))

    lines = text.splitlines()[2:]
    assert "| what a user does | Breadbox | Reverb | leads |" == lines[0]
    assert [f"| {ONE.name} | 4/s | - |  |"] == lines[2:]


def test_the_header_says_how_python_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, said in (
        ("'--enable-optimizations' '--with-lto'", "with PGO and with LTO"),
        ("'--enable-shared'", "without PGO and without LTO"),
        (None, "without PGO and without LTO"),
    ):
        monkeypatch.setattr(sysconfig, "get_config_var", {"CONFIG_ARGS": options}.get)
        assert re.search(rf", Python 3\.[\d.]+ built {said}$", machine())


def test_what_pip_does_not_find_is_skipped_with_pips_reason(tmp_path: Path) -> None:
    absent = Contender("Absent", "bench.peers.bare", "absent", "breadbox-absent-peer", "absent")
    # An environment whose pip has no index, and not the seconds that making one takes.
    python = tmp_path / "peer-absent" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\necho "ERROR: No matching distribution found for $5" >&2\nexit 1\n'
    )
    python.chmod(0o755)

    with pytest.raises(
        NoContestError,
        match=r"^pip: ERROR: No matching distribution found for breadbox-absent-peer$",
    ):
        installed(absent, tmp_path)


def test_a_peer_that_does_not_start_says_why_and_one_that_hangs_is_ended(tmp_path: Path) -> None:
    failing = Contender("Failing", "bench.peers.nobody", "numpy", imports="numpy")

    with pytest.raises(NoContestError, match="No module named"):
        Running(failing, tmp_path)

    pickled = next(each for each in CONTENDERS if each.module == "bench.peers.pickled")
    running = Running(pickled, tmp_path)
    wait = Order("batch", "vector", [("<f4", [4])], 1, steps=1, is_ready=True)
    with pytest.raises(NoContestError, match="took longer than 1 s"):
        running.ask(wait, 1.0)  # Nothing was appended, so it would wait for ever.
    with pytest.raises(NoContestError, match="took longer than 1 s"):
        running.ask(wait, 1.0)
    assert {} == running.cpu_s()


@pytest.mark.long
@pytest.mark.parametrize("module", ["breadbox", "breadbox_redis", "pickled", "bare"])
def test_who_needs_nothing_installed_does_every_row_with_real_processes(
    module: str, tmp_path: Path
) -> None:
    from bench.peers.__main__ import workload_arrays

    contender = next(each for each in CONTENDERS if each.module == f"bench.peers.{module}")
    # A crowd is the same processes for all: once will do.
    kinds: tuple[str, ...] = ("append", "batch")
    if contender.streams:
        kinds = ("append", "batch", "crowd", "stream", "streams")
    rows = [row for row in ROWS if row.workload == "vector" and row.kind in kinds]
    running = Running(contender, tmp_path)
    try:
        results = play(
            rows, {"it": running}, workload_arrays(), rounds=1, seconds=0.05, limit_s=0.0
        )
    finally:
        running.close()

    assert [""] * len(rows) == [each.measured["it"].why_not for each in results]
    assert all(each.measured["it"].rate > 0 for each in results)
    roles = {"caller", "server", "Redis"} - {
        "breadbox": {"Redis"},
        "breadbox_redis": set[str](),
    }.get(module, {"server"})
    assert all(roles == set(each.measured["it"].cpu) for each in results)


def _report(results: list[Result], absent: dict[str, str] | None = None) -> page.Report:
    return page.Report(
        machine="2 cores, 2026-11-22",
        rounds=2,
        seconds=0.1,
        others_share=0.25,
        versions={OURS.name: "0.1.0", "Reverb": "0.14.0"},
        absent=absent or {},
        results=results,
    )
