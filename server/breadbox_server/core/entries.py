"""What is written down so that the same state can be built again: decisions, not questions.

An entry is an input that changed something, or the outcome of a random or contended choice: which
chunks were granted to whom. Replaying entries therefore needs no waiters and draws no random
numbers. Not written down, because it follows from the entries and the time: what was evicted or
discarded, and which leases expired. Not written down, because it is gone with the process: waiters,
callers, and answers that changed nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from breadbox_server.core.config import BufferConfig
from breadbox_server.core.ids import BufferName, ChunkId, LeaseId, RequestId
from breadbox_server.core.inputs import (
    Acknowledge,
    AdmissionOutcome,
    DeleteBuffer,
    DropPayloads,
    EndSession,
    Fragment,
    PublishModel,
    ReleaseLease,
    RenewLease,
    ReportUnreadable,
    StartSession,
    Subscribe,
    TellSchema,
    UndeliveredGrant,
    Unsubscribe,
    UpdateBuffer,
    UpdatePriorities,
    exhaust,
)


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


@dataclass(frozen=True, slots=True)
class FragmentTaken:
    """A fragment was judged ADMITTED, or STALE, which is remembered too."""

    buffer: BufferName
    fragment: Fragment
    outcome: AdmissionOutcome

    @classmethod
    def restored(
        cls, buffer: BufferName, fragment: Fragment, outcome: AdmissionOutcome
    ) -> "FragmentTaken":
        """Build one as `Fragment.restored` does."""
        taken = _new(cls)
        _set_buffer(taken, buffer)
        _set_fragment(taken, fragment)
        _set_outcome(taken, outcome)
        return taken

    @classmethod
    def restored_many(
        cls, buffer: BufferName, fragments: Sequence[Fragment], outcome: AdmissionOutcome
    ) -> "list[FragmentTaken]":
        """Build one of each fragment, faster than each."""
        taken = list(map(_new, repeat(cls, len(fragments))))
        exhaust(map(_set_buffer, taken, repeat(buffer)))
        exhaust(map(_set_fragment, taken, fragments))
        exhaust(map(_set_outcome, taken, repeat(outcome)))
        return taken


_new = object.__new__
_set_buffer = FragmentTaken.__dict__["buffer"].__set__
_set_fragment = FragmentTaken.__dict__["fragment"].__set__
_set_outcome = FragmentTaken.__dict__["outcome"].__set__


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
    | StartSession
    | EndSession
    | PublishModel
    | TellSchema
    | RenewLease
    | ReleaseLease
    | UndeliveredGrant
    | DropPayloads
    | ReportUnreadable
    | UpdatePriorities
    | UpdateBuffer
    | Subscribe
    | Acknowledge
    | Unsubscribe
    | DeleteBuffer
)
"""`UndeliveredGrant` is written down only when it undid a grant; the others when they changed
anything at all. Of `UpdatePriorities` only the chunks that were held are."""
