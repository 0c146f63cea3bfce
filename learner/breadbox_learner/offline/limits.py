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
    opcodes_max: int = 1 << 20
    """Instructions of one packed value."""


DEFAULT_LIMITS = DataLimits()
