"""Readers of files: streamed, bounded, and with errors that name file, row and column."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.json as arrow_json
import pyarrow.parquet as parquet

from breadbox_learner.offline.arrow import columns_of
from breadbox_learner.offline.columns import row_count
from breadbox_learner.offline.errors import OfflineDataError, UnsupportedDatasetError
from breadbox_learner.offline.limits import DEFAULT_LIMITS, DataLimits
from breadbox_learner.offline.prelearner import ITEM

PARQUET = ".parquet"
JSON_LINES = (".jsonl", ".ndjson", ".json")
MSGPACK = (".msgpack", ".mpk")


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Some consecutive rows of a file."""

    columns: dict[str, Any]
    file: str
    first_row: int
    """Row of the file (from 0) that the first row here is."""


def read_file(
    path: Path, *, batch_rows: int = 4096, limits: DataLimits = DEFAULT_LIMITS
) -> Iterator[RowBatch]:
    """The rows of one file, in order, at most `batch_rows` at a time.

    Raises:
        UnsupportedDatasetError: no reader is known for the file's suffix.
        OfflineDataError: the file is corrupt, or states a size beyond the limits; rows before that
            have been handed out.
    """
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
    except (pa.ArrowException, OSError, ValueError) as error:
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
    """Whether some reader is known for the file's suffix."""
    return _reader_of(path) is not None


def _read_parquet(path: Path, batch_rows: int, limits: DataLimits) -> Iterator[dict[str, Any]]:
    with parquet.ParquetFile(path) as file:
        for number in range(file.metadata.num_row_groups):
            size_bytes = file.metadata.row_group(number).total_byte_size
            if not 0 <= size_bytes <= limits.row_group_bytes_max:
                raise OfflineDataError(
                    f"row group {number} states {size_bytes} bytes; the limit is "
                    f"{limits.row_group_bytes_max}"
                )
        for batch in file.iter_batches(batch_size=batch_rows):
            yield columns_of(batch)


def _read_json_lines(path: Path, batch_rows: int, limits: DataLimits) -> Iterator[dict[str, Any]]:
    size_bytes = min(limits.json_block_bytes, max(1024, path.stat().st_size + 1))
    options = arrow_json.ReadOptions(block_size=size_bytes)
    with arrow_json.open_json(path, read_options=options) as reader:
        for block in reader:
            for start in range(0, len(block), batch_rows):
                yield columns_of(block.slice(start, batch_rows))


def _read_msgpack(path: Path, batch_rows: int, limits: DataLimits) -> Iterator[dict[str, Any]]:
    """A file of serialized episodes one after the other, bare or as byte strings."""
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
    # A byte string holds a serialized episode; a map is one.
    return msgpack.unpackb(data) if data[0] in (0xC4, 0xC5, 0xC6) else data
