"""Share memory between an environment process and the worker, and copy observations into it.

Each process has an anonymous memory file per part (the rows of one pair of spaces). It is freed
when both have closed it: a kill leaves nothing in /dev/shm. The writers:

    environment process   obs, final_obs, reward, flags, first, acts, counts, clock
    worker                action, value, model_version

Both sides alternate, except that the worker reads clock and counts at any time.
"""

import mmap
import os
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from breadbox.model.errors import InvalidRequestError, TreeMismatchError
from breadbox.model.fragment import Tree
from breadbox.model.trees import child_path, in_order, map_tree
from breadbox_rollout.environments.failures import EnvironmentFailedError, FailureKind
from breadbox_rollout.environments.space_codec import Space

_ALIGNMENT_BYTES = 64
_FLAGS = ("terminated", "truncated", "first", "acts")
_COUNTS = ("answer_count", "obs_count", "abort_count")


class Phase(IntEnum):
    """Activity of an environment process; each has its own time limit."""

    IDLE = 0
    BUILDING = 1
    RESETTING = 2
    STEPPING = 3


@dataclass(frozen=True, slots=True)
class GroupArrays:
    """Views of the shared memory of N rows; leaves [N, ...]. See `units` for what a row is."""

    obs: Tree
    final_obs: Tree
    """The final observation of an episode that just ended; otherwise invalid."""
    action: Tree
    value: NDArray[np.float32]
    """float32[N]; the policy's value, for overlays."""
    model_version: NDArray[np.int64]
    """int64[1]; version that chose the action."""
    reward: NDArray[np.float64]
    """float64[N]; reward of the last answer."""
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    first: NDArray[np.bool_]
    """bool[N]; True if `obs` starts an episode."""
    acts: NDArray[np.bool_]
    """bool[N]; True if the row waits for an action. The policy's output for others is ignored."""
    answer_count: NDArray[np.int64]
    """int64[N]; answers so far; raised once reward, flags and final observation are complete."""
    obs_count: NDArray[np.int64]
    """int64[N]; observations so far; raised once `obs` is complete."""
    abort_count: NDArray[np.int64]
    """int64[N]; episodes aborted because the environment failed."""
    phase: NDArray[np.int64]
    """int64[1]; a `Phase`."""
    phase_at: NDArray[np.float64]
    """float64[1]; time of its beginning, on the machine's monotonic clock."""

    def enter(self, phase: Phase) -> None:
        """Set the current phase."""
        # The time first, so that a reader in between never sees the old phase as overdue.
        self.phase_at[0] = time.monotonic()
        self.phase[0] = phase


class _Layout:
    """Allocate consecutive, aligned pieces of a buffer, or only measure them if that is None."""

    def __init__(self, buffer: memoryview | mmap.mmap | None) -> None:
        self._buffer = buffer
        self.size_bytes = 0

    def array(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        dtype = np.dtype(dtype)
        start = self.size_bytes
        needed = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.size_bytes += -(-needed // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._buffer is None:
            return np.empty(0, dtype)
        return np.ndarray(shape, dtype, self._buffer, start)

    def tree(self, space: Space, count: int) -> Tree:
        if isinstance(space, spaces.Dict):
            # In the order in which learners read it, for policies that join what a dict holds.
            return {key: self.tree(part, count) for key, part in in_order(space.spaces)}
        if isinstance(space, spaces.Tuple):
            return tuple(self.tree(part, count) for part in space.spaces)
        assert space.shape is not None
        return self.array((count, *space.shape), space.dtype)

    def group(self, observation_space: Space, action_space: Space, count: int) -> GroupArrays:
        return GroupArrays(
            obs=self.tree(observation_space, count),
            final_obs=self.tree(observation_space, count),
            action=self.tree(action_space, count),
            value=self.array((count,), np.float32),
            model_version=self.array((1,), np.int64),
            reward=self.array((count,), np.float64),
            **{name: self.array((count,), np.bool_) for name in _FLAGS},
            **{name: self.array((count,), np.int64) for name in _COUNTS},
            phase=self.array((1,), np.int64),
            phase_at=self.array((1,), np.float64),
        )


def create_arrays(
    observation_space: Space, action_space: Space, count: int
) -> tuple[GroupArrays, int]:
    """Return zeroed shared arrays of *count* rows, and a descriptor that the caller closes."""
    descriptor = os.memfd_create("breadbox-envs", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _size(observation_space, action_space, count))
    return open_arrays(descriptor, observation_space, action_space, count), descriptor


def open_arrays(
    descriptor: int, observation_space: Space, action_space: Space, count: int
) -> GroupArrays:
    """Map arrays made for the same spaces; the caller may then close the descriptor.

    Raises InvalidRequestError if the size is not that of arrays for these spaces.
    """
    size_bytes, wanted = os.fstat(descriptor).st_size, _size(observation_space, action_space, count)
    if size_bytes != wanted:
        raise InvalidRequestError(
            "space", f"shared memory has {size_bytes} bytes, and these spaces need {wanted}"
        )
    mapped = mmap.mmap(descriptor, size_bytes)
    return _Layout(mapped).group(observation_space, action_space, count)


def _size(observation_space: Space, action_space: Space, count: int) -> int:
    measured = _Layout(None)
    measured.group(observation_space, action_space, count)
    return measured.size_bytes


Rows = int | slice | NDArray[np.bool_]
"""One row, all of them, or those of a mask."""


def write_checked(arrays: Tree, rows: Rows, obs: Tree, path: str = "observation") -> None:
    """Copy observations into rows; EnvironmentFailedError, possibly midway, if they do not fit."""
    if isinstance(arrays, dict):
        if not isinstance(obs, dict) or obs.keys() != arrays.keys():
            got = f"keys {sorted(obs)}" if isinstance(obs, dict) else type(obs).__name__
            raise _mismatch(path, f"keys {sorted(arrays)}", got)
        for key, part in arrays.items():
            write_checked(part, rows, obs[key], child_path(path, key))
        return
    if isinstance(arrays, tuple):
        if not isinstance(obs, list | tuple) or len(obs) != len(arrays):
            raise _mismatch(path, f"{len(arrays)} items", type(obs).__name__)
        for position, part in enumerate(arrays):
            write_checked(part, rows, obs[position], child_path(path, position))
        return
    if isinstance(obs, np.ma.MaskedArray):
        raise _mismatch(path, "an array", "a masked one")
    leaf = np.asarray(obs)
    shape = arrays.shape[1:] if isinstance(rows, int) else arrays.shape
    if leaf.shape != shape or not _fits(leaf, arrays.dtype):
        raise _mismatch(path, f"{arrays.dtype}{list(shape)}", f"{leaf.dtype}{list(leaf.shape)}")
    if not isinstance(rows, int | slice):
        leaf = leaf[rows]
    if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
        raise EnvironmentFailedError(FailureKind.NOT_FINITE, f"{path} holds NaN or infinity")
    arrays[rows] = leaf


def _fits(leaf: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Return True if a dtype can hold the values; integers are looked at, floats may be rounded."""
    if leaf.dtype != dtype and leaf.dtype.kind in "iu" and dtype.kind in "iu":
        return bool((leaf.astype(dtype) == leaf).all())
    return np.can_cast(leaf.dtype, dtype, "same_kind")


def _mismatch(path: str, wanted: str, got: str) -> EnvironmentFailedError:
    detail = str(TreeMismatchError(path, wanted, got))
    return EnvironmentFailedError(FailureKind.OBSERVATION_MISMATCH, detail)


def row_of(arrays: Tree, row: int) -> Tree:
    """Return a copy of one row, so that an environment can change its action."""
    return map_tree(lambda array: array[row].copy(), arrays)
