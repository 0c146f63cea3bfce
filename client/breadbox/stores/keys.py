"""How payloads are named and cut in a store: the one place that knows.

A payload id is 32 random lower-case hexadecimal digits. In Redis, piece k is `breadbox:{<id>}:<k>`,
all on one node by the hash tag; in a directory, one file of that name. The hash
`breadbox:{store}:journals` (one per slot of a cluster) has the latest epoch of each journal.
In a group file (`breadbox.stores.groups`) an id is 20 random digits, a mark, and two of the place.
"""

import binascii
import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from breadbox.model.types import PayloadReference

_PAYLOAD_ID = re.compile(r"[0-9a-f]{32}")
_KEY = re.compile(rb"breadbox:\{([0-9a-f]{32})\}:([0-9]+)")

KEY_PATTERN = "breadbox:{*}:0"
"""Matches the first piece of every payload, as Redis SCAN takes it."""

PAYLOAD_SIZE_BYTES_MAX = 1 << 36
"""64 GiB: far beyond any fragment; a reference that claims more is taken for damaged."""

PIECE_SIZE_BYTES_MIN = 1 << 16
"""64 KiB: bounds the keys that one reference can name (with the limit above) to 2^20."""


def new_payload_id() -> str:
    """Return a fresh id: 128 random bits."""
    return os.urandom(16).hex()


GROUP_PLACES = 256
"""Most payloads of a group file."""

_GROUP_MARK = b"group".hex()
"""One in 2^40 other ids has it; that payload is answered as missing, and written again."""

_MARKED = slice(20, 30)


def new_group() -> str:
    """Return the name of a new group file."""
    return os.urandom(10).hex() + _GROUP_MARK


def payload_ids_of(group: str) -> Iterator[str]:
    """Yield the ids for all places of a group file, in order."""
    return (f"{group}{place:02x}" for place in range(GROUP_PLACES))


def group_of(payload_id: str) -> str | None:
    """Return the name of a payload's group file, or None if it has a file of its own."""
    return payload_id[: _MARKED.stop] if payload_id[_MARKED] == _GROUP_MARK else None


def place_of(payload_id: str) -> int:
    """Return the place of a payload in its group file."""
    return int(payload_id[_MARKED.stop :], 16)


def is_payload_id(text: str) -> bool:
    """Return whether an id is well-formed; anything else is never put into a key or path."""
    return _PAYLOAD_ID.fullmatch(text) is not None


def is_sound(reference: PayloadReference) -> bool:
    """Return whether a reference, which may come from the network, is within all bounds."""
    return (
        is_payload_id(reference.payload_id)
        and 0 < reference.size_bytes <= PAYLOAD_SIZE_BYTES_MAX
        and (reference.piece_size_bytes == 0 or reference.piece_size_bytes >= PIECE_SIZE_BYTES_MIN)
    )


def piece_key(payload_id: str, piece: int) -> bytes:
    """Return the Redis key of one piece."""
    return b"breadbox:{%s}:%d" % (payload_id.encode("ascii"), piece)


def payload_id_of_key(key: bytes) -> str | None:
    """Return the payload id of a Redis key, or None if the key is not ours."""
    match = _KEY.fullmatch(key)
    return match[1].decode("ascii") if match else None


def piece_keys(reference: PayloadReference) -> list[bytes]:
    """Return the Redis keys of all pieces, at least one, in order."""
    count = max(1, reference.piece_count)
    return [piece_key(reference.payload_id, piece) for piece in range(count)]


def piece_ranges(
    reference: PayloadReference, offset_bytes: int, length_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a byte range in pieces: (piece, first byte within it, bytes)."""
    piece_size = reference.piece_size_bytes or reference.size_bytes
    end = offset_bytes + length_bytes
    while offset_bytes < end:
        piece, start = divmod(offset_bytes, piece_size)
        length = min(piece_size - start, end - offset_bytes)
        yield piece, start, length
        offset_bytes += length


def cut(
    buffers: Iterable[memoryview], piece_size_bytes: int
) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield the pieces of a payload: (length, the parts of the buffers that make it)."""
    if not piece_size_bytes:
        yield sum(len(buffer) for buffer in buffers), list(buffers)
        return
    piece: list[memoryview] = []
    room = piece_size_bytes
    for whole in buffers:
        buffer = whole
        while len(buffer) >= room:
            yield piece_size_bytes, [*piece, buffer[:room]]
            buffer = buffer[room:]
            piece, room = [], piece_size_bytes
        if len(buffer):
            piece.append(buffer)
            room -= len(buffer)
    if piece:
        yield piece_size_bytes - room, piece


JOURNALS_PATTERN = "breadbox:{s*}:journals"
"""Matches every hash of journals for SCAN: no payload id, being hexadecimal, begins with an s."""

JOURNALS_KEY = b"breadbox:{store}:journals"
"""Hash of journals, where one is for all payloads."""

_SLOTS = 16_384


@lru_cache(maxsize=_SLOTS)
def journals_key(payload_key: bytes) -> bytes:
    """Return the hash of journals in the same slot of a cluster as a payload's key."""
    slot = _slot(payload_key[len(b"breadbox:{") :].partition(b"}")[0])
    return b"breadbox:{%s}:journals" % _tags_by_slot()[slot]


def _slot(hash_tag: bytes) -> int:
    return binascii.crc_hqx(hash_tag, 0) % _SLOTS


@lru_cache(maxsize=1)
def _tags_by_slot() -> dict[int, bytes]:
    """Return a hash tag for each slot; found by trying, in some tens of ms."""
    tags: dict[int, bytes] = {}
    number = 0
    while len(tags) < _SLOTS:
        tag = b"s%d" % number
        tags.setdefault(_slot(tag), tag)
        number += 1
    return tags
