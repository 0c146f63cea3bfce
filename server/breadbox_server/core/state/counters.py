"""Counters of one buffer's life, by stable names.

Those in `DURABLE` follow from what is journaled and survive a restart; the others, which count
answers, begin at 0 in every process: `grants` are draws of the buffer's life, `fetches_granted`
the callers to which this process has reported one. Together they account for every fragment
and every chunk: admitted fragments are open, in a chunk, discarded for a reason; closed chunks are
held, under lease, or evicted for a reason.
"""

from collections.abc import Mapping

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
EPHEMERAL = (
    frozenset(
        {
            *(FRAGMENTS_JUDGED[outcome] for outcome in AdmissionOutcome),
            "fetches_granted",
            "fetches_repeated",
            "fetches_elapsed",
            "fetches_cancelled",
            "fetches_refused",
            "grants_undelivered",
        }
    )
    - DURABLE
)


class Counters:
    """Counts that only grow, each from 0."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = dict.fromkeys(sorted(DURABLE | EPHEMERAL), 0)

    def add(self, name: str, count: int = 1) -> None:
        """Count; the name must be one of the module's."""
        self._counts[name] += count

    def __getitem__(self, name: str) -> int:
        """Give one of them."""
        return self._counts[name]

    def all(self) -> dict[str, int]:
        """Give every counter, by name, sorted."""
        return dict(self._counts)

    def durable(self) -> dict[str, int]:
        """Give those that a journal brings back, by name, sorted."""
        return {name: count for name, count in self._counts.items() if name in DURABLE}

    def restore(self, counts: Mapping[str, int]) -> None:
        """Go on from a snapshot's durable counts; one it does not have begins at 0."""
        for name in DURABLE & counts.keys():
            self._counts[name] = counts[name]
