"""The core's inputs, for `BufferSet.apply`, and answers; a refused one changes nothing (B14)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Generic, NamedTuple, TypeVar

from breadbox_server.core.model import ids
from breadbox_server.core.model.config import PRIORITY_DEFAULT, BufferConfig
from breadbox_server.core.model.schemas import NO_SCHEMA, Schema

Answer = TypeVar("Answer")


class AdmissionOutcome(Enum):
    """What became of an appended fragment (B1)."""

    ADMITTED = "admitted"
    DUPLICATE = "duplicate"
    STALE = "stale"
    WRONG_SESSION = "wrong_session"
    BUFFER_FULL = "buffer_full"
    BYTES_FULL = "bytes_full"
    SCHEMA_UNKNOWN = "schema_unknown"
    GROUP_ENDED = "group_ended"
    PART_CONFLICT = "part_conflict"

    __hash__ = object.__hash__
    """Enum's own is written in Python, and outcomes are looked up by for every fragment."""

    asks_to_wait: bool
    """Whether the caller should send the same fragment again later."""
    asks_again: bool
    """Whether it should send it again at all."""

    def __init__(self, value: str) -> None:
        # Asked once per fragment: an attribute, since a property of an enum is slow to look up.
        self.asks_to_wait = value in ("buffer_full", "bytes_full")
        self.asks_again = self.asks_to_wait or value == "schema_unknown"


class GroupEndReason(Enum):
    """Why a group ended (B32).

    If the chunk of a complete or partial one leaves without a use, its end becomes stale, lost or
    evicted.
    """

    COMPLETE = "complete"
    PARTIAL = "partial"
    """Silent with at least `group_min` members, which were made a chunk."""
    INCOMPLETE = "incomplete"
    """Silent with fewer."""
    STALE = "stale"
    LOST = "lost"
    """A payload was lost, or a ticket expired before the first member."""
    EVICTED = "evicted"
    EQUAL = "equal"
    """All members have the same number of the name in `drop_equal`."""
    GIVEN_BACK = "given_back"
    """The holder of its ticket gave it up."""


class ReleaseMode(Enum):
    """How a lease ends."""

    CONSUMED = "consumed"
    RETURNED = "returned"


@dataclass(slots=True, unsafe_hash=True)
class Payload:
    """Reference to stored bytes; the core looks at their size alone. Never changed once made."""

    payload_id: ids.PayloadId
    size_bytes: int
    piece_size_bytes: int = 0

    @property
    def piece_count(self) -> int:
        """Pieces that its store is said to have cut it into."""
        piece_size_bytes = self.piece_size_bytes
        return -(-self.size_bytes // piece_size_bytes) if piece_size_bytes > 0 else 1


@dataclass(slots=True, unsafe_hash=True)
class Fragment:
    """Metadata of one fragment (B2). Not frozen: that takes three times as long to make."""

    worker_id: ids.WorkerId
    fragment_index: ids.FragmentIndex
    session_id: ids.SessionId
    model_version_min: ids.ModelVersion
    model_version_max: ids.ModelVersion
    payload: Payload
    step_count: int = 1
    discontinuity: bool = False
    schema_hash: int = NO_SCHEMA
    priority: float = PRIORITY_DEFAULT
    numbers: str = ""
    """Numbers of a sequence by name, as a JSON object, or empty."""
    part: str = ""
    """Name of a part of a member, or empty for the member itself (B34)."""
    replaces: bool = False
    """Whether a part of the same name with other bytes is replaced."""

    @property
    def key(self) -> tuple[int, str]:
        """Member and part."""
        return self.fragment_index, self.part


@dataclass(frozen=True, slots=True)
class Input(Generic[Answer]):
    """Base of the core's inputs; the parameter is the type of its answer."""

    buffer: ids.BufferName


@dataclass(frozen=True, slots=True)
class StartSession(Input["ModelState"]):
    """Make a session current, and end the previous one; with the current one change nothing."""

    session_id: ids.SessionId
    model_version: ids.ModelVersion | None = None
    """The first version; None is 0."""


@dataclass(frozen=True, slots=True)
class EndSession(Input[None]):
    """End a session if it is current; leases live on, waiters wait for the next one."""

    session_id: ids.SessionId


@dataclass(frozen=True, slots=True)
class PublishModel(Input["Published"]):
    """Move the version forward and evict what that makes stale (B5)."""

    session_id: ids.SessionId
    model_version: ids.ModelVersion
    weights: Payload | None = None


@dataclass(frozen=True, slots=True)
class AppendFragments(Input["list[Appended]"]):
    """Offer well-formed fragments, at least one, whose payloads are confirmed.

    The answer has a result for each up to the first that asks to be sent again, or until the next
    would be refused with an error: offered first, it raises that.
    """

    fragments: Sequence[Fragment]


@dataclass(frozen=True, slots=True)
class Offer(Input["Offered"]):
    """Offer well-formed fragments, at least one, before their payloads are confirmed.

    What is refused is answered as by `AppendFragments`; for the others room is reserved, until
    `Settle` or `expires_at`. The answer ends before a fragment that can be judged only once those
    before it are settled; it may be empty. What the first append lacks that waits for room is not
    given to a caller that is not in the queue (B31).
    """

    fragments: Sequence[Fragment]
    caller_id: ids.CallerId | None = None
    expires_at: float = inf


@dataclass(frozen=True, slots=True)
class Settle(Input["list[Appended | None]"]):
    """End a reservation, and admit those of its fragments that have their payloads.

    The answer has a result for each up to the first that asks to be sent again, or until the next
    would be refused with an error. None is for a fragment without its payload, and those behind it
    of its worker. It is empty if the reservation has ended: they are to be offered again.
    """

    reservation_id: ids.ReservationId
    there: list[bool]
    """Whether each payload is there; of a shorter list the last ones are not answered."""


@dataclass(frozen=True, slots=True)
class WaitForRoom(Input[ids.CallerId]):
    """Let an append wait for room with its first undecided fragment (B31); answers its caller's id.

    Without a turn before the deadline, or once it is sent again, it gets `RoomWaitEnded`. A caller
    that has the fragment's position keeps it, one with another fragment's goes to the end.
    """

    fragment: Fragment
    waits_for: AdmissionOutcome
    deadline_at: float
    caller_id: ids.CallerId | None = None


@dataclass(frozen=True, slots=True)
class LeaveQueue(Input[None]):
    """Let an append go that waits or has its turn; ignored if it is unknown."""

    caller_id: ids.CallerId
    keeps_place: bool
    """Whether its position is kept for a while: it will come again."""


@dataclass(frozen=True, slots=True)
class DeclareSchema(Input[None]):
    """Declare the schema behind a `schema_hash` (B30); ignored if known, full or not current."""

    session_id: ids.SessionId
    schema_hash: int
    schema: Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(Input[ids.CallerId]):
    """Ask for fragments (B8, B12); the outcome comes as an event. `deadline_at <= now`: no wait."""

    request_id: ids.RequestId
    fragment_count: int
    deadline_at: float
    rank: int = 0
    world_size: int = 1
    lease_s: float | None = None


@dataclass(frozen=True, slots=True)
class CancelFetch(Input[None]):
    """The caller of a `Fetch`, or of `TakeTickets`, went away.

    Ignored if it is unknown or its outcome was reported.
    """

    caller_id: ids.CallerId


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeTickets(Input[ids.CallerId]):
    """Ask for up to `ticket_count` tickets (B33); the outcome comes as an event, as of a `Fetch`.

    A repeated request gets those of its tickets that live.
    """

    request_id: ids.RequestId
    ticket_count: int
    deadline_at: float
    lease_s: float
    holder: str = ""
    """Name that the tickets are counted under."""


@dataclass(frozen=True, slots=True)
class RenewTicket(Input[float]):
    """Let a ticket live for another `lease_s` from now, None as taken; answers its expiry."""

    group: ids.WorkerId
    lease_s: float | None = None


@dataclass(frozen=True, slots=True)
class GiveBackTicket(Input[None]):
    """End a ticket with its group, or say that one member will not come (B33).

    Repeating it is a no-op while the group is remembered.
    """

    group: ids.WorkerId
    member: int | None = None


@dataclass(frozen=True, slots=True)
class DropMembers(Input[int]):
    """Drop rows; answers how many were there. Unknown ones are ignored (B34)."""

    groups: tuple[ids.WorkerId, ...]
    members: tuple[int, ...]
    """Of each of the groups the member."""


@dataclass(frozen=True, slots=True)
class RenewLease(Input[float]):
    """Let a lease live for another `lease_s` from now, None as granted; answers its expiry."""

    lease_id: ids.LeaseId
    lease_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReleaseLease(Input[None]):
    """End a lease. Repeating it is a no-op while the request is remembered."""

    lease_id: ids.LeaseId
    mode: ReleaseMode


@dataclass(frozen=True, slots=True)
class UndeliveredGrant(Input[None]):
    """A grant that its caller, cancelled in that very tick, never received.

    Only one rank's grant is undone; of several ranks the lease stays for a retry or expires.
    """

    lease_id: ids.LeaseId


@dataclass(frozen=True, slots=True)
class DropPayloads(Input[int]):
    """Drop what refers to payloads that the store lost; answers how many fragments went.

    A chunk goes whole (PAYLOAD_LOST); of an open chunk the fragments after the last lost one stay;
    a leased chunk never comes back. Unknown ids are ignored.
    """

    payload_ids: tuple[ids.PayloadId, ...]


@dataclass(frozen=True, slots=True)
class ReportUnreadable(Input[None]):
    """Report payloads that a reader could not read of its lease, which ends right after (B29).

    At `reports_max` reports a chunk is quarantined: it never comes back, its payloads go, and its
    fragments are named in the description. Others' payloads and ended leases are ignored.
    """

    lease_id: ids.LeaseId
    payload_ids: tuple[ids.PayloadId, ...]
    reports_max: int


@dataclass(frozen=True, slots=True)
class UpdatePriorities(Input["PrioritiesUpdated"]):
    """Evict held chunks (DELETED), then set others' priorities (B18). Unknown ids are counted."""

    priorities: tuple[tuple[ids.ChunkId, float], ...]
    deleted: tuple[ids.ChunkId, ...] = ()


@dataclass(frozen=True, slots=True)
class Subscribe(Input[None]):
    """Create a named cursor; one of the same name and kind is left as it is (B17)."""

    name: ids.SubscriptionName
    is_retaining: bool
    after_chunk_id: int | None = None
    """None is before the oldest chunk that is held."""


@dataclass(frozen=True, slots=True)
class Acknowledge(Input[None]):
    """Move a named cursor forward; one that is there or beyond stays."""

    name: ids.SubscriptionName
    chunk_id: int


@dataclass(frozen=True, slots=True)
class Unsubscribe(Input[None]):
    """Delete a named cursor; what was retained for it alone goes."""

    name: ids.SubscriptionName


@dataclass(frozen=True, slots=True)
class CreateBuffer(Input[None]):
    """Create a buffer; the same name with equal limits is a no-op."""

    config: BufferConfig


@dataclass(frozen=True, slots=True)
class UpdateBuffer(Input[None]):
    """Replace the limits; what no longer fits is evicted immediately."""

    config: BufferConfig


@dataclass(frozen=True, slots=True)
class DeleteBuffer(Input[None]):
    """Delete a buffer: waiters get BUFFER_NOT_FOUND, all payloads become disposable."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """What is current in a buffer; no session is ("", None, None)."""

    session_id: ids.SessionId
    model_version: ids.ModelVersion | None
    weights: Payload | None


@dataclass(frozen=True, slots=True)
class Published:
    """Answer to `PublishModel`."""

    model_version: ids.ModelVersion
    evicted_chunk_count: int
    weights_taken: bool = False
    """True if the buffer refers to this input's weights; else, as for a retry's second copy, the
    driver deletes them."""


@dataclass(frozen=True, slots=True)
class Appended:
    """What became of one of `AppendFragments`."""

    outcome: AdmissionOutcome
    first_outcome: AdmissionOutcome | None = None
    """First outcome of a duplicate, or None if it is no longer remembered."""
    group_end: GroupEndReason | None = None
    """Why the group of a GROUP_ENDED has ended."""


class Offered(NamedTuple):
    """Answer to `Offer`."""

    reservation_id: ids.ReservationId | None
    """None if nothing is reserved."""
    answers: list[Appended | None]
    """None for a fragment that has room reserved."""


class PrioritiesUpdated(NamedTuple):
    """Answer to `UpdatePriorities`."""

    updated_count: int
    deleted_count: int
    unknown_count: int
    """Ids, of either kind, of chunks that are not held."""


class GrantedFragment(NamedTuple):
    """One fragment of a grant, in the order in which it is to be handed out."""

    fragment: Fragment
    chunk_id: ids.ChunkId
    staleness: int
    use_count: int
    priority: float
    probability: float
    """How likely the chunk was to be the first one drawn."""
    population: int
