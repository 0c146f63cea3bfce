"""JSON lines in blocks of whole lines, looked at before anything is built of them.

A line may cost far more than its bytes: levels in each other cost stack, and every column that one
line names has a place in all others. Both are counted here without a Python object per value.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from breadbox_offline.errors import OfflineDataError
from breadbox_offline.limits import LIMIT_OPTION, DataLimits

_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_KEY = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")\s*:', re.DOTALL)
_KEYS_COUNTED_MAX = 32
_NO_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"\\'))
_DEEPER = np.zeros(256, np.int8)
_DEEPER[list(b"[{")] = 1
_DEEPER[list(b"]}")] = -1


def read_blocks(path: Path, limits: DataLimits) -> Iterator[bytes]:
    """The lines of a file, as many at a time as fit a block."""
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
                _demand_depth(block[:end], limits)
                yield block[:end]
    if rest.strip():
        _demand_depth(rest, limits)
        yield rest


def _demand_depth(block: bytes, limits: DataLimits) -> None:
    if _depth(block) <= limits.depth_max:
        return
    row = next(
        row for row, line in enumerate(block.splitlines()) if _depth(line) > limits.depth_max
    )
    raise OfflineDataError(f"has more than {limits.depth_max} levels in each other", row=row)


def _depth(block: bytes) -> int:
    """Levels of the deepest value; what stands in texts is none."""
    structure = block.translate(None, _NO_STRUCTURE)
    if b"\\" not in structure:
        # Texts without brackets in them are gone now, which are nearly all.
        structure = structure.replace(b'""', b"")
    if b'"' in structure or b"\\" in structure:
        structure = _TEXT.sub(b"", block).translate(None, _NO_STRUCTURE)
    steps = _DEEPER[np.frombuffer(structure, np.uint8)]
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))


def demand_places(block: bytes, column_count: int | None, limits: DataLimits) -> None:
    """Refuse lines of which each object would have a place for every key that any of them has.

    Lines that name their columns themselves have fewer places than bytes.
    """
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
    """How many different keys objects have, nested ones included."""
    keys = set(_KEY.findall(block[: block.find(b"\n") + 1]))
    # Mostly each line has the keys of the first. Then all colons are theirs, which is counted in a
    # tenth of the time; what a backslash does to that is not thought through here.
    is_plain = len(keys) <= _KEYS_COUNTED_MAX and b"\\" not in block
    if is_plain and sum(block.count(key + b":") for key in keys) == block.count(b":"):
        return len(keys)
    return len(set(_KEY.findall(block)))
