"""When snapshots are made, and what becomes of the turns that they make old."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from breadbox_server.journal import compaction, compactor
from breadbox_server.journal.compaction import Compaction
from breadbox_server.journal.storage.interface import JournalError
from breadbox_server.journal.storage.place import JournalPlace
from breadbox_server.journal.turn_journal import (
    REPLAY_BYTES_MAX,
    REPLAY_S_MAX,
    Extent,
    TurnJournal,
)
from breadbox_server.metrics.metrics import Metrics
from support.eventually import eventually

ENTRIES_MAX = 100


class Trimmer:
    """A writer that can only trim, some portions for each snapshot."""

    carries_payloads = False

    def __init__(self) -> None:
        self.claim = SimpleNamespace(journal="journal", epoch=1)
        self.portions = 0
        self.trimmed: list[int] = []

    def has_room(self) -> bool:
        return True

    async def trim(self, up_to: int) -> bool:
        self.trimmed.append(up_to)
        self.portions -= 1
        return self.portions > 0


class Bench:
    """A compaction whose process is a function of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, grown_entries: int = 0) -> None:
        monkeypatch.setattr(compaction, "PERIOD_S", 0.0)
        monkeypatch.setattr(compaction, "TRIM_PAUSE_S", 0.0)
        self.now = 0.0
        self.nicenesses: list[int] = []
        """Of the compactors that were started."""
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(compaction, "monotonic", lambda: self.now)
        self.trimmer = Trimmer()
        # So that the backlog is urgent at half of REPLAY_S_MAX, far above ENTRIES_MAX.
        self.journal = TurnJournal(
            self.trimmer,  # type: ignore[arg-type]
            1,
            chain=0,
            grown_entries=grown_entries,
            entry_s=REPLAY_S_MAX / (20 * ENTRIES_MAX),
        )
        self.metrics = Metrics(CollectorRegistry())
        self.damages: list[JournalError] = []
        self.compaction = Compaction(
            JournalPlace("sqlite", "/nowhere"),
            self.trimmer,  # type: ignore[arg-type]
            self.journal,
            metrics=self.metrics,
            entries_max=ENTRIES_MAX,
        )

    def grow(self, entry_count: int, size_bytes: int = 0) -> None:
        """As if turns had been written."""
        written = self.journal.written
        self.journal.written = Extent(
            written.entry_count + entry_count, written.size_bytes + size_bytes
        )

    def count(self, outcome: str) -> float:
        name, labels = "breadbox_journal_snapshots_total", {"outcome": outcome}
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def answers(self, act: Callable[[], object], *, code: int = 0, problem: bytes = b"") -> None:
        """Have every compactor do something, make a snapshot at turn 7, and end with a code."""

        async def start(*arguments: str, **_: Any) -> Compactor:
            self.nicenesses.append(int(arguments[-1]))
            return Compactor(act, code, problem)

        self._monkeypatch.setattr(asyncio, "create_subprocess_exec", start)

    def fails(self, code: int, problem: str) -> None:
        self.answers(lambda: None, code=code, problem=problem.encode())


class Compactor:
    """A process that has said everything as soon as it is talked to."""

    def __init__(self, act: Callable[[], object], code: int, problem: bytes) -> None:
        self.returncode: int | None = None
        self._act = act
        self._end = code, problem

    async def communicate(self, line: bytes) -> tuple[bytes, bytes]:
        self._act()
        self.returncode, problem = self._end
        return b"7 0 0", problem


async def compact(bench: Bench) -> None:
    """One look at whether a snapshot is due, and what follows from it."""
    await bench.compaction.look(bench.damages.append)


async def test_a_compactor_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that is short of processes for a moment must not end the server."""

    async def cannot(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", cannot)
    monkeypatch.setattr(compaction, "FAILED_REST_S", 0.0)
    bench = Bench(monkeypatch)
    bench.grow(ENTRIES_MAX)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(bench.compaction.run(bench.damages.append))
        await eventually(lambda: bench.count("failed") >= 2)
        running.cancel()
    assert [] == bench.damages


async def test_a_compactor_that_ends_before_it_reads_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under uvloop writing to one that was killed at its start raises, and ended the server."""

    class Dead:
        returncode = -11

        async def communicate(self, line: bytes) -> tuple[bytes, bytes]:
            raise RuntimeError("unable to perform operation; the handler is closed")

    async def start(*_: Any, **__: Any) -> Dead:
        return Dead()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    bench = Bench(monkeypatch)
    bench.grow(ENTRIES_MAX)
    await compact(bench)
    assert (1, []) == (bench.count("failed"), bench.damages)


def test_the_server_forks_without_what_grpc_does_at_a_fork() -> None:
    """By which 1 or 2 in 100 children of a busy server died."""
    script = (
        "import os, sys, breadbox_server\n"
        "assert 'grpc' not in sys.modules\n"
        "print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    )
    environment = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, check=True, text=True
    )
    assert "0\n" == done.stdout


async def test_a_snapshot_is_due_after_so_many_entries_or_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.answers(lambda: None)
    bench.grow(ENTRIES_MAX - 1, compaction.SIZE_BYTES_MAX - 1)
    await compact(bench)
    assert 0 == bench.count("made")
    bench.grow(1)
    await compact(bench)
    assert 1 == bench.count("made")
    bench.grow(0, compaction.SIZE_BYTES_MAX)
    await compact(bench)
    assert 2 == bench.count("made")


async def test_entries_that_an_earlier_process_left_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, grown_entries=ENTRIES_MAX - 1)
    bench.answers(lambda: None)
    await compact(bench)
    assert 0 == bench.count("made")
    bench.grow(1)
    await compact(bench)
    assert 1 == bench.count("made")


async def test_what_was_decided_while_a_snapshot_was_made_counts_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)

    def grow() -> None:
        bench.grow(ENTRIES_MAX)

    bench.answers(grow)
    bench.grow(ENTRIES_MAX)
    await compact(bench)
    await compact(bench)
    assert 2 == bench.count("made")


@pytest.mark.parametrize(
    ("took_s", "rest_s"), [(1.0, 4.0), (100.0, compaction.REST_S_MAX)], ids=["short", "long"]
)
async def test_a_compaction_is_followed_by_a_rest_that_is_capped(
    took_s: float, rest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the cap a server under load made snapshots at 8, 34 and 187 s."""
    bench = Bench(monkeypatch)

    def take_long() -> None:
        bench.now += took_s
        bench.grow(ENTRIES_MAX)

    bench.answers(take_long)
    bench.grow(ENTRIES_MAX)
    await compact(bench)
    bench.now = took_s + rest_s - 0.1
    await compact(bench)
    assert 1 == bench.count("made")
    bench.now += 0.1
    await compact(bench)
    assert 2 == bench.count("made")


async def test_there_is_no_rest_where_the_backlog_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)

    def take_long() -> None:
        bench.now += 10.0
        bench.grow(10 * ENTRIES_MAX)

    bench.answers(take_long)
    bench.grow(ENTRIES_MAX)
    await compact(bench)
    await compact(bench)
    assert 2 == bench.count("made")


async def test_the_priority_rises_with_the_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    # None is made, so that the backlog is not over.
    bench.fails(compactor.UNAVAILABLE, "away")
    for _ in range(12):
        bench.grow(ENTRIES_MAX)
        await compact(bench)
        bench.now += compaction.FAILED_REST_S
    seen = bench.nicenesses
    assert sorted(seen, reverse=True) == seen
    assert (17, 0) == (seen[0], seen[-1])


async def test_a_compactor_of_low_priority_is_begun_anew_when_it_becomes_urgent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    started: list[tuple[str, Any]] = []

    class Process:
        def __init__(self) -> None:
            self.returncode: int | None = None
            self.ended = asyncio.Event()

        async def communicate(self, line: bytes) -> tuple[bytes, bytes]:
            if len(started) == 2:
                self.returncode = 0
                return b"7 5000 0.25", b""
            bench.grow(10 * ENTRIES_MAX)
            await self.ended.wait()
            return b"", b""

        def kill(self) -> None:
            self.returncode = -9
            self.ended.set()

        async def wait(self) -> None:
            await self.ended.wait()

    async def start(*arguments: str, **_: Any) -> Process:
        process = Process()
        started.append((arguments[-1], process))
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    bench.grow(ENTRIES_MAX)
    await compact(bench)
    assert [("17", -9), ("0", 0)] == [(nice, process.returncode) for nice, process in started]
    assert 1 == bench.count("made")
    assert 0.25 / 5000 == bench.journal.entry_s


async def test_producers_wait_where_a_restart_would_take_too_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(monkeypatch)
    bench.grow(20 * ENTRIES_MAX - 1)
    assert "" == bench.journal.hold()
    bench.grow(1)
    assert bench.journal.hold()
    bench.fails(compactor.UNAVAILABLE, "away")
    await compact(bench)
    assert "producers wait for a snapshot" in caplog.text
    assert f"after {20 * ENTRIES_MAX} entries" in bench.journal.hold()
    assert REPLAY_S_MAX == pytest.approx(
        bench.metrics.registry.get_sample_value("breadbox_journal_replay_seconds")
    )
    bench.now += compaction.FAILED_REST_S
    bench.answers(lambda: None)
    await compact(bench)
    assert "" == bench.journal.hold()


async def test_many_bytes_make_producers_wait_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.grow(1, REPLAY_BYTES_MAX)
    assert bench.journal.hold()


async def test_a_journal_that_cannot_be_read_back_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.fails(compactor.DAMAGED, "lacks turns 3 to 9")
    bench.grow(ENTRIES_MAX)
    await compact(bench)
    assert ["the journal cannot be read back (lacks turns 3 to 9)"] == [
        str(error) for error in bench.damages
    ]


async def test_one_that_was_begun_again_meanwhile_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)

    def read_half() -> None:
        bench.journal.beginnings += 1

    bench.answers(read_half, code=compactor.DAMAGED, problem=b"lacks turns 3 to 9")
    bench.grow(ENTRIES_MAX)
    await compact(bench)
    assert (1, []) == (bench.count("failed"), bench.damages)


@pytest.mark.parametrize("is_broken", [True, False], ids=["broken", "unavailable"])
async def test_a_compactor_that_always_fails_does_not_stop_producers_for_good(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot reach the journal is waited for: a beginning would not reach it either."""
    bench = Bench(monkeypatch)
    bench.fails(1 if is_broken else compactor.UNAVAILABLE, "Traceback")
    bench.grow(20 * ENTRIES_MAX)
    for _ in range(compaction.FAILURES_MAX):
        assert [] == bench.damages
        await compact(bench)
        bench.now += compaction.FAILED_REST_S
    assert int(is_broken) == len(bench.damages)


async def test_everything_that_a_snapshot_made_old_is_trimmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.answers(lambda: None)
    bench.trimmer.portions = 3
    bench.grow(ENTRIES_MAX)
    await compact(bench)
    assert [7, 7, 7] == bench.trimmer.trimmed
