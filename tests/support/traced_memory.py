"""How many bytes were held at once: by Python's own books, in which numpy's arrays stand too."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Traced:
    """Filled in when the block ends."""

    peak_bytes: int = 0
    """Most that was held at once inside the block, beyond what was held when it began."""


@contextmanager
def traced_memory() -> Iterator[Traced]:
    """Trace allocations of all threads inside the block."""
    traced = Traced()
    tracemalloc.start(1)
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield traced
        traced.peak_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
    finally:
        tracemalloc.stop()
