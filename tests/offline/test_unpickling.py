"""Goal: packed columns are decoded without executing anything in them.

Method: everything that numpy itself pickles must come out equal; everything else, and every
damaged pickle, must be refused with an error, leaving no trace.
"""

import base64
import builtins
import os
import pickle  # noqa: TID251 - makes the inputs
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pytest
import xxhash

from breadbox_offline.decoding.packing import looks_packed, read_array, unpack
from breadbox_offline.errors import PackedValueError
from breadbox_offline.limits import DataLimits

USUAL: list[np.ndarray] = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.zeros((1, 2, 3, 4, 5), np.uint8),
    np.ones(300, np.bool_),
    np.arange(70_000, dtype=np.int16),
    np.zeros((3, 300, 1), np.complex64),
    np.zeros((0, 3)),
]
"""What numpy writes in the form that RLlib packs."""
OTHERS = [
    np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2],
    np.arange(4, dtype=">i2"),
    np.array(5),
    np.array(["ab", "c"]),
    np.float32(3.5),
    7,
    "text",
    None,
]
"""What it does not pack, or writes otherwise."""


def pack(data: bytes) -> str:
    return base64.b64encode(lz4.frame.compress(data)).decode()


class Executes:
    """Its pickle calls a function when it is loaded."""

    def __init__(self, function: object, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy(order="K")
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("value", [*USUAL, *map(read_only, USUAL)], ids=lambda v: str(v.shape))
def test_arrays_of_numbers_come_out_equal_and_read_only(value: np.ndarray) -> None:
    read = unpack(pack(pickle.dumps(value, 5)))
    assert (value.dtype, value.shape) == (read.dtype, read.shape)
    assert value.flags.f_contiguous == read.flags.f_contiguous
    assert (False, True) == (read.flags.writeable, read.flags.aligned)
    np.testing.assert_array_equal(value, read)


@pytest.mark.parametrize("value", OTHERS, ids=repr)
def test_other_values_are_refused_with_what_is_read(value: object) -> None:
    with pytest.raises(PackedValueError, match="contiguous numpy array of numbers"):
        unpack(pack(pickle.dumps(value, 5)))


@pytest.mark.parametrize("protocol", range(5))
def test_older_protocols_of_pickle_are_refused_with_the_one_that_is_read(protocol: int) -> None:
    with pytest.raises(PackedValueError, match="protocol 5"):
        unpack(pack(pickle.dumps(np.arange(6), protocol)))


def test_names_of_numpy_1_are_known() -> None:
    data = pickle.dumps(np.arange(3), 5)
    old = data.replace(b"\x8c\x13numpy._core.numeric", b"\x8c\x12numpy.core.numeric")
    assert data != old
    assert [0, 1, 2] == read_array(old).tolist()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch {marker}"),
        (builtins.eval, "open({marker!r}, 'w')"),
        (builtins.exec, "open({marker!r}, 'w')"),
        (builtins.open, "{marker}", "w"),
        (getattr, os, "system"),
    ],
    ids=lambda call: call[0].__name__,
)
def test_calls_are_refused_and_not_made(
    call: tuple[Any, ...], protocol: int, tmp_path: Path
) -> None:
    marker = tmp_path / "executed"
    function, *arguments = call
    texts = [
        each.format(marker=str(marker)) if isinstance(each, str) else each for each in arguments
    ]
    try:
        data = pickle.dumps(Executes(function, *texts), protocol)
    except TypeError:
        data = b"\x80\x04cos\nsystem\n(X\x04\x00\x00\x00truetR."
    for hostile in (data, data[:-1] + b"0" + pickle.dumps(np.arange(3), protocol)[2:]):
        with pytest.raises(PackedValueError):
            unpack(pack(hostile))
    assert not marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps([np.arange(3)]),
        pickle.dumps({"a": 1}),
        b"\x80\x04]\x94.",
        pickle.dumps(np.array([1, "a"], dtype=object)),
        pickle.dumps(np.zeros(2, dtype=[("a", "i4")])),
        pickle.dumps(np.dtype("f4")),
        pickle.dumps(slice(1, 2)),
        pickle.dumps((1, 2)),
        b"",
        b".",
        b"(.",
        b"\x80\x05)\x94.",
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(PackedValueError):
        read_array(data)


def test_every_truncation_is_refused() -> None:
    data = pickle.dumps(np.arange(6, dtype=np.float32).reshape(2, 3), 5)
    for end in range(len(data)):
        with pytest.raises(PackedValueError):
            read_array(data[:end])


def test_damaged_bytes_are_read_or_refused_but_nothing_else() -> None:
    seed = 20240607
    rng = random.Random(seed)
    data = pickle.dumps(np.arange(6, dtype=np.float32), 5)
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            read_array(bytes(damaged))
        except PackedValueError:
            continue
        except Exception as error:  # noqa: BLE001 - that is the claim under test
            pytest.fail(f"seed {seed}: {bytes(damaged)!r} raised {error!r}")


def test_a_huge_declared_shape_allocates_nothing() -> None:
    data = pickle.dumps(np.zeros(3), 5)
    hostile = data.replace(b"K\x03\x85", b"J\xff\xff\xff\x7f\x85")
    assert data != hostile
    with pytest.raises(PackedValueError, match="bytes"):
        read_array(hostile)


def test_a_huge_declared_length_allocates_nothing() -> None:
    data = pickle.dumps(np.zeros(3), 5)
    hostile = data.replace(struct.pack("<Q", 24), struct.pack("<Q", 2**62))
    assert data != hostile
    with pytest.raises(PackedValueError):
        read_array(hostile)


@pytest.mark.parametrize("states_size", [True, False])
def test_a_decompression_bomb_stops_at_the_limit(states_size: bool) -> None:
    bomb = base64.b64encode(lz4.frame.compress(bytes(50_000_000), store_size=states_size))
    with pytest.raises(PackedValueError, match=r"limit (of|is) 1000000"):
        unpack(bomb, limits=DataLimits(value_bytes_max=1_000_000))


def test_a_large_frame_is_read_up_to_what_it_states() -> None:
    array = np.random.default_rng(1).integers(0, 256, 2_000_000, dtype=np.uint8)
    data = pickle.dumps(array, 5)
    np.testing.assert_array_equal(array, unpack(pack(data)))
    frame = lz4.frame.compress(data)
    short = frame_header(len(data) - 1) + frame[15:]
    with pytest.raises(PackedValueError):
        unpack(base64.b64encode(short))


def frame_header(stated_bytes: int) -> bytes:
    # version 1 with its size stated, blocks of 64 KiB
    body = b"\x68\x40" + struct.pack("<Q", stated_bytes)
    return b"\x04\x22\x4d\x18" + body + bytes([xxhash.xxh32_intdigest(body) >> 8 & 0xFF])


@pytest.mark.parametrize("value", ["", "AAAA", "no base64!", "BCJNGG", b"\xff\xfe"])
def test_what_is_not_packed_is_refused(value: str | bytes) -> None:
    with pytest.raises(PackedValueError):
        unpack(value)


def test_packed_values_are_recognised() -> None:
    packed = pack(pickle.dumps(np.arange(3)))
    assert [True, True, False, False] == [
        looks_packed(each) for each in (packed, packed.encode(), "text", 3)
    ]


def test_what_is_read_after_damage_is_what_pickle_reads() -> None:
    seed = 20240607
    rng = random.Random(seed)
    read_count = 0
    for value in USUAL[:3]:
        data = pickle.dumps(value, 5)
        for _ in range(2000):
            damaged = bytearray(data)
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            try:
                read = read_array(bytes(damaged))
            except PackedValueError:
                continue
            read_count += 1
            try:
                expected = pickle.loads(damaged)
            except (pickle.UnpicklingError, OverflowError):
                continue  # A frame of another size, which says nothing.
            assert expected.tobytes() == read.tobytes(), f"seed {seed}: {bytes(damaged)!r}"
            assert (expected.dtype, expected.shape) == (read.dtype, read.shape)
    assert read_count > 100


def test_a_huge_declared_size_of_an_lz4_frame_allocates_nothing() -> None:
    frame = lz4.frame.compress(pickle.dumps(np.arange(3), 5), store_size=True)
    stated = struct.pack("<Q", lz4.frame.get_frame_info(frame)["content_size"])
    hostile = frame.replace(stated, struct.pack("<Q", 2**62), 1)
    assert frame != hostile
    with pytest.raises(PackedValueError, match="lz4"):
        unpack(base64.b64encode(hostile))


def test_a_frame_that_states_more_than_it_can_hold_allocates_little() -> None:
    frame = frame_header(250_000_000) + lz4.frame.compress(b"some", store_size=False)[7:]
    assert 250_000_000 == lz4.frame.get_frame_info(frame)["content_size"]
    tracemalloc.start()
    try:
        with pytest.raises(PackedValueError):
            unpack(base64.b64encode(frame))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000
