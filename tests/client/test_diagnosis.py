"""Why a learner waits: one case per cause."""

import re
from dataclasses import replace
from typing import Any

import pytest

from breadbox.diagnosis import diagnose, diagnose_arrivals, is_idle, rates_of
from breadbox.model.types import (
    AssemblyPolicy,
    BufferConfig,
    BufferDescription,
    BufferState,
    FullPolicy,
    OpenGroup,
    StalePolicy,
    TaggedGroups,
)

WATCHED_S = 10.0


def buffer(
    *, session_id: str = "s", config: dict[str, Any] | None = None, **state: Any
) -> BufferDescription:
    limits = {
        "fragments_per_chunk": 4,
        "capacity_chunks": 100,
        "capacity_bytes": 1000,
        "staleness_max": 2,
        "uses_max": 1,
        "leases_max": 8,
        "full_policy": FullPolicy.EVICT,
    }
    return BufferDescription(
        name="default",
        config=BufferConfig(**{**limits, **(config or {})}),
        session_id=session_id,
        model_version=5,
        state=BufferState(**state),
    )


def judge(after: BufferDescription, fragment_count: int | None = 40) -> Any:
    return diagnose(buffer(), after, WATCHED_S, fragment_count=fragment_count)


CASES: list[tuple[str, BufferDescription, list[str]]] = [
    ("NO_SESSION", buffer(session_id=""), ["'default'"]),
    ("HOLD", buffer(hold="the journal's disk is full", chunk_count=50), ["journal's disk"]),
    (
        "LEASES",
        buffer(lease_count=8, chunk_count=50, waiting_reason="8 leases are alive"),
        ["8 leases", "leases_max"],
    ),
    (
        "OLDER",
        buffer(
            config={"stale": StalePolicy.WAIT, "groups_per_version": 8},
            chunk_count=9,
            waiter_count=1,
            waiting_reason="group 'x', begun at version 3, is not complete",
        ),
        ["group 'x'", "version 3"],
    ),
    (
        "NOTHING_ARRIVES",
        buffer(
            config={"stale": StalePolicy.WAIT, "groups_per_version": 8},
            chunk_count=7,
            waiter_count=1,
            waiting_reason="7 chunks are held and 8 are needed",
        ),
        ["7 chunks"],
    ),
    ("NOTHING_ARRIVES", buffer(chunk_count=3, worker_count=2), ["10.0 s", "3 chunks", "2 workers"]),
    (
        "WRONG_SESSION",
        buffer(counters={"fragments_wrong_session": 90, "fragments_admitted": 10}),
        ["9 of 10", "'s'"],
    ),
    (
        "STALE",
        buffer(counters={"fragments_stale": 80, "fragments_admitted": 20, "versions_published": 5}),
        ["8 of 10", "staleness_max (2)", "version 5", "0.5 per second"],
    ),
    (
        "STALE",
        buffer(counters={"chunks_evicted_stale": 20, "fragments_admitted": 100}),
        ["8 of 10"],
    ),
    (
        "PRODUCERS_WAIT",
        buffer(
            config={"full_policy": FullPolicy.BLOCK, "capacity_chunks": 5},
            chunk_count=5,
            payload_bytes=990,
            counters={"fragments_bytes_full": 50, "fragments_admitted": 1},
        ),
        ["5 chunks of 5", "990 bytes of 1000"],
    ),
    (
        "TOO_FEW",
        buffer(chunk_count=4, counters={"fragments_admitted": 8, "chunks_closed": 2}),
        ["4 held", "10 needed", "0.2 per second", "about 30 s"],
    ),
    (
        "TOO_FEW",
        buffer(chunk_count=4, open_chunk_count=3, counters={"fragments_admitted": 1}),
        ["none was completed", "3 are open", "4 fragments each"],
    ),
    (
        "QUEUE",
        buffer(
            chunk_count=12,
            waiter_count=3,
            waiting_reason="12 chunks are held and 20 are needed",
            counters={"fragments_admitted": 40, "chunks_closed": 10},
        ),
        ["waiting: 3", "1 chunks per second", "12 chunks are held and 20"],
    ),
    (
        "LIMITER",
        buffer(
            chunk_count=50,
            waiting_reason="60 chunks were delivered",
            counters={"fragments_admitted": 40},
        ),
        ["60 chunks were delivered"],
    ),
    (
        "NONE",
        buffer(
            chunk_count=50, fragment_count=200, lease_count=1, counters={"fragments_admitted": 40}
        ),
        ["200 fragments", "50 chunks", "4 per second"],
    ),
]


@pytest.mark.parametrize(("cause", "after", "numbers"), CASES)
def test_each_cause_is_told_with_its_numbers(
    cause: str, after: BufferDescription, numbers: list[str]
) -> None:
    diagnosis = judge(after)
    assert cause == diagnosis.cause
    assert [] == [number for number in numbers if number not in diagnosis.headline]
    assert (cause == "NONE") == (diagnosis.advice == ())


@pytest.mark.parametrize(
    ("started", "headline", "remedy"),
    [
        (0, "so nothing is admitted.", "Start the learner"),
        (2, "the last session has ended, because its learner is done or was stopped.", "there is"),
    ],
)
def test_a_run_that_has_ended_is_told_from_one_that_was_never_started(
    started: int, headline: str, remedy: str
) -> None:
    diagnosis = judge(buffer(session_id="", counters={"sessions_started": started}))

    assert diagnosis.headline.endswith(headline), diagnosis.headline
    assert remedy in diagnosis.advice[0]


def test_what_stops_everything_is_told_before_what_slows_it() -> None:
    after = buffer(session_id="", chunk_count=0, lease_count=8, waiter_count=3)
    assert "NO_SESSION" == judge(after).cause


@pytest.mark.parametrize("cause", ["NOTHING_ARRIVES", "WRONG_SESSION", "STALE", "PRODUCERS_WAIT"])
def test_what_keeps_fragments_from_coming_is_told_whatever_keeps_fetches(cause: str) -> None:
    after = next(after for named, after, _ in CASES if named == cause)
    leased = replace(after, state=replace(after.state, lease_count=8))
    assert "LEASES" == judge(leased).cause
    assert cause == diagnose_arrivals(buffer(), leased, WATCHED_S).cause
    arriving = buffer(lease_count=8, counters={"fragments_admitted": 10})
    assert "NONE" == diagnose_arrivals(buffer(), arriving, WATCHED_S).cause


def test_one_of_a_kind_has_no_plural() -> None:
    held = buffer(chunk_count=1, counters={"fragments_admitted": 1})
    assert "chunk" in (headline := judge(held, fragment_count=None).headline)
    assert [] == re.findall(r"\b1 \w+s\b", headline)
    silent = judge(buffer(chunk_count=1, worker_count=1)).headline
    assert "1 chunk and has seen 1 worker in" in silent


def test_a_fetch_of_unknown_size_needs_one_chunk() -> None:
    after = buffer(chunk_count=1, counters={"fragments_admitted": 1})
    assert "NONE" == judge(after, fragment_count=None).cause


def test_a_server_that_restarted_meanwhile_gives_no_negative_rate() -> None:
    before = buffer(counters={"fragments_admitted": 100})
    after = buffer(counters={"fragments_admitted": 5})
    assert 0.0 == rates_of(before, after, 1.0)["fragments admitted"]


@pytest.mark.parametrize(
    ("state", "is_told"),
    [
        ({}, True),
        ({"waiter_count": 1}, False),
        ({"lease_count": 1}, False),
        ({"counters": {"uses": 3}}, False),
    ],
)
def test_a_session_that_nobody_learns_from_is_told_with_what_ends_it(
    state: dict[str, Any], is_told: bool
) -> None:
    remedy = "`breadbox buffers end-session default`"
    assert is_told == any(remedy in advice for advice in judge(buffer(**state)).advice)
    assert not any(remedy in advice for advice in judge(buffer(session_id="", **state)).advice)


def test_a_session_in_which_a_version_comes_is_not_idle() -> None:
    after = replace(buffer(), model_version=6)
    assert not is_idle(buffer(), after)
    assert is_idle(after, after)


@pytest.mark.parametrize("arrived", [0, 20])
def test_groups_that_lack_members_are_named_with_these_and_for_how_long(arrived: int) -> None:
    groups = (
        OpenGroup("x", 6, (3, 5), 41.2),
        OpenGroup("y", 7, (0,), 3.0),
        OpenGroup("z", 1, (1, 2, 3), 1.0),
    )
    after = buffer(open_chunk_count=3, open_groups=groups, counters={"fragments_admitted": arrived})
    config = replace(after.config, assembly=AssemblyPolicy.GROUPS, fragments_per_chunk=8)
    found = judge(replace(after, config=config))
    assert ("TOO_FEW" if arrived else "NOTHING_ARRIVES") == found.cause
    told = (
        "Of 3 open groups, group 'x' lacks members 3, 5 for 41 s; group 'y' lacks member 0 for "
        "3 s; group 'z' lacks members 1, 2, 3 and 4 more for 1 s."
    )
    assert found.headline.endswith(told)


@pytest.mark.parametrize(
    ("dropped", "sentence"),
    [
        (
            37,
            "Of 640 groups that ended, 603 are delivered; of task=math, length 4096-: 3 of 40 "
            "groups.",
        ),
        (4, None),
    ],
)
def test_groups_of_a_tag_and_length_that_are_hardly_ever_delivered_are_named(
    dropped: int, sentence: str | None
) -> None:
    rows = (TaggedGroups("easy", 0, 600, 0), TaggedGroups("math", 4096, 3, dropped))
    after = buffer(tagged_groups=rows, counters={"fragments_admitted": 20})
    config = replace(after.config, assembly=AssemblyPolicy.GROUPS, tag="task")
    found = judge(replace(after, config=config))
    assert (sentence is None) == (found.cause != "LEFT_OUT")
    assert sentence in (None, found.headline)


@pytest.mark.parametrize("open_count", [0, 1])
def test_groups_that_were_dropped_as_equal_are_counted(open_count: int) -> None:
    groups = (OpenGroup("x", 7, (3,), 2.0),) * open_count
    after = buffer(open_chunk_count=open_count, open_groups=groups, counters={"groups_equal": 5})
    config = replace(
        after.config, assembly=AssemblyPolicy.GROUPS, fragments_per_chunk=8, drop_equal="reward"
    )
    found = judge(replace(after, config=config))
    assert found.headline.endswith("Dropped because all members had one reward: 5 groups.")
