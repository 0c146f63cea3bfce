"""Every bound on what callers can make the server do or keep: one table.

SECURITY.md is written from it, and a test holds it against metrics and options.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

from breadbox.model.types import NUMBER_BYTES_MAX, NUMBERS_MAX
from breadbox.wire.schemas import (
    ORIGIN_TEXT_LENGTH_MAX,
    ORIGINS_MAX,
    SCHEMA_ARRAYS_MAX,
    SCHEMA_BYTES_MAX,
    SCHEMAS_TOLD_MAX,
)
from breadbox_server.core.model.config import (
    BUFFER_NAME_LENGTH_MAX,
    MEMBER_PARTS_MAX,
    NAME_SIZE_BYTES_MAX,
    BufferConfig,
)
from breadbox_server.core.model.schemas import SCHEMAS_MAX
from breadbox_server.core.rules.intake import INDEX_JUMP_MAX
from breadbox_server.core.rules.reading import READ_BYTES_MAX, READ_FRAGMENTS_MAX
from breadbox_server.core.rules.tickets import TICKETS_PER_REQUEST_MAX
from breadbox_server.core.state.buffer_state import QUARANTINED_MAX
from breadbox_server.core.state.subscriptions import SUBSCRIPTIONS_MAX


class Scope(Enum):
    """What a limit bounds."""

    MESSAGE = "a message"
    CONNECTION = "a connection"
    TOKEN = "a token"
    BUFFER = "a buffer"
    SERVER = "the server"


@dataclass(frozen=True, slots=True)
class Limit:
    """One bound: of what, how much, and what happens there."""

    name: str
    value: float
    """The default, where an option sets it."""
    scope: Scope
    at_limit: str
    """What the caller gets at the limit."""
    unit: str = ""
    """Empty for a count of what the name says."""
    metric: str = ""
    """Series that shows how near it is, or how often it was met; as scraped."""
    option: str = ""
    """Option of `breadbox serve` that sets it."""

    @property
    def shown(self) -> str:
        """Value and unit, for people."""
        if self.unit == "bytes":
            return _shown_bytes(self.value)
        number = f"{int(self.value):,}" if self.value == int(self.value) else f"{self.value:g}"
        return f"{number} {self.unit}".strip()


def _shown_bytes(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} bytes"


_BUFFER: Final = BufferConfig()
MESSAGE, CONNECTION, TOKEN, BUFFER, SERVER = Scope

LIMITS: Final[list[Limit]] = []
"""All of them; of what has an option, the default."""
Value = TypeVar("Value", int, float)


def limit(name: str, value: Value, scope: Scope, at_limit: str, **more: str) -> Value:
    """Add a limit to the table, with further fields of `Limit`, and return its value."""
    LIMITS.append(Limit(name, value, scope, at_limit, **more))
    return value


# What a connection may do --------------------------------------------------------------------

RESERVED_FILES: Final = 128
"""Open files kept from connections: those to the store, the journal, readers of the metrics."""
CONNECTIONS_MAX: Final = limit(
    "connections to an address",
    16_384,
    SERVER,
    f"closed at once; fewer where the process may not open so many files, less "
    f"{RESERVED_FILES} for its own; when nine in ten are taken, those that have asked for "
    "nothing are closed",
    metric="breadbox_connections",
    option="--connections-max",
)
HANDSHAKE_S: Final = limit("time to become HTTP/2", 10.0, CONNECTION, "closed", unit="s")
KEEPALIVE_S: Final = 30.0
KEEPALIVE_ANSWER_S: Final = 10.0
"""Silence after which a peer is pinged, and time to answer: its waiters leave within 40 s."""
limit(
    "silence of a peer, pings included",
    KEEPALIVE_S + KEEPALIVE_ANSWER_S,
    CONNECTION,
    "closed",
    unit="s",
)
PING_INTERVAL_S_MIN: Final = 5.0
"""Seconds between a client's own pings. Ours ping every 30, or every 12 with several addresses;
after a late ping the next comes early."""
STREAMS_MAX: Final = limit(
    "calls in progress on a connection", 256, CONNECTION, "the next waits in its client"
)
"""Calls in progress of one connection, given-up ones included until the loop has looked at them: it
takes one call at a time, so the next waits behind all."""
METRICS_REQUEST_S: Final = 5.0
METRICS_REQUESTS_MAX: Final = limit(
    "connections to the port of the metrics",
    16,
    SERVER,
    f"the slowest is closed; each after {METRICS_REQUEST_S:g} s",
)
IDLE_S: Final = limit(
    "time without a call",
    300.0,
    CONNECTION,
    "closed; the client connects again with its next call",
    unit="s",
)
"""Seconds without a call after which a connection is ended; its client notices nothing."""
AGE_GRACE_S: Final = 600.0
"""Seconds that the calls of an aged connection get to end: more than the longest wait."""
AGE_S: Final = limit(
    "age",
    3600.0,
    CONNECTION,
    f"new calls go to a new one; those in progress have {AGE_GRACE_S:g} s to end",
    unit="s",
)
"""Seconds after which a connection takes no new calls, which its client makes on a new one."""
ARRIVALS_OF_CONNECTION_MAX: Final = limit(
    "requests on their way on a connection",
    64,
    CONNECTION,
    "the slowest of its own is refused: SERVER_BUSY",
    metric="breadbox_calls_refused_total",
)
FRUITLESS_S: Final = 10.0
"""Calls refused or given up before their messages come, in so many seconds; weights: `traffic`."""
FRUITLESS_MAX: Final = limit(
    f"calls within {FRUITLESS_S:g} s that are refused or given up before their requests come",
    1024,
    CONNECTION,
    "closed; of callers that are not known, or give up, one counts for 16, and one whose "
    "request does not come in time for 64; each call that is let in makes up for 16",
    metric="breadbox_connections_closed_total",
)
ANSWER_TAKEN_S: Final = limit(
    "time to take an answer",
    60.0,
    CONNECTION,
    "closed",
    unit="s",
    metric="breadbox_connections_closed_total",
)
UNTAKEN_BYTES_OF: Final = {"all": 256 * 2**20, "token": 64 * 2**20, "connection": 32 * 2**20}
"""Bytes of answers that are made and not taken, by whose they are. gRPC has each of them twice."""
UNTAKEN_SMALL_BYTES: Final = 4 * 2**10
"""What a call may hold of them uncounted: the number of calls bounds that."""
limit(
    "bytes of answers that are not taken",
    UNTAKEN_BYTES_OF["connection"],
    CONNECTION,
    "SERVER_BUSY; one answer alone may be larger, and the first "
    f"{_shown_bytes(UNTAKEN_SMALL_BYTES)} of a call do not count",
    unit="bytes",
    metric="breadbox_untaken_bytes",
)
limit(
    "bytes of answers that a token does not take",
    UNTAKEN_BYTES_OF["token"],
    TOKEN,
    "as above",
    unit="bytes",
)
limit(
    "bytes of answers that nobody takes, altogether",
    UNTAKEN_BYTES_OF["all"],
    SERVER,
    "the connection that has held the most for a second is closed; the caller that asks for "
    "the most is answered as above",
    unit="bytes",
)
WINDOW_BYTES: Final = limit(
    "bytes of a request before it is asked for",
    64 * 2**10,
    MESSAGE,
    "the client waits",
    unit="bytes",
)

# What calls may do ---------------------------------------------------------------------------

CALLS_RESERVED: Final = 1024
CALLS_MAX: Final = limit(
    "calls in progress",
    32_768,
    SERVER,
    f"SERVER_BUSY; for health and for looking at, making and deleting buffers there are "
    f"{CALLS_RESERVED:,} more",
    metric="breadbox_calls",
)
"""Calls in progress; above the sum of watchers and waiters that one server is meant to hold."""
CALLS_OF_TOKEN_MAX: Final = limit(
    "calls in progress under a token",
    CALLS_MAX // 2,
    TOKEN,
    "SERVER_BUSY, but for those that the next places are kept for",
    metric="breadbox_calls_refused_total",
)
LOOK_PAUSE_S: Final = limit(
    "pause between calls that only look, while others work",
    0.004,
    SERVER,
    "wait until their deadline; each token, or connection, has its turn; all calls of a viewer "
    "are such",
    unit="s",
    metric="breadbox_looks_waiting",
)
"""Shortest pause between two calls that only look, while others work: about twice what receiving
and answering a call costs besides its handler where machines are slow."""
UNASKED_MAX: Final = 1000
UNASKED_MAX_HARD: Final = limit(
    "calls that nobody has looked at yet",
    3000,
    SERVER,
    f"CANCELLED, and clients try again; from {UNASKED_MAX:,} on for more and more",
)
"""Calls not looked at yet: above the first some are refused, above the second all. A thousand
producers that are too fast together wait here; refused ones come back by chance."""
ARRIVALS_MAX: Final = limit(
    "requests on their way",
    128,
    SERVER,
    "the slowest is refused: SERVER_BUSY",
    metric="breadbox_messages_arriving",
)
ARRIVAL_S: Final = limit(
    "time for a request to arrive",
    10.0,
    MESSAGE,
    "SERVER_BUSY",
    unit="s",
    metric="breadbox_calls_refused_total",
)
METADATA_BYTES: Final = 16 * 2**10
METADATA_BYTES_MAX: Final = limit(
    "metadata of a call",
    64 * 2**10,
    MESSAGE,
    f"RESOURCE_EXHAUSTED; from {_shown_bytes(METADATA_BYTES)} on for more and more calls",
    unit="bytes",
)
"""Metadata of a call: above the first some calls are refused, above the second all."""
MESSAGE_BYTES_MAX: Final = limit("request", 2 * 2**20, MESSAGE, "RESOURCE_EXHAUSTED", unit="bytes")
"""A request: 4096 fragments with the longest names are 1.5 MiB; more is a broken peer."""
WATCHES_OF_CONNECTION_MAX: Final = limit(
    "watches of the health service on a connection",
    4,
    CONNECTION,
    "RESOURCE_EXHAUSTED; Check goes on",
)
WATCHES_MAX: Final = limit(
    "watches of the health service", CALLS_MAX // 2, SERVER, "RESOURCE_EXHAUSTED; Check goes on"
)
"""Watches of the health service: one per connection, since clients that find servers by name need
one."""
TOKEN_LENGTH_MAX: Final = limit("token", 512, TOKEN, "UNAUTHENTICATED", unit="characters")
"""Characters of a token; a longer one is refused without being looked at."""
TOKENS_MAX: Final = limit("tokens in the file", 256, SERVER, "the file is not used")
"""Tokens of the file. A call's is compared with all of them, so that its time shows nothing."""
PATTERNS_MAX: Final = limit(
    "patterns of buffers, and of workers", 16, TOKEN, "the file is not used"
)
EPISODES_OF_APPEND: Final = 16
"""Episodes of a report that count as much as one fragment: they cost about as much."""
TOKEN_WORKERS_MAX: Final = limit(
    "workers that append under a token",
    16_384,
    TOKEN,
    "QUOTA_EXCEEDED; `workers_max=` of the token's line sets it. `bytes_held_max=` and "
    "`appends_per_s_max=`, without bound unless given, end in QUOTA_FULL, and producers wait; "
    "reports of episodes may come as often as fragments, every "
    f"{EPISODES_OF_APPEND} episodes of one as another",
    metric="breadbox_quota_refusals_total",
)
"""Workers under one token, unless its line says otherwise: so that none takes all of a buffer's."""
QUOTA_BURST_S: Final = 5.0
"""Seconds of unused appends per second that may come at once."""

# What one message may say --------------------------------------------------------------------

limit(
    "schemas that come with an append",
    SCHEMAS_TOLD_MAX,
    MESSAGE,
    f"ARGUMENT_INVALID, as for one of over {SCHEMA_BYTES_MAX} bytes, {SCHEMA_ARRAYS_MAX} arrays or "
    f"{ORIGINS_MAX} origins of {ORIGIN_TEXT_LENGTH_MAX} characters; of fragments with a larger one "
    "clients say none",
)
limit(
    "name of a buffer",
    BUFFER_NAME_LENGTH_MAX,
    MESSAGE,
    "ARGUMENT_INVALID, as for all but letters, digits, `.`, `_` and `-`",
    unit="characters",
)
limit(
    "name of a worker or session, id of a request or lease",
    NAME_SIZE_BYTES_MAX,
    MESSAGE,
    "ARGUMENT_INVALID, as for separators and unprintable characters",
    unit="bytes",
)
limit(
    "numbers of a sequence",
    NUMBERS_MAX,
    MESSAGE,
    f"ARGUMENT_INVALID, as for a name or text of over {NUMBER_BYTES_MAX} bytes",
)
PARTS_MAX: Final = limit("fields and items of a request", 8_192, MESSAGE, "ARGUMENT_INVALID")
"""Fields and items of a request: an empty item of two bytes takes a hundred once it is parsed."""
APPEND_FRAGMENTS_MAX: Final = limit("fragments of an append", 4096, MESSAGE, "ARGUMENT_INVALID")
INLINE_SIZE_BYTES_MAX: Final = limit(
    "inline payload of a fragment",
    4 * 2**10,
    MESSAGE,
    "PAYLOAD_MISSING, and the client writes it to the store",
    unit="bytes",
    option="--inline-size-max",
)
INLINE_SIZE_BYTES_CHOICE_MAX: Final = 512 * 2**10
"""Largest `--inline-size-max`: with the largest schemas of an append it fits into a message."""
INLINE_PENDING_BYTES_MAX: Final = limit(
    "inline payload bytes of appends in progress",
    256 * 2**20,
    SERVER,
    "APPENDS_FULL",
    unit="bytes",
)
limit(
    "inline payload bytes of appends that wait for room",
    INLINE_PENDING_BYTES_MAX // 2,
    SERVER,
    "the next is answered immediately that there is no room",
    unit="bytes",
)
INLINE_RECENT_BYTES_MAX: Final = limit(
    "bytes of inline payloads, kept for fetches that follow soon",
    16 * 2**20,
    SERVER,
    "those that came first are read from the store",
    unit="bytes",
)
INLINE_REPLY_BYTES_MAX: Final = limit(
    "inline payload bytes of a reply",
    4 * 2**20,
    MESSAGE,
    "the others are read from the store",
    unit="bytes",
)
SHARED_REPLIES_MAX: Final = 8
SHARED_REPLY_BYTES_MAX: Final = limit(
    "reply that readers at one place share",
    512 * 2**10,
    MESSAGE,
    f"it is made for each reader; so it is at the next place after {SHARED_REPLIES_MAX}",
    unit="bytes",
)
"""Bytes of a shared reply to readers, with inline payloads: what many wait for is small."""
PIECES_MAX: Final = limit("pieces of the payloads of an append", 8_192, MESSAGE, "ARGUMENT_INVALID")
"""Pieces of one payload, and of all of one call: 4 GiB as clients cut them. Bounds the keys that
one call can make the server and its store name."""
limit("fragments that a worker may leave out at once", INDEX_JUMP_MAX, MESSAGE, "ARGUMENT_INVALID")
EPISODES_MAX: Final = limit("episodes of a report", 1024, MESSAGE, "ARGUMENT_INVALID")
REPORT_WORKERS_MAX: Final = limit("workers of a report", 256, MESSAGE, "ARGUMENT_INVALID")
TASK_SIZE_BYTES_MAX: Final = limit("name of a task", 64, MESSAGE, "ARGUMENT_INVALID", unit="bytes")
TASKS_MAX: Final = limit(
    "tasks with series of their own",
    64,
    SERVER,
    "the worker that reports the most makes room, or counts as task `other`, as do all further "
    "tasks of one report",
    metric="breadbox_episodes_total",
)
REPORTED_WORKERS_MAX: Final = limit(
    "workers of which a buffer knows where their steps went",
    4096,
    BUFFER,
    "the one that has been silent for longest makes room",
    metric="breadbox_worker_steps",
)
LEFT_OUT_NAMES_MAX: Final = limit(
    "processes with workers left out of training that have series of their own",
    16,
    BUFFER,
    "the others count as worker `other`",
    metric="breadbox_workers_left_out",
)
TAGS_MAX: Final = limit(
    "values of the number `tag` by which groups are counted",
    16,
    BUFFER,
    "groups of other values count as `other`",
    metric="breadbox_tagged_groups",
)
FURTHER_LEASES_MAX: Final = limit("further leases of a release", 64, MESSAGE, "ARGUMENT_INVALID")
UNREADABLE_MAX: Final = limit(
    "unreadable payloads named by a release", 4096, MESSAGE, "ARGUMENT_INVALID"
)
PRIORITIES_MAX: Final = limit(
    "priorities set, and chunks evicted, by an update",
    2048,
    MESSAGE,
    "ARGUMENT_INVALID",
)
limit(
    "quarantined fragments that are named",
    QUARANTINED_MAX,
    BUFFER,
    "the latest are; all are counted",
    metric="breadbox_chunks_evicted_total",
)

# What may be on its way through the gateway --------------------------------------------------

GATEWAY_WAIT_S: Final = 5.0
GATEWAY_WAITERS_MAX: Final = 1024
GATEWAY_CALLS_MAX: Final = limit(
    "calls that move payloads through the gateway",
    256,
    SERVER,
    f"the next waits for {GATEWAY_WAIT_S:g} s, {GATEWAY_WAITERS_MAX:,} at most do; then "
    "GATEWAY_FULL; the caller that holds the most, and has moved nothing for a second, makes "
    "room for one that holds less. Each holds at most 1 MiB of payloads",
    metric="breadbox_gateway_calls",
)
"""Calls that move payloads at a time; each holds at most two parts in memory."""
GATEWAY_CALLS_OF: Final = {"all": GATEWAY_CALLS_MAX, "token": 64, "connection": 16}
"""The same, by whose they are; a client has as many threads as it may have here."""
limit("the same, of a token", GATEWAY_CALLS_OF["token"], TOKEN, "as above")
limit("the same, of a connection", GATEWAY_CALLS_OF["connection"], CONNECTION, "as above")
PART_BYTES: Final = 512 * 2**10
"""Bytes of a payload that are stored or read in one go. Measured best on unix sockets."""
PART_S: Final = limit(
    "time for 512 KiB of a payload to come or go through the gateway",
    30.0,
    MESSAGE,
    "GATEWAY_STALLED",
    unit="s",
)
GATEWAY_PAYLOADS_MAX: Final = limit(
    "payloads written by a call through the gateway",
    4096,
    MESSAGE,
    "ARGUMENT_INVALID",
)
GATEWAY_RANGES_MAX: Final = limit(
    "ranges read by a call through the gateway", 512, MESSAGE, "ARGUMENT_INVALID"
)
UNANNOUNCED_CALLERS: Final = 4
UNANNOUNCED_BYTES_MAX: Final = limit(
    "payload bytes written through the gateway and not announced",
    2**30,
    TOKEN,
    "GATEWAY_FULL, and the producer waits; ARGUMENT_INVALID for a payload larger than that. "
    f"Altogether {UNANNOUNCED_CALLERS} times as much, of what has come: there the oldest of "
    "the caller that holds the most is deleted for one that holds less",
    unit="bytes",
    metric="breadbox_gateway_unannounced_bytes",
    option="--gateway-unannounced",
)
PAYLOAD_BYTES_COUNTED_MIN: Final = 4096
"""A smaller payload counts as so many bytes there."""

# What a buffer may hold ----------------------------------------------------------------------

BUFFERS_MAX: Final = limit(
    "buffers",
    256,
    SERVER,
    "BUFFERS_FULL; so it is for a token bound to buffers that has as many as are left",
    option="--buffers-max",
)
PAGE_SIZE: Final = 100
PAGE_SIZE_MAX: Final = 1000
"""Buffers of one reply to ListBuffers, unless the caller says otherwise; and whatever it says."""
limit(
    "chunks of a buffer",
    _BUFFER.capacity_chunks,
    BUFFER,
    "chunks kept for subscriptions leave first, then the oldest; or BUFFER_FULL: --full-policy",
    metric="breadbox_chunks",
    option="--capacity-chunks",
)
limit(
    "payload bytes of a buffer",
    _BUFFER.capacity_bytes,
    BUFFER,
    "the oldest without a lease goes, or BYTES_FULL: --full-policy",
    unit="bytes",
    metric="breadbox_payload_bytes",
    option="--capacity-bytes",
)
limit(
    "workers of a session",
    _BUFFER.workers_max,
    BUFFER,
    "the longest silent with nothing held is forgotten; if there is none, WORKERS_FULL",
    metric="breadbox_workers",
    option="--workers-max",
)
limit(
    "schemas of a session that are remembered",
    SCHEMAS_MAX,
    BUFFER,
    "with `--schema any`, no more are asked for; else there is one",
)
limit(
    "fetches that wait",
    _BUFFER.waiters_max,
    BUFFER,
    "WAITERS_FULL",
    metric="breadbox_waiters",
    option="--waiters-max",
)

# Who may wait, and what readers may keep -----------------------------------------------------

READ_CHUNKS: Final = 64
READ_CHUNKS_MAX: Final = 4096
"""Chunks of one ReadFragments, unless the caller says otherwise; and whatever it says."""
limit(
    "fragments of a read by a cursor",
    READ_FRAGMENTS_MAX,
    MESSAGE,
    f"it ends there, and with {_shown_bytes(READ_BYTES_MAX)} of payloads, and after "
    f"{READ_CHUNKS_MAX:,} chunks; the caller reads on",
)
limit(
    "subscriptions",
    SUBSCRIPTIONS_MAX,
    BUFFER,
    "SUBSCRIPTIONS_FULL",
    metric="breadbox_subscription_lag_chunks",
)
WATCHERS_MAX: Final = limit(
    "callers that watch models, and as many that wait for chunks to read or for ends of groups",
    16_384,
    SERVER,
    "WATCHERS_FULL, for the one that has waited longest of the token that has the most (of the "
    "buffer, where there are no tokens), or for the next of it",
)
limit("tickets of a request", TICKETS_PER_REQUEST_MAX, MESSAGE, "ARGUMENT_INVALID")
GROUP_ENDS_MAX: Final = limit(
    "ends of groups in a reply", 1_024, MESSAGE, "the caller asks for those after them"
)
MEMBER_KEYS_MAX: Final = limit(
    "members named by a request", READ_FRAGMENTS_MAX, MESSAGE, "ARGUMENT_INVALID"
)
CLAIM_MEMBERS_MAX: Final = limit("members of a claim", 1_024, MESSAGE, "ARGUMENT_INVALID")
CLAIM_PARTS_MAX: Final = limit(
    "parts of a buffer for which claims wait", 8, TOKEN, "WATCHERS_FULL, for the next part"
)
MEMBERS_PAGE_MAX: Final = limit("members listed in a reply", 1_024, MESSAGE, "the next page")
limit("parts of a member", MEMBER_PARTS_MAX, BUFFER, "ARGUMENT_INVALID")
TICKETS_HELD_MAX: Final = limit(
    "tickets of a buffer, and requests for them that wait",
    16_384,
    TOKEN,
    "QUOTA_FULL",
    metric="breadbox_tickets",
)
READ_LEASES_MAX: Final = limit(
    "leases of readers with a cursor",
    16_384,
    SERVER,
    "the oldest ends of the token that has the most, or of the buffer, as above",
    metric="breadbox_read_leases",
)
WAITING_FRAGMENTS_MAX: Final = 65_536
"""Fragments of appends that wait for room, and as many that wait for nothing but their turn."""
APPENDS_WAITING_MAX: Final = limit(
    f"appends that wait for room at a time, of at most {WAITING_FRAGMENTS_MAX:,} fragments",
    16_384,
    SERVER,
    "the next is answered immediately, to be sent again",
    metric="breadbox_waiting_appends",
)
READ_KEPT_PART: Final = 8
"""Part of `--capacity-bytes` that payloads may take that left the buffers and are read still."""
limit(
    "payload bytes that left the buffers and that are read",
    _BUFFER.capacity_bytes // READ_KEPT_PART,
    SERVER,
    "the oldest lease ends of the reader that keeps the most; an eighth of --capacity-bytes",
    unit="bytes",
    metric="breadbox_read_kept_bytes",
)
CHUNK_EVENT_IDS_MAX: Final = 16_384
"""Events of chunks of a buffer that are remembered, and ids of chunks in all of them: 256 KiB."""
CHUNK_EVENTS_MAX: Final = limit(
    "events of chunks that are remembered",
    1_024,
    BUFFER,
    f"the oldest are forgotten; also beyond {CHUNK_EVENT_IDS_MAX:,} ids of chunks in them",
)
SESSION_USERS_MAX: Final = limit(
    "processes that are remembered as users of a session, learners and producers each",
    64,
    BUFFER,
    "no other is added while so many have called within a minute",
)
"""Remembered users of a buffer's session, by role."""
limit(
    "leases alive",
    _BUFFER.leases_max,
    BUFFER,
    "fetches wait",
    metric="breadbox_leases",
    option="--leases-max",
)
