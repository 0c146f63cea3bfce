"""`bench.freshness`: its environments and worlds, small runs, and the published page."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from bench.batched_envs import ACROBOT, CARTPOLE, PENDULUM, RECALL, BatchedEnv
from bench.freshness import (
    BINS,
    COLUMNS,
    CORRECTIONS,
    DATA,
    DEFAULT,
    ENVS,
    FRAGMENT_STEPS,
    LAGS,
    LIMITS,
    SEEDS,
    TASKS,
    TUNING_SEEDS,
    Cell,
    Fragments,
    Group,
    Learner,
    Run,
    at_end,
    cells,
    joined,
    lr_of,
    read,
    train,
)
from bench.freshness_page import (
    COMMAND,
    DEFAULT_LIMIT,
    PAGE,
    SIGNIFICANT,
    against,
    area,
    complete,
    draw,
    holm,
    interval,
    judged,
    over_tasks,
    paired_p,
    recommended,
    text,
)
from bench.report import write_into

from breadbox_learner.settings import PpoConfig
from breadbox_policies import make_policy
from breadbox_server.core.model.config import BufferConfig

FRESH = Cell("CartPole", 0, None, "none")


@pytest.mark.parametrize(
    ("env_id", "batched"),
    [("CartPole-v1", CARTPOLE), ("Acrobot-v1", ACROBOT), ("Pendulum-v1", PENDULUM)],
)
def test_batched_environments_go_where_gymnasiums_go(env_id: str, batched: BatchedEnv) -> None:
    rng = np.random.default_rng(0)
    assert batched.steps_max == gymnasium.spec(env_id).max_episode_steps
    env = gymnasium.make(env_id, disable_env_checker=True).unwrapped
    env.action_space.seed(0)
    for _ in range(5):
        env.reset(seed=int(rng.integers(1000)))
        state = np.array([env.state], dtype=np.float64)  # type: ignore[attr-defined]
        for _ in range(100):
            action = env.action_space.sample()
            obs, reward, terminated, _, _ = env.step(action)
            state, rewards, ended = batched.step(state, np.array([action]))
            np.testing.assert_allclose(batched.observe(state)[0], obs, rtol=1e-3, atol=1e-3)
            assert (pytest.approx(reward, abs=1e-5), terminated) == (rewards[0], ended[0])
            # From where it is to the last bit: chaotic systems would part after some steps.
            state = np.array([env.state], dtype=np.float64)  # type: ignore[attr-defined]
            if terminated:
                break


def test_recall_pays_for_the_symbol_of_two_steps_before() -> None:
    state = RECALL.reset(np.random.default_rng(0), 100)
    shown = []
    for step in range(32):
        shown.append(RECALL.observe(state).argmax(1))
        named = shown[max(0, step - 2)]
        state, reward, ended = RECALL.step(state, named)
        if step >= 2:
            assert [1.0] * 100 == reward.tolist()
        assert not ended.any()
    symbols, counts = np.unique(shown, return_counts=True)
    assert [0, 1, 2] == symbols.tolist()
    assert min(counts) > 0.3 * counts.sum()


def test_fragments_tell_where_episodes_were_cut_off() -> None:
    task = TASKS["CartPole"]
    policy = make_policy("mlp", task.env.observation_space, task.env.action_space)
    group = Group(task, "fast", (0, 0))
    group._length[:] = task.env.steps_max - 3  # noqa: SLF001
    group._return[:10] = np.nan  # noqa: SLF001
    group._return[10:] = 400.0  # noqa: SLF001
    parts: list[Fragments] = []
    counted: list[list[float]] = []
    while len(parts) < 2:
        full, returns = group.step(policy, 7)
        parts += [] if full is None else [full]
        counted.append(returns)
    assert [[], [], [403.0] * (ENVS - 10)] == counted[:3]
    assert [7, 7] == [each.version for each in parts]
    batch = joined([each.batch for each in parts])
    rows, steps = torch.nonzero(batch.truncated, as_tuple=True)
    assert rows.tolist() == batch.final_row.tolist()
    assert steps.tolist() == batch.final_step.tolist()
    assert {2} == set(steps[rows < ENVS].tolist())
    assert batch.final_obs is not None
    assert len(batch.final_obs) == len(rows)
    assert bool(batch.first[rows, steps + 1].all())
    assert batch.step_count == 2 * ENVS * FRAGMENT_STEPS


class _Counting:
    """An updater that makes every weight the number of its updates."""

    def __init__(self, policy: torch.nn.Module) -> None:
        self._policy = policy
        self.trained_steps = 0

    def update(self, batch: Any, *, number: int) -> None:
        self.trained_steps += batch.step_count
        with torch.no_grad():
            for each in self._policy.parameters():
                each.fill_(number + 1)


def _in_world(cell: Cell) -> tuple[Learner, _Counting]:
    learner = Learner(TASKS[cell.task], 0)
    learner.begin(cell, 1e-3)
    counting = _Counting(learner.policy)
    learner.updater = counting  # type: ignore[assignment]
    return learner, counting


def test_with_a_lag_versions_train_on_what_the_version_of_as_many_before_did() -> None:
    learner, _ = _in_world(Cell("CartPole", 3, None, "none"))
    acted_by = []
    for tick in range(16 * 8):
        learner.tick(tick)
        if learner.train(3, float("inf")):
            weight = next(learner._acting.parameters())  # noqa: SLF001
            acted_by.append(weight.flatten()[0].item())
    # Version 0 has weights of its own, versions 1, 2, ... are as _Counting makes them.
    assert [1.0, 2.0, 3.0, 4.0, 5.0] == acted_by[3:]
    assert len(set(acted_by[:3])) == 1


@pytest.mark.parametrize("limit", [0, 1, 2, 8])
def test_beside_slow_environments_every_step_is_trained_on_or_lost_or_not_sent_yet(
    limit: int,
) -> None:
    learner, counting = _in_world(Cell("CartPole", None, limit, DEFAULT))
    for tick in range(600):
        learner.tick(tick)
        learner.train(0, limit)
    groups = [learner.fast, *learner.slow]
    waiting = sum(len(group._rows) * ENVS for group in groups)  # noqa: SLF001
    waiting += len(learner._full) * ENVS * FRAGMENT_STEPS  # noqa: SLF001
    assert learner.acted == counting.trained_steps + learner.lost + waiting
    assert max(learner.staleness) <= limit
    assert (learner.lost > 0.2 * learner.acted) == (limit <= DEFAULT_LIMIT)


def test_a_run_is_the_same_again() -> None:
    run = Run(Cell("Recall", 2, None, "V-trace 1"), 2.5e-3, 3)
    rows = [train(run, updates=3) for _ in range(2)]
    assert rows[0] == rows[1]
    assert COLUMNS == tuple(rows[0])
    assert BINS == len(rows[0]["returns"].split())


def test_fresh_data_are_trained_on_alike_by_every_correction() -> None:
    rows = [
        train(Run(FRESH._replace(correction=each), 2.5e-3, 0), updates=3)["returns"]
        for each in CORRECTIONS
    ]
    assert [rows[0]] * len(CORRECTIONS) == rows


def test_a_difference_in_every_pair_is_as_rare_as_two_of_all_swaps() -> None:
    ours = [float(seed) for seed in range(10)]
    assert 2 / 1024 == paired_p([each + 0.1 for each in ours], ours)
    assert 1.0 == paired_p(ours, ours)
    # Nine pairs say one thing, and one says the other more loudly.
    assert paired_p([1.0] * 9 + [-9.0], [0.0] * 10) == 1.0


def test_several_comparisons_are_corrected_for_their_number() -> None:
    assert {"a": 0.03, "b": 0.04, "c": 0.2} == pytest.approx(holm({"c": 0.2, "a": 0.01, "b": 0.02}))
    assert {"a": 0.06, "b": 0.06} == pytest.approx(holm({"a": 0.04, "b": 0.03}))


def test_the_interval_is_where_means_of_drawn_seeds_lie() -> None:
    low, high = interval([0.0] * 5 + [1.0] * 5)
    assert 0.2 == pytest.approx(low, abs=0.11)
    assert 0.8 == pytest.approx(high, abs=0.11)
    assert (2.0, 2.0) == interval([2.0, 2.0, 2.0])


def test_the_default_changes_only_for_what_is_better_for_sure() -> None:
    usual = [0.5 + 0.01 * seed for seed in range(10)]
    assert "b" == recommended({"a": usual, "b": [each + 0.2 for each in usual]}, "a")
    assert "a" == recommended({"a": usual, "b": [each - 0.2 for each in usual]}, "a")
    assert "a" == recommended({"a": usual, "b": [0.9, *usual[1:]]}, "a")


@pytest.fixture(scope="module")
def rows() -> Mapping[Run, Mapping[str, str]]:
    return read(DATA)


def test_the_page_follows_from_the_rows(
    rows: Mapping[Run, Mapping[str, str]], tmp_path: Path
) -> None:
    again = tmp_path / "lag.md"
    shutil.copy(PAGE, again)
    write_into(again, text(rows), COMMAND)
    assert PAGE.read_text() == again.read_text()
    pytest.importorskip("matplotlib", reason="needs the extra breadbox[bench]")
    draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0


def test_a_slice_is_told_of_only_with_every_run(rows: Mapping[Run, Mapping[str, str]]) -> None:
    done = complete(rows)
    assert done
    for task, world in done:
        found = judged(rows, task, world)
        assert list(found) == cells(task, world)
        assert {len(SEEDS)} == {len(each) for each in found.values()}
        assert not set(SEEDS) & set(TUNING_SEEDS)
        for cell, each in found.items():
            assert {lr_of(rows, cell)} == {float(row["lr"]) for row in each}
    last = Run(cells(*done[0])[-1], lr_of(rows, cells(*done[0])[-1]), SEEDS[-1])
    fewer = {run: row for run, row in rows.items() if run != last}
    assert done[1:] == complete(fewer)


def test_the_defaults_follow_from_the_rows(rows: Mapping[Run, Mapping[str, str]]) -> None:
    arms = over_tasks(rows, "lag")
    wanted = {"advantages": "gae", **CORRECTIONS[recommended(arms, DEFAULT)]}
    assert wanted == {name: getattr(PpoConfig(), name) for name in wanted}
    traces = {each: arms[each] for each in ("V-trace 1", "V-trace 2")}
    rho = CORRECTIONS[recommended(traces, "V-trace 2")]["vtrace_rho_max"]
    assert rho == PpoConfig().vtrace_rho_max
    limits = over_tasks(rows, "limit")
    assert recommended(limits, DEFAULT_LIMIT) == BufferConfig().staleness_max


def test_what_the_page_says_of_corrections_holds(rows: Mapping[Run, Mapping[str, str]]) -> None:
    arms = over_tasks(rows, "lag")
    ps = against(arms, DEFAULT)
    assert ["none"] == [arm for arm, p in ps.items() if p < SIGNIFICANT]
    assert sum(arms["none"]) < sum(arms[DEFAULT])
    ends = {
        (task, cell.lag, cell.correction): [at_end(row) for row in each]
        for task in TASKS
        for cell, each in judged(rows, task, "lag").items()
    }
    for task, lag in (("Acrobot", 8), ("Recall", 8), ("Pendulum", 2)):
        arms_of = {each: ends[task, lag, each] for each in CORRECTIONS}
        assert against(arms_of, DEFAULT)["none"] < SIGNIFICANT
        assert sum(arms_of["none"]) < sum(arms_of[DEFAULT])
    none = ends["CartPole", 8, "none"]
    assert (4, 4) == (sum(e < 60 for e in none), sum(e > 460 for e in none))
    assert min(ends["CartPole", 8, DEFAULT]) > 160


def test_what_the_page_says_of_lag_holds(rows: Mapping[Run, Mapping[str, str]]) -> None:
    marks = {task: lag_marks(rows, task) for task in TASKS}
    lagged = {(lag, each) for lag in LAGS if lag for each in CORRECTIONS}
    assert lagged == marks["Pendulum"]["area"] == marks["Recall"]["area"] == marks["Recall"]["end"]
    for task in ("CartPole", "Acrobot"):
        assert not {(2, DEFAULT), (8, DEFAULT)} & (marks[task]["area"] | marks[task]["end"])


def lag_marks(
    rows: Mapping[Run, Mapping[str, str]], task: str
) -> dict[str, set[tuple[int | None, str]]]:
    """The lags and corrections that differ from fresh data, in the measures at the end and area."""
    found = judged(rows, task, "lag")
    fresh = next(cell for cell in found if cell.lag == 0)
    measures = {"end": at_end, "area": area}
    return {
        name: {
            (cell.lag, cell.correction)
            for cell, p in against(
                {cell: [measure(row) for row in each] for cell, each in found.items()}, fresh
            ).items()
            if p < SIGNIFICANT
        }
        for name, measure in measures.items()
    }


def test_what_the_page_says_of_limits_holds(rows: Mapping[Run, Mapping[str, str]]) -> None:
    assert min(against(over_tasks(rows, "limit"), DEFAULT_LIMIT).values()) >= SIGNIFICANT
    ends, areas, lost = {}, {}, {}
    for task in TASKS:
        for cell, each in judged(rows, task, "limit").items():
            ends[task, cell.limit] = [at_end(row) for row in each]
            areas[task, cell.limit] = [area(row) for row in each]
            lost[task, cell.limit] = sum(float(row["lost"]) for row in each) / len(each)
    for task in TASKS:
        assert [0.5, 0.03] == pytest.approx([lost[task, 0], lost[task, 8]], abs=0.03)

    def lower(task: str, limit: int) -> bool:
        arms = {each: ends[task, each] for each in LIMITS}
        return against(arms, DEFAULT_LIMIT)[limit] < SIGNIFICANT and (
            sum(arms[limit]) < sum(arms[DEFAULT_LIMIT])
        )

    found = {(task, limit) for task in TASKS for limit in LIMITS if limit != DEFAULT_LIMIT}
    assert {("Recall", 0), ("Acrobot", 1)} == {each for each in found if lower(*each)}
    recall = {limit: areas["Recall", limit] for limit in LIMITS}
    assert 4 == max(recall, key=lambda limit: sum(recall[limit]))
    assert against(recall, DEFAULT_LIMIT)[4] < SIGNIFICANT


def test_a_published_row_comes_out_again(rows: Mapping[Run, Mapping[str, str]]) -> None:
    """To the bit on this machine's kind; elsewhere arithmetic may round otherwise."""
    run = next(run for run in rows if run.cell == FRESH)
    again = train(run)
    assert area(rows[run]) == pytest.approx(area(again), abs=0.2)
