"""Payloads of each format version as they were when it was fixed: read for good, and still written.

The files under tests/golden/payloads are never made anew. What a later writer makes may differ only
in another format version, whose files then stand beside these.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox.payload import decode_tree, encode_fragment, encode_tree
from breadbox.payload.format import FORMAT_VERSION, OPEN_FORMAT_VERSION, parse_head
from breadbox.payload.fragments import fragment_tree
from breadbox.payload.weights import decode_weights, encode_weights
from support.fragments import vector_fragment
from support.payload_trees import same

GOLDEN = Path(__file__).parents[1] / "golden" / "payloads"

TYPES = """
|b1 |i1 |u1 <i2 >i2 <u2 <i4 <u4 <i8 >i8 <u8 <f2 <f4 >f4 <f8 <c8 <c16 |S7 <U5 |V3 <M8[ns] <m8[us]
"""


def kinds() -> dict[str, Any]:
    """Every type, shape and kind of node."""
    typed = {
        name: np.frombuffer(bytes(number % 2 for number in range(6 * dtype.itemsize)), dtype)
        for name, dtype in ((name, np.dtype(name)) for name in TYPES.split())
    }
    return {
        "types": typed,
        "shapes": [np.full(shape, 7, np.int16) for shape in ((), (0,), (3,), (2, 0, 4), (2, 3, 4))],
        "a.b[0]\\ä": (np.arange(5), None, {}, [], ()),
    }


def packed() -> dict[str, Any]:
    """Arrays that compress, one that does not, and raw ones before and behind them."""
    noise = np.arange(4096, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return {
        "small": np.arange(3),
        "zeros": np.zeros(5000, np.int32),
        "noise": (noise ^ (noise >> np.uint64(29))).view(np.uint8),
        "steps": np.arange(90_000, dtype=np.int64) // 100,
        "last": np.ones((), np.float32),
    }


def frames() -> np.ndarray:
    """Grey frames with a little motion."""
    pixels = np.full((6, 32, 48), 60, np.uint8)
    for step in range(6):
        pixels[step, 4:20, step : step + 16] = 200
    return pixels


PACKING = {"small": "raw", "last": "raw", "zeros": "lz4", "*": "zstd:3"}

RAW = {
    "kinds": lambda: encode_tree(kinds(), attributes={"kind": "test", "of": "types"}),
    "blocks": lambda: encode_tree({"rows": np.arange(70_001, dtype=np.int32)}),
    "fragment": lambda: encode_fragment(vector_fragment(12, worker_id="w7", model_version=3)),
}

TREES: dict[str, Any] = {
    "kinds": kinds(),
    "blocks": {"rows": np.arange(70_001, dtype=np.int32)},
    "fragment": fragment_tree(vector_fragment(12, worker_id="w7", model_version=3)),
    "packed": packed(),
}


def golden(name: str, version: int = FORMAT_VERSION) -> bytes:
    return (GOLDEN / f"v{version}-{name}.payload").read_bytes()


@pytest.mark.parametrize("name", TREES)
def test_payloads_of_the_first_version_are_read(name: str) -> None:
    tree, _ = decode_tree(golden(name))
    assert same(TREES[name], tree)


def test_attributes_of_the_first_version_are_read() -> None:
    assert {"kind": "test", "of": "types"} == decode_tree(golden("kinds"))[1]
    wanted = {"kind": "fragment", "worker_id": "w7", "session_id": "s"}
    wanted |= {"fragment_index": "12", "model_version": "3"}
    assert wanted == decode_tree(golden("fragment"))[1]


@pytest.fixture
def blocks_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers choose the size of checksummed blocks: these files have 256 KiB."""
    monkeypatch.setattr("breadbox.payload.layout.CHECKSUM_BLOCK_BYTES", 256 * 1024)
    monkeypatch.setattr("breadbox.payload.format._kinds", {})


@pytest.mark.usefixtures("blocks_of_then")
@pytest.mark.parametrize("name", RAW)
def test_the_same_bytes_are_still_written(name: str) -> None:
    assert golden(name) == b"".join(RAW[name]())


@pytest.mark.usefixtures("blocks_of_then")
def test_encoded_arrays_are_placed_as_they_were() -> None:
    """What a codec's library makes of them may change; where they are may not."""
    payload = golden("packed")
    head = parse_head(memoryview(payload), len(payload))
    assert (0, 4, 1, 2, 3) == head.layout.order
    assert [True, False, True, False, True] == [head.is_raw(index) for index in range(5)]
    written = b"".join(encode_tree(packed(), codecs=PACKING))
    assert head.layout is parse_head(memoryview(written), len(written)).layout


def test_video_of_the_first_version_is_read() -> None:
    pytest.importorskip("av", reason="the codec h264 needs the package av")
    assert same({"obs": frames()}, decode_tree(golden("video"))[0])


def test_weights_of_the_first_version_are_read() -> None:
    weights = {"bias": np.arange(3, dtype=np.float32), "kernel": np.ones((2, 3), np.float16)}
    tree, attributes = decode_tree(golden("weights"))
    assert {"kind": "weights"} == attributes
    decoded = decode_weights(tree["safetensors"].tobytes())
    assert same(weights, {name: decoded[name] for name in weights})
    assert same(weights, {k: decode_weights(encode_weights(weights))[k] for k in weights})


def completion() -> breadbox.Sequence:
    """Open axes of arrays of several ranks, one that compresses among them."""
    return breadbox.Sequence(
        group="g",
        member=3,
        tokens={"ids": np.arange(5, dtype=np.int32), "logits": np.ones((5, 2), np.float16)},
        context={"prompt": np.zeros(3000, np.int64), "image": np.eye(3), "none": np.zeros((0, 4))},
        model_version_min=2,
        model_version_max=3,
        session_id="s",
    )


@pytest.mark.parametrize(("name", "codecs"), [("sequence", "raw"), ("sequence-packed", "lz4")])
def test_sequences_of_version_two_are_read_and_still_written(name: str, codecs: str) -> None:
    payload = golden(name, OPEN_FORMAT_VERSION)
    tree, attributes = decode_tree(payload)
    wanted = completion()
    assert same({"tokens": wanted.tokens, "context": wanted.context}, tree)
    assert ("sequence", "3") == (attributes["kind"], attributes["fragment_index"])
    written = b"".join(encode_fragment(wanted, codecs=codecs))
    head = parse_head(memoryview(payload), len(payload))
    assert (5, 5, 3000, 3, 3, 0, 4) == head.layout.lengths
    if codecs == "raw":
        assert payload == written
    else:
        assert not head.is_raw(2), "it is compressed"
        assert head.layout.raw == parse_head(memoryview(written), len(written)).layout.raw
