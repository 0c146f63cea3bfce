"""Every bound on what callers can make the server do or keep: one table.

SECURITY.md is written from it, and a test holds it against metrics and options.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from breadbox.wire.schemas import SCHEMA_ARRAYS_MAX, SCHEMA_BYTES_MAX, SCHEMAS_TOLD_MAX
from breadbox_server.core.model.config import (
    BUFFER_NAME_LENGTH_MAX,
    NAME_SIZE_BYTES_MAX,
    BufferConfig,
)
from breadbox_server.core.model.schemas import SCHEMAS_MAX
from breadbox_server.core.rules.intake import INDEX_JUMP_MAX
from breadbox_server.core.rules.reading import READ_BYTES_MAX, READ_FRAGMENTS_MAX
from breadbox_server.core.state.buffer_state import QUARANTINED_MAX
from breadbox_server.core.state.subscriptions import SUBSCRIPTIONS_MAX

# What a connection may do --------------------------------------------------------------------

CONNECTIONS_MAX: Final = 16_384
RESERVED_FILES: Final = 128
"""Open files kept from connections: those to the store, the journal, readers of the metrics."""
HANDSHAKE_S: Final = 10.0
KEEPALIVE_S: Final = 30.0
KEEPALIVE_ANSWER_S: Final = 10.0
"""Silence after which a peer is pinged, and time to answer: its waiters leave within 40 s."""
PING_INTERVAL_S_MIN: Final = 5.0
"""Seconds between a client's own pings. Ours ping every 30, or every 12 with several addresses;
after a late ping the next comes early."""
STREAMS_MAX: Final = 256
"""Calls in progress of one connection, given-up ones included until the loop has looked at them: it
takes one call at a time, so the next waits behind all."""
METADATA_BYTES: Final = 16 * 2**10
METADATA_BYTES_MAX: Final = 64 * 2**10
"""Metadata of a call: above the first some calls are refused, above the second all."""

IDLE_S: Final = 300.0
"""Seconds without a call after which a connection is ended; its client notices nothing."""
AGE_S: Final = 3600.0
"""Seconds after which a connection takes no new calls, which its client makes on a new one."""
AGE_GRACE_S: Final = 600.0
"""Seconds that the calls of such a connection get to end: more than the longest wait."""
ARRIVALS_OF_CONNECTION_MAX: Final = 64
FRUITLESS_MAX: Final = 1024
FRUITLESS_S: Final = 10.0
"""Calls refused or given up before their messages come, in so many seconds; weights: `traffic`."""
ANSWER_TAKEN_S: Final = 60.0
UNTAKEN_BYTES_OF: Final = {"all": 256 * 2**20, "token": 64 * 2**20, "connection": 32 * 2**20}
"""Bytes of answers that are made and not taken, by whose they are. gRPC has each of them twice."""
UNTAKEN_SMALL_BYTES: Final = 4 * 2**10
"""What a call may hold of them uncounted: the number of calls bounds that."""
WINDOW_BYTES: Final = 64 * 2**10

METRICS_REQUESTS_MAX: Final = 16
METRICS_REQUEST_S: Final = 5.0

# What calls may do ---------------------------------------------------------------------------

CALLS_MAX: Final = 32_768
"""Calls in progress; above the sum of watchers and waiters that one server is meant to hold."""
CALLS_OF_TOKEN_MAX: Final = CALLS_MAX // 2
CALLS_RESERVED: Final = 1024
LOOK_PAUSE_S: Final = 0.002
"""Shortest pause between two calls that only look, while others work: about twice what receiving
and answering a call costs besides its handler."""
ARRIVALS_MAX: Final = 128
ARRIVAL_S: Final = 10.0
UNASKED_MAX: Final = 1000
UNASKED_MAX_HARD: Final = 3000
"""Calls not looked at yet: above the first some are refused, above the second all. A thousand
producers that are too fast together wait here; refused ones come back by chance."""
WATCHES_MAX: Final = CALLS_MAX // 2
"""Watches of the health service: one per connection, since clients that find servers by name need
one."""
WATCHES_OF_CONNECTION_MAX: Final = 4
MESSAGE_BYTES_MAX: Final = 2 * 2**20
"""A request: 4096 fragments with the longest names are 1.5 MiB; more is a broken peer."""
TOKEN_LENGTH_MAX: Final = 512
"""Characters of a token; a longer one is refused without being looked at."""
TOKENS_MAX: Final = 256
"""Tokens of the file. A call's is compared with all of them, so that its time shows nothing."""
PATTERNS_MAX: Final = 16
TOKEN_WORKERS_MAX: Final = 16_384
"""Workers under one token, unless its line says otherwise: so that none takes all of a buffer's."""
QUOTA_BURST_S: Final = 5.0
"""Seconds of unused appends per second that may come at once."""
EPISODES_OF_APPEND: Final = 16
"""Episodes of a report that count as much as one fragment: they cost about as much."""
BUFFERS_MAX: Final = 256

# What one message may say --------------------------------------------------------------------

PARTS_MAX: Final = 8_192
"""Fields and items of a request: an empty item of two bytes takes a hundred once it is parsed."""
APPEND_FRAGMENTS_MAX: Final = 4096
INLINE_SIZE_BYTES_MAX: Final = 4 * 2**10
INLINE_PENDING_BYTES_MAX: Final = 256 * 2**20
INLINE_SIZE_BYTES_CHOICE_MAX: Final = 512 * 2**10
"""Largest `--inline-size-max`: with the largest schemas of an append it fits into a message."""
INLINE_RECENT_BYTES_MAX: Final = 16 * 2**20
SHARED_REPLY_BYTES_MAX: Final = 512 * 2**10
"""Bytes of a shared reply to readers, with inline payloads: what many wait for is small."""
SHARED_REPLIES_MAX: Final = 8
INLINE_REPLY_BYTES_MAX: Final = 4 * 2**20
PIECES_MAX: Final = 8_192
"""Pieces of one payload, and of all of one call: 4 GiB as clients cut them. Bounds the keys that
one call can make the server and its store name."""
PAGE_SIZE: Final = 100
PAGE_SIZE_MAX: Final = 1000
"""Buffers of one reply to ListBuffers, unless the caller says otherwise; and whatever it says."""
EPISODES_MAX: Final = 1024
TASK_SIZE_BYTES_MAX: Final = 64
READ_CHUNKS: Final = 64
READ_CHUNKS_MAX: Final = 4096
"""Chunks of one ReadFragments, unless the caller says otherwise; and whatever it says."""
UNREADABLE_MAX: Final = 4096
PRIORITIES_MAX: Final = 2048
TASKS_MAX: Final = 64

# Who may wait, and what readers may keep ----------------------------------------------------------

APPENDS_WAITING_MAX: Final = 16_384
WAITING_FRAGMENTS_MAX: Final = 65_536
"""Fragments of appends that wait for room, and as many that wait for nothing but their turn."""
WATCHERS_MAX: Final = 16_384
READ_LEASES_MAX: Final = 16_384
CHUNK_EVENTS_MAX: Final = 1_024
CHUNK_EVENT_IDS_MAX: Final = 16_384
"""Events of chunks of a buffer that are remembered, and ids of chunks in all of them: 256 KiB."""
SESSION_USERS_MAX: Final = 64
"""Remembered users of a buffer's session, by role."""
READ_KEPT_PART: Final = 8
"""Part of `--capacity-bytes` that payloads may take that left the buffers and are read still."""

# What may be on its way through the gateway ------------------------------------------------------

PART_BYTES: Final = 512 * 2**10
"""Bytes of a payload that are stored or read in one go. Measured best on unix sockets."""
PART_S: Final = 30.0
GATEWAY_CALLS_MAX: Final = 256
"""Calls that move payloads at a time; each holds at most two parts in memory."""
GATEWAY_CALLS_OF: Final = {"all": GATEWAY_CALLS_MAX, "token": 64, "connection": 16}
"""The same, by whose they are; a client has as many threads as it may have here."""
GATEWAY_WAITERS_MAX: Final = 1024
GATEWAY_WAIT_S: Final = 5.0
GATEWAY_PAYLOADS_MAX: Final = 4096
GATEWAY_RANGES_MAX: Final = 512
UNANNOUNCED_BYTES_MAX: Final = 2**30
UNANNOUNCED_CALLERS: Final = 4
PAYLOAD_BYTES_COUNTED_MIN: Final = 4096
"""A smaller payload counts as so many bytes there."""


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

LIMITS: Final = (
    Limit(
        "connections to an address",
        CONNECTIONS_MAX,
        SERVER,
        f"closed at once; fewer where the process may not open so many files, less "
        f"{RESERVED_FILES} for its own; when nine in ten are taken, those that have asked for "
        "nothing are closed",
        metric="breadbox_connections",
        option="--connections-max",
    ),
    Limit("time to become HTTP/2", HANDSHAKE_S, CONNECTION, "closed", unit="s"),
    Limit(
        "silence of a peer, pings included",
        KEEPALIVE_S + KEEPALIVE_ANSWER_S,
        CONNECTION,
        "closed",
        unit="s",
    ),
    Limit(
        "calls in progress on a connection", STREAMS_MAX, CONNECTION, "the next waits in its client"
    ),
    Limit(
        "connections to the port of the metrics",
        METRICS_REQUESTS_MAX,
        SERVER,
        f"the slowest is closed; each after {METRICS_REQUEST_S:g} s",
    ),
    Limit(
        "time without a call",
        IDLE_S,
        CONNECTION,
        "closed; the client connects again with its next call",
        unit="s",
    ),
    Limit(
        "age",
        AGE_S,
        CONNECTION,
        f"new calls go to a new one; those in progress have {AGE_GRACE_S:g} s to end",
        unit="s",
    ),
    Limit(
        "requests on their way on a connection",
        ARRIVALS_OF_CONNECTION_MAX,
        CONNECTION,
        "the slowest of its own is refused: SERVER_BUSY",
        metric="breadbox_calls_refused_total",
    ),
    Limit(
        f"calls within {FRUITLESS_S:g} s that are refused or given up before their requests come",
        FRUITLESS_MAX,
        CONNECTION,
        "closed; of callers that are not known, or give up, one counts for 16, and one whose "
        "request does not come in time for 64; each call that is let in makes up for 16",
        metric="breadbox_connections_closed_total",
    ),
    Limit(
        "time to take an answer",
        ANSWER_TAKEN_S,
        CONNECTION,
        "closed",
        unit="s",
        metric="breadbox_connections_closed_total",
    ),
    Limit(
        "bytes of answers that are not taken",
        UNTAKEN_BYTES_OF["connection"],
        CONNECTION,
        "SERVER_BUSY; one answer alone may be larger, and the first "
        f"{_shown_bytes(UNTAKEN_SMALL_BYTES)} of a call do not count",
        unit="bytes",
        metric="breadbox_untaken_bytes",
    ),
    Limit(
        "bytes of answers that a token does not take",
        UNTAKEN_BYTES_OF["token"],
        TOKEN,
        "as above",
        unit="bytes",
    ),
    Limit(
        "bytes of answers that nobody takes, altogether",
        UNTAKEN_BYTES_OF["all"],
        SERVER,
        "the connection that has held the most for a second is closed; the caller that asks for "
        "the most is answered as above",
        unit="bytes",
    ),
    Limit(
        "bytes of a request before it is asked for",
        WINDOW_BYTES,
        MESSAGE,
        "the client waits",
        unit="bytes",
    ),
    Limit(
        "calls in progress",
        CALLS_MAX,
        SERVER,
        f"SERVER_BUSY; for health and for looking at, making and deleting buffers there are "
        f"{CALLS_RESERVED:,} more",
        metric="breadbox_calls",
    ),
    Limit(
        "calls in progress under a token",
        CALLS_OF_TOKEN_MAX,
        TOKEN,
        "SERVER_BUSY, but for those that the next places are kept for",
        metric="breadbox_calls_refused_total",
    ),
    Limit(
        "pause between calls that only look, while others work",
        LOOK_PAUSE_S,
        SERVER,
        "wait until their deadline; each token, or connection, has its turn; all calls of a viewer "
        "are such",
        unit="s",
        metric="breadbox_looks_waiting",
    ),
    Limit(
        "calls that nobody has looked at yet",
        UNASKED_MAX_HARD,
        SERVER,
        f"CANCELLED, and clients try again; from {UNASKED_MAX:,} on for more and more",
    ),
    Limit(
        "requests on their way",
        ARRIVALS_MAX,
        SERVER,
        "the slowest is refused: SERVER_BUSY",
        metric="breadbox_messages_arriving",
    ),
    Limit(
        "time for a request to arrive",
        ARRIVAL_S,
        MESSAGE,
        "SERVER_BUSY",
        unit="s",
        metric="breadbox_calls_refused_total",
    ),
    Limit(
        "metadata of a call",
        METADATA_BYTES_MAX,
        MESSAGE,
        f"RESOURCE_EXHAUSTED; from {_shown_bytes(METADATA_BYTES)} on for more and more calls",
        unit="bytes",
    ),
    Limit("request", MESSAGE_BYTES_MAX, MESSAGE, "RESOURCE_EXHAUSTED", unit="bytes"),
    Limit(
        "watches of the health service on a connection",
        WATCHES_OF_CONNECTION_MAX,
        CONNECTION,
        "RESOURCE_EXHAUSTED; Check goes on",
    ),
    Limit(
        "watches of the health service", WATCHES_MAX, SERVER, "RESOURCE_EXHAUSTED; Check goes on"
    ),
    Limit("token", TOKEN_LENGTH_MAX, TOKEN, "UNAUTHENTICATED", unit="characters"),
    Limit("tokens in the file", TOKENS_MAX, SERVER, "the file is not used"),
    Limit("patterns of buffers, and of workers", PATTERNS_MAX, TOKEN, "the file is not used"),
    Limit(
        "workers that append under a token",
        TOKEN_WORKERS_MAX,
        TOKEN,
        "QUOTA_EXCEEDED; `workers_max=` of the token's line sets it. `bytes_held_max=` and "
        "`appends_per_s_max=`, without bound unless given, end in QUOTA_FULL, and producers wait; "
        "reports of episodes may come as often as fragments, every "
        f"{EPISODES_OF_APPEND} episodes of one as another",
        metric="breadbox_quota_refusals_total",
    ),
    Limit(
        "schemas that come with an append",
        SCHEMAS_TOLD_MAX,
        MESSAGE,
        f"ARGUMENT_INVALID, as for one of over {SCHEMA_BYTES_MAX} bytes or {SCHEMA_ARRAYS_MAX} "
        "arrays; of fragments with a larger one clients say none",
    ),
    Limit(
        "name of a buffer",
        BUFFER_NAME_LENGTH_MAX,
        MESSAGE,
        "ARGUMENT_INVALID, as for all but letters, digits, `.`, `_` and `-`",
        unit="characters",
    ),
    Limit(
        "name of a worker or session, id of a request or lease",
        NAME_SIZE_BYTES_MAX,
        MESSAGE,
        "ARGUMENT_INVALID, as for separators and unprintable characters",
        unit="bytes",
    ),
    Limit("fields and items of a request", PARTS_MAX, MESSAGE, "ARGUMENT_INVALID"),
    Limit("fragments of an append", APPEND_FRAGMENTS_MAX, MESSAGE, "ARGUMENT_INVALID"),
    Limit(
        "inline payload of a fragment",
        INLINE_SIZE_BYTES_MAX,
        MESSAGE,
        "PAYLOAD_MISSING, and the client writes it to the store",
        unit="bytes",
        option="--inline-size-max",
    ),
    Limit(
        "inline payload bytes of appends in progress",
        INLINE_PENDING_BYTES_MAX,
        SERVER,
        "APPENDS_FULL",
        unit="bytes",
    ),
    Limit(
        "inline payload bytes of appends that wait for room",
        INLINE_PENDING_BYTES_MAX // 2,
        SERVER,
        "the next is answered immediately that there is no room",
        unit="bytes",
    ),
    Limit(
        "bytes of inline payloads, kept for fetches that follow soon",
        INLINE_RECENT_BYTES_MAX,
        SERVER,
        "those that came first are read from the store",
        unit="bytes",
    ),
    Limit(
        "inline payload bytes of a reply",
        INLINE_REPLY_BYTES_MAX,
        MESSAGE,
        "the others are read from the store",
        unit="bytes",
    ),
    Limit(
        "reply that readers at one place share",
        SHARED_REPLY_BYTES_MAX,
        MESSAGE,
        f"it is made for each reader; so it is at the next place after {SHARED_REPLIES_MAX}",
        unit="bytes",
    ),
    Limit("pieces of the payloads of an append", PIECES_MAX, MESSAGE, "ARGUMENT_INVALID"),
    Limit(
        "fragments that a worker may leave out at once", INDEX_JUMP_MAX, MESSAGE, "ARGUMENT_INVALID"
    ),
    Limit("episodes of a report", EPISODES_MAX, MESSAGE, "ARGUMENT_INVALID"),
    Limit("name of a task", TASK_SIZE_BYTES_MAX, MESSAGE, "ARGUMENT_INVALID", unit="bytes"),
    Limit(
        "tasks with series of their own",
        TASKS_MAX,
        SERVER,
        "the worker that reports the most makes room, or counts as task `other`, as do all further "
        "tasks of one report",
        metric="breadbox_episodes_total",
    ),
    Limit("unreadable payloads named by a release", UNREADABLE_MAX, MESSAGE, "ARGUMENT_INVALID"),
    Limit(
        "priorities set, and chunks evicted, by an update",
        PRIORITIES_MAX,
        MESSAGE,
        "ARGUMENT_INVALID",
    ),
    Limit(
        "quarantined fragments that are named",
        QUARANTINED_MAX,
        BUFFER,
        "the latest are; all are counted",
        metric="breadbox_chunks_evicted_total",
    ),
    Limit(
        "calls that move payloads through the gateway",
        GATEWAY_CALLS_MAX,
        SERVER,
        f"the next waits for {GATEWAY_WAIT_S:g} s, {GATEWAY_WAITERS_MAX:,} at most do; then "
        "GATEWAY_FULL; the caller that holds the most, and has moved nothing for a second, makes "
        "room for one that holds less. Each holds at most 1 MiB of payloads",
        metric="breadbox_gateway_calls",
    ),
    Limit("the same, of a token", GATEWAY_CALLS_OF["token"], TOKEN, "as above"),
    Limit("the same, of a connection", GATEWAY_CALLS_OF["connection"], CONNECTION, "as above"),
    Limit(
        "time for 512 KiB of a payload to come or go through the gateway",
        PART_S,
        MESSAGE,
        "GATEWAY_STALLED",
        unit="s",
    ),
    Limit(
        "payloads written by a call through the gateway",
        GATEWAY_PAYLOADS_MAX,
        MESSAGE,
        "ARGUMENT_INVALID",
    ),
    Limit(
        "ranges read by a call through the gateway", GATEWAY_RANGES_MAX, MESSAGE, "ARGUMENT_INVALID"
    ),
    Limit(
        "payload bytes written through the gateway and not announced",
        UNANNOUNCED_BYTES_MAX,
        TOKEN,
        "GATEWAY_FULL, and the producer waits; ARGUMENT_INVALID for a payload larger than that. "
        f"Altogether {UNANNOUNCED_CALLERS} times as much, of what has come: there the oldest of "
        "the caller that holds the most is deleted for one that holds less",
        unit="bytes",
        metric="breadbox_gateway_unannounced_bytes",
        option="--gateway-unannounced",
    ),
    Limit(
        "buffers",
        BUFFERS_MAX,
        SERVER,
        "BUFFERS_FULL; so it is for a token bound to buffers that has as many as are left",
        option="--buffers-max",
    ),
    Limit(
        "chunks of a buffer",
        _BUFFER.capacity_chunks,
        BUFFER,
        "chunks kept for subscriptions leave first, then the oldest; or BUFFER_FULL: --full-policy",
        metric="breadbox_chunks",
        option="--capacity-chunks",
    ),
    Limit(
        "payload bytes of a buffer",
        _BUFFER.capacity_bytes,
        BUFFER,
        "the oldest without a lease goes, or BYTES_FULL: --full-policy",
        unit="bytes",
        metric="breadbox_payload_bytes",
        option="--capacity-bytes",
    ),
    Limit(
        "workers of a session",
        _BUFFER.workers_max,
        BUFFER,
        "the longest silent with nothing held is forgotten; if there is none, WORKERS_FULL",
        metric="breadbox_workers",
        option="--workers-max",
    ),
    Limit(
        "schemas of a session that are remembered",
        SCHEMAS_MAX,
        BUFFER,
        "with `--schema any`, no more are asked for; else there is one",
    ),
    Limit(
        "fetches that wait",
        _BUFFER.waiters_max,
        BUFFER,
        "WAITERS_FULL",
        metric="breadbox_waiters",
        option="--waiters-max",
    ),
    Limit(
        "fragments of a read by a cursor",
        READ_FRAGMENTS_MAX,
        MESSAGE,
        f"it ends there, and with {_shown_bytes(READ_BYTES_MAX)} of payloads, and after "
        f"{READ_CHUNKS_MAX:,} chunks; the caller reads on",
    ),
    Limit(
        "subscriptions",
        SUBSCRIPTIONS_MAX,
        BUFFER,
        "SUBSCRIPTIONS_FULL",
        metric="breadbox_subscription_lag_chunks",
    ),
    Limit(
        "callers that watch models, and as many that wait for chunks to read",
        WATCHERS_MAX,
        SERVER,
        "WATCHERS_FULL, for the one that has waited longest of the token that has the most (of the "
        "buffer, where there are no tokens), or for the next of it",
    ),
    Limit(
        "leases of readers with a cursor",
        READ_LEASES_MAX,
        SERVER,
        "the oldest ends of the token that has the most, or of the buffer, as above",
        metric="breadbox_read_leases",
    ),
    Limit(
        f"appends that wait for room at a time, of at most {WAITING_FRAGMENTS_MAX:,} fragments",
        APPENDS_WAITING_MAX,
        SERVER,
        "the next is answered immediately, to be sent again",
        metric="breadbox_waiting_appends",
    ),
    Limit(
        "payload bytes that left the buffers and that are read",
        _BUFFER.capacity_bytes // READ_KEPT_PART,
        SERVER,
        "the oldest lease ends of the reader that keeps the most; an eighth of --capacity-bytes",
        unit="bytes",
        metric="breadbox_read_kept_bytes",
    ),
    Limit(
        "events of chunks that are remembered",
        CHUNK_EVENTS_MAX,
        BUFFER,
        f"the oldest are forgotten; also beyond {CHUNK_EVENT_IDS_MAX:,} ids of chunks in them",
    ),
    Limit(
        "processes that are remembered as users of a session, learners and producers each",
        SESSION_USERS_MAX,
        BUFFER,
        "no other is added while so many have called within a minute",
    ),
    Limit(
        "leases alive",
        _BUFFER.leases_max,
        BUFFER,
        "fetches wait",
        metric="breadbox_leases",
        option="--leases-max",
    ),
)
"""All of them; of what has an option, the default."""
