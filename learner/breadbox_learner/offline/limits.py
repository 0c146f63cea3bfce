"""Limits on what recorded data may ask for, so that a file cannot exhaust memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataLimits:
    """What a single value or episode may cost; beyond it the data is refused, nothing allocated."""

    value_bytes_max: int = 1 << 28
    """Decompressed bytes of one packed value."""
    array_bytes_max: int = 1 << 30
    """Bytes of one decoded array."""
    episode_bytes_max: int = 1 << 31
    """Serialized bytes of one episode."""
    row_group_bytes_max: int = 1 << 33
    """Decompressed bytes that a row group of a Parquet file may state."""
    json_block_bytes: int = 1 << 24
    """Bytes of JSON lines read at a time; a line must fit."""
    opcodes_max: int = 1 << 20
    """Instructions of one packed value."""


DEFAULT_LIMITS = DataLimits()
