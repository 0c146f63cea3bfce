"""Records with checksums: each turn's is chained to that of the one before.

    turn      magic, chain, body      chain = XXH3-64 of the chain before, the sequence, the body
    snapshot  magic, chain, checksum, body      chain: its turns go on from it

Reading finds flipped bits, missing or misplaced turns, and another history's turns; only a missing
end is the place's to know.
"""

import struct
from typing import Final

import xxhash

TURN_MAGIC: Final = b"BBt1"
SNAPSHOT_MAGIC: Final = b"BBs1"
_TURN: Final = struct.Struct("<4sQ")
_SNAPSHOT: Final = struct.Struct("<4sQQ")
_NUMBERS: Final = struct.Struct("<QQ")


class JournalFormatError(Exception):
    """A record cannot be read: it is damaged."""


class NewerFormatError(JournalFormatError):
    """A record says what only a newer server understands."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; start the newer server that wrote it")


def frame_turn(before: int, sequence: int, body: bytes) -> tuple[bytes, int]:
    """Make a turn's record."""
    chain = _checksum(before, sequence, body)
    return _TURN.pack(TURN_MAGIC, chain) + body, chain


def open_turn(before: int, sequence: int, record: bytes) -> tuple[bytes, int]:
    """Return body and chain of a turn's record, or raise JournalFormatError."""
    if not record.startswith(TURN_MAGIC) or len(record) < _TURN.size:
        raise JournalFormatError("a record is damaged, or is of another version of Breadbox")
    _, chain = _TURN.unpack_from(record)
    body = record[_TURN.size :]
    if chain != _checksum(before, sequence, body):
        raise JournalFormatError("a record is damaged, or does not follow the one before it")
    return body, chain


def frame_snapshot(sequence: int, body: bytes, chain: int | None = None) -> bytes:
    """Make the record of a snapshot of turn `sequence`; chain None begins a new one."""
    chain = _checksum(0, sequence, body) if chain is None else chain
    return _SNAPSHOT.pack(SNAPSHOT_MAGIC, chain, _checksum(chain, sequence, body)) + body


def open_snapshot(sequence: int, record: bytes) -> tuple[bytes, int]:
    """Return body of a snapshot's record, and the chain that its turns go on from."""
    if not record.startswith(SNAPSHOT_MAGIC) or len(record) < _SNAPSHOT.size:
        raise JournalFormatError("a snapshot is damaged, or is of another version of Breadbox")
    _, chain, checksum = _SNAPSHOT.unpack_from(record)
    body = record[_SNAPSHOT.size :]
    if checksum != _checksum(chain, sequence, body):
        raise JournalFormatError("a snapshot is damaged: its checksum fails")
    return body, chain


def _checksum(before: int, sequence: int, body: bytes) -> int:
    hashed = xxhash.xxh3_64(_NUMBERS.pack(before, sequence))
    hashed.update(body)
    return hashed.intdigest()
