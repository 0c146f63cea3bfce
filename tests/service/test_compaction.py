"""When snapshots are made, and what becomes of the turns that they make old."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from breadbox_server.journal import compaction
from breadbox_server.journal.compaction import Compaction
from breadbox_server.journal.place import JournalPlace
from breadbox_server.metrics import Metrics
from support.eventually import eventually

ENTRIES_MAX = 100


class Trimmer:
    """A writer that can only trim, some portions for each snapshot."""

    def __init__(self) -> None:
        self.portions = 0
        self.trimmed: list[int] = []

    async def trim(self, up_to: int) -> bool:
        self.trimmed.append(up_to)
        self.portions -= 1
        return self.portions > 0


class Bench:
    """A compaction whose process is a function of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, grown_entries: int = 0) -> None:
        monkeypatch.setattr(compaction, "PERIOD_S", 0.0)
        monkeypatch.setattr(compaction, "TRIM_PAUSE_S", 0.0)
        monkeypatch.setattr(compaction, "monotonic", lambda: self.now)
        self.now = 0.0
        self.journal = SimpleNamespace(entry_count=0, size_bytes=0)
        self.trimmer = Trimmer()
        self.metrics = Metrics(CollectorRegistry())
        self.compaction = Compaction(
            JournalPlace("sqlite", "/nowhere"),
            self.trimmer,  # type: ignore[arg-type]
            self.journal,  # type: ignore[arg-type]
            metrics=self.metrics,
            grown_entries=grown_entries,
            entries_max=ENTRIES_MAX,
        )

    def count(self, outcome: str) -> float:
        name, labels = "breadbox_journal_snapshots_total", {"outcome": outcome}
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def answers(self, function: Callable[[], int | None]) -> None:
        async def run() -> int | None:
            return function()

        self.compaction._run_compactor = run  # type: ignore[method-assign]


async def compact(bench: Bench) -> None:
    """One look at whether a snapshot is due, and what follows from it."""
    if bench.compaction._is_due():
        await bench.compaction._compact()


async def test_a_compactor_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that is short of processes for a moment must not end the server."""

    async def cannot(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", cannot)
    bench = Bench(monkeypatch)
    bench.journal.entry_count = ENTRIES_MAX
    async with asyncio.TaskGroup() as group:
        running = group.create_task(bench.compaction.run())
        await eventually(lambda: bench.count("failed") >= 2)
        running.cancel()


async def test_a_snapshot_is_due_after_so_many_entries_or_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.answers(lambda: 7)
    bench.journal.entry_count = ENTRIES_MAX - 1
    bench.journal.size_bytes = compaction.SIZE_BYTES_MAX - 1
    await compact(bench)
    assert 0 == bench.count("made")
    bench.journal.entry_count += 1
    await compact(bench)
    assert 1 == bench.count("made")
    bench.journal.size_bytes += compaction.SIZE_BYTES_MAX
    await compact(bench)
    assert 2 == bench.count("made")


async def test_entries_that_an_earlier_process_left_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, grown_entries=ENTRIES_MAX - 1)
    bench.answers(lambda: 7)
    await compact(bench)
    assert 0 == bench.count("made")
    bench.journal.entry_count = 1
    await compact(bench)
    assert 1 == bench.count("made")


async def test_what_was_decided_while_a_snapshot_was_made_counts_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)

    def grow() -> int:
        bench.journal.entry_count += ENTRIES_MAX
        return 7

    bench.answers(grow)
    bench.journal.entry_count = ENTRIES_MAX
    await compact(bench)
    await compact(bench)
    assert 2 == bench.count("made")


async def test_a_long_compaction_is_followed_by_a_longer_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)

    def take_long() -> None:
        bench.now += 10.0

    bench.answers(take_long)
    bench.journal.entry_count = ENTRIES_MAX
    await compact(bench)
    bench.now = 10.0 + 10.0 * compaction.REST_FACTOR - 0.1
    await compact(bench)
    assert 1 == bench.count("failed")
    bench.now += 0.1
    await compact(bench)
    assert 2 == bench.count("failed")


async def test_everything_that_a_snapshot_made_old_is_trimmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.answers(lambda: 7)
    bench.trimmer.portions = 3
    bench.journal.entry_count = ENTRIES_MAX
    await compact(bench)
    assert [7, 7, 7] == bench.trimmer.trimmed
