"""Bounds of the payload format. A payload beyond any of them is refused, by writers and readers.

Readers check them before they allocate, so that a damaged or hostile payload costs no more memory
than its own size, or what it declares within these bounds.
"""

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

LAYOUT_PARTS_MAX: Final = 4 * NODES_MAX + 8 * ARRAYS_MAX
"""Fields and items of a layout at all its levels: what that many nodes and arrays take."""

LAYOUTS_MAX: Final = 64
"""Layouts that a reader remembers, and a writer: more kinds of fragment than one process mixes."""

LAYOUTS_BYTES_MAX: Final = 1024 * 1024
"""Most bytes of all layouts that a reader caches, as encoded in payloads: in memory they take up to
40 times as much. A larger one is parsed for each payload."""

EXPANDED_BYTES_MAX: Final = 1 << 30
"""Bytes that the compressed arrays of a payload may expand to together, by default: 1 GiB."""

EXPANDED_BYTES_MAX_VARIABLE: Final = "BREADBOX_EXPANDED_BYTES_MAX"
"""Environment variable that sets another limit for readers and writers, in bytes."""

EXPANDED_BYTES_FREE: Final = 64 * 1024 * 1024
EXPANSION_MAX: Final = 256
"""And they may expand to so many bytes for each of their own, beyond what is free: observations
compress ten to a hundred times, and a few bytes must not make a reader take a gigabyte."""

NAME_CHARACTERS_MAX: Final = 1024
"""Length of an array's path."""

ATTRIBUTES_MAX: Final = 64
"""Attributes of a payload."""

ATTRIBUTE_CHARACTERS_MAX: Final = 1024
"""Length of an attribute's name, and of its value."""

CHECKSUM_BLOCK_BYTES: Final = 256 * 1024
"""Block of the checksums that writers make: fits a second-level cache, and a slice of a few steps
reads little more than it needs. Twice as large, and so on, where an array has too many blocks."""

CHECKSUM_BLOCK_BYTES_MIN: Final = 4 * 1024
"""Readers refuse smaller blocks: more checksums than data would be next."""

CHECKSUM_BLOCKS_MAX: Final = 1 << 18
"""Checksums of a payload."""

ALIGNMENT_BYTES: Final = 64
"""The body, and each array in it, starts at a multiple of this: a cache line, and any SIMD load."""


@cache
def expanded_bytes_max() -> int:
    """What the compressed arrays of a payload may expand to together, at most."""
    text = os.environ.get(EXPANDED_BYTES_MAX_VARIABLE, "").strip()
    if not text:
        return EXPANDED_BYTES_MAX
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequestError(
            EXPANDED_BYTES_MAX_VARIABLE, f"must be a whole number of bytes, got {text[:40]!r}"
        )
    return int(text)


class Expansion:
    """What the compressed arrays of one payload expand to, as far as they were taken."""

    def __init__(self) -> None:
        self.encoded_bytes = 0
        self.expanded_bytes = 0

    def takes(self, encoded_bytes: int, expanded_bytes: int) -> bool:
        """Whether one more compressed array is within bounds; then it counts from now on."""
        encoded_bytes += self.encoded_bytes
        expanded_bytes += self.expanded_bytes
        relative_max = EXPANDED_BYTES_FREE + EXPANSION_MAX * encoded_bytes
        if expanded_bytes > min(relative_max, expanded_bytes_max()):
            return False
        self.encoded_bytes, self.expanded_bytes = encoded_bytes, expanded_bytes
        return True
