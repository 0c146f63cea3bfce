"""The server's series, one row each; labels are closed sets, or limited in number."""

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary

MetricT = TypeVar("MetricT")

# From a fetch that need not wait (well under a millisecond) to the longest wait (5 min).
WAIT_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
# From a unary call over loopback (half a millisecond) to a call that is clearly slow.
RPC_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10, 60, 300)
# From one pipelined round trip on a unix socket to the store's timeout.
STORE_BUCKETS_S: Final = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
# Versions behind, where 0 is on-policy, and deliveries, of which replay trainers make tens.
SMALL_BUCKETS: Final = (0, 1, 2, 3, 5, 8, 13, 21, 34)


def series(kind: Callable[..., MetricT], text: str, labels: str = "", **options: Any) -> MetricT:
    """Return the row of a series: `breadbox_` and the attribute's name."""

    def make(name: str, registry: CollectorRegistry) -> MetricT:
        return kind(f"breadbox_{name}", text, labels.split(), registry=registry, **options)

    return cast(MetricT, make)


class Series:
    """All series of one registry: its attributes are made of the rows of the same names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        for name, make in vars(Series).items():
            if not name.startswith("__"):
                setattr(self, name, make(name, registry))

    # --- buffers ---
    fragments = series(Counter, "Fragments judged", "buffer outcome")
    admitted_bytes = series(Counter, "Payload bytes admitted", "buffer")
    delivered_bytes = series(Counter, "Payload bytes granted", "buffer")
    chunks_evicted = series(Counter, "Chunks that left", "buffer reason")
    fragments_discarded = series(Counter, "Fragments of open chunks given up", "buffer reason")
    groups_ended = series(
        Counter, "Groups ended; one that left before a use is counted once more", "buffer reason"
    )
    tagged_groups = series(
        Gauge,
        "Groups delivered, or dropped before a use, by the number `tag` of their members and the "
        "length of the longest",
        "buffer tag length end",
    )
    tickets_ended = series(Counter, "Tickets ended", "buffer end")
    leases_ended = series(Counter, "Leases ended", "buffer end")
    chunks_read = series(Counter, "Chunks returned to readers that read by a cursor", "buffer")
    chunks_skipped = series(
        Counter, "Chunks that had left before a reader with a cursor came to them", "buffer"
    )
    subscription_lag_chunks = series(
        Gauge,
        "Chunks that a subscription has not acknowledged, and that can be read",
        "buffer subscription",
    )
    subscription_lag_bytes = series(Gauge, "Payload bytes of these chunks", "buffer subscription")
    subscription_lag_seconds = series(
        Gauge,
        "Time for which a subscription has not acknowledged what there is",
        "buffer subscription",
    )
    subscription_missed_chunks = series(
        Gauge,
        "Chunks that a retaining subscription lost, since it was created",
        "buffer subscription",
    )
    fetch_wait_seconds = series(
        Histogram, "Time from a fetch to its outcome", "buffer outcome", buckets=WAIT_BUCKETS_S
    )
    staleness_at_delivery_versions = series(
        Histogram, "Staleness of a fragment's chunk at its grant", "buffer", buckets=SMALL_BUCKETS
    )
    staleness_at_release_versions = series(
        Histogram,
        "Staleness of a chunk when its learner released it as used: at most this when trained on",
        "buffer",
        buckets=SMALL_BUCKETS,
    )
    uses_at_eviction = series(
        Histogram, "Deliveries of a chunk when it left", "buffer", buckets=SMALL_BUCKETS
    )
    waiters = series(Gauge, "Waiting fetches, by the reason of the first one", "buffer reason")
    payloads_missing = series(
        Counter, "Fragments refused because the store does not have their payload", "buffer"
    )
    payloads_lost = series(
        Counter, "Payloads that the store lost although they were confirmed", "buffer"
    )

    # --- calls and connections ---
    rpcs = series(Counter, "Calls answered", "method code")
    token_calls = series(
        Counter, "Calls answered, by token, if its role may make them", "token code"
    )
    rpc_seconds = series(
        Histogram, "Time from a call's arrival to its answer", "method", buckets=RPC_BUCKETS_S
    )
    looks_waiting = series(Gauge, "Calls that only look and wait for their turn")
    calls = series(Gauge, "Calls in progress")
    messages_arriving = series(Gauge, "Calls that still receive their request")
    untaken_bytes = series(
        Gauge, "Bytes of answers that are made and not taken, but for small ones"
    )
    calls_refused = series(
        Counter, "Calls without a free slot, or without a request in time", "limit"
    )
    connections = series(Gauge, "Connections to the port of the calls")
    connections_closed = series(
        Counter,
        "Connections that the server closed: floods, unread answers, idle at the limit",
        "reason",
    )

    # --- payload store and gateway ---
    store_seconds = series(
        Histogram,
        "Time of one round trip to the payload store",
        "operation",
        buckets=STORE_BUCKETS_S,
    )
    store_errors = series(Counter, "Failed trips to the store", "operation")
    store_used_bytes = series(Gauge, "Everything in the payload store")
    store_limit_bytes = series(
        Gauge, "Where the payload store refuses to take more; 0: it has no limit of its own"
    )
    store_used_files = series(Gauge, "Inodes taken where payloads are files")
    store_limit_files = series(
        Gauge, "Inodes at which the payload store refuses to take more; 0: it has no such limit"
    )
    gateway_bytes = series(Counter, "Payload bytes that passed through the gateway", "direction")
    gateway_calls = series(Gauge, "Calls that move payloads")
    gateway_unannounced_bytes = series(
        Gauge, "Payload bytes written through the gateway and not announced"
    )
    payloads_deleted = series(Counter, "Payloads deleted from the store")
    pending_deletions = series(Gauge, "Payloads that wait for deletion")

    # --- appends and quotas ---
    waiting_appends = series(Gauge, "Appends that wait for room")
    pending_appends = series(Gauge, "Fragments that wait for admission")
    token_workers = series(
        Gauge, "Workers of current sessions that appended under a token", "token"
    )
    token_bytes = series(
        Gauge, "Payload bytes held that were appended under a token with a quota of them", "token"
    )
    quota_refusals = series(
        Counter,
        "Appends, and reports of episodes, refused because of a token's quota",
        "token quota",
    )

    # --- journal, standby, and what the stores refuse ---
    journal_seconds = series(
        Histogram,
        "Time from the first decision of a turn until the turn is durable",
        buckets=STORE_BUCKETS_S,
    )
    journal_entries = series(Counter, "Entries made durable")
    journal_lag_seconds = series(
        Gauge, "Time for which the oldest decision has waited to become durable"
    )
    leads = series(
        Gauge,
        "1: this server writes the journal; 0: it stands by, is not certain of its journal, "
        "or has not begun to serve",
    )
    standby_lag_seconds = series(
        Gauge, "Time for which a server that stands by may not have been as the journal is"
    )
    standby_lag_turns = series(
        Gauge, "Turns in the journal that a server that stands by has not replayed yet"
    )
    store_refusals = series(
        Counter,
        "Answers by which journal or payload store refused what they were asked, as when the "
        "disk of Redis is full",
        "place",
    )
    silence_seconds = series(
        Gauge, "Time for which journal or payload store have not answered the server", "place"
    )
    loop_lag_seconds = series(
        Gauge, "Time for which the event loop has held up everything; read by another thread"
    )
    journal_snapshots = series(Counter, "Snapshots attempted", "outcome")
    journal_replay_seconds = series(
        Gauge, "CPU time that a restart would need for the turns since the last snapshot"
    )
    journal_begun_again = series(
        Counter, "Journals that could not have been read back, begun again from memory"
    )

    # --- clients and what they report ---
    watchers = series(Gauge, "Clients that watch the model")
    readers = series(Gauge, "Clients that wait for chunks to read")
    read_leases = series(Gauge, "Leases of readers with a cursor")
    read_leases_ended = series(
        Counter, "Leases of readers with a cursor that ended; crowded: to make room", "end"
    )
    read_kept_bytes = series(
        Gauge, "Payload bytes that left the buffers, and that a reader holds a lease on"
    )
    clients = series(
        Gauge, "Connections that called within the last minute, by role of their calls", "role"
    )
    credential_reload_failures = series(
        Counter, "Changed token or certificate files that could not be used; the old ones stay"
    )
    tokens_usable = series(
        Gauge, "0: the token file cannot be used; after 5 minutes of that all calls are refused"
    )
    episodes = series(Counter, "Episodes reported", "task end")
    episode_return = series(Summary, "Sum of rewards of an episode", "task")
    worker_steps = series(
        Gauge,
        "Steps of the workers that report, by where they went: the sum of all is what they acted",
        "buffer end",
    )
    workers_left_out = series(
        Gauge,
        "Environments of which hardly any step is trained on although others' are, by the "
        "process that runs them",
        "buffer worker",
    )
    episode_steps = series(Summary, "Steps of an episode", "task")
