"""The header of a payload: its protobuf message to a checked `Layout` and back.

Headers of one layout differ in nothing but checksums, which have a fixed place and length, and
attributes, which come last. A `HeaderTemplate` knows these places, so that after the first payload
of a layout, writing a header is filling in numbers, and reading one is comparing bytes.
"""

import math
import operator
import secrets
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from breadbox.errors import PayloadCorruptError, UnsupportedArrayError
from breadbox.message_parts import require_few_parts
from breadbox.payload.codecs import require_plausible
from breadbox.payload.dtypes import parse_dtype
from breadbox.payload.layout import Layout, StoredArray
from breadbox.payload.limits import (
    ALIGNMENT_BYTES,
    ARRAYS_MAX,
    ATTRIBUTE_CHARACTERS_MAX,
    ATTRIBUTES_MAX,
    CHECKSUM_BLOCK_BYTES_MIN,
    CHECKSUM_BLOCKS_MAX,
    DIMENSIONS_MAX,
    HEADER_PARTS_MAX,
    NAME_CHARACTERS_MAX,
    PAYLOAD_BYTES_MAX,
    Expansion,
)
from breadbox.trees import NODES_MAX, TREE_DEPTH_MAX, Structure, child_path
from breadbox.v1 import payload_pb2

BlockChecksums = Sequence[Sequence[int]]
"""Per array, the checksums of its blocks."""

_PATH_TOO_LONG: Final = "." * (NAME_CHARACTERS_MAX + 1)
"""Stands for every path that is longer than an array's name may be."""

_HEADER_KIND: Final = payload_pb2.DESCRIPTOR.message_types_by_name["PayloadHeader"]

_ATTRIBUTE_PARTS_MAX: Final = 64 * ATTRIBUTES_MAX
"""So many that those of usual payloads are not counted."""

_TEMPLATES_MAX: Final = 16
"""Layouts that a reader remembers: more kinds of fragment than one learner mixes."""


def serialize_header(layout: Layout, block_checksums: BlockChecksums) -> bytes:
    """Return a header's bytes, without the attributes that stand at its end.

    Raises:
        UnsupportedArrayError: A key or name is not UTF-8 text.
    """
    header = payload_pb2.PayloadHeader(
        body_size_bytes=layout.body_bytes, checksum_block_bytes=layout.block_bytes
    )
    try:
        _fill_node(header.tree, layout.structure)
        for stored, checksums in zip(layout.arrays, block_checksums, strict=True):
            header.arrays.append(
                payload_pb2.ArrayHeader(
                    name=stored.name,
                    dtype=stored.type_name,
                    shape=stored.shape,
                    codec=stored.codec,  # type: ignore[arg-type]
                    offset_bytes=stored.offset_bytes,
                    size_bytes=stored.size_bytes,
                    block_checksums=checksums,
                    codec_parameters=stored.parameters,
                )
            )
    except (UnicodeEncodeError, ValueError) as error:
        raise UnsupportedArrayError("", "a key is not UTF-8 text") from error
    return header.SerializeToString()


def serialize_attributes(attributes: Mapping[str, str]) -> bytes:
    """Return the attributes' part of a header, which stands at its end."""
    try:
        raw = payload_pb2.PayloadHeader(attributes=attributes).SerializeToString()
    except (UnicodeEncodeError, ValueError) as error:
        raise UnsupportedArrayError("", "an attribute is not UTF-8 text") from error
    if len(attributes) > ATTRIBUTES_MAX:
        raise UnsupportedArrayError("", f"more than {ATTRIBUTES_MAX} attributes")
    if len(raw) > ATTRIBUTE_CHARACTERS_MAX:  # Else no single one can be too long.
        for name, text in attributes.items():
            if max(len(name), len(text)) > ATTRIBUTE_CHARACTERS_MAX:
                raise UnsupportedArrayError("", f"attribute {name[:40]!r} is too long")
    return raw


class HeaderTemplate:
    """All headers of one layout."""

    def __init__(self, layout: Layout, raw: bytes, slots: Sequence[tuple[int, int, int]]) -> None:
        """Use a header without attributes as the pattern; see `make`."""
        self.layout = layout
        self._slots = slots
        # The header as one packing: what stands before each slot, its checksums, and the rest.
        ends = [0, *(position + 8 * count for _, position, count in slots)]
        starts = [*(position for _, position, _ in slots), len(raw)]
        self._constants = [raw[end:start] for end, start in zip(ends, starts, strict=True)]
        packer = struct.Struct(
            "<"
            + "".join(
                f"{len(constant)}s{count}Q"
                for constant, (_, _, count) in zip(self._constants[:-1], slots, strict=True)
            )
            + f"{len(self._constants[-1])}s"
        )
        self._packer = packer
        self._single = [part for constant in self._constants for part in (constant, 0)][:-1]
        # Where the constants are among the packed values, and the checksums of each array.
        places = [0]
        ranges = {}
        for index, _, count in slots:
            ranges[index] = slice(places[-1] + 1, places[-1] + 1 + count)
            places.append(places[-1] + 1 + count)
        # With one place an itemgetter returns no tuple.
        self._constants_of = operator.itemgetter(*places, places[-1])
        self._expected = (*self._constants, self._constants[-1])
        self._ranges = [ranges.get(index, slice(0)) for index in range(len(layout.arrays))]

    @classmethod
    def make(
        cls, layout: Layout, raw: bytes, block_checksums: BlockChecksums
    ) -> "HeaderTemplate | None":
        """Find the places of the checksums in a header without attributes.

        Returns:
            None where the places cannot be told for certain.
        """
        slots = []
        position = 0
        for index, checksums in enumerate(block_checksums):
            if checksums:
                packed = struct.pack(f"<{len(checksums)}Q", *checksums)
                position = raw.find(packed, position)
                if position < 0:
                    return None
                slots.append((index, position, len(checksums)))
                position += len(packed)
        template = cls(layout, raw, slots)
        return template if template._is_right() else None

    def render(self, block_checksums: BlockChecksums) -> bytes:
        """Return the header with these checksums, without attributes."""
        values: list[bytes | int] = []
        for constant, (index, _, _) in zip(self._constants[:-1], self._slots, strict=True):
            values.append(constant)
            values += block_checksums[index]
        return self._packer.pack(*values, self._constants[-1])

    def render_single(self, checksums: Sequence[int]) -> bytes:
        """Do as `render` where no array has more than one block, with the checksums there are."""
        values: list[Any] = list(self._single)
        values[1::2] = checksums
        return self._packer.pack(*values)

    def match(self, raw: bytes) -> tuple[BlockChecksums, Mapping[str, str]] | None:
        """Read a header of this layout; None if it is of another."""
        if len(raw) < self._packer.size:
            return None
        values = self._packer.unpack_from(raw)
        if self._constants_of(values) != self._expected:
            return None
        attributes = _attributes_alone(raw[self._packer.size :])
        if attributes is None:
            return None
        return [values[each] for each in self._ranges], attributes

    def _is_right(self) -> bool:
        """Prove the places: other checksums written there must be read back, and nothing else."""
        other: list[Sequence[int]] = [()] * len(self.layout.arrays)
        for index, _, count in self._slots:
            other[index] = [secrets.randbits(64) for _ in range(count)]
        filled = payload_pb2.PayloadHeader.FromString(self.render(other))
        zeros: list[Sequence[int]] = [()] * len(self.layout.arrays)
        for index, _, count in self._slots:
            zeros[index] = [0] * count
        blank = payload_pb2.PayloadHeader.FromString(self.render(zeros))
        for array, checksums in zip(filled.arrays, other, strict=True):
            if list(array.block_checksums) != list(checksums):
                return False
            array.block_checksums[:] = [0] * len(checksums)
        return filled == blank


class HeaderReader:
    """Reads headers; remembers the layouts it met last."""

    def __init__(self) -> None:
        self._templates: deque[HeaderTemplate] = deque(maxlen=_TEMPLATES_MAX)

    def read(self, raw: bytes) -> tuple[Layout, BlockChecksums, Mapping[str, str]]:
        """Read and check a header.

        Raises:
            PayloadCorruptError: It is no header, contradicts itself, or is beyond a limit.
        """
        # A copy, since another thread may append; the newest is the likeliest.
        for template in reversed(tuple(self._templates)):
            matched = template.match(raw)
            if matched is not None:
                return template.layout, *matched
        try:
            require_few_parts(raw, _HEADER_KIND, HEADER_PARTS_MAX)
            header = payload_pb2.PayloadHeader.FromString(raw)
        except DecodeError as error:
            raise PayloadCorruptError("a payload's header is not a PayloadHeader") from error
        except ValueError as error:
            raise PayloadCorruptError(f"a payload's header {error}") from error
        layout = _layout_of(header)
        block_checksums = [tuple(each.block_checksums) for each in header.arrays]
        if len(header.attributes) > ATTRIBUTES_MAX:
            raise PayloadCorruptError(f"a payload has {len(header.attributes)} attributes")
        attributes = dict(header.attributes)
        self._remember(layout, raw, block_checksums, attributes)
        return layout, block_checksums, attributes

    def _remember(
        self,
        layout: Layout,
        raw: bytes,
        block_checksums: BlockChecksums,
        attributes: Mapping[str, str],
    ) -> None:
        suffix_bytes = payload_pb2.PayloadHeader(attributes=attributes).ByteSize()
        prefix, suffix = raw[: len(raw) - suffix_bytes], raw[len(raw) - suffix_bytes :]
        if _attributes_alone(suffix) != attributes or _has_attributes(prefix):
            return
        template = HeaderTemplate.make(layout, prefix, block_checksums)
        if template is not None:
            self._templates.append(template)


def _has_attributes(raw: bytes) -> bool:
    try:
        return bool(payload_pb2.PayloadHeader.FromString(raw).attributes)
    except DecodeError:
        return True


def _attributes_alone(raw: bytes) -> dict[str, str] | None:
    """Read a header that has attributes and nothing else; None if it has more."""
    if not raw:
        return {}
    try:
        require_few_parts(raw, _HEADER_KIND, _ATTRIBUTE_PARTS_MAX)
        header = payload_pb2.PayloadHeader.FromString(raw)
    except (DecodeError, ValueError):
        return None
    if len(header.attributes) > ATTRIBUTES_MAX:
        return None
    attributes = dict(header.attributes)
    header.ClearField("attributes")
    return None if header.ByteSize() else attributes


def _fill_node(node: payload_pb2.TreeNode, structure: Structure) -> None:
    if structure is None:
        node.none.SetInParent()
    elif isinstance(structure, dict):
        node.dict.SetInParent()
        node.dict.keys.extend(structure)
        for child in structure.values():
            _fill_node(node.dict.values.add(), child)
    elif isinstance(structure, (list, tuple)):
        items = node.list if isinstance(structure, list) else node.tuple
        items.SetInParent()
        for child in structure:
            _fill_node(items.items.add(), child)
    else:
        node.array_index = structure


def _layout_of(header: payload_pb2.PayloadHeader) -> Layout:
    """Check a header, and return what of it payloads have in common."""
    if len(header.arrays) > ARRAYS_MAX:
        raise PayloadCorruptError(f"a payload has {len(header.arrays)} arrays")
    block_bytes = header.checksum_block_bytes
    if not CHECKSUM_BLOCK_BYTES_MIN <= block_bytes <= PAYLOAD_BYTES_MAX:
        raise PayloadCorruptError(f"a payload has checksum blocks of {block_bytes} bytes")
    if not 0 <= header.body_size_bytes <= PAYLOAD_BYTES_MAX:
        raise PayloadCorruptError(f"a payload declares a body of {header.body_size_bytes} bytes")
    arrays = []
    end = block_count = 0
    expansion = Expansion()
    for each in header.arrays:
        stored = _stored_array_of(each, expansion)
        if stored.offset_bytes < end:
            raise PayloadCorruptError(f"array {stored.name!r} overlaps the one before it")
        end = stored.offset_bytes + stored.size_bytes
        if end > header.body_size_bytes:
            raise PayloadCorruptError(f"array {stored.name!r} ends behind the body")
        if len(each.block_checksums) != -(-stored.size_bytes // block_bytes):
            raise PayloadCorruptError(
                f"array {stored.name!r} has {len(each.block_checksums)} checksums"
            )
        block_count += len(each.block_checksums)
        arrays.append(stored)
    if block_count > CHECKSUM_BLOCKS_MAX:
        raise PayloadCorruptError(f"a payload has {block_count} checksums")
    structure = _structure_of(header.tree, [stored.name for stored in arrays])
    return Layout(structure, tuple(arrays), header.body_size_bytes, block_bytes)


def _stored_array_of(each: payload_pb2.ArrayHeader, expansion: Expansion) -> StoredArray:
    name = each.name
    if len(name) > NAME_CHARACTERS_MAX:
        raise PayloadCorruptError(f"an array's name is too long: {name[:40]!r}...")
    dtype = parse_dtype(each.dtype)
    shape = tuple(each.shape[: DIMENSIONS_MAX + 1])
    if (
        len(shape) > DIMENSIONS_MAX
        or any(length < 0 for length in shape)
        or extent_bytes(shape, dtype) > PAYLOAD_BYTES_MAX
    ):
        raise PayloadCorruptError(f"array {name!r} has an impossible shape")
    if each.offset_bytes < 0 or each.offset_bytes % ALIGNMENT_BYTES or each.size_bytes < 0:
        raise PayloadCorruptError(f"array {name!r} is at an impossible place")
    raw_bytes = math.prod(shape) * dtype.itemsize
    require_plausible(each.codec, each.size_bytes, raw_bytes, shape, each.dtype, expansion)
    return StoredArray(
        name=name,
        type_name=each.dtype,
        dtype=dtype,
        shape=shape,
        codec=each.codec,
        offset_bytes=each.offset_bytes,
        size_bytes=each.size_bytes,
        parameters=dict(each.codec_parameters),
    )


def extent_bytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Bytes of an array if no axis were empty: numpy bounds this, not only the true size."""
    return math.prod(max(1, length) for length in shape) * dtype.itemsize


def _path_below(path: str, key: str | int) -> str:
    """Join a key to a path; one that no array can have is not made longer for each node below it.

    Else a key of a megabyte would be copied for each of thousands of nodes.
    """
    if len(path) + len(str(key)) > NAME_CHARACTERS_MAX:
        return _PATH_TOO_LONG
    return child_path(path, key)


def _structure_of(root: payload_pb2.TreeNode, names: Sequence[str]) -> Structure:
    """Build the structure; each array must be the next leaf, and named after its path."""
    node_count = 0
    next_index = 0

    def visit(node: payload_pb2.TreeNode, path: str, depth: int) -> Structure:
        nonlocal node_count, next_index
        node_count += 1
        if depth > TREE_DEPTH_MAX or node_count > NODES_MAX:
            raise PayloadCorruptError("a payload's tree is too deep or too large")
        kind = node.WhichOneof("node")
        if kind == "array_index":
            if node.array_index != next_index or names[next_index : next_index + 1] != [path]:
                raise PayloadCorruptError("a payload's tree does not agree with its arrays")
            next_index += 1
            return node.array_index
        if kind == "none":
            return None
        if kind == "dict":
            keys = list(node.dict.keys)
            if len(keys) != len(node.dict.values) or len(set(keys)) != len(keys):
                raise PayloadCorruptError("a payload's tree has a dict with wrong keys")
            return {
                key: visit(child, _path_below(path, key), depth + 1)
                for key, child in zip(keys, node.dict.values, strict=True)
            }
        if kind in ("list", "tuple"):
            children = node.list.items if kind == "list" else node.tuple.items
            items = [
                visit(each, _path_below(path, i), depth + 1) for i, each in enumerate(children)
            ]
            return items if kind == "list" else tuple(items)
        raise PayloadCorruptError("a payload's tree has a node of no known kind")

    structure = visit(root, "", 0)
    if next_index != len(names):
        raise PayloadCorruptError("a payload has arrays that its tree does not name")
    return structure
