"""Goals in hindsight: which they may be, how often, and what becomes of the reward."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from breadbox.mirror import GoalStrategy, StepMemory
from breadbox.model.errors import InvalidRequestError
from mirror.goals import EPISODE_STEPS, GOAL, goal_fragments
from support.fragments import vector_fragment

EPISODES = 14


def reached(achieved: Any, desired: Any, _: Any) -> Any:
    return (achieved[:, 0] == desired[:, 0]).astype(np.float32)


@pytest.fixture
def memory() -> StepMemory:
    memory = StepMemory(1000, seed=3)
    # Of the last episode two steps are missing: it is not whole.
    for fragment in goal_fragments(20):
        memory.extend(fragment)
    assert 100 == memory.step_count
    return memory


def allowed(strategy: str, number: int) -> list[int]:
    """What a step's goal may be: positions that its episode reached."""
    begin = number - number % EPISODE_STEPS
    every = range(begin + 1, begin + EPISODE_STEPS + 1)
    return {
        "future": [each for each in every if each > number],
        "final": [begin + EPISODE_STEPS],
        "episode": [*every],
    }[strategy]


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_goals_are_what_the_same_episode_reached(
    memory: StepMemory, strategy: GoalStrategy
) -> None:
    batch = memory.sample_goals(20_000, reached, strategy=strategy, goals_per_step=3)
    number = batch.obs["achieved_goal"][:, 0].astype(int)
    goal = batch.obs["desired_goal"][:, 0].astype(int)
    relabelled = goal != GOAL
    assert 15_000 == relabelled.sum()
    assert (number + 1 == batch.next_obs["achieved_goal"][:, 0]).all()
    assert (goal == batch.next_obs["desired_goal"][:, 0]).all()
    assert set(range(EPISODES * EPISODE_STEPS)) == set(number.tolist())
    assert (np.where(relabelled, number + 1 == goal, -1) == batch.reward).all()
    pairs = Counter(zip(number[relabelled].tolist(), goal[relabelled].tolist(), strict=True))
    expected = {
        (step, each): 15_000 / (EPISODES * EPISODE_STEPS) / len(allowed(strategy, step))
        for step in range(EPISODES * EPISODE_STEPS)
        for each in allowed(strategy, step)
    }
    assert pairs.keys() <= expected.keys()
    chi_square = sum((pairs[pair] - count) ** 2 / count for pair, count in expected.items())
    freedom = len(expected) - 1
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_no_goal_is_changed_where_none_is_asked_for(memory: StepMemory) -> None:
    batch = memory.sample_goals(50, reached, goals_per_step=0)
    assert {GOAL} == set(batch.obs["desired_goal"].ravel().tolist())
    assert {-1.0} == set(batch.reward.tolist())


def test_sampled_steps_are_counted_whichever_way_they_are_drawn(memory: StepMemory) -> None:
    drawn = (
        lambda: len(memory.sample(7, prioritised=True)),
        lambda: int(memory.sample_sequences(5, length=30).mask.sum()),
        lambda: sum(map(len, memory.sample_episodes(3))),
        lambda: len(memory.sample_goals(6, reached)),
    )
    for draw in drawn:
        before = memory.sampled_step_count
        assert draw() == memory.sampled_step_count - before


def test_episodes_whose_beginning_was_evicted_take_no_part() -> None:
    memory = StepMemory(40, seed=3)
    for fragment in goal_fragments(20):
        memory.extend(fragment)
    batch = memory.sample_goals(5_000, reached)
    number = batch.obs["achieved_goal"][:, 0].astype(int)
    # Steps 60 to 99 are kept; episodes begin at 63, 70, 77, 84 and 91, and that at 98 goes on.
    assert set(range(63, 98)) == set(number.tolist())


def test_what_has_no_goals_and_what_gives_no_rewards_is_told(memory: StepMemory) -> None:
    with pytest.raises(InvalidRequestError, match=r"relabel must return float32\[8\]"):
        memory.sample_goals(10, lambda achieved, desired, extras: 1.0)
    with pytest.raises(InvalidRequestError, match="strategy must be one of"):
        memory.sample_goals(10, reached, strategy="past")  # type: ignore[arg-type]
    plain = StepMemory(100)
    plain.extend(vector_fragment())
    with pytest.raises(InvalidRequestError, match="no whole episode"):
        plain.sample_goals(10, reached)
