"""Trees of arrays: nested dicts with string keys, lists and tuples; leaves, or None for absent.

A *structure* is the tree with each leaf replaced by its number. `flatten` takes every dict in the
order of its keys, not of their insertion, so that leaves of the same paths have the same numbers.
Only this module matches leaves of two trees: by path, never by position.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from breadbox.model.errors import TreeMismatchError, UnsupportedArrayError

Tree = Any
"""Nested dicts with string keys, lists and tuples; leaves, or None for an absent one."""
Structure = Any

NODES_MAX: Final = 65_536
"""Most nodes of a tree, leaves included."""
TREE_DEPTH_MAX: Final = 32
"""Most levels of nested containers; protobuf itself allows 100 messages, two per container."""

_SPECIAL: Final = re.compile(r"[.\[\]\\]")
_ESCAPED: Final = re.compile(r"\\(.)")
_FIELD_ENDS: Final = re.compile(r"[.\[]")
_PART: Final = re.compile(r"(?:^|\.)?(?:\[(\d+)\]|((?:[^.\[\]\\]|\\.)+))")


def child_path(path: str, key: object) -> str:
    """Return the path of a child, `obs.image` or `action[0]`; escape a key's punctuation."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    part = _SPECIAL.sub(r"\\\g<0>", str(key))
    return f"{path}.{part}" if path else part


def path_parts(path: str) -> list[str | int]:
    """Return the keys and indices that lead to a leaf, or raise ValueError."""
    parts: list[str | int] = []
    position = 0
    while position < len(path):
        found = _PART.match(path, position)
        if found is None:
            raise ValueError(f"{path[:200]!r} is no path such as obs.image or action[0]")
        item, key = found.groups()
        parts.append(int(item) if item else _ESCAPED.sub(r"\1", key))
        position = found.end()
    return parts


def field_of(path: str) -> str:
    """Return the field of a fragment or batch at the start of a path: `obs` for `obs.image`."""
    return _FIELD_ENDS.split(path, maxsplit=1)[0]


def is_within(path: str, part: str) -> bool:
    """Return True if a path is `part`, or leads to a leaf in it."""
    return path.startswith(part) and path[len(part) : len(part) + 1] in ("", ".", "[")


Entries = Callable[[dict[str, Tree]], list[tuple[str, Tree]]]


def as_inserted(node: dict[str, Tree]) -> list[tuple[str, Tree]]:
    """Return a dict's entries; raise UnsupportedArrayError for a key that is no text."""
    for key in node:
        if not isinstance(key, str):
            raise UnsupportedArrayError("", f"key {key!r} is not a string")
    return list(node.items())


def in_order(node: dict[str, Tree]) -> list[tuple[str, Tree]]:
    """Return a dict's entries by key; raise UnsupportedArrayError for a key that is no text."""
    return sorted(as_inserted(node), key=itemgetter(0))


def flatten(tree: Tree, entries: Entries = in_order) -> tuple[Structure, list[tuple[str, Any]]]:
    """Return a tree's structure, and its leaves as (path, leaf); named tuples become tuples."""
    structure, leaves = flatten_leaves(tree, entries)
    return structure, list(zip(paths_of(structure), leaves, strict=True))


def flatten_leaves(tree: Tree, entries: Entries = in_order) -> tuple[Structure, list[Any]]:
    """Return a tree's structure and its leaves without paths, which is faster."""
    leaves: list[Any] = []
    return _take_apart(tree, leaves, [1], 0, entries), leaves


def _take_apart(
    node: Tree, leaves: list[Any], node_count: list[int], depth: int, entries: Entries
) -> Structure:
    """Return the structure and append leaves. No closure, because a recursive one is a cycle."""
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
        return {
            key: _take_apart(child, leaves, node_count, depth, entries)
            for key, child in entries(node)
        }
    items = [_take_apart(child, leaves, node_count, depth, entries) for child in node]
    return tuple(items) if isinstance(node, tuple) else items


def paths_of(structure: Structure) -> list[str]:
    """Return the path of every leaf of a structure, in order."""
    return [path for path, _ in leaves(structure)]


def leaves_as(wanted: Structure, tree: Tree, *, path: str = "", where: str = "") -> list[Any]:
    """Return a tree's leaves in the order of the structure that `flatten` made of another tree.

    Leaves are matched by path: whether a container is a list or a tuple, and absent or empty ones,
    do not matter. Raises TreeMismatchError, with a path below `path`, if the paths differ.
    """
    if type(wanted) is int and not (tree is None or isinstance(tree, (dict, list, tuple))):
        return [tree]  # First, because most are one leaf.
    structure, leaves = flatten_leaves(tree)
    if structure == wanted:
        return leaves
    found, paths = dict(zip(paths_of(structure), leaves, strict=True)), paths_of(wanted)
    if len(found) != len(leaves) or sorted(found) != sorted(paths):
        check_alike(wanted, structure, path=path, where=where)
    return [found[each] for each in paths]


def copied(tree: Tree) -> Tree:
    """Return a copy of a tree of arrays."""
    structure, leaves = flatten_leaves(tree)
    return unflatten(structure, [np.array(plain_array(leaf)) for leaf in leaves])


def check_unmasked(leaf: Any, path: str = "") -> None:
    """Refuse a masked array: its mask would be lost."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise UnsupportedArrayError(path, "a masked array; store its data and mask apart")


def plain_array(leaf: Any, path: str = "") -> NDArray[Any]:
    """Return a leaf as an array, or raise UnsupportedArrayError for a masked one."""
    check_unmasked(leaf, path)
    return np.asarray(leaf)


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Tree:
    """Return the tree of a structure and its leaves. Undoes `flatten`."""
    return map_structure(lambda number: leaves[number], structure)


def map_structure(change: Callable[[int], Any], structure: Structure) -> Tree:
    """Return a structure with every leaf number replaced by `change` of it."""
    return _mapped(change, structure, ())


def map_present(change: Callable[[int], Any], structure: Structure) -> Tree:
    """Do as `map_structure`, but return None for a tree if all its leaves become None."""
    tree = map_structure(change, structure)
    if not isinstance(structure, (dict, list, tuple)):
        return tree
    is_absent = not flatten_leaves(tree)[1] and next(leaves(structure), None) is not None
    return None if is_absent else tree


def map_tree(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Replace every leaf of a tree by `function` of it and of the leaves there in *others*.

    None stays None; a named tuple becomes a tuple. Raises TreeMismatchError.
    """
    if type(tree) is np.ndarray and not others:
        return function(tree)
    for other in others:
        check_alike(tree, other)
    return _mapped(function, tree, others)


def _mapped(function: Callable[..., Any], tree: Tree, others: tuple[Tree, ...]) -> Tree:
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {
            key: _mapped(function, child, tuple(other[key] for other in others))
            for key, child in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        items = [
            _mapped(function, child, tuple(other[i] for other in others))
            for i, child in enumerate(tree)
        ]
        return tuple(items) if isinstance(tree, tuple) else items
    return function(tree, *others)


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, as dicts hold them, whatever their keys are."""
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            yield from leaves(child, child_path(path, str(key)))
    elif isinstance(tree, (list, tuple)):
        for i, child in enumerate(tree):
            yield from leaves(child, child_path(path, i))
    elif tree is not None:
        yield path, tree


def gather(named: Mapping[str, Any]) -> Tree:
    """Build a tree from leaves by path, its lists and tuples as tuples, or raise ValueError."""
    root: dict[str | int, Any] = {}
    for path, leaf in named.items():
        node: Any = root
        *way, last = path_parts(path) or [""]
        for part in way:
            node = node.setdefault(part, {})
            if type(node) is not dict:
                raise ValueError(f"{path!r} leads through a leaf")
        if last in node:
            raise ValueError(f"{path!r} is a leaf, and leads to others")
        node[last] = leaf
    return _contained(root)


def _contained(node: Any) -> Tree:
    if type(node) is not dict:
        return node
    indices = [key for key in node if isinstance(key, int)]
    if not indices:
        return {key: _contained(child) for key, child in node.items()}
    if sorted(indices) != [*range(len(node))]:
        raise ValueError(f"items {sorted(indices)[:20]} are no list")
    return tuple(_contained(node[index]) for index in range(len(node)))


def row(tree: Tree, index: int) -> Tree:
    """Return one row of every leaf, as a view; of a leaf with one axis, the scalar."""
    return map_tree(lambda leaf: leaf[index], tree)


def row_view(tree: Tree, index: int) -> Tree:
    """Do as `row`, but return arrays for scalars too: text scalars would lose their width."""
    return map_tree(lambda leaf: leaf[index, ...], tree)


def rows(tree: Tree, start: int | None, stop: int | None) -> Tree:
    """Return the same rows of every leaf, as views."""
    if type(tree) is np.ndarray:  # First, because most are.
        return tree[start:stop]
    return map_tree(lambda leaf: leaf[start:stop], tree)


def take(tree: Tree, chosen: NDArray[np.integer[Any]]) -> Tree:
    """Return chosen rows of every leaf, copied."""
    return map_tree(lambda leaf: leaf[chosen], tree)


def concat(trees: Sequence[Tree]) -> Tree:
    """Join trees of arrays along the first axis; raise TreeMismatchError, ValueError if unlike."""
    if len(trees) == 1:
        return trees[0]
    if trees and type(trees[0]) is np.ndarray:
        return np.concatenate(trees)
    return map_tree(lambda *parts: np.concatenate(parts), *trees)


def rows_equal(one: Tree, other: Tree) -> NDArray[np.bool_]:
    """Return bool[N]: True for equal rows of two trees of one structure; NaN equals NaN.

    Leaves of different shapes have no equal rows. Raises TreeMismatchError.
    """
    compared: list[NDArray[np.bool_]] = []

    def compare(left: Any, right: Any) -> None:
        left, right = np.asarray(left), np.asarray(right)
        if left.shape != right.shape:
            compared.append(np.zeros(len(left), np.bool_))
            return
        equal = left == right
        if left.dtype.kind in "fc" and not equal.all():
            equal |= (left != left) & (right != right)
        compared.append(equal.all(axis=tuple(range(1, equal.ndim))))

    map_tree(compare, one, other)
    in_all: NDArray[np.bool_] = np.logical_and.reduce(compared)
    return in_all


def check_alike(wanted: Structure, got: Structure, *, path: str = "", where: str = "") -> None:
    """Raise TreeMismatchError, naming the path, if two structures (not numbers) differ."""
    wanted_kind, got_kind = _kind(wanted), _kind(got)
    if wanted_kind != got_kind:
        raise TreeMismatchError(path, wanted_kind, got_kind, where)
    if isinstance(wanted, dict):
        if wanted.keys() != got.keys():
            raise TreeMismatchError(
                path, f"keys {_shown(sorted(wanted))}", f"keys {_shown(sorted(got))}", where
            )
        for key, node in wanted.items():
            check_alike(node, got[key], path=child_path(path, key), where=where)
    elif isinstance(wanted, (list, tuple)):
        if len(wanted) != len(got):
            raise TreeMismatchError(path, f"{len(wanted)} items", f"{len(got)} items", where)
        for i, (node, other) in enumerate(zip(wanted, got, strict=True)):
            check_alike(node, other, path=child_path(path, i), where=where)


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
