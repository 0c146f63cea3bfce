"""Turns and snapshots come back as they were; anything else is refused."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from breadbox_server.core import entries as core_entries
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.config import (
    BufferConfig,
    FullPolicy,
    SampleToInsertRatioConfig,
)
from breadbox_server.core.inputs import (
    AdmissionOutcome,
    DropPayloads,
    Fragment,
    Payload,
    PublishModel,
    ReleaseLease,
    ReleaseMode,
    RenewLease,
    StartSession,
    UpdateBuffer,
)
from breadbox_server.journal import codec
from breadbox_server.journal.codec import (
    JournalFormatError,
    Snapshot,
    decode_snapshot,
    decode_turn,
    encode_snapshot,
    encode_turn,
)
from breadbox_server.journal.compactor import compact
from breadbox_server.journal.frames import frame_turn, open_snapshot
from breadbox_server.journal.place import JournalPlace
from breadbox_server.journal.recovery import begin, look, recover
from breadbox_server.journal.storage import BEGINNING, JournalDamagedError
from breadbox_server.journal.turn_journal import TurnJournal
from support.journals import SqliteJournal

PAYLOAD = Payload("0" * 32, 100, 64)
FRAGMENT = Fragment(
    worker_id="wörker",
    fragment_index=7,
    session_id="run",
    model_version_min=1,
    model_version_max=2,
    payload=PAYLOAD,
    step_count=5,
    discontinuity=True,
)
LIMITS = BufferConfig(
    full_policy=FullPolicy.BLOCK,
    limiter=SampleToInsertRatioConfig(ratio=2.5, error_chunks=10.0),
)
ENTRIES = [
    core_entries.BufferCreated("b", LIMITS, 2**80 + 1),
    core_entries.FragmentTaken("b", FRAGMENT, AdmissionOutcome.STALE),
    core_entries.GrantMade("b", "r", 4, 2, (3, 1), ("l0", "l1"), (60.0, 0.1)),
    StartSession("b", "run", None),
    StartSession("b", "run", 3),
    PublishModel("b", "run", 4, PAYLOAD),
    PublishModel("b", "run", 5),
    RenewLease("b", "l0", None),
    ReleaseLease("b", "l0", ReleaseMode.RETURNED),
    DropPayloads("b", ("0" * 32, "1" * 32)),
    UpdateBuffer("b", BufferConfig()),
]


def test_a_turn_comes_back_as_it_was():
    turn = [(1e9 + position / 3, entry) for position, entry in enumerate(ENTRIES)]
    assert turn == decode_turn(encode_turn(turn)).entries


def test_equal_ids_of_fragments_are_one_object_so_that_the_core_keeps_no_copies():
    turn = [(1.0, core_entries.FragmentTaken("b", FRAGMENT, AdmissionOutcome.ADMITTED))]
    first, second = (decode_turn(encode_turn(turn)).entries[0][1].fragment for _ in range(2))
    assert first is not second
    assert first.worker_id is second.worker_id
    assert first.session_id is second.session_id


def test_a_snapshot_comes_back_as_it_was():
    snapshot = Snapshot(9, 1.5, {"buffers": [[1, 2.25, "é", None, True]]})
    assert snapshot == decode_snapshot(encode_snapshot(snapshot))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"{}",
        b"[1]",
        b"[2,[]]",
        b'[1,[[0,"NoSuchEntry"]]]',
        b'[1,[[0,"EndSession","b"]]]',
        b'[1,[[0,"ReleaseLease","b","l","somehow"]]]',
        b'[1,[[0,"FragmentTaken","b",[],"admitted"]]]',
        b'[1,[[0,"FragmentTaken","b",["w",0,"s",0,0,["p",1],1,false],"admitted"]]]',
        b'[1,[[0,"FragmentTaken","b",["w",0,"s",0,0,["p",1,0],1,false],"somehow"]]]',
        b'[1,[[0,"FragmentTaken","b",[[],0,"s",0,0,["p",1,0],1,false],"admitted"]]]',
        b"[" * 100_000,
    ],
    ids=lambda data: data[:20].decode(errors="replace"),
)
def test_what_is_no_turn_is_refused(data: bytes):
    with pytest.raises(JournalFormatError):
        decode_turn(data)


def test_what_is_no_snapshot_is_refused():
    good = encode_snapshot(Snapshot(1, 1.0, {}))
    for data in (b"", good[:-3], b"junk" + good, encode_turn([])):
        with pytest.raises(JournalFormatError):
            decode_snapshot(data)


@pytest.mark.parametrize("says_its_size", [True, False])
def test_a_snapshot_that_would_unpack_to_more_than_the_limit_is_refused(monkeypatch, says_its_size):
    snapshot = Snapshot(1, 1.0, {"zeros": "0" * 100_000})
    text = zstandard.ZstdDecompressor().decompress(encode_snapshot(snapshot))
    packer = zstandard.ZstdCompressor(write_content_size=says_its_size)
    monkeypatch.setattr(codec, "SNAPSHOT_SIZE_BYTES_MAX", len(text))
    assert snapshot == decode_snapshot(packer.compress(text))
    monkeypatch.setattr(codec, "SNAPSHOT_SIZE_BYTES_MAX", len(text) - 1)
    with pytest.raises(JournalFormatError, match="damaged"):
        decode_snapshot(packer.compress(text))


def test_every_change_of_an_entry_grows_the_version():
    """Fields are written by position: change this list and `codec.VERSION` together."""
    assert 1 == codec.VERSION
    pinned = json.loads(Path(__file__).with_name("journal_schema.json").read_text())
    assert pinned == codec.schema()


def test_a_journal_cut_anywhere_is_compacted_into_the_same_core(tmp_path):
    journal = SqliteJournal(tmp_path)
    archive = journal.archive
    live = BufferSet(random.Random(3), BufferConfig(), is_recording=True)
    begin(archive, live, 0.0)
    _write_history(journal, live)
    wanted = live.snapshot()
    for _ in range(2):
        assert BEGINNING + 30 == compact(archive).sequence
        found = recover(archive, lambda state: BufferSet.restore(state, random.Random(0)))
        assert wanted == found.buffers.snapshot()
    assert 0 == found.turn_count
    archive.close()


class TrimmedMeanwhile:
    """An archive that a server compacts and trims between two reads of somebody else."""

    def __init__(self, journal: SqliteJournal) -> None:
        self._archive = journal.archive
        self._journal = journal
        self.reads = 0

    def __getattr__(self, name):
        return getattr(self._archive, name)

    def read_turns(self, after: int):
        self.reads += 1
        if self.reads == 1:
            sequence = compact(self._archive).sequence
            writer = self._journal.open_writer()
            _run_at_once(writer.trim(sequence - 5))
            _run_at_once(writer.close())
        return self._archive.read_turns(after)


def test_who_only_looks_reads_a_journal_again_that_was_trimmed_between_its_reads(tmp_path):
    journal = SqliteJournal(tmp_path)
    archive = journal.archive
    live = BufferSet(random.Random(3), BufferConfig(), is_recording=True)
    begin(archive, live, 0.0)
    _write_history(journal, live)
    meanwhile = TrimmedMeanwhile(journal)
    assert live.snapshot() == look(meanwhile).buffers.snapshot()
    assert 2 == meanwhile.reads
    with archive._connection as connection:
        connection.execute("DELETE FROM turns")
        connection.execute("INSERT INTO turns VALUES (?, ?, 0)", (BEGINNING + 99, encode_turn([])))
    with pytest.raises(JournalDamagedError, match="lacks turns"):
        look(archive)
    archive.close()


def test_the_compactor_process_takes_the_place_from_its_input(tmp_path):
    journal = SqliteJournal(tmp_path)
    archive = journal.archive
    live = BufferSet(random.Random(3), BufferConfig(), is_recording=True)
    begin(archive, live, 0.0)
    _write_history(journal, live)
    done = subprocess.run(
        [sys.executable, "-m", "breadbox_server.journal.compactor", "10"],
        input=JournalPlace("sqlite", str(tmp_path)).to_line(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    sequence, entry_count, replay_s = done.stdout.split()
    assert (BEGINNING + 30, 30) == (int(sequence), int(entry_count))
    assert float(replay_s) >= 0.0
    assert BEGINNING + 30 == archive.read_snapshot()[0]
    archive.close()


def test_an_entry_that_does_not_fit_is_a_damaged_journal(tmp_path):
    place = JournalPlace("sqlite", str(tmp_path))
    archive = place.open_archive()
    begun = begin(archive, BufferSet(random.Random(3), BufferConfig()), 0.0)
    entries = [(1.0, ReleaseLease("nowhere", "l", ReleaseMode.CONSUMED))]
    bad, _ = frame_turn(begun.chain, BEGINNING + 1, encode_turn(entries))
    with archive._connection as connection:
        connection.execute("INSERT INTO turns VALUES (?, ?, 0)", (BEGINNING + 1, bad))
    with pytest.raises(JournalDamagedError, match=r"turn 2.*start empty"):
        recover(archive, lambda state: BufferSet.restore(state, random.Random(0)))
    archive.close()


def _write_history(place: SqliteJournal, live: BufferSet) -> None:
    """Thirty turns of appends and publishes."""
    writer = place.open_writer()
    _, chain = open_snapshot(*place.archive.read_snapshot())
    journal = TurnJournal(writer, BEGINNING, chain)
    for step in range(30):
        now = float(step)
        if step % 10 == 0:
            live.apply(StartSession("default", f"run{step}"), now=now)
        else:
            live.apply(PublishModel("default", f"run{step // 10 * 10}", step), now=now)
        live.take_events()
        _run_at_once(journal.append(live.take_entries()))
    _run_at_once(writer.close())


def _run_at_once(coroutine) -> None:
    """Nothing here waits for the loop, so a coroutine runs to its end when it is sent to."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


def test_a_turn_with_a_configuration_that_cannot_be_is_a_damaged_one():
    turn = encode_turn([(1.0, core_entries.BufferCreated("b", BufferConfig(capacity_chunks=7), 1))])
    with pytest.raises(JournalFormatError, match="capacity_chunks"):
        decode_turn(turn.replace(b",7,", b",0,"))
