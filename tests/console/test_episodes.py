"""Episodes are put together from fragments, and found again."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from breadbox.model.fragment import Fragment
from breadbox_console.episodes import EpisodeIndex, Query, histogram, learning_points
from support import growth
from support.console import played, reference


def index_of(*fragments: Fragment, now: float = 1.0, **limits: Any) -> EpisodeIndex:
    index = EpisodeIndex(**({"steps_max": 10_000, "age_s_max": 1e9} | limits))
    for position, fragment in enumerate(fragments):
        index.add(reference(fragment), {}, fragment, now + position)
    return index


def test_an_episode_over_three_fragments_is_one_with_all_their_steps() -> None:
    index = index_of(
        played(0, ends=()),
        played(1, ends=(), first=False, version=1),
        played(2, ends=(9, 31), first=False, version=1),
    )

    first, second = index.episodes.values()
    assert (74, 74.0, "terminated", True) == (
        first.length,
        first.return_sum,
        first.end,
        first.is_whole,
    )
    assert (22, "terminated", True) == (second.length, second.end, second.is_whole)
    assert (0, 1) == (first.version_min, first.version_max)
    assert [(0, 32), (0, 32), (0, 10)] == [(each.start, each.stop) for each in first.spans]


def test_an_episode_of_which_a_fragment_is_missing_is_cut_and_the_rest_has_no_start() -> None:
    index = index_of(played(0, ends=()), played(2, ends=(31,), first=False))

    first, second = index.episodes.values()
    assert ("cut", True) == (first.end, first.is_whole)
    assert ("terminated", False) == (second.end, second.is_whole)


def test_a_fragment_that_is_read_twice_counts_once() -> None:
    index = index_of(played(0), played(0))

    assert 1 == len(index.episodes)
    assert 1 == len(index.workers["w0"].seen_at)


def test_a_return_that_the_worker_counted_from_the_start_is_taken() -> None:
    counted = np.full(32, np.nan, np.float32)
    counted[31] = 500.0
    index = index_of(played(3, first=False, extras={"episode_return": counted}))

    (episode,) = index.episodes.values()
    assert 500.0 == episode.return_sum


def reported(*steps: int, returns: float = 500.0, length: int = 500) -> dict[str, Any]:
    """The columns in which a worker reports the episodes that end at the steps."""
    column = np.full(32, np.nan, np.float32)
    column[list(steps)] = returns
    lengths = np.zeros(32, np.int64)
    lengths[list(steps)] = length
    return {"episode_return": column, "episode_length": lengths}


def test_an_episode_whose_start_was_missed_is_as_long_as_its_worker_reports() -> None:
    index = index_of(played(3, first=False, extras=reported(31)))

    (episode,) = index.episodes.values()
    assert (500.0, 500, 32) == (episode.return_sum, episode.length, episode.seen_count)
    assert [500.0] == [*index.workers["w0"].returns]


def test_the_return_of_a_part_that_no_worker_reports_is_unknown_and_counts_nowhere() -> None:
    index = index_of(
        played(3, first=False, ends=(9, 31), episode_id=4), played(4, reward=2.0, episode_id=6)
    )

    unknown, first, second = index.episodes.values()
    assert [None, 22.0, 64.0] == [each.row()["return"] for each in (unknown, first, second)]
    assert [22.0, 64.0] == [*index.workers["w0"].returns]
    assert 2 == sum(each["count"] for each in histogram(index.episodes.values()))
    assert [] == index.find(Query(return_max=9.0))
    learnt = learning_points(list(index.ended), by="all", points_max=1)["all"]
    assert ([43.0], [64]) == (learnt["return"], learnt["steps"])


def test_an_episode_that_its_worker_reports_no_return_of_has_none_although_it_is_whole() -> None:
    """Its environment failed: the sum of its rewards is a part."""
    index = index_of(played(0, extras=reported()))

    (episode,) = index.episodes.values()
    assert (None, 32, True) == (episode.row()["return"], episode.length, episode.has_ended)


@pytest.mark.parametrize("length", [np.full(32, np.nan), np.full(32, np.inf), np.full(32, -4)])
def test_a_length_that_is_none_is_not_taken(length: Any) -> None:
    extras = reported(31) | {"episode_length": length}
    (episode,) = index_of(played(0, extras=extras)).episodes.values()

    assert (500.0, 32) == (episode.return_sum, episode.length)


def test_workers_of_two_sessions_do_not_mix() -> None:
    index = index_of(
        played(0, ends=()), played(1, session_id="next", ends=(31,), first=False, episode_id=7)
    )

    assert ["running", "terminated"] == [each.end for each in index.episodes.values()]


def test_values_that_are_no_number_are_counted_at_their_worker() -> None:
    index = index_of(played(0, reward=math.nan), played(0, worker_id="w1"))

    assert ({"reward": 32}, {}) == tuple(index.workers[each].not_finite for each in ("w0", "w1"))
    assert 32 == sum(bin_["count"] * 32 for bin_ in histogram(index.episodes.values()))


def test_observations_that_are_no_number_are_counted_by_their_path() -> None:
    state = np.ones((32, 2), np.float32)
    state[5] = math.nan
    index = index_of(played(0, obs={"state": state}))

    assert {"obs.state": 2} == index.workers["w0"].not_finite


def test_an_array_is_still_while_no_step_differs_from_the_one_before_it() -> None:
    index = index_of(
        *(played(at, obs=np.full((32, 3), 7, np.float32)) for at in range(2)),
        *(played(at, worker_id="w1") for at in range(2)),
    )

    assert (2, 0) == tuple(index.workers[name].still["obs"] for name in ("w0", "w1"))
    assert 0 == index.workers["w0"].still["action"]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (Query(), [4, 3, 2, 1]),
        (Query(worker="w1"), [4]),
        (Query(end="running"), [3]),
        (Query(return_min=20.0), [4, 2, 1]),
        (Query(return_max=40.0), [3, 2, 1]),
        (Query(length_max=31), [3]),
        (Query(version_min=2), [4]),
        (Query(version_max=1), [3, 2, 1]),
        (Query(text="DIG"), [4]),
        (Query(task="dig", text="w0"), []),
    ],
)
def test_a_list_shows_what_fits_all_of_a_query(query: Query, found: list[int]) -> None:
    index = index_of(
        played(0),
        played(1, episode_id=1),
        played(2, steps=8, ends=(), episode_id=2),
        played(0, worker_id="w1", reward=2.0, version=2, extras={"task": np.array(["dig"] * 32)}),
    )

    assert found == [each.number for each in index.find(query)]


@pytest.mark.parametrize(
    ("query", "fits"),
    [
        # It was acted by versions 2 to 4: it fits a range that has one of them.
        ({"version_min": 4}, True),
        ({"version_min": 5}, False),
        ({"version_max": 2}, True),
        ({"version_max": 1}, False),
        ({"version_min": 3, "version_max": 3}, True),
        ({"version_min": 0, "version_max": 9}, True),
        # Bounds of return (64) and length (64) belong to the range.
        ({"return_min": 64.0, "return_max": 64.0}, True),
        ({"return_min": 64.1}, False),
        ({"return_max": 63.9}, False),
        ({"length_min": 64, "length_max": 64}, True),
        ({"length_min": 65}, False),
        ({"length_max": 63}, False),
    ],
)
def test_bounds_of_a_query_are_inclusive_and_versions_overlap(
    query: dict[str, Any], fits: bool
) -> None:
    index = index_of(played(0, ends=(), version=2), played(1, first=False, version=4))

    assert [1] * fits == [each.number for each in index.find(Query(**query))]


def test_flags_of_integers_and_wide_numbers_are_taken_as_they_are_meant() -> None:
    fragment = played(0, steps=4, ends=(1, 3))
    fragment.terminated = fragment.terminated.astype(np.uint64)
    fragment.truncated = np.zeros(4, np.int64)
    fragment.reward = np.full(4, 1e300)
    fragment.episode_id = np.full(4, 2**64 - 1, np.uint64)
    index = index_of(fragment)

    assert [("terminated", 2, math.inf, 2**64 - 1)] * 2 == [
        (each.end, each.length, each.return_sum, each.episode_id)
        for each in index.episodes.values()
    ]
    assert [] == histogram(index.episodes.values())


@pytest.mark.parametrize("counted", [np.array(["x"] * 32), np.ones(32, np.complex64)])
def test_a_return_that_is_no_number_is_not_taken(counted: Any) -> None:
    (episode,) = index_of(played(0, extras={"episode_return": counted})).episodes.values()

    assert 32.0 == episode.return_sum


@pytest.mark.parametrize(
    ("column", "label"),
    [
        (np.frombuffer(b"\xff\xff\xff\xff" * 32, "<U1"), "\ufffd"),
        (np.array(["\ud800x"] * 32), "\ufffdx"),
        (np.array(["\ud800x"] * 32).astype(">U2"), "\ufffdx"),
        (np.array([b"\xffx"] * 32), "\ufffdx"),
        (np.full(32, 7, np.uint64), "7"),
        (np.full(32, 7.5), "default"),
    ],
)
def test_a_task_is_valid_text_whatever_was_sent(column: Any, label: str) -> None:
    (episode,) = index_of(played(0, extras={"task": column})).episodes.values()

    assert label == episode.task


@pytest.mark.parametrize("returns", [(1e308, -1e308), (0.0, 5e-324), (1.0, 1.0 + 2**-52)])
def test_returns_that_no_bins_part_are_in_one_bin(returns: tuple[float, float]) -> None:
    episodes = [*index_of(played(0), played(1, episode_id=1)).episodes.values()]
    for each, value in zip(episodes, returns, strict=True):
        each.return_sum = value

    assert [{"from": min(returns), "to": max(returns), "count": 2}] == histogram(episodes)


def test_workers_arrays_and_problems_of_one_buffer_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("breadbox_console.episodes.WORKERS_MAX", 3)
    monkeypatch.setattr("breadbox_console.episodes.PATHS_MAX", 4)
    obs = {f"sensor{at}": np.zeros((32, 2), np.float32) for at in range(9)}
    index = index_of(*(played(0, worker_id=f"w{at}", obs=obs) for at in (0, 1, 2, 0, 3)))
    for at in range(99):
        index.note_problem("w3", f"problem {at}", 1.0)
    index.note_problem("w3", "problem 0", 1.0)

    # The third fragment of w0 was seen before: it is the one heard of longest ago.
    assert ["w1", "w2", "w3"] == [*index.workers]
    assert 4 == len(index.workers["w3"].still)
    assert {"problem 0": 2} | {f"problem {at}": 1 for at in range(1, 8)} == index.workers[
        "w3"
    ].problems


def test_the_bins_of_a_histogram_hold_every_episode_once() -> None:
    index = index_of(*(played(at, reward=float(at), episode_id=at) for at in range(10)))
    bins = histogram(index.episodes.values())

    assert 10 == sum(each["count"] for each in bins)
    assert (0.0, 288.0) == (bins[0]["from"], bins[-1]["to"])


def test_beyond_the_bound_the_oldest_episodes_are_forgotten_and_learning_is_not() -> None:
    index = index_of(*(played(at, episode_id=at) for at in range(10)), steps_max=128)

    assert [9, 10] == list(index.episodes)
    assert 10 == len(index.ended)
    assert 10 == len(learning_points(list(index.ended), by="worker")["w0"]["return"])


def test_fragments_of_single_steps_are_bounded_as_well() -> None:
    index = index_of(
        *(played(at, steps=1, ends=(0,), episode_id=at) for at in range(1_000)), steps_max=640
    )

    assert 10 == len(index.episodes)
    assert 1_000 == len(index.ended)
    assert not any(each.spans or each.rewards for each in list(index.ended)[:-10])


def test_an_episode_is_forgotten_after_its_time() -> None:
    index = index_of(played(0), played(1, episode_id=1), now=0.0, age_s_max=0.5)

    assert [2] == list(index.episodes)


@growth.marked
def test_each_episode_takes_as_long_to_forget_beside_many_workers_as_beside_few() -> None:
    def adding(count: int) -> Callable[[], object]:
        index = index_of(*[played(0, steps=1, worker_id=f"w{i}", ends=()) for i in range(count)])
        many = played(0, steps=count, ends=tuple(range(count)), worker_id="of short episodes")
        return lambda: index.add(reference(many), {}, many, 1e9)

    growth.check(adding, 2048)
