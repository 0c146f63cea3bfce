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

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from breadbox.errors import PayloadCorruptError, PayloadFormatError, UnsupportedArrayError
from breadbox.payload.codecs import Codecs, Encoded, choose, decode_into, encode, require_plausible
from breadbox.payload.dtypes import as_leaf, byte_view, parse_dtype, stored_array
from breadbox.payload.limits import (
    ALIGNMENT_BYTES,
    ARRAYS_MAX,
    ATTRIBUTE_CHARACTERS_MAX,
    ATTRIBUTES_MAX,
    CHECKSUM_BLOCK_BYTES,
    CHECKSUM_BLOCK_BYTES_MIN,
    CHECKSUM_BLOCKS_MAX,
    DIMENSIONS_MAX,
    HEADER_BYTES_MAX,
    NAME_CHARACTERS_MAX,
    NODES_MAX,
    PAYLOAD_BYTES_MAX,
    TREE_DEPTH_MAX,
)
from breadbox.payload.trees import Structure, Tree, flatten, join_path, unflatten
from breadbox.v1 import payload_pb2

FORMAT_VERSION: Final = 1

_MAGIC: Final = b"BREADBOX"
_PRELUDE: Final = struct.Struct("<8sHHIQQ")
PRELUDE_BYTES: Final = _PRELUDE.size


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array as a header describes it; everything in here has been checked."""

    name: str
    type_name: str
    dtype: np.dtype[Any]
    """Of the stored elements: unsigned 16-bit for "bfloat16"."""
    shape: tuple[int, ...]
    codec: int
    offset_bytes: int
    """From the start of the payload."""
    size_bytes: int
    """Encoded."""
    block_bytes: int
    block_checksums: Sequence[int]
    parameters: Mapping[str, str]

    @property
    def is_raw(self) -> bool:
        """Whether the encoded bytes are the elements themselves."""
        return self.codec == payload_pb2.CODEC_RAW

    def describe(self) -> str:
        """Type and shape, for messages."""
        return f"{self.type_name}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Head:
    """A payload's head, read and checked."""

    size_bytes: int
    structure: Structure
    arrays: tuple[StoredArray, ...]
    attributes: Mapping[str, str]


def encode_tree(
    tree: Tree, *, attributes: Mapping[str, str] | None = None, codecs: Codecs = "raw"
) -> list[memoryview]:
    """Encode a tree of arrays as a payload.

    Contiguous arrays are not copied: the buffers returned are their own memory, so leave them
    unchanged until the payload is written. Arrays that are not contiguous are copied, only those.

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
    structure, leaves = flatten(tree)
    if len(leaves) > ARRAYS_MAX:
        raise UnsupportedArrayError("", f"{len(leaves)} arrays; the limit is {ARRAYS_MAX}")
    header = payload_pb2.PayloadHeader()
    body: list[memoryview] = []
    body_bytes = 0
    block_bytes = CHECKSUM_BLOCK_BYTES
    encoded_leaves = [(path, *_encode_leaf(path, leaf, codecs)) for path, leaf in leaves]
    total_bytes = sum(len(encoded.buffer) for *_, encoded in encoded_leaves)
    while total_bytes // block_bytes + len(leaves) > CHECKSUM_BLOCKS_MAX // 2:
        block_bytes *= 2
    for path, array, type_name, encoded in encoded_leaves:
        padding = -body_bytes % ALIGNMENT_BYTES
        if padding:
            body.append(memoryview(bytes(padding)))
            body_bytes += padding
        header.arrays.append(
            payload_pb2.ArrayHeader(
                name=path,
                dtype=type_name,
                shape=array.shape,
                codec=encoded.codec,  # type: ignore[arg-type]
                offset_bytes=body_bytes,
                size_bytes=len(encoded.buffer),
                block_checksums=checksums(encoded.buffer, block_bytes),
                codec_parameters=encoded.parameters,
            )
        )
        if len(encoded.buffer):
            body.append(encoded.buffer)
            body_bytes += len(encoded.buffer)
    _fill_header(header, structure, body_bytes, block_bytes, attributes or {})
    return [_encode_head(header, body_bytes), *body]


def head_bytes_of(prelude: memoryview) -> int:
    """Tell from a payload's first bytes how long its head is, padding not included.

    Raises:
        PayloadFormatError: The payload is of another format version.
        PayloadCorruptError: This is not a payload, or its header is beyond the limit.
    """
    _, header_bytes, _, _ = _parse_prelude(prelude)
    return PRELUDE_BYTES + header_bytes


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
    version, header_bytes, checksum, declared_bytes = _parse_prelude(head)
    del version
    if declared_bytes != size_bytes:
        raise PayloadCorruptError(
            f"a payload of {size_bytes} bytes says that it has {declared_bytes}"
        )
    if len(head) < PRELUDE_BYTES + header_bytes:
        raise PayloadCorruptError("a payload ends within its header")
    raw_header = head[PRELUDE_BYTES : PRELUDE_BYTES + header_bytes]
    if xxhash.xxh3_64_intdigest(raw_header) != checksum:
        raise PayloadCorruptError("a payload's header fails its checksum")
    try:
        header = payload_pb2.PayloadHeader.FromString(bytes(raw_header))
    except DecodeError as error:
        raise PayloadCorruptError("a payload's header is not a PayloadHeader") from error
    body_offset = _align(PRELUDE_BYTES + header_bytes)
    if header.body_size_bytes < 0 or body_offset + header.body_size_bytes != size_bytes:
        raise PayloadCorruptError(
            f"a payload of {size_bytes} bytes declares a body of {header.body_size_bytes} bytes "
            f"from byte {body_offset} on"
        )
    arrays = _parse_arrays(header, body_offset)
    structure = _parse_structure(header.tree, [each.name for each in arrays])
    if len(header.attributes) > ATTRIBUTES_MAX:
        raise PayloadCorruptError(f"a payload has {len(header.attributes)} attributes")
    return Head(size_bytes, structure, arrays, dict(header.attributes))


def decode_tree(
    payload: bytes | bytearray | memoryview, *, is_verified: bool = False
) -> tuple[Tree, dict[str, str]]:
    """Decode a payload.

    Raw arrays are views of `payload`: writable if it is, and valid as long as its memory.

    Args:
        payload: The whole payload.
        is_verified: The checksums of the arrays have been checked already.

    Returns:
        The tree, and the attributes.

    Raises:
        PayloadFormatError: The payload is of another format version.
        PayloadCorruptError: The payload is damaged, truncated or beyond a limit.
        UnsupportedArrayError: It has bfloat16 arrays and torch is not installed.
    """
    view = memoryview(payload).cast("B")
    head = parse_head(view, len(view))
    leaves = []
    for stored in head.arrays:
        encoded = view[stored.offset_bytes : stored.offset_bytes + stored.size_bytes]
        if not is_verified:
            verify(stored, encoded)
        if stored.is_raw:
            array = np.frombuffer(encoded, dtype=stored.dtype).reshape(stored.shape)
        else:
            array = np.empty(stored.shape, dtype=stored.dtype)
            decode_into(array, encoded, stored.codec, stored.parameters)
        leaves.append(as_leaf(array, stored.type_name))
    return unflatten(head.structure, leaves), dict(head.attributes)


def checksums(buffer: memoryview, block_bytes: int) -> list[int]:
    """XXH3-64 of each block of a buffer, in order; none of an empty one."""
    digest = xxhash.xxh3_64_intdigest
    return [
        digest(buffer[start : start + block_bytes]) for start in range(0, len(buffer), block_bytes)
    ]


def verify(stored: StoredArray, encoded: memoryview, *, first_block: int = 0) -> None:
    """Check encoded bytes of an array against its checksums.

    Args:
        stored: The array.
        encoded: Its encoded bytes from the start of `first_block`, to the end of a block.
        first_block: Number of the block that `encoded` starts with.

    Raises:
        PayloadCorruptError: A checksum differs; names the array and the block.
    """
    digest = xxhash.xxh3_64_intdigest
    block_bytes = stored.block_bytes
    for block, start in enumerate(range(0, len(encoded), block_bytes), first_block):
        if digest(encoded[start : start + block_bytes]) != stored.block_checksums[block]:
            raise PayloadCorruptError(
                f"array {stored.name!r} fails its checksum in block {block} "
                f"(bytes from {block * block_bytes})"
            )


def _encode_leaf(path: str, leaf: Any, codecs: Codecs) -> tuple[NDArray[Any], str, Encoded]:
    array, type_name = stored_array(path, leaf)
    if len(path) > NAME_CHARACTERS_MAX:
        raise UnsupportedArrayError(path[:60] + "...", "the path is too long")
    if array.ndim > DIMENSIONS_MAX:
        raise UnsupportedArrayError(path, f"{array.ndim} axes; the limit is {DIMENSIONS_MAX}")
    if _extent_bytes(array.shape, array.dtype) > PAYLOAD_BYTES_MAX:
        raise UnsupportedArrayError(path, f"shape {array.shape} is beyond {PAYLOAD_BYTES_MAX}")
    contiguous = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return array, type_name, encode(contiguous, choose(codecs, path))


def _fill_header(
    header: payload_pb2.PayloadHeader,
    structure: Structure,
    body_bytes: int,
    block_bytes: int,
    attributes: Mapping[str, str],
) -> None:
    header.body_size_bytes = body_bytes
    header.checksum_block_bytes = block_bytes
    if len(attributes) > ATTRIBUTES_MAX:
        raise UnsupportedArrayError("", f"more than {ATTRIBUTES_MAX} attributes")
    try:
        _fill_node(header.tree, structure)
        for name, text in attributes.items():
            if max(len(name), len(text)) > ATTRIBUTE_CHARACTERS_MAX:
                raise UnsupportedArrayError("", f"attribute {name[:40]!r} is too long")
            header.attributes[name] = text
    except (UnicodeEncodeError, ValueError) as error:
        if isinstance(error, UnsupportedArrayError):
            raise
        raise UnsupportedArrayError("", "a key or attribute is not UTF-8 text") from error


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


def _encode_head(header: payload_pb2.PayloadHeader, body_bytes: int) -> memoryview:
    raw_header = header.SerializeToString()
    if len(raw_header) > HEADER_BYTES_MAX:
        raise UnsupportedArrayError("", f"the header has {len(raw_header)} bytes")
    padded_bytes = _align(PRELUDE_BYTES + len(raw_header))
    size_bytes = padded_bytes + body_bytes
    if size_bytes > PAYLOAD_BYTES_MAX:
        raise UnsupportedArrayError("", f"the payload has {size_bytes} bytes")
    prelude = _PRELUDE.pack(
        _MAGIC,
        FORMAT_VERSION,
        0,
        len(raw_header),
        xxhash.xxh3_64_intdigest(raw_header),
        size_bytes,
    )
    return memoryview((prelude + raw_header).ljust(padded_bytes, b"\0"))


def _parse_prelude(prelude: memoryview) -> tuple[int, int, int, int]:
    """Return (format version, header bytes, header checksum, payload bytes)."""
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
    return version, header_bytes, checksum, size_bytes


def _parse_arrays(header: payload_pb2.PayloadHeader, body_offset: int) -> tuple[StoredArray, ...]:
    if len(header.arrays) > ARRAYS_MAX:
        raise PayloadCorruptError(f"a payload has {len(header.arrays)} arrays")
    if not CHECKSUM_BLOCK_BYTES_MIN <= header.checksum_block_bytes <= PAYLOAD_BYTES_MAX:
        raise PayloadCorruptError(
            f"a payload has checksum blocks of {header.checksum_block_bytes} bytes"
        )
    arrays = []
    names = set()
    end = 0
    for each in header.arrays:
        stored = _parse_array(each, body_offset, header.checksum_block_bytes)
        if each.offset_bytes < end:
            raise PayloadCorruptError(f"array {stored.name!r} overlaps the one before it")
        end = each.offset_bytes + each.size_bytes
        if end > header.body_size_bytes:
            raise PayloadCorruptError(f"array {stored.name!r} ends behind the body")
        names.add(stored.name)
        arrays.append(stored)
    if len(names) != len(arrays):
        raise PayloadCorruptError("two arrays of a payload have the same name")
    return tuple(arrays)


def _parse_array(each: payload_pb2.ArrayHeader, body_offset: int, block_bytes: int) -> StoredArray:
    name = each.name[:NAME_CHARACTERS_MAX]
    if len(each.name) > NAME_CHARACTERS_MAX:
        raise PayloadCorruptError(f"an array's name is too long: {name[:40]!r}...")
    dtype = parse_dtype(each.dtype)
    shape = tuple(each.shape)
    if len(shape) > DIMENSIONS_MAX or any(length < 0 for length in shape):
        raise PayloadCorruptError(f"array {name!r} has an impossible shape")
    if _extent_bytes(shape, dtype) > PAYLOAD_BYTES_MAX:
        raise PayloadCorruptError(f"array {name!r} has an impossible shape")
    if each.offset_bytes < 0 or each.offset_bytes % ALIGNMENT_BYTES or each.size_bytes < 0:
        raise PayloadCorruptError(f"array {name!r} is at an impossible place")
    raw_bytes = math.prod(shape) * dtype.itemsize
    require_plausible(each.codec, each.size_bytes, raw_bytes)
    if len(each.block_checksums) != -(-each.size_bytes // block_bytes):
        raise PayloadCorruptError(f"array {name!r} has {len(each.block_checksums)} checksums")
    return StoredArray(
        name=name,
        type_name=each.dtype,
        dtype=dtype,
        shape=shape,
        codec=each.codec,
        offset_bytes=body_offset + each.offset_bytes,
        size_bytes=each.size_bytes,
        block_bytes=block_bytes,
        block_checksums=each.block_checksums,
        parameters=dict(each.codec_parameters),
    )


def _extent_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Bytes of an array if no axis were empty: numpy bounds this, not only the true size."""
    return math.prod(max(1, length) for length in shape) * dtype.itemsize


def _parse_structure(root: payload_pb2.TreeNode, names: Sequence[str]) -> Structure:
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
                key: visit(child, join_path(path, key), depth + 1)
                for key, child in zip(keys, node.dict.values, strict=True)
            }
        if kind == "list":
            return [
                visit(child, join_path(path, i), depth + 1)
                for i, child in enumerate(node.list.items)
            ]
        if kind == "tuple":
            return tuple(
                visit(child, join_path(path, i), depth + 1)
                for i, child in enumerate(node.tuple.items)
            )
        raise PayloadCorruptError("a payload's tree has a node of no known kind")

    structure = visit(root, "", 0)
    if next_index != len(names):
        raise PayloadCorruptError("a payload has arrays that its tree does not name")
    return structure


def _align(offset_bytes: int) -> int:
    return offset_bytes + -offset_bytes % ALIGNMENT_BYTES


__all__ = [
    "FORMAT_VERSION",
    "PRELUDE_BYTES",
    "Head",
    "StoredArray",
    "byte_view",
    "checksums",
    "decode_tree",
    "encode_tree",
    "head_bytes_of",
    "parse_head",
    "verify",
]
