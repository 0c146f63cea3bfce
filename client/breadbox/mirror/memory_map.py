"""Large arrays whose pages cost memory only once something is written to them."""

import contextlib
import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HUGE_PAGES_MIN_BYTES = 1 << 22


def lazy_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array of zeros that takes memory as it is written to.

    Raises:
        MemoryError: The system grants no address space of that size.
    """
    size = max(1, math.prod(shape) * dtype.itemsize)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        raise MemoryError(f"{size / 1e9:.1f} GB for steps: {error.strerror}") from error
    if size >= _HUGE_PAGES_MIN_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # Fewer misses where rows are read at random.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=dtype, count=math.prod(shape)).reshape(shape)
