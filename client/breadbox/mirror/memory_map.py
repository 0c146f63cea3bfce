"""Large arrays whose pages cost memory only once something is written to them."""

import contextlib
import math
import mmap
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

_HUGE_PAGES_MIN_BYTES = 1 << 22

NOWHERE: Final = -1
"""Place of an array that nobody else can find."""


class Memory(Protocol):
    """Where the arrays of a mirror are."""

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[NDArray[Any], int]:
        """Make an array of zeros; returns it and its place.

        Raises:
            MemoryError: The system grants no address space of that size.
        """

    def letting_go(self) -> AbstractContextManager[None]:
        """While readers are told that something goes; waits for those that must not lose it."""

    def forget(self) -> None:
        """Give back all arrays that were made: nobody uses them any more."""


class PrivateMemory:
    """Arrays of this process alone, whose threads agree by a lock."""

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[NDArray[Any], int]:
        """See `Memory.array`."""
        return lazy_array(shape, dtype), NOWHERE

    @contextlib.contextmanager
    def letting_go(self) -> Iterator[None]:
        """See `Memory.letting_go`; the lock is held already."""
        yield

    def forget(self) -> None:
        """See `Memory.forget`; they go with who has them."""


def lazy_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array of zeros that takes memory as it is written to.

    Raises:
        MemoryError: The system grants no address space of that size.
    """
    size = size_bytes_of(shape, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        raise MemoryError(f"{size / 1e9:.1f} GB for steps: {error.strerror}") from error
    return array_in(memory, shape, dtype)


def size_bytes_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Bytes to map for an array."""
    return max(1, math.prod(shape) * dtype.itemsize)


def array_in(memory: mmap.mmap, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """See mapped memory as an array, which keeps it mapped."""
    if len(memory) >= _HUGE_PAGES_MIN_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # Fewer misses where rows are read at random.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=dtype, count=math.prod(shape)).reshape(shape)
