"""What an operator can see of a buffer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from breadbox.model.types import OpenGroup as OpenGroup
from breadbox.model.types import QuarantinedFragment as QuarantinedFragment
from breadbox_server.core.model import ids
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.inputs import GroupEndReason, ModelState
from breadbox_server.core.model.schemas import Schema


class SubscriptionDescription(NamedTuple):
    """A named cursor, and how far it is behind."""

    name: ids.SubscriptionName
    is_retaining: bool
    cursor: int
    """The chunk up to which its reader has acknowledged; -1: none."""
    lag_chunks: int
    """Chunks behind it that can be read."""
    lag_bytes: int
    """Payload bytes of these."""
    missed_count: int
    """Chunks that a retaining one lost: gone before it had passed them."""


class GroupEnd(NamedTuple):
    """How a group ended."""

    number: int
    """Ascending in a buffer; an end that becomes another one gets a new number."""
    group: ids.WorkerId
    reason: GroupEndReason
    member_count: int
    """Members that were admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferDescription:
    """One buffer at one instant. Gauges are of now, `counters` of the buffer's whole life."""

    name: ids.BufferName
    config: BufferConfig
    model: ModelState
    chunk_count: int
    """Chunks held for sampling; those that only a lease keeps are not among them."""
    retained_count: int
    """Chunks that left the sampler and are kept for subscriptions."""
    open_chunk_count: int
    open_fragment_count: int
    fragment_count: int
    payload_bytes: int
    """Bytes referred to by open chunks, chunks, leases and for subscriptions: what `capacity_bytes`
    limits."""
    weights_bytes: int
    """Bytes of the model weights referred to; `capacity_bytes` does not count them."""
    lease_count: int
    waiter_count: int
    """Requests that wait, not callers: the ranks and retries of one request are one waiter."""
    worker_count: int
    counters: Mapping[str, int]
    """By stable names, sorted; see `breadbox_server.core.model.counters`."""
    chunk_count_by_staleness: Mapping[int, int]
    """Chunks held for sampling, by staleness in versions, ascending."""
    inserted_count: int
    """Chunks that were closed in the session, less those that left without a use: as limiters count
    them."""
    delivered_count: int
    """Chunks granted in the session, one for each use that was not given back."""
    waiting_reason: str
    """One sentence with numbers: what the next fetch would wait for; empty when it would not."""
    quarantined: tuple[QuarantinedFragment, ...]
    """The latest fragments that readers could not read, oldest first."""
    latest_request_id: ids.RequestId
    """The request granted last among those that still have a lease, or empty if none has."""
    schemas: tuple[Schema, ...]
    open_groups: tuple[OpenGroup, ...]
    """The longest silent groups that lack members."""
    ticket_count: int
    """Tickets that live."""
    ticket_waiter_count: int
    """Requests that wait for tickets."""
    ticket_waiting_reason: str
    """One sentence with numbers: what the next request for a ticket would wait for, or empty."""
