"""Share memory between one process that fills it and others that read it, mostly without locks.

All of it is one anonymous file, which the kernel frees with its last user. It begins with a head of
numbers; arrays follow, each mapped by itself; no range is ever reused for another.

The head is under a sequence lock: its first number is odd while the writer changes it, and a reader
repeats until it reads the same even number before and after. The writer announces in the head what
it will overwrite, so a reader chooses by a head, copies, and checks the choice in the newer head.
After several failed attempts the reader takes a shared lock on the file, for which the writer
waits; the kernel releases a dead process's lock.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from breadbox.mirror.following import MirrorReader, Progress
from breadbox.mirror.storage.columns import Columns, Layout
from breadbox.mirror.storage.index import StepIndex
from breadbox.mirror.storage.priorities import StepPriorities
from breadbox.mirror.storage.rings import (
    NOWHERE,
    Memory,
    StateLayout,
    States,
    array_in,
    size_bytes_of,
)
from breadbox.mirror.storage.step_storage import STATE, Check, FilledStepStorage, StepStorage
from breadbox.model.errors import ClosedError, InvalidRequestError, PayloadCorruptError
from breadbox.model.fragment import Fragment
from breadbox.payload.format import decode_tree, encode_tree

HEAD_BYTES: Final = 8192
_SESSION_AT: Final = 4096
_ODD_S_MAX: Final = 0.2
"""Seconds after which a changing head means a stopped writer."""
_POLL_S: Final = 0.002
_BYTE: Final = np.dtype(np.uint8)
_UNREAD: Final = -2
_WHOLE_FILE: Final = struct.Struct("hhqqi")
"""The kernel's `struct flock`: kind, whence, start, length (0: all), process."""


class RingHead(NamedTuple):
    """The range and place of a ring's records."""

    first: int = 0
    end: int = 0
    size: int = 0
    place: int = NOWHERE


class Head(NamedTuple):
    """The state of the memory."""

    generation: int = 0
    layout_count: int = 0
    layout_place: int = NOWHERE
    layout_size: int = 0
    inserted_count: int = 0
    size_bytes: int = 0
    low: int = 0
    floor: int = 0
    high: int = 0
    unusable_count: int = 0
    fragment_low: int = 0
    state_count: int = 0
    cursor: int = _UNREAD
    begun_count: int = 0
    skipped_chunk_count: int = 0
    has_failed: int = 0
    behind_since_ns: int = 0
    session_size: int = 0
    session_count: int = 0
    rings: tuple[RingHead, ...] = (RingHead(),) * 4
    """Heads of `StepIndex.rings`."""


_SCALARS: Final = len(Head._fields) - 1
_NUMBERS: Final = 1 + _SCALARS + 4 * len(RingHead._fields)
_AT: Final = {name: 1 + place for place, name in enumerate(Head._fields)}
_EPISODES_FIRST_AT: Final = _AT["rings"] + len(RingHead._fields)


def make_file() -> int:
    """Create the memory and return its descriptor, or raise InvalidRequestError off Linux."""
    if not hasattr(os, "memfd_create"):
        raise InvalidRequestError(
            "process", "needs anonymous shared memory, which Linux alone has: leave it out"
        )
    descriptor = os.memfd_create("breadbox-mirror", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, HEAD_BYTES)
    # No process that has the file can remove pages that another one reads.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


@contextlib.contextmanager
def _locked(descriptor: int, kind: int) -> Iterator[None]:
    """Lock the file inside the block, by an opening of its own.

    A lock of the process would end when any descriptor of the file is closed in it.
    """
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(own, fcntl.F_OFD_SETLKW, _WHOLE_FILE.pack(kind, os.SEEK_SET, 0, 0, 0))
        yield
    finally:
        os.close(own)


class SharedMemory(Memory):
    """The memory as its writer uses it; the descriptor, from `make_file`, stays open."""

    def __init__(self, descriptor: int) -> None:
        self.head = mmap.mmap(descriptor, HEAD_BYTES)
        self._descriptor = descriptor
        self._end = HEAD_BYTES
        self._arrays: list[mmap.mmap] = []

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[NDArray[Any], int]:
        size, place = size_bytes_of(shape, dtype), self._end
        page = mmap.ALLOCATIONGRANULARITY
        self._end += -(-size // page) * page
        try:
            os.ftruncate(self._descriptor, self._end)
            memory = mmap.mmap(self._descriptor, size, offset=place)
        except OSError as error:
            raise MemoryError(f"{size / 1e9:.1f} GB for steps: {error.strerror}") from error
        self._arrays.append(memory)
        return array_in(memory, shape, dtype), place

    @contextlib.contextmanager
    def letting_go(self) -> Iterator[None]:
        with _locked(self._descriptor, fcntl.F_WRLCK):
            yield

    def forget(self) -> None:
        """See `Memory.forget`; readers that still use the arrays find zeros."""
        for memory in self._arrays:
            memory.madvise(mmap.MADV_REMOVE)
        self._arrays.clear()


class Publisher:
    """Write the head of what a process fills; called under the lock."""

    def __init__(
        self, memory: SharedMemory, held: FilledStepStorage, mirror_reader: MirrorReader
    ) -> None:
        self._memory = memory
        self._held = held
        self._reader = mirror_reader
        self._numbers = np.frombuffer(memory.head, np.int64, _NUMBERS)
        self._layout_count = 0
        self._contents: NDArray[np.uint8] | None = None
        self._place = NOWHERE
        self._session = b""
        self._session_count = 0
        self._between = threading.Lock()

    def publish(self) -> None:
        """Write what there is."""
        held, mirror_reader, index = self._held, self._reader, self._held.index
        if held.layout_count != self._layout_count:
            self._publish_contents()
        session = mirror_reader.session_id.encode()[: HEAD_BYTES - _SESSION_AT]
        values = (
            held.generation,
            held.layout_count,
            self._place,
            0 if self._contents is None else len(self._contents),
            held.inserted_count,
            held.size_bytes,
            index.low,
            index.floor,
            index.high,
            index.unusable_count,
            index.fragment_low,
            index.state_count,
            _UNREAD if mirror_reader.cursor is None else mirror_reader.cursor,
            mirror_reader.begun_count,
            mirror_reader.skipped_chunk_count,
            mirror_reader.failure is not None,
            int(mirror_reader.behind_since * 1e9),
            len(session),
            self._session_count + (session != self._session),
            *chain.from_iterable(
                RingHead() if ring is None else (ring.first, ring.end, ring.size, ring.place)
                for ring in index.rings
            ),
        )
        self._step()
        self._numbers[1:] = values
        if session != self._session:
            self._memory.head[_SESSION_AT : _SESSION_AT + len(session)] = session
            self._session = session
            self._session_count += 1
        self._step()

    def _step(self) -> None:
        """Increment the head's count: odd while the head changes."""
        # Locks are memory barriers, for processors that would reorder the writes.
        with self._between:
            self._numbers[0] += 1
        with self._between:
            pass

    def _publish_contents(self) -> None:
        held = self._held
        self._layout_count = held.layout_count
        self._contents, self._place = None, NOWHERE
        if not held.example:
            return
        places = {name: np.int64(place) for name, place in held.places.items()}
        data = b"".join(encode_tree({"example": held.example, "places": places}))
        self._contents, self._place = self._memory.array((len(data),), _BYTE)
        self._contents[:] = np.frombuffer(data, np.uint8)


class SharedStepStorage(StepStorage):
    """Steps that another process fills. Closes the memory's descriptor; *clear* empties both."""

    def __init__(
        self,
        capacity_steps: int,
        frame_stack: Mapping[str, int],
        descriptor: int,
        clear: Callable[[], None],
    ) -> None:
        super().__init__(capacity_steps)
        self._frame_stack = frame_stack
        self.head = Head()
        self.session_id = ""
        self._clear = clear
        self._process_id = os.getpid()
        self._let_go: Callable[[], object] = lambda: None
        self.look_at(descriptor)

    def progress(self) -> Progress:
        """Return how far the other process had come at the last `refresh`."""
        head = self.head
        return Progress(
            self.session_id,
            None if head.cursor == _UNREAD else head.cursor,
            head.begun_count,
            head.skipped_chunk_count,
            head.behind_since_ns / 1e9,
        )

    def look_at(self, descriptor: int) -> None:
        """Switch to another memory; called under the lock."""
        self._let_go()
        self._descriptor = descriptor
        self._let_go = weakref.finalize(self, os.close, descriptor)
        self._head_map = mmap.mmap(descriptor, HEAD_BYTES, prot=mmap.PROT_READ)
        self._numbers = np.frombuffer(self._head_map, np.int64, _NUMBERS)
        self._seen = 0
        self._begin_anew(Head())

    def peek(self) -> None:
        """See what there is, without the arrays."""
        read = self._read_head()
        if read is not None and read[0]:  # 0: no head was written yet.
            self.head = read[1]

    def is_no_newer_than(self, other: "SharedStepStorage") -> bool:
        """Return True if another memory has as much as this one, what replaced it, or failed."""
        ours, theirs = self.progress(), other.progress()
        if other.head.has_failed or theirs.cursor is None:
            return bool(other.head.has_failed)
        is_same = (ours.session_id, ours.begun_count) == (theirs.session_id, theirs.begun_count)
        return not is_same or ours.cursor is None or theirs.cursor >= ours.cursor

    def _begin_anew(self, head: Head) -> None:
        self.head = head
        self._columns = None
        self.index = StepIndex(head.low)
        self.priorities = StepPriorities(self.row_count, head.low)
        self._layout_count = 0

    def refresh(self) -> Check:
        """See `StepStorage.refresh`; raises ClosedError if the process was forked since."""
        if os.getpid() != self._process_id:
            raise ClosedError(
                "this mirror was made before a fork; attach in this process: "
                "ReplayMirror.attach(address), with the address that share() gave before"
            )
        numbers = self._numbers
        while int(numbers[0]) != self._seen:
            read = self._read_head()
            if read is None:
                break
            try:
                self._show(read[1])
            except PayloadCorruptError:
                # Its arrays were forgotten before they were mapped.
                if int(numbers[_AT["generation"]]) == read[1].generation:
                    raise
                continue
            self._seen = read[0]
        episodes_first = self.index.episodes.first

        def still_has(number: int) -> bool:
            return (
                int(numbers[_AT["floor"]]) <= number
                and int(numbers[_EPISODES_FIRST_AT]) == episodes_first
            )

        return still_has

    def _read_head(self) -> tuple[int, Head] | None:
        """Return the head and its count, or None if its writer was stopped midway."""
        numbers = self._numbers
        began_at = time.monotonic()
        while True:
            count = int(numbers[0])
            if not count & 1:
                values = numbers[1:].tolist()
                session = None
                if not self._seen or values[_AT["session_count"] - 1] != self.head.session_count:
                    size = values[_AT["session_size"] - 1]
                    session = self._head_map[_SESSION_AT : _SESSION_AT + size]
                if int(numbers[0]) == count:
                    break
            if time.monotonic() - began_at > _ODD_S_MAX:
                return None
            time.sleep(0.0)
        rings = tuple(
            RingHead._make(values[at : at + 4]) for at in range(_SCALARS, _NUMBERS - 1, 4)
        )
        if session is not None:
            self.session_id = session.decode(errors="replace")
        return count, Head._make([*values[:_SCALARS], rings])

    def _show(self, head: Head) -> None:
        if head.generation != self.head.generation:
            self._begin_anew(head)
        if head.layout_count != self._layout_count:
            self._learn(head)
        index = self.index
        for ring, shown in zip(index.rings, head.rings, strict=True):
            if ring is not None:
                if ring.place != shown.place:
                    array = self._array(shown.place, ring.shape(shown.size), ring.dtype)
                    ring.lie_in(array, shown.place)
                ring.first, ring.end = shown.first, shown.end
        index.low, index.floor, index.high = head.low, head.floor, head.high
        index.unusable_count, index.fragment_low = head.unusable_count, head.fragment_low
        index.state_count = head.state_count
        self.inserted_count, self.size_bytes = head.inserted_count, head.size_bytes
        self.head = head

    def _learn(self, head: Head) -> None:
        self._columns = None
        self.index.states = None
        if head.layout_place != NOWHERE:
            data = self._array(head.layout_place, (head.layout_size,), _BYTE)
            contents, _ = decode_tree(memoryview(data.tobytes()))
            example, places = contents["example"], contents["places"]
            self._columns = Columns(
                Layout.of(example, self._frame_stack),
                self.row_count,
                lambda name, *like: self._array(int(places[name]), *like),
            )
            if STATE in example:
                self.index.states = States(StateLayout.of(example[STATE]), 0)
        self._layout_count = head.layout_count

    def _array(self, place: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        if place == NOWHERE:
            return np.empty(shape, dtype)
        size = size_bytes_of(shape, dtype)
        return array_in(
            mmap.mmap(self._descriptor, size, prot=mmap.PROT_READ, offset=place), shape, dtype
        )

    def is_steady(self) -> bool:
        numbers = self._numbers
        return (
            int(numbers[_AT["floor"]]) == self.index.floor
            and int(numbers[_AT["generation"]]) == self.head.generation
            and int(numbers[_EPISODES_FIRST_AT]) == self.index.episodes.first
        )

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        with _locked(self._descriptor, fcntl.F_RDLCK):
            yield

    def wait_for(self, is_there: Callable[[], bool], timeout_s: float) -> bool:
        over_at = time.monotonic() + timeout_s
        while True:
            self.refresh()
            if is_there():
                return True
            left_s = over_at - time.monotonic()
            if left_s <= 0:
                return False
            self.changed.wait(min(left_s, _POLL_S))

    def extend(self, fragment: Fragment, chunk_id: int | None) -> int:
        """Raise InvalidRequestError, because another process fills this."""
        raise InvalidRequestError(
            "fragment", "cannot be added to a mirror that another process fills from the buffer"
        )

    def clear(self) -> None:
        self._clear()
