"""Keep the small arrays of a step in one row, drawn in one gathering, and large ones as frames."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from breadbox.mirror.storage.frames import End, FrameLayout, FramePlan, FrameRing, Piece
from breadbox.model.errors import InvalidRequestError, TreeMismatchError, UnsupportedArrayError
from breadbox.model.fragment import Fragment, Tree
from breadbox.model.trees import Structure, flatten, leaves_as, map_structure, rows
from breadbox.payload.dtypes import BFLOAT16, as_leaf, stored_array

FRAME_MIN_BYTES = 1024
"""Size from which an observation is stored once, as a frame."""
_OWN = {
    "reward": np.dtype(np.float32),
    "terminated": np.dtype(np.bool_),
    "truncated": np.dtype(np.bool_),
    "first": np.dtype(np.bool_),
    "is_usable": np.dtype(np.bool_),
    "episode_id": np.dtype(np.int64),
    "model_version": np.dtype(np.int64),
    "handle": np.dtype(np.int64),
    "fragment": np.dtype(np.int64),
    "episode": np.dtype(np.int64),
    "ordinal": np.dtype(np.int64),
}
"""Columns that every memory has."""
TREES = ("obs", "action", "log_prob", "value", "extras")
"""Trees of a fragment that steps have."""


def step_trees(fragment: Fragment) -> dict[str, Tree]:
    """Return copies of the trees of a fragment's first step, by name."""
    return {name: deepcopy(rows(getattr(fragment, name), 0, 1)) for name in TREES}


class Leaf(NamedTuple):
    """One array of a fragment's trees, as the first fragment had it."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    type_name: str


ArrayFor = Callable[[str, tuple[int, ...], np.dtype[Any]], NDArray[Any]]
"""Function that returns memory for a name, shape and type."""


class Rows(NamedTuple):
    """Rows that were gathered, as records [...]."""

    records: NDArray[Any]
    leaf: Callable[[Any], Any]
    """Function from an array to a leaf of a batch."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Structure of steps, and the places of their arrays in rows, in whatever process."""

    structures: dict[str, Structure]
    leaves: dict[str, list[Leaf]]
    """Leaves of each tree of a fragment, by the tree's name."""
    row_type: np.dtype[Any]
    """Type of a row, with the arrays of a step by name."""
    frames: dict[str, FrameLayout]
    """Layouts of the observations that are not in rows, by path."""

    @classmethod
    def of(cls, trees: Mapping[str, Tree], frame_stack: Mapping[str, int]) -> "Layout":
        """Lay out steps like these trees; raise InvalidRequestError for a bad `frame_stack`."""
        structures: dict[str, Structure] = {}
        every: dict[str, list[Leaf]] = {}
        for name in TREES:
            structures[name], every[name] = _leaves_of(name, trees[name])
        frames: dict[str, FrameLayout] = {}
        small: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            name: (dtype, ()) for name, dtype in _OWN.items()
        }
        stacks = dict(frame_stack)
        for name, leaves in every.items():
            for leaf in leaves:
                axis = stacks.pop(leaf.path, None)
                size_bytes = leaf.dtype.itemsize * int(np.prod(leaf.shape, dtype=np.int64))
                if name == "obs" and (axis is not None or size_bytes >= FRAME_MIN_BYTES):
                    frames[leaf.path] = FrameLayout(leaf.shape, leaf.dtype, _axis_of(leaf, axis))
                    small[_at(leaf.path)] = small[_next_at(leaf.path)] = (_OWN["handle"], ())
                    continue
                small[leaf.path] = (leaf.dtype, leaf.shape)
                if name == "obs":
                    small["next_" + leaf.path] = small[leaf.path]
        if stacks:
            names = [leaf.path for leaf in every["obs"]]
            raise InvalidRequestError(
                "frame_stack", f"names {sorted(stacks)}; observations have {names}"
            )
        return cls(structures, every, row_type_of(small), frames)


class Columns:
    """The memory of *capacity* steps; `array_for` gives that of "rows" or of a frame's path."""

    def __init__(self, layout: Layout, capacity: int, array_for: ArrayFor) -> None:
        self._row_type = layout.row_type
        self._structures, self._leaves = layout.structures, layout.leaves
        self._names = {
            name: [leaf.path for leaf in leaves] for name, leaves in self._leaves.items()
        }
        self._next_names = ["next_" + path for path in self._names["obs"]]
        self.rings = {
            path: FrameRing(each, capacity, lambda *like, path=path: array_for(path, *like))
            for path, each in layout.frames.items()
        }
        self._rows = array_for("rows", (capacity, self._row_type.itemsize), np.dtype(np.uint8))
        self._records = self._rows.view(self._row_type)[:, 0]
        self._scratch = np.zeros((1, self._row_type.itemsize), np.uint8)

    @property
    def size_bytes(self) -> int:
        """Number of bytes of all rows, and of the frames that were written to."""
        return int(self._rows.nbytes) + sum(ring.size_bytes for ring in self.rings.values())

    def leaves_of(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        """Return a fragment's arrays by path, or raise TreeMismatchError if unlike the first's."""
        where = f"fragment {fragment.fragment_index} of worker {fragment.worker_id!r}"
        arrays: dict[str, NDArray[Any]] = {}
        for name in TREES:
            tree = getattr(fragment, name)
            if not self._leaves[name] and not tree:  # None, or nothing in it: most have no extras.
                continue
            found = leaves_as(self._structures[name], tree, path=name, where=where)
            for leaf, got in zip(self._leaves[name], found, strict=True):
                is_plain = type(got) is np.ndarray and leaf.type_name != BFLOAT16
                array, name_of_type = (
                    (got, leaf.type_name) if is_plain else stored_array(leaf.path, got)
                )
                _check_like(leaf, array, array.shape[1:], where, name_of_type)
                arrays[leaf.path] = array
        return arrays

    def observation_of(self, tree: Tree, index: int | None, where: str) -> list[NDArray[Any]]:
        """Return the arrays of one observation: of leaves [...], or of row *index* of [K, ...]."""
        leaves = leaves_as(self._structures["obs"], tree, path="obs", where=where)
        found = []
        for leaf, got in zip(self._leaves["obs"], leaves, strict=True):
            array, _ = stored_array(leaf.path, got)
            array = array if index is None else array[index, ...]
            _check_like(leaf, array, array.shape, where)
            found.append(array)
        return found

    def write(self, positions: Sequence[slice], values: Mapping[str, Any]) -> None:
        """Write values [T, ...] of all columns, or one for all, by way of spare rows."""
        count = sum(each.stop - each.start for each in positions)
        if count != len(self._scratch):
            self._scratch = np.zeros((count, self._row_type.itemsize), np.uint8)
        records = self._scratch.view(self._row_type)[:, 0]
        for name, value in values.items():
            records[name] = value
        done = 0
        for each in positions:
            length = each.stop - each.start
            self._rows[each] = self._scratch[done : done + length]
            done += length

    def outcomes(
        self, fragment: Fragment, arrays: Mapping[str, NDArray[Any]], ends: Mapping[int, End]
    ) -> tuple[dict[str, NDArray[Any]], dict[str, FramePlan]]:
        """Return a fragment's arrays and next observations by column, and frame plans by path."""
        where = f"fragment {fragment.fragment_index} of worker {fragment.worker_id!r}"
        count = fragment.step_count
        tails = {
            step: self.observation_of(fragment.final_obs, end.row, where)
            for step, end in ends.items()
            if end.row is not None
        }
        if count - 1 not in ends:
            tails[count - 1] = self.observation_of(fragment.next_obs, None, where)
        small = {path: array for path, array in arrays.items() if path not in self.rings}
        plans: dict[str, FramePlan] = {}
        bounds = sorted({*ends, count - 1})
        for number, path in enumerate(self._names["obs"]):
            array = arrays[path]
            if path in self.rings:
                pieces = [
                    Piece(before + 1, step + 1, tails[step][number] if step in tails else None)
                    for before, step in zip([-1, *bounds], bounds, strict=False)
                ]
                plans[path] = FramePlan(self.rings[path].layout, array, pieces)
                continue
            moved = np.empty_like(array)
            moved[:-1] = array[1:]
            for step in bounds:
                moved[step] = tails[step][number] if step in tails else array[step]
            small["next_" + path] = moved
        return small, plans

    def write_frames(self, path: str, plan: FramePlan, start: int) -> dict[str, Any]:
        """Write a fragment's frames, and return their positions by column."""
        plan.write(self.rings[path], start)
        return {_at(path): plan.at + start, _next_at(path): plan.next_at + start}

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of all rows, as a view: for looking up single places."""
        column: NDArray[Any] = self._records[name]
        return column

    def gather(
        self, positions: NDArray[np.int64], leaf: Callable[[Any], Any] = lambda array: array
    ) -> Rows:
        """Copy the rows at some positions, of any shape."""
        memory = np.take(self._rows, positions.reshape(-1), axis=0, mode="clip")
        return Rows(memory.view(self._row_type).reshape(positions.shape), leaf)

    def field(self, rows: Rows, name: str) -> Any:
        """Return one array of gathered rows, as a leaf."""
        return rows.leaf(rows.records[name])

    def tree(self, name: str, rows: Rows) -> Tree:
        """Return a tree of gathered rows, or None if fragments have none."""
        return self._built(name, rows, self._names[name], _at)

    def next_obs(self, rows: Rows) -> Tree:
        """Return the next observations of gathered rows."""
        return self._built("obs", rows, self._next_names, _next_at)

    def _built(self, name: str, rows: Rows, names: list[str], place: Callable[[str], str]) -> Tree:
        structure, leaves = self._structures[name], self._leaves[name]

        def leaf_of(number: int) -> Any:
            leaf = leaves[number]
            is_frames = leaf.path in self.rings
            array = rows.records[place(leaf.path) if is_frames else names[number]]
            if is_frames:
                array = self.rings[leaf.path].read(array)
            return rows.leaf(as_leaf(array, leaf.type_name))

        return leaf_of(structure) if type(structure) is int else map_structure(leaf_of, structure)


def _at(path: str) -> str:
    return "at " + path


def _next_at(path: str) -> str:
    return "next at " + path


def _leaves_of(name: str, tree: Tree) -> tuple[Structure, list[Leaf]]:
    structure, pairs = flatten({name: tree})
    leaves = []
    for path, found in pairs:
        array, type_name = stored_array(path, found)
        if array.ndim < 1:
            raise UnsupportedArrayError(path, "has no axis of steps")
        leaves.append(Leaf(path, array.dtype, array.shape[1:], type_name))
    return structure[name], leaves


def _axis_of(leaf: Leaf, axis: int | None) -> int | None:
    if axis is None:
        return None
    if not -len(leaf.shape) <= axis < len(leaf.shape):
        raise InvalidRequestError(
            "frame_stack", f"names axis {axis} of {leaf.path}, which has shape {[*leaf.shape]}"
        )
    return axis % len(leaf.shape)


def row_type_of(small: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> np.dtype[Any]:
    """Return the type of a row with these arrays, aligned, the widest types first."""
    names = sorted(small, key=lambda name: small[name][0].alignment, reverse=True)
    return np.dtype([(name, *small[name]) for name in names], align=True)


def _check_like(
    leaf: Leaf, array: NDArray[Any], shape: tuple[int, ...], where: str, type_name: str = ""
) -> None:
    is_same_type = array.dtype == leaf.dtype and type_name in ("", leaf.type_name)
    if not is_same_type or shape != leaf.shape:
        wanted, got = f"{leaf.dtype}{[*leaf.shape]}", f"{array.dtype}{[*shape]}"
        raise TreeMismatchError(leaf.path, wanted, got, where)
