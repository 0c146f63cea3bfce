"""Tallies say what the library's own histogram would say of the same values."""

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram, Summary

from breadbox_server.metrics.histograms import TallyHistogram, TallySummary

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


def test_a_summary_shows_what_one_that_takes_each_value_shows() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = TallySummary("breadbox_test", "values", registry=ours)
    summary = Summary("breadbox_test", "values", ["task"], registry=theirs)
    for task, values in (("a", [1.0, 2.5]), ("b", [-4.0]), ("a", [0.0, 0.0, 7.0])):
        tally.add(task, len(values), sum(values))
        for value in values:
            summary.labels(task).observe(value)
    tally.add("c", 1, 1.0)
    tally.forget("c")
    for task in ("a", "b", "c"):
        for suffix in ("_sum", "_count"):
            expected = theirs.get_sample_value(f"breadbox_test{suffix}", {"task": task})
            shown = ours.get_sample_value(f"breadbox_test{suffix}", {"task": task})
            assert expected == shown
