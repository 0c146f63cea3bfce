"""Read many files by one system call: Linux's `io_submit`, which does buffered reads in place.

Beside a thread that holds the interpreter, one that releases it waits up to 5 ms to have it back.
Here only the reads release it, all together; opening and closing the files do not.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

FILES_MAX: Final = 64
"""Files of one call, all open meanwhile."""

_BUFFERS_MAX: Final = 1024
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PREADV: Final = 7
_REQUEST: Final = struct.Struct("<QIIHhIQQqQII")
"""`struct iocb` of linux/aio_abi.h."""
_EVENT: Final = struct.Struct("<QQqq")
"""`struct io_event` of the same."""
_IO_SETUP, _IO_SUBMIT, IO_GETEVENTS = {"aarch64": (0, 2, 4)}.get(
    platform.machine(), (206, 209, 208)
)
_is_known: Final = (
    sys.platform == "linux" and sys.maxsize > 2**32 and platform.machine() in ("aarch64", "x86_64")
)

_holding: Final = ctypes.PyDLL(None)
"""The C library, called without releasing the interpreter."""
call_holding: Final = _holding.syscall
call_releasing: Final = ctypes.CDLL(None, use_errno=True).syscall
for _function in (call_holding, call_releasing):
    _function.argtypes = (ctypes.c_long,) * 6
    _function.restype = ctypes.c_long

_contexts: list[int] = []
"""Idle contexts of `io_setup`. A call takes one for itself; a child process has none of them."""
os.register_at_fork(after_in_child=_contexts.clear)

_beyond: Final = memoryview(bytearray(1))
"""Receives the byte behind the last one wanted, where a file has one."""

File = tuple[Sequence[str], Sequence[memoryview]]
"""(paths, of which the first that opens is the file's; memory for every byte of it)."""


def read_whole(files: Sequence[File]) -> list[bool]:
    """Read files into memory of their exact lengths; return for each whether it came whole.

    The others are for the caller to read one by one, and to learn so what is wrong with them: all
    of them where the kernel has no such call, or has none to spare.
    """
    came: list[bool] = []
    while len(came) < len(files):
        part = files[len(came) : len(came) + FILES_MAX]
        context = _take_context()
        if context is None:
            return came + [False] * (len(files) - len(came))
        came += _read(context, part)
        # Not after an exception, which may have left events behind.
        _contexts.append(context)
    return came


def _read(context: int, files: Sequence[File]) -> list[bool]:
    came = [False] * len(files)
    requests = bytearray()
    vectors: list[array[int]] = []
    descriptors: list[int] = []
    try:
        for number, (paths, destinations) in enumerate(files):
            descriptor = _open(paths) if len(destinations) < _BUFFERS_MAX else -1
            if descriptor < 0:
                continue
            descriptors.append(descriptor)
            vector = array("Q")
            for buffer in (*destinations, _beyond):
                if len(buffer):
                    vector.extend((_address(buffer), len(buffer)))
            vectors.append(vector)
            at, count = vector.buffer_info()
            requests += _REQUEST.pack(
                number, 0, 0, _PREADV, 0, descriptor, at, count // 2, 0, 0, 0, 0
            )
        for number, size_bytes in _submit(context, requests):
            came[number] = size_bytes == sum(map(len, files[number][1]))
        return came
    finally:
        for descriptor in descriptors:
            _holding.close(descriptor)


def _submit(context: int, requests: bytearray) -> Iterator[tuple[int, int]]:
    """Do the requests; yield the number of each, and its bytes or a negative error."""
    if not requests:
        return
    first = _address(requests)
    pointers = array("Q", range(first, first + len(requests), _REQUEST.size))
    at, count = pointers.buffer_info()
    submitted = call_releasing(_IO_SUBMIT, context, count, at, 0, 0)
    if submitted <= 0:
        return
    events = bytearray(submitted * _EVENT.size)
    done = max(0, call_holding(IO_GETEVENTS, context, 0, submitted, _address(events), 0))
    while done < submitted:  # A file system, or a kernel, that goes on reading on its own.
        rest, at = submitted - done, _address(events) + done * _EVENT.size
        got = call_releasing(IO_GETEVENTS, context, rest, rest, at, 0)
        if got < 0 and ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), "reads did not end")
        done += max(0, got)
    for number, _, size_bytes, _ in _EVENT.iter_unpack(events):
        yield number, size_bytes


def _take_context() -> int | None:
    with suppress(IndexError):
        return _contexts.pop()
    made = array("Q", [0])
    if _is_known and not call_holding(_IO_SETUP, FILES_MAX, made.buffer_info()[0], 0, 0, 0):
        return made[0]
    return None


def _open(paths: Sequence[str]) -> int:
    descriptor = -1
    for path in paths:
        descriptor = _holding.open(os.fsencode(path), _READ)
        if descriptor >= 0:
            break
    return descriptor


def _address(buffer: bytearray | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
