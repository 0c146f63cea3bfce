"""Observations and actions between an environment and its rows of the shared arrays."""

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from breadbox.model.errors import TreeMismatchError
from breadbox.model.fragment import Tree
from breadbox.model.trees import child_path
from breadbox_rollout.environments.failures import EnvironmentFailedError, FailureKind
from breadbox_rollout.environments.space_codec import Space

Rows = int | slice | NDArray[np.bool_]
"""One row, all of them, or those that a mask chooses."""


def write_checked(arrays: Tree, rows: Rows, obs: Tree, space: Space) -> None:
    """Copy an observation into its row, or observations with a leading axis into several.

    Strict about keys and shapes, lenient about the width of floats.
    """
    try:
        _write(arrays, rows, obs, space, "observation")
    except TreeMismatchError as error:
        raise EnvironmentFailedError(FailureKind.OBSERVATION_MISMATCH, str(error)) from error


def _write(arrays: Tree, rows: Rows, obs: Tree, space: Space, path: str) -> None:
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, dict) or obs.keys() != arrays.keys():
            got = f"keys {sorted(obs)}" if isinstance(obs, dict) else type(obs).__name__
            raise TreeMismatchError(path, f"keys {sorted(arrays)}", got)
        for key, part in space.items():
            _write(arrays[key], rows, obs[key], part, child_path(path, key))
        return
    if isinstance(space, spaces.Tuple):
        if not isinstance(obs, list | tuple) or len(obs) != len(arrays):
            raise TreeMismatchError(path, f"{len(arrays)} items", type(obs).__name__)
        for position, part in enumerate(space.spaces):
            _write(arrays[position], rows, obs[position], part, child_path(path, position))
        return
    _write_leaf(arrays, rows, np.asarray(obs), path)


def _write_leaf(array: NDArray[Any], rows: Rows, leaf: NDArray[Any], path: str) -> None:
    shape = array.shape[1:] if isinstance(rows, int) else array.shape
    if leaf.shape != shape or not np.can_cast(leaf.dtype, array.dtype, "same_kind"):
        wanted = f"{array.dtype}{list(shape)}"
        raise TreeMismatchError(path, wanted, f"{leaf.dtype}{list(leaf.shape)}")
    if not isinstance(rows, int | slice):
        leaf = leaf[rows]
    if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
        raise EnvironmentFailedError(FailureKind.NOT_FINITE, f"{path} holds NaN or infinity")
    array[rows] = leaf


def row_of(arrays: Tree, row: int) -> Tree:
    """Copy one row out, so that an environment that changes its action changes only its own."""
    if isinstance(arrays, dict):
        return {key: row_of(array, row) for key, array in arrays.items()}
    if isinstance(arrays, tuple):
        return tuple(row_of(array, row) for array in arrays)
    copied = arrays[row]
    return copied.copy() if isinstance(copied, np.ndarray) else copied
