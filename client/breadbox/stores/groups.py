"""Group files: small payloads in memory that one call wrote, in one file.

    DIR/groups/<30 digits>     the payloads with ids that begin so; the last two are the place

A file has a table, then the payloads, one behind another. The table is a byte for the state of each
of 256 places, and 257 offsets: payload k is between offsets k and k + 1.

1. Nothing is locked. A process writes the states of those payloads alone that it confirms or
   deletes, and a server does not confirm what a client discards or what is being deleted.
2. Before a payload is gone its bytes do not change. Afterwards a hole may be in their place, so a
   reader looks at the state after the last byte.
3. What is gone takes no memory but on pages with other payloads. With its last payload goes a file.
"""

import ctypes
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, chain, compress, groupby
from pathlib import Path
from typing import Final

from breadbox.model.types import PayloadReference
from breadbox.stores.base import Confirmation, Part
from breadbox.stores.keys import GROUP_PLACES, group_of, new_group, payload_ids_of, place_of

GROUP_COUNT_MIN: Final = 8
"""Fewest payloads of a call that share a file."""
GROUPED_SIZE_BYTES_MAX: Final = 64 * 1024
"""Largest payload that shares one; with a larger one in the call none does."""
GROUP_BYTES_MAX: Final = 1024 * 1024
"""Bytes of payloads after which the next one begins another file."""

GONE, UNANNOUNCED, CONFIRMED = range(3)

TABLE_BYTES: Final = GROUP_PLACES + 4 * (GROUP_PLACES + 1)
_PAGE_BYTES: Final = 4096
_PUNCH: Final = 0x03
"""FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE of fallocate(2)."""


def ids_together(sizes: Sequence[int]) -> list[str]:
    """Return ids of payloads that one call writes, or [] where each gets a file of its own."""
    payload_ids: list[str] = []
    if len(sizes) < GROUP_COUNT_MIN or max(sizes) > GROUPED_SIZE_BYTES_MAX or not min(sizes):
        return payload_ids
    places: Iterator[str] = iter(())
    room_bytes = 0
    for size_bytes in sizes:
        payload_id = next(places, "")
        if size_bytes > room_bytes or not payload_id:
            places, room_bytes = payload_ids_of(new_group()), GROUP_BYTES_MAX
            payload_id = next(places)
        payload_ids.append(payload_id)
        room_bytes -= size_bytes
    return payload_ids


def gathered(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield group files, each as a part, for the payloads of `ids_together`."""
    for group, together in groupby(parts, lambda part: str(group_of(part.reference.payload_id))):
        payloads = list(together)
        sizes = (part.reference.size_bytes for part in payloads)
        offsets = array("I", accumulate(sizes, initial=TABLE_BYTES))
        offsets.extend(offsets[-1:] * (GROUP_PLACES - len(payloads)))
        states = bytes([UNANNOUNCED] * len(payloads)).ljust(GROUP_PLACES, bytes([GONE]))
        table = memoryview(states + offsets.tobytes())
        buffers = chain.from_iterable(part.buffers for part in payloads)
        yield Part(PayloadReference(group, offsets[-1]), 0, [table, *buffers])


class Group:
    """An open group file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        table = os.pread(descriptor, TABLE_BYTES, 0).ljust(TABLE_BYTES, b"\0")
        self.states = table[:GROUP_PLACES]
        """As of the last look."""
        self._offsets = array("I", table[GROUP_PLACES:])

    def look(self) -> bytes:
        """Read the states again."""
        self.states = os.pread(self._descriptor, GROUP_PLACES, 0).ljust(GROUP_PLACES, b"\0")
        return self.states

    def range_of(self, payload_id: str) -> tuple[int, int]:
        """Return the first byte of a payload, and its size; 0 if it is gone."""
        place = place_of(payload_id)
        start, end = self._offsets[place : place + 2]
        return start, end - start if self.states[place] != GONE else 0

    def has(self, reference: PayloadReference) -> Confirmation:
        """Return what is in a payload's place."""
        size_bytes = self.range_of(reference.payload_id)[1]
        if size_bytes == reference.size_bytes:
            return Confirmation.THERE
        return Confirmation.OTHER_SIZE if size_bytes else Confirmation.MISSING

    def mark(self, payload_ids: Iterable[str], state: int) -> None:
        """Set the states of payloads, by one write for neighbours."""
        places = sorted(map(place_of, payload_ids))
        changed = [place for place in places if self.states[place] not in (GONE, state)]
        for _, run in groupby(enumerate(changed), lambda item: item[1] - item[0]):
            (_, first), *others = run
            os.pwrite(self._descriptor, bytes([state] * (1 + len(others))), first)

    def free(self, payload_ids: Iterable[str]) -> None:
        """Free the pages of payloads that are gone, with their neighbours that are."""
        places = {*map(place_of, payload_ids)}
        for state, run in groupby(range(GROUP_PLACES), self.states.__getitem__):
            alike = [*run]
            start, end = self._offsets[alike[0]], self._offsets[alike[-1] + 1]
            if state == GONE and end - start >= _PAGE_BYTES and not places.isdisjoint(alike):
                _punch(self._descriptor, start, end - start)


class GroupFiles:
    """The group files of a payload directory. Thread-safe."""

    def __init__(self, directory: Path, unannounced: Path) -> None:
        self.directory = directory
        """Made by servers that know group files; where it is missing, clients write none."""
        self._unannounced = unannounced
        self._looked_until = -math.inf

    def path(self, group: str) -> str:
        return f"{self.directory}/{group}"

    def confirm(self, group: str, references: Sequence[PayloadReference]) -> list[Confirmation]:
        """Make payloads of a group stay that have the right size."""
        try:
            with self._open(group, os.O_RDWR) as file:
                found = [*map(file.has, references)]
                right = compress(references, [each is Confirmation.THERE for each in found])
                file.mark([each.payload_id for each in right], CONFIRMED)
                os.stat(self.path(group))  # Raises where a sweep that saw no mark took it away.
                return found
        except FileNotFoundError:
            return [Confirmation.MISSING] * len(references)

    def present(self, group: str, references: Sequence[PayloadReference]) -> list[bool]:
        """Return whether each payload of a group is there."""
        try:
            with self._open(group, os.O_RDONLY) as file:
                return [file.has(each) is Confirmation.THERE for each in references]
        except FileNotFoundError:
            return [False] * len(references)

    def delete(self, group: str, payload_ids: Sequence[str]) -> None:
        """Delete payloads of a group; missing ones are fine."""
        with suppress(FileNotFoundError), self._open(group, os.O_RDWR) as file:
            file.mark(payload_ids, GONE)
            if any(file.look()):
                file.free(payload_ids)
            else:
                os.unlink(self.path(group))

    def confirmed(self) -> Iterator[str]:
        """Yield the ids of confirmed payloads."""
        for group in self._groups():
            with suppress(FileNotFoundError), self._open(group, os.O_RDONLY) as file:
                are_confirmed = [state == CONFIRMED for state in file.states]
                yield from compress(payload_ids_of(group), are_confirmed)

    def sweep(self, before: float) -> int:
        """Delete files without confirmed payloads, unchanged since a time; return their payloads.

        Each file is looked at once after its last change, whenever a process died.
        """
        count = 0
        for group in self._groups():
            with suppress(FileNotFoundError):
                if self._looked_until <= os.lstat(self.path(group)).st_mtime < before:
                    count += self._expire(group)
        self._looked_until = before
        return count

    def _expire(self, group: str) -> int:
        path, aside = self.path(group), f"{self._unannounced}/.{group}"
        with self._open(group, os.O_RDONLY) as file:
            if CONFIRMED in file.states:
                return 0
            # A server that confirms writes states before it looks for the file.
            os.utime(path)  # Or another sweep takes it from there.
            os.rename(path, aside)
            if CONFIRMED in file.look():
                os.rename(aside, path)
                return 0
            os.unlink(aside)
            return GROUP_PLACES - file.states.count(GONE)

    def _groups(self) -> Iterator[str]:
        with suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            files = [each.name for each in entries if each.is_file(follow_symlinks=False)]
            yield from [name for name in files if group_of(name) == name]

    @contextmanager
    def _open(self, group: str, flags: int) -> Iterator[Group]:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.path(group), flags)
        try:
            yield Group(descriptor)
        finally:
            os.close(descriptor)


_libc: Final = ctypes.CDLL(None)


def _punch(descriptor: int, start: int, size_bytes: int) -> None:
    _libc.fallocate(descriptor, _PUNCH, ctypes.c_int64(start), ctypes.c_int64(size_bytes))
