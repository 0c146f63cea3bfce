"""Plain, frozen values of the public API. No protobuf type appears here.

Counts are whole numbers, durations `float` seconds ending `_s`, sizes end `_bytes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from breadbox.errors import InvalidRequestError
from breadbox.presets import PRESETS


class TorchDevice(Protocol):
    """What `torch.device` is, for those who do without torch."""

    @property
    def type(self) -> str:
        """Such as "cuda"."""
        ...

    @property
    def index(self) -> int | None:
        """Of several of that type."""
        ...


Device = str | TorchDevice
"""Where tensors are: "cpu", "cuda", "cuda:1", or a `torch.device`. Not a number alone."""


class AdmissionOutcome(Enum):
    """What became of an appended fragment."""

    UNSPECIFIED = "unspecified"
    ADMITTED = "admitted"
    DUPLICATE = "duplicate"
    STALE = "stale"
    WRONG_SESSION = "wrong_session"
    BUFFER_FULL = "buffer_full"
    BYTES_FULL = "bytes_full"
    PAYLOAD_MISSING = "payload_missing"
    SCHEMA_UNKNOWN = "schema_unknown"
    """The library tells the schema, and sends the fragment again: nobody else meets this."""

    @property
    def asks_to_wait(self) -> bool:
        """Whether the same fragment should be sent again after the reply's retry delay."""
        return self in (AdmissionOutcome.BUFFER_FULL, AdmissionOutcome.BYTES_FULL)


class FullPolicy(Enum):
    """What an append meets when the buffer has no room."""

    EVICT = "evict"
    BLOCK = "block"


class SchemaPolicy(Enum):
    """How alike the fragments of a session must be; see `BufferDescription.schema`."""

    ONE = "one"
    """The same arrays, and as many steps as the first: what a learner stacks as it comes."""
    RAGGED = "ragged"
    """The same arrays, and any number of steps: what a learner takes steps from."""
    ANY = "any"
    """Any arrays, and any number of steps."""


class LeaseExpiryPolicy(Enum):
    """What an expired lease counts as."""

    GIVE_BACK = "give_back"
    CONSUME = "consume"


class ReleaseMode(Enum):
    """How a lease ends: the use counts, or is given back."""

    CONSUMED = "consumed"
    RETURNED = "returned"


class EpisodeEnd(Enum):
    """How an episode ended; ABORTED is an environment that failed, never a terminal state."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class PayloadReference:
    """Where a payload lives in the store."""

    payload_id: str
    """32 lower-case hexadecimal digits."""
    size_bytes: int
    """Bytes of the whole payload."""
    piece_size_bytes: int = 0
    """Bytes of a piece (the last may be shorter); 0: stored whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentMetadata:
    """What the service knows of one fragment; identity is (buffer, session, worker, index)."""

    worker_id: str
    fragment_index: int
    session_id: str
    model_version_min: int
    model_version_max: int
    payload: PayloadReference
    step_count: int
    discontinuity: bool = False
    schema_hash: int = 0
    """Of its schema; fragments of one hash can be stacked. 0: its producer does not say."""
    priority: float = 1.0
    """As it was appended, from 0 to 1e30; a chunk has the largest of its fragments'."""


class ArrayType(NamedTuple):
    """Type and shape of an array; as text "<f4[16, 3]"."""

    type_name: str
    """As numpy writes it, such as "<f4"; or "bfloat16"."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.type_name}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class FragmentReference:
    """One fragment of a granted chunk."""

    metadata: FragmentMetadata
    chunk_id: int
    staleness: int
    """Versions, at the moment of the grant."""
    use_count: int
    """Deliveries of the chunk, this one included."""
    priority: float = 1.0
    """Of the chunk, at the moment of the grant."""
    probability: float = 1.0
    """How likely the chunk was to be the first one drawn, over 0; 1 with samplers that leave
    nothing to chance."""
    population: int = 0
    """Chunks that were held at the moment of the draw; 0: not known."""
    body: bytes = field(default=b"", repr=False, compare=False)
    """The payload, where it is small and came along with the reference; empty: it is in the store
    alone."""

    def __repr__(self) -> str:
        """Say in one line what tells it from others; the rest is in the fields."""
        it = self.metadata
        low, high = it.model_version_min, it.model_version_max
        return (
            f"FragmentReference({it.worker_id!r} #{it.fragment_index} of {it.session_id!r}, "
            f"{it.step_count} steps, versions {low} to {high}, staleness {self.staleness}, "
            f"chunk {self.chunk_id}, use {self.use_count})"
        )


@dataclass(frozen=True, slots=True)
class AppendResult:
    """What became of one fragment; `first_outcome` is for DUPLICATE."""

    outcome: AdmissionOutcome
    first_outcome: AdmissionOutcome = AdmissionOutcome.UNSPECIFIED

    def __repr__(self) -> str:
        is_known = self.first_outcome is not AdmissionOutcome.UNSPECIFIED
        first = f", first {self.first_outcome.value}" if is_known else ""
        return f"AppendResult({self.outcome.value}{first})"


@dataclass(frozen=True, slots=True)
class AppendReply:
    """Answer to a batch of appends."""

    results: tuple[AppendResult, ...] = field(repr=False)
    session_id: str
    model_version: int | None
    append_credit_count: int
    append_credit_bytes: int
    retry_delay_s: float | None
    """Seconds to wait before sending again what asks to wait; None when nothing does."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """What is current in a buffer; ("", None, None) when no session is."""

    session_id: str
    model_version: int | None
    weights: PayloadReference | None


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
    """Ids, of either kind, of chunks that are not held: evicted, used up, or never there."""


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


@dataclass(frozen=True, slots=True)
class FragmentRead:
    """What came after a cursor: read, not used.

    Its payloads came with it, or stay readable under a lease.
    """

    fragments: tuple[FragmentReference, ...] = field(repr=False)
    """In order of `chunk_id`, those of one chunk together; staleness and uses are as of now."""
    lease_id: str | None
    """To be released once the payloads are loaded; None when nothing came, or all of them did."""
    remaining_s: float
    """Seconds the lease had left when the reply was made; 0 without one."""
    cursor: int
    """Chunks up to this one have been told of: the next `after_chunk_id`."""
    skipped_chunk_count: int
    """Chunks up to the cursor that had left the buffer before they were read."""
    session_id: str
    """Empty: no session is current."""
    model_version: int | None


@dataclass(frozen=True, slots=True)
class MinimumChunks:
    """A fetch waits until the buffer holds this many chunks."""

    chunk_count: int


@dataclass(frozen=True, slots=True)
class SampleToInsertRatio:
    """Keeps deliveries within `error_chunks` of `ratio` times the insertions."""

    ratio: float
    error_chunks: float
    minimum_chunk_count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferConfig:
    """Limits of a buffer; None takes the server's default, or in an update stays as it is."""

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

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "BufferConfig":
        """Limits for a kind of learner; what a preset does not say takes the server's default.

        Args:
            name: "on-policy", "off-policy", "prioritised", "queue" or "stack": see
                docs/which-read.md.
            **overrides: Limits that are to be others.

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
        for field_name, kind in (("full_policy", FullPolicy), ("schema", SchemaPolicy)):
            if field_name in limits:
                limits[field_name] = kind(limits[field_name])
        return cls(**limits | overrides)


@dataclass(frozen=True, slots=True)
class QuarantinedFragment:
    """A fragment whose payload is there and could not be read; its chunk is served no more."""

    worker_id: str
    fragment_index: int
    session_id: str
    payload_id: str


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
    """What does not answer the server, journal or payload store, and for how long; empty: all do.
    While it is not empty, the rest may not be durable."""
    hold: str = ""
    """Why fragments are answered BYTES_FULL whatever room the buffer has; empty: they are not."""
    quarantined: tuple[QuarantinedFragment, ...] = ()
    """The latest fragments that readers could not read, oldest first; at most 16."""
    retained_chunk_count: int = 0
    """Chunks that left the sampler and are kept for subscriptions."""
    latest_request_id: str = ""
    """Of the requests that still have a lease the one that was granted last; empty: none has."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """A named cursor that the server keeps, and how far it is behind."""

    name: str
    retaining: bool
    """Whether payloads of chunks that leave the sampler are kept until it has passed them."""
    acknowledged_chunk_id: int
    """The chunk up to which its reader has acknowledged; -1: none."""
    lag_chunk_count: int
    """Chunks behind it that can be read."""
    lag_bytes: int
    """Payload bytes of these."""
    lag_s: float
    """Seconds for which a chunk that it has not acknowledged has been there, to about a second;
    since the server's start at most."""
    missed_chunk_count: int
    """Chunks that a retaining one lost: gone for good before it had passed them."""


@dataclass(frozen=True, slots=True)
class BufferDescription:
    """One buffer as it was when asked."""

    name: str
    config: BufferConfig
    session_id: str
    """Empty: no session is current."""
    model_version: int | None
    """None: nothing was published in the session, or there is none."""
    state: BufferState
    schemas: tuple[Mapping[str, ArrayType], ...] = ()
    """Of the session's fragments, the one that was told first at the front: what is at each path
    that a learner stacks; shapes are of one step, but for `next_obs` and `in_state`. One without
    arrays stands for fragments whose producer does not say. More than one only where
    `config.schema` is, or was, ANY; of more than 16 the first 16."""
    subscriptions: tuple[Subscription, ...] = ()
    """Named cursors of readers, by name; only `get_buffer` says them."""

    @property
    def schema(self) -> Mapping[str, ArrayType] | None:
        """The first of `schemas`; None: no fragment of the session was told yet."""
        return self.schemas[0] if self.schemas else None


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where payloads live. `repr` hides the URL, which may hold a password."""

    store_url: str = field(repr=False)
    unannounced_s: float
    piece_size_bytes: int
    server_version: str
    server_unix_s: float | None = None
    """The server's wall clock when it answered, in seconds since 1970; None: it did not say."""
    inline_size_bytes_max: int = 0
    """Payloads of up to so many bytes ride along with calls; 0: none do."""
    journal_epoch: int = 0
    """Of the server's claim of its journal; grows with every takeover. 0: it has no journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReport:
    """One finished episode."""

    worker_id: str
    task: str = "default"
    return_sum: float
    discounted_return_sum: float
    step_count: int
    end: EpisodeEnd
