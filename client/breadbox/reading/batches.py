"""Batches: fragments loaded straight into stacked arrays."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from breadbox.model.errors import InvalidRequestError, TreeMismatchError, UnsupportedArrayError
from breadbox.model.fragment import Tree
from breadbox.model.summaries import Summarized, summary
from breadbox.model.trees import (
    Structure,
    check_alike,
    child_path,
    field_of,
    flatten,
    leaves_as,
    map_present,
    map_structure,
    map_tree,
    unflatten,
)
from breadbox.model.types import Device, FragmentReference
from breadbox.payload.alike import UniformPayloads, verify_and_group
from breadbox.payload.dtypes import BFLOAT16, as_leaf, byte_view
from breadbox.payload.format import Head
from breadbox.payload.fragments import (
    FIELDS,
    PER_FRAGMENT_FIELDS,
    Selection,
    check_fields,
    decode_fragment,
)
from breadbox.payload.layout import Layout, StoredArray
from breadbox.payload.memory import empty
from breadbox.payload.receive import Placement, receive
from breadbox.reading.devices import check_device, tensor_of
from breadbox.stores.base import PayloadStore

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeVar

    LeafT = TypeVar("LeafT", default=Any)
else:
    from typing import TypeVar

    LeafT = TypeVar("LeafT")

_STACKED_FIELDS = tuple(name for name in FIELDS if name not in PER_FRAGMENT_FIELDS)

_FINAL_FIELDS = ("final_obs_row", "final_obs_step", "final_obs")

_LEAF_FIELDS = (*_STACKED_FIELDS, "model_version", *_FINAL_FIELDS)

_LENGTHS_REMEDY = (
    "fragments of different lengths do not stack: take them one by one with lease.fragments(), "
    "draw steps from a mirror, or give the buffer the schema `one` (breadbox buffers update)"
)
_SLAB_ALIGNMENT_BYTES = 256
"""Alignment of each array in a page-locked slab: that of a GPU's own allocator."""


@dataclass(slots=True, kw_only=True, repr=False)
class Batch(Summarized, Generic[LeafT]):
    """B fragments, stacked: row b of every leaf belongs to `references[b]`.

    Leaves are numpy arrays (bfloat16: torch tensors) where no device was asked for, else torch
    tensors on the device. Fields that were not read, or that no fragment has, are None.

    Attributes:
        references: In order of the rows; worker, fragment index, session and versions are in their
            metadata.
        obs: Leaves [B, T, ...].
        action: Leaves [B, T, ...].
        reward: float32[B, T].
        terminated: bool[B, T].
        truncated: bool[B, T].
        first: bool[B, T].
        episode_id: int64[B, T].
        next_obs: Leaves [B, ...].
        in_state: Leaves [B, ...]; None for a policy without state.
        log_prob: float32[B, T].
        value: float32[B, T].
        model_version: int64[B, T]; filled in where a fragment has one version only.
        extras: Leaves [B, T, ...].
        final_obs_row: int64[N]; ascending rows of the N known final observations in the batch; None
            when N is 0.
        final_obs_step: int64[N]; the step, within its row, that each of them ended.
        final_obs: Leaves [N, ...]: what those steps really led to, for bootstrapping at time
            limits.
        stacked: The host memory behind the batch, for `load_batch(into=...)`.
    """

    references: tuple[FragmentReference, ...]
    obs: Tree
    action: Tree
    reward: LeafT
    terminated: LeafT
    truncated: LeafT
    first: LeafT
    episode_id: LeafT
    next_obs: Tree
    in_state: Tree = None
    log_prob: LeafT | None = None
    value: LeafT | None = None
    model_version: LeafT | None = None
    extras: Tree = field(default_factory=dict)
    final_obs_row: LeafT | None = None
    final_obs_step: LeafT | None = None
    final_obs: Tree = None
    stacked: "Stack | None" = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.references)

    def _facts(self) -> list[str]:
        return [f"{len(self)} fragments"]

    def _arrays(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _LEAF_FIELDS}

    @property
    def ended(self) -> LeafT:
        """bool[B, T]; terminated or truncated."""
        terminated: Any = self.terminated
        return cast(LeafT, terminated | self.truncated)

    def staleness(self, model_version: int | None = None) -> NDArray[np.int64]:
        """Return int64[B]: the versions between each fragment's oldest step and *model_version*.

        ```python
        if batch.staleness(version).max() <= 4:
            print(batch.reward.mean())
        ```

        `model_version` is the version that trains on the batch, of the batch's session, or None
        for the newest that the client knows, as in `FragmentReference.staleness`. The buffer's
        `staleness_max` bounds the staleness at the grant, not that of a later update.
        """
        return stalenesses(self.references, model_version)

    def to_torch(self, device: Device = "cpu") -> "Batch[torch.Tensor]":
        """Return the batch with torch tensors as leaves; on the CPU they share its memory.

        Raises:
            UnsupportedArrayError: torch has no type for an array, such as text.
            InvalidRequestError: There is no such device.
        """
        return _changed(self, partial(tensor_of, device=device))


@dataclass(slots=True)
class Stack:
    """Host memory for a batch: one array per leaf, [B, ...] in the stored type."""

    structure: Structure
    template: tuple[StoredArray, ...]
    arrays: list[NDArray[Any] | None]
    """None for a leaf that is not stacked."""
    slab: Any = None
    """Page-locked torch tensor that holds all arrays in sequence, or None in ordinary memory."""
    offsets: dict[int, int] = field(default_factory=dict)
    """First byte of each array in the slab."""
    copied: Any = None
    """CUDA event after the last copy from this memory, or None if no copy reads it."""

    def __repr__(self) -> str:
        paths = [stored.name for stored in self.template]
        return summary("Stack", [], dict(zip(paths, self.arrays, strict=True)))

    def fields(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Build the stacked fields of a batch from its leaves, one for each array."""
        fields = {
            name: map_present(leaves.__getitem__, self.structure[name]) for name in _STACKED_FIELDS
        }
        fields["extras"] = fields["extras"] or {}
        return fields

    def pin(self, wanted: Mapping[int, tuple[int, ...]], reusable: "Stack | None" = None) -> None:
        """Lay arrays of these shapes into one page-locked slab, so that one copy moves them."""
        import torch

        slab_bytes = 0
        for index, shape in wanted.items():
            self.offsets[index] = slab_bytes
            slab_bytes += math.prod(shape) * self.template[index].dtype.itemsize
            slab_bytes += -slab_bytes % _SLAB_ALIGNMENT_BYTES
        if reusable is not None and reusable.slab is not None and len(reusable.slab) >= slab_bytes:
            if reusable.copied is not None:
                reusable.copied.synchronize()
            self.slab = reusable.slab
        else:
            self.slab = torch.empty(
                slab_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
            )
        memory = self.slab.numpy()
        for index, shape in wanted.items():
            dtype = self.template[index].dtype
            end = self.offsets[index] + math.prod(shape) * dtype.itemsize
            self.arrays[index] = memory[self.offsets[index] : end].view(dtype).reshape(shape)

    def as_leaves(self) -> list[Any]:
        """Return its arrays as users see them."""
        return [
            None if array is None else as_leaf(array, stored.type_name)
            for array, stored in zip(self.arrays, self.template, strict=True)
        ]

    def copied_to(self, device: Any) -> list[Any]:
        """Return its arrays as tensors on a device, all of them by one copy."""
        import torch

        slab = self.slab.to(device, non_blocking=True)
        if slab.is_cuda:
            event: Any = torch.cuda.Event  # Untyped in torch's stubs.
            self.copied = event()
            self.copied.record(torch.cuda.current_stream(slab.device))

        def leaf(index: int, array: NDArray[Any] | None) -> Any:
            if array is None:
                return None
            bits = slab[self.offsets[index] : self.offsets[index] + array.nbytes]
            return bits.view(_torch_dtype(self.template[index])).view(array.shape)

        return [leaf(index, array) for index, array in enumerate(self.arrays)]


def load_batch(
    store: PayloadStore,
    references: Sequence[FragmentReference],
    *,
    device: Device | None = None,
    columns: Sequence[str] | None = None,
    into: Batch | Stack | None = None,
    is_mapped: bool = False,
) -> Batch:
    """Load fragments into stacked arrays, each received straight into its row.

    None as device gives numpy arrays, "cpu" torch tensors in ordinary memory. For another torch
    device the rows are received into page-locked memory and copied from there once, asynchronously
    on CUDA's current stream. `columns` are paths such as "reward" or "obs.image". `into` is an
    earlier batch, or its `stacked`, whose host memory is used again where it fits: nothing of it on
    the CPU may be in use any more. With `is_mapped` a single fragment on this host, read whole as
    numpy arrays, is returned as views of the store's memory; they outlive the payload, and writing
    to them changes nothing else.

    Raises TreeMismatchError with the path and the fragment, PayloadMissingError (its lease may have
    expired), PayloadCorruptError, UnsupportedArrayError for a type that torch has not, such as
    text, and InvalidRequestError.
    """
    if not references:
        raise InvalidRequestError("references", "must hold at least one fragment")
    check_device(device)
    if is_mapped and device is None and columns is None and len(references) == 1:
        mapped = store.map_many([references[0].metadata.payload])
        if mapped is not None:
            return _mapped_batch(references[0], decode_fragment(mapped[0], references[0]))
    is_elsewhere = device is not None and str(device).partition(":")[0] != "cpu"
    reusable = into.stacked if isinstance(into, Batch) else into
    builder = _Builder(references, Selection(columns), reusable, is_pinned=is_elsewhere)
    payloads = [each.metadata.payload for each in references]
    at_hand = store.at_hand(payloads)
    groups = None if at_hand is None else verify_and_group(at_hand)
    if groups is None:
        wants_whole = columns is None
        receive(
            store, payloads, builder.place, wants_whole=wants_whole, start_over=builder.start_over
        )
    else:
        for group in groups:
            builder.take(group)
    batch = builder.finish()
    if device is None:
        return batch
    return _on_device(batch, device) if is_elsewhere else _as_tensors(batch)


def _mapped_batch(reference: FragmentReference, tree: Tree) -> Batch:
    fields = {name: map_tree(lambda leaf: leaf[None], tree[name]) for name in _STACKED_FIELDS}
    fields["extras"] = fields["extras"] or {}
    versions = tree["model_version"]
    if versions is None:
        step_count = reference.metadata.step_count
        versions = np.full(step_count, reference.metadata.model_version_min, dtype=np.int64)
    batch = Batch(references=(reference,), model_version=versions[None], **fields)
    ends = tree["final_obs_step"]
    if ends is not None and tree["final_obs"] is not None and len(ends):
        batch.final_obs_row = np.zeros(len(ends), dtype=np.int64)
        batch.final_obs_step = ends.astype(np.int64)
        batch.final_obs = tree["final_obs"]
    return batch


class _Stacking(NamedTuple):
    array_index: int
    stacked: NDArray[Any] | None
    memory: memoryview | None
    """Memory of `stacked` as bytes, or None if received bytes are not the elements."""
    row_bytes: int


class _Builder:
    """Find each fragment's place in the stack, which the first one shapes."""

    def __init__(
        self,
        references: Sequence[FragmentReference],
        selection: Selection,
        reusable: Stack | None,
        *,
        is_pinned: bool,
    ) -> None:
        self._references = tuple(references)
        self._selection = selection
        self._reusable = reusable
        self._is_pinned = is_pinned
        self.start_over()

    def start_over(self) -> None:
        """Forget what was placed."""
        self._stack: Stack | None = None
        self._loose: dict[int, dict[str, Any]] = {}
        self._heads: dict[int, Head] = {}
        self._plans: dict[Layout, list[_Stacking]] = {}

    def place(self, position: int, head: Head) -> list[Placement]:
        plan = self._plans.get(head.layout)
        if plan is None:
            plan = self._plans[head.layout] = self._plan(position, head)
        loose: dict[str, Any] = {}
        self._loose[position] = loose
        self._heads[position] = head
        placements = []
        for index, stacked, memory, row_bytes in plan:
            if memory is not None:
                row = memory[position * row_bytes : (position + 1) * row_bytes]
                placements.append(Placement(index, row))
            elif stacked is not None:
                # With the ellipsis a view even where a row is a single number.
                placements.append(Placement(index, stacked[position, ...]))
            else:
                stored = head.layout.arrays[index]
                destination = np.empty(stored.shape, dtype=stored.dtype)
                loose[stored.name] = as_leaf(destination, stored.type_name)
                placements.append(Placement(index, destination))
        return placements

    def take(self, group: UniformPayloads) -> None:
        """Stack payloads that are here, as `place` has them received."""
        head, positions = group.head, group.positions
        rows = slice(None) if len(positions) == len(self._references) else positions
        loose: list[dict[str, Any]] = [{} for _ in positions]
        self._loose.update(zip(positions, loose, strict=True))
        self._heads.update(dict.fromkeys(positions, head))
        for index, stacked, memory, row_bytes in self._plan(positions[0], head):
            if memory is not None and row_bytes:
                every_row = np.frombuffer(memory, np.uint8).reshape(-1, row_bytes)
                every_row[rows] = group.column(index)
            elif stacked is None:
                stored = head.layout.arrays[index]
                arrays = np.empty((len(positions), *stored.shape), stored.dtype)
                byte_view(arrays)[:] = group.column(index).tobytes()
                for leaves, array in zip(loose, arrays, strict=True):
                    leaves[stored.name] = as_leaf(array, stored.type_name)

    def _plan(self, position: int, head: Head) -> list["_Stacking"]:
        check_fields(head.layout.structure)
        selected = self._selection.of(head, self._references[position])
        indexes = [index for index, _, _ in selected]
        if self._stack is None:
            self._stack = self._make_stack(head, indexes)
        rows = self._match(position, head, self._stack)
        plan = []
        for index in indexes:
            stacked = rows.get(index)
            is_raw = head.layout.arrays[index].is_raw
            memory = byte_view(stacked) if stacked is not None and is_raw else None
            row_bytes = 0 if memory is None else len(memory) // len(self._references)
            plan.append(_Stacking(index, stacked, memory, row_bytes))
        return plan

    def finish(self) -> Batch:
        stack = self._stack
        assert stack is not None
        return Batch(
            references=self._references,
            model_version=self._model_versions(),
            stacked=stack,
            **self._final_observations(),
            **stack.fields(stack.as_leaves()),
        )

    def _make_stack(self, head: Head, indexes: Sequence[int]) -> Stack:
        wanted = {
            index: (len(self._references), *head.layout.arrays[index].shape)
            for index in indexes
            if field_of(head.layout.arrays[index].name) not in PER_FRAGMENT_FIELDS
        }
        stack = Stack(head.layout.structure, head.layout.arrays, [None] * len(head.layout.arrays))
        if self._is_pinned:
            stack.pin(wanted, self._reusable)
            return stack
        offered = self._offered()
        for index, shape in wanted.items():
            stored = head.layout.arrays[index]
            array = offered.pop((stored.name, shape, stored.dtype.str), None)
            stack.arrays[index] = empty(shape, stored.dtype) if array is None else array
        return stack

    def _offered(self) -> dict[tuple[str, tuple[int, ...], str], NDArray[Any]]:
        reusable = self._reusable
        if reusable is None or reusable.slab is not None:
            return {}
        return {
            (stored.name, array.shape, array.dtype.str): array
            for stored, array in zip(reusable.template, reusable.arrays, strict=True)
            if array is not None
        }

    def _match(self, position: int, head: Head, stack: Stack) -> dict[int, NDArray[Any]]:
        """Map the fragment's arrays to stacked ones; refuse a fragment that differs."""
        if head.layout.structure == stack.structure and len(head.layout.arrays) == len(
            stack.template
        ):
            numbers = range(len(head.layout.arrays))
            pairs = list(zip(numbers, numbers, strict=True))
        else:
            pairs = self._pair_by_name(position, head, stack)
        rows = {}
        for index, template_index in pairs:
            array = stack.arrays[template_index]
            if array is None:
                continue
            stored, wanted = head.layout.arrays[index], stack.template[template_index]
            if stored.shape != wanted.shape or stored.type_name != wanted.type_name:
                steps_differ = stored.shape[:1] != wanted.shape[:1]
                is_longer = steps_differ and stored.shape[1:] == wanted.shape[1:]
                raise TreeMismatchError(
                    *(stored.name, wanted.describe(), stored.describe(), self._where(position)),
                    remedy=_LENGTHS_REMEDY if is_longer else "",
                )
            rows[index] = array
        return rows

    def _pair_by_name(self, position: int, head: Head, stack: Stack) -> list[tuple[int, int]]:
        """Pair arrays of two structures by name: other parts (None, lists) do not matter."""
        part_read = self._selection.part_read
        by_name = {stored.name: index for index, stored in enumerate(stack.template)}
        if self._names_read(head.layout.arrays) != self._names_read(stack.template):
            for name in _STACKED_FIELDS:
                # What is not read may differ.
                check_alike(
                    part_read(stack.structure[name], stack.template),
                    part_read(head.layout.structure[name], head.layout.arrays),
                    path=name,
                    where=self._where(position),
                )
        return [
            (index, by_name[stored.name])
            for index, stored in enumerate(head.layout.arrays)
            if stored.name in by_name and field_of(stored.name) not in PER_FRAGMENT_FIELDS
        ]

    def _names_read(self, arrays: Sequence[StoredArray]) -> set[str]:
        return {
            stored.name
            for stored in arrays
            if field_of(stored.name) not in PER_FRAGMENT_FIELDS
            and self._selection.reads(stored.name)
        }

    def _model_versions(self) -> NDArray[np.int64] | None:
        """Return int64[B, T] from the fragments or else from metadata."""
        if not self._selection.includes("model_version"):
            return None
        step_counts = [each.metadata.step_count for each in self._references]
        versions = np.empty((len(self._references), step_counts[0]), dtype=np.int64)
        if (
            not any("model_version" in each for each in self._loose.values())
            and len(set(step_counts)) == 1
        ):
            oldest = [each.metadata.model_version_min for each in self._references]
            versions[...] = np.array(oldest, dtype=np.int64)[:, None]
            return versions
        for position, reference in enumerate(self._references):
            stored = self._loose[position].get("model_version")
            row = reference.metadata.model_version_min if stored is None else stored
            if np.shape(row) not in ((), versions.shape[1:]) or step_counts[position] != len(
                versions[position]
            ):
                raise TreeMismatchError(
                    "model_version",
                    f"[{versions.shape[1]}]",
                    f"[{step_counts[position]}]",
                    self._where(position),
                    remedy=_LENGTHS_REMEDY,
                )
            versions[position] = row
        return versions

    def _final_observations(self) -> dict[str, Any]:
        if not self._selection.includes("final_obs"):
            return {}
        rows: list[int] = []
        steps: list[int] = []
        trees: list[tuple[Tree, str]] = []
        for position in range(len(self._references)):
            head, loose = self._heads[position], self._loose[position]
            structure = head.layout.structure["final_obs"]
            if structure is None or head.layout.structure["final_obs_step"] is None:
                continue
            ends = loose["final_obs_step"]
            rows += [position] * len(ends)
            steps += [int(step) for step in ends]
            trees.append((_named(structure, head, loose), self._where(position)))
        if not rows:
            return {}
        return {
            "final_obs_row": np.array(rows, dtype=np.int64),
            "final_obs_step": np.array(steps, dtype=np.int64),
            "final_obs": _joined(trees),
        }

    def _where(self, position: int) -> str:
        metadata = self._references[position].metadata
        return (
            f"fragment {position} of the batch (worker {metadata.worker_id!r}, "
            f"fragment_index {metadata.fragment_index})"
        )


def _named(structure: Structure, head: Head, leaves: Mapping[str, Any]) -> Tree:
    return map_structure(lambda index: leaves.get(head.layout.arrays[index].name), structure)


def _joined(trees: Sequence[tuple[Tree, str]]) -> Tree:
    """Join trees, each with its place, along the first axis, or raise TreeMismatchError."""
    structure, examples = flatten(trees[0][0])
    columns = [leaves_as(structure, tree, path="final_obs", where=where) for tree, where in trees]
    joined: list[Any] = []
    for number, (path, example) in enumerate(examples):
        parts = [leaves[number] for leaves in columns]
        for position, leaf in enumerate(parts):
            if leaf.shape[1:] != example.shape[1:] or leaf.dtype != example.dtype:
                wanted = f"{example.dtype}{[-1, *example.shape[1:]]}"
                got = f"{leaf.dtype}{[-1, *leaf.shape[1:]]}"
                at = child_path("final_obs", path)
                raise TreeMismatchError(at, wanted, got, trees[position][1])
        if isinstance(example, np.ndarray):
            joined.append(np.concatenate(parts))
        else:
            import torch

            joined.append(torch.cat(parts))
    return unflatten(structure, joined)


def stalenesses(
    references: Sequence[FragmentReference], model_version: int | None
) -> NDArray[np.int64]:
    """Return the staleness of each fragment at *model_version*, or now if None, int64[N]."""
    return np.array([each.staleness_at(model_version) for each in references], dtype=np.int64)


def take_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return a copy of some rows, in this order, perhaps repeated; it has no `stacked`."""
    rows = list(rows)
    held: Any = batch.final_obs_row
    known = [] if held is None else held.tolist()  # Ascending.
    first, end = (np.searchsorted(known, rows, side) for side in ("left", "right"))
    finals = [place for span in zip(first, end, strict=True) for place in range(*span)]

    def taken(name: str, places: list[int]) -> Tree:
        return map_tree(lambda leaf: leaf[places], getattr(batch, name))

    leaves = {name: taken(name, rows) for name in (*_STACKED_FIELDS, "model_version")}
    leaves |= {name: taken(name, finals) if finals else None for name in _FINAL_FIELDS}
    if finals:
        moved = np.repeat(np.arange(len(rows)), end - first)
        leaves["final_obs_row"] = moved if type(held) is np.ndarray else held.new_tensor(moved)
    references = tuple([batch.references[row] for row in rows])
    return replace(batch, references=references, stacked=None, **leaves)


def _changed(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    leaves = {name: map_tree(change, getattr(batch, name)) for name in _LEAF_FIELDS}
    return replace(batch, **leaves)


def _as_tensors(batch: Batch) -> Batch:
    stack = batch.stacked
    assert stack is not None
    for stored, array in zip(stack.template, stack.arrays, strict=True):
        if array is not None:
            _torch_dtype(stored)
    return batch.to_torch()


def _on_device(batch: Batch, device: Device) -> Batch:
    stack = batch.stacked
    assert stack is not None
    loose = {
        name: map_tree(partial(tensor_of, device=device), getattr(batch, name))
        for name in ("model_version", "final_obs_row", "final_obs_step", "final_obs")
    }
    return replace(batch, **stack.fields(stack.copied_to(device)), **loose)


def _torch_dtype(stored: StoredArray) -> Any:
    import torch

    if stored.type_name == BFLOAT16:
        return torch.bfloat16
    try:
        return torch.from_numpy(np.empty(0, dtype=stored.dtype)).dtype
    except (TypeError, ValueError):
        raise UnsupportedArrayError(
            stored.name, f"torch has no type for {stored.type_name}; load it without a device"
        ) from None
