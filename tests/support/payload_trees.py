"""Trees of arrays of every type that a payload can hold."""

import string

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

INTEGER_TYPES = [f"{order}{kind}{size}" for order in "<>" for kind in "iu" for size in (1, 2, 4, 8)]
FLOAT_TYPES = [f"{order}{kind}" for order in "<>" for kind in ("f2", "f4", "f8", "c8", "c16")]
OTHER_TYPES = ["?", "g", "G", "S1", "S7", "<U1", ">U5", "V3", "<M8[ns]", ">M8[D]", "<m8[us]", "<M8"]
TYPES = [np.dtype(name) for name in INTEGER_TYPES + FLOAT_TYPES + OTHER_TYPES]

keys = st.text(string.ascii_letters + ".\\ äß\n0", max_size=6)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """An array of random bytes: NaNs with payloads, unnormalised padding and all."""
    dtype = draw(st.sampled_from(TYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    count = int(np.prod(shape))
    if dtype.kind == "b":
        array = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8) % 2 == 1
    elif dtype.kind == "U":
        text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
        array = np.array(draw(st.lists(text, min_size=count, max_size=count)), dtype=dtype)
    else:
        size_bytes = count * dtype.itemsize
        array = np.frombuffer(
            draw(st.binary(min_size=size_bytes, max_size=size_bytes)), dtype=dtype
        )
    return draw(st.sampled_from(WAYS))(array.reshape(shape))


def _strided(array: np.ndarray) -> np.ndarray:
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 0] = array
    return wide[..., 0]


def _backwards(array: np.ndarray) -> np.ndarray:
    return array[tuple(slice(None, None, -1) for _ in array.shape)] if array.ndim else array


WAYS = [
    lambda array: array,
    lambda array: np.asfortranarray(array).reshape(array.shape),
    lambda array: array.T,
    _strided,
    _backwards,
]
"""Ways for an array to lie in memory."""


def trees() -> st.SearchStrategy[object]:
    """Nested dicts, lists and tuples of arrays, with absent values."""
    return st.recursive(
        arrays() | st.none(),
        lambda children: (
            st.dictionaries(keys, children, max_size=3)
            | st.lists(children, max_size=3)
            | st.lists(children, max_size=3).map(tuple)
        ),
        max_leaves=6,
    )


def same(left: object, right: object) -> bool:
    """Whether two trees are equal bit by bit, and of the same types and shapes."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left is None and right is None
