"""Reading by a cursor, in order of arrival, consuming nothing (B16); named cursors (B17)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import merge
from typing import Final, NamedTuple

from breadbox_server.core.model import inputs
from breadbox_server.core.model.description import SubscriptionDescription
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.ids import SessionId, SubscriptionName
from breadbox_server.core.model.inputs import GrantedFragment, ModelState
from breadbox_server.core.model.validation import check_int, check_name
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.chunks import Chunk
from breadbox_server.core.state.grants import GrantedChunk, granted_fragments
from breadbox_server.core.state.subscriptions import Subscription

READ_FRAGMENTS_MAX: Final = 4096
READ_BYTES_MAX: Final = 256 * 2**20
"""A read ends with the chunk with which it has so many fragments, or bytes of payloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpec:
    """What a reader asks for: chunks after a cursor, and at most how many."""

    after: int | None
    """The chunk up to which it has read, or None if it begins with the oldest that is held."""
    known_session_id: SessionId | None = None
    """The session that it knows, or None if it does not say."""
    chunk_count_max: int = 64
    """At least 1."""
    subscription: SubscriptionName | None = None
    """The one that is read: what it retains is given, too, and `after` None begins at it."""


class ChunksRead(NamedTuple):
    """Chunks after a cursor, and the cursor from which to read on."""

    fragments: tuple[GrantedFragment, ...]
    chunk_count: int
    cursor: int
    """The newest chunk that this read covers."""
    skipped_count: int
    """Chunks up to the cursor that had left before they were read."""
    model: ModelState
    lease_s: float
    """Seconds that leases of the buffer live."""


def read(state: BufferState, spec: ReadSpec) -> ChunksRead:
    """Return the held chunks after a cursor; O(log of what is held, and what is returned)."""
    holdings = state.holdings
    subscription = None
    if spec.subscription is not None:
        subscription = holdings.subscriptions[spec.subscription]
    newest = holdings.closed_count - 1
    after = _start(state, spec, subscription)
    version = state.model.version or 0
    taken: list[GrantedChunk] = []
    fragment_count, size_bytes = 0, 0
    told_to = newest
    for chunk in _readable(state, after, subscription):
        if (
            len(taken) >= spec.chunk_count_max
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
        fragments=granted_fragments(taken, len(holdings.table.held)),
        chunk_count=len(taken),
        cursor=told_to,
        skipped_count=told_to - after - len(taken),
        model=state.model.state,
        lease_s=state.config.lease_s,
    )


def _readable(state: BufferState, after: int, subscription: Subscription | None) -> Iterator[Chunk]:
    table, subscriptions = state.holdings.table, state.holdings.subscriptions
    held, left = table.held, subscriptions.left
    ids = table.arrived.after(after)
    if subscription is None or not subscription.is_retaining:
        yield from (held[chunk_id] for chunk_id in ids)
        return
    for chunk_id in merge(ids, subscriptions.arrived.after(after)):
        yield held[chunk_id] if chunk_id in held else left[chunk_id]


def describe_subscriptions(state: BufferState) -> tuple[SubscriptionDescription, ...]:
    """Show the named cursors, at the costs of `ArrivalOrder.backlogs`."""
    table, subscriptions = state.holdings.table, state.holdings.subscriptions
    found = subscriptions.all()
    if not found:
        return ()
    held = table.arrived.backlogs(each.cursor for each in found)
    left = subscriptions.arrived.backlogs(each.cursor for each in found if each.is_retaining)
    described = []
    for each in found:
        count, size_bytes = held[each.cursor]
        if each.is_retaining:
            count += left[each.cursor].chunk_count
            size_bytes += left[each.cursor].size_bytes
        described.append(
            SubscriptionDescription(
                each.name, each.is_retaining, each.cursor, count, size_bytes, each.missed_count
            )
        )
    return tuple(described)


def _start(state: BufferState, spec: ReadSpec, subscription: Subscription | None) -> int:
    newest = state.holdings.closed_count - 1
    after = spec.after
    # A cursor beyond the newest is of a buffer that was there before this one, under its name or in
    # its journal; and so may be any that comes from another session.
    if after is None or after > newest:
        return _before_all(state, None) if subscription is None else subscription.cursor
    known = spec.known_session_id
    if known is not None and known != state.model.session_id:
        begin = min(after, _before_all(state, subscription))
        return begin if subscription is None else max(begin, subscription.cursor)
    return after


def _before_all(state: BufferState, subscription: Subscription | None) -> int:
    first = next(_readable(state, -1, subscription), None)
    return (state.holdings.closed_count if first is None else first.chunk_id) - 1


def subscribe(state: BufferState, input: inputs.Subscribe, *, now: float) -> None:
    """Create a named cursor."""
    check_name("name", input.name)
    newest = state.holdings.closed_count - 1
    after = input.after_chunk_id
    if after is None:
        oldest = state.holdings.table.oldest()
        after = newest if oldest is None else oldest.chunk_id - 1
    check_int("after_chunk_id", after, -1, newest)
    subscription = Subscription(input.name, input.is_retaining, after, missed_count=0)
    if state.holdings.subscriptions.add(subscription):
        state.shared.record(replace(input, after_chunk_id=after), now)


def acknowledge(state: BufferState, input: inputs.Acknowledge, *, now: float) -> None:
    """Move a named cursor forward, and let go of what was retained for it alone."""
    holdings = state.holdings
    subscription = holdings.subscriptions[input.name]
    if input.chunk_id >= 0 == holdings.closed_count:
        raise InvalidArgumentError(
            "chunk_id", f"cannot be {input.chunk_id}: there was no chunk yet"
        )
    check_int("chunk_id", input.chunk_id, -1, holdings.closed_count - 1)
    if input.chunk_id > subscription.cursor:
        holdings.subscriptions.acknowledge(input.name, input.chunk_id)
        state.shared.record(input, now)
    state.tell_disposable()


def unsubscribe(state: BufferState, input: inputs.Unsubscribe, *, now: float) -> None:
    """Delete a named cursor, and let go of what was retained for it alone."""
    state.holdings.subscriptions.remove(input.name)
    state.shared.record(input, now)
    state.tell_disposable()
