"""Sequences of different lengths as one batch: packed one behind the other, or padded."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from breadbox.model.checks import checked_columns
from breadbox.model.errors import InvalidRequestError, TreeMismatchError
from breadbox.model.summaries import Summarized
from breadbox.model.trees import is_within, map_tree
from breadbox.model.types import Device, FragmentReference
from breadbox.payload.dtypes import as_leaf, byte_view
from breadbox.payload.format import Head
from breadbox.payload.fragments import SEQUENCE_FIELDS, are_sequences, check_stored, is_sequence
from breadbox.payload.layout import StoredArray
from breadbox.payload.memory import empty
from breadbox.payload.receive import Placement, receive
from breadbox.payload.unequal import UnequalPayloads
from breadbox.reading.batches import Stack
from breadbox.reading.devices import check_device, tensor_of
from breadbox.reading.parts import PartArrays, joined, load_parts, named
from breadbox.stores.base import PayloadStore

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    LeafT = TypeVar("LeafT", default=Any)
else:
    from typing import TypeVar

    LeafT = TypeVar("LeafT")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SequenceBatch(Summarized, Generic[LeafT]):
    """N sequences; what belongs to all of one is in the order of `references`.

    Leaves are numpy arrays (bfloat16: torch tensors) where no device was asked for, else torch
    tensors on the device.

    Attributes:
        references: In draw order; member, session, versions and staleness are in them.
        position: int64[N]; place of each sequence in the lease's references.
        group: int32[N]; number of each sequence's group, in `groups`. Without `max_tokens` groups
            are whole; a micro-batch may have some of a group's sequences only.
        groups: Names of the groups of this batch.
        numbers: Arrays [N] by name: bool, int64, or float64 with NaN where a sequence has none; a
            list where there are texts, with None. All batches of a lease have the same names and
            types, of which all its sequences decide.
        context: Lists of N leaves by name, of any shapes.
        lengths: int32[N]; tokens of each sequence.
        tokens: Leaves by name.
    """

    references: tuple[FragmentReference, ...]
    position: LeafT
    group: LeafT
    groups: tuple[str, ...]
    numbers: dict[str, LeafT | list[str | None]]
    context: dict[str, list[LeafT]]
    lengths: LeafT
    tokens: dict[str, LeafT]

    def __len__(self) -> int:
        return len(self.references)

    def _facts(self) -> list[str]:
        return [f"{len(self)} sequences"]

    def _arrays(self) -> dict[str, Any]:
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: leaf for name, leaf in named.items() if name not in ("references", "groups")}

    def to(self, device: Device) -> Self:
        """Return the batch with torch tensors on a device; on the CPU they share its memory.

        Raises:
            UnsupportedArrayError: torch has no type for an array, such as text.
            InvalidRequestError: There is no such device.
        """

        def move(leaf: Any) -> Any:
            return tensor_of(leaf, device) if hasattr(leaf, "dtype") else leaf

        return replace(self, **map_tree(move, self._arrays()))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PackedBatch(SequenceBatch[LeafT]):
    """N sequences of `total` tokens, one behind the other, as variable-length attention takes them.

    Leaves of `tokens` are [total, ...]; rows of sequence n are those from `cu_seqlens[n]` to
    `cu_seqlens[n + 1]`.

    Attributes:
        cu_seqlens: int32[N + 1], from 0 to `total`.
        max_seqlen: Tokens of the longest sequence.
        position_ids: int64[total]; place of each token in its sequence, from 0.
    """

    cu_seqlens: LeafT
    max_seqlen: int
    position_ids: LeafT


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PaddedBatch(SequenceBatch[LeafT]):
    """N sequences, each padded at its end with zeros to T, the length of the longest.

    Leaves of `tokens` are [N, T, ...].

    Attributes:
        mask: bool[N, T]; True where there is a token.
    """

    mask: LeafT


_Numbers = NDArray[Any] | list[str | None]
NumbersByName = dict[str, _Numbers]
BatchT = TypeVar("BatchT", bound=SequenceBatch)


def load_sequences(
    kind: type[BatchT],
    store: PayloadStore,
    references: Sequence[FragmentReference],
    *,
    positions: Sequence[int],
    device: Device | None = None,
    columns: Sequence[str] | None = None,
    numbers: NumbersByName | None = None,
) -> BatchT:
    """Load sequences, each received straight into its place in one array per column.

    `positions` are the places of the references in their lease. Empty *positions* ask for a batch
    of no sequence, with columns like those of the references. `columns` are names or paths of
    tokens and contexts, or None for all; `numbers` are those of the lease, or None for those of
    the references. Otherwise as `load_batch`.
    """
    check_device(device)
    is_elsewhere = device is not None and str(device).partition(":")[0] != "cpu"
    parts: list[PartArrays] = []
    if any([each.parts for each in references]):
        parts, columns = load_parts(store, references, columns)
    filled = _Columns(references, columns, is_padded=kind is PaddedBatch, is_pinned=is_elsewhere)
    payloads = [each.metadata.payload for each in references]
    wants_whole = columns is None
    place, again, take = filled.place, filled.start_over, filled.take
    receive(store, payloads, place, wants_whole=wants_whole, start_over=again, take=take)
    tokens, context = filled.finish(device)
    if parts:
        more = joined(references, parts, is_padded=kind is PaddedBatch)
        tokens, context = tokens | more[0], context | more[1]
    of_all = numbers_of(references) if numbers is None else numbers
    if not positions:
        none = (slice(0),) * (2 if kind is PaddedBatch else 1)
        tokens = {name: leaf[none] for name, leaf in tokens.items()}
        references, context = (), {name: [] for name in context}
    places = range(len(references)) if numbers is None else positions
    known = _of_sequences(references, positions)
    known["numbers"] = {name: _rows(column, places) for name, column in of_all.items()}
    known |= _of_tokens(kind, known["lengths"])
    batch = kind(tokens=tokens, context=context, **known)
    return batch if device is None else batch.to(device)


class _Place(NamedTuple):
    """Where an array of each payload of a layout goes."""

    array_index: int
    name: str
    column: NDArray[Any] | None
    """The rows of all sequences, one behind the other, or None for a context."""
    memory: memoryview
    """Memory of the column as bytes; empty if received bytes are not the elements."""
    row_bytes: int
    """Bytes of a row of the column: of one token."""


class _Columns:
    """Find each sequence's place in one array per column, which the first sequence shapes."""

    def __init__(
        self,
        references: Sequence[FragmentReference],
        columns: Sequence[str] | None,
        *,
        is_padded: bool,
        is_pinned: bool,
    ) -> None:
        self._references = tuple(references)
        self._columns = checked_columns(columns)
        self._is_padded = is_padded
        self._is_pinned = is_pinned
        self._lengths = [each.metadata.step_count for each in references]
        self._starts = [*accumulate(self._lengths, initial=0)]
        """First row of each sequence, and the number of rows."""
        if is_padded:
            longest = max(self._lengths)
            self._starts = [*range(0, longest * len(self._starts), longest)]
        self.start_over()

    def start_over(self) -> None:
        """Forget what was placed."""
        self._stack: Stack | None = None
        self._context: dict[str, list[Any]] = {}
        self._plans: dict[bytes, list[_Place]] = {}
        """Places of the arrays of a payload, by its layout with open axes."""

    def place(self, position: int, head: Head) -> list[Placement]:
        plan = self._plan_of(position, head)
        first = self._starts[position]
        end = first + self._lengths[position]
        placements = []
        for index, name, column, memory, row_bytes in plan:
            if column is None:
                stored = head.layout.arrays[index]
                context = np.empty(stored.shape, stored.dtype)
                self._context[name][position] = as_leaf(context, stored.type_name)
                placements.append(Placement(index, context))
            elif memory:
                placements.append(Placement(index, memory[first * row_bytes : end * row_bytes]))
            else:
                placements.append(Placement(index, column[first:end]))
        return placements

    def take(self, group: UnequalPayloads) -> bool:
        """Copy sequences into place, or return False if one of them is to be placed for itself."""
        if not are_sequences(group, [self._lengths[position] for position in group.positions]):
            return False
        plan = self._plan_of(group.positions[0], group.head)
        for row, position in enumerate(group.positions):
            for index, name, column, memory, row_bytes in plan:
                if column is None:
                    type_name = group.head.layout.arrays[index].type_name
                    self._context[name][position] = as_leaf(group.copied(row, index), type_name)
                else:
                    start, array = self._starts[position] * row_bytes, group.arrays[row][index]
                    memory[start : start + len(array)] = array
        return True

    def _plan_of(self, position: int, head: Head) -> list[_Place]:
        check_stored(head.layout, self._lengths[position])
        plan = self._plans.get(head.layout.raw)
        if plan is None:
            plan = self._plans[head.layout.raw] = self._plan(position, head)
        return plan

    def _plan(self, position: int, head: Head) -> list[_Place]:
        if not is_sequence(head.layout.structure):
            raise InvalidRequestError(
                "references", "name fragments of steps: take them by lease.batches()"
            )
        tokens, context = [self._wanted(head, part) for part in SEQUENCE_FIELDS]
        if self._stack is None:
            self._stack = self._shaped(head, tokens)
            self._tokens = tokens
            self._context = {name: [None] * len(self._references) for name in context}
        if tokens.keys() != self._tokens.keys() or context.keys() != self._context.keys():
            wanted, got = sorted({*self._tokens, *self._context}), sorted({*tokens, *context})
            raise self._mismatch("", f"arrays {wanted}", f"arrays {got}", position)
        plan = [_Place(index, name, None, memoryview(b""), 0) for name, index in context.items()]
        for name, index in tokens.items():
            stored, like = head.layout.arrays[index], self._stack.template[self._tokens[name]]
            if (stored.type_name, stored.shape[1:]) != (like.type_name, like.shape[1:]):
                raise self._mismatch(stored.name, like.describe(), stored.describe(), position)
            column = self._stack.arrays[self._tokens[name]]
            assert column is not None
            memory = byte_view(column) if stored.is_raw else memoryview(b"")
            row_bytes = len(memory) // self._starts[-1]
            plan.append(_Place(index, name, column, memory, row_bytes))
        return plan

    def _wanted(self, head: Head, part: str) -> dict[str, int]:
        """Return the indexes of the arrays to read, by name."""
        columns, arrays = self._columns, head.layout.arrays
        return {
            name: index
            for name, index in head.layout.structure[part].items()
            if columns is None or any([_is_in(name, arrays[index], each) for each in columns])
        }

    def _shaped(self, head: Head, tokens: Mapping[str, int]) -> Stack:
        arrays, structure = head.layout.arrays, head.layout.structure
        named = [(n, arrays[at]) for part in SEQUENCE_FIELDS for n, at in structure[part].items()]
        for column in self._columns or ():
            if not any([_is_in(*each, column) for each in named]):
                known = ", ".join([each.name for each in arrays])[:500]
                raise InvalidRequestError("columns", f"{column!r} is none of {known}")
        stack = Stack(structure, arrays, [None] * len(arrays))
        shapes = {index: (self._starts[-1], *arrays[index].shape[1:]) for index in tokens.values()}
        if self._is_pinned:
            stack.pin(shapes)
        else:
            for index, shape in shapes.items():
                stack.arrays[index] = empty(shape, arrays[index].dtype)
        return stack

    def _mismatch(self, path: str, wanted: str, got: str, position: int) -> TreeMismatchError:
        return TreeMismatchError(path, wanted, got, named(self._references[position]))

    def finish(self, device: Device | None) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """Return tokens and contexts by name, on a device other than the CPU or as in memory."""
        stack = self._stack
        assert stack is not None
        if self._is_padded:
            for array in [each for each in stack.arrays if each is not None]:
                for number, length in enumerate(self._lengths):
                    array[self._starts[number] + length : self._starts[number + 1]] = 0
        leaves = stack.as_leaves() if stack.slab is None else stack.copied_to(device)
        tokens = {name: leaves[index] for name, index in self._tokens.items()}
        if self._is_padded:
            rows = (len(self._lengths), max(self._lengths))
            tokens = {name: leaf.reshape(*rows, *leaf.shape[1:]) for name, leaf in tokens.items()}
        return tokens, self._context


def _is_in(name: str, stored: StoredArray, column: str) -> bool:
    return name == column or is_within(stored.name, column)


def _of_sequences(
    references: Sequence[FragmentReference], positions: Sequence[int]
) -> dict[str, Any]:
    """Return what metadata say of sequences."""
    metadata = [each.metadata for each in references]
    groups: dict[str, int] = {}
    group = [groups.setdefault(each.worker_id, len(groups)) for each in metadata]
    return {
        "references": tuple(references),
        "position": np.array(positions, np.int64),
        "group": np.array(group, np.int32),
        "groups": tuple(groups),
        "lengths": np.array([each.step_count for each in metadata], np.int32),
    }


def numbers_of(references: Sequence[FragmentReference]) -> NumbersByName:
    """Return the numbers of sequences as columns, of types that take those of all of them."""
    numbers = [each.metadata.numbers for each in references]
    names = dict.fromkeys([name for each in numbers for name in each])
    return {name: _joined([each.get(name) for each in numbers]) for name in names}


def _rows(column: _Numbers, places: Sequence[int]) -> _Numbers:
    return [column[place] for place in places] if isinstance(column, list) else column[places]


def _joined(values: list[Any]) -> _Numbers:
    if any([isinstance(each, str) for each in values]):
        return values
    return np.array([math.nan if each is None else each for each in values])


def _of_tokens(kind: type[SequenceBatch], lengths: NDArray[np.int32]) -> dict[str, Any]:
    """Return what lengths say of tokens."""
    longest = int(lengths.max(initial=0))
    places = np.arange(longest)
    if kind is PaddedBatch:
        return {"mask": places < lengths[:, None]}
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    position_ids = np.empty(ends[-1], np.int64)
    first = 0
    for end, length in zip(ends[1:].tolist(), lengths.tolist(), strict=True):
        position_ids[first:end] = places[:length]
        first = end
    return {"cu_seqlens": ends, "max_seqlen": longest, "position_ids": position_ids}
