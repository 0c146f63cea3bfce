"""`python tests/golden`: write golden journals of this version of the format, for good.

What is there is never written over: it is what servers of that version have left behind.
"""

import asyncio
import json
import random
import shutil
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.journal.compactor import compact
from breadbox_server.journal.encoding.codec import VERSION
from breadbox_server.journal.recovery import begin, recover
from breadbox_server.journal.storage.claims import Holder
from breadbox_server.journal.storage.place import JournalPlace
from breadbox_server.journal.turn_journal import TurnJournal
from golden.history import STARTED_AT, play
from golden.readable import readable
from golden.schema import schema
from support.redis_server import RedisServer

FOLDER = Path(__file__).parent / "journals"


async def write_history(place: JournalPlace) -> None:
    """One act in the snapshot, another one in the turns behind it."""
    archive = place.open_archive()
    claim = archive.claim(Holder.of_this_process())
    buffers = BufferSet(random.Random(7), BufferConfig(), is_recording=True)
    begun = begin(archive, buffers, STARTED_AT)
    # As after --journal-sync: else the machine that reads it would warn of another one's end.
    writer = place.open_writer(claim, sync=True)
    journal = TurnJournal(writer, begun.sequence, begun.chain)
    for act in range(2):
        play(buffers, act)
        entries = buffers.take_entries()
        # All of one act in two turns: one with runs of fragments, one that ends in between.
        for turn in (entries[: len(entries) // 2], entries[len(entries) // 2 :]):
            await journal.append(turn)
        if act == 0:
            compact(archive)
            await writer.trim(journal.sequence)
    await writer.close()
    archive.close()


def dump(client: Any) -> dict[str, Any]:
    """Every key with its value; bytes in base64."""
    dumped: dict[str, Any] = {}
    for key in sorted(client.scan_iter()):
        name, kind = key.decode(), client.type(key).decode()
        if kind == "string":
            dumped[name] = _text(client.get(key))
        elif kind == "hash":
            dumped[name] = {"hash": _fields(client.hgetall(key))}
        else:
            entries = client.xrange(key)
            dumped[name] = {"stream": [[each.decode(), _fields(held)] for each, held in entries]}
    return dumped


def _fields(fields: Any) -> dict[str, str]:
    return {name.decode(): _text(value) for name, value in fields.items()}


def _text(value: Any) -> str:
    return b64encode(value).decode()


def main() -> int:
    """Write the folder of this version."""
    folder = FOLDER / f"v{VERSION}"
    if folder.exists():
        sys.stderr.write(f"{folder} is there already: what was kept does not change\n")
        return 1
    directory = folder / "sqlite"
    place = JournalPlace("sqlite", str(directory))
    asyncio.run(write_history(place))
    with RedisServer() as server:
        asyncio.run(write_history(JournalPlace("redis", server.url)))
        with server.client() as client:
            _write(folder / "redis.json", dump(client))
    archive = place.open_archive()
    try:
        found = recover(archive, lambda taken: BufferSet.restore(taken, random.Random(0)))
    finally:
        archive.close()
    shutil.rmtree(directory / "reserve")
    _write(folder / "expected.json", readable(found.buffers.snapshot()))
    _write(folder / "schema.json", schema())
    return 0


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
