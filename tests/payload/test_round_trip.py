"""What is encoded is decoded, bit by bit, for every type, shape, way to lie in memory, and tree."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from breadbox.payload import decode_tree, encode_tree
from breadbox.payload.limits import ALIGNMENT_BYTES
from support.fuzzing import fewer
from support.payload_trees import TYPES, same, trees

LOSSLESS = ["raw", "lz4", "zstd", "zstd:9", "h264"]


def round_trip(tree: object, codecs: str = "raw") -> object:
    decoded, _ = decode_tree(b"".join(encode_tree(tree, codecs=codecs)))
    return decoded


@fewer
@given(trees())
def test_trees_come_back_bit_by_bit(tree: object) -> None:
    assert same(tree, round_trip(tree))


@fewer
@given(trees(), st.sampled_from(LOSSLESS))
def test_lossless_codecs_lose_nothing(tree: object, codec: str) -> None:
    assert same(tree, round_trip(tree, codec))


@fewer
@given(trees())
def test_encoding_twice_gives_the_same_bytes(tree: object) -> None:
    assert b"".join(encode_tree(tree)) == b"".join(encode_tree(tree))


@fewer
@given(st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=5))
def test_attributes_come_back(attributes: dict[str, str]) -> None:
    try:
        buffers = encode_tree({}, attributes=attributes)
    except ValueError:  # Lone surrogates are no text.
        assert any("\ud800" <= letter <= "\udfff" for letter in str(attributes))
    else:
        assert attributes == decode_tree(b"".join(buffers))[1]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_is_tried_with_its_corners(dtype: np.dtype) -> None:
    for shape in ((), (0,), (3,), (2, 0, 2), (2, 3)):
        array = np.zeros(shape, dtype)
        assert same(array, round_trip(array))


@pytest.mark.parametrize("tree", [{}, [], (), None, {"": {}}, [None, ()], {"a": [{}, ()]}], ids=str)
def test_trees_without_arrays_come_back(tree: object) -> None:
    assert same(tree, round_trip(tree))


def test_keys_that_look_like_paths_stay_apart() -> None:
    tree = {"a.b": np.zeros(1), "a": {"b": np.ones(1)}, "a\\": {".b": np.full(1, 2.0)}}
    assert same(tree, round_trip(tree))


def test_deep_and_wide_trees_within_limits_come_back() -> None:
    deep: object = np.arange(3)
    for _ in range(32):
        deep = [deep]
    assert same(deep, round_trip(deep))
    wide = {str(number): np.full(1, number) for number in range(5000)}
    assert same(wide, round_trip(wide))


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int64, torch.float16, torch.float32, torch.bool, torch.complex64],
    ids=str,
)
def test_torch_tensors_are_stored_as_arrays(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype).T
    assert same(tensor.numpy(), round_trip(tensor))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("codec", LOSSLESS)
def test_bfloat16_comes_back_as_a_tensor(shape: tuple[int, ...], codec: str) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    decoded = round_trip(tensor, codec)
    assert isinstance(decoded, torch.Tensor)
    assert torch.bfloat16 == decoded.dtype
    assert torch.equal(tensor, decoded)


def test_tensors_that_require_grad_or_are_conjugate_are_stored() -> None:
    tensor = torch.tensor([1 + 2j], requires_grad=True).conj()
    assert same(np.array([1 - 2j], np.complex64), round_trip(tensor))


@pytest.mark.parametrize("scalar", [True, 3, 2.5, 1j, np.float32(7)], ids=repr)
def test_scalars_become_arrays_without_axes(scalar: complex) -> None:
    decoded = round_trip(scalar)
    assert isinstance(decoded, np.ndarray)
    assert () == decoded.shape
    assert scalar == decoded[()]


def test_large_contiguous_arrays_are_not_copied() -> None:
    array = np.arange(100_000)
    strided = np.zeros((1000, 100))[:, ::2]
    buffers = encode_tree({"array": array, "strided": strided})
    shares = [np.shares_memory(np.frombuffer(buffer, np.uint8), array) for buffer in buffers]
    assert 1 == sum(shares)
    assert not any(np.shares_memory(np.frombuffer(buffer, np.uint8), strided) for buffer in buffers)


def test_decoded_raw_arrays_are_views_and_aligned() -> None:
    tree = {"a": np.arange(3, dtype=np.uint8), "b": np.arange(5.0), "c": np.zeros((2, 2), "<c16")}
    payload = np.frombuffer(b"".join(encode_tree(tree)), np.uint8)
    aligned = np.empty(len(payload) + ALIGNMENT_BYTES, np.uint8)
    start = -aligned.ctypes.data % ALIGNMENT_BYTES
    aligned[start : start + len(payload)] = payload
    decoded, _ = decode_tree(aligned[start : start + len(payload)].data)
    for leaf in decoded.values():
        assert np.shares_memory(leaf, aligned)
        assert 0 == leaf.ctypes.data % ALIGNMENT_BYTES


def test_arrays_of_many_blocks_are_verified_in_each() -> None:
    array = np.random.default_rng(0).integers(0, 256, 1_000_003, dtype=np.uint8)
    assert same(array, round_trip(array))
