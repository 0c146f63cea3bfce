"""What the console says of a buffer follows from what the server said."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from breadbox.model.types import (
    BufferConfig,
    BufferDescription,
    BufferState,
    ChunkEvent,
    FullPolicy,
    WorkerSteps,
)
from breadbox_console.episodes import EpisodeIndex, FragmentKey, SeenFragment, Worker
from breadbox_console.overview import (
    GRANTS_MAX,
    LIVES_MAX,
    BufferHistory,
    describe_batch,
    describe_buffer,
    next_out,
)
from support import growth
from support.console import played, reference


def description(
    *events: ChunkEvent,
    session_id: str = "run",
    full_policy: FullPolicy = FullPolicy.EVICT,
    **state: Any,
) -> BufferDescription:
    return BufferDescription(
        name="default",
        config=BufferConfig(
            staleness_max=2,
            leases_max=4,
            uses_max=2,
            capacity_chunks=10,
            full_policy=full_policy,
        ),
        session_id=session_id,
        model_version=3,
        state=BufferState(**state),
        chunk_events=events,
    )


def fragment(chunk_id: int) -> SeenFragment:
    key = FragmentKey("run", "w0", chunk_id)
    return SeenFragment(key, chunk_id, 0, 0, 32, 0, 1.0, 0, discontinuity=False, types={})


def event(
    number: int, kind: str, *chunk_ids: int, age_s: float = 0.0, value: int = 0
) -> ChunkEvent:
    values = tuple(value for _ in chunk_ids)
    return ChunkEvent(number, kind, age_s, chunk_ids, values)


def history_of(*events: ChunkEvent, oldest: int = 0, **state: Any) -> BufferHistory:
    history = BufferHistory()
    history.head = [reference(played(0), oldest)]
    history.add(100.0, description(*events, **state))
    return history


def test_the_life_of_a_chunk_has_each_grant_its_end_and_why_it_left() -> None:
    history = history_of(
        event(1, "granted", 0, 1, age_s=9, value=2),
        event(2, "returned", 0, 1, age_s=8),
        event(3, "granted", 0, age_s=7, value=3),
        event(4, "expired", 0, age_s=6),
        event(5, "evicted_stale", 0, age_s=5, value=1),
    )

    life = history.lives[0]
    assert [(91.0, 2, "returned", 92.0), (93.0, 3, "expired", 94.0)] == [
        (each["at"], each["staleness"], each["end"], each["ended_at"]) for each in life.grants
    ]
    assert (95.0, "it became stale") == (life.left_at, life.why)
    assert (None, "") == (history.lives[1].left_at, history.lives[1].why)
    assert 5 == history.event_number


def test_a_fragment_is_held_until_its_chunk_has_left_or_older_ones_are_all_that_left() -> None:
    history = history_of(event(1, "evicted_capacity", 5), oldest=3, chunk_count=2)
    assert [False, True, False] == [history.is_held(fragment(at)) for at in (2, 4, 5)]
    history.add(101.0, description(session_id="next"))

    assert not history.is_held(fragment(4))


def test_chunks_that_left_are_counted_by_their_uses() -> None:
    history = history_of(
        event(1, "evicted_used_up", 0, 1, value=2), event(2, "evicted_stale", 2, value=0)
    )

    assert {2: 2, 0: 1} == history.uses


def test_staleness_when_granted_and_when_released_is_kept_for_each_ten_seconds() -> None:
    history = history_of()
    granted = event(1, "granted", 0, 1, value=2)
    consumed, returned = event(2, "consumed", 0, value=5), event(3, "returned", 1, value=9)
    history.add(111.0, description(granted, consumed, returned, waiter_count=1))
    history.add(122.0, description())

    assert [(111.0, 2.0, 5.0, 1.0), (122.0, None, None, 0.0)] == list(history.training)
    assert [("consumed", 5), ("returned", 9)] == [
        (grant["end"], grant["staleness_at_end"])
        for chunk in (0, 1)
        for grant in history.lives[chunk].grants
    ]


def test_the_lives_of_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breadbox_console.overview.LIVES_MAX", 3)
    history = history_of(*(event(at, "evicted_stale", at) for at in range(5)))

    assert LIVES_MAX > 3
    assert [2, 3, 4] == list(history.lives)


def test_a_buffer_that_was_made_anew_has_other_chunks() -> None:
    history = history_of(event(1, "evicted_stale", 0), counters={"chunks_closed": 1})
    history.add(101.0, description())

    assert {} == history.lives


def test_the_latest_batch_is_described_when_counters_were_set_back_by_a_restart() -> None:
    index = EpisodeIndex(steps_max=999, age_s_max=9.0)
    index.add(reference(played(0)), {}, played(0), 90.0)
    history = history_of(event(1, "granted", 0, value=1), counters={"grants": 1})
    history.add(101.0, description())
    said = describe_batch(history, index)

    assert said is not None
    assert [("w0", 1)] == said["workers"]


def test_the_chunks_nearest_to_a_limit_leave_next() -> None:
    head = [
        reference(played(0), 4, uses=1),
        reference(played(1), 5, staleness=2),
        reference(played(2), 6),
    ]
    said = next_out(description(chunk_count_by_staleness={2: 7}, chunk_count=9), head)

    assert [(4, 0, 1), (5, 2, 0), (6, 0, 0)] == [
        (each["chunk"], each["age"], each["uses"]) for each in said["chunks"]
    ]
    assert [
        "for room by 2 more chunks; or used up by 1 more use; or as stale with version 6",
        "for room by 3 more chunks; or as stale with version 4; or used up by 2 more uses",
        "for room by 4 more chunks; or as stale with version 6; or used up by 2 more uses",
    ] == [each["leaves"] for each in said["chunks"]]
    assert (
        "A chunk leaves as stale beyond a staleness of 2; 7 are at it, and leave with version 4."
        == said["limits"][0]
    )


def test_a_batch_has_its_staleness_uses_and_shares_of_workers() -> None:
    index = EpisodeIndex(steps_max=999, age_s_max=9.0)
    for part, uses in (
        *((played(at, worker_id="w1", version=at), 0) for at in (1, 2)),
        (played(3), 1),
    ):
        index.add(reference(part, uses=uses), {}, part, 90.0)
    history = history_of(event(1, "granted", 1, 2, 3, 4, age_s=5, value=1))
    said = describe_batch(history, index)

    assert said is not None
    assert [("w1", 2), ("w0", 1)] == said["workers"]
    assert ([1, 1.0, 1], [(1, 2), (2, 1)]) == (said["staleness"], said["uses"])
    assert (4, 0, 2) == (said["chunks"], said["version_min"], said["version_max"])
    assert 2 == said["version"]  # Of the grant: the first, acted with 1, was 1 behind.


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ({"idle_s": 90.0}, ("Idle", "idle")),
        ({"session_id": ""}, ("Idle", "idle")),
        ({"session_id": "", "counters": {"sessions_started": 1}}, ("Ended", "idle")),
        ({"idle_s": 40.0, "counters": {"uses": 4}}, ("Healthy", "good")),
        ({"counters": {"fragments_admitted": 9, "uses": 4}}, ("Healthy", "good")),
        ({"waiter_count": 1, "waiting_reason": "0 chunks are held"}, ("Starved", "warn")),
        ({"waiter_count": 1, "lease_count": 4}, ("Stalled", "warn")),
        ({"outage": "Redis is gone"}, ("Down", "bad")),
    ],
)
def test_a_status_is_green_only_where_nothing_is_to_be_done(
    state: dict[str, Any], status: tuple[str, str]
) -> None:
    history = history_of()
    for at in (101.0, 102.0):
        history.add(at, description(**state))
    said = describe_buffer(history, EpisodeIndex(steps_max=9, age_s_max=9.0))

    assert status == (said["status"], said["level"])
    assert bool(said["advice"]) == (said["level"] != "good")
    assert (
        None if status[0] in ("Idle", "Ended", "Down") else state.get("waiter_count", 0)
    ) == said["waiters"]


def test_producers_that_wait_while_a_learner_holds_the_chunks_are_named_with_a_remedy() -> None:
    history = history_of()
    for count in (0, 3):
        history.add(
            101.0 + count,
            description(
                full_policy=FullPolicy.BLOCK,
                counters={"fragments_buffer_full": count, "uses": 4},
                chunk_count=4,
                lease_count=1,
            ),
        )
    said = describe_buffer(history, EpisodeIndex(steps_max=9, age_s_max=9.0))

    assert ("Full", "warn") == (said["status"], said["level"])
    assert said["headline"].startswith("The server asks producers to wait: it holds 4 chunks of 10")
    assert any("release leases" in each for each in said["advice"])


@pytest.mark.parametrize(
    ("delivered", "waiters", "status"),
    [(8, 0, ("Healthy", "good")), (0, 0, ("Stale", "warn")), (8, 1, ("Starved", "warn"))],
)
def test_a_buffer_is_stale_only_where_its_learner_goes_short(
    delivered: int, waiters: int, status: tuple[str, str]
) -> None:
    history = history_of()
    for share in (0, 1):
        counters = {"fragments_admitted": 90, "chunks_closed": 90, "chunks_evicted_stale": 80}
        counts = {name: count * share for name, count in (counters | {"uses": delivered}).items()}
        history.add(101.0 + share, description(counters=counts, waiter_count=waiters))
    said = describe_buffer(history, EpisodeIndex(steps_max=9, age_s_max=9.0))

    assert status == (said["status"], said["level"])
    assert (status[0] == "Healthy") == said["headline"].endswith("become stale.")


@pytest.mark.parametrize(
    ("breaks", "problems"), [(3, []), (5, ["dropped steps before 5 of its latest 32 fragments"])]
)
def test_a_worker_that_drops_stale_steps_now_and_then_is_well(
    breaks: int, problems: list[str]
) -> None:
    history = history_of()
    history.add(102.0, description())
    index = EpisodeIndex(steps_max=9, age_s_max=9.0)
    flags = deque([True] * breaks + [False] * (32 - breaks))
    index.workers["w0"] = Worker(last_seen_at=102.0, version=3, breaks=flags)

    assert problems == describe_buffer(history, index)["workers"][0]["problems"]


def test_a_worker_is_silent_only_while_a_session_is_current() -> None:
    problems = []
    for session_id in ("run", ""):
        history = history_of(session_id=session_id)
        history.add(200.0, description(session_id=session_id))
        index = EpisodeIndex(steps_max=9, age_s_max=9.0)
        index.workers["w0"] = Worker(last_seen_at=100.0, seen_at=deque([97.0, 98.0, 99.0, 100.0]))
        problems.append(describe_buffer(history, index)["workers"][0]["problems"])

    assert [["silent for 100 s"], []] == problems


def test_the_worst_workers_come_first_and_both_rates_are_of_chunks() -> None:
    history = history_of()
    history.add(102.0, description(counters={"chunks_closed": 4, "uses": 2}))
    index = EpisodeIndex(steps_max=9, age_s_max=9.0)
    index.workers |= {
        "well": Worker(last_seen_at=102.0, version=3),
        "late": Worker(last_seen_at=102.0, behind=deque([2])),
        "nans": Worker(last_seen_at=102.0, version=3, not_finite=Counter(reward=2)),
    }
    said = describe_buffer(history, index)

    assert ["sent 2 values that are NaN or infinite, in reward"] == said["workers"][0]["problems"]
    assert ["nans", "late", "well"] == [each["name"] for each in said["workers"]]
    assert (2.0, 1.0) == (history.history()["in"][-1], history.history()["out"][-1])


@pytest.mark.parametrize(("others", "named"), [(0, ["stuck"]), (9, [])])
def test_a_worker_whose_array_stands_still_is_named_if_those_of_others_do_not(
    others: int, named: list[str]
) -> None:
    history = history_of()
    index = EpisodeIndex(steps_max=9, age_s_max=9.0)
    for name, count in (("stuck", 9), ("one", others), ("two", others)):
        index.workers[name] = Worker(last_seen_at=100.0, still=Counter({"obs.camera": count}))
    said = describe_buffer(history, index)["workers"]

    assert named == [each["name"] for each in said if each["problems"]]
    assert ["sent the same obs.camera in its latest 9 fragments, unlike others"] * len(named) == [
        problem for each in said for problem in each["problems"]
    ]


@pytest.mark.parametrize(
    ("means", "named"),
    [
        # Median 2.5, and a median distance of 1 from it: far is beyond 8.
        ([1.0, 2.0, 3.0, 10.5], []),
        ([1.0, 2.0, 3.0, 10.6], ["w3"]),
        ([1.0, 2.0, 3.0, -100.0], ["w3"]),
        # Three workers have no others to be unlike; equal ones say nothing of distance.
        ([1.0, 2.0, 100.0], []),
        ([1.0, 1.0, 1.0, 100.0], []),
        ([1.0, 2.0, 3.0, np.inf], []),
    ],
)
def test_a_worker_whose_returns_are_far_from_the_others_is_named(
    means: list[float], named: list[str]
) -> None:
    index = EpisodeIndex(steps_max=9, age_s_max=9.0)
    for at, mean in enumerate(means):
        index.workers[f"w{at}"] = Worker(last_seen_at=100.0, returns=deque([mean - 1, mean + 1]))
    said = describe_buffer(history_of(), index)["workers"]

    assert named == [each["name"] for each in said if each["problems"]]
    finite = {f"w{at}": mean if np.isfinite(mean) else None for at, mean in enumerate(means)}
    assert finite == {each["name"]: each["mean_return"] for each in said}


def test_the_mean_return_of_a_far_worker_and_the_others_are_said() -> None:
    index = EpisodeIndex(steps_max=9, age_s_max=9.0)
    for at, mean in enumerate((1.0, 2.0, 3.0, 100.0)):
        index.workers[f"w{at}"] = Worker(last_seen_at=100.0, returns=deque([mean]))
    said = describe_buffer(history_of(), index)

    assert ["its mean return 100 is far from the others' 2.5"] == said["workers"][0]["problems"]


def test_a_fragment_that_cannot_be_shown_is_said_at_its_worker() -> None:
    index = EpisodeIndex(steps_max=9, age_s_max=9.0)
    for _ in range(2):
        index.note_problem("w0", "sent an unreadable fragment (why)", 100.0)
    (said,) = describe_buffer(history_of(), index)["workers"]

    assert ["sent an unreadable fragment (why), in 2 fragments"] == said["problems"]


def test_workers_are_not_called_silent_while_the_server_cannot_be_asked() -> None:
    history = history_of()
    index = EpisodeIndex(steps_max=9, age_s_max=9.0)
    index.workers["w0"] = Worker(last_seen_at=99.0)

    assert [1.0] == [each["silent_s"] for each in describe_buffer(history, index)["workers"]]


def test_the_share_that_is_trained_on_is_never_above_all_though_the_report_is_older() -> None:
    ahead = WorkerSteps(
        worker_id="w0", acted_count=90, admitted_count=90, trained_count=96, evicted_count=32,
        fragment_step_count=8, steps_per_version=8.0, report_age_s=4.0,
    )  # fmt: skip
    history = history_of(chunk_count=4, counters={"fragments_admitted": 1, "uses": 1})
    later = description(chunk_count=4, counters={"fragments_admitted": 9, "uses": 9})
    unjudged = replace(ahead, worker_id="w1", trained_count=0, evicted_count=0)
    history.add(102.0, replace(later, workers=(ahead, unjudged)))
    index = EpisodeIndex(steps_max=999, age_s_max=9.0)
    for name in ("w0", "w1"):
        part = played(0, worker_id=name)
        index.add(reference(part), {}, part, 90.0)
    shown = describe_buffer(history, index)
    assert {"w0": 0.75, "w1": None} == {row["name"]: row["trained"] for row in shown["workers"]}


def test_environments_that_are_never_trained_on_are_named_though_none_of_their_data_came() -> None:
    """Nothing of theirs arrives, so that the page had no line of them."""
    fast = [
        WorkerSteps(
            worker_id=f"fast-{index}", acted_count=64, admitted_count=64, trained_count=64,
            fragment_step_count=8, report_age_s=1.0,
        )
        for index in range(4)
    ]  # fmt: skip
    slow = WorkerSteps(
        worker_id="slow-0", acted_count=40, dropped_count=40, fragment_step_count=8,
        steps_per_version=1.6, report_age_s=1.0,
    )  # fmt: skip
    history = history_of(chunk_count=4, counters={"fragments_admitted": 1, "uses": 1})
    later = description(chunk_count=4, counters={"fragments_admitted": 9, "uses": 9})
    history.add(102.0, replace(later, workers=(*fast, slow)))
    shown = describe_buffer(history, EpisodeIndex(steps_max=999, age_s_max=9.0))
    assert ("Check workers", "warn") == (shown["status"], shown["level"])
    assert "1 of 5 environments is never trained on (slow-0)." == shown["headline"]
    assert "staleness_max 8." in shown["advice"][0]
    [row] = [row for row in shown["workers"] if row["name"] == "slow-0"]
    assert ["is never trained on: of 40 steps 40 dropped"] == row["problems"]
    assert (0.0, 5.0) == (row["trained"], row["fragment_versions"])
    assert {"trained": 256, "dropped": 40} == shown["steps"]


def used(*, times: int) -> BufferHistory:
    """The history of a buffer with a chunk that was used so often."""
    history = BufferHistory()
    for number in range(times):
        history.add(float(number), description(event(2 * number, "granted", 0)))
        history.add(number + 0.5, description(event(2 * number + 1, "consumed", 0)))
    return history


@growth.marked
def test_each_use_of_a_chunk_that_was_often_used_takes_as_long_to_note_as_the_first() -> None:
    def noting(times: int) -> Callable[[], object]:
        history, chunks = BufferHistory(), [0] * times
        uses = description(event(1, "granted", *chunks), event(2, "consumed", *chunks))
        return lambda: history.add(1.0, uses)

    growth.check(noting, 8192)


def test_of_a_chunk_that_was_often_used_the_latest_grants_are_kept_and_all_uses_counted() -> None:
    times = GRANTS_MAX + 10
    history, index = used(times=times), EpisodeIndex(steps_max=1000, age_s_max=1e9)
    history.add(float(times), description(event(2 * times, "granted", 0)))
    index.add(reference(played(0), chunk_id=0), {}, played(0), -1.0)

    assert [11.0 + number for number in range(GRANTS_MAX)] == [
        grant["at"] for grant in history.lives[0].grants
    ]
    batch = describe_batch(history, index)
    assert batch is not None
    assert [(times + 1, 1)] == batch["uses"]


def test_uses_before_a_chunk_was_read_are_counted_once() -> None:
    times = GRANTS_MAX + 10
    history, index = used(times=times), EpisodeIndex(steps_max=1000, age_s_max=1e9)
    history.add(float(times), description(event(2 * times, "granted", 0)))
    seen = replace(reference(played(0), chunk_id=0), use_count=times)
    index.add(seen, {}, played(0), times - 0.25)

    batch = describe_batch(history, index)
    assert batch is not None
    assert [(times + 1, 1)] == batch["uses"]
