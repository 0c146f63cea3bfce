"""Bounds of the payload format, which writers keep and readers check before they allocate."""

import os
from functools import cache
from typing import Final

from breadbox.model.errors import InvalidRequestError
from breadbox.model.trees import NODES_MAX

HEAD_BYTES_MAX: Final = 4 * 1024 * 1024
"""Checksums, attributes and layout: room for those of 64 GiB and for every array and node below."""
PAYLOAD_BYTES_MAX: Final = 1 << 36
"""A whole payload: 64 GiB, as the stores' own bound."""
ARRAYS_MAX: Final = 16_384
"""Arrays in a payload."""
DIMENSIONS_MAX: Final = 32
"""Axes of an array: what every supported numpy can make."""
OPEN_AXES_MAX: Final = 65_535
"""Axes of all arrays whose lengths are no part of the layout."""
LAYOUT_PARTS_MAX: Final = 4 * NODES_MAX + 8 * ARRAYS_MAX
"""Fields and items of a layout at all its levels: what that many nodes and arrays take."""
LAYOUTS_MAX: Final = 64
"""Layouts that a reader or writer remembers: more than one process mixes."""
LAYOUTS_BYTES_MAX: Final = 1024 * 1024
"""Most bytes of all layouts that a reader caches; in memory they take up to 40 times as much."""
EXPANDED_BYTES_MAX: Final = 1 << 30
"""Bytes that the compressed arrays of a payload may expand to together, by default: 1 GiB."""
EXPANDED_BYTES_MAX_VARIABLE: Final = "BREADBOX_EXPANDED_BYTES_MAX"
"""Environment variable that sets another limit for readers and writers, in bytes."""
EXPANDED_BYTES_FREE: Final = 64 * 1024 * 1024
EXPANSION_MAX: Final = 256
"""Bytes to expand to per own byte, beyond what is free: bounds what few bytes allocate."""
NAME_CHARACTERS_MAX: Final = 1024
"""Length of an array's path."""
ATTRIBUTES_MAX: Final = 64
"""Attributes of a payload."""
ATTRIBUTE_CHARACTERS_MAX: Final = 1024
"""Length of an attribute's name, and of its value."""
CHECKSUM_BLOCK_BYTES: Final = 64 * 1024
"""Block of writers' checksums, doubled until an array has few. For at most 100,000 bytes xxhash
keeps the interpreter, which beside a busy thread takes up to 5 ms to get back.
"""
CHECKSUM_BLOCK_BYTES_MIN: Final = 4 * 1024
"""Smallest block that readers take."""
CHECKSUM_BLOCKS_MAX: Final = 1 << 18
"""Checksums of a payload."""
ALIGNMENT_BYTES: Final = 64
"""Start of the body, and of each array in it, is a multiple: a cache line, and any SIMD load."""


@cache
def expanded_bytes_max() -> int:
    """Return what the compressed arrays of a payload may expand to together."""
    text = os.environ.get(EXPANDED_BYTES_MAX_VARIABLE, "").strip()
    if not text:
        return EXPANDED_BYTES_MAX
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequestError(
            EXPANDED_BYTES_MAX_VARIABLE, f"must be a whole number of bytes, got {text[:40]!r}"
        )
    return int(text)


class Expansion:
    """What the compressed arrays of one payload expand to."""

    def __init__(self) -> None:
        self.encoded_bytes = 0
        self.expanded_bytes = 0

    def takes(self, encoded_bytes: int, expanded_bytes: int) -> bool:
        """Return whether one more compressed array is within bounds, and count it."""
        encoded_bytes += self.encoded_bytes
        expanded_bytes += self.expanded_bytes
        relative_max = EXPANDED_BYTES_FREE + EXPANSION_MAX * encoded_bytes
        if expanded_bytes > min(relative_max, expanded_bytes_max()):
            return False
        self.encoded_bytes, self.expanded_bytes = encoded_bytes, expanded_bytes
        return True
