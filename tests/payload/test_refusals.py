"""What cannot be stored is refused by name; what is damaged is refused whatever the damage."""

import contextlib
import math
import struct
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from breadbox.errors import (
    InvalidRequestError,
    PayloadCorruptError,
    PayloadFormatError,
    StoreError,
    UnsupportedArrayError,
)
from breadbox.payload import decode_tree, encode_tree
from breadbox.payload.format import PRELUDE_BYTES, checksums
from breadbox.v1 import payload_pb2
from support.forged_payloads import assemble, with_header
from support.fuzzing import fewer
from support.payload_trees import TYPES, trees

EXAMPLE = {
    "obs": np.arange(600_000, dtype=np.int32),
    "state": [np.zeros((2, 3)), None, (np.array(["a", "bc"]),)],
    "flags": np.ones(9, np.bool_),
}


def payload_of(tree: object = EXAMPLE, codecs: str = "raw") -> bytearray:
    return bytearray(b"".join(encode_tree(tree, attributes={"kind": "test"}, codecs=codecs)))


@pytest.mark.parametrize(
    ("leaf", "problem"),
    [
        (np.array([object()]), "Python objects"),
        (np.array(["a"], dtype=np.dtypes.StringDType()), "Python objects"),
        (np.zeros(2, [("x", "f4")]), "structured"),
        (np.zeros(2, [("x", "O")]), "Python objects"),
        (np.ma.masked_array([1], [True]), "masked"),
        ("text", "str is not an array"),
        (b"bytes", "bytes is not an array"),
        ({1, 2}, "set is not an array"),
        (10**30, "Python objects"),
        (torch.zeros(2).to_sparse(), "cannot be stored"),
    ],
    ids=lambda value: str(type(value).__name__),
)
@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_leaves_that_cannot_be_stored_are_named(leaf: object, problem: str, codec: str) -> None:
    with pytest.raises(UnsupportedArrayError) as caught:
        encode_tree({"obs": {"good": np.zeros(2), "bad": [leaf]}}, codecs=codec)
    assert "obs.bad[0]" == caught.value.path
    assert problem in caught.value.problem


def test_trees_beyond_limits_are_refused() -> None:
    deep: object = np.zeros(1)
    for _ in range(33):
        deep = [deep]
    for tree in (deep, [None] * 70_000, [np.zeros(1)] * 16_385, {1: np.zeros(1)}, {"x" * 2000: 1}):
        with pytest.raises(UnsupportedArrayError):
            encode_tree(tree)


def test_keys_and_attributes_must_be_text() -> None:
    with pytest.raises(UnsupportedArrayError):
        encode_tree({"\ud800": np.zeros(1)})
    with pytest.raises(UnsupportedArrayError):
        encode_tree({}, attributes={"a": "\ud800"})
    with pytest.raises(UnsupportedArrayError):
        encode_tree({}, attributes={"a": "x" * 2000})
    with pytest.raises(UnsupportedArrayError):
        encode_tree({}, attributes={str(number): "" for number in range(65)})


@pytest.mark.parametrize(
    "codec", ["", "gzip", "zstd:0", "zstd:99", "zstd:", "raw:1", "h264:52", "auto:x", "zstd:-1"]
)
def test_codecs_that_are_none_are_refused(codec: str) -> None:
    with pytest.raises(InvalidRequestError):
        encode_tree({"x": np.zeros(10_000)}, codecs=codec)


def test_an_axis_of_nothing_does_not_hide_an_impossible_one() -> None:
    with pytest.raises(UnsupportedArrayError):
        encode_tree(np.zeros((0, 1 << 60), np.uint8))


def test_another_format_version_is_named() -> None:
    payload = payload_of()
    payload[8:10] = (2).to_bytes(2, "little")
    with pytest.raises(PayloadFormatError) as caught:
        decode_tree(payload)
    assert (2, 1) == (caught.value.version, caught.value.supported)


@pytest.mark.parametrize("size_bytes", [0, 1, 31, 32, 63, 200, 400, 1000, 2_000_000, -1])
def test_a_truncated_payload_is_corrupt(size_bytes: int) -> None:
    with pytest.raises(PayloadCorruptError):
        decode_tree(payload_of()[:size_bytes])


def test_a_payload_with_something_behind_it_is_corrupt() -> None:
    with pytest.raises(PayloadCorruptError):
        decode_tree(payload_of() + b"\0")


@pytest.mark.parametrize("codec", ["raw", "lz4", "zstd"])
def test_a_flipped_bit_in_an_array_is_found_and_the_array_named(codec: str) -> None:
    payload = payload_of(codecs=codec)
    payload[len(payload) // 2] ^= 1
    with pytest.raises(PayloadCorruptError, match="'obs' fails its checksum"):
        decode_tree(payload)


def _set_dtype(header: payload_pb2.PayloadHeader, name: str) -> None:
    header.arrays[0].dtype = name


CONTRADICTIONS: dict[str, Callable[[payload_pb2.PayloadHeader], None]] = {
    "object type": lambda header: _set_dtype(header, "|O"),
    "object type in disguise": lambda header: _set_dtype(header, "O8"),
    "structured type": lambda header: _set_dtype(header, "i4,O"),
    "type of no size": lambda header: _set_dtype(header, "|V0"),
    "native byte order": lambda header: _set_dtype(header, "=i4"),
    "type that is none": lambda header: _set_dtype(header, "quux"),
    "huge type": lambda header: _set_dtype(header, "<U999999999"),
    "another type": lambda header: _set_dtype(header, "<i8"),
    "longer shape": lambda header: header.arrays[0].shape.append(2),
    "negative shape": lambda header: header.arrays[0].shape.extend([-1, -1]),
    "overflowing shape": lambda header: header.arrays[0].shape.extend([1 << 62, 1 << 62, 0]),
    "too many axes": lambda header: header.arrays[0].shape.extend([1] * 40),
    "unknown codec": lambda header: setattr(header.arrays[0], "codec", 99),
    "no codec": lambda header: setattr(header.arrays[0], "codec", 0),
    "wrong codec": lambda header: setattr(header.arrays[0], "codec", 2),
    "video of numbers": lambda header: setattr(header.arrays[0], "codec", 4),
    "odd offset": lambda header: setattr(header.arrays[0], "offset_bytes", 1),
    "negative offset": lambda header: setattr(header.arrays[1], "offset_bytes", -64),
    "overlap": lambda header: setattr(header.arrays[1], "offset_bytes", 0),
    "behind the body": lambda header: setattr(header.arrays[-1], "offset_bytes", 1 << 40),
    "negative size": lambda header: setattr(header.arrays[0], "size_bytes", -1),
    "larger size": lambda header: setattr(header.arrays[0], "size_bytes", 1 << 40),
    "missing checksum": lambda header: header.arrays[0].ClearField("block_checksums"),
    "checksum too many": lambda header: header.arrays[0].block_checksums.append(1),
    "tiny blocks": lambda header: setattr(header, "checksum_block_bytes", 1),
    "no blocks": lambda header: setattr(header, "checksum_block_bytes", 0),
    "negative blocks": lambda header: setattr(header, "checksum_block_bytes", -1),
    "smaller body": lambda header: setattr(header, "body_size_bytes", 64),
    "negative body": lambda header: setattr(header, "body_size_bytes", -1),
    "another name": lambda header: setattr(header.arrays[0], "name", "other"),
    "same name": lambda header: setattr(header.arrays[1], "name", header.arrays[0].name),
    "array fewer": lambda header: header.arrays.pop() and None,
    "array too many": lambda header: (
        header.arrays.add(name="x", dtype="|u1", shape=[0], codec=1) and None
    ),
    "leaf beyond": lambda header: setattr(header.tree.dict.values[0], "array_index", 7),
    "leaf twice": lambda header: header.tree.dict.values[2].CopyFrom(header.tree.dict.values[0]),
    "node of no kind": lambda header: header.tree.dict.values[0].ClearField("array_index"),
    "key fewer": lambda header: header.tree.dict.keys.pop() and None,
    "same key": lambda header: header.tree.dict.keys.__setitem__(1, header.tree.dict.keys[0]),
    "no tree": lambda header: header.ClearField("tree"),
    "attributes without end": lambda header: header.attributes.update(
        {str(number): "" for number in range(100)}
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_header_that_contradicts_itself_is_corrupt(name: str) -> None:
    """The checksum of the header is right: whoever wrote it meant harm."""
    payload = payload_of()
    decode_tree(payload)  # So that the layout is known: nothing is taken for it that is not.
    with pytest.raises(PayloadCorruptError):
        decode_tree(with_header(payload, CONTRADICTIONS[name]))


def test_a_long_key_is_not_copied_for_every_node_below_it() -> None:
    """Without an array no path is of use; 60,000 of 3 MiB would take minutes."""

    def nest(header: payload_pb2.PayloadHeader) -> None:
        del header.arrays[:]
        header.body_size_bytes = 0
        header.tree.dict.keys[:] = ["k" * (3 << 20)]
        del header.tree.dict.values[:]
        items = header.tree.dict.values.add().list.items
        for _ in range(60_000):
            items.add().none.SetInParent()

    hostile = with_header(payload_of({"k": None}), nest)
    started_at = time.process_time()
    tree, _ = decode_tree(hostile)
    took_s = time.process_time() - started_at
    assert {"k" * (3 << 20): [None] * 60_000} == tree
    # As long as for a short key, give or take; not some megabytes for each node.
    short = with_header(payload_of({"k": None}), nest_short)
    started_at = time.process_time()
    decode_tree(short)
    assert took_s < 20 * (time.process_time() - started_at) + 1.0


def nest_short(header: payload_pb2.PayloadHeader) -> None:
    items = header.tree.dict.values[0].list.items
    for _ in range(60_000):
        items.add().none.SetInParent()


def test_a_tree_nested_beyond_reason_is_corrupt() -> None:
    node = payload_pb2.TreeNode(none=payload_pb2.NoneNode())
    for _ in range(40):
        node = payload_pb2.TreeNode(list=payload_pb2.ListNode(items=[node]))
    header = payload_pb2.PayloadHeader(tree=node, checksum_block_bytes=1 << 18)
    with pytest.raises(PayloadCorruptError):
        decode_tree(assemble(header.SerializeToString(), b""))
    raw = b"\x32\x00"
    for _ in range(5000):  # Beyond what protobuf itself reads.
        raw = (
            b"\x1a"
            + _varint(len(raw) + 1 + len(_varint(len(raw))))
            + b"\x0a"
            + _varint(len(raw))
            + raw
        )
    with pytest.raises(PayloadCorruptError):
        decode_tree(assemble(b"\x0a" + _varint(len(raw)) + raw, b""))


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def test_fields_hidden_behind_a_known_layout_do_not_change_its_meaning() -> None:
    """Protobuf lets later bytes override earlier ones; a remembered layout must not look away."""
    payload = payload_of()
    decode_tree(payload)
    _, _, _, header_bytes, _, _ = struct.unpack_from("<8sHHIQQ", payload)
    raw_header = bytes(payload[PRELUDE_BYTES : PRELUDE_BYTES + header_bytes])
    more = payload_pb2.PayloadHeader(checksum_block_bytes=4096).SerializeToString()
    body = bytes(payload[-(-(PRELUDE_BYTES + header_bytes) // 64) * 64 :])
    with pytest.raises(PayloadCorruptError):
        decode_tree(assemble(raw_header + more, body))


# Fuzzing: whatever the bytes are, only our own errors come out.


def decode_or_refuse(payload: bytes | bytearray) -> None:
    with contextlib.suppress(StoreError, UnsupportedArrayError):
        decode_tree(payload)


def _corpus() -> list[bytes]:
    """Payloads of every codec, type and kind of node, made once: drawing trees costs the most."""
    payloads = []
    for number, dtype in enumerate(TYPES):
        shape = ((), (3,), (2, 0, 4), (5, 1))[number % 4]
        size_bytes = math.prod(shape) * dtype.itemsize
        array = np.frombuffer(bytes(number % 2 for _ in range(size_bytes)), dtype).reshape(shape)
        trees_of_it: list[object] = [array, [array, None, {"k": array}], {"a": (array,), "b.c": []}]
        tree = trees_of_it[number % 3]
        attributes = {"kind": "test", "n": str(number)} if number % 2 else None
        payloads.append(b"".join(encode_tree(tree, attributes=attributes)))
    runs = {"runs": np.zeros(6000, np.int32), "rows": [np.arange(5000), np.ones((3, 2000))]}
    payloads += [b"".join(encode_tree(runs, codecs=codec)) for codec in ("raw", *PACKING)]
    return payloads


PACKING = ("lz4", "zstd", "zstd:9")
CORPUS = _corpus()
PACKED = CORPUS[-len(PACKING) :]


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    decode_or_refuse(noise)
    decode_or_refuse(assemble(noise, b""))
    decode_or_refuse(assemble(noise, bytes(64)))


edits = st.binary(min_size=6, max_size=24)
"""Each 6 bytes one edit; drawn as one value, which costs a quarter of drawing each number."""


def edited(raw: bytes, changes: bytes) -> bytes:
    """Take up to 3 bytes out somewhere and put others in, most often as many, once per edit."""
    changed = bytearray(raw)
    for start in range(0, len(changes) - 5, 6):
        position = int.from_bytes(changes[start : start + 2]) % (len(changed) + 1)
        how = changes[start + 2]
        taken = how % 4
        put = taken if how < 192 else how // 4 % 4
        changed[position : position + taken] = changes[start + 3 : start + 3 + put]
    return bytes(changed)


@given(st.sampled_from(CORPUS), edits)
def test_mutated_payloads_are_refused_or_harmless(payload: bytes, changes: bytes) -> None:
    decode_or_refuse(edited(payload, changes))


@given(st.sampled_from(CORPUS), edits)
def test_mutated_headers_with_right_checksums_are_refused_or_harmless(
    payload: bytes, changes: bytes
) -> None:
    """The mutation that matters: one that the checksum does not catch."""
    raw_header, body = _parts(payload)
    decode_or_refuse(assemble(edited(raw_header, changes), body))


@given(st.sampled_from(PACKED), edits)
def test_mutated_bodies_with_right_checksums_are_refused_or_harmless(
    payload: bytes, changes: bytes
) -> None:
    """What a codec makes of bytes that no encoder wrote."""
    raw_header, body = _parts(payload)
    header = payload_pb2.PayloadHeader.FromString(raw_header)
    body = edited(body, changes)[: len(body)].ljust(len(body), b"\0")
    for array in header.arrays:
        encoded = body[array.offset_bytes : array.offset_bytes + array.size_bytes]
        array.block_checksums[:] = checksums(encoded, header.checksum_block_bytes)
    decode_or_refuse(assemble(header.SerializeToString(), body))


@fewer
@given(st.data())
def test_mutations_of_any_tree_are_refused_or_harmless(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(["raw", "lz4", "zstd"]))
    payload = b"".join(encode_tree(data.draw(trees()), codecs=codec))
    changes = data.draw(edits)
    decode_or_refuse(edited(payload, changes))
    raw_header, body = _parts(payload)
    decode_or_refuse(assemble(edited(raw_header, changes), body))


def _parts(payload: bytes) -> tuple[bytes, bytes]:
    """Header and body."""
    _, _, _, header_bytes, _, _ = struct.unpack_from("<8sHHIQQ", payload)
    end = PRELUDE_BYTES + header_bytes
    return payload[PRELUDE_BYTES:end], payload[-(-end // 64) * 64 :]
