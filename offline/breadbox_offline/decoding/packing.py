"""Packed column values: base64 of an lz4 frame of a pickled numpy array, as RLlib writes them."""

import binascii
from typing import Any

import lz4.frame
import numpy as np

from breadbox_offline.decoding.unpickling import read_numpy_pickle
from breadbox_offline.errors import PackedValueError
from breadbox_offline.limits import DEFAULT_LIMITS, DataLimits

_FRAME_MAGIC_BASE64 = "BCJNG"
"""How base64 of every lz4 frame starts."""
_EXPANSION_MAX = 255
"""Bytes that one byte of an lz4 frame can stand for, at most."""


def looks_packed(value: object) -> bool:
    """Whether `value` is text that starts like a packed value."""
    if isinstance(value, bytes):
        return value.startswith(_FRAME_MAGIC_BASE64.encode())
    return isinstance(value, str) and value.startswith(_FRAME_MAGIC_BASE64)


def unpack(value: str | bytes, *, limits: DataLimits = DEFAULT_LIMITS) -> Any:
    """What was packed: an array (read-only), a numpy scalar or a plain number."""
    return read_numpy_pickle(_decompress(value, limits), limits=limits)


def unpack_if_packed(value: Any, *, limits: DataLimits = DEFAULT_LIMITS) -> Any:
    """`unpack` text and bytes, leave anything else as it is: packed columns may be mixed."""
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
            # It cannot exceed the limit, and this takes a tenth of the time for a small one.
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
    """Unpack what is packed in one column; a numeric array is returned as it is."""
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
