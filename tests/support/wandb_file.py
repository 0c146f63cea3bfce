"""Reads what Weights & Biases writes in offline mode, for tests that have the package."""

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER_BYTES = 7
_BLOCK_BYTES = 32 * 1024
_PIECE_HEADER = struct.Struct("<IHB")  # checksum, size, kind
_WHOLE, _FIRST, _LAST = 1, 2, 4


def read_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the one run below *folder*: its name, project and config, and its history."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    record_type = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    run: dict[str, Any] = {}
    history = []
    for data in _records(path.read_bytes()):
        record = record_type.FromString(data)
        if record.HasField("run"):
            config = {each.key: json.loads(each.value_json) for each in record.run.config.update}
            run = {"id": record.run.run_id, "project": record.run.project, "config": config}
        if record.HasField("history"):
            items = record.history.item
            history.append(
                {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in items
                }
            )
    return run, history


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format."""
    position = _FILE_HEADER_BYTES
    parts = b""
    while position + _PIECE_HEADER.size <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _PIECE_HEADER.size:
            position += left
            continue
        _, size, kind = _PIECE_HEADER.unpack_from(data, position)
        position += _PIECE_HEADER.size
        piece = data[position : position + size]
        position += size
        parts = piece if kind in (_WHOLE, _FIRST) else parts + piece
        if kind in (_WHOLE, _LAST):
            yield parts
