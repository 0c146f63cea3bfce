"""Recycle the memory of large arrays: fresh memory costs as much as receiving into it."""

import ctypes
import itertools
import math
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

RECYCLED_BYTES_MIN: Final = 1024 * 1024
"""Smallest array whose memory is recycled; the allocator keeps smaller ones at hand."""
IDLE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Kept in a process for arrays to come; beyond it, what has been idle for longest is freed."""
Block: TypeAlias = ctypes.Array[ctypes.c_ubyte]
"""Memory that numpy allocated, seen by something that is no array."""
idle_blocks: dict[int, Block] = {}
"""By the order in which they became idle. No lock, since giving back may run inside any holder of
it: each use of this is one step of the interpreter's."""
_order = itertools.count()


class _Lent(np.ndarray[Any, Any]):
    """Give a block of memory back once the last view of it, or tensor over it, is gone."""

    def __del__(self) -> None:
        # Numpy lets a view of a view refer to what is behind the two, though never past an object
        # of another type over memory that is no array: so this one outlives all of its views.
        if isinstance(self.base, ctypes.Array):
            _give_back(self.base)


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Make an array as `numpy.empty` does, in memory that was used before where some fits."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < RECYCLED_BYTES_MIN:
        return np.empty(shape, dtype)
    block: Any = _take(size_bytes)  # Numpy's annotations know fewer kinds of buffers than it takes.
    lent = _Lent((size_bytes,), np.uint8, buffer=block)
    return lent.view(np.ndarray).view(dtype).reshape(shape)


def _take(size_bytes: int) -> Block:
    # The latest first: some of it may still be in a cache.
    for number, block in reversed(idle_blocks.copy().items()):
        if len(block) == size_bytes and idle_blocks.pop(number, None) is not None:
            return block
    return (ctypes.c_ubyte * size_bytes).from_buffer(np.empty(size_bytes, np.uint8).data)


def _give_back(block: Block) -> None:
    if len(block) > IDLE_BYTES_MAX:
        return
    idle_blocks[next(_order)] = block
    idle = idle_blocks.copy()
    excess_bytes = sum(map(len, idle.values())) - IDLE_BYTES_MAX
    for number, oldest in idle.items():
        if excess_bytes <= 0:
            return
        idle_blocks.pop(number, None)
        excess_bytes -= len(oldest)
