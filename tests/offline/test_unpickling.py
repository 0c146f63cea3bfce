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

from breadbox_offline.decoding.packing import (
    looks_packed,
    read_numpy_pickle,
    read_usual_array,
    run_machine,
    unpack,
)
from breadbox_offline.errors import PackedValueError
from breadbox_offline.limits import DEFAULT_LIMITS, DataLimits

VALUES = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2],
    np.ones((2, 2), order="F"),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(4, dtype=">i2"),
    np.array(5),
    np.zeros((0, 3)),
    np.array(["ab", "c"]),
    np.array([b"ab", b"c"]),
    np.float32(3.5),
    np.bool_(True),
    np.int64(-1),
    np.complex64(1j),
    7,
    2.5,
    "text",
    None,
    True,
]


def pack(data: bytes) -> str:
    return base64.b64encode(lz4.frame.compress(data)).decode()


class Executes:
    """Its pickle calls a function when it is loaded."""

    def __init__(self, function: object, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._call


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_numpy_data_comes_out_equal(value: object, protocol: int) -> None:
    read = unpack(pack(pickle.dumps(value, protocol)))
    np.testing.assert_array_equal(value, read)
    if isinstance(value, np.ndarray | np.generic):
        assert value.dtype.newbyteorder("=") == read.dtype


def test_names_of_numpy_1_are_known() -> None:
    data = pickle.dumps(np.arange(3), 5)
    old = data.replace(b"\x8c\x13numpy._core.numeric", b"\x8c\x12numpy.core.numeric")
    assert data != old
    assert [0, 1, 2] == read_numpy_pickle(old).tolist()


def test_arrays_are_read_only() -> None:
    assert not read_numpy_pickle(pickle.dumps(np.arange(3))).flags.writeable


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
        read_numpy_pickle(data)


@pytest.mark.parametrize("protocol", [3, 5])
def test_every_truncation_is_refused(protocol: int) -> None:
    data = pickle.dumps(np.arange(6, dtype=np.float32).reshape(2, 3), protocol)
    for end in range(len(data)):
        with pytest.raises(PackedValueError):
            read_numpy_pickle(data[:end])


def test_damaged_bytes_are_read_or_refused_but_nothing_else() -> None:
    seed = 20240607
    rng = random.Random(seed)
    data = pickle.dumps(np.arange(6, dtype=np.float32), 5)
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            read_numpy_pickle(bytes(damaged))
        except PackedValueError:
            continue
        except Exception as error:  # noqa: BLE001 - that is the claim under test
            pytest.fail(f"seed {seed}: {bytes(damaged)!r} raised {error!r}")


def test_a_huge_declared_shape_allocates_nothing() -> None:
    data = pickle.dumps(np.zeros(3), 5)
    hostile = data.replace(b"K\x03\x85", b"J\xff\xff\xff\x7f\x85")
    assert data != hostile
    with pytest.raises(PackedValueError, match="bytes"):
        read_numpy_pickle(hostile)


def test_a_huge_declared_length_allocates_nothing() -> None:
    with pytest.raises(PackedValueError, match="remain"):
        read_numpy_pickle(b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".")


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


def test_endless_instructions_stop_at_the_limit() -> None:
    with pytest.raises(PackedValueError, match="instructions"):
        read_numpy_pickle(b"N" * 5000, limits=DataLimits(opcodes_max=1000))


@pytest.mark.parametrize("value", ["", "AAAA", "no base64!", "BCJNGG", b"\xff\xfe"])
def test_what_is_not_packed_is_refused(value: str | bytes) -> None:
    with pytest.raises(PackedValueError):
        unpack(value)


def test_packed_values_are_recognised() -> None:
    packed = pack(pickle.dumps(np.arange(3)))
    assert [True, True, False, False] == [
        looks_packed(each) for each in (packed, packed.encode(), "text", 3)
    ]


USUAL: list[np.ndarray] = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.zeros((1, 2, 3, 4, 5), np.uint8),
    np.ones(300, np.bool_),
    np.arange(70_000, dtype=np.int16),
    np.zeros((3, 300, 1), np.complex64),
]


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy(order="K")
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("value", [*USUAL, *map(read_only, USUAL)], ids=lambda v: str(v.shape))
def test_the_usual_form_is_recognised_and_reads_as_the_machine_does(value: np.ndarray) -> None:
    data = pickle.dumps(value, 5)
    usual = read_usual_array(data, DEFAULT_LIMITS)
    assert usual is not None
    by_machine = run_machine(data, DEFAULT_LIMITS)
    for array in (usual, by_machine):
        assert (value.dtype, value.shape) == (array.dtype, array.shape)
        assert value.flags.f_contiguous == array.flags.f_contiguous
        assert (False, True) == (array.flags.writeable, array.flags.aligned)
        np.testing.assert_array_equal(value, array)


def test_what_is_recognised_after_damage_reads_as_the_machine_does() -> None:
    seed = 20240607
    rng = random.Random(seed)
    read_count = 0
    for value in USUAL[:3]:
        data = pickle.dumps(value, 5)
        for _ in range(2000):
            damaged = bytearray(data)
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            usual = read_usual_array(bytes(damaged), DEFAULT_LIMITS)
            if usual is not None:
                read_count += 1
                by_machine = run_machine(bytes(damaged), DEFAULT_LIMITS)
                assert by_machine.tobytes() == usual.tobytes(), f"seed {seed}: {bytes(damaged)!r}"
                assert (by_machine.dtype, by_machine.shape) == (usual.dtype, usual.shape)
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
