"""`python -m bench.freshness`: its environments, one small run of it, and the published page."""

import math
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from bench.batched_envs import ACROBOT, CARTPOLE, FORCE_CARTPOLE, BatchedEnv
from bench.freshness import (
    COLUMNS,
    CORRECTIONS,
    DATA,
    LAGS,
    PAGE,
    ROUNDS,
    STEPS_MAX,
    TASKS,
    Cell,
    Rollout,
    Spread,
    arrived,
    cells,
    draw,
    joined,
    read,
    spreads,
    tables,
    train,
    with_tables,
)

from breadbox_learner.settings import PpoConfig
from breadbox_policies import make_policy

SMALL = Cell("CartPole", 2, 4, "V-trace 1")


@pytest.mark.parametrize(
    ("env_id", "batched"), [("CartPole-v1", CARTPOLE), ("Acrobot-v1", ACROBOT)]
)
def test_batched_environments_go_where_gymnasiums_go(env_id: str, batched: BatchedEnv) -> None:
    rng = np.random.default_rng(0)
    assert batched.steps_max == gymnasium.spec(env_id).max_episode_steps
    env = gymnasium.make(env_id, disable_env_checker=True).unwrapped
    assert isinstance(env.action_space, gymnasium.spaces.Discrete)
    for _ in range(5):
        env.reset(seed=int(rng.integers(1000)))
        state = np.array([env.state], dtype=np.float64)  # type: ignore[attr-defined]
        for _ in range(100):
            action = int(rng.integers(env.action_space.n))
            obs, reward, terminated, _, _ = env.step(action)
            state, rewards, ended = batched.step(state, np.array([action]))
            np.testing.assert_allclose(batched.observe(state)[0], obs, rtol=1e-3, atol=1e-3)
            assert (reward, terminated) == (rewards[0], ended[0])
            # From where it is to the last bit: chaotic systems would part after some steps.
            state = np.array([env.state], dtype=np.float64)  # type: ignore[attr-defined]
            if terminated:
                break


def test_any_force_at_its_ends_is_cartpoles() -> None:
    state = CARTPOLE.reset(np.random.default_rng(0), 2)
    discrete, _, _ = CARTPOLE.step(state, np.array([0, 1]))
    continuous, _, _ = FORCE_CARTPOLE.step(state, np.array([[-1.0], [7.0]]))
    np.testing.assert_array_equal(discrete, continuous)


def test_a_batch_is_the_last_rounds_and_tells_where_episodes_were_cut_off() -> None:
    env = CARTPOLE
    policy = make_policy("mlp", env.observation_space, env.action_space)
    rollout = Rollout(env, fragment_steps=8, seed=0)
    rollout._length[:] = env.steps_max - 3  # noqa: SLF001
    batch = joined([rollout.collect(policy) for _ in range(ROUNDS)])
    rows, steps = torch.nonzero(batch.truncated, as_tuple=True)
    assert rows.tolist() == batch.final_row.tolist()
    assert steps.tolist() == batch.final_step.tolist()
    assert set(steps.tolist()) == {2}
    assert batch.final_obs is not None
    assert len(batch.final_obs) == len(rows)
    assert bool(batch.first[rows, steps + 1].all())
    assert batch.step_count == rollout.step_count


def test_a_run_is_the_same_again() -> None:
    rows = [train(SMALL, 3, steps_max=6_000) for _ in range(2)]
    assert rows[0] == rows[1]
    assert set(COLUMNS) == set(rows[0])
    assert "" == rows[0]["steps"]
    assert 20 < rows[0]["updates"] < 30


def test_fresh_data_used_once_are_trained_on_alike_by_every_correction() -> None:
    rows = [
        {**train(Cell("CartPole", 0, 1, correction), 0, steps_max=10_000), "correction": ""}
        for correction in CORRECTIONS
    ]
    assert [rows[0]] * len(CORRECTIONS) == rows


def test_runs_that_never_arrived_count_as_the_slowest() -> None:
    cell = {"task": "CartPole", "lag": "8", "uses": "1", "correction": "none"}
    rows = [
        {**cell, "seed": str(seed), "steps": steps}
        for seed, steps in enumerate(["30000", "", "10000", "20000", ""])
    ]
    assert {Cell("CartPole", 8, 1, "none"): Spread(20_000, 30_000, math.inf, 3, 5)} == spreads(rows)
    assert "| 8 | 1 | 3 of 5 | - | - | - |" in tables(rows)
    assert "| 8 | 1 | 30 (20-never, 3 of 5) | - | - | - |" in tables(rows)


def test_the_page_follows_from_the_rows(tmp_path: Path) -> None:
    rows = read(DATA)
    seeds = {row["seed"] for row in rows}
    assert {(cell, seed) for cell in cells() for seed in seeds} == {
        (Cell(row["task"], int(row["lag"]), int(row["uses"]), row["correction"]), row["seed"])
        for row in rows
    }
    assert len(rows) == len(seeds) * len(list(cells()))
    assert {row["task"] for row in rows} == set(TASKS)
    # The batch in which the steps are used up is played to its end.
    assert all(int(row["steps"] or 0) < STEPS_MAX + 1_024 for row in rows)
    text = PAGE.read_text()
    assert with_tables(text, rows) == text
    pytest.importorskip("matplotlib", reason="needs the extra breadbox[bench]")
    draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0


def test_the_default_is_the_correction_with_which_most_runs_arrived_on_old_data() -> None:
    found = spreads(read(DATA))
    counts = {each: arrived(found, each, lags=LAGS[1:])[0] for each in CORRECTIONS}
    best = max(counts, key=lambda each: counts[each])
    wanted = {"advantages": "gae", **CORRECTIONS[best]}
    assert wanted == {name: getattr(PpoConfig(), name) for name in wanted}


def test_a_published_row_comes_out_again() -> None:
    """To the bit on this machine's kind; elsewhere arithmetic may round otherwise."""
    row = next(row for row in read(DATA) if row["task"] == "CartPole" and row["lag"] == "0")
    again = train(Cell("CartPole", 0, int(row["uses"]), row["correction"]), int(row["seed"]))
    assert int(row["steps"]) == pytest.approx(again["steps"], rel=0.5)
