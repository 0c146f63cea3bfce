"""What is written down so that the same state can be built again: decisions, not questions.

An entry is an input that changed something, or the outcome of a random or contended choice: which
chunks were granted to which request. Replaying entries therefore needs no waiters and draws no
random numbers. Not written down, because it follows from the entries and the time: what was evicted
or discarded, and which leases expired. Not written down, because it is gone with the process:
waiters, callers, and answers that changed nothing.
"""

from dataclasses import dataclass

from breadbox_server.core.model import inputs
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.ids import BufferName, ChunkId, LeaseId, RequestId
from breadbox_server.core.model.inputs import AdmissionOutcome, Fragment


class ReplayError(Exception):
    """An entry does not fit what came before it, or a snapshot contradicts itself.

    Whatever else a replay raises is a bug of the core's.
    """


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
    """Life of each rank's lease."""


Entry = (
    BufferCreated
    | FragmentTaken
    | GrantMade
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
"""`UndeliveredGrant` is written down only when it undid a grant; the others when they changed
anything at all. Of `UpdatePriorities` only the chunks that were held are."""
