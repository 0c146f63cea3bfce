"""The demo's view of what the learner wrote."""

import math
from pathlib import Path

from breadbox.model.types import BufferConfig, BufferDescription, BufferState
from breadbox_demo.screen import ProgressLog, Screen, sparkline


def test_a_line_still_being_written_is_left_for_the_next_poll(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    log = ProgressLog(path)
    assert 0 == log.poll(), "a file that is not there yet is no news"

    path.write_text('{"update": 1}\n{"upda')
    assert 1 == log.poll()
    path.write_text('{"update": 1}\n{"update": 2}\n')
    assert 1 == log.poll()

    assert [1.0, 2.0] == log.column("update")


def test_a_value_that_a_record_lacks_is_nan_in_its_column_and_skipped_by_latest(
    tmp_path: Path,
) -> None:
    path = tmp_path / "progress.jsonl"
    path.write_text(
        '{"update": 1, "return_mean_100": 9.5}\n{"update": 2, "return_mean_100": null}\n'
    )
    log = ProgressLog(path)
    log.poll()

    column = log.column("return_mean_100")
    assert 9.5 == column[0]
    assert math.isnan(column[1])
    assert 9.5 == log.latest("return_mean_100")
    assert 2.0 == log.latest("update"), "the newest of several"
    assert None is log.latest("loss")


def test_sparkline_spans_its_blocks_from_lowest_to_highest() -> None:
    assert "▁█" == sparkline([1.0, 5.0])
    assert "▁█" == sparkline([1.0, math.nan, 5.0])
    assert "" == sparkline([1.0])
    assert 48 == len(sparkline([float(i) for i in range(1000)], width=48))


def screen_that_saw(*counts: tuple[float, int]) -> Screen:
    screen = Screen(title="", target_return=1.0, time_limit_s=1.0)
    for now, count in counts:
        state = BufferState(counters={"fragments_admitted": count})
        screen.observe(BufferDescription("default", BufferConfig(), "s", 0, state), now)
    return screen


def test_rate_is_taken_over_the_window_only() -> None:
    assert 0.0 == screen_that_saw().fragments_per_s
    assert 0.0 == screen_that_saw((0.0, 5)).fragments_per_s
    screen = screen_that_saw((0.0, 0), (10.0, 1000), (11.0, 1000), (12.0, 1000))
    assert 0.0 == screen.fragments_per_s, "the burst is more than five seconds ago"


def test_rate_is_that_of_the_last_seconds_while_a_counter_grows() -> None:
    """Looks may be longer apart than the window: two of them are always kept."""
    assert 10.0 == screen_that_saw((0.0, 0), (10.0, 1000), (20.0, 1100)).fragments_per_s
