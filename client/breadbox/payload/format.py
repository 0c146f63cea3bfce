"""The payload format, version 1, byte by byte.

All numbers are little-endian.

    offset   bytes  what
    0        8      magic: "BREADBOX" in ASCII
    8        2      format version: 1
    10       2      flags: 0; a reader refuses any other value
    12       4      H, bytes of the header
    16       8      XXH3-64 of the header's bytes
    24       8      bytes of the whole payload
    32       H      header: a protobuf message breadbox.v1.PayloadHeader
    32+H     0-63   zeros, up to the next multiple of 64
    B        -      body: the arrays' encoded bytes, each from a multiple of 64 counted from B,
                    with zeros between them; in the order of the header; nothing behind the last

The first three lines are the *prelude* (32 bytes), prelude to padding is the *head*.
The header holds the tree, and per array its name, type, shape, codec, place in the body, and the
XXH3-64 of each block of its encoded bytes, counted from the array's own start. So any part of an
array can be verified by reading whole blocks.

What a raw array holds is its elements in row-major order, nothing else. Nothing in a payload is
ever executed, and a reader checks every size against the payload's own before it allocates.
"""

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from breadbox.errors import PayloadCorruptError, PayloadFormatError, UnsupportedArrayError
from breadbox.payload.auto import picker
from breadbox.payload.codecs import Codecs, Encoded, choose, decode_into, encode
from breadbox.payload.dtypes import as_leaf, byte_view, parse_dtype, stored_array
from breadbox.payload.header import (
    BlockChecksums,
    HeaderReader,
    HeaderTemplate,
    extent_bytes,
    serialize_attributes,
    serialize_header,
)
from breadbox.payload.layout import Layout, StoredArray
from breadbox.payload.limits import (
    ALIGNMENT_BYTES,
    ARRAYS_MAX,
    CHECKSUM_BLOCK_BYTES,
    CHECKSUM_BLOCKS_MAX,
    DIMENSIONS_MAX,
    HEADER_BYTES_MAX,
    NAME_CHARACTERS_MAX,
    PAYLOAD_BYTES_MAX,
    Expansion,
)
from breadbox.trees import (
    TREE_DEPTH_MAX,
    Structure,
    Tree,
    flatten,
    flatten_leaves,
    paths_of,
    unflatten,
)
from breadbox.v1 import payload_pb2

FORMAT_VERSION: Final = 1

_MAGIC: Final = b"BREADBOX"
_PRELUDE: Final = struct.Struct("<8sHHIQQ")
PRELUDE_BYTES: Final = _PRELUDE.size

_JOIN_BYTES: Final = 16 * 1024
"""Neighbouring buffers up to this size are joined: a copy costs less than a buffer more to send."""

_SMALL_BODY_BYTES: Final = 16 * 1024
"""Bodies up to this size are joined with their head, for the same reason."""

_TEMPLATES_MAX: Final = 64
"""Layouts that a writer remembers: more kinds of fragment than one process makes."""

_header_reader = HeaderReader()
_templates: OrderedDict[Hashable, tuple[Structure, HeaderTemplate]] = OrderedDict()
_recognised: dict[Hashable, HeaderTemplate] = {}
"""Templates by the signature of usual trees: found without naming a leaf."""
_templates_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Head:
    """A payload's head, read and checked."""

    layout: Layout
    body_offset: int
    """Where the body starts in the payload."""
    block_checksums: BlockChecksums
    attributes: Mapping[str, str]


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
    template, arrays = _recognise(tree)
    layout = template.layout
    if layout.body_bytes <= _SMALL_BODY_BYTES:
        raws = [array.tobytes() for array in arrays]
        return layout, [_small_payload(template, raws, raw_attributes)]
    # A copy of a small array costs less than a view of it.
    buffers = [
        array.tobytes()
        if array.nbytes <= _JOIN_BYTES
        else byte_view(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        for array in arrays
    ]
    block_checksums = [checksums(buffer, layout.block_bytes) for buffer in buffers]
    raw_header = template.render(block_checksums) + raw_attributes
    return layout, _assemble(layout, raw_header, buffers)


def head_bytes_of(prelude: memoryview) -> int:
    """Tell from a payload's first bytes how long its head is, padding not included.

    Raises:
        PayloadFormatError: The payload is of another format version.
        PayloadCorruptError: This is not a payload, or its header is beyond the limit.
    """
    return PRELUDE_BYTES + _parse_prelude(prelude)[0]


def parse_head(head: memoryview, size_bytes: int) -> Head:
    """Read and check a payload's head.

    Args:
        head: At least `head_bytes_of` bytes from the payload's start.
        size_bytes: Bytes that the payload has, by whoever stores it.

    Raises:
        PayloadFormatError: The payload is of another format version.
        PayloadCorruptError: The head is damaged, contradicts itself or `size_bytes`, or is beyond
            a limit.
    """
    header_bytes, checksum, declared_bytes = _parse_prelude(head)
    if declared_bytes != size_bytes:
        raise PayloadCorruptError(
            f"a payload of {size_bytes} bytes says that it has {declared_bytes}"
        )
    if len(head) < PRELUDE_BYTES + header_bytes:
        raise PayloadCorruptError("a payload ends within its header")
    raw_header = bytes(head[PRELUDE_BYTES : PRELUDE_BYTES + header_bytes])
    if xxhash.xxh3_64_intdigest(raw_header) != checksum:
        raise PayloadCorruptError("a payload's header fails its checksum")
    layout, block_checksums, attributes = _header_reader.read(raw_header)
    body_offset = _align(PRELUDE_BYTES + header_bytes)
    if body_offset + layout.body_bytes != size_bytes:
        raise PayloadCorruptError(
            f"a payload of {size_bytes} bytes declares a body of {layout.body_bytes} bytes "
            f"from byte {body_offset} on"
        )
    return Head(layout, body_offset, block_checksums, attributes)


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
    check(head.layout)
    leaves = []
    for index, stored in enumerate(head.layout.arrays):
        start = head.body_offset + stored.offset_bytes
        encoded = view[start : start + stored.size_bytes]
        verify(head, index, encoded)
        if stored.is_raw:
            array = np.frombuffer(encoded, dtype=stored.dtype).reshape(stored.shape)
        else:
            array = np.empty(stored.shape, dtype=stored.dtype)
            decode_into(array, encoded, stored.codec, stored.parameters)
        leaves.append(as_leaf(array, stored.type_name))
    return unflatten(head.layout.structure, leaves), dict(head.attributes)


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
    expected = head.block_checksums[index]
    for block, actual in enumerate(checksums(encoded, head.layout.block_bytes), first_block):
        if actual != expected[block]:
            raise PayloadCorruptError(
                f"array {head.layout.arrays[index].name!r} fails its checksum in block {block} "
                f"of {head.layout.block_bytes} bytes"
            )


class _UnusualTreeError(Exception):
    """A tree has something in it that takes more than a look to tell how it is stored."""


def _recognise(tree: Tree) -> tuple[HeaderTemplate, Sequence[NDArray[Any]]]:
    """Find the template for a tree, and its leaves as arrays of the stored types."""
    leaves: list[NDArray[Any]] = []
    try:
        signature = _signature(tree, leaves, TREE_DEPTH_MAX)
    except _UnusualTreeError:
        return _examine(tree)
    known = _recognised.get(signature)
    if known is not None:
        return known, leaves
    template, arrays = _examine(tree)
    with _templates_lock:
        _recognised[signature] = template
        while len(_recognised) > _TEMPLATES_MAX:
            del _recognised[next(iter(_recognised))]
    return template, arrays


def _signature(node: Tree, leaves: list[NDArray[Any]], depth_left: int) -> Hashable:
    """Return what two trees of one layout have in common, and no others; collect the leaves.

    Raises:
        _UnusualTreeError: The tree may not be storable, or not as it is.
    """
    kind = type(node)
    if kind is np.ndarray:  # First, because most are.
        dtype = node.dtype
        if dtype.kind not in "buif":
            raise _UnusualTreeError
        leaves.append(node)
        return dtype, node.shape
    if node is None:
        return None
    depth_left -= 1
    if depth_left <= 0:
        raise _UnusualTreeError
    if kind is dict:
        children = [_signature(child, leaves, depth_left) for child in node.values()]
        return dict, tuple(node), tuple(children)
    if kind is list or kind is tuple:
        return kind, tuple([_signature(child, leaves, depth_left) for child in node])
    raise _UnusualTreeError


def _examine(tree: Tree) -> tuple[HeaderTemplate, Sequence[NDArray[Any]]]:
    """Do as `_recognise`, for any tree, and refuse one that cannot be stored."""
    structure, leaves = flatten_leaves(tree)
    arrays, key = [], []
    for position, leaf in enumerate(leaves):
        array, type_name = _stored_leaf(structure, position, leaf)
        arrays.append(array)
        key.append((type_name, array.shape))
    return _template_for(tuple(key), structure, arrays, leaves), arrays


def _template_for(
    key: Hashable, structure: Structure, arrays: Sequence[NDArray[Any]], leaves: Sequence[Any]
) -> HeaderTemplate:
    """Return the template of raw payloads of these types, shapes and structure."""
    with _templates_lock:
        known = _templates.get(key)
    if known is not None and known[0] == structure:
        return known[1]
    paths = paths_of(structure)
    encoded: list[tuple[str, tuple[int, ...], str, int, int, Mapping[str, str]]] = []
    for path, array, leaf in zip(paths, arrays, leaves, strict=True):
        _, type_name = stored_array(path, leaf)
        _require_within_limits(path, array)
        encoded.append((path, array.shape, type_name, payload_pb2.CODEC_RAW, array.nbytes, {}))
    layout = _lay_out(structure, encoded)
    # Any checksums will do to find their places: distinct ones.
    examples = [
        [(index << 32) | block | 1 << 63 for block in range(layout.block_count(stored))]
        for index, stored in enumerate(layout.arrays)
    ]
    template = HeaderTemplate.make(layout, serialize_header(layout, examples), examples)
    assert template is not None, "the places of checksums in a header of our own"
    with _templates_lock:
        _templates[key] = (structure, template)
        while len(_templates) > _TEMPLATES_MAX:
            _templates.popitem(last=False)
    return template


def _stored_leaf(structure: Structure, position: int, leaf: Any) -> tuple[NDArray[Any], str]:
    try:
        return stored_array("", leaf)
    except UnsupportedArrayError as error:
        raise UnsupportedArrayError(paths_of(structure)[position], error.problem) from None


def _encode_by_codec(
    tree: Tree, raw_attributes: bytes, codecs: Codecs
) -> tuple[Layout, list[memoryview]]:
    structure, leaves = flatten(tree)
    expansion = Expansion()
    encoded: list[tuple[str, NDArray[Any], str, Encoded]] = []
    for path, leaf in leaves:
        array, type_name = stored_array(path, leaf)
        _require_within_limits(path, array)
        contiguous = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        choice = choose(codecs, path)
        if choice.name == "auto":
            choice = picker.pick(path, contiguous, type_name, choice.setting or 0)
        encoded.append((path, array, type_name, encode(contiguous, type_name, choice, expansion)))
    layout = _lay_out(
        structure,
        [
            (path, array.shape, type_name, each.codec, len(each.buffer), each.parameters)
            for path, array, type_name, each in encoded
        ],
    )
    buffers = [each.buffer for *_, each in encoded]
    block_checksums = [checksums(buffer, layout.block_bytes) for buffer in buffers]
    raw_header = serialize_header(layout, block_checksums) + raw_attributes
    return layout, _assemble(layout, raw_header, buffers)


def _lay_out(
    structure: Structure,
    encoded: Sequence[tuple[str, tuple[int, ...], str, int, int, Mapping[str, str]]],
) -> Layout:
    """Give every array its place, each (path, shape, type, codec, encoded bytes, parameters)."""
    if len(encoded) > ARRAYS_MAX:
        raise UnsupportedArrayError("", f"{len(encoded)} arrays; the limit is {ARRAYS_MAX}")
    arrays = []
    end = 0
    for path, shape, type_name, codec, size_bytes, parameters in encoded:
        offset = _align(end)
        dtype = parse_dtype(type_name)
        arrays.append(
            StoredArray(path, type_name, dtype, shape, codec, offset, size_bytes, parameters)
        )
        end = offset + size_bytes
    block_bytes = CHECKSUM_BLOCK_BYTES
    while end // block_bytes + len(arrays) > CHECKSUM_BLOCKS_MAX:
        block_bytes *= 2
    return Layout(structure, tuple(arrays), end, block_bytes)


def _require_within_limits(path: str, array: NDArray[Any]) -> None:
    if len(path) > NAME_CHARACTERS_MAX:
        raise UnsupportedArrayError(path[:60] + "...", "the path is too long")
    if array.ndim > DIMENSIONS_MAX:
        raise UnsupportedArrayError(path, f"{array.ndim} axes; the limit is {DIMENSIONS_MAX}")
    if extent_bytes(array.shape, array.dtype) > PAYLOAD_BYTES_MAX:
        raise UnsupportedArrayError(path, f"shape {array.shape} is beyond {PAYLOAD_BYTES_MAX}")


def _assemble(
    layout: Layout, raw_header: bytes, buffers: Sequence[bytes | memoryview]
) -> list[memoryview]:
    """Return head and arrays with the padding between them, small neighbours joined."""
    head = _head(raw_header, layout)
    if layout.body_bytes <= _SMALL_BODY_BYTES:
        parts = [part for pair in zip(layout.gaps, buffers, strict=True) for part in pair]
        return [memoryview(b"".join([*head, *parts]))]
    payload: list[memoryview] = []
    small: list[bytes | memoryview] = [*head]
    for gap, buffer in zip(layout.gaps, buffers, strict=True):
        small.append(gap)
        if len(buffer) <= _JOIN_BYTES:
            small.append(buffer)
        else:
            payload += [memoryview(b"".join(small)), memoryview(buffer)]
            small = []
    if small:
        payload.append(memoryview(b"".join(small)))
    return payload


def _small_payload(
    template: HeaderTemplate, raws: Sequence[bytes], raw_attributes: bytes
) -> memoryview:
    """Return a payload of raw arrays that have one checksum block each, or are empty."""
    digest = xxhash.xxh3_64_intdigest
    raw_header = template.render_single([digest(raw) for raw in raws if raw]) + raw_attributes
    parts: list[bytes] = list(template.layout.gaps_between)
    parts[1::2] = raws
    return memoryview(b"".join([*_head(raw_header, template.layout), *parts]))


def _head(raw_header: bytes, layout: Layout) -> tuple[bytes, bytes, bytes]:
    """Return prelude, header and padding."""
    header_bytes = len(raw_header)
    if header_bytes > HEADER_BYTES_MAX:
        raise UnsupportedArrayError("", f"the header has {header_bytes} bytes")
    padding_bytes = -(PRELUDE_BYTES + header_bytes) % ALIGNMENT_BYTES
    size_bytes = PRELUDE_BYTES + header_bytes + padding_bytes + layout.body_bytes
    if size_bytes > PAYLOAD_BYTES_MAX:
        raise UnsupportedArrayError("", f"the payload has {size_bytes} bytes")
    checksum = xxhash.xxh3_64_intdigest(raw_header)
    prelude = _PRELUDE.pack(_MAGIC, FORMAT_VERSION, 0, header_bytes, checksum, size_bytes)
    return prelude, raw_header, bytes(padding_bytes)


def _parse_prelude(prelude: memoryview) -> tuple[int, int, int]:
    """Return (header bytes, header checksum, payload bytes)."""
    if len(prelude) < PRELUDE_BYTES:
        raise PayloadCorruptError("a payload is shorter than its prelude")
    magic, version, flags, header_bytes, checksum, size_bytes = _PRELUDE.unpack_from(prelude)
    if magic != _MAGIC:
        raise PayloadCorruptError("the bytes are not a payload: their magic differs")
    if version != FORMAT_VERSION:
        raise PayloadFormatError(version, FORMAT_VERSION)
    if flags:
        raise PayloadCorruptError(f"a payload has unknown flags: {flags:#06x}")
    if header_bytes > HEADER_BYTES_MAX:
        raise PayloadCorruptError(f"a payload declares a header of {header_bytes} bytes")
    return header_bytes, checksum, size_bytes


def _align(offset_bytes: int) -> int:
    return offset_bytes + -offset_bytes % ALIGNMENT_BYTES
