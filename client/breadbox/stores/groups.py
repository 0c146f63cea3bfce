"""Group files: small payloads in memory that one call wrote, in one file.

    DIR/groups/<30 digits>     the payloads with ids that begin so; the last two are the place

A file has a table, then the payloads, one behind another. The table is a byte for the state of each
of 256 places, and 257 offsets: payload k is between offsets k and k + 1.

1. Nothing is locked. A process writes states of payloads alone that it was told to confirm or
   delete, and a state that is `GONE` stays so.
2. Before a payload is gone its bytes do not change. Afterwards a hole may be in their place, so a
   reader looks at the state after the last byte.
3. What is gone takes no memory but on pages with other payloads. With its last payload goes a file.
"""

import ctypes
import math
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any, Final

from breadbox.model.types import PayloadReference
from breadbox.stores.base import Confirmation, Part
from breadbox.stores.keys import (
    GROUP_PLACES,
    group_of,
    is_group,
    new_group_ids,
    payload_ids_of,
    place_of,
)

GROUP_COUNT_MIN: Final = 4
"""Fewest payloads of a call that share a file."""
GROUPED_SIZE_BYTES_MAX: Final = 64 * 1024
"""Largest payload that shares one; with a larger one in the call none does."""
GROUP_BYTES_MAX: Final = 1024 * 1024
"""Bytes of payloads after which the next one begins another file."""

GONE: Final = 0
UNANNOUNCED: Final = 1
CONFIRMED: Final = 2

_OFFSET_BYTES: Final = 4
TABLE_BYTES: Final = GROUP_PLACES + _OFFSET_BYTES * (GROUP_PLACES + 1)
_PAGE_BYTES: Final = 4096
_PUNCH: Final = 0x03
"""FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE of fallocate(2)."""


def ids_together(sizes: Sequence[int]) -> list[str] | None:
    """Return ids of payloads that one call writes into group files, or None for files of theirs."""
    if len(sizes) < GROUP_COUNT_MIN or max(sizes) > GROUPED_SIZE_BYTES_MAX or not min(sizes):
        return None
    payload_ids: list[str] = []
    places: Iterator[str] = iter(())
    room_bytes = 0
    for size_bytes in sizes:
        payload_id = next(places, "")
        if size_bytes > room_bytes or not payload_id:
            places, room_bytes = new_group_ids(), GROUP_BYTES_MAX
            payload_id = next(places)
        payload_ids.append(payload_id)
        room_bytes -= size_bytes
    return payload_ids


def gathered(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield parts, those of a group as one of its file."""
    for group, together in groupby(parts, lambda part: group_of(part.reference.payload_id)):
        if group is None:
            yield from together
            continue
        payloads = list(together)
        sizes = (part.reference.size_bytes for part in payloads)
        offsets = array("I", accumulate(sizes, initial=TABLE_BYTES))
        end = offsets[-1]
        offsets.extend([end] * (GROUP_PLACES + 1 - len(offsets)))
        states = bytes([UNANNOUNCED] * len(payloads)).ljust(GROUP_PLACES, bytes([GONE]))
        buffers = chain.from_iterable(part.buffers for part in payloads)
        table = memoryview(states + offsets.tobytes())
        yield Part(PayloadReference(group, end), 0, [table, *buffers])


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
        if not size_bytes:
            return Confirmation.MISSING
        is_right = size_bytes == reference.size_bytes
        return Confirmation.THERE if is_right else Confirmation.OTHER_SIZE

    def mark(self, places: set[int], state: int) -> None:
        """Set the states of places, by one write for neighbours."""
        changed = [place for place in sorted(places) if self.states[place] not in (GONE, state)]
        for _, run in groupby(enumerate(changed), lambda item: item[1] - item[0]):
            (_, first), *others = run
            os.pwrite(self._descriptor, bytes([state] * (1 + len(others))), first)

    def punch(self, places: set[int]) -> None:
        """Free the pages of payloads that are gone, with their neighbours that are."""
        for is_gone, run in groupby(range(GROUP_PLACES), lambda place: self.states[place] == GONE):
            dead = [*run]
            start, end = self._offsets[dead[0]], self._offsets[dead[-1] + 1]
            if is_gone and end - start >= _PAGE_BYTES and not places.isdisjoint(dead):
                _fallocate(self._descriptor, _PUNCH, start, end - start)


def is_there(descriptor: int, payload_id: str) -> bool:
    """Return False if a payload of an open group file is gone."""
    return any(os.pread(descriptor, 1, place_of(payload_id)))


class GroupFiles:
    """The group files of a payload directory. Thread-safe."""

    def __init__(self, directory: Path, unannounced: Path) -> None:
        self.directory = directory
        """Made by servers that know group files; where it is missing, clients write none."""
        self._unannounced = unannounced
        self._looked_until = -math.inf

    def path(self, group: str) -> str:
        return f"{self.directory}/{group}"

    def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        """Make payloads of the right size stay."""
        answers = [Confirmation.MISSING] * len(references)
        for name, positions in _by_group([each.payload_id for each in references]).items():
            with suppress(FileNotFoundError), self._open(name, os.O_RDWR) as group:
                found = {position: group.has(references[position]) for position in positions}
                there = [each for each, answer in found.items() if answer is Confirmation.THERE]
                places = {place_of(references[position].payload_id) for position in there}
                group.mark(places, CONFIRMED)
                os.stat(self.path(name))  # A sweep that saw no state of these took it away.
                for position, answer in found.items():
                    answers[position] = answer
        return answers

    def present(self, references: Sequence[PayloadReference]) -> list[bool]:
        """Return whether each payload is there."""
        answers = [False] * len(references)
        for name, positions in _by_group([each.payload_id for each in references]).items():
            with suppress(FileNotFoundError), self._open(name, os.O_RDONLY) as group:
                for position in positions:
                    answers[position] = group.has(references[position]) is Confirmation.THERE
        return answers

    def delete(self, payload_ids: Sequence[str]) -> None:
        """Delete payloads; missing ones are fine."""
        for name, positions in _by_group(payload_ids).items():
            places = {place_of(payload_ids[position]) for position in positions}
            with suppress(FileNotFoundError), self._open(name, os.O_RDWR) as group:
                group.mark(places, GONE)
                if any(group.look()):
                    group.punch(places)
                else:
                    os.unlink(self.path(name))

    def confirmed(self) -> Iterator[str]:
        """Yield the ids of confirmed payloads."""
        for name in self._names():
            with suppress(FileNotFoundError), self._open(name, os.O_RDONLY) as group:
                yield from (
                    payload_id
                    for payload_id, state in zip(payload_ids_of(name), group.states, strict=True)
                    if state == CONFIRMED
                )

    def sweep(self, before: float) -> int:
        """Delete files without confirmed payloads, unchanged since a time; return their payloads.

        Each file is looked at once after its last change, whenever a process died.
        """
        count = 0
        for name in self._names():
            with suppress(FileNotFoundError):
                if self._looked_until <= os.lstat(self.path(name)).st_mtime < before:
                    count += self._expire(name)
        self._looked_until = before
        return count

    def _expire(self, name: str) -> int:
        path, aside = self.path(name), f"{self._unannounced}/.{name}"
        with self._open(name, os.O_RDONLY) as group:
            if CONFIRMED in group.states:
                return 0
            # A server that confirms writes states before it looks for the file.
            os.rename(path, aside)
            if CONFIRMED in group.look():
                os.rename(aside, path)
                return 0
            os.unlink(aside)
            return GROUP_PLACES - group.states.count(GONE)

    def _names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [name for name in os.listdir(self.directory) if is_group(name)]
        return []

    @contextmanager
    def _open(self, name: str, flags: int) -> Iterator[Group]:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.path(name), flags)
        try:
            yield Group(descriptor)
        finally:
            os.close(descriptor)


def _by_group(payload_ids: Sequence[str]) -> dict[str, list[int]]:
    """Return the positions of payloads by their group files."""
    positions: dict[str, list[int]] = {}
    for position, payload_id in enumerate(payload_ids):
        group = group_of(payload_id)
        assert group is not None, "the caller asks for payloads of groups alone"
        positions.setdefault(group, []).append(position)
    return positions


def _function() -> Callable[[int, int, int, int], Any]:
    try:
        found = ctypes.CDLL(None).fallocate
    except (AttributeError, OSError, TypeError):
        return lambda *_: None
    found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return found


_fallocate: Final = _function()
