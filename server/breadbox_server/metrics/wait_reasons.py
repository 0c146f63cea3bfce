"""What fetches wait for, in a few words that may be a label of a metric."""

from enum import Enum

from breadbox_server.core.model.description import BufferDescription


class WaitingFor(Enum):
    """Closed set: what the fetch at the head of a buffer's queue lacks."""

    SESSION = "session"
    """No learner has started a session, so nothing can be produced."""
    WORKERS = "workers"
    """A session is current, and no worker has appended anything to it."""
    LEASES = "leases"
    """As many leases live as may; a learner holds on to what it has."""
    CHUNKS = "chunks"
    """There are too few chunks, or the limiter holds them back."""


def waiting_for(seen: BufferDescription) -> WaitingFor:
    """What a fetch that waits on this buffer waits for; `waiting_reason` has the numbers."""
    if seen.model.model_version is None:
        return WaitingFor.SESSION
    if seen.lease_count >= seen.config.leases_max:
        return WaitingFor.LEASES
    if seen.worker_count == 0:
        return WaitingFor.WORKERS
    return WaitingFor.CHUNKS
