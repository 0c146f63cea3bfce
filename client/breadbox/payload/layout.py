"""Layouts, checked once and shared: found by hash, compared by bytes, as hashes can be forged."""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import xxhash
from google.protobuf.message import DecodeError

from breadbox.model.errors import PayloadCorruptError, UnsupportedArrayError
from breadbox.model.trees import NODES_MAX, TREE_DEPTH_MAX, Structure, child_path, in_order
from breadbox.payload.codecs import is_video
from breadbox.payload.dtypes import parse_dtype
from breadbox.payload.limits import (
    ALIGNMENT_BYTES,
    ARRAYS_MAX,
    ATTRIBUTE_CHARACTERS_MAX,
    ATTRIBUTES_MAX,
    CHECKSUM_BLOCK_BYTES,
    CHECKSUM_BLOCK_BYTES_MIN,
    CHECKSUM_BLOCKS_MAX,
    DIMENSIONS_MAX,
    LAYOUT_PARTS_MAX,
    LAYOUTS_BYTES_MAX,
    LAYOUTS_MAX,
    NAME_CHARACTERS_MAX,
    OPEN_AXES_MAX,
    PAYLOAD_BYTES_MAX,
)
from breadbox.v1 import payload_pb2
from breadbox.wire.message_parts import check_few_parts

OPEN: Final = -1
"""Length of an axis that each payload says for itself: those of any lengths share one layout."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array as a layout describes it; everything in here has been checked."""

    name: str
    """Path in the tree."""
    type_name: str
    dtype: np.dtype[Any]
    """Type of the stored elements: unsigned 16-bit for "bfloat16"."""
    shape: tuple[int, ...]
    """With `OPEN` axes in a layout that `Layout.at` has not been called on."""
    codec: int
    """A value of the wire's enum Codec."""
    raw_bytes: int
    """Bytes of its elements."""
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_raw(self) -> bool:
        """Whether the encoded bytes are the elements themselves, in every payload."""
        return self.codec == payload_pb2.CODEC_RAW

    def describe(self) -> str:
        """Type and shape, for messages."""
        return f"{self.type_name}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Places:
    """Where arrays and checksums of a payload are, by index of the array."""

    offsets: Sequence[int]
    """First encoded byte, from the start of the body."""
    sizes: Sequence[int]
    """Encoded bytes."""
    first_figures: Sequence[int]
    """First of its checksums, among the numbers of the checksums section."""
    gaps: Sequence[bytes]
    """Zeros before it in the body."""
    figure_count: int
    """Numbers of the checksums section."""
    body_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Tree and arrays of a payload. Compared by identity."""

    structure: Structure
    arrays: tuple[StoredArray, ...]
    block_bytes: int
    """Bytes of a block with a checksum."""
    raw: bytes
    """As it stands in payloads."""
    hash: int
    """XXH3-64 of `raw`."""
    open_count: int = 0
    """Open axes; each payload has their lengths for itself, in order of the tree."""
    lengths: tuple[int, ...] = ()
    """Lengths of the open axes, or empty before `at`."""
    order: tuple[int, ...] = field(init=False)
    """Order of the arrays in the body: indexes, raw ones first."""
    encoded: tuple[int, ...] = field(init=False)
    """Arrays whose sizes each payload has for itself: the last ones of `order`."""
    raw_places: Places = field(init=False)
    """Where raw arrays and their checksums are in every payload; encoded ones come behind them."""

    def __post_init__(self) -> None:
        raw = [index for index, stored in enumerate(self.arrays) if stored.is_raw]
        encoded = [index for index, stored in enumerate(self.arrays) if not stored.is_raw]
        object.__setattr__(self, "order", (*raw, *encoded))
        object.__setattr__(self, "encoded", tuple(encoded))
        places = _go_on(_nowhere(self), self, raw, [self.arrays[index].raw_bytes for index in raw])
        object.__setattr__(self, "raw_places", places)

    def at(self, lengths: tuple[int, ...]) -> "Layout":
        """Return the layout with these lengths of its open axes, or raise PayloadCorruptError."""
        left = iter(lengths)
        arrays = tuple([_with_lengths(stored, left) for stored in self.arrays])
        _check_raw_bytes(arrays)
        return replace(self, arrays=arrays, lengths=lengths)

    def place_all(self, sizes: Sequence[int]) -> Places:
        """Give every array its place, from the sizes of all; of open axes no length is needed."""
        return _go_on(_nowhere(self), self, self.order, [sizes[index] for index in self.order])

    def place(self, encoded_sizes: Sequence[int]) -> Places:
        """Give every array its place, from the sizes of the encoded ones."""
        if not self.encoded:
            return self.raw_places
        return _go_on(self.raw_places, self, self.encoded, encoded_sizes)


def _nowhere(layout: Layout) -> Places:
    zeros = [0] * len(layout.arrays)
    figure_count = layout.open_count + len(layout.encoded)
    return Places(zeros, zeros, zeros, [b""] * len(layout.arrays), figure_count, 0)


def _go_on(places: Places, layout: Layout, indexes: Sequence[int], sizes: Sequence[int]) -> Places:
    offsets, all_sizes = [*places.offsets], [*places.sizes]
    first_figures, gaps = [*places.first_figures], [*places.gaps]
    end, figure_count = places.body_bytes, places.figure_count
    for index, size_bytes in zip(indexes, sizes, strict=True):
        offsets[index] = aligned(end)
        all_sizes[index] = size_bytes
        first_figures[index] = figure_count
        gaps[index] = bytes(offsets[index] - end)
        end = offsets[index] + size_bytes
        figure_count += -(-size_bytes // layout.block_bytes)
    return Places(offsets, all_sizes, first_figures, gaps, figure_count, end)


def aligned(offset_bytes: int) -> int:
    """Return the next multiple at which the body, or an array, may start."""
    return offset_bytes + -offset_bytes % ALIGNMENT_BYTES


def _with_lengths(stored: StoredArray, lengths: Iterator[int]) -> StoredArray:
    if OPEN not in stored.shape:
        return stored
    shape = tuple([next(lengths) if length == OPEN else length for length in stored.shape])
    _check_shape(stored.name, stored.type_name, stored.dtype, shape, stored.codec)
    return replace(stored, shape=shape, raw_bytes=math.prod(shape) * stored.dtype.itemsize)


_PATH_TOO_LONG: Final = "." * (NAME_CHARACTERS_MAX + 1)
_KIND: Final = payload_pb2.DESCRIPTOR.message_types_by_name["PayloadLayout"]
_CODECS: Final = frozenset(payload_pb2.Codec.values()) - {payload_pb2.CODEC_UNSPECIFIED}


def make_layout(structure: Structure, arrays: Sequence[StoredArray]) -> Layout:
    """Make the layout of payloads of these arrays, the leaves of a structure."""
    if len(arrays) > ARRAYS_MAX:
        raise UnsupportedArrayError("", f"{len(arrays)} arrays; the limit is {ARRAYS_MAX}")
    for stored in arrays:
        if len(stored.name) > NAME_CHARACTERS_MAX:
            raise UnsupportedArrayError(stored.name[:60] + "...", "the path is too long")
        if len(stored.shape) > DIMENSIONS_MAX:
            raise UnsupportedArrayError(
                stored.name, f"{len(stored.shape)} axes; the limit is {DIMENSIONS_MAX}"
            )
        if _extent_bytes(stored.shape, stored.dtype) > PAYLOAD_BYTES_MAX:
            raise UnsupportedArrayError(
                stored.name, f"shape {stored.shape} is beyond {PAYLOAD_BYTES_MAX}"
            )
    block_bytes = CHECKSUM_BLOCK_BYTES
    raw_bytes = sum(stored.raw_bytes for stored in arrays)
    while raw_bytes // block_bytes + len(arrays) > CHECKSUM_BLOCKS_MAX:
        block_bytes *= 2
    message = payload_pb2.PayloadLayout(checksum_block_bytes=block_bytes)
    try:
        _fill_node(message.tree, structure, arrays)
        raw = message.SerializeToString(deterministic=True)
    except (UnicodeEncodeError, ValueError) as error:
        raise UnsupportedArrayError("", "a key is not UTF-8 text") from error
    layout_hash = xxhash.xxh3_64_intdigest(raw)
    return Layout(structure, tuple(arrays), block_bytes, raw, layout_hash, _open_count(arrays))


def _open_count(arrays: Sequence[StoredArray]) -> int:
    open_count = sum([stored.shape.count(OPEN) for stored in arrays])
    if open_count > OPEN_AXES_MAX:
        raise UnsupportedArrayError("", f"{open_count} open axes; the limit is {OPEN_AXES_MAX}")
    return open_count


class LayoutReader:
    """Reads layouts; remembers those it met last, of all threads. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, Layout] = {}
        self._known_bytes = 0

    def read(self, raw: bytes, layout_hash: int) -> Layout:
        """Return the layout of these bytes, or raise PayloadCorruptError if it is none."""
        known = self._known.get(layout_hash)
        if known is not None and known.raw == raw:
            return known
        if xxhash.xxh3_64_intdigest(raw) != layout_hash:
            raise PayloadCorruptError("a payload's layout fails its checksum")
        layout = _parse(raw, layout_hash)
        self._remember(layout)
        return layout

    def _remember(self, layout: Layout) -> None:
        """Keep a layout instead of one of the same hash, or of the oldest."""
        if len(layout.raw) > LAYOUTS_BYTES_MAX:
            return
        with self._lock:
            self._forget(layout.hash)
            while (
                len(self._known) >= LAYOUTS_MAX
                or self._known_bytes + len(layout.raw) > LAYOUTS_BYTES_MAX
            ):
                self._forget(next(iter(self._known)))
            self._known[layout.hash] = layout
            self._known_bytes += len(layout.raw)

    def _forget(self, layout_hash: int) -> None:
        known = self._known.pop(layout_hash, None)
        if known is not None:
            self._known_bytes -= len(known.raw)


def _parse(raw: bytes, layout_hash: int) -> Layout:
    try:
        check_few_parts(raw, _KIND, LAYOUT_PARTS_MAX)
        message = payload_pb2.PayloadLayout.FromString(raw)
    except DecodeError as error:
        raise PayloadCorruptError("a payload's layout is not a PayloadLayout") from error
    except ValueError as error:
        raise PayloadCorruptError(f"a payload's layout {error}") from error
    block_bytes = message.checksum_block_bytes
    if not CHECKSUM_BLOCK_BYTES_MIN <= block_bytes <= PAYLOAD_BYTES_MAX:
        raise PayloadCorruptError(f"a payload has checksum blocks of {block_bytes} bytes")
    arrays: list[StoredArray] = []
    structure = _structure_of(message.tree, arrays)
    _check_raw_bytes(arrays)
    try:
        open_count = _open_count(arrays)
    except UnsupportedArrayError as error:
        raise PayloadCorruptError(f"a payload's layout has {error}") from error
    return Layout(structure, tuple(arrays), block_bytes, raw, layout_hash, open_count)


def _check_raw_bytes(arrays: Sequence[StoredArray]) -> None:
    if sum([stored.raw_bytes for stored in arrays if stored.is_raw]) > PAYLOAD_BYTES_MAX:
        raise PayloadCorruptError("a payload's arrays are larger than a payload may be")


def _fill_node(
    node: payload_pb2.TreeNode, structure: Structure, arrays: Sequence[StoredArray]
) -> None:
    if structure is None:
        node.none.SetInParent()
    elif isinstance(structure, dict):
        node.dict.SetInParent()
        node.dict.keys.extend(structure)
        for child in structure.values():
            _fill_node(node.dict.values.add(), child, arrays)
    elif isinstance(structure, (list, tuple)):
        items = node.list if isinstance(structure, list) else node.tuple
        items.SetInParent()
        for child in structure:
            _fill_node(items.items.add(), child, arrays)
    else:
        stored = arrays[structure]
        node.array.dtype = stored.type_name
        node.array.shape.extend(stored.shape)
        node.array.codec = stored.codec  # type: ignore[assignment]
        node.array.codec_parameters.update(stored.parameters)


def _stored_array_of(name: str, each: payload_pb2.ArrayLayout) -> StoredArray:
    if len(name) > NAME_CHARACTERS_MAX:
        raise PayloadCorruptError(f"an array's name is too long: {name[:40]!r}...")
    dtype = parse_dtype(each.dtype)
    shape = tuple(each.shape[: DIMENSIONS_MAX + 1])
    if each.codec not in _CODECS:
        raise PayloadCorruptError(
            f"array {name!r} has codec {each.codec}, which this library does not know"
        )
    is_open = OPEN in shape
    # With an open axis of one row: its lengths are checked as they come.
    closed = tuple([1 if length == OPEN else length for length in shape]) if is_open else shape
    _check_shape(name, each.dtype, dtype, closed, payload_pb2.CODEC_RAW if is_open else each.codec)
    raw_bytes = 0 if is_open else math.prod(shape) * dtype.itemsize
    parameters = dict(each.codec_parameters)
    return StoredArray(name, each.dtype, dtype, shape, each.codec, raw_bytes, parameters)


def _check_shape(
    name: str, type_name: str, dtype: np.dtype[Any], shape: tuple[int, ...], codec: int
) -> None:
    if (
        len(shape) > DIMENSIONS_MAX
        or any([length < 0 for length in shape])
        or _extent_bytes(shape, dtype) > PAYLOAD_BYTES_MAX
    ):
        raise PayloadCorruptError(f"array {name!r} has an impossible shape")
    if codec == payload_pb2.CODEC_H264 and not is_video(shape, type_name):
        raise PayloadCorruptError(f"array {name!r} is said to be video, and holds no frames")


def _extent_bytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    return math.prod(max(1, length) for length in shape) * dtype.itemsize


def _path_below(path: str, key: str | int) -> str:
    """Join a key to a path, cut: thousands of nodes could have a megabyte's key."""
    if len(path) + len(str(key)) > NAME_CHARACTERS_MAX:
        return _PATH_TOO_LONG
    return child_path(path, key)


def _structure_of(root: payload_pb2.TreeNode, arrays: list[StoredArray]) -> Structure:
    node_count = 0

    def visit(node: payload_pb2.TreeNode, path: str, depth: int) -> Structure:
        nonlocal node_count
        node_count += 1
        if depth > TREE_DEPTH_MAX or node_count > NODES_MAX:
            raise PayloadCorruptError("a payload's tree is too deep or too large")
        kind = node.WhichOneof("node")
        if kind == "array":
            if len(arrays) >= ARRAYS_MAX:
                raise PayloadCorruptError(f"a payload has more than {ARRAYS_MAX} arrays")
            arrays.append(_stored_array_of(path, node.array))
            return len(arrays) - 1
        if kind == "none":
            return None
        if kind == "dict":
            keys = list(node.dict.keys)
            if len(keys) != len(node.dict.values) or len(set(keys)) != len(keys):
                raise PayloadCorruptError("a payload's tree has a dict with wrong keys")
            entries = {
                key: visit(child, _path_below(path, key), depth + 1)
                for key, child in zip(keys, node.dict.values, strict=True)
            }
            return dict(in_order(entries))  # Readers get one order of all writers.
        if kind in ("list", "tuple"):
            children = node.list.items if kind == "list" else node.tuple.items
            items = [
                visit(each, _path_below(path, i), depth + 1) for i, each in enumerate(children)
            ]
            return items if kind == "list" else tuple(items)
        raise PayloadCorruptError("a payload's tree has a node of no known kind")

    return visit(root, "", 0)


_ATTRIBUTES_KIND: Final = payload_pb2.DESCRIPTOR.message_types_by_name["PayloadAttributes"]

_PARTS_MAX: Final = 64 * ATTRIBUTES_MAX


def serialize_attributes(attributes: Mapping[str, str]) -> bytes:
    """Return the attributes section of a payload; two of them joined are one as well."""
    try:
        raw = payload_pb2.PayloadAttributes(values=attributes).SerializeToString(deterministic=True)
    except (UnicodeEncodeError, ValueError) as error:
        raise UnsupportedArrayError("", "an attribute is not UTF-8 text") from error
    if len(attributes) > ATTRIBUTES_MAX:
        raise UnsupportedArrayError("", f"more than {ATTRIBUTES_MAX} attributes")
    if len(raw) > ATTRIBUTE_CHARACTERS_MAX:  # Else no single one can be too long.
        for name, text in attributes.items():
            if max(len(name), len(text)) > ATTRIBUTE_CHARACTERS_MAX:
                raise UnsupportedArrayError("", f"attribute {name[:40]!r} is too long")
    return raw


def parse_attributes(raw: bytes) -> dict[str, str]:
    """Read an attributes section."""
    try:
        check_few_parts(raw, _ATTRIBUTES_KIND, _PARTS_MAX)
        attributes = payload_pb2.PayloadAttributes.FromString(raw)
    except (DecodeError, ValueError) as error:
        raise PayloadCorruptError(f"a payload's attributes cannot be read: {error}") from error
    if len(attributes.values) > ATTRIBUTES_MAX:
        raise PayloadCorruptError(f"a payload has {len(attributes.values)} attributes")
    return dict(attributes.values)
