"""Goal: the episode buffer keeps its limits, and every draw ends with exactly what was asked for.

Method: toy episodes (obs[k] = [k], action k, reward k + 1), so that a sample says where it is from;
a random run of adds against a plain list; seeds are part of every failing case.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breadbox_offline.decoding.msgpack_codec import pack_message, unpack_message
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.episode_buffer import AddOutcome, EpisodeBuffer
from breadbox_offline.episodes.sampling import (
    SequenceSampling,
    ShortWindow,
    StepSampling,
    epoch_positions,
    sample_rows,
    sample_sequences,
    sample_steps,
)
from breadbox_offline.errors import EpisodeJoinError, EpisodeShapeError, SamplingError
from support.rllib_cases import make_toy_episode


def toy(episode_id: str, length: int, *, start: int = 0, end: str = "term") -> Episode:
    return make_toy_episode(
        episode_id, length, start=start, terminated=end == "term", truncated=end == "trunc"
    )


def filled(*lengths: int, seed: int = 7) -> EpisodeBuffer:
    buffer = EpisodeBuffer(1000, seed=seed)
    for number, length in enumerate(lengths):
        buffer.add(toy(f"e{number}", length))
    return buffer


class TestCapacity:
    def test_exactly_full_evicts_nothing(self) -> None:
        buffer = EpisodeBuffer(10)
        buffer.add_all([toy("a", 6), toy("b", 4)])
        assert (10, 0) == (buffer.step_count, buffer.counters.evicted_episode_count)

    def test_a_lone_long_episode_stays(self) -> None:
        buffer = EpisodeBuffer(4)
        assert AddOutcome.ADDED is buffer.add(toy("a", 9))
        assert 9 == buffer.step_count

    def test_the_episode_just_extended_may_be_the_one_to_leave(self) -> None:
        buffer = EpisodeBuffer(5)
        buffer.add_all([toy("a", 2, end=""), toy("b", 2), toy("a", 2, start=2)])
        assert ["b"] == [episode.id for episode in buffer.episodes()]
        assert {"b"} == {episode.id for episode in sample_steps(buffer, 20)}

    @given(st.lists(st.integers(1, 12), max_size=40), st.integers(1, 30), st.integers(0, 2**31))
    @settings(max_examples=80, deadline=None)
    def test_a_plain_list_agrees(self, lengths: list[int], capacity: int, seed: int) -> None:
        buffer = EpisodeBuffer(capacity, seed=seed)
        model: list[tuple[str, int]] = []
        for number, length in enumerate(lengths):
            buffer.add(toy(str(number), length))
            model.append((str(number), length))
            while sum(size for _, size in model) > capacity and len(model) > 1:
                model.pop(0)
            assert model == [(episode.id, len(episode)) for episode in buffer.episodes()]
            assert sum(size for _, size in model) == buffer.step_count
            everything = [(key, step) for key, size in model for step in range(size)]
            held = buffer.held_steps(np.arange(buffer.step_count))
            assert everything == [(held.episode.id, held.step) for held in held]


class TestJoining:
    def test_parts_join_in_any_order(self) -> None:
        whole = toy("a", 9)
        parts = [whole.slice(0, 3), whole.slice(3, 5), whole.slice(5, 9)]
        buffer = EpisodeBuffer(100, seed=1)
        outcomes = buffer.add_all([parts[2], parts[0], parts[1]])
        assert [AddOutcome.ADDED, AddOutcome.HELD_APART, AddOutcome.JOINED] == outcomes
        (joined,) = buffer.episodes()
        assert whole.content_digest() == joined.content_digest()
        assert {0, 1, 2, 3, 4, 5, 6, 7, 8} == {
            held.step for held in buffer.held_steps(np.arange(9))
        }

    @pytest.mark.parametrize(
        "part", [toy("a", 3), toy("a", 3, start=3), toy("a", 2, start=7, end="")]
    )
    def test_a_part_that_contradicts_changes_nothing(self, part: Episode) -> None:
        buffer = EpisodeBuffer(100)
        buffer.add(toy("a", 5))
        with pytest.raises(EpisodeJoinError):
            buffer.add(part)
        assert (5, 1) == (buffer.step_count, len(buffer.episodes()))

    def test_an_empty_episode_is_refused(self) -> None:
        empty = Episode(
            id="a", observations=np.zeros((1, 1)), actions=np.zeros(0), rewards=np.zeros(0)
        )
        with pytest.raises(EpisodeShapeError):
            EpisodeBuffer(10).add(empty)


class TestState:
    def test_a_restored_buffer_draws_the_same(self) -> None:
        buffer = filled(5, 3, 9)
        buffer.add(toy("open", 2, end=""))
        sample_steps(buffer, 3)
        state = unpack_message(pack_message(buffer.get_state()))
        twin = filled(1)
        twin.set_state(state)
        again = [sample_steps(each, 20) for each in (buffer, twin)]
        assert [(e.id, e.t_started) for e in again[0]] == [(e.id, e.t_started) for e in again[1]]
        for each in (buffer, twin):
            each.add(toy("open", 2, start=2))
        assert buffer.counters == twin.counters
        assert buffer.held_digest(toy("e0", 5)) == twin.held_digest(toy("e0", 5))


class TestSteps:
    def test_exactly_as_many_as_asked_for(self) -> None:
        buffer = filled(5, 3, 1)
        for n_step in (1, 3, 50, (1, 9)):
            assert 64 == len(sample_steps(buffer, 64, StepSampling(n_step=n_step)))

    @pytest.mark.parametrize("n", [1, 2, 4, 9])
    def test_a_window_sums_what_is_left_and_keeps_the_end(self, n: int) -> None:
        buffer = filled(5)
        gamma = 0.5
        items = sample_steps(
            buffer, 5, StepSampling(n_step=n, discount=gamma), positions=np.arange(5)
        )
        for t, item in enumerate(items):
            used = min(n, 5 - t)
            expected = sum(gamma**k * (t + 1 + k) for k in range(used))
            is_end = t + used == 5
            extras = item.extra_model_outputs
            assert pytest.approx(expected) == float(item.rewards[0])
            assert [t, t + used] == item.observations[:, 0].tolist()
            assert (t, is_end, used) == (item.actions[0], item.terminated, extras["n_step"][0])
            assert (0.0 if is_end else gamma**used) == extras["discount"][0]

    def test_a_truncated_end_still_bootstraps(self) -> None:
        buffer = EpisodeBuffer(10)
        buffer.add(toy("a", 2, end="trunc"))
        (item,) = sample_steps(buffer, 1, StepSampling(n_step=3), positions=np.array([1]))
        assert (True, 0.99) == (item.truncated, item.extra_model_outputs["discount"][0])

    def test_extras_are_those_of_the_step(self) -> None:
        items = sample_steps(
            filled(5), 5, StepSampling(n_step=3, with_extras=True), positions=np.arange(5)
        )
        assert [0, 1, 2, 3, 4] == [int(item.extra_model_outputs["lp"][0]) for item in items]

    def test_draws_are_uniform_over_steps(self) -> None:
        items = sample_steps(filled(90, 10), 5000)
        long = sum(item.id == "e0" for item in items)
        assert 4400 < long < 4600

    def test_an_epoch_covers_every_step_once(self) -> None:
        buffer = filled(5, 3, 9)
        seen = [
            (item.id, item.t_started)
            for share in epoch_positions(buffer, 4)
            for item in sample_steps(buffer, len(share), positions=share)
        ]
        assert 17 == len(seen) == len(set(seen))

    @pytest.mark.parametrize("n_step", [0, -1, (3, 3), (0, 2)])
    def test_senseless_arguments_are_refused(self, n_step: int | tuple[int, int]) -> None:
        with pytest.raises(SamplingError):
            StepSampling(n_step=n_step)

    def test_an_empty_buffer_is_refused(self) -> None:
        for draw in (
            lambda buffer: sample_steps(buffer, 1),
            lambda buffer: sample_sequences(buffer, 1, SequenceSampling(length=1)),
            lambda buffer: sample_rows(buffer, 1, 1),
        ):
            with pytest.raises(SamplingError, match="empty"):
                draw(EpisodeBuffer(10))


class TestSequences:
    @given(
        st.lists(st.integers(1, 9), min_size=1, max_size=6),
        st.integers(1, 40),
        st.integers(1, 7),
        st.sampled_from(ShortWindow),
        st.integers(0, 2**31),
    )
    @settings(max_examples=100, deadline=None)
    def test_steps_are_exact_and_no_sequence_is_too_long(
        self, lengths: list[int], count: int, length: int, window: ShortWindow, seed: int
    ) -> None:
        buffer = filled(*lengths, seed=seed)
        sampling = SequenceSampling(length=length, short_window=window, lookback=2)
        sequences = sample_sequences(buffer, count, sampling)
        assert count == sum(len(each) for each in sequences)
        for each in sequences:
            size = lengths[int(each.id[1:])]
            assert len(each) <= length
            assert (each.t == size) == each.terminated
            assert min(2, each.t_started) == each.lookback
            assert np.arange(each.t_started, each.t + 1).tolist() == (
                each.own_observations()[:, 0].tolist()
            )
        if window is ShortWindow.SHIFT:
            for each in sequences[:-1]:
                assert min(length, lengths[int(each.id[1:])]) == len(each)

    def test_a_start_margin_leaves_room_and_ends_even_where_room_is_rare(self) -> None:
        buffer = filled(*[1] * 500, 4)
        sampling = SequenceSampling(length=4, start_margin=3)
        assert {"e500"} == {each.id for each in sample_sequences(buffer, 8, sampling)}
        assert buffer.counters.redrawn_count > 0

    def test_a_start_margin_that_nothing_has_is_refused(self) -> None:
        with pytest.raises(SamplingError, match="more than 5 steps"):
            sample_sequences(filled(3, 4), 8, SequenceSampling(length=4, start_margin=5))
