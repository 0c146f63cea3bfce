"""Goal: episodes survive the way through fragments, and come back the same from any order."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breadbox_learner.offline.episode import Episode
from breadbox_learner.offline.errors import OfflineDataError
from breadbox_learner.offline.fragments import (
    FragmentCutter,
    FragmentReader,
    fragments_to_episodes,
)
from breadbox_learner.offline.mixing import Apportioner
from support.rllib_cases import make_toy_episode


def toy(episode_id: str, length: int, *, start: int = 0, end: str = "term") -> Episode:
    return make_toy_episode(
        episode_id, length, start=start, terminated=end == "term", truncated=end == "trunc"
    )


def cut(episodes: list[Episode], step_count: int) -> tuple[list, FragmentCutter]:
    cutter = FragmentCutter(step_count=step_count, worker_id="w", session_id="s")
    fragments = [fragment for episode in episodes for fragment in cutter.add(episode)]
    return [*fragments, *cutter.finish()], cutter


def test_the_rules_of_a_fragment_hold() -> None:
    fragments, cutter = cut([toy("a", 3), toy("b", 4, end="trunc"), toy("c", 3)], 4)
    assert ([0, 1], 2) == ([f.fragment_index for f in fragments], cutter.dropped_step_count)
    first, second = fragments
    assert [True, False, False, True] == first.first.tolist()
    assert [False, False, True, False] == first.terminated.tolist()
    assert [0, 0, 0, 1] == first.episode_id.tolist()
    assert [1.0] == first.next_obs.tolist()
    assert ([2], [[3.0]]) == (first.final_obs_step.tolist(), first.final_obs.tolist())
    assert [False, False, True, False] == second.truncated.tolist()
    assert [False, False, False, True] == second.first.tolist()
    assert np.float32 == first.reward.dtype


def test_an_unfinished_episode_counts_as_truncated() -> None:
    (fragment,), _ = cut([toy("a", 4, end="")], 4)
    assert (True, [4.0]) == (bool(fragment.truncated[-1]), fragment.next_obs.tolist())


def test_log_probabilities_and_values_get_their_fields() -> None:
    episode = toy("a", 4)
    numbers = np.arange(4, dtype=np.float32)
    episode.extra_model_outputs = {"action_logp": numbers, "vf_preds": numbers + 1, "lp": numbers}
    (fragment,), _ = cut([episode], 4)
    assert ([0, 1, 2, 3], [1, 2, 3, 4], {"lp"}) == (
        fragment.log_prob.tolist(),
        fragment.value.tolist(),
        set(fragment.extras),
    )
    (back,) = fragments_to_episodes([fragment])
    assert {"lp", "log_prob", "value"} == set(back.extra_model_outputs)


def test_columns_may_not_go_missing_on_the_way() -> None:
    later = toy("b", 2)
    later.extra_model_outputs = {}
    with pytest.raises(OfflineDataError, match="no column 'lp'"):
        cut([toy("a", 2), later], 4)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["term", "trunc"])), min_size=1),
    st.integers(1, 8),
    st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_episodes_come_back_from_any_order(
    specs: list[tuple[int, str]], step_count: int, seed: int
) -> None:
    episodes = [toy(str(i), length, end=end) for i, (length, end) in enumerate(specs)]
    fragments, cutter = cut(episodes, step_count)
    total = sum(length for length, _ in specs)
    assert total == len(fragments) * step_count + cutter.dropped_step_count
    random.Random(seed).shuffle(fragments)
    back = list(fragments_to_episodes(fragments))
    for episode, came in zip(episodes, back, strict=False):
        if came.is_done:
            assert (len(episode), episode.terminated) == (len(came), came.terminated)
            np.testing.assert_array_equal(episode.observations, came.observations)
            np.testing.assert_array_equal(episode.actions, came.actions)
    assert total - cutter.dropped_step_count == sum(len(episode) for episode in back)
    assert all(episode.is_done for episode in back[:-1])


def test_a_missing_fragment_leaves_parts_with_keys_of_their_own() -> None:
    fragments, _ = cut([toy("a", 12)], 4)
    reader = FragmentReader()
    parts = [part for f in (fragments[0], fragments[2]) for part in reader.add(f)]
    parts += reader.finish()
    assert [(0, False), (8, True)] == [(part.t_started, part.is_done) for part in parts]


def test_a_discontinuity_ends_what_came_before() -> None:
    fragments, _ = cut([toy("a", 8)], 4)
    fragments[1].discontinuity = True
    assert [4, 4] == [len(episode) for episode in fragments_to_episodes(fragments)]


class TestApportioning:
    @pytest.mark.parametrize(("per_chunk", "count"), [(1, 10), (4, 8), (3, 7)])
    def test_shares_are_exact_over_many_batches(self, per_chunk: int, count: int) -> None:
        apportioner = Apportioner(
            {"demo": 0.25, "online": 0.75}, {"demo": per_chunk, "online": per_chunk}
        )
        taken = {"demo": 0, "online": 0}
        for _ in range(100):
            for buffer, size in apportioner.split(count).items():
                assert 0 == size % per_chunk
                taken[buffer] += size
        assert abs(taken["demo"] - 25 * count) <= per_chunk
        assert abs(taken["online"] - 75 * count) <= per_chunk

    @pytest.mark.parametrize("shares", [{"a": 0.5}, {"a": 1.5, "b": -0.5}, {}])
    def test_shares_must_sum_to_one(self, shares: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="shares"):
            Apportioner(shares, dict.fromkeys(shares, 1))
