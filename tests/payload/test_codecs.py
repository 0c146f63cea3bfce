"""Codecs: what they keep, what they refuse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from breadbox.model.errors import PayloadCorruptError
from breadbox.payload import decode_tree, encode_tree
from breadbox.payload.codecs import CodecChoice, decode_into, encode, parse_codec
from breadbox.payload.format import parse_head
from breadbox.v1 import payload_pb2
from support.fuzzing import fewer
from support.payload_trees import same

frame_shapes = st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40))


def moving_square(steps: int = 32, side: int = 84, *, colour: bool = True) -> np.ndarray:
    """Frames with a little motion on a still ground, as games have them."""
    shape = (steps, side, side, 3) if colour else (steps, side, side)
    frames = np.full(shape, 60, np.uint8)
    for step in range(steps):
        frames[step, 10 : 30 + step % 5, step : step + 20] = 200
    return frames


@fewer
@given(st.data(), frame_shapes, st.booleans())
def test_video_without_a_quality_is_bit_exact(
    data: st.DataObject, shape: tuple[int, int, int], is_colour: bool
) -> None:
    full_shape = (*shape, 3) if is_colour else shape
    frames = data.draw(hnp.arrays(np.uint8, full_shape))
    encoded = _video(frames)
    decoded = np.empty_like(frames)
    decode_into(decoded, *encoded)
    assert frames.tobytes() == decoded.tobytes()


def _video(frames: np.ndarray) -> tuple[memoryview, int, dict[str, str]]:
    """As `encode` does, but without giving way to raw."""
    from breadbox.payload.codecs import encode_frames

    packed, parameters = encode_frames(frames, None)
    return memoryview(packed), payload_pb2.CODEC_H264, dict(parameters)


@pytest.mark.parametrize("colour", [True, False])
def test_real_motion_shrinks_and_stays_exact(colour: bool) -> None:
    frames = moving_square(colour=colour)
    buffers = encode_tree(frames, codecs="h264")
    assert sum(map(len, buffers)) < frames.nbytes / 5
    assert frames.tobytes() == decode_tree(b"".join(buffers))[0].tobytes()


@pytest.mark.parametrize("side", [84, 85])
@pytest.mark.parametrize("colour", [True, False])
def test_a_worse_quality_costs_fewer_bytes_and_stays_near(colour: bool, side: int) -> None:
    frames = moving_square(side=side, colour=colour)
    sizes = []
    for quality in (5, 40):
        payload = b"".join(encode_tree(frames, codecs=f"h264:{quality}"))
        sizes.append(len(payload))
        decoded = decode_tree(payload)[0]
        assert frames.shape == decoded.shape
        assert np.abs(frames.astype(int) - decoded).mean() < 12
    assert sizes[0] > sizes[1]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 5), np.uint8),
        np.zeros((4, 5, 5, 4), np.uint8),
        np.zeros((4, 5, 5), np.int8),
        np.zeros((0, 5, 5), np.uint8),
        np.zeros((4, 0, 5), np.uint8),
        np.zeros((1, 2, 10_000), np.uint8),
        np.zeros(()),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_what_is_not_video_stays_raw(array: np.ndarray) -> None:
    assert payload_pb2.CODEC_RAW == encode(array, array.dtype.str, CodecChoice("h264")).codec


@pytest.mark.parametrize("codec", ["lz4", "zstd", "zstd:19", "h264"])
def test_a_codec_that_saves_nothing_gives_way_to_the_elements_themselves(codec: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (4, 32, 32), dtype=np.uint8)
    assert noise.tobytes() == encode(noise, "|u1", parse_codec(codec)).buffer


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_arrays_that_are_packed_and_arrays_that_are_not_worth_it_share_a_layout(codec: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    heads, trees = [], []
    for first, second in [(noise, noise * 0), (noise * 0, noise), (noise, noise), (noise * 0,) * 2]:
        payload = b"".join(encode_tree({"a": first, "b": second, "c": noise[:1]}, codecs=codec))
        heads.append(parse_head(memoryview(payload), len(payload)))
        trees.append(decode_tree(payload)[0])
        assert same({"a": first, "b": second, "c": noise[:1]}, trees[-1])
    assert all(head.layout is heads[0].layout for head in heads)
    assert [True, False] == [heads[0].is_raw(0), heads[0].is_raw(1)]


def test_patterns_choose_by_name_and_the_first_match_counts() -> None:
    zeros = np.zeros(10_000)
    tree = {"obs": {"image": zeros, "depth": zeros}, "reward": zeros}
    payload = encode_tree(tree, codecs={"obs.image": "zstd", "obs.*": "raw", "*": "lz4"})
    layout = parse_head(memoryview(b"".join(payload)), sum(map(len, payload))).layout
    wanted = {"obs.image": payload_pb2.CODEC_ZSTD, "obs.depth": payload_pb2.CODEC_RAW}
    assert wanted | {"reward": payload_pb2.CODEC_LZ4} == {a.name: a.codec for a in layout.arrays}


@pytest.mark.parametrize("codec", [payload_pb2.CODEC_LZ4, payload_pb2.CODEC_ZSTD])
@pytest.mark.parametrize("junk", [b"", b"\0", b"\xff" * 100, b"\x28\xb5\x2f\xfd" + b"\0" * 20])
def test_junk_is_refused_by_every_codec(codec: int, junk: bytes) -> None:
    with pytest.raises(PayloadCorruptError):
        decode_into(np.empty(1000, np.uint8), memoryview(junk), codec, {})


@fewer
@given(st.binary(max_size=400))
def test_junk_is_refused_as_video(junk: bytes) -> None:
    with pytest.raises(PayloadCorruptError):
        decode_into(
            np.empty((2, 16, 16), np.uint8),
            memoryview(junk),
            payload_pb2.CODEC_H264,
            {"planes": "luma"},
        )


@pytest.mark.parametrize("shape", [(7, 40, 40), (9, 40, 40), (8, 40, 41), (8, 41, 40), (8, 4, 4)])
def test_video_of_other_frames_than_declared_is_corrupt(shape: tuple[int, int, int]) -> None:
    encoded = _video(moving_square(8, 40, colour=False))
    with pytest.raises(PayloadCorruptError):
        decode_into(np.empty(shape, np.uint8), *encoded)


def test_colour_does_not_pass_for_grey_nor_grey_for_colour() -> None:
    colour, grey = moving_square(4, 40), moving_square(4, 40, colour=False)
    buffer, codec, _ = _video(colour)
    with pytest.raises(PayloadCorruptError):
        decode_into(np.empty_like(grey), buffer, codec, {"planes": "luma"})
    buffer, codec, _ = _video(grey)
    for planes in ("rgb", "luma", "", "x"):
        with pytest.raises(PayloadCorruptError):
            decode_into(np.empty_like(colour), buffer, codec, {"planes": planes})


def test_an_array_compressed_to_another_size_is_corrupt() -> None:
    for choice in (CodecChoice("lz4"), CodecChoice("zstd", 1)):
        encoded = encode(np.zeros(1000), "<f8", choice)
        for count in (999, 1001):
            with pytest.raises(PayloadCorruptError):
                decode_into(np.empty(count), encoded.buffer, encoded.codec, {})
