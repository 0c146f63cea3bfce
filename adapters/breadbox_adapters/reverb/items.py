"""Turn data into items (fragments alone in their chunks) and back, and keep tables' signatures."""

import json
import operator
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from breadbox.model import fragment as fragments
from breadbox.model.errors import BufferNotFoundError
from breadbox.model.fragment import Fragment
from breadbox.model.types import FragmentReference


class TableNotFoundError(BufferNotFoundError):
    """No table, and so no buffer, has this name; lists those that exist."""

    def __init__(self, table: str, known: Sequence[str]) -> None:
        names = ", ".join(map(repr, known)) or "none"
        super().__init__(
            table, f"no table is named {table!r}; there are {names} (create_tables() makes more)"
        )
        self.known = tuple(known)


Structure = Any
Path = tuple[int | str, ...]

_NAMED = "("
"""Begins keys of the fields of a named tuple, with their places: "(Step:0)reward"."""
_JSON = "#"
"""Type name for a key that is no text; the key follows as JSON: "(#)5"."""


def children(node: Structure) -> list[tuple[int | str, Any]] | None:
    """Return a container's keys and entries, in order, or None for a leaf or an absent one."""
    if isinstance(node, dict):
        return [(key, node[key]) for key in sorted(node)]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, list | tuple):
        return list(enumerate(node))
    return None


def rebuilt(node: Structure, values: Sequence[Any]) -> Structure:
    """Return a container like `node` with other entries, in the order of `children`."""
    if isinstance(node, dict):
        return dict(zip(sorted(node), values, strict=True))
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*values)
    return type(node)(values)


def flatten_with_path(tree: Structure, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves that are not None, in order, each with its path."""
    entries = children(tree)
    if entries is not None:
        for key, child in entries:
            yield from flatten_with_path(child, (*path, key))
    elif tree is not None:
        yield path, tree


def flatten(tree: Structure) -> list[Any]:
    """Return the leaves that are not None, in order."""
    return [leaf for _, leaf in flatten_with_path(tree)]


def map_with_path(
    function: Callable[[Path, Any], Any], tree: Structure, path: Path = ()
) -> Structure:
    """Return the same structure with other leaves; None stays None."""
    entries = children(tree)
    if entries is not None:
        made = [map_with_path(function, child, (*path, key)) for key, child in entries]
        return rebuilt(tree, made)
    return None if tree is None else function(path, tree)


def map_leaves(function: Callable[[Any], Any], tree: Structure) -> Structure:
    """Return the same structure with other leaves; None stays None."""
    return map_with_path(lambda _, leaf: function(leaf), tree)


def row_of(tree: Structure, place: int) -> Structure:
    """Return one row of every array."""
    return map_leaves(lambda leaf: leaf[place], tree)


def unflatten_as(like: Structure, leaves: Sequence[Any]) -> Structure:
    """Return leaves in the structure of another tree, which has as many."""
    count = len(flatten(like))
    if count != len(leaves):
        raise ValueError(f"the structure has {count} leaves, and there are {len(leaves)}")
    rest = iter(leaves)
    return map_leaves(lambda _: next(rest), like)


def union(one: Structure, other: Structure) -> Structure:
    """Return a structure with the leaves of both; refuse a leaf in place of a container."""
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
    """Return what a payload holds, named tuples and other keys marked; see `restored`."""
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
            f"{_NAMED}{name}:{place}){field}": stored(child)
            for place, (field, child) in enumerate(children(tree) or ())
        }
    if isinstance(tree, list | tuple):
        return type(tree)(stored(child) for child in tree)
    return tree


def restored(tree: Structure, known: dict[tuple[str, ...], type] | None = None) -> Structure:
    """Undo `stored`. `known` maps name and fields of named tuples to types, and gets new ones."""
    types = {} if known is None else known
    if isinstance(tree, dict):
        if tree and all(_is_field(key) for key in tree):
            # Entries are kept in any order; items of earlier versions lack the fields' places.
            keys = sorted(tree, key=lambda key: _field_of(key)[0])
            values = [restored(tree[key], types) for key in keys]
            _, name, _ = _field_of(keys[0])
            fields = tuple(field for _, _, field in map(_field_of, keys))
            if name == _JSON:
                return dict(zip(map(_key_of, fields), values, strict=True))
            kind = types.get((name, *fields))
            if kind is None:
                kind = types[(name, *fields)] = namedtuple(name, fields)
            return kind(*values)
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


def _field_of(key: str) -> tuple[int, str, str]:
    """Return a field's place, the name of its tuple, and its own."""
    head, _, field = key.removeprefix(_NAMED).partition(")")
    name, _, place = head.partition(":")
    return int(place or 0), name, field


def _is_field(key: str) -> bool:
    return key.startswith(_NAMED) and not key.startswith(_NAMED * 2) and ")" in key


PRIORITY_MAX = 1e30
"""Larger priorities come from a loss that diverged."""
ITEM = "item"
"""Name of the extra that holds the item."""


class SampleInfo(NamedTuple):
    """An item that was drawn."""

    key: int
    """Key of the item, for `mutate_priorities`."""
    probability: float
    """Probability of this item at the draw."""
    table_size: int
    """Number of items in the table at the draw."""
    priority: float
    """Priority of the item at the draw."""
    times_sampled: int
    """Number of draws of the item, including this one."""


class ReplaySample(NamedTuple):
    """A drawn item, or one of its steps."""

    info: SampleInfo
    data: Any
    """Arrays, in a flat list or in the structure of the trajectory."""


def check_priority(priority: float) -> float:
    """Return a priority as a float; refuse one that is not from 0 to 1e30."""
    value = float(priority)
    if not 0 <= value <= PRIORITY_MAX:
        raise ValueError(f"a priority must be from 0 to {PRIORITY_MAX:g}, got {priority}")
    return value


def fragment_of(tree: Any, priority: float, *, worker_id: str, index: int) -> Fragment:
    """Return the fragment that holds an item; the sender sets its session."""
    return fragments.fragment_of(
        *("", worker_id, index),
        obs=None,
        action=None,
        reward=[0.0],
        next_obs=None,
        starts_episode=False,
        extras={ITEM: stored(map_leaves(lambda leaf: np.asarray(leaf)[None], tree))},
        # Items do not continue each other.
        discontinuity=True,
        priority=priority,
    )


def tree_of(fragment: Fragment, known: dict[tuple[str, ...], type]) -> Any:
    """Return the trajectory of a fragment; refuse one that another client appended."""
    if ITEM not in fragment.extras:
        raise ValueError(
            f"fragment {fragment.fragment_index} of worker {fragment.worker_id!r} is no item: "
            "it was not written by breadbox_adapters.reverb, so read it with breadbox.Client"
        )
    return restored(map_leaves(lambda array: array[0], fragment.extras[ITEM]), known)


def info_of(reference: FragmentReference) -> SampleInfo:
    """Describe a drawn item."""
    return SampleInfo(
        key=reference.chunk_id,
        probability=reference.probability,
        table_size=reference.population,
        priority=reference.priority,
        times_sampled=reference.use_count,
    )


_NAME = "signature"
"""Name of the array that is a signature, alone among the weights of a table's session."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Dtype and shape of an array."""

    dtype: str
    """Numpy's name of it; "text" of any width."""
    shape: tuple[int | None, ...] | None
    """Lengths of its axes, None for any length, or None if the number of axes is open."""

    def fits(self, dtype: str, shape: Sequence[int]) -> bool:
        """Return True if an array is of this dtype and shape."""
        if dtype != self.dtype:
            return False
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            wanted in (None, length) for wanted, length in zip(self.shape, shape, strict=True)
        )

    def __str__(self) -> str:
        return _shown(self.dtype, self.shape)


class Signature:
    """The `ArraySpec` of each array of a table's items, in the table's structure."""

    def __init__(self, specs: Any) -> None:
        self.specs = specs
        self._leaves = list(flatten_with_path(specs))

    @classmethod
    def of(cls, tree: Any) -> "Signature":
        """Return the signature of a tree with leaves of this `shape` and `dtype`."""
        return cls(map_leaves(_spec_of, tree))

    def packed(self) -> dict[str, NDArray[Any]]:
        """Return it as weights."""
        text = json.dumps(_plain(stored(self.specs)))
        return {_NAME: np.frombuffer(text.encode(), np.uint8)}

    @classmethod
    def unpacked(cls, weights: Mapping[str, Any]) -> "Signature | None":
        """Return the signature that `packed` wrote, or None for other weights."""
        if _NAME not in weights:
            return None
        return cls(restored(_made(json.loads(bytes(np.asarray(weights[_NAME]))))))

    def check(self, table: str, item: Any, *, is_of_steps: bool) -> None:
        """Refuse an item of other arrays (`is_of_steps`: of other steps); names may differ."""
        arrays = [np.asarray(leaf) for leaf in flatten(item)]
        if len(arrays) != len(self._leaves):
            raise ValueError(
                f"an item of table {table!r} is to have {len(self._leaves)} arrays, by the table's "
                f"signature, and has {len(arrays)}"
            )
        for number, ((path, spec), array) in enumerate(zip(self._leaves, arrays, strict=True)):
            name = _name(array.dtype)
            if spec.fits(name, array.shape) or (is_of_steps and spec.fits(name, array.shape[1:])):
                continue
            shape = array.shape[1:] if is_of_steps else array.shape
            raise ValueError(
                f"array {number} of an item of table {table!r} is {_shown(name, shape)}, and "
                f"{spec} by the table's signature, in which it is {'.'.join(map(str, path))!r}"
            )


def _spec_of(leaf: Any) -> ArraySpec:
    shape = getattr(leaf, "shape", ())
    # TensorFlow's shapes of unknown rank cannot be iterated.
    has_rank = getattr(shape, "rank", 0) is not None
    lengths = tuple(None if length is None else int(length) for length in shape) if has_rank else ()
    dtype = getattr(leaf, "dtype", leaf)
    return ArraySpec(
        _name(np.dtype(getattr(dtype, "as_numpy_dtype", dtype))), lengths if has_rank else None
    )


def _name(dtype: np.dtype[Any]) -> str:
    return "text" if dtype.kind in "OSUT" else dtype.name


def _shown(dtype: str, shape: Sequence[int | None] | None) -> str:
    lengths = (
        "..." if shape is None else ", ".join("?" if each is None else str(each) for each in shape)
    )
    return f"{dtype}[{lengths}]"


def _plain(node: Any) -> Any:
    if isinstance(node, ArraySpec):
        return ["leaf", node.dtype, node.shape]
    entries = children(node)
    if entries is None:
        return None
    if isinstance(node, dict):
        return ["dict", {key: _plain(child) for key, child in node.items()}]
    return [type(node).__name__, [_plain(child) for _, child in entries]]


def _made(plain: Any) -> Any:
    match plain:
        case ["leaf", dtype, shape]:
            return ArraySpec(dtype, shape if shape is None else tuple(shape))
        case ["dict", entries]:
            return {key: _made(child) for key, child in entries.items()}
        case ["tuple", entries]:
            return tuple(map(_made, entries))
        case ["list", entries]:
            return list(map(_made, entries))
    return None
