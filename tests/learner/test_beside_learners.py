"""`bench.beside_learners`: what it counts and compares, and the published page."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from bench.beside_learners import (
    BINS,
    CASES,
    COMMAND,
    DATA,
    OURS,
    PAGE,
    SEEDS,
    Run,
    binned,
    episodes_in,
    make,
    missing,
    read,
    swapped_p,
    table,
    twins_of,
)
from bench.report import write_into

from breadbox_learner.settings import LearnSettings

SIDES = [OURS, "Stable-Baselines3", "CleanRL"]


def row(run: Run, value: float) -> dict[str, str]:
    return {"returns": " ".join([str(value)] * BINS)}


def test_the_page_follows_from_the_rows(tmp_path: Path) -> None:
    rows = read(DATA)
    again = tmp_path / "learning.md"
    shutil.copy(PAGE, again)
    write_into(again, table(rows), COMMAND)
    assert PAGE.read_text() == again.read_text()
    assert {BINS} == {len(each["returns"].split()) for each in rows.values()}
    assert {each[:2] for each in CASES} >= {run[:2] for run in rows}


def test_what_the_page_says_beside_its_table_holds() -> None:
    text = PAGE.read_text()
    found: dict[tuple[str, str, str], tuple[Any, ...]] = {}
    for line in table(read(DATA)).splitlines()[2:]:
        env_id, settings, side, seeds, *measures = [each.strip() for each in line.split("|")[1:-1]]
        end, whole = (float(each.split()[0]) for each in measures[:2])
        stars = [each.endswith("*") for each in measures[2:]]
        found[env_id.split("-")[0], settings, side] = (int(seeds), end, whole, *stars)
    ours, sb3, cleanrl = SIDES

    def beside(task: str, settings: str, side: str) -> list[int]:
        """How another's return is to ours, at the end and over the whole: -1, 0 or 1."""
        count, *own = found[task, settings, ours]
        others, end, whole, *stars = found[task, settings, side]
        assert count == others == SEEDS, "what is claimed needs all seeds"
        pairs = zip((end, whole), own[:2], stars, strict=True)
        return [int(star) * (1 if theirs > mine else -1) for theirs, mine, star in pairs]

    assert (
        "no difference at the end between Breadbox and Stable-Baselines3, on CartPole, Pendulum "
        "and LunarLander" in text
    )
    assert [0, 0] == beside("CartPole", "alike", sb3)
    assert "over the whole of Pendulum, Breadbox's returns are higher" in text
    assert [0, -1] == beside("Pendulum", "alike", sb3)
    assert 0 == beside("LunarLanderContinuous", "alike", sb3)[0]
    assert "CleanRL's is alike on CartPole, and ends lower on Pendulum" in text
    assert [0, 0] == beside("CartPole", "alike", cleanrl)
    assert -1 == beside("Pendulum", "alike", cleanrl)[0]
    assert "For LunarLander it has four seeds: of these nothing is claimed" in text
    assert found["LunarLanderContinuous", "alike", cleanrl][0] == 4
    assert "Breadbox and Stable-Baselines3 end alike, and Breadbox is higher over the whole" in text
    assert [0, -1] == beside("CartPole", "own", sb3)
    assert "CleanRL's ends lower. On Pendulum, Breadbox ends higher than both" in text
    assert -1 == beside("CartPole", "own", cleanrl)[0]
    assert [-1, -1] == [beside("Pendulum", "own", side)[0] for side in (sb3, cleanrl)]
    assert "With 16 gradient steps instead of 64" in text
    assert 1 == beside("CartPole", "own, ours with --minibatch-fragments 16", sb3)[0]
    defaults = {name: field.default for name, field in LearnSettings.model_fields.items()}
    batches = defaults["fragments_per_batch"] // defaults["minibatch_fragments"]
    assert 64 == defaults["epochs"] * batches


def test_environments_that_step_together_tell_their_episodes_in_steps_of_all(
    tmp_path: Path,
) -> None:
    envs = [make("CartPole-v1", str(tmp_path)) for _ in range(2)]
    lengths = []
    for env, count in zip(envs, (1, 2), strict=True):
        for seed in range(count):
            env.reset(seed=10 * count + seed)
            lengths.append(1)
            while not any(env.step(0)[2:4]):
                lengths[-1] += 1
        env.close()
    first, second, third = lengths
    told = [(first, first), (second, second), (second + third, third)]
    assert sorted((2 * end, float(total)) for end, total in told) == sorted(episodes_in(tmp_path))


def test_returns_are_those_of_the_episodes_that_ended_in_each_part() -> None:
    steps = 100 * BINS
    told = binned([(100, 1.0), (101, 2.0), (150, 4.0), (steps, 8.0), (steps + 1, 99.0)], steps)
    assert [1.0, *[3.0] * (BINS - 2), 8.0] == told


def test_sides_are_compared_from_ten_seeds_on() -> None:
    case = CASES[0]
    rows = {
        Run(*case[:2], side, seed): row(Run(*case[:2], side, seed), 100.0 * place + seed)
        for place, side in enumerate(SIDES)
        for seed in range(SEEDS - (side == "CleanRL"))
    }
    ours, sb3, cleanrl = table(rows).splitlines()[2:]
    assert ours.endswith("| 10 | 4 (3 to 6) | 4 (3 to 6) |  |  |")
    assert sb3.endswith("| 10 | 104 (103 to 106) | 104 (103 to 106) | 0.000 * | 0.000 * |")
    assert cleanrl.endswith("| 9 | 204 (202 to 206) | 204 (202 to 206) |  |  |")
    left = list(missing(rows, SEEDS, SIDES))
    assert Run(*case[:2], "CleanRL", SEEDS - 1) == left[0]
    assert len(left) == len(CASES) * SEEDS * len(SIDES) - len(rows)


def test_a_difference_is_as_likely_as_the_ways_to_deal_it_out() -> None:
    usual = [float(seed) for seed in range(10)]
    assert 1.0 == swapped_p(usual, usual)
    assert swapped_p(usual, [each + 0.1 for each in usual]) > 0.9
    assert swapped_p(usual, [each + 5.0 for each in usual]) == pytest.approx(0.002, abs=0.002)


def test_what_is_the_same_for_a_side_is_trained_once() -> None:
    own = Run("CartPole-v1", "own", "CleanRL", 3)
    alike = own._replace(settings="alike")
    more = own._replace(settings="own, ours with --minibatch-fragments 16")
    assert {alike, more} == set(twins_of(own))
    assert {own, more} == set(twins_of(alike))
    sb3 = own._replace(side="Stable-Baselines3")
    assert [more._replace(side="Stable-Baselines3")] == twins_of(sb3)
    assert [] == twins_of(own._replace(side=OURS))
    assert [] == twins_of(own._replace(env_id="Pendulum-v1"))
