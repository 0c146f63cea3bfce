"""Goal: agents of one episode can be drawn at the same steps of their environment, each draw of a
step being as likely as any other, whoever acts in it.

Method: agents whose rewards say when they acted; positions that name every moment once.
"""

from collections import Counter

import numpy as np
import pytest

from breadbox_offline.decoding.msgpack_codec import pack_message, unpack_message
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.episode_buffer import EpisodeBuffer
from breadbox_offline.episodes.sampling import MOMENT, StepSampling, sample_moments
from breadbox_offline.episodes.serialized import pack_episode, unpack_episode
from breadbox_offline.errors import (
    EpisodeJoinError,
    EpisodeShapeError,
    SamplingError,
)
from breadbox_offline.report import ValidationReport
from breadbox_offline.rows.assembly import map_rows
from breadbox_offline.rows.options import MappingOptions
from breadbox_offline.rows.sample_batches import map_sample_batches
from breadbox_offline.training.prelearner import ModuleSnapshot, OfflinePreLearner, PreLearnerConfig

ALWAYS = (0, 1, 2, 3, 4, 5)
SOMETIMES = (1, 4, 5)


def acting(episode_id: str, agent_id: str | None, times: tuple[int, ...]) -> Episode:
    """An agent whose reward, action and first observation are the time at which it acted."""
    held = np.array(times)
    return Episode(
        id=episode_id,
        agent_id=agent_id,
        observations=np.append(held, 99).astype(np.float32)[:, None],
        actions=held,
        rewards=held.astype(np.float64),
        terminated=True,
        t_started=times[0],
        step_times=held,
    )


def two_agents(episode_id: str = "e") -> list[Episode]:
    return [acting(episode_id, "always", ALWAYS), acting(episode_id, "sometimes", SOMETIMES)]


def filled(*episodes: Episode, seed: int = 3, capacity: int = 1000) -> EpisodeBuffer:
    buffer = EpisodeBuffer(capacity, seed=seed)
    buffer.add_all(episodes)
    return buffer


def test_every_moment_has_all_agents_that_acted_in_it_and_no_others() -> None:
    buffer = filled(*two_agents())
    assert 6 == buffer.moment_count
    drawn = sample_moments(buffer, 6, positions=np.arange(6))
    expected = [
        {
            agent: time
            for agent, times in (("always", ALWAYS), ("sometimes", SOMETIMES))
            if time in times
        }
        for time in ALWAYS
    ]
    assert expected == [{e.agent_id: int(e.rewards[0]) for e in moment} for moment in drawn]
    for number, moment in enumerate(drawn):
        for item in moment:
            assert (number, 1) == (item.t_started, len(item))
            assert [number] == item.extra_model_outputs[MOMENT].tolist()


def test_moments_are_equally_likely_whoever_acts_in_them() -> None:
    buffer = filled(*two_agents("e"), acting("f", "always", (7, 9)), seed=11)
    drawn = sample_moments(buffer, 8000)
    counts = Counter((moment[0].id, moment[0].t_started) for moment in drawn)
    assert {("e", t) for t in ALWAYS} | {("f", 7), ("f", 9)} == set(counts)
    # 1,000 are expected of each, with a standard deviation of 30.
    assert all(850 < count < 1150 for count in counts.values()), f"seed 11: {counts}"


def test_windows_count_an_agents_own_steps_and_are_cut_at_its_end() -> None:
    buffer = filled(*two_agents())
    sampling = StepSampling(n_step=2, discount=0.5)
    (moment,) = sample_moments(buffer, 1, sampling, positions=np.array([4]))
    by_agent = {item.agent_id: item for item in moment}
    assert [4 + 0.5 * 5] * 2 == [float(item.rewards[0]) for item in moment]
    assert [4, 99] == by_agent["sometimes"].observations[:, 0].tolist()
    (last,) = sample_moments(buffer, 1, sampling, positions=np.array([5]))
    assert [(1, True, 0.0)] * 2 == [
        (
            int(each.extra_model_outputs["n_step"][0]),
            each.terminated,
            *each.extra_model_outputs["discount"],
        )
        for each in last
    ]


def test_parts_that_came_apart_and_in_any_order_are_found() -> None:
    always, sometimes = two_agents()
    buffer = filled(sometimes, always.slice(4, 6), always.slice(0, 2))
    assert [(0, 1), (1, 2), (4, 2), (5, 2)] == [
        (moment[0].t_started, len(moment))
        for moment in sample_moments(buffer, 4, positions=np.arange(4))
    ]
    buffer.add(always.slice(2, 4))
    assert 6 == buffer.moment_count


def test_agents_of_an_episode_leave_together() -> None:
    buffer = filled(*two_agents("old"), capacity=12)
    buffer.add_all(two_agents("new"))
    assert ["new", "new"] == [episode.id for episode in buffer.episodes()]
    assert (9, 6, 2) == (
        buffer.step_count,
        buffer.moment_count,
        buffer.counters.evicted_episode_count,
    )


def test_a_lone_episode_of_several_agents_stays_whole() -> None:
    buffer = filled(*two_agents(), capacity=4)
    assert (2, 9) == (buffer.episode_count, buffer.step_count)


def test_a_restored_buffer_draws_the_same_moments() -> None:
    buffer = filled(*two_agents(), acting("f", "always", (7, 9)))
    twin = EpisodeBuffer(1)
    twin.set_state(unpack_message(pack_message(buffer.get_state())))
    drawn = [
        [[(e.id, e.agent_id, e.t_started) for e in moment] for moment in sample_moments(each, 20)]
        for each in (buffer, twin)
    ]
    assert drawn[0] == drawn[1]


def test_a_single_agent_is_a_moment_of_one() -> None:
    buffer = filled(acting("e", None, ALWAYS))
    assert [1] * 6 == [len(m) for m in sample_moments(buffer, 6, positions=np.arange(6))]


def test_nothing_is_drawn_from_nothing() -> None:
    with pytest.raises(SamplingError, match="empty"):
        sample_moments(EpisodeBuffer(9), 1)
    with pytest.raises(SamplingError, match="2 positions for 1"):
        sample_moments(filled(*two_agents()), 1, positions=np.arange(2))


class TestTimes:
    def test_they_are_cut_joined_and_serialized_with_the_steps(self) -> None:
        whole = acting("e", "a", SOMETIMES)
        assert [4, 5] == whole.slice(1, 3).times().tolist()
        early, late = acting("e", "a", (1, 4)), whole.slice(2, 3)
        early.terminated, early.observations[-1] = False, 5
        late.t_started = early.t
        assert list(SOMETIMES) == early.join(late).times().tolist()
        assert list(SOMETIMES) == unpack_episode(pack_episode(whole)).times().tolist()

    def test_without_them_an_agent_acts_at_every_step(self) -> None:
        episode = acting("e", "a", (4, 5, 6))
        episode.step_times = None
        assert [4, 5, 6] == episode.times().tolist()
        assert None is unpack_episode(pack_episode(episode)).step_times

    @pytest.mark.parametrize("times", [(1, 1, 2), (3, 2, 4), (1, 2)])
    def test_they_ascend_one_for_every_step(self, times: tuple[int, ...]) -> None:
        with pytest.raises(EpisodeShapeError, match="step_times"):
            Episode(
                id="e",
                observations=np.zeros(4),
                actions=np.zeros(3),
                rewards=np.zeros(3),
                step_times=np.array(times),
            )

    def test_parts_whose_times_overlap_do_not_join(self) -> None:
        early, late = acting("e", "a", (1, 4)), acting("e", "a", (3,))
        early.terminated, early.observations[-1], late.t_started = False, 3, early.t
        with pytest.raises(EpisodeJoinError, match="time"):
            early.join(late)


def rows(shuffle_seed: int) -> dict[str, np.ndarray]:
    """Rows of two agents that act at different times, in any order."""
    agents = np.array(["always"] * len(ALWAYS) + ["sometimes"] * len(SOMETIMES))
    t = np.array(ALWAYS + SOMETIMES)
    order = np.random.default_rng(shuffle_seed).permutation(len(t))
    obs = t.astype(np.float32)[:, None]
    columns = {
        "eps_id": np.full(len(t), "e"),
        "agent_id": agents,
        "module_id": np.where(agents == "always", "p", "q"),
        "t": t,
        "obs": obs,
        "new_obs": np.concatenate([obs[1:6], [[99]], obs[7:], [[99]]]),
        "actions": t,
        "rewards": t.astype(np.float64),
        "terminateds": t == 5,
    }
    return {name: held[order] for name, held in columns.items()}


def test_rows_of_agents_that_act_at_different_times_keep_them() -> None:
    episodes = map_rows(rows(5), MappingOptions(multi_agent=True), ValidationReport())
    assert {"always": list(ALWAYS), "sometimes": list(SOMETIMES)} == {
        episode.agent_id: episode.times().tolist() for episode in episodes
    }


@pytest.mark.parametrize("is_plain", [True, False])
def test_sample_batches_of_several_agents_keep_their_times(is_plain: bool) -> None:
    held = rows(5)
    order = np.argsort(held["agent_id"], kind="stable")
    order = order[np.lexsort((held["t"][order], held["agent_id"][order]))]
    columns = {name: [values[order]] for name, values in held.items()}
    if not is_plain:
        columns["terminateds"] = [columns["terminateds"][0].astype(np.int8)]
    episodes = map_sample_batches(columns, MappingOptions(multi_agent=True), ValidationReport())
    assert {"always": list(ALWAYS), "sometimes": list(SOMETIMES)} == {
        episode.agent_id: episode.times().tolist() for episode in episodes
    }


class TestPreLearner:
    def test_batches_of_modules_can_be_matched_by_moment(self) -> None:
        config = PreLearnerConfig(
            train_batch_size=40,
            seed=2,
            mapping=MappingOptions(multi_agent=True),
            draws_agents_together=True,
        )
        prelearner = OfflinePreLearner(config)
        prelearner.take_in(map_rows(rows(1), config.mapping, prelearner.report))
        batch = prelearner.batch_episodes(prelearner.sample())
        p, q = batch.modules["p"], batch.modules["q"]
        assert (40, 40) == (batch.env_step_count, len(p["rewards"]))
        times = dict(zip(p[MOMENT].tolist(), p["actions"].tolist(), strict=True))
        assert [times[moment] for moment in q[MOMENT].tolist()] == q["actions"].tolist()
        assert {t for t in times.values() if t in SOMETIMES} == set(q["actions"].tolist())

    def test_sequences_are_not_drawn_together(self) -> None:
        prelearner = OfflinePreLearner(
            PreLearnerConfig(train_batch_size=4, row_length=2, draws_agents_together=True),
            modules=lambda: ModuleSnapshot(initial_states={"p": np.zeros(2)}),
        )
        prelearner.take_in(two_agents())
        with pytest.raises(SamplingError, match="draws_agents_together"):
            prelearner.sample()
