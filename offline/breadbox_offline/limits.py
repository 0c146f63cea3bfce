"""Limit the memory that reading recorded data may take, so that no file can exhaust it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from breadbox_offline.errors import OfflineDataError


@dataclass(frozen=True, slots=True)
class DataLimits:
    """Limits of reading; data beyond them is refused before memory is allocated for it."""

    memory_bytes_max: int = 1 << 32
    """Bytes that one column of a row group, or one episode of a Minari dataset, may expand to."""
    value_bytes_max: int = 1 << 28
    """Decompressed bytes of one packed value."""
    array_bytes_max: int = 1 << 30
    """Bytes of one decoded array, row, video or file of arrays."""
    episode_bytes_max: int = 1 << 31
    """Serialized bytes of one episode."""
    row_group_bytes_max: int = 1 << 33
    """Decompressed bytes that a row group of a Parquet file may state."""
    batch_bytes: int = 1 << 28
    """Decoded bytes read at a time, or of one row; a Parquet file may have 256 x its size more."""
    json_block_bytes: int = 1 << 24
    """Bytes of JSON lines read at a time; a line must fit."""
    depth_max: int = 64
    """Levels of nested lists and maps, in a line of JSON and in a column."""
    opcodes_max: int = 1 << 20
    """Instructions of one packed value."""

    @classmethod
    def within(cls, memory_bytes: int) -> "DataLimits":
        """Return limits for so many bytes of memory; `DEFAULT_LIMITS` are those for 4 GiB."""
        return cls(
            memory_bytes_max=memory_bytes,
            value_bytes_max=memory_bytes >> 4,
            array_bytes_max=memory_bytes >> 2,
            episode_bytes_max=memory_bytes >> 1,
            row_group_bytes_max=memory_bytes << 1,
            batch_bytes=memory_bytes >> 4,
            json_block_bytes=max(1 << 16, memory_bytes >> 8),
        )


DEFAULT_LIMITS = DataLimits()

LIMIT_OPTION = "--memory-max of `breadbox import`, `DataLimits` in code"
"""Option that raises every limit on memory, for messages."""


def check_bytes(what: str, size_bytes: int, limit_bytes: int) -> None:
    """Raise OfflineDataError if a stated size is above its limit."""
    if not 0 <= size_bytes <= limit_bytes:
        raise OfflineDataError(
            f"{what} states {size_bytes} bytes; the limit is {limit_bytes} ({LIMIT_OPTION})"
        )


@contextmanager
def nested_at_most() -> Iterator[None]:
    """Turn a RecursionError within into an error about the data."""
    try:
        yield
    except RecursionError:
        raise OfflineDataError("is nested too deeply") from None


@contextmanager
def bounded_memory(memory_bytes: int, file: str) -> Iterator[None]:
    """Bound this process's memory growth (Linux), as a last resort; for whole programs only."""
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    held_bytes = _data_bytes()
    limit = (held_bytes or 0) + memory_bytes
    is_lower = all(each == resource.RLIM_INFINITY or limit < each for each in (before, hard))
    is_set = held_bytes is not None and is_lower
    if is_set:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    except MemoryError:
        raise OfflineDataError(
            f"needs more than {memory_bytes} bytes ({LIMIT_OPTION})", file=file
        ) from None
    finally:
        if is_set:
            resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _data_bytes() -> int | None:
    """Return the memory that counts against the limit on data, or None if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
    except OSError:
        return None
    return pages * resource.getpagesize()
