"""The cutter on literal sequences: observations are their own time, rewards ten times that."""

from typing import Any

import numpy as np
import pytest

from breadbox.model.errors import TreeMismatchError
from breadbox.model.fragment import Fragment
from breadbox.writing.fragmenter import Fragmenter, Step


class Trace:
    """A worker whose observation at time t is t, and whose reward for the step at t is 10 t."""

    def __init__(self, step_count: int = 3, staleness_max: int | None = None) -> None:
        self.fragmenter = Fragmenter(
            worker_id="w", step_count=step_count, staleness_max=staleness_max
        )
        self.time = 0
        self.first = True
        self.episode_id = 0
        self.session_id = "s"
        self.version = 1
        self.fragments: list[Fragment] = []

    def push(self) -> None:
        step = Step(
            session_id=self.session_id,
            model_version=self.version,
            obs=np.array([self.time], np.int32),
            action=np.int64(self.time),
            first=self.first,
            episode_id=self.episode_id,
            state=[np.array([self.time], np.float32)],
            log_prob=-float(self.time),
            value=float(self.time),
        )
        fragment = self.fragmenter.push(step)
        if fragment is not None:
            self.fragments.append(fragment)
        self.first = False

    def answer(self, end: str = "") -> None:
        """`end`: "" goes on, "t" terminated, "c" cut off (truncated), "tc" both."""
        self.fragmenter.answer(
            10.0 * self.time,
            terminated="t" in end,
            truncated="c" in end,
            final_obs=np.array([-self.time], np.int32) if end else None,
        )
        self.time += 1
        self.first = bool(end)
        self.episode_id += bool(end)

    def run(self, ends: list[str]) -> None:
        for end in ends:
            self.push()
            self.answer(end)

    def abort(self) -> None:
        self.fragmenter.abort()
        self.time += 1
        self.first = True
        self.episode_id += 1


def summary(fragment: Fragment) -> dict[str, Any]:
    return {
        "obs": fragment.obs[:, 0].tolist(),
        "next_obs": fragment.next_obs.tolist(),
        "reward": fragment.reward.tolist(),
        "terminated": fragment.terminated.astype(int).tolist(),
        "truncated": fragment.truncated.astype(int).tolist(),
        "first": fragment.first.astype(int).tolist(),
        "episode_id": fragment.episode_id.tolist(),
        "final": None
        if fragment.final_obs_step is None
        else dict(
            zip(fragment.final_obs_step.tolist(), fragment.final_obs[:, 0].tolist(), strict=True)
        ),
        "discontinuity": fragment.discontinuity,
    }


def test_a_fragment_is_emitted_when_one_more_step_than_its_length_is_there() -> None:
    trace = Trace()
    trace.run(["", "", ""])
    assert [] == trace.fragments
    trace.push()
    assert 1 == len(trace.fragments)


def test_step_t_is_the_next_observation_and_element_0_of_the_next_fragment() -> None:
    trace = Trace()
    trace.run([""] * 6)
    trace.push()
    one, two = trace.fragments
    assert {
        "obs": [0, 1, 2],
        "next_obs": [3],
        "reward": [0.0, 10.0, 20.0],
        "terminated": [0, 0, 0],
        "truncated": [0, 0, 0],
        "first": [1, 0, 0],
        "episode_id": [0, 0, 0],
        "final": None,
        "discontinuity": False,
    } == summary(one)
    assert [3, 4, 5] == two.obs[:, 0].tolist()
    assert [0, 0, 0] == two.first.astype(int).tolist()
    assert (0, 1) == (one.fragment_index, two.fragment_index)
    assert ([0.0], [3.0]) == (one.in_state[0].tolist(), two.in_state[0].tolist())


def test_actions_log_probs_and_values_stand_at_their_steps() -> None:
    trace = Trace()
    trace.run([""] * 3)
    trace.push()
    (fragment,) = trace.fragments
    assert fragment.log_prob is not None
    assert fragment.value is not None
    assert [0, 1, 2] == fragment.action.tolist()
    assert [0.0, -1.0, -2.0] == fragment.log_prob.tolist()
    assert [0.0, 1.0, 2.0] == fragment.value.tolist()


def test_an_episode_that_ends_inside_starts_the_next_step_and_keeps_its_final_observation() -> None:
    trace = Trace()
    trace.run(["", "t", ""])
    trace.push()
    assert {
        "obs": [0, 1, 2],
        "next_obs": [3],
        "reward": [0.0, 10.0, 20.0],
        "terminated": [0, 1, 0],
        "truncated": [0, 0, 0],
        "first": [1, 0, 1],
        "episode_id": [0, 0, 1],
        "final": {1: -1},
        "discontinuity": False,
    } == summary(trace.fragments[0])


def test_an_episode_that_ends_at_the_border_leaves_the_reset_observation_as_next() -> None:
    trace = Trace()
    trace.run(["", "", "c", "", "", ""])
    trace.push()
    one, two = trace.fragments
    assert [0, 0, 1] == one.truncated.astype(int).tolist()
    assert [0, 0, 0] == one.terminated.astype(int).tolist()
    assert ([2], [-2]) == (one.final_obs_step.tolist(), one.final_obs[:, 0].tolist())
    assert [3] == one.next_obs.tolist()
    assert [1, 0, 0] == two.first.astype(int).tolist()
    assert [1, 1, 1] == two.episode_id.tolist()


def test_an_episode_that_ends_just_after_the_border_belongs_to_the_next_fragment() -> None:
    trace = Trace()
    trace.run(["", "", "", "t", "", ""])
    trace.push()
    one, two = trace.fragments
    assert None is one.final_obs_step
    assert [1, 0, 0] == two.terminated.astype(int).tolist()
    assert [0, 1, 0] == two.first.astype(int).tolist()
    assert {0: -3} == summary(two)["final"]


def test_both_flags_of_one_step_are_kept_apart() -> None:
    """The ancestor merged them."""
    trace = Trace()
    trace.run(["tc", "t", "c"])
    trace.push()
    (fragment,) = trace.fragments
    assert [1, 1, 0] == fragment.terminated.astype(int).tolist()
    assert [1, 0, 1] == fragment.truncated.astype(int).tolist()
    assert {0: 0, 1: -1, 2: -2} == summary(fragment)["final"]


def test_one_step_fragments_and_one_step_episodes() -> None:
    trace = Trace(step_count=1)
    trace.run(["t", "", "c"])
    trace.push()
    assert [[1], [1], [0]] == [f.first.astype(int).tolist() for f in trace.fragments]
    assert [[1], [0], [0]] == [f.terminated.astype(int).tolist() for f in trace.fragments]
    assert [0, 1, 2] == [f.fragment_index for f in trace.fragments]


def test_a_version_change_inside_is_kept_per_step() -> None:
    """The ancestor kept the oldest only."""
    trace = Trace()
    trace.run([""])
    trace.version = 4
    trace.run(["", ""])
    trace.push()
    (fragment,) = trace.fragments
    assert (1, 4) == (fragment.model_version_min, fragment.model_version_max)
    assert fragment.model_version is not None
    assert [1, 4, 4] == fragment.model_version.tolist()


def test_a_single_version_needs_no_column_even_if_the_next_step_is_newer() -> None:
    trace = Trace()
    trace.run([""] * 3)
    trace.version = 2
    trace.push()
    (fragment,) = trace.fragments
    assert (1, 1, None) == (
        fragment.model_version_min,
        fragment.model_version_max,
        fragment.model_version,
    )


def test_steps_too_old_to_be_admitted_are_dropped_and_the_next_fragment_says_so() -> None:
    """The ancestor's next fragment looked contiguous."""
    trace = Trace(staleness_max=1)
    trace.run([""] * 5)
    trace.version = 3
    trace.run([""] * 3)
    trace.push()
    one, two = trace.fragments
    assert ([0, 1, 2], [5, 6, 7]) == (one.obs[:, 0].tolist(), two.obs[:, 0].tolist())
    assert (False, True) == (one.discontinuity, two.discontinuity)
    assert (0, 1) == (one.fragment_index, two.fragment_index)
    assert [5.0] == two.in_state[0].tolist()
    assert 2 == trace.fragmenter.dropped_step_count


def test_a_fragment_is_not_completed_by_the_step_that_makes_it_stale() -> None:
    trace = Trace(staleness_max=1)
    trace.run([""] * 3)
    trace.version = 3
    trace.push()
    assert [] == trace.fragments

    trace.answer()
    trace.run(["", ""])
    trace.push()
    (fragment,) = trace.fragments
    assert [[3], [4], [5]] == fragment.obs.tolist()


def test_staleness_at_the_limit_is_fresh() -> None:
    trace = Trace(staleness_max=2)
    trace.run([""] * 3)
    trace.version = 3
    trace.push()
    assert 1 == len(trace.fragments)


def test_a_new_session_counts_from_0_and_holds_nothing_of_the_old_one() -> None:
    trace = Trace()
    trace.run([""] * 5)
    trace.session_id = "s2"
    trace.run([""] * 3)
    trace.push()
    one, two = trace.fragments
    assert ("s", "s2") == (one.session_id, two.session_id)
    assert (0, 0) == (one.fragment_index, two.fragment_index)
    assert [5, 6, 7] == two.obs[:, 0].tolist()
    assert False is two.discontinuity


def test_an_environment_that_failed_is_truncated_never_terminated_and_keeps_its_last_reward() -> (
    None
):
    """The ancestor recorded a true terminal with reward 0."""
    trace = Trace()
    trace.run(["", ""])
    trace.push()
    trace.abort()
    trace.run([""])
    trace.push()
    assert {
        "obs": [0, 1, 3],
        "next_obs": [4],
        "reward": [0.0, 10.0, 30.0],
        "terminated": [0, 0, 0],
        "truncated": [0, 1, 0],
        "first": [1, 0, 1],
        "episode_id": [0, 0, 1],
        "final": {1: 2},
        "discontinuity": False,
    } == summary(trace.fragments[0])


def test_a_failure_at_the_border_breaks_the_chain_between_the_fragments() -> None:
    trace = Trace()
    trace.run([""] * 3)
    trace.push()
    trace.abort()
    trace.run([""] * 3)
    trace.push()
    one, two = trace.fragments
    assert [0, 0, 0] == one.truncated.astype(int).tolist()
    assert [3] == one.next_obs.tolist()
    assert (False, True) == (one.discontinuity, two.discontinuity)
    assert [4, 5, 6] == two.obs[:, 0].tolist()
    assert [4.0] == two.in_state[0].tolist()


def test_a_failure_after_an_ended_episode_invents_no_second_end() -> None:
    trace = Trace()
    trace.run(["", "t"])
    trace.push()
    trace.abort()
    trace.run([""])
    trace.push()
    (fragment,) = trace.fragments
    assert [0, 1, 0] == fragment.terminated.astype(int).tolist()
    assert [0, 0, 0] == fragment.truncated.astype(int).tolist()
    assert {1: -1} == summary(fragment)["final"]


def test_a_failure_between_answer_and_step_ends_with_the_observation_that_is_known() -> None:
    trace = Trace()
    trace.run(["", ""])
    trace.fragmenter.abort(next_obs=np.array([77], np.int32))
    trace.first = True
    trace.run([""])
    trace.push()
    assert [0, 1, 0] == trace.fragments[0].truncated.astype(int).tolist()
    assert {1: 77} == summary(trace.fragments[0])["final"]


def test_only_the_first_fragment_after_a_failure_is_a_discontinuity() -> None:
    trace = Trace()
    trace.push()
    trace.abort()
    trace.run([""] * 6)
    trace.push()
    assert [True, False] == [fragment.discontinuity for fragment in trace.fragments]


def test_a_failure_inside_a_fragment_breaks_no_chain_between_fragments() -> None:
    """Marked, the fragment with the failure would have discarded the chunk that it belongs to."""
    trace = Trace()
    trace.run([""] * 4)
    trace.push()
    trace.abort()
    trace.run([""] * 4)
    trace.push()
    trace.answer()
    trace.push()
    one, two, three = trace.fragments
    assert ([3], [3]) == (one.next_obs.tolist(), two.obs[0].tolist())
    assert ([3, 5, 6], [True, False, False]) == (two.obs[:, 0].tolist(), two.truncated.tolist())
    assert ([7], [7]) == (two.next_obs.tolist(), three.obs[0].tolist())
    assert [False, False, False] == [fragment.discontinuity for fragment in trace.fragments]


def test_keys_that_vary_are_an_error_that_names_path_and_fragment_and_is_survived() -> None:
    """The ancestor's sender died."""
    fragmenter = Fragmenter(worker_id="w", step_count=2)

    def push(obs: Any, first: bool = False) -> Fragment | None:
        return fragmenter.push(
            Step(
                session_id="s",
                model_version=1,
                obs=obs,
                action=np.int64(0),
                first=first,
                episode_id=0,
            )
        )

    push({"image": np.zeros(2, np.uint8)}, first=True)
    fragmenter.answer(1.0, terminated=False, truncated=False)
    with pytest.raises(TreeMismatchError) as caught:
        push({"image": np.zeros(2, np.uint8), "task": np.zeros(1)})
    assert "fragment 0 of worker w: (root): wanted keys ['image'], got keys ['image', 'task']" == (
        str(caught.value)
    )
    with pytest.raises(TreeMismatchError, match=r"image: wanted uint8\[2\], got uint8\[3\]"):
        push({"image": np.zeros(3, np.uint8)})
    fragmenter.abort(next_obs=None)
    push({"image": np.ones(2, np.uint8)}, first=True)
    fragmenter.answer(1.0, terminated=False, truncated=False)
    fragment = push({"image": np.full(2, 2, np.uint8)})
    assert fragment is not None
    assert [[0, 0], [1, 1]] == fragment.obs["image"].tolist()
    assert (None, None) == (fragment.log_prob, fragment.in_state)
    assert not fragment.discontinuity


def test_the_state_is_wanted_exactly_where_a_fragment_begins() -> None:
    trace = Trace(step_count=2)
    wanted = []
    for _ in range(5):
        wanted.append(trace.fragmenter.wants_state("s", 1))
        trace.run([""])
    assert [True, False, True, False, True] == wanted


def test_the_state_is_wanted_where_a_new_session_or_version_begins_a_fragment() -> None:
    trace = Trace(staleness_max=1)
    trace.run([""])
    wants = trace.fragmenter.wants_state
    assert [False, False, True, True] == [
        wants("s", 1),
        wants("s", 2),
        wants("s", 3),
        wants("z", 1),
    ]


def test_a_fragment_keeps_its_values_while_the_next_one_is_filled() -> None:
    trace = Trace()
    trace.run([""] * 3)
    trace.push()
    before = summary(trace.fragments[0])
    trace.answer()
    trace.run([""] * 9)
    assert before == summary(trace.fragments[0])


def test_an_episodes_return_and_length_stand_at_its_last_step_over_fragments_and_drops() -> None:
    trace = Trace(staleness_max=0)
    trace.run(["", "", "", ""])
    trace.version = 2  # what is open is too old now: dropped, but its rewards were earned
    trace.run(["", "t", "", "c"])
    trace.push()
    one, two = trace.fragments
    assert [True] * 3 == np.isnan(one.extras["episode_return"]).tolist()
    # Episode one: 0 + 10 + 20 + 30 + 40 + 50 in 6 steps; the step at time 3 was dropped.
    np.testing.assert_equal(two.extras["episode_return"], [np.nan, 150.0, np.nan])
    assert [0, 6, 0] == two.extras["episode_length"].tolist()


def test_an_aborted_episode_has_no_return() -> None:
    trace = Trace()
    trace.run([""] * 2)
    trace.abort()
    trace.run([""] * 2)
    (fragment,) = trace.fragments
    assert [False, True, False] == fragment.truncated.tolist()
    assert np.isnan(fragment.extras["episode_return"]).all()


# Cutting ----------------------------------------------------------------------------------------


def cut(trace: Trace) -> Fragment:
    fragment = trace.fragmenter.cut(np.array([trace.time], np.int32))
    assert fragment is not None
    return fragment


def test_a_cut_hands_out_what_was_answered_and_the_next_step_follows() -> None:
    trace = Trace()
    trace.run(["", ""])
    assert 2 == trace.fragmenter.answered_count
    one = cut(trace)
    trace.run(["", "t"])
    two = cut(trace)
    assert ([0, 1], [2]) == (one.obs[:, 0].tolist(), one.next_obs.tolist())
    assert ([2, 3], [4]) == (two.obs[:, 0].tolist(), two.next_obs.tolist())
    assert [0, 0] == two.first.astype(int).tolist()
    assert (False, False) == (one.discontinuity, two.discontinuity)
    assert (0, 1) == (one.fragment_index, two.fragment_index)
    assert two.final_obs_step is not None
    assert [1] == two.final_obs_step.tolist()


def test_a_cut_of_all_steps_leaves_none_for_the_next_push_to_hand_out() -> None:
    trace = Trace()
    trace.run(["", "", ""])
    assert 3 == cut(trace).step_count
    assert trace.fragmenter.cut(np.array([3], np.int32)) is None
    trace.run(["", "", ""])
    assert [] == trace.fragments


def test_an_episode_given_up_right_after_a_cut_leaves_a_discontinuity() -> None:
    """Nothing says in the earlier fragment that its last step has no successor."""
    trace = Trace()
    trace.run([""])
    cut(trace)
    trace.fragmenter.abort()
    trace.first, trace.episode_id = True, 1
    trace.run([""])
    one = cut(trace)
    trace.run(["t"])
    two = cut(trace)
    trace.fragmenter.abort()  # There is no episode to be given up.
    trace.run([""])
    assert (True, [1]) == (one.discontinuity, one.first.astype(int).tolist())
    assert (False, False) == (two.discontinuity, cut(trace).discontinuity)


def test_extras_stand_at_their_steps_beside_those_of_episodes() -> None:
    fragmenter = Fragmenter(worker_id="w", step_count=3)
    for time in range(2):
        fragmenter.push(
            Step(
                session_id="s",
                model_version=0,
                obs=np.float32(0),
                action=np.int64(0),
                first=time == 0,
                episode_id=0,
                extras={"q": np.float32(time)},
            )
        )
        fragmenter.answer(1.0, terminated=time == 1, truncated=False)
    fragment = fragmenter.cut(np.float32(0))
    assert fragment is not None
    assert [0.0, 1.0] == fragment.extras["q"].tolist()
    assert [0, 2] == fragment.extras["episode_length"].tolist()


def ragged(step_count: int, staleness_max: int) -> Trace:
    trace = Trace(step_count, staleness_max)
    trace.fragmenter.is_ragged = True
    return trace


def test_a_ragged_buffer_gets_the_short_fragment_before_it_would_be_dropped() -> None:
    """Its steps were dropped, all of them, for as long as versions were faster than fragments."""
    trace = ragged(8, 2)
    for _ in range(6):
        trace.run([""] * 2)
        trace.version += 1
    assert 0 == trace.fragmenter.dropped_step_count
    assert [[0, 1, 2, 3], [4, 5, 6, 7]] == [each.obs[:, 0].tolist() for each in trace.fragments]
    assert [[4], [8]] == [each.next_obs.tolist() for each in trace.fragments]
    assert [False, False] == [each.discontinuity for each in trace.fragments]
    assert [[0.0], [4.0]] == [each.in_state[0].tolist() for each in trace.fragments]
    assert [0, 1] == [each.fragment_index for each in trace.fragments]


def test_a_ragged_fragment_that_is_stale_already_is_dropped_all_the_same() -> None:
    trace = ragged(8, 2)
    trace.run([""] * 3)
    trace.version += 3
    trace.run([""])
    assert ([], 3, 1) == (
        trace.fragments, trace.fragmenter.dropped_step_count, trace.fragmenter.stale_in_a_row
    )  # fmt: skip


def test_a_ragged_fragment_waits_for_a_new_version_or_its_full_length() -> None:
    trace = ragged(4, 0)
    trace.run([""] * 5)
    assert [4] == [each.step_count for each in trace.fragments]


def test_the_speed_is_steps_by_version_and_fragments_dropped_in_a_row_are_counted() -> None:
    trace = Trace(8, 2)
    assert 0.0 == trace.fragmenter.steps_per_version
    for _ in range(12):
        trace.run([""])
        trace.version += 1
    assert (1.0, 3) == (trace.fragmenter.steps_per_version, trace.fragmenter.stale_in_a_row)
    trace.run([""] * 9)
    assert (0, 4) == (trace.fragmenter.stale_in_a_row, trace.fragmenter.stale_count)
