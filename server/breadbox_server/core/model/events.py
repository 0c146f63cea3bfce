"""What the core reports to its driver; taken with `BufferSet.take_events()`, in order."""

from dataclasses import dataclass
from enum import Enum

from breadbox_server.core.model.errors import DomainError
from breadbox_server.core.model.ids import (
    BufferName,
    CallerId,
    LeaseId,
    ModelVersion,
    SessionId,
    WorkerId,
)
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Fragment,
    GrantedFragment,
    GroupEndReason,
    ModelState,
    Payload,
)


class EvictionReason(Enum):
    """Why a chunk left the buffer."""

    CAPACITY = "capacity"
    STALE = "stale"
    SESSION_ENDED = "session_ended"
    USED_UP = "used_up"
    PAYLOAD_LOST = "payload_lost"
    QUARANTINED = "quarantined"
    DELETED = "deleted"


class DiscardReason(Enum):
    """Why fragments of an open chunk were given up."""

    GAP = "gap"
    DISCONTINUITY = "discontinuity"
    STALE = "stale"
    SESSION_ENDED = "session_ended"
    WORKER_SILENT = "worker_silent"
    PAYLOAD_LOST = "payload_lost"
    EQUAL = "equal"
    GIVEN_BACK = "given_back"
    DROPPED = "dropped"
    """A row was dropped by its key."""
    REPLACED = "replaced"
    """A part was replaced, or numbers were merged."""


class TicketEnd(Enum):
    """How a ticket ended."""

    GROUP_ENDED = "group_ended"
    GIVEN_BACK = "given_back"
    EXPIRED = "expired"
    SESSION_ENDED = "session_ended"


class LeaseEnd(Enum):
    """How a lease ended."""

    CONSUMED = "consumed"
    RETURNED = "returned"
    EXPIRED = "expired"


class StepsEnd(Enum):
    """What became of a fragment's steps."""

    TRAINED = "trained"
    """Their first use was granted."""
    RETURNED = "returned"
    """Their only use was given back, so they were not trained on after all."""
    EVICTED = "evicted"
    """They left the buffer without a use."""


@dataclass(frozen=True, slots=True)
class Event:
    """Base of what happened in a buffer."""

    buffer: BufferName


@dataclass(frozen=True, slots=True)
class FetchGranted(Event):
    """A caller gets its share. Report it, or answer with `UndeliveredGrant`."""

    caller_id: CallerId
    lease_id: LeaseId
    expires_at: float
    fragments: tuple[GrantedFragment, ...]
    session_id: SessionId
    model_version: ModelVersion
    wait_s: float
    """Seconds since the caller asked."""
    first_delivery: bool
    """False when a repeated request_id got the same grant again."""
    step_counts: tuple[tuple[int, ...], ...]
    """By rank, of the fragments of its share; empty for one rank, and if all shares are alike."""


@dataclass(frozen=True, slots=True)
class WaitElapsed(Event):
    """A caller's deadline passed; it holds nothing."""

    caller_id: CallerId
    reason: str
    """One sentence with numbers: what it waited for."""
    wait_s: float


@dataclass(frozen=True, slots=True)
class TicketsTaken(Event):
    """A caller gets tickets. Report them, or give them back."""

    caller_id: CallerId
    groups: tuple[WorkerId, ...]
    expires_at: float
    """The same for all of them."""
    session_id: SessionId
    model_version: ModelVersion
    """Version that was current when they were taken."""
    staleness_max: int | None
    """Bound on their groups' staleness, or None if stale groups are kept."""


@dataclass(frozen=True, slots=True)
class TicketWaitElapsed(Event):
    """The deadline of a caller that waits for tickets passed; it holds none."""

    caller_id: CallerId
    reason: str
    """One sentence with numbers: what it waited for."""
    wait_s: float


@dataclass(frozen=True, slots=True)
class TicketsEnded(Event):
    """Tickets ended."""

    end: TicketEnd
    ticket_count: int


@dataclass(frozen=True, slots=True)
class RequestRefused(Event):
    """A caller that waits for fragments or tickets is turned away, such as at a drain."""

    caller_id: CallerId
    error: DomainError


@dataclass(frozen=True, slots=True)
class RoomWaitEnded(Event):
    """An append waits for room no longer: its deadline passed, it came again, or it is refused."""

    caller_id: CallerId
    outcome: AdmissionOutcome
    """What it waited for."""
    error: DomainError | None


@dataclass(frozen=True, slots=True)
class ModelChanged(Event):
    """The session, the version or both are new; wake the watchers."""

    state: ModelState


@dataclass(frozen=True, slots=True)
class PayloadsDisposable(Event):
    """Nothing refers to these any more (B13); delete them, off the request path, in batches."""

    payloads: tuple[Payload, ...]


@dataclass(frozen=True, slots=True)
class FragmentsJudged(Event):
    """Fragments of one append got the same outcome."""

    outcome: AdmissionOutcome
    fragment_count: int
    size_bytes: int
    """Payload bytes of all of them."""


@dataclass(frozen=True, slots=True)
class ChunksEvicted(Event):
    """Chunks left the buffer."""

    reason: EvictionReason
    use_counts: tuple[int, ...]
    chunk_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FragmentsDiscarded(Event):
    """Fragments of open chunks were given up."""

    reason: DiscardReason
    fragment_count: int


@dataclass(frozen=True, slots=True)
class GroupEnded(Event):
    """A group ended, or its end became another one."""

    reason: GroupEndReason


@dataclass(frozen=True, slots=True)
class LeaseEnded(Event):
    """A lease is over."""

    end: LeaseEnd
    chunk_ids: tuple[int, ...]
    staleness: tuple[int, ...] = ()
    """Staleness of each chunk then, or empty if its session has ended."""


@dataclass(frozen=True, slots=True)
class StepsEnded(Event):
    """Fragments came to an end, of which each ends as TRAINED or EVICTED once it is settled."""

    end: StepsEnd
    fragments: tuple[Fragment, ...]
    model_version: ModelVersion | None = None
    """Version that was current when TRAINED ones were granted."""
