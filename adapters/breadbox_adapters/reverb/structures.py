"""Structures of data as Reverb has them: dicts, lists, tuples and named tuples, leaves, None.

Leaves are in the order of `dm-tree`: entries of dicts by sorted keys, all else as it stands. None
is an absent leaf.
"""

import json
import operator
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Structure = Any
Path = tuple[int | str, ...]

_NAMED = "("
"""How keys begin under which fields of a named tuple are stored: "(Step)reward"."""
_JSON = "#"
"""In place of a type's name: what follows is a key that is no text, as JSON: "(#)5"."""


def children(node: Structure) -> list[tuple[int | str, Any]] | None:
    """Entries of a container, in order, with their keys; None: it is a leaf, or absent."""
    if isinstance(node, dict):
        return [(key, node[key]) for key in sorted(node)]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, list | tuple):
        return list(enumerate(node))
    return None


def rebuilt(node: Structure, values: Sequence[Any]) -> Structure:
    """A container like `node` with other entries, in the order of `children`."""
    if isinstance(node, dict):
        return dict(zip(sorted(node), values, strict=True))
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*values)
    return type(node)(values)


def flatten_with_path(tree: Structure, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Leaves that are there, in order, each with its path."""
    entries = children(tree)
    if entries is not None:
        for key, child in entries:
            yield from flatten_with_path(child, (*path, key))
    elif tree is not None:
        yield path, tree


def flatten(tree: Structure) -> list[Any]:
    """Leaves that are there, in order."""
    return [leaf for _, leaf in flatten_with_path(tree)]


def map_with_path(
    function: Callable[[Path, Any], Any], tree: Structure, path: Path = ()
) -> Structure:
    """The same structure with other leaves; absent ones stay so."""
    entries = children(tree)
    if entries is not None:
        made = [map_with_path(function, child, (*path, key)) for key, child in entries]
        return rebuilt(tree, made)
    return None if tree is None else function(path, tree)


def map_leaves(function: Callable[[Any], Any], tree: Structure) -> Structure:
    """The same structure with other leaves; absent ones stay so."""
    return map_with_path(lambda _, leaf: function(leaf), tree)


def row_of(tree: Structure, place: int) -> Structure:
    """One row of every array."""
    return map_leaves(lambda leaf: leaf[place], tree)


def unflatten_as(like: Structure, leaves: Sequence[Any]) -> Structure:
    """Leaves in the structure of another tree.

    Raises:
        ValueError: They are not as many.
    """
    count = len(flatten(like))
    if count != len(leaves):
        raise ValueError(f"the structure has {count} leaves, and there are {len(leaves)}")
    rest = iter(leaves)
    return map_leaves(lambda _: next(rest), like)


def union(one: Structure, other: Structure) -> Structure:
    """A structure that has the leaves of both.

    Raises:
        ValueError: One has a leaf where the other has a container, or their kinds differ.
    """
    if one is None or other is None:
        return one if other is None else other
    mine, others = children(one), children(other)
    if mine is None and others is None:
        return one
    if mine is None or others is None or type(one) is not type(other):
        raise ValueError(
            f"the structure of appended data changed from {type(one).__name__} "
            f"to {type(other).__name__}"
        )
    if isinstance(one, dict):
        return {
            key: union(one.get(key), other.get(key)) for key in sorted(one.keys() | other.keys())
        }
    if len(mine) != len(others):
        raise ValueError(
            f"a {type(one).__name__} of {len(mine)} entries was appended before, "
            f"and now one of {len(others)}"
        )
    return rebuilt(one, [union(a, b) for (_, a), (_, b) in zip(mine, others, strict=True)])


def stored(tree: Structure) -> Structure:
    """The same in what a payload holds: dicts by text, lists and tuples; see `restored`.

    A named tuple becomes a dict that says of which type its fields are.

    Raises:
        TypeError: A key of a dict is no text, number, or tuple of these.
    """
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            return {
                f"{_NAMED}{_JSON}){json.dumps(key, default=operator.index)}": stored(child)
                for key, child in tree.items()
            }
        return {
            _NAMED + key if key.startswith(_NAMED) else key: stored(child)
            for key, child in tree.items()
        }
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        name = type(tree).__name__
        return {
            f"{_NAMED}{name}){field}": stored(child)
            for field, child in zip(tree._fields, tree, strict=True)
        }
    if isinstance(tree, list | tuple):
        return type(tree)(stored(child) for child in tree)
    return tree


def restored(tree: Structure, known: dict[tuple[str, ...], type] | None = None) -> Structure:
    """What `stored` was given. Named tuples are of a type of the same name and fields.

    Args:
        tree: As it was stored.
        known: Types of named tuples by name and fields; those that are missing are made, and put
            in, so that one reader has one type for all items.
    """
    types = {} if known is None else known
    if isinstance(tree, dict):
        keys = list(tree)
        if keys and all(_is_field(key) for key in keys):
            name = keys[0][len(_NAMED) : keys[0].index(")")]
            fields = tuple(key[key.index(")") + 1 :] for key in keys)
            if name == _JSON:
                children_of = (restored(child, types) for child in tree.values())
                return dict(zip(map(_key_of, fields), children_of, strict=True))
            kind = types.get((name, *fields))
            if kind is None:
                kind = types[(name, *fields)] = namedtuple(name, fields)
            return kind(*(restored(child, types) for child in tree.values()))
        return {
            key.removeprefix(_NAMED) if key.startswith(_NAMED * 2) else key: restored(child, types)
            for key, child in tree.items()
        }
    if isinstance(tree, list | tuple):
        return type(tree)(restored(child, types) for child in tree)
    return tree


def _key_of(text: str) -> Any:
    def hashable(value: Any) -> Any:
        return tuple(map(hashable, value)) if isinstance(value, list) else value

    return hashable(json.loads(text))


def _is_field(key: str) -> bool:
    return key.startswith(_NAMED) and not key.startswith(_NAMED * 2) and ")" in key
