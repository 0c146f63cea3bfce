"""Groups: members in any order, from any worker, become one chunk (B32).

To the rest of the core a group is a worker: `worker_id` names it, `fragment_index` is the member,
and what was judged of it is remembered member by member.

O1  Members of an open group are different, and below `fragments_per_chunk`; so are the parts of
    each (B34).
O2  A group is open, or has ended with one reason and the number of that end; an open one has at
    least one member.
O3  Ends stand in order of their numbers.
O4  A group with a ticket is open, or has no member yet and is not remembered.
O5  A member is complete if it has each required part.
O6  What was listed or claimed once is found by an index: names in order, and `Lacking` (K1, K2).
O7  If there was a search for a group to forget, those with nothing held are found by an index.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from operator import attrgetter
from typing import ClassVar, Final

from breadbox_server.core.lacking import Held, Lacking, MemberKey
from breadbox_server.core.model.config import MEMBERS_MAX
from breadbox_server.core.model.description import GroupEnd, OpenGroup
from breadbox_server.core.model.events import EvictionReason, TicketEnd
from breadbox_server.core.model.ids import ModelVersion, PayloadId, WorkerId
from breadbox_server.core.model.inputs import Fragment, GroupEndReason, VersionOf
from breadbox_server.core.model.lazy_heap import LazyHeap
from breadbox_server.core.model.sorted_names import SortedNames
from breadbox_server.core.pacing import Reserved
from breadbox_server.core.state.assembly import (
    ADMITTED_CODE,
    CLOSES,
    GOES_ON,
    AppendPreview,
    Assembly,
    OpenChunk,
    Worker,
)
from breadbox_server.core.state.payloads import PayloadLedger
from breadbox_server.core.state.tickets import Tickets

SHOWN_MAX: Final = 8
"""Open groups that are described, the longest silent first, and of each the members that lack."""
_UNUSED: Final = {
    EvictionReason.STALE: GroupEndReason.STALE,
    EvictionReason.PAYLOAD_LOST: GroupEndReason.LOST,
    EvictionReason.QUARANTINED: GroupEndReason.LOST,
}
_KEY: Final = attrgetter("key")
_END_NUMBER: Final = attrgetter("end_number")


class GroupChunk(OpenChunk):
    """A group that is open: its members, complete or not, with the parts that they have.

    A member without a sequence yet may have a fragment without a payload, for its numbers.
    """

    __slots__ = ("complete", "members", "numbers", "required")

    def __init__(
        self,
        worker_id: WorkerId,
        fragments: Sequence[Fragment],
        touched_at: float,
        version_of: VersionOf,
        required: Sequence[str],
    ) -> None:
        super().__init__(worker_id, list(fragments), touched_at, version_of)
        self.kept = []
        self.members: dict[int, dict[str, Fragment]] = {}
        """The parts of each member, in the order in which they came."""
        self.numbers: dict[int, str] = {}
        """Numbers of each member, from all that came of it."""
        self.complete: set[int] = set()
        self.required = required
        for each in fragments:
            self.take(each)

    @property
    def fragments(self) -> list[Fragment]:
        """All parts, member by member; O(fragments of the group)."""
        return list(self._all())

    @property
    def first(self) -> Fragment:
        """The first of its fragments, in constant time."""
        return next(self._all())

    def _all(self) -> Iterator[Fragment]:
        return (each for parts in self.members.values() for each in parts.values())

    def find(self, key: tuple[int, str]) -> Fragment | None:
        """Return a part of a member, or None if it has none."""
        return self.members.get(key[0], {}).get(key[1])

    def has(self, key: tuple[int, str]) -> bool:
        """Return whether a member has a part, with a payload."""
        fragment = self.find(key)
        return fragment is not None and fragment.payload.size_bytes > 0

    def has_all(self, member: int) -> bool:
        """Return whether a member is complete."""
        return all([self.has((member, part)) for part in self.required])

    def only_merges(self, fragment: Fragment) -> bool:
        """Return whether nothing of a fragment stays but its numbers."""
        return not fragment.payload.size_bytes and fragment.fragment_index in self.members

    def take(self, fragment: Fragment) -> int:
        """Take in a member, a part or numbers, and return how many fragments more there are.

        One of the same key goes: what is attached last counts where arrays of several parts have
        one name.
        """
        member = fragment.fragment_index
        if fragment.numbers:
            known = self.numbers.get(member)
            self.numbers[member] = merged(known, fragment.numbers) if known else fragment.numbers
        if self.only_merges(fragment):
            return 0
        parts = self.members.setdefault(member, {})
        gone = parts.pop(fragment.part, None)
        parts[fragment.part] = fragment
        if self.has_all(member):
            self.complete.add(member)
        return 1 if gone is None else 0

    def take_out(self, member: int) -> list[Fragment]:
        """Take a member out, and return all of it."""
        self.complete.discard(member)
        self.numbers.pop(member, None)
        return list(self.members.pop(member).values())

    def whole(self) -> list[Fragment]:
        """Return its fragments; the first of each member has its numbers."""
        return self.with_numbers(self.fragments)

    def with_numbers(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        """Return fragments, the first of each member with its numbers."""
        seen, found = set[int](), []
        for each in fragments:
            member = each.fragment_index
            numbers = "" if member in seen else self.numbers.get(member, "")
            seen.add(member)
            found.append(each if each.numbers == numbers else replace(each, numbers=numbers))
        return found


def merged(known: str, more: str) -> str:
    """Return numbers with others that are newer."""
    both: str = _encode(json.loads(known) | json.loads(more))
    return both


_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_NONE: Final[Set[tuple[int, str]]] = frozenset()


class Groups(Assembly):
    """The groups of the current session; `on_end` is called with each end."""

    in_any_order: ClassVar = True

    def __init__(
        self,
        fragments_per_chunk: int,
        version_of: VersionOf,
        tickets: Tickets,
        on_end: Callable[[GroupEndReason], None],
        drop_equal: Callable[[], str],
        on_left_over: Callable[[list[Fragment]], None],
        required: Sequence[str],
    ) -> None:
        """Read *drop_equal*, the limit of the buffer, at each delivery: it may change meanwhile.

        *on_left_over* gets what incomplete members of a delivered group have.
        """
        super().__init__(fragments_per_chunk, version_of, tickets)
        self.required = required
        """Parts with which a member is complete; changes only while nothing is open."""
        self._on_left_over = on_left_over
        self._names: SortedNames | None = None
        """Names of open groups in order, or None if they were never listed."""
        self.lacking = Lacking()
        self._on_end = on_end
        self._drop_equal = drop_equal
        self._ends: dict[int, Worker] = {}
        self._heard_count = 0
        self._idle: LazyHeap[tuple[int, WorkerId]] | None = None
        """Groups with nothing held, the longest silent first, or None if none was ever searched
        for. Most groups have ended: the bound on them is met all the time."""

    @property
    def reserved_count(self) -> int:
        """Number of groups that are open, those with a ticket and no member included."""
        return len(self.open) + len(self.tickets.unbegun)

    def reserved(self) -> Iterator[Reserved]:
        """List the open groups; one with a ticket may yet get a member of the ticket's version."""
        for name in (*self.open, *self.tickets.unbegun):
            version = self._reserved_version(name)
            assert version is not None, "it is open, or has a ticket"
            yield Reserved(version, name)

    def _reserved_version(self, name: WorkerId) -> ModelVersion | None:
        chunk, version = self.open.get(name), super()._reserved_version(name)
        if chunk is None or version is None:
            return version if chunk is None else chunk.version
        return min(chunk.version, version)

    def preview(
        self,
        worker: Worker | None,
        fragment: Fragment,
        reserved: Set[tuple[int, str]] = _NONE,
    ) -> AppendPreview:
        """Return what `place` would do with a fragment, once others that are reserved are there."""
        if worker is not None and worker.end is not None:
            return AppendPreview(None, 0, closes_chunk=False, end=worker.end)
        if not self.fragments_per_chunk:
            return GOES_ON
        ticket = self.tickets.by_group.get(fragment.worker_id)
        if ticket is not None and fragment.fragment_index in ticket.given_back:
            return AppendPreview(None, 0, closes_chunk=False, end=GroupEndReason.GIVEN_BACK)
        chunk, awaited_count = self.chunk_of(worker), self.awaited_count(fragment.worker_id)
        there_count = 0 if chunk is None else len(chunk.complete)
        if there_count + len(reserved) + 1 < awaited_count:
            return GOES_ON  # Each part that is reserved completes one member at most.
        count = self._count_with(chunk, fragment, reserved)
        return CLOSES if count >= awaited_count else GOES_ON

    def _count_with(
        self, chunk: GroupChunk | None, fragment: Fragment, reserved: Set[tuple[int, str]]
    ) -> int:
        """Count the members that are complete with a fragment; 0 if it completes none."""
        member = fragment.fragment_index
        complete: Set[int] = frozenset() if chunk is None else chunk.complete
        if (
            not fragment.payload.size_bytes
            or fragment.part not in self.required
            or member in complete
        ):
            return 0

        def has_all(member: int, more: tuple[int, str] | None = None) -> bool:
            keys = [(member, part) for part in self.required]
            return all(
                [
                    key == more or key in reserved or (chunk is not None and chunk.has(key))
                    for key in keys
                ]
            )

        if not has_all(member, fragment.key) or has_all(member):
            return 0
        if reserved:
            complete = complete | {each for each, _ in reserved if has_all(each)}
        return len(complete) + 1

    @staticmethod
    def chunk_of(group: Worker | None) -> GroupChunk | None:
        """Return what is open of a group, or None."""
        chunk = None if group is None else group.open_chunk
        return chunk if isinstance(chunk, GroupChunk) else None

    def awaited_count(self, name: WorkerId) -> int:
        """Return how many members a group is to have: all but those that its ticket gave back."""
        ticket = self.tickets.by_group.get(name)
        return self.fragments_per_chunk - (0 if ticket is None else len(ticket.given_back))

    def place(self, worker: Worker, fragment: Fragment, *, now: float) -> list[Fragment] | None:
        """Put a member into its group; return all members if they are complete, or None.

        If they are to be dropped as equal, the group's end says so.
        """
        chunk = self.chunk_of(worker)
        if chunk is None:
            self.open_again(worker, [fragment], now)
            chunk = self.chunk_of(worker)
            assert chunk is not None, "opened just now"
        else:
            self.open_fragment_count += chunk.take(fragment)
            chunk.touched_at = now
            self.open.move_to_end(worker.worker_id)
            if self.lacking.indexes:
                member = fragment.fragment_index
                self.lacking.touch(worker.worker_id)
                self.lacking.note(worker.worker_id, member, chunk.members[member])
            version = self.version_of(fragment)
            if version < chunk.version:
                chunk.version = version
                self._by_version.push((chunk.version, worker.worker_id))
                self._note_reserved(worker.worker_id)
        is_short = len(chunk.complete) < self.awaited_count(worker.worker_id)
        return None if is_short or not self.fragments_per_chunk else self.deliver(worker, chunk)

    def deliver(self, group: Worker, chunk: GroupChunk) -> list[Fragment]:
        """End a group with the members that are complete, and return them, as `place` does."""
        is_whole = len(chunk.complete) == self.fragments_per_chunk
        reason = GroupEndReason.COMPLETE if is_whole else GroupEndReason.PARTIAL
        fragments = sorted(self.discard(group), key=_KEY)
        if left_over := [each for each in fragments if each.fragment_index not in chunk.complete]:
            self._on_left_over(left_over)
            fragments = [each for each in fragments if each.fragment_index in chunk.complete]
        members = chunk.with_numbers(fragments)
        name = self._drop_equal()
        self._end(group, GroupEndReason.EQUAL if name and _agree(members, name) else reason)
        return members

    def drop_row(self, name: WorkerId, member: int) -> list[Fragment]:
        """Drop a row, and its group with the last row; return its fragments, or nothing."""
        group = self.workers.get(name)
        chunk = self.chunk_of(group)
        if group is None or chunk is None or member not in chunk.members:
            return []
        if len(chunk.members) == 1:
            del self.workers[name]
            return self.discard(group)
        gone = chunk.take_out(member)
        self.lacking.note(name, member, {})
        self.open_fragment_count -= len(gone)
        # Its version may be older now than its rows: these are never stale.
        return gone

    def names_from(self, name: str) -> Iterator[WorkerId]:
        """Yield the names of open groups from one on, in order; the first listing sorts them."""
        if self._names is None:
            self._names = SortedNames(self.open)
        return self._names.since(name)

    def held(self) -> Iterator[Held]:
        """Go through the members of open groups, the longest silent group first."""
        for name, chunk in self.open.items():
            assert isinstance(chunk, GroupChunk), "of groups"
            yield name, chunk.members

    def end_claim(self, keys: Iterable[MemberKey]) -> None:
        """Give claimed members back to the claims that come or wait."""
        for name, member in keys:
            self.lacking.claimed.discard((name, member))
            chunk = self.chunk_of(self.workers.get(name))
            if chunk is not None:
                self.lacking.note(name, member, chunk.members.get(member, {}))

    def drop(self, group: Worker, reason: GroupEndReason) -> list[Fragment]:
        """End a group, open or not yet begun, as a whole, and return its members."""
        members = [] if group.open_chunk is None else self.discard(group)
        self._end(group, reason)
        return members

    def postpone(self, group: Worker, now: float) -> None:
        """Let a silent group stay open for as long again, behind those that are open."""
        open_chunk = self.open[group.worker_id]
        # Under a shorter silence than before, others may have had a member since it was due.
        open_chunk.touched_at = max(now, self.open[next(reversed(self.open))].touched_at)
        self.open.move_to_end(group.worker_id)
        if self.lacking.indexes:
            self.lacking.touch(group.worker_id)

    def end_stale(self, worker: Worker) -> list[Fragment]:
        """End the group of a stale member: it would be stale as a whole, whichever came first."""
        return self.drop(worker, GroupEndReason.STALE)

    def discard_stale(self, version_min: int) -> list[Fragment]:
        """End the groups with a member older than a version; return all their members."""
        gone: list[Fragment] = []
        while (entry := self._by_version.first()) is not None and entry[0] < version_min:
            gone += self.drop(self.workers[entry[1]], GroupEndReason.STALE)
        return gone

    def discard_lost(self, worker_id: WorkerId, payload_ids: Set[PayloadId]) -> list[Fragment]:
        """End the group, or the rows, of members with lost payloads; return all of them."""
        group = self.workers[worker_id]
        chunk = self.chunk_of(group)
        if self.fragments_per_chunk or chunk is None:
            return self.drop(group, GroupEndReason.LOST)
        lost = dict.fromkeys(
            [e.fragment_index for e in chunk.fragments if e.payload.payload_id in payload_ids]
        )
        return [each for member in lost for each in self.drop_row(worker_id, member)]

    def note_unused(self, fragments: Sequence[Fragment], reason: EvictionReason) -> None:
        """Change the ends of groups with chunks that left unused; not if their session ends."""
        if reason is EvictionReason.SESSION_ENDED:
            return
        for name in dict.fromkeys([each.worker_id for each in fragments]):
            self._end(self.workers[name], _UNUSED.get(reason, GroupEndReason.EVICTED))

    def discard_all(self) -> list[Fragment]:
        """Give up every open group, the longest silent first, and forget every group."""
        self._ends.clear()
        self._names = None
        self.lacking.clear()
        self._idle = None
        return super().discard_all()

    def put(self, worker: Worker, open_chunk: OpenChunk) -> None:
        """Open a group, behind those that are open."""
        super().put(worker, open_chunk)
        name = worker.worker_id
        if self._names is not None:
            self._names.add(name)
        if self.lacking.indexes and isinstance(open_chunk, GroupChunk):
            self.lacking.touch(name)
            for member, parts in open_chunk.members.items():
                self.lacking.note(name, member, parts)
        self.tickets.unbegun.pop(name, None)
        self._note_reserved(name)

    def discard(self, worker: Worker) -> list[Fragment]:
        """Give up an open group, and return its fragments."""
        if self._names is not None:
            self._names.remove(worker.worker_id)
        if self.lacking.indexes:
            self.lacking.leave(worker.worker_id)
        fragments = super().discard(worker)
        self._note_reserved(worker.worker_id)
        return fragments

    def open_again(self, worker: Worker, fragments: list[Fragment], touched_at: float) -> None:
        """Open a group with the fragments that it has."""
        place = (worker.worker_id, fragments, touched_at)
        self.put(worker, GroupChunk(*place, self.version_of, self.required))

    def first_idle(self, payloads: PayloadLedger) -> WorkerId | None:
        """Return the longest silent group with nothing held, or None; the first look sorts."""
        if self._idle is None:
            holders, groups = payloads.counts, self.workers

            def is_idle(entry: tuple[int, WorkerId]) -> bool:
                group = groups.get(entry[1])
                return (
                    group is not None and group.heard_number == entry[0] and entry[1] not in holders
                )

            self._idle = LazyHeap(is_idle)
            self._idle.replace(
                [(each.heard_number, name) for name, each in groups.items() if name not in holders]
            )
        first = self._idle.first()
        return None if first is None else first[1]

    def find_or_add(self, worker_id: WorkerId) -> Worker:
        """Return a group, remembering it from now on as the one heard of last."""
        group = super().find_or_add(worker_id)
        self._heard_count += 1
        group.heard_number = self._heard_count
        self.note_free(worker_id)  # As it is, unless it has members, or gets one now.
        return group

    def note_free(self, worker_id: WorkerId) -> None:
        """Take note of a group, remembered or not, that has nothing held any more."""
        group = self.workers.get(worker_id)
        if self._idle is not None and group is not None:
            self._idle.push((group.heard_number, worker_id))
            self._idle.compact(len(self.workers))

    def forget(self, worker_id: WorkerId) -> None:
        """Forget a group that has ended, and its end."""
        del self._ends[self.workers.pop(worker_id).end_number]

    def restore_ends(self, ended_count: int) -> None:
        """Take the ends of the groups of a snapshot, and the number of the latest."""
        self.ended_count = ended_count
        ended = [group for group in self.workers.values() if group.end is not None]
        self._ends = {each.end_number: each for each in sorted(ended, key=_END_NUMBER)}

    def ends_after(self, number: int, count_max: int) -> list[GroupEnd]:
        """Return the first ends after the one of a number; O(all ends after it).

        A number that no group has had is of an earlier buffer of the name: all ends are after it.
        """
        number = number if number <= self.ended_count else 0
        later: list[int] = []
        for each in reversed(self._ends):
            if each <= number:
                break
            later.append(each)
        return [
            GroupEnd(each, group.worker_id, reason, group.outcomes.codes.count(ADMITTED_CODE))
            for each in later[: -count_max - 1 : -1]
            if (reason := (group := self._ends[each]).end) is not None
        ]

    def longest_silent(self, now: float) -> Iterator[OpenGroup]:
        """Describe the open groups that had no member for the longest time."""
        for chunk in list(self.open.values())[:SHOWN_MAX] if self.fragments_per_chunk else ():
            assert isinstance(chunk, GroupChunk), "of groups"
            there = chunk.complete
            lacking = [each for each in range(self.fragments_per_chunk) if each not in there]
            silent_s = now - chunk.touched_at
            yield OpenGroup(chunk.worker_id, len(there), tuple(lacking[:SHOWN_MAX]), silent_s)

    def _end(self, group: Worker, reason: GroupEndReason) -> None:
        if group.end is not None:
            del self._ends[group.end_number]
        self.ended_count += 1
        group.end, group.end_number = reason, self.ended_count
        self._ends[group.end_number] = group
        self.tickets.end(group.worker_id, TicketEnd.GROUP_ENDED)
        self._on_end(reason)

    def check_invariants(self) -> None:
        """Assert O1 to O6 and A2, A3; O(groups remembered, and members for each index)."""
        super().check_invariants()
        assert self._names is None or [*self._names.since("")] == sorted(self.open), "O6: names"
        self.lacking.check_invariants(self.held())
        for group in self.workers.values():
            assert (group.end is None) == (group.open_chunk is not None), "O2"
        ended = {each.end_number: each for each in self.workers.values() if each.end is not None}
        assert self._ends == ended, "O2: ends"
        assert [*self._ends] == sorted(ended), "O3"
        assert self.ended_count >= max(ended, default=0), "O3: the latest"
        for name in self.tickets.by_group:
            assert (name in self.tickets.unbegun) == (name not in self.open), "O4: begun"
            assert name in self.open or name not in self.workers, "O4: a ticket of an ended group"

    def _check_chunk(self, chunk: OpenChunk) -> None:
        assert isinstance(chunk, GroupChunk), "O1: a group"
        size = self.fragments_per_chunk
        assert max(chunk.members) < (size or MEMBERS_MAX), "O1: members"
        keys = [(member, part) for member, parts in chunk.members.items() for part in parts]
        assert keys == [each.key for each in chunk.fragments], "O1: keys"
        assert all(chunk.members.values()), "O1: a member of nothing"
        assert chunk.complete == {each for each in chunk.members if chunk.has_all(each)}, "O5"
        assert not size or len(chunk.complete) < size, "A2: length"


def _agree(members: Sequence[Fragment], name: str) -> bool:
    """Return whether all members have a number of a name, and it is the same."""
    heads = [each for each in members if not each.part]
    first, *others = [json.loads(each.numbers or "{}").get(name) for each in heads]
    return first is not None and all(each == first for each in others)
