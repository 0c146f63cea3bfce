"""Serve a rollout worker's metrics to Prometheus."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from breadbox.model.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """Counts since a worker's start."""

    step_count: int
    fragments: dict[str, int]
    """Number of fragments by outcome, see `Sender.counts`."""
    failures: dict[str, int]
    """Number of failures of environments, by kind."""
    waiting_fragment_count: int
    live_env_count: int
    blocked_s: float
    """Seconds for which a full queue blocked the environments."""
    steps: dict[str, int] = field(default_factory=dict)
    """Number of steps by what became of them, see `breadbox.shared.step_ends`."""
    slow_env_count: int = 0
    """Environments of which one fragment after the other became stale before it was full."""


class WorkerCollector:
    """A worker's counts for prometheus_client. Thread-safe."""

    def __init__(self, counts: Callable[[], WorkerCounts]) -> None:
        """Call *counts* at every scrape."""
        self._counts = counts

    def describe(self) -> list[Any]:
        """Return nothing: outcomes and kinds are not known in advance."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts, prefix = self._counts(), "breadbox_rollout"
        yield CounterMetricFamily(
            f"{prefix}_steps", "Steps answered by environments.", counts.step_count
        )
        for name, text, label, by_label in (
            ("steps_by_end", "Steps by what became of them.", "end", counts.steps),
            ("fragments", "Fragments by outcome.", "outcome", counts.fragments),
            ("failures", "Failures of environments.", "kind", counts.failures),
        ):
            family = CounterMetricFamily(f"{prefix}_{name}", text, labels=(label,))
            for value, count in sorted(by_label.items()):
                family.add_metric((value,), count)
            yield family
        yield CounterMetricFamily(
            f"{prefix}_blocked_seconds",
            "Time for which a full queue of fragments held up the environments.",
            counts.blocked_s,
        )
        yield GaugeMetricFamily(
            f"{prefix}_waiting_fragments",
            "Fragments that wait to be sent.",
            counts.waiting_fragment_count,
        )
        yield GaugeMetricFamily(
            f"{prefix}_slow_environments",
            "Environments of which each fragment becomes stale before it is full.",
            counts.slow_env_count,
        )
        yield GaugeMetricFamily(
            f"{prefix}_live_environments",
            "Environments that run: not those being started.",
            counts.live_env_count,
        )


@contextmanager
def metrics_served(listen: str, *collectors: Any) -> Iterator[str]:
    """Serve collectors over HTTP, from a thread, inside the block; yield the bound "HOST:PORT".

    Port 0 takes a free one. InvalidRequestError if the address cannot be listened on.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidRequestError("metrics_listen", f"must be HOST:PORT, got {listen!r}")
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise InvalidRequestError(
            "metrics_listen", f"{listen} cannot be listened on: {error}"
        ) from error
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
