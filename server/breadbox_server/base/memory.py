"""Memory that is free, and that the C library keeps."""

import ctypes

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's; other libraries give memory back by themselves, or never."""


def give_memory_back() -> None:
    """Let the system have what is free of it; takes some milliseconds. From any thread."""
    if _TRIM is not None:
        _TRIM(0)
