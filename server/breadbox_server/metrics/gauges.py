"""Gauges of buffers, refreshed every second."""

from collections.abc import Sequence

from breadbox_server.core.model.description import BufferDescription, SubscriptionDescription
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.metrics.wait_reasons import waiting_for


def show_buffer(
    seen: BufferDescription,
    subscriptions: Sequence[tuple[SubscriptionDescription, float]],
    metrics: Metrics,
) -> None:
    """Refresh the gauges of a buffer.

    Args:
        seen: The buffer as it is now.
        subscriptions: Its named cursors, each with the seconds for which it has been behind.
        metrics: What shows them.
    """
    values = {
        "chunks": seen.chunk_count,
        "retained_chunks": seen.retained_count,
        "open_chunks": seen.open_chunk_count,
        "held_fragments": seen.fragment_count,
        "capacity_chunks": seen.config.capacity_chunks,
        "capacity_bytes": seen.config.capacity_bytes,
        "payload_bytes": seen.payload_bytes,
        "leases": seen.lease_count,
        "workers": seen.worker_count,
    }
    version = seen.model.model_version
    metrics.set_gauges(seen.name, values, -1 if version is None else version)
    metrics.show_subscriptions(seen.name, subscriptions)
    metrics.set_waiters(seen.name, seen.waiter_count, waiting_for(seen))
