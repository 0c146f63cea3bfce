"""Unpack column values: base64 of an lz4 frame of a pickled numpy array, as RLlib writes them.

A pickle is not run: what numpy writes for a contiguous array of numbers is recognised as a whole,
and everything else is refused. Nothing that the data names is looked up or imported.
"""

import binascii
import re
from functools import lru_cache
from typing import Any, Literal

import lz4.frame
import numpy as np
from numpy.typing import NDArray

from breadbox_offline.decoding.dtypes import RefusedError, array_from_bytes, plain_dtype
from breadbox_offline.errors import PackedValueError
from breadbox_offline.limits import DEFAULT_LIMITS, DataLimits

# Protocol, frame, numpy.core.numeric._frombuffer, mark, and the number of bytes of contents.
_HEAD = re.compile(
    rb"\x80[\x04\x05](?:\x95.{8})?"
    rb"(?:\x8c\x13numpy\._core\.numeric|\x8c\x12numpy\.core\.numeric)\x94"
    rb"\x8c\x0b_frombuffer\x94\x93\x94\("
    rb"(?:[\x96\x8e](?P<size8>.{8})|B(?P<size4>.{4})|C(?P<size1>.))",
    re.DOTALL,
)
# numpy.dtype(name, False, True) with its byte order, the shape, and the order of axes.
_TAIL = re.compile(
    rb"(?:\x95.{8})?\x94\x8c\x05numpy\x94\x8c\x05dtype\x94\x93\x94"
    rb"\x8c\x02(?P<name>[biufc][1-9])\x94\x89\x88\x87\x94R\x94"
    rb"\(K\x03\x8c\x01(?P<byte_order>[<|])\x94NNNJ\xff{4}J\xff{4}K\x00t\x94b"
    rb"(?P<many>\(?)(?P<sizes>(?:K.|M.{2}|J.{4})+)(?P<end>[\x85-\x87t])\x94"
    rb"\x8c\x01(?P<order>[CF])\x94t\x94R\x94\.",
    re.DOTALL,
)
_SIZE = re.compile(rb"K(.)|M(.{2})|J(.{4})", re.DOTALL)
_TAIL_BYTES_MAX = 400
"""Bytes of the longest tail, with 32 sizes of 5 bytes, and a margin; `_form_of` caches them."""
_OTHER_FORM = (
    "packed value is no pickle of a contiguous numpy array of numbers, of protocol 5 as RLlib uses"
)
_SMALL_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


def read_array(data: bytes, *, limits: DataLimits = DEFAULT_LIMITS) -> NDArray[Any]:
    """Return the array in `data`, read-only; PackedValueError for any other form of pickle."""
    head = _HEAD.match(data)
    if head is None:
        raise PackedValueError(_OTHER_FORM)
    size = head["size8"] or head["size4"] or head["size1"]
    start = head.end()
    stop = start + int.from_bytes(size, "little")
    is_near_end = 0 < len(data) - stop <= _TAIL_BYTES_MAX
    try:
        form = _form_of(data[stop:]) if is_near_end else None
        if form is None:
            raise PackedValueError(_OTHER_FORM)
        dtype, shape, order = form
        return array_from_bytes(
            data[start:stop], dtype, shape, order=order, bytes_max=limits.array_bytes_max
        )
    except RefusedError as error:
        raise PackedValueError(f"packed value refused: {error}") from error


_Form = tuple[np.dtype[np.generic], tuple[int, ...], Literal["C", "F"]]


# Samples of a column have the same tail.
@lru_cache(maxsize=64)
def _form_of(tail: bytes) -> _Form | None:
    found = _TAIL.fullmatch(tail)
    shape = None if found is None else _shape(found)
    if found is None or shape is None:
        return None
    return plain_dtype(found["name"]), shape, "C" if found["order"] == b"C" else "F"


def _shape(tail: re.Match[bytes]) -> tuple[int, ...] | None:
    shape = tuple(
        int.from_bytes(byte or short or word, "little", signed=bool(word))
        for byte, short, word in _SIZE.findall(tail["sizes"])
    )
    is_many = bool(tail["many"])
    end = b"t" if is_many else _SMALL_TUPLES.get(len(shape))
    if tail["end"] != end or len(shape) > 32 or min(shape) < 0:
        return None
    return shape


_FRAME_MAGIC_BASE64 = "BCJNG"
_EXPANSION_MAX = 255
"""Most bytes that one byte of an lz4 frame can expand to."""


def looks_packed(value: object) -> bool:
    """Return True if `value` is text that starts like a packed value."""
    if isinstance(value, bytes):
        return value.startswith(_FRAME_MAGIC_BASE64.encode())
    return isinstance(value, str) and value.startswith(_FRAME_MAGIC_BASE64)


def unpack(value: str | bytes, *, limits: DataLimits = DEFAULT_LIMITS) -> NDArray[Any]:
    """Return a packed array, read-only."""
    return read_array(_decompress(value, limits), limits=limits)


def unpack_if_packed(value: Any, *, limits: DataLimits = DEFAULT_LIMITS) -> Any:
    """Unpack text and bytes; return anything else as it is, because columns may be mixed."""
    if isinstance(value, str | bytes):
        return unpack(value, limits=limits)
    return value


def _decompress(value: str | bytes, limits: DataLimits) -> bytes:
    try:
        frame = binascii.a2b_base64(value, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise PackedValueError(f"packed value is not base64: {error}") from error
    held_bytes_max = _EXPANSION_MAX * len(frame)
    try:
        stated_bytes: int = lz4.frame.get_frame_info(frame)["content_size"]  # 0: not stated
        if stated_bytes > min(held_bytes_max, limits.value_bytes_max):
            raise PackedValueError(
                f"packed value of {len(frame)} compressed bytes states {stated_bytes}; "
                f"the limit is {min(held_bytes_max, limits.value_bytes_max)}"
            )
        if held_bytes_max <= limits.value_bytes_max:
            # It cannot exceed the limit, and this is ten times as fast for a small one.
            whole: bytes = lz4.frame.decompress(frame)
            return whole
        decompressor = lz4.frame.LZ4FrameDecompressor()
        bytes_max = stated_bytes or limits.value_bytes_max
        data: bytes = decompressor.decompress(frame, max_length=bytes_max)
    except (RuntimeError, EOFError) as error:
        raise PackedValueError(f"packed value is not an lz4 frame: {error}") from error
    if not decompressor.eof:
        if len(data) >= bytes_max:
            raise PackedValueError(f"packed value holds more than the limit of {bytes_max} bytes")
        raise PackedValueError("packed value is a truncated lz4 frame")
    return data


def unpack_column(
    values: Any, name: str, *, first_row: int = 0, limits: DataLimits = DEFAULT_LIMITS
) -> list[Any] | Any:
    """Unpack the packed values of one column; return a numeric array as it is."""
    if isinstance(values, np.ndarray) and values.dtype.kind not in "OUS":
        return values
    unpacked = []
    for row, value in enumerate(values):
        try:
            unpacked.append(unpack_if_packed(value, limits=limits))
        except PackedValueError as error:
            error.row = first_row + row
            error.column = name
            raise
    return unpacked
