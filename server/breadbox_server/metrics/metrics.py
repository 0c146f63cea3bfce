"""Everything that Prometheus scrapes from the server, on a registry that is handed in.

The core does not count for Prometheus: the driver feeds its events in here. Labels are small closed
sets, or bounded by a limit of the server (`buffer` by `buffers_max`, `task` by `TASKS_MAX`).
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
)

from breadbox.model.errors import StoreUnavailableError
from breadbox.shared.outages import OutageLog
from breadbox.stores.base import StoreUsage
from breadbox_server.base.errors import JOURNAL, PAYLOAD_STORE
from breadbox_server.core.model.description import SubscriptionDescription
from breadbox_server.core.model.events import (
    ChunksEvicted,
    Event,
    EvictionReason,
    FetchGranted,
    FragmentJudged,
    FragmentsDiscarded,
    LeaseEnded,
    WaitElapsed,
)
from breadbox_server.core.model.inputs import AdmissionOutcome
from breadbox_server.limits import TASKS_MAX
from breadbox_server.metrics.episodes import EpisodeKey, EpisodeTotals
from breadbox_server.metrics.histograms import TallyHistogram, TallySummary
from breadbox_server.metrics.task_series import OTHER, Reporter, TaskSeries
from breadbox_server.metrics.wait_reasons import WaitingFor

log = logging.getLogger(__name__)

STORE_WRITES: Final = {"confirm", "keep", "delete"}
"""Trips to the payload store that a full disk refuses."""
# From a fetch that finds everything there (well under a millisecond) to the longest wait (5 min).
WAIT_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
# From a unary call over loopback (half a millisecond) to a call that everybody notices.
RPC_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10, 60, 300)
# From one pipelined round trip on a unix socket to the store's timeout.
STORE_BUCKETS_S: Final = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
# Versions: 0 is on-policy; beyond some tens nobody asks.
STALENESS_BUCKETS: Final = (0, 1, 2, 3, 5, 8, 13, 21, 34)
# Deliveries: 1 is on-policy training; replay trainers reuse tens of times.
USES_BUCKETS: Final = (0, 1, 2, 3, 5, 8, 13, 21, 34)

GAUGES: Final = {
    "chunks": "Chunks held for sampling",
    "retained_chunks": "Chunks that left the sampler and are kept for subscriptions",
    "open_chunks": "Chunks being filled",
    "held_fragments": "Fragments of the chunks held for sampling",
    "capacity_chunks": "Chunks that may be held for sampling",
    "capacity_bytes": "Payload bytes that may be held",
    "payload_bytes": "Payload bytes of open chunks, chunks and leases",
    "leases": "Leases alive",
    "workers": "Workers that take part in the session",
}


class Metrics:
    """All series of the server. Called from the loop's thread only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._tasks = TaskSeries(TASKS_MAX)
        self._ends_of_task: dict[str, set[str]] = {}
        self._of_buffer: dict[str, dict[tuple[Any, tuple[str, ...]], Any]] = {}
        self._make_core_series()
        self._make_shell_series()
        # Processor time, memory and open files of this process, under their usual names.
        ProcessCollector(registry=registry)

    def _make_core_series(self) -> None:
        registry = self.registry
        self.judged = Counter(
            "breadbox_fragments", "Fragments judged", ["buffer", "outcome"], registry=registry
        )
        self.admitted_bytes = Counter(
            "breadbox_admitted_bytes", "Payload bytes admitted", ["buffer"], registry=registry
        )
        self.delivered_bytes = Counter(
            "breadbox_delivered_bytes", "Payload bytes granted", ["buffer"], registry=registry
        )
        self.evicted = Counter(
            "breadbox_chunks_evicted", "Chunks that left", ["buffer", "reason"], registry=registry
        )
        self.discarded = Counter(
            "breadbox_fragments_discarded",
            "Fragments of open chunks given up",
            ["buffer", "reason"],
            registry=registry,
        )
        self.leases_ended = Counter(
            "breadbox_leases_ended", "Leases ended", ["buffer", "end"], registry=registry
        )
        self.chunks_read = Counter(
            "breadbox_chunks_read",
            "Chunks returned to readers that read by a cursor",
            ["buffer"],
            registry=registry,
        )
        self.chunks_skipped = Counter(
            "breadbox_chunks_skipped",
            "Chunks that had left before a reader with a cursor came to them",
            ["buffer"],
            registry=registry,
        )
        of_subscription = ["buffer", "subscription"]
        self.lag_chunks = Gauge(
            "breadbox_subscription_lag_chunks",
            "Chunks that a subscription has not acknowledged, and that can be read",
            of_subscription,
            registry=registry,
        )
        self.lag_bytes = Gauge(
            "breadbox_subscription_lag_bytes",
            "Payload bytes of these chunks",
            of_subscription,
            registry=registry,
        )
        self.lag_seconds = Gauge(
            "breadbox_subscription_lag_seconds",
            "Time for which a subscription has not acknowledged what there is",
            of_subscription,
            registry=registry,
        )
        self.missed = Gauge(
            "breadbox_subscription_missed_chunks",
            "Chunks that a retaining subscription lost, since it was created",
            of_subscription,
            registry=registry,
        )
        self.fetch_wait = Histogram(
            "breadbox_fetch_wait_seconds",
            "Time from a fetch to its outcome",
            ["buffer", "outcome"],
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        )
        self.staleness = TallyHistogram(
            "breadbox_staleness_at_delivery_versions",
            "Staleness of a fragment's chunk at its grant",
            STALENESS_BUCKETS,
            registry=registry,
        )
        self.uses = TallyHistogram(
            "breadbox_uses_at_eviction",
            "Deliveries of a chunk when it left",
            USES_BUCKETS,
            registry=registry,
        )
        self.gauges = {
            name: Gauge(f"breadbox_{name}", text, ["buffer"], registry=registry)
            for name, text in GAUGES.items()
        }
        self.waiters = Gauge(
            "breadbox_waiters",
            "Fetches that wait, by what the first of them waits for",
            ["buffer", "reason"],
            registry=registry,
        )
        self.model_version = Gauge(
            "breadbox_model_version", "Current model version", ["buffer"], registry=registry
        )

    def _make_shell_series(self) -> None:
        registry = self.registry
        self.payloads_missing = Counter(
            "breadbox_payloads_missing",
            "Fragments refused because the store does not have their payload",
            ["buffer"],
            registry=registry,
        )
        self.payloads_lost = Counter(
            "breadbox_payloads_lost",
            "Payloads that the store lost although they were confirmed",
            ["buffer"],
            registry=registry,
        )
        self.rpcs = Counter(
            "breadbox_rpcs", "Calls answered", ["method", "code"], registry=registry
        )
        self.token_calls = Counter(
            "breadbox_token_calls",
            "Calls answered to holders of a token whose role may make them",
            ["token", "code"],
            registry=registry,
        )
        self._of_token: dict[str, dict[str, Any]] = {}
        """By the names of tokens that are known."""
        self.rpc_seconds = Histogram(
            "breadbox_rpc_seconds",
            "Time from a call's arrival to its answer",
            ["method"],
            buckets=RPC_BUCKETS_S,
            registry=registry,
        )
        self.calls = Gauge("breadbox_calls", "Calls in progress", registry=registry)
        self.messages_arriving = Gauge(
            "breadbox_messages_arriving", "Calls whose requests are on their way", registry=registry
        )
        self.untaken_bytes = Gauge(
            "breadbox_untaken_bytes",
            "Bytes of answers that are made and not taken, but for small ones",
            registry=registry,
        )
        self.calls_refused = Counter(
            "breadbox_calls_refused",
            "Calls for which there was no place, or whose requests did not come",
            ["limit"],
            registry=registry,
        )
        self.connections = Gauge(
            "breadbox_connections", "Connections to the port of the calls", registry=registry
        )
        self.connections_closed = Counter(
            "breadbox_connections_closed",
            "Connections that were hung up on: floods, untaken answers, idle in a full house",
            ["reason"],
            registry=registry,
        )
        self.store_seconds = Histogram(
            "breadbox_store_seconds",
            "Time of one round trip to the payload store",
            ["operation"],
            buckets=STORE_BUCKETS_S,
            registry=registry,
        )
        self.store_errors = Counter(
            "breadbox_store_errors", "Failed trips to the store", ["operation"], registry=registry
        )
        self.store_used = Gauge(
            "breadbox_store_used_bytes", "Everything in the payload store", registry=registry
        )
        self.store_limit = Gauge(
            "breadbox_store_limit_bytes",
            "Where the payload store refuses to take more; 0: it has no limit of its own",
            registry=registry,
        )
        self.gateway_bytes = Counter(
            "breadbox_gateway_bytes",
            "Payload bytes that passed through the gateway; direction: in, out",
            ["direction"],
            registry=registry,
        )
        self.gateway_calls = Gauge(
            "breadbox_gateway_calls", "Calls that move payloads", registry=registry
        )
        self.gateway_unannounced = Gauge(
            "breadbox_gateway_unannounced_bytes",
            "Payload bytes written through the gateway and not announced",
            registry=registry,
        )
        self.deleted = Counter(
            "breadbox_payloads_deleted", "Payloads deleted from the store", registry=registry
        )
        self.pending_deletions = Gauge(
            "breadbox_pending_deletions", "Payloads that wait for deletion", registry=registry
        )
        self.waiting_appends = Gauge(
            "breadbox_waiting_appends", "Appends that wait for room", registry=registry
        )
        self.pending_appends = Gauge(
            "breadbox_pending_appends", "Fragments that wait for admission", registry=registry
        )
        self.token_workers = Gauge(
            "breadbox_token_workers",
            "Workers of current sessions that appended under a token",
            ["token"],
            registry=registry,
        )
        self.token_bytes = Gauge(
            "breadbox_token_bytes",
            "Payload bytes held that were appended under a token with a quota of them",
            ["token"],
            registry=registry,
        )
        self.quota_refusals = Counter(
            "breadbox_quota_refusals",
            "Appends, and reports of episodes, refused because of a token's quota",
            ["token", "quota"],
            registry=registry,
        )
        self.journal_seconds = Histogram(
            "breadbox_journal_seconds",
            "Time from the first decision of a turn until the turn is durable",
            buckets=STORE_BUCKETS_S,
            registry=registry,
        )
        self.journal_entries = Counter(
            "breadbox_journal_entries", "Entries made durable", registry=registry
        )
        self.journal_lag = Gauge(
            "breadbox_journal_lag_seconds",
            "Time for which the oldest decision has waited to become durable",
            registry=registry,
        )
        self.leads = Gauge(
            "breadbox_leads",
            "1: this server writes the journal; 0: it stands by, is not certain of its journal, or "
            "has not begun to serve",
            registry=registry,
        )
        self.standby_lag = Gauge(
            "breadbox_standby_lag_seconds",
            "Time for which a server that stands by may not have been as the journal is",
            registry=registry,
        )
        self.standby_lag_turns = Gauge(
            "breadbox_standby_lag_turns",
            "Turns in the journal that a server that stands by has not replayed yet",
            registry=registry,
        )
        self.store_refusals = Counter(
            "breadbox_store_refusals",
            "Answers by which journal or payload store refused what they were asked, as when the "
            "disk of Redis is full",
            ["place"],
            registry=registry,
        )
        for place in (JOURNAL, PAYLOAD_STORE):
            self.store_refusals.labels(place.replace(" ", "_"))  # Shown from the start, as 0.
        self.store_outage = OutageLog(log, "writing to the payload store")
        self.silence = Gauge(
            "breadbox_silence_seconds",
            "Time for which journal or payload store have owed the server an answer",
            ["place"],
            registry=registry,
        )
        self.snapshots = Counter(
            "breadbox_journal_snapshots", "Snapshots attempted", ["outcome"], registry=registry
        )
        self.journal_replay = Gauge(
            "breadbox_journal_replay_seconds",
            "CPU time that a restart would need for the turns since the last snapshot",
            registry=registry,
        )
        self.journals_begun_again = Counter(
            "breadbox_journal_begun_again",
            "Journals that could not have been read back, begun again from memory",
            registry=registry,
        )
        self.watchers = Gauge(
            "breadbox_watchers", "Callers that watch the model", registry=registry
        )
        self.readers = Gauge(
            "breadbox_readers", "Callers that wait for chunks to read", registry=registry
        )
        self.read_leases = Gauge(
            "breadbox_read_leases", "Leases of readers with a cursor", registry=registry
        )
        self.read_leases_ended = Counter(
            "breadbox_read_leases_ended",
            "Leases of readers with a cursor that ended; crowded: to make room",
            ["end"],
            registry=registry,
        )
        self.read_kept_bytes = Gauge(
            "breadbox_read_kept_bytes",
            "Payload bytes that left the buffers, and that a reader holds a lease on",
            registry=registry,
        )
        self.clients = Gauge(
            "breadbox_clients",
            "Connections that called within the last minute, by what they called",
            ["role"],
            registry=registry,
        )
        self.credential_failures = Counter(
            "breadbox_credential_reload_failures",
            "Changed token or certificate files that could not be used; the old ones stay",
            registry=registry,
        )
        self.tokens_usable = Gauge(
            "breadbox_tokens_usable",
            "0: the token file cannot be used; after 5 minutes of that nobody is let in",
            registry=registry,
        )
        self.tokens_usable.set(1)
        self.episodes = Counter(
            "breadbox_episodes", "Episodes reported", ["task", "end"], registry=registry
        )
        self.episode_return = TallySummary(
            "breadbox_episode_return", "Sum of rewards of an episode", registry=registry
        )
        self.episode_steps = TallySummary(
            "breadbox_episode_steps", "Steps of an episode", registry=registry
        )

    def observe(self, events: Iterable[Event]) -> None:
        """Count what the core says happened."""
        # One by one, fragments and chunks would take a lock each; of one turn they are summed.
        judged: dict[tuple[str, AdmissionOutcome], list[int]] = {}
        evicted: dict[tuple[str, EvictionReason], list[int]] = {}
        for event in events:
            if type(event) is FragmentJudged:
                judged.setdefault((event.buffer, event.outcome), []).append(event.size_bytes)
            elif type(event) is ChunksEvicted:
                evicted.setdefault((event.buffer, event.reason), []).extend(event.use_counts)
            else:
                self._observe_one(event)
        for (buffer, outcome), sizes_bytes in judged.items():
            self._of(buffer, self.judged, outcome.value).inc(len(sizes_bytes))
            if outcome is AdmissionOutcome.ADMITTED:
                self._of(buffer, self.admitted_bytes).inc(sum(sizes_bytes))
        for (buffer, reason), use_counts in evicted.items():
            self._of(buffer, self.evicted, reason.value).inc(len(use_counts))
            self.uses.count(buffer, use_counts)

    def _observe_one(self, event: Event) -> None:
        match event:
            case FragmentsDiscarded(buffer=buffer, reason=why, fragment_count=count):
                self._of(buffer, self.discarded, why.value).inc(count)
            case LeaseEnded(buffer=buffer, end=end):
                self._of(buffer, self.leases_ended, end.value).inc()
            case FetchGranted():
                self._observe_grant(event)
            case WaitElapsed(buffer=buffer, wait_s=wait_s):
                self._of(buffer, self.fetch_wait, "elapsed").observe(wait_s)
            case _:
                pass

    def _observe_grant(self, grant: FetchGranted) -> None:
        if not grant.first_delivery:
            return
        self._of(grant.buffer, self.fetch_wait, "granted").observe(grant.wait_s)
        self.staleness.count(grant.buffer, [item.staleness for item in grant.fragments])
        size_bytes = sum(item.fragment.payload.size_bytes for item in grant.fragments)
        self._of(grant.buffer, self.delivered_bytes).inc(size_bytes)

    def set_gauges(self, buffer: str, values: Mapping[str, int], model_version: int) -> None:
        """Show how a buffer stands; `values` has the keys of `GAUGES`."""
        for name, value in values.items():
            self._of(buffer, self.gauges[name]).set(value)
        self._of(buffer, self.model_version).set(model_version)

    def set_waiters(self, buffer: str, waiter_count: int, reason: WaitingFor) -> None:
        """Show how many fetches wait; those of the other reasons are then none."""
        for each in WaitingFor:
            count = waiter_count if each is reason else 0
            self._of(buffer, self.waiters, each.value).set(count)

    def set_store_usage(self, usage: StoreUsage) -> None:
        """Show how full the payload store is."""
        self.store_used.set(usage.used_bytes)
        self.store_limit.set(usage.limit_bytes)

    def count_read(self, buffer: str, chunk_count: int, skipped_count: int) -> None:
        """Count the chunks that a reader with a cursor got, and those it missed."""
        if chunk_count:
            self._of(buffer, self.chunks_read).inc(chunk_count)
        if skipped_count:
            self._of(buffer, self.chunks_skipped).inc(skipped_count)

    def show_subscriptions(
        self, buffer: str, seen: Iterable[tuple[SubscriptionDescription, float]]
    ) -> None:
        """Show how far each named cursor of a buffer is behind, and what it lost."""
        for each, lag_s in seen:
            self._of(buffer, self.lag_chunks, each.name).set(each.lag_chunks)
            self._of(buffer, self.lag_bytes, each.name).set(each.lag_bytes)
            self._of(buffer, self.lag_seconds, each.name).set(lag_s)
            self._of(buffer, self.missed, each.name).set(each.missed_count)

    def forget_subscription(self, buffer: str, name: str) -> None:
        """Drop the series of a deleted subscription."""
        children = self._of_buffer.get(buffer, {})
        for metric in (self.lag_chunks, self.lag_bytes, self.lag_seconds, self.missed):
            if children.pop((metric, (name,)), None) is not None:
                metric.remove(buffer, name)

    def count_missing(self, buffer: str, fragment_count: int) -> None:
        """Count fragments whose payload the store does not have."""
        self._of(buffer, self.payloads_missing).inc(fragment_count)

    def count_lost(self, buffer: str, payload_count: int) -> None:
        """Count payloads that the store lost."""
        self._of(buffer, self.payloads_lost).inc(payload_count)

    def count_token_call(self, token: str, code: str) -> None:
        """Count an answer to a caller with this token; not of one that is known no more."""
        children = self._of_token.get(token)
        if children is None:
            return
        child = children.get(code)
        if child is None:
            child = children[code] = self.token_calls.labels(token, code)
        child.inc()

    def know_tokens(self, names: Collection[str]) -> None:
        """Say which tokens there are; the series of others are dropped."""
        for token in self._of_token.keys() - set(names):
            for code in self._of_token.pop(token):
                self.token_calls.remove(token, code)
        for token in names:
            self._of_token.setdefault(token, {})

    def forget_buffer(self, buffer: str) -> None:
        """Drop the series of a deleted buffer, so that names that come and go leave none behind."""
        for metric, labels in self._of_buffer.pop(buffer, {}):
            metric.remove(buffer, *labels)
        self.staleness.forget(buffer)
        self.uses.forget(buffer)

    def _of(self, buffer: str, metric: Any, *labels: str) -> Any:
        """The child of a metric for a buffer; the library's own look-up takes a lock each time."""
        children = self._of_buffer.setdefault(buffer, {})
        key = (metric, labels)
        child = children.get(key)
        if child is None:
            child = children[key] = metric.labels(buffer, *labels)
        return child

    @contextmanager
    def store_trip(self, operation: str) -> Iterator[None]:
        """Time one round trip to the store, and count it if it fails."""
        started = perf_counter()
        try:
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
        """Count an answer by which the journal's store, or that of payloads, refused."""
        self.store_refusals.labels(place.replace(" ", "_")).inc()

    def count_report(self, token: str, totals: Mapping[EpisodeKey, EpisodeTotals]) -> None:
        """Count finished episodes, as their task or, where there is no room for that, as "other".

        The series of a task that made room for one of these are dropped; see `TaskSeries`.

        Args:
            token: Name of the token that they were reported under; empty without one.
            totals: All of the report.
        """
        looked_up: set[str] = set()
        for key, of_key in totals.items():
            # One report finds room for no more than there is: a caller that invents tasks by the
            # thousand delays no other with it.
            is_one_more = key.task not in looked_up and len(looked_up) == TASKS_MAX
            if is_one_more:
                task = OTHER
            else:
                looked_up.add(key.task)
                task = self._task_of(key.task, Reporter(token, key.worker_id))
            self._ends_of_task.setdefault(task, set()).add(key.end)
            self.episodes.labels(task, key.end).inc(of_key.episode_count)
            self.episode_return.add(task, of_key.episode_count, of_key.return_sum)
            self.episode_steps.add(task, of_key.episode_count, of_key.step_count)

    def _task_of(self, task: str, reporter: Reporter) -> str:
        task, ended = self._tasks.place(task, reporter)
        if ended is not None:
            for each in self._ends_of_task.pop(ended):
                self.episodes.remove(ended, each)
            self.episode_return.forget(ended)
            self.episode_steps.forget(ended)
        return task
