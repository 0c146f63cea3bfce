"""Parts of the members of a grant, joined to the tokens and contexts of their sequences."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from breadbox.model.errors import TreeMismatchError
from breadbox.model.fragment import Sequence as TokenSequence
from breadbox.model.types import FragmentReference
from breadbox.payload.fragments import read_fragments
from breadbox.stores.base import PayloadStore


class PartArrays(NamedTuple):
    """The arrays of all parts of a member, by name."""

    tokens: dict[str, Any]
    context: dict[str, Any]


def load_parts(
    store: PayloadStore, references: Sequence[FragmentReference], columns: Sequence[str] | None
) -> tuple[list[PartArrays], Sequence[str] | None]:
    """Read the parts of members, and return what is left of *columns* for their sequences.

    Raises TreeMismatchError if an array of tokens has not as many rows as its member has tokens.
    """
    flat = [part for each in references for part in each.parts]
    loaded = iter(read_fragments(store, flat) if flat else ())
    parts = []
    for reference in references:
        found = PartArrays({}, {})
        for _ in reference.parts:
            tree = next(loaded)
            found.tokens.update(tree["tokens"])
            found.context.update(tree["arrays"])
        for name, array in found.tokens.items():
            length = reference.metadata.step_count
            if len(array) != length:
                wanted, got = f"[{length}, ...]", str([*array.shape])
                raise TreeMismatchError(f"tokens.{name}", wanted, got, named(reference))
        parts.append(found)
    if columns is None:
        return parts, None
    names = {name for each in parts for arrays in each for name in arrays}
    for arrays in [arrays for each in parts for arrays in each]:
        for name in arrays.keys() - set(columns):
            del arrays[name]
    return parts, [each for each in columns if each not in names]


def named(reference: FragmentReference) -> str:
    """Return the name of a sequence, for messages."""
    metadata = reference.metadata
    return f"member {metadata.fragment_index} of group {metadata.worker_id!r}"


def read_with_parts(
    store: PayloadStore,
    references: Sequence[FragmentReference],
    columns: Sequence[str] | None = None,
    steps: tuple[int, int] | None = None,
    *,
    is_mapped: bool = False,
) -> list[Any]:
    """Do as `read_fragments`, and join parts to the sequences that have some."""
    if not any([each.parts for each in references]):
        return read_fragments(store, references, columns, steps, is_mapped=is_mapped)
    parts, columns = load_parts(store, references, columns)
    read = read_fragments(store, references, columns, steps, is_mapped=is_mapped)
    rows = slice(*(steps or (None,)))
    for sequence, (tokens, context) in zip(read, parts, strict=True):
        if isinstance(sequence, TokenSequence):
            sequence.context = {**sequence.context, **context}
            cut = {name: array[rows] for name, array in tokens.items()}
            sequence.tokens = {**sequence.tokens, **cut}
    return read


def joined(
    references: Sequence[FragmentReference], parts: Sequence[PartArrays], *, is_padded: bool
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the arrays of parts as columns of tokens, and of contexts: None where one lacks.

    Raises TreeMismatchError if only some members have an array of tokens.
    """
    columns: dict[str, Any] = {}
    for name in dict.fromkeys([name for each in parts for name in each.tokens]):
        for reference, each in zip(references, parts, strict=True):
            if name not in each.tokens:
                raise TreeMismatchError(f"tokens.{name}", "an array", "none", named(reference))
        columns[name] = _rows([each.tokens[name] for each in parts], is_padded=is_padded)
    names = dict.fromkeys([name for each in parts for name in each.context])
    return columns, {name: [each.context.get(name) for each in parts] for name in names}


def _rows(arrays: Sequence[Any], *, is_padded: bool) -> Any:
    """Return arrays one behind the other, or each padded with zeros."""
    shape = (len(arrays), max(map(len, arrays)), *arrays[0].shape[1:])
    if isinstance(arrays[0], np.ndarray):
        if not is_padded:
            return np.concatenate(arrays)
        made = np.zeros(shape, arrays[0].dtype)
    else:  # bfloat16, which numpy does not have.
        import torch

        if not is_padded:
            return torch.cat(list(arrays))
        made = arrays[0].new_zeros(shape)
    for place, array in enumerate(arrays):
        made[place, : len(array)] = array
    return made
