"""The payload format, versions 1 and 2; docs/payload-format.md describes it byte by byte.

The first 48 bytes are the *prelude*, prelude to padding is the *head*. Nothing in a payload is
ever executed, and a reader checks every size against the payload's own before it allocates.
"""

import struct
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from breadbox.model.errors import PayloadCorruptError, PayloadFormatError, UnsupportedArrayError
from breadbox.model.trees import (
    TREE_DEPTH_MAX,
    Structure,
    Tree,
    as_inserted,
    child_path,
    flatten,
    unflatten,
)
from breadbox.payload.codecs import Codecs, Encoded, check_plausible, choose, decode_into, encode
from breadbox.payload.dtypes import as_leaf, byte_view, parse_dtype, stored_array
from breadbox.payload.layout import (
    OPEN,
    Layout,
    LayoutReader,
    Places,
    StoredArray,
    aligned,
    make_layout,
    parse_attributes,
    serialize_attributes,
)
from breadbox.payload.limits import (
    CHECKSUM_BLOCKS_MAX,
    HEAD_BYTES_MAX,
    LAYOUTS_MAX,
    PAYLOAD_BYTES_MAX,
    Expansion,
)
from breadbox.v1 import payload_pb2

FORMAT_VERSION: Final = 1
OPEN_FORMAT_VERSION: Final = 2
"""Version of payloads whose layout has open axes."""

_MAGIC: Final = b"BREADBOX"
_PRELUDE: Final = struct.Struct("<8sHHIQIIQ")
_CHECKSUM: Final = struct.Struct("<Q")
CHECKSUMMED_PRELUDE_BYTES: Final = _PRELUDE.size
"""Bytes of a prelude in front of its checksum."""
PRELUDE_BYTES: Final = CHECKSUMMED_PRELUDE_BYTES + _CHECKSUM.size
_digest: Final = xxhash.xxh3_64_intdigest

_JOIN_BYTES: Final = 16 * 1024
"""Neighbours up to this size are joined: a copy costs less than a buffer."""
_layout_reader = LayoutReader()
_kinds: dict[Hashable, "_TreeKind"] = {}
_kinds_lock = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A payload's head, read and checked."""

    layout: Layout
    places: Places
    body_offset: int
    figures: Sequence[int]
    """Figures of the checksums section; see `Places`."""
    raw_attributes: bytes

    @property
    def size_bytes(self) -> int:
        """Length of the payload."""
        return self.body_offset + self.places.body_bytes

    def is_raw(self, index: int) -> bool:
        """Whether an array's encoded bytes are its elements themselves, in this payload."""
        return self.places.sizes[index] == self.layout.arrays[index].raw_bytes


def encode_tree(
    tree: Tree, *, attributes: Mapping[str, str] | None = None, codecs: Codecs = "raw"
) -> list[memoryview]:
    """Encode a tree of arrays as buffers to join; leave large arrays unchanged until written."""
    return encode_with_layout(tree, attributes=attributes or {}, codecs=codecs)[1]


def encode_with_layout(
    tree: Tree,
    *,
    attributes: Mapping[str, str] | bytes,
    codecs: Codecs = "raw",
    leading: Mapping[str, int | None] | None = None,
) -> tuple[Layout, list[memoryview]]:
    """Do as `encode_tree`, and return the layout as well. Trees alike share one layout.

    `leading` is for a tree of two levels: the axes of each field's arrays that the layout leaves
    open, so many in front, or None for all. Trees that differ in their lengths then share it too.
    """
    raw_attributes = (
        attributes if isinstance(attributes, bytes) else serialize_attributes(attributes)
    )
    lengths: list[int] = []
    kind, arrays = _recognise(tree) if leading is None else _recognise_open(tree, leading, lengths)
    encoded = None
    if codecs != "raw":
        expansion = Expansion()
        encoded = [
            encode(
                _contiguous(array),
                kind.type_names[number],
                choose(codecs, kind.paths[number]),
                expansion,
            )
            for number, array in enumerate(arrays)
        ]
    layout = kind.layout(arrays, encoded)
    if encoded is not None:
        return layout, _assemble(layout, [each.buffer for each in encoded], raw_attributes, lengths)
    # A copy of a small array costs less than a view of it.
    buffers = [
        array.tobytes() if array.nbytes <= _JOIN_BYTES else byte_view(_contiguous(array))
        for array in arrays
    ]
    return layout, _assemble(layout, buffers, raw_attributes, lengths)


def head_bytes_of(prelude: memoryview) -> int:
    """Return the length of a payload's head from its first bytes, padding not included."""
    return _parse_prelude(prelude).head_bytes


def parse_head(head: memoryview, size_bytes: int) -> Head:
    """Read and check a payload's head, from at least `head_bytes_of` bytes of its start."""
    prelude = _parse_prelude(head)
    body_offset = aligned(prelude.head_bytes)
    if body_offset + prelude.body_bytes != size_bytes:
        raise PayloadCorruptError(
            f"a payload of {size_bytes} bytes says that it has {prelude.body_bytes} of them from "
            f"byte {body_offset} on"
        )
    if len(head) < prelude.head_bytes:
        raise PayloadCorruptError("a payload ends within its head")
    layout_at = prelude.head_bytes - prelude.layout_bytes
    own = bytes(head[PRELUDE_BYTES:layout_at])
    if xxhash.xxh3_64_intdigest(bytes(head[: _PRELUDE.size]) + own) != prelude.checksum:
        raise PayloadCorruptError("a payload's head fails its checksum")
    raw_layout = bytes(head[layout_at : prelude.head_bytes])
    layout = _layout_reader.read(raw_layout, prelude.layout_hash)
    open_count = layout.open_count
    if prelude.open_count != open_count:
        raise PayloadCorruptError(
            f"a payload has {prelude.open_count} lengths, its layout {open_count} open axes"
        )
    figure_count, rest_bytes = divmod(prelude.figure_bytes, _CHECKSUM.size)
    own_count = open_count + len(layout.encoded)
    if rest_bytes or figure_count < own_count:
        raise PayloadCorruptError(f"a payload has {prelude.figure_bytes} bytes of checksums")
    figures = struct.unpack_from(f"<{figure_count}Q", own)
    if open_count:
        layout = layout.at(figures[:open_count])
    places = _place(layout, figures[open_count:own_count])
    if places.figure_count != figure_count:
        raise PayloadCorruptError(
            f"a payload has {figure_count} sizes and checksums, its arrays {places.figure_count}"
        )
    if figure_count > CHECKSUM_BLOCKS_MAX + own_count:
        raise PayloadCorruptError(f"a payload has {figure_count} checksums")
    if places.body_bytes != prelude.body_bytes:
        raise PayloadCorruptError(
            f"a payload declares a body of {prelude.body_bytes} bytes, its arrays take "
            f"{places.body_bytes}"
        )
    return Head(layout, places, body_offset, figures, own[prelude.figure_bytes :])


def stored_layout(layout: Layout) -> Layout:
    """Return a layout as it stands in payloads: open axes without lengths."""
    return _layout_reader.read(layout.raw, layout.hash)


def decode_tree(
    payload: bytes | bytearray | memoryview, *, check: Callable[[Layout], None] = lambda _: None
) -> tuple[Tree, dict[str, str]]:
    """Decode a payload and verify it; return the tree and the attributes.

    Raw arrays are views of `payload`, writable if it is. `check` is called with the layout before
    arrays are decoded. bfloat16 without torch is an UnsupportedArrayError.
    """
    view = memoryview(payload).cast("B")
    head = parse_head(view, len(view))
    attributes = parse_attributes(head.raw_attributes)
    check(head.layout)
    leaves = []
    for index, stored in enumerate(head.layout.arrays):
        start = head.body_offset + head.places.offsets[index]
        encoded = view[start : start + head.places.sizes[index]]
        verify(head, index, encoded)
        if head.is_raw(index):
            array = np.frombuffer(encoded, dtype=stored.dtype).reshape(stored.shape)
        else:
            array = np.empty(stored.shape, dtype=stored.dtype)
            decode_into(array, encoded, stored.codec, stored.parameters)
        leaves.append(as_leaf(array, stored.type_name))
    return unflatten(head.layout.structure, leaves), attributes


def checksums(buffer: bytes | memoryview, block_bytes: int) -> list[int]:
    """Return the XXH3-64 of each block of a buffer, in order."""
    if len(buffer) <= block_bytes:
        return [_digest(buffer)] if len(buffer) else []
    return [
        _digest(buffer[start : start + block_bytes]) for start in range(0, len(buffer), block_bytes)
    ]


def verify(head: Head, index: int, encoded: memoryview, *, first_block: int = 0) -> None:
    """Check encoded bytes of an array, from the start of `first_block` to the end of a block."""
    layout = head.layout
    first = head.places.first_figures[index]
    for block, actual in enumerate(checksums(encoded, layout.block_bytes), first_block):
        if actual != head.figures[first + block]:
            raise PayloadCorruptError(
                f"array {layout.arrays[index].name!r} fails its checksum in block {block} "
                f"of {layout.block_bytes} bytes"
            )


_ndarray = np.ndarray


def _contiguous(array: NDArray[Any]) -> NDArray[Any]:
    # Numpy's own function makes an array without axes one of one axis.
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


@dataclass(slots=True)
class _TreeKind:
    structure: Structure
    paths: list[str]
    type_names: list[str]
    shapes: list[tuple[int, ...]] | None = None
    """Shapes with open axes, or None for those of the arrays."""
    layouts: dict[Hashable, Layout] = field(default_factory=dict)
    """Layouts by the arrays' codecs, or by none if all are raw."""

    def layout(self, arrays: Sequence[NDArray[Any]], encoded: Sequence[Encoded] | None) -> Layout:
        codecs = [(each.codec, each.parameters) for each in encoded or ()]
        key = tuple([(codec, *parameters.items()) for codec, parameters in codecs])
        layout = self.layouts.get(key)
        if layout is None:
            codecs = codecs or [(payload_pb2.CODEC_RAW, {})] * len(arrays)
            shapes = self.shapes or [array.shape for array in arrays]
            stored = [
                StoredArray(path, name, parse_dtype(name), shape, codec, array.nbytes, parameters)
                for path, name, shape, array, (codec, parameters) in zip(
                    self.paths, self.type_names, shapes, arrays, codecs, strict=True
                )
            ]
            layout = make_layout(self.structure, stored)
            if len(self.layouts) < LAYOUTS_MAX:
                self.layouts[key] = layout
        return layout


def _recognise(tree: Tree) -> tuple[_TreeKind, Sequence[NDArray[Any]]]:
    parts: list[Hashable] = []
    leaves: list[NDArray[Any]] = []
    try:
        _sign((tree,), parts, leaves, TREE_DEPTH_MAX)
    except UnsupportedArrayError:
        _describe(tree)  # Raises again, and names the leaf.
        raise
    signature = tuple(parts)
    kind = _kinds.get(signature) or _keep(signature, _TreeKind(*_describe(tree)))
    return kind, leaves


def _keep(signature: Hashable, kind: _TreeKind) -> _TreeKind:
    with _kinds_lock:
        _kinds[signature] = kind
        while len(_kinds) > LAYOUTS_MAX:
            del _kinds[next(iter(_kinds))]
    return kind


def _recognise_open(
    tree: Mapping[str, Mapping[str, Any]], leading: Mapping[str, int | None], lengths: list[int]
) -> tuple[_TreeKind, Sequence[NDArray[Any]]]:
    """Do as `_recognise` for what the layout does not leave open; add the lengths of the rest."""
    parts: list[Hashable] = []
    leaves: list[NDArray[Any]] = []
    shapes: list[tuple[int, ...]] = []
    for field_name, named in tree.items():
        parts.append((field_name, *named))
        open_max = leading[field_name]
        for name, leaf in named.items():
            array, type_name = leaf, None
            if not (type(leaf) is _ndarray and leaf.dtype.kind in "buif"):
                array, type_name = stored_array(child_path(field_name, name), leaf)
            shape = array.shape
            front, rest = shape[:open_max], () if open_max is None else shape[open_max:]
            lengths += front
            leaves.append(array)
            shapes.append((OPEN,) * len(front) + rest)
            parts += (type_name or array.dtype, shapes[-1])
    signature = tuple(parts)
    kind = _kinds.get(signature)
    if kind is None:
        kind = _keep(signature, _TreeKind(*_describe(tree), shapes))
    return kind, leaves


def _sign(
    nodes: Iterable[Tree], parts: list[Hashable], leaves: list[NDArray[Any]], depth_left: int
) -> None:
    """Append what trees of one kind, and no others, share; collect the leaves."""
    for node in nodes:
        if type(node) is _ndarray and node.dtype.kind in "buif":  # First, because most are.
            leaves.append(node)
            parts += (node.dtype, node.shape)
        elif node is None:
            parts.append(None)
        elif isinstance(node, (dict, list, tuple)):
            if depth_left <= 0:
                raise UnsupportedArrayError("", "the tree is too deep")
            if isinstance(node, dict):
                parts.append((dict, *node))
                _sign(node.values(), parts, leaves, depth_left - 1)
            else:
                parts.append((isinstance(node, tuple), len(node)))
                _sign(node, parts, leaves, depth_left - 1)
        else:
            array, type_name = stored_array("", node)
            leaves.append(array)
            parts += (type_name, array.shape)


def _describe(tree: Tree) -> tuple[Structure, list[str], list[str]]:
    structure, leaves = flatten(tree, as_inserted)
    types = [stored_array(path, leaf)[1] for path, leaf in leaves]
    return structure, [path for path, _ in leaves], types


def _place(layout: Layout, sizes: Sequence[int]) -> Places:
    expansion = Expansion()
    for index, size_bytes in zip(layout.encoded, sizes, strict=True):
        stored = layout.arrays[index]
        if size_bytes != stored.raw_bytes:  # Else its elements themselves.
            check_plausible(
                stored.codec,
                size_bytes,
                stored.raw_bytes,
                stored.shape,
                stored.type_name,
                expansion,
            )
    if sum(sizes) > PAYLOAD_BYTES_MAX:
        raise PayloadCorruptError("a payload's arrays are larger than a payload may be")
    return layout.place(sizes)


def _assemble(
    layout: Layout,
    buffers: Sequence[bytes | memoryview],
    raw_attributes: bytes,
    lengths: Sequence[int],
) -> list[memoryview]:
    figures = [len(buffers[index]) for index in layout.encoded]
    if lengths:
        places = layout.place_all([*map(len, buffers)])
        figures[:0] = lengths
        if places.figure_count > CHECKSUM_BLOCKS_MAX + len(figures):
            raise UnsupportedArrayError("", f"the arrays have {places.body_bytes} bytes")
    else:
        places = layout.place(figures)
    first: list[bytes | memoryview] = []
    small = first
    parts: list[list[bytes | memoryview] | memoryview] = []
    for index in layout.order:
        buffer = buffers[index]
        small += (places.gaps[index], buffer)
        size_bytes = len(buffer)
        if size_bytes > _JOIN_BYTES:
            figures += checksums(buffer, layout.block_bytes)
            parts += (memoryview(small.pop()), small := [])
        elif size_bytes:
            figures.append(_digest(buffer))
    # The head needs all figures, and goes before what is small in front.
    first[:0] = _head(layout, places.body_bytes, figures, raw_attributes)
    return [
        memoryview(b"".join(part)) if isinstance(part, list) else part
        for part in (first, *parts)
        if part
    ]


def _head(
    layout: Layout, body_bytes: int, figures: Sequence[int], raw_attributes: bytes
) -> tuple[bytes, ...]:
    own = struct.pack(f"<{len(figures)}Q", *figures) + raw_attributes
    head_bytes = PRELUDE_BYTES + len(own) + len(layout.raw)
    if head_bytes > HEAD_BYTES_MAX:
        raise UnsupportedArrayError("", f"the head has {head_bytes} bytes")
    body_offset = aligned(head_bytes)
    if body_offset + body_bytes > PAYLOAD_BYTES_MAX:
        raise UnsupportedArrayError("", f"the payload has {body_offset + body_bytes} bytes")
    attribute_bytes = len(raw_attributes)
    sizes = len(own) - attribute_bytes, attribute_bytes, body_bytes
    version = OPEN_FORMAT_VERSION if layout.open_count else FORMAT_VERSION
    kind = version, layout.open_count, len(layout.raw), layout.hash
    prelude = _PRELUDE.pack(_MAGIC, *kind, *sizes)
    checksum = _CHECKSUM.pack(_digest(prelude + own))
    return prelude, checksum, own, layout.raw, bytes(body_offset - head_bytes)


class _Prelude(NamedTuple):
    layout_bytes: int
    layout_hash: int
    figure_bytes: int
    body_bytes: int
    checksum: int
    head_bytes: int
    """Padding not included."""
    open_count: int


def _parse_prelude(prelude: memoryview) -> _Prelude:
    if len(prelude) < PRELUDE_BYTES:
        raise PayloadCorruptError("a payload is shorter than its prelude")
    magic, version, open_count, layout_bytes, layout_hash, *sizes = _PRELUDE.unpack_from(prelude)
    figure_bytes, attribute_bytes, body_bytes = sizes
    if magic != _MAGIC:
        raise PayloadCorruptError("the bytes are not a payload: their magic differs")
    if version not in (FORMAT_VERSION, OPEN_FORMAT_VERSION):
        raise PayloadFormatError(version, OPEN_FORMAT_VERSION)
    if bool(open_count) != (version == OPEN_FORMAT_VERSION):
        raise PayloadCorruptError(f"a payload of version {version} has {open_count} lengths")
    head_bytes = PRELUDE_BYTES + layout_bytes + figure_bytes + attribute_bytes
    if head_bytes > HEAD_BYTES_MAX:
        raise PayloadCorruptError(f"a payload declares a head of {head_bytes} bytes")
    (checksum,) = _CHECKSUM.unpack_from(prelude, _PRELUDE.size)
    return _Prelude(
        *(layout_bytes, layout_hash, figure_bytes, body_bytes, checksum, head_bytes, open_count)
    )
