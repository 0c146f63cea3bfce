"""Reading by a cursor: what came after a chunk, in order of arrival, consuming nothing (B16).

A read changes nothing, so it is no input and stands in no journal. Whoever serves it keeps the
payloads of what was read for a while, beside the core.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from breadbox_server.core.ids import SessionId
from breadbox_server.core.inputs import GrantedFragment, ModelState
from breadbox_server.core.leases import GrantedChunk, granted_fragments
from breadbox_server.core.state import BufferState

READ_FRAGMENTS_MAX: Final = 4096
READ_BYTES_MAX: Final = 256 * 2**20
"""A read ends with the chunk with which it has so many fragments, or bytes of payloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where a reader stands, and how far it wants to go on."""

    after: int | None
    """The chunk up to which it was told; None: it begins with the oldest that is held."""
    known_session_id: SessionId | None = None
    """The session that it knows; None: it does not say."""
    chunk_count_max: int = 64
    """At least 1."""


class ChunksRead(NamedTuple):
    """What a reader gets."""

    fragments: tuple[GrantedFragment, ...]
    chunk_count: int
    cursor: int
    """Chunks up to this one have been told of."""
    skipped_count: int
    """Chunks up to the cursor that had left before they were read."""
    model: ModelState
    lease_s: float
    """Seconds that leases of the buffer live."""


def read(state: BufferState, cursor: Cursor) -> ChunksRead:
    """Give the held chunks after a cursor; a logarithm of what is held, and what is given."""
    holdings = state.holdings
    newest = holdings.closed_count - 1
    after = _start(state, cursor)
    version = state.model.version or 0
    taken: list[GrantedChunk] = []
    fragment_count, size_bytes = 0, 0
    told_to = newest
    for chunk_id in holdings.table.arrived_after(after):
        chunk = holdings.table[chunk_id]
        if (
            len(taken) >= cursor.chunk_count_max
            or fragment_count >= READ_FRAGMENTS_MAX
            or size_bytes >= READ_BYTES_MAX
        ):
            told_to = taken[-1].chunk.chunk_id
            break
        # Which chunks a reader gets is not left to chance.
        taken.append(
            GrantedChunk(chunk, version - chunk.version, chunk.use_count, chunk.priority, 1.0)
        )
        fragment_count += len(chunk.fragments)
        size_bytes += chunk.size_bytes
    return ChunksRead(
        fragments=granted_fragments(taken, len(holdings.table)),
        chunk_count=len(taken),
        cursor=told_to,
        skipped_count=told_to - after - len(taken),
        model=state.model.state,
        lease_s=state.config.lease_s,
    )


def _start(state: BufferState, cursor: Cursor) -> int:
    """The chunk after which reading begins."""
    table, newest = state.holdings.table, state.holdings.closed_count - 1
    oldest = table.oldest()
    before_oldest = newest if oldest is None else oldest.chunk_id - 1
    after = cursor.after
    # A cursor beyond the newest is of a buffer that was there before this one, under its name or in
    # its journal; and so may be any that comes from another session.
    if after is None or after > newest:
        return before_oldest
    known = cursor.known_session_id
    if known is not None and known != state.model.session_id:
        return min(after, before_oldest)
    return after
