"""Convert a space's JSON to samples. Spaces are described, not built: building can execute code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from breadbox.model.trees import Tree, child_path
from breadbox_offline.decoding.dtypes import plain_dtype, plain_shape
from breadbox_offline.errors import SpaceMismatchError, named


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """An array of one shape and dtype (box, discrete, multi-binary and so on)."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


SpaceSpec = LeafSpec | dict[str, Any] | tuple[Any, ...]
"""A leaf, or a dict or tuple of specs."""


def spec_of(space: Any) -> SpaceSpec:
    """Describe a Gymnasium space, or a space as RLlib's recorders write it in a file."""
    if isinstance(space, dict) and isinstance(space.get("space"), str):
        return _spec_of_written(space)
    if isinstance(space, LeafSpec | dict | tuple):
        return space
    branches = getattr(space, "spaces", None)
    if isinstance(branches, Mapping):
        return {str(key): spec_of(branch) for key, branch in branches.items()}
    if isinstance(branches, Sequence):
        return tuple(spec_of(branch) for branch in branches)
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if shape is None or dtype is None:
        raise SpaceMismatchError(f"a {type(space).__name__} space has no fixed structure")
    return LeafSpec(tuple(shape), np.dtype(dtype))


def _spec_of_written(space: Mapping[str, Any]) -> SpaceSpec:
    kind = space.get("space")
    try:
        if kind == "dict":
            return {str(key): _spec_of_written(each) for key, each in space["spaces"].items()}
        if kind == "tuple":
            return tuple(_spec_of_written(each) for each in space["spaces"])
        if kind in ("box", "multi-binary"):
            dtype = plain_dtype(space.get("dtype", "|i1"))
            shape = space.get("shape", space.get("n", ()))
            return LeafSpec(plain_shape([shape] if isinstance(shape, int) else shape), dtype)
        if kind == "discrete":
            return LeafSpec((), np.dtype(np.int64))
        if kind == "multi-discrete":
            shape = plain_shape(space["shape"]) if "shape" in space else (len(space["nvec"]),)
            return LeafSpec(shape, np.dtype(np.int64))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpaceMismatchError(f"a {kind} space is described wrongly: {error}") from error
    raise SpaceMismatchError(f"a space of kind {named(kind)} has no fixed structure, or is unknown")


def composite_spec(space: Any) -> SpaceSpec | None:
    """Describe a space of nested samples, or None for any other: only those are stored as JSON."""
    spec = None if space is None else spec_of(space)
    return None if isinstance(spec, LeafSpec) else spec


def from_jsonable(value: Any, spec: SpaceSpec) -> Tree:
    """Return one sample, given itself or a JSON-able batch of one."""
    return _convert(value, spec, (), "")


def batch_from_jsonable(value: Any, spec: SpaceSpec, count: int) -> Tree:
    """Return a stacked batch of `count` samples, given its JSON-able form."""
    return _convert(value, spec, (count,), "")


def _convert(value: Any, spec: SpaceSpec, batch: tuple[int, ...], path: str) -> Tree:
    if isinstance(spec, LeafSpec):
        return _convert_leaf(value, spec, batch, path)
    if isinstance(spec, dict):
        if not isinstance(value, Mapping) or value.keys() != spec.keys():
            held = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise SpaceMismatchError(f"leaf {path or '(root)'}: {held}, wanted {sorted(spec)}")
        return {
            key: _convert(value[key], branch, batch, child_path(path, key))
            for key, branch in spec.items()
        }
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(spec):
        raise SpaceMismatchError(f"leaf {path or '(root)'}: wanted {len(spec)} entries")
    return tuple(
        _convert(value[index], branch, batch, child_path(path, index))
        for index, branch in enumerate(spec)
    )


def _convert_leaf(value: Any, spec: LeafSpec, batch: tuple[int, ...], path: str) -> Any:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise SpaceMismatchError(f"leaf {path or '(root)'}: {error}") from error
    if not batch and array.shape == (1, *spec.shape):
        array = array[0]
    if array.shape != (*batch, *spec.shape):
        raise SpaceMismatchError(
            f"leaf {path or '(root)'}: shape {array.shape}, wanted {(*batch, *spec.shape)}"
        )
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and spec.dtype.kind in "biu"):
        raise SpaceMismatchError(f"leaf {path or '(root)'}: {array.dtype}, wanted {spec.dtype}")
    return array.astype(spec.dtype)
