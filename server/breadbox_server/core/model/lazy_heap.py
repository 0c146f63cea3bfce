"""A min-heap whose entries die by themselves, and are dropped when they surface.

Removing from the middle would cost a search. An entry may be pushed again after it died: both
copies are live then, and equal.
"""

from collections.abc import Callable, Iterable
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

EntryT = TypeVar("EntryT", bound=Any)

WASTE_MIN = 64
"""Dead entries that are never worth a compaction."""


class LazyHeap(Generic[EntryT]):
    """Orders entries at O(log n) amortised; only the owner's acts may change `is_live`."""

    __slots__ = ("_entries", "_is_live", "push")

    def __init__(self, is_live: Callable[[EntryT], bool]) -> None:
        self._is_live = is_live
        self._entries: list[EntryT] = []
        self.push: Callable[[EntryT], None] = partial(heappush, self._entries)
        """Add a live entry. No method, since a frame of Python would cost more than the push."""

    def __len__(self) -> int:
        return len(self._entries)

    def first(self) -> EntryT | None:
        """Return the smallest live entry, or None if there is none."""
        entries = self._entries
        while entries:
            if self._is_live(entries[0]):
                return entries[0]
            heappop(entries)
        return None

    def first_many(self, count: int) -> list[EntryT]:
        """Return the `count` smallest live entries, ascending, each once, or all if fewer live."""
        taken: list[EntryT] = []
        while len(taken) < count and (entry := self.first()) is not None:
            heappop(self._entries)
            if not taken or entry != taken[-1]:
                taken.append(entry)
        for entry in taken:
            heappush(self._entries, entry)
        return taken

    def compact(self, live_count: int) -> None:
        """Drop the dead if they outnumber the live, distinct `live_count`; O(1) amortised."""
        if len(self._entries) > 2 * live_count + WASTE_MIN:
            self.replace(dict.fromkeys(filter(self._is_live, self._entries)))

    def replace(self, entries: Iterable[EntryT]) -> None:
        """Hold exactly these entries from now on."""
        self._entries[:] = list(entries)
        heapify(self._entries)
