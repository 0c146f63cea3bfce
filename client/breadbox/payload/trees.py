"""Trees of arrays: nested dicts with string keys, lists and tuples; leaves, or None for absent.

A *structure* is the tree with each leaf replaced by its number in order of appearance. Two trees
are alike when their structures are equal.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from breadbox.errors import TreeMismatchError, UnsupportedArrayError
from breadbox.payload.limits import NODES_MAX, TREE_DEPTH_MAX

Tree = Any
Structure = Any


def join_path(path: str, key: str | int) -> str:
    """Path of a child: parts joined by dots, with dots and backslashes in keys escaped."""
    part = str(key).replace("\\", "\\\\").replace(".", "\\.")
    return f"{path}.{part}" if path else part


def flatten(tree: Tree) -> tuple[Structure, list[tuple[str, Any]]]:
    """Take a tree apart.

    Returns:
        Its structure, and its leaves as (path, leaf), in order. A named tuple counts as a tuple.

    Raises:
        UnsupportedArrayError: A key is not a string, or the tree is too deep or too large.
    """
    structure, leaves = flatten_leaves(tree)
    return structure, list(zip(paths_of(structure), leaves, strict=True))


def flatten_leaves(tree: Tree) -> tuple[Structure, list[Any]]:
    """Take a tree apart without naming the leaves: what can be done once per fragment.

    Raises:
        UnsupportedArrayError: A key is not a string, or the tree is too deep or too large.
    """
    leaves: list[Any] = []
    return _take_apart(tree, leaves, [1], 0), leaves


def _take_apart(node: Tree, leaves: list[Any], node_count: list[int], depth: int) -> Structure:
    """Return the structure of a part of a tree, and append its leaves.

    No function within `flatten_leaves`: one that calls itself is a cycle, and would hold all arrays
    until Python looks for cycles.
    """
    if type(node) is np.ndarray:  # First, because most are.
        leaves.append(node)
        return len(leaves) - 1
    if node is None:
        return None
    if not isinstance(node, (dict, list, tuple)):
        leaves.append(node)
        return len(leaves) - 1
    node_count[0] += len(node)
    if depth >= TREE_DEPTH_MAX or node_count[0] > NODES_MAX:
        raise UnsupportedArrayError(
            "", f"the tree is deeper than {TREE_DEPTH_MAX} or has more than {NODES_MAX} nodes"
        )
    depth += 1
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, str):
                raise UnsupportedArrayError("", f"key {key!r} is not a string")
        return {key: _take_apart(child, leaves, node_count, depth) for key, child in node.items()}
    items = [_take_apart(child, leaves, node_count, depth) for child in node]
    return tuple(items) if isinstance(node, tuple) else items


def paths_of(structure: Structure) -> list[str]:
    """Path of every leaf of a structure, in order."""
    paths: list[str] = []

    def visit(node: Structure, path: str) -> None:
        if isinstance(node, dict):
            for key, child in node.items():
                visit(child, join_path(path, key))
        elif isinstance(node, (list, tuple)):
            for i, child in enumerate(node):
                visit(child, join_path(path, i))
        elif node is not None:
            paths.append(path)

    visit(structure, "")
    return paths


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Tree:
    """Put a tree together from its structure and leaves. The opposite of `flatten`."""
    return map_structure(lambda number: leaves[number], structure)


def map_structure(change: Callable[[int], Any], structure: Structure) -> Tree:
    """Replace every leaf number of a structure by what `change` returns for it."""
    if structure is None:
        return None
    if isinstance(structure, dict):
        return {key: map_structure(change, node) for key, node in structure.items()}
    if isinstance(structure, list):
        return [map_structure(change, node) for node in structure]
    if isinstance(structure, tuple):
        return tuple(map_structure(change, node) for node in structure)
    return change(structure)


def map_present(change: Callable[[int], Any], structure: Structure) -> Tree:
    """Do as `map_structure`; but of a tree whose leaves all become None, only None remains.

    A tree that never had a leaf, such as an empty tuple, stays.
    """
    tree = map_structure(change, structure)
    is_absent = not flatten(tree)[1] and next(leaf_numbers(structure), None) is not None
    return None if is_absent else tree


def map_leaves(change: Callable[[Any], Any], tree: Tree) -> Tree:
    """Replace every leaf of a tree by what `change` returns for it."""
    structure, leaves = flatten(tree)
    changed = [change(leaf) for _, leaf in leaves]
    return unflatten(structure, changed)


def leaf_numbers(structure: Structure) -> Iterator[int]:
    """Every leaf number in a structure, in order."""
    if isinstance(structure, dict):
        for node in structure.values():
            yield from leaf_numbers(node)
    elif isinstance(structure, (list, tuple)):
        for node in structure:
            yield from leaf_numbers(node)
    elif structure is not None:
        yield structure


def require_alike(wanted: Structure, got: Structure, *, path: str = "", where: str = "") -> None:
    """Compare two structures, or parts of them, without regard to the numbers of leaves.

    Raises:
        TreeMismatchError: They differ; names the first path at which they do.
    """
    wanted_kind, got_kind = _kind(wanted), _kind(got)
    if wanted_kind != got_kind:
        raise TreeMismatchError(path, wanted_kind, got_kind, where)
    if isinstance(wanted, dict):
        if wanted.keys() != got.keys():
            raise TreeMismatchError(
                path, f"keys {_shown(sorted(wanted))}", f"keys {_shown(sorted(got))}", where
            )
        for key, node in wanted.items():
            require_alike(node, got[key], path=join_path(path, key), where=where)
    elif isinstance(wanted, (list, tuple)):
        if len(wanted) != len(got):
            raise TreeMismatchError(path, f"{len(wanted)} items", f"{len(got)} items", where)
        for i, (node, other) in enumerate(zip(wanted, got, strict=True)):
            require_alike(node, other, path=join_path(path, i), where=where)


def _kind(structure: Structure) -> str:
    if structure is None:
        return "nothing"
    for kind in (dict, list, tuple):
        if isinstance(structure, kind):
            return f"a {kind.__name__}"
    return "an array"


def _shown(keys: list[str]) -> str:
    text = ", ".join(keys)
    return f"[{text if len(text) <= 200 else text[:200] + '...'}]"
