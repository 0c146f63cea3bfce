"""Signatures of tables: what the arrays of their items are.

A server keeps the signature of a table as the weights of the table's session, where every client
finds it, whatever may be written into the table by then.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.client import Client
from breadbox.model.types import ModelState
from breadbox_adapters.reverb.structures import (
    children,
    flatten,
    flatten_with_path,
    map_leaves,
    restored,
    stored,
)

_NAME = "signature"
"""Of the only array among the weights of a table's session."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What is known of an array before there is one."""

    dtype: str
    """As numpy names it; "text" of any width."""
    shape: tuple[int | None, ...] | None
    """A length that is None is open; None instead of them: so is how many there are."""

    def fits(self, dtype: str, shape: Sequence[int]) -> bool:
        """Whether an array is of this kind."""
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
    """The arrays of a table's items, in the structure in which the table was given them.

    Args:
        specs: `ArraySpec` as leaves.
    """

    def __init__(self, specs: Any) -> None:
        self.specs = specs
        self._leaves = list(flatten_with_path(specs))

    @classmethod
    def of(cls, tree: Any) -> "Signature":
        """Read what a table is told: leaves with `shape` and `dtype`."""
        return cls(map_leaves(_spec_of, tree))

    def packed(self) -> dict[str, NDArray[Any]]:
        """Write it as weights."""
        text = json.dumps(_plain(stored(self.specs)))
        return {_NAME: np.frombuffer(text.encode(), np.uint8)}

    @classmethod
    def unpacked(cls, weights: Mapping[str, Any]) -> "Signature | None":
        """Read what `packed` wrote, or None of other weights."""
        if _NAME not in weights:
            return None
        return cls(restored(_made(json.loads(bytes(np.asarray(weights[_NAME]))))))

    def require(self, table: str, item: Any, *, is_of_steps: bool) -> None:
        """Refuse an item of other arrays; names of fields do not matter, as in Reverb.

        Args:
            table: Where it is to go.
            item: Arrays [T, ...], or of a column that was squeezed [...].
            is_of_steps: Whether the signature may also be that of each of its steps.

        Raises:
            ValueError: It has another number of arrays, or one of another dtype or shape.
        """
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


def signature_of(client: Client, state: ModelState) -> Signature | None:
    """Return the signature of a table in whose session this is current, or None if it has none."""
    return None if state.weights is None else Signature.unpacked(client.load_weights(state.weights))


def tell_signature(client: Client, table: str, state: ModelState, signature: Signature) -> None:
    """Keep a signature with the session that is current in a table; nothing if it has one."""
    if state.weights is None:
        version = state.model_version or 0
        client.publish(state.session_id, version, signature.packed(), buffer=table)


def _spec_of(leaf: Any) -> ArraySpec:
    shape = getattr(leaf, "shape", ())
    # TensorFlow's shapes of unknown rank cannot be iterated.
    has_rank = getattr(shape, "rank", 0) is not None
    lengths = tuple(None if length is None else int(length) for length in shape) if has_rank else ()
    dtype = getattr(leaf, "dtype", leaf)
    return ArraySpec(
        _name(np.dtype(getattr(dtype, "as_numpy_dtype", dtype))),
        lengths if has_rank else None,
    )


def _name(dtype: np.dtype[Any]) -> str:
    return "text" if dtype.kind in "OSUT" else dtype.name


def _shown(dtype: str, shape: Sequence[int | None] | None) -> str:
    lengths = (
        "..." if shape is None else ", ".join("?" if each is None else str(each) for each in shape)
    )
    return f"{dtype}[{lengths}]"


def _plain(node: Any) -> Any:
    """The structure in what JSON has: a kind, and entries."""
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
