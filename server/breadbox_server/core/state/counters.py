"""Counters of one buffer's life, by stable names, and what limiters judge by.

The counters in `DURABLE` follow from what is journaled and survive a restart; the others, which
count answers, begin at 0 in every process: `grants` are draws of the buffer's life,
`fetches_granted` the callers to which this process has reported one. Together they account for
every fragment and every chunk: admitted fragments are open, in a chunk, discarded for a reason;
closed chunks are held, under lease, or evicted for a reason.
"""

from dataclasses import dataclass

from breadbox_server.core.model.events import DiscardReason, EvictionReason, LeaseEnd
from breadbox_server.core.model.inputs import AdmissionOutcome

FRAGMENTS_DISCARDED = {reason: f"fragments_discarded_{reason.value}" for reason in DiscardReason}
CHUNKS_EVICTED = {reason: f"chunks_evicted_{reason.value}" for reason in EvictionReason}
LEASES_ENDED = {end: f"leases_ended_{end.value}" for end in LeaseEnd}
FRAGMENTS_JUDGED = {outcome: f"fragments_{outcome.value}" for outcome in AdmissionOutcome}

DURABLE = frozenset(
    {
        FRAGMENTS_JUDGED[AdmissionOutcome.ADMITTED],
        FRAGMENTS_JUDGED[AdmissionOutcome.STALE],
        *FRAGMENTS_DISCARDED.values(),
        *CHUNKS_EVICTED.values(),
        *LEASES_ENDED.values(),
        "chunks_closed",
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
    """Counts the chunks of the current session.

    A chunk that leaves without a use counts as if it had never come, so that a limiter does not
    have the others used more often for it.
    """

    inserted_count: int = 0
    """Chunks closed, less those that left without a use."""
    delivered_count: int = 0
    """Uses granted, less those given back."""
