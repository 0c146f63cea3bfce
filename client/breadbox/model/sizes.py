"""Parse and format sizes in bytes ("8GiB", "500MB", "1048576"), and format counts."""

import re
from typing import Final

UNITS_BYTES: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
"""Factor by unit, in capitals; small letters mean the same."""
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size_bytes(text: str) -> int:
    """Parse a size such as "8GiB", "500 MB", "1.5TiB" or "1048576", or raise ValueError."""
    match = _SIZE.fullmatch(text)
    unit_bytes = UNITS_BYTES.get(match[2].upper()) if match else None
    if match is None or unit_bytes is None:
        raise ValueError(f"must be a size such as 8GiB, 500MB or 1048576, got {text!r}")
    whole = match[1].isdigit()
    return int(match[1]) * unit_bytes if whole else int(float(match[1]) * unit_bytes)


def size_name(size_bytes: int) -> str:
    """Return a size exactly, in its largest whole unit: "8GiB", "1000"."""
    for unit, unit_bytes in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 buffer", "2 buffers"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
