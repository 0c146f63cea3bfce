"""What is written down to build the same state again: decisions, not questions.

An entry is an input that changed something, or the outcome of a random or contended choice, so a
replay needs no waiters and no random numbers. What follows from entries and time (evictions,
expiries) is not written, nor what is gone with the process (waiters, callers).
"""

from dataclasses import dataclass

from breadbox_server.core.model import inputs
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.ids import BufferName, ChunkId, LeaseId, RequestId, WorkerId
from breadbox_server.core.model.inputs import AdmissionOutcome, Fragment


class ReplayError(Exception):
    """An entry or a snapshot contradicts what came before it. Any other error is a bug."""


@dataclass(frozen=True, slots=True)
class BufferCreated:
    """A buffer was created."""

    buffer: BufferName
    config: BufferConfig
    draw_seed: int


@dataclass(slots=True)
class FragmentTaken:
    """A fragment was judged ADMITTED, or STALE, which is remembered too."""

    buffer: BufferName
    fragment: Fragment
    outcome: AdmissionOutcome


@dataclass(frozen=True, slots=True)
class GrantMade:
    """A request was granted."""

    buffer: BufferName
    request_id: RequestId
    fragment_count: int
    world_size: int
    chunk_ids: tuple[ChunkId, ...]
    """In draw order, rank 0's share first."""
    lease_ids: tuple[LeaseId, ...]
    """By rank."""
    leases_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TicketsGiven:
    """A request was given tickets."""

    buffer: BufferName
    request_id: RequestId
    groups: tuple[WorkerId, ...]
    lease_s: float
    holder: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Groups ended as time passed, and callers learn of it: no server may find them open again."""

    buffer: BufferName


Entry = (
    BufferCreated
    | FragmentTaken
    | GrantMade
    | TimePassed
    | TicketsGiven
    | inputs.RenewTicket
    | inputs.GiveBackTicket
    | inputs.DropMembers
    | inputs.StartSession
    | inputs.EndSession
    | inputs.PublishModel
    | inputs.DeclareSchema
    | inputs.RenewLease
    | inputs.ReleaseLease
    | inputs.UndeliveredGrant
    | inputs.DropPayloads
    | inputs.ReportUnreadable
    | inputs.UpdatePriorities
    | inputs.UpdateBuffer
    | inputs.Subscribe
    | inputs.Acknowledge
    | inputs.Unsubscribe
    | inputs.DeleteBuffer
)
"""`UndeliveredGrant` only where it undid a grant, others where they changed anything; of
`UpdatePriorities` only held chunks."""
