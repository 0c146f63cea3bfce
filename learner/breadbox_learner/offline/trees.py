"""Trees of arrays: nested dicts and tuples whose leaves are numpy arrays.

A list is never a container here: in recorded data it is an array that somebody wrote as JSON.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox_learner.offline.errors import OfflineDataError

Tree = Any
"""An array, or a dict or tuple of trees."""


def map_tree(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply `function` leaf by leaf; `others` must have the structure of `tree`."""
    if isinstance(tree, dict):
        return {
            key: map_tree(function, leaf, *(other[key] for other in others))
            for key, leaf in tree.items()
        }
    if isinstance(tree, tuple):
        return tuple(
            map_tree(function, leaf, *(other[index] for other in others))
            for index, leaf in enumerate(tree)
        )
    return function(tree, *others)


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, such as `camera/left` or `hands/0`."""
    if isinstance(tree, dict):
        for key, branch in tree.items():
            yield from leaves(branch, f"{path}/{key}" if path else str(key))
    elif isinstance(tree, tuple):
        for index, branch in enumerate(tree):
            yield from leaves(branch, f"{path}/{index}" if path else str(index))
    else:
        yield path, tree


def slice_tree(tree: Tree, start: int | None, stop: int | None) -> Tree:
    """The same rows of every leaf, as views."""
    if isinstance(tree, np.ndarray):
        return tree[start:stop]
    return map_tree(lambda leaf: leaf[start:stop], tree)


def row(tree: Tree, index: int) -> Tree:
    """One row of every leaf."""
    if isinstance(tree, np.ndarray):
        return tree[index]
    return map_tree(lambda leaf: leaf[index], tree)


def pick_pair(tree: Tree, first: int, second: int) -> Tree:
    """Two rows of every leaf: a view when they are neighbours, else a copy."""
    if second == first + 1:
        return slice_tree(tree, first, second + 1)
    return take(tree, np.array([first, second]))


def take(tree: Tree, rows: NDArray[np.int64]) -> Tree:
    """Chosen rows of every leaf, copied."""
    if isinstance(tree, np.ndarray):
        return tree[rows]
    return map_tree(lambda leaf: leaf[rows], tree)


def concat(trees: Sequence[Tree]) -> Tree:
    """Join trees of one structure along the first axis."""
    first = trees[0]
    if len(trees) == 1:
        return first
    if isinstance(first, np.ndarray):
        return np.concatenate(trees)
    if isinstance(first, dict):
        return {key: concat([tree[key] for tree in trees]) for key in first}
    return tuple(concat([tree[index] for tree in trees]) for index in range(len(first)))


def stack(samples: Sequence[Any]) -> Tree:
    """Samples (arrays, numbers, lists, or dicts and tuples of them) as one tree of arrays.

    Raises:
        OfflineDataError: samples differ in structure or shape, or a leaf is no array.
    """
    return _stack(samples, "")


def _stack(samples: Sequence[Any], path: str) -> Tree:
    first = samples[0]
    if isinstance(first, dict):
        keys = first.keys()
        _demand_alike(samples, lambda each: isinstance(each, dict) and each.keys() == keys, path)
        return {key: _stack([each[key] for each in samples], f"{path}/{key}") for key in keys}
    if isinstance(first, tuple):
        size = len(first)
        _demand_alike(samples, lambda each: isinstance(each, tuple) and len(each) == size, path)
        return tuple(
            _stack([each[index] for each in samples], f"{path}/{index}") for index in range(size)
        )
    return _stack_leaves(samples, path)


def _demand_alike(samples: Sequence[Any], is_alike: Callable[[Any], bool], path: str) -> None:
    for index, sample in enumerate(samples):
        if not is_alike(sample):
            raise OfflineDataError(
                f"leaf {path.lstrip('/') or '(root)'}: structure differs from the first row's",
                row=index,
            )


def _stack_leaves(samples: Sequence[Any], path: str) -> NDArray[Any]:
    if isinstance(samples, np.ndarray):
        samples = samples.tolist()  # of objects: a list of them is walked in a third of the time
    try:
        stacked = _join_arrays(samples) if _are_arrays(samples) else np.array(samples)
    except ValueError as error:
        shape = np.shape(samples[0])
        row = next((i for i, each in enumerate(samples) if _shape_of(each) != shape), None)
        where = path.lstrip("/") or "(root)"
        raise OfflineDataError(f"leaf {where}: {error}", row=row) from error
    if stacked.dtype == object:
        where = path.lstrip("/") or "(root)"
        row = next((i for i, each in enumerate(samples) if not _is_plain(each)), None)
        kind = type(samples[row if row is not None else 0]).__name__
        raise OfflineDataError(f"leaf {where}: {kind} is no array or number", row=row)
    return stacked


def _are_arrays(samples: Sequence[Any]) -> bool:
    """Whether the samples are arrays of one length, which is the usual case and the fast one.

    Joining refuses arrays that differ in another axis, so that their lengths are all there is to
    look at.
    """
    first = samples[0]
    if not isinstance(first, np.ndarray) or not first.ndim:
        return False
    if set(map(type, samples)) != {np.ndarray}:
        return False
    try:
        return len(set(map(len, samples))) == 1
    except TypeError:  # one has no axis
        return False


def _join_arrays(samples: Sequence[Any]) -> NDArray[Any]:
    # np.stack does the same in three times the time for small arrays.
    joined: NDArray[Any] = np.concatenate(samples)
    return joined.reshape(len(samples), *samples[0].shape)


def _shape_of(sample: Any) -> tuple[int, ...] | None:
    try:
        shape: tuple[int, ...] = np.shape(sample)
    except ValueError:
        return None
    return shape


def _is_plain(sample: Any) -> bool:
    try:
        return bool(np.asarray(sample).dtype != object)
    except ValueError:
        return False


def first_leaf(tree: Tree) -> Any:
    """Any leaf: all of one tree share the length of their first axis."""
    while not isinstance(tree, np.ndarray):
        if isinstance(tree, dict):
            tree = next(iter(tree.values()))
        elif isinstance(tree, tuple):
            tree = tree[0]
        else:
            break
    return tree


def rows_equal(left: Tree, right: Tree) -> NDArray[np.bool_]:
    """Row by row, whether two trees of one structure hold the same values (NaN equals NaN)."""
    equal: NDArray[np.bool_] | None = None
    for (_, a), (_, b) in zip(leaves(left), leaves(right), strict=True):
        same = a == b
        if a.dtype.kind in "fc":
            same |= np.isnan(a) & np.isnan(b)
        same = same.reshape(len(a), -1).all(axis=1)
        equal = same if equal is None else equal & same
    assert equal is not None, "a tree has at least one leaf"
    return equal


def same_leaves(left: Tree, right: Tree) -> bool:
    """Whether two trees have the same containers, and leaves of the same shape and dtype."""
    a, b = list(leaves(left)), list(leaves(right))
    return [(path, leaf.shape, leaf.dtype) for path, leaf in a] == [
        (path, leaf.shape, leaf.dtype) for path, leaf in b
    ]


def same_structure(left: Tree, right: Tree) -> bool:
    """Whether two trees have the same containers, and leaves of the same shape per row."""
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and left.keys() == right.keys()
            and all(same_structure(left[key], right[key]) for key in left)
        )
    if isinstance(left, tuple):
        return (
            isinstance(right, tuple)
            and len(left) == len(right)
            and all(same_structure(a, b) for a, b in zip(left, right, strict=True))
        )
    return isinstance(right, np.ndarray) and left.shape[1:] == right.shape[1:]
