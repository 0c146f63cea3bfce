"""Stack and pick rows of recorded trees. A list is an array here, never a container."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model.trees import Tree, child_path, leaves, rows, take
from breadbox_offline.errors import OfflineDataError


def pick_pair(tree: Tree, first: int, second: int) -> Tree:
    """Return two rows of every leaf: a view if they are neighbours, else a copy."""
    if second == first + 1:
        return rows(tree, first, second + 1)
    return take(tree, np.array([first, second]))


def stack(samples: Sequence[Any]) -> Tree:
    """Stack samples (arrays, numbers, lists, or dicts and tuples of them) into a tree of arrays."""
    return _stack(samples, "")


def _stack(samples: Sequence[Any], path: str) -> Tree:
    first = samples[0]
    if isinstance(first, dict):
        keys = first.keys()
        _check_alike(samples, lambda each: isinstance(each, dict) and each.keys() == keys, path)
        return {key: _stack([each[key] for each in samples], child_path(path, key)) for key in keys}
    if isinstance(first, tuple):
        size = len(first)
        _check_alike(samples, lambda each: isinstance(each, tuple) and len(each) == size, path)
        return tuple(
            _stack([each[index] for each in samples], child_path(path, index))
            for index in range(size)
        )
    return _stack_leaves(samples, path)


def _check_alike(samples: Sequence[Any], is_alike: Callable[[Any], bool], path: str) -> None:
    for index, sample in enumerate(samples):
        if not is_alike(sample):
            raise OfflineDataError(
                f"leaf {path or '(root)'}: structure differs from the first row's", row=index
            )


def _stack_leaves(samples: Sequence[Any], path: str) -> NDArray[Any]:
    if isinstance(samples, np.ndarray):
        samples = samples.tolist()  # Iterating over a list of objects is three times as fast.
    try:
        stacked = _join_arrays(samples) if _are_arrays(samples) else np.array(samples)
    except ValueError as error:
        shape = np.shape(samples[0])
        row = next((i for i, each in enumerate(samples) if _shape_of(each) != shape), None)
        where = path or "(root)"
        raise OfflineDataError(f"leaf {where}: {error}", row=row) from error
    if stacked.dtype == object:
        where = path or "(root)"
        row = next((i for i, each in enumerate(samples) if not _is_plain(each)), None)
        kind = type(samples[row if row is not None else 0]).__name__
        raise OfflineDataError(f"leaf {where}: {kind} is no array or number", row=row)
    return stacked


def _are_arrays(samples: Sequence[Any]) -> bool:
    """Return True if all samples are arrays of one length, as usual; joining checks other axes."""
    first = samples[0]
    if not isinstance(first, np.ndarray) or not first.ndim:
        return False
    if set(map(type, samples)) != {np.ndarray}:
        return False
    try:
        return len(set(map(len, samples))) == 1
    except TypeError:  # One has no axis.
        return False


def _join_arrays(samples: Sequence[Any]) -> NDArray[Any]:
    first = samples[0]
    try:
        if {(each.dtype, each.ndim) for each in samples} == {(first.dtype, 1)} and not (
            first.dtype.hasobject or not first.dtype.isnative
        ):
            # Joining the bytes of small vectors takes half of numpy's time.
            return np.frombuffer(bytearray().join(samples), first.dtype).reshape(len(samples), -1)
    except (ValueError, BufferError):
        pass  # Dates, or vectors with strides, have no such bytes.
    joined: NDArray[Any] = np.concatenate(samples)
    return joined.reshape(len(samples), *first.shape)


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


def as_arrays(convert: Callable[[Any], NDArray[Any] | None], recorded: Any) -> Tree:
    """Return a recorded value as a tree of the arrays that `convert` returns for its leaves."""
    if isinstance(recorded, dict):
        return {key: as_arrays(convert, branch) for key, branch in recorded.items()}
    if isinstance(recorded, tuple):
        return tuple(as_arrays(convert, branch) for branch in recorded)
    return convert(recorded)


def row_types(tree: Tree) -> dict[str, tuple[int, ...]]:
    """Return the shape of one row of every array of a tree, by path."""
    return {path: leaf.shape[1:] for path, leaf in leaves(tree)}


def length(tree: Tree) -> int:
    """Return the number of rows of a tree's first array."""
    for _, leaf in leaves(tree):
        return len(leaf)
    raise OfflineDataError("holds no array")
