"""What a writer remembers of the latest steps, and the columns that items are made of."""

import operator
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from breadbox_adapters.reverb.structures import Path


class Cell:
    """What one step has in one column, for as long as the column keeps it."""

    __slots__ = ("array", "is_expired")

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.is_expired = False


class TrajectoryColumn:
    """Some cells of one column: a leaf of a trajectory that `create_item` takes."""

    def __init__(self, cells: Sequence[Cell | None], path: Path, *, is_squeezed: bool = False):
        """Made by indexing a history.

        Raises:
            ValueError: A cell is missing: the step had none, or it is older than what is kept.
        """
        missing = [place for place, cell in enumerate(cells) if cell is None]
        if missing:
            raise ValueError(
                f"a trajectory cannot contain None: of the {len(cells)} cells of {shown(path)} "
                f"number {missing[0]} was not given in its step, or is no longer kept"
            )
        self._cells: tuple[Cell, ...] = tuple(cell for cell in cells if cell is not None)
        self._path = path
        self.is_squeezed = is_squeezed
        """Whether it is one cell alone, without an axis of steps."""

    def __len__(self) -> int:
        return len(self._cells)

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells)

    def __getitem__(self, key: "int | slice | list[int]") -> "TrajectoryColumn":
        return _column(list(self._cells), key, self._path)

    @property
    def path(self) -> Path:
        """Where the column is in the data that were appended."""
        return self._path

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what `numpy` gives."""
        of_cell = self._cells[0].array.shape if self._cells else ()
        return of_cell if self.is_squeezed else (len(self._cells), *of_cell)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its cells."""
        return self._cells[0].array.dtype

    def numpy(self) -> NDArray[Any]:
        """The cells in one array, [steps, ...]; a squeezed one has no axis of steps.

        Raises:
            RuntimeError: A cell is no longer kept.
            ValueError: There are no cells, or their shapes or dtypes differ.
        """
        if any(cell.is_expired for cell in self._cells):
            raise RuntimeError(
                f"{shown(self._path)} refers to a step that has expired: "
                "raise num_keep_alive_refs to keep more"
            )
        if not self._cells:
            raise ValueError(f"{shown(self._path)} has no steps")
        if self.is_squeezed:
            return self._cells[0].array
        kinds = {(cell.array.dtype.str, cell.array.shape) for cell in self._cells}
        if len(kinds) > 1:
            named = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in sorted(kinds))
            raise ValueError(f"cells of {shown(self._path)} differ in dtype or shape: {named}")
        return np.stack([cell.array for cell in self._cells])


class ColumnHistory:
    """One column of a writer's history, indexed as a list of all steps of the episode.

    `history[-1]` is the latest cell alone, `history[-3:]` and `history[[0, 2]]` are columns. Steps
    that had no such field, and steps older than what is kept, are None and cannot be taken.
    """

    def __init__(self, path: Path, keep_count: int, padding: int = 0) -> None:
        """Start empty.

        Args:
            path: Where it is in the data.
            keep_count: Latest steps to keep.
            padding: Steps of the episode before it first appeared.
        """
        self._path = path
        self._keep_count = keep_count
        self._kept: deque[Cell | None] = deque([None] * min(padding, keep_count))
        self._gone_count = padding - len(self._kept)

    @property
    def path(self) -> Path:
        """Where it is in the data that were appended."""
        return self._path

    def keep(self, keep_count: int) -> None:
        """Keep so many steps from now on."""
        self._keep_count = keep_count
        self._expire()

    def add(self, cell: Cell | None) -> None:
        """Add what a new step has; the oldest step that is too many expires."""
        self._kept.append(cell)
        self._expire()

    def complete(self, cell: Cell) -> None:
        """Put into the latest step, which is still open, what it lacked."""
        self._kept[-1] = cell

    @property
    def is_latest_set(self) -> bool:
        """Whether the latest step has it."""
        return bool(self._kept) and self._kept[-1] is not None

    def clear(self) -> None:
        """Begin an episode; cells that items hold on to stay as they are."""
        for cell in self._kept:
            if cell is not None:
                cell.is_expired = True
        self._kept.clear()
        self._gone_count = 0

    def __len__(self) -> int:
        return self._gone_count + len(self._kept)

    def __iter__(self) -> Iterator[Cell | None]:
        return iter(self._cells())

    def __getitem__(self, key: "int | slice | list[int]") -> TrajectoryColumn:
        return _column(self._cells(), key, self._path)

    def _cells(self) -> list[Cell | None]:
        return [*([None] * self._gone_count), *self._kept]

    def _expire(self) -> None:
        while len(self._kept) > self._keep_count:
            cell = self._kept.popleft()
            self._gone_count += 1
            if cell is not None:
                cell.is_expired = True


def _column(
    cells: list[Cell | None], key: "int | slice | list[int]", path: Path
) -> TrajectoryColumn:
    """Some of a list of cells.

    A slice that starts before the first step is refused, not cut: an item that is shorter than
    it was meant to be would be found by a learner, much later.
    """
    if isinstance(key, slice):
        if key.start is not None and key.start < -len(cells):
            return TrajectoryColumn([None] * (-key.start - len(cells)) + cells[key], path)
        return TrajectoryColumn(cells[key], path)
    if isinstance(key, list):
        return TrajectoryColumn([cells[operator.index(each)] for each in key], path)
    try:
        place = operator.index(key)
    except TypeError:
        raise TypeError(
            f"a column is indexed by a number, a slice or a list of numbers, not {type(key)}"
        ) from None
    return TrajectoryColumn([cells[place]], path, is_squeezed=True)


def cell_of(value: Any, path: Path, like: tuple[DTypeLike, tuple[int, ...]] | None) -> Cell:
    """What one step has in a column; a copy, so that the caller may write over its own.

    Args:
        value: Array, number or text; anything that numpy takes.
        path: Of the column.
        like: Dtype and shape of its first cell; None: this is the first.

    Raises:
        ValueError: Dtype or shape is another, or numpy makes an array of objects of it.
    """
    array = np.array(value)
    if array.dtype.hasobject:
        raise ValueError(f"{shown(path)} is no array: {type(value).__name__}")
    if like is None:
        return Cell(array)
    dtype, shape = like
    # Texts of a longer width are the same kind of data.
    if (array.dtype if array.dtype.kind not in "US" else array.dtype.kind) != dtype:
        raise ValueError(f"{shown(path)} has had dtype {dtype}, and now {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{shown(path)} has had shape {list(shape)}, and now {list(array.shape)}")
    return Cell(array)


def kind_of(cell: Cell) -> tuple[DTypeLike, tuple[int, ...]]:
    """What the later cells of a column are held to."""
    dtype = cell.array.dtype
    return (dtype.kind if dtype.kind in "US" else dtype), cell.array.shape


def shown(path: Path) -> str:
    """A column's name, for people."""
    return f"column {'/'.join(map(str, path))!r}" if path else "the column"
