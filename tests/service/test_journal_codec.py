"""Turns and snapshots come back as they were; anything else is refused."""

import asyncio
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import closing
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import zstandard

from breadbox_server.base.errors import BugError
from breadbox_server.core.buffer import _HANDLERS
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model import entries as core_entries
from breadbox_server.core.model.config import (
    BufferConfig,
    FullPolicy,
    SampleToInsertRatioConfig,
    SchemaPolicy,
)
from breadbox_server.core.model.ids import (
    BufferName,
    ChunkId,
    FragmentIndex,
    LeaseId,
    ModelVersion,
    PayloadId,
    RequestId,
    SessionId,
    SubscriptionName,
    WorkerId,
)
from breadbox_server.core.model.inputs import (
    Acknowledge,
    AdmissionOutcome,
    DeclareSchema,
    DeleteBuffer,
    DropPayloads,
    EndSession,
    Fragment,
    DropMembers,
    GiveBackTicket,
    Payload,
    ReleaseLease,
    ReleaseMode,
    RenewLease,
    RenewTicket,
    ReportUnreadable,
    StartSession,
    Subscribe,
    UndeliveredGrant,
    Unsubscribe,
    UpdateBuffer,
    UpdatePriorities,
)
from breadbox_server.core.model.schemas import SchemaArray, SchemaOrigin
from breadbox_server.journal.compactor import compact
from breadbox_server.journal.encoding import codec
from breadbox_server.journal.encoding.codec import (
    Snapshot,
    decode_snapshot,
    decode_turn,
    encode_snapshot,
    encode_turn,
)
from breadbox_server.journal.encoding.entries import (
    FRAGMENTS,
    RUN_MIN,
    limits_of_text,
    limits_to_text,
)
from breadbox_server.journal.encoding.frames import (
    JournalFormatError,
    NewerFormatError,
    frame_turn,
    open_snapshot,
)
from breadbox_server.journal.recovery import begin, recover, recover_while_written
from breadbox_server.journal.storage.interface import (
    BEGINNING,
    JournalArchive,
    JournalDamagedError,
    JournalNewerError,
)
from breadbox_server.journal.storage.place import JournalPlace
from breadbox_server.journal.turn_journal import TurnJournal
from breadbox_server.journal.v1 import journal_pb2 as pb
from golden.history import play
from support.inputs import grant_made, named_payload, publish_model
from support.journals import SqliteJournal, behind, put_turn
from support.metadata import make_fragment

B, RUN, L0 = BufferName("b"), SessionId("run"), LeaseId("l0")
DEFAULT = BufferName("default")
PAYLOAD = named_payload("0" * 32, 100, 64)
FRAGMENT = Fragment(
    worker_id=WorkerId("wörker"),
    fragment_index=FragmentIndex(7),
    session_id=RUN,
    model_version_min=ModelVersion(1),
    model_version_max=ModelVersion(2),
    payload=PAYLOAD,
    step_count=5,
    discontinuity=True,
    schema_hash=2**64 - 1,
)
LIMITS = BufferConfig(
    full_policy=FullPolicy.BLOCK,
    schema=SchemaPolicy.ANY,
    limiter=SampleToInsertRatioConfig(ratio=2.5, error_chunks=10.0, lead_chunks=-1.5),
)
SCHEMA = (
    SchemaArray("obs", "<f4", (84, 84)),
    SchemaArray("r", "<f4", ()),
    SchemaOrigin("environment wrappers", "none"),
)
ENTRIES: list[core_entries.Entry] = [
    core_entries.BufferCreated(B, LIMITS, 2**63 - 1),
    core_entries.FragmentTaken(B, FRAGMENT, AdmissionOutcome.ADMITTED),
    core_entries.FragmentTaken(B, FRAGMENT, AdmissionOutcome.STALE),
    grant_made((3, 1), ("l0", "l1"), (60.0, 0.1), fragment_count=4, world_size=2, buffer=B),
    core_entries.TimePassed(B),
    core_entries.TicketsGiven(
        B, RequestId("t"), (WorkerId("ticket-1"), WorkerId("ticket-2")), 600.0, "generators"
    ),
    RenewTicket(B, WorkerId("ticket-1"), None),
    RenewTicket(B, WorkerId("ticket-1"), 1 / 3),
    GiveBackTicket(B, WorkerId("ticket-1"), None),
    GiveBackTicket(B, WorkerId("ticket-1"), 0),
    DropMembers(B, (WorkerId("row-1"), WorkerId("row-2")), (0, 1023)),
    StartSession(B, RUN, None),
    StartSession(B, RUN, ModelVersion(3)),
    EndSession(B, RUN),
    publish_model(4, PAYLOAD, session_id=RUN, buffer=B),
    publish_model(5, session_id=RUN, buffer=B),
    RenewLease(B, L0, None),
    RenewLease(B, L0, 1 / 3),
    ReleaseLease(B, L0, ReleaseMode.RETURNED),
    ReleaseLease(B, L0, ReleaseMode.CONSUMED),
    UndeliveredGrant(B, L0),
    DropPayloads(B, (PayloadId("0" * 32), PayloadId("1" * 32))),
    ReportUnreadable(B, L0, (PayloadId("0" * 32),), 3),
    UpdateBuffer(B, BufferConfig()),
    UpdatePriorities(
        B, ((ChunkId(7), 0.5), (ChunkId(3), 0.0), (ChunkId(7), 1e30)), (ChunkId(1), ChunkId(0))
    ),
    UpdatePriorities(B, (), (ChunkId(1),)),
    Subscribe(B, SubscriptionName("archive"), True, -1),
    Subscribe(B, SubscriptionName("mirror"), False, 2**40),
    Acknowledge(B, SubscriptionName("archive"), 7),
    Unsubscribe(B, SubscriptionName("archive")),
    DeleteBuffer(B),
    DeclareSchema(B, RUN, 2**63, SCHEMA),
    DeclareSchema(B, RUN, 7, ()),
]


def fragments(count: int) -> list[Fragment]:
    """Fragments of three workers, that differ in everything."""
    return [
        make_fragment(
            f"w{index % 3}",
            index,
            session_id=f"run{index % 2}",
            version=index,
            version_max=index + index % 2,
            payload=named_payload(f"{index:032x}", 100 + index, 4096 * (index % 2)),
            step_count=1 + index % 5,
            discontinuity=index % 4 == 0,
            schema_hash=2**64 - 1 - index % 3,
            priority=index % 3 / 2,
        )
        for index in range(count)
    ]


def taken(
    fragments: Iterable[Fragment],
    outcome: AdmissionOutcome = AdmissionOutcome.ADMITTED,
    buffer: str = B,
) -> list[core_entries.Entry]:
    return [
        core_entries.FragmentTaken(BufferName(buffer), fragment, outcome) for fragment in fragments
    ]


def timed(entries: Iterable[core_entries.Entry]) -> list[tuple[float, core_entries.Entry]]:
    return [(1e9 + position / 3, entry) for position, entry in enumerate(entries)]


def test_a_turn_comes_back_as_it_was() -> None:
    assert set(get_args(core_entries.Entry)) == {type(entry) for entry in ENTRIES}
    assert timed(ENTRIES) == decode_turn(encode_turn(timed(ENTRIES)))


@pytest.mark.parametrize("count", [1, RUN_MIN - 1, RUN_MIN, 3 * RUN_MIN])
def test_runs_of_fragments_come_back_as_they_were_among_other_entries(count: int) -> None:
    run = fragments(count)
    turn = timed(
        [
            *taken(run),
            *taken(run, AdmissionOutcome.STALE),
            *taken(run, buffer="another"),
            *ENTRIES,
            *taken(run),
        ]
    )
    assert turn == decode_turn(encode_turn(turn))


@pytest.mark.parametrize("count", [1, 2 * RUN_MIN])
def test_equal_ids_and_versions_of_fragments_are_one_object_so_that_the_core_keeps_no_copies(
    count: int,
) -> None:
    turn = timed(
        taken([FRAGMENT] * count)
        + taken([replace(FRAGMENT, model_version_max=ModelVersion(1))] * count)
    )
    read = [entry.fragment for _, entry in decode_turn(encode_turn(turn))]
    first, last = read[0], decode_turn(encode_turn(turn))[-1][1].fragment
    assert first is not last
    assert first.worker_id is last.worker_id
    assert first.session_id is last.session_id
    assert last.model_version_min is last.model_version_max


def test_columns_are_the_fields_of_fragments_and_payloads() -> None:
    core = {field.name for kind in (Fragment, Payload) for field in dataclass_fields(kind)}
    assert core - {"payload"} == {field.name for field in pb.FragmentColumns.DESCRIPTOR.fields}


def test_a_column_that_an_earlier_server_did_not_write_has_its_default() -> None:
    message = pb.FragmentColumns()
    FRAGMENTS.put(fragments(3), message)
    message.ClearField("discontinuity")
    message.ClearField("piece_size_bytes")
    wanted = [
        replace(each, discontinuity=False, payload=replace(each.payload, piece_size_bytes=0))
        for each in fragments(3)
    ]
    assert wanted == list(FRAGMENTS.read(message))


def test_columns_of_which_all_values_are_defaults_cost_nothing() -> None:
    message = pb.FragmentColumns()
    FRAGMENTS.put([replace(each, discontinuity=False) for each in fragments(3)], message)
    assert not message.discontinuity
    assert 3 == len(message.step_count)


def busy_buffers() -> BufferSet:
    """Two buffers with something in every corner."""
    buffers = BufferSet(random.Random(3), BufferConfig())
    play(buffers)
    return buffers


def test_a_snapshot_comes_back_as_it_was() -> None:
    snapshot = Snapshot(9, 1.5, busy_buffers().snapshot())
    assert snapshot == decode_snapshot(encode_snapshot(snapshot))


@pytest.mark.parametrize(
    "turn",
    [
        pb.Turn(),
        pb.Turn(
            version=1,
            entries=[
                pb.Entry(
                    buffer_created=pb.BufferCreated(limits={"config": {"capacity_chunks": -1}})
                )
            ],
        ),
        pb.Turn(
            version=1,
            entries=[
                pb.Entry(buffer_created=pb.BufferCreated(limits={"config": {"full_policy": 9}}))
            ],
        ),
        pb.Turn(version=1, entries=[pb.Entry(lease_released=pb.LeaseReleased(lease_id="l"))]),
        pb.Turn(
            version=1, entries=[pb.Entry(lease_released=pb.LeaseReleased(end="LEASE_END_EXPIRED"))]
        ),
        pb.Turn(version=1, entries=[pb.Entry(fragments_admitted=pb.FragmentRun(nows=[1.0]))]),
        pb.Turn(
            version=1,
            entries=[
                pb.Entry(
                    fragments_admitted={
                        "nows": [1.0],
                        "fragments": {"payload_id": ["p"], "step_count": [1, 2]},
                    }
                )
            ],
        ),
        pb.Turn(
            version=1,
            entries=[
                pb.Entry(
                    fragments_admitted={
                        "nows": [1.0],
                        "fragments": {"payload_id": ["p"], "worker_id": {"places": [0]}},
                    }
                )
            ],
        ),
    ],
    ids=str,
)
def test_what_is_no_turn_is_refused(turn: pb.Turn) -> None:
    with pytest.raises(JournalFormatError):
        decode_turn(turn.SerializeToString())


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[1,[]]", b"\x08\x01\x12\xff"], ids=repr)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(JournalFormatError):
        decode_turn(data)


def test_a_kind_of_entry_that_this_server_does_not_know_is_refused_and_never_skipped() -> None:
    turn = pb.Turn.FromString(encode_turn(timed(ENTRIES)))
    turn.entries.insert(3, pb.Entry.FromString(b"\x09" + bytes(8) + b"\xfa\x7f\x02\x08\x01"))
    with pytest.raises(NewerFormatError, match="start the newer server"):
        decode_turn(turn.SerializeToString())


def test_a_record_of_a_later_version_is_refused_with_the_remedy() -> None:
    turn = pb.Turn.FromString(encode_turn(timed(ENTRIES)))
    turn.version = codec.VERSION + 1
    with pytest.raises(
        NewerFormatError,
        match=rf"format {codec.VERSION + 1}.* up to {codec.VERSION}; start the newer server",
    ):
        decode_turn(turn.SerializeToString())
    later = pb.Snapshot(version=codec.VERSION + 1).SerializeToString()
    with pytest.raises(NewerFormatError, match="start the newer server"):
        decode_snapshot(zstandard.compress(later))


def test_what_is_no_snapshot_is_refused() -> None:
    good = encode_snapshot(Snapshot(1, 1.0, busy_buffers().snapshot()))
    for data in (b"", good[:-3], b"junk" + good, encode_turn([])):
        with pytest.raises(JournalFormatError):
            decode_snapshot(data)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda buffer: buffer.chunks.states.__setitem__(0, 9),
        lambda buffer: buffer.chunks.fragment_counts.__setitem__(0, 0),
        lambda buffer: buffer.chunks.fragment_counts.__setitem__(0, 2**40),
        lambda buffer: buffer.chunks.fragments.fragment_index.pop(),
        lambda buffer: buffer.chunks.fragments.worker_id.places.__setitem__(0, 99),
        lambda buffer: buffer.chunks.use_counts.pop(),
        lambda buffer: buffer.open_chunks.touched_ats.pop(),
        lambda buffer: buffer.live_grants[0].stalenesses.pop(),
        lambda buffer: setattr(buffer.live_grants[0].leases[0], "end", 9),
    ],
)
def test_a_snapshot_of_what_cannot_be_is_refused(
    spoil: Callable[[pb.BufferSnapshot], object],
) -> None:
    message = pb.Snapshot(version=1)
    for buffer in busy_buffers().snapshot():
        codec.BUFFER.put(buffer, message.buffers.add())
    busy = next(each for each in message.buffers if each.name == "chunks")
    spoil(busy)
    with pytest.raises(JournalFormatError, match="impossible value"):
        decode_snapshot(zstandard.compress(message.SerializeToString()))


@pytest.mark.parametrize("says_its_size", [True, False])
def test_a_snapshot_that_would_unpack_to_more_than_the_limit_is_refused(
    monkeypatch: pytest.MonkeyPatch, says_its_size: bool
) -> None:
    snapshot = Snapshot(1, 1.0, busy_buffers().snapshot())
    plain = zstandard.ZstdDecompressor().decompress(encode_snapshot(snapshot))
    packer = zstandard.ZstdCompressor(write_content_size=says_its_size)
    monkeypatch.setattr(codec, "SNAPSHOT_SIZE_BYTES_MAX", len(plain))
    assert snapshot == decode_snapshot(packer.compress(plain))
    monkeypatch.setattr(codec, "SNAPSHOT_SIZE_BYTES_MAX", len(plain) - 1)
    with pytest.raises(JournalFormatError, match="damaged"):
        decode_snapshot(packer.compress(plain))


def test_limits_are_the_same_as_text_and_a_new_one_is_no_change() -> None:
    for limits in (LIMITS, BufferConfig(), BufferConfig(lease_s=1 / 3, retry_delay_s=0.1)):
        assert limits == limits_of_text(limits_to_text(limits))
    noted = json.loads(limits_to_text(LIMITS))
    del noted["config"]["workersMax"]
    del noted["retryDelaySeconds"]
    noted["config"]["aLimitOfTheFuture"] = 3
    assert LIMITS == limits_of_text(json.dumps(noted))
    assert LIMITS != limits_of_text(json.dumps({**noted, "outcomesPerWorkerMax": "7"}))
    for text in ("BufferConfig(fragments_per_chunk=1)", '{"config": {"capacityChunks": "-1"}}'):
        with pytest.raises(JournalFormatError, match="limits cannot be read"):
            limits_of_text(text)


def test_a_journal_cut_anywhere_is_compacted_into_the_same_core(tmp_path: Path) -> None:
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._archive, name)

    def read_turns(self, after: int) -> Iterator[tuple[int, bytes]]:
        self.reads += 1
        if self.reads == 1:
            sequence = compact(self._archive).sequence
            writer = self._journal.open_writer()
            _run_at_once(writer.trim(sequence - 5))
            _run_at_once(writer.close())
        return self._archive.read_turns(after)


def test_who_only_looks_reads_a_journal_again_that_was_trimmed_between_its_reads(
    tmp_path: Path,
) -> None:
    journal = SqliteJournal(tmp_path)
    archive = journal.archive
    live = BufferSet(random.Random(3), BufferConfig(), is_recording=True)
    begin(archive, live, 0.0)
    _write_history(journal, live)
    meanwhile = TrimmedMeanwhile(journal)
    assert live.snapshot() == recover_while_written(meanwhile).buffers.snapshot()
    assert 2 == meanwhile.reads
    with behind(tmp_path) as connection:
        connection.execute("DELETE FROM turns")
        connection.execute("INSERT INTO turns VALUES (?, ?, 0)", (BEGINNING + 99, encode_turn([])))
    with pytest.raises(JournalDamagedError, match="lacks turns"):
        recover_while_written(archive)
    archive.close()


def test_the_compactor_process_takes_the_place_from_its_input(tmp_path: Path) -> None:
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


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Callable[[bytes], JournalArchive]]:
    """Makes a journal whose first turn says something; gives its archive."""
    with closing(JournalPlace("sqlite", str(tmp_path)).open_archive()) as archive:

        def make(turn: bytes) -> JournalArchive:
            begun = begin(archive, BufferSet(random.Random(3), BufferConfig()), 0.0)
            record, _ = frame_turn(begun.chain, BEGINNING + 1, turn)
            put_turn(tmp_path, BEGINNING + 1, record)
            return archive

        yield make


def _recover(archive: JournalArchive) -> BufferSet:
    return recover(archive, lambda taken: BufferSet.restore(taken, random.Random(0))).buffers


def test_an_entry_that_does_not_fit_is_a_damaged_journal(
    broken: Callable[[bytes], JournalArchive],
) -> None:
    entries = [(1.0, ReleaseLease(BufferName("nowhere"), LeaseId("l"), ReleaseMode.CONSUMED))]
    with pytest.raises(JournalDamagedError, match=r"turn 2.*start empty"):
        _recover(broken(encode_turn(entries)))


def test_a_turn_of_a_newer_server_is_no_damage_and_names_the_remedy(
    broken: Callable[[bytes], JournalArchive],
) -> None:
    turn = pb.Turn(version=codec.VERSION + 1).SerializeToString()
    with pytest.raises(JournalNewerError, match=r"turn 2.*start the newer server") as caught:
        _recover(broken(turn))
    assert "damaged" not in str(caught.value)
    assert "start empty" not in str(caught.value)


@pytest.mark.parametrize("kind", [AssertionError, AttributeError, KeyError, TypeError, ValueError])
def test_a_bug_of_the_core_is_no_damage_of_the_journal(
    broken: Callable[[bytes], JournalArchive],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
) -> None:
    archive = broken(encode_turn([(1.0, StartSession(DEFAULT, RUN))]))

    def start_session(*arguments: Any, **keywords: Any) -> None:
        raise kind("of ours")

    monkeypatch.setitem(_HANDLERS, StartSession, start_session)
    before = archive.read_snapshot(), list(archive.read_turns(BEGINNING))
    for read in (_recover, recover_while_written):
        with pytest.raises(BugError, match=r"this is a bug of Breadbox .*turn 2.*report") as caught:
            read(archive)
        assert "of ours" in str(caught.value)
        assert "damaged" not in str(caught.value)
    assert before == (archive.read_snapshot(), list(archive.read_turns(BEGINNING)))


_SERVER_WITH_A_BUG = """
from breadbox_server.core.buffers import BufferSet
from breadbox_server.main import serve

def restore(*arguments, **keywords):
    raise AttributeError("of ours")

BufferSet.restore = restore
serve()
"""


def test_a_server_that_finds_a_bug_at_its_start_says_so_and_keeps_the_journal(
    broken: Callable[[bytes], JournalArchive], tmp_path: Path
) -> None:
    broken(encode_turn([(1.0, StartSession(DEFAULT, RUN))])).close()
    done = subprocess.run(
        [
            *(sys.executable, "-c", _SERVER_WITH_A_BUG, "--listen", "127.0.0.1:0"),
            *("--store", f"file://{tmp_path}/store", "--journal", f"file://{tmp_path}"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 70 == done.returncode, done.stderr
    line = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"Error: this is a bug of Breadbox .*turn 1.*of ours.*report.*", line)
    assert "Traceback" in done.stderr
    with closing(JournalPlace("sqlite", str(tmp_path)).open_archive()) as archive:
        assert [BEGINNING + 1] == [sequence for sequence, _ in archive.read_turns(BEGINNING)]


def _write_history(place: SqliteJournal, live: BufferSet) -> None:
    """Thirty turns of appends and publishes."""
    writer = place.open_writer()
    _, chain = open_snapshot(*place.archive.read_snapshot())
    journal = TurnJournal(writer, BEGINNING, chain)
    for step in range(30):
        now = float(step)
        if step % 10 == 0:
            live.apply(StartSession(DEFAULT, SessionId(f"run{step}")), now=now)
        else:
            live.apply(
                publish_model(step, session_id=f"run{step // 10 * 10}"),
                now=now,
            )
        live.take_events()
        _run_at_once(journal.append(live.take_entries()))
    _run_at_once(writer.close())


def _run_at_once(coroutine: Coroutine[Any, Any, object]) -> None:
    asyncio.run(coroutine)
