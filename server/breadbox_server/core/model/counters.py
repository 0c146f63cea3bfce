"""Counters of one buffer's life, by stable names, and what limiters judge by.

Those in `DURABLE` follow from the journal; the rest count answers, from 0 in each process. They
account for every fragment (open, in a chunk, discarded) and chunk (held, leased, evicted).
"""

from dataclasses import dataclass

from breadbox_server.core.model.events import DiscardReason, EvictionReason, LeaseEnd, TicketEnd
from breadbox_server.core.model.inputs import AdmissionOutcome, GroupEndReason

FRAGMENTS_DISCARDED = {reason: f"fragments_discarded_{reason.value}" for reason in DiscardReason}
CHUNKS_EVICTED = {reason: f"chunks_evicted_{reason.value}" for reason in EvictionReason}
LEASES_ENDED = {end: f"leases_ended_{end.value}" for end in LeaseEnd}
TICKETS_ENDED = {end: f"tickets_ended_{end.value}" for end in TicketEnd}
GROUPS_ENDED = {reason: f"groups_{reason.value}" for reason in GroupEndReason}
FRAGMENTS_JUDGED = {outcome: f"fragments_{outcome.value}" for outcome in AdmissionOutcome}

DURABLE = frozenset(
    {
        FRAGMENTS_JUDGED[AdmissionOutcome.ADMITTED],
        FRAGMENTS_JUDGED[AdmissionOutcome.STALE],
        *FRAGMENTS_DISCARDED.values(),
        *CHUNKS_EVICTED.values(),
        *LEASES_ENDED.values(),
        *GROUPS_ENDED.values(),
        *TICKETS_ENDED.values(),
        "tickets_given",
        "chunks_closed",
        "chunks_delivered_late",
        "chunks_missed",
        "chunks_returned",
        "grants",
        "uses",
        "sessions_started",
        "versions_published",
    }
)
EPHEMERAL = {
    *FRAGMENTS_JUDGED.values(),
    "fetches_granted",
    "fetches_repeated",
    "fetches_elapsed",
    "fetches_cancelled",
    "fetches_refused",
    "grants_undelivered",
} - DURABLE

Counters = dict[str, int]


def new_counters() -> Counters:
    """Return every counter, sorted by name, at 0."""
    return dict.fromkeys(sorted(DURABLE | EPHEMERAL), 0)


@dataclass(slots=True)
class FlowMeter:
    """Count the session's chunks; one that leaves unused counts as if it had never come."""

    inserted_count: int = 0
    """Chunks closed, less those that left without a use."""
    delivered_count: int = 0
    """Uses granted, less those given back."""
    version_delivered_count: int = 0
    """The same, of grants at the current version."""
