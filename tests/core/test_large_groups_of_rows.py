"""Rows of one group are replaced, dropped, lost and listed without a look at all others of it."""

import random
from functools import partial
from typing import Any

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER as B
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig
from breadbox_server.core.model.ids import (
    FragmentIndex,
    ModelVersion,
    PayloadId,
    SessionId,
    WorkerId,
)
from breadbox_server.core.model.inputs import (
    AppendFragments,
    DropMembers,
    DropPayloads,
    Fragment,
    Payload,
)
from breadbox_server.core.model.validation import PART_VERSION
from support import growth
from support.inputs import start_session

MEMBERS, PARTS = 1024, 8
pytestmark = [
    pytest.mark.timeout(120),
    growth.marked,
]


def parts_of(member: int, start: int) -> list[Fragment]:
    """Its parts; of each member they have another version, as its sequence would."""
    version = ModelVersion(PART_VERSION - MEMBERS + member)
    return [
        Fragment(
            WorkerId("g"),
            FragmentIndex(member),
            SessionId("s"),
            version,
            version,
            Payload(PayloadId(f"{start + member * PARTS + number:032x}"), 1),
            step_count=0,
            discontinuity=True,
            part=f"p{number}",
            schema_hash=start + 1,
            replaces=True,
        )
        for number in range(PARTS)
    ]


def filled(members: int) -> BufferSet:
    """A buffer with one group of so many rows."""
    rows = BufferConfig(assembly=AssemblyPolicy.GROUPS, fragments_per_chunk=0)
    buffers = BufferSet(random.Random(0), rows)
    buffers.apply(start_session("s", buffer=B), now=0.0)
    for member in range(members):
        buffers.apply(AppendFragments(B, parts_of(member, 0)), now=0.0)
    return buffers


def replace(buffers: BufferSet, members: int) -> None:
    for member in range(members):
        buffers.apply(AppendFragments(B, parts_of(member, members * PARTS)), now=0.0)


def drop(buffers: BufferSet, members: int) -> None:
    dropping = DropMembers(B, (WorkerId("g"),) * members, tuple(range(members)))
    assert members == buffers.apply(dropping, now=0.0)
    assert [] == buffers[B].members("", ("", -1), 1)


def lose(buffers: BufferSet, members: int) -> None:
    """As when the store has lost the last part of each row."""
    lost = [PayloadId(f"{(member + 1) * PARTS - 1:032x}") for member in range(members)]
    assert members * PARTS == buffers.apply(DropPayloads(B, tuple(lost)), now=0.0)
    assert [] == buffers[B].members("", ("", -1), 1)


def list_payloads(buffers: BufferSet, members: int) -> None:
    """As fsck and quotas do, and a server that starts."""
    assert sum(1 for _ in buffers[B].payloads()) == members * PARTS
    assert sum(map(len, buffers[B].payload_batches(100))) == members * PARTS


@pytest.mark.parametrize(
    "act", [replace, drop, lose, list_payloads, lambda them, _: them.snapshot()]
)
def test_each_row_of_a_large_group_takes_as_long_as_one_of_a_small(act: Any) -> None:
    growth.check(lambda members: partial(act, filled(members), members), MEMBERS)
