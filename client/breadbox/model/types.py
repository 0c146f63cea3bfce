"""Plain values of the public API, never modified once created. No protobuf type appears here.

References are not frozen: there are very many, and a frozen one takes three times as long to
create.

Counts are integers, durations `float` seconds ending `_s`, sizes end `_bytes`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from breadbox.model.errors import InvalidRequestError
from breadbox.model.outcomes import AdmissionOutcome as AdmissionOutcome
from breadbox.model.outcomes import AppendResult as AppendResult
from breadbox.model.outcomes import GroupEndReason as GroupEndReason
from breadbox.model.presets import PRESETS


class TorchDevice(Protocol):
    """The interface of `torch.device`, for programs without torch."""

    @property
    def type(self) -> str:
        """Kind of device, such as "cuda"."""
        ...

    @property
    def index(self) -> int | None:
        """Number among the devices of that kind, or None for the current one."""
        ...


Device = str | TorchDevice
"""A device for tensors: "cpu", "cuda", "cuda:1", or a `torch.device`. Not a number alone."""


class FullPolicy(Enum):
    """What the server does with an append when the buffer is full."""

    EVICT = "evict"
    BLOCK = "block"


class AssemblyPolicy(Enum):
    """How fragments become chunks."""

    CONSECUTIVE = "consecutive"
    """Consecutive fragments of one worker."""
    GROUPS = "groups"
    """Members of a group, in any order and from any worker; see docs/agents.md."""


class StalePolicy(Enum):
    """How a buffer treats chunks that are staler than `staleness_max`."""

    EVICT = "evict"
    """They are evicted, and fragments that come as stale are refused as STALE."""
    KEEP = "keep"
    """They are delivered late, and counted."""


class SchemaPolicy(Enum):
    """How alike the fragments of a session must be; see `BufferDescription.schema`."""

    ONE = "one"
    """The same arrays, and as many steps as the first: a learner stacks whole fragments."""
    RAGGED = "ragged"
    """The same arrays, and any number of steps: a learner samples steps."""
    ANY = "any"
    """Any arrays, and any number of steps."""


class LeaseExpiryPolicy(Enum):
    """How an expired lease's uses are handled: returned, or counted."""

    GIVE_BACK = "give_back"
    CONSUME = "consume"


class ReleaseMode(Enum):
    """How a lease ends: its uses count (CONSUMED), or are returned (RETURNED)."""

    CONSUMED = "consumed"
    RETURNED = "returned"


class EpisodeEnd(Enum):
    """How an episode ended; ABORTED means that the environment failed."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass(slots=True, unsafe_hash=True)
class PayloadReference:
    """The id and size of a payload in the store."""

    payload_id: str
    """32 lower-case hexadecimal digits."""
    size_bytes: int
    """Bytes of the whole payload."""
    piece_size_bytes: int = 0
    """Bytes of a piece (the last may be shorter), or 0 if it is stored whole."""


Number = int | float | bool | str
"""A small value by name that the server knows of a sequence."""
NUMBERS_MAX: Final = 16
"""Most numbers of a sequence."""
NUMBER_BYTES_MAX: Final = 64
"""Most bytes of a number's name, and of a text among the numbers."""
_INTEGERS: Final = range(-(2**63), 2**63)


def checked_numbers(numbers: Mapping[str, Any]) -> dict[str, Number]:
    """Return numbers as plain values, or raise InvalidRequestError."""
    if len(numbers) > NUMBERS_MAX:
        raise InvalidRequestError("numbers", f"are {len(numbers)}; the limit is {NUMBERS_MAX}")
    checked = {}
    for name, value in numbers.items():
        if not isinstance(name, str) or not name or _size_bytes(name) > NUMBER_BYTES_MAX:
            problem = f"has a name that is not 1 to {NUMBER_BYTES_MAX} bytes of text"
            raise InvalidRequestError("numbers", f"{problem}: {name!r:.100}")
        plain = value.item() if getattr(value, "shape", None) == () else value
        kind = next((each for each in (bool, int, float, str) if isinstance(plain, each)), None)
        if (
            kind is None
            or (kind is int and plain not in _INTEGERS)
            or (kind is str and _size_bytes(plain) > NUMBER_BYTES_MAX)
        ):
            raise InvalidRequestError(
                f"numbers.{name}",
                f"must be a number of 64 bits, a flag, or a text of at most {NUMBER_BYTES_MAX} "
                f"bytes, got {value!r:.100}",
            )
        checked[name] = kind(plain)
    return checked


def _size_bytes(text: str) -> float:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return math.inf


@dataclass(slots=True, unsafe_hash=True)
class FragmentMetadata:
    """What the server knows about a fragment; its identity is (buffer, session, worker, index)."""

    worker_id: str
    fragment_index: int
    session_id: str
    model_version_min: int
    model_version_max: int
    payload: PayloadReference
    step_count: int
    discontinuity: bool = False
    schema_hash: int = 0
    """Hash of its schema, or 0 if the producer declared none. Fragments of one hash can be
    stacked."""
    priority: float = 1.0
    """Priority at its append, from 0 to 1e30; a chunk has the largest of its fragments'."""
    numbers: Mapping[str, Number] = field(default_factory=dict, hash=False)
    """Numbers of a sequence by name, or empty."""
    part: str = ""
    """Name of a part of a member, or empty for the member itself."""


class ArrayType(NamedTuple):
    """Type and shape of an array; as text "<f4[16, 3]"."""

    type_name: str
    """Name as numpy writes it, such as "<f4", or "bfloat16"."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.type_name}{list(self.shape)}"


class NewestVersion:
    """The newest version of a session that a client has published or heard of."""

    __slots__ = ("__weakref__", "version")

    def __init__(self) -> None:
        self.version = 0


@dataclass(slots=True, unsafe_hash=True)
class FragmentReference:
    """One fragment of a granted chunk."""

    metadata: FragmentMetadata
    chunk_id: int
    staleness_when_granted: int
    """Number of versions that its chunk was behind at the grant, or at the read by a cursor: the
    number that the buffer's `staleness_max` bounds."""
    use_count: int
    """Deliveries of the chunk, this one included."""
    priority: float = 1.0
    """Priority of the chunk at the grant."""
    probability: float = 1.0
    """Probability, above 0, that the chunk is drawn first; 1 with samplers that are not random."""
    population: int = 0
    """Chunks that the buffer held at the draw, or 0 if unknown."""
    body: bytes = field(default=b"", repr=False, compare=False)
    """The payload, if it is small and came inline, or empty if it is in the store."""
    parts: "tuple[FragmentReference, ...]" = ()
    """Parts of the member, in order of their names, beside its sequence."""
    _newest: NewestVersion | None = field(default=None, init=False, repr=False, compare=False)
    """The newest version of its session that its client knows, or None without a client."""

    @property
    def staleness(self) -> int:
        """Number of versions that the fragment's oldest step is behind now.

        It grows with each version that this client publishes or hears of in an answer. A client
        that only reads hears of versions at its calls; `Lease.staleness` asks the server. In
        another process it stays what it was when the reference was sent there.
        """
        if self._newest is None:
            return self.staleness_when_granted
        return self.staleness_at(self._newest.version)

    def staleness_at(self, model_version: int | None) -> int:
        """Return the versions between the fragment's oldest step and *model_version*.

        ```python
        staleness = lease.references[0].staleness_at(version)
        ```

        `model_version` is of the fragment's session, or None for `staleness`.
        `staleness_when_granted` counts from the oldest step of the whole chunk instead, which may
        have several fragments.
        """
        if model_version is None:
            return self.staleness
        return model_version - self.metadata.model_version_min

    def __repr__(self) -> str:
        """Return the fragment's identity and use in one line."""
        it = self.metadata
        low, high = it.model_version_min, it.model_version_max
        return (
            f"FragmentReference({it.worker_id!r} #{it.fragment_index} of {it.session_id!r}, "
            f"{it.step_count} steps, versions {low} to {high}, staleness {self.staleness}, "
            f"chunk {self.chunk_id}, use {self.use_count}{f', {it.numbers}' if it.numbers else ''})"
        )


@dataclass(frozen=True, slots=True)
class AppendReply:
    """Answer to a batch of appends."""

    results: tuple[AppendResult, ...] = field(repr=False)
    session_id: str
    model_version: int | None
    retry_delay_s: float | None
    """Seconds to wait before sending again the results that `asks_to_wait`, or None if none do."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """The current session, version and weights of a buffer; ("", None, None) without a session."""

    session_id: str
    model_version: int | None
    weights: PayloadReference | None
    known_session_ended: bool = field(default=False, compare=False)
    """True if the session that the caller named as known has ended; it never comes back."""


@dataclass(frozen=True, slots=True)
class PublishReply:
    """Answer to a published model version."""

    model_version: int
    evicted_chunk_count: int


class PrioritiesReply(NamedTuple):
    """Answer to an update of priorities."""

    updated_count: int
    deleted_count: int
    unknown_count: int
    """Ids, to update or delete, of chunks that the buffer does not hold: evicted, used up, or
    unknown."""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A granted share: the lease and its fragments in draw order."""

    lease_id: str
    remaining_s: float
    """Seconds the lease had left when the reply was made."""
    fragments: tuple[FragmentReference, ...] = field(repr=False)
    session_id: str
    model_version: int
    request_id: str
    step_counts: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    """By rank, the steps of each fragment of its share; empty for one rank, and if all shares are
    alike."""


@dataclass(frozen=True, slots=True)
class FragmentRead:
    """Chunks after a cursor: read, not used; payloads are inline, or readable under a lease."""

    fragments: tuple[FragmentReference, ...] = field(repr=False)
    """Fragments in order of `chunk_id`, with staleness and uses at the time of the reply."""
    lease_id: str | None
    """Lease to release once the payloads are loaded, or None if the reply is empty, or if every
    payload was inline."""
    remaining_s: float
    """Seconds the lease had left when the reply was made; 0 without one."""
    cursor: int
    """The last chunk that was returned or skipped: the next `after_chunk_id`."""
    skipped_chunk_count: int
    """Chunks up to the cursor that had left the buffer before they were read."""
    session_id: str
    """Name of the current session, or empty if there is none."""
    model_version: int | None


@dataclass(frozen=True, slots=True)
class MinimumChunks:
    """A limiter under which a fetch waits until the buffer holds this many chunks."""

    chunk_count: int


@dataclass(frozen=True, slots=True)
class SampleToInsertRatio:
    """A limiter: keep `inserted * ratio - delivered` within `error_chunks` of `lead_chunks`."""

    ratio: float
    error_chunks: float
    minimum_chunk_count: int = 1
    lead_chunks: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferConfig:
    """Limits of a buffer; the options of `breadbox serve` with the same names describe them.

    None stands for the server's default; in an update, for no change.

    ```python
    config = breadbox.BufferConfig(
        capacity_chunks=1_000,
        full_policy=breadbox.FullPolicy.BLOCK,
        limiter=breadbox.SampleToInsertRatio(ratio=4, error_chunks=32, minimum_chunk_count=16),
        schema=breadbox.SchemaPolicy.RAGGED,
    )
    client.create_buffer("replay", config)
    ```
    """

    fragments_per_chunk: int | None = None
    capacity_chunks: int | None = None
    capacity_bytes: int | None = None
    staleness_max: int | None = None
    uses_max: int | None = None
    full_policy: FullPolicy | None = None
    lease_expiry_policy: LeaseExpiryPolicy | None = None
    lease_s: float | None = None
    waiters_max: int | None = None
    leases_max: int | None = None
    workers_max: int | None = None
    open_chunk_s: float | None = None
    sampler: str | None = None
    limiter: MinimumChunks | SampleToInsertRatio | None = None
    schema: SchemaPolicy | None = None
    priority_exponent: float | None = None
    remover: str | None = None
    with_replacement: bool | None = None
    assembly: AssemblyPolicy | None = None
    group_min: int | None = None
    drop_equal: str | None = None
    stale: StalePolicy | None = None
    groups_per_version: int | None = None
    lead_versions: int | None = None
    required_parts: Sequence[str] | str | None = None
    """Parts with which a member is complete, such as `("tokens", "reward")`."""

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "BufferConfig":
        """Return limits for a kind of learner; those that a preset leaves out are None.

        Args:
            name: "on-policy", "off-policy", "prioritised", "queue", "stack" or "groups": see
                docs/which-read.md.
            **overrides: Limits that differ from the preset's.

        Raises:
            InvalidRequestError: There is no such preset, or no such limit.
        """
        limits: dict[str, Any] = dict(PRESETS.get(name, {}))
        if not limits:
            raise InvalidRequestError(
                "preset", f"must be one of {', '.join(PRESETS)}, got {name!r}"
            )
        names = [each.name for each in fields(cls)]
        if unknown := sorted(overrides.keys() - set(names)):
            raise InvalidRequestError(unknown[0], f"is no limit; there are {', '.join(names)}")
        for field_name, kind in (
            ("full_policy", FullPolicy),
            ("schema", SchemaPolicy),
            ("assembly", AssemblyPolicy),
            ("stale", StalePolicy),
        ):
            if field_name in limits:
                limits[field_name] = kind(limits[field_name])
        return cls(**limits | overrides)


@dataclass(frozen=True, slots=True)
class QuarantinedFragment:
    """A fragment with a stored but unreadable payload; its chunk is not served any more."""

    worker_id: str
    fragment_index: int
    session_id: str
    payload_id: str


class OpenGroup(NamedTuple):
    """A group that lacks members."""

    group: str
    member_count: int
    lacking_members: tuple[int, ...]
    """The first 8 of them."""
    silent_s: float
    """Seconds since its latest member was admitted."""


class MemberDescription(NamedTuple):
    """A member of an open group."""

    group: str
    member: int
    parts: tuple[str, ...]
    """Names of its parts, in the order in which they came; its sequence is "tokens"."""
    numbers: Mapping[str, Number]
    """Numbers from all that was attached to it."""


class MembersRead(NamedTuple):
    """The parts of members, one after the other."""

    references: list[FragmentReference]
    part_counts: tuple[int, ...]
    """Parts of each member, or -1 if there is no such member."""
    lease_id: str | None


class TicketGrant(NamedTuple):
    """Tickets that one request was given."""

    groups: tuple[str, ...]
    """Name of each ticket's group."""
    remaining_s: float
    """Seconds until they expire, unless they are renewed."""
    session_id: str
    model_version: int
    """Version that was current when they were given."""
    staleness_max: int | None
    """Largest staleness that the buffer delivers, in versions, or None if it keeps all."""


class TicketRenewal(NamedTuple):
    """The time that a renewed ticket has, and the current version."""

    remaining_s: float
    """Seconds until it expires, unless it is renewed again."""
    session_id: str
    model_version: int
    """Current version of the current session."""


class GroupEnd(NamedTuple):
    """How a group ended."""

    number: int
    """Ascending in a buffer, over restarts of the server too. If the chunk of a complete or partial
    group leaves the buffer before a use, its end becomes another one, with a higher number."""
    group: str
    reason: GroupEndReason
    member_count: int
    """Members that were admitted."""


@dataclass(frozen=True, slots=True)
class BufferState:
    """Gauges and counters of a buffer; counters cover its whole life."""

    chunk_count: int = 0
    open_chunk_count: int = 0
    open_fragment_count: int = 0
    fragment_count: int = 0
    payload_bytes: int = 0
    lease_count: int = 0
    waiter_count: int = 0
    worker_count: int = 0
    counters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    chunk_count_by_staleness: Mapping[int, int] = field(
        default_factory=lambda: MappingProxyType({})
    )
    waiting_reason: str = ""
    outage: str = ""
    """Which of journal and payload store does not answer the server, and for how long, or empty if
    both do. While it is not empty, the other fields may describe changes that are not durable."""
    hold: str = ""
    """Why producers wait although the buffer has room, or empty if they need not."""
    quarantined: tuple[QuarantinedFragment, ...] = ()
    """The latest fragments that readers could not read, oldest first; at most 16."""
    retained_chunk_count: int = 0
    """Chunks that left the sampler and are kept for subscriptions."""
    inserted_chunk_count: int = 0
    """Chunks closed in the session, minus those that left without a use; limiters count these."""
    delivered_chunk_count: int = 0
    """Uses granted in the session, minus those returned."""
    idle_s: float = 0.0
    """Seconds since the last call that used the buffer, at most since the server's start. 0 while
    such a call waits, or a lease is open. Descriptions and the console's reads do not count."""
    session_users: str = ""
    """Other processes that called as learners or producers of the session within the last minute,
    as words, or empty if none did."""
    latest_request_id: str = ""
    """Id of the last granted request with an open lease. If there is none, the id of the request
    with the latest ended leases, if one of these expired; empty if all were released."""
    open_groups: tuple[OpenGroup, ...] = ()
    """In a buffer of groups: the groups that have been without another member the longest; at most
    8."""
    ticket_count: int = 0
    """Tickets that are held."""
    ticket_waiter_count: int = 0
    """Requests that wait for tickets."""
    ticket_waiting_reason: str = ""
    """One sentence: what the next request for a ticket would wait for, or empty if it would not."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """A named cursor that the server keeps, and its lag."""

    name: str
    retaining: bool
    """True if the server keeps payloads of chunks that left the sampler until the cursor has passed
    them."""
    acknowledged_chunk_id: int
    """The last chunk that its reader has acknowledged, or -1 if it acknowledged none."""
    lag_chunk_count: int
    """Chunks after the cursor that can be read."""
    lag_bytes: int
    """Payload bytes of these chunks."""
    lag_s: float
    """Age of the oldest chunk after the cursor, to about a second; at most the time since the
    server's start."""
    missed_chunk_count: int
    """Chunks that a retaining subscription lost: they were deleted before the cursor passed."""


class ChunkEvent(NamedTuple):
    """Something that happened to chunks of a buffer at one moment."""

    number: int
    """Ascending, over restarts of the server too."""
    kind: str
    """"granted"; "consumed", "returned" or "expired" at a lease's end; or "evicted_" and the
    reason."""
    age_s: float
    """Seconds since it happened, at the server's reply."""
    chunk_ids: tuple[int, ...]
    values: tuple[int, ...]
    """A number for each chunk: its staleness then, if granted or at the end of a lease of the
    current session, or its uses if evicted. Otherwise empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSteps:
    """Where the steps of one worker went: each step that it acted is counted in one place.

    The worker reports the counts up to `admitted_count`, since its start; they add up to
    `acted_count`. The server divides the admitted ones, since its own start.
    """

    worker_id: str
    task: str = "default"
    """Task of its latest episode."""
    acted_count: int = 0
    """Steps that the environment has answered."""
    filling_count: int = 0
    """In the fragment being filled."""
    sending_count: int = 0
    """In fragments that the server has not answered yet."""
    dropped_count: int = 0
    """Dropped while filling: the fragment became stale, or its session ended."""
    refused_count: int = 0
    """In full fragments that worker or server refused: stale, of another session, misfits."""
    undelivered_count: int = 0
    """In fragments that the worker had left when it ended, or could not send."""
    admitted_count: int = 0
    fragment_step_count: int = 0
    """Steps of a full fragment."""
    steps_per_version: float = 0.0
    """Steps in the time of one model version, lately, or 0 if not known."""
    trained_count: int = 0
    """Admitted steps that were granted to a learner, which did not give them back."""
    evicted_count: int = 0
    """Admitted steps that left the buffer unread."""
    trained_version: int | None = None
    """Version that was current when a learner last got steps of it, or None for never."""
    report_age_s: float | None = None
    """Seconds since its latest report, or None if it has reported nothing."""

    @property
    def held_count(self) -> int:
        """Admitted steps that neither were trained on nor left unread: the buffer has them."""
        return max(0, self.admitted_count - self.trained_count - self.evicted_count)

    @property
    def lost_count(self) -> int:
        """Steps that ended without being trained on."""
        return self.dropped_count + self.refused_count + self.undelivered_count + self.evicted_count

    def ended(self) -> "WorkerSteps":
        """Return the same once its worker has ended, and fills no fragment any more."""
        undelivered = self.undelivered_count + self.filling_count
        return replace(self, filling_count=0, undelivered_count=undelivered)

    @property
    def fragment_versions(self) -> float:
        """Model versions that pass while one fragment is filled, or 0 if not known."""
        if not self.steps_per_version:
            return 0.0
        return self.fragment_step_count / self.steps_per_version


@dataclass(frozen=True, slots=True)
class BufferDescription:
    """One buffer, as of the server's reply."""

    name: str
    config: BufferConfig
    session_id: str
    """Name of the current session, or empty if there is none."""
    model_version: int | None
    """Current version, or None if the session has none, or if there is no session."""
    state: BufferState
    schemas: tuple[Mapping[str, ArrayType], ...] = ()
    """Schemas of the session's fragments in the order of their declaration, at most 16: the type of
    each path that a learner stacks. Shapes are of one step, except for `next_obs` and `in_state`.
    An empty schema stands for fragments without a declared one. There are several only if
    `config.schema` is, or was, ANY."""
    subscriptions: tuple[Subscription, ...] = ()
    """Subscriptions, sorted by name; only `get_buffer` returns them."""
    chunk_events: tuple[ChunkEvent, ...] = ()
    """Events of chunks, in order; only `get_buffer` returns them, if requested."""
    workers: tuple[WorkerSteps, ...] = ()
    """Where each worker's steps went, by name; only `get_buffer` returns them, if requested."""

    @property
    def schema(self) -> Mapping[str, ArrayType] | None:
        """The first of `schemas`, or None if the session has no fragment yet."""
        return self.schemas[0] if self.schemas else None


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The settings of the payload store. `repr` hides the URL, which may contain a password."""

    store_url: str = field(repr=False)
    unannounced_s: float
    piece_size_bytes: int
    server_version: str
    server_unix_s: float | None = None
    """The server's wall clock at its reply, in seconds since 1970, or None from an older server."""
    inline_size_bytes_max: int = 0
    """Largest payload that is sent inline, in bytes; 0 if none is."""
    journal_epoch: int = 0
    """Epoch of the server's claim of its journal, which grows with every takeover; 0 without a
    journal."""
    store_concerns: tuple[str, ...] = ()
    """Settings of the store under which it may lose payloads, each with its remedy, as the server
    found them at its start."""
    payload_size_bytes_max: int = 0
    """Bytes that the store takes in all: a larger payload can never be written. 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReport:
    """One finished episode."""

    worker_id: str
    task: str = "default"
    return_sum: float
    discounted_return_sum: float
    step_count: int
    end: EpisodeEnd
