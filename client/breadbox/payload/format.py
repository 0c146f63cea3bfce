"""The payload format, version 1, byte by byte.

All numbers are little-endian.

    offset   bytes  what
    0        8      magic: "BREADBOX" in ASCII
    8        2      format version: 1
    10       2      flags: 0; a reader refuses any other value
    12       4      L, bytes of the layout section
    16       8      XXH3-64 of the layout section: its hash
    24       4      C, bytes of the checksums section
    28       4      A, bytes of the attributes section
    32       8      bytes of the body
    40       8      XXH3-64 of bytes 0 to 39 and of the checksums and attributes sections
    48       C      checksums: 64-bit numbers; first the encoded bytes of each array that is not
                    raw, in order of the tree, then the XXH3-64 of each block of each array's
                    encoded bytes, in order of the body
    48+C     A      attributes: a protobuf message breadbox.v1.PayloadAttributes
    48+C+A   L      layout: a protobuf message breadbox.v1.PayloadLayout
    ...      0-63   zeros, up to the next multiple of 64
    B        -      body: the arrays' encoded bytes, raw arrays first, then the others, each in
                    order of the tree and from a multiple of 64 counted from B, with zeros between
                    them; nothing behind the last

The first 48 bytes are the *prelude*, prelude to padding is the *head*.
The layout holds the tree, and per array its type, shape and codec; it is the same in all payloads
of one kind, so readers know it by its bytes, and where raw arrays are follows from it alone. What
differs from payload to payload are the other two sections.
Blocks are counted from an array's own start, so any part of an array can be verified by reading
whole blocks. An array without elements has none. An array whose encoded bytes are as many as those
of its elements is these elements, whatever its codec: encoding it saved nothing.

What a raw array holds is its elements in row-major order, nothing else. Nothing in a payload is
ever executed, and a reader checks every size against the payload's own before it allocates.
"""

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from breadbox.model.errors import PayloadCorruptError, PayloadFormatError, UnsupportedArrayError
from breadbox.model.trees import (
    TREE_DEPTH_MAX,
    Structure,
    Tree,
    flatten_leaves,
    paths_of,
    unflatten,
)
from breadbox.payload.codecs import (
    Codecs,
    Encoded,
    choose,
    decode_into,
    encode,
    require_plausible,
)
from breadbox.payload.dtypes import as_leaf, byte_view, parse_dtype, stored_array
from breadbox.payload.layout import (
    Layout,
    LayoutReader,
    Places,
    StoredArray,
    aligned,
    make_layout,
    pack_figures,
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

_MAGIC: Final = b"BREADBOX"
_PRELUDE: Final = struct.Struct("<8sHHIQIIQ")
_CHECKSUM: Final = struct.Struct("<Q")
CHECKSUMMED_PRELUDE_BYTES: Final = _PRELUDE.size
"""Bytes of a prelude in front of its checksum."""
PRELUDE_BYTES: Final = CHECKSUMMED_PRELUDE_BYTES + _CHECKSUM.size

_JOIN_BYTES: Final = 16 * 1024
"""Neighbouring buffers up to this size are joined: a copy costs less than a buffer more to send."""

_SMALL_BODY_BYTES: Final = 16 * 1024
"""Bodies up to this size are joined with their head, for the same reason."""

_layout_reader = LayoutReader()
_layouts: OrderedDict[Hashable, tuple[Structure, Layout]] = OrderedDict()
_recognised: dict[Hashable, Layout] = {}
"""Layouts by the signature of usual trees: found without naming a leaf."""
_layouts_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Head:
    """A payload's head, read and checked."""

    layout: Layout
    places: Places
    body_offset: int
    """Where the body starts in the payload."""
    figures: Sequence[int]
    """Figures of the checksums section; see `Places`."""
    raw_attributes: bytes

    def is_raw(self, index: int) -> bool:
        """Whether an array's encoded bytes are its elements themselves, in this payload."""
        return self.places.sizes[index] == self.layout.arrays[index].raw_bytes


def encode_tree(
    tree: Tree, *, attributes: Mapping[str, str] | None = None, codecs: Codecs = "raw"
) -> list[memoryview]:
    """Encode a tree of arrays as a payload.

    Contiguous arrays are not copied, but for small ones: the buffers returned are their own
    memory, so leave them unchanged until the payload is written. Of arrays that are not
    contiguous, only themselves are copied.

    Args:
        tree: Nested dicts, lists and tuples; leaves as `stored_array` takes them, or None.
        attributes: For inspection; never needed to read the arrays.
        codecs: See `breadbox.payload.codecs`.

    Returns:
        Buffers that, joined, are the payload.

    Raises:
        UnsupportedArrayError: A leaf cannot be stored, or the tree is beyond a limit.
        InvalidRequestError: A codec is unknown.
    """
    return encode_with_layout(tree, attributes=attributes or {}, codecs=codecs)[1]


def encode_with_layout(
    tree: Tree, *, attributes: Mapping[str, str] | bytes, codecs: Codecs = "raw"
) -> tuple[Layout, list[memoryview]]:
    """Do as `encode_tree`, and return the layout as well. Trees alike share one layout.

    Attributes may be given as `serialize_attributes` makes them.
    """
    raw_attributes = (
        attributes if isinstance(attributes, bytes) else serialize_attributes(attributes)
    )
    if codecs != "raw":
        return _encode_by_codec(tree, raw_attributes, codecs)
    layout, arrays = _recognise(tree)
    if layout.raw_places.body_bytes <= _SMALL_BODY_BYTES:
        return layout, [_small_payload(layout, [each.tobytes() for each in arrays], raw_attributes)]
    # A copy of a small array costs less than a view of it.
    buffers = [
        array.tobytes()
        if array.nbytes <= _JOIN_BYTES
        else byte_view(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        for array in arrays
    ]
    return layout, _assemble(layout, buffers, raw_attributes)


def head_bytes_of(prelude: memoryview) -> int:
    """Tell from a payload's first bytes how long its head is, padding not included.

    Raises:
        PayloadFormatError: The payload is of another format version.
        PayloadCorruptError: This is not a payload, or its head is beyond the limit.
    """
    return _parse_prelude(prelude).head_bytes


def parse_head(head: memoryview, size_bytes: int) -> Head:
    """Read and check a payload's head.

    Args:
        head: At least `head_bytes_of` bytes from the payload's start.
        size_bytes: Bytes of the payload, as the store reports them.

    Raises:
        PayloadFormatError: The payload is of another format version.
        PayloadCorruptError: The head is damaged, contradicts itself or `size_bytes`, or is beyond
            a limit.
    """
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
    figure_count, rest_bytes = divmod(prelude.figure_bytes, _CHECKSUM.size)
    if rest_bytes or figure_count < len(layout.encoded):
        raise PayloadCorruptError(f"a payload has {prelude.figure_bytes} bytes of checksums")
    figures = struct.unpack_from(f"<{figure_count}Q", own)
    places = _place(layout, figures[: len(layout.encoded)])
    if places.figure_count != figure_count:
        raise PayloadCorruptError(
            f"a payload has {figure_count} sizes and checksums, its arrays {places.figure_count}"
        )
    if figure_count > CHECKSUM_BLOCKS_MAX + len(layout.encoded):
        raise PayloadCorruptError(f"a payload has {figure_count} checksums")
    if places.body_bytes != prelude.body_bytes:
        raise PayloadCorruptError(
            f"a payload declares a body of {prelude.body_bytes} bytes, its arrays take "
            f"{places.body_bytes}"
        )
    return Head(layout, places, body_offset, figures, own[prelude.figure_bytes :])


def decode_tree(
    payload: bytes | bytearray | memoryview, *, check: Callable[[Layout], None] = lambda _: None
) -> tuple[Tree, dict[str, str]]:
    """Decode a payload, and verify it.

    Raw arrays are views of `payload`: writable if it is, and valid as long as its memory.

    Args:
        payload: All of its bytes.
        check: Called with what the payload says of itself before its arrays are decoded; what it
            raises is raised here.

    Returns:
        The tree, and the attributes.

    Raises:
        PayloadFormatError: The payload is of another format version.
        PayloadCorruptError: The payload is damaged, truncated or beyond a limit.
        UnsupportedArrayError: It has bfloat16 arrays and torch is not installed.
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
    """XXH3-64 of each block of a buffer, in order; none of an empty one."""
    digest = xxhash.xxh3_64_intdigest
    if len(buffer) <= block_bytes:
        return [digest(buffer)] if len(buffer) else []
    return [
        digest(buffer[start : start + block_bytes]) for start in range(0, len(buffer), block_bytes)
    ]


def verify(head: Head, index: int, encoded: memoryview, *, first_block: int = 0) -> None:
    """Check encoded bytes of an array against its checksums.

    Args:
        head: Of the payload.
        index: Of the array.
        encoded: Its encoded bytes from the start of `first_block`, to the end of a block.
        first_block: Number of the block that `encoded` starts with.

    Raises:
        PayloadCorruptError: A checksum differs; names the array and the block.
    """
    layout = head.layout
    first = head.places.first_figures[index]
    for block, actual in enumerate(checksums(encoded, layout.block_bytes), first_block):
        if actual != head.figures[first + block]:
            raise PayloadCorruptError(
                f"array {layout.arrays[index].name!r} fails its checksum in block {block} "
                f"of {layout.block_bytes} bytes"
            )


_NO_PARAMETERS: Final[Mapping[str, str]] = {}


class _UnusualTreeError(Exception):
    """A tree has a leaf whose stored form is not found by a quick look."""


def _recognise(tree: Tree) -> tuple[Layout, Sequence[NDArray[Any]]]:
    """Find the layout of a tree's raw payloads, and its leaves as arrays of the stored types."""
    leaves: list[NDArray[Any]] = []
    parts: list[Hashable] = []
    try:
        _sign((tree,), parts, leaves, TREE_DEPTH_MAX)
    except _UnusualTreeError:
        return _examine(tree)
    signature = tuple(parts)
    known = _recognised.get(signature)
    if known is not None:
        return known, leaves
    layout, arrays = _examine(tree)
    if any(each.dtype.kind not in "buif" for each in leaves):
        return layout, arrays
    with _layouts_lock:
        _recognised[signature] = layout
        while len(_recognised) > LAYOUTS_MAX:
            del _recognised[next(iter(_recognised))]
    return layout, arrays


_ndarray = np.ndarray


def _sign(
    nodes: Iterable[Tree], parts: list[Hashable], leaves: list[NDArray[Any]], depth_left: int
) -> None:
    """Append what trees of one layout have in common, and no others; collect the leaves.

    Raises:
        _UnusualTreeError: A tree may not be storable, or not as it is.
    """
    for node in nodes:
        kind = type(node)
        if kind is _ndarray:  # First, because most are.
            leaves.append(node)
            parts += (node.dtype, node.shape)
        elif node is None:
            parts.append(None)
        elif depth_left <= 0:
            raise _UnusualTreeError
        elif kind is dict:
            parts.append((dict, *node))
            _sign(node.values(), parts, leaves, depth_left - 1)
        elif kind is list or kind is tuple:
            parts.append((kind, len(node)))
            _sign(node, parts, leaves, depth_left - 1)
        else:
            raise _UnusualTreeError


def _examine(tree: Tree) -> tuple[Layout, Sequence[NDArray[Any]]]:
    """Do as `_recognise`, for any tree, and refuse one that cannot be stored."""
    structure, arrays, type_names = _stored_leaves(tree)
    codecs = [(payload_pb2.CODEC_RAW, _NO_PARAMETERS)] * len(arrays)
    return _layout_of(structure, arrays, type_names, codecs), arrays


def _stored_leaves(tree: Tree) -> tuple[Structure, list[NDArray[Any]], list[str]]:
    """Return a tree's structure, and its leaves as arrays of the stored types, with their types."""
    structure, leaves = flatten_leaves(tree)
    arrays, type_names = [], []
    for position, leaf in enumerate(leaves):
        try:
            array, type_name = stored_array("", leaf)
        except UnsupportedArrayError as error:
            raise UnsupportedArrayError(paths_of(structure)[position], error.problem) from None
        arrays.append(array)
        type_names.append(type_name)
    return structure, arrays, type_names


def _layout_of(
    structure: Structure,
    arrays: Sequence[NDArray[Any]],
    type_names: Sequence[str],
    codecs: Sequence[tuple[int, Mapping[str, str]]],
) -> Layout:
    """Return the layout of payloads of these types, shapes, codecs and this structure."""
    key = tuple(
        [
            (type_name, array.shape, codec, *parameters.items())
            for array, type_name, (codec, parameters) in zip(
                arrays, type_names, codecs, strict=True
            )
        ]
    )
    with _layouts_lock:
        known = _layouts.get(key)
    if known is not None and known[0] == structure:
        return known[1]
    stored = []
    for path, array, type_name, (codec, parameters) in zip(
        paths_of(structure), arrays, type_names, codecs, strict=True
    ):
        dtype = parse_dtype(type_name)
        stored.append(
            StoredArray(path, type_name, dtype, array.shape, codec, array.nbytes, parameters)
        )
    layout = make_layout(structure, stored)
    with _layouts_lock:
        _layouts[key] = (structure, layout)
        while len(_layouts) > LAYOUTS_MAX:
            _layouts.popitem(last=False)
    return layout


def _encode_by_codec(
    tree: Tree, raw_attributes: bytes, codecs: Codecs
) -> tuple[Layout, list[memoryview]]:
    structure, arrays, type_names = _stored_leaves(tree)
    expansion = Expansion()
    encoded: list[Encoded] = []
    paths = paths_of(structure)
    for path, array, type_name in zip(paths, arrays, type_names, strict=True):
        contiguous = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        encoded.append(encode(contiguous, type_name, choose(codecs, path), expansion))
    layout = _layout_of(
        structure, arrays, type_names, [(each.codec, each.parameters) for each in encoded]
    )
    return layout, _assemble(layout, [each.buffer for each in encoded], raw_attributes)


def _place(layout: Layout, sizes: Sequence[int]) -> Places:
    """Place the arrays of a payload, its encoded ones of these sizes, if they can be true.

    Raises:
        PayloadCorruptError: A size is impossible, or more would be made of it than is taken.
    """
    expansion = Expansion()
    for index, size_bytes in zip(layout.encoded, sizes, strict=True):
        stored = layout.arrays[index]
        if size_bytes != stored.raw_bytes:  # Else its elements themselves.
            require_plausible(
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
    layout: Layout, buffers: Sequence[bytes | memoryview], raw_attributes: bytes
) -> list[memoryview]:
    """Return head and arrays with the padding between them, small neighbours joined."""
    sizes = [len(buffers[index]) for index in layout.encoded]
    places = layout.place(sizes)
    figures = list(sizes)
    for index in layout.order:
        figures += checksums(buffers[index], layout.block_bytes)
    payload: list[memoryview] = []
    small: list[bytes | memoryview] = [*_head(layout, places.body_bytes, figures, raw_attributes)]
    end = 0
    for index in layout.order:
        buffer, offset = buffers[index], places.offsets[index]
        small.append(bytes(offset - end))
        end = offset + len(buffer)
        if len(buffer) <= _JOIN_BYTES:
            small.append(buffer)
        else:
            payload += [memoryview(b"".join(small)), memoryview(buffer)]
            small = []
    if small:
        payload.append(memoryview(b"".join(small)))
    return payload


def _small_payload(layout: Layout, raws: Sequence[bytes], raw_attributes: bytes) -> memoryview:
    """Return a payload of raw arrays that have one checksum block each, or are empty."""
    figures = map(xxhash.xxh3_64_intdigest, filter(None, raws))
    parts = _head(layout, layout.raw_places.body_bytes, [*figures], raw_attributes)
    body = [*layout.gaps_between]
    body[1::2] = raws
    parts += body
    return memoryview(b"".join(parts))


def _head(
    layout: Layout, body_bytes: int, figures: Sequence[int], raw_attributes: bytes
) -> list[bytes]:
    """Return the parts of a head, padding included."""
    own = pack_figures(figures) + raw_attributes
    prelude, padding = _frame(layout, len(figures), len(raw_attributes), body_bytes)
    checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(prelude + own))
    return [prelude, checksum, own, layout.raw, padding]


@lru_cache(maxsize=64)
def _frame(
    layout: Layout, figure_count: int, attribute_bytes: int, body_bytes: int
) -> tuple[bytes, bytes]:
    """Return what a head begins with, checksum not included, and its padding."""
    figure_bytes = figure_count * _CHECKSUM.size
    head_bytes = PRELUDE_BYTES + figure_bytes + attribute_bytes + len(layout.raw)
    if head_bytes > HEAD_BYTES_MAX:
        raise UnsupportedArrayError("", f"the head has {head_bytes} bytes")
    body_offset = aligned(head_bytes)
    if body_offset + body_bytes > PAYLOAD_BYTES_MAX:
        raise UnsupportedArrayError("", f"the payload has {body_offset + body_bytes} bytes")
    prelude = _PRELUDE.pack(
        _MAGIC,
        FORMAT_VERSION,
        0,
        len(layout.raw),
        layout.hash,
        figure_bytes,
        attribute_bytes,
        body_bytes,
    )
    return prelude, bytes(body_offset - head_bytes)


class _Prelude(NamedTuple):
    """What a payload's first bytes say."""

    layout_bytes: int
    layout_hash: int
    figure_bytes: int
    body_bytes: int
    checksum: int
    head_bytes: int
    """Padding not included."""


def _parse_prelude(prelude: memoryview) -> _Prelude:
    if len(prelude) < PRELUDE_BYTES:
        raise PayloadCorruptError("a payload is shorter than its prelude")
    magic, version, flags, layout_bytes, layout_hash, figure_bytes, attribute_bytes, body_bytes = (
        _PRELUDE.unpack_from(prelude)
    )
    if magic != _MAGIC:
        raise PayloadCorruptError("the bytes are not a payload: their magic differs")
    if version != FORMAT_VERSION:
        raise PayloadFormatError(version, FORMAT_VERSION)
    if flags:
        raise PayloadCorruptError(f"a payload has unknown flags: {flags:#06x}")
    head_bytes = PRELUDE_BYTES + layout_bytes + figure_bytes + attribute_bytes
    if head_bytes > HEAD_BYTES_MAX:
        raise PayloadCorruptError(f"a payload declares a head of {head_bytes} bytes")
    (checksum,) = _CHECKSUM.unpack_from(prelude, _PRELUDE.size)
    return _Prelude(layout_bytes, layout_hash, figure_bytes, body_bytes, checksum, head_bytes)
