"""Plain types to the wire and back: total, and nothing lost."""

import dataclasses
import math
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from breadbox.model import errors, types
from breadbox.v1 import buffer_pb2, fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.wire import conversion as wire

INT64 = st.integers(-(2**63), 2**63 - 1)
SPANS_S = st.integers(0, 10**15).map(lambda nanoseconds: nanoseconds * 1e-9)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PAYLOADS = st.builds(types.PayloadReference, TEXT, INT64, INT64)
METADATA = st.builds(
    types.FragmentMetadata,
    worker_id=TEXT,
    fragment_index=INT64,
    session_id=TEXT,
    model_version_min=INT64,
    model_version_max=INT64,
    payload=PAYLOADS,
    step_count=INT64,
    discontinuity=st.booleans(),
)
LIMITERS = st.one_of(
    st.none(),
    st.builds(types.MinimumChunks, INT64),
    st.builds(types.SampleToInsertRatio, st.floats(), st.floats(), INT64, st.floats()),
)
COUNTS = st.none() | INT64
COUNT_NAMES = [
    name
    for name, field in wire.CONFIG.fields.items()
    if field.cpp_type == FieldDescriptor.CPPTYPE_INT64
]
CONFIGS = st.builds(
    types.BufferConfig,
    **dict.fromkeys(COUNT_NAMES, COUNTS),
    full_policy=st.none() | st.sampled_from(types.FullPolicy),
    lease_expiry_policy=st.none() | st.sampled_from(types.LeaseExpiryPolicy),
    lease_s=st.none() | SPANS_S,
    open_chunk_s=st.none() | SPANS_S,
    sampler=st.none() | st.sampled_from(tuple(buffer_pb2.Sampler.DESCRIPTOR.fields_by_name)),
    limiter=LIMITERS,
)


def alike(first: Any, second: Any) -> bool:
    """Equal but for the rounding of spans to nanoseconds, and NaN being itself."""
    if isinstance(first, float) and isinstance(second, float):
        both_nan = math.isnan(first) and math.isnan(second)
        return both_nan or math.isclose(first, second, abs_tol=1e-9)
    if dataclasses.is_dataclass(first) and type(first) is type(second):
        return all(
            alike(getattr(first, field.name), getattr(second, field.name))
            for field in dataclasses.fields(first)
        )
    return bool(first == second)


@given(METADATA)
def test_metadata_comes_back_as_it_was_sent(metadata: types.FragmentMetadata) -> None:
    assert metadata == wire.METADATA.read(wire.to_wire(wire.METADATA, metadata))


@given(CONFIGS)
def test_limits_come_back_as_they_were_sent(config: types.BufferConfig) -> None:
    assert alike(config, wire.config_from_wire(wire.to_wire(wire.CONFIG, config)))


@given(SPANS_S)
def test_a_span_comes_back_to_the_nanosecond(span_s: float) -> None:
    sent = wire.duration("span_s", span_s)
    assert sent is not None
    assert math.isclose(span_s, wire.seconds(sent), rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize("span_s", [-1e-9, -1.0, math.nan, math.inf, -math.inf, 1e18, "1", []])
def test_what_is_no_span_is_refused_by_name(span_s: Any) -> None:
    with pytest.raises(
        errors.InvalidRequestError,
        match=r"span_s must be (at least 0 s and under 1e9 s|a number of seconds), got",
    ):
        wire.duration("span_s", span_s)


def test_an_absent_span_stays_absent() -> None:
    assert wire.duration("span_s", None) is None


def test_every_outcome_of_the_wire_has_its_own_value() -> None:
    read = [wire.outcome_from_wire(number) for number in fragment_pb2.AdmissionOutcome.values()]
    assert sorted(types.AdmissionOutcome, key=str) == sorted(set(read), key=str)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (types.FullPolicy, buffer_pb2.FullPolicy),
        (types.LeaseExpiryPolicy, buffer_pb2.LeaseExpiryPolicy),
        (types.ReleaseMode, pb.ReleaseMode),
        (types.EpisodeEnd, pb.EpisodeEnd),
        (types.AdmissionOutcome, fragment_pb2.AdmissionOutcome),
    ],
)
def test_enums_of_the_library_are_those_of_the_wire(ours: Any, theirs: Any) -> None:
    prefix_length = len(theirs.keys()[0].removesuffix("UNSPECIFIED"))
    wanted = {name[prefix_length:] for name in theirs.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    assert wanted == {member.name for member in ours} - {"UNSPECIFIED"}


def test_an_outcome_of_a_newer_server_reads_as_unspecified() -> None:
    assert types.AdmissionOutcome.UNSPECIFIED == wire.outcome_from_wire(999)


def test_policies_of_a_newer_server_read_as_none() -> None:
    message = buffer_pb2.BufferConfig()
    message.ParseFromString(b"\x30\x63\x38\x63")  # full_policy = 99, lease_expiry_policy = 99
    config = wire.config_from_wire(message)
    assert (None, None) == (config.full_policy, config.lease_expiry_policy)


def test_no_session_is_no_version_whatever_the_wire_says() -> None:
    response = pb.WatchModelResponse(changed=True, model_version=7)
    assert types.ModelState("", None, None) == wire.model_from_wire(response)


def test_version_zero_is_told_from_no_version() -> None:
    response = pb.WatchModelResponse(changed=True, session_id="s", model_version=0)
    assert types.ModelState("s", 0, None) == wire.model_from_wire(response)
    response.ClearField("model_version")
    assert types.ModelState("s", None, None) == wire.model_from_wire(response)


def test_every_field_of_a_buffers_state_is_read() -> None:
    gauges: dict[str, Any] = {
        field.name: field.number
        for field in buffer_pb2.BufferState.DESCRIPTOR.fields
        if field.cpp_type == FieldDescriptor.CPPTYPE_INT64
    }
    state = buffer_pb2.BufferState(
        **gauges,
        idle_duration=Duration(seconds=9),
        waiting_reason="have 1 chunk, need 2",
        outage="the journal does not answer",
        hold="the journal's disk is full",
        session_users="a learner called",
        latest_request_id="r",
        ticket_waiting_reason="all 6 tickets of version 2 are held",
        counters={"b": 2, "a": 1},
        chunk_count_by_staleness={1: 3, 0: 4},
        quarantined=[
            buffer_pb2.QuarantinedFragment(
                worker_id="w", fragment_index=3, session_id="s", payload_id="0" * 32
            )
        ],
        open_groups=[
            buffer_pb2.OpenGroup(
                group="g",
                member_count=1,
                lacking_members=[0, 2],
                silent_duration=Duration(seconds=41),
            )
        ],
        tagged_groups=[
            buffer_pb2.TaggedGroups(tag="t", length_min=256, delivered_count=3, dropped_count=4)
        ],
    )
    read = wire.buffer_from_wire(buffer_pb2.Buffer(name="n", state=state)).state
    for field in dataclasses.fields(types.BufferState):
        assert getattr(read, field.name), field.name
    assert (types.QuarantinedFragment("w", 3, "s", "0" * 32),) == read.quarantined
    assert (types.OpenGroup("g", 1, (0, 2), 41.0),) == read.open_groups
    assert (types.TaggedGroups("t", 256, 3, 4),) == read.tagged_groups
    assert ["a", "b"] == list(read.counters)
    assert [0, 1] == list(read.chunk_count_by_staleness)


def test_an_update_names_its_fields_only_where_some_get_their_default() -> None:
    given = types.BufferConfig(lease_s=3.0, uses_max=2)
    assert wire.update_mask(given, ()) is None
    mask = wire.update_mask(given, ["open_chunk_s", "limiter"])
    assert mask is not None
    assert {"lease_duration", "uses_max", "open_chunk_duration", "limiter"} == set(mask.paths)
    assert set(mask.paths) <= set(buffer_pb2.BufferConfig.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("name", ["uses_max", "lease_duration", "", "uses-max"])
def test_what_cannot_get_its_default_is_refused_by_name(name: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match="reset"):
        wire.update_mask(types.BufferConfig(uses_max=2), [name])


def test_every_limit_can_get_its_default_again() -> None:
    names = [field.name for field in dataclasses.fields(types.BufferConfig)]
    mask = wire.update_mask(types.BufferConfig(), names)
    assert mask is not None
    assert set(mask.paths) == set(buffer_pb2.BufferConfig.DESCRIPTOR.fields_by_name)


def test_what_does_not_fit_a_nested_field_is_named() -> None:
    with pytest.raises(errors.InvalidRequestError, match="ratio"):
        wire.to_wire(
            wire.CONFIG,
            types.BufferConfig(limiter=types.SampleToInsertRatio("a", 1.0)),  # type: ignore[arg-type]
        )
    with pytest.raises(errors.InvalidRequestError, match="limiter"):
        wire.to_wire(wire.CONFIG, types.BufferConfig(limiter="fast"))  # type: ignore[arg-type]


def test_text_in_place_of_a_policy_is_refused_with_the_policies_there_are() -> None:
    problem = r"schema cannot be 'any': must be one of SchemaPolicy\.ONE, .*SchemaPolicy\.ANY$"
    with pytest.raises(errors.InvalidRequestError, match=problem):
        wire.to_wire(wire.CONFIG, types.BufferConfig(schema="any"))  # type: ignore[arg-type]
