"""Which of many log lines are written."""

from breadbox.shared.throttle import Throttle


def test_the_first_of_a_kind_is_said_and_then_one_every_interval_with_how_many() -> None:
    now = [0.0]
    throttle = Throttle(lambda: now[0], interval_s=10.0)
    said = []
    for second in range(25):
        now[0] = float(second)
        said.append((second, throttle.words("a")))
    assert [
        (0, ""),
        (10, " (and 9 more since the last line)"),
        (20, " (and 9 more since the last line)"),
    ] == [(second, words) for second, words in said if words is not None]
    assert throttle.words("b") == ""


def test_a_line_after_a_quiet_time_speaks_of_no_others() -> None:
    now = [0.0]
    throttle = Throttle(lambda: now[0], interval_s=10.0)
    throttle.words("a")
    now[0] = 60.0
    assert throttle.words("a") == ""
