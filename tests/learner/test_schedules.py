"""Schedules: what their text means, and where a run is on them, also after an interruption."""

import pytest
import yaml
from click.testing import CliRunner

from breadbox.cli.main import cli
from breadbox_learner.schedules import Schedule
from breadbox_learner.settings import LearnSettings, PpoConfig


@pytest.mark.parametrize(
    ("text", "run", "points"),
    [
        ("3e-4", {}, [(0, 0, 3e-4), (999, 10**9, 3e-4)]),
        ("0.2:0@100updates", {}, [(0, 0, 0.2), (25, 0, 0.15), (100, 0, 0.0), (101, 0, 0.0)]),
        ("0:0.2@1e3steps", {}, [(7, 0, 0.0), (7, 500, 0.1), (7, 2000, 0.2)]),
        ("1:3", {"updates_max": 10}, [(0, 10**9, 1.0), (5, 0, 2.0), (10, 0, 3.0)]),
        ("1:0", {"environment_steps_max": 200}, [(10**9, 0, 1.0), (0, 50, 0.75), (0, 200, 0.0)]),
        # Of two limits of the run, the one that is nearer ends it.
        ("1:0", {"updates_max": 10, "environment_steps_max": 200}, [(5, 40, 0.5), (1, 150, 0.25)]),
        ("1:0@10updates", {"updates_max": 20}, [(10, 0, 0.0)]),
    ],
)
def test_a_value_goes_in_a_line_and_stays_at_its_end(
    text: str, run: dict[str, int], points: list[tuple[int, int, float]]
) -> None:
    ppo = LearnSettings.model_validate({"entropy_coefficient": text, **run}).ppo
    got = [ppo.entropy_coefficient.at(updates, steps) for updates, steps, _ in points]
    assert [value for _, _, value in points] == pytest.approx(got, abs=1e-12)


@pytest.mark.parametrize(
    "text", ["0.00123456789", "3e-05:0", "0.3:0.1@7updates", "1:0@1000000steps"]
)
def test_what_is_printed_is_read_as_the_same(text: str) -> None:
    made = LearnSettings.model_validate({"lr": text})
    again = LearnSettings(**yaml.safe_load(made.as_yaml()))
    assert (made.lr, text) == (again.lr, str(made.lr))
    # A constant is a number for those that read the settings, such as a table of runs.
    assert isinstance(made.plain()["lr"], float) == (":" not in text)


@pytest.mark.parametrize(
    ("option", "text", "problem"),
    [
        ("lr", "fast", "must be a number, or START:END over the whole run"),
        ("lr", "1:2:3", "must be a number, or START:END"),
        ("lr", "1e-3@5updates", "must be a number, or START:END"),
        ("lr", "1e-3:0@5", "must be a number, or START:END"),
        ("lr", "1e-3:", "must be a number, or START:END"),
        ("lr", "1e-3:0@0updates", "must span a whole number of updates from 1 on"),
        ("lr", "1e-3:0@1.5steps", "must span a whole number of steps from 1 on"),
        ("lr", "inf:0", "must be a finite number"),
        ("lr", "1e-3:0@infsteps", "must be a finite number"),
        ("lr", "0", "must be greater than 0"),
        ("clip", "0:0@5updates", "must be greater than 0"),
        ("clip", "-0.1", "must be greater than or equal to 0"),
        ("entropy-coefficient", "0.01:-1@5updates", "must be greater than or equal to 0"),
        ("clip", "0.2:0", "takes the whole run, and the run has no end: set updates_max"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_with_the_option(
    option: str, text: str, problem: str
) -> None:
    done = CliRunner().invoke(cli, ["learn", "--dry-run", f"--{option}", text])
    assert (2, 1) == (done.exit_code, len(done.stderr.splitlines())), done.output
    assert problem in done.stderr
    assert option in done.stderr.replace("_", "-")


def test_a_schedule_without_a_length_has_no_value() -> None:
    with pytest.raises(ValueError, match=r"write 0\.001:0@300updates"):
        PpoConfig.model_validate({"lr": "1e-3:0"}).lr.at(0, 0)


def test_the_defaults_are_constant() -> None:
    ppo = PpoConfig()
    assert [Schedule(2.5e-3), Schedule(0.2), Schedule(0.01)] == [
        ppo.lr, ppo.clip, ppo.entropy_coefficient,
    ]  # fmt: skip
