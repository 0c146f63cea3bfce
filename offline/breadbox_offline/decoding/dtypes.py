"""Check dtypes that recorded data names: fixed-size numbers, booleans and text, nothing else."""

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from breadbox_offline.errors import named


class RefusedError(ValueError):
    """Data needs something that is not read here; callers raise an error with its place."""


_PLAIN = re.compile(r"[<>|=]?(?:\?|[biufcSU]\d{1,9})")


def plain_dtype(name: object) -> np.dtype[np.generic]:
    """Return the dtype that a file names, or raise RefusedError."""
    if isinstance(name, bytes):
        name = name.decode("ascii", errors="replace")
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
        raise RefusedError(
            f"dtype {named(name)} is refused: only numbers, booleans and text are read"
        )
    try:
        return np.dtype(name)
    except (TypeError, ValueError) as error:  # of a size that numpy refuses
        raise RefusedError(f"dtype {named(name)} is unknown") from error


def plain_shape(shape: object) -> tuple[int, ...]:
    """Return a shape that a file states, or raise RefusedError."""
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes) or len(shape) > 32:
        raise RefusedError("a shape is malformed: wanted at most 32 whole numbers from 0")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise RefusedError("a shape is malformed: wanted at most 32 whole numbers from 0")
    return tuple(shape)


def array_from_bytes(
    contents: object,
    dtype: np.dtype[np.generic],
    shape: tuple[int, ...],
    *,
    order: Literal["C", "F"] = "C",
    bytes_max: int,
) -> NDArray[Any]:
    """Return bytes of exactly this size as a read-only array, a copy if in foreign order."""
    size_bytes = dtype.itemsize * math.prod(shape)  # Exact, however large the stated shape is.
    if not isinstance(contents, bytes | bytearray):
        raise RefusedError(f"array contents are a {type(contents).__name__}, wanted bytes")
    if size_bytes > bytes_max:
        raise RefusedError(f"an array of {size_bytes} bytes; the limit is {bytes_max}")
    if size_bytes != len(contents):
        raise RefusedError(f"an array of {size_bytes} bytes with contents of {len(contents)}")
    flat = np.frombuffer(contents, dtype=dtype)
    if not dtype.isnative:
        flat = flat.astype(dtype.newbyteorder("="))
    if flat.base is None or isinstance(contents, bytearray):  # a view of bytes is read-only
        flat.flags.writeable = False
    return flat.reshape(shape, order=order)
