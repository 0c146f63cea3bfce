"""Bounds of the payload format. A payload beyond any of them is refused, by writers and readers.

Readers check them before they allocate, so that a damaged or hostile payload costs no more memory
than its own size, or what it declares within these bounds.
"""

from typing import Final

HEADER_BYTES_MAX: Final = 4 * 1024 * 1024
"""The header: room for the checksums of 64 GiB and for every array and node below."""

PAYLOAD_BYTES_MAX: Final = 1 << 36
"""A whole payload: 64 GiB, as the stores' own bound."""

ARRAYS_MAX: Final = 16_384
"""Arrays in a payload."""

NODES_MAX: Final = 65_536
"""Nodes of a tree, leaves included."""

TREE_DEPTH_MAX: Final = 32
"""Containers within containers; protobuf itself stops at 100 messages, two per container."""

DIMENSIONS_MAX: Final = 32
"""Axes of an array: what every supported numpy can make."""

EXPANDED_BYTES_MAX: Final = 1 << 32
"""What one compressed array may expand to: 4 GiB."""

NAME_CHARACTERS_MAX: Final = 1024
"""Length of an array's path."""

ATTRIBUTES_MAX: Final = 64
"""Attributes in a header."""

ATTRIBUTE_CHARACTERS_MAX: Final = 1024
"""Length of an attribute's name, and of its value."""

CHECKSUM_BLOCK_BYTES: Final = 256 * 1024
"""Block of the checksums that writers make: fits a second-level cache, and a slice of a few steps
reads little more than it needs. Twice as large, and so on, where an array has too many blocks."""

CHECKSUM_BLOCK_BYTES_MIN: Final = 4 * 1024
"""Readers refuse smaller blocks: more checksums than data would be next."""

CHECKSUM_BLOCKS_MAX: Final = 1 << 18
"""Checksums in a header."""

ALIGNMENT_BYTES: Final = 64
"""The body, and each array in it, starts at a multiple of this: a cache line, and any SIMD load."""
