"""What holds arrays, in one line: paths, dtypes and shapes instead of numbers."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

LEAVES_MAX = 40
"""Leaves that are named; what has more ends with an ellipsis."""


def summary(name: str, facts: Sequence[str], trees: Mapping[str, Any]) -> str:
    """Render `name(fact, path: dtype[shape], ...)`; absent trees are left out.

    Args:
        name: Of the class.
        facts: What is said first.
        trees: Nested dicts, lists and tuples of arrays or tensors, by name. Anything else in them
            is named by its type.
    """
    leaves = [*islice(_leaves(trees, ""), LEAVES_MAX + 1)]
    parts = [*facts, *(f"{path}: {_leaf_text(leaf)}" for path, leaf in leaves[:LEAVES_MAX])]
    if len(leaves) > LEAVES_MAX:
        parts.append("...")
    return f"{name}({', '.join(parts)})"


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, in order; whatever the keys are."""
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            yield from _leaves(child, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, (list, tuple)):
        for index, child in enumerate(tree):
            yield from _leaves(child, f"{path}.{index}")
    elif tree is not None:
        yield path, tree


def _leaf_text(leaf: Any) -> str:
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None or shape is None:
        return type(leaf).__name__
    device = str(getattr(leaf, "device", "cpu"))
    place = "" if device == "cpu" else f" on {device}"
    return f"{str(dtype).removeprefix('torch.')}{[*shape]}{place}"
