"""MineStudio's types and data functions."""

import json
from typing import Any

import numpy as np
import pytest
import torch

import breadbox
from breadbox import errors
from breadbox.compat.minestudio import (
    FragmentIndex,
    StepRecord,
    auto_stack,
    batchify_next_obs,
    fragment_id_of,
    from_fragment,
    get_last_fragment_indexes,
    limits_of,
    prepare_batch,
    reference_of,
    to_fragment,
)
from support.minestudio import CONFIG, STEP_COUNT, alike, metadata_of, sample_fragment

# Conversions ------------------------------------------------------------------------------------


def test_a_fragment_comes_back_as_it_was() -> None:
    sample = sample_fragment(3)
    assert alike(sample, from_fragment(to_fragment(sample, metadata_of(sample))))


def test_a_native_learner_sees_ended_steps_states_without_batch_axis_and_numbered_episodes() -> (
    None
):
    sample = sample_fragment(3)
    fragment = to_fragment(sample, metadata_of(sample, version=4))
    assert sample.next_done.tolist() == fragment.terminated.tolist()
    assert not fragment.truncated.any()
    assert [(1, 4), (4, 3), (4, 3)] == [leaf.shape for leaf in fragment.in_state]
    assert [0, 0, 2, 2, 2, 2] == [
        fragment.episode_id.tolist().index(number) for number in fragment.episode_id
    ]
    assert (4, 4) == (fragment.model_version_min, fragment.model_version_max)


def test_episodes_have_the_same_number_in_every_fragment() -> None:
    one, other = (
        to_fragment(sample_fragment(fid), metadata_of(sample_fragment(fid))) for fid in (0, 1)
    )
    assert one.episode_id.tolist() == other.episode_id.tolist()
    assert min(one.episode_id) >= 0


def test_a_policy_without_state_has_none() -> None:
    sample = sample_fragment()
    sample.in_state = None
    assert from_fragment(to_fragment(sample, metadata_of(sample))).in_state is None


def test_a_state_without_batch_axis_is_an_error_that_says_so() -> None:
    sample = sample_fragment()
    sample.in_state = [np.zeros((4, 3))]
    with pytest.raises(errors.TreeMismatchError, match="in_state"):
        to_fragment(sample, metadata_of(sample))


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "7", '{"metadata": {}}', "x" * 50, '{"metadata":1}']
)
def test_a_fragment_id_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match="fragment_id"):
        reference_of(text)


def test_a_fragment_id_is_plain_text_that_names_what_to_load() -> None:
    payload = breadbox.types.PayloadReference("0" * 32, 100, 0)
    metadata = breadbox.types.FragmentMetadata(
        worker_id="w",
        fragment_index=1,
        session_id="s",
        model_version_min=1,
        model_version_max=1,
        payload=payload,
        step_count=4,
    )
    reference = breadbox.FragmentReference(metadata, 5, 0, 1)
    fragment_id = fragment_id_of(reference)
    assert "w" == json.loads(fragment_id)["metadata"]["worker_id"]
    assert reference == reference_of(fragment_id)


def test_limits_are_mapped_and_a_reuse_below_one_is_one() -> None:
    limits = limits_of({**CONFIG, "max_reuse": 0})
    assert (64, 2, 1, 2) == (
        limits.capacity_chunks,
        limits.staleness_max,
        limits.uses_max,
        limits.fragments_per_chunk,
    )


def test_steps_are_records() -> None:
    step = StepRecord("w", {}, None, {}, 0.0, True, False, -1, "e", "")
    assert ("w", True, -1) == (step.worker_uuid, step.last_terminated, step.model_version)


# Data functions ---------------------------------------------------------------------------------


def test_the_last_fragment_of_each_run_is_found() -> None:
    indexes = [FragmentIndex(w, i) for w, i in [("a", 1), ("a", 2), ("a", 4), ("b", 2), ("b", 3)]]
    wanted = [FragmentIndex("a", 2), FragmentIndex("a", 4), FragmentIndex("b", 3)]
    assert wanted == get_last_fragment_indexes(indexes)


@pytest.mark.parametrize(
    ("items", "stacked"),
    [
        ([np.zeros(2), np.ones(2)], np.array([[0.0, 0.0], [1.0, 1.0]])),
        (["a", "b"], ["a", "b"]),
        ([{"x": 1, "y": 2}, {"y": 4, "x": 3}], {"x": np.array([1, 3]), "y": np.array([2, 4])}),
        ([[1, 2.0], [3, 4.0]], [np.array([1, 3]), np.array([2.0, 4.0])]),
        ([True, False], np.array([True, False])),
        ([None, None], [None, None]),
        ([(1, 2), (3, 4)], [(1, 2), (3, 4)]),
    ],
)
def test_values_are_stacked_by_the_kind_of_the_first(items: list[Any], stacked: Any) -> None:
    assert alike(stacked, auto_stack(items))


def test_a_key_that_another_lacks_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        auto_stack([{"x": 1}, {}])


class Model:
    """What `prepare_batch` needs of a model."""

    device = torch.device("cpu")

    @staticmethod
    def merge_state(states: list[Any]) -> list[torch.Tensor]:
        return [torch.cat(parts, dim=0) for parts in zip(*states, strict=True)]


def test_a_batch_is_prepared_for_the_model() -> None:
    samples = [sample_fragment(fid) for fid in range(3)]
    for sample in samples:
        del sample.obs["task"]
    batch = prepare_batch(Model(), samples)
    assert (3, STEP_COUNT, 8, 8, 3) == tuple(batch["obs"]["image"].shape)
    assert (3, STEP_COUNT, 1) == tuple(batch["action"]["buttons"].shape)
    assert torch.bool == batch["first"].dtype
    assert [(3, 1, 4), (3, 4, 3), (3, 4, 3)] == [tuple(leaf.shape) for leaf in batch["state"]]


def test_the_next_observation_gets_axes_of_batch_and_time() -> None:
    obs = batchify_next_obs(sample_fragment().next_obs, torch.device("cpu"))
    assert (1, 1, 8, 8, 3) == tuple(obs["image"].shape)
    assert [["shoot"]] == obs["task"]
