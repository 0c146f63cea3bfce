"""A checkpoint: all rows of the buffer in one file, and their index in `metadata.json`."""

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import breadbox
from breadbox.payload import decode_tree, encode_tree
from breadbox.stores.disk import replace_text
from breadbox_adapters.transfer_queue.rows import TASK, parts_of
from breadbox_adapters.transfer_queue.runtime import runtime

_INDEX: Final = "metadata.json"
_ROWS_AT_ONCE: Final = 256
"""Rows that are read or attached together."""
UNION: Final = "union"
"""Value of `BREADBOX_TQ_RESUME` with which rows that the server has win over a checkpoint's."""


def save_checkpoint(
    checkpoint_dir: str | Path,
    *,
    include_storage: bool = True,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Write all rows into a folder, in place of an older checkpoint, whole or not at all.

    `include_storage` changes nothing: a row that is cleared afterwards has to come back.

    Raises:
        OSError: The folder or a file cannot be written.
    """
    folder = Path(checkpoint_dir)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"rows-{uuid.uuid4().hex}.bin"
    with open(folder / name, "wb") as file:
        index = runtime.start(_saved(file)).result()
        os.fsync(file.fileno())
        size_bytes = file.tell()
    about = {"file": name, "size_bytes": size_bytes, "rows": index, "user_metadata": metadata or {}}
    replace_text(folder / _INDEX, json.dumps(about))
    for old in folder.glob("rows-*.bin"):
        if old.name != name:
            old.unlink()


async def _saved(file: Any) -> list[dict[str, Any]]:
    rows, index, end = await runtime.rows(), list[dict[str, Any]](), 0
    members = await rows.client.members()
    for start in range(0, len(members), _ROWS_AT_ONCE):
        some = {each.group: each for each in members[start : start + _ROWS_AT_ONCE]}
        for group, arrays in (await rows.read_left([*some])).items():
            size_bytes = sum(map(file.write, encode_tree(arrays)))
            place = {"offset": end, "size_bytes": size_bytes}
            index.append({"group": group, "numbers": some[group].numbers, **place})
            end += size_bytes
    file.flush()
    return index


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Make the rows those of a checkpoint: other rows are dropped, older values come back.

    Where `BREADBOX_TQ_RESUME` is "union", rows that the server has stay as they are, so that what
    it acknowledged since the checkpoint is kept, and only rows that are gone come back.

    Raises:
        FileNotFoundError: There is no checkpoint, or its file of rows is gone.
        ValueError: Its file of rows is not whole. No row was changed.
        PayloadCorruptError: The file has changed since it was written. No row was changed.
    """
    folder = Path(checkpoint_dir)
    about = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    with open(folder / about["file"], "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != about["size_bytes"]:
            raise ValueError(f"{file.name} has {size_bytes} bytes, not {about['size_bytes']}")
        for row in about["rows"]:
            _arrays(file, row)  # All are read before one is dropped.
        runtime.start(_loaded(file, about["rows"])).result()


async def _loaded(file: Any, index: list[dict[str, Any]]) -> None:
    client = (await runtime.rows()).client
    there = {(each.group, each.member) for each in await client.members()}
    if os.environ.get("BREADBOX_TQ_RESUME") == UNION:
        index = [each for each in index if (each["group"], 0) not in there]
    else:
        await client.drop_members(there)
    for start in range(0, len(index), _ROWS_AT_ONCE):
        some = index[start : start + _ROWS_AT_ONCE]
        await client.attach([part for each in some for part in _parts(file, each)], replace=True)


def _arrays(file: Any, row: dict[str, Any]) -> dict[str, Any]:
    file.seek(row["offset"])
    stored = bytearray(row["size_bytes"])
    file.readinto(stored)
    arrays: dict[str, Any] = decode_tree(stored)[0]
    return arrays


def _parts(file: Any, row: dict[str, Any]) -> Iterator[breadbox.Part]:
    arrays = _arrays(file, row)
    columns = {name: array for name, array in arrays.items() if not name.startswith(TASK)}
    yield from parts_of(row["group"], columns, row["numbers"])
    for name in arrays.keys() - columns.keys():
        yield breadbox.Part(group=row["group"], name=name, arrays={name: arrays[name]})
