"""Convert between MineStudio's fragments and Breadbox's, and name stored fragments.

A fragment holds trees of arrays with text keys and a row per step, and no pickles. So a value is
*taken apart* into such a tree, which any learner can read, and a *recipe* to put it together again.
What fits into no tree (texts that end in NUL, object arrays, bytes, numbers among the steps) is in
the recipe: a JSON list that begins with its kind. Nothing in it is ever executed.

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

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model import errors, types
from breadbox.model.fragment import Fragment, Tree
from breadbox.model.trees import map_tree
from breadbox.payload.dtypes import is_tensor, parse_dtype
from breadbox_adapters.minestudio.datatypes import (
    FragmentIndex,
    FragmentMetadata,
    SampleFragment,
    is_dict,
)

Recipe = list[Any]

_LENGTH_BYTES = 8
_PLAIN_KINDS = "?biufcSUmM"
"""Kinds of dtype that payloads can hold: no objects, no records."""


class SideBytes:
    """Bytes beside a tree of arrays, for values that no array can hold."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def put(self, part: bytes) -> list[int]:
        """Keep bytes; return where they start and stop."""
        start = self._size_bytes
        self._parts.append(part)
        self._size_bytes += len(part)
        return [start, self._size_bytes]

    def packed(self, recipe: Mapping[str, Recipe], row_count: int) -> NDArray[np.uint8]:
        """Pack recipes and bytes into one array with a row per step: uint8[row_count, ...]."""
        head = json.dumps(recipe, separators=(",", ":")).encode()
        whole = b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *self._parts])
        width = -(-len(whole) // row_count)
        padded = whole.ljust(width * row_count, b"\0")
        return np.frombuffer(padded, np.uint8).reshape(row_count, width)


def unpack(packed: NDArray[np.uint8]) -> tuple[dict[str, Recipe], bytes]:
    """Undo `SideBytes.packed`: return the recipes, and the bytes aside."""
    whole = np.ascontiguousarray(packed).tobytes()
    stop = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES], "little")
    try:
        recipe = json.loads(whole[_LENGTH_BYTES:stop])
    except ValueError as error:
        raise errors.PayloadCorruptError("a fragment's recipe is not JSON") from error
    return recipe, whole[stop:]


def take_apart(
    value: Any,
    aside: SideBytes,
    path: str,
    *,
    row_count: int | None = None,
    drops_axis: bool = False,
) -> tuple[Tree, Recipe]:
    """Return a value as a tree of arrays, and the recipe that undoes it.

    `aside` gets what fits into no tree. `path` is for `UnsupportedArrayError`. `row_count` is the
    arrays' first axis; `drops_axis` removes that axis, of length 1.
    """
    if is_dict(value):
        tree: dict[str, Any] = {}
        entries = []
        for key, child in value.items():
            name = str(key)
            while name in tree:
                name += "'"
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
    """Return the value that `take_apart` was given, or raise PayloadCorruptError."""

    def made(recipe: Recipe) -> Any:
        return put_together(None, recipe, aside)

    match recipe:
        case ["array"]:
            return tree
        case ["row"]:
            return np.asarray(tree)[np.newaxis]
        case ["tensor"]:
            return _as_tensor(tree)
        case ["row tensor"]:
            return _as_tensor(tree)[None]
        case ["item"]:
            return tree.item()
        case ["scalar"]:
            return tree[()]
        case ["texts"]:
            return tree.tolist()
        case ["dict", *entries]:
            present = tree or {}
            return {
                made(key): put_together(present.get(name), child, aside)
                for key, name, child in entries
            }
        case ["list" | "tuple" as kind, *recipes]:
            children = tree or [None] * len(recipes)
            items = [
                put_together(child, each, aside)
                for child, each in zip(children, recipes, strict=True)
            ]
            return items if kind == "list" else tuple(items)
        case ["none"]:
            return None
        case ["aside", inner]:
            return made(inner)
        case ["value", value]:
            return value
        case ["bytes", start, stop]:
            return aside[start:stop]
        case ["complex", real, imaginary]:
            return complex(real, imaginary)
        case ["odd array", type_name, shape, start, stop]:
            array = np.frombuffer(aside[start:stop], parse_dtype(type_name))
            return array.reshape(shape).copy()
        case ["objects", shape, *recipes]:
            objects = np.empty(len(recipes), object)
            objects[:] = list(map(made, recipes))
            return objects.reshape(shape)
        case ["scalar of", inner]:
            return made(inner)[()]
        case ["tensor of", inner]:
            return _as_tensor(made(inner))
        case ["set", *recipes]:
            return set(map(made, recipes))
        case ["frozenset", *recipes]:
            return frozenset(map(made, recipes))
    raise errors.PayloadCorruptError(
        f"a fragment's recipe has a step of no known kind, {recipe[0]!r}"
    )


def take_aside(value: Any, aside: SideBytes, path: str) -> Recipe:
    """Return a recipe that needs no tree."""
    if value is None:
        return ["none"]
    # By exact type: an enumeration's member or a subclass of str would come back as its base.
    if type(value) in (bool, int, float, str):
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


def _fitting_array(
    value: Any, row_count: int | None, drops_axis: bool
) -> tuple[Tree, Recipe] | None:
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
    if type(value) is str and not value.endswith("\0"):
        return np.array(value), ["item"]
    if type(value) in (bool, float) or (type(value) is int and -(2**63) <= value < 2**63):
        return np.array(value), ["item"]
    return None


def _take_array_aside(array: NDArray[Any], aside: SideBytes, path: str) -> Recipe:
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
    return (
        len(items) > 0
        and row_count in (None, len(items))
        # Numpy pads texts with NUL, and removes them at the end.
        and all(type(item) is str and not item.endswith("\0") for item in items)
    )


def _as_tensor(leaf: Any) -> Any:
    import torch

    return leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(leaf)


EPISODE_UUIDS = "episode_uuids"
"""Name of the extra with the episodes' names: MineStudio's are texts, Breadbox's numbers."""
RECIPE = "minestudio"
"""Name of the extra with the recipe."""
_STEP_DTYPES: Mapping[str, type[np.generic]] = {
    "next_done": np.bool_,
    "reward": np.float32,
    "first": np.bool_,
}


def to_fragment(sample: SampleFragment, metadata: FragmentMetadata) -> Fragment:
    """Make a fragment, sharing arrays; UnsupportedArrayError for what only pickle could store."""
    steps = {name: np.asarray(getattr(sample, name), kind) for name, kind in _STEP_DTYPES.items()}
    next_done = steps["next_done"]
    aside = SideBytes()
    recipe: dict[str, Recipe] = {}

    def apart(name: str, **how: Any) -> Tree:
        tree, recipe[name] = take_apart(getattr(sample, name), aside, name, **how)
        return tree

    fragment = Fragment(
        worker_id=metadata.worker_uuid,
        fragment_index=metadata.fid_in_worker,
        session_id=metadata.session_id,
        model_version_min=metadata.model_version,
        # The newest step's version is unknown; the buffer judges by the oldest.
        model_version_max=metadata.model_version,
        obs=apart("obs", row_count=len(next_done)),
        action=apart("action", row_count=len(next_done)),
        reward=steps["reward"],
        terminated=next_done,
        truncated=np.zeros_like(next_done),
        first=steps["first"],
        episode_id=np.array([_episode_number(name) for name in sample.episode_uuids], np.int64),
        next_obs=apart("next_obs"),
        in_state=apart("in_state", drops_axis=_all_lead_with_one(sample.in_state)),
        extras={EPISODE_UUIDS: np.array([str(name) for name in sample.episode_uuids], np.str_)},
    )
    for name, kind in _STEP_DTYPES.items():
        value = getattr(sample, name)
        if type(value) is not np.ndarray or value.dtype != kind:
            recipe[name] = ["aside", take_aside(value, aside, name)]
    if fragment.extras[EPISODE_UUIDS].tolist() != sample.episode_uuids:
        recipe[EPISODE_UUIDS] = ["aside", take_aside(sample.episode_uuids, aside, EPISODE_UUIDS)]
    fragment.extras[RECIPE] = aside.packed(recipe, len(next_done))
    return fragment


def from_fragment(fragment: Fragment) -> SampleFragment:
    """Make a MineStudio fragment, even of a fragment that another producer wrote."""
    packed = fragment.extras.get(RECIPE)
    names = fragment.extras.get(EPISODE_UUIDS)
    sample = SampleFragment(
        obs=fragment.obs,
        action=fragment.action,
        next_done=fragment.ended,
        reward=fragment.reward,
        first=fragment.first,
        in_state=fragment.in_state,
        worker_uuid=fragment.worker_id,
        fid_in_worker=fragment.fragment_index,
        next_obs=fragment.next_obs,
        episode_uuids=[str(name) for name in (fragment.episode_id if names is None else names)],
    )
    if packed is None:
        sample.in_state = map_tree(lambda leaf: np.asarray(leaf)[np.newaxis], fragment.in_state)
    else:
        recipe, aside = unpack(packed)
        try:
            for name, steps in recipe.items():
                setattr(sample, name, put_together(getattr(sample, name), steps, aside))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise errors.PayloadCorruptError("a fragment's recipe does not fit it") from error
    return sample


def _episode_number(name: str) -> int:
    """Return the same number for the same name, in every process; not negative."""
    digest = hashlib.blake2b(str(name).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _all_lead_with_one(state: Any) -> bool:
    """Return True if all arrays of a recurrent state have a first axis of length 1."""
    if isinstance(state, dict | list | tuple):
        return all(map(_all_lead_with_one, state.values() if isinstance(state, dict) else state))
    return state is None or tuple(getattr(state, "shape", ())[:1]) == (1,)


def named(references: Sequence[types.FragmentReference]) -> list[tuple[FragmentIndex, str]]:
    """Return MineStudio's records: each fragment's index, and the text to load it by."""
    return [
        (
            FragmentIndex(reference.metadata.worker_id, reference.metadata.fragment_index),
            fragment_id_of(reference),
        )
        for reference in references
    ]


def fragment_id_of(reference: types.FragmentReference) -> str:
    """Return the text that names a stored fragment, and suffices to load it in any process."""
    named = asdict(reference)
    del named["body"], named["parts"], named["_newest"]
    return json.dumps(named, separators=(",", ":"))


def reference_of(fragment_id: str) -> types.FragmentReference:
    """Read the text that `fragment_id_of` made, or raise `InvalidRequestError`."""
    try:
        fields = json.loads(fragment_id)
        metadata = fields.pop("metadata")
        payload = types.PayloadReference(**metadata.pop("payload"))
        return types.FragmentReference(
            types.FragmentMetadata(**metadata, payload=payload), **fields
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise errors.InvalidRequestError(
            "fragment_id", "was not returned by fetch_fragments"
        ) from error
