"""How any value that MineStudio pickles becomes arrays that Breadbox stores, and a value again.

A Breadbox fragment holds trees of arrays with text keys, and of what belongs to its steps one row
per step; it holds no pickles. So a value is *taken apart* into such a tree, which a learner of
Breadbox's own can read, and a *recipe*, which says how to put it together again. What fits into no
tree of arrays (texts that end in NUL, object arrays, bytes, numbers among the steps) lies in the
recipe itself.

A recipe is JSON: a list whose first item says what it is. Nothing in it is ever executed.

    ["array"]                    the tree's array as it is
    ["row"]                      the same, with a leading axis of 1 in front
    ["tensor"], ["row tensor"]   the same, as a torch tensor on the host
    ["item"]                     the array's only element as Python's own bool, int, float or str
    ["scalar"]                   the same as numpy's
    ["texts"]                    an array of text as a list
    ["dict", [key, name, recipe]...]  key: a recipe of its own; name: the tree's key
    ["list", recipe...], ["tuple", recipe...]
    ["none"]
    ["aside", recipe]            whatever the tree holds in this place
    ["value", value]             what JSON knows: bool, int, float, str
    ["bytes", start, stop]       bytes aside
    ["odd array", dtype, shape, start, stop]   an array aside
    ["objects", shape, recipe...]  an object array, row by row
    ["set", recipe...], ["frozenset", recipe...], ["complex", real, imaginary]
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model import errors
from breadbox.model.fragment import Tree
from breadbox.payload.dtypes import is_tensor, parse_dtype

Recipe = list[Any]

_LENGTH_BYTES = 8
_PLAIN_KINDS = "?biufcSUmM"
"""Kinds of dtype that payloads hold: no objects, no records."""
_SCALARS = (bool, int, float)


class Aside:
    """Bytes that lie beside a tree, because they fit into none."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def put(self, part: bytes) -> list[int]:
        """Keep bytes; returns where they start and stop."""
        start = self._size_bytes
        self._parts.append(part)
        self._size_bytes += len(part)
        return [start, self._size_bytes]

    def packed(self, recipe: Mapping[str, Recipe], row_count: int) -> NDArray[np.uint8]:
        """Recipes by name, and bytes, as one array with a row per step: uint8[row_count, ...]."""
        head = json.dumps(recipe, separators=(",", ":")).encode()
        whole = b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *self._parts])
        width = -(-len(whole) // row_count)
        padded = whole.ljust(width * row_count, b"\0")
        return np.frombuffer(padded, np.uint8).reshape(row_count, width)


def unpack(packed: NDArray[np.uint8]) -> tuple[dict[str, Recipe], bytes]:
    """Undo `Aside.packed`: the recipes, and the bytes aside.

    Raises:
        PayloadCorruptError: It is not what `packed` makes.
    """
    whole = np.ascontiguousarray(packed).tobytes()
    stop = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES], "little")
    try:
        recipe = json.loads(whole[_LENGTH_BYTES:stop])
    except ValueError as error:
        raise errors.PayloadCorruptError("a fragment's recipe is not JSON") from error
    return recipe, whole[stop:]


def take_apart(
    value: Any, aside: Aside, path: str, *, row_count: int | None = None, drops_axis: bool = False
) -> tuple[Tree, Recipe]:
    """Make a tree of arrays of a value, and the recipe that undoes it.

    Args:
        value: Anything made of arrays, tensors, numbers, texts, bytes, None, and of dicts, lists,
            tuples and sets of these.
        aside: Gets what fits into no tree.
        path: Name of the value, for errors.
        row_count: What the tree's arrays must have in their first axis; None: anything.
        drops_axis: Whether arrays lose their first axis, which is 1 for all of them.

    Raises:
        UnsupportedArrayError: Something in it is of a kind that is never stored; names its path.
    """
    if isinstance(value, dict) or _is_omegaconf(value):
        tree: dict[str, Any] = {}
        entries = []
        for key, child in value.items():
            name = _free_name(key, tree)
            below = f"{path}.{name}"
            tree[name], recipe = take_apart(
                child, aside, below, row_count=row_count, drops_axis=drops_axis
            )
            entries.append([take_aside(key, aside, below), name, recipe])
        return tree, ["dict", *entries]
    if isinstance(value, list) and _are_texts(value, row_count):
        return np.array(value, np.str_), ["texts"]
    if isinstance(value, list | tuple):
        pairs = [
            take_apart(child, aside, f"{path}.{place}", row_count=row_count, drops_axis=drops_axis)
            for place, child in enumerate(value)
        ]
        kind = "list" if isinstance(value, list) else "tuple"
        children = [child for child, _ in pairs]
        recipes = [recipe for _, recipe in pairs]
        return children if kind == "list" else tuple(children), [kind, *recipes]
    if value is None:
        return None, ["none"]
    fitting = _fitting_array(value, row_count, drops_axis)
    if fitting is not None:
        return fitting
    return None, take_aside(value, aside, path)


def put_together(tree: Tree, recipe: Recipe, aside: bytes) -> Any:
    """Make the value again that `take_apart` was given.

    Raises:
        PayloadCorruptError: The recipe does not fit the tree.
    """
    kind, *rest = recipe
    match kind:
        case "array":
            return tree
        case "aside":
            return put_together(None, rest[0], aside)
        case "row":
            return np.asarray(tree)[np.newaxis]
        case "tensor":
            return _as_tensor(tree)
        case "row tensor":
            return _as_tensor(tree)[None]
        case "item":
            return tree.item()
        case "scalar":
            return tree[()]
        case "texts":
            return tree.tolist()
        case "dict":
            present = tree or {}
            return {
                put_together(None, key, aside): put_together(present.get(name), child, aside)
                for key, name, child in rest
            }
        case "list" | "tuple":
            children = tree or [None] * len(rest)
            made = [
                put_together(child, each, aside) for child, each in zip(children, rest, strict=True)
            ]
            return made if kind == "list" else tuple(made)
        case _:
            return _put_aside_together(kind, rest, aside)


def take_aside(value: Any, aside: Aside, path: str) -> Recipe:
    """Make a recipe that needs no tree.

    Raises:
        UnsupportedArrayError: Something in it is of a kind that is never stored; names its path.
    """
    if value is None:
        return ["none"]
    # By type, not by kind: an enumeration's member or a subclass of str would come back as less.
    if type(value) in (*_SCALARS, str):
        return ["value", value]
    if type(value) is bytes:
        return ["bytes", *aside.put(value)]
    if type(value) is complex:
        return ["complex", value.real, value.imag]
    if isinstance(value, np.ndarray):
        return _take_array_aside(value, aside, path)
    if isinstance(value, np.generic):
        return ["scalar of", _take_array_aside(np.asarray(value), aside, path)]
    if is_tensor(value):
        array = value.detach().cpu().numpy()
        return ["tensor of", _take_array_aside(array, aside, path)]
    if isinstance(value, dict):
        pairs = [
            [take_aside(key, aside, path), "", take_aside(child, aside, f"{path}.{key}")]
            for key, child in value.items()
        ]
        return ["dict", *pairs]
    for name, kind in (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            children = [
                take_aside(child, aside, f"{path}.{place}") for place, child in enumerate(value)
            ]
            return [name, *children]
    raise errors.UnsupportedArrayError(
        path,
        f"{type(value).__name__} cannot be stored; make it of arrays, numbers, texts, dicts, lists",
    )


def _put_aside_together(kind: str, rest: Sequence[Any], aside: bytes) -> Any:
    match kind, *rest:
        case "none", *_:
            return None
        case "value", value:
            return value
        case "bytes", start, stop:
            return aside[start:stop]
        case "complex", real, imaginary:
            return complex(real, imaginary)
        case "odd array", type_name, shape, start, stop:
            array = np.frombuffer(aside[start:stop], parse_dtype(type_name))
            return array.reshape(shape).copy()
        case "objects", shape, *recipes:
            objects = np.empty(len(recipes), object)
            objects[:] = [put_together(None, recipe, aside) for recipe in recipes]
            return objects.reshape(shape)
        case "scalar of", recipe:
            return put_together(None, recipe, aside)[()]
        case "tensor of", recipe:
            return _as_tensor(put_together(None, recipe, aside))
        case "set", *recipes:
            return {put_together(None, recipe, aside) for recipe in recipes}
        case "frozenset", *recipes:
            return frozenset(put_together(None, recipe, aside) for recipe in recipes)
    raise errors.PayloadCorruptError(f"a fragment's recipe has a step of no known kind, {kind!r}")


def _fitting_array(
    value: Any, row_count: int | None, drops_axis: bool
) -> tuple[Tree, Recipe] | None:
    """What goes into a tree as it is; None: it does not fit."""
    if is_tensor(value) or type(value) is np.ndarray:
        of_torch = type(value) is not np.ndarray
        if not of_torch and value.dtype.kind not in _PLAIN_KINDS:
            return None
        if row_count is not None and tuple(value.shape[:1]) != (row_count,):
            return None
        name = "tensor" if of_torch else "array"
        if not drops_axis:
            return value, [name]
        return value[0], ["row tensor" if of_torch else "row"]
    if row_count is not None or drops_axis:
        return None  # Numbers have no rows.
    if isinstance(value, np.generic) and value.dtype.kind in _PLAIN_KINDS:
        return np.asarray(value), ["scalar"]
    if type(value) is str and not _loses_its_end(value):
        return np.array(value), ["item"]
    if type(value) in (bool, float) or (type(value) is int and -(2**63) <= value < 2**63):
        return np.array(value), ["item"]
    return None


def _take_array_aside(array: NDArray[Any], aside: Aside, path: str) -> Recipe:
    shape = list(array.shape)
    if array.dtype.kind == "O":
        recipes = [
            take_aside(item, aside, f"{path}.{place}") for place, item in enumerate(array.flat)
        ]
        return ["objects", shape, *recipes]
    if array.dtype.kind not in _PLAIN_KINDS:
        raise errors.UnsupportedArrayError(path, f"dtype {array.dtype} cannot be stored")
    contiguous = np.ascontiguousarray(array)
    return ["odd array", array.dtype.str, shape, *aside.put(contiguous.tobytes())]


def _are_texts(items: Sequence[Any], row_count: int | None) -> bool:
    """Whether a list is stored as one array of text, and comes back from it."""
    return (
        len(items) > 0
        and row_count in (None, len(items))
        and all(type(item) is str and not _loses_its_end(item) for item in items)
    )


def _loses_its_end(text: str) -> bool:
    """Whether numpy, which pads texts with NUL, would take the end of it for padding."""
    return text.endswith("\0")


def _free_name(key: Any, taken: dict[str, Any]) -> str:
    """A text key for the tree: the key itself where it is one, else its text, once."""
    name = str(key)
    while name in taken:
        name += "'"
    return name


def _as_tensor(leaf: Any) -> Any:
    import torch

    return leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(leaf)


def _is_omegaconf(value: Any) -> bool:
    kind = getattr(sys.modules.get("omegaconf"), "DictConfig", None)
    return kind is not None and isinstance(value, kind)
