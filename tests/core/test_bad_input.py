"""Malformed input: each is refused with the field's name, and changes nothing (B14)."""

import dataclasses
import random
from typing import Any

import pytest

from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import (
    BufferConfig,
    MinimumChunks,
    SampleToInsertRatio,
)
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.inputs import AdmissionOutcome, Payload
from breadbox_server.core.model.validation import check_fragment
from breadbox_server.core.rules.intake import INDEX_JUMP_MAX
from core.world import World
from support.inputs import named_payload
from support.metadata import make_fragment, make_payload

BAD_NAMES = ["", "a/b", "a\\b", "a\nb", "a\x00b", "x" * 129, "ä" * 65, "\ud800", "a\u202eb", 7]
GOOD_PAYLOAD_ID = "0123456789abcdef" * 2


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_malformed_ids_are_refused_everywhere(name: str) -> None:
    world = World()
    snapshot = world.buffers.snapshot()
    for act in (
        lambda: world.start(name),
        lambda: world.end(name),
        lambda: world.publish(1, session_id=name),
        lambda: check_fragment(make_fragment(name)),
        lambda: check_fragment(make_fragment("w0", session_id=name)),
        lambda: world.fetch(request_id=name),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            act()
        assert name in ("", 7) or name not in str(caught.value)
    assert snapshot == world.buffers.snapshot()


def test_ids_at_their_limits_are_taken() -> None:
    world = World()
    for name in ("x" * 128, "ä" * 64, "a b.c:d@e"):
        assert "admitted" == world.append(name).value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fragment_index", -1),
        ("fragment_index", 2**48 + 1),
        ("fragment_index", 0.0),
        ("fragment_index", False),
        ("model_version_min", -1),
        ("model_version_max", 2**53 + 1),
        ("model_version_min", 1),
        ("step_count", 0),
        ("step_count", 2**31 + 1),
        ("payload", named_payload("0" * 31)),
        ("payload", named_payload("0" * 31 + "A")),
        ("payload", named_payload("../" + "0" * 29)),
        ("payload", named_payload("0" * 32 + "\n")),
        ("payload", Payload(7, 1)),  # type: ignore[arg-type]
        ("payload", named_payload(GOOD_PAYLOAD_ID, 0)),
        ("payload", named_payload(GOOD_PAYLOAD_ID, 2**41)),
        ("payload", named_payload(GOOD_PAYLOAD_ID, 1, -1)),
    ],
)
def test_malformed_fragments_are_refused_before_they_are_offered(field: str, value: Any) -> None:
    check_fragment(make_fragment())
    with pytest.raises(InvalidArgumentError):
        check_fragment(dataclasses.replace(make_fragment(), **{field: value}))


def test_huge_index_within_the_limit_is_a_gap_and_costs_nothing() -> None:
    world = World()
    world.append(index=0)
    assert "admitted" == world.append(index=2**20).value
    assert "duplicate" == world.append(index=5).value


def test_malformed_weights_are_refused() -> None:
    world = World()
    bad = dataclasses.replace(make_payload(), size_bytes=-1)
    with pytest.raises(InvalidArgumentError, match=r"weights\.size_bytes"):
        world.publish(1, weights=bad)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fragments_per_chunk", 0),
        ("fragments_per_chunk", 1025),
        ("capacity_chunks", 0),
        ("capacity_chunks", -5),
        ("capacity_chunks", 2**41),
        ("capacity_chunks", float("nan")),
        ("capacity_chunks", True),
        ("capacity_bytes", 0),
        ("staleness_max", -1),
        ("uses_max", 0),
        ("waiters_max", 0),
        ("leases_max", 0),
        ("workers_max", 0),
        ("outcomes_per_worker_max", 0),
        ("requests_remembered_max", 0),
        ("lease_s", 0.0),
        ("lease_s", -1.0),
        ("lease_s", float("nan")),
        ("open_chunk_s", float("inf")),
        ("retry_delay_s", 90_000.0),
        ("retry_delay_s", "1"),
        ("limiter", MinimumChunks(0)),
        ("limiter", MinimumChunks(4097)),
        ("limiter", SampleToInsertRatio(0.0, 1.0)),
        ("limiter", SampleToInsertRatio(float("nan"), 1.0)),
        ("limiter", SampleToInsertRatio(2.0, 1.0)),
        ("limiter", SampleToInsertRatio(0.5, 0.5)),
        ("limiter", SampleToInsertRatio(1.0, float("inf"))),
        ("limiter", SampleToInsertRatio(1.0, 2.0, minimum_chunk_count=0)),
        ("limiter", SampleToInsertRatio(1.0, 2.0, lead_chunks=3.1)),
        ("limiter", SampleToInsertRatio(1.0, 2.0, lead_chunks=float("-inf"))),
        ("limiter", SampleToInsertRatio(1.0, 2.0, lead_chunks=float("nan"))),
    ],
)
def test_limits_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    """B15."""
    with pytest.raises(InvalidArgumentError) as caught:
        BufferConfig(**{name: value})
    assert caught.value.field.startswith(name)


def test_largest_fetch_is_capacity_in_fragments() -> None:
    assert 12 == BufferConfig(fragments_per_chunk=3, capacity_chunks=4).capacity_fragments


def test_unknown_sampler_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidArgumentError, match="sampler"):
        BufferSet(random.Random(1), BufferConfig(sampler="best"))


def test_an_index_that_leaves_out_more_than_may_be_is_refused_with_the_next() -> None:
    world = World()
    world.append("w0", 0)
    with pytest.raises(InvalidArgumentError, match=r"the next of worker 'w0' .* is 1, and at most"):
        world.append("w0", INDEX_JUMP_MAX + 2)
    assert world.append("w0", INDEX_JUMP_MAX + 1) is AdmissionOutcome.ADMITTED
