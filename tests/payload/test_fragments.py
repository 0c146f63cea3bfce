"""Fragments in a store: written and read whole, by columns, by steps, and mapped."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from breadbox.mirror import ReplayMirror
from breadbox.model.errors import (
    InvalidRequestError,
    PayloadCorruptError,
    PayloadMissingError,
    TreeMismatchError,
    UnsupportedArrayError,
)
from breadbox.payload import (
    decode_tree,
    encode_fragment,
    encode_tree,
    read_fragments,
    read_weights,
    write_fragments,
    write_weights,
)
from breadbox.payload.fragments import write_and_describe
from breadbox.reading.batches import load_batch
from breadbox.stores import PayloadStore, open_store
from support.fake_store import FakeStore
from support.fragments import vector_fragment
from support.payload_trees import same
from support.rich_fragments import (
    STEPS,
    arrays_of,
    plain_fragment,
    reference_to,
    rich_fragment,
    stored,
)


@pytest.fixture(params=["fake", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PayloadStore]:
    store = FakeStore() if request.param == "fake" else open_store(f"file://{tmp_path}/store")
    yield store
    store.close()


@pytest.mark.parametrize("codecs", ["raw", "zstd", {"obs.image": "h264", "*": "lz4"}], ids=str)
@pytest.mark.parametrize("is_mapped", [False, True])
def test_fragments_come_back_as_they_were(
    store: PayloadStore, codecs: Any, is_mapped: bool
) -> None:
    fragments = [rich_fragment(0), plain_fragment(1), rich_fragment(2, model_version=None)]
    references = stored(store, *fragments, codecs=codecs)
    for fragment, read in zip(
        fragments, read_fragments(store, references, is_mapped=is_mapped), strict=True
    ):
        assert same(arrays_of(fragment), arrays_of(read))
        for name in ("worker_id", "fragment_index", "session_id", "discontinuity"):
            assert getattr(fragment, name) == getattr(read, name)


def test_mapped_fragments_are_nobody_elses_and_outlive_their_payload(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    fragment = rich_fragment()
    references = stored(store, fragment)
    mapped, other = (read_fragments(store, references, is_mapped=True)[0] for _ in range(2))
    assert mapped.obs["image"].base is not None
    mapped.obs["image"][:] = 7
    (read,) = read_fragments(store, references)
    store.delete_many([references[0].metadata.payload])
    assert {7} == set(mapped.obs["image"].flat)
    assert same(fragment.obs["image"], other.obs["image"])
    assert same(fragment.obs["image"], read.obs["image"])
    store.close()


def test_a_payload_says_where_it_belongs() -> None:
    store = FakeStore()
    (payload,) = write_fragments(store, [rich_fragment(7)])
    attributes = decode_tree(store.payloads.unannounced[payload.payload_id])[1]
    wanted = {"kind": "fragment", "worker_id": "w", "session_id": "s"}
    assert wanted | {"fragment_index": "7", "model_version": "3"} == attributes


def test_columns_read_what_is_named_and_nothing_else(store: PayloadStore) -> None:
    fragment = rich_fragment()
    references = stored(store, fragment, codecs={"reward": "lz4"})
    (read,) = read_fragments(store, references, columns=["reward", "obs.more[0]", "in_state"])
    assert same(fragment.reward, read.reward)
    assert read.obs["image"] is None
    assert same(fragment.obs["more"][0], read.obs["more"][0])
    assert same(fragment.in_state, read.in_state)
    assert read.action is None
    assert read.next_obs is None
    assert {} == read.extras


def test_columns_that_are_absent_are_none_but_unknown_ones_are_refused(store: PayloadStore) -> None:
    references = stored(store, plain_fragment())
    (read,) = read_fragments(store, references, columns=["log_prob", "reward"])
    assert read.log_prob is None
    for column in ("obs.imag", "rewards", "obs.image.x", ""):
        with pytest.raises(InvalidRequestError):
            read_fragments(store, references, columns=[column])


@pytest.mark.parametrize("columns", ["reward", b"reward", 7, [3]])
def test_columns_that_are_no_list_of_texts_are_refused(store: PayloadStore, columns: Any) -> None:
    references = stored(store, plain_fragment())
    with pytest.raises(InvalidRequestError, match="columns must be a list such as "):
        read_fragments(store, references, columns=columns)
    with pytest.raises(InvalidRequestError, match="columns must be a list such as "):
        load_batch(store, references, columns=columns)
    with pytest.raises(InvalidRequestError, match="columns must be a list such as "):
        ReplayMirror("localhost:1", columns=columns)


@pytest.mark.parametrize("steps", [3, (1,), ("a", "b"), (3, 2), (-1, 2)])
def test_steps_that_are_no_span_are_refused(store: PayloadStore, steps: Any) -> None:
    references = stored(store, plain_fragment())
    with pytest.raises(InvalidRequestError, match=r"steps must be \[a, b\)"):
        read_fragments(store, references, steps=steps)


@pytest.mark.parametrize("codecs", ["raw", "zstd"])
@pytest.mark.parametrize("steps", [(0, 3), (2, 5), (5, 8), (0, 8), (7, 8)])
def test_slices_hold_what_a_shorter_fragment_would(
    store: PayloadStore, codecs: str, steps: tuple[int, int]
) -> None:
    fragment = rich_fragment(steps=STEPS)
    first, last = steps
    (read,) = read_fragments(store, stored(store, fragment, codecs=codecs), steps=steps)
    assert same(fragment.obs["image"][first:last], read.obs["image"])
    assert same(fragment.obs["more"][1][0][first:last], read.obs["more"][1][0])
    assert same(fragment.reward[first:last], read.reward)
    assert same(fragment.extras["task"][first:last], read.extras["task"])
    if last < STEPS:
        assert same(np.asarray(fragment.obs["image"][last]), read.next_obs["image"])
    else:
        assert same(fragment.next_obs, read.next_obs)
    assert (read.in_state is None) == (first > 0)
    ends = [end - first for end in (2, 5) if first <= end < last]
    assert ends == read.final_obs_step.tolist()
    assert len(ends) == len(read.final_obs["image"])


def test_a_slice_moves_little_more_than_itself() -> None:
    """Of 200 steps of 12 KiB, two steps may cost a checksum block on each side, not the array."""
    store = CountingStore()
    references = stored(store, plain_fragment(steps=200))
    read_fragments(store, references, steps=(100, 102), columns=["obs.image", "reward"])
    assert store.moved_bytes < 3 * 256 * 1024


def test_columns_move_little_more_than_themselves() -> None:
    store = CountingStore()
    references = stored(store, rich_fragment())
    read_fragments(store, references, columns=["reward"])
    assert STEPS * 4 == store.moved_bytes


class CountingStore(FakeStore):
    """Counts the bytes that receivers ask for."""

    moved_bytes = 0

    def read_many(self, references: Any, receiver: Any) -> None:
        original = receiver.segments

        def segments(position: int, head: memoryview) -> Any:
            wanted = original(position, head)
            self.moved_bytes += sum(len(each.destination) for each in wanted)
            return wanted

        super().read_many(references, _Spy(receiver, segments))


class _Spy:
    def __init__(self, receiver: Any, segments: Any) -> None:
        self.wants_whole = receiver.wants_whole
        self.foresee = receiver.foresee
        self.head_bytes = receiver.head_bytes
        self.segments = segments
        self.arrived = receiver.arrived


@pytest.mark.parametrize("steps", [(0, 0), (3, 2), (-1, 2), (0, STEPS + 1)])
def test_slices_out_of_range_are_refused(store: PayloadStore, steps: tuple[int, int]) -> None:
    references = stored(store, plain_fragment())
    with pytest.raises(InvalidRequestError):
        read_fragments(store, references, steps=steps)


def test_a_leaf_without_a_row_per_step_is_named_and_nothing_is_written() -> None:
    store = FakeStore()
    short = plain_fragment(1)
    short.obs["more"][0] = short.obs["more"][0][:-1]
    with pytest.raises(TreeMismatchError) as caught:
        write_fragments(store, [plain_fragment(0), short])
    assert "obs.more[0]" == caught.value.path
    assert "worker 'w', fragment 1" == caught.value.where
    assert 0 == store.payloads.held_bytes()
    with pytest.raises(TreeMismatchError):
        write_fragments(store, [plain_fragment(action=np.array(3))])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"final_obs": np.zeros((STEPS, 3)), "final_obs_step": np.array([2], np.int32)},
            r"final_obs: wanted \[1\] rows, one for each of final_obs_step, got shape",
        ),
        (
            {"final_obs": {"a": np.zeros((2, 3))}, "final_obs_step": np.array([2], np.int32)},
            r"final_obs\.a: wanted \[1\] rows",
        ),
        ({"final_obs": np.zeros((1, 3)), "final_obs_step": None}, "final_obs_step: wanted"),
        ({"final_obs_step": np.array([[2]], np.int32)}, "final_obs_step"),
        ({"final_obs_step": np.array([2.0])}, "final_obs_step is of type"),
        ({"reward": np.zeros(STEPS, complex)}, "reward is of type"),
        ({"reward": np.zeros((STEPS, 1))}, "reward is not an array of one axis"),
        ({"terminated": np.zeros(STEPS)}, "terminated is of type"),
        ({"value": {"a": np.zeros(STEPS)}}, "value is not an array"),
        ({"extras": np.zeros(STEPS)}, "extras have no names"),
    ],
)
def test_what_no_reader_takes_is_refused_before_it_is_written(
    fields: dict[str, Any], words: str
) -> None:
    store = FakeStore()
    with pytest.raises((TreeMismatchError, InvalidRequestError), match=words):
        write_fragments(store, [plain_fragment(0, **fields)])
    assert 0 == store.payloads.held_bytes()


def test_large_fragments_are_written_in_order_and_all_or_none() -> None:
    store = FakeStore()
    large = [plain_fragment(index, steps=400) for index in range(4)]
    references = stored(store, *large)
    for fragment, read in zip(large, read_fragments(store, references), strict=True):
        assert same(arrays_of(fragment), arrays_of(read))
    held_bytes = store.payloads.held_bytes()
    large[3].reward = large[3].reward[1:]
    with pytest.raises(TreeMismatchError):
        write_fragments(store, large)
    assert held_bytes == store.payloads.held_bytes()
    assert [] == write_fragments(store, [])


def test_an_object_array_is_named() -> None:
    with pytest.raises(UnsupportedArrayError) as caught:
        write_fragments(FakeStore(), [plain_fragment(action=np.array([None] * STEPS))])
    assert "action" == caught.value.path


def test_a_payload_that_is_no_fragment_is_corrupt(store: PayloadStore) -> None:
    payloads = store.write_many([encode_tree({"obs": np.zeros(3)}), encode_tree([np.zeros(3)])])
    for payload in payloads:
        with pytest.raises(PayloadCorruptError, match="not a fragment's"):
            read_fragments(store, [reference_to(plain_fragment(), payload)])


def test_a_deleted_payload_is_missing(store: PayloadStore) -> None:
    references = stored(store, plain_fragment())
    store.delete_many([references[0].metadata.payload])
    with pytest.raises(PayloadMissingError):
        read_fragments(store, references)


def test_images_as_floats_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    images = {"floats": np.zeros((STEPS, 37, 41, 3), np.float32), "v": np.zeros((STEPS, 40))}
    with caplog.at_level(logging.WARNING, logger="breadbox"):
        for index in range(3):
            write_fragments(FakeStore(), [plain_fragment(index, obs=images, next_obs=None)])
    (record,) = caplog.records
    assert "obs.floats" in record.getMessage()
    assert "4 times" in record.getMessage()


# Weights


def test_weights_come_back_by_name(store: PayloadStore) -> None:
    weights = {
        "layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "layer.bias": torch.ones(3, dtype=torch.float64),
        "count": np.array(7),
        "mask": np.array([True, False]),
    }
    read = read_weights(store, write_weights(store, weights))
    assert weights.keys() == read.keys()
    for name, array in weights.items():
        assert same(np.asarray(array), read[name]), name
        assert read[name].flags.writeable or not read[name].size


def test_bfloat16_weights_come_back_as_tensors(store: PayloadStore) -> None:
    a, b = torch.ones(2, 2, dtype=torch.bfloat16), np.zeros(3, np.int8)
    read = read_weights(store, write_weights(store, {"a": a, "b": b}))
    assert torch.equal(a, read["a"])
    assert same(b, read["b"])


def test_weights_of_a_type_that_safetensors_lacks_are_named(store: PayloadStore) -> None:
    with pytest.raises(UnsupportedArrayError) as caught:
        write_weights(store, {"words": np.array(["a"])})
    assert "words" == caught.value.path


def test_payloads_that_hold_no_weights_are_corrupt(store: PayloadStore) -> None:
    noise = np.zeros(50, np.uint8)
    for tree in ({"safetensors": noise}, {"other": noise}, {"safetensors": np.zeros(50)}):
        (payload,) = store.write_many([encode_tree(tree)])
        with pytest.raises(PayloadCorruptError):
            read_weights(store, payload)


@pytest.mark.parametrize("index", [0, 9, 10, 2**63 - 1])
def test_every_index_is_said_by_raw_and_packed_payloads_alike(index: int) -> None:
    fragment = plain_fragment(index, model_version_min=7, model_version_max=8)
    for codec in ("raw", "zstd"):
        _, attributes = decode_tree(b"".join(encode_fragment(fragment, codecs=codec)))
        assert attributes == {
            "kind": "fragment",
            "worker_id": "w",
            "session_id": fragment.session_id,
            "fragment_index": str(index),
            "model_version": "7",
        }


def test_trees_that_differ_in_little_are_told_apart() -> None:
    """Layouts are remembered by what trees look like: none may be taken for another."""
    one, two = np.zeros(2, np.int32), np.ones(2, np.int32)
    trees = [
        {"a": one, "b": two},
        {"b": one, "a": two},
        {"a": (one, two)},
        {"a": [one, two]},
        {"a": [one, [two]]},
        {"a": [one, None, two]},
        {"a": {"0": one, "1": two}},
        {"a": one, "b": two.astype(np.uint32)},
        {"a": one, "b": two.astype(">i4")},
        {"a": one, "b": two.reshape(1, 2)},
        [one, two],
        (one, two),
        one,
    ]
    for _ in range(2):
        for tree in trees:
            assert same(tree, decode_tree(b"".join(encode_tree(tree)))[0])


def test_text_of_another_width_is_another_schema_because_no_reader_stacks_both() -> None:
    told = []
    for word in ("ab", "abcd"):
        fragment = vector_fragment()
        fragment.extras["who"] = np.array([word] * fragment.step_count)
        (written,) = write_and_describe(FakeStore(), [fragment])
        told.append(written.schema)
    assert ["<U2", "<U4"] == [
        array.dtype
        for schema in told
        for array in (schema.message.arrays if schema else ())
        if array.path == "extras.who"
    ]
    assert told[0] != told[1]
