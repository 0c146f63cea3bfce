"""Episode returns, told by fragments or added up from rewards."""

import json
from typing import Any

import numpy as np
import pytest

from breadbox.model.fragment import Fragment
from breadbox_learner.training import batching
from breadbox_learner.training.batching import EnvironmentSteps, EpisodeReturns, TrainingBatch
from support.collating import collate
from support.fragments import vector_fragment


def fragment(
    index: int,
    rewards: list[float],
    ended: list[int],
    *,
    first: bool = False,
    told: list[float] | None = None,
    episode: int = 0,
    discontinuity: bool = False,
    worker: str = "w",
) -> Fragment:
    count = len(rewards)
    terminated = np.array(ended, dtype=np.bool_)
    starts = np.concatenate([[first], terminated[:-1]])
    return Fragment(
        worker_id=worker,
        fragment_index=index,
        session_id="s",
        model_version_min=0,
        model_version_max=0,
        obs=np.zeros((count, 1)),
        action=np.zeros(count),
        reward=np.array(rewards, dtype=np.float32),
        terminated=terminated,
        truncated=np.zeros(count, np.bool_),
        first=starts,
        episode_id=episode + np.cumsum(starts) - int(first),
        next_obs=np.zeros(1),
        extras={} if told is None else {"episode_return": np.array(told, np.float32)},
        discontinuity=discontinuity,
    )


def batch(*arguments: Any, **options: Any) -> TrainingBatch:
    return collate([fragment(*arguments, **options)])


NAN = float("nan")


def test_the_worker_tells_returns_and_each_counts_once() -> None:
    seen = EpisodeReturns()
    assert seen.mean is None
    for _ in range(2):  # the same fragment is delivered twice
        seen.observe(batch(3, [1.0, 1.0], [0, 1], told=[NAN, 7.0]))
    seen.observe(batch(4, [1.0, 1.0], [1, 1], told=[9.0, 1.0]))
    assert (3, [7.0, 9.0, 1.0]) == (seen.episode_count, seen.recent)


def test_the_mean_is_of_the_window_and_the_count_of_all() -> None:
    seen = EpisodeReturns(window=2)
    for index, value in enumerate([100.0, 2.0, 4.0]):
        seen.observe(batch(index, [0.0], [1], told=[value]))
    assert (3.0, 3) == (seen.mean, seen.episode_count)


def test_rewards_are_added_up_over_consecutive_fragments() -> None:
    seen = EpisodeReturns()
    seen.observe(batch(0, [1.0, 2.0], [0, 0], first=True))
    seen.observe(batch(1, [4.0, 8.0], [1, 0]))
    seen.observe(batch(2, [16.0, 32.0], [0, 1], episode=1))
    assert [7.0, 56.0] == seen.recent


@pytest.mark.parametrize(
    "second",
    [
        fragment(2, [4.0], [1]),
        fragment(1, [4.0], [1], discontinuity=True),
        fragment(1, [4.0], [1], episode=5),
        fragment(1, [4.0], [1], worker="another"),
    ],
    ids=["gap", "discontinuity", "another_episode", "another_worker"],
)
def test_an_episode_of_which_steps_are_missing_does_not_count(second: Fragment) -> None:
    seen = EpisodeReturns()
    seen.observe(batch(0, [1.0], [0], first=True))
    seen.observe(collate([second]))
    assert [] == seen.recent


def test_an_episode_delivered_to_two_ranks_counts_once_on_each() -> None:
    """Its name does not depend on who found it."""
    twice = batch(3, [1.0, 1.0], [0, 1], told=[NAN, 7.0])
    one, two = EpisodeReturns().ended_in(twice), EpisodeReturns().ended_in(twice)
    other = EpisodeReturns().ended_in(batch(4, [1.0, 1.0], [0, 1], told=[NAN, 9.0]))
    assert one == two
    assert -(2**63) <= one[0][0] < 2**63
    seen = EpisodeReturns()
    seen.count(one + other + two)
    assert [7.0, 9.0] == seen.recent


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "REMEMBERED_MAX", 10)
    seen = EpisodeReturns()
    for index in range(50):
        seen.observe(batch(0, [1.0], [1], first=True, worker=f"w{index}"))
    assert len(seen._counted) == len(seen._running) == 10  # noqa: SLF001 - what it remembers shows nowhere
    assert 50 == seen.episode_count


def test_a_resumed_run_goes_on_with_its_window() -> None:
    seen, resumed = EpisodeReturns(), EpisodeReturns()
    seen.observe(batch(0, [3.0], [1], first=True))
    resumed.restore(seen.recent, seen.episode_count)
    assert (seen.mean, seen.episode_count) == (resumed.mean, resumed.episode_count)


# Environment steps -------------------------------------------------------------------------------


def seen(environment: EnvironmentSteps, *fragments: tuple[str, int], session: str = "s") -> int:
    """Count fragments of 4 steps, as (worker, index)."""
    made = [
        vector_fragment(index, worker_id=worker, session_id=session) for worker, index in fragments
    ]
    environment.count(environment.seen_in(collate(made)))
    return environment.total


def test_steps_that_nobody_trained_on_count_as_made() -> None:
    environment = EnvironmentSteps()
    assert 4 == seen(environment, ("a", 0))
    # Fragments 1 and 2 were stale, or never sent.
    assert 16 + 4 == seen(environment, ("a", 3), ("b", 0))


def test_fragments_delivered_again_or_late_are_not_made_again() -> None:
    environment = EnvironmentSteps()
    assert 12 == seen(environment, ("a", 2), ("a", 1))
    assert 12 == seen(environment, ("a", 2), ("a", 0))


def test_another_session_is_counted_on_top() -> None:
    environment = EnvironmentSteps()
    seen(environment, ("a", 2))
    assert 16 == seen(environment, ("a", 0), session="t")


def test_steps_go_on_from_what_was_written() -> None:
    environment, resumed = EnvironmentSteps(), EnvironmentSteps()
    seen(environment, ("a", 2), ("b", 4))
    resumed.restore(json.loads(json.dumps(environment.written())))
    assert environment.total == resumed.total
    assert seen(environment, ("a", 3)) == seen(resumed, ("a", 3)) == 12 + 20 + 4
