"""What the core says happened, in the numbers that Prometheus reads."""

from prometheus_client import CollectorRegistry

from breadbox_server.core.model.events import (
    ChunksEvicted,
    EvictionReason,
    FragmentsJudged,
    LeaseEnd,
    LeaseEnded,
)
from breadbox_server.core.model.ids import BufferName
from breadbox_server.core.model.inputs import AdmissionOutcome
from breadbox_server.metrics.metrics import Metrics

ONE, OTHER = BufferName("one"), BufferName("other")
ADMITTED, STALE = AdmissionOutcome.ADMITTED, AdmissionOutcome.STALE
CAPACITY, USED_UP = EvictionReason.CAPACITY, EvictionReason.USED_UP


def test_events_of_one_turn_are_summed_by_buffer_and_label() -> None:
    registry = CollectorRegistry()
    Metrics(registry).observe(
        [
            FragmentsJudged(ONE, ADMITTED, 1, 10),
            ChunksEvicted(ONE, CAPACITY, (0, 2), (0, 1)),
            FragmentsJudged(OTHER, ADMITTED, 1, 100),
            FragmentsJudged(ONE, STALE, 1, 1000),
            LeaseEnded(ONE, LeaseEnd.CONSUMED, (3, 4), (5, 0)),
            LeaseEnded(ONE, LeaseEnd.RETURNED, (6,), (9,)),
            FragmentsJudged(ONE, ADMITTED, 2, 20),
            ChunksEvicted(ONE, CAPACITY, (5,), (2,)),
            ChunksEvicted(ONE, USED_UP, (1,), (4,)),
        ]
    )

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"breadbox_{name}", labels)

    assert 3 == value("fragments_total", buffer=ONE, outcome="admitted")
    assert 1 == value("fragments_total", buffer=ONE, outcome="stale")
    assert 1 == value("fragments_total", buffer=OTHER, outcome="admitted")
    assert [30, 100] == [value("admitted_bytes_total", buffer=name) for name in (ONE, OTHER)]
    assert 3 == value("chunks_evicted_total", buffer=ONE, reason="capacity")
    assert 1 == value("chunks_evicted_total", buffer=ONE, reason="used_up")
    assert 8 == value("uses_at_eviction_sum", buffer=ONE)
    assert 4 == value("uses_at_eviction_count", buffer=ONE)
    at_most = [value("uses_at_eviction_bucket", buffer=ONE, le=f"{uses}.0") for uses in range(3)]
    assert [1, 2, 3] == at_most
    assert 4 == value("uses_at_eviction_bucket", buffer=ONE, le="+Inf")
    assert 1 == value("leases_ended_total", buffer=ONE, end="consumed")
    # What was returned was not trained on.
    assert [2, 5] == [
        value(f"staleness_at_release_versions_{each}", buffer=ONE) for each in ("count", "sum")
    ]
