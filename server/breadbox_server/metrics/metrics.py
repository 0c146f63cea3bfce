"""Define the series that Prometheus scrapes; labels are closed sets, or limited in number."""

import logging
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    Summary,
)

from breadbox.model.errors import ReplayBufferError, StoreUnavailableError
from breadbox.shared.outages import OutageLog
from breadbox.stores.base import StoreUsage
from breadbox.v1.replay_buffer_service_pb2 import EpisodeReport
from breadbox_server.base.errors import JOURNAL, PAYLOAD_STORE
from breadbox_server.base.unforeseen import unforeseen_as
from breadbox_server.core.model.description import BufferDescription, SubscriptionDescription
from breadbox_server.core.model.events import (
    ChunksEvicted,
    Event,
    EvictionReason,
    FetchGranted,
    FragmentsDiscarded,
    FragmentsJudged,
    LeaseEnded,
    WaitElapsed,
)
from breadbox_server.core.model.inputs import AdmissionOutcome
from breadbox_server.limits import TASKS_MAX
from breadbox_server.metrics.episodes import OTHER, EpisodeKey, Reporter, TaskSeries

log = logging.getLogger(__name__)

STORE_WRITES: Final = {"confirm", "keep", "delete"}
"""Operations of the payload store that fail on a full disk."""
# From a fetch that need not wait (well under a millisecond) to the longest wait (5 min).
WAIT_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
# From a unary call over loopback (half a millisecond) to a call that is clearly slow.
RPC_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10, 60, 300)
# From one pipelined round trip on a unix socket to the store's timeout.
STORE_BUCKETS_S: Final = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
# Versions behind, where 0 is on-policy, and deliveries, of which replay trainers make tens.
SMALL_BUCKETS: Final = (0, 1, 2, 3, 5, 8, 13, 21, 34)

GAUGES: Final = {
    "chunks": ("chunk_count", "Chunks held for sampling"),
    "retained_chunks": (
        "retained_count",
        "Chunks that left the sampler and are kept for subscriptions",
    ),
    "open_chunks": ("open_chunk_count", "Chunks being filled"),
    "held_fragments": ("fragment_count", "Fragments of the chunks held for sampling"),
    "capacity_chunks": ("config.capacity_chunks", "Chunks that may be held for sampling"),
    "capacity_bytes": ("config.capacity_bytes", "Payload bytes that may be held"),
    "payload_bytes": ("payload_bytes", "Payload bytes of open chunks, chunks and leases"),
    "leases": ("lease_count", "Leases alive"),
    "workers": ("worker_count", "Workers that take part in the session"),
    "model_version": ("model.model_version", "Current model version"),
}
"""Gauges of a buffer, by name: the field of its description, and help."""


class WaitingFor(Enum):
    """What the first fetch in a buffer's queue waits for; a closed set."""

    SESSION = "session"
    """No learner has started a session."""
    WORKERS = "workers"
    """No worker has appended to the current session."""
    LEASES = "leases"
    """The buffer has as many active leases as it allows."""
    CHUNKS = "chunks"
    """There are too few chunks, or the limiter withholds them."""


def waiting_for(seen: BufferDescription) -> WaitingFor:
    """Return what a fetch on this buffer waits for; `waiting_reason` has the details."""
    if seen.model.model_version is None:
        return WaitingFor.SESSION
    if seen.lease_count >= seen.config.leases_max:
        return WaitingFor.LEASES
    if seen.worker_count == 0:
        return WaitingFor.WORKERS
    return WaitingFor.CHUNKS


class Metrics:
    """All series of the server. Called from the loop's thread only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._tasks = TaskSeries(TASKS_MAX)
        self._ends_of_task: dict[str, set[str]] = {}
        self._of_buffer: dict[str, dict[tuple[Any, tuple[str, ...]], Any]] = {}
        # Processor time, memory and open files of this process, under their usual names.
        ProcessCollector(registry=registry)
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)

        # --- buffers ---
        self.judged = counter("breadbox_fragments", "Fragments judged", ["buffer", "outcome"])
        self.admitted_bytes = counter(
            "breadbox_admitted_bytes", "Payload bytes admitted", ["buffer"]
        )
        self.delivered_bytes = counter(
            "breadbox_delivered_bytes", "Payload bytes granted", ["buffer"]
        )
        self.evicted = counter("breadbox_chunks_evicted", "Chunks that left", ["buffer", "reason"])
        self.discarded = counter(
            "breadbox_fragments_discarded",
            "Fragments of open chunks given up",
            ["buffer", "reason"],
        )
        self.leases_ended = counter("breadbox_leases_ended", "Leases ended", ["buffer", "end"])
        self.chunks_read = counter(
            "breadbox_chunks_read", "Chunks returned to readers that read by a cursor", ["buffer"]
        )
        self.chunks_skipped = counter(
            "breadbox_chunks_skipped",
            "Chunks that had left before a reader with a cursor came to them",
            ["buffer"],
        )
        of_subscription = ["buffer", "subscription"]
        self.lag_chunks = gauge(
            "breadbox_subscription_lag_chunks",
            "Chunks that a subscription has not acknowledged, and that can be read",
            of_subscription,
        )
        self.lag_bytes = gauge(
            "breadbox_subscription_lag_bytes", "Payload bytes of these chunks", of_subscription
        )
        self.lag_seconds = gauge(
            "breadbox_subscription_lag_seconds",
            "Time for which a subscription has not acknowledged what there is",
            of_subscription,
        )
        self.missed = gauge(
            "breadbox_subscription_missed_chunks",
            "Chunks that a retaining subscription lost, since it was created",
            of_subscription,
        )
        self.fetch_wait = histogram(
            "breadbox_fetch_wait_seconds",
            "Time from a fetch to its outcome",
            ["buffer", "outcome"],
            buckets=WAIT_BUCKETS_S,
        )
        self.staleness = histogram(
            "breadbox_staleness_at_delivery_versions",
            "Staleness of a fragment's chunk at its grant",
            ["buffer"],
            buckets=SMALL_BUCKETS,
        )
        self.uses = histogram(
            "breadbox_uses_at_eviction",
            "Deliveries of a chunk when it left",
            ["buffer"],
            buckets=SMALL_BUCKETS,
        )
        self.gauges = {
            name: gauge(f"breadbox_{name}", text, ["buffer"]) for name, (_, text) in GAUGES.items()
        }
        self.waiters = gauge(
            "breadbox_waiters",
            "Waiting fetches, by the reason of the first one",
            ["buffer", "reason"],
        )
        self.payloads_missing = counter(
            "breadbox_payloads_missing",
            "Fragments refused because the store does not have their payload",
            ["buffer"],
        )
        self.payloads_lost = counter(
            "breadbox_payloads_lost",
            "Payloads that the store lost although they were confirmed",
            ["buffer"],
        )

        # --- calls and connections ---
        self.rpcs = counter("breadbox_rpcs", "Calls answered", ["method", "code"])
        self.token_calls = counter(
            "breadbox_token_calls",
            "Calls answered, by token, if its role may make them",
            ["token", "code"],
        )
        self._of_token: dict[str, dict[str, Any]] = {}
        self.rpc_seconds = histogram(
            "breadbox_rpc_seconds",
            "Time from a call's arrival to its answer",
            ["method"],
            buckets=RPC_BUCKETS_S,
        )
        self.looks_waiting = gauge(
            "breadbox_looks_waiting", "Calls that only look and wait for their turn"
        )
        self.calls = gauge("breadbox_calls", "Calls in progress")
        self.messages_arriving = gauge(
            "breadbox_messages_arriving", "Calls that still receive their request"
        )
        self.untaken_bytes = gauge(
            "breadbox_untaken_bytes",
            "Bytes of answers that are made and not taken, but for small ones",
        )
        self.calls_refused = counter(
            "breadbox_calls_refused",
            "Calls without a free slot, or without a request in time",
            ["limit"],
        )
        self.connections = gauge("breadbox_connections", "Connections to the port of the calls")
        self.connections_closed = counter(
            "breadbox_connections_closed",
            "Connections that the server closed: floods, unread answers, idle at the limit",
            ["reason"],
        )

        # --- payload store and gateway ---
        self.store_seconds = histogram(
            "breadbox_store_seconds",
            "Time of one round trip to the payload store",
            ["operation"],
            buckets=STORE_BUCKETS_S,
        )
        self.store_errors = counter(
            "breadbox_store_errors", "Failed trips to the store", ["operation"]
        )
        self.store_used = gauge("breadbox_store_used_bytes", "Everything in the payload store")
        self.store_limit = gauge(
            "breadbox_store_limit_bytes",
            "Where the payload store refuses to take more; 0: it has no limit of its own",
        )
        self.store_used_files = gauge(
            "breadbox_store_used_files", "Inodes taken where payloads are files"
        )
        self.store_limit_files = gauge(
            "breadbox_store_limit_files",
            "Inodes at which the payload store refuses to take more; 0: it has no such limit",
        )
        self.gateway_bytes = counter(
            "breadbox_gateway_bytes",
            "Payload bytes that passed through the gateway; direction: in, out",
            ["direction"],
        )
        self.gateway_calls = gauge("breadbox_gateway_calls", "Calls that move payloads")
        self.gateway_unannounced = gauge(
            "breadbox_gateway_unannounced_bytes",
            "Payload bytes written through the gateway and not announced",
        )
        self.deleted = counter("breadbox_payloads_deleted", "Payloads deleted from the store")
        self.pending_deletions = gauge(
            "breadbox_pending_deletions", "Payloads that wait for deletion"
        )

        # --- appends and quotas ---
        self.waiting_appends = gauge("breadbox_waiting_appends", "Appends that wait for room")
        self.pending_appends = gauge(
            "breadbox_pending_appends", "Fragments that wait for admission"
        )
        self.token_workers = gauge(
            "breadbox_token_workers",
            "Workers of current sessions that appended under a token",
            ["token"],
        )
        self.token_bytes = gauge(
            "breadbox_token_bytes",
            "Payload bytes held that were appended under a token with a quota of them",
            ["token"],
        )
        self.quota_refusals = counter(
            "breadbox_quota_refusals",
            "Appends, and reports of episodes, refused because of a token's quota",
            ["token", "quota"],
        )

        # --- journal, standby, and what the stores refuse ---
        self.journal_seconds = histogram(
            "breadbox_journal_seconds",
            "Time from the first decision of a turn until the turn is durable",
            buckets=STORE_BUCKETS_S,
        )
        self.journal_entries = counter("breadbox_journal_entries", "Entries made durable")
        self.journal_lag = gauge(
            "breadbox_journal_lag_seconds",
            "Time for which the oldest decision has waited to become durable",
        )
        self.leads = gauge(
            "breadbox_leads",
            "1: this server writes the journal; 0: it stands by, is not certain of its journal, or "
            "has not begun to serve",
        )
        self.standby_lag = gauge(
            "breadbox_standby_lag_seconds",
            "Time for which a server that stands by may not have been as the journal is",
        )
        self.standby_lag_turns = gauge(
            "breadbox_standby_lag_turns",
            "Turns in the journal that a server that stands by has not replayed yet",
        )
        self.store_refusals = counter(
            "breadbox_store_refusals",
            "Answers by which journal or payload store refused what they were asked, as when the "
            "disk of Redis is full",
            ["place"],
        )
        for place in (JOURNAL, PAYLOAD_STORE):
            self.store_refusals.labels(place.replace(" ", "_"))  # Shown from the start, as 0.
        self.store_outage = OutageLog(log, "writing to the payload store")
        self.silence = gauge(
            "breadbox_silence_seconds",
            "Time for which journal or payload store have not answered the server",
            ["place"],
        )
        self.loop_lag = gauge(
            "breadbox_loop_lag_seconds",
            "Time for which the event loop has held up everything; read by another thread",
        )
        self.snapshots = counter("breadbox_journal_snapshots", "Snapshots attempted", ["outcome"])
        self.journal_replay = gauge(
            "breadbox_journal_replay_seconds",
            "CPU time that a restart would need for the turns since the last snapshot",
        )
        self.journals_begun_again = counter(
            "breadbox_journal_begun_again",
            "Journals that could not have been read back, begun again from memory",
        )

        # --- clients and what they report ---
        self.watchers = gauge("breadbox_watchers", "Clients that watch the model")
        self.readers = gauge("breadbox_readers", "Clients that wait for chunks to read")
        self.read_leases = gauge("breadbox_read_leases", "Leases of readers with a cursor")
        self.read_leases_ended = counter(
            "breadbox_read_leases_ended",
            "Leases of readers with a cursor that ended; crowded: to make room",
            ["end"],
        )
        self.read_kept_bytes = gauge(
            "breadbox_read_kept_bytes",
            "Payload bytes that left the buffers, and that a reader holds a lease on",
        )
        self.clients = gauge(
            "breadbox_clients",
            "Connections that called within the last minute, by role of their calls",
            ["role"],
        )
        self.credential_failures = counter(
            "breadbox_credential_reload_failures",
            "Changed token or certificate files that could not be used; the old ones stay",
        )
        self.tokens_usable = gauge(
            "breadbox_tokens_usable",
            "0: the token file cannot be used; after 5 minutes of that all calls are refused",
        )
        self.tokens_usable.set(1)
        self.episodes = counter("breadbox_episodes", "Episodes reported", ["task", "end"])
        self.episode_return = Summary(
            "breadbox_episode_return", "Sum of rewards of an episode", ["task"], registry=registry
        )
        self.episode_steps = Summary(
            "breadbox_episode_steps", "Steps of an episode", ["task"], registry=registry
        )

    def observe(self, events: Iterable[Event]) -> None:
        """Count the core's events."""
        # Each count takes a lock, so the fragments and chunks of one turn are summed first.
        judged: dict[tuple[str, AdmissionOutcome], list[FragmentsJudged]] = {}
        evicted: dict[tuple[str, EvictionReason], list[int]] = {}
        for event in events:
            if type(event) is FragmentsJudged:
                judged.setdefault((event.buffer, event.outcome), []).append(event)
            elif type(event) is ChunksEvicted:
                evicted.setdefault((event.buffer, event.reason), []).extend(event.use_counts)
            else:
                self._observe_one(event)
        for (buffer, outcome), alike in judged.items():
            count = sum([each.fragment_count for each in alike])
            self._of(buffer, self.judged, outcome.value).inc(count)
            if outcome is AdmissionOutcome.ADMITTED:
                self._of(buffer, self.admitted_bytes).inc(sum([each.size_bytes for each in alike]))
        for (buffer, reason), use_counts in evicted.items():
            self._of(buffer, self.evicted, reason.value).inc(len(use_counts))
            _observe_each(self._of(buffer, self.uses), use_counts)

    def _observe_one(self, event: Event) -> None:
        match event:
            case FragmentsDiscarded(buffer=buffer, reason=why, fragment_count=count):
                self._of(buffer, self.discarded, why.value).inc(count)
            case LeaseEnded(buffer=buffer, end=end):
                self._of(buffer, self.leases_ended, end.value).inc()
            case FetchGranted(buffer=buffer, fragments=fragments, first_delivery=True):
                self._of(buffer, self.fetch_wait, "granted").observe(event.wait_s)
                staleness = [each.staleness for each in fragments]
                _observe_each(self._of(buffer, self.staleness), staleness)
                size_bytes = sum([each.fragment.payload.size_bytes for each in fragments])
                self._of(buffer, self.delivered_bytes).inc(size_bytes)
            case WaitElapsed(buffer=buffer, wait_s=wait_s):
                self._of(buffer, self.fetch_wait, "elapsed").observe(wait_s)
            case _:
                pass

    def show_buffer(
        self,
        seen: BufferDescription,
        subscriptions: Iterable[tuple[SubscriptionDescription, float]],
    ) -> None:
        """Update the gauges of a buffer, and of its subscriptions with their lags in seconds."""
        buffer = seen.name
        for name, (field, _) in GAUGES.items():
            value = attrgetter(field)(seen)
            self._of(buffer, self.gauges[name]).set(-1 if value is None else value)
        self.set_waiters(buffer, seen.waiter_count, waiting_for(seen))
        for each, lag_s in subscriptions:
            self._of(buffer, self.lag_chunks, each.name).set(each.lag_chunks)
            self._of(buffer, self.lag_bytes, each.name).set(each.lag_bytes)
            self._of(buffer, self.lag_seconds, each.name).set(lag_s)
            self._of(buffer, self.missed, each.name).set(each.missed_count)

    def set_waiters(self, buffer: str, waiter_count: int, reason: WaitingFor) -> None:
        """Set the number of waiting fetches under this reason, and 0 under the others."""
        for each in WaitingFor:
            count = waiter_count if each is reason else 0
            self._of(buffer, self.waiters, each.value).set(count)

    def set_store_usage(self, usage: StoreUsage) -> None:
        """Set the gauges of the payload store's size and limit."""
        self.store_used.set(usage.used_bytes)
        self.store_limit.set(usage.limit_bytes)
        self.store_used_files.set(usage.used_file_count)
        self.store_limit_files.set(usage.limit_file_count)

    def count_read(self, buffer: str, chunk_count: int, skipped_count: int) -> None:
        """Count the chunks that a reader with a cursor got and skipped."""
        if chunk_count:
            self._of(buffer, self.chunks_read).inc(chunk_count)
        if skipped_count:
            self._of(buffer, self.chunks_skipped).inc(skipped_count)

    def forget_subscription(self, buffer: str, name: str) -> None:
        """Drop the series of a deleted subscription."""
        children = self._of_buffer.get(buffer, {})
        for metric in (self.lag_chunks, self.lag_bytes, self.lag_seconds, self.missed):
            if children.pop((metric, (name,)), None) is not None:
                metric.remove(buffer, name)

    def count_missing(self, buffer: str, fragment_count: int) -> None:
        """Count fragments without a payload in the store."""
        self._of(buffer, self.payloads_missing).inc(fragment_count)

    def count_lost(self, buffer: str, payload_count: int) -> None:
        """Count payloads that the store lost."""
        self._of(buffer, self.payloads_lost).inc(payload_count)

    def count_token_call(self, token: str, code: str) -> None:
        """Count an answer to a call with this token, unless the token was removed."""
        children = self._of_token.get(token)
        if children is None:
            return
        child = children.get(code)
        if child is None:
            child = children[code] = self.token_calls.labels(token, code)
        child.inc()

    def know_tokens(self, names: Collection[str]) -> None:
        """Set the known tokens, and drop the series of all others."""
        for token in self._of_token.keys() - set(names):
            for code in self._of_token.pop(token):
                self.token_calls.remove(token, code)
        for token in names:
            self._of_token.setdefault(token, {})

    def forget_buffer(self, buffer: str) -> None:
        """Drop the series of a deleted buffer."""
        for metric, labels in self._of_buffer.pop(buffer, {}):
            metric.remove(buffer, *labels)

    def _of(self, buffer: str, metric: Any, *labels: str) -> Any:
        """Return a metric's child for a buffer; cached, since the library's lookup takes a lock."""
        children = self._of_buffer.setdefault(buffer, {})
        key = (metric, labels)
        child = children.get(key)
        if child is None:
            child = children[key] = metric.labels(buffer, *labels)
        return child

    @contextmanager
    def store_trip(self, operation: str) -> Iterator[None]:
        """Time one operation of the store, and count it if it fails; see `unforeseen_as`."""
        started = perf_counter()
        try:
            with unforeseen_as(StoreUnavailableError, (ReplayBufferError,), f"store: {operation}"):
                yield
        except Exception as error:
            self.store_errors.labels(operation).inc()
            if isinstance(error, StoreUnavailableError) and error.answer:
                self.count_refusal(PAYLOAD_STORE)
                self.store_outage.failed(error)
            raise
        else:
            if operation in STORE_WRITES:
                self.store_outage.succeeded()
        finally:
            self.store_seconds.labels(operation).observe(perf_counter() - started)

    def count_refusal(self, place: str) -> None:
        """Count a refusal by the store of the journal or of payloads."""
        self.store_refusals.labels(place.replace(" ", "_")).inc()

    def count_report(
        self, token: str, episodes: Mapping[EpisodeKey, Sequence[EpisodeReport]]
    ) -> None:
        """Count finished episodes under their task, or else "other"; drop replaced series."""
        looked_up: set[str] = set()
        for key, of_key in episodes.items():
            # One report replaces at most `capacity` series: a client that invents thousands of
            # tasks does not delay others.
            is_one_more = key.task not in looked_up and len(looked_up) == TASKS_MAX
            if is_one_more:
                task = OTHER
            else:
                looked_up.add(key.task)
                task = self._task_of(key.task, Reporter(token, key.worker_id))
            self._ends_of_task.setdefault(task, set()).add(key.end)
            self.episodes.labels(task, key.end).inc(len(of_key))
            returns, steps = self.episode_return.labels(task), self.episode_steps.labels(task)
            for episode in of_key:
                returns.observe(episode.return_sum)
                steps.observe(episode.step_count)

    def _task_of(self, task: str, reporter: Reporter) -> str:
        task, ended = self._tasks.place(task, reporter)
        if ended is not None:
            for each in self._ends_of_task.pop(ended):
                self.episodes.remove(ended, each)
            self.episode_return.remove(ended)
            self.episode_steps.remove(ended)
        return task


def _observe_each(histogram: Histogram, values: Sequence[int]) -> None:
    """Observe values, equal ones together: one by one each takes two locks."""
    bounds, buckets = histogram._upper_bounds, histogram._buckets  # noqa: SLF001 - it takes one only
    histogram._sum.inc(sum(values))  # noqa: SLF001 - likewise
    for value, count in Counts(values).items():
        buckets[bisect_left(bounds, value)].inc(count)
