"""Rows of one group are replaced and dropped without a look at all others of the group."""

import random
import sys
import time

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER as B
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig
from breadbox_server.core.model.ids import FragmentIndex, PayloadId, SessionId, WorkerId
from breadbox_server.core.model.inputs import AppendFragments, DropMembers, Fragment, Payload
from breadbox_server.core.model.validation import PART_VERSION
from support.inputs import start_session

MEMBERS, PARTS = 1024, 8
PROCESSOR_S_MAX = 4.0
"""Many times what it takes, and a small part of the time with a look at all others."""
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer takes most of the time"),
]


def parts_of(member: int, start: int) -> list[Fragment]:
    return [
        Fragment(
            WorkerId("g"),
            FragmentIndex(member),
            SessionId("s"),
            PART_VERSION,
            PART_VERSION,
            Payload(PayloadId(f"{start + member * PARTS + number:032x}"), 1),
            step_count=0,
            discontinuity=True,
            part=f"p{number}",
            schema_hash=start + 1,
            replaces=True,
        )
        for number in range(PARTS)
    ]


def test_all_rows_of_a_large_group_are_replaced_and_dropped_soon() -> None:
    rows = BufferConfig(assembly=AssemblyPolicy.GROUPS, fragments_per_chunk=0)
    buffers = BufferSet(random.Random(0), rows)
    buffers.apply(start_session("s", buffer=B), now=0.0)
    for member in range(MEMBERS):
        buffers.apply(AppendFragments(B, parts_of(member, 0)), now=0.0)
    began_at = time.process_time()
    for member in range(MEMBERS):
        buffers.apply(AppendFragments(B, parts_of(member, MEMBERS * PARTS)), now=0.0)
    buffers.check_invariants()
    drop = DropMembers(B, (WorkerId("g"),) * MEMBERS, tuple(range(MEMBERS)))
    assert MEMBERS == buffers.apply(drop, now=0.0)
    taken_s = time.process_time() - began_at
    assert taken_s < PROCESSOR_S_MAX, taken_s
    assert [] == buffers[B].members("", ("", -1), 1)
