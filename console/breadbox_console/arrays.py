"""Turn arrays of any type into those that pages can show. Pure."""

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from breadbox.payload.dtypes import as_numpy

NUMBERS: Final = "biuf"
"""Kinds of numpy types that are shown as numbers; complex numbers, dates and raw bytes are not."""
_REPLACEMENT: Final = 0xFFFD


def plain(leaf: Any) -> NDArray[Any]:
    """Return a leaf as numpy has it: bfloat16 as float32, and text of valid code points alone.

    A code point that is none, or half of a pair, becomes U+FFFD.
    """
    array = as_numpy(leaf)
    if array.dtype.kind != "U":
        return array
    codes = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(-1).view(np.uint32)
    is_wrong = (codes > 0x10FFFF) | ((codes >= 0xD800) & (codes <= 0xDFFF))
    if not is_wrong.any():
        return array
    codes = np.where(is_wrong, np.uint32(_REPLACEMENT), codes)
    return codes.view(array.dtype.newbyteorder("=")).reshape(array.shape)


def numbers(leaf: Any) -> NDArray[np.float64]:
    """Return a leaf as float64; an array of something else than numbers is NaN."""
    array = as_numpy(leaf)
    if array.dtype.kind not in NUMBERS:
        return np.full(array.shape, np.nan)
    return array.astype(np.float64)


def text_of(value: Any) -> str:
    """Return an element of an array of text, bytes or integers as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def finite(value: Any) -> float | None:
    """Return a number that JSON knows, or None if it is infinite or no number."""
    return float(value) if math.isfinite(value) else None
