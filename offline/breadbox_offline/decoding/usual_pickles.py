r"""The form in which numpy pickles nearly every array, recognised as a whole.

Such a pickle is always the same instructions around the contents, a dtype and a shape. Two regular
expressions find those in a tenth of the time that the stack machine (`unpickling`) needs; what does
not match to the last byte, or does not add up, is left to the machine, which reads or refuses it.
"""

import re
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from breadbox_offline.decoding.dtypes import RefusedError, array_from_bytes, plain_dtype
from breadbox_offline.limits import DataLimits

# protocol, frame, numpy.core.numeric._frombuffer, mark, and how many bytes of contents follow
_HEAD = re.compile(
    rb"\x80[\x04\x05](?:\x95.{8})?"
    rb"(?:\x8c\x13numpy\._core\.numeric|\x8c\x12numpy\.core\.numeric)\x94"
    rb"\x8c\x0b_frombuffer\x94\x93\x94\("
    rb"(?:[\x96\x8e](?P<size8>.{8})|B(?P<size4>.{4})|C(?P<size1>.))",
    re.DOTALL,
)
# numpy.dtype(name, False, True) with its byte order, the shape, and the order of axes
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
"""Bytes of the longest tail, with 32 sizes of 5 bytes, and to spare; longer ones are forgotten."""
_SMALL_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


def read_usual_array(data: bytes, limits: DataLimits) -> NDArray[Any] | None:
    """The array that `data` holds, read-only; None when it is of any other form."""
    head = _HEAD.match(data)
    if head is None:
        return None
    size = head["size8"] or head["size4"] or head["size1"]
    start = head.end()
    stop = start + int.from_bytes(size, "little")
    is_near_end = 0 < len(data) - stop <= _TAIL_BYTES_MAX
    try:
        form = _form_of(data[stop:]) if is_near_end else None
        if form is None:
            return None
        dtype, shape, order = form
        return array_from_bytes(
            data[start:stop], dtype, shape, order=order, bytes_max=limits.array_bytes_max
        )
    except RefusedError:
        return None


_Form = tuple[np.dtype[np.generic], tuple[int, ...], Literal["C", "F"]]


# The samples of a column end alike.
@lru_cache(maxsize=64)
def _form_of(tail: bytes) -> _Form | None:
    """What the bytes behind the contents say; None when they are of any other form."""
    found = _TAIL.fullmatch(tail)
    shape = None if found is None else _shape(found)
    if found is None or shape is None:
        return None
    return plain_dtype(found["name"]), shape, "C" if found["order"] == b"C" else "F"


def _shape(tail: re.Match[bytes]) -> tuple[int, ...] | None:
    """The shape that a tail states; None when the numbers make no tuple."""
    shape = tuple(
        int.from_bytes(byte or short or word, "little", signed=bool(word))
        for byte, short, word in _SIZE.findall(tail["sizes"])
    )
    is_many = bool(tail["many"])
    end = b"t" if is_many else _SMALL_TUPLES.get(len(shape))
    if tail["end"] != end or len(shape) > 32 or min(shape) < 0:
        return None
    return shape
