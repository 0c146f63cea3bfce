"""Recurrent states at the beginning of fragments, in rows as steps are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.mirror.storage.columns import Column, laid_out
from breadbox.mirror.storage.memory_map import NOWHERE, Memory
from breadbox.mirror.storage.tables import SIZE_MIN
from breadbox.model.errors import TreeMismatchError
from breadbox.model.fragment import Tree
from breadbox.model.trees import Structure, flatten, map_structure, paths_of, require_alike
from breadbox.payload.dtypes import as_leaf, stored_array

_IS_THERE = ""
"""Name of the column that says whether a fragment has a state."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What states are like, and how their arrays lie in rows."""

    structure: Structure
    names: list[str]
    """Paths of the leaves, in order."""
    columns: dict[str, Column]
    row_bytes: int

    @classmethod
    def of(cls, state: Tree) -> "StateLayout":
        """Lay out what is like a state.

        Raises:
            UnsupportedArrayError: An array cannot be kept.
        """
        structure, pairs = flatten(state)
        names = [f"in_state {path}" for path in paths_of(structure)]
        small: dict[str, tuple[np.dtype[Any], tuple[int, ...], str]] = {
            _IS_THERE: (np.dtype(np.bool_), (), "|b1")
        }
        for name, (path, leaf) in zip(names, pairs, strict=True):
            array, type_name = stored_array(f"in_state{path and '.' + path}", leaf)
            small[name] = (array.dtype, array.shape, type_name)
        columns, row_bytes = laid_out(small)
        return cls(structure, names, columns, row_bytes)


class States:
    """States by the number of their fragment, in a ring whose size is a power of two.

    Not thread-safe.

    Args:
        layout: Of all of them.
        first: Number of the first fragment that may have one.
    """

    def __init__(self, layout: StateLayout, first: int) -> None:
        self.layout = layout
        self.first = first
        """Fragments of lower numbers have none here."""
        self.end = first
        """Number of the next fragment."""
        self.place = NOWHERE
        """Place of its memory."""
        self._mask = -1
        self._rows = np.empty((0, layout.row_bytes), np.uint8)

    @property
    def size(self) -> int:
        """States that there is room for."""
        return self._mask + 1

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of its memory."""
        return self._mask + 1, self.layout.row_bytes

    def lie_in(self, rows: NDArray[np.uint8], place: int = NOWHERE) -> None:
        """Use other memory, as it is."""
        self._rows, self._mask, self.place = rows, len(rows) - 1, place

    def append(self, memory: Memory, values: Mapping[str, NDArray[Any]] | None) -> None:
        """Add the state of the next fragment, as `checked` returns it, or None if it has none."""
        if self.end - self.first > self._mask:
            self._grow(memory)
        row = self._rows[self.end & self._mask]
        self._column(row, self.layout.columns[_IS_THERE])[...] = values is not None
        for name, array in (values or {}).items():
            self._column(row, self.layout.columns[name])[...] = array
        self.end += 1

    def checked(self, state: Tree, where: str) -> dict[str, NDArray[Any]]:
        """The arrays of a state by name.

        Raises:
            TreeMismatchError: It differs from the others in structure, type or shape.
        """
        structure, pairs = flatten(state)
        require_alike(self.layout.structure, structure, path="in_state", where=where)
        values = {}
        for name, (path, leaf) in zip(self.layout.names, pairs, strict=True):
            column = self.layout.columns[name]
            array, type_name = stored_array(path, leaf)
            if (array.dtype, array.shape, type_name) != (
                column.dtype,
                column.shape,
                column.type_name,
            ):
                wanted, got = (f"{each.dtype}{[*each.shape]}" for each in (column, array))
                raise TreeMismatchError(f"in_state{path and '.' + path}", wanted, got, where)
            values[name] = array
        return values

    def drop_before(self, number: int) -> None:
        """Forget those of lower numbers."""
        self.first = min(max(self.first, number), self.end)

    def has(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of some fragments has one."""
        flags = self._column(self._rows, self.layout.columns[_IS_THERE])
        inside = (self.first <= numbers) & (numbers < self.end)
        return np.asarray(flags[numbers & self._mask] & inside)

    def stacked(self, numbers: NDArray[np.int64]) -> Tree:
        """States of fragments that have one; leaves [B, ...], copied."""
        rows = self._rows[numbers & self._mask]
        layout = self.layout

        def leaf(number: int) -> Any:
            column = layout.columns[layout.names[number]]
            return as_leaf(self._column(rows, column).copy(), column.type_name)

        if type(layout.structure) is int:
            return leaf(layout.structure)
        return map_structure(leaf, layout.structure)

    def _column(self, rows: NDArray[np.uint8], column: Column) -> NDArray[Any]:
        """One array of rows [..., row], as a view."""
        strides = (*rows.strides[:-1], *column.strides)
        shape = (*rows.shape[:-1], *column.shape)
        if not rows.size:
            return np.empty(shape, column.dtype)
        return np.ndarray(shape, column.dtype, rows, column.offset, strides)

    def _grow(self, memory: Memory) -> None:
        size = max(SIZE_MIN, 2 * (self._mask + 1))
        larger, place = memory.array((size, self.layout.row_bytes), np.dtype(np.uint8))
        numbers = np.arange(self.first, self.end)
        if len(numbers):
            larger[numbers & (size - 1)] = self._rows[numbers & self._mask]
        self.lie_in(larger, place)
