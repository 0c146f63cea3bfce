"""Large arrays whose pages cost memory only once something is written to them."""

import contextlib
import math
import mmap
import platform
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

_HUGE_PAGES_MIN_BYTES = 1 << 22


def _no_reserve() -> int:
    """Return the flag by which Linux promises address space beyond what memory there is.

    Python has the constant from 3.13 on. Linux has it alike wherever its generic headers apply;
    elsewhere nothing is asked for, as no other value is safe.
    """
    is_generic = platform.machine() in ("x86_64", "aarch64", "arm64", "riscv64", "s390x")
    known = 0x4000 if sys.platform == "linux" and is_generic else 0
    return getattr(mmap, "MAP_NORESERVE", known)


_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _no_reserve()

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
        """Return a context in which steps are removed; entering waits for readers with a lock."""

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
        """See `Memory.forget`; they are freed with their last reference."""


def lazy_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array of zeros that takes memory as it is written to.

    Raises:
        MemoryError: The system grants no address space of that size.
    """
    size = size_bytes_of(shape, dtype)
    try:
        memory = mmap.mmap(-1, size, flags=_PRIVATE)
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
