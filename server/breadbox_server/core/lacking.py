"""Members that lack a part, found without a look at all others (B34).

Kept for the claims that are made: a buffer without claims has no index and pays nothing. The first
claim of a kind makes its index from the open groups. In no journal and no snapshot.

K1  An index has the members that have a sequence, lack its part, may be taken by its claims, and
    are not claimed.
K2  Groups are taken in the order in which they are open: the longest silent first.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Final, NamedTuple

from breadbox_server.core.model.ids import WorkerId
from breadbox_server.core.model.inputs import Fragment
from breadbox_server.core.model.lazy_heap import LazyHeap

INDEXES_MAX: Final = 16
"""Kinds of claims with an index; a further one replaces the least recent that nothing waits for."""

MemberKey = tuple[WorkerId, int]
Parts = Mapping[str, Fragment]
Held = tuple[WorkerId, Mapping[int, Parts]]
"""An open group, and the parts of its members."""


class Wanted(NamedTuple):
    """A kind of claim: what its members lack, and the groups that it may take."""

    part: str
    groups: tuple[str, ...] | None = None
    """Patterns of their names, or None for all."""


class LackingIndex:
    """The members for one kind of claim."""

    __slots__ = ("free", "may_take", "order", "part")

    def __init__(
        self, part: str, may_take: Callable[[WorkerId], bool], places: Mapping[WorkerId, int]
    ) -> None:
        self.part = part
        self.may_take = may_take
        self.free: dict[WorkerId, list[int]] = {}
        """Members by group, in the order in which they came to lack it or were given back. A list
        takes a third of a dict's memory, and most groups have few members."""
        self.order: LazyHeap[tuple[int, WorkerId]] = LazyHeap(
            lambda entry: entry[1] in self.free and places[entry[1]] == entry[0]
        )

    def add(self, name: WorkerId, member: int, place: int) -> bool:
        """Add a member, unless its claims may not take it; return whether it is new."""
        members = self.free.get(name)
        if members is None:
            if not self.may_take(name):
                return False
            self.free[name] = [member]
            self.order.push((place, name))
        elif member in members:
            return False
        else:
            members.append(member)
        return True

    def remove(self, name: WorkerId, member: int) -> None:
        """Remove a member if it is there."""
        members = self.free.get(name)
        if members is not None and member in members:
            members.remove(member)
            if not members:
                self.leave(name)

    def leave(self, name: WorkerId) -> None:
        """Remove a group if it is there."""
        if self.free.pop(name, None) is not None:
            self.order.compact(len(self.free))


class Lacking:
    """The indexes of one buffer, and the members that are claimed."""

    def __init__(self) -> None:
        self.indexes: OrderedDict[Wanted, LackingIndex] = OrderedDict()
        """The least recently asked for first."""
        self.claimed: set[MemberKey] = set()
        self.has_more = True
        """Whether there may be members for claims that wait, since this was last set to False."""
        self._places: dict[WorkerId, int] = {}
        """Ascending in the order of the open groups; empty without an index."""
        self._last_place = 0

    def touch(self, name: WorkerId) -> None:
        """Put an open group behind all others."""
        self._last_place += 1
        place = self._places[name] = self._last_place
        for index in self.indexes.values():
            if name in index.free:
                index.order.push((place, name))
                index.order.compact(len(index.free))

    def note(self, name: WorkerId, member: int, parts: Parts) -> None:
        """Note the parts that a member of an open group has; empty if it has left."""
        for index in self.indexes.values():
            if not self._is_free(index.part, name, member, parts):
                index.remove(name, member)
            elif index.add(name, member, self._places[name]):
                self.has_more = True

    def _is_free(self, part: str, name: WorkerId, member: int, parts: Parts) -> bool:
        tokens = parts.get("")
        return (
            tokens is not None
            and tokens.payload.size_bytes > 0
            and part not in parts
            and (name, member) not in self.claimed
        )

    def _free_of(self, part: str, name: WorkerId, members: Mapping[int, Parts]) -> list[int]:
        return [each for each, has in members.items() if self._is_free(part, name, each, has)]

    def leave(self, name: WorkerId) -> None:
        """Let go of a group that is open no more."""
        self._places.pop(name, None)
        for index in self.indexes.values():
            index.leave(name)

    def clear(self) -> None:
        """Let go of all groups and indexes; claims that wait ask anew."""
        self.indexes.clear()
        self._places.clear()
        self.has_more = True

    def ask(
        self,
        wanted: Wanted,
        may_take: Callable[[WorkerId], bool],
        groups: Iterable[Held],
        is_awaited: Callable[[Wanted], bool],
    ) -> None:
        """Have an index for a kind of claim; a new one costs O(members of the open groups)."""
        if wanted in self.indexes:
            self.indexes.move_to_end(wanted)
            return
        excess_count = len(self.indexes) - INDEXES_MAX + 1
        unused = (each for each in self.indexes if not is_awaited(each))
        for each in list(islice(unused, max(0, excess_count))):
            del self.indexes[each]
        index = LackingIndex(wanted.part, may_take, self._places)
        for name, members in groups:
            if name not in self._places:
                self.touch(name)
            free = self._free_of(wanted.part, name, members)
            if free and may_take(name):
                index.free[name] = free
        index.order.replace([(self._places[name], name) for name in index.free])
        self.indexes[wanted] = index

    def take(self, wanted: Wanted, count_max: int) -> list[MemberKey]:
        """Claim members; O(their number, and that of the indexes)."""
        taken: list[MemberKey] = []
        index = self.indexes[wanted]
        while len(taken) < count_max and (entry := index.order.first()) is not None:
            name = entry[1]
            for member in index.free[name][: count_max - len(taken)]:
                taken.append((name, member))
                self.claimed.add((name, member))
                for each in self.indexes.values():
                    each.remove(name, member)
        return taken

    def check_invariants(self, groups: Iterable[Held]) -> None:
        """Assert K1 and K2; O(members of the open groups, and that for each index)."""
        held = list(groups)
        if self.indexes:
            assert [*self._places] != [] or not held, "K2: places"
        places = [self._places[name] for name, _ in held if self.indexes]
        assert places == sorted(self._places.values()), "K2: the order of silence"
        for wanted, index in self.indexes.items():
            expected = {
                name: sorted(free)
                for name, members in held
                if index.may_take(name) and (free := self._free_of(wanted.part, name, members))
            }
            assert {name: sorted(free) for name, free in index.free.items()} == expected, "K1"
            entries = index.order.first_many(len(held) + 1)
            assert [name for _, name in entries] == [*expected], "K2: the order of a claim"
