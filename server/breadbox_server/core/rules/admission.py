"""Whether a fragment is taken: one pure function (B1).

Nothing is evicted, discarded or remembered here, so a refused fragment cannot have cost anybody
anything (B14), and a look-ahead is the same function as the act.
"""

from typing import NamedTuple

from breadbox_server.core.model.config import FullPolicy
from breadbox_server.core.model.ids import ModelVersion
from breadbox_server.core.model.inputs import AdmissionOutcome


class Circumstances(NamedTuple):
    """All that the fate of one fragment depends on."""

    is_of_current_session: bool
    was_judged_before: bool
    version: ModelVersion
    """Version of the fragment's oldest step."""
    version_min: int
    """Oldest version that is still fresh; negative while everything is."""
    size_bytes: int
    closes_chunk: bool
    """It is the last fragment of its chunk."""
    place_count: int
    """Chunks that have a place: see `Holdings.place_count`."""
    capacity_chunks: int
    limiter_permits: bool
    """The limiter lets one more chunk be closed."""
    full_policy: FullPolicy
    referred_bytes: int
    """Payload bytes referred to, without those that this fragment's gap discards."""
    evictable_bytes: int
    """Payload bytes of held and retained chunks without a lease."""
    capacity_bytes: int


def is_fresh(version: ModelVersion, version_min: int) -> bool:
    """Whether a version is not older than the oldest fresh one; the boundary is fresh (B5)."""
    return version >= version_min


def judge(circumstances: Circumstances) -> AdmissionOutcome:
    """Decide what becomes of a fragment; the first reason that applies wins.

    The order is one of finality: reasons that waiting cannot change come before those that it can.
    Reasons in the fragment's origin come before reasons in its contents.

    Returns:
        WRONG_SESSION, DUPLICATE or STALE: never to be taken.
        BUFFER_FULL: It would close a chunk for which there is no place under a blocking policy,
            or which the limiter holds back under any.
        BYTES_FULL: Its bytes do not fit, even after evicting all that may be evicted for them.
        ADMITTED: It fits, possibly after evictions.
    """
    c = circumstances
    if not c.is_of_current_session:
        return AdmissionOutcome.WRONG_SESSION
    if c.was_judged_before:
        return AdmissionOutcome.DUPLICATE
    if not is_fresh(c.version, c.version_min):
        return AdmissionOutcome.STALE
    may_evict = c.full_policy is FullPolicy.EVICT
    if c.closes_chunk:
        if not c.limiter_permits:
            return AdmissionOutcome.BUFFER_FULL
        if c.place_count >= c.capacity_chunks and not may_evict:
            return AdmissionOutcome.BUFFER_FULL
    must_stay_bytes = c.referred_bytes - (c.evictable_bytes if may_evict else 0)
    if must_stay_bytes + c.size_bytes > c.capacity_bytes:
        return AdmissionOutcome.BYTES_FULL
    return AdmissionOutcome.ADMITTED
