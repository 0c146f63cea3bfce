"""The figures of `python -m bench.freshness`, of runs made up here."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench.freshness import SETTINGS, curve, draw, summary, told
from bench.local_run import Finished, LocalRun

from breadbox_learner.intervals import interval


def run(*returns: float, steps: int = 1000) -> Finished:
    """A run whose mean return was so after every *steps* steps."""
    records: list[dict[str, Any]] = [
        {
            "return_mean_100": mean,
            "environment_steps": steps * (number + 1),
            "steps": steps * number,
            "time_s": 1.0 + number,
            "fetch_wait_s": 0.5,
            "staleness_mean": 1.5,
            "staleness_max": 2,
            "use_count_mean": 1.0,
        }
        for number, mean in enumerate(returns)
    ]
    return Finished(LocalRun("made up", learn=()), 0, records)


def test_an_interval_is_students() -> None:
    assert {"mean": 3.0, "half_width": pytest.approx(2.78 * 2.5**0.5 / 5**0.5)} == interval(
        [1.0, 2.0, 3.0, 4.0, 5.0]
    )
    assert {"mean": 7.0, "half_width": None} == interval([7.0])
    assert {"mean": None, "half_width": None} == interval([])


def test_a_run_that_missed_the_target_is_told_and_not_averaged() -> None:
    row = summary("a setting", [run(20, 200), run(20, 30, 40), run(20, 100, 196)])
    assert (3, 2) == (row["seeds"], row["reached"])
    assert 2500.0 == row["environment_steps"]["mean"]
    assert "2 of 3 seeds" in told(row)
    assert "none of 1 seeds" in told(summary("another", [run(20)]))


def test_a_curve_is_the_mean_over_seeds_while_all_last() -> None:
    steps, means, half_widths = curve([run(10, 20, 30), run(30, 40)])
    assert (0.0, 2000.0) == (steps[0], steps[-1])
    assert 30.0 == means[-1]
    assert half_widths[-1] > 0.0


def test_figures_and_picture_are_made_of_every_setting(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra breadbox[bench]")
    labels = [each.label for each in SETTINGS]
    assert len(labels) == len(set(labels))
    runs = [[run(20, 200), run(20, 30, 197)], [run(20)], []]
    rows = [summary(label, each) for label, each in zip(labels, runs, strict=False)]
    json.dumps(rows, allow_nan=False)
    draw(labels[:3], runs, rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0
