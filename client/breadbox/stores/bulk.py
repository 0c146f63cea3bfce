"""Receive many payloads, and digest them, by one call that releases the interpreter once.

Beside a thread that holds the interpreter, one that releases it waits up to 5 ms to have it back,
and one that holds it stops the other. So the work is done by a compiled library, `_bulk.c`. Where
it was not compiled, or xxhash hides its function, callers do the same step by step.
"""

import ctypes
import os
from array import array
from collections.abc import Sequence
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from breadbox.stores.spare import SPARE_SIZE_BYTES_MIN

Blocks = Sequence[tuple[int, int]]
"""(first byte, byte behind the last) of blocks to digest, counted over all of a memory, in order.
Each is without a gap in it."""


class File(NamedTuple):
    """A file to read."""

    paths: tuple[str, str, str]
    """The first that opens is the file's."""
    memory: Sequence[memoryview]
    """For every byte of it, in order."""
    blocks: Blocks


class Question(NamedTuple):
    """What is to be sent once so many bytes of answers are there."""

    after_bytes: int
    command: bytes


_PIECE: Final = 3
"""Numbers that describe one."""


def _compiled() -> tuple[Any, Any]:
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_bulk.so")))
        digest = ctypes.CDLL(import_module("xxhash._xxhash").__file__).XXH3_64bits
    except (ImportError, AttributeError, OSError):
        return None, None
    pointer, count = ctypes.c_void_p, ctypes.c_uint64
    library.read_files.argtypes = (count, count, *[pointer] * 8, count)
    library.read_files.restype = count
    library.receive.argtypes = (
        ctypes.c_int, pointer, count, pointer, count, pointer, pointer, count, pointer, count
    )  # fmt: skip
    library.receive.restype = ctypes.c_int64
    return library, ctypes.cast(digest, pointer)


_library, _digest = _compiled()
is_compiled: Final = _library is not None


def read_files(files: Sequence[File]) -> Sequence[Sequence[int] | None]:
    """Read files into memory of their exact lengths; return the XXH3-64 of each one's blocks.

    None stands for a file that did not come whole: it is for the caller to read alone, and to learn
    so what is wrong with it.
    """
    if not is_compiled:
        return [None] * len(files)
    encoded = [os.fsencode(path) for file in files for path in file.paths]
    paths = (ctypes.c_char_p * len(encoded))(*encoded)
    memories = [_pieces(file.memory) for file in files]
    pieces = array("Q", chain.from_iterable(memories))
    piece_counts = array("Q", [len(each) // _PIECE for each in memories])
    blocks = array("Q", chain.from_iterable(chain.from_iterable(file.blocks for file in files)))
    block_counts = array("Q", [len(file.blocks) for file in files])
    digests = array("Q", bytes(4 * len(blocks) + 8))
    are_whole = array("b", bytes(len(files) + 1))
    done = 0
    while done < len(files):
        done = _library.read_files(
            *(done, len(files), paths),
            *map(_address, (pieces, piece_counts, blocks, block_counts, digests)),
            _digest,
            _address(are_whole),
            SPARE_SIZE_BYTES_MIN,
        )
    rest = iter(digests)
    found = [[*islice(rest, count)] for count in block_counts]
    return [each if is_whole else None for each, is_whole in zip(found, are_whole, strict=False)]


def receive(
    descriptor: int,
    frames: Sequence[memoryview],
    values: Sequence[Sequence[memoryview]],
    blocks: Blocks,
    received_bytes: int,
    questions: Sequence[Question],
    digests: "array[int]",
) -> int:
    """Receive what is left of values and the frames around them, and send questions in their time.

    Blocks are counted over the values. `digests`, of `new_digests`, get the XXH3-64 of those that
    are whole. Returns bytes received so far: fewer than all if nothing came within the socket's own
    timeout, or after 0.1 s, so that Python handles signals.
    """
    pieces = _pieces(frames[:1], is_counted=False)
    for value, frame in zip(values, frames[1:], strict=True):
        pieces += _pieces(value) + _pieces([frame], is_counted=False)
    bounds = array("Q", chain.from_iterable(blocks))
    asked = array("Q")
    for after_bytes, command in questions:
        size_bytes = len(command)
        asked.extend(
            (
                ctypes.cast(ctypes.c_char_p(command), ctypes.c_void_p).value or 0,
                size_bytes,
                after_bytes,
            )
        )
    done = _library.receive(
        descriptor,
        _address(pieces),
        len(pieces) // _PIECE,
        _address(bounds),
        len(blocks),
        _address(digests),
        _digest,
        received_bytes,
        _address(asked),
        len(questions),
    )
    if done < 0:
        raise OSError(-done, os.strerror(-done))
    return int(done)


def new_digests(blocks: Blocks) -> "array[int]":
    """Return room for the digests of blocks."""
    return array("Q", bytes(8 * len(blocks)))


def _pieces(memory: Sequence[memoryview], *, is_counted: bool = True) -> "array[int]":
    """Return address, bytes and bytes counted of what is not empty, one after another."""
    pieces = array("Q")
    for each in memory:
        size_bytes = len(each)
        if size_bytes:
            address = ctypes.addressof(ctypes.c_char.from_buffer(each))
            pieces.extend((address, size_bytes, size_bytes * is_counted))
    return pieces


def _address(numbers: "array[int]") -> int:
    return numbers.buffer_info()[0]
