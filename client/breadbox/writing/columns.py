"""Write rows of trees into arrays that are allocated once, instead of stacking lists of steps."""

import numpy as np

from breadbox.model.errors import TreeMismatchError, UnsupportedArrayError
from breadbox.model.trees import Tree, child_path, flatten, map_tree, plain_array, rows, unflatten


class Columns:
    """A tree of arrays [row_count, ...], like the first row written; errors begin with `where`."""

    def __init__(self, row_count: int, where: str) -> None:
        self._row_count = row_count
        self._where = where
        self._arrays: Tree = None
        self._allocated = False

    def write(self, row: int, tree: Tree) -> None:
        """Copy *tree* into a row, which is undefined after a TreeMismatchError."""
        if not self._allocated:
            self._arrays = self._allocate(tree)
            self._allocated = True
        self._write(self._arrays, row, tree, "")

    def rows(self, end: int) -> Tree:
        """Return rows 0 to end - 1, as views."""
        return rows(self._arrays, None, end)

    def row(self, row: int) -> Tree:
        """Return one row, as views."""
        # Ellipsis keeps rows without axes arrays; a plain index would make them scalars.
        return map_tree(lambda array: array[row, ...], self._arrays)

    def _allocate(self, tree: Tree) -> Tree:
        structure, leaves = flatten(tree)
        columns = []
        for path, value in leaves:
            leaf = plain_array(value, path)
            if leaf.dtype.hasobject:
                name = type(value).__name__
                raise UnsupportedArrayError(path, f"{self._where}: {name} is no array")
            columns.append(np.empty((self._row_count, *leaf.shape), leaf.dtype))
        return unflatten(structure, columns)

    def _write(self, arrays: Tree, row: int, tree: Tree, path: str) -> None:
        if isinstance(arrays, np.ndarray):
            leaf = plain_array(tree, path)
            if leaf.dtype != arrays.dtype or leaf.shape != arrays.shape[1:]:
                wanted = f"{arrays.dtype}{list(arrays.shape[1:])}"
                got = f"{leaf.dtype}{list(leaf.shape)}" if leaf.dtype != object else repr(tree)[:80]
                raise TreeMismatchError(path, wanted, got, self._where)
            arrays[row] = leaf
        elif isinstance(arrays, dict) and isinstance(tree, dict):
            if arrays.keys() != tree.keys():
                wanted, got = f"keys {sorted(arrays)}", f"keys {sorted(tree)}"
                raise TreeMismatchError(path, wanted, got, self._where)
            for key, array in arrays.items():
                self._write(array, row, tree[key], child_path(path, key))
        elif type(arrays) is type(tree) and isinstance(tree, list | tuple):
            if len(arrays) != len(tree):
                wanted, got = f"{len(arrays)} items", f"{len(tree)} items"
                raise TreeMismatchError(path, wanted, got, self._where)
            for index, (array, value) in enumerate(zip(arrays, tree, strict=True)):
                self._write(array, row, value, child_path(path, index))
        elif arrays is not None or tree is not None:
            wanted, got = type(arrays).__name__, type(tree).__name__
            raise TreeMismatchError(path, wanted, got, self._where)
