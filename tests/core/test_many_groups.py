"""A group, or a member, costs as much among many others as among few."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER as B
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import (
    AssemblyPolicy,
    BufferConfig,
    SchemaPolicy,
    StalePolicy,
)
from breadbox_server.core.model.events import FetchGranted
from breadbox_server.core.model.ids import (
    FragmentIndex,
    ModelVersion,
    PayloadId,
    RequestId,
    SessionId,
    WorkerId,
)
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    AppendFragments,
    Fetch,
    Fragment,
    Offer,
    Payload,
    ReleaseLease,
    ReleaseMode,
)
from support import growth
from support.inputs import publish_model, start_session

pytestmark = [
    pytest.mark.timeout(120),
    growth.marked,
]
PAYLOAD_IDS: Iterator[int] = count()


def member(group: str, number: int = 0, version: int = 0) -> Fragment:
    return Fragment(
        WorkerId(group),
        FragmentIndex(number),
        SessionId("s"),
        ModelVersion(version),
        ModelVersion(version),
        Payload(PayloadId(f"{next(PAYLOAD_IDS):032x}"), 1),
    )


def groups_of(size: int, **limits: Any) -> BufferSet:
    config = BufferConfig(
        assembly=AssemblyPolicy.GROUPS,
        fragments_per_chunk=size,
        schema=SchemaPolicy.ANY,
        capacity_chunks=100_000,
        **limits,
    )
    buffers = BufferSet(random.Random(0), config)
    buffers.apply(start_session("s", buffer=B), now=0.0)
    return buffers


def append(buffers: BufferSet, fragments: Sequence[Fragment]) -> None:
    answers = buffers.apply(AppendFragments(B, list(fragments)), now=0.0)
    assert [AdmissionOutcome.ADMITTED] * len(fragments) == [each.outcome for each in answers]


def test_a_group_is_let_in_for_a_used_one_without_a_look_at_those_that_are_open() -> None:
    """Where as many are remembered as may be, and a producer began most long ago."""
    new = 64

    def among(open_count: int) -> Callable[[], object]:
        buffers = groups_of(2, workers_max=open_count + new)
        append(buffers, [member(f"open-{each}") for each in range(open_count)])
        append(buffers, [member(f"used-{each}", at) for each in range(new) for at in (0, 1)])
        fetch = Fetch(buffer=B, request_id=RequestId("r"), fragment_count=2 * new, deadline_at=0.0)
        buffers.apply(fetch, now=0.0)
        (granted,) = [each for each in buffers.take_events() if isinstance(each, FetchGranted)]
        buffers.apply(ReleaseLease(B, granted.lease_id, ReleaseMode.CONSUMED), now=0.0)
        append(buffers, [member("first")])
        fragments = [member(f"new-{each}") for each in range(new - 1)]
        return partial(append, buffers, fragments)

    growth.check(among, 8_000, growth_max=2.5)


def test_each_member_offered_costs_as_much_behind_many_of_its_group_as_behind_few() -> None:
    def of(size: int) -> Callable[[], object]:
        buffers = groups_of(1024)
        offer = Offer(B, [member("g", each) for each in range(size)])
        return partial(buffers.apply, offer, now=0.0)

    growth.check(of, 1_023)


def test_each_member_costs_as_much_where_a_fetch_waits_for_many_groups_as_for_few() -> None:
    """A fetch holds newer groups back for older ones, and each member may end that (B35)."""

    def among(open_count: int) -> Callable[[], object]:
        limits = {"stale": StalePolicy.WAIT, "groups_per_version": 8, "staleness_max": 4}
        buffers = groups_of(4, **limits)
        append(buffers, [member(f"old-{each}") for each in range(open_count)])
        buffers.apply(publish_model(3, session_id="s"), now=0.0)
        append(buffers, [member(f"new-{each}", at, 3) for each in range(8) for at in range(4)])
        fetch = Fetch(buffer=B, request_id=RequestId("r"), fragment_count=32, deadline_at=1.0)
        buffers.apply(fetch, now=0.0)
        assert not [each for each in buffers.take_events() if isinstance(each, FetchGranted)]
        return partial(append, buffers, [member(f"old-{each}", 1) for each in range(100)])

    growth.check(among, 2_000, growth_max=2.5)
