"""What cannot be stored is refused by name; what is damaged is refused whatever the damage."""

import contextlib
import math
import sys
import time
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from breadbox.model.errors import (
    InvalidRequestError,
    PayloadCorruptError,
    PayloadFormatError,
    StoreError,
    UnsupportedArrayError,
)
from breadbox.payload import decode_tree, encode_fragment, encode_tree
from breadbox.payload.codecs import Codecs
from breadbox.payload.format import checksums, parse_head
from breadbox.payload.layout import LayoutReader
from breadbox.payload.limits import LAYOUTS_BYTES_MAX, LAYOUTS_MAX
from breadbox.v1 import payload_pb2
from support.forged_payloads import Parts, assemble, changed, parts_of, sections_of, varint
from support.fuzzing import fewer
from support.payload_trees import TYPES, trees
from support.sequences import sequence

EXAMPLE = {
    "obs": np.arange(600_000, dtype=np.int32),
    "state": [np.zeros((2, 3)), None, (np.array(["a", "bc"]),)],
    "flags": np.ones(9, np.bool_),
}


def payload_of(tree: object = EXAMPLE, codecs: Codecs = "raw") -> bytearray:
    return bytearray(b"".join(encode_tree(tree, attributes={"kind": "test"}, codecs=codecs)))


@pytest.mark.parametrize(
    ("leaf", "problem"),
    [
        (np.array([object()]), "Python objects"),
        (np.array([{"a": 1.0}] * 2), "stack per key"),
        (np.array([np.zeros(2), np.zeros(3)], object), "pad them to one shape"),
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


def test_arrays_are_encoded_while_another_thread_imports_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The module is known from the first line of it on, and its classes are not."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert payload_of({"obs": np.zeros(3)})


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
    payload[8:10] = (3).to_bytes(2, "little")
    with pytest.raises(PayloadFormatError) as caught:
        decode_tree(payload)
    assert (3, 2) == (caught.value.version, caught.value.supported)


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


def leaf(parts: Parts, key: str = "obs") -> payload_pb2.ArrayLayout:
    tree = parts.layout.tree.dict
    return tree.values[list(tree.keys).index(key)].array


def _set_dtype(parts: Parts, name: str) -> None:
    leaf(parts).dtype = name


CONTRADICTIONS: dict[str, Callable[[Parts], object]] = {
    "object type": lambda parts: _set_dtype(parts, "|O"),
    "object type in disguise": lambda parts: _set_dtype(parts, "O8"),
    "structured type": lambda parts: _set_dtype(parts, "i4,O"),
    "type of no size": lambda parts: _set_dtype(parts, "|V0"),
    "native byte order": lambda parts: _set_dtype(parts, "=i4"),
    "type that is none": lambda parts: _set_dtype(parts, "quux"),
    "huge type": lambda parts: _set_dtype(parts, "<U999999999"),
    "another type": lambda parts: _set_dtype(parts, "<i8"),
    "longer shape": lambda parts: leaf(parts).shape.append(2),
    "negative shape": lambda parts: leaf(parts).shape.extend([-1, -1]),
    "overflowing shape": lambda parts: leaf(parts).shape.extend([1 << 62, 1 << 62, 0]),
    "shape beyond the body": lambda parts: leaf(parts).shape.insert(0, 1 << 12),
    "too many axes": lambda parts: leaf(parts).shape.extend([1] * 40),
    "unknown codec": lambda parts: setattr(leaf(parts), "codec", 99),
    "no codec": lambda parts: setattr(leaf(parts), "codec", 0),
    "encoded without a size": lambda parts: setattr(leaf(parts), "codec", 2),
    "video of numbers": lambda parts: setattr(leaf(parts), "codec", 4),
    "missing checksum": lambda parts: parts.figures.pop(),
    "no checksums": lambda parts: parts.figures.clear(),
    "checksum too many": lambda parts: parts.figures.append(1),
    "tiny blocks": lambda parts: setattr(parts.layout, "checksum_block_bytes", 1),
    "no blocks": lambda parts: setattr(parts.layout, "checksum_block_bytes", 0),
    "negative blocks": lambda parts: setattr(parts.layout, "checksum_block_bytes", -1),
    "smaller body": lambda parts: setattr(parts, "body", parts.body[:-64]),
    "larger body": lambda parts: setattr(parts, "body", parts.body + bytes(64)),
    "array fewer": lambda parts: leaf(parts).Clear(),
    "node of no kind": lambda parts: parts.layout.tree.dict.values[0].Clear(),
    "value fewer": lambda parts: parts.layout.tree.dict.values.pop(),
    "key fewer": lambda parts: parts.layout.tree.dict.keys.pop(),
    "same key": lambda parts: parts.layout.tree.dict.keys.__setitem__(
        1, parts.layout.tree.dict.keys[0]
    ),
    "no tree": lambda parts: parts.layout.ClearField("tree"),
    "attributes without end": lambda parts: setattr(
        parts,
        "attributes",
        payload_pb2.PayloadAttributes(
            values={str(number): "" for number in range(100)}
        ).SerializeToString(),
    ),
    "attributes that are none": lambda parts: setattr(parts, "attributes", b"\xff"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_head_that_contradicts_itself_is_corrupt(name: str) -> None:
    """The checksums of the head are right: whoever wrote it meant harm."""
    payload = payload_of()
    decode_tree(payload)  # So that the layout is known: nothing is taken for it that is not.
    with pytest.raises(PayloadCorruptError):
        decode_tree(changed(payload, CONTRADICTIONS[name]))


@pytest.mark.parametrize(
    "size_bytes", [0, 1, 7, 9, 1 << 20, 1 << 40, (1 << 64) - 1, 2_400_001], ids=str
)
def test_a_size_that_an_encoded_array_cannot_have_is_corrupt(size_bytes: int) -> None:
    payload = payload_of(codecs={"obs": "zstd"})
    decode_tree(payload)
    with pytest.raises(PayloadCorruptError):
        decode_tree(changed(payload, lambda parts: parts.figures.__setitem__(0, size_bytes)))


def test_a_layout_is_known_by_its_bytes_and_not_by_its_hash() -> None:
    """Whoever makes payloads can find two layouts of one hash; here the hash is made to fit."""
    reader = LayoutReader()
    ours = sections_of(payload_of())[0]
    known = reader.read(ours, xxhash.xxh3_64_intdigest(ours))
    assert known is reader.read(bytes(bytearray(ours)), known.hash)
    theirs = sections_of(payload_of({"obs": np.zeros(3)}))[0]
    with pytest.raises(PayloadCorruptError, match="fails its checksum"):
        reader.read(theirs, known.hash)
    reader._known[xxhash.xxh3_64_intdigest(theirs)] = known  # noqa: SLF001 - as if they had the same hash
    other = reader.read(theirs, xxhash.xxh3_64_intdigest(theirs))
    assert [(3,)] == [stored.shape for stored in other.arrays]


def test_layouts_without_end_take_bounded_memory_and_the_latest_are_known() -> None:
    reader = LayoutReader()
    keys = ["k" * 1000 + str(number) for number in range(40)]
    for length in range(1000):
        raw = sections_of(payload_of({key: np.zeros(length) for key in keys[: 1 + length % 40]}))[0]
        read = reader.read(raw, xxhash.xxh3_64_intdigest(raw))
        assert read is reader.read(raw, read.hash)
    assert len(reader._known) <= LAYOUTS_MAX  # noqa: SLF001 - its memory shows nowhere
    assert sum(len(each.raw) for each in reader._known.values()) == reader._known_bytes  # noqa: SLF001 - likewise
    assert reader._known_bytes <= LAYOUTS_BYTES_MAX  # noqa: SLF001 - likewise


def test_a_long_key_is_not_copied_for_every_node_below_it() -> None:
    """Without an array no path is of use; 60,000 of 3 MiB would take minutes."""

    def nest(parts: Parts) -> None:
        parts.layout.tree.dict.keys[:] = ["k" * (3 << 20)]
        items = parts.layout.tree.dict.values[0].list.items
        for _ in range(60_000):
            items.add().none.SetInParent()

    hostile = changed(payload_of({"k": None}), nest)
    started_at = time.process_time()
    tree, _ = decode_tree(hostile)
    took_s = time.process_time() - started_at
    assert {"k" * (3 << 20): [None] * 60_000} == tree
    # As long as for a short key, give or take; not some megabytes for each node.
    short = changed(payload_of({"k": None}), nest_short)
    started_at = time.process_time()
    decode_tree(short)
    assert took_s < 20 * (time.process_time() - started_at) + 1.0


def nest_short(parts: Parts) -> None:
    items = parts.layout.tree.dict.values[0].list.items
    for _ in range(60_000):
        items.add().none.SetInParent()


def test_a_tree_nested_beyond_reason_is_corrupt() -> None:
    node = payload_pb2.TreeNode(none=payload_pb2.NoneNode())
    for _ in range(40):
        node = payload_pb2.TreeNode(list=payload_pb2.ListNode(items=[node]))
    layout = payload_pb2.PayloadLayout(tree=node, checksum_block_bytes=1 << 18)
    with pytest.raises(PayloadCorruptError):
        decode_tree(assemble(layout.SerializeToString(), b""))
    raw = b"\x32\x00"
    for _ in range(5000):  # Beyond what protobuf itself reads.
        raw = (
            b"\x1a"
            + varint(len(raw) + 1 + len(varint(len(raw))))
            + b"\x0a"
            + varint(len(raw))
            + raw
        )
    with pytest.raises(PayloadCorruptError):
        decode_tree(assemble(b"\x0a" + varint(len(raw)) + raw, b""))


def test_fields_hidden_behind_a_known_layout_do_not_change_its_meaning() -> None:
    """Protobuf lets later bytes override earlier ones; a remembered layout must not look away."""
    payload = payload_of()
    decode_tree(payload)
    raw_layout, figures, attributes, body = sections_of(payload)
    more = payload_pb2.PayloadLayout(checksum_block_bytes=4096).SerializeToString()
    with pytest.raises(PayloadCorruptError):
        decode_tree(assemble(raw_layout + more, body, figures, attributes))


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
    ids = {"ids": np.zeros(6000, np.int32), "logits": np.ones((6000, 2))}
    many = sequence(tokens=ids, context={"image": np.zeros((2, 3, 3), np.uint8)})
    payloads.append(b"".join(encode_fragment(sequence())))
    for codec in ("raw", *PACKING):
        payloads.append(b"".join(encode_tree(runs, codecs=codec)))
        payloads.append(b"".join(encode_fragment(many, codecs=codec)))
    return payloads


PACKING = ("lz4", "zstd", "zstd:9")
CORPUS = _corpus()
PACKED = CORPUS[-2 * len(PACKING) :]


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


@pytest.mark.parametrize("section", ["layout", "checksums", "attributes"])
@given(st.sampled_from(CORPUS), edits)
def test_mutated_heads_with_right_checksums_are_refused_or_harmless(
    section: str, payload: bytes, changes: bytes
) -> None:
    """The mutation that matters: one that the checksum does not catch."""
    decode_or_refuse(_with_edited(section, payload, changes))


def _with_edited(section: str, payload: bytes, changes: bytes) -> bytes:
    raw_layout, figures, attributes, body = sections_of(payload)
    if section == "layout":
        raw_layout = edited(raw_layout, changes)
    elif section == "checksums":
        figures = edited(figures, changes)
    else:
        attributes = edited(attributes, changes)
    return assemble(raw_layout, body, figures, attributes)


@given(st.sampled_from(PACKED), edits)
def test_mutated_bodies_with_right_checksums_are_refused_or_harmless(
    payload: bytes, changes: bytes
) -> None:
    """What a codec makes of bytes that no encoder wrote."""
    parts = parts_of(payload)
    head = parse_head(memoryview(payload), len(payload))
    parts.body = edited(parts.body, changes)[: len(parts.body)].ljust(len(parts.body), b"\0")
    for index in head.layout.order:
        start, first = head.places.offsets[index], head.places.first_figures[index]
        encoded = parts.body[start : start + head.places.sizes[index]]
        sums = checksums(encoded, head.layout.block_bytes)
        parts.figures[first : first + len(sums)] = sums
    decode_or_refuse(parts.joined())


@fewer
@given(st.data())
def test_mutations_of_any_tree_are_refused_or_harmless(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(["raw", "lz4", "zstd"]))
    payload = b"".join(encode_tree(data.draw(trees()), codecs=codec))
    changes = data.draw(edits)
    decode_or_refuse(edited(payload, changes))
    decode_or_refuse(_with_edited("layout", payload, changes))
