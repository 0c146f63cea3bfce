"""A journal that was damaged while no server ran is read back whole, or refused: never in part."""

import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.ids import BufferName, SessionId
from breadbox_server.core.model.inputs import AppendFragments, StartSession
from breadbox_server.core.snapshot import BufferSnapshot
from breadbox_server.journal.compactor import compact
from breadbox_server.journal.encoding.frames import (
    frame_snapshot,
    frame_turn,
    open_snapshot,
    open_turn,
)
from breadbox_server.journal.recovery import begin, recover
from breadbox_server.journal.storage.interface import JournalDamagedError
from breadbox_server.journal.storage.sqlite import END_NAME, SqliteArchive
from breadbox_server.journal.turn_journal import TurnJournal
from support.inputs import named_payload
from support.journals import SqliteJournal
from support.metadata import make_fragment

FLIPS = 120
"""Positions in a file at which a bit is flipped, one at a time."""
TURNS = 40


def restore(state: Iterable[BufferSnapshot]) -> BufferSet:
    return BufferSet.restore(state, random.Random(0))


Left = tuple[Path, Sequence[BufferSnapshot]]


@pytest.fixture
async def left(tmp_path: Path) -> Left:
    """A directory as a killed server leaves it, with its log unread, and the state it tells of."""
    (tmp_path / "live").mkdir()
    journal = SqliteJournal(tmp_path / "live")
    live = BufferSet(random.Random(3), BufferConfig(), is_recording=True)
    begun = begin(journal.archive, live, 0.0)
    writer = journal.open_writer()
    turns = TurnJournal(writer, begun.sequence, begun.chain)
    live.apply(StartSession(BufferName("default"), SessionId("run")), now=0.0)
    for index in range(TURNS):
        payload = named_payload(f"{index:032x}", 100)
        fragment = make_fragment("w", index, session_id="run", payload=payload)
        live.apply(AppendFragments(BufferName("default"), [fragment]), now=float(index))
        live.take_events()
        await turns.append(live.take_entries())
        if index == TURNS // 2:
            compact(journal.archive)
    no_reserve = shutil.ignore_patterns("reserve")
    shutil.copytree(tmp_path / "live", tmp_path / "left", ignore=no_reserve)
    await writer.close()
    journal.close()
    return tmp_path / "left", live.snapshot()


def read_back(directory: Path) -> object:
    with closing(SqliteArchive(directory)) as archive:
        assert archive.is_begun()
        return recover(archive, restore).buffers.snapshot()


def copies(left: Path) -> Iterator[Path]:
    number = 0
    while True:
        number += 1
        copy = left.with_name(f"copy{number}")
        shutil.copytree(left, copy)
        yield copy
        shutil.rmtree(copy)


async def test_what_is_left_by_a_killed_server_is_read_back(left: Left) -> None:
    directory, state = left
    assert state == read_back(directory)


@pytest.mark.parametrize("name", ["journal.sqlite-wal", "snapshot-*", END_NAME])
async def test_a_flipped_bit_is_found_wherever_it_is(left: Left, name: str) -> None:
    directory, state = left
    rng = random.Random(11)
    found = 0
    size_bytes = next(directory.glob(name)).stat().st_size
    for copy, _ in zip(copies(directory), range(FLIPS), strict=False):
        path = next(copy.glob(name))
        content = bytearray(path.read_bytes())
        position, bit = rng.randrange(size_bytes), rng.randrange(8)
        content[position] ^= 1 << bit
        path.write_bytes(content)
        try:
            assert state == read_back(copy), (position, bit)
        except JournalDamagedError as error:
            assert "start empty" in str(error)  # noqa: PT017 - either is right, the rest is not
            found += 1
    assert found > FLIPS // 3


@pytest.mark.parametrize("name", ["journal.sqlite-wal", "snapshot-*", END_NAME])
async def test_a_file_that_is_gone_or_cut_is_missed(left: Left, name: str) -> None:
    directory, _ = left
    for acts in (lambda path: path.unlink(), lambda path: path.write_bytes(b"")):
        copy = next(copies(directory))
        acts(next(copy.glob(name)))
        with pytest.raises(JournalDamagedError, match="start empty"):
            read_back(copy)
        shutil.rmtree(copy)


async def test_a_log_that_was_cut_after_any_turn_is_missed(left: Left) -> None:
    directory, state = left
    log = directory / "journal.sqlite-wal"
    size_bytes = log.stat().st_size
    for copy, cut_bytes in zip(copies(directory), range(1, size_bytes, 4096), strict=False):
        with (copy / log.name).open("r+b") as file:
            file.truncate(size_bytes - cut_bytes)
        with pytest.raises(JournalDamagedError, match="start empty"):
            assert state == read_back(copy)


async def test_a_turn_of_another_history_is_found(left: Left) -> None:
    body = b"what happened"
    _, chain = open_snapshot(4, frame_snapshot(4, b"state"))
    record, next_chain = frame_turn(chain, 5, body)
    assert (body, next_chain) == open_turn(chain, 5, record)
    for before, sequence in ((chain + 1, 5), (chain, 6)):
        with pytest.raises(Exception, match="does not follow"):
            open_turn(before, sequence, record)


async def test_after_a_restart_of_the_machine_what_the_disk_kept_is_read_with_a_warning(
    left: Left, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without --journal-sync nothing else was promised."""
    directory, state = left
    (directory / "journal.sqlite-wal").unlink()
    monkeypatch.setattr("breadbox_server.journal.storage.sqlite._boot", lambda: b"another kernel__")
    assert state != read_back(directory)
    assert "--journal-sync" in caplog.text
