import pytest

from breadbox_learner.runs import Lines
from support.clock import ManualClock


def record(
    update: int, mean: float | None = None, episode_count: int = 0
) -> dict[str, float | int | str | None]:
    return {
        "update": update,
        "return_mean_100": mean,
        "episode_count": episode_count,
        "model_version": update,
        "staleness_mean": 1.25,
        "staleness_at_grant_mean": 0.25,
        "staleness_max": 2,
        "steps": 2048,
        "environment_steps": 4096,
        "fetch_wait_s": 0.034,
    }


def test_a_line_says_what_a_run_has_come_to() -> None:
    said: list[str] = []
    Lines(said.append, clock=ManualClock()).write(record(3, 41.5, episode_count=380))

    assert [
        "update 3: return 41.5 (mean of 100 episodes), model version 3, "
        "staleness 0.2 when granted, 1.2 when trained (largest 2), "
        "trained on 2048 steps of 4096 made, "
        "waited 0.03 s for the last batch"
    ] == said


def test_a_line_says_how_many_fragments_were_too_stale_to_be_trained_on() -> None:
    said: list[str] = []
    Lines(said.append, clock=ManualClock()).write(record(3) | {"left_out": 12})
    assert "steps of 4096 made, 12 fragments too stale, waited 0.03 s" in said[0]


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "return - (mean of 0 episodes)"),
        (1, "return -16.4 (mean of 1 episode)"),
        (80, "return -16.4 (mean of 80 episodes)"),
        (101, "return -16.4 (mean of 100 episodes)"),
    ],
)
def test_a_mean_return_is_told_with_the_number_of_its_episodes(count: int, shown: str) -> None:
    said: list[str] = []
    mean = -16.4 if count else None
    Lines(said.append, clock=ManualClock()).write(record(1, mean, count))

    assert shown in said[0]


def test_lines_come_no_faster_than_their_period() -> None:
    said: list[str] = []
    clock = ManualClock()
    lines = Lines(said.append, period_s=5.0, clock=clock)
    for update in range(10):
        lines.write(record(update))
        clock.advance(1.0)

    assert ["update 0", "update 5"] == [line.split(":")[0] for line in said]


def test_the_last_record_is_shown_once() -> None:
    said: list[str] = []
    lines = Lines(said.append, clock=ManualClock())
    lines.write(record(1))
    lines.write(record(2))
    lines.close()
    lines.close()

    assert ["update 1", "update 2"] == [line.split(":")[0] for line in said]
