"""Records of turns and snapshots: protobuf messages of `breadbox.journal.v1` with a version.

A record of an earlier version is read, one of a later version is refused: it may say what this
server would drop. What is read is checked for what a record must have; whether it fits what came
before it is the core's to say.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

import zstandard
from google.protobuf.message import DecodeError

from breadbox_server.core.model.entries import Entry
from breadbox_server.core.model.errors import DomainError
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.journal.encoding.entries import entries_of, put_entries
from breadbox_server.journal.encoding.frames import JournalFormatError, NewerFormatError
from breadbox_server.journal.encoding.snapshots import buffer_of, put_buffer
from breadbox_server.journal.v1 import journal_pb2 as pb

VERSION: Final = 3
"""Version of the records that are written. It grows with every change of what a journal holds (a
test pins the schema to it), and with it a folder is added to tests/golden. Earlier versions stay
readable for ever."""
COMPRESSION_LEVEL: Final = 1
"""Snapshots are written in the background but read while all clients wait for the server."""
SNAPSHOT_SIZE_BYTES_MAX: Final = 2**30
"""Size of a decompressed snapshot beyond which it is taken for damage, declared or not."""


_Record = TypeVar("_Record", pb.Turn, pb.Snapshot)


class Turn(NamedTuple):
    """What was decided together: instants of the server's clock, and entries."""

    entries: list[tuple[float, Entry]]


class Snapshot(NamedTuple):
    """The core after a turn."""

    sequence: int
    """The turn; 1 is before the first."""
    now: float
    """An instant that the server's clock had reached."""
    buffers: tuple[BufferSnapshot, ...]


def encode_turn(entries: Sequence[tuple[float, Entry]]) -> bytes:
    """Write one turn. Small, and so not compressed: most turns hold a handful of entries."""
    message = pb.Turn(version=VERSION)
    put_entries(entries, message.entries)
    return message.SerializeToString()


def decode_turn(data: bytes) -> Turn:
    """Read one turn.

    Raises:
        JournalFormatError: It is damaged.
        NewerFormatError: A newer server wrote it.
    """
    message = _parsed(pb.Turn, data)
    try:
        return Turn(entries_of(message.entries))
    except (DomainError, ValueError) as error:
        raise JournalFormatError(f"a turn holds an entry that cannot be: {error}") from error


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Write one snapshot."""
    message = pb.Snapshot(version=VERSION, sequence=snapshot.sequence, now=snapshot.now)
    for buffer in snapshot.buffers:
        put_buffer(buffer, message.buffers.add())
    compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL)
    return compressor.compress(message.SerializeToString())


def decode_snapshot(data: bytes) -> Snapshot:
    """Read one snapshot.

    Raises:
        JournalFormatError: It is damaged.
        NewerFormatError: A newer server wrote it.
    """
    try:
        # zstandard heeds `max_output_size` only where the frame does not say its size.
        if zstandard.frame_content_size(data) > SNAPSHOT_SIZE_BYTES_MAX:
            raise JournalFormatError("a snapshot is damaged: it claims to be too large")
        plain = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=SNAPSHOT_SIZE_BYTES_MAX
        )
    except zstandard.ZstdError as error:
        raise JournalFormatError(f"a snapshot is damaged: {error}") from error
    message = _parsed(pb.Snapshot, plain)
    try:
        buffers = tuple([buffer_of(each) for each in message.buffers])
    except (DomainError, ValueError) as error:
        raise JournalFormatError(f"a snapshot holds what cannot be: {error}") from error
    return Snapshot(message.sequence, message.now, buffers)


def _parsed(kind: type[_Record], data: bytes) -> _Record:
    """A record of this version or an earlier one."""
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise JournalFormatError(f"a record is damaged: {error}") from error
    if message.version > VERSION:
        raise NewerFormatError(
            f"it is of format {message.version}, and this server reads up to {VERSION}"
        )
    if message.version < 1:
        raise JournalFormatError("a record is damaged: it has no version")
    return message
