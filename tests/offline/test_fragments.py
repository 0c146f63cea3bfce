"""Goal: episodes survive the way through fragments, and come back the same from any order."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breadbox.model.fragment import Fragment
from breadbox.model.trees import leaves
from breadbox.writing.fragmenter import EPISODE_COLUMNS, Fragmenter, Step
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.errors import EpisodeJoinError, OfflineDataError
from breadbox_offline.service import FragmentCutter, FragmentReader
from breadbox_offline.training.mixing import Apportioner, MixedLease
from support import growth
from support.references import references
from support.rllib_cases import make_toy_episode


def toy(episode_id: str, length: int, *, start: int = 0, end: str = "term") -> Episode:
    return make_toy_episode(
        episode_id, length, start=start, terminated=end == "term", truncated=end == "trunc"
    )


def cut(
    episodes: list[Episode], step_count: int, *, keeps_tail: bool = False
) -> tuple[list[Fragment], FragmentCutter]:
    cutter = FragmentCutter(
        step_count=step_count, worker_id="w", session_id="s", keeps_tail=keeps_tail
    )
    fragments = [fragment for episode in episodes for fragment in cutter.add(episode)]
    return [*fragments, *cutter.finish()], cutter


def fragments_to_episodes(fragments: Iterable[Fragment]) -> Iterator[Episode]:
    """Episodes of fragments in any order."""
    reader = FragmentReader()
    for fragment in sorted(fragments, key=lambda f: (f.session_id, f.worker_id, f.fragment_index)):
        yield from reader.add(fragment)
    yield from reader.finish()


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


def test_parts_have_the_rows_and_ends_of_the_episodes_that_they_are_of() -> None:
    episodes = [toy("a", 9), toy("b", 2, end="trunc"), toy("c", 6)]
    fragments, _ = cut(episodes, 4)
    reader = FragmentReader(yields_parts=True)
    parts = [part for each in fragments for part in reader.add(each)] + [*reader.finish()]
    joined: list[Episode] = []
    for part in parts:
        joined[-1:] = (
            [joined[-1].join(part)]
            if joined and joined[-1].leads_to(part)
            else [
                *joined[-1:],
                part,
            ]
        )

    assert [4, 4, 1, 2, 1, 4] == [len(each) for each in parts]
    assert [each.content_digest() for each in fragments_to_episodes(fragments)] == [
        each.content_digest() for each in joined
    ]


@pytest.mark.parametrize("yields_parts", [True, False])
def test_a_fragment_that_starts_elsewhere_ends_the_episode_before_it(yields_parts: bool) -> None:
    """A loop that reads its sensors again for each step writes such fragments."""
    fragments, _ = cut([toy("a", 8)], 4)
    fragments[1].obs = fragments[1].obs + 1
    reader = FragmentReader(yields_parts=yields_parts)
    found = [part for fragment in fragments for part in reader.add(fragment)]
    first, second = [*found, *reader.finish()]
    assert (4, 4, False, True) == (len(first), len(second), first.is_done, second.is_done)
    assert f"{first.id}@4" == second.id
    np.testing.assert_array_equal(fragments[1].obs, second.observations[:4])


def test_parts_of_other_shapes_are_refused() -> None:
    fragments, _ = cut([toy("a", 8)], 4)
    fragments[1].obs = np.repeat(fragments[1].obs, 2, axis=-1)
    fragments[1].final_obs = np.repeat(fragments[1].final_obs, 2, axis=-1)
    reader = FragmentReader(yields_parts=True)
    assert 1 == len([*reader.add(fragments[0])])
    with pytest.raises(EpisodeJoinError, match="observations of other shapes"):
        list(reader.add(fragments[1]))


def test_a_long_episode_of_many_fragments_is_joined_in_order() -> None:
    episode = toy("a", 1000)
    fragments, _ = cut([episode], 4)
    (found,) = fragments_to_episodes(fragments)

    np.testing.assert_array_equal(episode.observations, found.observations)
    np.testing.assert_array_equal(episode.actions, found.actions)


def test_bfloat16_comes_out_widened() -> None:
    torch = pytest.importorskip("torch")
    (fragment,), _ = cut([toy("a", 4)], 4)
    fragment.obs = torch.full((4, 1), 1.5, dtype=torch.bfloat16)
    fragment.next_obs = fragment.final_obs = torch.full((1,), 2.5, dtype=torch.bfloat16)
    fragment.final_obs = fragment.final_obs[None]
    fragment.reward = torch.full((4,), 0.5, dtype=torch.bfloat16)
    (episode,) = fragments_to_episodes([fragment])

    assert np.float32 == episode.observations.dtype
    assert [1.5, 1.5, 1.5, 1.5, 2.5] == episode.observations[:, 0].tolist()
    assert [0.5] * 4 == episode.rewards.tolist()


def test_an_unfinished_episode_counts_as_truncated() -> None:
    (fragment,), _ = cut([toy("a", 4, end="")], 4)
    assert (True, [4.0]) == (bool(fragment.truncated[-1]), fragment.next_obs.tolist())


def test_log_probabilities_and_values_get_their_fields() -> None:
    episode = toy("a", 4)
    numbers = np.arange(4, dtype=np.float32)
    episode.extra_model_outputs = {"action_logp": numbers, "vf_preds": numbers + 1, "lp": numbers}
    (fragment,), _ = cut([episode], 4)
    assert ([0, 1, 2, 3], [1, 2, 3, 4], {"lp", *EPISODE_COLUMNS}) == (
        fragment.log_prob.tolist(),
        fragment.value.tolist(),
        set(fragment.extras),
    )
    (back,) = fragments_to_episodes([fragment])
    assert {"lp", "log_prob", "value", *EPISODE_COLUMNS} == set(back.extra_model_outputs)
    (again,), _ = cut([back], 4)
    assert set(fragment.extras) == set(again.extras)


def test_imports_have_the_return_and_length_of_each_whole_episode() -> None:
    episodes = [toy("a", 3), toy("b", 5, end="trunc"), toy("c", 2, end=""), toy("d", 2, start=7)]
    fragments, _ = cut([*episodes, toy("e", 1)], 4, keeps_tail=True)
    assert [4, 4, 4, 1] == [fragment.step_count for fragment in fragments]
    lengths = np.concatenate([fragment.extras["episode_length"] for fragment in fragments])
    assert [0, 0, 3, 0, 0, 0, 0, 5, 0, 0, 0, 0, 1] == lengths.tolist()
    returns = np.concatenate([fragment.extras["episode_return"] for fragment in fragments])
    wanted = [episodes[0].return_sum(), episodes[1].return_sum(), toy("e", 1).return_sum()]
    np.testing.assert_allclose(returns[lengths > 0], wanted)
    assert np.isnan(returns[lengths == 0]).all()
    assert ("float32", "int64") == (returns.dtype.name, lengths.dtype.name)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=9),
    st.integers(1, 8),
)
@settings(deadline=None)
def test_every_producer_reports_the_same_episodes(
    specs: list[tuple[int, bool]], step_count: int
) -> None:
    episodes = [
        toy(str(i), length, end="term" if is_terminal else "trunc")
        for i, (length, is_terminal) in enumerate(specs)
    ]
    imported, _ = cut(episodes, step_count, keeps_tail=True)
    fragmenter = Fragmenter(worker_id="w", step_count=step_count)
    played = []
    for number, episode in enumerate(episodes):
        for t in range(len(episode)):
            step = Step(
                session_id="s",
                model_version=0,
                obs=episode.observations[t],
                action=episode.actions[t],
                first=t == 0,
                episode_id=number,
                extras={"lp": episode.extra_model_outputs["lp"][t]},
            )
            fragment = fragmenter.push(step)
            assert fragment is None
            is_last = t == len(episode) - 1
            fragmenter.answer(
                float(episode.rewards[t]),
                terminated=episode.terminated and is_last,
                truncated=episode.truncated and is_last,
                final_obs=episode.observations[-1] if is_last else None,
            )
            if fragmenter.answered_count == step_count:
                played.append(fragmenter.cut(episode.observations[t + 1]))
    if fragmenter.answered_count:
        played.append(fragmenter.cut(episodes[-1].observations[-1]))
    assert len(played) == len(imported)
    for one, other in zip(played, imported, strict=True):
        assert one is not None
        one_leaves, other_leaves = (
            {path: np.asarray(leaf) for path, leaf in leaves(vars_of(each))}
            for each in (one, other)
        )
        assert {path: leaf.dtype for path, leaf in one_leaves.items()} == {
            path: leaf.dtype for path, leaf in other_leaves.items()
        }
        for path in one_leaves.keys() - {"next_obs"}:
            np.testing.assert_allclose(one_leaves[path], other_leaves[path], err_msg=path)


def vars_of(fragment: Fragment) -> dict[str, Any]:
    """Its arrays, by field."""
    names = ("obs", "action", "reward", "terminated", "truncated", "first", "episode_id")
    more = ("next_obs", "final_obs_step", "final_obs", "log_prob", "value", "extras")
    return {name: getattr(fragment, name) for name in (*names, *more)}


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


def recurrent(fragments: list[Fragment]) -> list[Fragment]:
    """As a recurrent policy's worker records them: a state per fragment, here its first obs."""
    for fragment in fragments:
        hidden = np.repeat(fragment.obs[0], 3)
        fragment.in_state = [hidden, {"cell": hidden * 10}]
    return fragments


class TestRecurrentStates:
    def test_an_episode_knows_the_state_before_each_of_its_fragments(self) -> None:
        fragments, _ = cut([toy("a", 3), toy("b", 9)], 4)
        episodes = list(fragments_to_episodes(recurrent(fragments)))
        assert [[0], [1, 5]] == [list(episode.in_states) for episode in episodes]
        hidden, cell = episodes[1].in_states[5]
        assert ([5.0] * 3, [50.0] * 3) == (hidden.tolist(), cell["cell"].tolist())

    @pytest.mark.parametrize("lengths", [(8,), (3, 9), (4, 4), (1, 1, 10), (12, 5, 7)])
    def test_states_survive_the_way_out_and_in_again(self, lengths: tuple[int, ...]) -> None:
        fragments, _ = cut([toy(str(i), length) for i, length in enumerate(lengths)], 4)
        recurrent(fragments)
        again, cutter = cut(list(fragments_to_episodes(fragments)), 4)
        for before, after in zip(fragments, again, strict=True):
            assert before.in_state[0].tolist() == after.in_state[0].tolist()
            assert before.in_state[1]["cell"].tolist() == after.in_state[1]["cell"].tolist()
        assert 0 == cutter.assumed_state_count

    def test_slices_and_joins_keep_the_states_of_their_steps(self) -> None:
        fragments, _ = cut([toy("a", 12)], 4)
        (whole,) = fragments_to_episodes(recurrent(fragments))
        assert [0, 4, 8] == list(whole.in_states)
        front, back = whole.slice(0, 5), whole.slice(5, 12)
        assert ([0, 4], [8]) == (list(front.in_states), list(back.in_states))
        assert [4, 8] == list(whole.slice(5, 12, lookback=1).in_states)
        assert [0, 4, 8] == list(front.join(back).in_states)

    def test_where_no_state_was_recorded_zeros_stand_in_and_are_counted(self) -> None:
        fragments, _ = cut([toy("a", 12)], 4)
        again, cutter = cut(list(fragments_to_episodes(recurrent(fragments))), 3)
        assert [0, 0, 0, 0] == [fragment.in_state[0][0] for fragment in again]
        assert [(3,)] * 4 == [fragment.in_state[1]["cell"].shape for fragment in again]
        assert 3 == cutter.assumed_state_count

    def test_an_episode_start_needs_no_recorded_state(self) -> None:
        fragments, _ = cut([toy("a", 4)], 4)
        with_states = list(fragments_to_episodes(recurrent(fragments)))
        again, cutter = cut([*with_states, toy("b", 4)], 4)
        assert ([0.0] * 3, 0) == (again[1].in_state[0].tolist(), cutter.assumed_state_count)

    @pytest.mark.parametrize("name", ["state_in", "state_out"])
    def test_states_recorded_at_every_step_give_those_of_the_fragments(self, name: str) -> None:
        episode = toy("a", 9)
        offset = 1 if name == "state_out" else 0
        states = np.arange(9, dtype=np.float32)[:, None] + offset
        episode.extra_model_outputs = {"state_in": states - offset, name: states}
        fragments, _ = cut([episode], 3)
        assert [[0.0], [3.0], [6.0]] == [fragment.in_state.tolist() for fragment in fragments]
        assert {*EPISODE_COLUMNS} == set(fragments[0].extras)

    def test_states_of_other_shapes_are_refused(self) -> None:
        first, second = toy("a", 4), toy("b", 4)
        first.in_states, second.in_states = {0: np.zeros(2)}, {0: np.zeros(3)}
        with pytest.raises(OfflineDataError, match="other shapes"):
            cut([first, second], 4)

    def test_data_without_states_has_none(self) -> None:
        fragments, cutter = cut([toy("a", 9)], 4)
        assert [None, None] == [fragment.in_state for fragment in fragments]
        assert 0 == cutter.assumed_state_count


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


@growth.marked
def test_each_fragment_of_a_large_mixed_batch_takes_as_long_as_one_of_a_small() -> None:
    client: Any = SimpleNamespace(load_batch=lambda *_, **__: SimpleNamespace(extras={}))

    def loading(count: int) -> Callable[[], object]:
        granted = references(count)
        for number in range(0, count, 2):
            granted[number] = replace(
                granted[number], metadata=replace(granted[number].metadata, step_count=32)
            )
        leases: Any = {"online": SimpleNamespace(references=granted)}
        lease = MixedLease(client, leases, ExitStack())
        return lambda: lease.load_batch(columns=["reward"], seed=1)

    growth.check(loading, 8192)
