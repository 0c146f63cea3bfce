"""Arrays that take memory as they are written to, and records in rings of them."""

import contextlib
import math
import mmap
import platform
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from breadbox.mirror.storage.columns import Leaf, row_type_of
from breadbox.model.errors import TreeMismatchError
from breadbox.model.fragment import Tree
from breadbox.model.trees import Structure, flatten, leaves_as, map_structure
from breadbox.payload.dtypes import as_leaf, stored_array

_HUGE_PAGES_MIN_BYTES = 1 << 22
SIZE_MIN: Final = 64
NOWHERE: Final = -1
"""Place of an array that no other process can find."""
_IS_THERE = "is there"
"""Name of the array that is True if a fragment has a state."""


def _no_reserve() -> int:
    """Return Linux's flag for address space beyond memory (Python has it from 3.13 on), or 0."""
    is_generic = platform.machine() in ("x86_64", "aarch64", "arm64", "riscv64", "s390x")
    known = 0x4000 if sys.platform == "linux" and is_generic else 0
    return getattr(mmap, "MAP_NORESERVE", known)


_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _no_reserve()


class Memory:
    """The arrays of a mirror in one process, shared by its threads under a lock."""

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[NDArray[Any], int]:
        """Return zeros that take memory once written, and their place, or raise MemoryError."""
        size = size_bytes_of(shape, dtype)
        try:
            memory = mmap.mmap(-1, size, flags=_PRIVATE)
        except OSError as error:
            raise MemoryError(f"{size / 1e9:.1f} GB for steps: {error.strerror}") from error
        return array_in(memory, shape, dtype), NOWHERE

    def letting_go(self) -> AbstractContextManager[None]:
        """Return a context in which steps are removed; entering waits for readers with a lock."""
        return nullcontext()

    def forget(self) -> None:
        """Give back all arrays that were made: nothing uses them any more."""


def size_bytes_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return the bytes to map for an array."""
    return max(1, math.prod(shape) * dtype.itemsize)


def array_in(memory: mmap.mmap, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return mapped memory as an array, which keeps it mapped."""
    if len(memory) >= _HUGE_PAGES_MIN_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # Fewer misses where rows are read at random.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=dtype, count=math.prod(shape)).reshape(shape)


class Ring:
    """Records in the order of their numbers: appended at one end, dropped at the other.

    Record n is in row n modulo the size. It grows into other memory, so that readers of the old are
    not disturbed; numbers are never used again. Not thread-safe.
    """

    dtype: np.dtype[Any]

    def __init__(self, width: int, first: int = 0) -> None:
        self.first = first
        self.end = first
        self.place = NOWHERE
        self._width = width
        self.lie_in(np.empty(self.shape(0), self.dtype))

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def size(self) -> int:
        """Number of records that there is room for."""
        return self._mask + 1

    @property
    def is_at_size(self) -> bool:
        """True if the next record makes the ring grow."""
        return len(self) > self._mask

    def shape(self, size: int) -> tuple[int, int]:
        """Return the shape of the array for so many records."""
        return size, self._width

    def lie_in(self, array: NDArray[Any], place: int = NOWHERE) -> None:
        """Use another array, with the records in it."""
        self._rows, self._mask, self.place = array, len(array) - 1, place

    def grow(self, memory: Memory) -> None:
        """Make room for twice as many records."""
        numbers = np.arange(self.first, self.end)
        kept = self._rows[numbers & self._mask] if len(numbers) else None
        self.lie_in(*memory.array(self.shape(max(SIZE_MIN, 2 * self.size)), self.dtype))
        if kept is not None:
            self._rows[numbers & self._mask] = kept

    def _new_row(self, memory: Memory) -> NDArray[Any]:
        if self.is_at_size:
            self.grow(memory)
        self.end += 1
        row: NDArray[Any] = self._rows[(self.end - 1) & self._mask]
        return row

    def drop_before(self, number: int) -> None:
        """Drop the records of lower numbers."""
        self.first = min(max(self.first, number), self.end)


class Table(Ring):
    """Records of whole numbers, by the names of their columns, each of which is contiguous."""

    dtype = np.dtype(np.int64)

    def __init__(self, *names: str) -> None:
        self._names = names
        super().__init__(len(names))

    def shape(self, size: int) -> tuple[int, int]:
        """Return the shape of the array: a row for each column."""
        return self._width, size

    def lie_in(self, array: NDArray[Any], place: int = NOWHERE) -> None:
        """Use another array, with the records in it."""
        super().lie_in(array.T, place)
        self._columns = dict(zip(self._names, array, strict=True))

    def append(self, memory: Memory, **values: int) -> int:
        """Add a record, and return its number."""
        self._new_row(memory)[:] = [values[name] for name in self._names]
        return self.end - 1

    def get(self, name: str, numbers: Any) -> Any:
        """Return a column's values of records that are kept."""
        return self._columns[name][numbers & self._mask]

    def set(self, name: str, number: int, value: int) -> None:
        """Change one value."""
        self._columns[name][number & self._mask] = value

    def kept(self, name: str) -> NDArray[np.int64]:
        """Return a copy of a column's values of all records that are kept, in order."""
        if not len(self):
            return np.empty(0, np.int64)
        values: NDArray[np.int64] = self.get(name, np.arange(self.first, self.end))
        return values

    def last_at_most(self, name: str, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the last record at or below each value of an ascending column, or first - 1."""
        if not len(self):
            return np.full(len(values), self.first - 1)
        column, start, end = self._columns[name], self.first & self._mask, self.end & self._mask
        if start < end:
            found = np.searchsorted(column[start:end], values, side="right")
        else:
            older, newer = column[start:], column[:end]
            found = np.searchsorted(older, values, side="right")
            if len(newer):
                in_newer = len(older) + np.searchsorted(newer, values, side="right")
                found = np.where(found == len(older), in_newer, found)
        return found + (self.first - 1)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Structure of recurrent states, and the type of the rows with their arrays."""

    structure: Structure
    leaves: list[Leaf]
    row_type: np.dtype[Any]

    @classmethod
    def of(cls, state: Tree) -> "StateLayout":
        """Lay out states like this one, or raise UnsupportedArrayError."""
        structure, pairs = flatten({"in_state": state})
        leaves = []
        for path, leaf in pairs:
            array, type_name = stored_array(path, leaf)
            leaves.append(Leaf(path, array.dtype, array.shape, type_name))
        arrays = {leaf.path: (leaf.dtype, leaf.shape) for leaf in leaves}
        row_type = row_type_of({_IS_THERE: (np.dtype(np.bool_), ()), **arrays})
        return cls(structure["in_state"], leaves, row_type)


class States(Ring):
    """Recurrent states at the beginning of fragments, by their number, *first* or above."""

    dtype = np.dtype(np.uint8)

    def __init__(self, layout: StateLayout, first: int) -> None:
        super().__init__(layout.row_type.itemsize, first)
        self._structure, self._leaves = layout.structure, layout.leaves
        self._row_type = layout.row_type

    def append(self, memory: Memory, arrays: list[NDArray[Any]] | None) -> None:
        """Add the state of the next fragment, as `checked` returns it, or None if it has none."""
        record = self._new_row(memory).view(self._row_type)
        record[_IS_THERE] = arrays is not None
        for leaf, array in zip(self._leaves, arrays or (), strict=False):
            record[leaf.path] = array

    def checked(self, state: Tree, where: str) -> list[NDArray[Any]]:
        """Return the arrays of a state; raise TreeMismatchError if it differs from the others."""
        found = leaves_as(self._structure, state, path="in_state", where=where)
        arrays = []
        for leaf, given in zip(self._leaves, found, strict=True):
            array, type_name = stored_array(leaf.path, given)
            if (array.dtype, array.shape, type_name) != leaf[1:]:
                wanted, got = (f"{each.dtype}{[*each.shape]}" for each in (leaf, array))
                raise TreeMismatchError(leaf.path, wanted, got, where)
            arrays.append(array)
        return arrays

    def has(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for each fragment that has one."""
        flags = self._rows.view(self._row_type)[:, 0][_IS_THERE]
        inside = (self.first <= numbers) & (numbers < self.end)
        return np.asarray(flags[numbers & self._mask] & inside)

    def stacked(self, numbers: NDArray[np.int64]) -> Tree:
        """Return copies of states of fragments that have one; leaves [B, ...]."""
        records = self._rows[numbers & self._mask].view(self._row_type)[:, 0]

        def leaf(number: int) -> Any:
            path, *_, type_name = self._leaves[number]
            return as_leaf(records[path].copy(), type_name)

        if type(self._structure) is int:
            return leaf(self._structure)
        return map_structure(leaf, self._structure)
