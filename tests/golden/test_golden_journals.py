"""What servers of earlier versions left behind is read for ever."""

import json
import random
import shutil
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zstandard
from google.protobuf.message import Message

from breadbox_server.core.buffers import BufferSet
from breadbox_server.journal.compactor import compact
from breadbox_server.journal.encoding.codec import VERSION
from breadbox_server.journal.encoding.frames import open_snapshot, open_turn
from breadbox_server.journal.recovery import Recovered, recover
from breadbox_server.journal.storage.interface import JournalArchive
from breadbox_server.journal.storage.place import JournalPlace
from breadbox_server.journal.v1 import journal_pb2 as pb
from golden.readable import readable
from golden.schema import schema
from support.journals import claim_of
from support.redis_server import RedisServer

FOLDER = Path(__file__).parent / "journals"
VERSIONS = sorted(int(path.name.removeprefix("v")) for path in FOLDER.iterdir())


SINCE = {
    "chunks_delivered_late": 6,
    "chunks_evicted_deleted": 2,
    "chunks_missed": 2,
    "groups_complete": 5,
    "drop_equal": 6,
    "fragments_discarded_equal": 6,
    "groups_equal": 6,
    "groups_evicted": 5,
    "groups_given_back": 6,
    "groups_incomplete": 5,
    "groups_lost": 5,
    "groups_partial": 5,
    "groups_stale": 5,
    "lead_chunks": 3,
    "numbers": 6,
    "population": 2,
    "probability": 2,
    "fragments_discarded_dropped": 6,
    "fragments_discarded_given_back": 6,
    "fragments_discarded_replaced": 6,
    "part": 6,
    "replaces": 6,
    "required_parts": 6,
    "tickets_ended_expired": 6,
    "tickets_ended_given_back": 6,
    "tickets_ended_group_ended": 6,
    "tickets_ended_session_ended": 6,
    "tickets_given": 6,
    "version_delivered_count": 6,
}
"""What later servers make of the entries of earlier ones, by the version that brought it."""


def without_later(value: Any, version: int) -> Any:
    """What a server of a version would have made of its journal."""
    if isinstance(value, dict):
        return {
            name: without_later(each, version)
            for name, each in value.items()
            if SINCE.get(name, 1) <= version
        }
    return [without_later(each, version) for each in value] if isinstance(value, list) else value


Left = tuple[Path, JournalArchive]


@pytest.fixture(
    params=[f"{version} in {kind}" for version in VERSIONS for kind in ("sqlite", "redis")]
)
def left(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Left]:
    """A folder, and an archive of a copy of the journal in it."""
    version, kind = request.param.split(" in ")
    folder = FOLDER / f"v{version}"
    if kind == "sqlite":
        with closing(open_copy(folder, tmp_path / "journal")) as archive:
            yield folder, archive
        return
    with RedisServer() as server:
        load(server, json.loads((folder / "redis.json").read_text()))
        with closing(JournalPlace("redis", server.url).open_archive()) as archive:
            yield folder, archive


def open_copy(folder: Path, copy: Path) -> JournalArchive:
    shutil.copytree(folder / "sqlite", copy)
    copy.chmod(0o700)
    for path in copy.iterdir():
        path.chmod(0o600)
    return JournalPlace("sqlite", str(copy)).open_archive()


def load(server: RedisServer, dumped: dict[str, Any]) -> None:
    with server.client() as client:
        for key, value in dumped.items():
            if isinstance(value, str):
                client.set(key, b64decode(value))
            elif "hash" in value:
                client.hset(key, mapping=plain(value["hash"]))
            else:
                for entry_id, fields in value["stream"]:
                    client.xadd(key, plain(fields), id=entry_id)


def plain(fields: dict[str, str]) -> dict[str, bytes]:
    return {name: b64decode(value) for name, value in fields.items()}


def read(archive: JournalArchive) -> Recovered:
    return recover(archive, lambda taken: BufferSet.restore(taken, random.Random(0)))


def test_a_journal_of_each_version_is_read_back_as_it_was_left(left: Left) -> None:
    folder, archive = left
    assert archive.is_begun()
    found = read(archive)
    found.buffers.check_invariants()
    expected = json.loads((folder / "expected.json").read_text())
    version = int(folder.name.removeprefix("v"))
    assert expected == without_later(readable(found.buffers.snapshot()), version)


def test_a_journal_of_each_version_is_compacted_into_what_it_was(left: Left) -> None:
    _, archive = left
    claim_of(archive)
    before = compact(archive)
    assert before.turn_count
    after = read(archive)
    assert (before.sequence, 0) == (after.sequence, after.turn_count)
    assert before.buffers.snapshot() == after.buffers.snapshot()


def test_there_is_a_golden_journal_of_every_version() -> None:
    assert list(range(1, VERSION + 1)) == VERSIONS


def test_every_change_of_what_a_journal_holds_grows_the_version() -> None:
    """If this fails: grow `codec.VERSION`, and have `python tests/golden` write its folder."""
    pinned = json.loads((FOLDER / f"v{VERSION}" / "schema.json").read_text())
    assert pinned == schema()


def test_the_golden_journal_of_now_has_everything_in_it(tmp_path: Path) -> None:
    with closing(open_copy(FOLDER / f"v{VERSION}", tmp_path / "journal")) as archive:
        sequence, record = archive.read_snapshot()
        body, chain = open_snapshot(sequence, record)
        used = fields_of(pb.Snapshot.FromString(zstandard.decompress(body)))
        for turn, record in archive.read_turns(sequence):
            body, chain = open_turn(chain, turn, record)
            used |= fields_of(pb.Turn.FromString(body))
    known = {f"{name}.{field}" for name, fields in schema().items() for field in fields}
    enums = {each for each in known if each.rpartition(".")[2].isupper()}
    assert set() == known - enums - used


def fields_of(message: Message) -> set[str]:
    used = set()
    for field, value in message.ListFields():
        used.add(f"{message.DESCRIPTOR.full_name}.{field.name}")
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            used |= {f"{field.message_type.full_name}.{part}" for part in ("key", "value")}
            continue
        for each in [value] if isinstance(value, Message) else value:
            used |= fields_of(each)
    return used
