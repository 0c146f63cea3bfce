"""Fragments and sequences as payloads: which trees they are stored as, and how parts are read."""

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from breadbox.model.checks import check_whole, checked_columns
from breadbox.model.errors import InvalidRequestError, PayloadCorruptError, TreeMismatchError
from breadbox.model.fragment import ARRAY_FIELDS, METADATA_FIELDS, Fragment, Part, Sendable
from breadbox.model.fragment import Sequence as TokenSequence
from breadbox.model.trees import Structure, field_of, is_within, map_present, map_tree, rows
from breadbox.model.types import ArrayType, FragmentReference, PayloadReference
from breadbox.payload.alike import verify_and_group
from breadbox.payload.codecs import Codecs
from breadbox.payload.dtypes import BFLOAT16, as_leaf
from breadbox.payload.format import Head, decode_tree, encode_with_layout
from breadbox.payload.layout import Layout, StoredArray, serialize_attributes
from breadbox.payload.memory import empty
from breadbox.payload.receive import Placement, receive
from breadbox.payload.unequal import UnequalPayloads, verify_unequal
from breadbox.stores.base import PayloadStore
from breadbox.v1 import schema_pb2
from breadbox.wire.numbers import to_text
from breadbox.wire.schemas import SCHEMA_ARRAYS_MAX, SCHEMA_BYTES_MAX, hash_of, message_of

_log = logging.getLogger(__name__)

WHOLE_FIELDS: Final = ("next_obs", "in_state", "final_obs_step", "final_obs")
"""Fields that belong to the fragment, not to its steps."""
STEP_FIELDS: Final = tuple(name for name in ARRAY_FIELDS if name not in WHOLE_FIELDS)
"""Fields whose leaves are [T, ...]."""
FIELDS: Final = (*STEP_FIELDS, *WHOLE_FIELDS)
_ROW_FIELDS: Final = frozenset({*STEP_FIELDS, "tokens"})
"""Fields of fragments and sequences with a row for each step or token."""

PER_FRAGMENT_FIELDS: Final = frozenset({"final_obs_step", "final_obs", "model_version"})
"""Fields that one fragment of a batch may have and another not, or in another length."""
_KINDS_OF_FIELD: Final = {
    "reward": "biuf",
    "terminated": "biu",
    "truncated": "biu",
    "first": "biu",
    "episode_id": "iu",
    "log_prob": "biuf",
    "value": "biuf",
    "model_version": "iu",
    "final_obs_step": "iu",
}
"""Fields that are one array of a row each, or absent; and numpy's kinds in them."""
_REQUIRED_FIELDS: Final = ("reward", "terminated", "truncated", "first", "episode_id")
SEQUENCE_FIELDS: Final[Mapping[str, int | None]] = {"tokens": 1, "context": None}
"""Fields of a sequence, and how many leading axes of their arrays its layout leaves open."""
PART_FIELDS: Final[Mapping[str, int | None]] = {"tokens": 1, "arrays": None}
"""The same for a part of a member."""
_KINDS: Final = {Fragment: "fragment", TokenSequence: "sequence", Part: "part"}
_IMAGE_SIDE_MIN: Final = 16
_fields_of = attrgetter(*FIELDS)


def fragment_tree(fragment: Fragment) -> dict[str, Any]:
    """Return the tree that a fragment is stored as: its array fields by name."""
    tree = dict(zip(FIELDS, _fields_of(fragment), strict=True))
    if isinstance(fragment.extras, dict) and not fragment.extras:
        tree["extras"] = None
    return tree


def fragment_attributes(fragment: Sendable) -> bytes:
    """Return what a payload says about where it belongs, for inspection."""
    try:
        return _attributes(fragment)
    except TypeError as error:
        is_sequence = not isinstance(fragment, Fragment)
        check_whole("member" if is_sequence else "fragment_index", fragment.fragment_index, 0)
        named = {"group" if is_sequence else "worker_id": fragment.worker_id}
        for name, value in (named | {"session_id": fragment.session_id}).items():
            if not isinstance(value, str):
                raise InvalidRequestError(name, f"must be text, got {value!r:.100}") from error
        raise


def _attributes(fragment: Sendable) -> bytes:
    # Two maps of protobuf joined are one: most of it is the same in many fragments, and the rest is
    # an entry of this key, whose lengths are a byte each.
    index = b"%d" % fragment.fragment_index
    entry = b"\n\x0efragment_index\x12%c%b" % (len(index), index)
    kind = next(kind for its_type, kind in _KINDS.items() if isinstance(fragment, its_type))
    return _fixed_attributes(
        kind, fragment.worker_id, fragment.session_id, str(fragment.model_version_min)
    ) + b"\n%c%b" % (len(entry), entry)


@lru_cache(maxsize=1024)
def _fixed_attributes(kind: str, worker_id: str, session_id: str, model_version: str) -> bytes:
    return serialize_attributes(
        {
            "kind": kind,
            "worker_id": worker_id,
            "session_id": session_id,
            "model_version": model_version,
        }
    )


def encode_fragment(fragment: Sendable, *, codecs: Codecs = "raw") -> list[memoryview]:
    """Encode a fragment, sequence or part. See `encode_tree` about whose memory the buffers are."""
    return _encode(fragment, codecs)[1]


def _encode(fragment: Sendable, codecs: Codecs) -> tuple[Layout, list[memoryview]]:
    attributes = fragment_attributes(fragment)
    if not isinstance(fragment, Fragment):
        leading = PART_FIELDS if isinstance(fragment, Part) else SEQUENCE_FIELDS
        tree = {name: getattr(fragment, name) for name in leading}
        return encode_with_layout(tree, attributes=attributes, codecs=codecs, leading=leading)
    layout, buffers = encode_with_layout(
        fragment_tree(fragment), attributes=attributes, codecs=codecs
    )
    try:
        _check_layout(layout, fragment.step_count)
    except TreeMismatchError as error:
        where = f"worker {fragment.worker_id!r}, fragment {fragment.fragment_index}"
        raise TreeMismatchError(error.path, error.wanted, error.got, where) from None
    return layout, buffers


def write_fragments(
    store: PayloadStore, fragments: Sequence[Sendable], *, codecs: Codecs = "raw"
) -> list[PayloadReference]:
    """Write fragments to a store, unannounced, once all are encoded and checked; all or none."""
    return store.write_many([encode_fragment(each, codecs=codecs) for each in fragments])


class Schema(NamedTuple):
    """The arrays of a fragment that a learner stacks, as declared to the server."""

    hash: int
    message: schema_pb2.Schema | None
    """None for a part: its hash is that of its bytes, or of its numbers if it has no arrays."""


class Written(NamedTuple):
    """A fragment with a payload that is written, or inline in its announcement."""

    payload: PayloadReference | None
    """Reference of the written payload, or None if it is inline."""
    schema: Schema | None
    """Schema of the fragment, or None if it is too large to be declared."""
    body: bytes = b""
    """The payload if it is inline, or empty."""


def write_and_describe(
    store: PayloadStore | None,
    fragments: Sequence[Sendable],
    *,
    codecs: Codecs = "raw",
    inline_size_bytes_max: int = 0,
) -> list[Written]:
    """Do as `write_fragments`, return schemas too, and payloads that are to be sent inline.

    Without a store return [] if a payload is not to be sent inline.
    """
    encoded = [_encode_and_describe(each, codecs) for each in fragments]
    written = [_inline(*each, inline_size_bytes_max) for each in encoded]
    to_store = [
        buffers for each, (_, buffers) in zip(written, encoded, strict=True) if each is None
    ]
    if to_store and store is None:
        return []
    payloads = iter(store.write_many(to_store) if to_store and store else ())
    return [
        each or Written(next(payloads), schema)
        for each, (schema, _) in zip(written, encoded, strict=True)
    ]


def _encode_and_describe(
    fragment: Sendable, codecs: Codecs
) -> tuple[Schema | None, list[memoryview]]:
    if isinstance(fragment, Part) and not fragment.name:
        return None, []
    layout, buffers = _encode(fragment, codecs)
    if not isinstance(fragment, Part):
        return schema_of(layout), buffers
    digest = xxhash.xxh3_64()
    for each in buffers:
        digest.update(each)
    if not fragment.has_arrays:
        digest.update(to_text(dict(sorted(fragment.numbers.items()))).encode())
    return Schema(digest.intdigest(), None), buffers


def _inline(
    schema: Schema | None, buffers: Sequence[memoryview], inline_size_bytes_max: int
) -> Written | None:
    if sum(map(len, buffers)) > inline_size_bytes_max:
        return None
    return Written(None, schema, b"".join(buffers))


@lru_cache(maxsize=64)
def schema_of(layout: Layout) -> Schema | None:
    """Return the schema of fragments of a layout, or None if it is too large to be declared."""
    arrays = []
    for stored in layout.arrays:
        name = field_of(stored.name)
        if name not in PER_FRAGMENT_FIELDS:
            shape = stored.shape[1:] if name in _ROW_FIELDS else stored.shape
            arrays.append((stored.name, stored.type_name, shape))
    message = message_of(arrays)
    if len(arrays) > SCHEMA_ARRAYS_MAX or message.ByteSize() > SCHEMA_BYTES_MAX:
        return None
    return Schema(hash_of(message), message)


def read_fragments(
    store: PayloadStore,
    references: Sequence[FragmentReference],
    columns: Sequence[str] | None = None,
    steps: tuple[int, int] | None = None,
    *,
    is_mapped: bool = False,
) -> list[Any]:
    """Read fragments and sequences, or parts of them, as what they were appended as.

    `columns` are paths such as "reward" or "obs.image", each for everything below it; other fields
    are None. `steps` reads [first, last) of each fragment: `in_state` is None then unless `first`
    is 0, `next_obs` is the observation at `last` if `obs` is read too, and a compressed array is
    moved whole. With `is_mapped` the result, if all is read from this host, is views of the store's
    memory, which outlive the payload; writes into them are private.

    Raises PayloadMissingError (its lease may have expired), PayloadCorruptError, and
    InvalidRequestError for a column in no fragment, or steps out of range.
    """
    if is_mapped and columns is None and steps is None:
        mapped = store.map_many([each.metadata.payload for each in references])
        if mapped is not None:
            return [
                _stored_of(reference, decode_stored(view, reference))
                for reference, view in zip(references, mapped, strict=True)
            ]
    selection = Selection(columns, steps)
    read: dict[int, tuple[Head, dict[int, Any]]] = {}

    def place(position: int, head: Head) -> list[Placement]:
        placements = [
            Placement(index, empty(shape, head.layout.arrays[index].dtype), rows)
            for index, shape, rows in selection.of(head, references[position])
        ]
        read[position] = (head, {each.array_index: each.destination for each in placements})
        return placements

    def take(group: UnequalPayloads) -> bool:
        steps = [references[position].metadata.step_count for position in group.positions]
        if not (wants_whole and are_sequences(group, steps)):
            return False
        for row, position in enumerate(group.positions):
            arrays = {index: group.copied(row, index) for index in range(len(group.shapes))}
            read[position] = (group.head, arrays)
        return True

    payloads = [each.metadata.payload for each in references]
    wants_whole = columns is None and steps is None
    at_hand = store.at_hand(payloads) if wants_whole else None
    groups = None if at_hand is None else verify_and_group(at_hand)
    if groups is None:
        views = {at: memoryview(body) for at, body in enumerate(at_hand or ())}
        for unequal in verify_unequal(views):
            take(unequal)
        if len(read) < len(references):
            receive(store, payloads, place, wants_whole=wants_whole, take=take)
    else:
        for group in groups:
            head = group.head
            places = list(zip(head.layout.arrays, head.places.offsets, strict=True))
            for position, body in zip(group.positions, group.bodies, strict=True):
                check_stored(head.layout, references[position].metadata.step_count)
                # Each fragment's own, so that one does not keep the others in memory.
                own = body.copy()
                arrays = [np.ndarray(at.shape, at.dtype, own, offset) for at, offset in places]
                read[position] = (head, dict(enumerate(arrays)))
    return [
        _stored_of(reference, selection.tree(*read[position], reference))
        for position, reference in enumerate(references)
    ]


def describe_arrays(
    store: PayloadStore, references: Sequence[FragmentReference]
) -> list[dict[str, ArrayType]]:
    """Return type and shape of each array of fragments, by path; no array is read."""
    described: list[dict[str, ArrayType]] = [{} for _ in references]

    def place(position: int, head: Head) -> Sequence[Placement]:
        check_stored(head.layout, references[position].metadata.step_count)
        described[position] = {
            stored.name: ArrayType(stored.type_name, stored.shape) for stored in head.layout.arrays
        }
        return ()

    receive(store, [each.metadata.payload for each in references], place, wants_whole=False)
    return described


class Selection:
    """Which arrays of a fragment are read, and which rows of them."""

    def __init__(
        self, columns: Sequence[str] | None = None, steps: tuple[int, int] | None = None
    ) -> None:
        try:
            is_right = steps is None or 0 <= steps[0] < steps[1]
        except (TypeError, LookupError):
            is_right = False
        if not is_right:
            raise InvalidRequestError("steps", f"must be [a, b) with 0 <= a < b, not {steps!r}")
        self._columns = checked_columns(columns)
        if self._columns and any(each.startswith("final_obs") for each in self._columns):
            # It maps final observations to their steps.
            self._columns = (*self._columns, "final_obs_step")
        self._steps = steps

    def includes(self, field_name: str) -> bool:
        """Return whether a field of `Fragment`, or a part of it, is read."""
        return self._columns is None or any(
            field_of(column) == field_name for column in self._columns
        )

    def of(
        self, head: Head, reference: FragmentReference
    ) -> list[tuple[int, tuple[int, ...], tuple[int, int] | None]]:
        """List the arrays to read, as (index, shape to read, rows or None for all)."""
        check_stored(head.layout, reference.metadata.step_count)
        steps = self._steps
        if steps is not None and steps[1] > reference.metadata.step_count:
            raise InvalidRequestError(
                "steps", f"{steps}: the fragment has {reference.metadata.step_count} steps"
            )
        unmatched = set(self._columns or ())
        selected = []
        for index, stored in enumerate(head.layout.arrays):
            matched = self._matching(stored.name)
            if matched is None:
                continue
            unmatched -= matched
            rows = self._rows(stored, reference)
            shape = stored.shape if rows is None else (rows[1] - rows[0], *stored.shape[1:])
            selected.append((index, shape, rows))
        for column in unmatched:
            # A field that is stored as None is known, and simply None.
            if column not in head.layout.structure:
                known = ", ".join(each.name for each in head.layout.arrays)
                raise InvalidRequestError("columns", f"{column!r} is none of {known[:500]}")
        return selected

    def tree(
        self, head: Head, arrays: Mapping[int, Any], reference: FragmentReference
    ) -> dict[str, Any]:
        """Return the tree of what was read, by array index, with None for the rest."""

        def leaf(index: int) -> Any:
            if index not in arrays:
                return None
            return as_leaf(arrays[index], head.layout.arrays[index].type_name)

        tree = {name: map_present(leaf, node) for name, node in head.layout.structure.items()}
        if self._steps is not None and "obs" in tree:
            _cut_to_steps(tree, self._steps, reference.metadata.step_count)
        return tree

    def part_read(self, structure: Structure, arrays: Sequence[StoredArray]) -> Structure:
        """Return the part of a structure over *arrays* that is read, or None if nothing is."""
        if self._columns is None or structure is None:
            return structure
        if isinstance(structure, dict):
            parts = {key: self.part_read(node, arrays) for key, node in structure.items()}
            return {key: part for key, part in parts.items() if part is not None} or None
        if isinstance(structure, list | tuple):
            items = [self.part_read(node, arrays) for node in structure]
            return type(structure)(items) if any(item is not None for item in items) else None
        return None if self._matching(arrays[structure].name) is None else structure

    def reads(self, name: str) -> bool:
        """Return whether the array of this name is read."""
        return self._matching(name) is not None

    def _matching(self, name: str) -> set[str] | None:
        if self._columns is None:
            return set()
        matched = {column for column in self._columns if is_within(name, column)}
        return matched or None

    def _rows(self, stored: StoredArray, reference: FragmentReference) -> tuple[int, int] | None:
        if self._steps is None or field_of(stored.name) not in _ROW_FIELDS:
            return None
        if not stored.shape or stored.shape[0] != reference.metadata.step_count:
            raise PayloadCorruptError(
                f"array {stored.name!r} of {stored.describe()} does not have one row per step"
            )
        first, last = self._steps
        if field_of(stored.name) == "obs" and last < stored.shape[0]:
            last += 1  # The observation behind the slice becomes its next_obs.
        return first, last


def _cut_to_steps(tree: dict[str, Any], steps: tuple[int, int], step_count: int) -> None:
    first, last = steps
    if first > 0:
        tree["in_state"] = None
    if last < step_count:
        tree["next_obs"] = map_tree(lambda leaf: leaf[-1], tree["obs"])
        tree["obs"] = rows(tree["obs"], None, -1)
    ends = tree["final_obs_step"]
    if ends is not None:
        kept = (ends >= first) & (ends < last)
        tree["final_obs_step"] = ends[kept] - np.int32(first)
        tree["final_obs"] = map_tree(lambda leaf: leaf[kept], tree["final_obs"])


def check_fields(tree: Any) -> dict[str, Any]:
    """Return a tree, or structure, of a fragment; raise an error for another."""
    if is_sequence(tree):
        raise InvalidRequestError(
            "references", "name sequences, which do not stack: take them by lease.sequences()"
        )
    if not isinstance(tree, dict) or tree.keys() != set(FIELDS):
        raise PayloadCorruptError("the payload is not a fragment's")
    return tree


def is_sequence(tree: Any) -> bool:
    """Return whether a tree, or structure, is that of a sequence."""
    return isinstance(tree, dict) and tree.keys() == SEQUENCE_FIELDS.keys()


def is_part(tree: Any) -> bool:
    """Return whether a tree, or structure, is that of a part of a member."""
    return isinstance(tree, dict) and tree.keys() == PART_FIELDS.keys()


def are_sequences(group: UnequalPayloads, lengths: Sequence[int]) -> bool:
    """Return whether payloads are sequences of so many tokens, and of columns of one shape."""
    layout = group.head.layout
    if not is_sequence(layout.structure):
        return False
    check_stored(layout, lengths[0])
    columns = [(group.shapes[at], layout.arrays[at]) for at in layout.structure["tokens"].values()]
    return all([(got == [(n, *it.shape[1:]) for n in lengths]).all() for got, it in columns])


def check_stored(layout: Layout, step_count: int) -> None:
    """Refuse a layout that is no part's, fragment's or sequence's of so many steps or tokens."""
    if is_part(layout.structure):
        if not all(isinstance(named, dict) for named in layout.structure.values()):
            raise PayloadCorruptError("a part's arrays have no names")
        return
    if not is_sequence(layout.structure):
        check_fragment(layout, step_count)
        return
    if not all(isinstance(named, dict) for named in layout.structure.values()):
        raise PayloadCorruptError("a sequence's arrays have no names")
    for index in layout.structure["tokens"].values():
        stored = layout.arrays[index]
        if stored.shape[:1] != (step_count,):
            raise PayloadCorruptError(
                f"array {stored.name!r} of {stored.describe()} does not have {step_count} rows"
            )


@lru_cache(maxsize=64)
def check_fragment(layout: Layout, step_count: int) -> None:
    """Refuse a layout that cannot be that of a fragment of so many steps."""
    structure = check_fields(layout.structure)
    for name in _REQUIRED_FIELDS:
        if structure[name] is None:
            raise PayloadCorruptError(f"a fragment has no {name}")
    if not isinstance(structure["extras"], dict | None):
        raise PayloadCorruptError("a fragment's extras have no names")
    for name, kinds in _KINDS_OF_FIELD.items():
        number = structure[name]
        if number is None:
            continue
        if not isinstance(number, int) or len(layout.arrays[number].shape) != 1:
            raise PayloadCorruptError(f"a fragment's {name} is not an array of one axis")
        stored = layout.arrays[number]
        if stored.dtype.kind not in kinds or (stored.type_name == BFLOAT16 and kinds[-1] != "f"):
            raise PayloadCorruptError(f"a fragment's {name} is of type {stored.type_name}")
    ends = structure["final_obs_step"]
    rows = dict.fromkeys(STEP_FIELDS, step_count)
    if ends is not None:
        rows["final_obs"] = layout.arrays[ends].shape[0]
    for stored in layout.arrays:
        wanted = rows.get(field_of(stored.name))
        if wanted is not None and stored.shape[:1] != (wanted,):
            raise PayloadCorruptError(
                f"array {stored.name!r} of {stored.describe()} does not have {wanted} rows"
            )


def decode_stored(payload: memoryview, reference: FragmentReference) -> dict[str, Any]:
    """Decode the payload of a fragment or sequence, and verify it; see `decode_tree`."""
    step_count = reference.metadata.step_count
    tree, _ = decode_tree(payload, check=lambda layout: check_stored(layout, step_count))
    decoded: dict[str, Any] = tree
    return decoded


def decode_fragment(payload: memoryview, reference: FragmentReference) -> dict[str, Any]:
    """Decode a fragment's payload, and verify it; see `decode_tree`."""
    return check_fields(decode_stored(payload, reference))


def _stored_of(
    reference: FragmentReference, tree: dict[str, Any]
) -> Fragment | TokenSequence | dict[str, Any]:
    if is_part(tree):
        return tree
    if is_sequence(tree):
        return TokenSequence.read(reference.metadata, **tree)
    shared = {name: getattr(reference.metadata, name) for name in METADATA_FIELDS}
    return Fragment(**shared, **{**tree, "extras": tree["extras"] or {}})


@lru_cache(maxsize=64)
def _check_layout(layout: Layout, step_count: int) -> None:
    """Refuse what a reader refuses, and warn of images as floats. Once per layout."""
    _check_final_observations(layout)
    for stored in layout.arrays:
        if field_of(stored.name) not in STEP_FIELDS:
            continue
        if not stored.shape or stored.shape[0] != step_count:
            got = f"shape {list(stored.shape)}"
            if stored.name.startswith(f"{field_of(stored.name)}["):
                got += "; a list is a tree of arrays, not one entry per step: stack steps per key"
            raise TreeMismatchError(stored.name, f"[{step_count}, ...]", got)
        if stored.name.startswith("obs") and _is_float_image(stored):
            _log.warning(
                "array %s holds images as float32 %s: 4 times the bytes of uint8, and no video "
                "codec takes it; send uint8 and scale in the policy",
                stored.name,
                list(stored.shape),
            )
    try:
        check_fragment(layout, step_count)
    except PayloadCorruptError as error:
        raise InvalidRequestError("fragments", f"cannot be read back: {error}") from None


def _check_final_observations(layout: Layout) -> None:
    structure: Any = layout.structure
    ends = structure["final_obs_step"]
    if ends is None and structure["final_obs"] is not None:
        raise TreeMismatchError(
            "final_obs_step", "int32[K], a step for each row of final_obs", "None"
        )
    for stored in layout.arrays:
        if (
            field_of(stored.name) == "final_obs"
            and stored.shape[:1] != layout.arrays[ends].shape[:1]
        ):
            raise TreeMismatchError(
                stored.name,
                f"{list(layout.arrays[ends].shape[:1])} rows, one for each of final_obs_step",
                f"shape {list(stored.shape)}",
            )


def _is_float_image(stored: StoredArray) -> bool:
    shape = stored.shape
    return (
        stored.type_name == "<f4"
        and (len(shape) in (4, 5) or (len(shape) == 3 and shape[-1] > 4))
        and min(shape[1:3]) >= _IMAGE_SIDE_MIN
    )
