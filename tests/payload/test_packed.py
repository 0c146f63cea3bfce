"""Packed and padded batches, against arrays joined by hand."""

import random
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import breadbox
from breadbox.model.errors import InvalidRequestError, TreeMismatchError, UnsupportedArrayError
from breadbox.payload.fragments import write_fragments
from breadbox.reading.packed import PackedBatch, PaddedBatch, load_sequences
from breadbox.stores import PayloadStore
from breadbox.types import FragmentReference
from support.announced import metadata_of
from support.payload_trees import same


def sequence(length: int, seed: int = 0, group: str = "g", **fields: Any) -> breadbox.Sequence:
    rng = np.random.default_rng(seed)
    tokens = {
        "ids": rng.integers(0, 1000, length),
        "log_prob": rng.normal(size=length).astype(np.float32),
        "top": rng.normal(size=(length, 3, 2)).astype(np.float32),
        "mask": rng.integers(0, 2, length).astype(bool),
        "half": torch.from_numpy(rng.normal(size=(length, 2))).bfloat16(),
    }
    context = {"prompt": rng.integers(0, 9, 1 + seed % 3), "image": np.full((2, 2), seed, np.uint8)}
    defaults: dict[str, Any] = {
        "member": seed,
        "tokens": tokens,
        "context": context,
        "numbers": {"reward": seed / 2, "good": seed % 2 == 0, "count": seed, "task": f"t{seed}"},
        "model_version_min": 0,
        "model_version_max": 0,
    }
    return breadbox.Sequence(group=group, **defaults | fields)


def stored(
    store: PayloadStore, sequences: Sequence[breadbox.Sequence], codecs: Any = "raw"
) -> list[FragmentReference]:
    payloads = write_fragments(store, sequences, codecs=codecs)
    pairs = zip(sequences, payloads, strict=True)
    return [FragmentReference(metadata_of(*pair), 0, 0, 1) for pair in pairs]


def numpy_of(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return (leaf.float() if leaf.dtype is torch.bfloat16 else leaf).numpy()


def joined(sequences: Sequence[breadbox.Sequence], name: str) -> Any:
    return np.concatenate([numpy_of(each.tokens[name]) for each in sequences])


LENGTHS = [3, 1, 7, 2, 7]


@pytest.mark.parametrize("columns", ["ids", [3], 3])
def test_columns_that_are_no_list_of_texts_are_refused(store: PayloadStore, columns: Any) -> None:
    references = stored(store, [sequence(3)])
    for kind in (PackedBatch, PaddedBatch):
        with pytest.raises(InvalidRequestError, match="columns must be a list such as "):
            load_sequences(kind, store, references, positions=[0], columns=columns)


@pytest.mark.parametrize("codecs", ["raw", "zstd"])
def test_packed_columns_are_the_sequences_one_behind_the_other(
    store: PayloadStore, codecs: str
) -> None:
    sequences = [sequence(length, seed, "ab"[seed % 2]) for seed, length in enumerate(LENGTHS)]
    references = stored(store, sequences, codecs)
    for _ in range(2):  # Of lengths that are new, and of lengths that were met.
        batch = load_sequences(PackedBatch, store, references, positions=[4, 3, 2, 1, 0])
        assert tuple(references) == batch.references
        assert [4, 3, 2, 1, 0] == batch.position.tolist()
        assert len(sequences) == len(batch)
        assert np.dtype(np.int32) == batch.cu_seqlens.dtype == batch.group.dtype
        assert np.dtype(np.int64) == batch.position_ids.dtype
        assert [0, 3, 4, 11, 13, 20] == batch.cu_seqlens.tolist()
        assert (7, int) == (batch.max_seqlen, type(batch.max_seqlen))
        assert LENGTHS == batch.lengths.tolist()
        assert [at for length in LENGTHS for at in range(length)] == batch.position_ids.tolist()
        assert ("a", "b") == batch.groups
        assert [0, 1, 0, 1, 0] == batch.group.tolist()
        assert {"ids", "log_prob", "top", "mask", "half"} == batch.tokens.keys()
        assert torch.bfloat16 == batch.tokens["half"].dtype
        for name in batch.tokens:
            assert same(joined(sequences, name), numpy_of(batch.tokens[name]))
            assert batch.tokens[name].dtype == sequences[0].tokens[name].dtype
        for name in ("prompt", "image"):
            pairs = zip(sequences, batch.context[name], strict=True)
            assert all(same(each.context[name], got) for each, got in pairs)


def test_padded_rows_are_the_sequences_with_zeros_behind(store: PayloadStore) -> None:
    sequences = [sequence(length, seed) for seed, length in enumerate(LENGTHS)]
    batch = load_sequences(
        PaddedBatch, store, stored(store, sequences), positions=range(len(sequences))
    )
    assert LENGTHS == batch.lengths.tolist()
    assert [[at < length for at in range(7)] for length in LENGTHS] == batch.mask.tolist()
    for name, column in batch.tokens.items():
        wanted = np.zeros((5, 7, *sequences[0].tokens[name].shape[1:]), numpy_of(column).dtype)
        for row, each in enumerate(sequences):
            wanted[row, : LENGTHS[row]] = numpy_of(each.tokens[name])
        assert same(wanted, numpy_of(column)), name


def test_columns_without_elements_are_padded_to_the_longest(store: PayloadStore) -> None:
    sequences = [sequence(length, 0, tokens={"none": np.zeros((length, 0))}) for length in (2, 5)]
    batch = load_sequences(PaddedBatch, store, stored(store, sequences), positions=range(2))
    assert (2, 5, 0) == batch.tokens["none"].shape


def test_numbers_are_arrays_and_texts_are_lists(store: PayloadStore) -> None:
    sequences = [sequence(2, seed) for seed in range(3)]
    sequences[1].numbers = {"reward": 7.0, "extra": 3}
    batch = load_sequences(PackedBatch, store, stored(store, sequences), positions=range(3))
    assert [0.0, 7.0, 1.0] == batch.numbers["reward"].tolist()
    assert same(np.array([0.0, np.nan, 2.0]), batch.numbers["count"])
    assert same(np.array([np.nan, 3.0, np.nan]), batch.numbers["extra"])
    assert ["t0", None, "t2"] == batch.numbers["task"]
    complete = load_sequences(PackedBatch, store, stored(store, sequences[::2]), positions=[0, 1])
    kinds = {name: getattr(each, "dtype", list) for name, each in complete.numbers.items()}
    expected = {"reward": np.float64, "good": np.bool_, "count": np.int64, "task": list}
    assert expected == kinds


def test_only_named_columns_are_loaded(store: PayloadStore) -> None:
    sequences = [sequence(length, seed) for seed, length in enumerate(LENGTHS)]
    references = stored(store, sequences)
    batch = load_sequences(
        PackedBatch, store, references, positions=range(5), columns=["ids", "prompt"]
    )
    assert (["ids"], ["prompt"]) == ([*batch.tokens], [*batch.context])
    assert same(joined(sequences, "ids"), batch.tokens["ids"])
    none = load_sequences(PackedBatch, store, references, positions=range(5), columns=[])
    assert ({}, {}, 20) == (none.tokens, none.context, none.cu_seqlens[-1])
    with pytest.raises(InvalidRequestError, match="'missing' is none of"):
        load_sequences(
            PackedBatch, store, references, positions=range(5), columns=["ids", "missing"]
        )


@pytest.mark.parametrize("kind", [PackedBatch, PaddedBatch])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_to_a_device_every_leaf_is_a_tensor_there(
    store: PayloadStore, kind: Any, device: str
) -> None:
    references = stored(store, [sequence(3, 0), sequence(5, 1)])
    batch = load_sequences(kind, store, references, positions=range(2), device=device)
    moved = load_sequences(kind, store, references, positions=range(2)).to(device)
    for each in (batch, moved):
        for field in fields(each):
            value = getattr(each, field.name)
            leaves = [*value.values()] if isinstance(value, dict) else [value]
            flat = [
                leaf for held in leaves for leaf in (held if isinstance(held, list) else [held])
            ]
            if field.name not in ("references", "groups", "max_seqlen"):
                found = {str(leaf.device) for leaf in flat if not isinstance(leaf, str)}
                assert {device} == found, field.name
        assert ["t0", "t1"] == each.numbers["task"]
    if device == "cpu":
        assert same(joined([sequence(3, 0), sequence(5, 1)], "ids"), _rows(batch, "ids"))


def _rows(batch: Any, name: str) -> Any:
    column = batch.tokens[name]
    return numpy_of(column if isinstance(batch, PackedBatch) else column[batch.mask])


@pytest.mark.parametrize("kind", [PackedBatch, PaddedBatch])
def test_a_batch_of_no_sequence_has_the_columns_of_others(store: PayloadStore, kind: Any) -> None:
    references = stored(store, [sequence(3, 0)])
    batch = load_sequences(kind, store, references, positions=[], device="cpu")
    assert (0, (), ()) == (len(batch), batch.references, batch.groups)
    whole = load_sequences(kind, store, references, positions=[0])
    for name, column in whole.tokens.items():
        assert 0 == len(batch.tokens[name])
        assert numpy_of(column).dtype == numpy_of(batch.tokens[name]).dtype
        assert column.ndim == batch.tokens[name].ndim
    assert {"prompt": [], "image": []} == batch.context
    assert {"task": []} == {k: v for k, v in batch.numbers.items() if isinstance(v, list)}
    assert 0 == len(batch.group) == len(batch.position) == len(batch.lengths)
    if kind is PackedBatch:
        assert ([0], 0, 0) == (
            batch.cu_seqlens.tolist(),
            batch.max_seqlen,
            len(batch.position_ids),
        )
    else:
        assert {(0, 0)} == {batch.mask.shape, *(each.shape[:2] for each in batch.tokens.values())}


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"ids": np.zeros(2, np.int32)}, "tokens.ids"),
        ({"ids": np.zeros((2, 1), np.int64)}, "tokens.ids"),
        ({"other": np.zeros(2, np.int64)}, ""),
    ],
    ids=["dtype", "shape", "name"],
)
def test_sequences_that_differ_in_columns_are_named(
    store: PayloadStore, changed: dict[str, Any], path: str
) -> None:
    first = sequence(2, 0, tokens={"ids": np.zeros(2, np.int64)})
    other = sequence(2, 1, group="odd", tokens=changed)
    references = stored(store, [first, other])
    with pytest.raises(TreeMismatchError, match="'odd'") as caught:
        load_sequences(PackedBatch, store, references, positions=range(2))
    assert path == caught.value.path


def test_text_is_refused_as_tensors(store: PayloadStore) -> None:
    references = stored(store, [sequence(2, tokens={"words": np.array(["a", "b"])})])
    with pytest.raises(UnsupportedArrayError):
        load_sequences(PackedBatch, store, references, positions=[0], device="cpu")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_any_lengths_are_packed_as_joined_by_hand(lengths: list[int], store: PayloadStore) -> None:
    rng = np.random.default_rng(len(lengths))
    tokens = [
        {"ids": rng.integers(0, 99, length), "p": rng.random(length, np.float32)}
        for length in lengths
    ]
    sequences = [sequence(0, n, tokens=each) for n, each in enumerate(tokens)]
    references = stored(store, sequences)
    order = random.Random(sum(lengths)).sample(range(len(lengths)), len(lengths))
    batch = load_sequences(PackedBatch, store, [references[at] for at in order], positions=order)
    for name in ("ids", "p"):
        assert same(joined([sequences[at] for at in order], name), batch.tokens[name])
    assert [lengths[at] for at in order] == np.diff(batch.cu_seqlens).tolist()


def test_attention_over_packed_tokens_is_that_of_each_sequence(store: PayloadStore) -> None:
    """Tokens that `cu_seqlens` separates, and no others, see one another."""
    torch.manual_seed(3)
    lengths = [5, 1, 9, 4]
    sequences = [
        sequence(0, n, tokens={"x": torch.randn(length, 8).numpy()})
        for n, length in enumerate(lengths)
    ]
    batch = load_sequences(
        PackedBatch, store, stored(store, sequences), positions=range(4), device="cpu"
    )
    attention = torch.nn.functional.scaled_dot_product_attention
    places = torch.arange(sum(lengths))
    owner = torch.bucketize(places, batch.cu_seqlens[1:], right=True)
    mask = (owner[:, None] == owner) & (places[:, None] >= places)
    x = batch.tokens["x"][None]
    alone = [
        attention(each, each, each, is_causal=True)
        for each in (torch.from_numpy(one.tokens["x"])[None] for one in sequences)
    ]
    torch.testing.assert_close(attention(x, x, x, attn_mask=mask), torch.cat(alone, 1))
    starts = batch.cu_seqlens[owner]
    assert (places - starts).tolist() == batch.position_ids.tolist()
