"""Nested dicts, lists and tuples of tensors."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from breadbox.errors import TreeMismatchError

Tree = Any
"""Nested dicts, lists and tuples whose leaves are tensors (or arrays), or None."""


def map_tree(function: Callable[..., Any], tree: Tree, *others: Tree, path: str = "") -> Tree:
    """Apply *function* to each leaf of *tree* and the leaves at the same place in *others*.

    None is not a leaf: it stays None.

    Raises:
        TreeMismatchError: The trees differ in structure; names the path.
    """
    for other in others:
        _require_alike(tree, other, path)
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {
            key: map_tree(function, value, *(o[key] for o in others), path=f"{path}.{key}")
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return type(tree)(
            map_tree(function, value, *(o[i] for o in others), path=f"{path}[{i}]")
            for i, value in enumerate(tree)
        )
    return function(tree, *others)


def leaves(tree: Tree) -> Iterator[Any]:
    """Leaves in order; dicts in insertion order."""
    if tree is None:
        return
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def stack_trees(trees: Sequence[Tree]) -> Tree:
    """Stack like trees of arrays leaf by leaf into tensors with a new first axis.

    Raises:
        TreeMismatchError: Structure, shape or dtype differs between two of them.
    """

    def stack(*arrays: Any) -> torch.Tensor:
        first = np.asarray(arrays[0])
        for array in arrays[1:]:
            if np.shape(array) != first.shape or np.asarray(array).dtype != first.dtype:
                raise TreeMismatchError(
                    "",
                    f"{first.dtype}{list(first.shape)}",
                    f"{np.asarray(array).dtype}{list(np.shape(array))}",
                    "stacking fragments",
                )
        return torch.from_numpy(np.stack(arrays))

    if not trees:
        raise ValueError("nothing to stack")
    return map_tree(stack, trees[0], *trees[1:])


def _require_alike(tree: Tree, other: Tree, path: str) -> None:
    if isinstance(tree, dict):
        wanted = f"a dict with {sorted(tree)}"
        alike = isinstance(other, dict) and tree.keys() == other.keys()
    elif isinstance(tree, list | tuple):
        wanted = f"a {type(tree).__name__} of {len(tree)}"
        alike = type(other) is type(tree) and len(other) == len(tree)
    elif tree is None:
        wanted, alike = "None", other is None
    else:
        wanted, alike = "a leaf", not isinstance(other, dict | list | tuple) and other is not None
    if not alike:
        got = f"a dict with {sorted(other)}" if isinstance(other, dict) else type(other).__name__
        raise TreeMismatchError(path.lstrip("."), wanted, got)
