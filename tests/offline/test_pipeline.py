"""Goal: batches hold what episodes hold, padded and masked right, and episodes stay as they are."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.sampling import StepSampling
from breadbox_offline.episodes.serialized import pack_episode
from breadbox_offline.errors import SamplingError, SchemaError
from breadbox_offline.files.writers import step_columns
from breadbox_offline.report import FindingKind
from breadbox_offline.training.pipeline import Draft, Pipeline, PipelineContext
from breadbox_offline.training.prelearner import (
    InputMode,
    ModuleSnapshot,
    OfflinePreLearner,
    PreLearnerConfig,
)
from breadbox_offline.training.stages import (
    default_pipeline,
    make_advantages,
    make_returns_to_go,
    returns_to_go,
)
from support.rllib_cases import make_toy_episode

STATE = {"h": np.zeros(2, dtype=np.float32)}


def toy(episode_id: str, length: int, *, start: int = 0, end: str = "term") -> Episode:
    return make_toy_episode(
        episode_id, length, start=start, terminated=end == "term", truncated=end == "trunc"
    )


def of_agent(episode: Episode, agent_id: str, module_id: str | None = None) -> Episode:
    episode.agent_id, episode.module_id = agent_id, module_id
    return episode


def run(pipeline: Pipeline, episodes: list[Episode], **context: Any) -> dict[str, Any]:
    return pipeline(episodes, PipelineContext(**context)).batches["default_policy"]


class TestPieces:
    def test_user_stages_may_stand_anywhere(self) -> None:
        def double(draft: Draft, _context: PipelineContext) -> None:
            draft.columns["rewards"] = [2 * each for each in draft.columns["rewards"]]

        pipeline = default_pipeline()
        pipeline.insert_after("columns", "double", double)
        assert [2, 4] == run(pipeline, [toy("a", 2)])["rewards"].tolist()
        pipeline.remove("double")
        pipeline.prepend("first", lambda _draft, _context: None)
        assert "first" == pipeline.names[0]
        assert [1, 2] == run(pipeline, [toy("a", 2)])["rewards"].tolist()

    def test_unknown_and_doubled_names_are_refused(self) -> None:
        pipeline = default_pipeline()
        with pytest.raises(ValueError, match="no stage is named 'x'"):
            pipeline.insert_before("x", "y", lambda _draft, _context: None)
        with pytest.raises(ValueError, match="already"):
            pipeline.append("batch", lambda _draft, _context: None)

    def test_rows_are_padded_with_zeros_and_masked(self) -> None:
        batch = run(
            default_pipeline(),
            [toy("a", 5), toy("b", 2)],
            initial_states={"default_policy": STATE},
            row_length=3,
        )
        assert [3, 2, 2] == batch["seq_lens"].tolist()
        assert [[0, 1, 2], [3, 4, 0], [0, 1, 0]] == batch["actions"].tolist()
        assert batch["loss_mask"].sum(1).tolist() == batch["seq_lens"].tolist()
        assert (3, 2) == tuple(batch["state_in"]["h"].shape)

    def test_burn_in_masks_the_start_of_rows_in_mid_episode_only(self) -> None:
        batch = run(
            default_pipeline(),
            [toy("a", 5)],
            initial_states={"default_policy": STATE},
            row_length=3,
            burn_in=1,
        )
        assert [[True, True, True], [False, True, False]] == batch["loss_mask"].tolist()

    def test_ids_with_underscores_are_not_glued(self) -> None:
        batch = run(
            default_pipeline(),
            [toy("a_1", 1), toy("a_1", 2), toy("a", 1)],
            initial_states={"default_policy": STATE},
            row_length=4,
        )
        assert [1, 2, 1] == batch["seq_lens"].tolist()

    def test_a_row_length_is_needed_for_recurrent_modules(self) -> None:
        with pytest.raises(SamplingError, match="row_length"):
            run(default_pipeline(), [toy("a", 2)], initial_states={"default_policy": STATE})

    def test_tensors_have_the_dtypes_that_modules_expect(self) -> None:
        episode = toy("a", 2)
        episode.observations = {"cam": np.zeros((3, 2), np.uint8), "pos": np.zeros((3, 1))}
        batch = run(default_pipeline(), [episode])
        assert (torch.uint8, torch.float32) == (
            batch["obs"]["cam"].dtype,
            batch["obs"]["pos"].dtype,
        )
        assert (torch.int64, torch.float32, torch.bool) == (
            batch["actions"].dtype,
            batch["rewards"].dtype,
            batch["terminateds"].dtype,
        )

    def test_returns_to_go_are_discounted_sums(self) -> None:
        pipeline = default_pipeline()
        pipeline.insert_after("columns", "returns", make_returns_to_go(0.5))
        assert [2.75, 3.5, 3.0, 1.0] == (
            run(pipeline, [toy("a", 3), toy("b", 1)])["returns_to_go"].tolist()
        )
        rewards = np.random.default_rng(3).normal(size=50)
        expected = [sum(0.9 ** (j - i) * rewards[j] for j in range(i, 50)) for i in range(50)]
        np.testing.assert_allclose(expected, returns_to_go(rewards, 0.9), rtol=1e-5)

    @pytest.mark.parametrize(("end", "last"), [("term", 2.0 - 1), ("trunc", 2.0 + 0.5 * 7 - 1)])
    def test_a_cut_episode_bootstraps_from_what_it_led_to(self, end: str, last: float) -> None:
        def values(episodes: Sequence[Episode]) -> list[np.ndarray]:
            return [np.append(np.ones(len(each)), 7.0) for each in episodes]

        pipeline = default_pipeline()
        pipeline.insert_after("columns", "advantages", make_advantages(0.5, 1.0))
        batch = run(pipeline, [toy("a", 2, end=end)], values=values)
        first = 1.0 + 0.5 * 1 - 1 + 0.5 * last
        assert pytest.approx([first, last]) == batch["advantages"].tolist()
        assert pytest.approx([first + 1, last + 1]) == batch["value_targets"].tolist()


class TestModules:
    def test_agents_go_to_their_modules(self) -> None:
        episodes = [of_agent(toy("e", 2), "x", "p"), of_agent(toy("e", 3), "y")]
        batches = default_pipeline()(episodes, PipelineContext(module_of={"y": "q"})).batches
        assert {"p": 2, "q": 3} == {name: len(batch["rewards"]) for name, batch in batches.items()}

    @pytest.mark.parametrize(
        ("chosen", "kept"),
        [
            (None, {"p", "q"}),
            ([], set()),
            (["q"], {"q"}),
            (lambda module_id, batch: len(batch["rewards"]) == 2, {"p"}),
        ],
    )
    def test_only_the_chosen_ones_are_in_the_batch(self, chosen: Any, kept: set[str]) -> None:
        prelearner = OfflinePreLearner(
            PreLearnerConfig(train_batch_size=4, modules_to_train=chosen)
        )
        episodes = [of_agent(toy("e", 2), "x", "p"), of_agent(toy("e", 3), "y", "q")]
        batch = prelearner.batch_episodes(episodes)
        assert (kept, {"p", "q"} - kept) == (set(batch.modules), set(batch.left_out_modules))
        assert (3, sum({"p": 2, "q": 3}[name] for name in kept)) == (
            batch.env_step_count,
            batch.agent_step_count,
        )


class TestPreLearner:
    def test_serialized_episodes_are_buffered_and_sampled(self) -> None:
        prelearner = OfflinePreLearner(PreLearnerConfig(train_batch_size=6, seed=1))
        batch = prelearner.make_batch({"item": [pack_episode(toy("a", 4)), b"garbage"]})
        assert (6, 6) == (len(batch.modules["default_policy"]["rewards"]), batch.env_step_count)
        assert (4, 1) == (
            prelearner.buffer.step_count,
            prelearner.report.counts[FindingKind.MALFORMED],
        )
        prelearner({"item": [pack_episode(toy("a", 4)), pack_episode(toy("b", 2))]})
        assert (6, 1) == (
            prelearner.buffer.step_count,
            prelearner.report.counts[FindingKind.ALREADY_HELD],
        )

    def test_rows_are_used_once_and_in_order(self) -> None:
        prelearner = OfflinePreLearner(PreLearnerConfig(train_batch_size=6))
        flat = prelearner(step_columns(toy("a", 4)))
        assert [0, 1, 2, 3] == flat["default_policy/actions"].tolist()
        assert 0 == prelearner.buffer.step_count

    def test_rows_may_wait_for_the_rest_of_their_episode(self) -> None:
        prelearner = OfflinePreLearner(PreLearnerConfig(train_batch_size=6, holds_unfinished=True))
        columns = step_columns(toy("a", 4))
        assert {} == prelearner({name: held[:3] for name, held in columns.items()})
        flat = prelearner({name: held[3:] for name, held in columns.items()})
        assert [False, False, False, True] == flat["default_policy/terminateds"].tolist()
        assert 0 == prelearner.finish().env_step_count

    def test_the_mode_may_not_change(self) -> None:
        prelearner = OfflinePreLearner(
            PreLearnerConfig(train_batch_size=6, mode=InputMode.SAMPLE_BATCHES)
        )
        with pytest.raises(SchemaError, match="look like mode columns"):
            prelearner(step_columns(toy("a", 4)))

    def test_padding_is_not_counted(self) -> None:
        prelearner = OfflinePreLearner(
            PreLearnerConfig(train_batch_size=10, row_length=4, seed=3),
            modules=lambda: ModuleSnapshot(version=5, initial_states={"default_policy": STATE}),
        )
        batch = prelearner.make_batch({"item": [pack_episode(toy("a", 7))]})
        module = batch.modules["default_policy"]
        assert (10, 10, 5) == (batch.env_step_count, batch.agent_step_count, batch.model_version)
        assert 10 == int(module["loss_mask"].sum()) == int(module["seq_lens"].sum())

    def test_modules_are_asked_for_again_after_some_calls(self) -> None:
        versions = iter(range(9))
        prelearner = OfflinePreLearner(
            PreLearnerConfig(train_batch_size=2, refresh_every=2),
            modules=lambda: ModuleSnapshot(version=next(versions)),
        )
        columns = step_columns(toy("a", 4))
        assert [0, 0, 1, 1] == [prelearner.make_batch(columns).model_version for _ in range(4)]

    @pytest.mark.parametrize(("uses", "state"), [(False, 0.0), (True, 2.0)])
    def test_states_of_fragments_are_used_only_on_request(self, uses: bool, state: float) -> None:
        episode = toy("a", 4)
        episode.in_states = {3: {"h": np.full(2, 2.0, np.float32)}}
        prelearner = OfflinePreLearner(
            PreLearnerConfig(train_batch_size=4, row_length=3, uses_recorded_states=uses),
            modules=lambda: ModuleSnapshot(initial_states={"default_policy": STATE}),
        )
        prelearner.take_in([episode])
        batch = prelearner.batch_episodes(prelearner.buffer.episodes())
        held = batch.modules["default_policy"]["state_in"]["h"]
        assert [[0.0, 0.0], [state, state]] == held.tolist()

    @pytest.mark.parametrize(("uses", "state"), [(False, 0.0), (True, 2.0)])
    def test_recorded_states_are_used_only_on_request(self, uses: bool, state: float) -> None:
        episode = toy("a", 4)
        states = {"h": np.arange(4, dtype=np.float32)[:, None] * np.ones(2, np.float32)}
        episode.extra_model_outputs["state_out"] = states
        prelearner = OfflinePreLearner(
            PreLearnerConfig(train_batch_size=4, row_length=3, uses_recorded_states=uses),
            modules=lambda: ModuleSnapshot(initial_states={"default_policy": STATE}),
        )
        prelearner.take_in([episode])
        batch = prelearner.batch_episodes(prelearner.buffer.episodes())
        held = batch.modules["default_policy"]["state_in"]["h"]
        assert [[0.0, 0.0], [state, state]] == held.tolist()

    def test_a_part_that_contradicts_is_reported_and_the_rest_goes_on(self) -> None:
        prelearner = OfflinePreLearner(PreLearnerConfig(train_batch_size=4))
        prelearner.take_in([toy("a", 4), toy("a", 2, start=6), toy("b", 2)])
        assert (6, 1) == (
            prelearner.buffer.step_count,
            prelearner.report.counts[FindingKind.CONFLICT],
        )

    def test_steps_of_an_overridden_mapping_are_used(self) -> None:
        class Shifted(OfflinePreLearner):
            def map(self, columns: Any, mode: InputMode) -> list[Episode]:
                episodes = super().map(columns, mode)
                for episode in episodes:
                    episode.rewards = episode.rewards + 1
                return episodes

        flat = Shifted(PreLearnerConfig(train_batch_size=4))(step_columns(toy("a", 2)))
        assert [2, 3] == flat["default_policy/rewards"].tolist()

    def test_n_step_items_count_one_step_each(self) -> None:
        prelearner = OfflinePreLearner(
            PreLearnerConfig(train_batch_size=8, steps=StepSampling(n_step=3), seed=2)
        )
        batch = prelearner.make_batch({"item": [pack_episode(toy("a", 5))]})
        assert 8 == batch.env_step_count
