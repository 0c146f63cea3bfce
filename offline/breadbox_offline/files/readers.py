"""Read files as bounded streams, with errors that name file, row and column."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.json as arrow_json
import pyarrow.parquet as parquet

from breadbox.payload.limits import EXPANSION_MAX
from breadbox_offline.decoding.arrow import (
    check_type,
    columns_of,
    expanded_bytes,
    leaf_count,
    split_rows,
)
from breadbox_offline.errors import OfflineDataError, UnsupportedDatasetError, placed
from breadbox_offline.limits import DEFAULT_LIMITS, LIMIT_OPTION, DataLimits, check_bytes
from breadbox_offline.rows.columns import row_count
from breadbox_offline.training.prelearner import ITEM

PARQUET = ".parquet"
JSON_LINES = (".jsonl", ".ndjson", ".json")
MSGPACK = (".msgpack", ".mpk")


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows of a file."""

    columns: dict[str, Any]
    file: str
    first_row: int
    """Number of the first of these rows in the file, from 0."""


def read_file(
    path: Path, *, batch_rows: int = 4096, limits: DataLimits = DEFAULT_LIMITS
) -> Iterator[RowBatch]:
    """Yield the rows of one file, in order, at most `batch_rows` at a time."""
    reader = _reader_of(path)
    if reader is None:
        known = ", ".join((PARQUET, *JSON_LINES, *MSGPACK))
        raise UnsupportedDatasetError(f"is none of {known}", file=str(path))
    row = 0
    try:
        for columns in reader(path, batch_rows, limits):
            yield RowBatch(columns, str(path), row)
            row += row_count(columns)
    except OfflineDataError as error:
        error.add_place(file=str(path), row_offset=row)
        raise
    except MemoryError as error:
        raise OfflineDataError(
            f"needs more memory than there is ({LIMIT_OPTION})", file=str(path), row=row
        ) from error
    except (pa.ArrowException, OSError, RuntimeError, ValueError) as error:
        raise OfflineDataError(
            f"cannot be read: {error}".splitlines()[0], file=str(path), row=row
        ) from error


_Reader = Callable[[Path, int, DataLimits], Iterator[dict[str, Any]]]


def _reader_of(path: Path) -> _Reader | None:
    if path.suffix == PARQUET:
        return _read_parquet
    if path.suffix in JSON_LINES:
        return _read_json_lines
    return _read_msgpack if path.suffix in MSGPACK else None


def is_readable(path: Path) -> bool:
    """Return True if there is a reader for the file's suffix, and it is no pipe, which waits."""
    return _reader_of(path) is not None and not path.is_fifo()


def _read_parquet(path: Path, batch_rows: int, limits: DataLimits) -> Iterator[dict[str, Any]]:
    file_bytes = path.stat().st_size
    with parquet.ParquetFile(path) as file:
        shared, rows = _plan_parquet(file, file_bytes, batch_rows, limits)
    size_bytes = 0
    with parquet.ParquetFile(path, read_dictionary=shared) as file:
        for batch in file.iter_batches(batch_size=rows):
            size_bytes += expanded_bytes(batch)
            for part in split_rows(batch, limits):
                _check_file(file_bytes, size_bytes, limits)
                yield columns_of(part)


def _plan_parquet(
    file: parquet.ParquetFile, file_bytes: int, batch_rows: int, limits: DataLimits
) -> tuple[list[str], int]:
    value_bytes = 0
    fixed = {field.name: check_type(field, limits) for field in file.schema_arrow}
    shared: set[str] = set()
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        check_bytes(f"row group {number}", group.total_byte_size, limits.row_group_bytes_max)
        row_bytes = sum(each for each in fixed.values() if each is not None)
        text_bytes = 0
        for index in range(group.num_columns):
            held, described = group.column(index), file.schema.column(index)
            name, stated_bytes = held.path_in_schema, held.total_uncompressed_size
            is_text = described.physical_type == "BYTE_ARRAY"
            width = described.length or _PHYSICAL_BYTES.get(described.physical_type, 8)
            # Each value may repeat all of those before it. pyarrow reads none as shared ones.
            is_delta = any(each.startswith("DELTA") for each in held.encodings)
            repeats = is_text and is_delta
            top = next((each for each in fixed if f"{name}.".startswith(f"{each}.")), None)
            if top is None or fixed[top] is None:
                # A single row may have all of the values.
                each_bytes = stated_bytes if repeats else width
                with placed(column=name):
                    check_bytes(
                        f"row group {number}", held.num_values * each_bytes, limits.memory_bytes_max
                    )
                row_bytes += 8 + held.num_values * width // max(1, group.num_rows)
            if is_text:
                text_bytes += stated_bytes if repeats else stated_bytes // max(1, group.num_rows)
            if is_text and not is_delta and held.num_values * stated_bytes > limits.array_bytes_max:
                shared.add(name)
        value_bytes += row_bytes * group.num_rows
        rows = limits.batch_bytes // max(1, row_bytes + text_bytes)
        batch_rows = max(1, min(batch_rows, rows))
    _check_file(file_bytes, value_bytes, limits)
    return sorted(shared), batch_rows


def _check_file(file_bytes: int, size_bytes: int, limits: DataLimits) -> None:
    limit_bytes = limits.batch_bytes + EXPANSION_MAX * file_bytes
    check_bytes(f"a file of {file_bytes} bytes", size_bytes, limit_bytes)


_PHYSICAL_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}


def _read_json_lines(path: Path, batch_rows: int, limits: DataLimits) -> Iterator[dict[str, Any]]:
    parse = arrow_json.ParseOptions()
    column_count: int | None = None
    for block in read_blocks(path, limits):
        check_places(block, column_count, limits)
        table = arrow_json.read_json(
            pa.BufferReader(block),
            read_options=arrow_json.ReadOptions(block_size=len(block) + 1),
            parse_options=parse,
        )
        if column_count is None:
            # Later lines must have the types of the first ones.
            parse = arrow_json.ParseOptions(
                explicit_schema=table.schema, unexpected_field_behavior="error"
            )
            column_count = sum(map(leaf_count, table.schema.types))
        for batch in table.to_batches(max_chunksize=batch_rows):
            yield columns_of(batch)


def _read_msgpack(path: Path, batch_rows: int, limits: DataLimits) -> Iterator[dict[str, Any]]:
    items: list[bytes] = []
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file, max_buffer_size=limits.episode_bytes_max)
        start = 0
        while True:
            try:
                unpacker.skip()
            except msgpack.OutOfData:
                break
            end = unpacker.tell()
            items.append(_raw_item(path, start, end))
            start = end
            if len(items) == batch_rows:
                yield {ITEM: items}
                items = []
    if items:
        yield {ITEM: items}
    if start != path.stat().st_size:
        raise OfflineDataError(f"ends in the middle of an episode, after byte {start}")


def _raw_item(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(end - start)
    # A byte string contains a serialized episode; a map is one itself.
    return msgpack.unpackb(data) if data[0] in (0xC4, 0xC5, 0xC6) else data


_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_KEY = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")\s*:', re.DOTALL)
_KEYS_COUNTED_MAX = 32
_NO_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"\\'))
_DEEPER = np.zeros(256, np.int8)
_DEEPER[list(b"[{")] = 1
_DEEPER[list(b"]}")] = -1


def read_blocks(path: Path, limits: DataLimits) -> Iterator[bytes]:
    """Yield the lines of a file, in blocks of as many as fit."""
    rest = b""
    with path.open("rb") as file:
        while piece := file.read(limits.json_block_bytes - len(rest)):
            block = rest + piece
            end = block.rfind(b"\n") + 1
            if not end and len(block) >= limits.json_block_bytes:
                raise OfflineDataError(
                    f"a line has more than {limits.json_block_bytes} bytes ({LIMIT_OPTION})", row=0
                )
            rest = block[end:]
            if end:
                _check_depth(block[:end], limits)
                yield block[:end]
    if rest.strip():
        _check_depth(rest, limits)
        yield rest


def _check_depth(block: bytes, limits: DataLimits) -> None:
    if _depth(block) <= limits.depth_max:
        return
    row = next(
        row for row, line in enumerate(block.splitlines()) if _depth(line) > limits.depth_max
    )
    raise OfflineDataError(f"has more than {limits.depth_max} levels in each other", row=row)


def _depth(block: bytes) -> int:
    """Return the levels of the deepest value, without those in texts."""
    structure = block.translate(None, _NO_STRUCTURE)
    if b"\\" not in structure:
        # This removes texts without brackets in them, which are nearly all.
        structure = structure.replace(b'""', b"")
    if b'"' in structure or b"\\" in structure:
        structure = _TEXT.sub(b"", block).translate(None, _NO_STRUCTURE)
    steps = _DEEPER[np.frombuffer(structure, np.uint8)]
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))


def check_places(block: bytes, column_count: int | None, limits: DataLimits) -> None:
    """Refuse lines of objects that would together need too many cells, one per object and key."""
    objects = block.count(b"{")
    if column_count is None:
        column_count = block.count(b'"') // 2  # at most
        if objects * column_count > limits.json_block_bytes:
            column_count = _count_keys(block)
    if objects * column_count > limits.json_block_bytes:
        raise OfflineDataError(
            f"{objects} objects with {column_count} different keys have more than "
            f"{limits.json_block_bytes} places ({LIMIT_OPTION})",
            row=0,
        )


def _count_keys(block: bytes) -> int:
    keys = set(_KEY.findall(block[: block.find(b"\n") + 1]))
    # Usually each line has the keys of the first, and then all colons are theirs: counting them is
    # ten times as fast. Blocks with backslashes are not counted so.
    is_plain = len(keys) <= _KEYS_COUNTED_MAX and b"\\" not in block
    if is_plain and sum(block.count(key + b":") for key in keys) == block.count(b":"):
        return len(keys)
    return len(set(_KEY.findall(block)))
