"""Tallies say what the library's own histogram would say of the same values."""

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram

from breadbox_server.tallies import TallyHistogram

BUCKETS = (0, 1, 3, 8)
SUFFIXES = [
    "_sum",
    "_count",
    *(f"_bucket:{bound}" for bound in ("0.0", "1.0", "3.0", "8.0", "+Inf")),
]


def sample(registry: CollectorRegistry, suffix: str, buffer: str) -> float | None:
    name, _, bound = suffix.partition(":")
    labels = {"buffer": buffer} | ({"le": bound} if bound else {})
    return registry.get_sample_value(f"breadbox_test{name}", labels)


@pytest.mark.parametrize("seed", range(5))
def test_a_tally_shows_what_a_histogram_of_the_same_values_shows(seed: int) -> None:
    rng = random.Random(seed)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = TallyHistogram("breadbox_test", "values", BUCKETS, registry=ours)
    histogram = Histogram("breadbox_test", "values", ["buffer"], buckets=BUCKETS, registry=theirs)
    for _ in range(20):
        buffer = rng.choice(["a", "b"])
        values = [rng.randrange(12) for _ in range(rng.randrange(1, 8))]
        tally.count(buffer, values)
        for value in values:
            histogram.labels(buffer).observe(value)

    for buffer in ("a", "b"):
        for suffix in SUFFIXES:
            assert sample(theirs, suffix, buffer) == sample(ours, suffix, buffer), suffix


def test_a_deleted_buffer_leaves_no_series_behind() -> None:
    registry = CollectorRegistry()
    tally = TallyHistogram("breadbox_test", "values", BUCKETS, registry=registry)
    tally.count("a", [1])
    tally.forget("a")
    tally.forget("never there")
    assert None is sample(registry, "_count", "a")
