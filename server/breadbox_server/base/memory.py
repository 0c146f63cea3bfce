"""Memory that is free, and that the C library keeps."""

import ctypes

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's; other libraries give memory back by themselves, or never."""


def trim_heap() -> None:
    """Return free memory of the heap to the system; takes some milliseconds. From any thread."""
    if _TRIM is not None:
        _TRIM(0)
