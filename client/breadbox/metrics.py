"""What a process that uses the library can show to Prometheus.

Needs the package `prometheus-client`, which the library itself does not install. With a registry
of your own, `registry.register(CodecCollector())`; without one:

    with metrics_served("0.0.0.0:9465"):
        ...
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from breadbox.model.errors import InvalidRequestError
from breadbox.payload import CodecReport, codec_reports


class CodecCollector:
    """What the codec `auto` picked in this process, for a registry of prometheus_client.

    Gauges, by `array` (its path, such as "obs.image") and `codec` (such as "zstd:1" or "raw"):

    - `breadbox_codec_picks`: kinds of the array, by type and shape, that get this codec. An array
      of which the first few are still being measured has none yet.
    - `breadbox_codec_saved_ratio`: share of their bytes that the codec saved while it was measured;
      0 for raw.

    At most 256 kinds are remembered, so there are no more series than that. Thread-safe.
    """

    def __init__(self, reports: Callable[[], tuple[CodecReport, ...]] = codec_reports) -> None:
        """Read what `reports` returns at every scrape; by default, of this process."""
        self._reports = reports

    def describe(self) -> list[Any]:
        """Promise nothing in advance: what arrays there are is known later."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metric families.

        Raises:
            ImportError: prometheus-client is not installed.
        """
        from prometheus_client.core import GaugeMetricFamily

        labels = ("array", "codec")
        picks = GaugeMetricFamily(
            "breadbox_codec_picks",
            "Kinds of the array, by type and shape, for which `auto` picked the codec.",
            labels=labels,
        )
        saved = GaugeMetricFamily(
            "breadbox_codec_saved_ratio",
            "Share of the array's bytes that the codec saved while `auto` measured it.",
            labels=labels,
        )
        by_labels = defaultdict(list)
        for report in self._reports():
            by_labels[report.name, report.picked].append(report)
        for names, reports in sorted(by_labels.items()):
            raw_bytes = sum(report.raw_bytes for report in reports)
            encoded_bytes = sum(report.encoded_bytes for report in reports)
            picks.add_metric(names, len(reports))
            saved.add_metric(names, 1.0 - encoded_bytes / raw_bytes)
        yield picks
        yield saved


@contextmanager
def metrics_served(listen: str, *collectors: Any) -> Iterator[str]:
    """Serve this library's metrics over HTTP, from a thread, inside the block.

    Args:
        listen: "HOST:PORT"; port 0 takes a free one.
        *collectors: More to serve, each with `collect` and `describe` as prometheus_client asks.

    Yields:
        The address, "HOST:PORT", with the port that was bound.

    Raises:
        InvalidRequestError: It is no such address, or cannot be listened on.
        ImportError: prometheus-client is not installed.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidRequestError("metrics_listen", f"must be HOST:PORT, got {listen!r}")
    registry = CollectorRegistry()
    for collector in (CodecCollector(), *collectors):
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
