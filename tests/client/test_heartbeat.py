import os
from pathlib import Path

from breadbox.transport.heartbeat import (
    AGE_VARIABLE,
    FILE_VARIABLE,
    Heartbeat,
    check,
    from_environment,
)
from support.clock import ManualClock


def test_a_loop_that_turns_is_healthy(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    from_environment({FILE_VARIABLE: str(path)}).beat()

    assert "" == check({FILE_VARIABLE: str(path)}, path.stat().st_mtime + 120)


def test_a_loop_that_hangs_is_found_after_the_age_that_was_set(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    Heartbeat(path).beat()
    late = path.stat().st_mtime + 31
    environment = {FILE_VARIABLE: str(path), AGE_VARIABLE: "30"}

    assert "the last heartbeat was 31 s ago" == check(environment, late)


def test_a_loop_that_never_turned_is_not_healthy(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"

    assert "no heartbeat: No such file or directory" == check({FILE_VARIABLE: str(path)}, 0)
    assert f"{FILE_VARIABLE} is not set" == check({}, 0)


def test_beats_in_quick_succession_touch_the_file_once_a_second(tmp_path: Path) -> None:
    path, clock = tmp_path / "heartbeat", ManualClock()
    heartbeat = Heartbeat(path, clock)
    heartbeat.beat()
    os.utime(path, (0, 0))
    heartbeat.beat()
    assert 0 == path.stat().st_mtime

    clock.advance(1.0)
    heartbeat.beat()
    assert 0 < path.stat().st_mtime


def test_a_heartbeat_that_cannot_be_written_does_not_stop_the_loop(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "missing" / "heartbeat").beat()
    Heartbeat(None).beat()


def test_a_file_that_could_not_be_written_for_a_while_gets_its_beats_again(tmp_path: Path) -> None:
    """A disk that was full for a moment must not end a worker that lives."""
    path, clock = tmp_path / "away" / "heartbeat", ManualClock()
    heartbeat = Heartbeat(path, clock)
    heartbeat.beat()
    assert not path.exists()

    path.parent.mkdir()
    clock.advance(1.0)
    heartbeat.beat()
    assert path.exists()
