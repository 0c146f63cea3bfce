"""Count what happens, in the series that Prometheus scrapes."""

import logging
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from operator import attrgetter
from time import perf_counter
from typing import Any, Final

from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector

from breadbox.model.errors import ReplayBufferError, StoreFullError, StoreUnavailableError
from breadbox.shared.outages import OutageLog
from breadbox.stores.base import StoreUsage
from breadbox.v1.buffer_pb2 import TaggedGroups
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
    GroupEnded,
    LeaseEnd,
    LeaseEnded,
    TicketsEnded,
    WaitElapsed,
)
from breadbox_server.core.model.inputs import AdmissionOutcome
from breadbox_server.limits import TASKS_MAX
from breadbox_server.metrics.episodes import OTHER, EpisodeKey, Reporter, TaskSeries
from breadbox_server.metrics.series import Series

log = logging.getLogger(__name__)

STORE_WRITES: Final = {"confirm", "keep", "delete"}
"""Operations of the payload store that fail on a full disk."""
STORE_ADDITIONS: Final = {"confirm", "keep"}
"""Those by which payloads come in."""

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
    "tickets": ("ticket_count", "Tickets that are held"),
    "ticket_waiters": ("ticket_waiter_count", "Requests that wait for tickets"),
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


class Metrics(Series):
    """All series of the server. Called from the loop's thread only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.registry = registry
        self._tasks = TaskSeries(TASKS_MAX)
        self._ends_of_task: dict[str, set[str]] = {}
        self._of_buffer: dict[str, dict[tuple[Any, tuple[str, ...]], Any]] = {}
        self._of_token: dict[str, dict[str, Any]] = {}
        # Processor time, memory and open files of this process, under their usual names.
        ProcessCollector(registry=registry)
        self.gauges = {
            name: Gauge(f"breadbox_{name}", text, ["buffer"], registry=registry)
            for name, (_, text) in GAUGES.items()
        }
        self._of_subscriptions = (
            *(self.subscription_lag_chunks, self.subscription_lag_bytes),
            *(self.subscription_lag_seconds, self.subscription_missed_chunks),
        )
        for place in (JOURNAL, PAYLOAD_STORE):
            self.store_refusals.labels(place.replace(" ", "_"))  # Shown from the start, as 0.
        self.store_outage = OutageLog(log, "writing to the payload store")
        self.on_store_full: Callable[[str], None] = lambda words: None
        """Called with the store's words when it has no room for a write."""
        self.store_written_at = 0.0
        """Time of `perf_counter` of the latest write that the store took."""
        self.tokens_usable.set(1)

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
            self._of(buffer, self.fragments, outcome.value).inc(count)
            if outcome is AdmissionOutcome.ADMITTED:
                self._of(buffer, self.admitted_bytes).inc(sum([each.size_bytes for each in alike]))
        for (buffer, reason), use_counts in evicted.items():
            self._of(buffer, self.chunks_evicted, reason.value).inc(len(use_counts))
            _observe_each(self._of(buffer, self.uses_at_eviction), use_counts)

    def _observe_one(self, event: Event) -> None:
        match event:
            case FragmentsDiscarded(buffer=buffer, reason=why, fragment_count=count):
                self._of(buffer, self.fragments_discarded, why.value).inc(count)
            case GroupEnded(buffer=buffer, reason=why):
                self._of(buffer, self.groups_ended, why.value).inc()
            case TicketsEnded(buffer=buffer, end=end, ticket_count=count):
                self._of(buffer, self.tickets_ended, end.value).inc(count)
            case LeaseEnded(buffer=buffer, end=end, staleness=staleness):
                self._of(buffer, self.leases_ended, end.value).inc()
                if end is LeaseEnd.CONSUMED:
                    _observe_each(self._of(buffer, self.staleness_at_release_versions), staleness)
            case FetchGranted(buffer=buffer, fragments=fragments, first_delivery=True):
                self._of(buffer, self.fetch_wait_seconds, "granted").observe(event.wait_s)
                at_grant = [each.staleness for each in fragments]
                _observe_each(self._of(buffer, self.staleness_at_delivery_versions), at_grant)
                size_bytes = sum([each.fragment.payload.size_bytes for each in fragments])
                self._of(buffer, self.delivered_bytes).inc(size_bytes)
            case WaitElapsed(buffer=buffer, wait_s=wait_s):
                self._of(buffer, self.fetch_wait_seconds, "elapsed").observe(wait_s)
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
            values = (each.lag_chunks, each.lag_bytes, lag_s, each.missed_count)
            for metric, value in zip(self._of_subscriptions, values, strict=True):
                self._of(buffer, metric, each.name).set(value)

    def show_step_ends(
        self, buffer: str, ends: Mapping[str, int], left_out: Mapping[str, int]
    ) -> None:
        """Set the steps of a buffer's workers by end, and the number left out by process."""
        for end, count in ends.items():
            self._of(buffer, self.worker_steps, end).set(count)
        self._show_only(
            buffer, self.workers_left_out, {(each,): left_out[each] for each in left_out}
        )

    def show_tagged_groups(self, buffer: str, rows: Iterable[TaggedGroups]) -> None:
        """Set the groups of a buffer by tag, length and what became of them."""
        shown: dict[tuple[str, ...], int] = {}
        for each in rows:
            kind = each.tag, f"{each.length_min}-"
            shown[*kind, "delivered"] = each.delivered_count
            shown[*kind, "dropped"] = each.dropped_count
        self._show_only(buffer, self.tagged_groups, shown)

    def _show_only(self, buffer: str, shown: Any, values: Mapping[tuple[str, ...], int]) -> None:
        """Set a gauge of a buffer by its labels, and drop its other series."""
        children = self._of_buffer.get(buffer, {})
        for metric, labels in list(children):
            if metric is shown and labels not in values:
                del children[metric, labels]
                metric.remove(buffer, *labels)
        for labels, value in values.items():
            self._of(buffer, shown, *labels).set(value)

    def set_waiters(self, buffer: str, waiter_count: int, reason: WaitingFor) -> None:
        """Set the number of waiting fetches under this reason, and 0 under the others."""
        for each in WaitingFor:
            count = waiter_count if each is reason else 0
            self._of(buffer, self.waiters, each.value).set(count)

    def set_store_usage(self, usage: StoreUsage) -> None:
        """Set the gauges of the payload store's size and limit."""
        self.store_used_bytes.set(usage.used_bytes)
        self.store_limit_bytes.set(usage.limit_bytes)
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
        for metric in self._of_subscriptions:
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
            if isinstance(error, StoreFullError):
                self.on_store_full(error.what)
            if isinstance(error, StoreUnavailableError) and error.answer:
                self.count_refusal(PAYLOAD_STORE)
                self.store_outage.failed(error)
            raise
        else:
            if operation in STORE_WRITES:
                self.store_outage.succeeded()
            if operation in STORE_ADDITIONS:
                self.store_written_at = perf_counter()
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
