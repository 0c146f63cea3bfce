"""Batches: fragments stacked row by row, whatever order and form they come in."""

from typing import Any

import numpy as np
import pytest
import torch

from breadbox.model.errors import (
    InvalidRequestError,
    PayloadCorruptError,
    TreeMismatchError,
    UnsupportedArrayError,
)
from breadbox.model.fragment import Fragment
from breadbox.model.trees import flatten
from breadbox.payload import describe_arrays
from breadbox.payload.fragments import FIELDS
from breadbox.reading.batches import Batch, load_batch, take_rows
from breadbox.stores import PayloadStore
from support.fake_store import FakeStore
from support.payload_trees import same
from support.rich_fragments import STEPS, plain_fragment, rich_fragment, stored


@pytest.mark.parametrize("codecs", ["raw", "zstd", {"obs.image": "h264"}], ids=str)
def test_rows_are_the_fragments_in_order(store: PayloadStore, codecs: object) -> None:
    fragments = [rich_fragment(index) for index in range(3)]
    references = stored(store, *fragments, codecs=codecs)
    batch = load_batch(store, references[::-1])
    assert 3 == len(batch)
    assert tuple(references[::-1]) == batch.references
    for row, fragment in enumerate(fragments[::-1]):
        assert same(fragment.obs["image"], batch.obs["image"][row])
        assert same(fragment.obs["more"][1][0], batch.obs["more"][1][0][row])
        assert same(fragment.next_obs["image"], batch.next_obs["image"][row])
        assert same(fragment.in_state[1][0], batch.in_state[1][0][row])
        assert same(fragment.reward, batch.reward[row])
        assert same(fragment.ended, batch.ended[row])
        assert batch.log_prob is not None
        assert same(fragment.log_prob, batch.log_prob[row])
        assert same(fragment.extras["task"], batch.extras["task"][row])


def test_fields_that_no_fragment_has_are_none(store: PayloadStore) -> None:
    batch = load_batch(store, stored(store, plain_fragment(0), plain_fragment(1)))
    assert batch.in_state is None
    assert batch.log_prob is None
    assert batch.final_obs is None
    assert batch.final_obs_row is None
    assert {} == batch.extras


def test_model_versions_are_filled_in_from_metadata(store: PayloadStore) -> None:
    versions = np.arange(STEPS)
    fragments = [
        plain_fragment(0, model_version_min=4, model_version_max=4),
        plain_fragment(1, model_version=versions),
    ]
    batch = load_batch(store, stored(store, *fragments))
    assert [[4] * STEPS, versions.tolist()] == batch.model_version.tolist()


def test_final_observations_are_joined_with_their_rows_and_steps(store: PayloadStore) -> None:
    fragments = [
        rich_fragment(0),
        plain_fragment(1),
        rich_fragment(2, final_obs_step=np.array([7], np.int32)),
    ]
    fragments[2].final_obs["image"] = fragments[2].final_obs["image"][:1]
    for fragment in (fragments[0], fragments[2]):
        fragment.log_prob = fragment.value = fragment.model_version = fragment.in_state = None
        fragment.extras = {}
    batch = load_batch(store, stored(store, *fragments))
    assert [0, 0, 2] == batch.final_obs_row.tolist()
    assert [2, 5, 7] == batch.final_obs_step.tolist()
    wanted = np.concatenate([fragments[0].final_obs["image"], fragments[2].final_obs["image"]])
    assert same(wanted, batch.final_obs["image"])


def test_final_observations_that_differ_are_named(store: PayloadStore) -> None:
    other = rich_fragment(1, final_obs={"image": np.zeros((2, 3, 3, 3), np.uint8)})
    with pytest.raises(TreeMismatchError, match=r"final_obs\.image"):
        load_batch(store, stored(store, rich_fragment(0), other))
    other = rich_fragment(1, final_obs={"picture": np.zeros((2, 64, 64, 3), np.uint8)})
    with pytest.raises(TreeMismatchError, match="final_obs"):
        load_batch(store, stored(store, rich_fragment(0), other))


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"obs": {"image": np.zeros((STEPS, 32, 64, 3), np.uint8)}}, "obs"),
    "type": ({"reward": np.zeros(STEPS, np.float64)}, "reward"),
    "absent": ({"log_prob": None}, "log_prob"),
    "kind": ({"action": [np.zeros(STEPS, np.int64)]}, "action"),
    "keys": ({"extras": {"job": np.array(["dig"] * STEPS)}}, "extras"),
    "length": ({"in_state": (np.zeros(4),)}, "in_state"),
    "row shape": ({"action": np.zeros((STEPS, 2), np.int64)}, "action"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_fragment_that_differs_is_named_with_path_wanted_and_got(
    store: PayloadStore, name: str
) -> None:
    changes, path = MISMATCHES[name]
    references = stored(store, rich_fragment(0), rich_fragment(1, **changes))
    with pytest.raises(TreeMismatchError) as caught:
        load_batch(store, references)
    assert path == caught.value.path.partition(".")[0]
    assert caught.value.wanted != caught.value.got
    assert "fragment 1 of the batch (worker 'w', fragment_index 1)" == caught.value.where
    assert "lengths do not stack" not in str(caught.value)


def test_fragments_of_different_lengths_are_named(store: PayloadStore) -> None:
    references = stored(store, plain_fragment(0), plain_fragment(1, steps=STEPS + 1))
    with pytest.raises(TreeMismatchError, match=r"lengths do not stack: .* lease\.fragments\(\)"):
        load_batch(store, references)
    with pytest.raises(TreeMismatchError, match=r"model_version.*lengths do not stack"):
        load_batch(store, references, columns=["model_version"])


def test_memory_is_used_again_where_it_fits(store: PayloadStore) -> None:
    references = stored(store, *[rich_fragment(index) for index in range(4)])
    first = load_batch(store, references[:2])
    again = load_batch(store, references[2:], into=first)
    assert np.shares_memory(first.obs["image"], again.obs["image"])
    assert same(rich_fragment(2).obs["image"], again.obs["image"][0])
    larger = load_batch(store, references, into=again)
    assert not np.shares_memory(again.obs["image"], larger.obs["image"])
    fewer = load_batch(store, references[:2], into=again, columns=["reward"])
    assert np.shares_memory(again.reward, fewer.reward)


def test_columns_load_only_themselves(store: PayloadStore) -> None:
    references = stored(store, rich_fragment(0), rich_fragment(1))
    batch = load_batch(store, references, columns=["reward", "obs.more", "final_obs"])
    assert (2, STEPS) == batch.reward.shape
    assert batch.obs["image"] is None
    assert (2, STEPS, 3) == batch.obs["more"][0].shape
    assert [0, 0, 1, 1] == batch.final_obs_row.tolist()
    assert batch.action is None
    assert batch.model_version is None
    assert batch.in_state is None


def test_no_references_are_refused(store: PayloadStore) -> None:
    with pytest.raises(InvalidRequestError):
        load_batch(store, [])


def test_bfloat16_is_stacked_as_a_tensor(store: PayloadStore) -> None:
    states = [torch.full((3,), float(index), dtype=torch.bfloat16) for index in range(2)]
    references = stored(store, *[plain_fragment(i, in_state=s) for i, s in enumerate(states)])
    batch = load_batch(store, references)
    assert torch.equal(torch.stack(states), batch.in_state)


def test_a_batch_turns_into_tensors_of_the_same_memory(store: PayloadStore) -> None:
    references = stored(store, plain_fragment(0, obs=np.zeros((STEPS, 2)), next_obs=np.zeros(2)))
    batch = load_batch(store, references)
    tensors = batch.to_torch()
    assert isinstance(tensors.obs, torch.Tensor)
    assert batch.obs.ctypes.data == tensors.obs.data_ptr()
    assert torch.bool == tensors.ended.dtype


def test_a_batch_with_text_names_the_type_that_torch_does_not_have(store: PayloadStore) -> None:
    words = np.array(["left", "right"] * (STEPS // 2))
    batch = load_batch(store, stored(store, plain_fragment(0, extras={"word": words})))
    with pytest.raises(UnsupportedArrayError, match="torch has no type for <U"):
        batch.to_torch()


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"], ids=str)
def test_the_cpu_as_a_device_gets_tensors_of_the_stacked_memory(
    store: PayloadStore, device: str | torch.device
) -> None:
    def fragment(index: int) -> Fragment:
        return plain_fragment(
            index,
            obs=np.full((STEPS, 2), index),
            next_obs=np.zeros(2),
            final_obs_step=np.array([3], np.int32),
            final_obs=np.full((1, 2), 7),
        )

    references = stored(store, fragment(0), fragment(1))
    arrays = load_batch(store, references)
    assert isinstance(arrays.obs, np.ndarray)
    tensors = load_batch(store, references, device=device)
    for name in ("obs", "next_obs", "reward", "ended", "model_version", "final_obs"):
        tensor = getattr(tensors, name)
        assert isinstance(tensor, torch.Tensor), name
        assert torch.device("cpu") == tensor.device, name
        assert same(getattr(arrays, name), tensor.numpy()), name
    again = load_batch(store, references[::-1], device=device, into=tensors)
    assert tensors.obs.data_ptr() == again.obs.data_ptr()
    assert [1, 0] == again.obs[:, 0, 0].tolist()


def test_a_batch_of_one_as_tensors_is_not_a_view_of_the_stores_memory(store: PayloadStore) -> None:
    references = stored(store, plain_fragment(0, obs=np.zeros((STEPS, 2)), next_obs=np.zeros(2)))
    load_batch(store, references, device="cpu", is_mapped=True).obs.add_(1)
    assert 0 == load_batch(store, references).obs.sum()


@pytest.mark.parametrize("device", ["gpu", "cuda:99", 0])
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(
    store: PayloadStore, device: Any
) -> None:
    references = stored(store, plain_fragment())
    store.delete_many([each.metadata.payload for each in references])
    with pytest.raises(InvalidRequestError, match=f"device must be .*'cuda'.*; got '{device}'"):
        load_batch(store, references, device=device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_text_is_refused_as_tensors(store: PayloadStore, device: str) -> None:
    fragment = plain_fragment(0, extras={"task": np.array(["dig"] * STEPS)}, obs=np.zeros(STEPS))
    fragment.next_obs = np.array(0.0)
    with pytest.raises(UnsupportedArrayError, match=r"extras\.task.*without a device"):
        load_batch(store, stored(store, fragment), device=device)


def test_another_device_gets_tensors_by_way_of_one_slab(store: PayloadStore) -> None:
    """The meta device stands in for a GPU: it takes the same path, less the copy."""
    fragment = plain_fragment(0, obs=np.zeros((STEPS, 2)), next_obs=np.zeros(2), in_state=())
    references = stored(
        store,
        fragment,
        plain_fragment(
            1, **{name: getattr(fragment, name) for name in ("obs", "next_obs", "in_state")}
        ),
    )
    batch = load_batch(store, references, device="meta")
    assert torch.device("meta") == batch.obs.device
    assert (2, STEPS, 2) == tuple(batch.obs.shape)
    assert torch.float32 == batch.reward.dtype
    assert () == batch.in_state
    assert batch.stacked is not None
    rewards = batch.stacked.arrays[2]
    assert rewards is not None
    assert same(fragment.reward, rewards[0])


def test_a_damaged_fragment_spoils_its_batch_only() -> None:
    store = FakeStore()
    references = stored(store, rich_fragment(0), rich_fragment(1))
    payload_id = references[1].metadata.payload.payload_id
    damaged = bytearray(store.payloads.unannounced[payload_id])
    damaged[-100_000] ^= 1
    store.payloads.unannounced[payload_id] = bytes(damaged)
    with pytest.raises(PayloadCorruptError):
        load_batch(store, references)
    assert 1 == len(load_batch(store, references[:1]))


@pytest.mark.parametrize("codecs", ["raw", "lz4"])
def test_a_batch_of_one_can_be_a_view_of_the_stores_memory(
    store: PayloadStore, codecs: str
) -> None:
    for fragment in (rich_fragment(0), plain_fragment(1)):
        references = stored(store, fragment, codecs=codecs)
        copied = load_batch(store, references)
        mapped = load_batch(store, references, is_mapped=True)
        for name in ("obs", "next_obs", "in_state", "reward", "model_version", "extras"):
            assert same(getattr(copied, name), getattr(mapped, name)), name
        for name in ("final_obs", "final_obs_row", "final_obs_step", "log_prob"):
            assert same(getattr(copied, name), getattr(mapped, name)), name
        if codecs == "raw":
            assert mapped.obs["image"].base is not None


def test_a_mapped_batch_of_several_is_stacked(store: PayloadStore) -> None:
    references = stored(store, rich_fragment(0), rich_fragment(1))
    batch = load_batch(store, references, is_mapped=True)
    assert same(rich_fragment(1).obs["image"], batch.obs["image"][1])


@pytest.mark.parametrize("dtype", ["i8", "f4", "?", "c16", "<U3", "<M8[s]"])
def test_leaves_without_axes_are_stacked_too(store: PayloadStore, dtype: str) -> None:
    """Such as the next observation of an environment that observes a single number."""
    values = [np.array(number, "i8").astype(dtype) for number in (1, 0, 2)]
    fragments = [plain_fragment(i, next_obs=value) for i, value in enumerate(values)]
    batch = load_batch(store, stored(store, *fragments))
    assert same(np.stack(values), batch.next_obs)


def test_what_is_not_read_may_differ(store: PayloadStore) -> None:
    with_more = plain_fragment(0, log_prob=np.zeros(STEPS, np.float32))
    with_more.extras = {"note": np.arange(STEPS), "shared": np.arange(STEPS)}
    with_less = plain_fragment(1)
    with_less.extras = {"shared": np.arange(STEPS) + 1}
    references = stored(store, with_more, with_less)
    with pytest.raises(TreeMismatchError):
        load_batch(store, references)
    batch = load_batch(store, references, columns=["reward", "extras.shared"])
    assert [0, 1] == batch.extras["shared"][:, 0].tolist()
    assert batch.log_prob is None
    with pytest.raises(TreeMismatchError, match="log_prob"):
        load_batch(store, references, columns=["log_prob"])


def test_arrays_are_described_without_being_read(store: PayloadStore) -> None:
    references = stored(store, plain_fragment(0), rich_fragment(1))
    plain, rich = describe_arrays(store, references)
    assert f"<f4[{STEPS}]" == str(plain["reward"])
    assert set(plain) < set(rich)
    assert "obs.image" in rich
    assert [] == describe_arrays(store, [])


@pytest.mark.parametrize("rows", [[2, 0], [1, 1, 0], [3], [3, 2, 3, 0], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_rows_that_are_taken_are_a_batch_of_these_fragments_alone(
    rows: list[int], device: str | None
) -> None:
    """Also where they repeat, and where some have no final observation, or none has."""
    store = FakeStore()
    without: dict[str, Any] = {"final_obs_step": None, "final_obs": None}
    texts: dict[str, Any] = {"extras": {}, "obs": np.zeros((STEPS, 2)), "next_obs": np.zeros(2)}
    fragments = [
        rich_fragment(index, **texts, **(without if index == 3 else {})) for index in range(4)
    ]
    references = stored(store, *fragments)
    taken = take_rows(load_batch(store, references, device=device), rows)
    wanted = load_batch(store, [references[row] for row in rows], device=device)
    assert wanted.references == taken.references
    assert taken.stacked is None
    names = [name for name in FIELDS if name in Batch.__dataclass_fields__]
    for name in (*names, "model_version", "final_obs_row", "final_obs_step", "final_obs"):
        left, right = getattr(wanted, name), getattr(taken, name)
        assert (left is None) == (right is None), name
        for (path, one), (_, other) in zip(flatten(left)[1], flatten(right)[1], strict=True):
            assert type(one) is type(other), path
            assert same(np.asarray(one), np.asarray(other)), path
