"""Records of turns and snapshots: protobuf messages of `breadbox.journal.v1` with a version.

A later version's record is refused: it may say what this server would drop. Records are checked for
what they must have; whether they fit the state is the core's to say.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, TypeVar

import zstandard
from google.protobuf.message import DecodeError

from breadbox.wire.forms import Columns, Functions, MessageMapping, members
from breadbox_server.base.conversion import PAYLOAD, QUARANTINED, SCHEMA, as_one_object
from breadbox_server.core.model.entries import Entry
from breadbox_server.core.model.errors import DomainError
from breadbox_server.core.model.inputs import Fragment
from breadbox_server.core.snapshot import (
    BufferSnapshot,
    ChunkSnapshot,
    GrantedChunkSnapshot,
    GrantSnapshot,
    LeaseSnapshot,
    OpenChunkSnapshot,
    TicketSnapshot,
    WorkerSnapshot,
)
from breadbox_server.core.state.chunks import ChunkState
from breadbox_server.core.state.subscriptions import Subscription
from breadbox_server.journal.encoding.entries import FRAGMENTS, LIMITS, entries_of, put_entries
from breadbox_server.journal.encoding.frames import JournalFormatError, NewerFormatError
from breadbox_server.journal.v1 import journal_pb2 as pb

VERSION: Final = 6
"""Version of written records. It grows with every change of what a journal holds (a test pins the
schema to it), with a folder in tests/golden. Earlier ones stay readable for ever."""
COMPRESSION_LEVEL: Final = 1
"""Snapshots are written in the background but read while all clients wait for the server."""
SNAPSHOT_SIZE_BYTES_MAX: Final = 2**30
"""Size of a decompressed snapshot beyond which it is taken for damage, declared or not."""


def _put_lists(lists: Sequence[Sequence[Fragment]], message: Any) -> None:
    message.fragment_counts.extend(map(len, lists))
    FRAGMENTS.put([fragment for each in lists for fragment in each], message.fragments)


def _lists_of(message: Any) -> list[tuple[Fragment, ...]]:
    fragments, counts = FRAGMENTS.read(message.fragments), message.fragment_counts
    if any(count < 1 for count in counts):
        raise ValueError("a chunk has no fragments")
    if sum(counts) != len(fragments):
        raise ValueError(f"{len(fragments)} fragments for {sum(counts)} of chunks")
    if len(counts) == len(fragments):
        return list(zip(fragments, strict=True))
    ends = accumulate(counts, initial=0)
    return [fragments[start:end] for start, end in pairwise(ends)]


_LISTS: Final = Functions(_lists_of, _put_lists, ("fragment_counts", "fragments"))
_STATES: Final = members(pb.ChunkState.DESCRIPTOR, ChunkState)
_CHUNKS: Final = Columns(
    ChunkSnapshot,
    names={
        "chunk_id": "chunk_ids",
        "state": "states",
        "use_count": "use_counts",
        "unreadable_count": "unreadable_counts",
        "priority": "priorities",
    },
    defaults={"priority": 1.0},
    parts={
        "state": Functions(
            lambda column: list(map(_STATES.__getitem__, column)),
            lambda states, column: column.extend(map(_STATES.numbers.__getitem__, states)),
        )
    },
    within={"fragments": _LISTS},
)
_OPEN_CHUNKS: Final = Columns(
    OpenChunkSnapshot, names={"touched_at": "touched_ats"}, within={"fragments": _LISTS}
)
_GRANT: Final = MessageMapping(
    pb.Grant,
    GrantSnapshot,
    parts={"leases": MessageMapping(pb.Lease, LeaseSnapshot)},
    reads={"session_id": as_one_object},
    within={
        "chunks": Columns(
            GrantedChunkSnapshot,
            names={
                "chunk_id": "chunk_ids",
                "staleness": "stalenesses",
                "use_count": "use_counts",
                "priority": "priorities",
                "probability": "probabilities",
            },
            defaults={"priority": 1.0, "probability": 1.0},
        )
    },
)


def _put_weights(value: tuple[int, Any], message: pb.Weights) -> None:
    message.model_version = value[0]
    PAYLOAD.put(value[1], message.payload)


def _put_schema(value: tuple[int, Any], message: pb.KnownSchema) -> None:
    message.hash = value[0]
    SCHEMA.put(value[1], message.schema)


BUFFER: Final = MessageMapping(
    pb.BufferSnapshot,
    BufferSnapshot,
    names={"limits": "config", "ended_session_ids": "ended_sessions"},
    reads={"session_id": as_one_object},
    parts={
        "config": LIMITS,
        "weights": Functions(
            lambda each: (each.model_version, PAYLOAD.read(each.payload)), _put_weights
        ),
        "chunks": _CHUNKS,
        "workers": MessageMapping(pb.Worker, WorkerSnapshot, reads={"worker_id": as_one_object}),
        "open_chunks": _OPEN_CHUNKS,
        "tickets": MessageMapping(pb.Ticket, TicketSnapshot),
        "quarantined": QUARANTINED,
        "live_grants": _GRANT,
        "ended_grants": _GRANT,
        "schemas": Functions(lambda each: (each.hash, SCHEMA.read(each.schema)), _put_schema),
        "subscriptions": MessageMapping(
            pb.NamedCursor, Subscription, names={"retaining": "is_retaining", "chunk_id": "cursor"}
        ),
    },
)


_Record = TypeVar("_Record", pb.Turn, pb.Snapshot)


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


def decode_turn(data: bytes) -> list[tuple[float, Entry]]:
    """Read one turn: what was decided together, with instants of the server's clock."""
    message = _parsed(pb.Turn, data)
    try:
        return entries_of(message.entries)
    except (DomainError, ValueError) as error:
        raise JournalFormatError(f"a turn holds an entry that cannot be: {error}") from error


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Write one snapshot."""
    message = pb.Snapshot(version=VERSION, sequence=snapshot.sequence, now=snapshot.now)
    for buffer in snapshot.buffers:
        BUFFER.put(buffer, message.buffers.add())
    compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL)
    return compressor.compress(message.SerializeToString())


def decode_snapshot(data: bytes) -> Snapshot:
    """Read one snapshot."""
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
        buffers = tuple(map(BUFFER.read, message.buffers))
    except (DomainError, ValueError) as error:
        raise JournalFormatError(f"a snapshot holds an impossible value: {error}") from error
    return Snapshot(message.sequence, message.now, buffers)


def _parsed(kind: type[_Record], data: bytes) -> _Record:
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
