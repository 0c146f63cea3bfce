"""A few bytes that would become a gigabyte: every reader refuses them before it takes memory."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lz4.block
import numpy as np
import pytest

from breadbox.model.errors import InvalidRequestError, PayloadCorruptError
from breadbox.model.types import FragmentMetadata, FragmentReference
from breadbox.payload import decode_tree, encode_tree
from breadbox.payload.codecs import decode_into, encode_frames
from breadbox.payload.fragments import describe_arrays, read_fragments
from breadbox.payload.limits import (
    EXPANDED_BYTES_FREE,
    EXPANDED_BYTES_MAX_VARIABLE,
    expanded_bytes_max,
)
from breadbox.payload.weights import read_weights
from breadbox.reading.batches import load_batch
from breadbox.stores import open_store
from breadbox.stores.base import PayloadStore
from breadbox.v1 import payload_pb2
from support.forged_payloads import MIB, bomb_of, layout_of_parts, zeros_as_zstd
from support.traced_memory import traced_memory

BOMBS = {
    "one array": bomb_of(1, 1024 * MIB),
    "many arrays": bomb_of(64, 32 * MIB),
}

READERS: dict[str, Callable[[PayloadStore, FragmentReference], object]] = {
    "read": lambda store, reference: read_fragments(store, [reference]),
    "read a column": lambda store, reference: read_fragments(store, [reference], ["extras"]),
    "read steps": lambda store, reference: read_fragments(store, [reference], None, (0, 1)),
    "map": lambda store, reference: read_fragments(store, [reference], is_mapped=True),
    "load": lambda store, reference: load_batch(store, [reference]),
    "load mapped": lambda store, reference: load_batch(store, [reference], is_mapped=True),
    "describe": lambda store, reference: describe_arrays(store, [reference]),
    "weights": lambda store, reference: read_weights(store, reference.metadata.payload),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PayloadStore]:
    opened = open_store(f"file://{tmp_path_factory.mktemp('store')}")
    yield opened
    opened.close()


def referred(store: PayloadStore, payload: bytes) -> FragmentReference:
    (written,) = store.write_many([[memoryview(payload)]])
    metadata = FragmentMetadata(
        worker_id="mallory",
        fragment_index=0,
        session_id="s",
        model_version_min=0,
        model_version_max=0,
        payload=written,
        step_count=4,
        discontinuity=False,
    )
    return FragmentReference(metadata, chunk_id=0, staleness_when_granted=0, use_count=1)


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_takes_memory_for_what_a_few_bytes_claim(
    store: PayloadStore, reader: str, bomb: str
) -> None:
    reference = referred(store, BOMBS[bomb])
    with traced_memory() as traced, pytest.raises(PayloadCorruptError):
        READERS[reader](store, reference)
    assert traced.peak_bytes < 16 * MIB + 2 * len(BOMBS[bomb])


def test_a_layout_of_a_great_many_parts_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(PayloadCorruptError, match=r"has more than .* fields and items"):
        decode_tree(layout_of_parts(2_000_000))


def test_what_a_writer_compresses_a_reader_takes() -> None:
    """Zeros compress ten thousand times; what would expand too far stays as it is."""
    tree = {f"zeros{number}": np.zeros(EXPANDED_BYTES_FREE // 2, np.uint8) for number in range(3)}
    payload = b"".join(encode_tree(tree, codecs="zstd"))
    assert EXPANDED_BYTES_FREE // 2 < len(payload) < EXPANDED_BYTES_FREE
    decoded, _ = decode_tree(payload)
    assert [EXPANDED_BYTES_FREE // 2] * 3 == [len(each) for each in decoded.values()]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def set_to(text: str) -> None:
        monkeypatch.setenv(EXPANDED_BYTES_MAX_VARIABLE, text)
        expanded_bytes_max.cache_clear()

    yield set_to
    monkeypatch.undo()
    expanded_bytes_max.cache_clear()


def test_the_environment_bounds_what_a_payload_may_expand_to(limit: Callable[[str], None]) -> None:
    generator = np.random.default_rng(5)
    tree: dict[str, Any] = {"obs": generator.integers(0, 4, 10_000)}
    payload = b"".join(encode_tree(tree, codecs="zstd"))
    limit("79999")
    with pytest.raises(PayloadCorruptError, match="BREADBOX_EXPANDED_BYTES_MAX is 79999"):
        decode_tree(payload)
    assert len(b"".join(encode_tree(tree, codecs="zstd"))) > tree["obs"].nbytes
    limit("80000")
    assert np.array_equal(tree["obs"], decode_tree(payload)[0]["obs"])
    limit("a lot")
    with pytest.raises(InvalidRequestError, match="BREADBOX_EXPANDED_BYTES_MAX"):
        encode_tree(tree, codecs="zstd")


def test_a_frame_of_zeros_is_as_small_as_these_attacks_need() -> None:
    assert len(zeros_as_zstd(1024 * MIB)) < 64 * 1024


EXPANDS_TO = 256 * MIB
DECLARED = (64, 128, 128)
"""Of frames: 1 MiB, a 256th of what the streams expand to."""


def _frames_as_h264() -> tuple[bytes, Mapping[str, str]]:
    pytest.importorskip("av")
    frames = np.zeros((EXPANDS_TO // (1024 * 1024), 1024, 1024), np.uint8)
    return encode_frames(frames, None)


STREAMS: dict[str, tuple[int, Callable[[], tuple[bytes, Mapping[str, str]]]]] = {
    "lz4": (
        payload_pb2.CODEC_LZ4,
        lambda: (lz4.block.compress(bytes(EXPANDS_TO), store_size=False), {}),
    ),
    "zstd": (payload_pb2.CODEC_ZSTD, lambda: (zeros_as_zstd(EXPANDS_TO), {})),
    "h264": (payload_pb2.CODEC_H264, _frames_as_h264),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_expands_to_more_than_its_layout_says_takes_no_more_memory(name: str) -> None:
    codec, make = STREAMS[name]
    encoded, parameters = make()
    frames = np.empty(DECLARED, np.uint8)
    with traced_memory() as traced, pytest.raises(PayloadCorruptError):
        decode_into(frames, memoryview(encoded), codec, parameters)
    assert traced.peak_bytes < 8 * frames.nbytes + 2 * len(encoded)
